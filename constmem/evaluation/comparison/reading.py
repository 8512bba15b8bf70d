"""Rows of evaluations from files, every one of them held to what tables need of it."""

import json
import shlex
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from constmem.core.files import read_json
from constmem.evaluation.comparison.events import of_events
from constmem.evaluation.comparison.rows import Rows

KEYS = {"dataset", "model", "recipe", "seed", "scores", "settings"}
OF_POINTS, OF_EVENTS = ("log_likelihood", "log_likelihood_by_batch", "rmse", "crps"), ("nll", "rmse")
TEXTS = ("dataset", "model", "recipe")


def read_rows(paths: Iterable[Path]) -> Rows:
    """The rows of run folders (their eval.json) and of JSON files with one row or many."""
    found: Rows = []
    paths = list(paths)
    unscored = [path for path in paths if path.is_dir() and not (path / "eval.json").is_file()]
    if unscored:
        names = shlex.join(map(str, unscored))
        raise FileNotFoundError(f"no scores in {names}: run `constmem eval {names}` first")
    for path in paths:
        file = path / "eval.json" if path.is_dir() else path
        if not file.is_file():
            raise FileNotFoundError(f"there is no run folder or JSON file {path}")
        content = read_json(file, "expected rows that `constmem eval` wrote; run it again")
        rows = content.get("rows", [content]) if isinstance(content, dict) else content
        for row in rows if isinstance(rows, list) else [None]:
            missing = KEYS.difference(row if isinstance(row, dict) else ())
            if missing:
                raise ValueError(
                    f"{file} has a row without {', '.join(sorted(missing))}: not one of an evaluation"
                )
            _check(row, file)
        found += rows
    return found


def _check(row: Any, file: Path) -> None:
    """Refuse a row by its name where something in it is of another kind than tables need."""
    wrong = next(_wrong(row), None)
    if wrong is not None:
        name = " ".join(str(row[key]) for key in (*TEXTS, "seed"))
        raise ValueError(f"{file}: the row of {name} has {wrong}; run `constmem eval` again, or leave it out")


def _wrong(row: dict[str, Any]) -> Iterator[str]:
    """What is of another kind than it should be, and what it should be."""
    yield from (f"{_told(row, key)}, which should be text" for key in TEXTS if not isinstance(row[key], str))
    if not _number(row["seed"], int):
        yield f"{_told(row, 'seed')}, which should be a whole number"
    for key in ("settings", "scores"):
        if not isinstance(row[key], dict):
            yield f"{_told(row, key)}, which should be a dictionary"
            return
    for test, scores in row["scores"].items():
        if not isinstance(scores, dict):
            yield f"no scores on {test!r}, but {json.dumps(scores)}"
            return
        needed = OF_EVENTS if of_events(row) else OF_POINTS
        levels = scores.get("coverage", {})
        if isinstance(levels, dict):
            inside = {f"coverage of {level}": share for level, share in levels.items()}
        else:
            yield f"the coverage {json.dumps(levels)} on {test!r}, which should be a dictionary"
            return
        numbers = {key: scores[key] for key in needed if key in scores} | inside
        for key, value in numbers.items():
            if not _number(value, int, float):
                yield f"the {key} {json.dumps(value)} on {test!r}, which should be a number"


def _told(row: dict[str, Any], key: str) -> str:
    return f"the {key} {json.dumps(row[key])}"


def _number(value: Any, *kinds: type) -> bool:
    return isinstance(value, kinds) and not isinstance(value, bool)

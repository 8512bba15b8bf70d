"""Rows that `constmem eval` wrote: read, put together by seeds, and named as people name them."""

import json
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import floor, log10
from pathlib import Path
from statistics import mean, stdev
from typing import Any, Protocol

from constmem.files import read_json
from constmem.recipes import complete

NAMES = {
    "emnist": "EMNIST",
    "celeba32": "CelebA 32x32",
    "celeba64": "CelebA 64x64",
    "celeba128": "CelebA 128x128",
    "digits": "digits 8x8",
    "gp": "Gaussian processes",
    "taxi": "Taxi",
    "mooc": "Mooc",
    "reddit": "Reddit",
    "wiki": "Wikipedia",
    "taobao": "Taobao",
    "hawkes1": "Hawkes, one exponential",
    "hawkes2": "Hawkes, two exponentials",
}
PAPER = ("cnp", "canp", "np", "anp", "bnp", "banp", "tnpd", "eqtnp", "lbanp", "cmanp")
OF_EVENTS = ("trivial", "gru", "thp", "cmhp")
MODEL_NAMES = {"tnpd": "TNP-D", "trivial": "no history"}
KEYS = {"dataset", "model", "recipe", "seed", "scores", "settings"}
TOLD = ("steps", "batch")  # settings that have a column of their own
Rows = list[dict[str, Any]]
Table = tuple[str, list[str], list[list[str]]]  # its name, the heads of the columns, the cells


@dataclass(frozen=True)
class Figure:
    """The mean over seeds, and their standard deviation where there are several."""

    mean: float
    spread: float | None

    @classmethod
    def of(cls, values: Sequence[float]) -> "Figure":
        """Of one value for each seed."""
        return cls(mean(values), stdev(values) if len(values) > 1 else None)

    def __str__(self) -> str:
        return self.text(2)

    def text(self, digits: int, *, percent: bool = False) -> str:
        """With so many digits after the point.

        Example:
            >>> Figure(0.9184, 0.002).text(1, percent=True)
            '91.8 ± 0.2 %'
        """
        scale, unit = (100, " %") if percent else (1, "")
        spread = "" if self.spread is None else f" ± {scale * self.spread:,.{digits}f}"
        return f"{scale * self.mean:,.{digits}f}{spread}{unit}"

    def short(self) -> str:
        """With about four digits in all, for numbers whose unit may be anything.

        Example:
            >>> Figure(1234.5, None).short(), Figure(0.25, None).short(), Figure(0.00012345, None).short()
            ('1,234', '0.2500', '0.0001234')
        """
        size = abs(self.mean)
        if 0 < size < 0.01:
            return self.text(3 - floor(log10(size)))
        return self.text(next((d for d in range(4) if size >= 10 ** (3 - d)), 4))


class Compared(Protocol):
    """All runs of one model by one recipe and the same settings on one data set."""

    @property
    def dataset(self) -> str: ...
    @property
    def model(self) -> str: ...
    @property
    def recipe(self) -> str: ...
    @property
    def settings(self) -> dict[str, Any]: ...


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
        found += rows
    return found


def kind(row: dict[str, Any]) -> str:
    """What rows have in common that differ by seed alone."""
    named = [row[key] for key in ("dataset", "model", "recipe")]
    return json.dumps([*named, complete(row["settings"])], sort_keys=True)


def grouped(rows: Rows, *, dataset: str | None = None) -> list[Rows]:
    """Rows of the same model, recipe and settings together; of two rows of one seed the newer counts."""
    groups: dict[str, dict[int, dict[str, Any]]] = {}
    for row in sorted(rows, key=lambda row: row.get("date", "")):
        if dataset is None or row["dataset"] == dataset:
            groups.setdefault(kind(row), {})[row["seed"]] = row
    if not groups:
        have = ", ".join(sorted({row["dataset"] for row in rows})) or "no rows at all"
        raise ValueError(f"there are no rows of {dataset or 'any data set'}: there are {have}")
    return [list(seeds.values()) for seeds in groups.values()]


def shared_tests(rows: Rows) -> list[str]:
    """The test sets that all of these rows were scored on."""
    return [name for name in rows[0]["scores"] if all(name in row["scores"] for row in rows)]


def devices(rows: Rows) -> str:
    """What these rows were computed on."""
    return ", ".join(sorted({row["device"] for row in rows}))


def place(dataset: str, recipe: str, model: str, steps: int) -> tuple[Any, ...]:
    """Where an entry stands: data sets in the order of `NAMES`, the paper's recipe and models first."""

    def rank(name: str, names: Sequence[str]) -> int:
        return names.index(name) if name in names else len(names)

    base, _, variant = model.partition("-")
    order = rank(base, (*PAPER, *OF_EVENTS))
    return rank(dataset, list(NAMES)), dataset, rank(recipe, ("faithful", "improved")), order, variant, steps


def model_name(model: str) -> str:
    """A model as people write it: cmanp-small is CMANP-small."""
    base, dash, variant = model.partition("-")
    return f"{MODEL_NAMES.get(base, base.upper())}{dash}{variant}"


def told_apart(entry: Compared, entries: Iterable[Compared]) -> str:
    """The settings that tell an entry from others of the same model and recipe, but for `TOLD`."""
    name = entry.dataset, entry.model, entry.recipe
    same = [_flat(e.settings) for e in entries if (e.dataset, e.model, e.recipe) == name]
    own = _flat(entry.settings)
    told = [key for key in own if any(other.get(key) != own[key] for other in same)]
    return ", ".join(f"{key}={own[key]}" for key in told)


def full_name(entry: Compared, entries: Iterable[Compared]) -> str:
    """The model's name, with the settings that tell it from others of that name."""
    note = told_apart(entry, entries)
    return model_name(entry.model) + (f" ({note})" if note else "")


def _flat(settings: dict[str, Any]) -> dict[str, Any]:
    every = complete(settings)
    return {key: value for key, value in (every | every["model"]).items() if key not in ("model", *TOLD)}

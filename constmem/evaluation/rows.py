"""Rows: what an evaluation found of one run, read from files in types; entries: rows that differ by seed."""

import json
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, fields
from math import isnan, nan
from pathlib import Path
from statistics import mean
from types import UnionType
from typing import Any, TypeVar, get_args, get_origin

from constmem.core import MODELS
from constmem.core import title_of as model_name
from constmem.core.files import read_json
from constmem.data.catalogue import DATASETS
from constmem.evaluation import Figure, Scores
from constmem.evaluation.events import HITS, EventScores
from constmem.training.recipes import complete

OF_DATA = ("data", "contents", "columns")  # what a row says of the data that it was scored on
COLUMNS = ("steps", "batch")  # settings that have a column of their own
PHASES = ("training", "evaluation")
OF_EVENTS = {  # the scores of events that a table shows, under these heads
    "nll": "NLL", "time_nll": "time", "mark_nll": "mark", "survival_nll": "survival", "rmse": "RMSE",
    "mae_median": "MAE, median", "accuracy": "accuracy", "accuracy_given_gap": "given the gap",
    "top5": "top 5", "ks": "KS",
}  # fmt: skip
ALWAYS = ("nll", "time_nll", "rmse")  # of events: NaN only where a model has failed
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Row:
    """What `constmem eval` found of one run.

    Attributes:
        scores: of each test set.
        settings: of the recipe.
        published: the log-likelihood (NLL of events) on each test set that was published, where one was.
        true: NLL an event of the process that simulated the data.
        peak_memory: bytes that training and evaluation took on a GPU.
        steps, minutes: of training; 0 steps where its metrics are lost.
        data, contents, columns: what the data are; of one's own also a digest of them, and which columns.
        device, evaluated_on: where it was trained, and scored.
    """

    dataset: str
    model: str
    recipe: str
    seed: int
    scores: Mapping[str, Scores | EventScores]
    settings: dict[str, Any]
    steps: int
    minutes: float
    parameters: int
    device: str
    published: dict[str, float] | None = None
    true: dict[str, float] | None = None
    peak_memory: dict[str, int | None] | None = None
    data: str | None = None
    columns: dict[str, Any] | None = None
    contents: str | None = None
    evaluated_on: str | None = None
    commit: str | None = None
    torch: str | None = None
    date: str | None = None

    @property
    def of_events(self) -> bool:
        """Whether it is a row of an event model."""
        return any(isinstance(scores, EventScores) for scores in self.scores.values())

    @property
    def kind(self) -> str:
        """What it has in common with rows that differ by seed alone."""
        own = ("dataset", "model", "recipe", "steps", "parameters", *OF_DATA)
        return json.dumps([complete(self.settings), *(getattr(self, key) for key in own)], sort_keys=True)

    def content(self) -> dict[str, Any]:
        """The row as JSON can hold it; what is not known is left out."""
        whole = {key: value for key, value in asdict(self).items() if value is not None}
        for test, scores in whole["scores"].items():
            whole["scores"][test] = {key: value for key, value in scores.items() if value is not None}
        return whole


def read_rows(paths: Iterable[Path]) -> list[Row]:
    """The rows of run folders (their eval.json) and of JSON files with one row or many."""
    found: list[Row] = []
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
        found += typed_rows(rows if isinstance(rows, list) else [None], file)
    return found


def typed_rows(rows: Iterable[Any], where: Path | str) -> list[Row]:
    """Rows of plain dictionaries as JSON gives them; the error names the row and what is wrong in it."""
    return [_typed_row(row, where) for row in rows]


def _typed_row(row: Any, where: Path | str) -> Row:
    if missing := _missing(Row, row if isinstance(row, dict) else {}):
        raise ValueError(f"{where} has a row without {missing}: not one of an evaluation")
    try:
        every = _typed(row["scores"], dict[str, Any], "scores")
        kind = EventScores if any("nll" in own for own in every.values() if isinstance(own, dict)) else Scores
        scores = {test: _typed_scores(own, kind, f"scores on {test!r}") for test, own in every.items()}
        return _made(Row, {key: value for key, value in row.items() if key != "scores"}, scores=scores)
    except ValueError as error:
        name = " ".join(str(row[key]) for key in ("dataset", "model", "recipe", "seed"))
        raise ValueError(
            f"{where}: the row of {name} is not sound ({error}); run `constmem eval` again, or leave it out"
        ) from None


def _typed_scores(content: Any, kind: Any, where: str) -> Any:
    """Scores; those of marks may be null."""
    content = _typed(content, dict[str, Any], where)
    if missing := _missing(kind, content):
        raise ValueError(f"{where} lack {missing}, as another version may have written them")
    unknown = {key: nan for key in (*HITS, "error") if key in content and content[key] is None}
    return _made(kind, content | unknown, f" in {where}")


def _missing(kind: Any, content: Mapping[str, Any]) -> str:
    return ", ".join(f.name for f in fields(kind) if f.default is MISSING and f.name not in content)


def _made(kind: type[T], content: Mapping[str, Any], where: str = "", **more: Any) -> T:
    hints = {field.name: field.type for field in fields(kind) if field.name in content}  # type: ignore[arg-type]
    return kind(**{key: _typed(content[key], hint, f"{key}{where}") for key, hint in hints.items()}, **more)


def _typed(value: Any, hint: Any, where: str) -> Any:
    """The value if it is of the type, or an error that says where it is not."""
    if hint is Any or (value is None and isinstance(hint, UnionType)):
        return value
    hint = get_args(hint)[0] if isinstance(hint, UnionType) else hint
    plain = get_origin(hint) or hint
    if plain is float and type(value) is int:
        return float(value)
    if type(value) is not plain:
        words = {float: "a number", int: "a whole number", str: "text", dict: "a dictionary"}
        raise ValueError(f"{where} is {json.dumps(value)[:60]}, not {words[plain]}")
    if plain is not dict:
        return value
    return {str(key): _typed(own, get_args(hint)[1], f"{key} of {where}") for key, own in value.items()}


def json_text(content: Any) -> str:
    """Anything made of numbers and text in JSON, which has no word for numbers that are not finite: null.

    Example:
        >>> json_text({"nll": float("nan")}).split()
        ['{', '"nll":', 'null', '}']
    """
    finite = json.loads(json.dumps(content), parse_constant=lambda _: None)
    return json.dumps(finite, indent=1, allow_nan=False)


# Entries


@dataclass(frozen=True)
class Entry:
    """All runs of one model by one recipe and the same settings on the same data: a row for each seed."""

    rows: Sequence[Row]

    @property
    def first(self) -> Row:
        """The first row, for what all have in common."""
        return self.rows[0]

    @property
    def seeds(self) -> list[int]:
        """Of the runs that figures are means over."""
        return sorted(row.seed for row in self.rows)

    @property
    def tests(self) -> list[str]:
        """The test sets that all runs were scored on."""
        return [test for test in self.first.scores if all(test in row.scores for row in self.rows)]

    def figure(self, test: str, key: str, level: str | None = None) -> Figure | None:
        """The mean and spread of a score (of coverage: at a level); None where not all runs have it."""
        values: list[Any] = [getattr(row.scores.get(test), key, None) for row in self.rows]
        values = [(found or {}).get(level) for found in values] if level else values
        unknown = self.first.of_events and key not in ALWAYS  # there may be no marks
        return None if any(v is None or (unknown and isnan(v)) for v in values) else Figure.of(values)

    def known(self, test: str, key: str) -> Any:
        """What the first row says of a test set, where all have it."""
        return getattr(self.first.scores[test], key) if test in self.tests else None

    @property
    def unit(self) -> Any:
        """Of gaps, RMSE and MAE of events."""
        return self.known(next(iter(self.first.scores)), "unit")

    @property
    def about(self) -> dict[str, Any]:
        """What the rows have in common, their seeds, devices and mean minutes of training, as JSON has it."""
        row = self.first
        return {
            "dataset": row.dataset, "model": row.model, "recipe": row.recipe, "seeds": self.seeds,
            "published": row.published or {}, "settings": row.settings, "parameters": row.parameters,
            "steps": row.steps, "batch": complete(row.settings)["batch"],
            "minutes": mean(own.minutes for own in self.rows),
            "device": ", ".join(sorted({own.device for own in self.rows})),
            **{key: getattr(row, key) for key in OF_DATA},
        }  # fmt: skip

    @property
    def peak(self) -> dict[str, int]:
        """Bytes that training and evaluation took on a GPU beyond data and weights, the most of all runs."""
        found = {phase: [(row.peak_memory or {}).get(phase) or 0 for row in self.rows] for phase in PHASES}
        return {phase: max(sizes) for phase, sizes in found.items() if any(sizes)}

    @property
    def place(self) -> tuple[Any, ...]:
        """Where it is in a table: data sets in the registry's order, the paper's recipe and models first."""
        row = self.first
        base, _, variant = row.model.partition("-")
        recipe, order = _rank(row.recipe, ("faithful", "improved")), _rank(base, list(MODELS))
        return _rank(row.dataset, tuple(DATASETS)), row.dataset, recipe, order, variant, row.steps

    def difference(self, entries: Iterable["Entry"], *, elsewhere: Sequence[str] = COLUMNS) -> str:
        """What distinguishes it from others of the same model and recipe: settings, data, missing steps.

        Args:
            elsewhere: settings that are shown elsewhere.
        """

        def flat(of: Row) -> dict[str, Any]:
            settings = complete(of.settings)
            every = settings | settings["model"] | (of.columns or {})
            return {key: value for key, value in every.items() if key not in ("model", *elsewhere)}

        row = self.first
        name = row.dataset, row.model, row.recipe
        firsts = [other.first for other in entries]
        same = [other for other in firsts if (other.dataset, other.model, other.recipe) == name]
        own, others = flat(row), [flat(other) for other in same]
        notes = {key: own[key] for key in own if any(other.get(key) != own[key] for other in others)}
        alike = [other for other, settings in zip(same, others, strict=True) if settings == own]
        for key in ("data", "contents", "parameters"):  # the next where those before are the same
            value = getattr(row, key)
            if any(getattr(other, key) != value for other in alike):
                notes[key] = value
                alike = [other for other in alike if getattr(other, key) == value]
        asked = row.settings.get("steps")
        stopped = [] if row.steps else ["steps unknown"]  # its metrics are lost
        if asked is not None and 0 < row.steps < asked:
            stopped = [f"{row.steps:,} of {asked:,} steps"]
        return ", ".join([*(f"{key}={_shown(value)}" for key, value in notes.items()), *stopped])

    def name(self, entries: Iterable["Entry"]) -> str:
        """The model's name, with what distinguishes it from others of that name."""
        note = self.difference(entries)
        return model_name(self.first.model) + (f" ({note})" if note else "")


def _rank(name: str, names: Sequence[str]) -> int:
    return names.index(name) if name in names else len(names)


def compare(rows: Iterable[Row], *, dataset: str | None = None) -> list[Entry]:
    """Rows of the same `kind` as one entry each, in the order of the paper; of two of a seed the newer."""
    groups: dict[str, dict[int, Row]] = {}
    rows = sorted(rows, key=lambda row: row.date or "")
    for row in rows:
        if dataset is None or row.dataset == dataset:
            groups.setdefault(row.kind, {})[row.seed] = row
    if not groups:
        have = ", ".join(sorted({row.dataset for row in rows})) or "no rows at all"
        raise ValueError(f"there are no rows of {dataset or 'any data set'}: there are {have}")
    return sorted((Entry(list(seeds.values())) for seeds in groups.values()), key=lambda entry: entry.place)


def _shown(value: Any) -> str:
    if value is None or value == "":
        return "none"
    words = isinstance(value, list) and all(isinstance(word, str) for word in value)
    return ",".join(value) if words else str(value)

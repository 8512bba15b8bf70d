"""Rows that `constmem eval` wrote: put together by seeds, and named as people name them."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import floor, isfinite, log10, nan
from statistics import mean, stdev
from typing import Any, Protocol

from constmem.training.recipes import complete

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
TOLD = ("steps", "batch")  # settings that have a column of their own
OF_DATA = ("data", "contents", "columns")  # what a row says of the data that it was scored on
Rows = list[dict[str, Any]]
Table = tuple[str, list[str], list[list[str]]]  # its name, the heads of the columns, the cells


@dataclass(frozen=True)
class Figure:
    """The mean over seeds, and their standard deviation where there are several."""

    mean: float
    spread: float | None

    @classmethod
    def of(cls, values: Sequence[float]) -> "Figure":
        """Of one value for each seed; NaN where there are several and not all of them are finite."""
        if len(values) > 1 and not all(map(isfinite, values)):
            return cls(nan, nan)
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
    """All runs of one model by one recipe and the same settings on the same data."""

    @property
    def dataset(self) -> str: ...
    @property
    def model(self) -> str: ...
    @property
    def recipe(self) -> str: ...
    @property
    def settings(self) -> dict[str, Any]: ...
    @property
    def steps(self) -> int: ...
    @property
    def parameters(self) -> int: ...
    @property
    def data(self) -> str | None: ...
    @property
    def contents(self) -> str | None: ...
    @property
    def columns(self) -> dict[str, Any] | None: ...


def kind(row: dict[str, Any]) -> str:
    """What rows have in common that differ by seed alone."""
    named = [row[key] for key in ("dataset", "model", "recipe")]
    found = [row.get(key) for key in ("steps", "parameters", *OF_DATA)]
    return json.dumps([*named, complete(row["settings"]), *found], sort_keys=True)


def of_data(row: dict[str, Any]) -> dict[str, Any]:
    """What a row says of its data; of a data set that is not one's own, less."""
    return {key: row.get(key) for key in OF_DATA}


def grouped(rows: Rows, *, dataset: str | None = None) -> list[Rows]:
    """Rows of the same `kind` together; of two rows of one seed the newer counts."""
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


def told_apart(entry: Compared, entries: Iterable[Compared], *, told: Sequence[str] = TOLD) -> str:
    """What tells an entry from others of the same model and recipe: settings, data, steps not taken.

    Args:
        told: settings that are told elsewhere.
    """
    name = entry.dataset, entry.model, entry.recipe
    same = {id(e): e for e in entries if (e.dataset, e.model, e.recipe) == name}
    flat = {key: _flat(other, told) for key, other in same.items()}
    own = _flat(entry, told)
    notes = {key: own[key] for key in own if any(other.get(key) != own[key] for other in flat.values())}
    alike = [other for key, other in same.items() if flat[key] == own]
    for key in ("data", "contents", "parameters"):  # the next where those before do not tell
        value = getattr(entry, key)
        if any(getattr(other, key) != value for other in alike):
            notes[key] = value
            alike = [other for other in alike if getattr(other, key) == value]
    return ", ".join([*(f"{key}={_shown(value)}" for key, value in notes.items()), *_stopped(entry)])


def full_name(entry: Compared, entries: Iterable[Compared]) -> str:
    """The model's name, with what tells it from others of that name."""
    note = told_apart(entry, entries)
    return model_name(entry.model) + (f" ({note})" if note else "")


def _stopped(entry: Compared) -> list[str]:
    """How far a run came that did not come to its end; without its metrics, 0 steps, that is not known."""
    asked = entry.settings.get("steps")
    if not entry.steps:
        return ["steps unknown"]
    return [f"{entry.steps:,} of {asked:,} steps"] if asked is not None and entry.steps < asked else []


def _shown(value: Any) -> str:
    if value is None or value == "":
        return "none"
    words = isinstance(value, list) and all(isinstance(word, str) for word in value)
    return ",".join(value) if words else str(value)


def _flat(entry: Compared, told: Sequence[str]) -> dict[str, Any]:
    settings = complete(entry.settings)
    every = settings | settings["model"] | (entry.columns or {})
    return {key: value for key, value in every.items() if key not in ("model", *told)}

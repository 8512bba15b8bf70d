"""Event models in a table: NLL of an event, errors, accuracy and goodness of fit, seeds together."""

from dataclasses import dataclass
from math import isnan
from statistics import mean
from typing import Any

from constmem.evaluation.comparison.rows import (
    NAMES,
    Figure,
    Rows,
    Table,
    devices,
    full_name,
    of_data,
    place,
    shared_tests,
)

SHOWN = (
    "nll", "time_nll", "mark_nll", "survival_nll", "rmse", "mae_median", "accuracy", "accuracy_given_gap",
    "top5", "ks",
)  # fmt: skip
ALWAYS = ("nll", "time_nll", "rmse")  # NaN only where a model has failed
OF_MARKS = ("mark_nll", "accuracy", "accuracy_given_gap", "top5")
HEADS = {
    "nll": "NLL", "time_nll": "time", "mark_nll": "mark", "survival_nll": "survival", "rmse": "RMSE",
    "mae_median": "MAE, median", "accuracy": "accuracy", "accuracy_given_gap": "given the gap",
    "top5": "top 5", "ks": "KS",
}  # fmt: skip

# What others report: data set -> (who, where, {column: figure}). Those of Taxi are under the protocol that we
# follow too. The paper's are not: other splits, other units, and an RMSE of sums of errors.
ELSEWHERE: dict[str, tuple[tuple[str, str, dict[str, float]], ...]] = {
    "taxi": (
        ("RMTPP", "published elsewhere", {"nll": -0.346}),
        ("AttNHP", "published elsewhere", {"nll": -0.493}),
        ("NHP", "published elsewhere", {"nll": -0.514}),
        ("S2P2", "published elsewhere", {"nll": -0.522}),
    ),
    "mooc": (
        ("THP", "the paper's, another protocol", {"nll": 0.267, "rmse": 0.202, "accuracy": 0.336}),
        ("CMHP", "the paper's, another protocol", {"nll": -0.040, "rmse": 0.168, "accuracy": 0.237}),
    ),
    "reddit": (
        ("THP", "the paper's, another protocol", {"nll": 0.268, "rmse": 0.238, "accuracy": 0.610}),
        ("CMHP", "the paper's, another protocol", {"nll": 0.528, "rmse": 0.262, "accuracy": 0.609}),
    ),
}


@dataclass(frozen=True)
class EventEntry:
    """All runs of one event model by one recipe and the same settings on the same data.

    Attributes:
        seeds: of the runs that the figures are means over.
        scores: for each test set the figures of `EventScores` that a table shows; that of survival only
            where all runs know when their watches ended.
        published: NLL an event on each test set, where somebody published one under the same protocol.
        true: NLL of the process that the data were simulated from.
        unit: of gaps, RMSE and MAE.
        settings: of the recipe; what tells apart entries of one model is shown beside its name.
        minutes: of training, the mean over runs.
        data, contents, columns: what the data are; of one's own also a digest of them, and which columns.
    """

    dataset: str
    model: str
    recipe: str
    seeds: list[int]
    scores: dict[str, dict[str, Figure]]
    published: dict[str, float]
    true: dict[str, float]
    unit: str
    settings: dict[str, Any]
    parameters: int
    steps: int
    batch: int
    minutes: float
    device: str
    data: str | None = None
    contents: str | None = None
    columns: dict[str, Any] | None = None

    @classmethod
    def of(cls, rows: Rows) -> "EventEntry":
        """Of the rows of one model, one for each seed."""
        first, tests = rows[0], shared_tests(rows)
        scores = {test: _figures([row["scores"][test] for row in rows]) for test in tests}
        return cls(
            dataset=first["dataset"], model=first["model"], recipe=first["recipe"],
            seeds=sorted(row["seed"] for row in rows), scores=scores,
            published=first.get("published") or {}, true=first.get("true") or {},
            unit=first["scores"][tests[0]]["unit"], settings=first["settings"],
            parameters=first["parameters"], steps=max(row["steps"] for row in rows),
            batch=first["settings"]["batch"], minutes=mean(row["minutes"] for row in rows),
            device=devices(rows), **of_data(first),
        )  # fmt: skip

    @property
    def place(self) -> tuple[object, ...]:
        """Where it stands among others."""
        return place(self.dataset, self.recipe, self.model, self.steps)


def _figures(scores: list[dict[str, Any]]) -> dict[str, Figure]:
    """Of the scores of several seeds, what a table shows and all of them have: there may be no marks."""

    def known(key: str, score: float | None) -> bool:
        return score is not None and (key in ALWAYS or not isnan(score))

    told = [key for key in SHOWN if all(known(key, own.get(key)) for own in scores)]
    return {key: Figure.of([own[key] for own in scores]) for key in told}


def of_events(row: dict[str, Any]) -> bool:
    """Whether a row is of an event model."""
    return any("nll" in scores for scores in row["scores"].values())


def event_table(entries: list[EventEntry]) -> Table:
    """Entries of one data set: a column for each score, the published beside; others' figures below."""
    dataset, tests = entries[0].dataset, list(dict.fromkeys(t for e in entries for t in e.scores))
    marked = any(entry.settings.get("model", {}).get("num_marks", 2) > 1 for entry in entries)
    told = {key for entry in entries for scores in entry.scores.values() for key in scores}
    shown = [key for key in SHOWN if key in told and (marked or key not in OF_MARKS)]
    published = any(entry.published for entry in entries)
    several = len(tests) > 1
    head = ["model", *(["test set"] if several else []), "recipe"]
    for key in shown:
        unit = f" ({entries[0].unit})" if key in ("rmse", "mae_median") else ""
        head += [HEADS[key] + unit, *(["published"] if published and key == "nll" else [])]
    head += ["parameters", "steps x batch", "minutes", "device", "seeds"]
    cells = []
    for entry in entries:
        for test, scores in entry.scores.items():
            row = [full_name(entry, entries), *([test] if several else []), entry.recipe]
            for key in shown:
                row.append(_cell(key, scores[key]) if key in scores else "")
                if published and key == "nll":
                    row.append(f"{entry.published[test]:.3f}" if test in entry.published else "")
            size = f"{entry.steps:,} x {entry.batch}"
            rest = f"{entry.parameters:,}", size, f"{entry.minutes:.1f}", entry.device, str(len(entry.seeds))
            cells.append([*row, *rest])
    others = [*_true(entries), *ELSEWHERE.get(dataset, ())]
    cells += [_other(name, where, known, head, shown) for name, where, known in others]
    return NAMES.get(dataset, dataset), head, cells


def _cell(key: str, figure: Figure) -> str:
    if key in ("rmse", "mae_median"):
        return figure.short()
    if key.startswith(("accuracy", "top")):
        return figure.text(1, percent=True)
    return figure.text(3)


def _true(entries: list[EventEntry]) -> list[tuple[str, str, dict[str, float]]]:
    """What no model can beat, where the data are simulated."""
    known = [value for entry in entries for value in entry.true.values()]
    return [("the true process", "known", {"nll": known[0], "time_nll": known[0]})] if known else []


def _other(name: str, where: str, known: dict[str, float], head: list[str], shown: list[str]) -> list[str]:
    """A line of figures that are not ours, under the columns they belong to."""
    cells = dict.fromkeys(head, "") | {"model": name, "recipe": where}
    for key in shown:
        if key in known:
            column = next(h for h in head if h.startswith(HEADS[key]))
            cells[column] = _cell(key, Figure(known[key], None))
    return list(cells.values())

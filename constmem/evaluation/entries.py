"""Entries: all runs of one model on one data set that differ by seed alone, as means and spreads."""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from math import isnan
from statistics import mean
from typing import Any

from constmem.core.registry import MODELS
from constmem.core.registry import title_of as model_name
from constmem.data.catalogue import DATASETS
from constmem.evaluation.rows import Figure, Row, grouped
from constmem.training.recipes import complete

COLUMNS = ("steps", "batch")  # settings that have a column of their own
PHASES = ("training", "evaluation")
SHOWN = (  # of events, in order
    "nll", "time_nll", "mark_nll", "survival_nll", "rmse", "mae_median", "accuracy", "accuracy_given_gap",
    "top5", "ks",
)  # fmt: skip
ALWAYS = ("nll", "time_nll", "rmse")  # NaN only where a model has failed


@dataclass(frozen=True, kw_only=True)
class Entry:
    """All runs of one model by one recipe and the same settings on the same data.

    Attributes:
        seeds: of the runs that the figures are means over.
        published: of each test set, where a figure was published under the same protocol.
        settings: of the recipe; those that differ among entries of one model are shown beside its name.
        minutes: of training, the mean over runs.
        data, contents, columns: what the data are; of one's own also a digest of them, and which columns.
    """

    dataset: str
    model: str
    recipe: str
    seeds: list[int]
    published: dict[str, float]
    settings: dict[str, Any]
    parameters: int
    steps: int
    batch: int
    minutes: float
    device: str
    data: str | None
    contents: str | None
    columns: dict[str, Any] | None

    @property
    def place(self) -> tuple[Any, ...]:
        """Where it is in a table: data sets in the registry's order, the paper's recipe and models first."""
        base, _, variant = self.model.partition("-")
        recipe, order = _rank(self.recipe, ("faithful", "improved")), _rank(base, list(MODELS))
        return _rank(self.dataset, tuple(DATASETS)), self.dataset, recipe, order, variant, self.steps

    @property
    def size(self) -> list[str]:
        """The cells of parameters, steps and minutes."""
        return [f"{self.parameters:,}", f"{self.steps:,} x {self.batch}", f"{self.minutes:.1f}"]


@dataclass(frozen=True, kw_only=True)
class PointEntry(Entry):
    """Of a model of points.

    Attributes:
        by_batch: log-likelihood of each test set as the reference takes it, the one to compare with
            the published: the unweighted mean over batches.
        by_point: the same as the mean over points.
        rmse, crps, coverage: the others of `Scores` on each test set, coverage of every level.
        level: log-probability of a grey level, of test sets of pixels where all runs have it.
        exact, exact_by_point: those of the process that the data came from, where it is known.
        peak: bytes that training and evaluation took on a GPU beyond data and weights, the most of all runs.
    """

    by_batch: dict[str, Figure]
    by_point: dict[str, Figure]
    rmse: dict[str, Figure]
    crps: dict[str, Figure]
    coverage: dict[str, dict[str, Figure]]
    level: dict[str, Figure]
    exact: dict[str, float]
    exact_by_point: dict[str, float]
    peak: dict[str, int]


@dataclass(frozen=True, kw_only=True)
class EventEntry(Entry):
    """Of a model of events.

    Attributes:
        scores: for each test set the figures of `EventScores` that a table shows and all runs have.
        true: NLL of the process that the data were simulated from.
        unit: of gaps, RMSE and MAE.
    """

    scores: dict[str, dict[str, Figure]]
    true: dict[str, float]
    unit: str


def compare(rows: Iterable[Row], *, dataset: str | None = None) -> list[Entry]:
    """Rows of the same model, recipe, settings and data as one entry each, in the order of the paper.

    Of two rows of one seed the newer counts.
    """
    return sorted((entry_of(group) for group in grouped(rows, dataset=dataset)), key=lambda e: e.place)


def entry_of(rows: Sequence[Row]) -> Entry:
    """Rows that differ by seed alone as one entry."""
    first = rows[0]
    tests = [name for name in first.scores if all(name in row.scores for row in rows)]
    common: dict[str, Any] = {
        "dataset": first.dataset, "model": first.model, "recipe": first.recipe,
        "seeds": sorted(row.seed for row in rows), "published": first.published or {},
        "settings": first.settings, "parameters": first.parameters, "steps": first.steps,
        "batch": complete(first.settings)["batch"], "minutes": mean(row.minutes for row in rows),
        "device": ", ".join(sorted({row.device for row in rows})),
        "data": first.data, "contents": first.contents, "columns": first.columns,
    }  # fmt: skip

    def figures(key: str) -> dict[str, Figure]:
        values = {test: [getattr(row.scores[test], key) for row in rows] for test in tests}
        return {test: Figure.of(own) for test, own in values.items() if None not in own}

    def known(key: str) -> dict[str, float]:
        values = {test: getattr(first.scores[test], key) for test in tests}
        return {test: value for test, value in values.items() if value is not None}

    if first.of_events:
        every = {test: [asdict(row.scores[test]) for row in rows] for test in tests}
        scores = {test: _event_figures(own) for test, own in every.items()}
        unit = asdict(next(iter(first.scores.values())))["unit"]
        return EventEntry(**common, scores=scores, true=first.true or {}, unit=unit)
    levels = {test: _levels([asdict(row.scores[test])["coverage"] for row in rows]) for test in tests}
    return PointEntry(
        **common, by_batch=figures("log_likelihood_by_batch"), by_point=figures("log_likelihood"),
        rmse=figures("rmse"), crps=figures("crps"), coverage=levels,
        level=figures("level_log_likelihood"),
        exact=known("exact_by_batch"), exact_by_point=known("exact"), peak=_peak(rows),
    )  # fmt: skip


def _rank(name: str, names: Sequence[str]) -> int:
    return names.index(name) if name in names else len(names)


def _event_figures(scores: list[dict[str, Any]]) -> dict[str, Figure]:
    """Of the scores of several seeds, what a table shows and all of them have: there may be no marks."""

    def known(key: str, score: float | None) -> bool:
        return score is not None and (key in ALWAYS or not isnan(score))

    shown = [key for key in SHOWN if all(known(key, own[key]) for own in scores)]
    return {key: Figure.of([own[key] for own in scores]) for key in shown}


def _levels(coverage: list[dict[str, float]]) -> dict[str, Figure]:
    """For each level the share of values inside its interval, over the seeds that all have it."""
    shared = [level for level in coverage[0] if all(level in own for own in coverage)]
    return {level: Figure.of([own[level] for own in coverage]) for level in shared}


def _peak(rows: Sequence[Row]) -> dict[str, int]:
    found = {phase: [(row.peak_memory or {}).get(phase) or 0 for row in rows] for phase in PHASES}
    return {phase: max(sizes) for phase, sizes in found.items() if any(sizes)}


def difference(entry: Entry, entries: Iterable[Entry], *, elsewhere: Sequence[str] = COLUMNS) -> str:
    """What distinguishes an entry from others of the same model and recipe: settings, data, missing steps.

    Args:
        elsewhere: settings that are shown elsewhere.
    """

    def flat(of: Entry) -> dict[str, Any]:
        settings = complete(of.settings)
        every = settings | settings["model"] | (of.columns or {})
        return {key: value for key, value in every.items() if key not in ("model", *elsewhere)}

    name = entry.dataset, entry.model, entry.recipe
    same = [other for other in entries if (other.dataset, other.model, other.recipe) == name]
    own, others = flat(entry), [flat(other) for other in same]
    notes = {key: own[key] for key in own if any(other.get(key) != own[key] for other in others)}
    alike = [other for other, settings in zip(same, others, strict=True) if settings == own]
    for key in ("data", "contents", "parameters"):  # the next where those before are the same
        value = getattr(entry, key)
        if any(getattr(other, key) != value for other in alike):
            notes[key] = value
            alike = [other for other in alike if getattr(other, key) == value]
    asked = entry.settings.get("steps")
    stopped = [] if entry.steps else ["steps unknown"]  # its metrics are lost
    if asked is not None and 0 < entry.steps < asked:
        stopped = [f"{entry.steps:,} of {asked:,} steps"]
    return ", ".join([*(f"{key}={_shown(value)}" for key, value in notes.items()), *stopped])


def _shown(value: Any) -> str:
    if value is None or value == "":
        return "none"
    words = isinstance(value, list) and all(isinstance(word, str) for word in value)
    return ",".join(value) if words else str(value)


def full_name(entry: Entry, entries: Iterable[Entry]) -> str:
    """The model's name, with what distinguishes it from others of that name."""
    note = difference(entry, entries)
    return model_name(entry.model) + (f" ({note})" if note else "")

"""Neural processes in a table like the paper's: log-likelihoods and other scores, seeds together."""

from dataclasses import dataclass
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

PHASES = ("training", "evaluation")
MORE = ("RMSE", "CRPS", "90 %")  # columns that are shown where they are asked for


@dataclass(frozen=True)
class Entry:
    """All runs of one model by one recipe and the same settings on the same data.

    Attributes:
        seeds: of the runs that the figures are means over.
        by_batch: log-likelihood of each test set as the reference takes it, the one to compare with
            the published: the unweighted mean over batches.
        by_point: the same as the mean over points.
        rmse, crps, coverage: the others of `Scores` on each test set, coverage of every level.
        published: the paper's, where it has one.
        exact, exact_by_point: the process's that the data came from, where it is known, by batch and not.
        settings: of the recipe; what tells apart entries of one model is shown beside its name.
        peak: bytes that training and evaluation took on a GPU beyond data and weights, the most of all runs.
        minutes: of training, the mean over runs.
        data, contents, columns: what the data are; of one's own also a digest of them, and which columns.
    """

    dataset: str
    model: str
    recipe: str
    seeds: list[int]
    by_batch: dict[str, Figure]
    by_point: dict[str, Figure]
    rmse: dict[str, Figure]
    crps: dict[str, Figure]
    coverage: dict[str, dict[str, Figure]]
    published: dict[str, float]
    exact: dict[str, float]
    exact_by_point: dict[str, float]
    settings: dict[str, Any]
    peak: dict[str, int]
    parameters: int
    steps: int
    batch: int
    minutes: float
    device: str
    data: str | None = None
    contents: str | None = None
    columns: dict[str, Any] | None = None

    @classmethod
    def of(cls, rows: Rows) -> "Entry":
        """Of the rows of one model, one for each seed."""
        first = rows[0]
        scores = {test: [row["scores"][test] for row in rows] for test in shared_tests(rows)}

        def figures(key: str) -> dict[str, Figure]:
            return {test: Figure.of([own[key] for own in every]) for test, every in scores.items()}

        def known(key: str) -> dict[str, float]:
            return {test: every[0][key] for test, every in scores.items() if key in every[0]}

        return cls(
            dataset=first["dataset"], model=first["model"], recipe=first["recipe"],
            seeds=sorted(row["seed"] for row in rows),
            by_batch=figures("log_likelihood_by_batch"), by_point=figures("log_likelihood"),
            rmse=figures("rmse"), crps=figures("crps"),
            coverage={test: _levels([own["coverage"] for own in every]) for test, every in scores.items()},
            published=first.get("published") or {},
            exact=known("exact_by_batch"), exact_by_point=known("exact"), settings=first["settings"],
            peak=_peak(rows), parameters=first["parameters"],
            steps=max(row["steps"] for row in rows), batch=first["settings"]["batch"],
            minutes=mean(row["minutes"] for row in rows), device=devices(rows), **of_data(first),
        )  # fmt: skip

    @property
    def place(self) -> tuple[object, ...]:
        """Where it stands among others."""
        return place(self.dataset, self.recipe, self.model, self.steps)


def _levels(coverage: list[dict[str, float]]) -> dict[str, Figure]:
    """For each level the share of values inside its interval, over the seeds that all know it."""
    shared = [level for level in coverage[0] if all(level in own for own in coverage)]
    return {level: Figure.of([own[level] for own in coverage]) for level in shared}


def _peak(rows: Rows) -> dict[str, int]:
    told = [row.get("peak_memory") or {} for row in rows]
    found = {what: [peak[what] for peak in told if peak.get(what)] for what in PHASES}
    return {what: max(sizes) for what, sizes in found.items() if sizes}


def other_scores(entry: Entry, test: str) -> list[str]:
    """The cells of `MORE` on a test set."""
    inside = entry.coverage[test].get("0.9")
    covered = "" if inside is None else inside.text(1, percent=True)
    return [entry.rmse[test].text(4), entry.crps[test].text(4), covered]


def point_table(entries: list[Entry], *, scores: bool = False) -> Table:
    """Entries of one data set: a column for each test set, the published beside, and `MORE` if asked for."""
    tests = list(dict.fromkeys(test for entry in entries for test in entry.by_batch))
    published = {test: any(test in entry.published for entry in entries) for test in tests}
    exact = {test: any(test in entry.exact for entry in entries) for test in tests}
    phases = [phase for phase in PHASES if any(phase in entry.peak for entry in entries)]
    head = ["model", "recipe"]
    for test in tests:
        head += [f"{test}, by batch", *(["published"] if published[test] else [])]
        head += [*(["exact"] if exact[test] else []), "by point", *(MORE if scores else ())]
    head += [
        "parameters",
        "steps x batch",
        "minutes",
        *(f"{phase}, GB" for phase in phases),
        "device",
        "seeds",
    ]
    cells = []
    for entry in entries:
        row = [full_name(entry, entries), entry.recipe]
        for test in tests:
            paper = f"{entry.published[test]:.2f}" if test in entry.published else ""
            row += [str(entry.by_batch.get(test, "")), *([paper] if published[test] else [])]
            row += [f"{entry.exact[test]:.2f}" if test in entry.exact else ""] if exact[test] else []
            row.append(str(entry.by_point.get(test, "")))
            more = other_scores(entry, test) if test in entry.rmse else [""] * len(MORE)
            row += more if scores else []
        size = f"{entry.steps:,} x {entry.batch}"
        row += [f"{entry.parameters:,}", size, f"{entry.minutes:.1f}"]
        row += [f"{entry.peak[phase] / 1e9:.1f}" if phase in entry.peak else "" for phase in phases]
        row += [entry.device, str(len(entry.seeds))]
        cells.append(row)
    return NAMES.get(entries[0].dataset, entries[0].dataset), head, cells

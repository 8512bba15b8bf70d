"""What `constmem eval` prints: runs one by one, then those that differ by seed alone as mean and spread."""

import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from itertools import compress
from pathlib import Path
from typing import Any

from constmem.evaluation.comparison.events import EventEntry
from constmem.evaluation.comparison.points import MORE, Entry, other_scores
from constmem.evaluation.comparison.rows import Figure, Rows, grouped, kind, told_apart
from constmem.evaluation.comparison.tables import Entries, compare, entry_of

POINTS = ("run", "test set", "log-likelihood", "exact", "by batch", "published", *MORE, "minutes")
OF_EVENTS = (
    "run", "test set", "NLL", "of time", "of mark", "published", "survival", "gap RMSE", "mark error",
    "mark error, gap known", "KS", "minutes",
)  # fmt: skip
TOLD_OF_POINTS = (
    "log-likelihood: nats a point, higher is better; by batch: the paper's mean over batches. RMSE, CRPS: in "
    "the units of y (of images, white - black = 1). 90 %: how many values lie in central 90 % intervals."
)
TOLD_OF_EVENTS = (
    "NLL: nats an event, of its time plus of its mark given the time. gap RMSE: of the mean gap foretold.\n"
    "mark error: how often the likeliest mark is wrong, foretold before the event, or given when it came."
)
PLAIN = ("nll", "time_nll", "mark_nll", "survival_nll", "ks")
TOLD_OF_SEEDS = "±: the standard deviation over seeds, beside their mean."


def over_seeds(rows: Rows) -> Rows:
    """The rows, and in each of several that differ by seed alone their mean and spread, as "over_seeds"."""
    several = {kind(group[0]): asdict(entry_of(group)) for group in grouped(rows) if len(group) > 1}
    return [row | ({"over_seeds": several[kind(row)]} if kind(row) in several else {}) for row in rows]


def print_runs(rows: Rows, folders: Sequence[Path] | None = None) -> None:
    """Tables of runs, of points and of events: ours beside the published, without empty columns.

    Args:
        folders: where the runs are, to tell apart those that nothing else does.
    """
    single: Entries = [entry_of([row]) for row in rows]
    several = [entry for entry in compare(rows) if len(entry.seeds) > 1]
    names = [_name(entry, single) for entry in single]
    if folders is not None:
        told = zip(names, folders, strict=True)
        names = [f"{name}, {folder}" if names.count(name) > 1 else name for name, folder in told]
    named = list(zip(single, names, strict=True)), [(entry, _name(entry, single)) for entry in several]
    for columns, told_below, events in ((POINTS, TOLD_OF_POINTS, False), (OF_EVENTS, TOLD_OF_EVENTS, True)):
        own, pooled = (
            [
                line
                for entry, name in entries
                if isinstance(entry, EventEntry) == events
                for line in _lines(entry, name)
            ]
            for entries in named
        )
        if own:
            _print(columns, [own, pooled], f"{told_below}\n{TOLD_OF_SEEDS}" if pooled else told_below)


def _name(entry: Entry | EventEntry, entries: Entries) -> str:
    """What was trained on what, what tells it from the others, and its seed or how many."""
    note = told_apart(entry, entries, told=())
    seeds = f" #{entry.seeds[0]}" if len(entry.seeds) == 1 else f", mean of {len(entry.seeds)} seeds"
    return f"{entry.dataset} {entry.model} {entry.recipe}{f' ({note})' if note else ''}{seeds}"


def _lines(entry: Entry | EventEntry, name: str) -> list[list[str]]:
    """A line for each test set."""
    cells = _event_cells(entry) if isinstance(entry, EventEntry) else _point_cells(entry)
    return [[name, test, *found, f"{entry.minutes:.1f}"] for test, found in cells.items()]


def _point_cells(entry: Entry) -> dict[str, list[str]]:
    return {
        test: [
            entry.by_point[test].text(3), _known(entry.exact_by_point.get(test), ".3f"), by_batch.text(3),
            _known(entry.published.get(test), ".3g"), *other_scores(entry, test),
        ]
        for test, by_batch in entry.by_batch.items()
    }  # fmt: skip


def _event_cells(entry: EventEntry) -> dict[str, list[str]]:
    found = {}
    for test, scores in entry.scores.items():
        nll, time, mark, survival, ks = (scores[key].text(3) if key in scores else "" for key in PLAIN)
        wrong = [_error(scores.get(key)) for key in ("accuracy", "accuracy_given_gap")]
        gap, published = f"{scores['rmse'].short()} {entry.unit}", _known(entry.published.get(test), ".3g")
        found[test] = [nll, time, mark, published, survival, gap, *wrong, ks]
    return found


def _known(value: float | None, form: str) -> str:
    return "" if value is None else f"{value:{form}}"


def _error(hits: Figure | None) -> str:
    """How often wrong; nothing where no mark is known."""
    return "" if hits is None else Figure(1 - hits.mean, hits.spread).text(1, percent=True)


def _print(columns: Sequence[str], sections: Iterable[list[list[str]]], note: str) -> None:
    """A table on the terminal, a rule between its sections."""
    from rich.console import Console
    from rich.table import Table

    table = Table(padding=(0, 0), caption=note, caption_justify="left")
    sections = list(sections)
    contents: list[Any] = list(zip(*(line for lines in sections for line in lines), strict=True))
    told = [any(content) for content in contents]
    for column, content in compress(zip(columns, contents, strict=True), told):
        words = column in ("run", "test set")
        # a narrow terminal breaks heads, before units and behind a ±, but no number
        pieces = [piece for cell in content for piece in cell.replace("± ", "±\n").split("\n")]
        widest = None if words or column == "gap RMSE" else max(map(len, pieces))
        table.add_column(column, justify="left" if words else "right", min_width=widest, overflow="fold")
    for lines in sections:
        for line in lines:
            table.add_row(*compress(line, told))
        table.add_section()
    Console(width=None if sys.stdout.isatty() else 200).print(table)

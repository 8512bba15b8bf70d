"""Tables of all entries, in every form that they are shown in."""

import json
import sys
from dataclasses import asdict
from math import isfinite
from typing import Any

from constmem.evaluation.comparison.events import EventEntry, event_table, of_events
from constmem.evaluation.comparison.points import Entry, point_table
from constmem.evaluation.comparison.rows import Rows, Table, grouped

Entries = list[Entry | EventEntry]
WORDS = ("model", "recipe", "device", "test set")


def compare(rows: Rows, *, dataset: str | None = None) -> Entries:
    """Rows of the same model, recipe, settings and data as one entry each, in the order of the paper.

    Of two rows of one seed the newer counts.
    """
    entries = [entry_of(group) for group in grouped(rows, dataset=dataset)]
    return sorted(entries, key=lambda entry: entry.place)


def entry_of(rows: Rows) -> Entry | EventEntry:
    """Rows that differ by seed alone as one entry."""
    try:
        return EventEntry.of(rows) if of_events(rows[0]) else Entry.of(rows)
    except KeyError as error:
        raise ValueError(
            f"a row has no {error}: another version wrote it; run `constmem eval` again"
        ) from error


def tabulate(entries: Entries, *, scores: bool = False) -> list[Table]:
    """For each data set its name, the heads of the columns, and the cells: what every form of table shows.

    Args:
        scores: RMSE, CRPS and coverage of neural processes too; event models show all they have.
    """
    tables = []
    for dataset in dict.fromkeys(entry.dataset for entry in entries):
        own = [entry for entry in entries if entry.dataset == dataset]
        points = [entry for entry in own if isinstance(entry, Entry)]
        events = [entry for entry in own if isinstance(entry, EventEntry)]
        tables += [point_table(points, scores=scores)] if points else []
        tables += [event_table(events)] if events else []
    return tables


def markdown(entries: Entries, *, scores: bool = False) -> str:
    """The tables in Markdown."""
    parts = []
    for name, head, rows in tabulate(entries, scores=scores):
        lines = [[name, *head[1:]], ["---"] * len(head), *rows]
        parts.append("\n".join(f"| {' | '.join(line)} |" for line in lines))
    return "\n\n".join(parts)


def as_json(entries: Entries) -> str:
    """The entries in JSON."""
    return json_text([asdict(entry) for entry in entries])


def json_text(content: Any) -> str:
    """Anything made of numbers and text in JSON, which has no word for numbers that are not finite: null.

    Example:
        >>> json_text({"nll": float("nan")}).split()
        ['{', '"nll":', 'null', '}']
    """
    return json.dumps(_finite(content), indent=1, allow_nan=False)


def _finite(content: Any) -> Any:
    if isinstance(content, dict):
        return {key: _finite(value) for key, value in content.items()}
    if isinstance(content, list | tuple):
        return [_finite(value) for value in content]
    return None if isinstance(content, float) and not isfinite(content) else content


def show(entries: Entries, *, scores: bool = False) -> None:
    """The tables on a terminal."""
    from rich.console import Console
    from rich.table import Table as Grid

    for name, head, rows in tabulate(entries, scores=scores):
        wide = scores or "NLL" in head
        what = "nats an event" if "NLL" in head else "log-likelihood of a point"
        grid = Grid(title=f"{name}: {what}", title_justify="left", padding=(0, 0) if wide else (0, 1))
        for column in head:
            grid.add_column(column, justify="left" if column in WORDS else "right")
        for row in rows:
            grid.add_row(*row)
        Console(width=None if sys.stdout.isatty() else 240 if wide else 160).print(grid)

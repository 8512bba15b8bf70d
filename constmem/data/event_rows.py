"""Rows of events, from CSV or Parquet: columns by name, marks of any text or numbered, times or dates."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from math import isfinite
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from constmem.core.checks import known
from constmem.data.catalogue import SECONDS
from constmem.data.packs import Array
from constmem.data.row_files import opened
from constmem.point_processes.events import Events

Columns = Mapping[str, str | None]
COLUMNS = {  # of the JODIE layout, and what else they are called
    "user": ("user_id", "user", "userid", "u"),
    "mark": ("item_id", "mark", "item", "itemid", "type", "event_type", "i"),
    "time": ("timestamp", "time", "ts", "t"),
}
NONE = "-"  # instead of a column's name: there is no such column
MOST_MARKS = 10_000_000
EXACT = 2**53  # whole numbers up to here are float64 numbers, all of them


@dataclass(frozen=True)
class Sequences:
    """Sequences as they are in a file, in its order.

    Attributes:
        times, marks: one array for each sequence; a mark of -1 is unknown.
        num_marks: how many kinds there are.
    """

    times: list[Array]
    marks: list[Array]
    num_marks: int

    def events(self, unit: str) -> Events:
        """As one padded batch; watches begin with their first events, and when they end is not known."""
        return Events.from_arrival_times(self.times, marks=self.marks, unit=unit, num_marks=self.num_marks)


class Row(NamedTuple):
    """One event as it is written in a file, and where."""

    where: str
    user: str
    mark: str
    time: str


def numbered_sequences(path: Path, *, by: str = "user", num_marks: int | None = None) -> Sequences:
    """Rows in the JODIE layout, with whole numbers as marks; by item, items are sequences and users marks."""
    rows = read_rows(path, {})
    if by == "item":
        rows = (Row(row.where, row.mark, row.user, row.time) for row in rows)
    found = _grouped(path, rows, "second")
    kinds = [np.array([_whole(mark, where) for where, mark in row], np.int64) for row in found.marks]
    largest = max(int(kind.max()) for kind in kinds)
    return Sequences(
        found.times, kinds, num_marks or number_of_marks(max(largest + 1, 1), f"the marks of {path}")
    )


@dataclass(frozen=True)
class Labelled:
    """Sequences of a file, and how things are called in it.

    Attributes:
        labels: what the marks are called, by their numbers.
        users: whose the sequences are.
        dated: whether times are dates.
        unknown: how many events have a mark that is none of the labels.
    """

    sequences: Sequences
    labels: list[str]
    users: list[str]
    dated: bool
    unknown: int


def labelled_sequences(
    path: Path, columns: Columns, unit: str, *, labels: Sequence[str] | None = None
) -> Labelled:
    """The events of a file, those of each user together, and what the marks are called in it.

    Args:
        columns: names of the columns of user, mark and time; None: as in the JODIE layout; "-": there are
            no users (all rows are one sequence), or no marks (all events are alike).
        unit: of times that are numbers; what dates are to be counted in.
        labels: what marks are called where that is known already; others are unknown. None: as in the file.
    """
    found = _grouped(path, read_rows(path, columns), unit)
    if labels is None:
        marked = columns.get("mark") != NONE
        given = {mark for row in found.marks for _, mark in row if mark} if marked else set()
        labels = sorted(given, key=_order) or [""]
    number = {label: i for i, label in enumerate(labels)}
    kinds = [np.array([number.get(mark, -1) for _, mark in row], np.int64) for row in found.marks]
    unknown = sum(mark != "" and mark not in number for row in found.marks for _, mark in row)
    return Labelled(
        Sequences(found.times, kinds, len(labels)), list(labels), found.users, found.dated, unknown
    )


def read_rows(path: Path, columns: Columns) -> Iterator[Row]:
    """The rows of a CSV or Parquet file; each says whose event it is, if there are users."""
    with opened(path) as (names, lines):
        places = _places(path, names, columns)
        least = 1 + max(place for place in places if place is not None)
        for line, cells in lines:
            if len(cells) < least:
                raise ValueError(
                    f"{line} of {path} has {len(cells)} cells, but {least} or more are needed: the file "
                    "is cut short or of another format"
                )
            row = Row(f"{line} of {path}", *("" if i is None else cells[i].strip() for i in places))
            if not row.user and columns.get("user") != NONE:
                raise ValueError(
                    f"{row.where} does not say whose event it is: name the user, leave the row out, or make "
                    f"one sequence of all rows (--user {NONE})"
                )
            yield row


def _places(path: Path, names: Sequence[str], columns: Columns) -> list[int | None]:
    """Where user, mark and time are; None for what there is not."""
    if not any(names):
        raise ValueError(f"{path} is empty, or its first line is: that line names the columns")
    lower = [name.strip().lower() for name in names]
    places: list[int | None] = []
    for what, spellings in COLUMNS.items():
        asked = columns.get(what)
        if asked == NONE and what != "time":
            places.append(None)
            continue
        found = [lower.index(spelling) for spelling in spellings if spelling in lower]
        if asked is not None:
            found = [list(names).index(known(f"column of {path}", asked, names))]
        if not found:
            none = f", or --{what} {NONE} if there is none" if what != "time" else ""
            raise ValueError(
                f"{path} names no column of the {what} ({', '.join(spellings)}), but "
                f"{', '.join(names)[:120]}: say which it is, --{what} NAME{none}"
            )
        name = names[found[0]]
        if list(names).count(name) > 1:
            raise ValueError(
                f"{list(names).count(name)} columns are called {name!r}, and {path} does not say which holds "
                f"the {what}: rename one"
            )
        places.append(found[0])
    return places


class _Grouped(NamedTuple):
    """Users in the order of their first rows, times of their events, and marks with where they are."""

    users: list[str]
    times: list[Array]
    marks: list[list[tuple[str, str]]]
    dated: bool


def _grouped(path: Path, rows: Iterable[Row], unit: str) -> _Grouped:
    times: dict[str, list[float]] = {}
    marks: dict[str, list[tuple[str, str]]] = {}
    first: Row | None = None
    for row in rows:
        first = first or row
        if row.time and _is_number(row.time) != _is_number(first.time):
            raise ValueError(
                f"{row.where} has a time that is {row.time[:40]!r}, but {first.where} one that is "
                f"{first.time[:40]!r}: write all as numbers, or all as ISO dates"
            )
        at = moment(row.time, unit, row.where)
        history = times.setdefault(row.user, [])
        if history and at < history[-1]:
            whose, which = (f"{row.user!r} has ", "its row before") if row.user else ("", "the row before it")
            raise ValueError(
                f"{row.where}: {whose}an event at {row.time}, earlier than {which}: sort the rows by time"
            )
        history.append(at)
        marks.setdefault(row.user, []).append((row.where, row.mark))
    if first is None:
        raise ValueError(f"{path} has a header but no events: a row for each event is needed")
    dated = not _is_number(first.time)
    return _Grouped(list(times), [np.array(row) for row in times.values()], list(marks.values()), dated)


def moment(text: str, unit: str, where: str) -> float:
    """A number as it is, or a date (ISO 8601; without an offset: UTC) counted in `unit` from 1970 on."""
    try:
        number = float(text)
    except ValueError:
        try:
            date = datetime.fromisoformat(text)
        except ValueError:
            shown = repr(text[:40]) if text else "empty"
            raise ValueError(
                f"{where} has a time that is {shown}: a number or an ISO date is needed"
            ) from None
        date = date if date.tzinfo else date.replace(tzinfo=UTC)
        return date.timestamp() / SECONDS[known("unit to count dates in", unit, SECONDS)]
    if not isfinite(number):
        raise ValueError(f"{where} has a time that is {text}: every time must be finite; leave the row out")
    if abs(number) > EXACT and text.lstrip("+-").isdigit() and int(text) != number:
        raise ValueError(
            f"{where} has a time that is {text}, which float64 would round: count from a later start, or in "
            "a larger unit"
        )
    return number


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _whole(mark: str, where: str) -> int:
    """A mark as its number; -1 where it is unknown."""
    if not mark:
        return -1
    if not _is_number(mark) or not isfinite(float(mark)) or not float(mark).is_integer():
        raise ValueError(f"{where} has mark {mark[:40]!r}, but marks are whole numbers here")
    return int(float(mark))


def _order(label: str) -> tuple[bool, float, str]:
    """Numbers by size, before any other text by the alphabet."""
    if _is_number(label) and isfinite(float(label)):  # NaN has no place in any order
        return False, float(label), label
    return True, 0.0, label


def number_of_marks(number: Any, where: str) -> int:
    if not isinstance(number, int | float) or not 1 <= number <= MOST_MARKS:
        raise ValueError(f"{where} is {number!r}, but 1 to {MOST_MARKS:,} marks are needed, numbered from 0")
    return int(number)

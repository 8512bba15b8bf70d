"""Rows of events of one's own, from CSV or Parquet: columns by name, marks of any text, times or dates."""

from collections.abc import Iterable, Iterator, Mapping
from datetime import UTC, datetime
from math import isfinite
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from constmem.core.names import known
from constmem.data.catalogue import SECONDS
from constmem.data.csv_files import opened
from constmem.data.event_files import COLUMNS, Sequences

NONE = "-"  # instead of a column's name: there is no such column


class Labelled(NamedTuple):
    """Sequences, and what their marks are called in the file."""

    sequences: Sequences
    labels: list[str]


class Row(NamedTuple):
    """One event as a file tells it, and where."""

    where: str
    user: str
    mark: str
    time: str


def read_rows(path: Path, columns: Mapping[str, str | None], unit: str) -> Labelled:
    """The events of a file, those of each user together, in the order of the users' first rows.

    Args:
        columns: names of the columns of user, mark and time; None: as in the JODIE layout; "-": there are
            no users (all rows are one sequence), or no marks (all events are alike).
        unit: of times that are numbers; what dates are to be counted in.
    """
    rows = parquet_rows(path, columns) if path.suffix == ".parquet" else csv_rows(path, columns)
    if columns.get("user") != NONE:
        rows = _owned(rows)
    return _grouped(path, _one_clock(rows), unit, marked=columns.get("mark") != NONE)


def csv_rows(path: Path, columns: Mapping[str, str | None]) -> Iterator[Row]:
    """The rows of a CSV file."""
    with opened(path) as (names, lines):
        places = _places(path, names, columns)
        for line, cells in lines:
            yield Row(f"line {line} of {path}", *("" if i is None else cells[i].strip() for i in places))


def parquet_rows(path: Path, columns: Mapping[str, str | None]) -> Iterator[Row]:
    """The rows of a Parquet file."""
    from pyarrow import parquet

    table = parquet.read_table(path)
    places = _places(path, table.column_names, columns)
    cells = [None if i is None else table.column(i).to_pylist() for i in places]
    for i in range(table.num_rows):
        yield Row(f"row {i} of {path}", *("" if column is None else _text(column[i]) for column in cells))


def moment(text: str, unit: str, where: str) -> float:
    """A number as it stands, or a date (ISO 8601; without an offset: UTC) counted in `unit` from 1970 on."""
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
    return number


def _places(path: Path, names: list[str], columns: Mapping[str, str | None]) -> list[int | None]:
    """Where user, mark and time stand; None for what there is not."""
    lower = [name.strip().lower() for name in names]
    places: list[int | None] = []
    for what, spellings in COLUMNS.items():
        asked = columns.get(what)
        if asked == NONE and what != "time":
            places.append(None)
        elif asked is not None:
            places.append(names.index(known(f"column of {path}", asked, names)))
        else:
            found = [lower.index(spelling) for spelling in spellings if spelling in lower]
            if not found:
                none = f", or --{what} {NONE} if there is none" if what != "time" else ""
                raise ValueError(
                    f"{path} names no column of the {what} ({', '.join(spellings)}), but "
                    f"{', '.join(names)[:120] or 'nothing'}: say which it is, --{what} NAME{none}"
                )
            places.append(found[0])
        name = "" if places[-1] is None else names[places[-1]]
        if name and names.count(name) > 1:
            raise ValueError(
                f"{names.count(name)} columns are called {name!r}, and {path} does not say which holds the "
                f"{what}: rename one"
            )
    return places


def _owned(rows: Iterable[Row]) -> Iterator[Row]:
    """The rows, each of which must say whose it is."""
    for row in rows:
        if not row.user:
            raise ValueError(
                f"{row.where} does not say whose event it is: name the user, leave the row out, or make one "
                f"sequence of all rows (--user {NONE})"
            )
        yield row


def _one_clock(rows: Iterable[Row]) -> Iterator[Row]:
    """The rows, whose times must be numbers all of them, or dates all of them."""
    first = None
    for row in rows:
        first = first or row
        if _is_number(row.time) != _is_number(first.time) and row.time:
            raise ValueError(
                f"{row.where} has a time that is {row.time[:40]!r}, but {first.where} one that is "
                f"{first.time[:40]!r}: write all as numbers, or all as ISO dates"
            )
        yield row


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _grouped(path: Path, rows: Iterable[Row], unit: str, *, marked: bool) -> Labelled:
    times: dict[str, list[float]] = {}
    marks: dict[str, list[str]] = {}
    for where, user, mark, time in rows:
        at = moment(time, unit, where)
        history = times.setdefault(user, [])
        if history and at < history[-1]:
            whose, which = (f"{user!r} has ", "its row before") if user else ("", "the row before it")
            raise ValueError(
                f"{where}: {whose}an event at {time}, earlier than {which}: sort the rows by time"
            )
        history.append(at)
        marks.setdefault(user, []).append(mark)
    if not times:
        raise ValueError(f"{path} has a header but no events")
    labels = sorted({mark for row in marks.values() for mark in row if mark}, key=_order) if marked else []
    number = {label: i for i, label in enumerate(labels)} | {"": -1 if labels else 0}
    kinds = [np.array([number[mark] for mark in row], np.int64) for row in marks.values()]
    return Labelled(
        Sequences([np.array(t) for t in times.values()], kinds, max(len(labels), 1)), labels or [""]
    )


def _order(label: str) -> tuple[bool, float, str]:
    """Numbers by size, before any other text by the alphabet."""
    if _is_number(label) and isfinite(float(label)):  # NaN has no place in any order
        return False, float(label), label
    return True, 0.0, label


def _text(cell: Any) -> str:
    if cell is None:
        return ""
    return cell.isoformat() if isinstance(cell, datetime) else str(cell).strip()

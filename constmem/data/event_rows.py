"""Rows of events, from CSV or Parquet: columns by name, marks of any text or numbered, times or dates."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from math import isfinite
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from constmem.core.checks import known
from constmem.data.catalogue import SECONDS
from constmem.data.packs import RATIO, ROOM, Array
from constmem.data.table import opened
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
    times, marks = _grouped(path, rows, "second")
    kinds = [np.array([_whole(mark, where) for where, mark in row], np.int64) for row in marks]
    largest = max(int(kind.max()) for kind in kinds)
    return Sequences(times, kinds, num_marks or number_of_marks(max(largest + 1, 1), f"the marks of {path}"))


def labelled_sequences(path: Path, columns: Columns, unit: str) -> tuple[Sequences, list[str]]:
    """The events of a file, those of each user together, and what the marks are called in it.

    Args:
        columns: names of the columns of user, mark and time; None: as in the JODIE layout; "-": there are
            no users (all rows are one sequence), or no marks (all events are alike).
        unit: of times that are numbers; what dates are to be counted in.
    """
    times, marks = _grouped(path, read_rows(path, columns), unit)
    given = {mark for row in marks for _, mark in row if mark} if columns.get("mark") != NONE else set()
    labels = sorted(given, key=_order)
    number = {label: i for i, label in enumerate(labels)} | {"": -1 if labels else 0}
    kinds = [np.array([number[mark] for _, mark in row], np.int64) for row in marks]
    return Sequences(times, kinds, max(len(labels), 1)), labels or [""]


def read_rows(path: Path, columns: Columns) -> Iterator[Row]:
    """The rows of a CSV or Parquet file; each says whose event it is, if there are users."""
    for row in _parquet_rows(path, columns) if path.suffix == ".parquet" else _csv_rows(path, columns):
        if not row.user and columns.get("user") != NONE:
            raise ValueError(
                f"{row.where} does not say whose event it is: name the user, leave the row out, or make one "
                f"sequence of all rows (--user {NONE})"
            )
        yield row


def _csv_rows(path: Path, columns: Columns) -> Iterator[Row]:
    with opened(path) as (names, lines):
        places = _places(path, names, columns)
        least = 1 + max(place for place in places if place is not None)
        for line, cells in lines:
            if len(cells) < least:
                raise ValueError(
                    f"line {line} of {path} has {len(cells)} cells, but {least} or more are needed: the file "
                    "is cut short or of another format"
                )
            yield Row(f"line {line} of {path}", *("" if i is None else cells[i].strip() for i in places))


def _parquet_rows(path: Path, columns: Columns) -> Iterator[Row]:
    table = parquet_table(path)
    places = _places(path, table.column_names, columns)
    cells = [None if i is None else table.column(i).to_pylist() for i in places]
    for i in range(table.num_rows):
        yield Row(f"row {i} of {path}", *("" if column is None else _text(column[i]) for column in cells))


def parquet_table(path: Path) -> Any:
    """The table of a Parquet file, unless it has far more values than bytes."""
    with parquet_errors(path):
        file, size = parquet_file(path), path.stat().st_size
        groups = [file.metadata.row_group(i) for i in range(file.metadata.num_row_groups)]
        values = sum(group.column(k).num_values for group in groups for k in range(group.num_columns))
        if max(values, file.metadata.num_rows) > ROOM // 8 + RATIO * size:
            raise ValueError(
                f"{path} of {size:,} bytes announces {values:,} values: it is damaged, or no data"
            )
        return file.read()


def parquet_file(path: Path) -> Any:
    """A Parquet file, opened."""
    with parquet_errors(path):
        from pyarrow import parquet

        return parquet.ParquetFile(path)


@contextmanager
def parquet_errors(path: Path) -> Iterator[None]:
    """Errors of pyarrow in words: what is damaged, or which extra it comes with."""
    try:
        from pyarrow import ArrowException
    except ImportError as error:
        raise ImportError("Parquet files need pyarrow: pip install 'constmem[data]'") from error
    try:
        yield
    except FileNotFoundError:
        raise
    except (ArrowException, OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not a readable Parquet file ({error})") from error


def _text(cell: Any) -> str:
    if cell is None:
        return ""
    return cell.isoformat() if isinstance(cell, datetime) else str(cell).strip()


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


def _grouped(path: Path, rows: Iterable[Row], unit: str) -> tuple[list[Array], list[list[tuple[str, str]]]]:
    """Times of each user's events, and marks with where they are, in the order of the users' first rows."""
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
    if not times:
        raise ValueError(f"{path} has a header but no events: a row for each event is needed")
    return [np.array(row) for row in times.values()], list(marks.values())


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

"""Event sequences from files in public layouts: EasyTPP's records, JODIE's rows."""

import json
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from constmem.data.packs import Array
from constmem.data.rows import EXACT, is_number, moment, parquet_file, parquet_table, place_of, read_text
from constmem.point_processes.events import Events

File = str | os.PathLike[str]
RECORD = ("time_since_start", "type_event")  # of EasyTPP
MOST_MARKS = 10_000_000
Columns = Mapping[str, str | None]
COLUMNS = {  # of the JODIE layout, and what else they are called
    "user": ("user_id", "user", "userid", "u"),
    "mark": ("item_id", "mark", "item", "itemid", "type", "event_type", "i"),
    "time": ("timestamp", "time", "ts", "t"),
}
NONE = "-"  # instead of a column's name: there is no such column


@dataclass(frozen=True)
class Sequences:
    """Sequences as they are in a file, in its order.

    Attributes:
        times, marks: one array for each sequence; a mark of -1 is unknown.
        num_marks: how many kinds there are.
        users, labels: whose the sequences are, and what the marks are called by their numbers, if known.
        dated: whether times are dates in the file.
        unknown: how many events have a mark that is none of the labels.
    """

    times: list[Array]
    marks: list[Array]
    num_marks: int
    users: list[str] = field(default_factory=list)
    labels: list[str] | None = None
    dated: bool = False
    unknown: int = 0

    def events(self, unit: str) -> Events:
        """As one padded batch; observation begins with the first events, and when it ends is not known."""
        return Events.from_arrival_times(self.times, marks=self.marks, unit=unit, num_marks=self.num_marks)


def read_easytpp(path: File, *, unit: str) -> Events:
    """The sequences of a JSON or JSON Lines file as EasyTPP publishes them."""
    return easytpp_sequences(Path(path)).events(unit)


def read_event_csv(path: File, *, unit: str, num_marks: int | None = None) -> Events:
    """The sequences of a CSV file in the JODIE layout: a row an event, with user, item and timestamp.

    The header names the columns; others may follow. Each user is a sequence, in the order in which
    users first appear; items are marks, whole numbers from 0, and empty where unknown. All rows are
    kept, simultaneous ones too. Rows of a user must be sorted by time.

    Args:
        path: of the file.
        unit: of its timestamps.
        num_marks: how many kinds there are; by default one more than the largest.
    """
    return numbered_sequences(Path(path), num_marks=num_marks).events(unit)


def read_event_parquet(path: File, *, unit: str, num_marks: int | None = None) -> Events:
    """The sequences of a Parquet file with the columns of the JODIE layout, or with those of EasyTPP."""
    path = Path(path)
    if has_records(path):
        return easytpp_sequences(path).events(unit)
    return numbered_sequences(path, num_marks=num_marks).events(unit)


def has_records(path: Path) -> bool:
    """Whether a Parquet file has the columns of EasyTPP."""
    return RECORD[0] in parquet_file(path).schema_arrow.names


def easytpp_sequences(path: Path) -> Sequences:
    """The records of EasyTPP in a JSON, JSON Lines or Parquet file, before they are padded."""
    times, marks, kinds = [], [], set()
    for where, record in _records(path):
        if not isinstance(record, Mapping):
            raise ValueError(f"{where} of {path} is not an object, but one of EasyTPP is needed")
        absent = [key for key in (*RECORD, "dim_process") if record.get(key) is None]
        if absent:
            raise ValueError(
                f"{where} of {path} lacks {', '.join(absent)}: it holds {', '.join(record) or 'nothing'}. "
                "EasyTPP's records have time_since_start, type_event and dim_process"
            )
        time, mark = (_numbers(record[key], f"{key} in {where} of {path}") for key in RECORD)
        length = record.get("seq_len", len(time))
        if not len(time) == len(mark) == length or not length:
            raise ValueError(
                f"{where} of {path} has {len(time)} times, {len(mark)} marks and a seq_len of {length}: "
                "they must be the same, and at least 1"
            )
        times.append(time)
        marks.append(mark)
        kinds.add(number_of_marks(record["dim_process"], f"dim_process in {where} of {path}"))
    if len(kinds) != 1:
        raise ValueError(
            f"{path} has no records" if not kinds else f"the records of {path} differ in dim_process: {kinds}"
        )
    return Sequences(times, marks, kinds.pop())


def _records(path: Path) -> Iterator[tuple[str, Any]]:
    """Every record with where it is, of a JSON list, of JSON Lines or of a Parquet file."""
    if path.suffix.lower() in (".pkl", ".pickle"):
        raise ValueError(f"{path} is a pickle, which can run code when it is read: use EasyTPP's JSON files")
    if path.suffix.lower() == ".parquet":
        yield from ((f"row {i}", record) for i, record in enumerate(parquet_table(path).to_pylist()))
        return
    try:
        text = path.read_text(encoding="utf-8")
        if text.lstrip().startswith("["):
            yield from ((f"record {i}", record) for i, record in enumerate(json.loads(text)))
            return
        for number, line in enumerate(text.splitlines(), 1):
            if line.strip():
                yield f"line {number}", json.loads(line)
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise ValueError(
            f"{path} is neither a JSON list of records nor JSON Lines ({error}): it is cut short or of "
            "another format"
        ) from error


def _numbers(values: Any, where: str) -> Array:
    try:
        array = np.asarray(values, np.float64)
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"{where} is not a list of numbers ({error})") from error
    if array.ndim != 1:
        raise ValueError(f"{where} is not a flat list of numbers")
    if np.abs(array).max(initial=0.0) > EXACT:
        for value, taken in zip(values, array.tolist(), strict=True):
            if isinstance(value, int) and value != taken:
                raise ValueError(
                    f"{where} holds {value}, which float64 would round: count from a later start, or in a "
                    "larger unit"
                )
    return array


# Rows of events


class Row(NamedTuple):
    """One event as it is written in a file, and where."""

    where: str
    user: str
    mark: str
    time: str


def read_rows(path: Path, columns: Columns) -> Iterator[Row]:
    """The rows of a CSV or Parquet file; each says whose event it is, if there are users."""
    names, lines = read_text(path)
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


def _places(path: Path, names: list[str], columns: Columns) -> list[int | None]:
    """Where user, mark and time are; None for what there is not."""
    lower = [name.lower() for name in names]
    places: list[int | None] = []
    for what, spellings in COLUMNS.items():
        asked, optional = columns.get(what), what != "time"
        if asked == NONE and optional:
            places.append(None)
            continue
        found = [names[lower.index(spelling)] for spelling in spellings if spelling in lower]
        if asked is None and any(names) and not found:
            none = f", or --{what} {NONE} if there is none" if optional else ""
            raise ValueError(
                f"{path} names no column of the {what} ({', '.join(spellings)}), but "
                f"{', '.join(names)[:120]}: say which it is, --{what} NAME{none}"
            )
        places.append(place_of(asked or next(iter(found), what), names, path))
    return places


def numbered_sequences(
    path: Path, columns: Columns | None = None, *, num_marks: int | None = None
) -> Sequences:
    """The events of a file whose marks are whole numbers; by default in the JODIE layout."""
    times, marks, _ = _grouped(path, columns or {}, "second")
    kinds = [np.array([_whole(mark, where) for where, mark in own], np.int64) for own in marks.values()]
    largest = max(int(kind.max()) for kind in kinds)
    count = num_marks or number_of_marks(max(largest + 1, 1), f"the marks of {path}")
    return Sequences([np.array(own) for own in times.values()], kinds, count)


def labelled_sequences(
    path: Path, columns: Columns, unit: str, *, labels: Sequence[str] | None = None
) -> Sequences:
    """The events of a file, those of each user together, and what the marks are called in it.

    Args:
        columns: names of the columns of user, mark and time; None: as in the JODIE layout; "-": there are
            no users (all rows are one sequence), or no marks (all events are alike).
        unit: of times that are numbers; what dates are to be counted in.
        labels: what marks are called where that is known already; others are unknown. None: as in the file.
    """
    times, marks, dated = _grouped(path, columns, unit)
    given = Counter(mark for own in marks.values() for _, mark in own if mark)
    if labels is None:
        labels = sorted(given if columns.get("mark") != NONE else (), key=_order) or [""]
    number = {label: i for i, label in enumerate(labels)}
    kinds = [np.array([number.get(mark, -1) for _, mark in own], np.int64) for own in marks.values()]
    unknown = sum(count for mark, count in given.items() if mark not in number)
    found = [np.array(own) for own in times.values()]
    return Sequences(found, kinds, len(labels), list(times), list(labels), dated, unknown)


def _grouped(
    path: Path, columns: Columns, unit: str
) -> tuple[dict[str, list[float]], dict[str, list[tuple[str, str]]], bool]:
    """Times by user in the order of their first rows, marks and where they are, whether times are dates."""
    times: dict[str, list[float]] = {}
    marks: dict[str, list[tuple[str, str]]] = {}
    first: Row | None = None
    for row in read_rows(path, columns):
        first = first or row
        if row.time and is_number(row.time) != is_number(first.time):
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
    return times, marks, not is_number(first.time)


def _whole(mark: str, where: str) -> int:
    """A mark as its number; -1 where it is unknown."""
    if not mark:
        return -1
    if not is_number(mark) or not isfinite(float(mark)) or not float(mark).is_integer():
        raise ValueError(f"{where} has mark {mark[:40]!r}, but marks are whole numbers here")
    return int(float(mark))


def _order(label: str) -> tuple[bool, float, str]:
    """Numbers by size, before any other text by the alphabet."""
    if is_number(label) and isfinite(float(label)):  # NaN has no place in any order
        return False, float(label), label
    return True, 0.0, label


def number_of_marks(number: Any, where: str) -> int:
    if not isinstance(number, int | float) or not 1 <= number <= MOST_MARKS:
        raise ValueError(f"{where} is {number!r}, but 1 to {MOST_MARKS:,} marks are needed, numbered from 0")
    return int(number)

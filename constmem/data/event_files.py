"""Event sequences from files in public layouts: packs, EasyTPP's records, JODIE's rows."""

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from constmem.core.checks import known
from constmem.data.catalogue import DATASETS, EVENT_KEYS, EVENT_SPLITS
from constmem.data.packs import Array, Folder, data_folder, find_pack, read_pack
from constmem.data.rows import NONE, Columns, Row, is_number, moment, parquet_file, parquet_table, read_rows
from constmem.point_processes.events import Events

File = str | os.PathLike[str]
Split = Literal["train", "validation", "test"]
RECORD = ("time_since_start", "type_event")  # of EasyTPP
MOST_MARKS = 10_000_000


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


def load_events(name: str, *, data_dir: Folder = None, split: Split = "train") -> Events:
    """A split of a prepared data set: taxi, taobao, mooc, reddit, wiki, or your own `events_NAME.npz`.

    Args:
        name: of the data set.
        data_dir: folder of the packs; else CONSTMEM_DATA, else ~/.local/share/constmem.
        split: "train", "validation" or "test".
    """
    known("split", split, EVENT_SPLITS)
    packs = {entry.name: entry.pack for entry in DATASETS.values() if entry.kind == "events" and entry.pack}
    for path in data_folder(data_dir).glob("events_*.npz"):
        if path.stem not in packs.values():
            packs[path.stem.removeprefix("events_")] = path.stem
    path = find_pack(packs[known("event data set", name, packs)], data_dir)
    sequences, splits, unit = read_event_pack(path)
    chosen = np.flatnonzero(splits == EVENT_SPLITS.index(split))
    times, marks = ([rows[k] for k in chosen] for rows in (sequences.times, sequences.marks))
    try:
        return Sequences(times, marks, sequences.num_marks).events(unit)
    except ValueError as error:
        raise ValueError(f"the {split} split of {path} is not sound: {error}") from error


def read_event_pack(path: Path) -> tuple[Sequences, Array, str]:
    """All sequences of a pack, the split of each, and the unit; refused where its arrays do not fit."""
    pack = read_pack(path, EVENT_KEYS)
    offsets, split, times, marks = (pack[key] for key in ("offsets", "split", "times", "marks"))
    sound = (
        offsets.ndim == split.ndim == times.ndim == marks.ndim == 1
        and len(offsets) == len(split) + 1
        and offsets[0] == 0
        and (np.diff(offsets) > 0).all()
        and offsets[-1] == len(times) == len(marks)
        and np.isin(split, (0, 1, 2)).all()
        and pack["num_marks"].size == pack["unit"].size == 1
    )
    if not sound:
        raise ValueError(
            f"the offsets and splits of {path} do not fit its {times.size:,} times and {marks.size:,} marks, "
            "or a sequence is empty: prepare it again"
        )
    rows = [np.split(whole, offsets[1:-1]) for whole in (times, marks)]
    return Sequences(rows[0], rows[1], int(pack["num_marks"])), split, str(pack["unit"])


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
    if path.suffix in (".pkl", ".pickle"):
        raise ValueError(f"{path} is a pickle, which can run code when it is read: use EasyTPP's JSON files")
    if path.suffix == ".parquet":
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
    return array


# Rows of events


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
    dated = not is_number(first.time)
    return _Grouped(list(times), [np.array(row) for row in times.values()], list(marks.values()), dated)


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

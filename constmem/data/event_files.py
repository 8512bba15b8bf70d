"""Event sequences from files: prepared packs, EasyTPP's JSON, JODIE's CSV, and both as Parquet."""

import csv
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from constmem.core.names import known
from constmem.data.catalogue import DATASETS, EVENT_KEYS, EVENT_SPLITS
from constmem.data.packs import Array, Folder, data_folder, find_pack, read_pack
from constmem.point_processes.events import Events

File = str | os.PathLike[str]
Split = Literal["train", "validation", "test"]
By = Literal["user", "item"]  # what makes a sequence of a table
COLUMNS = {  # of the JODIE layout, and what else they are called
    "user": ("user_id", "user", "userid", "u"),
    "mark": ("item_id", "mark", "item", "itemid", "type", "event_type", "i"),
    "time": ("timestamp", "time", "ts", "t"),
}
RECORD = ("time_since_start", "type_event")  # of EasyTPP


@dataclass(frozen=True)
class Sequences:
    """Sequences as they stand in a file, in its order.

    Attributes:
        times, marks: one array for each sequence; a mark of -1 is unknown.
        num_marks: how many kinds there are.
    """

    times: list[Array]
    marks: list[Array]
    num_marks: int

    def events(self, unit: str) -> Events:
        """As one padded batch; watches begin with their first events and end nobody knows when."""
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
    pack = read_pack(path, EVENT_KEYS)
    check_pack(path, pack)
    offsets, chosen = pack["offsets"], np.flatnonzero(pack["split"] == EVENT_SPLITS.index(split))
    parts = [slice(offsets[k], offsets[k + 1]) for k in chosen]
    sequences = Sequences(
        [pack["times"][part] for part in parts],
        [pack["marks"][part] for part in parts],
        int(pack["num_marks"]),
    )
    try:
        return sequences.events(str(pack["unit"]))
    except ValueError as error:
        raise ValueError(f"the {split} split of {path} is not sound: {error}") from error


def check_pack(path: Path, pack: Mapping[str, Array]) -> None:
    """Refuse a pack whose parts do not fit each other."""
    offsets, split = pack["offsets"], pack["split"]
    sound = (
        offsets.ndim == split.ndim == 1
        and len(offsets) == len(split) + 1
        and offsets[0] == 0
        and (np.diff(offsets) > 0).all()
        and offsets[-1] == len(pack["times"]) == len(pack["marks"])
        and np.isin(split, (0, 1, 2)).all()
    )
    if not sound:
        raise ValueError(
            f"the offsets and splits of {path} do not fit its {len(pack['times']):,} times and "
            f"{len(pack['marks']):,} marks, or a sequence is empty: prepare it again"
        )


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
    return csv_sequences(Path(path), num_marks=num_marks).events(unit)


def read_event_parquet(path: File, *, unit: str, num_marks: int | None = None) -> Events:
    """The sequences of a Parquet file with the columns of the JODIE layout, or with those of EasyTPP."""
    return parquet_sequences(Path(path), num_marks=num_marks).events(unit)


def easytpp_sequences(path: Path) -> Sequences:
    """What `read_easytpp` reads, before it is padded."""
    return _from_records(path, _records(path))


def csv_sequences(path: Path, *, by: By = "user", num_marks: int | None = None) -> Sequences:
    """What `read_event_csv` reads, before it is padded; by item, items are sequences and users marks."""
    try:
        with path.open(newline="", encoding="utf-8") as file:
            rows = csv.reader(file)
            user, mark, time = _columns(path, next(rows, [])).values()
            places = (user, mark, time) if by == "user" else (mark, user, time)
            return _grouped(path, _cells(path, rows, places), num_marks)
    except (UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"{path} is not a CSV file of UTF-8 text ({error})") from error


def has_records(path: Path) -> bool:
    """Whether a Parquet file has the columns of EasyTPP."""
    try:
        from pyarrow import ArrowInvalid, parquet
    except ImportError as error:
        raise ImportError("Parquet files need pyarrow: pip install 'constmem[data]'") from error
    try:
        return RECORD[0] in parquet.read_schema(path).names
    except ArrowInvalid as error:
        raise ValueError(f"{path} is not a readable Parquet file ({error})") from error


def parquet_sequences(path: Path, *, num_marks: int | None = None) -> Sequences:
    """What `read_event_parquet` reads, before it is padded."""
    records = has_records(path)
    from pyarrow import parquet

    table = parquet.read_table(path)
    if records:
        return _from_records(path, ((f"row {i}", r) for i, r in enumerate(table.to_pylist())))
    columns = _columns(path, table.column_names)
    users, marks, times = (map(_text, cells) for cells in table.select(list(columns)).to_pydict().values())
    rows = ((f"row {i}", *row) for i, row in enumerate(zip(users, marks, times, strict=True)))
    return _grouped(path, rows, num_marks)


def _text(cell: Any) -> str:
    return "" if cell is None else str(cell)


def _records(path: Path) -> Iterator[tuple[str, Any]]:
    """Every record with where it stands, of a JSON list or of JSON Lines."""
    if path.suffix in (".pkl", ".pickle"):
        raise ValueError(f"{path} is a pickle, which can run code when it is read: use EasyTPP's JSON files")
    try:
        text = path.read_text(encoding="utf-8")
        if text.lstrip().startswith("["):
            yield from ((f"record {i}", record) for i, record in enumerate(json.loads(text)))
            return
        for number, line in enumerate(text.splitlines(), 1):
            if line.strip():
                yield f"line {number}", json.loads(line)
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(
            f"{path} is neither a JSON list of records nor JSON Lines ({error}): it is cut short or of "
            "another format"
        ) from error


def _from_records(path: Path, records: Iterable[tuple[str, Any]]) -> Sequences:
    times, marks, kinds = [], [], set()
    for where, record in records:
        if not isinstance(record, Mapping):
            raise ValueError(f"{where} of {path} is not an object, but one of EasyTPP is needed")
        absent = [key for key in (*RECORD, "dim_process") if record.get(key) is None]
        if absent:
            raise ValueError(
                f"{where} of {path} lacks {', '.join(absent)}: it holds {', '.join(record) or 'nothing'}. "
                "EasyTPP's records have time_since_start, type_event and dim_process"
            )
        time, mark = (_numbers(path, where, key, record[key]) for key in RECORD)
        length = record.get("seq_len", len(time))
        if not len(time) == len(mark) == length or not length:
            raise ValueError(
                f"{where} of {path} has {len(time)} times, {len(mark)} marks and a seq_len of {length}: "
                "they must be the same, and at least 1"
            )
        times.append(time)
        marks.append(mark)
        kinds.add(int(record["dim_process"]))
    if len(kinds) != 1:
        raise ValueError(
            f"{path} has no records" if not kinds else f"the records of {path} differ in dim_process: {kinds}"
        )
    return Sequences(times, marks, kinds.pop())


def _numbers(path: Path, where: str, key: str, values: Any) -> Array:
    try:
        array = np.asarray(values, np.float64)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{key} in {where} of {path} is not a list of numbers ({error})") from error
    if array.ndim != 1:
        raise ValueError(f"{key} in {where} of {path} is not a flat list of numbers")
    return array


def _columns(path: Path, header: list[str]) -> dict[str, int]:
    """The three columns by their names in the header, in the order user, mark, time."""
    names = [name.strip().lower() for name in header]
    found: dict[str, int] = {}
    for what, spellings in COLUMNS.items():
        places = [names.index(spelling) for spelling in spellings if spelling in names]
        if not places:
            raise ValueError(
                f"the header of {path} names no {what} ({', '.join(spellings)}): it reads "
                f"{', '.join(header)[:120] or 'nothing'!r}. The JODIE layout is user_id,item_id,timestamp,..."
            )
        found[header[places[0]]] = places[0]
    return found


def _cells(path: Path, rows: Any, places: tuple[int, int, int]) -> Iterator[tuple[str, str, str, str]]:
    """Where each row stands, and its cells at three places."""
    first, second, third = places
    for row in rows:
        if not row:
            continue
        if len(row) <= max(places):
            raise ValueError(
                f"line {rows.line_num} of {path} has {len(row)} fields, but {max(places) + 1} or more are "
                "needed: the file is cut short or of another format"
            )
        yield f"line {rows.line_num}", row[first], row[second], row[third]


def _grouped(path: Path, rows: Iterable[tuple[str, str, str, str]], num_marks: int | None) -> Sequences:
    """Sequences of the rows of each user (or item), which come in the order of their first rows."""
    times: dict[str, list[float]] = {}
    marks: dict[str, list[int]] = {}
    for where, user, mark, time in rows:
        try:
            kind = _whole(mark) if mark.strip() else -1
            moment = float(time)
        except ValueError as error:
            raise ValueError(
                f"{where} of {path} has mark {mark[:40]!r} and time {time[:40]!r}, but marks are whole "
                "numbers and times are numbers"
            ) from error
        history = times.setdefault(user, [])
        if history and not moment >= history[-1]:
            raise ValueError(
                f"{where} of {path}: {user!r} has an event at {moment} after one at {history[-1]}; "
                "sort the rows by time first"
            )
        history.append(moment)
        marks.setdefault(user, []).append(kind)
    if not times:
        raise ValueError(f"{path} has a header but no events")
    kinds = [np.array(kind, np.int64) for kind in marks.values()]
    largest = max(int(kind.max()) for kind in kinds)
    return Sequences([np.array(t) for t in times.values()], kinds, num_marks or max(largest + 1, 1))


def _whole(text: str) -> int:
    number = float(text)
    if not number.is_integer():
        raise ValueError(f"{text} is not a whole number")
    return int(number)

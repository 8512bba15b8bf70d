"""Event sequences of one's own, from a file to splits to train, validate and test on; kept with a run."""

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from jaxtyping import Int64
from torch import Tensor

from constmem.core.checks import known
from constmem.core.files import read_tensors, write_tensors
from constmem.data.catalogue import DATASETS, EVENT_KEYS, EVENT_SPLITS, SECONDS
from constmem.data.event_files import Sequences, easytpp_sequences, has_records, labelled_sequences
from constmem.data.packs import Array, Folder, data_folder, find_pack, read_pack
from constmem.data.rows import moment
from constmem.point_processes.events import Events

KIND, VERSION = "constmem.event_log", 1
FORMATS = (".csv", ".tsv", ".json", ".jsonl", ".parquet", ".npz")
By = Literal["sequence", "time"]
Split = Literal["train", "validation", "test"]
LEAST = 5  # sequences that can be split
_SPLITS = torch.arange(len(EVENT_SPLITS))


@dataclass(frozen=True, eq=False)
class EventLog:
    """Sequences of events, and how they are split.

    Args:
        events: all of them.
        split: of each sequence, 0 to train, 1 to validate, 2 to test on; None: all sequences are cut at two
            moments, before which are eight and nine tenths of the events.
        labels: what the marks are called, in the order of their numbers.
        name: of the data, for run folders and figures.

    Example:
        >>> gaps, marks = [[0.0, 1.0, 2.0]] * 10, [[0, 1, 0]] * 10
        >>> log = EventLog.of(Events.from_gaps(gaps, marks=marks, unit="hour", num_marks=2))
        >>> [len(part) for part in log.parts()]  # to train, validate and test on
        [8, 1, 1]
    """

    events: Events
    split: Int64[Tensor, " b"] | None
    labels: list[str]
    name: str = "events"

    @staticmethod
    def of(
        events: Events, *, by: By = "sequence", labels: Sequence[str] | None = None, name: str = "events"
    ) -> "EventLog":
        """A log of events: eight, one and one tenths of the sequences at random, or all cut `by="time"`."""
        known("way to split events", by, ("sequence", "time"))
        names = [str(i) for i in range(events.num_marks)] if labels is None else list(labels)
        if len(names) != events.num_marks:
            raise ValueError(f"there are {len(names)} labels for {events.num_marks} marks: give one for each")
        if not events.num_events:
            raise ValueError(f"{name} has no events, and nothing can be learned from it")
        log = EventLog(events.to("cpu"), _drawn(events, name) if by == "sequence" else None, names, name)
        return _checked(log)

    @staticmethod
    def read(
        path: str | os.PathLike[str],
        *,
        user: str | None = None,
        mark: str | None = None,
        time: str | None = None,
        unit: str | None = None,
        end: str | None = None,
        by: By = "sequence",
    ) -> "EventLog":
        """The events of a CSV, Parquet, JSON (Lines) or NPZ file.

        A row of a CSV or Parquet file is an event. Marks may be any text, and are numbered in their order;
        an empty one is unknown. Times are numbers, or dates (ISO 8601). JSON is that of EasyTPP, and NPZ
        the prepared format with its own splits.

        Args:
            user, mark, time: names of columns; by default as in the JODIE layout (user_id, item_id,
                timestamp and what else they are called). "-": there are no users (one sequence), no marks.
            unit: of the times, or to count dates in ("second" by default).
            end: when observation of all sequences ended, a number or a date, or "last": with the last event.
            by: split the sequences, or the time.
        """
        path = Path(path)
        if not path.is_file():
            raise FileNotFoundError(f"there is no file {path} to read events from")
        kind = known("format of event files", path.suffix.lower(), FORMATS)
        given = {"user": user, "mark": mark, "time": time}
        if kind in (".json", ".jsonl", ".npz") and any(given.values()):
            asked = ", ".join(f"--{what}" for what, column in given.items() if column)
            raise ValueError(f"{asked}: columns are those of CSV and Parquet files, but {path} is neither")
        if kind == ".npz":
            return _read_pack(path, unit, end, by)
        unit = unit or "second"
        recorded = kind in (".json", ".jsonl") or (kind == ".parquet" and has_records(path))
        read = easytpp_sequences(path) if recorded else labelled_sequences(path, given, unit)
        events = _until(read.events(unit), end, f"--end of {path}")
        return EventLog.of(events, by=by, labels=read.labels, name=path.name)

    def __len__(self) -> int:
        return len(self.events)

    @property
    def statement(self) -> str:
        """What the data are, to stand beside figures made with them."""
        kinds = f"{self.events.num_marks:,} {'kind' if self.events.num_marks == 1 else 'kinds'}"
        how = "time" if self.split is None else "sequences"
        size = f"{len(self):,} sequences, {self.events.num_events:,} events of {kinds}"
        return f"{self.name}: {size}, in {self.events.unit}s, split by {how}"

    def parts(self) -> tuple[Events, Events, Events]:
        """The events to train, to validate and to test on."""
        if self.split is not None:
            chosen = ((self.split == i).nonzero()[:, 0] for i in range(3))
            train, validation, test = (self.events.select(index).trim() for index in chosen)
            return train, validation, test
        times = self.events.times[self.events.mask].sort().values
        cuts = [float(times[len(times) * tenths // 10]) for tenths in (8, 9)]
        first, last = -float("inf"), float("inf")
        train, validation, test = (
            _between(self.events, start, stop)
            for start, stop in ((first, cuts[0]), (cuts[0], cuts[1]), (cuts[1], last))
        )
        return train, validation, test

    def equals(self, other: object) -> bool:
        """Whether it is a log of the same events, in the same order, and split alike."""
        if not isinstance(other, EventLog):
            return False
        mine, theirs = self._tensors(), other._tensors()
        alike = mine.keys() == theirs.keys() and all(torch.equal(mine[k], theirs[k]) for k in mine)
        return alike and self.labels == other.labels and self.events.unit == other.events.unit

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the events, atomically, as a safetensors file."""
        about = {"unit": self.events.unit, "name": self.name, "labels": json.dumps(self.labels)}
        write_tensors(path, self._tensors(), {"format": KIND, "version": str(VERSION), **about})

    @staticmethod
    def load(path: str | os.PathLike[str]) -> "EventLog":
        """Read a log that `save` wrote."""
        tensors, header = read_tensors(path, kind=KIND, version=VERSION)
        try:
            labels, split = json.loads(header["labels"]), tensors.get("split")
            times, marks, mask, start = (tensors[name] for name in ("times", "marks", "mask", "t_start"))
            events = Events(times, marks, mask, start, tensors.get("t_end"), header["unit"], len(labels))
            if split is not None and (
                split.shape != start.shape or not bool(torch.isin(split, _SPLITS).all())
            ):
                raise ValueError("its splits do not fit its sequences")
            return EventLog(events, split, labels, header["name"])
        except (KeyError, ValueError, TypeError, RecursionError) as error:
            raise ValueError(f"{path} is damaged ({error!r}): write the events again") from error

    def _tensors(self) -> dict[str, Tensor]:
        names = ("times", "marks", "mask", "t_start", "t_end")
        found = {name: getattr(self.events, name) for name in names} | {"split": self.split}
        return {name: t for name, t in found.items() if t is not None}


def _drawn(events: Events, name: str) -> Int64[Tensor, " b"]:
    """A tenth of the sequences each to validate and to test on, the same for as many sequences."""
    count = len(events)
    if count < LEAST:
        raise ValueError(
            f"{name} has {count} sequences, but {LEAST} are the fewest that can be split: split them by time "
            "(--split time), or name the column that says which sequence an event is of (--user NAME)"
        )
    order = torch.randperm(count, generator=torch.Generator().manual_seed(0))
    split, tenth = torch.zeros(count, dtype=torch.int64), max(count // 10, 1)
    split[order[:tenth]], split[order[tenth : 2 * tenth]] = 1, 2
    return split


def _between(events: Events, start: float, stop: float) -> Events:
    """The events at or after one moment and before another, each observed from the event before its first."""
    times, marks, starts, ends = [], [], [], []
    for k, count in enumerate(events.lengths.tolist()):
        row = events.times[k, :count]
        first, last = (int((row < cut).sum()) for cut in (start, stop))
        if first == last:
            continue
        times.append(row[first:last])
        marks.append(events.marks[k, first:last])
        starts.append(float(row[first - 1] if first else events.t_start[k]))
        ends.append(0.0 if events.t_end is None else min(stop, float(events.t_end[k])))
    return Events.from_arrival_times(
        times, marks=marks, t_start=starts, t_end=None if events.t_end is None else ends, unit=events.unit,
        num_marks=events.num_marks,
    )  # fmt: skip


def _until(events: Events, end: str | None, where: str) -> Events:
    """The same events, observed until `end`."""
    if end is None:
        return events
    last = float(events.times[events.mask].max())
    at = last if end == "last" else moment(end, events.unit if events.unit in SECONDS else "second", where)
    if at < last:
        raise ValueError(f"{where} is {end}, but there are events up to {last}: it ended after those")
    return replace(events, t_end=torch.full_like(events.t_start, at))


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


def _read_pack(path: Path, unit: str | None, end: str | None, by: By) -> EventLog:
    """A pack has splits and a unit of its own."""
    sequences, split, own = read_event_pack(path)
    if unit is not None and unit != own:
        raise ValueError(f"{path} says that its unit is {own!r}, not {unit!r}")
    events = _until(sequences.events(own), end, f"--end of {path}")
    if by == "time":
        return EventLog.of(events, by="time", name=path.name)
    labels = [str(i) for i in range(events.num_marks)]
    return _checked(EventLog(events, torch.as_tensor(split).long(), labels, path.name))


def _checked(log: EventLog) -> EventLog:
    for what, part in zip(EVENT_SPLITS, log.parts(), strict=True):
        if not bool(part.scored.any()):
            raise ValueError(
                f"{log.name} leaves no sequence of two events for {what}: give more events, or split them "
                f"by {'sequences' if log.split is None else 'time'}"
            )
    return log

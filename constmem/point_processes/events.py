"""Event sequences: when things happened and of what kind, padded into one batch."""

from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Float64, Int, Int64
from torch import Tensor

from constmem.core import checks
from constmem.point_processes.padding import (
    UNKNOWN,
    Bounds,
    Sequences,
    bounds_of,
    check_events,
    each_of,
    exact,
    marks_of,
    one_sequence,
    pad,
    require_kept,
)

PADDED = ("times", "marks", "mask")


@dataclass(frozen=True, eq=False, repr=False)
class Events:
    """A batch of event sequences, the real events of each first and padding behind them.

    Attributes:
        times: absolute, in `unit`, never decreasing along a sequence; padding repeats the last real time.
        marks: the kind of each event, 0 to num_marks - 1; -1 where unknown and in padding.
        mask: True = real.
        t_start: when the observation of each sequence began.
        t_end: when it ended, or None where unknown; nothing happened between the last event and t_end.
        unit: of all times, such as "second" or "hour".
        num_marks: how many kinds there are.

    Example:
        Gaps and arrival times say the same.

        >>> events = Events.from_arrival_times([[3.0, 4.0, 6.0], [5.0, 5.5]], unit="hour")
        >>> events.gaps.tolist()
        [[0.0, 1.0, 2.0], [0.0, 0.5, 0.0]]
        >>> again = Events.from_gaps([[0.0, 1.0, 2.0], [0.0, 0.5]], t_start=[3.0, 5.0], unit="hour")
        >>> torch.equal(again.times, events.times)
        True
    """

    times: Float64[Tensor, "b t"]
    marks: Int64[Tensor, "b t"]
    mask: Bool[Tensor, "b t"]
    t_start: Float64[Tensor, " b"]
    t_end: Float64[Tensor, " b"] | None
    unit: str
    num_marks: int

    def __post_init__(self) -> None:
        check_events(
            self.times, self.marks, self.mask, self.t_start, self.t_end, unit=self.unit,
            num_marks=self.num_marks,
        )  # fmt: skip

    @staticmethod
    def from_arrival_times(
        times: Sequences,
        *,
        marks: Sequences | None = None,
        t_start: Bounds = None,
        t_end: Bounds = None,
        unit: str,
        num_marks: int | None = None,
    ) -> "Events":
        """Events from the times of each sequence.

        Args:
            times: one sequence of never decreasing numbers for each sequence of events. One without
                events needs a t_start. Whole numbers that float64 would round, such
                as nanoseconds since 1970, are refused: count them from the start of their sequence.
            marks: as many whole numbers each; -1 where unknown. Where none are given, all events are of
                the one kind there is, or unknown if num_marks says that there are more.
            t_start: one number, or one a sequence. By default it begins with its first event, whose
                gap is then 0: it is given, and events from the second on are predicted.
            t_end: one number, or one a sequence; None: unknown.
            unit: of all times.
            num_marks: how many kinds there are; needed beside marks.
        """
        rows = [exact(f"times[{k}]", one_sequence("times", k, row)) for k, row in each_of("times", times)]
        if t_start is None:
            for k, row in enumerate(rows):
                if not len(row):
                    raise ValueError(
                        f"sequence {k} has no events, so it is not known when its observation began: "
                        "give t_start=, or leave the sequence out"
                    )
            t_start = torch.stack([row[0] for row in rows]) if rows else []
        starts = exact("t_start", bounds_of("t_start", t_start, len(rows)))
        kinds, num_marks = marks_of(marks, rows, num_marks)
        ends = None if t_end is None else exact("t_end", bounds_of("t_end", t_end, len(rows)))
        padded, mask = pad(rows, starts.tolist(), torch.float64)
        return Events(padded, kinds, mask, starts, ends, unit, num_marks)

    @staticmethod
    def from_gaps(
        gaps: Sequences,
        *,
        marks: Sequences | None = None,
        t_start: Bounds = 0,
        t_end: Bounds = None,
        unit: str,
        num_marks: int | None = None,
    ) -> "Events":
        """Events from the time that passed before each: times = t_start + cumsum(gaps).

        A sequence's first gap is that from t_start; the rest is as in `from_arrival_times`.
        """
        rows = [one_sequence("gaps", k, row) for k, row in each_of("gaps", gaps)]
        starts = bounds_of("t_start", 0 if t_start is None else t_start, len(rows))
        for k, row in enumerate(rows):
            if (row < 0).any():
                i = int((row < 0).nonzero()[0])
                raise ValueError(
                    f"gaps[{k}][{i}] is {row[i].item()}: the time between two events cannot be negative; "
                    "sort each sequence by time before taking differences"
                )
        if starts.is_floating_point():
            rows = [exact(f"gaps[{k}]", row) for k, row in enumerate(rows)]
        times = [start + row.cumsum(0) for start, row in zip(starts, rows, strict=True)]
        for k, (row, at) in enumerate(zip(rows, times, strict=True)):
            require_kept(f"gaps[{k}]", row, starts[k], at)
        return Events.from_arrival_times(
            times, marks=marks, t_start=starts, t_end=t_end, unit=unit, num_marks=num_marks
        )

    @staticmethod
    def cat(parts: Sequence["Events"]) -> "Events":
        """The sequences of several batches as one; all in one unit, with the same marks."""
        if not parts:
            raise ValueError("there are no events to put together: give at least one batch")
        first, width = parts[0], max(part.times.shape[1] for part in parts)
        for what in ("unit", "num_marks"):
            found = [getattr(part, what) for part in parts]
            if len(set(found)) > 1:
                raise ValueError(
                    f"the batches differ in {what} ({', '.join(map(repr, dict.fromkeys(found)))}): events "
                    "put together need the same; convert them first"
                )
        if len({part.t_end is None for part in parts}) > 1:
            raise ValueError("some batches have a t_end and some have none: give all of them one, or none")
        wide = [part._widened(width) for part in parts]
        ends = [part.t_end for part in wide if part.t_end is not None]
        joined = {name: torch.cat([getattr(part, name) for part in wide]) for name in (*PADDED, "t_start")}
        return first._with(**joined, t_end=torch.cat(ends) if ends else None)

    def __len__(self) -> int:
        """How many sequences there are."""
        return len(self.times)

    def __repr__(self) -> str:
        size = f"{len(self):,} sequences, {self.num_events:,} events, {self.num_marks:,} marks"
        return f"Events({size}, times in {self.unit!r}, on {self.device})"

    @property
    def lengths(self) -> Int[Tensor, " b"]:
        """How many events each sequence has."""
        return self.mask.sum(-1)

    @property
    def num_events(self) -> int:
        """How many events there are in all."""
        return int(self.mask.sum())

    @property
    def gaps(self) -> Float64[Tensor, "b t"]:
        """The time since the event before, or since t_start for the first; 0 in padding."""
        before = torch.cat([self.t_start[:, None], self.times], 1)[:, :-1]
        return self.times - before

    @property
    def scored(self) -> Bool[Tensor, "b t"]:
        """The events that likelihoods and errors are taken over: the second of each sequence to its last."""
        first = torch.arange(self.times.shape[1], device=self.times.device) == 0
        return self.mask & ~first

    @property
    def device(self) -> torch.device:
        """Where all tensors are."""
        return self.times.device

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> "Events":
        """The same events on another device."""
        parts = ((name, part) for name, part in vars(self).items() if isinstance(part, Tensor))
        return self._with(**{name: part.to(device, non_blocking=non_blocking) for name, part in parts})

    def select(self, index: Int[Tensor, " k"] | Bool[Tensor, " b"] | slice | Sequence[int]) -> "Events":
        """Some of the sequences, by numbers, a boolean mask or a slice; padding stays (see `trim`)."""
        if not isinstance(index, Tensor | slice):
            index = torch.as_tensor(list(index), dtype=torch.long, device=self.device)
        parts = ((name, part) for name, part in vars(self).items() if isinstance(part, Tensor))
        return self._with(**{name: part[index] for name, part in parts})

    def trim(self, width: int | None = None) -> "Events":
        """The same events without the columns that hold nothing but padding.

        Args:
            width: how many columns to keep, of which the caller knows that they hold all events: then a
                device need not be waited for.
        """
        width = (int(self.lengths.max()) if len(self) else 0) if width is None else width
        return self._with(**{name: getattr(self, name)[:, :width] for name in PADDED})

    def window(self, start: int, stop: int) -> "Events":
        """The events from place start to before stop, observed from the event before the first.

        Observation ends at t_end where nothing follows; else its end is unknown.
        """
        parts = {name: getattr(self, name)[:, start:stop] for name in PADDED}
        t_start = self.times[:, start - 1] if start else self.t_start
        t_end = self.t_end if stop >= self.times.shape[1] else None
        return self._with(**parts, t_start=t_start, t_end=t_end)

    def _widened(self, width: int) -> "Events":
        """The same events with padding up to `width` columns."""
        b, t = self.times.shape
        last = self.times[:, -1] if t else self.t_start
        more = (b, width - t)
        return self._with(
            times=torch.cat([self.times, last[:, None].expand(more)], 1),
            marks=torch.cat([self.marks, self.marks.new_full(more, UNKNOWN)], 1),
            mask=torch.cat([self.mask, self.mask.new_zeros(more)], 1),
        )

    def _with(self, **parts: Any) -> "Events":
        """These events with other parts, made of checked ones: to check again would wait for the device."""
        events = copy(self)
        vars(events).update(parts)
        return events


@dataclass(frozen=True, eq=False)
class EventLogProb:
    """Log-probabilities of events, each given all events before it in its sequence.

    Attributes:
        time: log density of the gap before each event, per `unit`; 0 in padding.
        mark: log-probability of its mark, given that gap too; 0 where the mark is unknown and in padding.
        survival: log-probability of nothing between the last event and t_end; None without a t_end.
        scored: the events to take sums over (`Events.scored`).
    """

    time: Float[Tensor, "b t"]
    mark: Float[Tensor, "b t"]
    survival: Float[Tensor, " b"] | None
    scored: Bool[Tensor, "b t"]

    @property
    def mean(self) -> Float[Tensor, ""]:
        """Time and mark together, the mean over all scored events; its negative is the loss."""
        total = torch.where(self.scored, self.time + self.mark, 0.0).sum()
        return total / self.scored.sum().clamp_min(1)


def bucketed(events: Events, batch: int, generator: torch.Generator) -> Iterator[Events]:
    """All sequences once, in random batches of similar lengths, each trimmed.

    Sequences are shuffled, pooled by 16 batches, sorted by length within a pool and cut into
    batches, which come in random order: little padding, and no batch is the same in two epochs.
    """
    checks.positive("batch", batch)
    lengths = events.lengths.cpu()
    order = torch.randperm(len(events), generator=generator, device=generator.device).cpu()
    batches: list[Tensor] = []
    for pool in order.split(16 * batch):
        batches += pool[lengths[pool].argsort(stable=True)].split(batch)
    for i in torch.randperm(len(batches), generator=generator, device=generator.device).tolist():
        index = batches[i]
        yield events.select(index.to(events.device)).trim(int(lengths[index].max()))

"""What event models remember: a clock (start, last event) and a memory, which merges where it can."""

from dataclasses import dataclass, replace
from typing import Any, ClassVar, TypeVar

import torch
from jaxtyping import Float64, Int64
from torch import Tensor

from constmem.core import checks
from constmem.core.monoid import Monoid, State
from constmem.core.state import AttentionState
from constmem.point_processes.chunks import Chunk, Recent, newest, without
from constmem.point_processes.padding import NOTHING

_MEMORY = "memory."  # before the names of what a memory holds, in files
CLOCK = {"start": torch.float64, "last_time": torch.float64, "last_gap": torch.float64}
CLOCK |= {"last_mark": torch.int64, "count": torch.int64}
RECENT = ("recent_times", "recent_gaps", "recent_marks")  # of the events before the last, oldest first
S = TypeVar("S", bound="EventState")
M = TypeVar("M", bound="EventMonoid")


@dataclass(frozen=True, eq=False)
class EventState(State):
    """All that a model remembers of a batch of event streams; immutable.

    Attributes:
        start: when each observation began; times are counted from there.
        last_time, last_gap: of the last event; `start` and 0 before any.
        last_mark: -1 for an unknown mark, -2 before any event.
        count: how many events were seen.
        memory: what else the model remembers, the batch in front of every tensor.
        fingerprint: which weights made it; None when unknown (or still being trained).
    """

    KIND: ClassVar[str] = "constmem.events"
    AXES: ClassVar[str] = "(features,)"
    LEAD: ClassVar[str] = "start"
    NEEDED: ClassVar[dict[str, int]] = {"known": 2}  # the axes of what is in every memory, by name
    MORE: ClassVar[dict[str, int]] = {}  # of what some memories hold too, all of it or nothing

    start: Float64[Tensor, " b"]
    last_time: Float64[Tensor, " b"]
    last_gap: Float64[Tensor, " b"]
    last_mark: Int64[Tensor, " b"]
    count: Int64[Tensor, " b"]
    memory: dict[str, Tensor]
    fingerprint: str | None = None

    def moved(self: S, chunk: Chunk, memory: dict[str, Tensor]) -> S:
        """The state with a new memory, and the clock at the last real event of a chunk."""
        return type(self)(
            self.start,
            chunk.last_of(chunk.times, self.last_time),
            chunk.last_of(chunk.gaps, self.last_gap),
            chunk.last_of(chunk.marks, self.last_mark),
            self.count + (chunk.times.shape[1] if chunk.mask is None else chunk.mask.sum(-1)),
            memory,
            self.fingerprint,
        )

    def merge(self: S, later: S) -> S:
        """Refused: a model that remembers so is a `Transition`."""
        raise NotImplementedError(
            "cannot merge states of a model whose every event changes what the one before it left (a "
            "Transition, as the GRU is): a later part of a stream has no state of its own; update the state "
            "with its events instead"
        )

    @property
    def layout(self) -> tuple[int, ...]:
        """The width of what is known."""
        return self.memory["known"].shape[1:]

    def repeat(self: S, times: int) -> S:
        """Every stream `times` times, side by side: several futures of each can be sampled at once."""
        return self._mapped(lambda t: t.repeat_interleave(times, 0))

    def tensors(self) -> dict[str, Tensor]:
        """All it is made of, by name."""
        clock = {name: getattr(self, name) for name in CLOCK}
        return clock | {_MEMORY + name: t for name, t in self.memory.items()}

    @classmethod
    def _made(cls: type[S], tensors: dict[str, Tensor], fingerprint: str | None) -> S:
        memory = {name.removeprefix(_MEMORY): t for name, t in tensors.items() if name not in CLOCK}
        return cls(**{name: tensors[name] for name in CLOCK}, memory=memory, fingerprint=fingerprint)

    @classmethod
    def _require(cls, tensors: dict[str, Tensor]) -> None:
        more = cls.MORE if any(_MEMORY + name in tensors for name in cls.MORE) else {}
        axes = {_MEMORY + name: axes for name, axes in (cls.NEEDED | more).items()}
        checks.named(tensors, axes.keys() | CLOCK.keys())
        for name, t in tensors.items():
            small = name == "last_mark" and bool((t < NOTHING).any())
            if small or t.ndim != axes.get(name, 1) or t.dtype != CLOCK.get(name, t.dtype):
                raise ValueError(f"holds a {name} that does not fit: {tuple(t.shape)} {t.dtype}")


@dataclass(frozen=True, eq=False)
class EventMonoid(EventState, Monoid):
    """A state that merges with those of later parts of its streams; this one has no memory but the clock.

    All parts count time from one start: see `PointProcess.observe`.
    """

    AXES: ClassVar[str] = "()"
    NEEDED: ClassVar[dict[str, int]] = {}

    @property
    def layout(self) -> tuple[int, ...]:
        """Nothing: all such states are alike."""
        return ()

    def merge(self: M, later: M) -> M:
        """The state of both parts of the streams; associative, with `PointProcess.empty` its identity."""
        self._require_parts(later, "merge")
        after = (later.last_gap == 0) | (
            self.last_gap > 0
        )  # of simultaneous ones, unless it is the other way
        after = (later.last_time > self.last_time) | ((later.last_time == self.last_time) & after)
        theirs = (later.count > 0) & ((self.count == 0) | after)
        theirs = theirs | ((self.count == 0) & (later.last_time > self.last_time))
        clock: dict[str, Any] = {
            name: torch.where(theirs, getattr(later, name), getattr(self, name))
            for name in ("last_time", "last_gap", "last_mark")
        }
        return replace(
            self, **clock, count=self.count + later.count, memory=self._merged(later),
            fingerprint=self.signature_with(later),
        )  # fmt: skip

    def _merged(self: M, later: M) -> dict[str, Tensor]:  # noqa: ARG002
        """The memory of both parts."""
        return {}

    def _require_parts(self, other: "EventState", verb: str) -> None:
        checks.state(verb, self, other)
        if self.batch != other.batch or self.layout != other.layout:
            raise ValueError(
                f"cannot {verb} states of {self.batch} and {other.batch} streams, whose {self.AXES} is "
                f"{self.layout} and {other.layout}: take those of one model and of the same streams, in order"
            )
        checks.alike(verb, self.start, other.start, (self.fingerprint, other.fingerprint))
        if not torch.equal(self.start, other.start):
            raise ValueError(
                f"cannot {verb} states that count time from different starts ({self.start.tolist()} and "
                f"{other.start.tolist()}): give observe the start of the whole stream, start="
            )


@dataclass(frozen=True, eq=False)
class ConstantState(EventMonoid):
    """A state whose memory is an `AttentionState`: as large after a million events as after one.

    Parts of a stream merge in any order, and an earlier part can be removed.
    """

    AXES: ClassVar[str] = "(depth, heads, slots, channels, last events)"
    NEEDED: ClassVar[dict[str, int]] = {"value": 5, "lse": 4}
    MORE: ClassVar[dict[str, int]] = dict.fromkeys(RECENT, 2)

    @classmethod
    def _require(cls, tensors: dict[str, Tensor]) -> None:
        super()._require(tensors)
        value, lse = (tensors[_MEMORY + name] for name in ("value", "lse"))
        recent = {tensors[_MEMORY + name].shape for name in RECENT if _MEMORY + name in tensors}
        if value.shape[:-1] != lse.shape or value.dtype != lse.dtype or len(recent) > 1:
            raise ValueError("holds a value and an lse, or last events, that do not fit each other")

    @property
    def layout(self) -> tuple[int, ...]:
        """The shape of the attention's value but for the batch, and how many events are remembered."""
        recent = self.memory[RECENT[0]].shape[1] if RECENT[0] in self.memory else 0
        return *self.memory["value"].shape[1:], recent + 1

    @property
    def attention(self) -> AttentionState:
        """The memory and its algebra."""
        return AttentionState(self.memory["value"], self.memory["lse"], self.count, self.fingerprint)

    @property
    def last(self) -> tuple[Float64[Tensor, "b k"], Int64[Tensor, "b k"]]:
        """Gaps and marks of the last events, oldest first; marks of -2 where there were fewer."""
        return self._remembered[1:]

    @property
    def _remembered(self) -> Recent:
        """Times, gaps and marks of the last events."""
        times, gaps, marks = (
            torch.cat([self.memory[name], last[:, None]], 1) if name in self.memory else last[:, None]
            for name, last in zip(RECENT, (self.last_time, self.last_gap, self.last_mark), strict=True)
        )
        return times, gaps, marks

    def recent_after(self, chunk: Chunk) -> dict[str, Tensor]:
        """What is remembered of single events, once those of a chunk are seen."""
        if RECENT[0] not in self.memory:
            return {}
        if chunk.mask is None and chunk.times.shape[1] == 1:  # the oldest goes, the last moves up
            own = zip(RECENT, (self.last_time, self.last_gap, self.last_mark), strict=True)
            return {name: torch.cat([self.memory[name][:, 1:], last[:, None]], 1) for name, last in own}
        pairs = zip(self._remembered, chunk[:3], strict=True)
        return _recent(*(chunk.latest(each, before) for before, each in pairs))

    def _merged(self, later: "ConstantState") -> dict[str, Tensor]:
        joined = self.attention.merge(later.attention)
        memory = {"value": joined.value, "lse": joined.lse}
        if RECENT[0] in self.memory:
            memory |= _recent(*newest(self._remembered, later._remembered))
        return memory

    def remove(self, other: "ConstantState", *, max_share: float = 0.999) -> "ConstantState":
        """The state without an earlier part of the streams: undoes `merge`, the last event stays."""
        self._require_parts(other, "remove")
        held = ((other.count > 0) & (other.last_time >= self.last_time)).nonzero()
        if len(held):
            k = int(held[0])
            raise ValueError(
                f"the part to remove from stream {k} holds its last event, at {self.last_time[k].item()}: "
                "the one before it is not kept: remove earlier events, or condition again on those to keep"
            )
        left = self.attention.remove(other.attention, max_share=max_share)
        memory = {"value": left.value, "lse": left.lse}
        if RECENT[0] in self.memory:
            pairs = zip(self._remembered, other._remembered, strict=True)
            same = [mine[:, :, None] == theirs[:, None, :] for mine, theirs in pairs]
            gone = (same[0] & same[1] & same[2]).any(-1)  # the part that is removed remembers them too
            memory |= _recent(*newest(without(self._remembered, gone)))
        return replace(self, count=left.count, memory=memory)


@dataclass(frozen=True, eq=False)
class StoredEvents(EventMonoid):
    """A state that keeps every event, with its keys and values in all layers: it grows with the stream.

    Merging concatenates the events. Keys and values of the later part were computed without the earlier one:
    they are computed again when the merged state is first used.
    """

    AXES: ClassVar[str] = "(layers, 2, width)"
    NEEDED: ClassVar[dict[str, int]] = {"cache": 5, "mask": 2, "known": 2}
    MORE: ClassVar[dict[str, int]] = {"times": 2, "marks": 2}  # which files of version 0.1 do not hold

    @classmethod
    def _require(cls, tensors: dict[str, Tensor]) -> None:
        super()._require(tensors)
        columns = {
            t.shape[1] for name, t in tensors.items() if name[len(_MEMORY) :] in ("times", "marks", "mask")
        }
        if len(columns) != 1 or tensors[_MEMORY + "cache"].shape[1] > columns.pop():
            raise ValueError("holds events, a mask and a cache that do not fit each other")

    @property
    def layout(self) -> tuple[int, ...]:
        """The shape of an event's keys and values."""
        return self.memory["cache"].shape[2:]

    @property
    def cached(self) -> int:
        """How many columns of events have their keys and values."""
        return self.memory["cache"].shape[1]

    def _merged(self, later: "StoredEvents") -> dict[str, Tensor]:
        mine, theirs = self.memory, later.memory
        if "times" not in mine or "times" not in theirs:
            raise ValueError(
                "cannot merge states of which one was saved by an earlier version, without its events: "
                "condition again on the events themselves"
            )
        if not mine["mask"].shape[1] or not theirs["mask"].shape[1]:
            return mine if mine["mask"].shape[1] else theirs
        first = torch.where(theirs["mask"], theirs["times"], torch.inf).amin(1)
        early = (first < self.last_time).nonzero()
        if len(early):
            k = int(early[0])
            raise ValueError(
                f"stream {k} of the later part begins at {first[k].item()}, before the last event of the "
                f"earlier one, at {self.last_time[k].item()}: merge in order of time, earlier.merge(later)"
            )
        done, names = self.cached, ("times", "marks", "mask")
        fresh = {name: torch.cat([mine[name][:, done:], theirs[name]], 1) for name in names}
        order = (~fresh["mask"]).long().argsort(dim=1, stable=True)  # real events first
        joined = {name: torch.cat([mine[name][:, :done], fresh[name].gather(1, order)], 1) for name in names}
        return mine | joined


def _recent(*last: Tensor) -> dict[str, Tensor]:
    """The memory of the last events, but for the very last, which the clock knows."""
    return {name: each[:, :-1].clone() for name, each in zip(RECENT, last, strict=True)}

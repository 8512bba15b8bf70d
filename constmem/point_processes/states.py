"""What event models remember: a clock (start, last event) and a memory, which merges where it can."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, TypeVar

import torch
from jaxtyping import Float64, Int64
from torch import Tensor

from constmem.core import checks
from constmem.core.files import read_tensors, write_tensors
from constmem.core.state import AttentionState
from constmem.point_processes.chunks import Chunk
from constmem.point_processes.heads import MarkEmbedding

CLOCK = {"start": torch.float64, "last_time": torch.float64, "last_gap": torch.float64}
CLOCK |= {"last_mark": torch.int64, "count": torch.int64}
RECENT = ("recent_times", "recent_gaps", "recent_marks")  # of the events before the last, oldest first
Recent = tuple[Float64[Tensor, "b k"], Float64[Tensor, "b k"], Int64[Tensor, "b k"]]
S = TypeVar("S", bound="EventState")
M = TypeVar("M", bound="EventMonoid")


@dataclass(frozen=True, eq=False)
class EventState:
    """All that a model remembers of a batch of event streams; immutable.

    Attributes:
        start: when each watch began; times are counted from there.
        last_time, last_gap: of the last event; `start` and 0 before any.
        last_mark: -1 for an unknown mark, -2 before any event.
        count: how many events were seen.
        memory: what else the model remembers, the batch in front of every tensor.
        fingerprint: which weights made it; None when unknown (or still being trained).
    """

    KIND: ClassVar[str] = "constmem.events"
    VERSION: ClassVar[int] = 1
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
        return replace(
            self,
            last_time=chunk.last_of(chunk.times, self.last_time),
            last_gap=chunk.last_of(chunk.gaps, self.last_gap),
            last_mark=chunk.last_of(chunk.marks, self.last_mark),
            count=self.count + (chunk.times.shape[1] if chunk.mask is None else chunk.mask.sum(-1)),
            memory=memory,
        )

    def merge(self: S, later: S) -> S:
        """Refused: a model that remembers so is a `Transition`."""
        raise NotImplementedError(
            "cannot merge states of a model whose every event changes what the one before it left (a "
            "Transition, as the GRU is): a later part of a stream has no state of its own; update the state "
            "with its events instead"
        )

    @property
    def batch(self) -> int:
        """How many streams it is the state of."""
        return len(self.start)

    @property
    def device(self) -> torch.device:
        """Where its tensors are."""
        return self.start.device

    @property
    def nbytes(self) -> int:
        """Bytes remembered."""
        return sum(t.nbytes for t in self.tensors().values())

    def to(self: S, device: torch.device | str) -> S:
        """The same state elsewhere."""
        return self._mapped(lambda t: t.to(device))

    def detach(self: S) -> S:
        """The same state cut off from the graph that computed it."""
        return self._mapped(Tensor.detach)

    def repeat(self: S, times: int) -> S:
        """Every stream `times` times, side by side: several futures of each can be sampled at once."""
        return self._mapped(lambda t: t.repeat_interleave(times, 0))

    def select(self: S, index: Tensor | slice) -> S:
        """The states of some of the streams."""
        return self._mapped(lambda t: t[index])

    def signed(self: S, fingerprint: str) -> S:
        """The same state with the name of the weights that made it."""
        return replace(self, fingerprint=fingerprint)

    def tensors(self) -> dict[str, Tensor]:
        """All it is made of, by name."""
        clock = {name: getattr(self, name) for name in CLOCK}
        return clock | {f"memory.{name}": t for name, t in self.memory.items()}

    @classmethod
    def of_tensors(cls: type[S], tensors: Mapping[str, Tensor], fingerprint: str | None = None) -> S:
        """The state made of these, if they can be one."""
        clock = {name: tensors[name] for name in CLOCK if name in tensors}
        if missing := CLOCK.keys() - clock.keys():
            raise ValueError(f"lacks {sorted(missing)}")
        memory = {name.removeprefix("memory."): t for name, t in tensors.items() if name not in clock}
        if unknown := [name for name in tensors if name not in clock and not name.startswith("memory.")]:
            raise ValueError(f"holds {sorted(unknown)}, which no state has")
        b = clock["start"].shape[:1]
        axes = cls.NEEDED | (cls.MORE if cls.MORE.keys() & memory.keys() else {})
        if axes.keys() != memory.keys():
            raise ValueError(f"holds a memory of {sorted(memory)} where {sorted(axes)} is needed")
        for name, t in memory.items():
            if t.shape[:1] != b or t.ndim != axes[name]:
                raise ValueError(f"holds a {name} of shape {tuple(t.shape)} beside a batch of {tuple(b)}")
        for name, t in clock.items():
            if t.shape != b or not b or t.dtype != CLOCK[name]:
                raise ValueError(f"holds a {name} of shape {tuple(t.shape)}, {t.dtype}")
        if bad := checks.first_not_finite(tensors):
            raise ValueError(f"holds numbers that are not finite, in {bad}")
        if bool((clock["count"] < 0).any()) or bool((clock["last_mark"] < MarkEmbedding.NOTHING).any()):
            raise ValueError("holds a count or a mark that cannot be")
        return cls(**clock, memory=memory, fingerprint=fingerprint)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the state, atomically, as a safetensors file with a versioned header."""
        header = {"format": self.KIND, "version": str(self.VERSION), "fingerprint": self.fingerprint or ""}
        write_tensors(path, self.tensors(), header)

    @classmethod
    def load(cls: type[S], path: str | os.PathLike[str], device: torch.device | str | None = None) -> S:
        """Read a state that `save` wrote."""
        tensors, header = read_tensors(path, kind=cls.KIND, version=cls.VERSION)
        try:
            state = cls.of_tensors(tensors, header["fingerprint"] or None)
        except ValueError as error:
            raise ValueError(
                f"{path} is damaged or of another model than a {cls.__name__}: it {error}; "
                "load it by the state_type of its own model, or save the state again"
            ) from error
        return state if device is None else state.to(device)

    def _mapped(self: S, function: Callable[[Tensor], Tensor]) -> S:
        clock: dict[str, Any] = {name: function(getattr(self, name)) for name in CLOCK}
        return replace(self, **clock, memory={name: function(t) for name, t in self.memory.items()})


@dataclass(frozen=True, eq=False)
class EventMonoid(EventState):
    """A state that merges with those of later parts of its streams; this one has no memory but the clock.

    All parts count time from one start: see `PointProcess.observe`.
    """

    NEEDED: ClassVar[dict[str, int]] = {}

    def merge(self: M, later: M) -> M:
        """The state of both parts of the streams; associative, with `PointProcess.empty` its identity."""
        self._require_parts(later, "merge")
        after = later.last_time > self.last_time
        at_once = (later.last_time == self.last_time) & (later.last_gap == 0) & (self.last_gap > 0)
        seen, both = (self.count > 0) & (later.count > 0), (self.count > 0) == (later.count > 0)
        theirs = torch.where(both, after | (at_once & seen), later.count > 0)
        clock: dict[str, Any] = {
            name: torch.where(theirs, getattr(later, name), getattr(self, name))
            for name in ("last_time", "last_gap", "last_mark")
        }
        return replace(
            self, **clock, count=self.count + later.count, memory=self._merged(later),
            fingerprint=self.fingerprint or later.fingerprint,
        )  # fmt: skip

    def _merged(self: M, later: M) -> dict[str, Tensor]:  # noqa: ARG002
        """The memory of both parts."""
        return {}

    def _require_parts(self, other: "EventState", verb: str) -> None:
        checks.state(verb, self, other)
        if self.batch != other.batch:
            raise ValueError(
                f"cannot {verb} states of {self.batch} and {other.batch} streams: take those of the "
                "same streams, in the same order (select takes some of them)"
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

    NEEDED: ClassVar[dict[str, int]] = {"value": 5, "lse": 4}
    MORE: ClassVar[dict[str, int]] = dict.fromkeys(RECENT, 2)

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
        pairs = zip(self._remembered, chunk[:3], strict=True)
        return _recent(*(chunk.latest(each, before) for before, each in pairs))

    def _merged(self, later: "ConstantState") -> dict[str, Tensor]:
        joined = self.attention.merge(later.attention)
        memory = {"value": joined.value, "lse": joined.lse}
        if RECENT[0] in self.memory:
            memory |= _recent(*_latest(later._remembered, self._remembered))
        return memory

    def remove(self, other: "ConstantState", *, max_share: float = 0.999) -> "ConstantState":
        """The state without an earlier part of the streams: undoes `merge`, the last event stays."""
        self._require_parts(other, "remove")
        held = (other.count > 0) & (other.last_time >= self.last_time)
        if bool(held.any()):
            k = int(held.nonzero()[0])
            raise ValueError(
                f"the part to remove from stream {k} holds its last event, at {self.last_time[k].item()}: "
                "nobody remembers the one before: remove earlier events, or condition again on those to keep"
            )
        left = self.attention.remove(other.attention, max_share=max_share)
        memory = {"value": left.value, "lse": left.lse}
        if RECENT[0] in self.memory:
            pairs = zip(self._remembered, other._remembered, strict=True)
            same = [mine[:, :, None] == theirs[:, None, :] for mine, theirs in pairs]
            gone = (same[0] & same[1] & same[2]).any(-1)  # whoever removes them remembers them too
            memory |= _recent(*_latest(_without(self._remembered, gone)))
        return replace(self, count=left.count, memory=memory)


def _recent(*last: Tensor) -> dict[str, Tensor]:
    """The memory of the last events, but for the very last, which the clock knows."""
    return {name: each[:, :-1].clone() for name, each in zip(RECENT, last, strict=True)}


def _latest(*parts: Recent) -> Recent:
    """The latest of the last events of some parts, as many as one has; of simultaneous ones without a gap
    between them those of the last part are the later."""
    times, gaps, marks = (torch.cat(each, 1) for each in zip(*parts, strict=True))
    nothing = marks == MarkEmbedding.NOTHING
    times, gaps, marks = _without((times, gaps, marks), nothing)
    order = (gaps == 0).long().argsort(dim=1, stable=True)
    by_time = torch.where(nothing, -torch.inf, times).gather(1, order).argsort(dim=1, stable=True)
    kept = order.gather(1, by_time)[:, times.shape[1] - parts[0][0].shape[1] :]
    return times.gather(1, kept), gaps.gather(1, kept), marks.gather(1, kept)


def _without(last: Recent, gone: Tensor) -> Recent:
    """Nothing in place of some of the events."""
    times, gaps, marks = last
    nothing = marks.masked_fill(gone, MarkEmbedding.NOTHING)
    return times.masked_fill(gone, 0.0), gaps.masked_fill(gone, 0.0), nothing

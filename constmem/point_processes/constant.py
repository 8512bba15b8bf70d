"""The state of a point process in constant memory: an `AttentionState`, and the last few events."""

from dataclasses import dataclass, replace

import torch
from jaxtyping import Float64, Int64
from torch import Tensor

from constmem.core.state import AttentionState
from constmem.point_processes.chunks import Chunk
from constmem.point_processes.heads import MarkEmbedding
from constmem.point_processes.states import EventState

RECENT = ("recent_times", "recent_gaps", "recent_marks")  # of the events before the last, oldest first
Recent = tuple[Float64[Tensor, "b k"], Float64[Tensor, "b k"], Int64[Tensor, "b k"]]


@dataclass(frozen=True, eq=False)
class ConstantState(EventState):
    """A state whose memory is an `AttentionState`: as large after a million events as after one.

    States of parts of one stream merge, if all count time from one start. A part that begins in the middle
    is conditioned on from `model.empty(start, last_time=...)`, which knows when the event before it was.
    """

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
        own = self.last_time, self.last_gap, self.last_mark
        times, gaps, marks = (
            torch.cat([*([self.memory[name]] if name in self.memory else []), last[:, None]], 1)
            for name, last in zip(RECENT, own, strict=True)
        )
        return times, gaps, marks

    def holding(self, attention: AttentionState) -> dict[str, Tensor]:
        """The memory that an attention state makes."""
        return {"value": attention.value, "lse": attention.lse}

    def recent_after(self, chunk: Chunk) -> dict[str, Tensor]:
        """What is remembered of single events, once those of a chunk are seen."""
        if RECENT[0] not in self.memory:
            return {}
        pairs = zip(chunk[:3], self._remembered, strict=True)
        return _recent(*(chunk.latest(each, before) for each, before in pairs))

    def merge(self, other: "ConstantState") -> "ConstantState":
        """The state of both parts of the streams; the last events are the latest of both."""
        self._require_one_clock(other, "merge")
        joined = self.attention.merge(other.attention)
        same, after = other.last_time == self.last_time, other.last_time > self.last_time
        after = after | (same & (other.last_gap == 0) & (self.last_gap > 0))  # the later of simultaneous ones
        theirs = (other.count > 0) & ((self.count == 0) | after)
        nothing = (self.count == 0) & (other.count == 0)
        theirs = torch.where(nothing, other.last_time > self.last_time, theirs)
        clock = {
            name: torch.where(theirs, getattr(other, name), getattr(self, name))
            for name in ("last_time", "last_gap", "last_mark")
        }
        memory = self.holding(joined)
        if RECENT[0] in self.memory:
            memory |= _recent(*_latest(other._remembered, self._remembered))
        return replace(self, **clock, count=joined.count, memory=memory, fingerprint=joined.fingerprint)

    def remove(self, other: "ConstantState", *, max_share: float = 0.999) -> "ConstantState":
        """The state without an earlier part of the streams: undoes `merge`, the last event stays."""
        self._require_one_clock(other, "remove")
        if bool(((other.count > 0) & (other.last_time >= self.last_time)).any()):
            k = int(((other.count > 0) & (other.last_time >= self.last_time)).nonzero()[0])
            raise ValueError(
                f"the part to remove from stream {k} holds its last event, at {self.last_time[k].item()}: "
                "nobody remembers the one before: remove earlier events, or condition again on those to keep"
            )
        left = self.attention.remove(other.attention, max_share=max_share)
        memory = self.holding(left)
        if RECENT[0] in self.memory:
            pairs = zip(self._remembered, other._remembered, strict=True)
            same = [mine[:, :, None] == theirs[:, None, :] for mine, theirs in pairs]
            gone = (same[0] & same[1] & same[2]).any(-1)  # whoever removes them remembers them too
            memory |= _recent(*_latest(_without(self._remembered, gone)))
        return replace(self, count=left.count, memory=memory)

    def _require_one_clock(self, other: "ConstantState", verb: str) -> None:
        if not isinstance(other, ConstantState):
            raise TypeError(f"cannot {verb} a ConstantState and a {type(other).__name__}")
        kept, theirs = (state._remembered[0].shape[1] for state in (self, other))
        if kept != theirs:
            raise ValueError(
                f"cannot {verb} states that remember {kept} and {theirs} last events: take those of one model"
            )
        if self.batch != other.batch:
            raise ValueError(
                f"cannot {verb} states of {self.batch} and {other.batch} streams: take those of the "
                "same streams, in the same order (select takes some of them)"
            )
        if not torch.equal(self.start, other.start):
            raise ValueError(
                f"cannot {verb} states that count time from different starts ({self.start.tolist()} and "
                f"{other.start.tolist()}): condition both with the t_start of the whole stream"
            )


def nothing_recent(batch: int, events: int, device: torch.device) -> dict[str, Tensor]:
    """The memory of no events, where `events` of them are to be remembered one by one."""
    if events <= 1:
        return {}
    zeros = torch.zeros(batch, events, dtype=torch.float64, device=device)  # `_recent` copies
    return _recent(zeros, zeros, torch.full_like(zeros, MarkEmbedding.NOTHING, dtype=torch.int64))


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

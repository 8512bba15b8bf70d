"""What event models remember: a clock (start, last event), and a memory of what came before."""

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from jaxtyping import Float64, Int64
from torch import Tensor

from constmem.files import read_tensors, write_tensors
from constmem.state import AttentionState

KIND, VERSION = "constmem.events", 1
CLOCK = ("start", "last_time", "last_gap", "last_mark", "count")
S = TypeVar("S", bound="EventState")


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

    start: Float64[Tensor, "b"]
    last_time: Float64[Tensor, "b"]
    last_gap: Float64[Tensor, "b"]
    last_mark: Int64[Tensor, "b"]
    count: Int64[Tensor, "b"]
    memory: dict[str, Tensor]
    fingerprint: str | None = None

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
        return sum(t.nbytes for t in self._tensors().values())

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

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the state, atomically, as a safetensors file with a versioned header."""
        header = {"format": KIND, "version": str(VERSION), "fingerprint": self.fingerprint or ""}
        write_tensors(path, self._tensors(), header)

    @classmethod
    def load(cls: type[S], path: str | os.PathLike[str], device: torch.device | str | None = None) -> S:
        """Read a state that `save` wrote."""
        tensors, header = read_tensors(path, kind=KIND, version=VERSION)
        missing = set(CLOCK) - tensors.keys()
        if missing:
            raise ValueError(f"{path} is damaged: it lacks {sorted(missing)}; save the state again")
        clock = {name: tensors.pop(name) for name in CLOCK}
        memory = {name.removeprefix("memory."): t for name, t in tensors.items()}
        state = cls(**clock, memory=memory, fingerprint=header["fingerprint"] or None)
        return state if device is None else state.to(device)

    def _tensors(self) -> dict[str, Tensor]:
        clock = {name: getattr(self, name) for name in CLOCK}
        return clock | {f"memory.{name}": t for name, t in self.memory.items()}

    def _mapped(self: S, function: Callable[[Tensor], Tensor]) -> S:
        clock: dict[str, Any] = {name: function(getattr(self, name)) for name in CLOCK}
        return replace(self, **clock, memory={name: function(t) for name, t in self.memory.items()})


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

    def holding(self, attention: AttentionState) -> dict[str, Tensor]:
        """The memory that an attention state makes."""
        return {"value": attention.value, "lse": attention.lse}

    def merge(self, other: "ConstantState") -> "ConstantState":
        """The state of both parts of the streams; the last event is that of the later part."""
        self._require_one_clock(other, "merge")
        joined = self.attention.merge(other.attention)
        theirs = (other.count > 0) & ((self.count == 0) | (other.last_time > self.last_time))
        nothing = (self.count == 0) & (other.count == 0)
        theirs = torch.where(nothing, other.last_time > self.last_time, theirs)
        clock = {
            name: torch.where(theirs, getattr(other, name), getattr(self, name))
            for name in ("last_time", "last_gap", "last_mark")
        }
        return replace(
            self, **clock, count=joined.count, memory=self.holding(joined), fingerprint=joined.fingerprint
        )

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
        return replace(self, count=left.count, memory=self.holding(left))

    def _require_one_clock(self, other: "ConstantState", verb: str) -> None:
        if not isinstance(other, ConstantState):
            raise TypeError(f"cannot {verb} a ConstantState and a {type(other).__name__}")
        if self.start.shape != other.start.shape or not torch.equal(self.start, other.start):
            raise ValueError(
                f"cannot {verb} states that count time from different starts ({self.start.tolist()} and "
                f"{other.start.tolist()}): condition both with the t_start of the whole stream"
            )

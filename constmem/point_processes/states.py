"""What event models remember: a clock (start, last event), and a memory of what came before."""

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from jaxtyping import Float64, Int64
from torch import Tensor

from constmem.core.files import read_tensors, write_tensors

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

    start: Float64[Tensor, " b"]
    last_time: Float64[Tensor, " b"]
    last_gap: Float64[Tensor, " b"]
    last_mark: Int64[Tensor, " b"]
    count: Int64[Tensor, " b"]
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

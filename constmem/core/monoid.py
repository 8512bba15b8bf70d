"""What models remember: the base of all states, and of those that merge."""

import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import ClassVar, TypeVar

import torch
from jaxtyping import Int
from torch import Tensor

from constmem.core import checks
from constmem.core.files import read_tensors, write_tensors

S = TypeVar("S", bound="State")
M = TypeVar("M", bound="Monoid")
NOTHING = ""  # the fingerprint of having seen nothing, which is the same for all weights


class State(ABC):
    """Tensors with the batch in front, signed by the weights they depend on; immutable.

    A kind of state says what it is made of (`tensors`), how (`_made`) and what is needed for it (`_require`);
    the rest is written once, here. Where states of parts add up to that of the whole it is a `Monoid`.
    """

    KIND: ClassVar[str]  # what its files say they hold
    VERSION: ClassVar[int] = 1  # of its files
    AXES: ClassVar[str]  # what the numbers of `layout` are
    LEAD: ClassVar[str] = "count"  # the tensor whose batch and device are the state's
    WEIGHTED: ClassVar[bool] = False  # whether points may count more or less, and so be forgotten by and by

    count: Int[Tensor, "..."]  # how many points each task has seen
    fingerprint: str | None  # which weights made it; NOTHING of nothing seen, None when nobody knows

    @property
    @abstractmethod
    def layout(self) -> tuple[int, ...]:
        """What states of one model have in common, whatever their batch and points."""

    @abstractmethod
    def tensors(self) -> dict[str, Tensor]:
        """All it is made of, by name."""

    @classmethod
    @abstractmethod
    def _made(cls: type[S], tensors: dict[str, Tensor], fingerprint: str | None) -> S:
        """The state made of tensors that are known to fit."""

    @classmethod
    @abstractmethod
    def _require(cls, tensors: dict[str, Tensor]) -> None:
        """A ValueError says what is missing, unknown or does not fit, as "it ..." goes on."""

    @classmethod
    def of_tensors(cls: type[S], tensors: dict[str, Tensor], fingerprint: str | None = None) -> S:
        """The state made of these, as they come from a file: shapes and numbers are checked."""
        cls._require(tensors)
        checks.remembered(tensors)
        return cls._made(tensors, fingerprint)

    @property
    def batch(self) -> int:
        """How many tasks it is the state of."""
        return int(getattr(self, self.LEAD).shape[0])

    @property
    def device(self) -> torch.device:
        """Where its tensors are."""
        where: torch.device = getattr(self, self.LEAD).device
        return where

    @property
    def nbytes(self) -> int:
        """Bytes remembered."""
        return sum(t.nbytes for t in self.tensors().values())

    def signed(self: S, fingerprint: str | None) -> S:
        """The same state with the name of the weights that made it."""
        return self._made(self.tensors(), fingerprint)

    def to(self: S, device: torch.device | str | None = None) -> S:
        """The same state elsewhere."""
        return self._mapped(lambda t: t.to(device))

    def detach(self: S) -> S:
        """The same state cut off from the graph that computed it."""
        return self._mapped(Tensor.detach)

    def select(self: S, index: Tensor | slice) -> S:
        """The states of some of the tasks."""
        return self._mapped(lambda t: t[index])

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the state, atomically, as a safetensors file with a versioned header."""
        header = {"format": self.KIND, "version": str(self.VERSION), "fingerprint": self.fingerprint or ""}
        write_tensors(path, self.tensors(), header)

    @classmethod
    def load(cls: type[S], path: str | os.PathLike[str], device: torch.device | str | None = None) -> S:
        """Read a state that `save` wrote."""
        tensors, header = read_tensors(path, kind=cls.KIND, version=cls.VERSION)
        try:
            state = cls.of_tensors(tensors, header.get("fingerprint") or None)
        except ValueError as error:
            raise ValueError(f"{path} is damaged: it {error}; save the state again") from error
        return state if device is None else state.to(device)

    def _mapped(self: S, function: Callable[[Tensor], Tensor]) -> S:
        """The same state with each of its tensors changed."""
        return self._made({name: function(t) for name, t in self.tensors().items()}, self.fingerprint)


class Monoid(State):
    """A state that merges with those of more points, in any order and grouping."""

    def signature_with(self, other: "Monoid") -> str | None:
        """The fingerprint of both together: known where both are, or where one has seen nothing."""
        if NOTHING in (self.fingerprint, other.fingerprint):
            return other.fingerprint if self.fingerprint == NOTHING else self.fingerprint
        return None if None in (self.fingerprint, other.fingerprint) else self.fingerprint

    @abstractmethod
    def merge(self: M, other: M) -> M:
        """The state of both sets of points together."""

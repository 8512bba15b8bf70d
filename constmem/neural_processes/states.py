"""What models remember: the contract of states."""

import os
from typing import ClassVar, Protocol, TypeVar, runtime_checkable

import torch
from jaxtyping import Int
from torch import Tensor

S = TypeVar("S", bound="State")


@runtime_checkable
class State(Protocol):
    """What any model remembers of the points it has seen; immutable, and a monoid under `merge`."""

    AXES: ClassVar[str]  # what the numbers of `layout` are
    KIND: ClassVar[str]  # what its files say they hold
    WEIGHTED: ClassVar[bool]  # whether points may count more or less, and so be forgotten by and by

    @property
    def layout(self) -> tuple[int, ...]:
        """What states of one model have in common, whatever their batch and points."""

    @property
    def batch(self) -> int:
        """How many tasks it is the state of."""

    @property
    def device(self) -> torch.device:
        """Where its tensors are."""

    @property
    def count(self) -> Int[Tensor, "..."]:
        """How many points each task has seen."""

    @property
    def nbytes(self) -> int:
        """Bytes remembered."""

    @property
    def fingerprint(self) -> str | None:
        """Which weights made it; None when unknown, or when it depends on none."""

    def signed(self: S, fingerprint: str) -> S:
        """The same state with the name of the weights it depends on."""

    def merge(self: S, other: S) -> S:
        """The state of both sets of points together."""

    def remove(self: S, other: S) -> S:
        """The state without points it has seen, where that can be known."""

    def to(self: S, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> S:
        """The same state elsewhere."""

    def detach(self: S) -> S:
        """The same state cut off from the graph that computed it."""

    def tensors(self) -> dict[str, Tensor]:
        """All it is made of, by name."""

    @staticmethod
    def of_tensors(tensors: dict[str, Tensor], fingerprint: str | None) -> "State":
        """The state made of these; a ValueError says what is missing or does not fit."""

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the state, atomically, as a safetensors file."""

    @staticmethod
    def load(path: str | os.PathLike[str], device: torch.device | str | None = None) -> "State":
        """Read a state that `save` wrote."""

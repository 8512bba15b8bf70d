"""`Product`: what slots read from points and moments of their features; each part merges by itself."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from jaxtyping import Int
from torch import Tensor

from constmem.core import checks
from constmem.core.moments import Moments
from constmem.core.monoid import Monoid
from constmem.core.state import AttentionState

SLOTS, MOMENTS = "slots.", "moments."  # how the tensors of each part are named in files


@dataclass(frozen=True, eq=False)
class Product(Monoid):
    """The state of a model that keeps two kinds of sums of the same points; immutable, mergeable.

    Count and fingerprint are those of the slots: both parts have seen the same points, by the same weights.

    Attributes:
        slots: what learned queries read from the points.
        moments: sums of products of their features and outputs.

    Example:
        >>> q, k, phi, y = (torch.randn(shape) for shape in ((1, 3, 4), (1, 1, 9, 4), (1, 9, 5), (1, 9, 2)))
        >>> def seen(i, j):
        ...     slots = AttentionState.observe(q, k[..., i:j, :], k[..., i:j, :])
        ...     return Product(slots, Moments.observe(phi[:, i:j], y[:, i:j]))
        >>> merged, whole = seen(0, 4).merge(seen(4, 9)), seen(0, 9)
        >>> torch.allclose(merged.moments.gram, whole.moments.gram), merged.nbytes == whole.nbytes
        (True, True)
    """

    AXES: ClassVar[str] = "(depth, heads, slots, channels, features, outputs)"
    KIND: ClassVar[str] = "constmem.product"
    WEIGHTED: ClassVar[bool] = True

    slots: AttentionState
    moments: Moments

    @property
    def count(self) -> Int[Tensor, "..."]:  # type: ignore[override]
        """How many points each task has seen."""
        return self.slots.count

    @property
    def fingerprint(self) -> str | None:  # type: ignore[override]
        """Which weights made it."""
        return self.slots.fingerprint

    @property
    def layout(self) -> tuple[int, ...]:
        """The shapes of a slots' value and of the cross moments, but for the batch."""
        return *self.slots.layout, *self.moments.cross.shape[1:]

    def merge(self, other: "Product") -> "Product":
        """The state of both sets of points together; associative and commutative."""
        checks.state("merge", self, other)
        return Product(self.slots.merge(other.slots), self.moments.merge(other.moments))

    def remove(self, other: "Product", *, max_share: float = 0.999) -> "Product":
        """The state without points it has seen: undoes `merge` with `other`, within what both parts allow."""
        checks.state("remove", self, other)
        slots = self.slots.remove(other.slots, max_share=max_share)
        return Product(slots, self.moments.remove(other.moments))

    def decay(self, log_weight: float | Tensor) -> "Product":
        """Multiply the weight of every point seen by exp(log_weight), at most 1: less is forgetting."""
        slots = self.slots.decay(log_weight)
        factor = torch.as_tensor(log_weight, dtype=torch.float64, device=self.device).exp()
        return Product(slots, self.moments.decay(factor))

    def signed(self, fingerprint: str | None) -> "Product":
        """The same state with the name of the weights that made it."""
        return replace(self, slots=self.slots.signed(fingerprint))

    def tensors(self) -> dict[str, Tensor]:
        """All it is made of, by name."""
        slots = {name: t for name, t in self.slots.tensors().items() if name != "count"}
        moments = {name: getattr(self.moments, name) for name in Moments.NAMES}
        parts = {SLOTS + k: t for k, t in slots.items()} | {MOMENTS + k: t for k, t in moments.items()}
        return {**parts, "count": self.count}

    @classmethod
    def _made(cls, tensors: dict[str, Tensor], fingerprint: str | None) -> "Product":
        slots, moments = _split(tensors)
        return cls(
            AttentionState._made(slots, fingerprint), Moments(*(moments[name] for name in Moments.NAMES))
        )

    @classmethod
    def _require(cls, tensors: dict[str, Tensor]) -> None:
        slots, moments = _split(tensors)
        AttentionState._require(slots)
        checks.named(moments, set(Moments.NAMES))
        Moments.require(moments)

    def _mapped(self, function: Callable[[Tensor], Tensor]) -> "Product":
        return Product(self.slots._mapped(function), self.moments._mapped(function))

    def to(self, device: torch.device | str | None = None) -> "Product":
        """The same state elsewhere."""
        where = self.device if device is None else device
        return Product(self.slots.to(where), self.moments.to(where))


def _split(tensors: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The tensors of the slots, and of the moments; those of neither are left with the slots."""
    moments = {k.removeprefix(MOMENTS): t for k, t in tensors.items() if k.startswith(MOMENTS)}
    slots = {k.removeprefix(SLOTS): t for k, t in tensors.items() if not k.startswith(MOMENTS)}
    return slots, moments

"""What models remember beside slots alone: moments with them, or the data itself; models that store data."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from constmem.core import checks
from constmem.core.costs import require_room
from constmem.core.fold import Chunk, joined
from constmem.core.moments import Moments
from constmem.core.monoid import NOTHING, Monoid
from constmem.core.state import AttentionState
from constmem.neural_processes.base import M, NeuralProcess

SLOTS, MOMENTS = "slots.", "moments."  # how the tensors of each part of a product are named in files


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

    def to(self, device: torch.device | str | None = None) -> "Product":
        """The same state elsewhere."""
        where = self.device if device is None else device
        return Product(self.slots.to(where), self.moments.to(where))


def _split(tensors: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The tensors of the slots, and of the moments; those of neither are left with the slots."""
    moments = {k.removeprefix(MOMENTS): t for k, t in tensors.items() if k.startswith(MOMENTS)}
    slots = {k.removeprefix(SLOTS): t for k, t in tensors.items() if not k.startswith(MOMENTS)}
    return slots, moments


@dataclass(frozen=True, eq=False)
class StoredPoints(Monoid):
    """All points seen, kept as they are: a state that grows with every one of them.

    It depends on no weights, so any model of the same channels that stores its data may read it; only
    points that a model has put on its own scales are for that model alone.

    Attributes:
        x, y: inputs and outputs; zeros where the mask leaves points out.
        mask: (b, n) True = real; None where all are.
        fingerprint: of the model on whose scales the points are; None where they are as they came.

    Example:
        >>> one = StoredPoints(torch.rand(1, 3, 2), torch.rand(1, 3, 1))
        >>> both = one.merge(StoredPoints(torch.rand(1, 2, 2), torch.rand(1, 2, 1)))
        >>> both.count.item(), both.nbytes - one.nbytes  # 2 points of 3 numbers of 4 bytes
        (5, 24)
    """

    AXES: ClassVar[str] = "(dim_x, dim_y)"
    KIND: ClassVar[str] = "constmem.points"
    LEAD: ClassVar[str] = "x"

    x: Float[Tensor, "b n x"]
    y: Float[Tensor, "b n y"]
    mask: Bool[Tensor, "b n"] | None = None
    fingerprint: str | None = None

    def merge(self, other: "StoredPoints") -> "StoredPoints":
        """All points of both; associative, and commutative as far as any prediction goes."""
        checks.state("merge", self, other)
        mine, theirs = ((s.batch, *s.layout, s.device) for s in (self, other))
        if mine != theirs:
            raise ValueError(
                f"cannot merge states that differ: (batch, dim_x, dim_y, device) is {mine} and {theirs}; "
                "both must be of one batch and on one device (state.to moves one)"
            )
        if 0 in (self.x.shape[1], other.x.shape[1]):
            return self if other.x.shape[1] == 0 else other
        if self.fingerprint != other.fingerprint:
            raise ValueError(
                f"cannot merge points on different scales (those of models {self.fingerprint} and "
                f"{other.fingerprint}, None for none): observe the data again with one model"
            )
        points = joined((self.x, self.y, self.mask), (other.x, other.y, other.mask))
        return StoredPoints(*points, self.fingerprint)

    def remove(self, other: "StoredPoints") -> "StoredPoints":
        """Not possible: which of the points to drop is not for a state to guess."""
        raise NotImplementedError(
            f"cannot remove {other.count.tolist()} points: this state is the stored data itself, in which "
            "points have no identity; condition again on those to keep"
        )

    def decay(self, log_weight: float | Tensor) -> "StoredPoints":
        """Not possible: stored points have no weights."""
        raise NotImplementedError(
            f"cannot decay by {log_weight}: this state is the stored data itself, whose points all count "
            "alike; keep a window of the last points instead"
        )

    def to(
        self, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> "StoredPoints":
        """The same points elsewhere, or in another precision."""
        mask = None if self.mask is None else self.mask.to(device)
        return StoredPoints(self.x.to(device, dtype), self.y.to(device, dtype), mask, self.fingerprint)

    @property
    def layout(self) -> tuple[int, ...]:
        """(dim_x, dim_y)."""
        return self.x.shape[-1], self.y.shape[-1]

    @property
    def count(self) -> Int[Tensor, " b"]:  # type: ignore[override]  # computed, where others hold it
        """How many points each task has seen."""
        if self.mask is not None:
            return self.mask.sum(-1)
        return torch.full(self.x.shape[:1], self.x.shape[1], device=self.x.device)

    def tensors(self) -> dict[str, Tensor]:
        """All it is made of, by name."""
        return {"x": self.x, "y": self.y} | ({} if self.mask is None else {"mask": self.mask})

    @classmethod
    def _made(cls, tensors: dict[str, Tensor], fingerprint: str | None) -> "StoredPoints":
        return cls(tensors["x"], tensors["y"], tensors.get("mask"), fingerprint)

    @classmethod
    def _require(cls, tensors: dict[str, Tensor]) -> None:
        checks.named(tensors, {"x", "y"}, {"mask"})
        x, y, mask = tensors["x"], tensors["y"], tensors.get("mask")
        fits = x.ndim == y.ndim == 3 and x.shape[:2] == y.shape[:2] and x.dtype == y.dtype
        if not fits or not x.is_floating_point():
            raise ValueError("holds an x and a y that do not fit each other")
        if mask is not None and (mask.dtype != torch.bool or mask.shape != x.shape[:2]):
            raise ValueError("holds a mask that does not fit its points")


class StoringProcess(NeuralProcess[StoredPoints, M]):
    """A neural process that remembers all its data, and works them through when it is asked."""

    state_type = StoredPoints

    def empty(self, batch: int = 1) -> StoredPoints:
        nothing = self._where.new_zeros
        return StoredPoints(nothing(batch, 0, self.dim_x), nothing(batch, 0, self.dim_y), None, NOTHING)

    def _observe(self, x: Tensor, y: Tensor, mask: Tensor | None, log_weight: Tensor | None) -> StoredPoints:
        if log_weight is not None:
            raise ValueError(
                f"{type(self).__name__} cannot weigh points: it stores them as they are, and all count "
                "alike; leave log_weight out, or take a model of constant memory"
            )
        return StoredPoints(x.clone(), y.clone(), None if mask is None else mask.clone())

    def _merged(self, chunks: Iterable[Chunk]) -> StoredPoints:
        parts = list(chunks)
        size = sum(t.numel() * t.element_size() for x, y, _ in parts for t in (x, y))  # compilers lack nbytes
        require_room(size, self.device, f"{type(self).__name__}, which stores a copy of all points,")
        return self._observe(*parts[0], None) if len(parts) == 1 else StoredPoints(*joined(*parts))

    def observing_parameters(self) -> list[nn.Parameter]:
        return []

    def _name_of_weights(self) -> str | None:
        """None unless the scales of the model made the points what they are."""
        return None if self.scales is None else self.fingerprint()

    def _require_own(self, state: StoredPoints) -> None:
        super()._require_own(state)
        if self.scales is not None and state.fingerprint is None and state.x.shape[1] > 0:
            raise ValueError(
                "these points are not on the scales of this model: they were stored by a model that has "
                "none; condition again with this model"
            )

    @property
    def layout(self) -> tuple[int, ...]:
        return self.dim_x, self.dim_y

    def _points(self, state: StoredPoints) -> Chunk:
        """The stored points in the precision of the model, unless working them through would not fit."""
        self.afford(state.x.shape[0], state.x.shape[1])
        return state.x.to(self.dtype), state.y.to(self.dtype), state.mask

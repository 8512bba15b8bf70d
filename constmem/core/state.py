"""`AttentionState` and its verbs: observe, merge, remove, empty, decay, scan (formulas: `algebra`)."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import isfinite
from typing import ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from constmem import kernels
from constmem.core import algebra, checks
from constmem.core.algebra import EMPTY, accumulator, bias_of, is_nothing, settle
from constmem.core.monoid import NOTHING, Monoid


@dataclass(frozen=True, eq=False)
class AttentionState(Monoid):
    """All that must be remembered of a set of points seen by fixed queries; immutable, mergeable.

    Attributes:
        value: (b, *h, s, c) what each slot reads from the points; 0 where nothing was seen.
        lse: (b, *h, s) natural logarithm of each slot's softmax normaliser; `EMPTY` for nothing.
        count: (b,) number of points seen.
        fingerprint: which weights made this state; `NOTHING` of nothing seen, None where unknown.
        low: what float32 could not hold of value and lse, on devices without float64.

    Example:
        >>> q, k, v = torch.randn(2, 5, 8), torch.randn(1, 2, 9, 8), torch.randn(1, 2, 9, 8)
        >>> whole = AttentionState.observe(q, k, v)
        >>> left = AttentionState.observe(q, k[..., :4, :], v[..., :4, :])
        >>> right = AttentionState.observe(q, k[..., 4:, :], v[..., 4:, :])
        >>> torch.allclose(left.merge(right).value, whole.value, atol=1e-6)
        True
    """

    AXES: ClassVar[str] = "(depth, heads, slots, channels)"
    KIND: ClassVar[str] = "constmem.state"
    LEAD: ClassVar[str] = "value"
    NAMES: ClassVar[tuple[str, ...]] = ("value", "lse", "value_low", "lse_low")
    WEIGHTED: ClassVar[bool] = True

    value: Float[Tensor, "b *h s c"]
    lse: Float[Tensor, "b *h s"]
    count: Int[Tensor, "..."]
    fingerprint: str | None = None
    low: tuple[Tensor, Tensor] | None = None

    @staticmethod
    def observe(
        q: Float[Tensor, "*h s c"], k: Float[Tensor, "b *h n c"], v: Float[Tensor, "b *h n c"],
        mask: Tensor | None = None, log_weight: Tensor | None = None,
    ) -> "AttentionState":  # fmt: skip
        """The state of exactly these points: softmax(q k' + log_weight) v, masked points left out.

        Args:
            q: the fixed queries, already scaled.
            k, v: keys and values of the points.
            mask: (b, n) True = real.
            log_weight: (b, n) natural logarithm of each point's weight.
        """
        checks.heads(q, k, v)
        if k.shape[-2] == 0:
            return AttentionState.empty((*k.shape[:-2], q.shape[-2]), v.shape[-1], device=k.device)
        b, heads, n = k.shape[0], k.shape[1:-2], k.shape[-2]
        bias = bias_of(mask, log_weight, k.dtype)
        k, v = (t.flatten(1, -3) for t in (k, v))
        value, lse = kernels.attend(q.flatten(0, -3), k, v, bias)
        if bias is not None:
            value, lse = settle(value, lse)
        count = torch.full((b,), n, device=k.device) if mask is None else mask.sum(-1)
        return AttentionState.of(
            value.reshape(b, *heads, *value.shape[-2:]), lse.reshape(b, *heads, q.shape[-2]), count
        )

    @staticmethod
    def of(value: Tensor, lse: Tensor, count: Tensor) -> "AttentionState":
        """A state from freshly computed tensors, in the device's accumulation precision."""
        dtype = accumulator(value.device)
        if value.stride(-2) == 0:  # one point: its value is every slot's, and is kept once
            value = value[..., :1, :].to(dtype, copy=True).expand(value.shape)
        state = AttentionState(value.to(dtype), lse.to(dtype), count)
        return state if dtype == torch.float64 else state.to(dtype=dtype)

    @staticmethod
    def empty(
        shape: tuple[int, ...], channels: int, *, device: torch.device | str | None = None
    ) -> "AttentionState":
        """The state of nothing: `shape` is that of the lse, (b, *h, s)."""
        dtype = accumulator(torch.empty(0, device=device).device)
        return AttentionState.of(
            torch.zeros(*shape, channels, dtype=dtype, device=device),
            torch.full(shape, EMPTY, dtype=dtype, device=device),
            torch.zeros(shape[0], dtype=torch.int64, device=device),
        ).signed(NOTHING)

    @staticmethod
    def scan(
        q: Float[Tensor, "*h s c"], k: Float[Tensor, "b *h n c"], v: Float[Tensor, "b *h n c"],
        mask: Tensor | None = None, log_weight: Tensor | None = None, *,
        drift: tuple[Tensor, Tensor] | None = None, initial: "AttentionState | None" = None,
        chunk: int = 32,
    ) -> "AttentionState":  # fmt: skip
        """The states of all prefixes: entry i of axis 1 has seen `initial` and points 0 to i.

        Nothing is subtracted from a running maximum of the future, so drifting scores do no harm.

        Args:
            drift: (rates, clock) of shapes (*h, s) and (b, n), the clock in float64: rates * clock is added
                to the scores. Inside a chunk only differences of the clock are met, however large it is.
        """
        checks.heads(q, k, v)
        b, heads, n = k.shape[0], k.shape[1:-2], k.shape[-2]
        if n == 0:
            raise ValueError("scan needs at least one point: there is no prefix of nothing")
        bias = bias_of(mask, log_weight, k.dtype)
        ones = torch.ones(b, n, dtype=torch.int64, device=k.device)
        counts = (ones if mask is None else mask.long()).cumsum(1)
        paired, carry = accumulator(k.device) == torch.float32, None
        if initial is not None:
            checks.goes_on(initial.value, (b, *heads, q.shape[-2], v.shape[-1]), k.device)
            paired = paired or initial.low is not None
            initial = initial.to(dtype=torch.float32 if paired else torch.float64)
            counts = counts + initial.count[:, None]
            carry = tuple(t.flatten(1, len(heads))[:, None] for t in initial._tensors)
        k, v = (t.flatten(1, -3) for t in (k, v))
        if drift is not None:
            drift = drift[0].flatten(0, -2), drift[1]
        scanned = algebra.scan(q.flatten(0, -3), k, v, bias, carry, drift, chunk=chunk, paired=paired)
        return _of((t.unflatten(2, heads) for t in scanned), counts)

    def merge(self, other: "AttentionState") -> "AttentionState":
        """The state of both sets of points together; associative and commutative, `empty` its identity."""
        checks.state("merge", self, other)
        checks.alike("merge", self.value, other.value, (self.fingerprint, other.fingerprint))
        count = self.count + other.count
        fingerprint = self.signature_with(other)
        if self.low is None or other.low is None:
            return _of(algebra.merge(self.value, self.lse, other.value, other.lse), count, fingerprint)
        return _of(algebra.merge_pairs(*self._tensors, *other._tensors), count, fingerprint)

    @property
    def _tensors(self) -> tuple[Tensor, ...]:
        """Value and lse and, where they are pairs, what float32 could not hold of them."""
        return self.value, self.lse, *(self.low or ())

    def remove(self, other: "AttentionState", *, max_share: float = 0.999) -> "AttentionState":
        """The state without points it has seen: undoes `merge` with `other`.

        What a slot keeps is known to about 1e-6 / (1 - share) of itself, where share is the part of
        the slot's normaliser that goes: a share above `max_share`, or of 1, is refused.
        """
        checks.state("remove", self, other)
        checks.alike("remove", self.value, other.value, (self.fingerprint, other.fingerprint))
        if self.low is not None:
            raise ValueError("remove needs float64: state.to(device='cpu', dtype=torch.float64)")
        left = self.count - other.count
        gap = (other.lse - self.lse).masked_fill(is_nothing(other.lse), -float("inf"))
        gone = (left == 0).reshape(-1, *[1] * (gap.ndim - 1))
        short = gone & (gap < -1e-3) & ~is_nothing(self.lse)
        if bool((left < 0).any()) or bool((gap > 1e-3).any()) or bool(short.any()):
            raise ValueError(
                f"cannot remove {other.count.tolist()} points from a state of {self.count.tolist()}: "
                "they weigh more in it than all it has seen (or less, where it should have seen nothing "
                "else), so they were never there; remove only what was merged, with the same weights"
            )
        share = gap.exp().clamp_max(1.0)
        worst = float(torch.where(gone, 0.0, share).detach().max()) if share.numel() else 0.0
        if not worst <= max_share or worst == 1.0:  # all, as far as float64 can say
            raise ValueError(
                f"the points to remove hold {worst:.6f} of a slot's normaliser (max_share={max_share}): what "
                "would remain cancels to rounding error; condition again on the points to keep"
                + (", or allow a larger max_share and less precision" if worst < 1.0 else "")
            )
        value, lse = algebra.remove(self.value, self.lse, other.value, torch.where(gone, 0.0, share))
        left_over = value.masked_fill(gone[..., None], 0.0), lse.masked_fill(gone, EMPTY)
        return AttentionState(*left_over, left, self.signature_with(other))

    def decay(self, log_weight: float | Tensor) -> "AttentionState":
        """Multiply the weight of every point seen by exp(log_weight): negative forgets.

        Values stay: only how much they count against points still to come changes.
        """
        if isinstance(log_weight, Tensor):
            checks.all_finite("log_weight", log_weight)
            shift = checks.one_each("log_weight", log_weight, self.batch, self.lse.device)
            shift = shift.to(self.lse).reshape(-1, *[1] * (self.lse.ndim - 1))
        elif isfinite(log_weight):
            shift = torch.tensor(log_weight, dtype=self.lse.dtype, device=self.lse.device)
        else:
            raise ValueError(f"log_weight must be finite, not {log_weight}: use empty to forget all")
        if self.low is None:
            return replace(self, lse=torch.where(is_nothing(self.lse), EMPTY, self.lse + shift))
        lse, lse_low = algebra.add(self.lse, self.low[1], shift)
        return replace(self, lse=lse, low=(self.low[0], lse_low))

    def to(
        self, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> "AttentionState":
        """The same state elsewhere: float64, or (float32) as unevaluated sums of two float32 numbers."""
        target = torch.empty(0, device=device or self.value.device).device
        dtype = dtype or accumulator(target)
        if dtype not in (torch.float64, torch.float32):
            raise ValueError(f"a state is accumulated in float64 or paired float32, not in {dtype}")
        tensors = self._tensors
        if self.low is not None and dtype == torch.float64:
            value, lse, value_low, lse_low = (t.to("cpu").double() for t in tensors)
            tensors = value + value_low, lse + lse_low
        elif self.low is None and dtype == torch.float32:
            tensors = algebra.pairs(*tensors)
        moved = (t.to(dtype).to(target) for t in tensors)
        return _of(moved, self.count.to(target), self.fingerprint)

    @property
    def layout(self) -> tuple[int, ...]:
        """The shape of its value, but for the batch."""
        return self.value.shape[1:]

    def tensors(self) -> dict[str, Tensor]:
        """All it is made of, by name."""
        return {**dict(zip(self.NAMES, self._tensors, strict=False)), "count": self.count}

    @classmethod
    def _made(cls, tensors: dict[str, Tensor], fingerprint: str | None) -> "AttentionState":
        return _of((tensors[name] for name in cls.NAMES if name in tensors), tensors["count"], fingerprint)

    @classmethod
    def _require(cls, tensors: dict[str, Tensor]) -> None:
        paired = "value_low" in tensors or "lse_low" in tensors
        checks.named(tensors, {*(cls.NAMES if paired else cls.NAMES[:2]), "count"})
        value, lse, count = (tensors[name] for name in ("value", "lse", "count"))
        dtype = torch.float32 if paired else value.dtype
        for name, like in zip(cls.NAMES, (value, lse, value, lse), strict=True):
            other = tensors.get(name, like)
            if other.shape != like.shape or other.dtype != dtype or not dtype.is_floating_point:
                raise ValueError(f"holds a {name} that does not fit: {tuple(other.shape)} {other.dtype}")
        if value.ndim < 3 or value.shape[:-1] != lse.shape or count.shape != value.shape[: count.ndim]:
            raise ValueError("holds a value, an lse and a count that do not fit each other")


def _of(tensors: Iterable[Tensor], count: Tensor, fingerprint: str | None = None) -> AttentionState:
    """A state of what `AttentionState._tensors` gives."""
    value, lse, *low = tensors
    return AttentionState(value, lse, count, fingerprint, (low[0], low[1]) if low else None)

"""`AttentionState` and its algebra: observe, merge, remove, empty, decay, scan.

The softmax of fixed queries over a set of keys is kept as two tensors: the `value` it gives, and
the logarithm `lse` of its normaliser. Two sets need not meet to be joined:

    lse   = log(exp(lse_a) + exp(lse_b))
    value = value_a + (value_b - value_a) * exp(lse_b - lse)

This is a commutative monoid. Its identity, the state of nothing, has value 0 and lse `EMPTY`: a
finite number far below any score, so that no formula here ever meets infinity minus infinity.
"""

import os
from dataclasses import dataclass, replace
from math import isfinite
from typing import ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from constmem import kernels
from constmem.files import read_tensors, write_tensors
from constmem.kernels import reference

EMPTY = -(2.0**100)  # about -1e30, and the same number in float64, float32 and bfloat16
KIND, VERSION = "constmem.state", 1


def bias_of(
    mask: Tensor | None, log_weight: Tensor | None, dtype: torch.dtype
) -> Float[Tensor, "*b n"] | None:
    """What is added to the scores of each point: its log-weight, or `EMPTY` where it is masked out."""
    if mask is None:
        return None if log_weight is None else log_weight.clamp_min(EMPTY)
    dtype = torch.promote_types(dtype, torch.float32)  # float16 has no number as low as EMPTY
    weight = torch.zeros((), dtype=dtype, device=mask.device) if log_weight is None else log_weight
    return torch.where(mask, weight.clamp_min(EMPTY), EMPTY)


def is_nothing(lse: Tensor) -> Tensor:
    """True where a log-normaliser says that nothing was seen."""
    return lse <= EMPTY / 2


def settle(
    value: Float[Tensor, "*h s c"], lse: Float[Tensor, "*h s"]
) -> tuple[Float[Tensor, "*h s c"], Float[Tensor, "*h s"]]:
    """Make exact identities of slots that only met masked points, so that masking is leaving out."""
    nothing = is_nothing(lse)
    return value.masked_fill(nothing[..., None], 0.0), lse.masked_fill(nothing, EMPTY)


def merge(
    value: Float[Tensor, "*h s c"],
    lse: Float[Tensor, "*h s"],
    other_value: Float[Tensor, "*#h s c"],
    other_lse: Float[Tensor, "*#h s"],
) -> tuple[Float[Tensor, "*h s c"], Float[Tensor, "*h s"]]:
    """The state of the union of two disjoint sets; accurate to the dtype's last digits."""
    share = torch.sigmoid(other_lse - lse)
    return torch.lerp(value, other_value, share[..., None]), torch.logaddexp(lse, other_lse)


def remove(
    value: Float[Tensor, "*h s c"],
    lse: Float[Tensor, "*h s"],
    other_value: Float[Tensor, "*h s c"],
    share: Float[Tensor, "*h s"],
) -> tuple[Float[Tensor, "*h s c"], Float[Tensor, "*h s"]]:
    """Undo `merge` with a part that holds `share` of the normaliser; loses digits as it nears 1."""
    grow = share / (1 - share)
    return value + (value - other_value) * grow[..., None], lse + torch.log1p(-share)


def _add(high: Tensor, low: Tensor, increment: Tensor) -> tuple[Tensor, Tensor]:
    """(high + low) + increment as an unevaluated sum of two numbers, without losing the small one."""
    total = high + increment
    kept = total - high
    error = (high - (total - kept)) + (increment - kept) + low
    renewed = total + error
    return renewed, error - (renewed - total)


def accumulator(device: torch.device) -> torch.dtype:
    """The dtype states are accumulated in: float64, or pairs of float32 where a device has none."""
    return torch.float32 if device.type == "mps" else torch.float64


@dataclass(frozen=True, eq=False)
class AttentionState:
    """All that must be remembered of a set of points seen by fixed queries; immutable, mergeable.

    Attributes:
        value: (b, *h, s, c) what each slot reads from the points; 0 where nothing was seen.
        lse: (b, *h, s) natural logarithm of each slot's softmax normaliser; `EMPTY` for nothing.
        count: (b,) number of points seen.
        fingerprint: which weights made this state; None when unknown (or still being trained).
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

    value: Float[Tensor, "b *h s c"]
    lse: Float[Tensor, "b *h s"]
    count: Int[Tensor, "..."]
    fingerprint: str | None = None
    low: tuple[Tensor, Tensor] | None = None

    @staticmethod
    def observe(
        q: Float[Tensor, "*h s c"],
        k: Float[Tensor, "b *h n c"],
        v: Float[Tensor, "b *h n c"],
        mask: Tensor | None = None,
        log_weight: Tensor | None = None,
    ) -> "AttentionState":
        """The state of exactly these points: softmax(q k' + log_weight) v, masked points left out.

        Args:
            q: the fixed queries, already scaled.
            k, v: keys and values of the points.
            mask: (b, n) True = real.
            log_weight: (b, n) natural logarithm of each point's weight.
        """
        b, heads, n = k.shape[0], k.shape[1:-2], k.shape[-2]
        if n == 0:
            return AttentionState.empty((b, *heads, q.shape[-2]), v.shape[-1], device=k.device)
        bias = bias_of(mask, log_weight, k.dtype)
        k, v = (t.reshape(b, -1, n, t.shape[-1]) for t in (k, v))
        value, lse = kernels.attend(q.flatten(0, -3), k, v, bias)
        if bias is not None:
            value, lse = settle(value, lse)
        count = torch.full((b,), n, device=k.device) if mask is None else mask.sum(-1)
        return AttentionState.of(
            value.reshape(b, *heads, *value.shape[-2:]), lse.reshape(b, *heads, -1), count
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
        )

    @staticmethod
    def scan(
        q: Float[Tensor, "*h s c"],
        k: Float[Tensor, "b *h n c"],
        v: Float[Tensor, "b *h n c"],
        mask: Tensor | None = None,
        log_weight: Tensor | None = None,
        *,
        drift: tuple[Tensor, Tensor] | None = None,
        initial: "AttentionState | None" = None,
        chunk: int = 32,
    ) -> "AttentionState":
        """The states of all prefixes: entry i of axis 1 has seen `initial` and points 0 to i.

        Prefixes inside a chunk are masked softmaxes; the chunks before arrive as one carried state.
        Nothing is subtracted from a running maximum of the future, so drifting scores do no harm.

        Args:
            drift: (rates, clock) of shapes (*h, s) and (b, n), the clock in float64: rates * clock is added
                to the scores. Inside a chunk only differences of the clock are met, however large it is.
        """
        b, heads, n = k.shape[0], k.shape[1:-2], k.shape[-2]
        if n == 0:
            raise ValueError("scan needs at least one point: there is no prefix of nothing")
        q, bias = q.flatten(0, -3), bias_of(mask, log_weight, k.dtype)
        k, v = (t.reshape(b, -1, n, t.shape[-1]) for t in (k, v))
        dtype = accumulator(k.device)
        counts = torch.ones(b, n, dtype=torch.int64, device=k.device) if mask is None else mask.long()
        counts = counts.cumsum(1)
        carry = None
        if initial is not None:
            counts = counts + initial.count[:, None]
            carry = initial.value.flatten(1, -3)[:, None], initial.lse.flatten(1, -2)[:, None]
        parts: list[tuple[Tensor, Tensor]] = []
        for start in range(0, n, chunk):
            here = slice(start, start + chunk)
            seen = None if bias is None else bias[:, here]
            ago = None if drift is None else (drift[0].flatten(0, -2), drift[1][:, here])
            value, lse = _prefixes(q, k[:, :, here], v[:, :, here], seen, ago)
            if ago is not None:
                lse = lse.to(dtype) + ago[0].to(dtype) * ago[1][:, :, None, None].to(dtype)
            part = value.to(dtype), lse.to(dtype)
            parts.append(part if carry is None else merge(*part, *carry))
            carry = parts[-1][0][:, -1:], parts[-1][1][:, -1:]
        value = torch.cat([value for value, _ in parts], 1)
        lse = torch.cat([lse for _, lse in parts], 1)
        return AttentionState(
            value.reshape(b, n, *heads, *value.shape[-2:]), lse.reshape(b, n, *heads, -1), counts
        )

    def merge(self, other: "AttentionState") -> "AttentionState":
        """The state of both sets of points together; associative and commutative, `empty` its identity."""
        self._require_like(other, "merge")
        return self._joined(other)

    def _joined(self, other: "AttentionState") -> "AttentionState":
        count = self.count + other.count
        fingerprint = self.fingerprint or other.fingerprint
        if self.low is None or other.low is None:
            value, lse = merge(self.value, self.lse, other.value, other.lse)
            return AttentionState(value, lse, count, fingerprint)
        mine = self.lse >= other.lse  # the larger part stays, the smaller is added to it as an increment
        a_lse, b_lse = (
            torch.where(mine, self.lse, other.lse),
            torch.where(mine, other.lse, self.lse),
        )
        pick = mine[..., None]
        a, b = (
            torch.where(pick, self.value, other.value),
            torch.where(pick, other.value, self.value),
        )
        (u, u_lse), (w, w_lse) = self.low, other.low
        a_low, b_low = torch.where(pick, u, w), torch.where(pick, w, u)
        a_lse_low, b_lse_low = torch.where(mine, u_lse, w_lse), torch.where(mine, w_lse, u_lse)
        gap = (b_lse - a_lse) + (b_lse_low - a_lse_low)
        step = torch.sigmoid(gap)[..., None] * ((b - a) + (b_low - a_low))
        lse, lse_low = _add(a_lse, a_lse_low, torch.log1p(gap.exp()))
        value, value_low = _add(a, a_low, step)
        return AttentionState(value, lse, count, fingerprint, (value_low, lse_low))

    def remove(self, other: "AttentionState", *, max_share: float = 0.999) -> "AttentionState":
        """The state without points it has seen: undoes `merge` with `other`.

        What a slot keeps is known to about 1e-6 / (1 - share) of itself, where share is the part of
        the slot's normaliser that goes: a share above `max_share` is refused.
        """
        self._require_like(other, "remove")
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
        worst = float(torch.where(gone, 0.0, share).detach().max())
        if worst > max_share:
            raise ValueError(
                f"the points to remove hold {worst:.6f} of a slot's normaliser, more than "
                f"max_share={max_share}: what would remain cancels to rounding error; condition again on "
                "the points to keep, or allow a larger max_share"
            )
        value, lse = remove(self.value, self.lse, other.value, torch.where(gone, 0.0, share))
        value, lse = value.masked_fill(gone[..., None], 0.0), lse.masked_fill(gone, EMPTY)
        return AttentionState(value, lse, left, self.fingerprint)

    def decay(self, log_weight: float | Tensor) -> "AttentionState":
        """Multiply the weight of every point seen by exp(log_weight): negative forgets.

        Values stay: only how much they count against points still to come changes.
        """
        if isinstance(log_weight, Tensor):
            shift = log_weight.to(self.lse.dtype).reshape(-1, *[1] * (self.lse.ndim - 1))
        elif isfinite(log_weight):
            shift = torch.tensor(log_weight, dtype=self.lse.dtype, device=self.lse.device)
        else:
            raise ValueError(f"log_weight must be finite, not {log_weight}: use empty to forget all")
        if self.low is None:
            return replace(self, lse=torch.where(is_nothing(self.lse), EMPTY, self.lse + shift))
        lse, lse_low = _add(self.lse, self.low[1], shift)
        return replace(self, lse=lse, low=(self.low[0], lse_low))

    def to(
        self, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> "AttentionState":
        """The same state elsewhere: float64, or (float32) as unevaluated sums of two float32 numbers."""
        target = torch.empty(0, device=device or self.value.device).device
        dtype = dtype or accumulator(target)
        if dtype not in (torch.float64, torch.float32):
            raise ValueError(f"a state is accumulated in float64 or paired float32, not in {dtype}")
        value, lse = self.value, self.lse
        if self.low is not None and dtype == torch.float64:
            low = [t.to("cpu").double() for t in (value, lse, *self.low)]
            value, lse = low[0] + low[2], low[1] + low[3]
        lows = self.low
        if dtype == torch.float32 and lows is None:
            lows = (value - value.float()).float(), (lse - lse.float()).float()
        return AttentionState(
            value.to(dtype).to(target),
            lse.to(dtype).to(target),
            self.count.to(target),
            self.fingerprint,
            None if dtype == torch.float64 or lows is None else (lows[0].to(target), lows[1].to(target)),
        )

    def detach(self) -> "AttentionState":
        """The same state cut off from the graph that computed it."""
        low = self.low and (self.low[0].detach(), self.low[1].detach())
        return replace(self, value=self.value.detach(), lse=self.lse.detach(), low=low)

    def signed(self, fingerprint: str) -> "AttentionState":
        """The same state with the name of the weights that made it."""
        return replace(self, fingerprint=fingerprint)

    @property
    def layout(self) -> tuple[int, ...]:
        """The shape of its value, but for the batch."""
        return self.value.shape[1:]

    @property
    def batch(self) -> int:
        """How many tasks it is the state of."""
        return self.value.shape[0]

    @property
    def device(self) -> torch.device:
        """Where its tensors are."""
        return self.value.device

    @property
    def nbytes(self) -> int:
        """Bytes remembered: the same whatever the number of points seen."""
        return sum(t.nbytes for t in (self.value, self.lse, self.count, *(self.low or ())))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the state, atomically, as a safetensors file with a versioned header."""
        tensors = {"value": self.value, "lse": self.lse, "count": self.count}
        if self.low is not None:
            tensors |= {"value_low": self.low[0], "lse_low": self.low[1]}
        header = {"format": KIND, "version": str(VERSION), "fingerprint": self.fingerprint or ""}
        write_tensors(path, tensors, header)

    @staticmethod
    def load(path: str | os.PathLike[str], device: torch.device | str | None = None) -> "AttentionState":
        """Read a state that `save` wrote."""
        tensors, header = read_tensors(path, kind=KIND, version=VERSION)
        missing = {"value", "lse", "count"} - tensors.keys()
        if missing or tensors["value"].shape[:-1] != tensors["lse"].shape:
            what = f"lacks {sorted(missing)}" if missing else "holds a value and an lse that do not fit"
            raise ValueError(f"{path} is damaged: it {what}; save the state again")
        low = (tensors["value_low"], tensors["lse_low"]) if "value_low" in tensors else None
        state = AttentionState(
            tensors["value"], tensors["lse"], tensors["count"], header["fingerprint"] or None, low
        )
        return state if device is None else state.to(device)

    def _require_like(self, other: "AttentionState", verb: str) -> None:
        """Refuse states that cannot belong to the same model."""
        mine, theirs = self.value, other.value
        if mine.shape != theirs.shape or mine.device != theirs.device or mine.dtype != theirs.dtype:
            raise ValueError(
                f"cannot {verb} states that differ: {tuple(mine.shape)} {mine.dtype} on {mine.device} and "
                f"{tuple(theirs.shape)} {theirs.dtype} on {theirs.device}; both must come from the same "
                "model and batch, in one precision on one device (state.to moves one)"
            )
        if None not in (self.fingerprint, other.fingerprint) and self.fingerprint != other.fingerprint:
            raise ValueError(
                f"cannot {verb} states made by different weights ({self.fingerprint} and "
                f"{other.fingerprint}): observe the data again with one model"
            )


def _prefixes(
    q: Float[Tensor, "h s c"],
    k: Float[Tensor, "b h t c"],
    v: Float[Tensor, "b h t c"],
    bias: Float[Tensor, "b t"] | None,
    drift: tuple[Tensor, Tensor] | None,
) -> tuple[Float[Tensor, "b t h s c"], Float[Tensor, "b t h s"]]:
    """Softmaxes over every prefix of a few points, by masking; drift counts from its last point."""
    logits = reference.scores(q, k, bias)[..., None, :]  # (b, h, s, 1, t)
    t = logits.shape[-1]
    past = torch.ones(t, t, dtype=torch.bool, device=logits.device).tril()
    if drift is not None:
        rates, clock = drift
        ago = (clock[:, None, :] - clock[:, :, None]).clamp_max(0.0).to(logits.dtype)  # (b, t, t)
        logits = logits + rates[:, :, None, None].to(logits.dtype) * ago[:, None, None]
    logits = torch.where(past, logits, EMPTY)  # (b, h, s, t, t)
    lse = logits.logsumexp(-1)
    value = (logits - lse[..., None]).exp() @ v[:, :, None].to(logits.dtype)  # (b, h, s, t, c)
    value, lse = settle(value, lse)
    return value.permute(0, 3, 1, 2, 4), lse.permute(0, 3, 1, 2)

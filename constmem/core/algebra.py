"""The algebra of attention with fixed queries, as pure functions of tensors.

The softmax of fixed queries over a set of keys is kept as two tensors: the `value` it gives, and
the logarithm `lse` of its normaliser. Two sets need not meet to be joined:

    lse   = log(exp(lse_a) + exp(lse_b))
    value = value_a + (value_b - value_a) * exp(lse_b - lse)

This is a commutative monoid. Its identity, the state of nothing, has value 0 and lse `EMPTY`: a
finite number far below any score, so that no formula here ever meets infinity minus infinity.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from constmem import kernels

EMPTY = kernels.EMPTY  # a finite number far below any score
Slots = Float[Tensor, "*h s c"]
SlotsLse = Float[Tensor, "*h s"]
Others = Float[Tensor, "*#h s c"]
OthersLse = Float[Tensor, "*#h s"]


def bias_of(
    mask: Tensor | None, log_weight: Tensor | None, dtype: torch.dtype
) -> Float[Tensor, "*b n"] | None:
    """What is added to the scores of each point: its log-weight, or `EMPTY` where it is masked out."""
    if log_weight is not None:  # in at least float32, as float16 has no number as low as EMPTY
        log_weight = log_weight.to(torch.promote_types(log_weight.dtype, torch.float32)).clamp_min(EMPTY)
    if mask is None:
        return log_weight
    dtype = torch.promote_types(dtype, torch.float32)
    weight = torch.zeros((), dtype=dtype, device=mask.device) if log_weight is None else log_weight
    return torch.where(mask, weight, EMPTY)


def is_nothing(lse: Tensor) -> Tensor:
    """True where a log-normaliser says that nothing was seen."""
    return lse <= EMPTY / 2


def settle(value: Slots, lse: SlotsLse) -> tuple[Slots, SlotsLse]:
    """Make exact identities of slots that only met masked points, so that masking is leaving out."""
    nothing = is_nothing(lse)
    return value.masked_fill(nothing[..., None], 0.0), lse.masked_fill(nothing, EMPTY)


def merge(value: Slots, lse: SlotsLse, other_value: Others, other_lse: OthersLse) -> tuple[Slots, SlotsLse]:
    """The state of the union of two disjoint sets; accurate to the dtype's last digits."""
    found = kernels.merge(value, lse, other_value, other_lse)
    if found is not None:
        return found
    share = torch.sigmoid(other_lse - lse)
    return torch.lerp(value, other_value, share[..., None]), torch.logaddexp(lse, other_lse)


def remove(value: Slots, lse: SlotsLse, other_value: Slots, share: SlotsLse) -> tuple[Slots, SlotsLse]:
    """Undo `merge` with a part that holds `share` of the normaliser; loses digits as it nears 1."""
    grow = share / (1 - share)
    return value + (value - other_value) * grow[..., None], lse + torch.log1p(-share)


def add(high: Tensor, low: Tensor, increment: Tensor) -> tuple[Tensor, Tensor]:
    """(high + low) + increment as an unevaluated sum of two numbers, without losing the small one."""
    total = high + increment
    kept = total - high
    error = (high - (total - kept)) + (increment - kept) + low
    renewed = total + error
    return renewed, error - (renewed - total)


def merge_pairs(
    value: Slots, lse: SlotsLse, value_low: Slots, lse_low: SlotsLse,
    other_value: Others, other_lse: OthersLse, other_value_low: Others, other_lse_low: OthersLse,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """`merge` of unevaluated sums of two: the larger part stays, the smaller is added as an increment."""
    mine = lse >= other_lse

    def larger_first(own: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
        first = mine if own.ndim == mine.ndim else mine[..., None]
        return torch.where(first, own, other), torch.where(first, other, own)

    (a, b), (a_low, b_low) = larger_first(value, other_value), larger_first(value_low, other_value_low)
    (a_lse, b_lse), (a_lse_low, b_lse_low) = (
        larger_first(lse, other_lse),
        larger_first(lse_low, other_lse_low),
    )
    gap = (b_lse - a_lse) + (b_lse_low - a_lse_low)
    step = torch.sigmoid(gap)[..., None] * ((b - a) + (b_low - a_low))
    new_lse, new_lse_low = add(a_lse, a_lse_low, torch.log1p(gap.exp()))
    new_value, new_value_low = add(a, a_low, step)
    return new_value, new_lse, new_value_low, new_lse_low


def pairs(value: Tensor, lse: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """A value and an lse as unevaluated sums of two float32 tensors each: what `merge_pairs` takes."""
    high, high_lse = value.float(), lse.float()
    return high, high_lse, (value - high).float(), (lse - high_lse).float()


def accumulator(device: torch.device) -> torch.dtype:
    """The dtype states are accumulated in: float64, or pairs of float32 where a device has none."""
    return torch.float32 if device.type == "mps" else torch.float64


def prefixes(
    q: Float[Tensor, "h s c"],
    k: Float[Tensor, "b h t c"],
    v: Float[Tensor, "b h t c"],
    bias: Float[Tensor, "b t"] | None,
    drift: tuple[Tensor, Tensor] | None = None,
) -> tuple[Float[Tensor, "b t h s c"], Float[Tensor, "b t h s"]]:
    """Softmaxes over every prefix of a few points, by masking; drift counts from its last point."""
    logits = kernels.scores(q, k, bias)[..., None, :]  # (b, h, s, 1, t)
    if drift is not None:
        rates, clock = drift
        ago = (clock[:, None, :] - clock[:, :, None]).clamp_max(0.0).to(logits.dtype)  # (b, t, t)
        logits = logits + rates[:, :, None, None].to(logits.dtype) * ago[:, None, None]
    value, lse = _masked(logits, v.to(logits.dtype))
    if bias is not None:
        value, lse = settle(value, lse)
    return value.permute(0, 3, 1, 2, 4), lse.permute(0, 3, 1, 2)


def _masked(logits: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Softmaxes over all prefixes of points (b, h, t, c), from logits (b, h, s, 1 or t, t)."""
    t = logits.shape[-1]
    past = torch.ones(t, t, dtype=torch.bool, device=logits.device).tril()
    logits = torch.where(past, logits, EMPTY)  # (b, h, s, t, t)
    lse = logits.logsumexp(-1)
    shares = (logits - lse[..., None]).exp()
    return (shares.flatten(2, 3) @ v).unflatten(2, lse.shape[2:]), lse


def scan(
    q: Float[Tensor, "h s c"],
    k: Float[Tensor, "b h n c"],
    v: Float[Tensor, "b h n c"],
    bias: Float[Tensor, "b n"] | None,
    carry: tuple[Tensor, ...] | None,
    drift: tuple[Tensor, Tensor] | None = None,
    *,
    chunk: int,
    paired: bool,
) -> tuple[Tensor, ...]:
    """Value and lse of all prefixes in float64, or `paired`: with what float32 could not hold of both.

    Prefixes inside chunks are masked softmaxes, of all chunks at once; what came before each chunk is a
    prefix of the chunks' last states, found the same way. Pairs are carried from chunk to chunk instead.
    Drift, (rates, clock) of shapes (h, s) and (b, n), adds rates * clock to the scores.
    """
    if paired:
        return _scan_pairs(q, k, v, bias, carry, drift, chunk=chunk)
    b, n = k.shape[0], k.shape[-2]
    t = min(chunk, n)
    k, v = (_cut(x, -2, t).transpose(1, 2).flatten(0, 1) for x in (k, v))  # (b m, h, t, c)
    within = None if bias is None else _cut(bias, -1, t).flatten(0, 1)
    ago = None if drift is None else (drift[0], _cut(drift[1], -1, t).flatten(0, 1))
    value, lse = _counted(q, k, v, within, ago)
    value, lse = value.unflatten(0, (b, -1)), lse.unflatten(0, (b, -1))  # (b, m, t, h, s, c)
    value, lse = _carried(value, lse, carry)
    return value[:, :n], lse[:, :n]


def _cut(x: Tensor, axis: int, t: int) -> Tensor:
    """An axis as chunks of t, zeros behind the last point: no prefix that is asked for sees those."""
    axis %= x.ndim
    missing = -x.shape[axis] % t
    if missing:
        x = torch.nn.functional.pad(x, (*[0, 0] * (x.ndim - 1 - axis), 0, missing))
    cut: Tensor = x.unflatten(axis, (-1, t))
    return cut


def _counted(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, drift: tuple[Tensor, Tensor] | None
) -> tuple[Float[Tensor, "b t h s c"], Float[Tensor, "b t h s"]]:
    """`prefixes` in float64, the drift counted from the clock's zero."""
    value, lse = prefixes(q, k, v, bias, drift)
    value = value.to(torch.float64, memory_format=torch.contiguous_format)
    lse = lse.to(torch.float64, memory_format=torch.contiguous_format)
    if drift is not None:
        lse = lse + drift[0].double() * drift[1][:, :, None, None].double()
    return value, lse


def _carried(
    value: Float[Tensor, "b m t h s c"], lse: Float[Tensor, "b m t h s"], first: tuple[Tensor, ...] | None
) -> tuple[Float[Tensor, "b mt h s c"], Float[Tensor, "b mt h s"]]:
    """Prefixes inside m chunks, merged with `first` and the last states of all chunks before their own."""
    if first is not None or value.shape[1] > 1:
        first = first or (torch.zeros_like(value[:, 0, :1]), torch.full_like(lse[:, 0, :1], EMPTY))
        values = torch.cat([first[0], value[:, :-1, -1]], 1)
        before, lse_before = _merged_prefixes(values, torch.cat([first[1], lse[:, :-1, -1]], 1))
        value, lse = merge(value, lse, before[:, :, None], lse_before[:, :, None])
    return value.flatten(1, 2), lse.flatten(1, 2)


def _merged_prefixes(
    value: Float[Tensor, "b n h s c"], lse: Float[Tensor, "b n h s"], chunk: int = 32
) -> tuple[Float[Tensor, "b n h s c"], Float[Tensor, "b n h s"]]:
    """Entry i is the merge of states 0 to i, by a tree whose nodes have `chunk` children."""
    b, n, *heads = lse.shape
    if n == 1:
        return value, lse
    if n > chunk:
        value, lse = (_cut(x, 1, chunk).flatten(0, 1) for x in (value, lse))
        value, lse = (x.unflatten(0, (b, -1)) for x in _merged_prefixes(value, lse))
        value, lse = _carried(value, lse, None)
        return value[:, :n], lse[:, :n]
    v = value.permute(0, 2, 3, 1, 4).flatten(1, 2)  # (b, h s, n, c): every slot has values of its own
    logits = lse.permute(0, 2, 3, 1).flatten(1, 2)[:, :, None, None, :]
    found, total = settle(*_masked(logits, v))  # (b, h s, 1, n, c)
    value, lse = (x[:, :, 0].unflatten(1, heads).movedim(3, 1) for x in (found, total))
    return value, lse


def _scan_pairs(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    carry: tuple[Tensor, ...] | None,
    drift: tuple[Tensor, Tensor] | None,
    *,
    chunk: int,
) -> tuple[Tensor, ...]:
    """Prefixes as unevaluated sums of two float32 numbers, chunk by chunk."""
    parts: list[tuple[Tensor, ...]] = []
    for start in range(0, k.shape[-2], chunk):
        here = slice(start, start + chunk)
        ago = None if drift is None else (drift[0], drift[1][:, here])
        value, lse = prefixes(q, k[:, :, here], v[:, :, here], None if bias is None else bias[:, here], ago)
        if ago is not None:
            lse = lse.double() + ago[0].double() * ago[1][:, :, None, None].double()
        part: tuple[Tensor, ...] = pairs(value, lse)
        if carry is not None:
            part = merge_pairs(*part, *carry)
        parts.append(part)
        carry = tuple(t[:, -1:] for t in part)
    return tuple(torch.cat(tensors, 1) for tensors in zip(*parts, strict=True))

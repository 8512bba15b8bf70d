"""What every faster way must agree with, on any device and dtype: attention, embeddings, absorbed queries."""

from collections.abc import Iterable
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

Chunk = tuple[Tensor, Tensor, Tensor | None]  # x, y, mask
Queries = Float[Tensor, "h s c"]
Keys = Float[Tensor, "b h n c"]  # and values
Bias = Float[Tensor, "b n"] | None
Values = Float[Tensor, "b h s c"]
Lse = Float[Tensor, "b h s"]
Slots = Float[Tensor, "*h s c"]
SlotsLse = Float[Tensor, "*h s"]
Others = Float[Tensor, "*#h s c"]
OthersLse = Float[Tensor, "*#h s"]
EMPTY = -(2.0**100)  # the lse of nothing: about -1e30, and the same number in float64, float32 and bfloat16


def scores(q: Queries, k: Keys, bias: Bias) -> Float[Tensor, "b h s n"]:
    """The logits of every query against every key, in float32 or better."""
    wide = torch.promote_types(q.dtype, torch.float32)
    logits = q.to(wide) @ k.to(wide).mT
    return logits if bias is None else logits + bias[:, None, None, :].to(wide)


def forward(q: Queries, k: Keys, v: Keys, bias: Bias) -> tuple[Values, Lse]:
    """Attention and the logarithm of its normaliser; differentiable as it stands."""
    logits = scores(q, k, bias)
    if logits.shape[-1] == 1:  # the share of an only point is one
        return v.expand(-1, -1, q.shape[-2], -1), logits.squeeze(-1)
    lse = logits.logsumexp(-1)
    shares = (logits - lse[..., None]).exp()
    return (shares @ v.to(shares.dtype)).to(v.dtype), lse


def backward(
    q: Queries, k: Keys, v: Keys, bias: Bias, value: Values, lse: Lse, grad_value: Values
) -> tuple[Values, Keys, Keys]:
    """Gradients of these keys and values as a part of a larger softmax, whose value and lse are given.

    With shares p = exp(score - lse): dv = p' g, dscore = p (g v' - sum(g * value)).
    """
    logits = scores(q, k, bias)
    shares = (logits - lse[..., None]).exp()
    wide = shares.dtype
    g = grad_value.to(wide)
    delta = (g * value.to(wide)).sum(-1, keepdim=True)
    grad_scores = shares * (g @ v.to(wide).mT - delta)
    return (
        (grad_scores @ k.to(wide)).to(q.dtype),
        (grad_scores.mT @ q.to(wide)).to(k.dtype),
        (shares.mT @ g).to(v.dtype),
    )


def contiguous(
    value: Slots, lse: SlotsLse, other_value: Slots, other_lse: SlotsLse
) -> tuple[Slots, SlotsLse, Float[Tensor, "*h _s c"], SlotsLse]:
    """Two states to merge as they are read: of one point, whose value all slots share, it is there once."""
    shared = other_value.stride(-2) == 0 and other_value.shape[-2] > 1
    other_value = other_value[..., :1, :] if shared else other_value
    return value.contiguous(), lse.contiguous(), other_value.contiguous(), other_lse.contiguous()


class Absorbed(NamedTuple):
    """All that meets normalised tokens: rows whose products with them are scores, and what makes values."""

    rows: Float[Tensor, "s d"]  # q Wk of all slots of all heads
    score: Float[Tensor, " s"]  # what the shift of keys adds to every score
    project: Float[Tensor, "h c d"]  # from mean tokens to values
    shift: Float[Tensor, "h c"]

    @property
    def single(self) -> tuple[Float[Tensor, "sv d"], Float[Tensor, " sv"]]:
        """Scores and values of a token by one product."""
        weight = torch.cat([self.rows, self.project.flatten(0, 1)])
        return weight, torch.cat([self.score, self.shift.flatten()])


def absorb(
    queries: Float[Tensor, "*depth h s c"], weight: Float[Tensor, "kv d"], shift: Float[Tensor, " kv"]
) -> Absorbed:
    """Queries, and the projection to keys and values of all heads, as tokens meet them; differentiable."""
    queries = queries.flatten(0, -3)
    heads, _, channels = queries.shape
    (key, value), (key_shift, value_shift) = weight.chunk(2), shift.chunk(2)
    rows = (queries @ key.unflatten(0, (heads, channels))).flatten(0, 1)
    score = (queries @ key_shift.view(heads, channels, 1)).flatten()
    return Absorbed(rows, score, value.unflatten(0, (heads, channels)), value_shift.view(heads, channels))


def joined(*chunks: Chunk) -> Chunk:
    """Concatenate chunks; there is a mask if any of them has one."""
    if len(chunks) == 1:
        return chunks[0]
    xs, ys, masks = zip(*chunks, strict=True)
    if all(mask is None for mask in masks):
        return torch.cat(xs, 1), torch.cat(ys, 1), None
    filled = [
        torch.ones(x.shape[:2], dtype=torch.bool, device=x.device) if mask is None else mask
        for x, mask in zip(xs, masks, strict=True)
    ]
    return torch.cat(xs, 1), torch.cat(ys, 1), torch.cat(filled, 1)


def accumulate(grads: dict[int, Tensor], found: Iterable[tuple[Tensor, Tensor | None]]) -> None:
    """Add gradients to those of the same leaves so far."""
    for leaf, grad in found:
        if grad is None:
            continue
        if id(leaf) in grads:
            grads[id(leaf)] += grad
        else:
            grads[id(leaf)] = grad.clone()

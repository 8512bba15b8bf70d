"""How the CNP family encodes sets of points: pooled, seen by each other and by targets, or drawn again.

All modules take any number of axes `*b` before the points: tasks, and samples of tasks.
"""

from collections.abc import Sequence
from math import log, sqrt
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from constmem.core.algebra import EMPTY, accumulator, bias_of, settle
from constmem.core.fold import Chunk
from constmem.core.layers import MLP, attend, check_heads, keep_variance


def pool(
    tokens: Float[Tensor, "*b n d"], bias: Float[Tensor, "*b n"] | None
) -> tuple[Float[Tensor, "*b d"], Float[Tensor, "*b"]]:
    """The mean of tokens weighted by exp(bias), and the logarithm of all weights; 0 and `EMPTY` of none.

    This is attention with all scores zero, and so the state of an attention.
    """
    wide, n = torch.promote_types(tokens.dtype, torch.float32), tokens.shape[-2]
    shape = tokens.shape[:-2]
    if n == 0:
        nothing = torch.zeros(*shape, tokens.shape[-1], dtype=wide, device=tokens.device)
        return nothing, torch.full(shape, EMPTY, dtype=wide, device=tokens.device)
    if bias is None:
        return tokens.mean(-2, dtype=wide), torch.full(shape, log(n), dtype=wide, device=tokens.device)
    lse = bias.to(wide).logsumexp(-1, keepdim=True)
    shares = (bias - lse).exp()
    value = (shares[..., None] * tokens).sum(-2, keepdim=True)
    value, lse = settle(value, lse.expand(*shape, 1))
    return value.squeeze(-2), lse.squeeze(-1)


def paired(x: Float[Tensor, "*#b n x"], y: Float[Tensor, "*b n y"]) -> Float[Tensor, "*b n p"]:
    """Inputs and outputs side by side; outputs may come in several versions for the same inputs."""
    return torch.cat([x.expand(*y.shape[:-1], -1), y], -1)


def linear_in_parts(
    parts: Sequence[Float[Tensor, "*#b _"]], weight: Float[Tensor, "o i"], bias: Tensor | None = None
) -> Float[Tensor, "*b o"]:
    """A linear map of parts side by side, which are broadcast against each other only behind it.

    Each is one product of matrices, whatever its strides: the same to the last digit.
    """
    weights = weight.split([part.shape[-1] for part in parts], 1)
    total: Tensor | None = None
    for part, own in zip(parts, weights, strict=True):
        flat = F.linear(part.flatten(0, -2), own, bias if total is None else None)
        term = flat.view(*part.shape[:-1], weight.shape[0])
        total = term if total is None else total + term
    assert total is not None
    return total


class PoolingPair(nn.Module):
    """Two encoders of points: an MLP on each point, the mean of what it gives, an MLP on the mean."""

    def __init__(
        self, *, dim_x: int, dim_y: int, dim: int, outs: tuple[int, int], pre_depth: int, post_depth: int
    ) -> None:
        super().__init__()
        self.pre = nn.ModuleList(
            MLP(dim_in=dim_x + dim_y, dim_hidden=dim, dim_out=dim, depth=pre_depth) for _ in outs
        )
        self.post = nn.ModuleList(
            MLP(dim_in=dim, dim_hidden=dim, dim_out=out, depth=post_depth) for out in outs
        )

    def means(
        self, points: Float[Tensor, "*b n p"], bias: Float[Tensor, "*b n"] | None
    ) -> list[tuple[Float[Tensor, "*b d"], Float[Tensor, "*b"]]]:
        """What each encoder pools of points weighted by exp(bias): see `pool`."""
        return [pool(pre(points), bias) for pre in self.pre]

    def read(self, mean: Float[Tensor, "*b d"], which: int) -> Float[Tensor, "*b o"]:
        """What one of the encoders makes of its mean."""
        out: Tensor = self.post[which](mean.to(_dtype(self)))
        return out

    def encode(
        self, x: Float[Tensor, "*#b n x"], y: Float[Tensor, "*b n y"], mask: Bool[Tensor, "*b n"] | None
    ) -> Float[Tensor, "*b o"]:
        """Both encoders, without a state in between."""
        bias = bias_of(mask, None, torch.promote_types(x.dtype, torch.float32))
        found = self.means(paired(x, y), bias)
        return torch.cat([self.read(mean, which) for which, (mean, _) in enumerate(found)], -1)

    def attend(self, context: Float[Tensor, "*b o"], xt: Tensor) -> Float[Tensor, "*b 1 o"]:  # noqa: ARG002
        """What was encoded, the same for all targets."""
        return context[..., None, :]

    def represent(self, memory: Float[Tensor, "*b o"], xt: Tensor) -> tuple[Float[Tensor, "*b 1 o"]]:
        """The same, in one part."""
        return (self.attend(memory, xt),)


class PostNormAttention(nn.Module):
    """Attention of the CNP family: scores over the root of the whole width, norms behind, residual from q.

    h = norm(q + softmax(q k' / sqrt(dim)) v), out = norm(h + relu(W h)); q, k and v have no bias.
    """

    def __init__(self, *, dim: int, num_heads: int = 8) -> None:
        super().__init__()
        check_heads(dim, num_heads)
        self.num_heads, self.scale = num_heads, 1 / sqrt(dim)
        self.query, self.key, self.value = (keep_variance(nn.Linear(dim, dim, bias=False)) for _ in range(3))
        self.out = keep_variance(nn.Linear(dim, dim))
        self.norm, self.norm_out = nn.LayerNorm(dim), nn.LayerNorm(dim)

    def forward(
        self,
        queries: Float[Tensor, "*#b m d"],
        k: Float[Tensor, "*#b n d"],
        v: Float[Tensor, "*b n d"],
        mask: Bool[Tensor, "*b n"] | None,
    ) -> Float[Tensor, "*b m d"]:
        """Attend to keys and values that are projected already, since they serve many queries."""
        lead = v.shape[:-2]
        q = self.query(queries)
        flat = None if mask is None else mask.flatten(0, -2)
        split = (
            t.expand(*lead, -1, -1).flatten(0, -3).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for t in (q, k, v)
        )
        q_heads, k_heads, v_heads = split  # (b, h, n, c) each
        seen = attend(q_heads, k_heads, v_heads, flat, scale=self.scale)
        h = self.norm(q + seen.transpose(1, 2).reshape(*lead, *q.shape[-2:]))
        out: Tensor = self.norm_out(h + F.relu(self.out(h)))
        return out


class MixedTokens(nn.Module):
    """Tokens of points that have seen each other: an MLP of depth - 2, ReLU if so asked, self-attention."""

    def __init__(self, *, dim_in: int, dim: int, depth: int, num_heads: int, relu: bool) -> None:
        super().__init__()
        if depth < 3:
            raise ValueError(f"self-attention takes the place of two layers: pre_depth={depth} is below 3")
        self.relu = relu
        self.embed = MLP(dim_in=dim_in, dim_hidden=dim, dim_out=dim, depth=depth - 2)
        self.attention = PostNormAttention(dim=dim, num_heads=num_heads)

    def forward(
        self, points: Float[Tensor, "*b n p"], mask: Bool[Tensor, "*b n"] | None
    ) -> Float[Tensor, "*b n d"]:
        tokens = self.embed(points)
        tokens = F.relu(tokens) if self.relu else tokens
        attention = self.attention
        out: Tensor = attention(tokens, attention.key(tokens), attention.value(tokens), mask)
        return out


class Keyed(NamedTuple):
    """A context that targets attend to: keys from its x, values from all of it."""

    keys: Float[Tensor, "*#b n d"]
    values: Float[Tensor, "*b n d"]
    mask: Bool[Tensor, "*b n"] | None


class Attended(NamedTuple):
    """A vector for all targets, and a context they attend to."""

    pooled: Float[Tensor, "*b o"]
    context: Keyed


class AttentiveEncoder(nn.Module):
    """Two encoders of points that see each other: one that targets attend to, one that pools.

    Targets attend by x alone: queries and keys come from one MLP on it. As published, the values are as
    deep as what is pooled, the queries and keys as deep as what follows pooling, and a ReLU stands before the
    self-attention of what is pooled alone. Earlier versions had it in the values too (`value_relu`).
    """

    def __init__(
        self,
        *,
        dim_x: int,
        dim_y: int,
        dim: int,
        out: int,
        pre_depth: int,
        post_depth: int,
        num_heads: int,
        value_relu: bool,
    ) -> None:
        super().__init__()
        self.values, self.tokens = (
            MixedTokens(dim_in=dim_x + dim_y, dim=dim, depth=pre_depth, num_heads=num_heads, relu=relu)
            for relu in (value_relu, True)
        )
        self.keys = MLP(dim_in=dim_x, dim_hidden=dim, dim_out=dim, depth=post_depth)
        self.attention = PostNormAttention(dim=dim, num_heads=num_heads)
        self.post = MLP(dim_in=dim, dim_hidden=dim, dim_out=out, depth=post_depth)

    def keyed(
        self, x: Float[Tensor, "*#b n x"], y: Float[Tensor, "*b n y"], mask: Bool[Tensor, "*b n"] | None
    ) -> Keyed:
        """Keys and values of the points, once for all targets."""
        values = self.values(paired(x, y), mask)
        return Keyed(self.attention.key(self.keys(x)), self.attention.value(values), mask)

    def pooled(
        self, x: Float[Tensor, "*#b n x"], y: Float[Tensor, "*b n y"], mask: Bool[Tensor, "*b n"] | None
    ) -> Float[Tensor, "*b o"]:
        """One vector for all points."""
        bias = bias_of(mask, None, torch.promote_types(x.dtype, torch.float32))
        mean, _ = pool(self.tokens(paired(x, y), mask), bias)
        return self.post(mean.to(_dtype(self)))  # type: ignore[no-any-return]

    def encode(
        self, x: Float[Tensor, "*#b n x"], y: Float[Tensor, "*b n y"], mask: Bool[Tensor, "*b n"] | None
    ) -> Attended:
        """Both."""
        return Attended(self.pooled(x, y, mask), self.keyed(x, y, mask))

    def attend(self, context: Keyed, xt: Float[Tensor, "*#b m x"]) -> Float[Tensor, "*b m d"]:
        """What each target reads from the points."""
        out: Tensor = self.attention(self.keys(xt), *context)
        return out

    def represent(
        self, memory: Attended, xt: Float[Tensor, "*#b m x"]
    ) -> tuple[Float[Tensor, "*b m d"], Float[Tensor, "*b 1 o"]]:
        """What each target reads from the points, and the vector for all of them."""
        return self.attend(memory.context, xt), memory.pooled[..., None, :]


def _dtype(module: nn.Module) -> torch.dtype:
    return next((p.dtype for p in module.parameters()), torch.float32)  # none where they are quantized


def ordered(x: Tensor, y: Tensor, mask: Tensor | None) -> Chunk:
    """The points in an order that depends on what they are, not on how they came; real ones first."""
    points = torch.cat([x, y], -1).to(accumulator(x.device))
    weights = torch.arange(2, points.shape[-1] + 2, dtype=points.dtype, device=points.device).sqrt()
    key = (points * weights).sum(-1)  # no two different points in practice have the same
    if mask is not None:
        key = key.masked_fill(~mask, float("inf"))
    order = key.argsort(dim=-1, stable=True)
    x, y = (t.gather(1, order[..., None].expand_as(t)) for t in (x, y))
    return x, y, None if mask is None else mask.gather(1, order)


def drawn(
    uniforms: Float[Tensor, "2 #b k n"], x: Float[Tensor, "b n x"], mask: Tensor | None
) -> Int[Tensor, "2 b k n"]:
    """Indices of points drawn with replacement from the real ones, wherever those are."""
    b, n = x.shape[:2]
    if mask is None:
        return (uniforms * n).long().clamp_max(n - 1).expand(2, b, -1, -1)
    count = mask.sum(-1)[:, None, None]
    which = torch.minimum((uniforms * count).long(), count - 1).clamp_min(0)
    numbers = torch.arange(1, n + 1, device=x.device).expand(b, n).contiguous()
    place = torch.searchsorted(mask.cumsum(-1), numbers) % max(n, 1)  # of the first real point, the second...
    return place[None, :, None].expand_as(which).gather(-1, which)


def picked(points: Float[Tensor, "b k n p"], draws: Int[Tensor, "b k n"]) -> Float[Tensor, "b k n p"]:
    """The points that were drawn, of each version."""
    return points.gather(2, draws[..., None].expand(-1, -1, -1, points.shape[-1]))


def repeated(points: Tensor, k: int) -> Tensor:
    """The same points for each of k versions, without a copy."""
    return points[:, None].expand(points.shape[0], k, *points.shape[1:])

"""How the CNP family encodes points: pooling, and 8-head post-norm attention.

All modules take any number of axes `*b` before the points: tasks, and samples of tasks.
"""

from math import log, sqrt
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn

from constmem.core.algebra import EMPTY, bias_of, settle
from constmem.core.costs import Needs
from constmem.core.layers import MLP, attend, check_heads, keep_variance
from constmem.core.model import listed
from constmem.core.state import AttentionState


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


class PoolingPair(nn.Module):
    """Two encoders of points: an MLP on each point, the mean of what it gives, an MLP on the mean.

    Both running means are one `AttentionState`, with one slot and all scores zero: its value is the
    mean, its lse the logarithm of the number of points.
    """

    def __init__(
        self, *, dim_x: int, dim_y: int, dim: int, outs: tuple[int, int], pre_depth: int, post_depth: int
    ) -> None:
        super().__init__()
        self.dim = dim
        self.pre = nn.ModuleList(
            MLP(dim_in=dim_x + dim_y, dim_hidden=dim, dim_out=dim, depth=pre_depth) for _ in outs
        )
        self.post = nn.ModuleList(
            MLP(dim_in=dim, dim_hidden=dim, dim_out=out, depth=post_depth) for out in outs
        )

    def empty(self, batch: int, device: torch.device) -> AttentionState:
        """The state of nothing."""
        return AttentionState.empty((batch, *self.layout[:-1]), self.dim, device=device)

    @property
    def layout(self) -> tuple[int, int, int, int]:
        """The shape of a state, but for the batch: (depth, heads, slots, channels)."""
        return len(self.pre), 1, 1, self.dim

    def observe(
        self, points: Float[Tensor, "b n p"], mask: Tensor | None, log_weight: Tensor | None
    ) -> AttentionState:
        """The running means of exactly these points."""
        bias = bias_of(mask, log_weight, torch.promote_types(points.dtype, torch.float32))
        means, lses = zip(*(pool(pre(points), bias) for pre in self.pre), strict=True)
        b, n = points.shape[:2]
        count = torch.full((b,), n, device=points.device) if mask is None else mask.sum(-1)
        value, lse = torch.stack(means, 1), torch.stack(lses, 1)  # (b, 2, d), (b, 2)
        return AttentionState.of(value[:, :, None, None], lse[:, :, None, None], count)

    def observing(self) -> list[Tensor]:
        """The weights that its states depend on."""
        return listed(*self.pre)

    def read(self, state: AttentionState, which: int) -> Float[Tensor, "b o"]:
        """What one of the encoders makes of its mean."""
        out: Tensor = self.post[which](state.value[:, which, 0, 0].to(_dtype(self)))
        return out

    def forward(
        self, points: Float[Tensor, "*b n p"], mask: Bool[Tensor, "*b n"] | None
    ) -> Float[Tensor, "*b o"]:
        """Both encoders, without a state in between."""
        bias = bias_of(mask, None, torch.promote_types(points.dtype, torch.float32))
        parts = zip(self.pre, self.post, strict=True)
        return torch.cat([post(pool(pre(points), bias)[0].to(_dtype(self))) for pre, post in parts], -1)


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

    def needs(self, config: dict[str, Any], *, learning: bool) -> Needs:
        """A point's tokens while they attend to each other; while learning, all that both encoders compute.

        Learning, the context is predicted too: a point is also a target.
        """
        dim, pre, post, decoder = (config[key] for key in ("dim", "pre_depth", "post_depth", "decoder_depth"))
        if learning:
            target = (post + decoder + 8) * dim
            return Needs((2 * (pre + 8) + post + 2) * dim + target, target)
        return Needs(8 * dim, 6 * dim)

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

    def forward(
        self, memory: Attended, xt: Float[Tensor, "*#b m x"]
    ) -> tuple[Float[Tensor, "*b m d"], Float[Tensor, "*b 1 o"]]:
        """What each target reads from the points, and the vector for all of them."""
        return self.attend(memory.context, xt), memory.pooled[..., None, :]


def _dtype(module: nn.Module) -> torch.dtype:
    return next((p.dtype for p in module.parameters()), torch.float32)  # none where they are quantized

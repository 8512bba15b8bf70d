"""Neural processes that are transformers over all their data: LBANP, TNP-D and EQTNP."""

from typing import ClassVar

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn

from constmem.core.checks import positive
from constmem.core.layers import (
    MLP,
    CrossAttention,
    FeedForward,
    Residual,
    SelfAttention,
    attend,
    check_heads,
)
from constmem.core.memory import Needs
from constmem.neural_processes.heads import Gaussian, Levels, Std, decode_levels
from constmem.neural_processes.stored import StoredPoints, StoringProcess


class LBANP(StoringProcess[Tensor]):
    """A neural process whose queries take constant memory, while every update goes through all data again.

    The latents of each layer look at the data anew, so there is no smaller state than the data. The
    defaults are the published sizes.

    Args:
        dim_x, dim_y: channels of inputs and outputs.
        dim: width of all tokens.
        depth: number of layers, and of decoder layers.
        num_latents: learned vectors that attend to the data.
        hidden: width inside feed-forward layers and the predictor.
        embed_depth: layers of the two embedding MLPs.
        residual: "normed" as in the published models, or "raw".
        std: "bounded" (at least 0.05) or "exp".

    Example:
        >>> model = LBANP(dim_x=1, dim_y=1, dim=16, depth=2, num_latents=8).eval()
        >>> x, y = torch.rand(1, 50, 1), torch.rand(1, 50, 1)
        >>> few, many = model.condition(x[:, :5], y[:, :5]), model.condition(x, y)
        >>> many.nbytes == 10 * few.nbytes, model.read(many).shape == model.read(few).shape
        (True, True)
    """

    name: ClassVar[str] = "lbanp"

    def __init__(
        self,
        *,
        dim_x: int,
        dim_y: int,
        dim: int = 64,
        depth: int = 6,
        num_latents: int = 128,
        num_heads: int = 4,
        hidden: int = 128,
        embed_depth: int = 4,
        residual: Residual = "normed",
        std: Std = "bounded",
    ) -> None:
        super().__init__(dim_x=dim_x, dim_y=dim_y)
        positive("depth", depth)
        positive("num_latents", num_latents)
        self.embed = MLP(dim_in=dim_x + dim_y, dim_hidden=dim, dim_out=dim, depth=embed_depth)
        self.embed_target = MLP(dim_in=dim_x, dim_hidden=dim, dim_out=dim, depth=embed_depth)
        self.latents = nn.Parameter(torch.randn(num_latents, dim))

        def cross() -> nn.Module:
            return CrossAttention(dim=dim, num_heads=num_heads, residual=residual)

        def feed() -> nn.Module:
            return FeedForward(dim=dim, hidden=hidden, residual=residual)

        def among() -> nn.Module:
            attention = SelfAttention(dim=dim, num_heads=num_heads, residual=residual)
            return nn.Sequential(feed(), attention, feed())

        self.look = nn.ModuleList(cross() for _ in range(depth))
        self.think = nn.ModuleList(among() for _ in range(depth))
        self.cross = nn.ModuleList(cross() for _ in range(depth))
        self.feed = nn.ModuleList(feed() for _ in range(depth))
        self.head = Gaussian(dim=dim, hidden=hidden, dim_y=dim_y, std=std)

    def needs(self, *, learning: bool) -> Needs:
        """A point's token, its norm, key and value; while learning, the last three in every layer."""
        depth, dim, hidden = (self.config[key] for key in ("depth", "dim", "hidden"))
        if learning:
            embedded = 2 * self.config["embed_depth"] * dim
            return Needs(embedded + depth * 3 * dim, embedded + depth * (7 * dim + 4 * hidden))
        return Needs(4 * dim + self.dim_x + self.dim_y, 4 * (dim + hidden))

    def read(self, state: StoredPoints) -> Float[Tensor, "b depth l d"]:
        """The latents after every layer: linear in the data, and constant from there on."""
        x, y, mask = self._points(state)
        tokens = self.embed(torch.cat([x, y], -1))
        latents = self.latents.expand(state.batch, -1, -1)
        levels: list[Tensor] = []
        for look, think in zip(self.look, self.think, strict=True):
            latents = think(look(latents, tokens, mask))
            levels.append(latents)
        return torch.stack(levels, 1)

    def decode(
        self, memory: Float[Tensor, "b depth l d"], xt: Float[Tensor, "b m x"]
    ) -> tuple[Float[Tensor, "b m y"], Float[Tensor, "b m y"]]:
        tokens = self.embed_target(xt.to(self.dtype))
        mean, std = self.head(decode_levels(tokens, memory.unbind(1), self.cross, self.feed))
        return mean, std


class TNPD(StoringProcess[Levels]):
    """A post-norm transformer over [data (x, y); targets (x, 0)], in which all attend to the data only.

    As published, every query runs the transformer over the data again. But data tokens never attend to
    targets, so here `read` takes them through the layers once, and targets are decoded against them:
    exactly the same predictions. What this costs is memory: `depth` tokens a point, beside the
    point itself, for as long as what `read` gave is kept.

    Args:
        dim_x, dim_y: channels of inputs and outputs.
        dim: width of all tokens.
        depth: number of layers.
        hidden: width inside feed-forward layers and the predictor.
        embed_depth: layers of the embedding MLP.
        std: "bounded" (at least 0.05) or "exp".

    Example:
        >>> model = TNPD(dim_x=1, dim_y=1, dim=16, depth=2).eval()
        >>> x, y = torch.rand(1, 9, 1), torch.rand(1, 9, 1)
        >>> memory = model.read(model.condition(x, y))
        >>> one, all_of_them = model.predict(memory, x[:, 4:5]).mean, model.predict(memory, x).mean
        >>> torch.allclose(one, all_of_them[:, 4:5], atol=1e-6)  # targets do not see each other
        True
    """

    name: ClassVar[str] = "tnpd"

    def __init__(
        self,
        *,
        dim_x: int,
        dim_y: int,
        dim: int = 64,
        depth: int = 6,
        num_heads: int = 4,
        hidden: int = 128,
        embed_depth: int = 4,
        std: Std = "bounded",
    ) -> None:
        super().__init__(dim_x=dim_x, dim_y=dim_y)
        positive("depth", depth)
        self.embed = MLP(dim_in=dim_x + dim_y, dim_hidden=dim, dim_out=dim, depth=embed_depth)
        self.layers = nn.ModuleList(_Layer(dim, num_heads, hidden) for _ in range(depth))
        self.head = Gaussian(dim=dim, hidden=hidden, dim_y=dim_y, std=std, norm=False)

    def needs(self, *, learning: bool) -> Needs:
        """`depth` levels and, in the last layer, a feed-forward; while learning, nine vectors a layer."""
        depth, dim, hidden = (self.config[key] for key in ("depth", "dim", "hidden"))
        if learning:
            return Needs(depth * (9 * dim + hidden), depth * (9 * dim + hidden))
        return Needs((depth + 1) * dim + 3 * hidden + self.dim_x + self.dim_y, 3 * (dim + hidden))

    def read(self, state: StoredPoints) -> Levels:
        """The data's tokens as they enter every layer: `depth` times n vectors."""
        x, y, mask = self._points(state)
        levels: list[Tensor] = [self.embed(torch.cat([x, y], -1))]
        for layer in list(self.layers)[:-1]:
            levels.append(layer(levels[-1], levels[-1], mask))
        return Levels(tuple(levels), mask)

    def decode(
        self, memory: Levels, xt: Float[Tensor, "b m x"]
    ) -> tuple[Float[Tensor, "b m y"], Float[Tensor, "b m y"]]:
        unknown = xt.new_zeros(*xt.shape[:2], self.dim_y)
        tokens = self.embed(torch.cat([xt, unknown], -1).to(self.dtype))
        for level, layer in zip(memory.tokens, self.layers, strict=True):
            tokens = layer(tokens, level, memory.mask)
        return self.head(tokens)  # type: ignore[no-any-return]


class _Layer(nn.Module):
    """A post-norm transformer layer, x attending to a context.

    It starts like PyTorch's own, with branches smaller than what they are added to: weights that keep the
    variance made it learn more slowly.
    """

    def __init__(self, dim: int, num_heads: int, hidden: int) -> None:
        super().__init__()
        check_heads(dim, num_heads)
        self.num_heads = num_heads
        self.query_key_value = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim)
        self.norm = nn.LayerNorm(dim)
        self.expand = nn.Linear(dim, hidden)
        self.contract = nn.Linear(hidden, dim)
        self.norm_feed = nn.LayerNorm(dim)
        nn.init.xavier_uniform_(self.query_key_value.weight)
        nn.init.zeros_(self.query_key_value.bias)
        nn.init.zeros_(self.out.bias)

    def forward(
        self,
        x: Float[Tensor, "b m d"],
        context: Float[Tensor, "b n d"],
        mask: Bool[Tensor, "b n"] | None,
    ) -> Float[Tensor, "b m d"]:
        q, k, v = self._project(x, context)
        x = self.norm(x + self.out(attend(q, k, v, mask).transpose(1, 2).flatten(2)))
        out: Tensor = self.norm_feed(x + self.contract(F.relu(self.expand(x))))
        return out

    def _project(self, x: Tensor, context: Tensor) -> list[Float[Tensor, "b h n c"]]:
        dim = x.shape[-1]
        weight, bias = self.query_key_value.weight, self.query_key_value.bias
        q = F.linear(x, weight[:dim], bias[:dim])
        k, v = F.linear(context, weight[dim:], bias[dim:]).chunk(2, -1)
        return [t.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for t in (q, k, v)]


class EQTNP(StoringProcess[Levels]):
    """The data attend to each other once, in quadratic time; targets then read all levels in linear time.

    Args:
        dim_x, dim_y: channels of inputs and outputs.
        dim: width of all tokens.
        depth: number of decoder layers; the data go through one less.
        hidden: width inside feed-forward layers and the predictor.
        embed_depth: layers of the two embedding MLPs.
        residual: "normed" as in the published models, or "raw".
        std: "bounded" (at least 0.05) or "exp".

    Example:
        >>> model = EQTNP(dim_x=1, dim_y=1, dim=16, depth=3).eval()
        >>> x, y = torch.rand(1, 9, 1), torch.rand(1, 9, 1)
        >>> memory = model.read(model.condition(x, y))
        >>> one, all_of_them = model.predict(memory, x[:, 4:5]).mean, model.predict(memory, x).mean
        >>> torch.allclose(one, all_of_them[:, 4:5], atol=1e-6)  # targets do not see each other
        True
    """

    name: ClassVar[str] = "eqtnp"

    def __init__(
        self,
        *,
        dim_x: int,
        dim_y: int,
        dim: int = 64,
        depth: int = 6,
        num_heads: int = 4,
        hidden: int = 128,
        embed_depth: int = 4,
        residual: Residual = "normed",
        std: Std = "bounded",
    ) -> None:
        super().__init__(dim_x=dim_x, dim_y=dim_y)
        positive("depth", depth)
        self.embed = MLP(dim_in=dim_x + dim_y, dim_hidden=dim, dim_out=dim, depth=embed_depth)
        self.embed_target = MLP(dim_in=dim_x, dim_hidden=dim, dim_out=dim, depth=embed_depth)

        def feeds(count: int) -> nn.ModuleList:
            return nn.ModuleList(FeedForward(dim=dim, hidden=hidden, residual=residual) for _ in range(count))

        self.among = nn.ModuleList(
            SelfAttention(dim=dim, num_heads=num_heads, residual=residual) for _ in range(depth - 1)
        )
        self.among_feed = feeds(depth - 1)
        self.cross = nn.ModuleList(
            CrossAttention(dim=dim, num_heads=num_heads, residual=residual) for _ in range(depth)
        )
        self.feed = feeds(depth)
        self.head = Gaussian(dim=dim, hidden=hidden, dim_y=dim_y, std=std)

    def needs(self, *, learning: bool) -> Needs:
        """`depth` levels and, in the last, a feed-forward; while learning, all that every layer computes."""
        depth, dim, hidden = (self.config[key] for key in ("depth", "dim", "hidden"))
        if learning:
            point = (depth - 1) * (9 * dim + 4 * hidden) + depth * 3 * dim
            return Needs(point, depth * (7 * dim + 4 * hidden))
        return Needs((depth + 1) * dim + 4 * hidden + self.dim_x + self.dim_y, 4 * (dim + hidden))

    def read(self, state: StoredPoints) -> Levels:
        """The data's tokens at every level: `depth` times n vectors."""
        x, y, mask = self._points(state)
        levels: list[Tensor] = [self.embed(torch.cat([x, y], -1))]
        for among, feed in zip(self.among, self.among_feed, strict=True):
            levels.append(feed(among(levels[-1], mask)))
        return Levels(tuple(levels), mask)

    def decode(
        self, memory: Levels, xt: Float[Tensor, "b m x"]
    ) -> tuple[Float[Tensor, "b m y"], Float[Tensor, "b m y"]]:
        tokens = self.embed_target(xt.to(self.dtype))
        mean, std = self.head(decode_levels(tokens, memory.tokens, self.cross, self.feed, memory.mask))
        return mean, std

"""Neural processes that are transformers over all their data: LBANP, TNP-D and EQTNP."""

from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple, Required, TypedDict, Unpack

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn

from constmem.core import layers
from constmem.core.block import through_levels
from constmem.core.checks import positive
from constmem.core.costs import Needs
from constmem.core.layers import MLP, CrossAttention, FeedForward, Residual, SelfAttention
from constmem.neural_processes.base import M, NeuralProcess
from constmem.neural_processes.heads import Gaussian, Std
from constmem.neural_processes.points import S
from constmem.neural_processes.states import StoredPoints, StoringProcess


class TokenSettings(TypedDict, total=False):
    """The settings of a `TokenProcess`."""

    dim_x: Required[int]
    dim_y: Required[int]
    dim: int
    depth: int
    num_heads: int
    hidden: int
    embed_depth: int
    std: Std


class TokenProcess(NeuralProcess[S, M]):
    """A model that makes a token of every point, with attention among tokens; by default as published.

    Args:
        dim_x, dim_y: channels of inputs and outputs.
        dim: width of all tokens.
        depth: number of layers.
        num_heads: of all attention.
        hidden: width inside feed-forward layers and the predictor.
        embed_depth: layers of the embedding MLPs.
        std: "bounded" (at least 0.05) or "exp".
    """

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
        del num_heads, hidden, std  # the layers take them from `config`
        positive("depth", depth)
        self.embed = MLP(dim_in=dim_x + dim_y, dim_hidden=dim, dim_out=dim, depth=embed_depth)


class LevelSettings(TokenSettings, total=False):
    """The settings of a `LevelProcess`."""

    residual: Residual


class LevelProcess(TokenProcess[S, M]):
    """A model with `depth` levels of a context, which targets attend to one after another.

    Args:
        residual: "normed" as in the published models, or "raw".
        settings: those of `TokenProcess`.
    """

    def __init__(self, *, residual: Residual = "normed", **settings: Unpack[TokenSettings]) -> None:
        super().__init__(**settings)
        del residual  # the layers take it from `config`
        dim, depth = self.config["dim"], self.config["embed_depth"]
        self.embed_target = MLP(dim_in=self.dim_x, dim_hidden=dim, dim_out=dim, depth=depth)

    def _layer(self, kind: type[nn.Module]) -> nn.Module:
        """A layer of the model's sizes."""
        inside = "hidden" if kind is FeedForward else "num_heads"
        return kind(**self._set("dim", inside, "residual"))

    def _add_decoder(self) -> None:
        """What targets go through: the last of a model's weights."""
        depth = self.config["depth"]
        self.cross = nn.ModuleList(self._layer(CrossAttention) for _ in range(depth))
        self.feed = nn.ModuleList(self._layer(FeedForward) for _ in range(depth))
        self.head: nn.Module = Gaussian(**self._set("dim", "hidden", "std"), dim_y=self.dim_y)

    def _decode_levels(
        self, levels: Sequence[Tensor], xt: Tensor, mask: Tensor | None = None
    ) -> tuple[Float[Tensor, "b m y"], Float[Tensor, "b m y"]]:
        """Predictions at targets that attend to every level, and never see each other."""
        parts: Any = self._modules  # past the look-ups of modules: small queries feel those
        layers = parts["cross"], parts["feed"]
        tokens = through_levels(xt.to(self.dtype), levels, *layers, mask, embed=parts["embed_target"])
        return parts["head"](tokens)  # type: ignore[no-any-return]


class Levels(NamedTuple):
    """Tokens of a ragged context at every level of a model, and which of them are real (None: all)."""

    tokens: tuple[Float[Tensor, "b n d"], ...]
    mask: Bool[Tensor, "b n"] | None


class LBANP(LevelProcess[StoredPoints, Tensor], StoringProcess[Tensor]):
    """A neural process whose queries take constant memory, while every update goes through all data again.

    The latents of each layer read the data again, so there is no smaller state than the data.

    Args:
        num_latents: learned vectors that attend to the data.
        settings: those of `LevelProcess`.

    Example:
        >>> model = LBANP(dim_x=1, dim_y=1, dim=16, depth=2, num_latents=8).eval()
        >>> x, y = torch.rand(1, 50, 1), torch.rand(1, 50, 1)
        >>> few, many = model.condition(x[:, :5], y[:, :5]), model.condition(x, y)
        >>> many.nbytes == 10 * few.nbytes, model.read(many).shape == model.read(few).shape
        (True, True)
    """

    name: ClassVar[str] = "lbanp"

    def __init__(self, *, num_latents: int = 128, **settings: Unpack[LevelSettings]) -> None:
        super().__init__(**settings)
        positive("num_latents", num_latents)
        depth = self.config["depth"]
        self.latents = nn.Parameter(torch.randn(num_latents, self.config["dim"]))
        self.look = nn.ModuleList(self._layer(CrossAttention) for _ in range(depth))
        self.think = nn.ModuleList(self._thought() for _ in range(depth))
        self._add_decoder()

    def _thought(self) -> nn.Module:
        attention = self._layer(SelfAttention)  # first, so that a seed gives the weights it always gave
        return nn.Sequential(self._layer(FeedForward), attention, self._layer(FeedForward))

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
        return self._decode_levels(memory.unbind(1), xt)


class TNPD(TokenProcess[StoredPoints, Levels], StoringProcess[Levels]):
    """A post-norm transformer over [data (x, y); targets (x, 0)], in which all attend to the data only.

    As published, every query runs the transformer over the data again. But data tokens never attend to
    targets, so here `read` takes them through the layers once, and targets are decoded against them:
    exactly the same predictions. What this costs is memory: `depth` tokens a point, beside the
    point itself, for as long as what `read` gave is kept. Its settings are those of `TokenProcess`.

    Example:
        >>> model = TNPD(dim_x=1, dim_y=1, dim=16, depth=2).eval()
        >>> x, y = torch.rand(1, 9, 1), torch.rand(1, 9, 1)
        >>> memory = model.read(model.condition(x, y))
        >>> one, all_of_them = model.predict(memory, x[:, 4:5]).mean, model.predict(memory, x).mean
        >>> torch.allclose(one, all_of_them[:, 4:5], atol=1e-6)  # targets do not see each other
        True
    """

    name: ClassVar[str] = "tnpd"

    def __init__(self, **settings: Unpack[TokenSettings]) -> None:
        super().__init__(**settings)
        dim, num_heads, hidden = (self.config[key] for key in ("dim", "num_heads", "hidden"))
        self.layers = nn.ModuleList(_Layer(dim, num_heads, hidden) for _ in range(self.config["depth"]))
        self.head: nn.Module = Gaussian(**self._set("dim", "hidden", "std"), dim_y=self.dim_y, norm=False)

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
        layers.check_heads(dim, num_heads)
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
        self, x: Float[Tensor, "b m d"], context: Float[Tensor, "b n d"], mask: Bool[Tensor, "b n"] | None
    ) -> Float[Tensor, "b m d"]:
        q, k, v = self.project(x, context)
        x = self.norm(x + self.out(layers.attend(q, k, v, mask).transpose(1, 2).flatten(2)))
        return self.norm_feed(x + self.contract(F.relu(self.expand(x))))  # type: ignore[no-any-return]

    def project(self, x: Tensor, context: Tensor) -> list[Float[Tensor, "b h n c"]]:
        dim, (weight, bias) = x.shape[-1], layers.affine(self.query_key_value)
        q = F.linear(x, weight[:dim], bias[:dim])
        k, v = F.linear(context, weight[dim:], bias[dim:]).chunk(2, -1)
        return [t.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for t in (q, k, v)]


class EQTNP(LevelProcess[StoredPoints, Levels], StoringProcess[Levels]):
    """The data attend to each other once, in quadratic time; targets then read all levels in linear time.

    Its settings are those of `LevelProcess`; the data go through one layer less than the targets.

    Example:
        >>> model = EQTNP(dim_x=1, dim_y=1, dim=16, depth=3).eval()
        >>> x, y = torch.rand(1, 9, 1), torch.rand(1, 9, 1)
        >>> [level.shape for level in model.read(model.condition(x, y)).tokens] == 3 * [(1, 9, 16)]
        True
    """

    name: ClassVar[str] = "eqtnp"

    def __init__(self, **settings: Unpack[LevelSettings]) -> None:
        super().__init__(**settings)
        before_last = range(self.config["depth"] - 1)
        self.among = nn.ModuleList(self._layer(SelfAttention) for _ in before_last)
        self.among_feed = nn.ModuleList(self._layer(FeedForward) for _ in before_last)
        self._add_decoder()

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
        return self._decode_levels(memory.tokens, xt, memory.mask)

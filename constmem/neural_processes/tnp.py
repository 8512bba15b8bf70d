"""Transformer Neural Process, diagonal: one transformer over data and targets, all attending to data only."""

from typing import ClassVar

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn

from constmem.core.checks import positive
from constmem.core.layers import MLP, attend, check_heads
from constmem.core.memory import Needs
from constmem.neural_processes.heads import Gaussian, Std
from constmem.neural_processes.levels import Levels
from constmem.neural_processes.stored import StoredPoints, StoringProcess


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
        config = {k: v for k, v in locals().items() if k not in ("self", "__class__")}
        super().__init__(dim_x=dim_x, dim_y=dim_y, config=config)
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
        mean, std = self.head(tokens)
        return mean, std


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

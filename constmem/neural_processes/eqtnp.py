"""Efficient-Query Transformer Neural Process: a transformer over the data, read level by level."""

from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor, nn

from constmem.core.checks import positive
from constmem.core.layers import MLP, CrossAttention, FeedForward, Residual, SelfAttention
from constmem.core.memory import Needs
from constmem.neural_processes.heads import Gaussian, Std
from constmem.neural_processes.levels import Levels, decode_levels
from constmem.neural_processes.stored import StoredPoints, StoringProcess


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
        config = {k: v for k, v in locals().items() if k not in ("self", "__class__")}
        super().__init__(dim_x=dim_x, dim_y=dim_y, config=config)
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

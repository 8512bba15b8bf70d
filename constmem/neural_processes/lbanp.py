"""Latent Bottlenecked Attentive Neural Process: latents that attend to all data, layer after layer."""

from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor, nn

from constmem.core.checks import positive
from constmem.core.layers import MLP, CrossAttention, FeedForward, Residual, SelfAttention
from constmem.core.memory import Needs
from constmem.neural_processes.heads import Gaussian, Std
from constmem.neural_processes.levels import decode_levels
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
        config = {k: v for k, v in locals().items() if k not in ("self", "__class__")}
        super().__init__(dim_x=dim_x, dim_y=dim_y, config=config)
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

"""Constant Memory Attentive Neural Process: stacked CMABs, and a decoder that reads every level."""

from collections.abc import Set
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor, nn

from constmem.core import checks
from constmem.core.block import CMABStack
from constmem.core.fold import Chunk, fold, fused_fold
from constmem.core.layers import MLP, CrossAttention, FeedForward, Residual, on_gpu
from constmem.core.model import listed
from constmem.core.observation import Observation
from constmem.core.state import AttentionState
from constmem.kernels import Graphs
from constmem.neural_processes.base import NeuralProcess
from constmem.neural_processes.heads import Gaussian, Std, decode_levels


class CMANP(NeuralProcess):
    """A neural process in constant memory: conditioning, updating, and (training's) gradients too.

    The defaults are the paper's sizes.

    Args:
        dim_x, dim_y: channels of inputs and outputs.
        dim: width of all tokens.
        depth: number of blocks, and of decoder layers.
        num_slots: learned queries a block looks at the data with; they size the state.
        num_latents: vectors the blocks hand to each other.
        hidden: width inside feed-forward layers and the predictor.
        embed_depth: layers of the two embedding MLPs.
        residual: "normed" as in the published models, or "raw".
        std: "bounded" (at least 0.05) or "exp".

    Example:
        >>> model = CMANP(dim_x=1, dim_y=1, dim=16, depth=2, num_slots=8, num_latents=8).eval()
        >>> x, y = torch.rand(1, 50, 1), torch.rand(1, 50, 1)
        >>> with torch.no_grad():
        ...     streamed = model.update(model.condition(x[:, :30], y[:, :30]), x[:, 30:], y[:, 30:])
        ...     at_once = model.condition(x, y)
        ...     same = torch.allclose(
        ...         model.query(streamed, x).mean, model.query(at_once, x).mean, atol=1e-5)
        >>> same, streamed.nbytes == at_once.nbytes, streamed.count.item()
        (True, True, 50)
    """

    name: ClassVar[str] = "cmanp"
    decoding: ClassVar[Set[str]] = {"embed_target", "cross", "feed", "head"}

    def __init__(
        self,
        *,
        dim_x: int,
        dim_y: int,
        dim: int = 64,
        depth: int = 6,
        num_slots: int = 128,
        num_latents: int = 128,
        num_heads: int = 4,
        hidden: int = 128,
        embed_depth: int = 4,
        residual: Residual = "normed",
        std: Std = "bounded",
    ) -> None:
        super().__init__(dim_x=dim_x, dim_y=dim_y)
        checks.positive("num_latents", num_latents)
        self.embed = MLP(dim_in=dim_x + dim_y, dim_hidden=dim, dim_out=dim, depth=embed_depth)
        self.embed_target = MLP(dim_in=dim_x, dim_hidden=dim, dim_out=dim, depth=embed_depth)
        self.latents = nn.Parameter(torch.randn(num_latents, dim))
        self.stack = CMABStack(
            depth=depth,
            dim=dim,
            num_slots=num_slots,
            num_heads=num_heads,
            hidden=hidden,
            residual=residual,
        )
        self.cross = nn.ModuleList(
            CrossAttention(dim=dim, num_heads=num_heads, residual=residual) for _ in range(depth)
        )
        self.feed = nn.ModuleList(
            FeedForward(dim=dim, hidden=hidden, residual=residual) for _ in range(depth)
        )
        self.head = Gaussian(dim=dim, hidden=hidden, dim_y=dim_y, std=std)
        self._graphs = Graphs()

    def empty(self, batch: int = 1) -> AttentionState:
        return self.stack.empty(batch)

    def _observe(
        self, x: Tensor, y: Tensor, mask: Tensor | None, log_weight: Tensor | None
    ) -> AttentionState:
        points = torch.cat([x, y], -1).to(self.dtype)
        return self.stack.observation.observe(points, mask, log_weight, embed=self.embed)

    def _extended(
        self, state: AttentionState, x: Tensor, y: Tensor, mask: Tensor | None, chunk: int | None
    ) -> AttentionState:
        if x.shape[1] == 1 and mask is None and not self._learns():
            own_x, own_y, _ = self._scaled((x, y, None))
            points = torch.cat([own_x, own_y], -1).to(self.dtype)
            found = self.stack.observation.extended(state, points, embed=self.embed)
            if found is not None and checks.surely_finite(points):  # asked last: a GPU is at work meanwhile
                return found
        return super()._extended(state, x, y, mask, chunk)

    def _chunk(self) -> int:
        return self.stack.observation.chunk()

    def _fold(self, chunks: list[Chunk]) -> AttentionState:
        observation = self.stack.observation
        found = fused_fold(observation, self.embed, chunks)
        if found is not None:
            return found
        return fold(_Projection(self.embed, observation), observation.prepared().queries, chunks)

    def observing_parameters(self) -> list[Tensor]:
        own: Any = self._modules  # past the look-ups of modules: small updates feel those
        return listed(own["embed"], own["stack"]._modules["observation"])

    @property
    def layout(self) -> tuple[int, ...]:
        return self.stack.layout

    def read(self, state: AttentionState) -> Float[Tensor, "b depth l d"]:
        """The latents after every block."""
        work, value = self._read, state.value
        return self._graphs.run(self, work, value) if on_gpu(value) else work(value)

    def _read(self, value: Float[Tensor, "b depth h s c"]) -> Float[Tensor, "b depth l d"]:
        return torch.stack(self.stack.read_value(value, self.latents.expand(len(value), -1, -1)), 1)

    def decode(
        self, memory: Float[Tensor, "b depth l d"], xt: Float[Tensor, "b m x"]
    ) -> tuple[Float[Tensor, "b m y"], Float[Tensor, "b m y"]]:
        given = memory, xt
        return self._graphs.run(self, self._decode, *given) if on_gpu(memory) else self._decode(*given)

    def _decode(self, memory: Tensor, xt: Tensor) -> tuple[Tensor, Tensor]:
        tokens = self.embed_target(xt.to(memory.dtype))
        mean, std = self.head(decode_levels(tokens, memory.unbind(1), self.cross, self.feed))
        return mean, std


class _Projection(nn.Module):
    """From points to the keys and values of all blocks."""

    def __init__(self, embed: MLP, observation: Observation) -> None:
        super().__init__()
        self.embed, self.observation = embed, observation

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        points = torch.cat([x, y], -1).to(self.observation.slots.dtype)
        k, v = self.observation(self.embed(points))
        return k, v

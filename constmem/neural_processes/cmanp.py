"""Constant Memory Attentive Neural Process: stacked CMABs, and a decoder that reads every level."""

from typing import Any, ClassVar, Unpack

import torch
from jaxtyping import Float
from torch import Tensor, nn

from constmem.core import checks
from constmem.core.block import CMABStack
from constmem.core.fold import Chunk, fold, fused_fold
from constmem.core.layers import MLP
from constmem.core.observation import Observation
from constmem.core.state import AttentionState
from constmem.kernels import Graphs
from constmem.neural_processes.transformers import LevelProcess, LevelSettings


class CMANP(LevelProcess[AttentionState, Tensor]):
    """A neural process in constant memory: conditioning, updating, and (training's) gradients too.

    The defaults are the paper's sizes.

    Args:
        num_slots: learned queries a block looks at the data with; they size the state.
        num_latents: vectors the blocks hand to each other.
        settings: those of `LevelProcess`; `depth` is the number of blocks, and of decoder layers.

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

    def __init__(
        self, *, num_slots: int = 128, num_latents: int = 128, **settings: Unpack[LevelSettings]
    ) -> None:
        super().__init__(**settings)
        checks.positive("num_latents", num_latents)
        self.latents = nn.Parameter(torch.randn(num_latents, self.config["dim"]))
        sizes = self._set("depth", "dim", "num_heads", "hidden", "residual")
        self.stack = CMABStack(num_slots=num_slots, **sizes)
        self._add_decoder()
        self._graphs = Graphs()

    def empty(self, batch: int = 1) -> AttentionState:
        return self.stack.empty(batch)

    def _observe(
        self, x: Tensor, y: Tensor, mask: Tensor | None, log_weight: Tensor | None
    ) -> AttentionState:
        points = torch.cat([x, y], -1).to(self.dtype)
        return self.stack.observe(points, mask, log_weight, embed=self.embed)

    def _extended(
        self, state: AttentionState, x: Tensor, y: Tensor, mask: Tensor | None, chunk: int | None
    ) -> AttentionState:
        if x.shape[1] == 1 and mask is None and not self._learns():
            own_x, own_y, _ = self._scaled((x, y, None))
            points, weights = torch.cat([own_x, own_y], -1).to(self.dtype), self._weights_of(state)
            observation = self.stack.observation
            found = observation.extended(state, points, embed=self.embed, known_as=weights)
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
        stack: Any = self._modules["stack"]  # past the look-ups of modules: small updates feel those
        embed: Any = self._modules["embed"]
        return [*embed.tensors(), *stack._modules["observation"].weights()]

    @property
    def layout(self) -> tuple[int, ...]:
        return self.stack.layout

    def read(self, state: AttentionState) -> Float[Tensor, "b depth l d"]:
        """The latents after every block."""
        return self._graphs.run(self, self._read, state.value)

    def _read(self, value: Float[Tensor, "b depth h s c"]) -> Float[Tensor, "b depth l d"]:
        return torch.stack(self.stack.read_value(value, self.latents.expand(len(value), -1, -1)), 1)

    def decode(
        self, memory: Float[Tensor, "b depth l d"], xt: Float[Tensor, "b m x"]
    ) -> tuple[Float[Tensor, "b m y"], Float[Tensor, "b m y"]]:
        return self._graphs.run(self, self._decode, memory, xt)

    def _decode(self, memory: Tensor, xt: Tensor) -> tuple[Tensor, Tensor]:
        return self._decode_levels(memory.unbind(1), xt)


class _Projection(nn.Module):
    """From points to the keys and values of all blocks."""

    def __init__(self, embed: MLP, observation: Observation) -> None:
        super().__init__()
        self.embed, self.observation = embed, observation

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        points = torch.cat([x, y], -1).to(self.observation.slots.dtype)
        k, v = self.observation(self.embed(points))
        return k, v

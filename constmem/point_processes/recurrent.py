"""A recurrent network over gaps and marks with a mixture head: intensity-free learning of point processes."""

from typing import ClassVar

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from constmem.point_processes.base import PointProcess
from constmem.point_processes.chunks import Chunk, shifted
from constmem.point_processes.heads import GapFeatures, MarkEmbedding
from constmem.point_processes.states import EventState


class GRU(PointProcess):
    """A gated recurrent unit reads log gap and mark of each event; its state is one vector.

    Constant memory too, but of a fixed order: states of two parts of a stream cannot be merged.

    Args:
        num_marks: kinds of events.
        dim: width of embeddings and of the state.
        hidden: width inside the heads.
        components: log-normals of the mixture.
        mark_given_gap: the mark is predicted from the gap too.
        dropout: of what is known, before the heads, while training.
        unit: of the times it is trained on; `standardise` sets it.
    """

    name: ClassVar[str] = "gru"

    def __init__(
        self,
        *,
        num_marks: int,
        dim: int = 64,
        hidden: int = 64,
        components: int = 16,
        mark_given_gap: bool = False,
        dropout: float = 0.1,
        unit: str | None = None,
    ) -> None:
        config = {k: v for k, v in locals().items() if k not in ("self", "__class__")}
        super().__init__(
            num_marks=num_marks, features=dim, hidden=hidden, components=components,
            mark_given_gap=mark_given_gap, dropout=dropout, unit=unit, config=config,
        )  # fmt: skip
        self.marks = MarkEmbedding(num_marks=num_marks, dim=dim)
        self.gaps = GapFeatures(dim=dim)
        self.cell = nn.GRU(dim, dim, batch_first=True)

    def train(self, mode: bool = True) -> "GRU":
        """As ever, but for the cell, which has no dropout: cuDNN keeps what gradients need only so."""
        super().train(mode)
        self.cell.train()
        return self

    def _blank(self, batch: int) -> dict[str, Tensor]:
        return {"known": torch.zeros(batch, self.cell.hidden_size, dtype=self.dtype, device=self.device)}

    def _read(self, state: EventState) -> Float[Tensor, "b f"]:
        return state.memory["known"]

    def _observe(self, state: EventState, chunk: Chunk) -> dict[str, Tensor]:
        return self._scan(state, chunk, chunk.real)[1]

    def _scan(
        self,
        state: EventState,
        chunk: Chunk,
        wanted: Bool[Tensor, "b t"] | None,  # noqa: ARG002
    ) -> tuple[Float[Tensor, "b t f"], dict[str, Tensor]]:
        tokens = self.marks(chunk.marks) + self.gaps(self._standard(chunk.gaps))
        before = state.memory["known"]
        after, _ = self.cell(tokens, before[None].contiguous())
        return shifted(before, after), {"known": chunk.last_of(after, before)}

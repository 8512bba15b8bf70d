"""The baseline that every event model should beat, and some do not: no memory of anything."""

from typing import ClassVar

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from constmem.point_processes.base import PointProcess
from constmem.point_processes.chunks import Chunk
from constmem.point_processes.states import EventState


class Trivial(PointProcess):
    """A renewal process of independent marks: one mixture for all gaps, one distribution for all marks.

    Args:
        num_marks: kinds of events.
        components: log-normals of the mixture.
        dim, hidden: of the vector that the heads see, the same for all events.
        mark_given_gap: the mark depends on the gap.
        dropout: of what is known, before the heads, while training.
        unit: of the times it is trained on; `standardise` sets it.
    """

    name: ClassVar[str] = "trivial"

    def __init__(
        self,
        *,
        num_marks: int,
        components: int = 16,
        dim: int = 16,
        hidden: int = 64,
        mark_given_gap: bool = False,
        dropout: float = 0.0,
        unit: str | None = None,
    ) -> None:
        config = {k: v for k, v in locals().items() if k not in ("self", "__class__")}
        super().__init__(
            num_marks=num_marks, features=dim, hidden=hidden, components=components,
            mark_given_gap=mark_given_gap, dropout=dropout, unit=unit, config=config,
        )  # fmt: skip
        self.known = nn.Parameter(torch.randn(dim))

    def _blank(self, batch: int) -> dict[str, Tensor]:  # noqa: ARG002
        return {}

    def _read(self, state: EventState) -> Float[Tensor, "b f"]:
        return self.known.expand(state.batch, -1)

    def _observe(self, state: EventState, chunk: Chunk) -> dict[str, Tensor]:  # noqa: ARG002
        return {}

    def _scan(
        self,
        state: EventState,  # noqa: ARG002
        chunk: Chunk,
        wanted: Bool[Tensor, "b t"] | None,  # noqa: ARG002
    ) -> tuple[Float[Tensor, "b t f"], dict[str, Tensor]]:
        return self.known.expand(*chunk.times.shape, -1), {}

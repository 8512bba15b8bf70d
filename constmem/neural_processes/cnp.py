"""Conditional neural processes: the data as means of what each point says, or attended to by targets."""

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from constmem.core.fold import Chunk, joined
from constmem.core.memory import Needs
from constmem.core.state import AttentionState
from constmem.neural_processes.base import NeuralProcess
from constmem.neural_processes.encoders import Attended, AttentiveEncoder, PointDecoder, PoolingPair
from constmem.neural_processes.heads import AnyStd
from constmem.neural_processes.stored import StoredPoints, StoringProcess


class CNP(NeuralProcess[AttentionState, Tensor]):
    """A neural process whose state is two running means: constant memory, and the same for all targets.

    The default depths are the published ones for Gaussian processes; trained on context and targets.

    Args:
        dim_x, dim_y: channels of inputs and outputs.
        dim: width of everything inside.
        pre_depth, post_depth: layers of the MLPs before and after the means.
        decoder_depth: layers of the decoder.
        std: "coarse" (at least 0.1) as published, "bounded" (at least 0.05) or "exp".

    Example:
        >>> model = CNP(dim_x=1, dim_y=1, dim=16).eval()
        >>> x, y = torch.rand(1, 50, 1), torch.rand(1, 50, 1)
        >>> with torch.no_grad():
        ...     some, all_of_them = model.condition(x[:, :30], y[:, :30]), model.condition(x, y)
        ...     rest = all_of_them.remove(some)
        ...     same = torch.allclose(rest.value, model.condition(x[:, 30:], y[:, 30:]).value, atol=1e-5)
        >>> same, rest.count.item(), rest.nbytes == all_of_them.nbytes
        (True, 20, True)
    """

    name: ClassVar[str] = "cnp"

    def __init__(
        self,
        *,
        dim_x: int,
        dim_y: int,
        dim: int = 128,
        pre_depth: int = 4,
        post_depth: int = 2,
        decoder_depth: int = 3,
        std: AnyStd = "coarse",
    ) -> None:
        super().__init__(dim_x=dim_x, dim_y=dim_y)
        self.encoder = PoolingPair(
            dim_x=dim_x, dim_y=dim_y, dim=dim, outs=(dim, dim), pre_depth=pre_depth, post_depth=post_depth
        )
        self.decoder = PointDecoder(
            dim_x=dim_x, dim_in=2 * dim, dim=dim, dim_y=dim_y, depth=decoder_depth, std=std
        )

    def empty(self, batch: int = 1) -> AttentionState:
        return self.encoder.empty(batch, self.device)

    def _observe(
        self, x: Tensor, y: Tensor, mask: Tensor | None, log_weight: Tensor | None
    ) -> AttentionState:
        return self.encoder.observe(torch.cat([x, y], -1).to(self.dtype), mask, log_weight)

    def observing_parameters(self) -> list[Tensor]:
        return self.encoder.observing()

    @property
    def layout(self) -> tuple[int, ...]:
        return self.encoder.layout

    def read(self, state: AttentionState) -> Float[Tensor, "b r"]:
        """What both encoders make of their means."""
        return torch.cat([self.encoder.read(state, which) for which in (0, 1)], -1)

    def decode(
        self, memory: Float[Tensor, "b r"], xt: Float[Tensor, "b m x"]
    ) -> tuple[Float[Tensor, "b m y"], Float[Tensor, "b m y"]]:
        mean, std = self.decoder(xt.to(self.dtype), memory[:, None])
        return mean, std

    def _loss(self, context: Chunk, targets: Chunk, noise: Tensor) -> Tensor:
        return super()._loss(context, joined(context, targets), noise)


class CANP(StoringProcess[Attended]):
    """A conditional neural process whose targets attend to the data, which attend to each other.

    The default depths are the published ones for Gaussian processes; trained on context and targets.

    Args:
        dim_x, dim_y: channels of inputs and outputs.
        dim: width of everything inside.
        pre_depth: layers before the mean and of the values (self-attention stands for two of them).
        post_depth: layers after the mean, and of queries and keys.
        decoder_depth: layers of the decoder.
        std: "coarse" (at least 0.1) as published, "bounded" (at least 0.05) or "exp".
        value_relu: False as published; True for weights of earlier versions, which had one ReLU too many.

    Example:
        >>> model = CANP(dim_x=1, dim_y=1, dim=16).eval()
        >>> x, y = torch.rand(1, 9, 1), torch.rand(1, 9, 1)
        >>> streamed = model.update(model.condition(x[:, :5], y[:, :5]), x[:, 5:], y[:, 5:])
        >>> at_once = model.query(model.condition(x, y), x).mean
        >>> torch.allclose(model.query(streamed, x).mean, at_once, atol=1e-6)
        True
    """

    name: ClassVar[str] = "canp"
    older: ClassVar[Mapping[str, Any]] = {"value_relu": True}

    def __init__(
        self,
        *,
        dim_x: int,
        dim_y: int,
        dim: int = 128,
        num_heads: int = 8,
        pre_depth: int = 4,
        post_depth: int = 2,
        decoder_depth: int = 3,
        std: AnyStd = "coarse",
        value_relu: bool = False,
    ) -> None:
        super().__init__(dim_x=dim_x, dim_y=dim_y)
        self.encoder = AttentiveEncoder(
            dim_x=dim_x,
            dim_y=dim_y,
            dim=dim,
            out=dim,
            pre_depth=pre_depth,
            post_depth=post_depth,
            num_heads=num_heads,
            value_relu=value_relu,
        )
        self.decoder = PointDecoder(
            dim_x=dim_x, dim_in=2 * dim, dim=dim, dim_y=dim_y, depth=decoder_depth, std=std
        )

    def needs(self, *, learning: bool) -> Needs:
        return self.encoder.needs(self.config, learning=learning)

    def read(self, state: StoredPoints) -> Attended:
        """The data's mean, and their keys and values: two vectors a point."""
        return self.encoder.encode(*self._points(state))

    def decode(
        self, memory: Attended, xt: Float[Tensor, "b m x"]
    ) -> tuple[Float[Tensor, "b m y"], Float[Tensor, "b m y"]]:
        xt = xt.to(self.dtype)
        mean, std = self.decoder(xt, *self.encoder(memory, xt))
        return mean, std

    def _loss(self, context: Chunk, targets: Chunk, noise: Tensor) -> Tensor:
        return super()._loss(context, joined(context, targets), noise)

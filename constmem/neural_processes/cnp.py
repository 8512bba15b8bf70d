"""The CNP family: what its models share, and the conditional ones, by means of points or by attention."""

from collections.abc import Mapping
from typing import Any, ClassVar, Required, TypedDict, Unpack

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from constmem.core.algebra import bias_of
from constmem.core.checks import positive
from constmem.core.costs import Needs
from constmem.core.fold import Chunk, joined
from constmem.core.layers import MLP, RELU, affine, keep_variance
from constmem.core.model import listed
from constmem.core.state import AttentionState
from constmem.neural_processes.base import M, NeuralProcess
from constmem.neural_processes.encoders import Attended, AttentiveEncoder, Keyed, PoolingPair, linear_in_parts
from constmem.neural_processes.heads import AnyStd, std_of
from constmem.neural_processes.points import S
from constmem.neural_processes.states import StoredPoints, StoringProcess


class PointDecoder(nn.Module):
    """An MLP from a target's x and what was encoded to mean and standard deviation."""

    def __init__(
        self, *, dim_x: int, dim_y: int, dim_in: int, dim: int, decoder_depth: int, std: AnyStd
    ) -> None:
        super().__init__()
        if std not in ("bounded", "exp", "coarse"):
            raise ValueError(f"std must be 'bounded', 'exp' or 'coarse', not {std!r}")
        if decoder_depth < 2:
            raise ValueError(f"decoder_depth must be at least 2, not {decoder_depth}")
        self.std: AnyStd = std
        self.first = keep_variance(nn.Linear(dim_x + dim_in, dim), gain=RELU)
        share = torch.tensor([dim_x] * dim_x + [dim_in] * dim_in) / (dim_x + dim_in)
        with torch.no_grad():  # x, a few channels among many, starts with half of the say
            self.first.weight /= (2 * share).sqrt()
        self.rest = MLP(dim_in=dim, dim_hidden=dim, dim_out=2 * dim_y, depth=decoder_depth - 1)

    def forward(
        self, xt: Float[Tensor, "*#b x"], *parts: Float[Tensor, "*#b _"]
    ) -> tuple[Float[Tensor, "*b y"], Float[Tensor, "*b y"]]:
        """Mean and standard deviation from what was encoded, in as many parts as there are."""
        return self.predict(self.hidden(xt, *parts))

    def hidden(self, xt: Float[Tensor, "*#b x"], *parts: Float[Tensor, "*#b _"]) -> Float[Tensor, "*b d"]:
        """What the first layer gives."""
        return linear_in_parts((xt, *parts), *affine(self.first))

    def predict(self, hidden: Float[Tensor, "*b d"]) -> tuple[Float[Tensor, "*b y"], Float[Tensor, "*b y"]]:
        """What follows on the first layer."""
        mean, raw = self.rest(F.relu(hidden)).chunk(2, -1)
        return mean, std_of(raw, self.std)


class EncodingSettings(TypedDict, total=False):
    """The settings of an `EncodingProcess`."""

    dim_x: Required[int]
    dim_y: Required[int]
    dim: int
    pre_depth: int
    post_depth: int
    decoder_depth: int
    std: AnyStd


class EncodingProcess(NeuralProcess[S, M]):
    """A model of the CNP family: an encoder of the points, and a decoder of each target.

    The default depths are the published ones for Gaussian processes; trained on context and targets.

    Args:
        dim_x, dim_y: channels of inputs and outputs.
        dim: width of everything inside.
        pre_depth: layers before the means (and of the values that targets attend to), of which
            self-attention, where there is any, stands for two.
        post_depth: layers after the means (and of the queries and keys of targets that attend).
        decoder_depth: layers of the decoder.
        std: "coarse" (at least 0.1) as published, "bounded" (at least 0.05) or "exp".
    """

    encoder: Any  # one of points, `PoolingPair` or `AttentiveEncoder`
    decoder: PointDecoder

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
        del dim, pre_depth, post_depth, decoder_depth, std  # the parts take them from `config`

    def decode(self, memory: M, xt: Float[Tensor, "b m x"]) -> tuple[Tensor, ...]:
        xt = xt.to(self.dtype)
        return self.decoder(xt, *self.encoder.represent(memory, xt))  # type: ignore[no-any-return]

    def _widths(self) -> tuple[int, int]:
        """How many numbers the second encoder gives, and how many the decoder takes in their place."""
        return self.config["dim"], self.config["dim"]

    def _pooling(self) -> tuple[PoolingPair, PointDecoder]:
        """Two encoders of single points and a decoder, to be added in this order."""
        out, _ = self._widths()
        encoder = PoolingPair(**self._encoded(), outs=(self.config["dim"], out))
        return encoder, self._decoder()

    def _encoded(self) -> dict[str, Any]:
        return self._set("dim_x", "dim_y", "dim", "pre_depth", "post_depth")

    def _decoder(self) -> PointDecoder:
        dim_in = self.config["dim"] + self._widths()[1]
        return PointDecoder(**self._set("dim_x", "dim_y", "dim", "decoder_depth", "std"), dim_in=dim_in)

    def _loss(self, context: Chunk, targets: Chunk, noise: Tensor) -> Tensor:
        return super()._loss(context, joined(context, targets), noise)


class SamplingSettings(EncodingSettings, total=False):
    """The settings of a `SamplingProcess`."""

    num_samples: int
    num_train_samples: int
    seed: int


class SamplingProcess(EncodingProcess[S, M]):
    """A model of the CNP family whose predictions are mixtures over samples, the same for all targets.

    Args:
        num_samples, num_train_samples: how many samples in predictions, and in the loss.
        seed: which ones predictions are made of.
        settings: those of `EncodingProcess`.
    """

    def __init__(
        self,
        *,
        num_samples: int = 50,
        num_train_samples: int = 4,
        seed: int = 0,
        **settings: Unpack[EncodingSettings],
    ) -> None:
        super().__init__(**settings)
        positive("num_samples", num_samples)
        positive("num_train_samples", num_train_samples)
        self.num_samples, self.num_train_samples, self.seed = num_samples, num_train_samples, seed


class PoolingProcess(EncodingProcess[AttentionState, M]):
    """A model of the CNP family whose state is two running means: constant memory.

    Both are one `AttentionState`, with one slot and all scores zero: its value is the mean, its lse the
    logarithm of the number of points.

    Args:
        rest: the settings of the other class that a model is of.
    """

    encoder: PoolingPair

    def __init__(self, **rest: Any) -> None:
        super().__init__(**rest)
        self.encoder, self.decoder = self._pooling()

    def empty(self, batch: int = 1) -> AttentionState:
        return AttentionState.empty((batch, *self.layout[:-1]), self.layout[-1], device=self.device)

    def _observe(
        self, x: Tensor, y: Tensor, mask: Tensor | None, log_weight: Tensor | None
    ) -> AttentionState:
        points = torch.cat([x, y], -1).to(self.dtype)
        bias = bias_of(mask, log_weight, torch.promote_types(points.dtype, torch.float32))
        means, lses = zip(*self.encoder.means(points, bias), strict=True)
        b, n = points.shape[:2]
        count = torch.full((b,), n, device=points.device) if mask is None else mask.sum(-1)
        value, lse = torch.stack(means, 1), torch.stack(lses, 1)  # (b, 2, d), (b, 2)
        return AttentionState.of(value[:, :, None, None], lse[:, :, None, None], count)

    def observing_parameters(self) -> list[Tensor]:
        return listed(*self.encoder.pre)

    @property
    def layout(self) -> tuple[int, ...]:
        return len(self.encoder.pre), 1, 1, self.config["dim"]

    def _context(self, state: AttentionState) -> Float[Tensor, "b d"]:
        return self.encoder.read(state.value[:, 0, 0, 0], 0)

    def _pooled(self, state: AttentionState) -> Float[Tensor, "b o"]:
        return self.encoder.read(state.value[:, 1, 0, 0], 1)


class CNP(PoolingProcess[Tensor]):
    """A neural process whose state is two running means: constant memory, and the same for all targets.

    Its settings are those of `EncodingProcess`.

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

    def __init__(self, **settings: Unpack[EncodingSettings]) -> None:
        super().__init__(**settings)

    def read(self, state: AttentionState) -> Float[Tensor, "b r"]:
        """What both encoders make of their means."""
        return torch.cat([self._context(state), self._pooled(state)], -1)


class AttendingProcess(EncodingProcess[StoredPoints, M], StoringProcess[M]):
    """A model of the CNP family whose targets attend to the data, which attend to each other.

    Args:
        num_heads: of all attention.
        value_relu: False as published; True for weights of earlier versions, which had one ReLU too many.
        rest: the settings of the other class that a model is of.
    """

    older: ClassVar[Mapping[str, Any]] = {"value_relu": True}
    encoder: AttentiveEncoder

    def __init__(self, *, num_heads: int = 8, value_relu: bool = False, **rest: Any) -> None:
        super().__init__(**rest)
        self.encoder = AttentiveEncoder(
            **self._encoded(), out=self._widths()[0], num_heads=num_heads, value_relu=value_relu
        )
        self.decoder = self._decoder()

    def needs(self, *, learning: bool) -> Needs:
        """A point's tokens while they attend to each other; while learning, all that both encoders compute.

        Learning, the context is predicted too: a point is also a target.
        """
        dim, pre, post, decoder = (
            self.config[key] for key in ("dim", "pre_depth", "post_depth", "decoder_depth")
        )
        if learning:
            target = (post + decoder + 8) * dim
            return Needs((2 * (pre + 8) + post + 2) * dim + target, target)
        return Needs(8 * dim, 6 * dim)

    def _context(self, state: StoredPoints) -> Keyed:
        return self.encoder.keyed(*self._points(state))

    def _pooled(self, state: StoredPoints) -> Float[Tensor, "b o"]:
        return self.encoder.pooled(*self._points(state))


class CANP(AttendingProcess[Attended]):
    """A conditional neural process whose targets attend to the data, which attend to each other.

    Its settings are those of `AttendingProcess` and `EncodingProcess`.

    Example:
        >>> model = CANP(dim_x=1, dim_y=1, dim=16).eval()
        >>> x, y = torch.rand(1, 9, 1), torch.rand(1, 9, 1)
        >>> streamed = model.update(model.condition(x[:, :5], y[:, :5]), x[:, 5:], y[:, 5:])
        >>> at_once = model.query(model.condition(x, y), x).mean
        >>> torch.allclose(model.query(streamed, x).mean, at_once, atol=1e-6)
        True
    """

    name: ClassVar[str] = "canp"

    def read(self, state: StoredPoints) -> Attended:
        """The data's mean, and their keys and values: two vectors a point."""
        return self.encoder.encode(*self._points(state))

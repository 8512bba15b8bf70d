"""Latent neural processes: a global latent z, drawn from what the data say, makes predictions mixtures.

Trained on the importance-weighted bound over k samples z of the posterior given context C and targets T,

    log 1/k sum_k p(y | z_k) p(z_k | C) / q(z_k | C, T),

and evaluated with samples of p(z | C). The two are one encoder, shown more or fewer points.
"""

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from torch.distributions import Normal

from constmem.core.checks import positive
from constmem.core.fold import Chunk, joined
from constmem.core.memory import Needs
from constmem.core.state import AttentionState
from constmem.neural_processes.base import NeuralProcess
from constmem.neural_processes.encoders import AttentiveEncoder, Keyed, PointDecoder, PoolingPair
from constmem.neural_processes.heads import AnyStd, logmeanexp, normal
from constmem.neural_processes.points import S, slices
from constmem.neural_processes.stored import StoredPoints, StoringProcess


class Sampled(NamedTuple):
    """Samples of the latent, and whatever else of the data the predictions need."""

    z: Float[Tensor, "b k z"]
    context: Any


class LatentProcess(NeuralProcess[S, Sampled]):
    """A neural process with a latent: mixtures over `num_samples` of it, the same ones for all targets.

    The samples are drawn once, by `seed`: predictions are deterministic, and do not depend on chunks or
    on the rest of a batch.
    """

    decoder: PointDecoder

    def __init__(
        self,
        *,
        dim_x: int,
        dim_y: int,
        dim_latent: int,
        num_samples: int,
        num_train_samples: int,
        seed: int,
    ) -> None:
        super().__init__(dim_x=dim_x, dim_y=dim_y)
        positive("num_samples", num_samples)
        positive("num_train_samples", num_train_samples)
        self.num_train_samples = num_train_samples
        generator = torch.Generator().manual_seed(seed)
        self.noise: Tensor
        noise = torch.randn(num_samples, dim_latent, generator=generator, device="cpu")
        self.register_buffer("noise", noise, persistent=False)

    @abstractmethod
    def _context(self, state: S) -> Any:
        """What predictions need of a state beside the latent."""

    @abstractmethod
    def _raw_latent(self, state: S) -> Float[Tensor, "b r"]:
        """Mean and unconstrained deviation of the latent."""

    @abstractmethod
    def _represent(self, context: Any, xt: Tensor) -> Float[Tensor, " b #m d"]:
        """What a context says about each target, or about all of them."""

    def latent(self, state: S) -> Normal:
        """The distribution of the latent (b, 1, z) given all that was observed."""
        out = self._raw_latent(state)[:, None]
        mean, raw = out.to(torch.promote_types(out.dtype, torch.float32)).chunk(2, -1)
        return normal(mean, 0.1 + 0.9 * raw.sigmoid())

    def read(self, state: S, *, generator: torch.Generator | None = None) -> Sampled:
        """Samples of the latent, the model's own or (with a generator) new ones, and the rest."""
        latent, noise = self.latent(state), self.noise
        if generator is not None:
            noise = torch.randn(noise.shape, generator=generator, device=noise.device)
        return Sampled((latent.mean + latent.stddev * noise).to(self.dtype), self._context(state))

    def decode(
        self, memory: Sampled, xt: Float[Tensor, "b m x"]
    ) -> tuple[Float[Tensor, "b m k y"], Float[Tensor, "b m k y"]]:
        xt = xt.to(self.dtype)
        seen = self._represent(memory.context, xt)
        mean, std = self.decoder(xt[:, :, None], seen[:, :, None], memory.z[:, None])
        return mean, std

    def loss_noise(
        self, xc: Float[Tensor, "b n x"], *, generator: torch.Generator | None = None
    ) -> Float[Tensor, "b k z"]:
        shape = xc.shape[0], self.num_train_samples, self.noise.shape[-1]
        if generator is None:  # left out, not None: a compiler could not take other sizes with it
            return torch.randn(shape, device=xc.device)
        return torch.randn(shape, generator=generator, device=xc.device)

    def _loss(self, context: Chunk, targets: Chunk, noise: Float[Tensor, "b k z"]) -> Tensor:
        x, y, mask = joined(context, targets)
        state = self._condition(slices(*context, 4096))
        prior = self.latent(state)
        posterior = self.latent(state.merge(self._observe(*targets, None)))
        z = posterior.mean + posterior.stddev * noise
        predicted = normal(*self.decode(Sampled(z.to(self.dtype), self._context(state)), x))
        points = predicted.log_prob(y[:, :, None]).sum(-1)  # (b, m, k)
        if mask is not None:
            points = torch.where(mask[..., None], points, 0.0)
        weights = points.sum(1) + (prior.log_prob(z) - posterior.log_prob(z)).sum(-1)  # (b, k)
        count = max(x.shape[0] * x.shape[1], 1) if mask is None else mask.sum().clamp_min(1)
        return -logmeanexp(weights).sum() / count


class NP(LatentProcess[AttentionState]):
    """A neural process with a latent, whose state is two running means: constant memory.

    The default depths are the published ones for Gaussian processes; trained on context and targets.

    Args:
        dim_x, dim_y: channels of inputs and outputs.
        dim, dim_latent: widths of everything inside, and of the latent.
        pre_depth, post_depth: layers of the MLPs before and after the means.
        decoder_depth: layers of the decoder.
        std: "coarse" (at least 0.1) as published, "bounded" (at least 0.05) or "exp".
        num_samples, num_train_samples: samples of the latent in predictions, and in the loss.
        seed: which samples predictions are made of.

    Example:
        >>> model = NP(dim_x=1, dim_y=1, dim=16, dim_latent=8).eval()
        >>> x, y = torch.rand(1, 50, 1), torch.rand(1, 50, 1)
        >>> with torch.no_grad():
        ...     few, many = model.condition(x[:, :5], y[:, :5]), model.condition(x, y)
        >>> few.nbytes == many.nbytes, model.query(many, x).mean.shape
        (True, torch.Size([1, 50, 1]))
    """

    name: ClassVar[str] = "np"

    def __init__(
        self,
        *,
        dim_x: int,
        dim_y: int,
        dim: int = 128,
        dim_latent: int = 128,
        pre_depth: int = 4,
        post_depth: int = 2,
        decoder_depth: int = 3,
        std: AnyStd = "coarse",
        num_samples: int = 50,
        num_train_samples: int = 4,
        seed: int = 0,
    ) -> None:
        super().__init__(
            dim_x=dim_x,
            dim_y=dim_y,
            dim_latent=dim_latent,
            num_samples=num_samples,
            num_train_samples=num_train_samples,
            seed=seed,
        )
        outs = dim, 2 * dim_latent
        self.encoder = PoolingPair(
            dim_x=dim_x, dim_y=dim_y, dim=dim, outs=outs, pre_depth=pre_depth, post_depth=post_depth
        )
        self.decoder = PointDecoder(
            dim_x=dim_x, dim_in=dim + dim_latent, dim=dim, dim_y=dim_y, depth=decoder_depth, std=std
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

    def _context(self, state: AttentionState) -> Float[Tensor, "b d"]:
        return self.encoder.read(state, 0)

    def _raw_latent(self, state: AttentionState) -> Float[Tensor, "b r"]:
        return self.encoder.read(state, 1)

    def _represent(self, context: Float[Tensor, "b d"], xt: Tensor) -> Float[Tensor, "b 1 d"]:  # noqa: ARG002
        return context[:, None]


class ANP(LatentProcess[StoredPoints], StoringProcess[Sampled]):
    """A latent neural process whose targets attend to the data, which attend to each other.

    The default depths are the published ones for Gaussian processes; trained on context and targets.

    Args:
        dim_x, dim_y: channels of inputs and outputs.
        dim, dim_latent: widths of everything inside, and of the latent.
        pre_depth: layers before the mean and of the values (self-attention stands for two of them).
        post_depth: layers after the mean, and of queries and keys.
        decoder_depth: layers of the decoder.
        std: "coarse" (at least 0.1) as published, "bounded" (at least 0.05) or "exp".
        value_relu: False as published; True for weights of earlier versions, which had one ReLU too many.
        num_samples, num_train_samples: samples of the latent in predictions, and in the loss.
        seed: which samples predictions are made of.

    Example:
        >>> model = ANP(dim_x=1, dim_y=1, dim=16, dim_latent=8).eval()
        >>> x, y = torch.rand(1, 9, 1), torch.rand(1, 9, 1)
        >>> state = model.condition(x, y)
        >>> in_chunks = model.query(state, x, chunk=2).mean  # the same samples for all targets
        >>> torch.allclose(model.query(state, x).mean, in_chunks, atol=1e-6)
        True
    """

    name: ClassVar[str] = "anp"
    older: ClassVar[Mapping[str, Any]] = {"value_relu": True}

    def __init__(
        self,
        *,
        dim_x: int,
        dim_y: int,
        dim: int = 128,
        dim_latent: int = 128,
        num_heads: int = 8,
        pre_depth: int = 4,
        post_depth: int = 2,
        decoder_depth: int = 3,
        std: AnyStd = "coarse",
        value_relu: bool = False,
        num_samples: int = 50,
        num_train_samples: int = 4,
        seed: int = 0,
    ) -> None:
        super().__init__(
            dim_x=dim_x,
            dim_y=dim_y,
            dim_latent=dim_latent,
            num_samples=num_samples,
            num_train_samples=num_train_samples,
            seed=seed,
        )
        self.encoder = AttentiveEncoder(
            dim_x=dim_x,
            dim_y=dim_y,
            dim=dim,
            out=2 * dim_latent,
            pre_depth=pre_depth,
            post_depth=post_depth,
            num_heads=num_heads,
            value_relu=value_relu,
        )
        self.decoder = PointDecoder(
            dim_x=dim_x, dim_in=dim + dim_latent, dim=dim, dim_y=dim_y, depth=decoder_depth, std=std
        )

    def needs(self, *, learning: bool) -> Needs:
        """A CANP's, and for each target and sample the decoder."""
        point, target = self.encoder.needs(self.config, learning=learning)
        samples = self.num_train_samples if learning else self.noise.shape[0]
        decoded = samples * self.config["dim"] * (self.config["decoder_depth"] + 3 if learning else 4)
        return Needs(point + (decoded if learning else 0), target + decoded)

    def _context(self, state: StoredPoints) -> Keyed:
        return self.encoder.keyed(*self._points(state))

    def _raw_latent(self, state: StoredPoints) -> Float[Tensor, "b r"]:
        return self.encoder.pooled(*self._points(state))

    def _represent(self, context: Keyed, xt: Tensor) -> Float[Tensor, "b m d"]:
        return self.encoder.attend(context, xt)

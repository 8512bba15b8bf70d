"""Latent neural processes: a global latent z, drawn from what the data say, makes predictions mixtures.

Trained on the importance-weighted bound over k samples z of the posterior given context C and targets T,

    log 1/k sum_k p(y | z_k) p(z_k | C) / q(z_k | C, T),

and evaluated with samples of p(z | C). The two are one encoder, shown more or fewer points.
"""

from abc import abstractmethod
from typing import Any, ClassVar, NamedTuple, Unpack

import torch
from jaxtyping import Float
from torch import Tensor
from torch.distributions import Normal

from constmem.core.costs import Needs
from constmem.core.fold import Chunk, joined, slices
from constmem.core.state import AttentionState
from constmem.neural_processes.cnp import AttendingProcess, PoolingProcess, SamplingProcess, SamplingSettings
from constmem.neural_processes.encoders import Keyed
from constmem.neural_processes.joint import logmeanexp
from constmem.neural_processes.points import S, normal
from constmem.neural_processes.states import StoredPoints


class Sampled(NamedTuple):
    """Samples of the latent, and whatever else of the data the predictions need."""

    z: Float[Tensor, "b k z"]
    context: Any


class LatentSettings(SamplingSettings, total=False):
    """The settings of a `LatentProcess`."""

    dim_latent: int


class LatentProcess(SamplingProcess[S, Sampled]):
    """A neural process with a latent: mixtures over `num_samples` of it, the same ones for all targets.

    The samples are drawn once, by `seed`: predictions are deterministic, and do not depend on chunks or
    on the rest of a batch.

    Args:
        dim_latent: width of the latent.
        settings: those of `SamplingProcess`.
    """

    noise: Tensor

    def __init__(self, *, dim_latent: int = 128, **settings: Unpack[SamplingSettings]) -> None:
        super().__init__(**settings)
        generator = torch.Generator().manual_seed(self.seed)
        noise = torch.randn(self.num_samples, dim_latent, generator=generator, device="cpu")
        self.register_buffer("noise", noise, persistent=False)

    def _widths(self) -> tuple[int, int]:
        return 2 * self.config["dim_latent"], self.config["dim_latent"]

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
            noise = torch.randn(noise.shape, generator=generator, dtype=torch.float32, device=noise.device)
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
            return torch.randn(shape, dtype=torch.float32, device=xc.device)
        return torch.randn(shape, generator=generator, dtype=torch.float32, device=xc.device)

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


class NP(PoolingProcess[Sampled], LatentProcess[AttentionState]):
    """A neural process with a latent, whose state is two running means: constant memory.

    Its settings are those of `LatentProcess`.

    Example:
        >>> model = NP(dim_x=1, dim_y=1, dim=16, dim_latent=8).eval()
        >>> x, y = torch.rand(1, 50, 1), torch.rand(1, 50, 1)
        >>> with torch.no_grad():
        ...     few, many = model.condition(x[:, :5], y[:, :5]), model.condition(x, y)
        >>> few.nbytes == many.nbytes, model.query(many, x).mean.shape
        (True, torch.Size([1, 50, 1]))
    """

    name: ClassVar[str] = "np"

    def __init__(self, **settings: Unpack[LatentSettings]) -> None:
        super().__init__(**settings)
        self.encoder, self.decoder = self._pooling()

    def _context(self, state: AttentionState) -> Float[Tensor, "b d"]:
        return self.encoder.read(state, 0)

    def _raw_latent(self, state: AttentionState) -> Float[Tensor, "b r"]:
        return self.encoder.read(state, 1)

    def _represent(self, context: Float[Tensor, "b d"], xt: Tensor) -> Float[Tensor, "b 1 d"]:  # noqa: ARG002
        return context[:, None]


class ANP(AttendingProcess[Sampled], LatentProcess[StoredPoints]):
    """A latent neural process whose targets attend to the data, which attend to each other.

    Its settings are those of `AttendingProcess` and `LatentProcess`.

    Example:
        >>> model = ANP(dim_x=1, dim_y=1, dim=16, dim_latent=8).eval()
        >>> x, y = torch.rand(1, 9, 1), torch.rand(1, 9, 1)
        >>> state = model.condition(x, y)
        >>> in_chunks = model.query(state, x, chunk=2).mean  # the same samples for all targets
        >>> torch.allclose(model.query(state, x).mean, in_chunks, atol=1e-6)
        True
    """

    name: ClassVar[str] = "anp"

    def needs(self, *, learning: bool) -> Needs:
        """A CANP's, and for each target and sample the decoder."""
        point, target = super().needs(learning=learning)
        samples = self.num_train_samples if learning else self.noise.shape[0]
        decoded = samples * self.config["dim"] * (self.config["decoder_depth"] + 3 if learning else 4)
        return Needs(point + (decoded if learning else 0), target + decoded)

    def _context(self, state: StoredPoints) -> Keyed:
        return self.encoder.keyed(*self._points(state))

    def _raw_latent(self, state: StoredPoints) -> Float[Tensor, "b r"]:
        return self.encoder.pooled(*self._points(state))

    def _represent(self, context: Keyed, xt: Tensor) -> Float[Tensor, "b m d"]:
        return self.encoder.attend(context, xt)

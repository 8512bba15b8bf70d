"""Neural processes that predict mixtures: over samples of a latent, or over data as they might have been.

Latent models draw z from what the data say. They are trained on the importance-weighted bound over k samples
z of the posterior given context C and targets T,

    log 1/k sum_k p(y | z_k) p(z_k | C) / q(z_k | C, T),

and evaluated with samples of p(z | C). The two are one encoder, shown more or fewer points.

Bootstrapping ones rebuild the data by their residuals, k times over: draw as many points as there are, with
replacement; let the model, given those, predict all points; draw from its standardised residuals, centred;
rebuild the outputs with them. The model sees the data as they are and, through a layer of its own, each
rebuilt version.
"""

from abc import abstractmethod
from typing import Any, ClassVar, NamedTuple, Unpack

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.distributions import Normal

from constmem.core.algebra import bias_of
from constmem.core.costs import Needs
from constmem.core.fold import Chunk, joined, slices
from constmem.core.layers import affine, keep_variance
from constmem.core.state import AttentionState
from constmem.neural_processes.base import M
from constmem.neural_processes.cnp import AttendingProcess, PoolingProcess, SamplingProcess, SamplingSettings
from constmem.neural_processes.encoders import (
    Attended,
    drawn,
    linear_in_parts,
    ordered,
    picked,
    pool,
    repeated,
)
from constmem.neural_processes.joint import logmeanexp, mean_of_real
from constmem.neural_processes.points import S, normal
from constmem.neural_processes.states import StoredPoints, StoringProcess


class Sampled(NamedTuple):
    """Samples of the latent, and whatever else of the data the predictions need."""

    z: Float[Tensor, "b k z"]
    context: Any


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
    def _pooled(self, state: S) -> Float[Tensor, "b r"]:
        """Mean and unconstrained deviation of the latent."""

    def latent(self, state: S) -> Normal:
        """The distribution of the latent (b, 1, z) given all that was observed."""
        out = self._pooled(state)[:, None]
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
        seen = self.encoder.attend(memory.context, xt)
        return self.decoder(xt[:, :, None], seen[:, :, None], memory.z[:, None])  # type: ignore[no-any-return]

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

    def __init__(self, *, dim_latent: int = 128, **settings: Unpack[SamplingSettings]) -> None:
        super().__init__(dim_latent=dim_latent, **settings)


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


class BootstrapProcess(SamplingProcess[StoredPoints, M], StoringProcess[M]):
    """A neural process that predicts mixtures over `num_samples` bootstrap versions of its data.

    The versions are drawn by `seed`, from the points in an order of their own: predictions are
    deterministic, and do not depend on chunks, on the order of the data or on the rest of a batch.
    Settings are those of `SamplingProcess`.
    """

    def __init__(self, **settings: Unpack[SamplingSettings]) -> None:
        super().__init__(**settings)
        dim = self.config["dim"]
        self.adapt = keep_variance(nn.Linear(2 * dim, dim, bias=False))

    def read(self, state: StoredPoints, *, generator: torch.Generator | None = None) -> M:
        """The data and their bootstrap versions, encoded; a generator draws others than the model's own."""
        generator = generator or torch.Generator().manual_seed(self.seed)
        points = self._points(state)
        shape = points[0].shape[1], 2, self.num_samples  # points first: more of them change no draw before
        uniforms = torch.rand(shape, generator=generator, dtype=torch.float32, device=generator.device)
        return self._versions(ordered(*points), uniforms.to(self.device).permute(1, 2, 0)[:, None])

    def decode(
        self, memory: M, xt: Float[Tensor, "b m x"]
    ) -> tuple[Float[Tensor, "b m k y"], Float[Tensor, "b m k y"]]:
        mean, std = self._decode_versions(memory, xt.to(self.dtype))
        return mean[:, :, 1:], std[:, :, 1:]

    def loss_noise(
        self, xc: Float[Tensor, "b n x"], *, generator: torch.Generator | None = None
    ) -> Float[Tensor, "2 b k n"]:
        shape = 2, xc.shape[0], self.num_train_samples, xc.shape[1]
        if generator is None:  # left out, not None: a compiler could not take other sizes with it
            return torch.rand(shape, dtype=torch.float32, device=xc.device)
        return torch.rand(shape, generator=generator, dtype=torch.float32, device=xc.device)

    def _loss(self, context: Chunk, targets: Chunk, noise: Float[Tensor, "2 b k n"]) -> Tensor:
        x, y, mask = joined(context, targets)
        xc, yc, mask_c = context
        memory = self._versions((xc.to(self.dtype), yc.to(self.dtype), mask_c), noise)
        predicted = normal(*self._decode_versions(memory, x.to(self.dtype)))
        points = predicted.log_prob(y[:, :, None]).sum(-1)  # (b, m, 1 + k)
        return -mean_of_real(points[..., 0] + logmeanexp(points[..., 1:]), mask)

    def _versions(self, points: Chunk, uniforms: Float[Tensor, "2 #b k n"]) -> M:
        """Encode the data as they are, and behind them k rebuilt versions."""
        x, y, mask = points
        ys = torch.cat([y[:, None], self.bootstrap(points, uniforms).to(y.dtype)], 1)
        masks = None if mask is None else repeated(mask, ys.shape[1])
        return self.encoder.encode(x[:, None], ys, masks)  # type: ignore[no-any-return]

    @torch.no_grad()
    def bootstrap(self, points: Chunk, uniforms: Float[Tensor, "2 #b k n"]) -> Float[Tensor, "b k n y"]:
        """Outputs as they might have been.

        Args:
            uniforms: numbers in [0, 1) that choose the points drawn, and the residuals drawn.
        """
        (x, y, mask), k = points, uniforms.shape[2]
        draws = drawn(uniforms, x, mask)
        masks = None if mask is None else repeated(mask, k)
        some_x, some_y = (picked(repeated(part, k), draws[0]) for part in (x, y))
        seen = self.encoder.represent(self.encoder.encode(some_x, some_y, masks), x[:, None])
        mean, std = self.decoder(x[:, None], *seen)
        residuals = picked((y[:, None] - mean) / std, draws[1])
        centre, _ = pool(residuals, bias_of(masks, None, torch.float32))
        return mean + std * (residuals - centre[..., None, :])  # type: ignore[no-any-return]

    def _decode_versions(
        self, memory: M, xt: Float[Tensor, "b m x"]
    ) -> tuple[Float[Tensor, "b m v y"], Float[Tensor, "b m v y"]]:
        """Predictions given the data alone, and behind them those given each version beside the data."""
        xt = xt[:, None]
        parts = self.encoder.represent(memory, xt)  # (b, 1 + k, 1 or m, d) each
        alone, versions = zip(*(part.split([1, part.shape[1] - 1], 1) for part in parts), strict=True)
        hidden = self.decoder.hidden(xt, *alone)
        both = torch.cat([hidden, hidden + linear_in_parts(versions, affine(self.adapt)[0])], 1)
        mean, std = self.decoder.predict(both)
        return mean.transpose(1, 2), std.transpose(1, 2)


class BNP(BootstrapProcess[Tensor]):
    """A conditional neural process that bootstraps its data: two means of them, and of each version.

    Its settings are those of `SamplingProcess`; the samples are versions.

    Example:
        >>> model = BNP(dim_x=1, dim_y=1, dim=16).eval()
        >>> x, y = torch.rand(1, 9, 1), torch.rand(1, 9, 1)
        >>> mean = model.query(model.condition(x, y), x).mean
        >>> shuffled = model.query(model.condition(x.flip(1), y.flip(1)), x).mean
        >>> torch.allclose(mean, shuffled, atol=1e-5)  # the draws do not follow the order of the data
        True
    """

    name: ClassVar[str] = "bnp"

    def __init__(self, **settings: Unpack[SamplingSettings]) -> None:
        super().__init__(**settings)
        self.encoder, self.decoder = self._pooling()

    def needs(self, *, learning: bool) -> Needs:
        """For the data and each version of them: two tokens a point, and a target's decoder."""
        dim, pre, decoder = (self.config[key] for key in ("dim", "pre_depth", "decoder_depth"))
        if learning:
            target = (decoder + 4) * dim
            return Needs(2 * (pre + 1) * dim + target, target).times(1 + self.num_train_samples)
        return Needs(7 * dim // 2, 4 * dim).times(1 + self.num_samples)


class BANP(AttendingProcess[Attended], BootstrapProcess[Attended]):
    """A bootstrapping neural process whose targets attend to the data and to each version of them.

    Its settings are those of `AttendingProcess` and `SamplingProcess`.

    Example:
        >>> model = BANP(dim_x=1, dim_y=1, dim=16, num_samples=5).eval()
        >>> x, y = torch.rand(1, 9, 1), torch.rand(1, 9, 1)
        >>> once, again = (model.query(model.condition(x, y), x).mean for _ in range(2))
        >>> torch.equal(once, again)  # the versions are the model's own
        True
    """

    name: ClassVar[str] = "banp"

    def needs(self, *, learning: bool) -> Needs:
        """A CANP's, for the data and each version of them."""
        versions = 1 + (self.num_train_samples if learning else self.num_samples)
        return super().needs(learning=learning).times(versions)

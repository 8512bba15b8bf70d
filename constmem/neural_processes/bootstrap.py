"""Bootstrapping neural processes: predictions as mixtures over data as they might have been.

Residual bootstrap, k times over: draw as many points as there are, with replacement; let the model,
given those, predict all points; draw from its standardised residuals, centred; rebuild the outputs with
them. The model sees the data as they are and, through a layer of its own, each rebuilt version.
"""

from abc import abstractmethod
from typing import ClassVar, Unpack

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from constmem.core.algebra import accumulator, bias_of
from constmem.core.costs import Needs
from constmem.core.fold import Chunk, joined
from constmem.core.layers import affine, keep_variance
from constmem.neural_processes.base import M
from constmem.neural_processes.cnp import AttendingProcess, SamplingProcess, SamplingSettings, linear_in_parts
from constmem.neural_processes.encoders import Attended, paired, pool
from constmem.neural_processes.joint import logmeanexp, mean_of_real
from constmem.neural_processes.points import normal
from constmem.neural_processes.states import StoredPoints, StoringProcess


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

    @abstractmethod
    def _encode(self, x: Float[Tensor, "*#b n x"], y: Float[Tensor, "*b n y"], mask: Tensor | None) -> M:
        """What predictions need of sets of points."""

    @abstractmethod
    def _represent(self, memory: M, xt: Float[Tensor, "*#b m x"]) -> tuple[Float[Tensor, "*b #m _"], ...]:
        """What sets of points say about each target, or about all of them, in as many parts as there are."""

    def read(self, state: StoredPoints, *, generator: torch.Generator | None = None) -> M:
        """The data and their bootstrap versions, encoded; a generator draws others than the model's own."""
        generator = generator or torch.Generator().manual_seed(self.seed)
        points = self._points(state)
        shape = points[0].shape[1], 2, self.num_samples  # points first: more of them change no draw before
        uniforms = torch.rand(shape, generator=generator, dtype=torch.float32, device=generator.device).to(
            self.device
        )
        return self._versions(ordered(*points), uniforms.permute(1, 2, 0)[:, None])

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
        k = uniforms.shape[2]
        rebuilt = self.bootstrap(x, y, mask, uniforms)
        ys = torch.cat([y[:, None], rebuilt.to(y.dtype)], 1)
        return self._encode(x[:, None], ys, None if mask is None else repeated(mask, k + 1))

    @torch.no_grad()
    def bootstrap(
        self,
        x: Float[Tensor, "b n x"],
        y: Float[Tensor, "b n y"],
        mask: Bool[Tensor, "b n"] | None,
        uniforms: Float[Tensor, "2 #b k n"],
    ) -> Float[Tensor, "b k n y"]:
        """Outputs as they might have been.

        Args:
            uniforms: numbers in [0, 1) that choose the points drawn, and the residuals drawn.
        """
        k = uniforms.shape[2]
        draws = drawn(uniforms, x, mask)
        masks = None if mask is None else repeated(mask, k)
        some_x, some_y = (picked(repeated(points, k), draws[0]) for points in (x, y))
        seen = self._represent(self._encode(some_x, some_y, masks), x[:, None])
        mean, std = self.decoder(x[:, None], *seen)
        residuals = picked((y[:, None] - mean) / std, draws[1])
        centre, _ = pool(residuals, bias_of(masks, None, torch.float32))
        return mean + std * (residuals - centre[..., None, :])  # type: ignore[no-any-return]

    def _decode_versions(
        self, memory: M, xt: Float[Tensor, "b m x"]
    ) -> tuple[Float[Tensor, "b m v y"], Float[Tensor, "b m v y"]]:
        """Predictions given the data alone, and behind them those given each version beside the data."""
        xt = xt[:, None]
        parts = self._represent(memory, xt)  # (b, 1 + k, 1 or m, d) each
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

    def _encode(self, x: Tensor, y: Tensor, mask: Tensor | None) -> Float[Tensor, "*b r"]:
        return self.encoder(paired(x, y), mask)  # type: ignore[no-any-return]

    def _represent(self, memory: Tensor, xt: Tensor) -> tuple[Float[Tensor, "*b 1 r"]]:  # noqa: ARG002
        return (memory[..., None, :],)


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

    def _encode(self, x: Tensor, y: Tensor, mask: Tensor | None) -> Attended:
        return self.encoder.encode(x, y, mask)

    def _represent(self, memory: Attended, xt: Tensor) -> tuple[Tensor, Tensor]:
        return self.encoder(memory, xt)  # type: ignore[no-any-return]


def ordered(x: Tensor, y: Tensor, mask: Tensor | None) -> Chunk:
    """The points in an order that depends on what they are, not on how they came; real ones first."""
    points = torch.cat([x, y], -1).to(accumulator(x.device))
    weights = torch.arange(2, points.shape[-1] + 2, dtype=points.dtype, device=points.device).sqrt()
    key = (points * weights).sum(-1)  # no two different points in practice have the same
    if mask is not None:
        key = key.masked_fill(~mask, float("inf"))
    order = key.argsort(dim=-1, stable=True)
    x, y = (t.gather(1, order[..., None].expand_as(t)) for t in (x, y))
    return x, y, None if mask is None else mask.gather(1, order)


def drawn(
    uniforms: Float[Tensor, "2 #b k n"], x: Float[Tensor, "b n x"], mask: Tensor | None
) -> Int[Tensor, "2 b k n"]:
    """Indices of points drawn with replacement from the real ones, wherever those are."""
    b, n = x.shape[:2]
    if mask is None:
        return (uniforms * n).long().clamp_max(n - 1).expand(2, b, -1, -1)
    count = mask.sum(-1)[:, None, None]
    which = torch.minimum((uniforms * count).long(), count - 1).clamp_min(0)
    numbers = torch.arange(1, n + 1, device=x.device).expand(b, n).contiguous()
    place = torch.searchsorted(mask.cumsum(-1), numbers) % max(n, 1)  # of the first real point, the second...
    return place[None, :, None].expand_as(which).gather(-1, which)


def picked(points: Float[Tensor, "b k n p"], draws: Int[Tensor, "b k n"]) -> Float[Tensor, "b k n p"]:
    """The points that were drawn, of each version."""
    return points.gather(2, draws[..., None].expand(-1, -1, -1, points.shape[-1]))


def repeated(points: Tensor, k: int) -> Tensor:
    """The same points for each of k versions, without a copy."""
    return points[:, None].expand(points.shape[0], k, *points.shape[1:])

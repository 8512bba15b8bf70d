"""Predictions at several targets together: by the chain rule, by a low rank, and of mixed regressions.

Any neural process predicts jointly a few targets at a time, each block given all before it:

    p(y_1 ... y_m | state) = prod_i p(y_i | state, y_1 ... y_(i-1))

A step is a query and an update, which a model of constant memory does in constant time and memory, however
many targets came before. The factors are the model's own, so that another order of the targets gives another
joint distribution: near-by for a well trained model, never the same. A `JointNormal` depends on no order.
"""

from math import log, pi
from typing import Any, NoReturn

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.distributions import Distribution, Normal

from constmem.core import checks
from constmem.core.moments import Moments
from constmem.neural_processes.base import NeuralProcess
from constmem.neural_processes.heads import PreciseHead, SampleMixture, Std, std_of
from constmem.neural_processes.levels import LevelMixture
from constmem.neural_processes.points import S
from constmem.neural_processes.regression import Inverse, Posterior


class LowRankHead(PreciseHead):
    """Mean, own deviation and loadings of every target, each from its own token alone.

    Args:
        rank: how many directions targets have in common.
    """

    def __init__(self, *, dim: int, hidden: int, dim_y: int, rank: int, std: Std = "bounded") -> None:
        super().__init__(dim=dim, hidden=hidden, dim_out=(2 + rank) * dim_y)
        self.rank, self.dim_y, self.std = rank, dim_y, std

    def forward(
        self, tokens: Float[Tensor, "b m d"]
    ) -> tuple[Float[Tensor, "b m y"], Float[Tensor, "b m y"], Float[Tensor, "b m y r"]]:
        """Mean, deviation, and loadings in units of that deviation."""
        mean, raw, loading = self.raw(tokens).split([self.dim_y, self.dim_y, self.rank * self.dim_y], -1)
        return mean, std_of(raw, self.std), loading.unflatten(-1, (self.dim_y, -1)) / self.rank**0.5


class JointNormal(Normal):
    """Normals of targets that have r standard normal numbers z in common:

        y = mean + std (loading z + e),        e ~ N(0, 1) for every target and channel

    It is the normal of each target by itself, with deviation std (1 + |loading|^2)^1/2: `log_prob`, `cdf` and
    `icdf` are those. What it predicts at a target does not depend on which others are asked for, nor on their
    order. `joint_log_prob` is of all targets of a task together, and `rsample` draws them together.

    Args:
        loading: in units of the deviation, so that both scale with the data.

    Example:
        >>> one = torch.ones(1, 2, 1)
        >>> dist = JointNormal(0 * one, 0.1 * one, 10 * one[..., None])  # two targets, hardly ever apart
        >>> y = dist.rsample((1000,), generator=torch.Generator().manual_seed(0))
        >>> bool((y[:, 0, 0] - y[:, 0, 1]).std() < 0.2), bool(y.std() > 0.9)
        (True, True)
    """

    has_rsample = True

    def __init__(
        self,
        mean: Float[Tensor, "b m y"],
        std: Float[Tensor, "b m y"],
        loading: Float[Tensor, "b m y r"],
    ) -> None:
        wide = torch.promote_types(mean.dtype, torch.float32)
        self.own, self.loading = std.to(wide), loading.to(wide)
        size = (1 + self.loading.square().sum(-1)).sqrt()
        super().__init__(mean.to(wide), self.own * size, validate_args=False)

    def joint_log_prob(
        self, value: Float[Tensor, "b m y"], mask: Bool[Tensor, "b m"] | None = None
    ) -> Float[Tensor, " b"]:
        """Of all targets of a task together, in float64: those that are masked out count for nothing.

        With z = (y - mean) / std, L the loadings and C = 1 + L'L, which is only r by r:

            log p = -1/2 (z'z - z'L C^-1 L'z + log det C) - sum log std - n/2 log(2 pi)
        """
        own, loading = self.own.double(), self.loading.double()
        z, one = (value.double() - self.loc.double()) / own, -own.log() - 0.5 * log(2 * pi)
        if mask is not None:
            real = mask[..., None]
            z, one = torch.where(real, z, 0.0), torch.where(real, one, 0.0)
            loading = torch.where(real[..., None], loading, 0.0)
        z, loading = z.flatten(1), loading.flatten(1, 2)  # (b, my), (b, my, r)
        eye = torch.eye(loading.shape[-1], dtype=z.dtype, device=z.device)
        inverse, log_det = Inverse.apply(eye + loading.mT @ loading)  # type: ignore[no-untyped-call]
        shared = (loading.mT @ z[..., None]).squeeze(-1)  # (b, r)
        explained = (shared[:, None] @ inverse @ shared[..., None]).flatten()
        found: Tensor = one.sum((1, 2)) - 0.5 * (z.square().sum(1) - explained + log_det)
        return found

    def covariance(self) -> Float[Tensor, "b n n"]:
        """Of all targets and channels of a task, the channels of a target side by side."""
        factor = (self.own[..., None] * self.loading).flatten(1, 2)
        return factor @ factor.mT + torch.diag_embed(self.own.square().flatten(1))

    def rsample(
        self, sample_shape: Any = (), *, generator: torch.Generator | None = None
    ) -> Float[Tensor, "*s b m y"]:
        shape, (b, m, y, r) = tuple(sample_shape), self.loading.shape
        how: dict[str, Any] = {"generator": generator, "device": self.own.device, "dtype": self.own.dtype}
        shared, noise = torch.randn((*shape, b, r), **how), torch.randn((*shape, b, m, y), **how)
        common = torch.einsum("bmyr,...br->...bmy", self.loading, shared)
        return self.loc + self.own * (common + noise)

    def sample(
        self, sample_shape: Any = (), *, generator: torch.Generator | None = None
    ) -> Float[Tensor, "*s b m y"]:
        with torch.no_grad():
            return self.rsample(sample_shape, generator=generator)

    def expand(self, *_: Any, **__: Any) -> NoReturn:
        raise NotImplementedError(
            "targets that belong together are not expanded: query a state with more tasks"
        )


@torch.no_grad()
def sample_jointly(
    model: NeuralProcess[S, Any],
    state: S,
    xt: Float[Tensor, "b m x"],
    *,
    samples: int = 1,
    block: int = 1,
    generator: torch.Generator | None = None,
) -> Float[Tensor, "k b m y"]:
    """Coherent functions: outputs at all targets that belong together, `samples` times for each task.

    Args:
        state: of what is known; it stays as it is.
        xt: the targets, drawn in this order.
        block: how many targets are drawn at a time, each block given all before it. Within a block they are
            independent, or share one sample of the model's latent or low rank where it has one.
        generator: PyTorch's own if None.

    Example:
        >>> from constmem.neural_processes import CNP
        >>> model, x = CNP(dim_x=1, dim_y=1, dim=16).eval(), torch.linspace(-1, 1, 5)[None, :, None]
        >>> y = sample_jointly(model, model.empty(), x, samples=3, generator=torch.Generator().manual_seed(0))
        >>> y.shape, joint_log_prob(model, model.empty(3), x.expand(3, -1, -1), y[:, 0]).shape
        (torch.Size([3, 1, 5, 1]), torch.Size([3]))
    """
    checks.positive("samples", samples)
    checks.positive("block", block)
    every = torch.arange(state.batch, device=state.device).repeat(samples)
    state, xt = state.select(every), xt.repeat(samples, 1, 1)
    drawn = []
    for x in xt.split(block, 1):
        y = _draw(model.query(state, x), generator)
        drawn.append(y)
        state = model.update(state, x, y) if len(drawn) * block < xt.shape[1] else state
    out: Tensor = torch.cat(drawn, 1).unflatten(0, (samples, -1))
    return out


def joint_log_prob(
    model: NeuralProcess[S, Any],
    state: S,
    xt: Float[Tensor, "b m x"],
    yt: Float[Tensor, "b m y"],
    *,
    block: int = 1,
) -> Float[Tensor, " b"]:
    """Log-probability of all targets together, for each task: of what `sample_jointly` draws.

    Args:
        state: of what is known; it stays as it is.
        xt, yt: the targets, in the order in which they are predicted and observed.
        block: how many are predicted at a time; with all at once nothing is observed.
    """
    checks.positive("block", block)
    checks.points("yt", yt, model.dim_y, like=xt, device=model.device)
    total = torch.zeros(xt.shape[0], dtype=torch.float64, device=xt.device)
    for i, (x, y) in enumerate(zip(xt.split(block, 1), yt.split(block, 1), strict=True), 1):
        total = total + _log_prob(model.query(state, x), y)
        state = model.update(state, x, y) if i * block < xt.shape[1] else state
    return total


def _draw(predicted: Distribution, generator: torch.Generator | None) -> Float[Tensor, "b m y"]:
    if isinstance(predicted, SampleMixture | LevelMixture | JointNormal):
        return predicted.sample(generator=generator)
    mean, std = predicted.mean, predicted.stddev
    return mean + std * torch.randn(mean.shape, generator=generator, dtype=mean.dtype, device=mean.device)


def _log_prob(predicted: Distribution, y: Float[Tensor, "b m y"]) -> Float[Tensor, " b"]:
    if isinstance(predicted, SampleMixture | JointNormal):  # one component, or draw, for the whole block
        return predicted.joint_log_prob(y)
    out: Tensor = predicted.log_prob(y).sum((1, 2))
    return out


def mixture(
    posterior: Posterior, phi: Float[Tensor, "*b q p"], noise: Float[Tensor, " k"] | None = None
) -> tuple[Float[Tensor, "*b q"], Float[Tensor, "*b q q"]]:
    """Mean and covariance at q points together of all experts of one output, by their normalised evidence.

    Args:
        posterior: one for all batches of points, or a batch of them, which is broadcast against the points'.
        noise: variance that each expert adds to every point; none if not given.
    """
    log_weight, weights, covariance = posterior
    if log_weight.ndim > 1:  # each batch of points has a posterior of its own
        batch = torch.broadcast_shapes(phi.shape[:-2], log_weight.shape[:-1])
        phi = phi.expand(*batch, *phi.shape[-2:])[..., None, :, :]
        mean, each = (phi @ weights).squeeze(-1), phi @ covariance @ phi.mT  # (*b, k, q), (*b, k, q, q)
    else:  # a product of all points with one matrix for each expert
        flat = phi.reshape(-1, phi.shape[-1])
        mean = (flat @ weights.squeeze(-1).mT).unflatten(0, phi.shape[:-1]).mT
        half = (flat @ covariance).unflatten(1, phi.shape[:-1]).movedim(0, -3)  # (*b, k, q, p)
        each = half @ phi[..., None, :, :].mT
    if noise is not None:
        each = each + noise[:, None, None] * torch.eye(each.shape[-1], dtype=each.dtype, device=each.device)
    weight = log_weight.exp()[..., None]
    middle = (weight * mean).sum(-2)
    apart = mean - middle[..., None, :]
    return middle, (weight[..., None] * (each + apart[..., :, None] * apart[..., None, :])).sum(-3)


def standardised(moments: Moments, mean: float, std: float) -> Moments:
    """The moments of features and (y - mean) / std, from those of y and features with a one behind them."""
    sums, total, count = moments.gram[..., :-1, -1:], moments.cross[..., -1, :], moments.count[..., None]
    square = (moments.square - 2 * mean * total + mean**2 * count) / std**2
    cross = (moments.cross[..., :-1, :] - mean * sums) / std
    return Moments(moments.gram[..., :-1, :-1], cross, square, moments.count)

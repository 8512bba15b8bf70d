"""Predictions: mixtures, targets that belong together, and joint ones of any model by the chain rule.

Any neural process predicts jointly a few targets at a time, each block given all before it:

    p(y_1 ... y_m | state) = prod_i p(y_i | state, y_1 ... y_(i-1))

A step is a query and an update, which a model of constant memory does in constant time and memory, however
many targets came before. The factors are the model's own, so that another order of the targets gives another
joint distribution: near-by for a well trained model, never the same. A `JointNormal` depends on no order.
"""

from math import log, pi
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.distributions import Distribution, Normal, constraints

from constmem.core import checks
from constmem.neural_processes.points import S, normal
from constmem.neural_processes.regression import Inverse

if TYPE_CHECKING:
    from constmem.neural_processes.base import NeuralProcess


def mean_of_real(numbers: Float[Tensor, "b n"], mask: Tensor | None) -> Float[Tensor, ""]:
    """The mean over all points of the batch that are not masked out."""
    if mask is None:
        return numbers.sum() / max(numbers.numel(), 1)
    return torch.where(mask, numbers, 0.0).sum() / mask.sum().clamp_min(1)


def logmeanexp(numbers: Float[Tensor, "*b k"]) -> Float[Tensor, "*b"]:
    """log of the mean of exponentials over the last axis."""
    return numbers.logsumexp(-1) - log(numbers.shape[-1])


def chosen(
    place: Float[Tensor, "*s b #m 1"], log_weight: Float[Tensor, "b m k"], *parts: Float[Tensor, "b m k y"]
) -> list[Float[Tensor, "*s b m y"]]:
    """The parts of those components of mixtures that numbers from 0 to 1 fall to, by their weights."""
    passed = place > log_weight.exp().cumsum(-1)[..., :-1]  # but for the last, which is up to 1
    *lead, k, y = *passed.shape[:-1], *parts[0].shape[-2:]
    pick = passed.sum(-1)[..., None, None].expand(*lead, 1, y)
    return [t.expand(*lead, k, y).gather(-2, pick).squeeze(-2) for t in parts]


class SampleMixture(Distribution):
    """A mixture of k normals at every point: what k samples of a latent, or k experts, predict together.

    Its `log_prob` is that of a point, log sum_k w_k prod_y N(y | mean_k, std_k): the channels of one
    sample belong together. It is returned as (b, m, 1), so that `log_prob(y).sum(-1)` is the
    log-likelihood of a point here as it is for independent normals. `mean`, `variance` and `cdf` are
    those of each channel. `sample` draws one component for a whole task: its points belong together.

    Args:
        log_weight: log w_k, the same at all points of a task; an even mixture if not given.

    Example:
        >>> one = torch.zeros(1, 2, 1, 3), torch.ones(1, 2, 1, 3)
        >>> alone = SampleMixture(*one).log_prob(torch.zeros(1, 2, 3))  # a mixture of one is a normal
        >>> torch.allclose(alone.sum(-1), Normal(0.0, 1.0).log_prob(torch.zeros(1, 2, 3)).sum(-1))
        True
    """

    arg_constraints: ClassVar[dict[str, constraints.Constraint]] = {}
    support = constraints.real_vector
    apart: ClassVar[bool] = False  # whether each point is of a component of its own

    def __init__(
        self,
        means: Float[Tensor, "b m k y"],
        stds: Float[Tensor, "b m k y"],
        log_weight: Float[Tensor, "b m k"] | None = None,
    ) -> None:
        self.components = normal(means, stds)
        even = self.components.mean.new_full((), -log(means.shape[-2])).expand(means.shape[:-1])
        self.log_weight = even if log_weight is None else log_weight.to(even.dtype)
        super().__init__(means.shape[:2], means.shape[-1:], validate_args=False)

    @property
    def weight(self) -> Float[Tensor, "b m k 1"]:
        """Of each component."""
        return self.log_weight.exp()[..., None]

    @property
    def mean(self) -> Float[Tensor, "b m y"]:
        return (self.weight * self.components.mean).sum(-2)

    @property
    def variance(self) -> Float[Tensor, "b m y"]:
        apart = (self.components.mean - self.mean[..., None, :]).square()
        return (self.weight * (self.components.variance + apart)).sum(-2)

    def log_prob(self, value: Float[Tensor, "b m y"]) -> Float[Tensor, "b m 1"]:
        each: Tensor = self.components.log_prob(value[..., None, :]).sum(-1)
        return (each + self.log_weight).logsumexp(-1)[..., None]

    def joint_log_prob(self, value: Float[Tensor, "b m y"]) -> Float[Tensor, " b"]:
        """Of all points of a task together, which are of one component."""
        if value.shape[1] == 0:
            return value.new_zeros(value.shape[0])
        each: Tensor = self.components.log_prob(value[..., None, :]).sum((1, 3))
        return (each + self.log_weight[:, 0]).logsumexp(-1)

    def cdf(self, value: Float[Tensor, "b m y"]) -> Float[Tensor, "b m y"]:
        out: Tensor = (self.weight * self.components.cdf(value[..., None, :])).sum(-2)
        return out

    def sample(
        self, sample_shape: Any = (), *, generator: torch.Generator | None = None
    ) -> Float[Tensor, "*s b m y"]:
        means, stds = self.components.mean, self.components.stddev
        how: dict[str, Any] = {"generator": generator, "device": means.device, "dtype": means.dtype}
        with torch.no_grad():
            each = means.shape[1] if self.apart else 1
            place = torch.rand((*sample_shape, means.shape[0], each, 1), **how)
            mean, std = chosen(place, self.log_weight, means, stds)
            return mean + std * torch.randn(mean.shape, **how)


class PointMixture(SampleMixture):
    """A mixture of k normals whose weights differ from point to point: points are independent."""

    apart: ClassVar[bool] = True

    def joint_log_prob(self, value: Float[Tensor, "b m y"]) -> Float[Tensor, " b"]:
        total: Tensor = self.log_prob(value).sum((1, 2))
        return total


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
    model: "NeuralProcess[S, Any]",
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
    model: "NeuralProcess[S, Any]",
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
    if type(predicted) is not Normal:
        return predicted.sample(generator=generator)  # type: ignore[call-arg]
    mean, std = predicted.mean, predicted.stddev
    return mean + std * torch.randn(mean.shape, generator=generator, dtype=mean.dtype, device=mean.device)


def _log_prob(predicted: Distribution, y: Float[Tensor, "b m y"]) -> Float[Tensor, " b"]:
    if isinstance(predicted, SampleMixture | JointNormal):  # one component, or draw, for the whole block
        return predicted.joint_log_prob(y)
    out: Tensor = predicted.log_prob(y).sum((1, 2))
    return out

"""Surrogates for Bayesian optimisation with BoTorch, whose posterior comes from a state of constant size.

Both predict the points of a batch together, so that acquisition functions see what pending points leave to
learn, and both are immutable: real and imagined observations make a new surrogate with another state.
"""

from abc import abstractmethod
from collections.abc import Callable
from math import sqrt
from typing import Any

import torch
from botorch.acquisition.objective import PosteriorTransform
from botorch.models.model import Model
from botorch.posteriors.gpytorch import GPyTorchPosterior
from gpytorch.distributions import MultivariateNormal
from torch import Tensor

from constmem.core.moments import Moments
from constmem.neural_processes import NeuralProcess
from constmem.neural_processes.joint import JointNormal
from constmem.neural_processes.regression import Posterior, Regression, mixture, standardised

JITTER = 1e-8  # of the mean variance, added to each: points that are asked for twice have no inverse
NEGLIGIBLE = 1e-3  # weight of experts that are left out, at most, each in turn from the least
SHORTEST, LONGEST = 0.2, 4.0  # lengths that functions are smooth over, in half widths of a box with d = 1
AMPLITUDES, NOISE = (0.3, 6.0), 2e-3  # of functions and of noise, in deviations of what was observed


class Surrogate(Model):
    """What both surrogates share: a normal posterior of one output over the points of each batch together."""

    dim: int  # of inputs
    device: torch.device

    @abstractmethod
    def _joint(self, x: Tensor, *, noise: bool) -> tuple[Tensor, Tensor]:
        """Mean (*b, q) and covariance (*b, q, q) at points (*b, q, d)."""

    @abstractmethod
    def condition_on_observations(self, X: Tensor, Y: Tensor, **kwargs: Any) -> "Surrogate":  # noqa: N803
        """A surrogate with more observations, imagined ones too: Y (*f, *b, q, 1) makes a batch of states."""

    @property
    def num_outputs(self) -> int:
        return 1

    def posterior(
        self,
        X: Tensor,  # noqa: N803
        output_indices: list[int] | None = None,
        observation_noise: bool | Tensor = False,
        posterior_transform: PosteriorTransform | None = None,
    ) -> Any:
        """The posterior of the q points of every batch together, in the dtype of X."""
        if output_indices not in (None, [0]):
            raise ValueError(f"there is one output, number 0, not {output_indices}")
        if isinstance(observation_noise, Tensor):
            raise ValueError("the noise is this surrogate's own: give True or False, not a tensor of it")
        if X.ndim < 2 or X.shape[-1] != self.dim:
            raise ValueError(f"X has shape {tuple(X.shape)}, but (..., q, {self.dim}) is needed")
        mean, covariance = self._joint(X, noise=observation_noise)
        own = covariance.diagonal(dim1=-2, dim2=-1)
        covariance = covariance + torch.diag_embed(JITTER * own.mean(-1, keepdim=True).expand_as(own))
        found = GPyTorchPosterior(MultivariateNormal(mean.to(X.dtype), covariance.to(X.dtype)))
        return found if posterior_transform is None else posterior_transform(found)

    def fantasize(self, X: Tensor, sampler: Any, observation_noise: Any = None, **_: Any) -> Any:  # noqa: N803
        """A batch of surrogates, each with another imagined outcome at X, drawn together."""
        if observation_noise is not None:
            raise ValueError("the noise is this surrogate's own: leave observation_noise out")
        return self.condition_on_observations(X, sampler(self.posterior(X, observation_noise=True)))

    def subset_output(self, idcs: list[int]) -> "Surrogate":
        if idcs != [0]:
            raise ValueError(f"there is one output, number 0, not {idcs}")
        return self

    def _observed(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, torch.Size]:
        """Points and outcomes that fit each other and the states, with their batch (in front) in common."""
        if y.shape[-1] != 1 or x.shape[-1] != self.dim or y.shape[-2] != x.shape[-2]:
            raise ValueError(
                f"X has shape {tuple(x.shape)} and Y {tuple(y.shape)}, but (..., n, {self.dim}) and "
                "(..., n, 1) are needed, with as many outcomes as points"
            )
        batch = torch.broadcast_shapes(x.shape[:-2], y.shape[:-2], self.batch_shape)
        return x.expand(*batch, *x.shape[-2:]), y.expand(*batch, *y.shape[-2:]), batch

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Surrogate":  # noqa: ARG002
        """Stay in its own precision: acquisition functions call `to(X)`, and X is often of float64."""
        wanted = fn(torch.empty(0)).device
        if wanted.type not in (self.device.type, "cpu"):
            raise ValueError(f"the surrogate is on {self.device}, points on {wanted}: bring them together")
        return self


class RegressionSurrogate(Surrogate):
    """Smooth functions in a box, untrained: Bayesian linear regressions of many lengths, by their evidence.

    It remembers moments of `features` cosines and sines, however many observations there are. Its posterior
    is the normal with mean and covariance of the mixture of all `experts`.

    Args:
        bounds: (2, d) lowest and highest of each input.
        features, experts: how many.
        seed: of the directions of features.

    Example:
        >>> x = torch.linspace(0, 1, 20, dtype=torch.float64)[:, None]
        >>> surrogate = RegressionSurrogate(torch.tensor([[0.0], [1.0]])).observe(x, torch.sin(6 * x))
        >>> found = surrogate.posterior(torch.tensor([[0.512]], dtype=torch.float64))
        >>> bool((found.mean - torch.sin(torch.tensor(6 * 0.512))).abs() < 0.02), surrogate.count
        (True, 20)
    """

    def __init__(self, bounds: Tensor, *, features: int = 256, experts: int = 48, seed: int = 0) -> None:
        super().__init__()
        if bounds.ndim != 2 or len(bounds) != 2 or not bool((bounds[1] > bounds[0]).all()):
            raise ValueError(f"bounds must be (2, d), the lowest below the highest, not {bounds.tolist()}")
        self._bounds, d = bounds.detach().double(), bounds.shape[1]
        shortest = SHORTEST * sqrt(d)
        reach = (sqrt(d) + 2.5) / shortest  # of frequencies that the shortest length has
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            made = Regression(
                dim_x=d, features=features, experts=experts, lengths=(shortest, LONGEST * sqrt(d)),
                amplitudes=AMPLITUDES, noise=NOISE, spacing=2 * reach / features,
            )  # fmt: skip
        self.regression = made.to(bounds.device).requires_grad_(False)
        self._start(Moments.empty(features + 1, 1, device=bounds.device), (0.0, 1.0))

    def _start(self, moments: Moments, units: tuple[float, float]) -> None:
        """Take on a state, in units (mean and deviation) of outcomes."""
        self.moments, self.units = moments, units
        self.dim, self.device = self._bounds.shape[1], moments.count.device
        self.posterior_ = self._read(moments, units)

    def _read(self, moments: Moments, units: tuple[float, float]) -> Posterior:
        """What the experts that matter know; outcomes are standardised within the moments."""
        own, batch = standardised(moments, *units), moments.count.shape
        found = self.regression.read(Moments(*(t.reshape(-1, *t.shape[len(batch) :]) for t in own.parts)))
        weight = found.evidence.log_softmax(-1)
        kept = weight.exp().amax(0) > NEGLIGIBLE
        parts = weight[:, kept].log_softmax(-1), found.weights[:, kept], found.covariance[:, kept]
        self._noise = (2 * self.regression.log_noise.double()).exp()[kept]
        return Posterior(*(t.unflatten(0, batch) if batch else t[0] for t in parts))

    @property
    def batch_shape(self) -> torch.Size:
        return self.moments.count.shape

    @property
    def count(self) -> int:
        """How many observations it holds; of a batch, the most."""
        return int(self.moments.count.max())

    def observe(self, X: Tensor, Y: Tensor) -> "RegressionSurrogate":  # noqa: N803
        """A surrogate with more real observations, (n, d) and (n, 1), and units that fit all of them."""
        moments = self._with(X, Y)
        count, total, square = (float(t) for t in (moments.count, moments.cross[-1], moments.square))
        mean = total / max(count, 1.0)
        variance = square / max(count, 1.0) - mean**2
        return self._made(moments, (mean, sqrt(variance) if variance > 1e-12 * (1 + mean**2) else 1.0))

    def condition_on_observations(self, X: Tensor, Y: Tensor, **_: Any) -> "RegressionSurrogate":  # noqa: N803
        return self._made(self._with(X, Y), self.units)

    def _with(self, x: Tensor, y: Tensor) -> Moments:
        x, y, batch = self._observed(x, y)
        if not bool(y.isfinite().all()):
            raise ValueError("some outcomes are not finite: leave those points out")
        phi = self._features(x)
        more = Moments.observe(torch.cat([phi, torch.ones_like(phi[..., :1])], -1), y.double())
        own = (t.expand((*batch, *t.shape[self.moments.count.ndim :])) for t in self.moments.parts)
        return Moments(*own).merge(more)

    def _made(self, moments: Moments, units: tuple[float, float]) -> "RegressionSurrogate":
        made = RegressionSurrogate.__new__(RegressionSurrogate)
        Model.__init__(made)
        made._bounds, made.regression = self._bounds, self.regression
        made._start(moments, units)
        return made

    def _features(self, x: Tensor) -> Tensor:
        low, high = self._bounds.to(x.device)
        return self.regression.features(2 * (x.double() - low) / (high - low) - 1)

    def _joint(self, x: Tensor, *, noise: bool) -> tuple[Tensor, Tensor]:
        mean, covariance = mixture(self.posterior_, self._features(x), self._noise if noise else None)
        shift, scale = self.units
        return shift + scale * mean, scale**2 * covariance


class ProcessSurrogate(Surrogate):
    """A neural process and its state, as a surrogate for the kind of functions that it was trained on.

    The points of a batch are predicted one after another, each given those before. How later means follow
    what an earlier point turns out to be is taken from two updates, a deviation above and below its mean:

        L_ii = std(y_i | y_1 ... y_(i-1))
        L_ji = (E[y_j | y_i = mean + std] - E[y_j | y_i = mean - std]) / 2

    and L L' is the covariance, its rows scaled to each point's own deviation; of a process that is Gaussian
    it is exact. A model with a low rank has one of its own. Deviations are of observations, with noise.

    Args:
        model: of one output; ready to evaluate.
        state: of what was observed; nothing if not given.
    """

    def __init__(
        self, model: NeuralProcess[Any, Any], state: Any = None, *, batch: torch.Size | tuple[int, ...] = ()
    ) -> None:
        super().__init__()
        self.dim, self.device = model.dim_x, model.device
        if model.dim_y != 1:
            raise ValueError(f"the model has {model.dim_y} outputs, but one is optimised: take one of one")
        self.model, self._batch = model, torch.Size(batch)
        self.state = model.empty() if state is None else state
        if self.state.batch != self._batch.numel():
            raise ValueError(f"the state is a batch of {self.state.batch}, not of {tuple(batch) or 'one'}")

    @property
    def batch_shape(self) -> torch.Size:
        return self._batch

    def condition_on_observations(self, X: Tensor, Y: Tensor, **_: Any) -> "ProcessSurrogate":  # noqa: N803
        x, y, batch = self._observed(X, Y)
        flat = (t.reshape(batch.numel(), *t.shape[-2:]).to(self.model.dtype) for t in (x, y))
        return ProcessSurrogate(self.model, self.model.update(self._states(batch), *flat), batch=batch)

    observe = condition_on_observations

    def _states(self, batch: torch.Size) -> Any:
        """One state for each batch of points."""
        index = torch.arange(self.state.batch, device=self.state.device)
        return self.state.select(index.view(self._batch).expand(batch).reshape(-1))

    def _joint(self, x: Tensor, *, noise: bool) -> tuple[Tensor, Tensor]:  # noqa: ARG002
        batch, (q, d) = torch.broadcast_shapes(x.shape[:-2], self._batch), x.shape[-2:]
        flat = x.expand(*batch, q, d).reshape(-1, q, d).to(self.model.dtype)
        if self._batch:
            found: Any = self.model.query(self._states(batch), flat)
        else:  # targets do not see each other: no need for many states
            found = self.model.query(self.state, flat.reshape(1, -1, d))
        mean = found.mean.reshape(-1, q)
        if isinstance(found, JointNormal):
            own = found.own.reshape(-1, q)
            factor = own[..., None] * found.loading.reshape(*own.shape, -1)
            covariance = factor @ factor.mT + torch.diag_embed(own.square())
        elif q == 1:
            covariance = found.variance.reshape(-1, 1, 1)
        else:
            std = found.stddev.reshape(-1, q)
            root = self._root(self._states(batch), flat, mean, std)
            root = root * (std / root.norm(dim=-1))[..., None]
            covariance = root @ root.mT
        return mean.reshape(*batch, q), covariance.reshape(*batch, q, q)

    def _root(self, states: Any, x: Tensor, mean: Tensor, std: Tensor) -> Tensor:
        """A lower triangular root of the covariance, column by column."""
        (b, q), columns = mean.shape, []
        every = torch.arange(b, device=x.device)
        for i in range(q):
            own = [torch.zeros_like(std[:, :i]), std[:, i:][:, :1]]
            if i < q - 1:
                here = torch.cat([mean[:, :1] + std_i for std_i in (own[1], -own[1], 0 * own[1])])[..., None]
                three = states.select(every.repeat(3))
                grown = self.model.update(three, x[:, i : i + 1].repeat(3, 1, 1), here)
                found = self.model.query(grown, x[:, i + 1 :].repeat(3, 1, 1))
                above, below, mean = found.mean[..., 0].chunk(3)
                own.append((above - below) / 2)
                std = torch.cat([std[:, : i + 1], found.stddev[2 * b :, :, 0]], 1)
                states = grown.select(every + 2 * b)
            columns.append(torch.cat(own, 1))
        return torch.stack(columns, -1)

"""Gaussian-process tasks in one dimension, and the exact posterior that no model can beat."""

from collections.abc import Iterator
from dataclasses import dataclass
from math import pi, sqrt
from typing import Literal, get_args

import torch
from jaxtyping import Float, Float64
from torch import Tensor
from torch.distributions import Normal

from constmem.core import checks
from constmem.core.checks import known
from constmem.data.task import Task, draw_counts, draw_sizes, draw_split, first

Kernel = Literal["rbf", "matern", "periodic"]
LENGTH, SCALE, PERIOD, X = (0.1, 0.6), (0.1, 1.0), (0.1, 0.5), (-2.0, 2.0)  # drawn from U[low, high)
NOISE = 0.02  # standard deviation
JITTER = 1e-9  # of the variance: above what float64 loses for hundreds of points, below all that matters


@dataclass(frozen=True, eq=False)
class GaussianProcess:
    """A batch of Gaussian processes, one for each task, all of one kernel; computed in float64.

    With d = |x - x'|, the covariance is scale² times
    `exp(-d²/(2 length²))` (rbf),
    `(1 + a + a²/3) exp(-a)`, a = √5 d / length (matern, ν = 5/2), or
    `exp(-2 sin²(π d / period) / length²)` (periodic).

    Args:
        kernel: 'rbf', 'matern' or 'periodic'.
        length, scale: of each process; scale is a standard deviation.
        period: of each process, where the kernel has one.
        noise: standard deviation of what is added to every observation.

    Example:
        Predicting the context gives it back, up to the noise.

        >>> generator = torch.Generator().manual_seed(0)
        >>> task, process = gp_tasks(4, kernel="rbf", generator=generator)
        >>> again = Task(task.xc, task.yc, task.xc, task.yc)
        >>> bool((process.posterior(again).mean - task.yc).abs().max() < 4 * process.noise)
        True
    """

    kernel: Kernel
    length: Float64[Tensor, " b"]
    scale: Float64[Tensor, " b"]
    period: Float64[Tensor, " b"] | None = None
    noise: float = NOISE

    def __post_init__(self) -> None:
        known("kernel", self.kernel, get_args(Kernel))
        if (self.kernel == "periodic") != (self.period is not None):
            raise ValueError(
                f"kernel is {self.kernel!r} and period {'given' if self.period is not None else 'None'}: "
                "the periodic kernel needs a period, the others have none"
            )

    def covariance(self, x1: Float[Tensor, "b n 1"], x2: Float[Tensor, "b m 1"]) -> Float64[Tensor, "b n m"]:
        """The covariance of the process between two sets of points, without the noise."""
        d = (x1.double() - x2.double().mT).abs()
        length, scale = self.length[:, None, None], self.scale[:, None, None]
        if self.kernel == "rbf":
            shape = torch.exp(-0.5 * (d / length) ** 2)
        elif self.kernel == "matern":
            a = sqrt(5) * d / length
            shape = (1 + a + a**2 / 3) * torch.exp(-a)
        else:
            assert self.period is not None
            shape = torch.exp(-2 * (torch.sin(pi * d / self.period[:, None, None]) / length) ** 2)
        return scale**2 * shape

    def sample(self, x: Float[Tensor, "b n 1"], *, generator: torch.Generator) -> Float64[Tensor, "b n 1"]:
        """Noisy observations of one function drawn from each process."""
        shape, device = x.shape, generator.device
        white = torch.randn(shape, generator=generator, device=device, dtype=torch.float64)
        return self._factor(self.covariance(x, x)) @ white.to(x.device)

    def posterior(self, task: Task) -> Normal:
        """The exact predictive distribution of each target, apart from the others, given the context.

        It is that of observations, noise included: its log-likelihood is the ceiling for models
        that predict targets independently.
        """
        prior, cross = self.covariance(task.xc, task.xc), self.covariance(task.xc, task.xt)
        yc = task.yc.double()
        if task.mask_c is not None:  # a point of no covariance with anything says nothing
            real = task.mask_c[..., None]
            prior = torch.where(real & real.mT, prior, 0.0)
            cross, yc = torch.where(real, cross, 0.0), torch.where(real, yc, 0.0)
        factor = self._factor(prior)
        weights = torch.linalg.solve_triangular(factor, cross, upper=False)  # (b, n, m)
        mean = weights.mT @ torch.linalg.solve_triangular(factor, yc, upper=False)
        explained = weights.square().sum(1)[..., None]
        variance = (self.scale[:, None, None] ** 2 - explained).clamp_min(0.0) + self._variance_of_noise()
        return Normal(mean, variance.sqrt(), validate_args=False)

    def log_likelihood(self, task: Task) -> Float64[Tensor, "b m"]:
        """The exact posterior's log-likelihood of each target; 0 where masked out."""
        return task.point_log_likelihood(self.posterior(task).log_prob(task.yt.double()))

    def _variance_of_noise(self) -> Float64[Tensor, "b 1 1"]:
        return self.noise**2 + JITTER * self.scale[:, None, None] ** 2

    def _factor(self, covariance: Float64[Tensor, "b n n"]) -> Float64[Tensor, "b n n"]:
        """The Cholesky factor with the noise on the diagonal; never asks the device whether it worked."""
        eye = torch.eye(covariance.shape[-1], dtype=covariance.dtype, device=covariance.device)
        factor: Tensor = torch.linalg.cholesky_ex(covariance + self._variance_of_noise() * eye).L
        return factor


def draw_gp(batch: int, *, kernel: Kernel, generator: torch.Generator) -> GaussianProcess:
    """A batch of processes with hyper-parameters drawn by the protocol, on the generator's device."""
    checks.positive("batch", batch)
    length = _uniform(LENGTH, (batch,), generator)
    scale = _uniform(SCALE, (batch,), generator)
    period = _uniform(PERIOD, (batch,), generator) if kernel == "periodic" else None
    return GaussianProcess(kernel, length, scale, period)


def gp_tasks(
    batch: int,
    *,
    kernel: Kernel = "rbf",
    generator: torch.Generator,
    max_points: int = 50,
    padded: bool = False,
) -> tuple[Task, GaussianProcess]:
    """Tasks by the reference protocol: one context and one target size for the whole batch.

    x ~ U[-2, 2); Nc ~ U{3..46} and Nt ~ U{3..49-Nc} for 50 points at most; made on the
    generator's device, together with the processes they came from. `padded` gives the sizes by masks
    over max_points - 1 points: shapes never change, and nothing waits for the device.
    """
    if padded:
        mask_c, mask_t = draw_split(batch, generator=generator, max_points=max_points)
        process = draw_gp(batch, kernel=kernel, generator=generator)
        x, y = _points(process, batch, max_points - 1, generator)
        return Task(x, y, x, y, mask_c, mask_t), process
    n, m = draw_sizes(generator=generator, max_points=max_points)
    process = draw_gp(batch, kernel=kernel, generator=generator)
    x, y = _points(process, batch, n + m, generator)
    return Task(x[:, :n], y[:, :n], x[:, n:], y[:, n:]), process


def static_gp_tasks(
    batch: int, *, kernel: Kernel = "rbf", generator: torch.Generator, max_points: int = 50
) -> tuple[Task, GaussianProcess]:
    """Tasks of one fixed shape, a context size drawn for each by the protocol and given by a mask.

    There are max_points - 4 slots for the context and as many targets, all of them real. Nothing waits
    for the device, so that steps on these tasks can be compiled or captured in a graph.

    Args:
        batch: how many tasks.
        kernel: 'rbf', 'matern' or 'periodic'.
        generator: source of all randomness; the tasks are made on its device.
        max_points: a task has fewer points than this by the protocol.
    """
    context, _ = draw_counts(batch, generator=generator, max_points=max_points)
    slots = max_points - 4
    process = draw_gp(batch, kernel=kernel, generator=generator)
    x, y = _points(process, batch, 2 * slots, generator)
    return Task(x[:, :slots], y[:, :slots], x[:, slots:], y[:, slots:], first(context, slots)), process


def gp_evaluation_tasks(
    *, kernel: Kernel, seed: int, num_batches: int = 3000, batch: int = 16, max_points: int = 50
) -> Iterator[tuple[Task, GaussianProcess]]:
    """A fixed evaluation set: the same tasks for the same seed, drawn on the CPU; move them with `.to`."""
    checks.positive("num_batches", num_batches)
    known("kernel", kernel, get_args(Kernel))
    generator = torch.Generator().manual_seed(seed)
    return (
        gp_tasks(batch, kernel=kernel, generator=generator, max_points=max_points) for _ in range(num_batches)
    )


def _points(
    process: GaussianProcess, batch: int, count: int, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    x = _uniform(X, (batch, count, 1), generator).float()  # rounded first: y belongs to the x returned
    return x, process.sample(x, generator=generator).float()


def _uniform(bounds: tuple[float, float], shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    low, high = bounds
    u = torch.rand(shape, generator=generator, device=generator.device, dtype=torch.float64)
    return low + (high - low) * u

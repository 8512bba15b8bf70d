"""How good predictions are: log-likelihood, error, CRPS and calibration on fixed tasks."""

from collections.abc import Iterable
from dataclasses import dataclass
from math import pi, sqrt

import torch
from jaxtyping import Float
from torch import Tensor
from torch.distributions import Distribution, Normal

from constmem.data import Task
from constmem.neural_processes import NeuralProcess

LEVELS = (0.5, 0.8, 0.9, 0.95)


@dataclass(frozen=True)
class Scores:
    """Means over all target points of a test set.

    Attributes:
        log_likelihood: summed over channels, mean over points.
        log_likelihood_by_batch: the reference's figure: the unweighted mean over batches of their means.
        rmse: root mean squared error of the predicted mean.
        crps: continuous ranked probability score, mean over channels.
        coverage: share of values inside the central interval of each level of `LEVELS`.
        points: how many target points.
    """

    log_likelihood: float
    log_likelihood_by_batch: float
    rmse: float
    crps: float
    coverage: dict[str, float]
    points: int


def evaluate(model: NeuralProcess, tasks: Iterable[Task]) -> Scores:
    """Score a model on tasks, each conditioned on its context and asked for its targets."""
    model.eval()
    batches: list[Tensor] = []  # per batch: sum of ll, mean of ll, squared error, crps, coverage..., counts
    with torch.no_grad():
        for task in tasks:
            dist = model.query(model.condition(task.xc, task.yc, mask=task.mask_c), task.xt)
            batches.append(_batch_sums(task, dist))
    table = torch.stack(batches).double().cpu()
    points, values = float(table[:, -2].sum()), float(table[:, -1].sum())
    sums = table.sum(0)
    return Scores(
        log_likelihood=float(sums[0]) / points,
        log_likelihood_by_batch=float(table[:, 1].mean()),
        rmse=sqrt(float(sums[2]) / values),
        crps=float(sums[3]) / values,
        coverage={str(level): float(sums[4 + i]) / values for i, level in enumerate(LEVELS)},
        points=int(points),
    )


def _batch_sums(task: Task, dist: Distribution) -> Tensor:
    real = (
        torch.ones(task.xt.shape[:2], device=task.xt.device) if task.mask_t is None else task.mask_t.float()
    )
    point = task.point_log_likelihood(dist.log_prob(task.yt)).double()
    each = real[..., None].expand_as(task.yt)
    off_centre = (dist.cdf(task.yt) - 0.5).abs()
    inside = [((off_centre <= level / 2) * each).sum() for level in LEVELS]
    error = ((dist.mean - task.yt) ** 2 * each).sum()
    crps = (crps_of(dist, task.yt) * each).sum()
    return torch.stack([point.sum(), point.sum() / real.sum(), error, crps, *inside, real.sum(), each.sum()])


def crps_of(dist: Distribution, y: Tensor) -> Tensor:
    """Continuous ranked probability score of each value: in closed form for normals, else by quadrature.

    CRPS = integral of (F(z) - [z >= y])^2 dz; the same units as y, smaller is better.
    """
    if isinstance(dist, Normal):
        z = (y - dist.mean) / dist.stddev
        density = torch.exp(-0.5 * z**2) / sqrt(2 * pi)
        erf: Tensor = torch.special.erf(z / sqrt(2.0))
        return dist.stddev * (z * erf + 2 * density - 1 / sqrt(pi))
    below = torch.minimum(dist.mean - 6 * dist.stddev, y)
    above = torch.maximum(dist.mean + 6 * dist.stddev, y)
    steps = 48
    total = torch.zeros_like(y)
    for i in range(steps):  # the midpoint rule on either side of y, where the integrand is smooth
        share = (i + 0.5) / steps
        total += (y - below) * dist.cdf(below + (y - below) * share) ** 2
        total += (above - y) * (1 - dist.cdf(y + (above - y) * share)) ** 2
    return total / steps


def pit_values(model: NeuralProcess, tasks: Iterable[Task]) -> Float[Tensor, " n"]:
    """F(y) of every target value under its prediction: uniform on [0, 1] for a calibrated model."""
    model.eval()
    found = []
    with torch.no_grad():
        for task in tasks:
            dist = model.query(model.condition(task.xc, task.yc, mask=task.mask_c), task.xt)
            values = dist.cdf(task.yt)
            found.append((values if task.mask_t is None else values[task.mask_t]).flatten().cpu())
    return torch.cat(found)

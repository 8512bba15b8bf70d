"""Scores of predictions of points, their figures over seeds, and what was published."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import floor, isfinite, isnan, log10, nan, pi, sqrt
from statistics import mean, stdev
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.distributions import Distribution, Normal

from constmem.data import Task
from constmem.neural_processes import NeuralProcess
from constmem.neural_processes.heads import LevelMixture, level_log_prob
from constmem.neural_processes.joint import JointNormal, SampleMixture

LEVELS = (0.5, 0.8, 0.9, 0.95)
AT_ONCE = {"cuda": 2**16}  # points predicted together, where small batches would leave a device idle

# Log-likelihoods of the paper's image table (mean of 5 seeds); for Gaussian processes of its later version.
PUBLISHED: dict[str, dict[str, dict[str, float]]] = {
    "emnist": {
        "cnp": {"seen": 0.73, "unseen": 0.49},
        "canp": {"seen": 0.94, "unseen": 0.82},
        "np": {"seen": 0.79, "unseen": 0.59},
        "anp": {"seen": 0.98, "unseen": 0.89},
        "bnp": {"seen": 0.88, "unseen": 0.73},
        "banp": {"seen": 1.01, "unseen": 0.94},
        "tnpd": {"seen": 1.46, "unseen": 1.31},
        "lbanp": {"seen": 1.39, "unseen": 1.17},
        "cmanp": {"seen": 1.36, "unseen": 1.09},
    },
    "celeba32": {
        "cnp": {"test": 2.15}, "canp": {"test": 2.66}, "np": {"test": 2.48}, "anp": {"test": 2.90},
        "bnp": {"test": 2.76}, "banp": {"test": 3.09}, "tnpd": {"test": 3.89}, "lbanp": {"test": 3.97},
        "cmanp": {"test": 3.93},
    },
    "celeba64": {
        "cnp": {"test": 2.43}, "canp": {"test": 3.15}, "np": {"test": 2.60}, "bnp": {"test": 2.97},
        "tnpd": {"test": 5.41}, "lbanp": {"test": 5.09}, "cmanp": {"test": 5.02},
    },
    "celeba128": {
        "cnp": {"test": 2.55}, "np": {"test": 2.67}, "lbanp": {"test": 5.84}, "cmanp": {"test": 5.55},
    },
    "gp": {"cmanp": {"rbf": 1.24, "matern": 0.80}},
    "taxi": {"thp": {"test": -0.372}, "gru": {"test": -0.453}},  # NLL an event, as EasyTPP reports it
}  # fmt: skip
# What others report: data set -> (who, where, {column: figure}). Those of Taxi are under the protocol that we
# follow too. The paper's are not: other splits, other units, and an RMSE of sums of errors.
ELSEWHERE: dict[str, tuple[tuple[str, str, dict[str, float]], ...]] = {
    "taxi": (
        ("RMTPP", "published elsewhere", {"nll": -0.346}),
        ("AttNHP", "published elsewhere", {"nll": -0.493}),
        ("NHP", "published elsewhere", {"nll": -0.514}),
        ("S2P2", "published elsewhere", {"nll": -0.522}),
    ),
    "mooc": (
        ("THP", "the paper's, another protocol", {"nll": 0.267, "rmse": 0.202, "accuracy": 0.336}),
        ("CMHP", "the paper's, another protocol", {"nll": -0.040, "rmse": 0.168, "accuracy": 0.237}),
    ),
    "reddit": (
        ("THP", "the paper's, another protocol", {"nll": 0.268, "rmse": 0.238, "accuracy": 0.610}),
        ("CMHP", "the paper's, another protocol", {"nll": 0.528, "rmse": 0.262, "accuracy": 0.609}),
    ),
}


@dataclass(frozen=True)
class Scores:
    """Means over all target points of a test set.

    Attributes:
        log_likelihood: summed over channels, mean over points.
        log_likelihood_by_batch: the reference's figure: the unweighted mean over batches of their means.
        rmse: root mean squared error of the predicted mean.
        crps: continuous ranked probability score, mean over channels.
        coverage: share of values inside the central interval of each level (of grey levels, by share).
        points: how many target points.
        exact, exact_by_batch: the two log-likelihoods of the process that the data came from, where it
            is known: no model exceeds them but by chance.
        level_log_likelihood, level_log_likelihood_by_batch: of pixels, the same two of the probabilities of
            grey levels, by which models of densities and of levels compare; a normal's are its integrals.
        joint_log_likelihood, joint_log_likelihood_by_batch: of all targets of a task together, divided by how
            many they are, where a model predicts them together.
    """

    log_likelihood: float
    log_likelihood_by_batch: float
    rmse: float
    crps: float
    coverage: dict[str, float]
    points: int
    exact: float | None = None
    exact_by_batch: float | None = None
    level_log_likelihood: float | None = None
    level_log_likelihood_by_batch: float | None = None
    joint_log_likelihood: float | None = None
    joint_log_likelihood_by_batch: float | None = None


@dataclass(frozen=True)
class Figure:
    """The mean over seeds, and their standard deviation where there are several."""

    mean: float
    spread: float | None

    @classmethod
    def of(cls, values: Sequence[float]) -> "Figure":
        """Of one value for each seed; NaN where there are several and not all of them are finite."""
        if len(values) > 1 and not all(map(isfinite, values)):
            return cls(nan, nan)
        return cls(mean(values), stdev(values) if len(values) > 1 else None)

    def __str__(self) -> str:
        return self.text(2)

    def text(self, digits: int, *, percent: bool = False) -> str:
        """With so many digits after the point.

        Example:
            >>> Figure(0.9184, 0.002).text(1, percent=True)
            '91.8 ± 0.2 %'
        """
        scale, unit = (100, " %") if percent else (1, "")
        spread = "" if self.spread is None else f" ± {scale * self.spread:,.{digits}f}"
        return f"{scale * self.mean:,.{digits}f}{spread}{unit}"

    def short(self) -> str:
        """With about four digits in all, for numbers whose unit may be anything.

        Example:
            >>> Figure(1234.5, None).short(), Figure(0.25, None).short(), Figure(0.00012345, None).short()
            ('1,234', '0.2500', '0.0001234')
        """
        size = abs(self.mean)
        if 0 < size < 0.01:
            return self.text(3 - floor(log10(size)))
        return self.text(next((d for d in range(4) if size >= 10 ** (3 - d)), 4))


@torch.no_grad()
def evaluate(model: NeuralProcess, tasks: Iterable[Task], *, levels: int = 0) -> Scores:
    """Score a model on tasks, each conditioned on its context and asked for its targets.

    Args:
        levels: of pixels, how many values there are from black to white: their probabilities are scored, too.
    """
    batches: list[Tensor] = []  # per batch: sums of ll's, squared error, crps, coverage..., counts
    for group, whole, dist in _predicted(model, tasks):
        each = _task_sums(whole, dist, levels).split([task.batch for task in group])
        batches += [sums.sum(0) for sums in each]
    if not batches:
        raise ValueError("there are no tasks to score a model on")
    table = torch.stack(batches).double().cpu()
    table = table[table[:, -2] > 0]  # a batch without targets has no mean
    if not len(table):
        raise ValueError("there are no targets to score a model on: every one is masked out")
    sums = table.sum(0)
    points, values = float(sums[-2]), float(sums[-1])
    means, known = (table[:, :4] / table[:, -2:-1]).mean(0), dict[str, Any]()
    for i, name in enumerate(("log_likelihood", "exact", "level_log_likelihood", "joint_log_likelihood")):
        by_point, by_batch = float(sums[i]) / points, float(means[i])
        if i == 0 or not isnan(by_point):  # the model's own is NaN only where it has failed
            known |= {name: by_point, f"{name}_by_batch": by_batch}
    return Scores(
        **known,
        rmse=sqrt(float(sums[4]) / values),
        crps=float(sums[5]) / values,
        coverage={str(level): float(sums[6 + i]) / values for i, level in enumerate(LEVELS)},
        points=int(points),
    )


@torch.no_grad()
def pit_values(model: NeuralProcess, tasks: Iterable[Task]) -> Float[Tensor, " n"]:
    """F(y) of every target value under its prediction: uniform on [0, 1] for a calibrated model.

    Of a value that has a probability it is anywhere in the step that F makes there, at random.
    """
    found = []
    for _, task, dist in _predicted(model, tasks):
        bounds = torch.stack(_bounds(dist, task.yt), -1)
        found.append((bounds if task.mask_t is None else bounds[task.mask_t]).flatten(0, -2).cpu())
    below, upto = torch.cat(found).unbind(-1)
    place = torch.rand(below.shape, generator=torch.Generator().manual_seed(0), dtype=below.dtype)
    return below + place * (upto - below)


def _bounds(dist: Distribution, y: Float[Tensor, "b m y"]) -> tuple[Tensor, Tensor]:
    """P(Y < y) and P(Y <= y), which only a distribution on levels knows apart."""
    upto = dist.cdf(y)
    return (dist.below(y), upto) if isinstance(dist, LevelMixture) else (upto, upto)


def inside(below: Tensor, upto: Tensor, level: float) -> Tensor:
    """How much of a value is in the central interval of a level: all or nothing, unless F makes a step.

    Of a step it is the share that lies between (1 - level) / 2 and (1 + level) / 2. An interval of levels can
    hold no less than the whole of its outermost ones: only counted by shares is a calibrated model's coverage
    the level.
    """
    low, high = (1 - level) / 2, (1 + level) / 2
    step, shared = upto - below, torch.minimum(upto, upto.new_tensor(high)) - below.clamp_min(low)
    return torch.where(step > 0, shared.clamp_min(0) / step, ((upto >= low) & (upto <= high)).to(upto.dtype))


def _predicted(
    model: NeuralProcess, tasks: Iterable[Task]
) -> Iterator[tuple[list[Task], Task, Distribution]]:
    """Predictions for as many batches at a time as their device is good for, and those batches as one."""
    model.eval()
    for group in _grouped(tasks, AT_ONCE.get(model.device.type, 0)):
        whole = Task.stack(group)
        if whole.mask_t is not None:  # what is masked out may hold anything
            hidden = ~whole.mask_t[..., None]
            whole = replace(whole, xt=whole.xt.masked_fill(hidden, 0.0), yt=whole.yt.masked_fill(hidden, 0.0))
        yield group, whole, model.query(model.condition(whole.xc, whole.yc, mask=whole.mask_c), whole.xt)


def _grouped(tasks: Iterable[Task], most: int) -> Iterator[list[Task]]:
    """Batches that follow each other, together while they are of no more than so many points when padded."""
    group: list[Task] = []
    for task in tasks:
        grown = [*group, task]
        longest = max(t.xc.shape[1] for t in grown) + max(t.xt.shape[1] for t in grown)
        if group and sum(t.batch for t in grown) * longest > most:
            yield group
            grown = [task]
        group = grown
    if group:
        yield group


def _task_sums(task: Task, dist: Distribution, levels: int) -> Float[Tensor, "b sums"]:
    """For each task, sums over its targets."""
    real = torch.ones_like(task.xt[..., 0]) if task.mask_t is None else task.mask_t.float()
    each = real[..., None].expand_as(task.yt).double()
    held = map(partial(inside, *_bounds(dist, task.yt)), LEVELS)
    of_values = [(dist.mean - task.yt) ** 2, crps_of(dist, task.yt), *held]
    sums = [(each * values).sum((1, 2)) for values in of_values]
    point = task.point_log_likelihood(dist.log_prob(task.yt)).double()
    unknown = point.new_full(point.shape[:1], nan)
    exact = unknown if task.exact is None else task.exact.double().sum(1)
    level = (
        task.point_log_likelihood(level_log_prob(dist, task.yt, levels)).double().sum(1)
        if levels
        else unknown
    )
    joint = dist.joint_log_prob(task.yt, task.mask_t) if isinstance(dist, JointNormal) else unknown
    parts = [point.sum(1), exact, level, joint, *sums, real.double().sum(1), each.sum((1, 2))]
    return torch.stack(parts, 1)


def crps_of(dist: Distribution, y: Float[Tensor, "*b y"]) -> Float[Tensor, "*b y"]:
    """Continuous ranked probability score of each value, in closed form; in its units, smaller is better.

    CRPS = integral of (F(z) - [z >= y])^2 dz = E|X - y| - E|X - X'| / 2, for X, X' drawn from F. Of a
    mixture both are means of E|N(m, s)| over its components, and over pairs of them, by their weights.
    """
    if isinstance(dist, LevelMixture):
        return dist.crps(y)
    if isinstance(dist, Normal):
        return _mean_size(y - dist.mean, dist.stddev) - dist.stddev / sqrt(pi)
    if not isinstance(dist, SampleMixture):
        raise TypeError(f"there is no closed form here for the CRPS of a {type(dist).__name__}")
    means, stds = dist.components.mean, dist.components.stddev  # (b, m, k, y)
    weight, k = dist.weight, means.shape[-2]
    spread = (2 / sqrt(pi)) * (weight.square() * stds).sum(-2)  # of each component with itself
    for shift in range(1, k // 2 + 1):  # of each with the one so many places on; and back, but for half way
        others, other_stds = means.roll(shift, -2), stds.roll(shift, -2)
        sizes = _mean_size(means - others, torch.hypot(stds, other_stds))
        pairs = (weight * weight.roll(shift, -2) * sizes).sum(-2)
        spread += pairs if 2 * shift == k else 2 * pairs
    return (weight * _mean_size(y[..., None, :] - means, stds)).sum(-2) - 0.5 * spread


def _mean_size(mean: Tensor, std: Tensor) -> Tensor:
    """E|N(mean, std)|."""
    z = mean / std
    size: Tensor = mean * torch.special.erf(z / sqrt(2.0)) + sqrt(2 / pi) * std * torch.exp(-0.5 * z**2)
    return size

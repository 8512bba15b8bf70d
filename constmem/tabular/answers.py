"""What a learner answers: Student's t of each target, or probabilities of classes, mixed over horizons."""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor

DOUBT = 0.3  # of the variance that indicators of equally frequent classes have
BISECTIONS = 60
TAILS = 8.0  # degrees of freedom of a number's distribution, at most


def probabilities(
    mean: Float[Tensor, "n k"], variance: Float[Tensor, "n k"], *, temperature: float = 1.0
) -> Float[Tensor, "n k"]:
    """Probabilities of classes, (n, k), from means and variances of their indicators.

    A softmax over distances from one half in units of each answer's deviation: the logistic function that
    is nearest to a normal distribution's. Indicators of classes that are easy to tell apart have next to no
    noise in the rows seen; `DOUBT` keeps that from being taken for certainty.
    """
    k = mean.shape[-1]
    spread = (variance + DOUBT * (k - 1) / k**2).clamp(min=torch.finfo(torch.float64).tiny).sqrt()
    return torch.softmax((mean - 0.5) / (spread * temperature) * (8 / torch.pi) ** 0.5, -1)


@dataclass(frozen=True, eq=False)
class Answer:
    """Student's t for each of n rows and k targets.

    Attributes:
        mean: (n, k).
        variance: (n, k) the square of its scale, noise included.
        freedom: degrees of freedom.
    """

    mean: Float[Tensor, "n k"]
    variance: Float[Tensor, "n k"]
    freedom: float

    def heavier(self) -> "Answer":
        """The same answer with tails as tables have them, and the same 90 % intervals.

        Moments of second order say nothing about tails. The residuals of most tables have heavier ones than a
        Gaussian: at most `TAILS` degrees of freedom predict them better, and lose little where they do not.
        """
        if self.freedom <= TAILS:
            return self
        return Answer(self.mean, self.variance * (_upper(self.freedom) / _upper(TAILS)) ** 2, TAILS)

    def restored(self, center: Tensor, scale: Tensor) -> "Answer":
        """The same in the units of targets."""
        return Answer(self.mean * scale + center, self.variance * scale**2, self.freedom)

    def log_density(self, y: Float[Tensor, "n k"]) -> Float[Tensor, " n"]:
        """Log density of the targets, summed over them."""
        scale = self.variance.clamp(min=1e-300).sqrt()
        t = torch.distributions.StudentT(self.freedom, self.mean, scale, validate_args=False)
        density: Tensor = t.log_prob(y)
        return density.sum(-1)

    def heavy_log_density(self, y: Float[Tensor, "n k"]) -> Float[Tensor, " n"]:
        """Log density of numbers, whose tails are heavy."""
        return self.heavier().log_density(y)

    def cdf(self, y: NDArray[np.float64]) -> NDArray[np.float64]:
        """Probability of less than y, each (n, k)."""
        from scipy.special import stdtr  # type: ignore[import-untyped]

        scale = np.maximum(self.variance.clamp(min=0).sqrt().numpy(), 1e-300)
        return np.asarray(stdtr(self.freedom, (y - self.mean.numpy()) / scale))

    def bounds(self, level: float) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Numbers that the quantile lies between: here it is both."""
        from scipy.special import stdtrit

        found = self.mean.numpy() + self.variance.clamp(min=0).sqrt().numpy() * stdtrit(self.freedom, level)
        return found, found

    @property
    def moment(self) -> Float[Tensor, "n k"]:
        """Variance, but that it is never infinite."""
        return self.variance * (self.freedom / max(self.freedom - 2.0, 1.0))  # at least three rows' worth

    def log_probability(self, y: Float[Tensor, "n k"]) -> Float[Tensor, " n"]:
        """Log probability of the classes that one-hot targets name."""
        chances = probabilities(self.mean, self.variance)
        return (chances * y).sum(-1).clamp(min=1e-6).log()


@dataclass(frozen=True, eq=False)
class Shape:
    """A mixture of normals for each of n rows and k targets, around a mean that is not its own.

    Attributes:
        mean: (n, k) as predicted otherwise; it stays.
        means, stds, log_weight: (n, k, c) of the normals.
    """

    mean: Float[Tensor, "n k"]
    means: Float[Tensor, "n k c"]
    stds: Float[Tensor, "n k c"]
    log_weight: Float[Tensor, "n k c"]

    def log_density(self, y: Float[Tensor, "n k"]) -> Float[Tensor, " n"]:
        """Log density of the targets, summed over them."""
        normal = torch.distributions.Normal(self.means, self.stds, validate_args=False)
        made: Tensor = (normal.log_prob(y[..., None]) + self.log_weight).logsumexp(-1)
        return made.sum(-1)

    def cdf(self, y: NDArray[np.float64]) -> NDArray[np.float64]:
        """Probability of less than y, each (n, k)."""
        below = torch.special.ndtr((torch.from_numpy(y)[..., None] - self.means) / self.stds)
        return np.asarray((below * self.log_weight.exp()).sum(-1).numpy())

    def bounds(self, level: float) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Numbers that the quantile lies between: those of its normals."""
        far = torch.special.ndtri(torch.tensor(level, dtype=torch.float64))
        each = (self.means + self.stds * far).numpy()
        return each.min(-1), each.max(-1)

    @property
    def moment(self) -> Float[Tensor, "n k"]:
        """Mean square of the distance from the mean."""
        apart = (self.means - self.mean[..., None]).square()
        return (self.log_weight.exp() * (self.stds.square() + apart)).sum(-1)

    def restored(self, center: Tensor, scale: Tensor) -> "Shape":
        """The same in the units of targets."""
        middle, unit = center[:, None], scale[:, None]
        return Shape(
            self.mean * scale + center, self.means * unit + middle, self.stds * unit, self.log_weight
        )


A = TypeVar("A", Answer, Shape)


def concatenated(pieces: Sequence[A]) -> A:
    """Answers of several rows as one."""
    names = [field.name for field in fields(pieces[0]) if field.name != "freedom"]
    made: dict[str, Any] = {name: torch.cat([getattr(p, name) for p in pieces]) for name in names}
    return replace(pieces[0], **made)


def _upper(freedom: float) -> float:
    """The 95 % quantile of Student's t, by the expansion of Cornish and Fisher."""
    z = 1.6448536269514722
    first, second = (z**3 + z) / 4, (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + first / freedom + second / freedom**2 + third / freedom**3


Weights = Float[np.ndarray, " h"]


def mixed_mean(answers: Sequence[Answer | Shape], weights: Weights) -> NDArray[np.float64]:
    """Mean of the mixture, (n, k)."""
    means = np.stack([a.mean.numpy() for a in answers])
    return np.asarray(np.einsum("h,hnk->nk", weights, means))


def mixed_deviation(answers: Sequence[Answer | Shape], weights: Weights) -> NDArray[np.float64]:
    """Standard deviation of the mixture, (n, k)."""
    mean = mixed_mean(answers, weights)
    total = np.zeros_like(mean)
    for weight, a in zip(weights, answers, strict=True):
        total += weight * (a.moment.numpy() + (a.mean.numpy() - mean) ** 2)
    return np.sqrt(total)


def mixed_log_density(
    answers: Sequence[Answer | Shape], weights: Weights, y: Float[np.ndarray, "n k"]
) -> NDArray[np.float64]:
    """Log density of all targets of a row under the mixture, (n,)."""
    densities = torch.stack([answer.log_density(torch.from_numpy(y)) for answer in answers])
    shares = torch.from_numpy(weights).clamp(min=1e-300).log()
    return np.asarray((densities + shares[:, None]).logsumexp(0).numpy())


def mixed_quantiles(
    answers: Sequence[Answer | Shape], weights: Weights, levels: Sequence[float]
) -> NDArray[np.float64]:
    """Quantiles of the mixture, (levels, n, k)."""
    made = []
    for level in levels:
        lows, highs = zip(*(answer.bounds(level) for answer in answers), strict=True)
        low, high = np.min(lows, 0), np.max(highs, 0)  # the mixture's lies between those of its parts
        for _ in range(BISECTIONS if len(answers) > 1 else 0):
            middle = (low + high) / 2
            below = np.zeros_like(middle)
            for weight, answer in zip(weights, answers, strict=True):
                below += weight * answer.cdf(middle)
            low, high = np.where(below < level, middle, low), np.where(below < level, high, middle)
        made.append((low + high) / 2)
    return np.stack(made)


def mixed_probabilities(answers: Sequence[Answer | Shape], weights: Weights) -> NDArray[np.float64]:
    """Probabilities of classes, (n, k)."""
    known = [a for a in answers if isinstance(a, Answer)]
    chances = np.stack([probabilities(a.mean, a.variance).numpy() for a in known])
    mixture = np.einsum("h,hnk->nk", weights, chances)
    return np.asarray(mixture / mixture.sum(1, keepdims=True))

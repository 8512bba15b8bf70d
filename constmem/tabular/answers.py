"""What a learner answers: laws of targets, probabilities of classes; in numpy, as exported models run it."""
# ruff: noqa: N803 - X is scikit-learn's name

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from math import erfc, exp, lgamma, log, pi
from statistics import NormalDist
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from constmem.tabular.inputs import numbers_of

Array = NDArray[np.float64]
DOUBT = 0.3  # of the variance that indicators of equally frequent classes have
TAILS = 8.0  # degrees of freedom of a number's distribution, at most
TINY = 1e-300
TERMS = 20  # of a continued fraction: exact for some dozens of degrees of freedom
NEAR = 1e-13  # of where a quantile may be: how exactly it is found
_erfc = np.frompyfunc(erfc, 1, 1)


def probabilities(mean: Array, variance: Array) -> Array:
    """Probabilities of classes, (n, k), from means and variances of their indicators.

    A softmax over distances from one half in units of each answer's deviation: the logistic function that
    is nearest to a normal distribution's. Indicators of classes that are easy to tell apart have next to no
    noise in the rows seen; `DOUBT` keeps that from being taken for certainty.
    """
    k = mean.shape[-1]
    spread = np.sqrt(np.maximum(variance + DOUBT * (k - 1) / k**2, np.finfo(np.float64).tiny))
    numbers = (mean - 0.5) / spread * (8 / pi) ** 0.5
    shares = np.exp(numbers - numbers.max(-1, keepdims=True))
    return np.asarray(shares / shares.sum(-1, keepdims=True))


@dataclass(frozen=True, eq=False)
class Answer:
    """Student's t for each of n rows and k targets.

    Attributes:
        mean: (n, k).
        variance: (n, k) the square of its scale, noise included.
        freedom: degrees of freedom.
    """

    mean: Array
    variance: Array
    freedom: float

    def heavier(self) -> "Answer":
        """The same answer with tails as tables have them, and the same 90 % intervals.

        Moments of second order say nothing about tails. The residuals of most tables have heavier ones than a
        Gaussian: at most `TAILS` degrees of freedom predict them better, and lose little where they do not.
        """
        if self.freedom <= TAILS:
            return self
        return Answer(self.mean, self.variance * (_upper(self.freedom) / _upper(TAILS)) ** 2, TAILS)

    def restored(self, center: Array, scale: Array) -> "Answer":
        """The same in the units of targets."""
        return Answer(self.mean * scale + center, self.variance * scale**2, self.freedom)

    @property
    def scale(self) -> Array:
        """The root of the variance, never zero."""
        return np.sqrt(np.maximum(self.variance, TINY))

    def log_densities(self, y: Array) -> Array:
        """Log density of each target, (n, k)."""
        v, scale = self.freedom, self.scale
        constant = lgamma((v + 1) / 2) - lgamma(v / 2) - 0.5 * log(v * pi)
        far = np.hypot(1.0, (y - self.mean) / (scale * v**0.5))  # whose square may be infinite
        return np.asarray(constant - np.log(scale) - (v + 1) * np.log(far))

    def heavy_log_density(self, y: Array) -> Array:
        """Log density of numbers, whose tails are heavy, summed over them: (n,)."""
        return np.asarray(self.heavier().log_densities(y).sum(-1))

    def log_probability(self, y: Array) -> Array:
        """Log probability of the classes that one-hot targets name, (n,)."""
        chances = probabilities(self.mean, self.variance)
        return np.asarray(np.log(np.maximum((chances * y).sum(-1), 1e-6)))

    def cdf(self, y: Array) -> Array:
        """Probability of less than y, each (n, k)."""
        return student_cdf((y - self.mean) / self.scale, self.freedom)

    def bounds(self, level: float) -> tuple[Array, Array]:
        """Numbers that the quantile lies between: here it is both."""
        found = self.mean + self.scale * student_quantile(level, self.freedom)
        return found, found

    @property
    def moment(self) -> Array:
        """Variance, but that it is never infinite."""
        return self.variance * (self.freedom / max(self.freedom - 2.0, 1.0))  # at least three rows' worth


@dataclass(frozen=True, eq=False)
class Shape:
    """A mixture of normals for each of n rows and k targets, around a mean that is not its own.

    Attributes:
        mean: (n, k) as predicted otherwise; it stays.
        means, stds, log_weight: (n, k, c) of the normals.
    """

    mean: Array
    means: Array
    stds: Array
    log_weight: Array

    def log_densities(self, y: Array) -> Array:
        """Log density of each target, (n, k)."""
        z = (y[..., None] - self.means) / self.stds
        with np.errstate(over="ignore"):  # so far out the density is zero
            each = self.log_weight - 0.5 * z**2 - np.log(self.stds) - 0.5 * log(2 * pi)
        return np.asarray(np.logaddexp.reduce(each, -1))

    def cdf(self, y: Array) -> Array:
        """Probability of less than y, each (n, k)."""
        z = (self.means - y[..., None]) / self.stds
        below = 0.5 * np.asarray(_erfc(z / 2**0.5), np.float64)
        return np.asarray((below * np.exp(self.log_weight)).sum(-1))

    def bounds(self, level: float) -> tuple[Array, Array]:
        """Numbers that the quantile lies between: those of its normals."""
        each = self.means + self.stds * NormalDist().inv_cdf(level)
        return each.min(-1), each.max(-1)

    @property
    def moment(self) -> Array:
        """Mean square of the distance from the mean."""
        apart = (self.means - self.mean[..., None]) ** 2
        return np.asarray((np.exp(self.log_weight) * (self.stds**2 + apart)).sum(-1))

    def restored(self, center: Array, scale: Array) -> "Shape":
        """The same in the units of targets."""
        middle, unit = center[:, None], scale[:, None]
        return Shape(
            self.mean * scale + center, self.means * unit + middle, self.stds * unit, self.log_weight
        )


A = TypeVar("A", Answer, Shape)
Answers = Sequence[Answer | Shape]
Weights = Array  # shares of answers, (h,)


def concatenated(pieces: Sequence[A]) -> A:
    """Answers of several rows as one."""
    names = [field.name for field in fields(pieces[0]) if field.name != "freedom"]
    made: dict[str, Any] = {name: np.concatenate([getattr(p, name) for p in pieces]) for name in names}
    return replace(pieces[0], **made)


def mixed_mean(answers: Answers, weights: Weights) -> Array:
    """Mean of the mixture, (n, k)."""
    return np.tensordot(weights, [a.mean for a in answers], 1)


def mixed_deviation(answers: Answers, weights: Weights) -> Array:
    """Standard deviation of the mixture, (n, k)."""
    mean = mixed_mean(answers, weights)
    squares = [a.moment + (a.mean - mean) ** 2 for a in answers]
    return np.sqrt(np.tensordot(weights, squares, 1))


def mixed_log_density(answers: Answers, weights: Weights, y: Array) -> Array:
    """Log density of all targets of a row under the mixture, (n,)."""
    shares = np.log(np.maximum(weights, TINY))
    each = [share + a.log_densities(y).sum(-1) for share, a in zip(shares, answers, strict=True)]
    return np.asarray(np.logaddexp.reduce(each, 0))


def mixed_quantiles(answers: Answers, weights: Weights, levels: Sequence[float]) -> Array:
    """Quantiles of the mixture, (levels, n, k)."""
    made = []
    for level in levels:
        lows, highs = zip(*(a.bounds(level) for a in answers), strict=True)
        low, high = np.min(lows, 0), np.max(highs, 0)  # the mixture's lies between those of its parts
        made.append(_quantile(answers, weights, level, low, high) if len(answers) > 1 else low)
    return np.stack(made)


def _quantile(answers: Answers, weights: Weights, level: float, low: Array, high: Array) -> Array:
    """Newton's method between two ends; a step that leaves them, or is not half the last, goes half-way."""
    enough = NEAR * (high - low)
    at, last = (low + high) / 2, high - low
    while True:
        below = np.tensordot(weights, [a.cdf(at) for a in answers], 1) - level
        slope = np.tensordot(weights, [np.exp(a.log_densities(at)) for a in answers], 1)
        low, high = np.where(below < 0, at, low), np.where(below < 0, high, at)
        step = -below / np.maximum(slope, TINY)
        good = (at + step >= low) & (at + step <= high) & (np.abs(step) <= last / 2)
        step = np.where(good | (np.abs(step) <= enough), step, (low + high) / 2 - at)
        at, last = at + step, np.abs(step)
        if not (last > enough).any():
            return np.asarray(at)


def mixed_probabilities(answers: Answers, weights: Weights) -> Array:
    """Probabilities of classes, (n, k)."""
    known = [probabilities(a.mean, a.variance) for a in answers if isinstance(a, Answer)]
    mixture = np.tensordot(weights, known, 1)
    return np.asarray(mixture / mixture.sum(1, keepdims=True))


class Numbers(ABC):
    """The verbs of whoever predicts numbers that follow from the answers to rows."""

    _flat: bool  # whether the one target is a column of its own

    @abstractmethod
    def _answers(self, X: Any) -> tuple[Answers, Weights]: ...

    def predict_quantiles(self, X: Any, quantiles: Sequence[float] = (0.05, 0.5, 0.95)) -> Array:
        """Quantiles of the target's distribution: (n, quantiles), or (n, targets, quantiles) of several."""
        levels = np.asarray(quantiles, np.float64)
        if levels.ndim != 1 or not len(levels) or not ((levels > 0) & (levels < 1)).all():
            raise ValueError(f"quantiles={quantiles!r}: give one or more numbers between 0 and 1")
        return self._shaped(np.moveaxis(mixed_quantiles(*self._answers(X), levels.tolist()), 0, -1))

    def predict_interval(self, X: Any, coverage: float = 0.9) -> Array:
        """The central interval that holds the target with this probability: (n, 2) lower and upper ends."""
        if not 0 < coverage < 1:
            raise ValueError(f"coverage={coverage!r}: a number between 0 and 1 is needed, such as 0.9")
        return self.predict_quantiles(X, ((1 - coverage) / 2, (1 + coverage) / 2))

    def log_density(self, X: Any, y: Any) -> Array:
        """Log density of each row's targets, (n,), under the distribution that is predicted for it."""
        answers, weights = self._answers(X)
        targets, _ = numbers_of(y, len(answers[0].mean))
        if (given := targets.shape[1]) != (known := answers[0].mean.shape[1]):
            raise ValueError(f"y has {given} targets, but {known} were learned")
        return mixed_log_density(answers, weights, targets)

    def _shaped(self, of: Array) -> Array:
        return of[:, 0] if self._flat else of


def _upper(freedom: float) -> float:
    """The 95 % quantile of Student's t, by the expansion of Cornish and Fisher."""
    z = 1.6448536269514722
    first, second = (z**3 + z) / 4, (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + first / freedom + second / freedom**2 + third / freedom**3


def student_cdf(t: Array, freedom: float) -> Array:
    """The distribution function of Student's t: half an incomplete beta function."""
    a, b, length = freedom / 2, 0.5, np.hypot(t, freedom**0.5)
    near, far = (t / length) ** 2, (freedom**0.5 / length) ** 2
    close = far > (a + 1) / (a + b + 2)  # where the fraction of the other side converges fast
    front = exp(lgamma(a + b) - lgamma(a) - lgamma(b)) / 2
    tail = np.empty_like(near)
    tail[~close] = front * _fraction(far[~close], near[~close], a, b)
    tail[close] = 0.5 - front * _fraction(near[close], far[close], b, a)
    return np.asarray(np.where(t > 0, 1 - tail, tail))


def _fraction(x: Array, rest: Array, a: float, b: float) -> Array:
    """The incomplete beta function by its continued fraction, from the inside out; rest is 1 - x."""
    made = np.zeros_like(x)
    for m in range(TERMS if len(x) else 0, 0, -1):
        even = m * (b - m) / ((a + 2 * m - 1) * (a + 2 * m))
        odd = (a + m) * (a + b + m) / ((a + 2 * m) * (a + 2 * m + 1))
        made = even * x / (1 - odd * x / (1 + made))
    return np.asarray(x**a * rest**b / (a * (1 - (a + b) / (a + 1) * x / (1 + made))))


@lru_cache(64)
def student_quantile(level: float, freedom: float) -> float:
    """Where the distribution function of Student's t has this level."""
    tail, reach = min(level, 1 - level), np.ones((1, 1))
    one = Answer(0 * reach, reach, freedom)
    while one.cdf(-reach) > tail:
        reach = 2 * reach
    found = float(_quantile([one], np.ones(1), tail, -reach, 0 * reach)[0, 0])
    return found if level < 0.5 else -found

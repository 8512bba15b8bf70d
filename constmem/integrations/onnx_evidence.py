"""The numpy of `TableRunner`: precisions of feature groups by evidence, and the laws that it answers with.

`constmem.tabular` has the same in PyTorch, with the words; a graph cannot factorise matrices. Constants come
from there, through model.json.
"""

from math import erfc, exp, inf, lgamma, log, pi
from statistics import NormalDist
from typing import Any, NamedTuple

import numpy as np

Array = np.ndarray[Any, Any]
Constants = dict[str, Any]
Groups = dict[str, slice]
Moments = dict[str, Array]  # gram, cross, square, count
BISECTIONS = 60
ODD = -7046029254386353131  # of the hash that cuts rows into folds
FOLDS = 4
_erfc = np.frompyfunc(erfc, 1, 1)


class Known(NamedTuple):
    """What a search of precisions has found: noise and freedom, and what the rows seen until then left."""

    noise: Array
    freedom: float
    left: Array
    rows: float


def regularised(moments: Moments, groups: Groups, precisions: Array, c: Constants) -> Array:
    """The Gram matrix plus each group's precision."""
    gram = moments["gram"]
    added = np.full(len(gram), c["ROUNDING"] * np.trace(gram))
    for value, group in zip(precisions, groups.values(), strict=True):
        added[group] += value
    return np.asarray(gram + np.diag(added))


def solved(moments: Moments, groups: Groups, precisions: Array, c: Constants) -> tuple[Array, Array, Array]:
    """The regularised matrix, the weights, and what they leave of the targets' squares."""
    matrix = regularised(moments, groups, precisions, c)
    weights = np.linalg.solve(matrix, moments["cross"])
    return matrix, weights, np.maximum(moments["square"] - (moments["cross"] * weights).sum(0), 0.0)


class _Fit:
    """The evidence at given precisions, prior included, its gradient and its Hessian in their logarithms."""

    def __init__(self, moments: Moments, groups: Groups, at: Array, c: Constants) -> None:
        self.at, self.evidence = at, -inf
        slices, precision = list(groups.values()), np.exp(at)
        try:
            factor = np.linalg.cholesky(regularised(moments, groups, precision, c))
        except np.linalg.LinAlgError:
            return
        _, weights, left = solved(moments, groups, precision, c)
        count, targets = float(moments["count"]), moments["cross"].shape[1]
        first, faint = c["PRIOR"]
        shape, level = first + count / 2, moments["square"] / max(count, 1.0)
        scale = first * faint * np.maximum(level, c["SMALLEST"]) + left / 2
        self.noise, self.freedom, self.left = scale / shape, 2 * shape, left
        sizes = np.array([s.stop - s.start for s in slices], np.float64)
        volume = np.log(np.diagonal(factor)).sum() - (sizes * at).sum() / 2
        width, tails = c["SPREAD"]
        expected = strengths(moments, groups, c) * [c["RATIOS"].get(name, c["RATIO"]) for name in groups]
        off = (at - np.log(expected)) / width
        near = tails + off**2
        prior = -(tails + 1) / 2 * np.log(near).sum()
        self.evidence = float(prior - (shape * np.log(scale)).sum() - targets * volume)
        root = np.linalg.inv(factor)
        inverse, grown = root.T @ root, weights * np.sqrt(shape / scale)
        size = len(slices)
        square, bend = np.zeros((size, size)), np.zeros((size, size))
        for i, g in enumerate(slices):
            for j, h in enumerate(slices[: i + 1]):
                block = inverse[g, h]
                square[i, j] = square[j, i] = (block**2).sum()
                bend[i, j] = bend[j, i] = ((block @ grown[h]) * grown[g]).sum()
        trace = precision * [np.diagonal(inverse)[g].sum() for g in slices]
        fit = precision[:, None] * np.stack([(grown[g] ** 2).sum(0) for g in slices])
        self.gradient = (targets * (sizes - trace) - fit.sum(1)) / 2 - (tails + 1) * off / (near * width)
        self.hessian = (
            -np.diag(targets * trace + fit.sum(1)) / 2
            + np.outer(precision, precision) * (targets * square / 2 + bend)
            + fit @ fit.T / (4 * shape)
            - np.diag((tails + 1) * (2 * tails - near) / (near * width) ** 2)
        )

    def step(self, reach: float) -> Array:
        """Newton's step uphill, at most `reach` long in any precision's logarithm."""
        curvature, axes = np.linalg.eigh(self.hessian)
        step = axes @ ((axes.T @ self.gradient) / np.maximum(np.abs(curvature), 1e-3))
        return np.asarray(step * min(1.0, reach / max(float(np.abs(step).max()), 1e-300)))


def strengths(moments: Moments, groups: Groups, c: Constants) -> Array:
    """Sum of a row's squared features in each group, on average."""
    squares = np.diagonal(moments["gram"]) / max(float(moments["count"]), 1.0)
    return np.maximum([squares[group].sum() for group in groups.values()], c["FAINT"])


def search(moments: Moments, groups: Groups, start: Array | None, c: Constants) -> tuple[Array, Array, float]:
    """Precisions that maximise the evidence, and the noise and degrees of freedom there."""
    first = np.log(c["START"] * strengths(moments, groups, c) if start is None else start)
    best = _Fit(moments, groups, first, c)
    if best.evidence == -inf:
        best = _Fit(moments, groups, np.zeros_like(first), c)
    if not np.isfinite(best.evidence):
        raise ValueError("the sums of squares of these rows are not finite and positive: use a larger unit")
    reach, most = c["REACH"]
    for _ in range(c["STEPS"]):
        step = best.step(reach)
        if step @ best.gradient < c["CLOSE"] * moments["cross"].shape[1] or reach < 0.05:
            break
        tried = _Fit(moments, groups, np.clip(best.at + step, -c["LARGEST"], c["LARGEST"]), c)
        if tried.evidence > best.evidence:
            best, reach = tried, min(2 * reach, most)
        else:
            reach /= 4
    freedom = best.freedom - min(len(groups), float(moments["count"]) / 2)
    return np.exp(best.at), best.noise * (best.freedom / freedom), freedom


def probabilities(mean: Array, variance: Array, c: Constants) -> Array:
    """Probabilities of classes, (n, k), from means and variances of their indicators."""
    k = mean.shape[-1]
    spread = np.sqrt(np.maximum(variance + c["DOUBT"] * (k - 1) / k**2, np.finfo(np.float64).tiny))
    numbers = (mean - 0.5) / spread * (8 / pi) ** 0.5
    shares = np.exp(numbers - numbers.max(-1, keepdims=True))
    return np.asarray(shares / shares.sum(-1, keepdims=True))


class Student:
    """Student's t for each of n rows and k targets, with tails as heavy as tables have them."""

    def __init__(self, mean: Array, variance: Array, freedom: float, c: Constants) -> None:
        if freedom > c["TAILS"]:  # the same 90 % intervals
            variance = variance * (_upper(freedom) / _upper(c["TAILS"])) ** 2
        self.mean, self.variance, self.freedom = mean, variance, min(freedom, c["TAILS"])
        self.scale = np.sqrt(np.maximum(variance, 1e-300))

    @property
    def moment(self) -> Array:
        """Variance, but that it is never infinite."""
        return np.asarray(self.variance * (self.freedom / max(self.freedom - 2.0, 1.0)))

    def log_density(self, y: Array) -> Array:
        """Log density of the targets, (n, k)."""
        v, z = self.freedom, (y - self.mean) / self.scale
        constant = lgamma((v + 1) / 2) - lgamma(v / 2) - 0.5 * log(v * pi)
        return np.asarray(constant - np.log(self.scale) - (v + 1) / 2 * np.log1p(z**2 / v))

    def cdf(self, y: Array) -> Array:
        """Probability of less than y."""
        return _student((y - self.mean) / self.scale, self.freedom)

    def bounds(self, level: float) -> tuple[Array, Array]:
        """Numbers that the quantile lies between: here it is both."""
        low, high = -1e6, 1e6
        for _ in range(100):
            middle = (low + high) / 2
            low, high = (middle, high) if _student(np.array(middle), self.freedom) < level else (low, middle)
        found = self.mean + self.scale * (low + high) / 2
        return found, found


class Normals:
    """A mixture of normals for each row and target, around a mean that is not its own."""

    def __init__(self, mean: Array, means: Array, stds: Array, log_weight: Array) -> None:
        self.mean, self.means, self.stds, self.log_weight = mean, means, stds, log_weight

    @property
    def moment(self) -> Array:
        """Mean square of the distance from the mean."""
        apart = (self.means - self.mean[..., None]) ** 2
        return np.asarray((np.exp(self.log_weight) * (self.stds**2 + apart)).sum(-1))

    def log_density(self, y: Array) -> Array:
        """Log density of the targets, (n, k)."""
        z = (y[..., None] - self.means) / self.stds
        each = self.log_weight - 0.5 * z**2 - np.log(self.stds) - 0.5 * log(2 * pi)
        return np.asarray(np.logaddexp.reduce(each, -1))

    def cdf(self, y: Array) -> Array:
        """Probability of less than y."""
        z = (y[..., None] - self.means) / self.stds
        below = 0.5 * np.asarray(_erfc(-z / 2**0.5), np.float64)
        return np.asarray((below * np.exp(self.log_weight)).sum(-1))

    def bounds(self, level: float) -> tuple[Array, Array]:
        """Numbers that the quantile lies between: those of its normals."""
        each = self.means + self.stds * NormalDist().inv_cdf(level)
        return each.min(-1), each.max(-1)


Laws = list[tuple[float, Student | Normals]]  # and their shares


def quantile(laws: Laws, level: float) -> Array:
    """The quantile of a mixture, which lies between those of its parts."""
    ends = [law.bounds(level) for _, law in laws]
    low, high = np.min([a for a, _ in ends], 0), np.max([b for _, b in ends], 0)
    for _ in range(BISECTIONS if len(laws) > 1 else 0):
        middle = (low + high) / 2
        below = sum(share * law.cdf(middle) for share, law in laws) < level
        low, high = np.where(below, middle, low), np.where(below, high, middle)
    return np.asarray((low + high) / 2)


def usual(moments: Moments, groups: Groups) -> float | None:
    """How much of the kernel features do not explain at the rows seen, on average; None without one."""
    count, kernel = float(moments["count"]), groups.get("kernel")
    if kernel is None or not count:
        return None
    return max(1.0 - float(np.diagonal(moments["gram"])[kernel].sum()) / count, 0.0)


def symmetric(lower: Array, size: int) -> Array:
    """A matrix from its lower triangle."""
    made = np.zeros((size, size))
    made[np.tril_indices(size)] = lower
    return np.asarray(made + np.tril(made, -1).T)


def together(rows: list[tuple[Array, Array]], targets: int) -> tuple[Array, Array]:
    """Rows and their targets as one table; targets that came up later are zero."""
    y = [np.pad(y, ((0, 0), (0, targets - y.shape[1]))) for _, y in rows]
    return np.concatenate([x for x, _ in rows]), np.concatenate(y)


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether two sets of frozen parts are one."""
    return one.keys() == other.keys() and all(np.array_equal(one[name], other[name]) for name in one)


def fold_of(x: Array) -> Array:
    """Which fold a row belongs to: by a hash of its numbers, so always the same."""
    bits = np.ascontiguousarray(x + 0.0).view(np.int64)  # + 0.0: there are two zeros
    with np.errstate(over="ignore"):
        mixed = (bits ^ (bits >> 29)) * (np.arange(1, 2 * x.shape[1], 2) * ODD)
        total = mixed.sum(1)
        total = (total ^ (total >> 32)) * ODD
    return np.asarray((total >> 40) & (FOLDS - 1))


def _upper(freedom: float) -> float:
    """The 95 % quantile of Student's t, by the expansion of Cornish and Fisher."""
    z = 1.6448536269514722
    first, second = (z**3 + z) / 4, (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + first / freedom + second / freedom**2 + third / freedom**3


def _student(t: Array, v: float) -> Array:
    """The distribution function of Student's t: half an incomplete beta function."""
    x, rest, a, b = v / (v + t**2), t**2 / (v + t**2), v / 2, 0.5
    flip = x > (a + 1) / (a + b + 2)
    near, far = _beta(np.where(flip, rest, 0.0), b, a), _beta(np.where(flip, 0.0, x), a, b)
    tail = np.where(flip, 1 - near, far) / 2
    return np.where(t > 0, 1 - tail, tail)


def _beta(x: Array, a: float, b: float) -> Array:
    """The regularised incomplete beta function, by its continued fraction, where that converges fast."""
    front = exp(lgamma(a + b) - lgamma(a) - lgamma(b)) / a
    power = np.power(x, a) * np.power(1 - x, b)
    fraction = np.zeros_like(x)
    for m in range(60, 0, -1):  # from the inside out
        even = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        odd = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        fraction = even / (1 + odd / (1 + fraction))
    first = -(a + b) * x / (a + 1)
    return np.asarray(front * power / (1 + first / (1 + fraction)))

"""Precisions of feature groups by their evidence, from moments alone; in numpy, as exported models run it."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from math import inf, isfinite, lgamma, log, pi

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Groups = Mapping[str, slice]
KERNEL = "kernel"  # the group whose inner products are those of a kernel with k(x, x) = 1, or less
PRIOR = 0.5, 1e-5  # of the noise: shape of an inverse gamma, and noise in units of y's mean square
SMALLEST = 1e-9  # mean square of targets that is more than zero
FAINT = 1e-3  # mean square of a group's features, at least: of none a ratio to the noise says nothing
LARGEST = 23.0  # logarithm of the largest relative precision, and of the inverse of the smallest
ROUNDING = 1e-15  # of the Gram matrix's trace: added to every precision, since sums are rounded
STEPS = 24  # of Newton's method, at most
REACH = 4.0, 8.0  # how far a precision's logarithm moves in the first step, and in any, at most
RATIO = 0.3  # noise to signal that is expected of a group
RATIOS = {"products": 30.0}  # and of some: few rows say nothing of products where both columns are large
SPREAD = 1.0, 4.0  # width and degrees of freedom of the prior of a ratio's logarithm, Student's t
START = 0.01  # noise to signal ratio that a search begins with
LINEAR = "constant", "columns"  # groups of a law that is linear in the columns
OFF = 1e12  # precision of groups that are left out
FLAT = 0.25  # curvature of the evidence, at least: the prior's own is about so much
CLOSE = 1e-2  # nats a target: a step that promises less is not made
PIECE = 4096  # rows that are taken in at once
RECENT = 128  # rows that may wait to be; answers correct for them exactly, by a matrix of that size
GROWTH = 0.5  # precisions are searched again when so many more rows have come
FEW = 128  # ... but not for fewer than these


@dataclass(frozen=True, eq=False)
class Sums:
    """The moments of rows, as `Moments` has them."""

    gram: Array
    cross: Array
    square: Array
    count: float


class Factor:
    """A positive definite matrix, factorised; LinAlgError where it is none."""

    def __init__(self, matrix: Array) -> None:
        self.matrix, self.lower = matrix, np.linalg.cholesky(matrix)

    @cached_property
    def root(self) -> Array:
        """The factor's inverse."""
        return np.asarray(np.linalg.inv(self.lower))

    def solve(self, right: Array) -> Array:
        """The matrix's inverse times columns."""
        return np.asarray(np.linalg.solve(self.matrix, right))

    def inverse(self) -> Array:
        """The matrix's inverse."""
        return np.asarray(self.root.T @ self.root)


class Fit:
    """Weights and noise at given precisions, by group; `factored` says how matrices are factorised."""

    def __init__(self, sums: Sums, groups: Groups, precision: Array, factored: type[Factor] = Factor) -> None:
        self.precision, added = precision, np.empty(len(sums.gram))
        for value, group in zip(precision, groups.values(), strict=True):
            added[group] = value
        rounding = ROUNDING * np.trace(sums.gram)
        self.factor = factored(sums.gram + np.diag(added + rounding))
        self.weights = self.factor.solve(sums.cross)
        self.left = np.maximum(sums.square - (sums.cross * self.weights).sum(0), 0.0)  # of the squares


class Evidence(Fit):
    """The evidence at given logarithms of precisions, prior included, its gradient and its Hessian."""

    def __init__(self, sums: Sums, groups: Groups, log: Array, factored: type[Factor] = Factor) -> None:
        self.log, self.log_evidence = log, -inf
        slices, precision, targets = list(groups.values()), np.exp(log), sums.cross.shape[1]
        try:
            super().__init__(sums, groups, precision, factored)
        except np.linalg.LinAlgError:
            return
        shape, level = PRIOR[0] + sums.count / 2, sums.square / max(sums.count, 1.0)
        scale = PRIOR[0] * PRIOR[1] * np.maximum(level, SMALLEST) + self.left / 2
        self.noise, self.freedom = scale / shape, 2 * shape
        sizes = np.array([s.stop - s.start for s in slices], np.float64)
        volume = np.log(np.diagonal(self.factor.lower)).sum() - (sizes * log).sum() / 2
        width, tails = SPREAD
        expected = strengths(sums, groups) * [RATIOS.get(name, RATIO) for name in groups]
        off = (log - np.log(expected)) / width
        near = tails + off**2
        prior = -(tails + 1) / 2 * np.log(near).sum()
        self.log_evidence = float(prior - (shape * np.log(scale)).sum() - targets * volume)

        inverse = self.factor.inverse()
        scaled = self.weights * np.sqrt(shape / scale)
        square, bend = np.zeros((2, len(slices), len(slices)))
        for i, g in enumerate(slices):
            for j, h in enumerate(slices[: i + 1]):
                block = inverse[g, h]
                square[i, j] = square[j, i] = (block**2).sum()
                bend[i, j] = bend[j, i] = ((block @ scaled[h]) * scaled[g]).sum()
        trace = precision * [np.diagonal(inverse)[g].sum() for g in slices]
        fit = precision[:, None] * np.stack([(scaled[g] ** 2).sum(0) for g in slices])
        self.gradient = (targets * (sizes - trace) - fit.sum(1)) / 2 - (tails + 1) * off / (near * width)
        self.hessian = (
            -np.diag(targets * trace + fit.sum(1)) / 2
            + np.outer(precision, precision) * (targets * square / 2 + bend)
            + fit @ fit.T / (4 * shape)
            - np.diag((tails + 1) * (2 * tails - near) / (near * width) ** 2)
        )

    @property
    def integrated(self) -> float:
        """The evidence with the precisions integrated out, as if it were normal in their logarithms."""
        width, tails = SPREAD
        constant = lgamma((tails + 1) / 2) - lgamma(tails / 2) - 0.5 * log(pi * tails) - log(width)
        each = constant + (tails + 1) / 2 * log(tails) + 0.5 * log(2 * pi)
        curvature = np.maximum(-np.linalg.eigvalsh(self.hessian), FLAT)
        return float(self.log_evidence + len(self.log) * each - 0.5 * np.log(curvature).sum())

    def step(self, reach: float) -> Array:
        """Newton's step uphill, at most `reach` long in any precision's logarithm."""
        curvature, axes = np.linalg.eigh(self.hessian)
        step = axes @ ((axes.T @ self.gradient) / np.maximum(np.abs(curvature), 1e-3))
        return np.asarray(step * min(1.0, reach / max(float(np.abs(step).max()), 1e-300)))


@dataclass(frozen=True, eq=False)
class Found:
    """What a search found: precisions, the weights at them, noise and degrees of freedom.

    Attributes:
        log_evidence: the largest of all groups together, even where only the linear ones are used.
    """

    fit: Fit
    noise: Array
    freedom: float
    log_evidence: float


def search(
    sums: Sums,
    groups: Groups,
    start: Array | None = None,
    factored: type[Factor] = Factor,
    *,
    fitted: int | None = 0,
) -> Found:
    """Precisions where the evidence is largest, and noise and degrees of freedom there.

    Each group of features has one precision relative to the noise's, shared by all targets; the noise has
    an inverse gamma prior and is integrated out. Newton's method in the logarithms of the precisions: one
    factorisation gives the evidence, its gradient and its Hessian. Few rows can be explained by almost any
    precisions, so those have a prior, too, and each one that was fitted costs a degree of freedom. Where
    a law that is linear in the columns has the larger evidence, precisions integrated out, all other
    groups are left out.

    Args:
        groups: slices of features by name, which together are all of them.
        start: precisions to begin with, such as those of an earlier search.
        fitted: how many numbers were fitted to targets to make the features. One that means nothing raises
            the evidence by a half, on average, so that much counts against the features for each. None: all
            groups are used.
    """
    usual = START * strengths(sums, groups)
    best = _largest(sums, groups, usual if start is None else np.where(start < OFF, start, usual), factored)
    fit: Fit = best
    costs, noise, freedom = len(groups), best.noise, best.freedom
    if fitted is not None and set(LINEAR) < set(groups):
        few = {name: groups[name] for name in LINEAR}
        inner, slices = _only(sums, few)
        line = _largest(inner, slices, START * strengths(inner, slices), factored)
        if line.integrated > best.integrated - fitted / 2:
            known = dict(zip(few, line.precision, strict=True))
            fit = Fit(sums, groups, np.array([known.get(name, OFF) for name in groups]), factored)
            costs, noise, freedom = len(few), line.noise, line.freedom
    left = freedom - min(costs, sums.count / 2)
    return Found(fit, noise * (freedom / left), left, best.log_evidence)


def _only(sums: Sums, groups: Groups) -> tuple[Sums, Groups]:
    """The moments of some groups of features, and where these are now."""
    chosen = np.concatenate([np.arange(group.start, group.stop) for group in groups.values()])
    ends = np.cumsum([group.stop - group.start for group in groups.values()]).tolist()
    slices = {name: slice(start, stop) for name, start, stop in zip(groups, [0, *ends], ends, strict=False)}
    return Sums(sums.gram[np.ix_(chosen, chosen)], sums.cross[chosen], sums.square, sums.count), slices


def _largest(sums: Sums, groups: Groups, start: Array, factored: type[Factor]) -> Evidence:
    """The evidence where it is largest, uphill from a start."""
    first = np.log(start)
    best = Evidence(sums, groups, first, factored)
    if best.log_evidence == -inf:
        best = Evidence(sums, groups, np.zeros_like(first), factored)
    if not isfinite(best.log_evidence) or not np.isfinite(best.hessian).all():
        raise ValueError(
            "the sums of squares of these rows are not finite or not positive: numbers are too large to be "
            "squared, or the state was changed from outside; use a larger unit, and learn the rows again"
        )
    reach, most = REACH
    for _ in range(STEPS):
        step = best.step(reach)
        if step @ best.gradient < CLOSE * sums.cross.shape[1] or reach < 0.05:
            break
        tried = Evidence(sums, groups, np.clip(best.log + step, -LARGEST, LARGEST), factored)
        if tried.log_evidence > best.log_evidence:
            best, reach = tried, min(2 * reach, most)
        else:
            reach /= 4
    return best


def hold(new: int, since: int, searched: float) -> bool:
    """Whether precisions hold for some new rows: of so many since they were searched by so many rows."""
    return new <= RECENT and since < max(FEW, GROWTH * searched)


def strengths(sums: Sums, groups: Groups) -> Array:
    """Sum of a row's squared features in each group, on average: a signal's variance by its precision."""
    squares = np.diagonal(sums.gram) / max(sums.count, 1.0)
    return np.maximum([squares[group].sum() for group in groups.values()], FAINT)


def unexplained(sums: Sums, groups: Groups) -> float | None:
    """How much of k(x, x) a kernel's features miss at the rows seen, on average; None of no kernel or row."""
    if KERNEL not in groups or not sums.count:
        return None
    return max(1.0 - float(np.diagonal(sums.gram)[groups[KERNEL]].sum()) / sums.count, 0.0)


def missed(groups: Groups, precision: Array, usual: float | None) -> float:
    """Variance, in units of the noise, of what a kernel's features cannot represent at all."""
    if usual is None:
        return 0.0
    own = float(precision[list(groups).index(KERNEL)])
    return 1.0 / max(own, usual)  # usual * missed is a part of the noise, so 1 at most

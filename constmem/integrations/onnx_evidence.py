"""The numpy of `TableRunner`: precisions of feature groups by evidence.

`constmem.tabular` has the same in PyTorch, with the words; a graph cannot factorise matrices. Constants come
from there, through model.json.
"""

from math import inf
from typing import Any, NamedTuple

import numpy as np

Array = np.ndarray[Any, Any]
Constants = dict[str, Any]
Groups = dict[str, slice]
Moments = dict[str, Array]  # gram, cross, square, count


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

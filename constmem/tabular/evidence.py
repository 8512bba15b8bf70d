"""Bayesian linear regression from moments: precisions of feature groups by evidence, and predictions."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from math import inf, isfinite

import numpy as np
import torch
from jaxtyping import Float
from scipy.linalg import lapack  # type: ignore[import-untyped]
from torch import Tensor

from constmem.core.moments import Moments
from constmem.tabular.kernel import side_by_side, times_upper

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
PIECE = 512  # rows multiplied at once
MANY = 128  # rows; of more the factor is worth inverting
SHORT = 1e-6  # of the noise: what float32 may round it by, at most
CLOSE = 1e-2  # nats a target: a step that promises less is not made


@dataclass(frozen=True, eq=False)
class Posterior:
    """What is believed of the weights and the noise, given moments; predictions are Student's t.

    Attributes:
        weights: (p, k) means of the weights.
        factor: (p, p) lower Cholesky factor of the Gram matrix plus the precisions.
        noise: (k,) variance of the noise.
        freedom: degrees of freedom of the predictive distribution.
        precisions: by group, relative to the noise's; they warm-start the next search.
        log_evidence: log marginal likelihood, summed over targets, plus the log prior of the precisions; but
            for a constant.
        kernel: which features are a kernel's, if any.
        missed: variance, in units of the noise, of what these features cannot represent at all.
        usual: how much of k(x, x) they do not represent at the rows seen, on average.
    """

    weights: Float[Tensor, "p k"]
    factor: Float[Tensor, "p p"]
    noise: Float[Tensor, " k"]
    freedom: float
    precisions: dict[str, float]
    log_evidence: float
    kernel: slice | None = None
    missed: float = 0.0
    usual: float = 0.0

    def mean(self, phi: Float[Tensor, "n p"]) -> Float[Tensor, "n k"]:
        """Predicted means, without variances: far cheaper."""
        return phi.double() @ self.weights

    def mean_variance(self, phi: Float[Tensor, "n p"]) -> tuple[Tensor, Tensor]:
        """Predicted means and variances, noise included, each (n, k)."""
        return self.mean(phi), (1 + self.leverage(phi))[:, None] * self.noise

    def epistemic(self, phi: Float[Tensor, "n p"]) -> Float[Tensor, "n k"]:
        """The part of the variance that more rows would remove."""
        return self.leverage(phi).clamp(min=0.0)[:, None] * self.noise

    def whitened(self, phi: Float[Tensor, "n p"]) -> Float[Tensor, "n p"]:
        """Features whose weights are uncorrelated, of variance one in units of the noise.

        Many rows are multiplied by the factor's inverse, in float32 where the variances are still exact to
        `SHORT` of the noise: a row's rounding is that of sums as long as the variances of its weights allow.
        """
        if len(phi) <= MANY:
            made: Tensor = torch.linalg.solve_triangular(self.factor.mT, phi.double(), upper=True, left=False)
            return made
        exact, short, variances = self._inverse
        rows = phi.float()
        longest = float((rows.square() @ variances).max().sqrt())
        if longest * torch.finfo(torch.float32).eps / 2 > SHORT:
            rows, short = phi.double().clone(), exact
        side_by_side(lambda piece: times_upper(piece, short), rows.split(PIECE))
        return rows

    @cached_property
    def _inverse(self) -> tuple[Float[Tensor, "p p"], Float[Tensor, "p p"], Float[Tensor, " p"]]:
        """The factor's inverse, transposed, in float64 and float32, and the variances of the weights."""
        inverse, failed = lapack.dtrtri(np.asfortranarray(self.factor.numpy()), lower=1)
        assert not failed
        exact = torch.from_numpy(inverse.T)  # in the order of its rows
        return exact, exact.float(), exact.square().sum(1).float()

    def leverage(
        self, phi: Float[Tensor, "n p"], whitened: Float[Tensor, "n p"] | None = None
    ) -> Float[Tensor, " n"]:
        """Variance beyond the noise, in units of it: of the weights, and of what features do not represent.

        Far from all inducing points a kernel's features vanish, and their weights say nothing. What they
        miss there is the kernel's own variance. What they miss on average is already in the noise, so rows
        that are represented better than the average have less of it, and a leverage that may be negative.
        """
        white = self.whitened(phi) if whitened is None else whitened
        made: Tensor = torch.linalg.vecdot(white, white).double()
        if self.kernel is not None:
            near = phi[:, self.kernel].double()
            lacking = (1.0 - torch.linalg.vecdot(near, near)).clamp(min=0.0)
            made += self.missed * (lacking - self.usual)
        return made


def posterior(
    moments: Moments, groups: Mapping[str, slice], start: Mapping[str, float] | None = None
) -> Posterior:
    """The posterior at the precisions that maximise the evidence, found from the moments alone.

    Each group of features has one precision relative to the noise's, shared by all targets; the noise has
    an inverse gamma prior and is integrated out. Newton's method in the logarithms of the precisions: one
    factorisation gives the evidence, its gradient and its Hessian. Few rows can be explained by almost any
    precisions, so those have a prior, too, and each one that was fitted costs a degree of freedom.

    Args:
        groups: slices of features by name, which together are all of them.
        start: precisions to begin with, such as those of an earlier posterior.
    """
    strengths = _strengths(moments, groups)
    first = (START * strengths if start is None else strengths.new_tensor([start[n] for n in groups])).log()
    best = _Fit(moments, groups, first)
    if best.log_evidence == -inf:
        best = _Fit(moments, groups, torch.zeros_like(first))
    if not isfinite(best.log_evidence) or not bool(best.hessian.isfinite().all()):
        raise ValueError(
            "the sums of squares of these rows are not finite or not positive: numbers are too large to be "
            "squared, or the state was changed from outside; use a larger unit, and learn the rows again"
        )
    reach, most = REACH
    for _ in range(STEPS):
        step = best.step(reach)
        if float(step @ best.gradient) < CLOSE * moments.targets or reach < 0.05:
            break
        tried = _Fit(moments, groups, (best.log + step).clamp(-LARGEST, LARGEST))
        if tried.log_evidence > best.log_evidence:
            best, reach = tried, min(2 * reach, most)
        else:
            reach /= 4
    precisions = dict(zip(groups, best.log.exp().tolist(), strict=True))
    freedom = best.freedom - min(len(groups), float(moments.count) / 2)
    noise = best.noise * (best.freedom / freedom)
    return _made(moments, groups, best.weights, best.factor, noise, freedom, precisions, best.log_evidence)


def at(
    moments: Moments,
    groups: Mapping[str, slice],
    precisions: Mapping[str, float],
    noise: Float[Tensor, " k"],
    freedom: float,
) -> Posterior:
    """The posterior at known precisions and noise: one factorisation, no search."""
    values = torch.tensor([precisions[name] for name in groups], dtype=torch.float64)
    factor = torch.linalg.cholesky(_regularised(moments, groups, values))
    weights = torch.cholesky_solve(moments.cross, factor)
    return _made(moments, groups, weights, factor, noise, freedom, dict(precisions), float("nan"))


def _made(
    moments: Moments,
    groups: Mapping[str, slice],
    weights: Tensor,
    factor: Tensor,
    noise: Tensor,
    freedom: float,
    precisions: dict[str, float],
    log_evidence: float,
) -> Posterior:
    """A posterior that also knows what a kernel's features miss."""
    kernel, missed, usual = groups.get(KERNEL), 0.0, 0.0
    if kernel is not None and float(moments.count) > 0:
        explained = moments.gram.diagonal()[kernel].sum() / moments.count
        usual = max(1.0 - float(explained), 0.0)
        missed = 1.0 / max(precisions[KERNEL], usual)  # usual * missed is a part of the noise, so 1 at most
    return Posterior(weights, factor, noise, freedom, precisions, log_evidence, kernel, missed, usual)


def _strengths(moments: Moments, groups: Mapping[str, slice]) -> Tensor:
    """Sum of a row's squared features in each group, on average: a signal's variance by its precision."""
    squares = moments.gram.diagonal() / moments.count.clamp(min=1.0)
    return torch.stack([squares[group].sum() for group in groups.values()]).clamp(min=FAINT)


def _regularised(moments: Moments, groups: Mapping[str, slice], precision: Tensor) -> Tensor:
    """The Gram matrix plus each group's precision."""
    added = moments.gram.new_empty(moments.width)
    for value, group in zip(precision, groups.values(), strict=True):
        added[group] = value
    return moments.gram + (added + ROUNDING * moments.gram.diagonal().sum()).diag()


class _Fit:
    """The evidence at given precisions, prior included, its gradient and its Hessian in their logarithms."""

    def __init__(self, moments: Moments, groups: Mapping[str, slice], log: Tensor) -> None:
        self.log, targets = log, moments.targets
        slices, precision = list(groups.values()), log.exp()
        self.factor, failed = torch.linalg.cholesky_ex(_regularised(moments, groups, precision))
        self.log_evidence = -inf
        if failed:
            return
        self.weights = torch.cholesky_solve(moments.cross, self.factor)
        count = float(moments.count)
        shape, level = PRIOR[0] + count / 2, moments.square / max(count, 1.0)
        left = (moments.square - (moments.cross * self.weights).sum(0)).clamp(min=0.0)
        scale = PRIOR[0] * PRIOR[1] * level.clamp(min=SMALLEST) + left / 2
        self.noise, self.freedom = scale / shape, 2 * shape
        sizes = torch.tensor([s.stop - s.start for s in slices], dtype=torch.float64)
        volume = self.factor.diagonal().log().sum() - (sizes * log).sum() / 2
        (width, tails), strengths = SPREAD, _strengths(moments, groups)
        expected = strengths * strengths.new_tensor([RATIOS.get(name, RATIO) for name in groups])
        off = (log - expected.log()) / width
        near = tails + off.square()
        prior = -(tails + 1) / 2 * near.log().sum()
        self.log_evidence = float(prior - (shape * scale.log()).sum() - targets * volume)

        inverse = torch.cholesky_inverse(self.factor)
        scaled = self.weights * (shape / scale).sqrt()
        size = len(slices)
        square, bend = log.new_zeros(size, size), log.new_zeros(size, size)
        for i, g in enumerate(slices):
            for j, h in enumerate(slices[: i + 1]):
                block = inverse[g, h]
                square[i, j] = square[j, i] = block.square().sum()
                bend[i, j] = bend[j, i] = ((block @ scaled[h]) * scaled[g]).sum()
        trace = precision * torch.stack([inverse.diagonal()[g].sum() for g in slices])
        fit = precision[:, None] * torch.stack([scaled[g].square().sum(0) for g in slices])
        self.gradient = (targets * (sizes - trace) - fit.sum(1)) / 2 - (tails + 1) * off / (near * width)
        outer = precision[:, None] * precision
        self.hessian = (
            -(targets * trace + fit.sum(1)).diag() / 2
            + outer * (targets * square / 2 + bend)
            + fit @ fit.mT / (4 * shape)
            - ((tails + 1) * (2 * tails - near) / (near * width).square()).diag()
        )

    def step(self, reach: float) -> Tensor:
        """Newton's step uphill, at most `reach` long in any precision's logarithm."""
        curvature, axes = torch.linalg.eigh(self.hessian)
        step = axes @ ((axes.mT @ self.gradient) / curvature.abs().clamp(min=1e-3))
        shortened: Tensor = step * min(1.0, reach / float(step.abs().max().clamp(min=1e-300)))
        return shortened

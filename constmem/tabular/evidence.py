"""Bayesian linear regression from moments: precisions of feature groups by evidence, and predictions."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from jaxtyping import Float
from scipy.linalg import lapack  # type: ignore[import-untyped]
from torch import Tensor

from constmem.core.moments import Moments
from constmem.tabular.kernel import side_by_side, times_upper
from constmem.tabular.precisions import KERNEL, Array, Factor, Fit, Sums, missed, search, unexplained

PIECE = 512  # rows multiplied at once
MANY = 128  # rows; of more the factor is worth inverting
SHORT = 1e-6  # of the noise: what float32 may round it by, at most


@dataclass(frozen=True, eq=False)
class Posterior:
    """What is believed of the weights and the noise, given moments; predictions are Student's t.

    Attributes:
        weights: (p, k) means of the weights.
        factor: (p, p) lower Cholesky factor of the Gram matrix plus the precisions.
        noise: (k,) variance of the noise.
        freedom: degrees of freedom of the predictive distribution.
        precisions: by group, relative to the noise's; they warm-start the next search.
        log_evidence: the largest log marginal likelihood of all groups together, summed over targets, plus
            the log prior of the precisions; but for a constant.
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
    moments: Moments,
    groups: Mapping[str, slice],
    start: Mapping[str, float] | None = None,
    *,
    fitted: int | None = 0,
) -> Posterior:
    """The posterior at the precisions that maximise the evidence, found from the moments alone.

    Args:
        groups: slices of features by name, which together are all of them.
        start: precisions to begin with, such as those of an earlier posterior.
        fitted: how many numbers were fitted to targets to make the features; None: all groups are used.
    """
    sums, known = _sums(moments), None if start is None else _listed(start, groups)
    found = search(sums, groups, known, _Factor, fitted=fitted)
    return _made(sums, groups, found.fit, found.noise, found.freedom, found.log_evidence)


def at(
    moments: Moments,
    groups: Mapping[str, slice],
    precisions: Mapping[str, float],
    noise: Float[Tensor, " k"],
    freedom: float,
) -> Posterior:
    """The posterior at known precisions and noise: one factorisation, no search."""
    sums = _sums(moments)
    found = Fit(sums, groups, _listed(precisions, groups), _Factor)
    return _made(sums, groups, found, noise.numpy(), freedom, float("nan"))


def _made(
    sums: Sums, groups: Mapping[str, slice], found: Fit, noise: Array, freedom: float, log_evidence: float
) -> Posterior:
    """A posterior that also knows what a kernel's features miss."""
    weights, factor, own_noise = (torch.from_numpy(t) for t in (found.weights, found.factor.lower, noise))
    precisions, usual = dict(zip(groups, found.precision.tolist(), strict=True)), unexplained(sums, groups)
    return Posterior(
        weights, factor, own_noise, freedom, precisions, log_evidence, groups.get(KERNEL),
        missed(groups, found.precision, usual), usual or 0.0,
    )  # fmt: skip


def _sums(moments: Moments) -> Sums:
    return Sums(moments.gram.numpy(), moments.cross.numpy(), moments.square.numpy(), float(moments.count))


def _listed(precisions: Mapping[str, float], groups: Mapping[str, slice]) -> Array:
    return np.array([precisions[name] for name in groups])


class _Factor(Factor):
    """The same by LAPACK's own routines, which numpy alone does not have: half of the work."""

    def __init__(self, matrix: Array) -> None:
        self._own, failed = torch.linalg.cholesky_ex(torch.from_numpy(matrix))
        if failed:
            raise np.linalg.LinAlgError("this matrix is not positive definite")
        self.lower = self._own.numpy()

    def solve(self, right: Array) -> Array:
        return torch.cholesky_solve(torch.from_numpy(right), self._own).numpy()

    def inverse(self) -> Array:
        return torch.cholesky_inverse(self._own).numpy()

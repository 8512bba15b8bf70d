"""Bayesian linear regression, precisions of feature groups by evidence: from moments, or from a few rows."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from jaxtyping import Float
from scipy.linalg import lapack  # type: ignore[import-untyped]
from torch import Tensor

from constmem.core.moments import Moments
from constmem.tabular.answers import Answer
from constmem.tabular.kernel import side_by_side, times_upper
from constmem.tabular.precisions import KERNEL, Array, Factor, Fit, Sums, missed, search, unexplained

PIECE = 512  # rows multiplied at once
LIVES = 8  # half-lives after which a row of an echo counts for nothing
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


class Echo:
    """The last few rows, kept as they are, where a half-life is so short that they are fewer than features.

    Answers are those of the posterior of the weighted rows, written with kernels.

    With rows R of features, weights W, and precisions P of the features: K = R P⁻¹ R', and the answer to a
    row f is k' (K + W⁻¹)⁻¹ y with k = R P⁻¹ f. A few rows cannot tell the precisions: they are those of an
    elder, the posterior of a longer memory, whose noise counts as one row's.
    """

    def __init__(
        self, elder: Callable[[], Posterior], features: Callable[[Tensor], Tensor],
        groups: Mapping[str, slice], targets: int, width: int, *, half_life: float,
    ) -> None:  # fmt: skip
        self.elder, self.features, self.groups, self.half_life = elder, features, groups, half_life
        self.x = torch.zeros(0, width, dtype=torch.float64)
        self.y = torch.zeros(0, targets, dtype=torch.float64)
        room = 2 * int(LIVES * half_life)  # of rows and their kernel: new ones are added behind the old
        self._buffer = torch.zeros(room, max(g.stop for g in groups.values()), dtype=torch.float64)
        self._inner = torch.zeros(room, room, dtype=torch.float64)
        self._stop = self._kept = 0
        self._precisions: Tensor | None = None  # that the kernel was made with

    limit = 1
    searches = False

    @property
    def nbytes(self) -> int:
        """Bytes remembered."""
        rows = int(LIVES * self.half_life)
        return rows * 8 * (self.x.shape[1] + self.y.shape[1])

    def fold(self, x: Float[Tensor, "n d"], phi: Float[Tensor, "n p"], y: Float[Tensor, "n k"]) -> None:
        """Take rows, and drop those that are too old."""
        keep = int(LIVES * self.half_life)
        self.x, self.y = (torch.cat([old, new])[-keep:] for old, new in ((self.x, x), (self.y, y)))
        phi, kept = phi[-keep:], min(self._kept, keep - len(phi[-keep:]))
        if self._stop + len(phi) > len(self._buffer):  # now and then: what is kept moves to the front
            old = slice(self._stop - kept, self._stop)
            self._buffer[:kept] = self._buffer[old].clone()
            self._inner[:kept, :kept] = self._inner[old, old].clone()
            self._stop = kept
        new = slice(self._stop, self._stop + len(phi))
        self._buffer[new], self._stop, self._kept = phi, new.stop, kept + len(phi)
        if self._precisions is not None:
            across = (phi / self._precisions) @ self._phi.mT  # (new, rows)
            rows = self._rows
            self._inner[new, rows], self._inner[rows, new] = across, across.mT

    @property
    def _rows(self) -> slice:
        return slice(self._stop - self._kept, self._stop)

    @property
    def _phi(self) -> Tensor:
        return self._buffer[self._rows]

    def answer(
        self, phi: Float[Tensor, "n p"], recent: Float[Tensor, "r p"], y: Float[Tensor, "r k"]
    ) -> Answer:
        """The answer to rows; none wait."""
        assert not len(recent)
        assert not len(y)
        precisions, factor, white, weight = self._solved()
        scaled = phi / precisions
        across = torch.linalg.solve_triangular(factor, self._phi @ scaled.mT, upper=False)
        leverage = (scaled * phi).sum(1) - across.square().sum(0)
        freedom = 1.0 + float(weight.sum())
        noise = (self.elder().noise + white.square().sum(0)) / freedom
        variance = noise * (1 + leverage.clamp(min=0.0)[:, None])
        return Answer((across.mT @ white).numpy(), variance.numpy(), freedom)

    def weights(self, recent: Float[Tensor, "r p"], y: Float[Tensor, "r k"]) -> Float[Tensor, "p k"]:
        """The weights whose products with features are the means of answers; no rows wait."""
        assert not len(recent)
        assert not len(y)
        precisions, factor, white, _ = self._solved()
        made: Tensor = (self._phi / precisions).mT @ torch.linalg.solve_triangular(
            factor.mT, white, upper=True
        )
        return made

    def _solved(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Precisions P, the Cholesky factor of K + W⁻¹, its inverse times y, and W."""
        precisions, rows = self._elder_precisions(), self._rows
        if self._precisions is None or not torch.equal(self._precisions, precisions):
            self._precisions = precisions
            self._inner[rows, rows] = (self._phi / precisions) @ self._phi.mT
        age = torch.arange(len(self.y) - 1, -1, -1, dtype=torch.float64)
        weight = 0.5 ** (age / self.half_life)
        factor = torch.linalg.cholesky(self._inner[rows, rows] + (1 / weight).diag())
        return precisions, factor, torch.linalg.solve_triangular(factor, self.y, upper=False), weight

    def _elder_precisions(self) -> Tensor:
        made = torch.empty(self._buffer.shape[1], dtype=torch.float64)
        for name, group in self.groups.items():
            made[group] = self.elder().precisions[name]
        return made

    def arrange(self, places: Sequence[int], targets: int) -> None:
        """Move the targets to these places among more of them, which were zero in all rows so far."""
        self.y = arranged(self.y, places, targets)

    def merge(self, other: "Echo") -> None:
        """Take the last rows of another stream, too: they are taken as the newer ones."""
        self.fold(other.x, other._phi, other.y)

    def _begin(self, x: Tensor, phi: Tensor, y: Tensor) -> None:
        """Keep these rows, and no others."""
        self.x, self.y = x[:0], y[:0]
        self._stop, self._kept, self._precisions = 0, 0, None
        self.fold(x, phi, y)

    def tensors(self) -> dict[str, Tensor]:
        """All that is remembered, by name."""
        return {"x": self.x, "y": self.y}

    def restore(self, tensors: dict[str, Tensor]) -> None:
        """Take what `tensors` gave in place of what is remembered."""
        self._begin(tensors["x"], self.features(tensors["x"]), tensors["y"])


def arranged(y: Tensor, places: Sequence[int], targets: int) -> Tensor:
    """The targets at these places among more of them, which are zero."""
    made = y.new_zeros(*y.shape[:-1], targets)
    made[..., list(places)] = y
    return made

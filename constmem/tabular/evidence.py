"""Bayesian linear regression from moments: precisions of feature groups by evidence, and predictions."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from constmem.core.moments import Moments

SHAPE = 0.5  # of the inverse gamma prior of the noise: worth one row of a noise as large as y's own spread
LARGEST = 16.0  # logarithm of the largest and smallest relative precision
STEPS = 12  # of Newton's method, at most
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
        log_evidence: log marginal likelihood, summed over targets, but for a constant.
    """

    weights: Float[Tensor, "p k"]
    factor: Float[Tensor, "p p"]
    noise: Float[Tensor, " k"]
    freedom: float
    precisions: dict[str, float]
    log_evidence: float

    def mean(self, phi: Float[Tensor, "n p"]) -> Float[Tensor, "n k"]:
        """Predicted means, without variances: far cheaper."""
        return phi.to(self.weights.dtype) @ self.weights

    def mean_variance(self, phi: Float[Tensor, "n p"]) -> tuple[Tensor, Tensor]:
        """Predicted means and variances, noise included, each (n, k)."""
        return self.mean(phi), self.noise + self.epistemic(phi)

    def epistemic(self, phi: Float[Tensor, "n p"]) -> Float[Tensor, "n k"]:
        """The part of the variance that more rows would remove."""
        white = torch.linalg.solve_triangular(self.factor, phi.to(self.factor.dtype).mT, upper=False)
        return white.square().sum(0)[:, None] * self.noise


def posterior(
    moments: Moments, groups: Mapping[str, slice], start: Mapping[str, float] | None = None
) -> Posterior:
    """The posterior at the precisions that maximise the evidence, found from the moments alone.

    Each group of features has one precision relative to the noise's; the noise has an inverse gamma prior
    and is integrated out. Newton's method in the logarithms of the precisions: one factorisation gives the
    evidence, its gradient and its Hessian.

    Args:
        groups: slices of features by name, which together are all of them.
        start: precisions to begin with, such as those of an earlier posterior.
    """
    log = torch.tensor([_initial(name, start) for name in groups], dtype=torch.float64)
    best = _Fit(moments, groups, log)
    reach = 2.0
    for _ in range(STEPS):
        step = best.step(reach)
        if float(step @ best.gradient) < CLOSE * moments.targets:
            break
        tried = _Fit(moments, groups, (best.log + step).clamp(-LARGEST, LARGEST))
        if tried.log_evidence > best.log_evidence:
            best, reach = tried, min(2 * reach, 4.0)
        else:
            reach /= 4
            if reach < 0.05:
                break
    return best.posterior()


def _initial(name: str, start: Mapping[str, float] | None) -> float:
    found = 1.0 if start is None else start.get(name, 1.0)
    return float(torch.tensor(found, dtype=torch.float64).log())


class _Fit:
    """The evidence at given precisions, its gradient and its Hessian in their logarithms."""

    def __init__(self, moments: Moments, groups: Mapping[str, slice], log: Tensor) -> None:
        self.groups, self.log, targets = groups, log, moments.targets
        sizes = torch.tensor([s.stop - s.start for s in groups.values()])
        precision = log.exp()
        added = moments.gram.new_empty(moments.width)
        for value, group in zip(precision, groups.values(), strict=True):
            added[group] = value
        self.factor = torch.linalg.cholesky(moments.gram + torch.diag(added))
        self.weights = torch.cholesky_solve(moments.cross, self.factor)
        n = float(moments.count)
        spread = moments.square / max(n, 1.0)
        left = (moments.square - (moments.cross * self.weights).sum(0)).clamp(min=0.0)
        scale = SHAPE * spread.clamp(min=1e-300) + left / 2
        shape = SHAPE + n / 2
        self.noise, self.freedom = scale / shape, 2 * shape
        volume = self.factor.diagonal().log().sum() - (sizes * log).sum() / 2
        self.log_evidence = float(-(shape * scale.log()).sum() - targets * volume)
        inverse = torch.cholesky_inverse(self.factor)
        fit, trace = torch.zeros(len(groups), targets), torch.zeros(len(groups))
        fit, trace = fit.double(), trace.double()
        bend = torch.zeros(len(groups), len(groups), dtype=torch.float64)
        square = bend.clone()
        scaled = self.weights / scale.sqrt() * shape**0.5
        for i, g in enumerate(groups.values()):
            trace[i] = inverse[g, g].diagonal().sum()
            fit[i] = self.weights[g].square().sum(0)
            for j, h in enumerate(list(groups.values())[: i + 1]):
                block = inverse[g, h]
                square[i, j] = square[j, i] = block.square().sum()
                bend[i, j] = bend[j, i] = ((block @ scaled[h]) * scaled[g]).sum()
        fit, trace = precision[:, None] * fit, precision * trace
        pull = (fit * (shape / scale)).sum(1)
        self.gradient = (targets * (sizes - trace) - pull) / 2
        outer = precision[:, None] * precision
        slope = fit / (2 * scale)
        self.hessian = (
            -torch.diag(targets * trace + pull) / 2
            + targets * outer * square / 2
            + outer * bend
            + shape * slope @ slope.mT
        )

    def step(self, reach: float) -> Tensor:
        """Newton's step uphill, at most `reach` long in any precision's logarithm."""
        curvature, axes = torch.linalg.eigh(self.hessian)
        step = axes @ ((axes.mT @ self.gradient) / curvature.abs().clamp(min=1e-3))
        return step * min(1.0, reach / float(step.abs().max().clamp(min=1e-300)))

    def posterior(self) -> Posterior:
        precisions = dict(zip(self.groups, self.log.exp().tolist(), strict=True))
        return Posterior(self.weights, self.factor, self.noise, self.freedom, precisions, self.log_evidence)

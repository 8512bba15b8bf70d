"""Lengths of the kernel, learned from warm-up rows: those of the largest marginal likelihood."""

from collections.abc import Sequence
from math import inf, log

import torch
from jaxtyping import Float
from torch import Tensor

from constmem.tabular.kernel import Kernel, distance, exp, sqrt

ROWS = 256, 512, 1024  # drawn for each step, more and more of them: a step takes the cube of it
UNTIL = 0.4, 0.75, 1.0  # of the steps
MANY, POINTS = 4096, 512  # rows of the last steps, and inducing points, where there are more rows than these
STEPS = 80
RATE = 0.15
HASTE = 4.0  # how much faster variances move at the end, when the lengths are nearly right
JITTER = 1e-9
ROUNDING = 1e-8  # of the kernel's variance: added to that of each inducing point
CONSTANT = 10.0  # variance of the constant
PARTS = log(0.75), log(0.25), log(0.35), log(0.1)  # variances: smooth, rough, linear, noise


def learned(u: Float[Tensor, "n e"], y: Float[Tensor, "n k"], generator: torch.Generator) -> Kernel:
    """The kernel whose lengths maximise the marginal likelihood of a Gaussian process on these rows.

    The process is a constant, a linear part, the kernel and noise; each of a few steps of Adam sees some
    rows, drawn anew: few at first, and more of them at the end. Of many rows the last steps see far more, by
    what inducing points explain of them, as the features will. The first half of u are columns, the
    second their ranks; the targets are in units of their spread.
    """
    columns = u.shape[1] // 2
    at = torch.cat([Kernel.usual(columns).rates.log().flatten(), torch.tensor(PARTS, dtype=torch.float64)])
    mean, square = torch.zeros_like(at), torch.zeros_like(at)
    points = u[:0]
    for step in range(1, STEPS + 1):
        some = next(rows for rows, until in zip(ROWS, UNTIL, strict=True) if step <= until * STEPS)
        order = torch.randperm(len(u), generator=generator)
        if len(u) > MANY and some == ROWS[-1] and not len(points):
            points = u[order[: ROWS[-1]]]
            points = points[_kernel(at).inducing(points, POINTS)]
        if len(points) == POINTS:
            slope = induced_slope(at, u[order[:MANY]], y[order[:MANY]], points)
        else:  # few points say all about a kernel with long lengths, and so do few rows
            slope = exact_slope(at, u[order[:some]], y[order[:some]])
        if slope is None:
            break
        mean = 0.9 * mean + 0.1 * slope
        square = 0.99 * square + 0.01 * slope.square()
        move = RATE * (mean / (1 - 0.9**step)) / ((square / (1 - 0.99**step)).sqrt() + 1e-8)
        if step > 0.6 * STEPS:
            move[-len(PARTS) :] *= HASTE
        if step > 0.7 * STEPS:
            move *= 0.4
        at = at - move
    return _kernel(at)


def exact_slope(at: Tensor, u: Float[Tensor, "n e"], y: Float[Tensor, "n k"]) -> Tensor | None:
    """Gradient of the negative log marginal likelihood in the logarithms of rates and variances.

    None where rounding leaves the covariance indefinite: there is no noise left to find.
    """
    rates, (smooth, rough, slant, noise) = _split(at)
    columns = u.shape[1] // 2
    z, (v, w) = u[:, :columns], (u * rate for rate in rates)
    near, kernels = _kernels((v, w), (v, w), smooth, rough)
    covariance = torch.addmm(kernels[0] + kernels[1], z, z.mT, alpha=float(slant) / columns).add_(CONSTANT)
    covariance.diagonal().add_(noise + JITTER)
    factor, failed = torch.linalg.cholesky_ex(covariance)
    if failed:
        return None
    answer = torch.cholesky_solve(y, factor)
    pull = torch.cholesky_inverse(factor).mul_(y.shape[1]).addmm_(answer, answer.mT, alpha=-1.0).div_(2)
    slants = slant / columns * ((pull @ z) * z).sum(), noise * pull.diagonal().sum()
    slopes, shares = _pulled(near, kernels, pull, (v, w), (v, w))
    return torch.cat([*slopes, torch.stack([*shares, *slants])])


def induced_slope(
    at: Tensor, u: Float[Tensor, "n e"], y: Float[Tensor, "n k"], points: Float[Tensor, "m e"]
) -> Tensor | None:
    """The same gradient where the kernel's part is only what inducing points explain: linear in the rows.

    With covariances U of rows and points, K of points (the columns and the constant are points of a kind,
    too) and S = noise K + U'U: the slopes in U are U S⁻¹ - a b', and those in K (b b' - K⁻¹ + noise S⁻¹) / 2
    for one target, where a are the answers of the process, and b = K⁻¹ U'a.
    """
    rates, (smooth, rough, slant, noise) = _split(at)
    (n, e), m, k = u.shape, len(points), y.shape[1]
    columns, noise = e // 2, noise + JITTER
    rows, ends = ([t * rate for rate in rates] for t in (u, points))
    near, kernels = _kernels(rows, ends, smooth, rough)
    near_ends, kernels_ends = _kernels(ends, ends, smooth, rough)
    across = torch.cat([kernels[0] + kernels[1], u[:, :columns], torch.ones_like(u[:, :1])], 1)
    inner = torch.full((across.shape[1],), columns / float(slant), dtype=u.dtype).diag()
    inner[:m, :m] = kernels_ends[0] + kernels_ends[1]
    inner.diagonal()[:m] += ROUNDING * (smooth + rough)
    inner[-1, -1] = 1 / CONSTANT
    whole = torch.from_numpy(across.numpy().T @ across.numpy()).add_(inner, alpha=float(noise))
    (factor, failed), (root, bad) = torch.linalg.cholesky_ex(whole), torch.linalg.cholesky_ex(inner)
    if failed or bad:
        return None
    answer = (y - across @ torch.cholesky_solve(across.mT @ y, factor)) / noise
    weights = torch.cholesky_solve(across.mT @ answer, root)
    inverse = torch.cholesky_inverse(factor)
    pull = (across @ inverse[:, :m]).mul_(k).addmm_(answer, weights[:m].mT, alpha=-1.0)
    kept = (torch.cholesky_inverse(root) - noise * inverse).mul_(k)
    pull_ends = kept.addmm_(weights, weights.mT, alpha=-1.0).div_(-2)
    trace = (n - len(inner) + noise * (inverse * inner).sum()) / noise
    slants = [
        -columns / slant * pull_ends.diagonal()[m:-1].sum(),
        noise * (k * trace - answer.square().sum()) / 2,
    ]
    slopes, shares = _pulled(near, kernels, pull, rows, ends)
    more, more_shares = _pulled(near_ends, kernels_ends, pull_ends[:m, :m].contiguous(), ends, ends)
    every = [a + b for a, b in zip([*slopes, *shares], [*more, *more_shares], strict=True)]
    return torch.cat([*every[:2], torch.stack([*every[2:], *slants])])


def _split(at: Tensor) -> tuple[Tensor, Tensor]:
    """Rates of both parts of the kernel, (2, e), and variances."""
    parts = len(PARTS)
    return at[:-parts].exp().view(2, -1), at[-parts:].exp()


def _kernel(at: Tensor) -> Kernel:
    rates, (smooth, rough, *_) = _split(at)
    return Kernel(rates, smooth / (smooth + rough))


def _kernels(
    rows: Sequence[Tensor], ends: Sequence[Tensor], smooth: Tensor, rough: Tensor
) -> tuple[Tensor, list[Tensor]]:
    """Distances, and both parts of the kernel, of rows and ends in units of the lengths of each part."""
    near = sqrt(distance(rows[1], ends[1]))
    far = exp(distance(rows[0], ends[0]).mul_(-0.5)), exp(near.neg())
    return near, [kernel.mul_(share) for kernel, share in zip(far, (smooth, rough), strict=True)]


def _pulled(
    near: Tensor, kernels: list[Tensor], pull: Tensor, rows: Sequence[Tensor], ends: Sequence[Tensor]
) -> tuple[list[Tensor], list[Tensor]]:
    """Slopes in the logarithms of rates and shares, from those in covariances; uses up the given."""
    pulls = [kernel.mul_(pull) for kernel in kernels]
    shares = [pulled.sum() for pulled in pulls]
    pulls[0] *= -0.5
    pulls[1] /= near.masked_fill_(near == 0, inf).mul_(-2.0)  # at the same place lengths change nothing
    slopes = [
        2 * (pulled.sum(1) @ u.square() + pulled.sum(0) @ v.square() - 2 * (u * (pulled @ v)).sum(0))
        for pulled, u, v in zip(pulls, rows, ends, strict=True)
    ]
    return slopes, shares

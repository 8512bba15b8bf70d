"""Lengths of the kernel and its inducing points, learned from warm-up rows by their marginal likelihood."""

from collections.abc import Sequence
from math import inf, log

import torch
from jaxtyping import Float
from torch import Tensor

from constmem.tabular.evidence import Posterior
from constmem.tabular.kernel import Kernel, distance, exp, sqrt

ROWS = 256, 512, 1024  # drawn for each step, more and more of them: a step takes the cube of it
UNTIL = 0.4, 0.75, 1.0  # of the steps
MANY, POINTS = 4096, 512  # rows of the last steps, and inducing points, where there are more rows than these
STEPS = 80
RATE = 0.15
MOVES, MOVE = 12, 0.03  # of inducing points, in units of the kernel's lengths
LONGEST = 3.0  # deviations: of longer lengths, too
HASTE = 4.0  # how much faster variances move at the end, when the lengths are nearly right
JITTER = 1e-9
ROUNDING = 1e-8  # of the kernel's variance: added to that of each inducing point
TINY = 1e-12  # variance, of parts that are not there
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
    points, adam = u[:0], _Adam(at)
    for step in range(1, STEPS + 1):
        some = next(rows for rows, until in zip(ROWS, UNTIL, strict=True) if step <= until * STEPS)
        order = torch.randperm(len(u), generator=generator)
        if len(u) > MANY and some == ROWS[-1] and not len(points):
            points = u[order[: ROWS[-1]]]
            points = points[_kernel(at).inducing(points, POINTS)]
        if len(points) == POINTS:
            slope, _ = induced_slopes(at, u[order[:MANY]], y[order[:MANY]], points) or (None, None)
        else:  # few points say all about a kernel with long lengths, and so do few rows
            slope = exact_slope(at, u[order[:some]], y[order[:some]])
        if slope is None:
            break
        move = RATE * adam.step(slope)
        if step > 0.6 * STEPS:
            move[-len(PARTS) :] *= HASTE
        if step > 0.7 * STEPS:
            move *= 0.4
        at = at - move
    return _kernel(at)


def placed(
    kernel: Kernel,
    found: Posterior,
    u: Float[Tensor, "n e"],
    y: Float[Tensor, "n k"],
    points: Float[Tensor, "m e"],
    generator: torch.Generator,
) -> Float[Tensor, "m e"]:
    """Inducing points, moved to where the kernel's part of the process explains more of the rows by them.

    Args:
        found: by features with these points: its precisions and noise are those of the process.
        points: to begin with. Of those that end where others are already, one is kept.
    """
    share, noise, known = float(kernel.share), float(found.noise.mean()), found.precisions
    own, slant = noise / known["kernel"], u.shape[1] / 2 * noise / known["columns"]
    parts = torch.tensor([own * share, own * (1 - share), slant, noise], dtype=torch.float64)
    at = torch.cat([kernel.rates.flatten(), parts.clamp(min=TINY)]).log()
    lengths = 1 / torch.maximum(kernel.rates[0], kernel.rates[1] / 2).clamp(min=1 / LONGEST)
    adam = _Adam(points)
    for step in range(MOVES):
        order = torch.randperm(len(u), generator=generator)[:MANY]
        slopes = induced_slopes(at, u[order], y[order], points, missed=1.0)
        if slopes is None:
            break
        slower = min(1.0, 2 * (1 - step / MOVES))
        points = points - slower * MOVE * lengths * adam.step(slopes[1])
    return points[kernel.inducing(points, len(points))]


class _Adam:
    """Directions to move in, of about one in each number, from gradients that change from step to step."""

    def __init__(self, at: Tensor) -> None:
        self.mean, self.square, self.steps = torch.zeros_like(at), torch.zeros_like(at), 0

    def step(self, slope: Tensor) -> Tensor:
        self.steps += 1
        self.mean = 0.9 * self.mean + 0.1 * slope
        self.square = 0.99 * self.square + 0.01 * slope.square()
        steady = self.mean / (1 - 0.9**self.steps)
        return steady / ((self.square / (1 - 0.99**self.steps)).sqrt() + 1e-8)


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
    slopes, shares, _ = _pulled(near, kernels, pull, (v, w), (v, w))
    return torch.cat([*slopes, torch.stack([*shares, *slants])])


def induced_slopes(
    at: Tensor,
    u: Float[Tensor, "n e"],
    y: Float[Tensor, "n k"],
    points: Float[Tensor, "m e"],
    missed: float = 0.0,
) -> tuple[Tensor, Float[Tensor, "m e"]] | None:
    """The same gradient where the kernel's part is only what inducing points explain; and that in the points.

    It is linear in the number of rows. With covariances U of rows and points, K of points (the columns and
    the constant are points of a kind, too) and S = noise K + U'U: the slopes in U are U S⁻¹ - a b', and those
    in K (b b' - K⁻¹ + noise S⁻¹) / 2 for one target, where a are the answers of the process, and b = K⁻¹ U'a.

    Args:
        missed: weight of tr(k - U K⁻¹ U') / (2 noise), what the points do not explain, beside the negative
            log likelihood. With 1 their sum bounds that of the whole process from above (Titsias, 2009):
            points cannot fit noise.
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
    gram = torch.from_numpy(across.numpy().T @ across.numpy())
    (factor, failed), (root, bad) = (
        torch.linalg.cholesky_ex(matrix) for matrix in (torch.add(gram, inner, alpha=float(noise)), inner)
    )
    if failed or bad:
        return None
    answer = (y - across @ torch.cholesky_solve(across.mT @ y, factor)) / noise
    weights = torch.cholesky_solve(across.mT @ answer, root)
    inverse, prior = torch.cholesky_inverse(factor), torch.cholesky_inverse(root)
    own = prior[:m, :m]
    explained = gram[:m, :m] @ own
    weight = missed * k / (2 * noise)
    both = k * inverse[:, :m]
    both[:m] -= 2 * weight * own
    pull = (across @ both).addmm_(answer, weights[:m].mT, alpha=-1.0)
    pull_ends = (prior - noise * inverse).mul_(k).addmm_(weights, weights.mT, alpha=-1.0).div_(-2)
    slants = -columns / slant * pull_ends.diagonal()[m:-1].sum()
    pull_ends = pull_ends[:m, :m].addmm(own, explained, alpha=float(weight))
    trace = (n - len(inner) + noise * (inverse * inner).sum()) / noise
    noises = noise * (k * trace - answer.square().sum()) / 2
    noises = noises - weight * (n * (smooth + rough) - explained.trace())
    slopes, shares, moves = _pulled(near, kernels, pull, rows, ends)
    more, more_shares, more_moves = _pulled(near_ends, kernels_ends, pull_ends, ends, ends)
    variances = torch.stack(shares) + torch.stack(more_shares) + n * weight * torch.stack([smooth, rough])
    by_at = torch.cat([slopes[0] + more[0], slopes[1] + more[1], variances, torch.stack([slants, noises])])
    by_points = torch.stack([a + 2 * b for a, b in zip(moves, more_moves, strict=True)])
    return by_at, (by_points * rates[:, None]).sum(0)


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
) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Slopes in the logarithms of rates and shares, and in ends; uses up the covariances and theirs."""
    pulls = [kernel.mul_(pull) for kernel in kernels]
    shares = [pulled.sum() for pulled in pulls]
    pulls[0] *= -0.5
    pulls[1] /= near.masked_fill_(near == 0, inf).mul_(-2.0)  # at the same place lengths change nothing
    slopes, moves = [], []
    for pulled, u, v in zip(pulls, rows, ends, strict=True):
        weight, across = pulled.sum(0), pulled.mT @ u
        slopes.append(2 * (pulled.sum(1) @ u.square() + weight @ v.square() - 2 * (across * v).sum(0)))
        moves.append(2 * (weight[:, None] * v - across))
    return slopes, shares, moves

"""Bayesian linear regressions on cosines and sines, from moments alone: what CMANP may predict by."""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from constmem.core import checks
from constmem.core.moments import Moments

SPACING = 0.9  # of the first frequencies, in radians: two harmonics repeat after 7, beyond inputs in [-2, 2]
LENGTHS, AMPLITUDES, NOISE = (0.1, 0.8), (0.1, 1.0), 0.02  # of the functions that experts start with
GOLDEN = 0.618034  # amplitudes of neighbours in length are spread by it
FEWEST = -60.0  # logarithm of a variance that is as good as none
AT_ONCE = 512  # targets whose variances are computed together


class Posterior(NamedTuple):
    """What the experts know of the coefficients after some points, in float64."""

    evidence: Float[Tensor, "b k"]  # logarithm of how likely each expert held the points, and of its prior
    weights: Float[Tensor, "b k p y"]  # mean of the coefficients
    covariance: Float[Tensor, "b k p p"]  # of the coefficients, the same for every output


class Regression(nn.Module):
    """`experts` ways to regress outputs on the same cosines and sines of inputs.

    With phi(x) = [cos(W x), sin(W x)], expert k holds that y = phi(x)' w + e, w ~ N(0, S_k) and
    e ~ N(0, noise_k^2). Its posterior and its evidence are closed form in the moments of phi and y:

        B = 1 + S^1/2 G S^1/2 / noise^2        C = S^1/2 B^-1 S^1/2        E[w] = C c / noise^2
        log p(y) = -1/2 (n log(2 pi noise^2) + log det B + (y'y - c'C c / noise^2) / noise^2)

    for G = sum phi phi' and c = sum phi y. Experts start as smooth functions (squared exponential and
    Matern 5/2 by turns) of many length scales and amplitudes; W, S and the noise are learned.

    Args:
        dim_x: channels of inputs.
        features: cosines and sines together: even.
        experts: how many.
        lengths, amplitudes, noise: of the functions that experts start with.
        spacing: of the first frequencies.

    Example:
        >>> regression = Regression(dim_x=1, features=64, experts=8)
        >>> x = torch.linspace(-1, 1, 30)[None, :, None]
        >>> posterior = regression.read(regression.observe(x, torch.sin(3 * x)))
        >>> mean, std = regression(posterior, torch.tensor([[[0.5], [3.0]]]))  # among the points, and far off
        >>> best = posterior.evidence.argmax()
        >>> bool((mean[0, 0, best] - torch.sin(torch.tensor(1.5))).abs() < 0.02)
        True
        >>> bool(std[0, 0, best] < 0.03), bool(std[0, 1, best] > 0.2)
        (True, True)
    """

    def __init__(
        self,
        *,
        dim_x: int,
        features: int,
        experts: int,
        lengths: tuple[float, float] = LENGTHS,
        amplitudes: tuple[float, float] = AMPLITUDES,
        noise: float = NOISE,
        spacing: float = SPACING,
    ) -> None:
        super().__init__()
        checks.positive("experts", experts)
        if features < 2 or features % 2:
            raise ValueError(f"moments must be an even number of features, cosines and sines, not {features}")
        radius = spacing * (torch.arange(features // 2) + 0.5)
        length = _spread(lengths, (torch.arange(experts) + 0.5) / experts)[:, None]
        amplitude = _spread(amplitudes, torch.arange(experts) * GOLDEN % 1)[:, None]
        scaled = (radius * length).square()
        smooth, rough = -0.5 * scaled, -(5 + dim_x) / 2 * torch.log1p(scaled / 5)
        spectrum = torch.where(torch.arange(experts)[:, None] % 2 == 0, smooth, rough)
        spectrum = spectrum + (dim_x - 1) * radius.log()  # radii are spread evenly, volume is not
        start = spectrum.log_softmax(-1) + 2 * amplitude.log()
        self.frequencies = nn.Parameter(
            radius[:, None] * F.normalize(torch.randn(features // 2, dim_x), dim=-1)
        )
        self.log_variance = nn.Parameter(
            start.clamp_min(FEWEST)
        )  # of the coefficients of a cosine and its sine
        self.log_noise = nn.Parameter(torch.full((experts,), noise).log())
        self.log_prior = nn.Parameter(torch.zeros(experts))

    def features(self, x: Float[Tensor, "*b n x"]) -> Float[Tensor, "*b n p"]:
        """phi(x), in float64."""
        angles = x.double() @ self.frequencies.double().mT
        return torch.cat([angles.cos(), angles.sin()], -1)

    def observe(
        self,
        x: Float[Tensor, "b n x"],
        y: Float[Tensor, "b n y"],
        mask: Tensor | None = None,
        log_weight: Tensor | None = None,
    ) -> Moments:
        """The moments of exactly these points; those that are masked out count nothing."""
        weight = None if log_weight is None else log_weight.double().exp()
        if mask is not None:
            weight = mask.double() if weight is None else torch.where(mask, weight, 0.0)
        return Moments.observe(self.features(x), y, weight)

    def read(self, moments: Moments) -> Posterior:
        """What each expert makes of the points."""
        matrix = self.matrix(moments.gram)
        inverse, log_det = Inverse.apply(matrix)  # type: ignore[no-untyped-call]
        return self.solved(moments, matrix, inverse, log_det)

    def _prior(self) -> tuple[Float[Tensor, "k p"], Float[Tensor, " k"]]:
        """Deviations of the coefficients, and variances of the noise."""
        return (0.5 * self.log_variance.double()).exp().repeat(1, 2), (2 * self.log_noise.double()).exp()

    def matrix(self, gram: Float[Tensor, "b p p"]) -> Float[Tensor, "b k p p"]:
        """B of each expert, which must be inverted."""
        scale, noise = self._prior()
        outer = scale[:, :, None] * scale[:, None]
        eye = torch.eye(scale.shape[-1], dtype=scale.dtype, device=scale.device)
        return eye + gram[:, None] * (outer / noise[:, None, None])

    def solved(
        self,
        moments: Moments,
        matrix: Float[Tensor, "b k p p"],
        inverse: Float[Tensor, "b k p p"],
        log_det: Float[Tensor, "b k"],
    ) -> Posterior:
        """What each expert makes of the points, given B, its inverse and the logarithm of its determinant."""
        scale, noise = self._prior()
        covariance = scale[:, :, None] * scale[:, None] * inverse
        right = scale[..., None] * moments.cross[:, None] / noise[:, None, None]
        weights = inverse @ right  # in units of the prior, once refined: little noise would cost their digits
        weights = scale[..., None] * (weights + inverse @ (right - matrix @ weights))
        left = moments.square[:, None] - (moments.cross[:, None] * weights).sum(-2)  # (b, k, y)
        one = moments.count[:, None] * (2 * torch.pi * noise).log() + log_det  # (b, k)
        evidence = -0.5 * (left.shape[-1] * one + left.sum(-1) / noise)
        return Posterior(evidence + self.log_prior.double().log_softmax(-1), weights, covariance)

    def forward(
        self, posterior: Posterior, xt: Float[Tensor, "b m x"]
    ) -> tuple[Float[Tensor, "b m k y"], Float[Tensor, "b m k 1"]]:
        """Mean and standard deviation of each expert at the targets, noise included."""
        phi, (_, weights, covariance) = self.features(xt), posterior
        mean = torch.einsum("bmp,bkpy->bmky", phi, weights)
        pieces = (phi,) if torch.compiler.is_exporting() else phi.split(AT_ONCE, 1)  # a graph takes any m
        parts = [_quadratic(part, covariance) for part in pieces]
        variance = parts[0] if len(parts) == 1 else torch.cat(parts, 1)  # (b, m, k)
        noise = (2 * self.log_noise.double()).exp()
        return mean, (variance.clamp_min(0.0) + noise).sqrt()[..., None]


def _quadratic(phi: Float[Tensor, "b m p"], covariance: Float[Tensor, "b k p p"]) -> Float[Tensor, "b m k"]:
    """phi' C phi for each expert."""
    return (phi[:, None] @ covariance).mul(phi[:, None]).sum(-1).mT


def _spread(bounds: tuple[float, float], places: Tensor) -> Tensor:
    """Numbers between two bounds, evenly in their logarithm."""
    low, high = bounds
    return low * (high / low) ** places


def mixture(
    posterior: Posterior, phi: Float[Tensor, "*b q p"], noise: Float[Tensor, " k"] | None = None
) -> tuple[Float[Tensor, "*b q"], Float[Tensor, "*b q q"]]:
    """Mean and covariance at q points together of all experts of one output, by their normalised evidence.

    Args:
        posterior: one for all batches of points, or a batch of them, which is broadcast against the points'.
        noise: variance that each expert adds to every point; none if not given.
    """
    log_weight, weights, covariance = posterior
    if log_weight.ndim > 1:  # each batch of points has a posterior of its own
        batch = torch.broadcast_shapes(phi.shape[:-2], log_weight.shape[:-1])
        phi = phi.expand(*batch, *phi.shape[-2:])[..., None, :, :]
        mean, each = (phi @ weights).squeeze(-1), phi @ covariance @ phi.mT  # (*b, k, q), (*b, k, q, q)
    else:  # a product of all points with one matrix for each expert
        flat = phi.reshape(-1, phi.shape[-1])
        mean = (flat @ weights.squeeze(-1).mT).unflatten(0, phi.shape[:-1]).mT
        half = (flat @ covariance).unflatten(1, phi.shape[:-1]).movedim(0, -3)  # (*b, k, q, p)
        each = half @ phi[..., None, :, :].mT
    if noise is not None:
        each = each + noise[:, None, None] * torch.eye(each.shape[-1], dtype=each.dtype, device=each.device)
    weight = log_weight.exp()[..., None]
    middle = (weight * mean).sum(-2)
    apart = mean - middle[..., None, :]
    return middle, (weight[..., None] * (each + apart[..., :, None] * apart[..., None, :])).sum(-3)


def standardised(moments: Moments, mean: float, std: float) -> Moments:
    """The moments of features and (y - mean) / std, from those of y and features with a one behind them."""
    sums, total, count = moments.gram[..., :-1, -1:], moments.cross[..., -1, :], moments.count[..., None]
    square = (moments.square - 2 * mean * total + mean**2 * count) / std**2
    cross = (moments.cross[..., :-1, :] - mean * sums) / std
    return Moments(moments.gram[..., :-1, :-1], cross, square, moments.count)


class Inverse(torch.autograd.Function):
    """Inverse and log-determinant of positive definite matrices, with the gradient of both by two products.

    Nothing asks a GPU whether it worked: the identity is part of every matrix that is inverted here.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(matrix: Tensor) -> tuple[Tensor, Tensor]:
        factor = torch.linalg.cholesky_ex(matrix).L
        eye = torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device).expand_as(matrix)
        root = torch.linalg.solve_triangular(factor, eye, upper=False)
        return root.mT @ root, 2 * factor.diagonal(dim1=-2, dim2=-1).log().sum(-1)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:  # noqa: ARG004
        ctx.save_for_backward(output[0])

    @staticmethod
    def backward(ctx: Any, grad: Tensor, grad_log_det: Tensor) -> Tensor:
        (inverse,) = ctx.saved_tensors
        found: Tensor = grad_log_det[..., None, None] * inverse - inverse @ grad @ inverse
        return found

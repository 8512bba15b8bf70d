"""What regressions say of several points together: the mean and covariance of a mixture of them."""

import torch
from jaxtyping import Float
from torch import Tensor

from constmem.core.moments import Moments
from constmem.neural_processes.regression import Posterior


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

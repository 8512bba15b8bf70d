"""Probabilities of classes from Gaussian answers to one-hot targets."""

import torch
from jaxtyping import Float
from torch import Tensor

DOUBT = 0.3  # of the variance that indicators of equally frequent classes have


def probabilities(
    mean: Float[Tensor, "n k"], variance: Float[Tensor, "n k"], *, temperature: float = 1.0
) -> Float[Tensor, "n k"]:
    """Probabilities of classes, (n, k), from means and variances of their indicators.

    A softmax over distances from one half in units of each answer's deviation: the logistic function that
    is nearest to a normal distribution's. Indicators of classes that are easy to tell apart have next to no
    noise in the rows seen; `DOUBT` keeps that from being taken for certainty.
    """
    k = mean.shape[-1]
    spread = (variance + DOUBT * (k - 1) / k**2).clamp(min=torch.finfo(torch.float64).tiny).sqrt()
    return torch.softmax((mean - 0.5) / (spread * temperature) * (8 / torch.pi) ** 0.5, -1)

"""Probabilities of classes from Gaussian answers to one-hot targets."""

import torch
from jaxtyping import Float
from torch import Tensor


def probabilities(
    mean: Float[Tensor, "n k"], variance: Float[Tensor, "n k"], *, temperature: float = 1.0
) -> Float[Tensor, "n k"]:
    """Probabilities of classes, (n, k), from means and variances of their indicators."""
    score = (mean - 0.5) / variance.sqrt() * (torch.pi / 8) ** -0.5
    return torch.softmax(score / temperature, -1)

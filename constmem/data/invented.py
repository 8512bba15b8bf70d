"""Invented functions of given inputs, so that few rows cannot be learned by heart."""

from math import log, pi, sqrt

import torch
from jaxtyping import Float
from torch import Tensor

FEATURES = 48
LENGTH, NOISE = (0.5, 4.0), (0.1, 1.5)  # drawn from a log-uniform; the length for one relevant input


def invented_outputs(
    x: Float[Tensor, "b n x"], dim_y: int, *, generator: torch.Generator
) -> Float[Tensor, "b n y"]:
    """A random noisy function of each task, of about unit variance over standardised inputs.

    It is m wave(x) + (1 - m) line(x) + noise, with m ~ U[0, 1) and inputs that matter more or less;
    wave(x) = sqrt(2/F) sum_f a_f cos(w_f x + c_f) is a Gaussian process of RBF kernel, by random features.
    """
    b, _, dim_x = x.shape
    where, like = generator.device, x

    def normal(*shape: int) -> Tensor:
        return torch.randn(b, *shape, generator=generator, device=where).to(like)

    def uniform(*shape: int) -> Tensor:
        return torch.rand(b, *shape, generator=generator, device=where).to(like)

    def between(bounds: tuple[float, float]) -> Tensor:
        low, high = map(log, bounds)
        return torch.exp(low + (high - low) * uniform(1, 1))

    relevance = uniform(dim_x, 1) ** 2
    relevance = relevance / relevance.square().sum(1, keepdim=True).sqrt()
    angles = x @ (relevance * normal(dim_x, FEATURES)) / between(LENGTH) + 2 * pi * uniform(1, FEATURES)
    wave = sqrt(2 / FEATURES) * angles.cos() @ normal(FEATURES, dim_y)
    line = x @ (relevance * normal(dim_x, dim_y).sign())
    mix, noise = uniform(1, 1), between(NOISE)
    spread = (mix**2 + (1 - mix) ** 2 + noise**2).sqrt()
    return (mix * wave + (1 - mix) * line + noise * normal(x.shape[1], dim_y)) / spread

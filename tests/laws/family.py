"""Small models of every kind, and tasks for them: what the tests of the family share."""

from typing import Any

import torch
from torch import Tensor
from torch.distributions import Distribution

from constmem.neural_processes import MODELS

CNP_FAMILY = ("cnp", "canp", "np", "anp", "bnp", "banp")
MIXTURES = ("np", "anp", "bnp", "banp")
POOLED = ("cnp", "np")
STORED = [name for name in MODELS if name not in ("cmanp", *POOLED)]


def small(name: str) -> Any:
    """A small model of two input and two output channels, in float64, away from its initial zeros."""
    settings: dict[str, Any] = {"dim": 16}
    if name in CNP_FAMILY:
        settings |= {"pre_depth": 3, "post_depth": 2, "decoder_depth": 2}
    else:
        settings |= {"depth": 2, "hidden": 24, "embed_depth": 2, "num_heads": 2}
    settings |= {"num_samples": 5} if name in MIXTURES else {}
    settings |= {"dim_latent": 7} if name in ("np", "anp") else {}
    settings |= {"num_latents": 6} if name in ("lbanp", "cmanp") else {}
    settings |= {"num_slots": 5} if name == "cmanp" else {}
    torch.manual_seed(1)
    model = MODELS[name](dim_x=2, dim_y=2, **settings)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model.double().eval()


def data(n: int = 11, m: int = 6, b: int = 2, seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    random = torch.Generator().manual_seed(seed)
    shapes = (n, n, m, m)
    x, y, xt, yt = (torch.randn(b, k, 2, generator=random, dtype=torch.float64) for k in shapes)
    return x, y, xt, yt


def ragged(n: int, counts: list[int], seed: int = 3) -> Tensor:
    """A mask with as many real points as asked for, in random places."""
    scores = torch.rand(len(counts), n, generator=torch.Generator().manual_seed(seed))
    return scores.argsort(1).argsort(1) < torch.tensor(counts)[:, None]


def assert_same(found: Distribution, expected: Distribution, yt: Tensor) -> None:
    torch.testing.assert_close(found.mean, expected.mean, atol=1e-7, rtol=0)
    torch.testing.assert_close(found.stddev, expected.stddev, atol=1e-7, rtol=0)
    torch.testing.assert_close(found.log_prob(yt), expected.log_prob(yt), atol=1e-6, rtol=0)

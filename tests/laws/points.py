"""Neural processes of every kind as laws on points build them, and what they are compared by."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributions import Distribution

from constmem import CMANP, NeuralProcess
from constmem.core.monoid import State
from tests.laws.models import fresh, moved

Factory = Callable[[], NeuralProcess]
DIM_X, DIM_Y = 2, 3


def small_cmanp(**settings: Any) -> CMANP:
    found: CMANP = fresh("cmanp", **{"dim_y": DIM_Y, "num_slots": 6, **settings})
    return found


def factory_of(name: str) -> Factory:
    return partial(fresh, name, dim_y=DIM_Y)


def built(factory: Factory) -> NeuralProcess:
    """A model whose parameters are away from the ones and zeros they start from, ready to evaluate."""
    torch.manual_seed(1)
    found: NeuralProcess = moved(factory()).eval().requires_grad_(False)
    return found


def task(n: int = 30, m: int = 7, b: int = 2, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    random = torch.Generator().manual_seed(seed)
    sizes = (n, DIM_X), (n, DIM_Y), (m, DIM_X)
    x, y, xt = (torch.randn(b, points, dim, generator=random) for points, dim in sizes)
    return x, y, xt


def assert_predicts(found: Distribution, expected: Distribution, tolerance: float = 1e-4) -> None:
    """Far above the rounding of float32, and far below what any broken law would change."""
    torch.testing.assert_close(found.mean, expected.mean, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(found.stddev, expected.stddev, atol=tolerance, rtol=tolerance)


def tensors(state: State) -> dict[str, Tensor]:
    """Copies of all tensors a state holds."""
    return {name: t.clone() for name, t in state.tensors().items()}


def assert_unchanged(state: State, before: dict[str, Tensor]) -> None:
    after = tensors(state)
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())


def pieces(x: Tensor, y: Tensor, size: int = 8) -> Iterator[tuple[Tensor, Tensor]]:
    for i in range(0, x.shape[1], size):
        yield x[:, i : i + size], y[:, i : i + size]

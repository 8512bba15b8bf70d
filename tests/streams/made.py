"""Models and points for tests of streams, and what those are compared by."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributions import Distribution

from constmem import CMANP, AttentionState, Decay, NeuralProcess, Stream, Window
from constmem.neural_processes import LBANP, StoredPoints

Forget = Decay | Window | None
Model = NeuralProcess[Any, Any]


def built(seed: int = 1, kind: type[Model] = CMANP) -> Any:
    sizes = {"dim_x": 1, "dim_y": 1, "dim": 16, "depth": 2, "num_latents": 5, "num_heads": 2, "hidden": 12}
    torch.manual_seed(seed)
    model = kind(**sizes, num_slots=6) if kind is CMANP else kind(**sizes)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model.eval()


MODEL, STORING = built(), built(kind=LBANP)  # a state of constant size, and one that is the stored points
every_model = pytest.mark.parametrize("model", [MODEL, STORING], ids=["cmanp", "lbanp"])
every_forgetting = pytest.mark.parametrize(
    "forget", [None, Decay(5.0), Window(9, 3)], ids=["all", "decay", "window"]
)
every_kind = pytest.mark.parametrize(  # stored points have no weights, so they cannot decay
    ("model", "forget"),
    [
        (MODEL, None),
        (MODEL, Decay(5.0)),
        (MODEL, Window(9, 3)),
        (STORING, None),
        (STORING, Window(9, 3)),
    ],
    ids=["cmanp-all", "cmanp-decay", "cmanp-window", "lbanp-all", "lbanp-window"],
)


def task(n: int = 30, b: int = 2, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    random = torch.Generator().manual_seed(seed)
    x, y, xt = (torch.randn(b, m, 1, generator=random) for m in (n, n, 7))
    return x, y, xt


def show(stream: Stream, x: Tensor, y: Tensor, sizes: list[int], **options: Any) -> None:
    start = 0
    for size in sizes:
        stream.observe(x[:, start : start + size], y[:, start : start + size], **options)
        start += size


def condition(x: Tensor, y: Tensor, model: Model = MODEL) -> Any:
    with torch.no_grad():
        return model.condition(x, y)


def query(state: Any, xt: Tensor, model: Model = MODEL) -> Distribution:
    with torch.no_grad():
        return model.query(state, xt)


def assert_predicts(found: Distribution, expected: Distribution, tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(found.mean, expected.mean, atol=tolerance, rtol=0)
    torch.testing.assert_close(found.stddev, expected.stddev, atol=tolerance, rtol=0)


def assert_state(found: Any, expected: Any, tolerance: float = 1e-5) -> None:
    if isinstance(found, AttentionState):
        torch.testing.assert_close(found.value, expected.value, atol=tolerance, rtol=0)
        torch.testing.assert_close(found.lse, expected.lse, atol=tolerance, rtol=1e-6)
    else:
        for mine, theirs in zip(real_points(found), real_points(expected), strict=True):
            assert torch.equal(mine, theirs)


def real_points(state: StoredPoints) -> list[Tensor]:
    """The points of each task that are not masked out."""
    points = torch.cat([state.x, state.y], -1)
    return [points[i] if state.mask is None else points[i][state.mask[i]] for i in range(state.batch)]


def assert_identical(found: Any, expected: Any) -> None:
    mine, theirs = found.tensors(), expected.tensors()
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)

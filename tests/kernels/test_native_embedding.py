"""The embedding in machine code: its layers do not amplify what float32 would round."""

import copy

import pytest
import torch
from torch import Tensor

from constmem import CMANP
from constmem.core.layers import MLP
from constmem.core.observation import Observation
from constmem.core.state import AttentionState
from constmem.kernels import cpu

pytestmark = [
    pytest.mark.skipif(cpu.library() is None, reason="there is no C++ compiler"),
    pytest.mark.usefixtures("library"),
]


@pytest.fixture(scope="module")
def trained() -> CMANP:
    return CMANP.from_pretrained("emnist").eval()


def strokes(batch: int, n: int) -> tuple[Tensor, Tensor]:
    """Pixels of smooth strokes, as a trained model of digits knows them."""
    x = 2 * torch.rand(batch, n, 2) - 1
    wave = (3 * x[..., :1] + 3 * torch.rand(batch, 1, 1)).sin()
    return x, (-(((0.5 * wave + x[..., 1:]) / 0.15) ** 2)).exp() - 0.5


def off(state: AttentionState, exact: AttentionState) -> tuple[float, float]:
    """How far values are off, as a part of the largest, and the lse."""
    value = (state.value - exact.value).abs().amax((1, 2, 3, 4)) / exact.value.abs().amax((1, 2, 3, 4))
    return float(value.max()), float((state.lse - exact.lse).abs().max())


@pytest.mark.parametrize(("batch", "n"), [(64, 2), (64, 20), (16, 100), (2, 784), (1, 4097)])
@torch.no_grad()
def test_states_of_trained_weights_are_within_four_millionths_of_float64(
    trained: CMANP, batch: int, n: int
) -> None:
    x, y = strokes(batch, n)
    exact = copy.deepcopy(trained).double().condition(x.double(), y.double())
    value, lse = off(trained.condition(x, y), exact)
    assert value < 4e-6
    assert lse < 3e-5


@torch.no_grad()
def test_states_updated_point_by_point_are_within_four_millionths_of_float64(trained: CMANP) -> None:
    x, y = strokes(64, 20)
    exact = copy.deepcopy(trained).double().condition(x.double(), y.double())
    state = trained.condition(x[:, :1], y[:, :1])
    for i in range(1, 20):
        state = trained.update(state, x[:, i : i + 1], y[:, i : i + 1])
    value, lse = off(state, exact)
    assert value < 4e-6
    assert lse < 3e-5


@pytest.mark.parametrize("depth", [1, 2, 4])
@pytest.mark.parametrize("points", [1, 10])
@torch.no_grad()
def test_what_is_not_a_number_goes_through_an_embedding_as_such(depth: int, points: int) -> None:
    found = Observation(dim=16, depth=1, num_slots=4, num_heads=2)
    embed = MLP(dim_in=3, dim_hidden=17, dim_out=16, depth=depth)
    data = torch.randn(1, points, 3)
    data[0, -1, 1] = torch.nan
    state = found.observe(data, embed=embed)
    assert bool(state.lse.isnan().all())
    assert bool(state.value.isnan().all())


@pytest.mark.parametrize("points", [2, 5, 9, 33])
@torch.no_grad()
def test_a_few_points_are_not_mixed_with_what_another_task_left_behind(points: int) -> None:
    found = Observation(dim=16, depth=1, num_slots=4, num_heads=2)
    embed = MLP(dim_in=3, dim_hidden=17, dim_out=16, depth=3)
    data = torch.randn(2, 70, 3)
    data[0] = torch.nan
    mask = torch.arange(70).expand(2, -1) < torch.tensor([[70], [points]])
    state = found.observe(data, mask, embed=embed)
    alone = found.observe(data[1:, :points], embed=embed)
    assert bool(state.lse[0].isnan().all())
    assert torch.equal(state.value[1:], alone.value)
    assert torch.equal(state.lse[1:], alone.lse)

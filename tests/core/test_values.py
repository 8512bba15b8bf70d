"""Numbers that are finite as they are given, but not as a model takes them."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from constmem import CMANP, Stream
from constmem.neural_processes import CNP, NeuralProcess, Scales

HUGE = 1e39  # float32 ends at 3.4e38
MODELS: dict[str, Callable[[], NeuralProcess[Any, Any]]] = {
    "cnp": lambda: CNP(dim_x=2, dim_y=1, dim=8).eval(),
    "cmanp": lambda: CMANP(
        dim_x=2, dim_y=1, dim=8, depth=1, num_slots=4, num_latents=4, hidden=8, num_heads=2
    ).eval(),
}


@pytest.fixture(params=list(MODELS))
def model(request: pytest.FixtureRequest) -> NeuralProcess[Any, Any]:
    return MODELS[request.param]()


def data(n: int) -> tuple[Tensor, Tensor]:
    return torch.rand(1, n, 2, dtype=torch.float64), torch.rand(1, n, 1, dtype=torch.float64)


@pytest.mark.parametrize("n", [1, 5, 50])  # one by one, few, and many enough to be summed up
def test_values_beyond_the_precision_of_the_model_are_refused_by_their_index(
    model: NeuralProcess[Any, Any], n: int
) -> None:
    told = rf"\[0, {n - 1}, %d\] is 1e\+39, which the model takes as inf in its torch.float32: every value"
    state = model.empty()
    for name, channel in (("x", 1), ("y", 0)):
        points = dict(zip("xy", data(n), strict=True))
        points[name][0, -1, channel] = HUGE
        for verb in (model.observe, model.condition, lambda x, y: model.update(state, x, y)):
            with pytest.raises(ValueError, match=name + told % channel):
                verb(points["x"], points["y"])
        with pytest.raises(ValueError, match=name + told % channel):
            Stream(model).observe(points["x"], points["y"])
    xt = data(n)[0]
    xt[0, -1, 0] = -HUGE
    for ask in (lambda xt: model.query(state, xt), Stream(model).predict):
        with pytest.raises(ValueError, match=rf"xt\[0, {n - 1}, 0\] is -1e\+39, .* takes as -inf in its"):
            ask(xt)


def test_the_first_index_is_counted_through_all_chunks(model: NeuralProcess[Any, Any]) -> None:
    x, y = data(60)
    y[0, 47:, 0] = HUGE
    with pytest.raises(ValueError, match=r"y\[0, 47, 0\] is 1e\+39"):
        model.condition(x, y, chunk=20)


def test_values_that_a_wider_model_can_take_are_taken(model: NeuralProcess[Any, Any]) -> None:
    x, y = data(5)
    x[0, 2, 0] = HUGE
    masked = torch.tensor([[True, True, False, True, True]])
    assert model.query(model.condition(x, y, mask=masked), data(3)[0]).mean.isfinite().all()
    model.double().condition(x, y)


def test_what_is_looked_at_is_what_the_scales_of_a_model_make_of_the_values(
    model: NeuralProcess[Any, Any],
) -> None:
    wide = {"x_mean": [0.0, 0.0], "x_std": [1e39, 1e-39], "y_mean": [0.0], "y_std": [1.0]}
    model.set_scales(Scales(**wide))
    x, y = data(5)
    x[..., 0] *= 1e39
    x[..., 1] *= 1e-39
    assert model.query(model.condition(x, y), x).mean.isfinite().all()
    x[0, 3, 1] = 1.0  # 1e39 deviations from the mean
    for verb in (lambda: model.condition(x, y), lambda: model.query(model.empty(), x)):
        with pytest.raises(ValueError, match=r"\[0, 3, 1\] is 1.0, which the model takes as inf"):
            verb()


def test_numbers_that_are_no_numbers_are_told_as_before(model: NeuralProcess[Any, Any]) -> None:
    x, y = data(5)
    y[0, 1, 0] = float("nan")
    with pytest.raises(ValueError, match=r"y\[0, 1, 0\] is nan: every value of y must be finite"):
        model.condition(x, y)


def test_a_warm_stream_of_single_points_refuses_them_as_well_and_stays_as_it_was() -> None:
    stream = Stream(CMANP(dim_x=2, dim_y=1).eval())
    for _ in range(4):  # until machine code, where there is any, does it in one call
        stream.observe(*data(1))
    before = stream.state.value
    x, y = data(1)
    x[0, 0, 1] = HUGE
    with pytest.raises(ValueError, match=r"x\[0, 0, 1\] is 1e\+39, which the model takes as inf"):
        stream.observe(x, y)
    assert stream.state.value is before

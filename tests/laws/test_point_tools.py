"""Neural processes under PyTorch's own tools: mapped, compiled; and built with settings of every kind."""

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from constmem import CMANP, NeuralProcess
from tests.conftest import Refuses
from tests.laws.points import DIM_X, DIM_Y, Factory, assert_predicts, built, factory_of, small_cmanp, task

# PyTorch's own tools


@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")
@pytest.mark.parametrize("grad", [True, False])
def test_tasks_may_be_mapped_over(model: NeuralProcess, grad: bool) -> None:
    x, y, xt = task(b=3)

    def mean(x: Tensor, y: Tensor, xt: Tensor) -> Tensor:
        return model.query(model.condition(x[None], y[None]), xt[None]).mean[0]

    with torch.set_grad_enabled(grad):
        found = torch.func.vmap(mean, randomness="same")(x, y, xt)  # of the versions that a BNP draws
        expected = model.query(model.condition(x, y), xt).mean
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


def test_sparse_points_are_refused_with_advice(model: NeuralProcess, refuses: Refuses) -> None:
    x, y, _ = task()
    with refuses(TypeError, r"x is torch.sparse_coo: .* use x.to_dense\(\)"):
        model.condition(x.to_sparse(), y)


@pytest.mark.parametrize(
    ("points", "advice"),
    [
        (np.zeros((5, DIM_X)), r"not ndarray: torch.as_tensor\(x, dtype=torch.float32\)"),
        ([[0.0, 1.0]], r"not list: torch.as_tensor\(x, dtype=torch.float32\)"),
        (torch.zeros(1, 5, DIM_X).long(), r"not torch.int64: use x.float\(\)"),
        (torch.zeros(5, DIM_X), r"if these are the points of one task, x.reshape\(1, -1, 2\)"),
        (torch.zeros(DIM_X), r"if these are the points of one task, x.reshape\(1, -1, 2\)"),
        (torch.zeros(1, 5, 7), r"\(batch, points, 2\) is needed$"),
    ],
)
def test_advice_on_points_of_another_kind_is_right(
    model: NeuralProcess, refuses: Refuses, points: Any, advice: str
) -> None:
    with refuses((TypeError, ValueError), advice):
        model.condition(points, torch.zeros(1, 5, DIM_Y))


@pytest.mark.parametrize("name", ["gp", "emnist"])
@torch.no_grad()
def test_data_far_from_what_shipped_weights_know_are_warned_of_once(name: str) -> None:
    def asked(x: float, y: float) -> None:
        model = NeuralProcess.from_pretrained(name)
        xs, ys = torch.full((1, 3, model.dim_x), x), torch.full((1, 3, model.dim_y), y)
        model.query(model.condition(xs, ys), xs)
        model.query(model.condition(xs, ys), xs)

    asked(0.9, -0.4)  # no warning, which would be an error here
    for x, y, channel in ((27.0, 0.1, "x"), (0.1, 255.0, "y")):
        with pytest.warns(UserWarning, match=f"channel 0 of {channel} goes from .* trained on") as told:
            asked(x, y)
        assert len(told) == 1


# Building


@pytest.mark.parametrize(
    "settings",
    [{"dim_x": 0}, {"dim_y": -1}, {"depth": 0}, {"num_slots": 0}, {"num_latents": 0}, {"hidden": 0}],
)
def test_a_cmanp_of_no_size_is_refused(settings: dict[str, int]) -> None:
    name, number = next(iter(settings.items()))
    with pytest.raises(ValueError, match=f"{name} must be a whole number of at least 1, not {number}"):
        CMANP(**{"dim_x": 1, "dim_y": 1, **settings})  # type: ignore[arg-type]


def test_a_cmanp_of_impossible_settings_is_refused(refuses: Refuses) -> None:
    with refuses(ValueError, "dim=64 does not split into num_heads=5"):
        CMANP(dim_x=1, dim_y=1, num_heads=5)
    with refuses(ValueError, "std must be 'bounded' or 'exp', not 'wide'"):
        CMANP(dim_x=1, dim_y=1, std="wide")  # type: ignore[arg-type]
    with refuses(ValueError, "residual must be 'normed' or 'raw'"):
        CMANP(dim_x=1, dim_y=1, residual="none")  # type: ignore[arg-type]
    with refuses(ValueError, "an MLP needs a depth of at least 1, not 0"):
        CMANP(dim_x=1, dim_y=1, embed_depth=0)


@pytest.mark.parametrize("residual", ["normed", "raw"])
@pytest.mark.parametrize("std", ["bounded", "exp"])
def test_a_cmanp_of_every_kind_updates_as_it_conditions(residual: str, std: str) -> None:
    model = built(lambda: small_cmanp(residual=residual, std=std))
    x, y, xt = task()
    found = model.query(model.update(model.condition(x[:, :11], y[:, :11]), x[:, 11:], y[:, 11:]), xt)
    assert_predicts(found, model.query(model.condition(x, y), xt), 3e-5)
    if std == "bounded":
        assert bool((found.stddev >= 0.05).all())


def test_the_two_standard_deviations_differ() -> None:
    bounded, free = built(lambda: small_cmanp(std="bounded")), built(lambda: small_cmanp(std="exp"))
    x, y, xt = task()
    one, other = (m.query(m.condition(x, y), xt) for m in (bounded, free))
    torch.testing.assert_close(one.mean, other.mean)
    raw = other.stddev.log()
    torch.testing.assert_close(one.stddev, 0.05 + 0.95 * raw.exp().log1p())


# Compiling


@pytest.mark.compiles
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # the compiler's own
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize(  # that every model's loss compiles is a law of its own (test_losses.py)
    "factory",
    [partial(small_cmanp, depth=1, embed_depth=1), pytest.param(factory_of("cnp"), marks=pytest.mark.slow)],
)
def test_a_training_step_in_chunks_compiles(factory: Factory) -> None:
    x, y, xt = (t.double() for t in task(12))
    yt = torch.randn(2, 7, DIM_Y).double()
    torch._dynamo.reset()
    losses, grads = [], []
    for compiled in (True, False):
        model = built(factory).double().requires_grad_(True).train()

        def loss(model: NeuralProcess = model) -> Tensor:
            out: Tensor = -model(x, y, xt, None, chunk=7).log_prob(yt).sum(-1).mean()
            return out

        optimiser = torch.optim.SGD(model.parameters(), lr=0.01)
        step = torch.compile(loss, backend="aot_eager") if compiled else loss
        for _ in range(2):
            optimiser.zero_grad()
            value = step()
            value.backward()
            optimiser.step()
        losses.append(value.detach())
        grads.append([p.grad for p in model.parameters()])
    torch.testing.assert_close(losses[0], losses[1], atol=1e-8, rtol=0)
    for found, expected in zip(*grads, strict=True):
        torch.testing.assert_close(found, expected, atol=1e-7, rtol=1e-7)


@pytest.mark.compiles
@pytest.mark.parametrize(
    "factory",
    [
        partial(small_cmanp, depth=1, embed_depth=1),
        pytest.param(factory_of("cnp"), marks=pytest.mark.slow),
        pytest.param(partial(factory_of("lbanp"), depth=1), marks=pytest.mark.slow),
    ],
)  # every kind of state
def test_conditioning_and_querying_compile(factory: Factory) -> None:
    model = built(factory)
    x, y, xt = task(12)

    def predict(x: Tensor, y: Tensor, xt: Tensor) -> Tensor:
        mean: Tensor = model.query(model.condition(x, y, chunk=7), xt).mean
        return mean

    torch._dynamo.reset()
    compiled = torch.compile(predict, backend="eager")
    for n in (x.shape[1], 8):  # sizes become symbols at the second
        points = x[:, :n], y[:, :n], xt
        torch.testing.assert_close(compiled(*points), predict(*points), atol=1e-5, rtol=0)

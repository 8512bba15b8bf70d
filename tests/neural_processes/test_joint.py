"""Joint predictions: the chain rule by hand, conditioning anew on all that came before each target."""

from math import log, pi
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from constmem.neural_processes import NeuralProcess, Scales, StoredPoints
from constmem.neural_processes.joint import joint_log_prob, sample_jointly
from constmem.neural_processes.states import StoringProcess
from tests.conftest import Refuses
from tests.laws.models import POINT_MODELS, data, ragged, small

BLOCKS = (1, 4, 9)  # of six targets: one by one, with a rest, and more than there are
NOISE = 0.5


@pytest.fixture(params=[name for name in POINT_MODELS if name not in ("cmanp-calibrated", "cmanp-joint")])
def model(request: pytest.FixtureRequest) -> Any:
    return small(request.param).requires_grad_(False)


def log_density(predicted: Any, y: Tensor) -> np.ndarray:
    """Of the points of a block together, by numpy: of a mixture, given each component, by their weights."""
    parts = getattr(predicted, "components", predicted)
    mean, std = (t.numpy() for t in (parts.mean, parts.stddev))
    value = y.numpy() if mean.ndim == 3 else y.numpy()[:, :, None]
    terms = -0.5 * ((value - mean) / std) ** 2 - np.log(std) - 0.5 * log(2 * pi)
    if mean.ndim == 3:
        return terms.sum((1, 2))
    return np.logaddexp.reduce(terms.sum((1, 3)) + predicted.log_weight[:, 0].numpy(), axis=-1)


def by_hand(model: NeuralProcess, x: Tensor, y: Tensor, xt: Tensor, yt: Tensor, block: int) -> np.ndarray:
    total = np.zeros(len(x))
    for i in range(0, xt.shape[1], block):
        known = model.condition(torch.cat([x, xt[:, :i]], 1), torch.cat([y, yt[:, :i]], 1))
        total += log_density(model.query(known, xt[:, i : i + block]), yt[:, i : i + block])
    return total


@pytest.mark.parametrize("block", BLOCKS)
def test_the_joint_log_probability_is_the_chain_rules(model: NeuralProcess, block: int) -> None:
    x, y, xt, yt = data()
    found = joint_log_prob(model, model.condition(x, y), xt, yt, block=block)
    np.testing.assert_allclose(found, by_hand(model, x, y, xt, yt, block), atol=1e-7)


def test_the_order_of_targets_matters_unless_they_are_predicted_at_once(model: NeuralProcess) -> None:
    x, y, xt, yt = data()
    state, order = model.condition(x, y), [3, 0, 5, 1, 4, 2]
    turned = xt[:, order], yt[:, order]
    found, other = joint_log_prob(model, state, xt, yt), joint_log_prob(model, state, *turned)
    assert (found - other).abs().min() > 1e-6
    np.testing.assert_allclose(other, by_hand(model, x, y, *turned, 1), atol=1e-7)
    at_once = [joint_log_prob(model, state, *points, block=6) for points in ((xt, yt), turned)]
    torch.testing.assert_close(*at_once, atol=1e-9, rtol=0)


def test_an_empty_state_and_ragged_contexts_are_no_different(model: NeuralProcess) -> None:
    x, y, xt, yt = data()
    nothing = joint_log_prob(model, model.empty(2), xt, yt)
    np.testing.assert_allclose(nothing, by_hand(model, x[:, :0], y[:, :0], xt, yt, 1), atol=1e-7)
    mask = ragged(11, [4, 11])
    found = joint_log_prob(model, model.condition(x, y, mask=mask), xt, yt)
    for b in range(2):
        one, real = slice(b, b + 1), mask[b]
        expected = by_hand(model, x[one, real], y[one, real], xt[one], yt[one], 1)
        np.testing.assert_allclose(found[one], expected, atol=1e-7)


def drawn_by_hand(
    model: NeuralProcess, x: Tensor, y: Tensor, xt: Tensor, *, samples: int, block: int, seed: int
) -> Tensor:
    """All samples of all tasks, each conditioned anew before every block, from the same random numbers."""
    random, b = torch.Generator().manual_seed(seed), len(x)
    ys = torch.zeros(samples * b, 0, model.dim_y, dtype=torch.float64)
    for i in range(0, xt.shape[1], block):
        here = xt[:, i : i + block]
        parts, mixtures = [], []
        for k in range(samples * b):
            task = slice(k % b, k % b + 1)
            seen = torch.cat([x[task], xt[task, :i]], 1), torch.cat([y[task], ys[k : k + 1]], 1)
            predicted: Any = model.query(model.condition(*seen), here[task])
            mixtures.append(predicted)
            parts.append(getattr(predicted, "components", predicted))
        means, stds = torch.cat([p.mean for p in parts]), torch.cat([p.stddev for p in parts])
        if means.ndim == 4:  # one component for a block of a task
            weights = torch.cat([p.log_weight[:, 0].exp() for p in mixtures])
            place = torch.rand(samples * b, 1, 1, generator=random, dtype=means.dtype).flatten()
            edges = zip(weights.cumsum(1)[:, :-1], place, strict=True)
            pick = torch.tensor([sum(bool(p > edge) for edge in row) for row, p in edges])
            rows = torch.arange(samples * b)
            means, stds = means[rows, :, pick], stds[rows, :, pick]
        ys = torch.cat([ys, means + stds * torch.randn(means.shape, generator=random, dtype=means.dtype)], 1)
    return ys.unflatten(0, (samples, b))


@pytest.mark.parametrize("block", [1, 4])
def test_samples_are_drawn_target_by_target_given_those_before(model: NeuralProcess, block: int) -> None:
    x, y, xt, _ = data(m=5)
    state, before = model.condition(x, y), model.condition(x, y)
    random = torch.Generator().manual_seed(7)
    found = sample_jointly(model, state, xt, samples=3, block=block, generator=random)
    assert found.shape == (3, 2, 5, 2)
    expected = drawn_by_hand(model, x, y, xt, samples=3, block=block, seed=7)
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=0)
    for name, tensor in state.tensors().items():
        assert torch.equal(tensor, before.tensors()[name])


@pytest.mark.parametrize("name", ["cmanp", "cnp", "np"])
def test_constant_models_go_on_in_constant_memory(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = small(name).requires_grad_(False)
    x, y, xt, yt = data(m=30)
    sizes: list[int] = []
    update = model.update

    def noted(*args: Any) -> Any:
        sizes.append(update(*args).nbytes)
        return update(*args)

    monkeypatch.setattr(model, "update", noted)
    joint_log_prob(model, model.condition(x, y), xt, yt)
    assert len(sizes) == 29  # what follows the last target is not needed
    assert len(set(sizes)) == 1


class Constant(StoringProcess[Tensor]):
    """Exact: outputs are one unknown number, N(0, 1) a priori, seen with a noise of 0.5."""

    name = "constant"

    def __init__(self) -> None:
        super().__init__(dim_x=1, dim_y=1)
        self.double().eval()

    def read(self, state: StoredPoints) -> Tensor:
        precision = 1 + state.count.double() / NOISE**2
        return torch.stack([state.y.sum((1, 2)) / NOISE**2 / precision, 1 / precision + NOISE**2], -1)

    def decode(self, memory: Tensor, xt: Tensor) -> tuple[Tensor, Tensor]:
        mean, variance = memory[:, None, :, None].expand(-1, xt.shape[1], -1, -1).unbind(2)
        return mean, variance.sqrt()


def exact_joint(m: int) -> torch.distributions.MultivariateNormal:
    covariance = torch.ones(m, m, dtype=torch.float64) + NOISE**2 * torch.eye(m, dtype=torch.float64)
    return torch.distributions.MultivariateNormal(torch.zeros(m, dtype=torch.float64), covariance)


def test_an_exact_process_has_its_exact_joint_log_probability_in_any_order() -> None:
    model, y = Constant(), torch.randn(3, 6, 1, dtype=torch.float64)
    x = torch.zeros_like(y)
    expected = exact_joint(6).log_prob(y[..., 0])
    for order in ([0, 1, 2, 3, 4, 5], [4, 2, 5, 0, 3, 1]):
        found = joint_log_prob(model, model.empty(3), x, y[:, order])
        torch.testing.assert_close(found, expected, atol=1e-10, rtol=0)
    seen = model.condition(x[:, :2], y[:, :2])
    rest = expected - exact_joint(2).log_prob(y[:, :2, 0])
    torch.testing.assert_close(joint_log_prob(model, seen, x[:, 2:], y[:, 2:]), rest, atol=1e-10, rtol=0)


def test_samples_of_an_exact_process_have_its_covariance() -> None:
    model, x = Constant(), torch.zeros(1, 3, 1, dtype=torch.float64)
    random = torch.Generator().manual_seed(0)
    found = sample_jointly(model, model.empty(), x, samples=20_000, generator=random)[:, 0, :, 0]
    expected = exact_joint(3)
    torch.testing.assert_close(found.mean(0), expected.mean, atol=0.03, rtol=0)
    torch.testing.assert_close(found.T.cov(), expected.covariance_matrix, atol=0.05, rtol=0)
    alone = sample_jointly(model, model.empty(), x, samples=20_000, block=3, generator=random)[:, 0, :, 0]
    assert alone.T.cov()[0, 1].abs() < 0.05  # of one block without a latent: nothing in common


def test_log_probabilities_and_samples_are_in_the_units_of_the_data(model: NeuralProcess) -> None:
    x, y, xt, yt = data()
    plain = joint_log_prob(model, model.condition(x, y), xt, yt)
    scales = {"x_mean": [5.0, -2.0], "x_std": [3.0, 0.5], "y_mean": [1.0, 9.0], "y_std": [2.0, 4.0]}
    shift, scale = (torch.tensor(scales[name], dtype=torch.float64) for name in ("y_mean", "y_std"))
    moved = [
        torch.tensor(scales["x_mean"]) + torch.tensor(scales["x_std"]) * x,
        shift + scale * y,
        torch.tensor(scales["x_mean"]) + torch.tensor(scales["x_std"]) * xt,
        shift + scale * yt,
    ]
    random = torch.Generator().manual_seed(0)
    drawn = sample_jointly(model, model.condition(x, y), xt, samples=2, generator=random)
    model.set_scales(Scales(**scales))
    state = model.condition(moved[0], moved[1])
    found = joint_log_prob(model, state, moved[2], moved[3])
    torch.testing.assert_close(found, plain - 6 * scale.log().sum(), atol=1e-6, rtol=0)
    again = sample_jointly(model, state, moved[2], samples=2, generator=random.manual_seed(0))
    torch.testing.assert_close(again, shift + scale * drawn, atol=1e-5, rtol=0)


def test_the_joint_log_probability_can_be_learned_from() -> None:
    model: Any = small("cmanp")
    x, y, xt, yt = data(m=3)
    joint_log_prob(model, model.condition(x, y), xt, yt).sum().backward()
    assert all(p.grad is not None and bool(p.grad.abs().sum() > 0) for p in model.parameters())
    weight, step = model.embed.layers[0].weight, 1e-5
    slope = weight.grad[0, 0].item()
    with torch.no_grad():
        found = []
        for sign in (1, -1):
            weight[0, 0] += sign * step
            found.append(joint_log_prob(model, model.condition(x, y), xt, yt).sum().item())
            weight[0, 0] -= sign * step
    assert (found[0] - found[1]) / (2 * step) == pytest.approx(slope, rel=1e-4)


@pytest.mark.parametrize("m", [0, 1])
def test_few_targets_are_no_error(model: NeuralProcess, m: int) -> None:
    x, y, xt, yt = data(m=m)
    state = model.condition(x, y)
    assert joint_log_prob(model, state, xt, yt).shape == (2,)
    assert sample_jointly(model, state, xt, samples=2).shape == (2, 2, m, 2)


def test_what_cannot_be_is_refused(refuses: Refuses) -> None:
    model = small("cmanp")
    x, y, xt, yt = data()
    state = model.condition(x, y)
    with pytest.raises(ValueError, match="block must be"):
        joint_log_prob(model, state, xt, yt, block=0)
    with pytest.raises(ValueError, match="samples must be"):
        sample_jointly(model, state, xt, samples=0)
    with refuses(ValueError, "yt has"):
        joint_log_prob(model, state, xt, yt[:, :4])
    with refuses(ValueError, "xt is a batch of 1"):
        joint_log_prob(model, state, xt[:1], yt[:1])

"""Distributions on grey levels against sums by hand, and coverage where the law is known."""

from math import erf, exp, log, sqrt
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.distributions import Categorical, Normal

from constmem.data import Task
from constmem.evaluation import crps_of, evaluate, pit_values
from constmem.neural_processes import CMANP, Scales
from constmem.neural_processes.heads import LevelMixture, level_log_prob
from constmem.neural_processes.joint import SampleMixture, joint_log_prob, sample_jointly
from constmem.training import fit_dataset
from tests.laws.models import LEARNER, LEAST, data, small

LEVELS = 16  # few enough for loops
VALUES = [-0.5 + i / (LEVELS - 1) for i in range(LEVELS)]


def mixture(k: int = 3, y: int = 2, levels: int = LEVELS, seed: int = 0) -> LevelMixture:
    random = torch.Generator().manual_seed(seed)
    size: dict[str, Any] = {"generator": random, "dtype": torch.float64}
    location = 0.6 * torch.randn(2, 3, k, y, **size)
    scale = 0.002 + 0.1 * torch.rand(2, 3, k, y, **size)
    return LevelMixture(location, scale, torch.randn(2, 3, k, **size).log_softmax(-1), levels=levels)


def sigmoid(z: float) -> float:
    return 1 / (1 + exp(-z)) if z > -700 else 0.0


def by_hand(dist: LevelMixture, at: tuple[int, int, int]) -> np.ndarray:
    """Of every component of one channel at one point: the probability of each level, (k, levels)."""
    b, m, y = at
    found = []
    for location, scale in zip(
        dist.location[b, m, :, y].tolist(), dist.scale[b, m, :, y].tolist(), strict=True
    ):
        edges = [0.0, *(sigmoid((v + 0.5 / (LEVELS - 1) - location) / scale) for v in VALUES[:-1]), 1.0]
        found.append(np.diff(edges))
    return np.array(found)


def test_probabilities_moments_and_quantiles_are_those_of_sums_by_hand() -> None:
    dist = mixture()
    weight = dist.log_weight.exp().numpy()
    quarter = dist.icdf(torch.tensor(0.25))
    for at in np.ndindex(2, 3, 2):
        expected = weight[at[:2]] @ by_hand(dist, at)
        np.testing.assert_allclose(dist.probabilities[at], expected, atol=1e-12)
        mean = expected @ VALUES
        assert dist.mean[at].item() == pytest.approx(mean)
        assert dist.variance[at].item() == pytest.approx(expected @ (np.array(VALUES) - mean) ** 2)
        assert quarter[at].item() == pytest.approx(VALUES[int((expected.cumsum() < 0.25).sum())])
        for i, value in enumerate(VALUES):
            y = torch.full((2, 3, 2), value, dtype=torch.float64)
            assert dist.cdf(y)[at].item() == pytest.approx(expected[: i + 1].sum())
            assert dist.below(y)[at].item() == pytest.approx(expected[:i].sum(), abs=1e-12)
            size = np.abs(np.subtract.outer(VALUES, VALUES))
            crps = expected @ np.abs(np.array(VALUES) - value) - 0.5 * expected @ size @ expected
            assert crps_of(dist, y)[at].item() == pytest.approx(crps)


def test_the_levels_of_a_points_channels_belong_together() -> None:
    dist = mixture()
    weight, total = dist.log_weight.exp().numpy(), np.zeros((2, 3))
    for i, j in np.ndindex(LEVELS, LEVELS):
        y = torch.tensor([VALUES[i], VALUES[j]], dtype=torch.float64).expand(2, 3, 2)
        found = dist.log_prob(y).squeeze(-1).exp().numpy()
        total += found
        parts = by_hand(dist, (1, 2, 0))[:, i], by_hand(dist, (1, 2, 1))[:, j]
        assert found[1, 2] == pytest.approx(float(weight[1, 2] @ (parts[0] * parts[1])), abs=1e-12)
    np.testing.assert_allclose(total, 1.0, atol=1e-12)


def test_a_value_between_levels_counts_as_the_nearer_and_beyond_black_and_white_as_those() -> None:
    dist = mixture()
    for level, near in ((VALUES[3], VALUES[3] + 0.03), (VALUES[0], -7.0), (VALUES[-1], 2.0)):
        exact, other = (torch.full((2, 3, 2), v, dtype=torch.float64) for v in (level, near))
        torch.testing.assert_close(dist.log_prob(other), dist.log_prob(exact))
        torch.testing.assert_close(dist.cdf(other), dist.cdf(exact))


@pytest.mark.parametrize("scale", [1e-4, 1.0, 1e3])
@pytest.mark.parametrize("location", [-1e4, 0.1, 1e4])
def test_the_sharpest_and_the_furthest_have_finite_probabilities_and_gradients(
    location: float, scale: float
) -> None:
    parts = [torch.full((1, 1, 1, 1), float(v), requires_grad=True) for v in (location, scale)]
    dist = LevelMixture(*parts, torch.zeros(1, 1, 1), levels=256)
    for value in (-0.5, 0.0, 0.5):
        found = dist.log_prob(torch.full((1, 1, 1), value)).sum()
        assert bool(found.isfinite())
        assert found <= 0
        assert all(bool(g.isfinite().all()) for g in torch.autograd.grad(found, parts))


def test_samples_are_levels_as_often_as_they_are_likely() -> None:
    dist = mixture(y=1)
    drawn = dist.sample((40_000,), generator=torch.Generator().manual_seed(1))
    counts = torch.stack([(drawn - value).abs().lt(1e-9).double().mean(0) for value in VALUES], -1)
    torch.testing.assert_close(counts.sum(-1), torch.ones(2, 3, 1, dtype=torch.float64))
    torch.testing.assert_close(counts, dist.probabilities, atol=0.012, rtol=0)
    again = dist.sample((40_000,), generator=torch.Generator().manual_seed(1))
    assert torch.equal(drawn, again)


def phi(z: float) -> float:
    return 0.5 * (1 + erf(z / sqrt(2)))


@pytest.mark.parametrize(("mean", "std"), [(0.1, 0.05), (-0.6, 0.3), (0.45, 0.02)])
def test_a_normal_gives_levels_its_integrals_and_all_of_them_one(mean: float, std: float) -> None:
    dist = Normal(*(torch.full((1, 1, 1), v, dtype=torch.float64) for v in (mean, std)))
    total = 0.0
    for i, value in enumerate(VALUES):
        low = 0.0 if i == 0 else phi((value - 0.5 / (LEVELS - 1) - mean) / std)
        high = 1.0 if i == LEVELS - 1 else phi((value + 0.5 / (LEVELS - 1) - mean) / std)
        found = level_log_prob(dist, torch.full((1, 1, 1), value), LEVELS).exp().item()
        assert found == pytest.approx(high - low, abs=1e-9)
        total += found
    assert total == pytest.approx(1.0, abs=1e-6)
    far = level_log_prob(Normal(dist.mean + 50, dist.stddev), torch.zeros(1, 1, 1), LEVELS)
    assert -1e8 < far.item() < -1e3  # not minus infinity, which differences of 1 would give


def test_a_mixture_of_normals_gives_levels_the_mean_of_theirs() -> None:
    means, stds = torch.tensor([[[[-0.2], [0.3]]]]), torch.tensor([[[[0.1], [0.05]]]])
    y = torch.full((1, 1, 1), VALUES[5])
    each = [level_log_prob(Normal(means[:, :, k], stds[:, :, k]), y, LEVELS).exp() for k in (0, 1)]
    found = level_log_prob(SampleMixture(means, stds), y, LEVELS).exp()
    torch.testing.assert_close(found, (each[0] + each[1]) / 2)
    with pytest.raises(TypeError, match="Categorical"):
        level_log_prob(Categorical(torch.ones(2)), y, LEVELS)
    with pytest.raises(ValueError, match="16 levels, the values are on 256"):
        level_log_prob(mixture(), torch.zeros(2, 3, 2), 256)


# Coverage where the law is known


class Knows(CMANP):
    """A model that predicts one law everywhere, whatever it has seen."""

    name = "cmanp"
    law: tuple[Tensor, Tensor, Tensor]

    def distribution(self, mean: Tensor, std: Tensor, *log_weight: Tensor) -> LevelMixture:
        del std, log_weight
        b, m = mean.shape[:2]
        location, scale, weight = (t.expand(b, m, *t.shape) for t in self.law)
        return LevelMixture(location, scale, weight, levels=256)


def knowing(black: float, width: float = 0.05) -> Knows:
    """Black for sure, or a grey around the middle."""
    model = Knows(dim_x=2, dim_y=1, levels=256, components=2, **LEAST)
    location, scale = torch.tensor([[-9.0], [0.0]]), torch.tensor([[0.05], [width]])
    model.law = location, scale, torch.tensor([black, 1 - black]).log()
    return model


def drawn_from(model: Knows, points: int = 20_000) -> Task:
    x = torch.zeros(1, points, 2)
    y = model.query(model.empty(), x).sample(generator=torch.Generator().manual_seed(3))
    return Task(x[:, :1], y[:, :1], x, y)


@pytest.mark.parametrize("black", [0.1, 0.6, 0.97])
def test_intervals_hold_what_they_say_however_likely_black_is(black: float) -> None:
    model = knowing(black)
    task = drawn_from(model)
    scores = evaluate(model, [task], levels=256)
    assert float((task.yt == -0.5).float().mean()) == pytest.approx(black, abs=0.02)
    for level, share in scores.coverage.items():
        assert share == pytest.approx(float(level), abs=0.015), level
    assert scores.level_log_likelihood == pytest.approx(scores.log_likelihood)
    grey = model.query(model.empty(), torch.zeros(1, 1, 2)).probabilities.double()
    assert scores.log_likelihood == pytest.approx(float((grey * grey.clamp_min(1e-30).log()).sum()), abs=0.05)
    pits = pit_values(model, [task])
    for place in (0.1, 0.5, 0.9):
        assert float((pits <= place).float().mean()) == pytest.approx(place, abs=0.015)


@pytest.mark.parametrize(("predicted", "found"), [((0.8, 0.05), "more black"), ((0.5, 0.2), "wider")])
def test_a_law_that_is_not_the_datas_is_seen_to_be_wrong(predicted: Any, found: str) -> None:
    task, other = drawn_from(knowing(0.5)), knowing(*predicted)
    coverage = evaluate(other, [task]).coverage
    assert max(abs(share - float(level)) for level, share in coverage.items()) > 0.03, found


# In a model


def test_joint_predictions_of_levels_are_the_chain_rules() -> None:
    model = small("cmanp-calibrated").requires_grad_(False)
    x, y, xt, _ = data(m=4)
    state = model.condition(x, y)
    drawn = sample_jointly(model, state, xt, samples=2, generator=torch.Generator().manual_seed(0))
    place = (drawn + 0.5) * 255
    torch.testing.assert_close(place, place.round(), atol=1e-6, rtol=0)
    total = torch.zeros(2, dtype=torch.float64)
    for i in range(4):
        known = torch.cat([x, xt[:, :i]], 1), torch.cat([y, drawn[0, :, :i]], 1)
        here = model.query(model.condition(*known), xt[:, i : i + 1])
        total += here.log_prob(drawn[0, :, i : i + 1]).flatten()
    torch.testing.assert_close(joint_log_prob(model, state, xt, drawn[0]), total, atol=1e-7, rtol=0)


@pytest.mark.once
def test_a_small_model_learns_how_likely_black_is_and_its_intervals_hold() -> None:
    """Left of the middle 90 % are black, right of it 20 %; the rest is of any grey."""
    torch.manual_seed(0)
    random = torch.Generator().manual_seed(1)
    model = CMANP(dim_x=1, dim_y=1, levels=256, components=6, **LEARNER)

    def task(b: int, n: int) -> Task:
        x = 2 * torch.rand(b, n, 1, generator=random) - 1
        black = torch.rand(b, n, 1, generator=random) < torch.where(x < 0, 0.9, 0.2)
        grey = torch.randint(256, (b, n, 1), generator=random) / 255 - 0.5
        y = torch.where(black, -0.5, grey)
        return Task(x[:, :4], y[:, :4], x[:, 4:], y[:, 4:])

    optimiser = torch.optim.Adam(model.parameters(), lr=4e-3)
    for _ in range(200):
        given = task(16, 68)
        loss = model.loss(given.xc, given.yc, given.xt, given.yt)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    scores = evaluate(model, [task(64, 204)], levels=256)
    assert 0.47 < scores.coverage["0.5"] < 0.53
    assert 0.87 < scores.coverage["0.9"] < 0.93
    best = 0.0  # nats: minus the entropy
    for share in (0.9, 0.2):
        black, grey = share + (1 - share) / 256, (1 - share) / 256
        best += 0.5 * (black * log(black) + 255 * grey * log(grey))
    assert best - 0.15 < scores.log_likelihood < best + 0.1
    normal = evaluate(CMANP(dim_x=1, dim_y=1, **LEARNER), [task(64, 204)], levels=256)
    assert normal.level_log_likelihood is not None
    assert normal.level_log_likelihood < scores.log_likelihood - 1  # untrained, and no normal says so much


def test_levels_are_refused_where_there_are_none(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="256 grey levels of pixels, and these data are none"):
        fit_dataset("gp", "cmanp-calibrated", out=tmp_path / "gp", steps=2)
    with pytest.raises(ValueError, match="4 grey levels of pixels, and these data have 256"):
        fit_dataset("digits", "cmanp-tiny", change=["model.levels=4"], out=tmp_path / "four", steps=2)
    model = small("cmanp-calibrated")
    with pytest.raises(ValueError, match="no other units"):
        model.set_scales(Scales(x_mean=[0.0] * 2, x_std=[1.0] * 2, y_mean=[0.0] * 2, y_std=[1.0] * 2))
    for settings, words in (
        ({"levels": 1}, "levels must be 2 or more"),
        ({"levels": 8, "moments": 4}, "kinds of predictions"),
        ({"levels": 8, "components": 0}, "components"),
    ):
        with pytest.raises(ValueError, match=words):
            CMANP(dim_x=1, dim_y=1, **settings)

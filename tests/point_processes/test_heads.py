"""The heads of event models against numpy, quadrature and limits."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from constmem.point_processes.heads import (
    GapFeatures,
    GapHead,
    LogNormalMixture,
    MarkEmbedding,
    MarkHead,
    sinusoids,
)


def mixture(
    batch: tuple[int, ...] = (), k: int = 3, seed: int = 0, dtype: torch.dtype = torch.float64
) -> LogNormalMixture:
    random = torch.Generator().manual_seed(seed)
    weights, loc, raw = (torch.randn(*batch, k, generator=random, dtype=dtype) for _ in range(3))
    return LogNormalMixture(weights, 1.5 * loc, 0.3 + 0.7 * raw.abs())


def grid(low: float = -14.0, high: float = 14.0, n: int = 40_001) -> tuple[Tensor, float]:
    u = torch.linspace(low, high, n, dtype=torch.float64)
    return u, float(u[1] - u[0])


def test_the_density_is_the_sum_of_log_normal_densities() -> None:
    gap = mixture()
    w, m, s = (np.asarray(t) for t in (gap.log_weights.exp(), gap.loc, gap.scale))
    for x in (1e-3, 0.4, 1.0, 17.0):
        each = np.exp(-((math.log(x) - m) ** 2) / (2 * s**2)) / (x * s * math.sqrt(2 * math.pi))
        assert float(gap.log_prob(torch.tensor(x, dtype=torch.float64))) == pytest.approx(
            math.log((w * each).sum()), rel=1e-9
        )
    assert w.sum() == pytest.approx(1.0)


def test_the_density_integrates_to_one_and_to_the_cdf() -> None:
    gap = mixture()
    u, step = grid()
    mass = (gap.log_prob(u.exp()) + u).exp() * step  # dx = x du
    assert float(mass.sum()) == pytest.approx(1.0, abs=1e-8)
    at = 25_000
    assert float(mass[: at + 1].sum() - mass[at] / 2) == pytest.approx(float(gap.cdf(u[at].exp())), abs=1e-7)


def test_mean_and_variance_are_those_of_the_density() -> None:
    gap = mixture()
    u, step = grid()
    x = u.exp()
    mass = (gap.log_prob(x) + u).exp() * step
    assert float(gap.mean) == pytest.approx(float((mass * x).sum()), rel=1e-6)
    assert float(gap.variance) == pytest.approx(float((mass * x**2).sum() - (mass * x).sum() ** 2), rel=1e-5)


def test_hazard_is_density_over_survival() -> None:
    gap = mixture((4,))
    x = torch.tensor([0.1, 0.9, 2.0, 30.0], dtype=torch.float64)
    torch.testing.assert_close(gap.hazard(x), gap.log_prob(x).exp() / (1 - gap.cdf(x)))
    torch.testing.assert_close(gap.survival(x), 1 - gap.cdf(x))


def test_far_tails_stay_finite_where_the_cdf_is_one() -> None:
    gap = LogNormalMixture(torch.zeros(1), torch.zeros(1), torch.ones(1))  # float32
    x = torch.tensor(1e20)  # log x = 46 deviations out
    z = 20 * math.log(10)
    series = -0.5 * z**2 - math.log(z) - 0.5 * math.log(2 * math.pi) + math.log(1 - 1 / z**2)
    assert float(gap.cdf(x)) == 1.0
    assert float(gap.log_survival(x)) == pytest.approx(series, rel=1e-4)
    assert float(gap.log_hazard(x)) == pytest.approx(
        math.log(z) - z, abs=1e-2
    )  # hazard z / x of a log-normal


def test_a_zero_gap_has_a_finite_log_density_and_gradient() -> None:
    loc = torch.zeros(3, requires_grad=True)
    gap = LogNormalMixture(torch.zeros(3), loc, torch.ones(3))
    value = gap.log_prob(torch.tensor(0.0))
    value.backward()
    assert torch.isfinite(value)
    assert loc.grad is not None
    assert torch.isfinite(loc.grad).all()
    assert float(gap.cdf(torch.tensor(0.0)).detach()) == pytest.approx(0.0, abs=1e-30)


@pytest.mark.parametrize("level", [1e-12, 1e-3, 0.3, 0.5, 0.9, 1 - 1e-9])
def test_quantiles_undo_the_cdf(level: float) -> None:
    gap = mixture((5,))
    p = torch.full((5,), level, dtype=torch.float64)
    x = gap.icdf(p)
    if level < 0.5:
        torch.testing.assert_close(gap.log_cdf(x), p.log(), rtol=1e-9, atol=1e-9)
    else:
        torch.testing.assert_close(gap.log_survival(x), torch.log1p(-p), rtol=1e-6, atol=1e-9)


def test_quantiles_of_nothing_and_everything_are_the_ends() -> None:
    gap = mixture()
    ends = gap.icdf(torch.tensor([0.0, 1.0, 1.5], dtype=torch.float64))
    assert ends[0] == 0
    assert ends[1] == math.inf
    assert ends[2].isnan()


def test_the_median_of_one_log_normal_is_its_scale() -> None:
    gap = LogNormalMixture(torch.zeros(2, 1), torch.tensor([[0.7], [-3.0]]), torch.ones(2, 1))
    torch.testing.assert_close(gap.median, torch.tensor([0.7, -3.0]).exp())


def test_samples_follow_the_cdf_and_the_generator() -> None:
    gap = mixture((2,))
    draw = gap.sample((20_000,), generator=torch.Generator().manual_seed(1))
    again = gap.sample((20_000,), generator=torch.Generator().manual_seed(1))
    assert torch.equal(draw, again)
    assert draw.shape == (20_000, 2)
    pit = gap.cdf(draw).sort(0).values
    even = (torch.arange(20_000, dtype=torch.float64) + 0.5) / 20_000
    assert float((pit - even[:, None]).abs().max()) < 1.63 / math.sqrt(20_000)  # KS at 1 %


def test_a_part_of_a_batch_is_the_mixture_there() -> None:
    gap = mixture((3, 4))
    x = torch.rand(3, 4, dtype=torch.float64) + 0.1
    torch.testing.assert_close(gap[1].log_prob(x[1]), gap.log_prob(x)[1])
    torch.testing.assert_close(gap[:, 2].log_prob(x[:, 2]), gap.log_prob(x)[:, 2])
    mask = torch.rand(3, 4) < 0.5
    torch.testing.assert_close(gap[mask].log_prob(x[mask]), gap.log_prob(x)[mask])


def test_the_head_is_in_the_units_of_the_data() -> None:
    """In minutes instead of hours densities shrink by sixty, and nothing else changes."""
    head = GapHead(dim=5, hidden=8, components=4).double()
    features = torch.randn(7, 5, dtype=torch.float64)
    gaps = torch.rand(7, dtype=torch.float64) + 0.01
    std = torch.tensor(0.8, dtype=torch.float64)
    hours = head(features, torch.tensor(0.3, dtype=torch.float64), std)
    minutes = head(features, torch.tensor(0.3 + math.log(60), dtype=torch.float64), std)
    torch.testing.assert_close(minutes.log_prob(60 * gaps), hours.log_prob(gaps) - math.log(60))
    torch.testing.assert_close(minutes.mean, 60 * hours.mean)


def test_the_head_cannot_leave_its_range_of_scales() -> None:
    head = GapHead(dim=1, hidden=4, components=2)
    for size in (1e6, -1e6):
        with torch.no_grad():
            gap = head(torch.full((1, 1), size), torch.tensor(0.0), torch.tensor(1.0))
        assert math.exp(-5.001) < float(gap.scale.min()) <= float(gap.scale.max()) < math.exp(1.001)


def test_marks_depend_on_the_gap_only_if_asked_to() -> None:
    features, gaps = torch.randn(6, 5), torch.randn(6)
    for given in (True, False):
        head = MarkHead(dim=5, hidden=16, num_marks=3, given_gap=given)
        here, there = head(features, gaps), head(features, gaps + 1)
        torch.testing.assert_close(here.exp().sum(-1), torch.ones(6))
        assert torch.equal(here, there) != given
        assert torch.isfinite(head(features, torch.full((6,), torch.nan))).all()


def test_unknown_and_absent_marks_have_vectors_of_their_own() -> None:
    table = MarkEmbedding(num_marks=3, dim=4)
    found = table(torch.tensor([0, 1, 2, -1, -2]))
    assert torch.equal(found, table.table)


def test_sinusoids_of_late_times_keep_their_digits() -> None:
    late = torch.tensor([1e9, 1e9 + 0.5], dtype=torch.float64)
    found = sinusoids(late, 6)
    assert found.dtype == torch.float64
    assert found[1, 0].item() == pytest.approx(math.sin(1e9 + 0.5), abs=1e-6)
    assert found[1, 3].item() == pytest.approx(math.cos((1e9 + 0.5) * 1e4 ** (-1 / 3)), abs=1e-6)


def test_no_gap_is_not_an_average_gap() -> None:
    features = GapFeatures(dim=4)
    none, average = features(torch.tensor([torch.nan, 0.0]))
    assert not torch.allclose(none, average)
    assert torch.isfinite(none).all()

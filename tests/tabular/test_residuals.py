"""The law of residuals: shapes that a Student's t has not, in a state that merges, is saved and forgets."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy import integrate, stats

from constmem import StreamingRegressor
from constmem.tabular.answers import Shape, mixed_log_density, mixed_quantiles
from constmem.tabular.inputs import frame_of
from constmem.tabular.residuals import _folds, shipped


def rounded(rows: int = 600, seed: int = 0) -> tuple[Any, Any]:
    """A table whose targets are whole numbers: grades."""
    random = np.random.default_rng(seed)
    x = random.normal(size=(rows, 3))
    return x, np.round(1.5 * x[:, 0] + 0.5 * x[:, 1] + 0.6 * random.normal(size=rows))


@pytest.fixture(scope="module")
def fitted() -> StreamingRegressor:
    return StreamingRegressor(size=64).fit(*rounded())


def test_whole_numbers_are_recognised_as_such(fitted: StreamingRegressor) -> None:
    x, y = rounded(200, seed=1)
    plain = StreamingRegressor(size=64, pretrained=False).fit(*rounded())
    gained = fitted.log_density(x, y).mean() - plain.log_density(x, y).mean()
    assert gained > 0.5
    assert np.array_equal(fitted.predict(x), plain.predict(x))  # means are the closed form's


def densities(of: StreamingRegressor, row: Any) -> tuple[Any, Any]:
    """A fine grid, and the density of a row's target on it."""
    grid = np.linspace(-20, 20, 16_001)
    return grid, np.exp(of.log_density(np.repeat(row[None], len(grid), 0), grid))


def test_a_density_integrates_to_one_and_quantiles_are_its(fitted: StreamingRegressor) -> None:
    for row in rounded(2, seed=2)[0]:
        grid, density = densities(fitted, row)
        below = integrate.cumulative_trapezoid(density, grid)
        assert below[-1] == pytest.approx(1.0, abs=2e-3)
        levels = (0.2, 0.5, 0.9)
        for level, found in zip(levels, fitted.predict_quantiles(row[None], levels)[0], strict=True):
            assert np.interp(found, grid[1:], below) == pytest.approx(level, abs=2e-3)


def test_the_deviation_is_the_root_of_the_mean_square_around_the_mean(fitted: StreamingRegressor) -> None:
    (row,) = rounded(1, seed=3)[0]
    mean, deviation = fitted.predict(row[None], return_std=True)
    grid, density = densities(fitted, row)
    found = integrate.trapezoid((grid - mean[0]) ** 2 * density, grid)
    assert deviation[0] == pytest.approx(found**0.5, rel=0.01)
    assert mean == pytest.approx(fitted.predict(row[None]), rel=1e-12)


def test_shards_merge_to_the_law_of_all_rows(fitted: StreamingRegressor) -> None:
    x, y = rounded()
    shards = [fitted.spawn().partial_fit(x[i::3], y[i::3]) for i in range(3)]
    merged = shards[0].merge(shards[1]).merge(shards[2])
    new, grades = rounded(50, seed=4)
    assert np.allclose(merged.log_density(new, grades), fitted.log_density(new, grades), atol=1e-3)
    state, whole = (e.learner_.memory.residuals.state for e in (merged, fitted))
    assert torch.allclose(state.value, whole.value, atol=1e-6)
    assert torch.equal(state.count, whole.count)


def test_rows_one_at_a_time_give_the_same_law(fitted: StreamingRegressor) -> None:
    x, y = rounded(40, seed=5)
    slow, fast = (fitted.spawn() for _ in range(2))
    for i in range(40):
        slow.partial_fit(x[i : i + 1], y[i : i + 1])
        slow.predict_interval(x[:2])  # asking must not count rows twice
    fast.partial_fit(x, y)
    fast.predict_interval(x[:2])
    one, other = (e.learner_.memory.residuals.state for e in (slow, fast))
    assert torch.equal(one.count, other.count)
    assert torch.allclose(one.value, other.value, atol=1e-6)


def test_removed_rows_leave_no_trace(fitted: StreamingRegressor) -> None:
    x, y = rounded()
    less = fitted.spawn().partial_fit(x, y).remove(x[:20], y[:20])
    never = fitted.spawn().partial_fit(x[20:], y[20:])
    never.predict_interval(x[:2])
    one, other = (e.learner_.memory.residuals.state for e in (less, never))
    assert torch.allclose(one.value, other.value, atol=1e-5)
    assert torch.equal(one.count, other.count)


def test_removing_nearly_all_rows_forgets_the_law_and_says_so(fitted: StreamingRegressor) -> None:
    x, y = rounded(400, seed=6)
    few = fitted.spawn().partial_fit(x, y)
    with pytest.warns(UserWarning, match="forgotten with them"):
        few.remove(x[1:], y[1:])
    assert few.learner_.memory.residuals is None
    assert np.isfinite(few.predict_interval(x[:3])).all()


def test_a_saved_estimator_keeps_the_law(fitted: StreamingRegressor, tmp_path: Path) -> None:
    fitted.save(tmp_path / "one")
    again = StreamingRegressor.load(tmp_path / "one")
    x, y = rounded(20, seed=7)
    assert np.array_equal(again.log_density(x, y), fitted.log_density(x, y))
    assert again.partial_fit(x, y).learner_.memory.residuals is not None


def test_a_law_read_by_other_weights_is_left_out_with_a_warning(
    fitted: StreamingRegressor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fitted.save(tmp_path / "one")
    monkeypatch.setattr(type(shipped()), "fingerprint", lambda _: "other")
    with pytest.warns(UserWarning, match="other weights"):
        again = StreamingRegressor.load(tmp_path / "one")
    assert again.learner_.memory.residuals is None
    x, _ = rounded(20, seed=7)
    assert np.array_equal(again.predict(x), fitted.predict(x))


def test_several_targets_have_a_law_each() -> None:
    x, y = rounded(400)
    both = np.stack([y, x[:, 0] ** 2], 1)
    made = StreamingRegressor(size=64).fit(x, both)
    assert made.predict_interval(x[:5]).shape == (5, 2, 2)
    assert made.learner_.memory.residuals.state.batch == 2


def test_folds_are_even_and_belong_to_the_row_alone() -> None:
    x = torch.randn(4000, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    fold = _folds(x)
    assert torch.equal(_folds(x[100:110]), fold[100:110])
    assert all(900 < int((fold == i).sum()) < 1100 for i in range(4))
    steps = torch.arange(400, dtype=torch.float64)[:, None]
    assert all(60 < int((_folds(steps) == i).sum()) < 140 for i in range(4))
    assert int(_folds(torch.tensor([[0.0]]))) == int(_folds(torch.tensor([[-0.0]])))


def test_a_residual_does_not_know_its_own_target() -> None:
    x, y = (part[:200] for part in rounded())  # so few rows that their own targets show
    y = np.round(y + 3 * np.sin(3 * x[:, 2]))  # which a line does not explain
    fitted = StreamingRegressor(size=64).fit(x, y)
    learner, memory = fitted.learner_, fitted.learner_.memory
    inside, said = (learner._inside(t[:, None]) for t in (y, fitted.predict(x)))
    encoded = torch.from_numpy(learner.columns(frame_of(x)))
    left = inside - memory.residuals._before(memory.features(encoded), _folds(encoded))
    seen = inside - said
    assert float(left.square().mean()) > 1.05 * float(seen.square().mean())
    assert float(left.square().mean().sqrt()) == pytest.approx(float(memory.residuals.sigma), rel=1e-6)


@pytest.mark.parametrize("forget", [50, "window:300", "auto"])
def test_what_forgets_keeps_the_closed_forms_law(forget: Any) -> None:
    made = StreamingRegressor(size=64, forget=forget, warmup=150).partial_fit(*rounded(300))
    assert made.learner_.memory.residuals is None


def test_a_shape_agrees_with_sums_by_hand() -> None:
    normals = [[[-1.0, 2.0]]], [[[0.5, 0.1]]], [[[np.log(0.25), np.log(0.75)]]]
    one = Shape(np.zeros((1, 1)), *(np.array(t) for t in normals))
    y = np.array([[1.9]])
    normal = lambda m, s: np.exp(-0.5 * ((1.9 - m) / s) ** 2) / s / (2 * np.pi) ** 0.5  # noqa: E731
    by_hand = np.log(0.25 * normal(-1.0, 0.5) + 0.75 * normal(2.0, 0.1))
    assert mixed_log_density([one], np.ones(1), y)[0] == pytest.approx(by_hand)
    assert one.moment[0, 0] == pytest.approx(0.25 * (0.25 + 1) + 0.75 * (0.01 + 4))
    (quantile,) = mixed_quantiles([one, one], np.array([0.5, 0.5]), [0.5])
    assert one.cdf(quantile)[0, 0] == pytest.approx(0.5)


@pytest.mark.parametrize(("columns", "rows"), [(1, 128), (5, 400)])
def test_where_residuals_are_normal_nothing_is_lost(columns: int, rows: int) -> None:
    random = np.random.default_rng(columns)
    x = random.normal(size=(rows + 800, columns))
    noise = 0.3 * columns**0.5
    y = x @ random.normal(size=columns) + noise * random.normal(size=len(x))
    one = np.c_[x, np.ones(len(x))]
    covariance = np.linalg.inv(one[:rows].T @ one[:rows] / noise**2 + 1e-2 * np.eye(columns + 1))
    mean = one[rows:] @ covariance @ one[:rows].T @ y[:rows] / noise**2
    deviation = np.sqrt(noise**2 + ((one[rows:] @ covariance) * one[rows:]).sum(1))
    exact = stats.norm(mean, deviation).logpdf(y[rows:]).mean()  # by whoever knows the noise
    made = [StreamingRegressor(size=96, pretrained=law).fit(x[:rows], y[:rows]) for law in (True, False)]
    law, t = (each.log_density(x[rows:], y[rows:]) for each in made)
    assert law.mean() > t.mean() - 0.02
    assert law.mean() > exact - 0.08

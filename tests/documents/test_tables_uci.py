"""The baselines beside the learner: their scores are what scipy says of their predictions."""

from typing import Any

import numpy as np
import pytest
import tables_uci
from scipy import stats


def smooth(rows: int) -> tables_uci.Data:
    rng = np.random.default_rng(0)
    x = rng.uniform(-2, 2, (rows, 2))
    y = 100 + 5 * np.sin(2 * x[:, 0]) * x[:, 1] + 0.1 * rng.standard_normal(rows)
    return x[60:], y[60:], x[:60], y[:60]


@pytest.mark.parametrize("method", ["Gaussian process", "Fourier moments"])
def test_a_smooth_function_is_learned_far_better_than_by_ridge_and_intervals_hold(method: str) -> None:
    data = smooth(260)
    row, ridge = (tables_uci.METHODS[name](data, 0) for name in (method, "ridge"))
    assert row is not None
    assert ridge is not None
    assert row["rmse"] < 0.1 * ridge["rmse"]
    assert row["rmse"] < 0.3
    assert 0.8 < row["cover90"] <= 1
    assert row["nll"] < 0.3  # of the noise alone it is -0.9


def test_scores_of_normal_predictions_are_scipys() -> None:
    rng = np.random.default_rng(0)
    mean, deviation, y = rng.normal(size=500), rng.uniform(0.5, 2, 500), rng.normal(size=500)
    row = tables_uci._normal(mean, deviation, y, 0.0)
    normal = stats.norm(mean, deviation)
    assert row["nll"] == pytest.approx(-normal.logpdf(y).mean())
    assert row["rmse"] == pytest.approx(np.sqrt(np.mean((mean - y) ** 2)))
    for name, level in (("cover50", 0.5), ("cover90", 0.9)):
        low, high = normal.interval(level)
        assert row[name] == np.mean((low < y) & (y < high))


def test_a_gaussian_process_is_not_asked_for_too_many_rows() -> None:
    assert tables_uci.gaussian_process(smooth(tables_uci.MOST_ROWS + 100), 0) is None


class Normal:
    """A standard normal law of every row, as a learner answers it."""

    def __init__(self) -> None:
        self.learner_ = self

    def answers(self, _: Any) -> tuple[list[Any], Any]:
        return [self], np.ones(1)

    def cdf(self, y: Any) -> Any:
        return stats.norm.cdf(y)


@pytest.mark.parametrize("step", [1e-6, 0.5, 2.0])
def test_by_share_a_law_that_is_right_holds_its_level_however_targets_are_rounded(step: float) -> None:
    y = np.random.default_rng(0).normal(size=40_000)
    rounded = step * np.round(y / step)
    held = tables_uci._by_share(Normal(), np.zeros((len(y), 1)), rounded, step / 2)  # type: ignore[arg-type]
    assert held["cover50_share"] == pytest.approx(0.5, abs=0.01)
    assert held["cover90_share"] == pytest.approx(0.9, abs=0.01)


def test_the_step_of_rounded_targets_is_found() -> None:
    assert tables_uci.rounding(np.array([3.0, 5.0, 5.0, 4.5])) == 0.5

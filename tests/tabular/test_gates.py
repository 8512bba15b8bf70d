"""What the learner loses against exact posteriors, in nats a row: little on lines and smooth functions."""

import warnings
from typing import Any

import numpy as np
import pytest
from scipy import stats
from sklearn.exceptions import ConvergenceWarning
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import RBF, ConstantKernel, WhiteKernel

from constmem import StreamingRegressor

NOISE = 0.3
SCALES = np.geomspace(1e-3, 1e6, 60)  # variance of a weight over the noise's
Rows = tuple[Any, Any]


def line(rows: int, columns: int, seed: int) -> tuple[Rows, Rows]:
    """Rows whose target is linear in the columns, and others of the same law."""
    random = np.random.default_rng(seed)
    weights = random.normal(size=columns) / columns**0.5
    x = random.normal(size=(rows + 400, columns))
    y = x @ weights + NOISE * random.normal(size=rows + 400)
    return (x[:rows], y[:rows]), (x[rows:], y[rows:])


def linear_posterior(known: Rows, new: Rows) -> float:
    """Log density, a row, of exact Bayesian linear regression that knows neither noise nor scale.

    The noise has an inverse gamma prior and is integrated out: Student's t. The scale of the weights is
    summed over a grid, each with its evidence. The constant may be anything.
    """
    (x, y), (x_new, y_new) = known, new
    centre, scale, middle, unit = x.mean(0), x.std(0), y.mean(), y.std()
    z, z_new = (x - centre) / scale, (x_new - centre) / scale
    evidence, said = [], []
    for ratio in SCALES:
        covariance = np.eye(len(z)) + 1e3 + ratio * z @ z.T
        across = 1e3 + ratio * z_new @ z.T
        target = (y - middle) / unit
        freedom, rest = 1 + len(z), 1e-5 + target @ np.linalg.solve(covariance, target)
        evidence.append(-(np.linalg.slogdet(covariance)[1] + freedom * np.log(rest)) / 2)
        gain = np.linalg.solve(covariance, across.T).T
        inner = 1 + 1e3 + ratio * (z_new**2).sum(1) - (gain * across).sum(1)
        t = stats.t(freedom, middle + unit * gain @ target, unit * np.sqrt(rest / freedom * inner))
        said.append(t.logpdf(y_new))
    shares = np.array(evidence) - np.logaddexp.reduce(evidence)
    return float(np.logaddexp.reduce(np.array(said) + shares[:, None], 0).mean())


@pytest.mark.parametrize("columns", [1, 3, 8, 20])
@pytest.mark.parametrize("times", [1, 4, 16])
def test_lines_are_learned_as_by_the_exact_posterior(columns: int, times: int) -> None:
    lost = []
    for seed in range(12 if columns * times < 128 else 4):
        known, new = line(max(columns * times, 3), columns, seed)
        model = StreamingRegressor().fit(*known)
        lost.append(linear_posterior(known, new) - float(model.log_density(*new).mean()))
    assert np.mean(lost) < 0.02


def wave(rows: int, columns: int, seed: int) -> tuple[Rows, Rows]:
    """Rows of a smooth random function with little noise, and others of the same law."""
    random = np.random.default_rng(seed)
    x = random.normal(size=(rows + 300, columns))
    along = x @ random.normal(size=(columns, 600)) / 1.5 + random.uniform(0, 2 * np.pi, 600)
    y = np.cos(along) @ random.normal(size=600) / 300**0.5 + 0.1 * random.normal(size=rows + 300)
    return (x[:rows], y[:rows]), (x[rows:], y[rows:])


@pytest.mark.parametrize("columns", [1, 2, 4])
@pytest.mark.parametrize("rows", [128, 256, pytest.param(512, marks=pytest.mark.slow)])
def test_smooth_functions_are_learned_nearly_as_by_the_exact_process(columns: int, rows: int) -> None:
    lost = []
    for seed in range(3):
        known, (x, y) = wave(rows, columns, seed)
        middle, unit = known[1].mean(), known[1].std()
        kernel = ConstantKernel() * RBF(np.ones(columns), (1e-2, 1e4)) + WhiteKernel(0.1, (1e-8, 10.0))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)
            exact = GaussianProcessRegressor(kernel).fit(known[0], (known[1] - middle) / unit)
        mean, deviation = exact.predict(x, return_std=True)
        wanted = stats.norm(middle + unit * mean, unit * deviation).logpdf(y).mean()
        lost.append(wanted - StreamingRegressor().fit(*known).log_density(x, y).mean())
    assert np.mean(lost) < 0.1

"""Evidence and posteriors from moments, against Gaussian processes written in numpy."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor

from constmem import StreamingClassifier, StreamingRegressor
from constmem.core.moments import Moments
from constmem.tabular.answers import TAILS, Answer, probabilities
from constmem.tabular.evidence import MANY, SHORT, Posterior, _Factor, _sums, at, posterior
from constmem.tabular.precisions import OFF, PRIOR, RATIO, RATIOS, SPREAD, Evidence, Factor

GROUPS = {"constant": slice(0, 1), "few": slice(1, 4), "products": slice(4, 12)}
seeds = st.integers(0, 2**31)


def data(n: int, *, seed: int = 0, k: int = 1, noise: float = 0.3) -> tuple[Tensor, Tensor]:
    """Targets that depend on the constant and on `few`, not on `products`."""
    random = torch.Generator().manual_seed(seed)
    phi = torch.randn(n, 12, generator=random, dtype=torch.float64)
    phi[:, 0] = 1.0
    weights = torch.randn(12, k, generator=random, dtype=torch.float64)
    weights[4:] = 0.0
    return phi, phi @ weights + noise * torch.randn(n, k, generator=random, dtype=torch.float64)


def covariance(phi: Any, precision: dict[str, float]) -> Any:
    """Of the targets, in units of the noise: I + sum over groups of phi phi' / precision."""
    made = np.eye(len(phi))
    for name, group in GROUPS.items():
        made += phi[:, group] @ phi[:, group].T / precision[name]
    return made


@given(seed=seeds, n=st.integers(1, 30), k=st.integers(1, 3))
def test_evidence_is_the_marginal_likelihood_of_the_targets(seed: int, n: int, k: int) -> None:
    phi, y = data(n, seed=seed, k=k)
    log = np.random.default_rng(seed).normal(size=3)
    fit = Evidence(_sums(Moments.observe(phi, y)), GROUPS, log)
    inner = covariance(phi.numpy(), dict(zip(GROUPS, np.exp(log).tolist(), strict=True)))
    width, tails = SPREAD
    strengths = np.array([(phi.numpy()[:, group] ** 2).sum(1).mean() for group in GROUPS.values()])
    prior = stats.t(tails, np.log(strengths * [RATIOS.get(name, RATIO) for name in GROUPS]), width)
    wanted = prior.logpdf(log).sum() + 3 * (np.log(width) - stats.t.logpdf(0, tails))
    wanted -= 3 * (tails + 1) / 2 * np.log(tails)  # constants that the fit leaves out
    for target in y.numpy().T:
        scale = PRIOR[0] * PRIOR[1] * (target**2).mean() + target @ np.linalg.solve(inner, target) / 2
        wanted -= (PRIOR[0] + n / 2) * np.log(scale) + np.linalg.slogdet(inner)[1] / 2
    assert fit.log_evidence == pytest.approx(wanted, rel=1e-7, abs=1e-6)


@given(seed=seeds, k=st.integers(1, 3))
def test_gradient_and_hessian_are_those_of_the_evidence(seed: int, k: int) -> None:
    sums, log = _sums(Moments.observe(*data(40, seed=seed, k=k))), np.random.default_rng(seed).normal(size=3)
    fit, step = Evidence(sums, GROUPS, log), 1e-4
    for move, i in zip(step * np.eye(3), range(3), strict=True):
        up, down = Evidence(sums, GROUPS, log + move), Evidence(sums, GROUPS, log - move)
        slope = (up.log_evidence - down.log_evidence) / (2 * step)
        assert float(fit.gradient[i]) == pytest.approx(slope, rel=1e-4, abs=1e-4)
        bend = (up.gradient - down.gradient) / (2 * step)
        np.testing.assert_allclose(fit.hessian[i], bend, rtol=1e-4, atol=1e-4)


@given(seed=seeds)
def test_found_precisions_are_a_maximum(seed: int) -> None:
    moments = Moments.observe(*data(60, seed=seed))
    found = posterior(moments, GROUPS)
    log = np.log([*found.precisions.values()])
    for i in range(3):
        for move in (-0.5, 0.5):
            other = Evidence(_sums(moments), GROUPS, log + move * np.eye(3)[i])
            assert other.log_evidence < found.log_evidence + 0.05
    again = posterior(moments, GROUPS, found.precisions)
    assert again.log_evidence == pytest.approx(found.log_evidence, abs=0.05)


@given(seed=seeds, size=st.integers(1, 20))
def test_matrices_are_factorised_alike_with_numpy_alone(seed: int, size: int) -> None:
    random = np.random.default_rng(seed)
    rows, right = random.normal(size=(size + 3, size)), random.normal(size=(size, 2))
    matrix = rows.T @ rows + 1e-3 * np.eye(size)
    for made in (Factor(matrix), _Factor(matrix)):
        np.testing.assert_allclose(made.lower @ made.lower.T, matrix, rtol=0, atol=1e-10)
        np.testing.assert_allclose(made.solve(right), np.linalg.solve(matrix, right), rtol=1e-6, atol=1e-8)
        np.testing.assert_allclose(made.inverse() @ matrix, np.eye(size), rtol=0, atol=1e-6)
        with pytest.raises(np.linalg.LinAlgError):
            type(made)(-matrix)


def mean_variance(found: Posterior, phi: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Predicted means and variances, noise included, each (n, k)."""
    return found.mean(phi), (1 + found.leverage(phi))[:, None] * found.noise


def test_groups_that_do_nothing_are_shrunk_away() -> None:
    found = posterior(Moments.observe(*data(500)), GROUPS)
    assert found.precisions["products"] > 100 * found.precisions["few"]
    assert float(found.weights[4:].abs().max()) < 0.05
    assert float(found.noise.sqrt()) == pytest.approx(0.3, rel=0.1)


@given(seed=seeds, n=st.integers(1, 30))
def test_predictions_are_those_of_the_gaussian_process(seed: int, n: int) -> None:
    phi, y = data(n, seed=seed, k=2)
    new, _ = data(5, seed=seed + 1)
    found = posterior(Moments.observe(phi, y), GROUPS)
    both = covariance(np.concatenate([phi.numpy(), new.numpy()]), found.precisions)
    gain = np.linalg.solve(both[:n, :n], both[:n, n:]).T
    mean, variance = mean_variance(found, new)
    np.testing.assert_allclose(mean.numpy(), gain @ y.numpy(), atol=1e-5 * float(y.abs().max()))
    inner = np.diag(both[n:, n:] - gain @ both[:n, n:])
    np.testing.assert_allclose(variance.numpy(), np.outer(inner, found.noise.numpy()), rtol=1e-4)
    assert found.freedom == pytest.approx(n + 2 * PRIOR[0] - min(3, n / 2))  # three precisions were fitted


def test_the_posterior_at_known_precisions_is_the_one_that_was_found() -> None:
    moments = Moments.observe(*data(50, k=2))
    found = posterior(moments, GROUPS)
    same = at(moments, GROUPS, found.precisions, found.noise, found.freedom)
    torch.testing.assert_close(same.weights, found.weights)
    torch.testing.assert_close(same.factor, found.factor)


@pytest.mark.parametrize(("alike", "dtype"), [(1.0, torch.float32), (1e-7, torch.float64)])
def test_variances_of_many_rows_are_those_of_each(alike: float, dtype: torch.dtype) -> None:
    """Of features that are nearly copies float32 would lose the variances, so they are not given to it."""
    phi, y = data(MANY + 1, noise=1e-3)
    phi[:, 2:4] = phi[:, 1:2] + alike * phi[:, 2:4]
    found = at(Moments.observe(phi, y), GROUPS, dict.fromkeys(GROUPS, 1e-9), torch.ones(1).double(), 9.0)
    together = found.whitened(phi)
    assert together.dtype == dtype
    exact = np.linalg.solve(found.factor.numpy(), phi.numpy().T).T
    np.testing.assert_allclose(found.leverage(phi), (exact**2).sum(1), rtol=0, atol=SHORT)
    np.testing.assert_allclose(together.numpy(), exact, rtol=0, atol=1e-5)


def test_intervals_hold_what_they_promise() -> None:
    inside: list[float] = []
    for seed in range(60):
        phi, y = data(240, seed=seed)
        found = posterior(Moments.observe(phi[:40], y[:40]), GROUPS)
        mean, variance = mean_variance(found, phi[40:])
        t = stats.t.ppf(0.95, found.freedom)
        inside += ((y[40:] - mean).abs() < t * variance.sqrt()).double().flatten().tolist()
    assert 0.86 < np.mean(inside) < 0.94


@pytest.mark.parametrize("freedom", [1.5, 8.0, 9.0, 30.0, 1e6])
def test_heavier_tails_leave_90_percent_intervals_alone(freedom: float) -> None:
    one = np.ones((1, 1))
    made = Answer(one, 4 * one, freedom).heavier()
    assert made.freedom == min(freedom, TAILS)
    width = float(made.scale[0, 0]) * stats.t.ppf(0.95, made.freedom)
    assert width == pytest.approx(2 * stats.t.ppf(0.95, freedom), rel=1e-3)


@pytest.mark.parametrize("n", [0, 1, 2])
def test_hardly_any_rows_are_enough(n: int) -> None:
    phi, y = data(3)
    mean, variance = mean_variance(posterior(Moments.observe(phi[:n], y[:n]), GROUPS), phi)
    assert bool(mean.isfinite().all() & (variance > 0).all() & variance.isfinite().all())


@pytest.mark.parametrize("value", [0.0, 1.0, -1e6])
def test_constant_targets_are_predicted(value: float) -> None:
    phi, y = data(30)
    mean, variance = mean_variance(posterior(Moments.observe(phi, torch.full_like(y, value)), GROUPS), phi)
    torch.testing.assert_close(mean, torch.full_like(y, value), rtol=1e-3, atol=1e-6)
    assert bool((variance > 0).all())


def test_features_that_repeat_each_other_do_no_harm() -> None:
    phi, y = data(300)
    phi[:, 8:] = phi[:, 4:8]
    phi[:, 3] = 0.0
    mean, _ = mean_variance(posterior(Moments.observe(phi, y), GROUPS), phi)
    wanted, *_ = np.linalg.lstsq(phi.numpy(), y.numpy(), rcond=None)
    assert float((mean - torch.from_numpy(phi.numpy() @ wanted)).square().mean().sqrt()) < 0.05


def test_targets_share_precisions_but_not_noise() -> None:
    phi, y = data(400, k=2)
    y[:, 1] += 3 * torch.randn(400, dtype=torch.float64)
    noise = posterior(Moments.observe(phi, y), GROUPS).noise.sqrt()
    assert noise.tolist() == pytest.approx([0.3, 3.0], rel=0.15)


def kernel_process(n: int, points: int) -> tuple[Posterior, Tensor, Tensor, Any]:
    """A posterior of a kernel's features with inducing points among rows on a line; rows; the kernel."""
    x = torch.linspace(-2, 2, n, dtype=torch.float64)[:, None]

    def kernel(a: Tensor, b: Tensor) -> Tensor:
        return (-(a - b.mT).square() * 2).exp()

    inducing = x[:: n // points]
    factor = torch.linalg.cholesky(kernel(inducing, inducing) + 1e-10 * torch.eye(len(inducing)))

    def features(a: Tensor) -> Tensor:
        made: Tensor = torch.linalg.solve_triangular(factor, kernel(inducing, a), upper=False).mT
        return made

    new = torch.tensor([[-9.0], [-2.3], [0.1], [1.0], [30.0]], dtype=torch.float64)
    moments = Moments.observe(features(x), x.sin())
    groups = {"kernel": slice(0, len(inducing))}
    made = at(moments, groups, {"kernel": 0.05}, torch.tensor([0.01], dtype=torch.float64), 9.0)
    return made, features(new), new, (x, kernel)


def test_with_all_rows_as_inducing_points_the_variance_is_the_exact_one() -> None:
    made, phi, new, (x, kernel) = kernel_process(12, 12)
    across, inner = kernel(new, x).numpy(), kernel(x, x).numpy() + 0.05 * np.eye(12)
    wanted = (1 - np.diag(across @ np.linalg.solve(inner, across.T))) / 0.05
    np.testing.assert_allclose(made.leverage(phi).numpy(), wanted, rtol=1e-4, atol=1e-4)


def test_what_inducing_points_miss_is_shared_out_among_rows() -> None:
    made, phi, *_ = kernel_process(60, 6)
    assert made.usual > 0
    assert made.usual * made.missed <= 1 + 1e-9  # it is a part of the noise
    far = made.leverage(phi)[[0, 4]]
    torch.testing.assert_close(
        far, torch.full_like(far, made.missed * (1 - made.usual)), rtol=1e-3, atol=1e-3
    )
    assert bool((mean_variance(made, phi)[1] > 0).all())


@given(seed=seeds, k=st.integers(2, 6))
def test_probabilities_are_ordered_as_means_and_doubt_what_varies(seed: int, k: int) -> None:
    mean = np.random.default_rng(seed).random((7, k))
    sure, unsure = (probabilities(mean, np.full_like(mean, v)) for v in (1e-3, 1.0))
    np.testing.assert_allclose(sure.sum(1), np.ones(7))
    np.testing.assert_array_equal(sure.argsort(1), mean.argsort(1))
    assert (sure.max(1) >= unsure.max(1)).all()


def test_few_rows_do_not_make_products_bold() -> None:
    moments = Moments.observe(*data(8, noise=1.0))
    renamed = {name.replace("products", "others"): group for name, group in GROUPS.items()}
    bold = posterior(moments, renamed).precisions["others"]
    assert posterior(moments, GROUPS).precisions["products"] > 5 * bold


def test_numbers_fitted_to_make_features_count_against_them() -> None:
    random = np.random.default_rng(0)
    x = random.normal(size=(60, 3))
    phi = torch.from_numpy(np.concatenate([np.ones((60, 1)), x, np.sin(2 * x)], 1))
    groups = {"constant": slice(0, 1), "columns": slice(1, 4), "kernel": slice(4, 7)}
    y = torch.from_numpy(x[:, :1] + 0.6 * np.sin(2 * x[:, 1:2]) + 0.5 * random.normal(size=(60, 1)))
    moments = Moments.observe(phi, y)
    free, dear = (posterior(moments, groups, fitted=fitted) for fitted in (0, 100))
    assert float(free.weights[4:].abs().max()) > 0.1
    assert dear.precisions["kernel"] == OFF
    assert float(dear.weights[4:].abs().max()) < 1e-9
    alone = posterior(
        Moments.observe(phi[:, :4], y), {name: groups[name] for name in ("constant", "columns")}
    )
    torch.testing.assert_close(dear.weights[:4], alone.weights, rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(dear.noise, alone.noise)
    assert dear.freedom == alone.freedom
    again = posterior(moments, groups, dear.precisions)  # what was left out may come back
    assert float(again.weights[4:].abs().max()) > 0.1


def test_classes_use_all_groups_and_numbers_may_lie_on_a_line() -> None:
    random = np.random.default_rng(0)
    x = random.normal(size=(100, 2))
    y = x[:, 0] + 0.5 * random.normal(size=100)
    off = []
    for model in (StreamingRegressor().fit(x, y), StreamingClassifier().fit(x, y > 0)):
        model.predict(x)
        off.append(OFF in model.learner_.memory.traces[0].base().precisions.values())
    assert off == [True, False]

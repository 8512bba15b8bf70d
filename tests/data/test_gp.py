"""Gaussian-process tasks and the exact posterior, against a slow numpy reference."""

import numpy as np
import pytest
import torch

from constmem.data import GaussianProcess, Task, draw_gp, gp_evaluation_tasks, gp_tasks, static_gp_tasks
from tests.data.test_task import same, seeded

KERNELS = ("rbf", "matern", "periodic")


# An independent, slow reference: numpy, float64, one number at a time


def slow_kernel(kernel, d, length, scale, period):
    if kernel == "rbf":
        return scale**2 * np.exp(-(d**2) / (2 * length**2))
    if kernel == "matern":
        return (
            scale**2
            * (1 + np.sqrt(5) * d / length + 5 * d**2 / (3 * length**2))
            * np.exp(-np.sqrt(5) * d / length)
        )
    return scale**2 * np.exp(-2 * np.sin(np.pi * d / period) ** 2 / length**2)


def slow_covariance(process, i, x1, x2):
    length, scale = process.length[i].item(), process.scale[i].item()
    period = None if process.period is None else process.period[i].item()
    cov = np.empty((len(x1), len(x2)))
    for j, a in enumerate(x1):
        for k, b in enumerate(x2):
            cov[j, k] = slow_kernel(process.kernel, abs(a - b), length, scale, period)
    return cov


def slow_posterior(process, i, xc, yc, xt):
    inverse = np.linalg.inv(slow_covariance(process, i, xc, xc) + process.noise**2 * np.eye(len(xc)))
    cross = slow_covariance(process, i, xt, xc)
    mean = cross @ inverse @ yc
    variance = process.scale[i].item() ** 2 - np.einsum("mn,nk,mk->m", cross, inverse, cross)
    return mean, np.sqrt(variance + process.noise**2)


# Gaussian processes


@pytest.mark.parametrize("kernel", KERNELS)
def test_the_covariance_equals_the_slow_one(kernel):
    process = draw_gp(3, kernel=kernel, generator=seeded(1))
    x1, x2 = torch.randn(3, 5, 1, generator=seeded(2)), torch.randn(3, 4, 1, generator=seeded(3))
    ours = process.covariance(x1, x2).numpy()
    for i in range(3):
        slow = slow_covariance(process, i, x1[i, :, 0].double().numpy(), x2[i, :, 0].double().numpy())
        np.testing.assert_allclose(ours[i], slow, rtol=1e-12, atol=1e-14)


def test_hyper_parameters_are_uniform_in_the_ranges_of_the_protocol():
    process = draw_gp(50_000, kernel="periodic", generator=seeded())
    ranges = {"length": (0.1, 0.6), "scale": (0.1, 1.0), "period": (0.1, 0.5)}
    for name, (low, high) in ranges.items():
        values = getattr(process, name)
        assert low <= values.min() < low + 1e-3
        assert high - 1e-3 < values.max() < high
        quartiles = torch.quantile(values, torch.tensor([0.25, 0.5, 0.75], dtype=values.dtype))
        expected = low + (high - low) * np.array([0.25, 0.5, 0.75])
        np.testing.assert_allclose(quartiles.numpy(), expected, atol=0.02 * (high - low))
    assert process.noise == 0.02


@pytest.mark.parametrize("kernel", KERNELS)
def test_samples_have_the_covariance_of_the_kernel_plus_noise(kernel):
    b = 40_000
    one = torch.ones(b, dtype=torch.float64)
    period = 0.4 * one if kernel == "periodic" else None
    process = GaussianProcess(kernel, 0.5 * one, 0.8 * one, period, noise=0.3)
    x = torch.tensor([-0.3, 0.1, 0.45, 1.5])[:, None].expand(b, 4, 1)
    y = process.sample(x, generator=seeded(4))[..., 0].numpy()
    xs = x[0, :, 0].double().numpy()
    expected = slow_covariance(process, 0, xs, xs) + 0.3**2 * np.eye(4)
    np.testing.assert_allclose(y.T @ y / b, expected, atol=5 * 0.73 * np.sqrt(2 / b))
    np.testing.assert_allclose(y.mean(0), 0, atol=5 * np.sqrt(0.73 / b))


@pytest.mark.parametrize("kernel", KERNELS)
def test_the_posterior_equals_the_slow_one(kernel):
    task, process = gp_tasks(6, kernel=kernel, generator=seeded(5))
    ours = process.posterior(task)
    log_likelihood = process.log_likelihood(task).numpy()
    for i in range(6):
        xc, yc, xt, yt = (t[i, :, 0].double().numpy() for t in (task.xc, task.yc, task.xt, task.yt))
        mean, std = slow_posterior(process, i, xc, yc, xt)
        np.testing.assert_allclose(ours.mean[i, :, 0].numpy(), mean, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(ours.stddev[i, :, 0].numpy(), std, rtol=1e-4)
        slow = -0.5 * ((yt - mean) / std) ** 2 - np.log(std) - 0.5 * np.log(2 * np.pi)
        np.testing.assert_allclose(log_likelihood[i], slow, rtol=1e-3, atol=1e-3)


def test_masking_context_equals_leaving_it_out_whatever_stood_there():
    task, process = static_gp_tasks(5, kernel="matern", generator=seeded(6))
    dirty = torch.where(task.mask_c[..., None], task.yc, 1e6)
    ours = process.posterior(Task(task.xc, dirty, task.xt, task.yt, task.mask_c, task.mask_t))
    for i in range(5):
        n = int(task.num_context[i])
        xc, yc, xt = (t[i, :, 0].double().numpy() for t in (task.xc[:, :n], task.yc[:, :n], task.xt))
        mean, std = slow_posterior(process, i, xc, yc, xt)
        np.testing.assert_allclose(ours.mean[i, :, 0].numpy(), mean, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(ours.stddev[i, :, 0].numpy(), std, rtol=1e-4)


def test_an_empty_context_gives_the_prior():
    task, process = gp_tasks(3, generator=seeded(7))
    nothing = Task(task.xc[:, :0], task.yc[:, :0], task.xt, task.yt)
    posterior = process.posterior(nothing)
    assert (posterior.mean == 0).all()
    expected = (process.scale**2 + process.noise**2).sqrt()[:, None, None].expand_as(posterior.stddev)
    torch.testing.assert_close(posterior.stddev, expected)


@pytest.mark.parametrize("kernel", KERNELS)
def test_the_posterior_is_calibrated_and_beats_other_kernels_on_its_own_tasks(kernel):
    task, process = static_gp_tasks(500, kernel=kernel, generator=seeded(8))
    posterior = process.posterior(task)
    z = (task.yt - posterior.mean) / posterior.stddev
    assert z.square().mean().item() == pytest.approx(1, abs=0.08)
    best = process.log_likelihood(task).mean()
    for other in set(KERNELS) - {kernel}:
        period = torch.full_like(process.length, 0.3) if other == "periodic" else None
        wrong = GaussianProcess(other, process.length, process.scale, period)
        assert wrong.log_likelihood(task).mean() < best


def test_points_that_coincide_and_no_noise_stay_finite():
    one = torch.ones(1, dtype=torch.float64)
    process = GaussianProcess("rbf", 0.6 * one, one, noise=0.0)
    x = torch.cat([torch.linspace(-2, 2, 200), torch.zeros(50)])[None, :, None]
    y = process.sample(x, generator=seeded(9))
    assert y.isfinite().all()
    task = Task(x, y.float(), x, y.float())
    assert process.log_likelihood(task).isfinite().all()


def test_static_tasks_have_one_shape_and_sizes_of_the_protocol():
    tasks = [static_gp_tasks(500, generator=seeded(i))[0] for i in range(4)]
    assert {(t.xc.shape, t.yt.shape, t.mask_c.shape, t.mask_t) for t in tasks} == {
        ((500, 46, 1), (500, 46, 1), (500, 46), None)
    }
    context = torch.cat([t.num_context for t in tasks])
    assert (context.min(), context.max()) == (3, 46)
    assert len(context.unique()) > 40


def test_gp_points_lie_in_their_interval_and_context_differs_from_targets():
    x = torch.cat([t.flatten() for i in range(50) for t in _xs(gp_tasks(16, generator=seeded(i))[0])])
    assert -2 <= x.min() < -1.99
    assert 1.99 < x.max() < 2
    assert x.mean().abs() < 0.05
    task, _ = gp_tasks(2, generator=seeded())
    assert task.xc.dtype == task.yt.dtype == torch.float32
    assert not torch.isin(task.xt, task.xc).any()


def _xs(task):
    return task.xc, task.xt


def test_the_gp_evaluation_set_is_fixed_by_its_seed():
    first = list(gp_evaluation_tasks(kernel="rbf", seed=1, num_batches=5, batch=4))
    again = list(gp_evaluation_tasks(kernel="rbf", seed=1, num_batches=5, batch=4))
    other = next(gp_evaluation_tasks(kernel="rbf", seed=2, num_batches=5, batch=4))
    assert len(first) == 5
    assert all(same(a, b) for (a, _), (b, _) in zip(first, again, strict=True))
    assert not same(first[0][0], other[0])
    assert len({task.xc.shape for task, _ in first}) > 1


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: draw_gp(2, kernel="cosine", generator=seeded()),
            "no kernel 'cosine': choose from rbf, matern, periodic",
        ),
        (lambda: gp_evaluation_tasks(kernel="cosine", seed=0), "choose from rbf, matern, periodic"),
        (lambda: gp_tasks(0, generator=seeded()), "batch must be a whole number of at least 1"),
        (
            lambda: GaussianProcess("periodic", torch.ones(1).double(), torch.ones(1).double()),
            "needs a period",
        ),
    ],
)
def test_gaussian_processes_refuse_what_they_cannot_do(call, message, refuses):
    with refuses(ValueError, message):
        call()

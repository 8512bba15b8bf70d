"""Regressions from moments alone are the Gaussian processes of their kernels, computed from all points."""

from math import log, pi
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from constmem import CMANP, Stream
from constmem.data.gp import GaussianProcess, gp_tasks
from constmem.neural_processes.joint import SampleMixture
from constmem.neural_processes.regression import AMPLITUDES, AT_ONCE, LENGTHS, Inverse, Regression
from constmem.neural_processes.states import Product


def made(dim_x: int = 1, features: int = 128, experts: int = 4) -> Regression:
    torch.manual_seed(0)
    return Regression(dim_x=dim_x, features=features, experts=experts)


def points(n: int, dim_x: int = 1, dim_y: int = 1, seed: int = 0) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(seed)
    x = 4 * torch.rand(1, n, dim_x, generator=random, dtype=torch.float64) - 2
    return x, torch.randn(1, n, dim_y, generator=random, dtype=torch.float64)


def numpy_expert(regression: Regression, k: int) -> Any:
    """The covariance function of an expert without noise, and its noise's variance."""
    frequencies = regression.frequencies.detach().double().numpy()
    variance = np.exp(regression.log_variance[k].detach().double().numpy())

    def covariance(a: Any, b: Any) -> Any:
        return sum(
            v * np.cos((a @ w)[:, None] - (b @ w)[None]) for v, w in zip(variance, frequencies, strict=True)
        )

    return covariance, np.exp(2 * float(regression.log_noise[k].detach()))


@pytest.mark.parametrize(("dim_x", "dim_y"), [(1, 1), (3, 2)])
@torch.no_grad()
def test_an_expert_is_the_gaussian_process_of_its_kernel(dim_x: int, dim_y: int) -> None:
    regression, (x, y), (xt, _) = made(dim_x, 24), points(15, dim_x, dim_y), points(4, dim_x, seed=1)
    posterior = regression.read(regression.observe(x, y))
    mean, std = regression(posterior, xt)
    prior = torch.zeros(4).log_softmax(0)
    a, b, seen = x[0].numpy(), xt[0].numpy(), y[0].numpy()
    for k in range(4):
        covariance, noise = numpy_expert(regression, k)
        inverse = np.linalg.inv(covariance(a, a) + noise * np.eye(15))
        cross = covariance(a, b)
        variance = np.diag(covariance(b, b) - cross.T @ inverse @ cross) + noise
        np.testing.assert_allclose(mean[0, :, k], cross.T @ inverse @ seen, rtol=1e-8, atol=1e-8)
        np.testing.assert_allclose(std[0, :, k, 0], np.sqrt(variance), rtol=1e-8)
        log_det = -np.linalg.slogdet(inverse)[1]
        evidence = -0.5 * sum(15 * log(2 * pi) + log_det + column @ inverse @ column for column in seen.T)
        np.testing.assert_allclose(posterior.evidence[0, k] - prior[k], evidence, rtol=1e-9)


@pytest.mark.parametrize(("k", "kernel"), [(2, "rbf"), (3, "matern")])
def test_experts_start_as_smooth_functions_of_their_length_and_amplitude(k: int, kernel: Any) -> None:
    regression, (x, _) = made(experts=4), points(40)
    length = LENGTHS[0] * (LENGTHS[1] / LENGTHS[0]) ** ((k + 0.5) / 4)
    amplitude = AMPLITUDES[0] * (AMPLITUDES[1] / AMPLITUDES[0]) ** (k * 0.618034 % 1)
    one = torch.ones(1, dtype=torch.float64)
    process = GaussianProcess(kernel, length * one, amplitude * one)
    found = numpy_expert(regression, k)[0](x[0].numpy(), x[0].numpy())
    np.testing.assert_allclose(found, process.covariance(x, x)[0], atol=2e-3 * amplitude**2)


@torch.no_grad()
def test_a_point_counts_by_its_weight_and_not_at_all_if_it_is_masked_out() -> None:
    regression, (x, y) = made(features=12), points(6)
    mask = torch.tensor([[True, True, False, True, False, True]])
    left_out = regression.observe(x[:, mask[0]], y[:, mask[0]])
    twice = regression.observe(x, y, mask, torch.full((1, 6), log(2.0)))
    torch.testing.assert_close(regression.observe(x, y, mask).gram, left_out.gram)
    torch.testing.assert_close(twice.gram, 2 * left_out.gram)
    torch.testing.assert_close(twice.count, 2 * left_out.count)


def test_the_inverse_and_its_gradient_are_right() -> None:
    root = torch.randn(2, 3, 5, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    root.requires_grad_()

    def both(root: Tensor) -> Any:
        return Inverse.apply(torch.eye(5, dtype=torch.float64) + root @ root.mT)  # type: ignore[no-untyped-call]

    assert torch.autograd.gradcheck(both, root)
    inverse, log_det = both(root)
    expected = torch.eye(5, dtype=torch.float64) + root @ root.mT
    torch.testing.assert_close(inverse, torch.linalg.inv(expected))
    torch.testing.assert_close(log_det, torch.logdet(expected))


@torch.no_grad()
def test_many_targets_are_predicted_as_few_are() -> None:
    regression, (x, y), (xt, _) = made(features=12), points(6), points(AT_ONCE + 5, seed=1)
    posterior = regression.read(regression.observe(x, y))
    together = regression(posterior, xt)
    for i in (0, AT_ONCE, AT_ONCE + 4):
        alone = regression(posterior, xt[:, i : i + 1])
        for whole, one in zip(together, alone, strict=True):
            torch.testing.assert_close(whole[:, i : i + 1], one)


def test_features_come_in_pairs() -> None:
    for wrong in (3, -2):
        with pytest.raises(ValueError, match="an even number of features"):
            CMANP(dim_x=1, dim_y=1, moments=wrong)


# The model


@torch.no_grad()
def test_a_new_model_predicts_the_mixture_of_its_experts() -> None:
    torch.manual_seed(0)
    model = CMANP(dim_x=1, dim_y=1, dim=16, depth=2, num_slots=4, num_latents=4, std="exp", moments=64).eval()
    x, y = points(20)
    found = model.query(model.condition(x, y), x)
    assert isinstance(found, SampleMixture)
    assert model.regression is not None
    posterior = model.regression.read(model.regression.observe(x, y))
    mean, std = model.regression(posterior, x)
    weight = posterior.evidence.softmax(-1)
    torch.testing.assert_close(
        found.mean.double(), torch.einsum("bk,bmky->bmy", weight, mean), atol=1e-5, rtol=1e-5
    )
    torch.testing.assert_close(found.components.stddev.double(), std, atol=1e-6, rtol=1e-5)


@pytest.mark.once
@pytest.mark.parametrize("kernel", ["rbf", "matern"])
@torch.no_grad()
def test_a_new_model_comes_near_the_exact_posterior(kernel: Any) -> None:
    torch.manual_seed(0)
    model = CMANP(
        dim_x=1, dim_y=1, dim=16, depth=1, num_slots=4, num_latents=4, std="exp", moments=128
    ).eval()
    generator = torch.Generator().manual_seed(0)
    gaps = []
    for _ in range(2):
        task, process = gp_tasks(16, kernel=kernel, generator=generator)
        found = model.query(model.condition(task.xc, task.yc), task.xt).log_prob(task.yt)
        gaps.append(float((process.log_likelihood(task) - found[..., 0]).mean()))
    assert sum(gaps) / 2 < 0.25


def test_a_model_without_moments_says_nothing_of_them() -> None:
    settings = {"dim_x": 1, "dim_y": 1, "dim": 16, "depth": 1, "num_slots": 4, "num_latents": 4}
    plain = CMANP(**settings, moments=0)  # type: ignore[arg-type]
    assert not {"moments", "experts"} & plain.config.keys()  # so that states of earlier versions are its own
    assert CMANP(**settings, moments=8).config["moments"] == 8  # type: ignore[arg-type]


@torch.no_grad()
def test_a_stream_of_single_points_keeps_both_parts() -> None:
    torch.manual_seed(0)
    sizes = {
        "dim": 32,
        "num_heads": 2,
        "depth": 2,
        "num_slots": 16,
        "num_latents": 4,
    }  # which machine code serves
    model = CMANP(dim_x=1, dim_y=1, **sizes, moments=16, experts=3).eval()  # type: ignore[arg-type]
    stream, (x, y) = Stream(model), points(30)
    held = set()
    for i in range(30):
        stream.observe(x[:, i : i + 1], y[:, i : i + 1])
        held.add(stream.nbytes)
    assert len(held) == 1
    assert isinstance(stream.state, Product)
    whole = model.condition(x, y)
    torch.testing.assert_close(stream.state.moments.gram, whole.moments.gram)
    torch.testing.assert_close(stream.predict(x).mean, model.query(whole, x).mean, atol=1e-5, rtol=1e-5)

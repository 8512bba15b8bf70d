"""Surrogates against Gaussian process regression by hand, and in BoTorch's own acquisition functions."""

from math import log, pi
from typing import Any

import numpy as np
import pytest
import torch
from botorch.acquisition import LogExpectedImprovement, qKnowledgeGradient, qLogExpectedImprovement
from botorch.optim import optimize_acqf, optimize_acqf_discrete
from botorch.sampling import SobolQMCNormalSampler
from botorch.test_functions import Branin
from torch import Tensor

from constmem import CMANP
from constmem.integrations.botorch import NEGLIGIBLE, ProcessSurrogate, RegressionSurrogate
from tests.laws.models import LEAST, small

BOX = torch.tensor([[-5.0, 0.0], [10.0, 15.0]], dtype=torch.float64)
SMALL: dict[str, int] = {"features": 64, "experts": 6}


def points(n: int, seed: int = 0) -> Tensor:
    random = torch.Generator().manual_seed(seed)
    return BOX[0] + (BOX[1] - BOX[0]) * torch.rand(n, 2, generator=random, dtype=torch.float64)


def branin(x: Tensor) -> Tensor:
    return Branin(negate=True)(x)[..., None]


def observed(n: int = 12, **settings: int) -> RegressionSurrogate:
    x = points(n)
    return RegressionSurrogate(BOX, **SMALL | settings).observe(x, branin(x))


def by_hand(x: Tensor, y: Tensor, at: Tensor, regression: Any) -> tuple[np.ndarray, np.ndarray]:
    """Gaussian process regression in the space of functions, for every expert, and their mixture."""
    middle, scale = y.mean().item(), y.numpy().std()
    phi, phi_at = [regression.features(2 * (p - BOX[0]) / (BOX[1] - BOX[0]) - 1).numpy() for p in (x, at)]
    outcome = (y.numpy()[:, 0] - middle) / scale
    parts = []
    for k in range(len(regression.log_noise)):
        variance = np.tile(np.exp(regression.log_variance[k].double().numpy()), 2)
        noise = np.exp(2 * regression.log_noise[k].double().item())
        among = (phi * variance) @ phi.T + noise * np.eye(len(x))
        across, own = (phi_at * variance) @ phi.T, (phi_at * variance) @ phi_at.T
        solved = np.linalg.solve(among, outcome)
        size = np.linalg.slogdet(among)[1] + outcome @ solved + len(x) * log(2 * pi)
        parts.append((-0.5 * size, across @ solved, own - across @ np.linalg.solve(among, across.T)))
    evidence = np.array([part[0] for part in parts])
    weight = np.exp(evidence - evidence.max())
    weight /= weight.sum()
    weight = np.where(weight > NEGLIGIBLE, weight, 0)
    weight /= weight.sum()
    mean = sum(w * part[1] for w, part in zip(weight, parts, strict=True))
    spread = sum(
        w * (part[2] + np.outer(part[1] - mean, part[1] - mean))
        for w, part in zip(weight, parts, strict=True)
    )
    return middle + scale * mean, scale**2 * spread


def test_the_posterior_is_that_of_gaussian_process_regression_by_hand() -> None:
    x, at = points(12), points(5, seed=1)
    surrogate = observed()
    mean, covariance = by_hand(x, branin(x), at, surrogate.regression)
    found = surrogate.posterior(at)
    np.testing.assert_allclose(found.mean[:, 0], mean, rtol=1e-5, atol=1e-4)
    np.testing.assert_allclose(
        found.distribution.covariance_matrix, covariance, atol=2e-5 * np.diag(covariance).max()
    )
    one = surrogate.posterior(at[:, None])  # five batches of one
    np.testing.assert_allclose(one.variance[:, 0, 0], np.diag(covariance), rtol=1e-4)
    noisy = surrogate.posterior(at, observation_noise=True).variance - found.variance
    assert float(noisy.min()) > 0
    assert found.mean.dtype == torch.float64
    assert surrogate.posterior(at.float()).mean.dtype == torch.float32


def test_pieces_make_the_state_that_all_at_once_make_and_it_does_not_grow() -> None:
    x, whole = points(12), observed()
    pieces = RegressionSurrogate(BOX, **SMALL).observe(x[:5], branin(x[:5])).observe(x[5:], branin(x[5:]))
    at = points(4, seed=2)
    torch.testing.assert_close(pieces.posterior(at).mean, whole.posterior(at).mean)
    torch.testing.assert_close(pieces.posterior(at).variance, whole.posterior(at).variance)
    assert (pieces.count, observed(30).count) == (12, 30)
    assert pieces.moments.nbytes == observed(30).moments.nbytes


def test_outcomes_may_be_in_any_units() -> None:
    x, at = points(12), points(4, seed=2)
    plain = observed().posterior(at)
    other = RegressionSurrogate(BOX, **SMALL).observe(x, 1e4 - 7 * branin(x)).posterior(at)
    torch.testing.assert_close(other.mean, 1e4 - 7 * plain.mean, rtol=1e-6, atol=1e-5)
    torch.testing.assert_close(other.variance, 49 * plain.variance, rtol=1e-5, atol=0)
    constant = RegressionSurrogate(BOX, **SMALL).observe(x, torch.full((12, 1), 3.0, dtype=torch.float64))
    torch.testing.assert_close(constant.posterior(at).mean, torch.full((4, 1), 3.0, dtype=torch.float64))


def process(name: str = "cmanp", **settings: Any) -> ProcessSurrogate:
    model = small(name, dim_x=2, dim_y=1, **settings).requires_grad_(False)
    x = points(6) / 10
    return ProcessSurrogate(model).observe(x, torch.sin(x.sum(-1, keepdim=True)))


@pytest.mark.parametrize("surrogate", [observed(), process()], ids=["regression", "process"])
def test_fantasies_are_a_batch_of_states_each_with_its_own_outcomes(surrogate: Any) -> None:
    sampler = SobolQMCNormalSampler(torch.Size([3]), seed=0)
    x, at = points(4, seed=3).view(2, 2, 2), points(5, seed=4)
    imagined = surrogate.fantasize(x, sampler)
    outcomes = sampler(surrogate.posterior(x, observation_noise=True))
    assert imagined.batch_shape == (3, 2)
    found = imagined.posterior(at)
    assert found.mean.shape == (3, 2, 5, 1)
    for f in range(3):
        for b in range(2):
            alone = surrogate.condition_on_observations(x[b], outcomes[f, b]).posterior(at)
            torch.testing.assert_close(found.mean[f, b], alone.mean, rtol=1e-3, atol=1e-6)
            together = found.distribution.covariance_matrix[f, b]
            expected = alone.distribution.covariance_matrix  # where other experts may be negligible
            torch.testing.assert_close(together, expected, rtol=1e-3, atol=1e-3 * float(expected.max()))
    assert surrogate.batch_shape == ()


def test_the_covariance_of_a_process_is_exact_where_it_is_gaussian() -> None:
    """A new model of one expert, which its slots do not correct yet, is a Gaussian process."""
    torch.manual_seed(0)
    model = CMANP(dim_x=1, dim_y=1, moments=32, experts=1, std="exp", **LEAST).double().eval()
    model.requires_grad_(False)
    with torch.no_grad():
        model.head.predictor.layers[-1].bias.zero_()  # type: ignore[union-attr,index]
    x = torch.linspace(-1, 1, 5, dtype=torch.float64)[:, None]
    at = torch.tensor([[-1.7], [0.1], [0.3], [1.6]], dtype=torch.float64)
    surrogate = ProcessSurrogate(model).observe(x, torch.sin(3 * x))
    assert model.regression is not None
    posterior = model.regression.read(model.regression.observe(x[None], torch.sin(3 * x)[None]))
    phi = model.regression.features(at)
    expected = phi @ posterior.covariance[0, 0] @ phi.T
    expected += (2 * model.regression.log_noise.double()).exp() * torch.eye(4)
    found = surrogate.posterior(at).distribution.covariance_matrix
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
    assert float(found[1, 2] / (found[1, 1] * found[2, 2]).sqrt()) > 0.5  # of two that are near each other


def test_a_model_with_a_low_rank_has_a_covariance_of_its_own() -> None:
    surrogate = process("cmanp-joint")
    at = points(3, seed=5)
    dist: Any = surrogate.model.query(surrogate.state, at[None])
    found = surrogate.posterior(at).distribution.covariance_matrix
    torch.testing.assert_close(found, dist.covariance()[0], rtol=1e-6, atol=1e-6)


def test_acquisition_functions_leave_the_network_in_its_precision() -> None:
    model = CMANP.from_pretrained("gp").eval()
    x = torch.tensor([[-1.5], [-0.3], [0.9]], dtype=torch.float64)
    surrogate = ProcessSurrogate(model).observe(x, torch.sin(2 * x))
    before = surrogate.posterior(x).mean
    at = torch.tensor([[[0.4]], [[1.2]]], dtype=torch.float64, requires_grad=True)
    found = LogExpectedImprovement(surrogate, best_f=0.5)(at)
    assert found.dtype == torch.float64
    assert model.dtype == torch.float32
    torch.testing.assert_close(surrogate.posterior(x).mean, before)
    (slope,) = torch.autograd.grad(found.sum(), at)
    assert float(slope.abs().min()) > 0


def test_three_points_proposed_together_are_three_different_points() -> None:
    x = points(8)
    surrogate = RegressionSurrogate(BOX, **SMALL).observe(x, branin(x))
    acquisition = qLogExpectedImprovement(
        surrogate, branin(x).max(), SobolQMCNormalSampler(torch.Size([64]), seed=0)
    )
    torch.manual_seed(0)
    found, _ = optimize_acqf(
        acquisition, BOX, q=3, num_restarts=2, raw_samples=16, sequential=True, options={"maxiter": 15}
    )
    assert float(torch.pdist((found - BOX[0]) / (BOX[1] - BOX[0])).min()) > 0.02


def test_pending_points_are_not_proposed_again_by_a_process() -> None:
    model = CMANP.from_pretrained("gp").eval().requires_grad_(False)
    x = torch.tensor([[-1.5], [-0.3], [0.9]], dtype=torch.float64)
    surrogate = ProcessSurrogate(model).observe(x, torch.sin(2 * x))
    grid = torch.linspace(-2, 2, 21, dtype=torch.float64)[:, None]
    sampler = SobolQMCNormalSampler(torch.Size([64]), seed=0)
    acquisition = qLogExpectedImprovement(surrogate, torch.sin(2 * x).max(), sampler)
    best, _ = optimize_acqf_discrete(acquisition, 1, grid)
    place = int((grid - best).abs().argmin())
    with torch.no_grad():
        acquisition.set_X_pending(best)
        given = acquisition(grid[:, None])
    gained = given - given[place]  # at the pending point itself there is hardly anything to gain
    assert int(given.argmax()) != place
    assert int((gained > 0).sum()) >= 10


def test_knowledge_gradients_look_ahead_through_a_batch_of_states() -> None:
    surrogate = observed(8, features=32, experts=4)
    acquisition = qKnowledgeGradient(surrogate, num_fantasies=2)
    at = points(6, seed=6).view(2, 3, 2).requires_grad_()
    found = acquisition(at)
    assert found.shape == (2,)
    (slope,) = torch.autograd.grad(found.sum(), at)
    assert bool(slope.isfinite().all())
    assert float(slope.abs().max()) > 0


def test_what_does_not_fit_is_refused() -> None:
    surrogate = observed()
    with pytest.raises(ValueError, match="the lowest below the highest"):
        RegressionSurrogate(BOX.flip(0))
    with pytest.raises(ValueError, match=r"X has shape \(4, 3\), but \(..., q, 2\)"):
        surrogate.posterior(torch.zeros(4, 3))
    with pytest.raises(ValueError, match="as many outcomes as points"):
        surrogate.observe(points(3), torch.zeros(2, 1))
    with pytest.raises(ValueError, match="not finite"):
        surrogate.observe(points(1), torch.full((1, 1), float("nan")))
    with pytest.raises(ValueError, match="one output"):
        surrogate.posterior(points(1), output_indices=[1])
    with pytest.raises(ValueError, match="one output"):
        surrogate.subset_output([1])
    with pytest.raises(ValueError, match="True or False"):
        surrogate.posterior(points(1), observation_noise=torch.ones(1, 1))
    with pytest.raises(ValueError, match="2 outputs"):
        ProcessSurrogate(small("cmanp"))
    model = small("cmanp", dim_y=1)
    with pytest.raises(ValueError, match="a batch of 3, not of one"):
        ProcessSurrogate(model, model.empty(3))

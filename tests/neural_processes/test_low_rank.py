"""Targets that belong together, against the normal distribution of all of them written out."""

from typing import Any

import numpy as np
import pytest
import torch
from torch.distributions import MultivariateNormal

from constmem.data import Task, gp_evaluation_tasks
from constmem.evaluation import evaluate
from constmem.neural_processes import CMANP, Scales
from constmem.neural_processes.joint import JointNormal, joint_log_prob, sample_jointly
from tests.laws.models import LEARNER, data, ragged, small


def some(b: int = 2, m: int = 4, y: int = 2, r: int = 3) -> JointNormal:
    random = torch.Generator().manual_seed(0)
    size: dict[str, Any] = {"generator": random, "dtype": torch.float64}
    mean, loading = torch.randn(b, m, y, **size), 2 * torch.randn(b, m, y, r, **size)
    return JointNormal(mean, 0.1 + torch.rand(b, m, y, **size), loading)


def written_out(dist: JointNormal) -> MultivariateNormal:
    """The covariance by loops."""
    b, m, y, r = dist.loading.shape
    covariance = np.zeros((b, m * y, m * y))
    std, loading = dist.own.reshape(b, -1).numpy(), dist.loading.reshape(b, m * y, r).numpy()
    for task in range(b):
        for i in range(m * y):
            for j in range(m * y):
                shared = sum(loading[task, i, k] * loading[task, j, k] for k in range(r))
                covariance[task, i, j] = std[task, i] * std[task, j] * (shared + (i == j))
    return MultivariateNormal(dist.mean.flatten(1), torch.tensor(covariance))


def test_the_joint_log_probability_is_that_of_the_whole_normal() -> None:
    dist, y = some(), torch.randn(2, 4, 2, dtype=torch.float64)
    whole = written_out(dist)
    torch.testing.assert_close(dist.joint_log_prob(y), whole.log_prob(y.flatten(1)), atol=1e-9, rtol=0)
    torch.testing.assert_close(dist.covariance(), whole.covariance_matrix, atol=1e-10, rtol=0)
    torch.testing.assert_close(dist.variance.flatten(1), whole.variance, atol=1e-10, rtol=0)


def test_masked_targets_are_left_out_whatever_they_hold() -> None:
    dist, y = some(b=1), torch.randn(1, 4, 2, dtype=torch.float64)
    mask = torch.tensor([[True, False, True, True]])
    few = JointNormal(*(t[:, mask[0]] for t in (dist.mean, dist.own, dist.loading)))
    expected = few.joint_log_prob(y[:, mask[0]])
    y[:, 1] = 1e9
    torch.testing.assert_close(dist.joint_log_prob(y, mask), expected, atol=1e-9, rtol=0)


def test_samples_have_the_moments_of_the_whole_normal_and_can_be_learned_from() -> None:
    dist = some(b=1)
    drawn = dist.rsample((60_000,), generator=torch.Generator().manual_seed(1)).flatten(2)[:, 0]
    whole = written_out(dist)
    torch.testing.assert_close(drawn.mean(0), whole.mean[0], atol=0.06, rtol=0)
    torch.testing.assert_close(drawn.T.cov(), whole.covariance_matrix[0], atol=0.1, rtol=0.05)
    parts = [t.clone().requires_grad_() for t in (dist.mean, dist.own, dist.loading)]
    JointNormal(*parts).rsample().sum().backward()
    assert all(part.grad is not None and float(part.grad.abs().max()) > 0 for part in parts)
    assert not JointNormal(*parts).sample().requires_grad
    with pytest.raises(NotImplementedError, match="not expanded"):
        dist.expand((3,))


def test_a_target_does_not_see_which_others_are_asked_for() -> None:
    model = small("cmanp-joint").requires_grad_(False)
    x, y, xt, _ = data()
    state = model.condition(x, y)
    every, order = model.query(state, xt), [3, 0, 5]
    some_of_them = model.query(state, xt[:, order])
    index = torch.tensor([2 * i + c for i in order for c in range(2)])
    torch.testing.assert_close(
        some_of_them.covariance(), every.covariance()[:, index][:, :, index], atol=1e-9, rtol=0
    )


def test_the_loss_is_of_all_real_targets_together() -> None:
    model = small("cmanp-joint")
    x, y, xt, yt = data()
    mask = ragged(6, [2, 5])
    found = model.loss(x, y, xt, yt, mask_t=mask)
    total = torch.zeros((), dtype=torch.float64)
    for b in range(2):
        one = slice(b, b + 1)
        dist = model.query(model.condition(x[one], y[one]), xt[one][:, mask[b]])
        total = total + written_out_of(dist).log_prob(yt[one][:, mask[b]].flatten(1)).sum()
    torch.testing.assert_close(found, -total / 7, atol=1e-8, rtol=0)


def written_out_of(dist: Any) -> MultivariateNormal:
    return written_out(JointNormal(*(t.detach() for t in (dist.mean, dist.own, dist.loading))))


def test_units_scale_what_targets_have_in_common() -> None:
    model = small("cmanp-joint").requires_grad_(False)
    x, y, xt, _ = data()
    plain = model.query(model.condition(x, y), xt)
    scale = torch.tensor([2.0, 4.0], dtype=torch.float64)
    model.set_scales(Scales(x_mean=[0.0, 0.0], x_std=[1.0, 1.0], y_mean=[1.0, 9.0], y_std=scale))
    shifted = model.query(model.condition(x, scale * y + torch.tensor([1.0, 9.0])), xt)
    torch.testing.assert_close(
        shifted.covariance(),
        plain.covariance() * torch.outer(scale.repeat(6), scale.repeat(6)),
        atol=1e-6,
        rtol=0,
    )


def test_a_block_of_targets_is_drawn_together_and_the_next_given_it() -> None:
    model = small("cmanp-joint").requires_grad_(False)
    x, y, xt, yt = data()
    state = model.condition(x, y)
    at_once = model.query(state, xt).joint_log_prob(yt)
    torch.testing.assert_close(joint_log_prob(model, state, xt, yt, block=6), at_once)
    first, second = (
        model.query(state, xt[:, :4]),
        model.query(model.update(state, xt[:, :4], yt[:, :4]), xt[:, 4:]),
    )
    by_hand = first.joint_log_prob(yt[:, :4]) + second.joint_log_prob(yt[:, 4:])
    torch.testing.assert_close(joint_log_prob(model, state, xt, yt, block=4), by_hand, atol=1e-7, rtol=0)
    one, same = (
        sample_jointly(model, state, xt, block=6, generator=torch.Generator().manual_seed(s)) for s in (0, 0)
    )
    assert torch.equal(one, same)
    expected = model.query(state, xt).sample(generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(one[0], expected, atol=1e-7, rtol=0)


def test_rows_hold_the_joint_likelihood_beside_the_marginal() -> None:
    model = small("cmanp-joint").requires_grad_(False)
    x, y, xt, yt = data()
    mask = ragged(6, [2, 5])
    scores = evaluate(model, [Task(x, y, xt, yt, mask_t=mask)])
    found = model.query(model.condition(x, y), xt).joint_log_prob(yt, mask).sum() / 7
    assert scores.joint_log_likelihood == pytest.approx(float(found))
    assert scores.joint_log_likelihood != pytest.approx(scores.log_likelihood)
    assert evaluate(small("cmanp"), [Task(x, y, xt, yt)]).joint_log_likelihood is None


@pytest.mark.once
def test_a_small_model_learns_that_the_targets_of_a_function_belong_together() -> None:
    """Functions that are one unknown level everywhere: marginals cannot say that."""
    torch.manual_seed(0)
    random = torch.Generator().manual_seed(1)
    model = CMANP(dim_x=1, dim_y=1, rank=4, **LEARNER)

    def task(b: int, n: int = 16) -> tuple[torch.Tensor, torch.Tensor]:
        x = 2 * torch.rand(b, n, 1, generator=random) - 1
        level = torch.randn(b, 1, 1, generator=random)
        return x, level + 0.1 * torch.randn(b, n, 1, generator=random)

    optimiser = torch.optim.Adam(model.parameters(), lr=4e-3)
    for _ in range(150):
        x, y = task(32)
        loss = model.loss(x[:, :0], y[:, :0], x, y)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    x, y = task(200)
    with torch.no_grad():
        dist: Any = model.query(model.empty(200), x)
        marginal, joint = dist.log_prob(y).mean(), dist.joint_log_prob(y).mean() / 16
    noise = 0.01 * torch.eye(16, dtype=torch.float64)
    exact = MultivariateNormal(torch.zeros(16, dtype=torch.float64), noise + 1).log_prob(y[..., 0].double())
    assert joint > marginal + 1.0
    assert joint > exact.mean() / 16 - 0.4
    drawn = dist.sample(generator=random)
    assert float(drawn.std(1).mean()) < 0.4
    assert float(drawn.mean(1).std()) > 0.6


def test_a_step_on_functions_takes_their_tasks_as_they_are() -> None:
    task, _ = next(gp_evaluation_tasks(kernel="rbf", seed=0, num_batches=1))
    torch.manual_seed(0)
    model = CMANP(dim_x=1, dim_y=1, dim=8, depth=1, num_slots=2, num_latents=2, hidden=8, num_heads=1, rank=2)
    model.loss(task.xc, task.yc, task.xt, task.yt).backward()
    assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in model.parameters())

"""Scans, precision and gradients of attention states, against softmaxes written in numpy."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from constmem import AttentionState
from tests.conftest import Refuses
from tests.core.states import (
    B,
    C,
    H,
    Points,
    S,
    assert_identical,
    assert_same,
    assert_state,
    nothing,
    points,
    seeds,
    sharpnesses,
    sizes,
    softmax,
    some,
)

# Scanning


def prefixes(data: Points, added: Tensor | None = None) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    q, k, v = data
    parts = [
        softmax(q, k[..., : i + 1, :], v[..., : i + 1, :], None if added is None else added[:, : i + 1])
        for i in range(k.shape[-2])
    ]
    return np.stack([value for value, _ in parts], 1), np.stack([lse for _, lse in parts], 1)


@given(n=st.integers(1, 9), seed=seeds, sharpness=sharpnesses, chunk=st.integers(1, 10))
def test_a_scan_gives_the_state_of_every_prefix(n: int, seed: int, sharpness: float, chunk: int) -> None:
    data = points(n, seed=seed, sharpness=sharpness)
    states = AttentionState.scan(*data, chunk=chunk)
    assert_state(states, *prefixes(data))
    assert states.count.tolist() == [list(range(1, n + 1))] * B


@given(n=st.integers(1, 9), seed=seeds, chunk=st.integers(1, 10), data=st.data())
def test_a_scan_leaves_out_what_is_masked(n: int, seed: int, chunk: int, data: st.DataObject) -> None:
    q, k, v = points(n, seed=seed)
    mask = torch.tensor(data.draw(st.lists(st.booleans(), min_size=B * n, max_size=B * n))).view(B, n)
    log_weight = torch.randn(B, n, dtype=torch.float64)
    states = AttentionState.scan(q, k, v, mask, log_weight, chunk=chunk)
    assert_state(states, *prefixes((q, k, v), torch.where(mask, log_weight, -float("inf"))))
    assert torch.equal(states.count, mask.cumsum(1))


@pytest.mark.parametrize("chunk", [1, 3, 100])
def test_a_scan_goes_on_from_an_initial_state(chunk: int) -> None:
    q, k, v = data = points(9)
    states = AttentionState.scan(
        q, k[..., 4:, :], v[..., 4:, :], initial=some(data, 0, 4).merge(nothing()), chunk=chunk
    )
    value, lse = prefixes(data)
    assert_state(states, value[:, 4:], lse[:, 4:])
    assert states.count.tolist() == [[5, 6, 7, 8, 9]] * B


def test_a_scan_from_nothing_is_a_scan() -> None:
    data = points(5)
    assert_same(AttentionState.scan(*data, initial=nothing()), AttentionState.scan(*data))


@pytest.mark.parametrize("chunk", [1, 3, 32])
def test_a_scan_goes_on_from_pairs_of_float32_in_pairs(chunk: int) -> None:
    """Each point weighs a millionth of what came before: float32 alone would be off by 1e-7."""
    data = points(11)
    q, k, v = (data[0], *(t[..., 4:, :] for t in data[1:]))
    initial = some(data, 0, 4).decay(14.0)
    states = AttentionState.scan(q, k, v, initial=initial.to(dtype=torch.float32), chunk=chunk)
    assert states.low is not None
    assert states.value.dtype == torch.float32
    expected = AttentionState.scan(q, k, v, initial=initial, chunk=chunk)
    assert_same(states.to(dtype=torch.float64), expected, 1e-11)


def test_a_scan_from_another_shape_of_state_is_refused(refuses: Refuses) -> None:
    data = points(3)
    for initial in (nothing(3), AttentionState.empty((B, *H, S + 1), C)):
        with refuses(ValueError, r"cannot scan from a state of \(.* both must come from the same model"):
            AttentionState.scan(*data, initial=initial)


@pytest.mark.parametrize("slope", [30.0, -30.0])
def test_a_scan_does_not_mind_scores_that_drift(slope: float) -> None:
    n = 2000
    q = torch.ones(1, 1, 1, dtype=torch.float64)
    k = slope * torch.arange(n, dtype=torch.float64).view(1, 1, n, 1)
    v = torch.randn(1, 1, n, 1, dtype=torch.float64)
    states = AttentionState.scan(q, k, v)
    scores, values = k.flatten().numpy(), v.flatten().numpy()
    value, lse = values[0], scores[0]
    for i in range(n):
        if i:
            whole = np.logaddexp(lse, scores[i])
            value = value * np.exp(lse - whole) + values[i] * np.exp(scores[i] - whole)
            lse = whole
        assert abs(float(states.value[0, i]) - value) < 1e-9
        assert abs(float(states.lse[0, i]) - lse) < 1e-9


@pytest.mark.parametrize("chunk", [2, 100])
def test_gradients_of_a_scan_are_those_of_all_prefixes(chunk: int) -> None:
    q, k, v = (t.requires_grad_() for t in points(7))
    states = AttentionState.scan(q, k, v, chunk=chunk)
    grad_value, grad_lse = torch.randn_like(states.value), torch.randn_like(states.lse)
    found = torch.autograd.grad((states.value, states.lse), (q, k, v), (grad_value, grad_lse))
    loss = torch.zeros((), dtype=torch.float64)
    for i in range(7):
        scores = q @ k[..., : i + 1, :].mT
        loss = loss + (scores.softmax(-1) @ v[..., : i + 1, :] * grad_value[:, i]).sum()
        loss = loss + (scores.logsumexp(-1) * grad_lse[:, i]).sum()
    expected = torch.autograd.grad(loss, (q, k, v))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, atol=1e-10, rtol=0)


def test_the_future_changes_no_prefix() -> None:
    q, k, v = points(8)
    states = AttentionState.scan(q, k, v, chunk=3)
    k, v = k.clone(), v.clone()
    k[..., 5:, :], v[..., 5:, :] = 1e3, 1e3
    changed = AttentionState.scan(q, k, v, chunk=3)
    assert torch.equal(changed.value[:, :5], states.value[:, :5])
    assert torch.equal(changed.lse[:, :5], states.lse[:, :5])


def test_there_is_no_prefix_of_nothing() -> None:
    with pytest.raises(ValueError, match="scan needs at least one point"):
        AttentionState.scan(*points(0))


# Precision


def test_pairs_of_float32_hold_what_single_ones_lose() -> None:
    """20,000 merges of one point: plain float32 drifts, pairs of float32 stay with float64."""
    n = 20_000
    random = np.random.default_rng(0)
    scores, values = 300 + random.normal(size=n), random.normal(size=n) + np.linspace(1, 2, n)
    weights = np.exp(scores - 300)
    value, lse = weights @ values / weights.sum(), 300 + np.log(weights.sum())
    v, s = torch.as_tensor(values).view(n, 1, 1, 1), torch.as_tensor(scores).view(n, 1, 1)
    each = AttentionState(v, s, torch.ones(n, dtype=torch.int64)).to(dtype=torch.float32)
    assert each.low is not None
    held = (t.split(1) for t in (each.value, each.lse, each.count, *each.low))
    parts = [
        AttentionState(v, s, count, low=(low[0], low[1])) for v, s, count, *low in zip(*held, strict=True)
    ]
    paired, plain = parts[0], (parts[0].value, parts[0].lse)
    for part in parts[1:]:
        paired = paired.merge(part)
        share = (part.lse - plain[1]).sigmoid()
        plain = plain[0].lerp(part.value, share[..., None]), plain[1].logaddexp(part.lse)
    whole = paired.to(dtype=torch.float64)
    assert whole.count.item() == n
    assert abs(whole.value.item() / value - 1) < 1e-6
    assert abs(whole.lse.item() - lse) < 1e-6
    assert abs(plain[0].item() / value - 1) > 1e-5
    assert abs(plain[1].item() - lse) > 1e-3


@given(n=sizes, m=sizes, seed=seeds, sharpness=sharpnesses, shift=st.floats(-30, 30))
def test_pairs_of_float32_obey_the_same_laws(
    n: int, m: int, seed: int, sharpness: float, shift: float
) -> None:
    data = points(n + m, seed=seed, sharpness=sharpness)
    left, right = some(data, 0, n), some(data, n, n + m)
    single = left.to(dtype=torch.float32), right.to(dtype=torch.float32)
    for a, b, expected in (
        (single[0], single[1], left.merge(right)),
        (single[1], single[0], left.merge(right)),
        (single[0].decay(shift), single[1], left.decay(shift).merge(right)),
    ):
        merged = a.merge(b)
        assert merged.value.dtype == merged.lse.dtype == torch.float32
        assert_same(merged.to(dtype=torch.float64), expected, 1e-6 if sharpness < 1e4 else 1e-5)


def test_pairs_of_float32_hold_nearly_all_of_float64() -> None:
    state = some(points(5), 0, 5)
    back = state.to(dtype=torch.float32).to(dtype=torch.float64)
    assert back.low is None
    assert_same(back, state, 1e-13)


def test_a_state_is_as_large_as_it_says() -> None:
    state = some(points(5), 0, 5)
    slots = B * 2 * 3 * S
    assert state.nbytes == slots * (C + 1) * 8 + B * 8
    assert state.to(dtype=torch.float32).nbytes == state.nbytes
    assert some(points(1), 0, 1).nbytes == some(points(500), 0, 500).nbytes == state.nbytes


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.int64])
def test_states_in_other_precisions_are_refused(dtype: torch.dtype) -> None:
    with pytest.raises(ValueError, match="accumulated in float64 or paired float32, not in"):
        some(points(3), 0, 3).to(dtype=dtype)


# Differentiating


@pytest.mark.parametrize("n", [1, 4])
def test_observing_merging_decaying_and_removing_are_differentiable(n: int) -> None:
    q, k, v = points(2 * n + 1, seed=1, b=1)
    mask = torch.ones(1, 2 * n + 1, dtype=torch.bool)
    mask[0, 0] = n == 1

    def through(q: Tensor, k: Tensor, v: Tensor, log_weight: Tensor) -> tuple[Tensor, Tensor]:
        left = AttentionState.observe(q, k[..., :n, :], v[..., :n, :], mask[:, :n], log_weight[:, :n])
        right = AttentionState.observe(q, k[..., n:-1, :], v[..., n:-1, :])
        last = AttentionState.observe(q, k[..., -1:, :], v[..., -1:, :])
        state = left.decay(-0.5).merge(right).merge(last).remove(last)
        return state.value, state.lse

    q, k, v = q[:1, :1, :2], k[:, :1, :1], v[:, :1, :1]
    leaves = [t.clone().requires_grad_() for t in (q, k, v, torch.randn(1, 2 * n + 1).double())]
    assert torch.autograd.gradcheck(through, leaves)


def test_merging_with_nothing_passes_gradients_through() -> None:
    q, k, v = (t.requires_grad_() for t in points(3))
    state = nothing().merge(AttentionState.observe(q, k, v)).merge(nothing())
    found = torch.autograd.grad(state.value.square().sum() + state.lse.sum(), (q, k, v))
    state = AttentionState.observe(q, k, v)
    expected = torch.autograd.grad(state.value.square().sum() + state.lse.sum(), (q, k, v))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


def test_masked_points_have_no_gradient() -> None:
    q, k, v = (t.requires_grad_() for t in points(4))
    mask = torch.tensor([[True, True, False, False], [False] * 4])
    state = AttentionState.observe(q, k, v, mask)
    for grad in torch.autograd.grad(state.value.sum() + state.lse.sum(), (k, v)):
        assert bool(grad.isfinite().all())
        assert not bool(grad.transpose(-1, -2).movedim(0, -2)[..., ~mask].any())


def test_a_detached_state_has_no_history() -> None:
    q, k, v = (t.requires_grad_() for t in points(3))
    state = AttentionState.observe(q, k, v)
    assert state.value.requires_grad
    assert state.lse.requires_grad
    for free in (state.detach(), state.to(dtype=torch.float32).detach()):
        assert not any(t.requires_grad for t in (free.value, free.lse, *(free.low or ())))
    assert_identical(state.detach(), state)

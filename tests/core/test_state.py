"""The algebra of attention states, law by law, against softmaxes written in numpy."""

import os
from collections.abc import Callable
from dataclasses import FrozenInstanceError, replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from safetensors.torch import save_file
from torch import Tensor, nn

from constmem import AttentionState
from constmem.core.algebra import EMPTY
from constmem.core.files import read_tensors, write_tensors
from tests.conftest import Refuses

Points = tuple[Tensor, Tensor, Tensor]
B, H, S, C = 2, (2, 3), 4, 5

seeds = st.integers(0, 2**31)
sizes = st.integers(0, 9)
sharpnesses = st.sampled_from([1e-3, 1.0, 30.0, 1e4])


def points(
    n: int, *, seed: int = 0, sharpness: float = 1.0, dtype: torch.dtype = torch.float64, b: int = B
) -> Points:
    """Queries, keys and values of n points; scores spread over about +-sharpness."""
    random = torch.Generator().manual_seed(seed)
    q = torch.randn(*H, S, C, generator=random, dtype=torch.float64)
    q = sharpness * q / q.norm(dim=-1, keepdim=True)
    k = torch.randn(b, *H, n, C, generator=random, dtype=torch.float64)
    v = torch.randn(b, *H, n, C, generator=random, dtype=torch.float64)
    return q.to(dtype), k.to(dtype), v.to(dtype)


def some(data: Points, start: int, stop: int) -> AttentionState:
    q, k, v = data
    return AttentionState.observe(q, k[..., start:stop, :], v[..., start:stop, :])


def softmax(
    q: Tensor, k: Tensor, v: Tensor, added: Tensor | None = None
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Value and log-normaliser in numpy's float64, one softmax after another; -inf leaves points out."""
    queries, keys, values = (t.detach().double().numpy() for t in (q, k, v))
    b, *heads, n, c = keys.shape
    bias = np.zeros((b, n)) if added is None else added.double().numpy()
    value = np.zeros((b, *heads, queries.shape[-2], c))
    lse = np.full(value.shape[:-1], EMPTY)
    for i, *h, s in np.ndindex(lse.shape):
        here = (i, *h)
        scores = keys[here] @ queries[(*h, s)] + bias[i]
        top = scores.max(initial=-np.inf)
        if top > -np.inf:
            weights = np.exp(scores - top)
            value[(*here, s)] = weights @ values[here] / weights.sum()
            lse[(*here, s)] = top + np.log(weights.sum())
    return value, lse


def assert_state(state: AttentionState, value: object, lse: object, tolerance: float = 1e-9) -> None:
    torch.testing.assert_close(state.value, torch.as_tensor(value).double(), atol=tolerance, rtol=0)
    torch.testing.assert_close(state.lse, torch.as_tensor(lse).double(), atol=tolerance, rtol=tolerance)


def assert_same(left: AttentionState, right: AttentionState, tolerance: float = 1e-9) -> None:
    assert_state(left, right.value, right.lse, tolerance)
    assert torch.equal(left.count, right.count)


def assert_identical(left: AttentionState, right: AttentionState) -> None:
    assert torch.equal(left.value, right.value)
    assert torch.equal(left.lse, right.lse)
    assert torch.equal(left.count, right.count)


def copy_of(state: AttentionState) -> AttentionState:
    return replace(state, value=state.value.clone(), lse=state.lse.clone(), count=state.count.clone())


def nothing(b: int = B) -> AttentionState:
    return AttentionState.empty((b, *H, S), C)


# Observing


@given(n=sizes, seed=seeds, sharpness=sharpnesses)
def test_observing_is_the_softmax_and_the_logarithm_of_its_normaliser(
    n: int, seed: int, sharpness: float
) -> None:
    data = points(n, seed=seed, sharpness=sharpness)
    state = AttentionState.observe(*data)
    assert_state(state, *softmax(*data))
    assert state.count.tolist() == [n, n]


@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 5e-2), (torch.float16, 5e-3)],
)
def test_states_are_float64_whatever_the_data(dtype: torch.dtype, tolerance: float) -> None:
    data = points(7, dtype=dtype)
    state = AttentionState.observe(*data)
    assert state.value.dtype == state.lse.dtype == torch.float64
    assert_state(state, *softmax(*data), tolerance)


def test_heads_may_have_any_number_of_axes() -> None:
    q, k, v = points(6)
    whole = AttentionState.observe(q, k, v)
    one = AttentionState.observe(q[1], k[:, 1], v[:, 1])
    torch.testing.assert_close(one.value, whole.value[:, 1])
    torch.testing.assert_close(one.lse, whole.lse[:, 1])


def test_queries_and_points_without_an_axis_of_heads_are_refused(refuses: Refuses) -> None:
    q, k, v = points(6)
    q, k, v = q[0, 0], k[:, 0, 0], v[:, 0, 0]
    message = r"shapes \(4, 5\), \(2, 6, 5\) and \(2, 6, 5\), .* single head use q\[None\], k\[:, None\]"
    for verb in (AttentionState.observe, AttentionState.scan):
        with refuses(ValueError, message):
            verb(q, k, v)
        assert verb(q[None], k[:, None], v[:, None]).value.shape[-3:] == (1, S, C)
    with refuses(ValueError, "at least one axis of heads"):
        AttentionState.observe(q[None], k, v)


@given(n=sizes, seed=seeds, sharpness=sharpnesses)
def test_log_weights_are_added_to_the_scores(n: int, seed: int, sharpness: float) -> None:
    q, k, v = points(n, seed=seed, sharpness=sharpness)
    log_weight = torch.randn(B, n, dtype=torch.float64)
    state = AttentionState.observe(q, k, v, log_weight=log_weight)
    assert_state(state, *softmax(q, k, v, log_weight))


def test_a_weight_of_two_is_seeing_a_point_twice() -> None:
    q, k, v = points(4)
    twice = AttentionState.observe(q, torch.cat([k, k[..., :1, :]], -2), torch.cat([v, v[..., :1, :]], -2))
    log_weight = torch.zeros(B, 4, dtype=torch.float64)
    log_weight[:, 0] = np.log(2)
    weighted = AttentionState.observe(q, k, v, log_weight=log_weight)
    assert_state(weighted, twice.value, twice.lse)


@given(n=sizes, seed=seeds, sharpness=sharpnesses, data=st.data())
def test_masking_is_leaving_out(n: int, seed: int, sharpness: float, data: st.DataObject) -> None:
    q, k, v = points(n, seed=seed, sharpness=sharpness)
    mask = torch.tensor(data.draw(st.lists(st.booleans(), min_size=B * n, max_size=B * n))).view(B, n).bool()
    state = AttentionState.observe(q, k, v, mask)
    for i in range(B):
        keep = mask[i]
        left = AttentionState.observe(q, k[i : i + 1, ..., keep, :], v[i : i + 1, ..., keep, :])
        torch.testing.assert_close(state.value[i : i + 1], left.value, atol=1e-9, rtol=0)
        torch.testing.assert_close(state.lse[i : i + 1], left.lse, atol=1e-9, rtol=1e-9)
        assert state.count[i] == keep.sum()


@pytest.mark.parametrize("n", [1, 2, 5, 300])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_all_masked_is_exactly_nothing(n: int, dtype: torch.dtype) -> None:
    q, k, v = points(n, dtype=dtype)
    state = AttentionState.observe(q, k, v, torch.zeros(B, n, dtype=torch.bool))
    assert_identical(state, nothing())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_masking_is_leaving_out_in_every_precision(dtype: torch.dtype) -> None:
    q, k, v = points(300, dtype=dtype)
    mask = torch.arange(300).expand(B, -1) % 3 > 0
    left = AttentionState.observe(q, k[..., mask[0], :], v[..., mask[0], :])
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5}.get(dtype, 2e-2)
    assert_same(AttentionState.observe(q, k, v, mask), left, tolerance)


def test_a_weight_of_nothing_is_a_mask() -> None:
    q, k, v = points(5)
    mask = torch.tensor([[True, False, True, True, False], [False] * 5])
    weight = torch.where(mask, 0.0, -float("inf")).double()
    weighted, masked = (
        AttentionState.observe(q, k, v, log_weight=weight),
        AttentionState.observe(q, k, v, mask),
    )
    assert_state(weighted, masked.value, masked.lse)


def test_mask_and_weights_go_together() -> None:
    q, k, v = points(5)
    mask = torch.tensor([[True, False, True, True, False], [True, True, False, True, True]])
    log_weight = torch.randn(B, 5, dtype=torch.float64)
    added = torch.where(mask, log_weight, -float("inf"))
    assert_state(AttentionState.observe(q, k, v, mask, log_weight), *softmax(q, k, v, added))


# Merging


@given(n=sizes, seed=seeds, sharpness=sharpnesses, cuts=st.lists(sizes, max_size=4))
def test_any_split_equals_observing_all(n: int, seed: int, sharpness: float, cuts: list[int]) -> None:
    data = points(n, seed=seed, sharpness=sharpness)
    edges = [0, *sorted(min(cut, n) for cut in cuts), n]
    state = nothing()
    for start, stop in pairwise(edges):
        state = state.merge(some(data, start, stop))
    assert_state(state, *softmax(*data))
    assert state.count.tolist() == [n, n]


@given(n=sizes, m=sizes, seed=seeds, sharpness=sharpnesses)
def test_merging_is_commutative(n: int, m: int, seed: int, sharpness: float) -> None:
    data = points(n + m, seed=seed, sharpness=sharpness)
    left, right = some(data, 0, n), some(data, n, n + m)
    assert_same(left.merge(right), right.merge(left), 1e-12)


@given(n=sizes, m=sizes, k=sizes, seed=seeds, sharpness=sharpnesses)
def test_merging_is_associative(n: int, m: int, k: int, seed: int, sharpness: float) -> None:
    data = points(n + m + k, seed=seed, sharpness=sharpness)
    a, b, c = some(data, 0, n), some(data, n, n + m), some(data, n + m, n + m + k)
    assert_same(a.merge(b).merge(c), a.merge(b.merge(c)), 1e-10)


@given(n=sizes, seed=seeds, sharpness=sharpnesses)
def test_nothing_is_the_identity_to_the_last_bit(n: int, seed: int, sharpness: float) -> None:
    state = AttentionState.observe(*points(n, seed=seed, sharpness=sharpness))
    assert_identical(state.merge(nothing()), state)
    assert_identical(nothing().merge(state), state)


def test_merging_one_point_into_many_keeps_its_share() -> None:
    """A share of 1e-12 is far below float32 and the paper's rule; it must still move the value."""
    q, k, v = points(2)
    many = AttentionState.observe(q, k[..., :1, :], v[..., :1, :]).decay(float(np.log(1e12)))
    moved = many.merge(AttentionState.observe(q, k[..., 1:, :], v[..., 1:, :]))
    log_weight = torch.tensor([[np.log(1e12), 0.0]] * B)
    value, lse = softmax(q, k, v, log_weight)
    np.testing.assert_allclose(moved.value, value, atol=1e-15)
    np.testing.assert_allclose(moved.lse, lse, atol=1e-14)
    assert bool((moved.lse > many.lse).all())


def test_states_that_differ_do_not_merge(refuses: Refuses) -> None:
    state = AttentionState.observe(*points(3))
    for other in (
        AttentionState.observe(*points(3, b=1)),
        state.to(dtype=torch.float32),
        replace(state, value=state.value.to("meta"), lse=state.lse.to("meta")),
    ):
        for verb in ("merge", "remove"):
            with refuses(ValueError, f"cannot {verb} states that differ"):
                getattr(state, verb)(other)


def test_states_of_other_weights_do_not_merge() -> None:
    state = AttentionState.observe(*points(3))
    mine, theirs = replace(state, fingerprint="mine"), replace(state, fingerprint="theirs")
    for verb in ("merge", "remove"):
        with pytest.raises(
            ValueError, match=rf"cannot {verb} states made by different weights \(mine and th"
        ):
            getattr(mine, verb)(theirs)


def test_a_fingerprint_is_kept_where_both_sides_are_known() -> None:
    unknown = AttentionState.observe(*points(3))
    mine = replace(unknown, fingerprint="mine")
    assert mine.merge(mine).fingerprint == mine.merge(mine).remove(mine).fingerprint == "mine"
    assert mine.merge(nothing()).fingerprint == nothing().merge(mine).fingerprint == "mine"
    assert mine.merge(unknown).fingerprint is unknown.merge(mine).fingerprint is None  # not to be vouched for
    assert mine.merge(unknown).remove(unknown).fingerprint is None
    assert mine.decay(-1.0).fingerprint == mine.detach().fingerprint == "mine"
    assert mine.to(dtype=torch.float32).fingerprint == "mine"


# Removing


@given(n=st.integers(1, 9), m=sizes, seed=seeds)
def test_removing_undoes_merging(n: int, m: int, seed: int) -> None:
    data = points(n + m, seed=seed)
    kept, gone = some(data, 0, n), some(data, n, n + m)
    assert_same(kept.merge(gone).remove(gone), kept)


@given(n=sizes, seed=seeds, sharpness=sharpnesses)
def test_removing_everything_gives_exactly_nothing(n: int, seed: int, sharpness: float) -> None:
    state = AttentionState.observe(*points(n, seed=seed, sharpness=sharpness))
    assert_identical(state.remove(state), nothing())


def test_tasks_of_a_batch_may_lose_all_some_or_nothing() -> None:
    q, k, v = points(6, b=3)
    kept = torch.tensor([[False] * 6, [True] * 3 + [False] * 3, [True] * 6])
    gone = torch.tensor([[False] * 6, [False] * 3 + [True] * 3, [False] * 6])
    gone[0, :2] = True
    left = AttentionState.observe(q, k, v, kept)
    found = left.merge(AttentionState.observe(q, k, v, gone)).remove(AttentionState.observe(q, k, v, gone))
    assert_same(found, left)
    assert torch.equal(found.value[0], torch.zeros_like(found.value[0]))


def test_removing_what_was_never_there_is_refused() -> None:
    data = points(9)
    heavy = some(data, 4, 9).decay(50.0)
    with pytest.raises(
        ValueError, match=r"cannot remove \[5, 5\] points from a state of \[9, 9\]: .*never th"
    ):
        some(data, 0, 9).remove(heavy)


def test_removing_more_points_than_were_seen_is_refused() -> None:
    data = points(9)
    with pytest.raises(ValueError, match=r"cannot remove \[5, 5\] points from a state of \[4, 4\]"):
        some(data, 0, 4).remove(some(data, 4, 9).decay(-20.0))


def test_removing_as_many_other_points_is_refused() -> None:
    data = points(8)
    with pytest.raises(ValueError, match="they were never there"):
        some(data, 0, 4).remove(some(data, 4, 8).decay(-5.0))


def test_removing_points_from_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match=r"cannot remove \[2, 2\] points from a state of \[0, 0\]"):
        nothing().remove(some(points(2), 0, 2))


def test_removing_all_of_a_slot_but_not_all_points_is_refused_whatever_is_allowed() -> None:
    data = points(6)
    kept, gone = some(data, 0, 3), some(data, 3, 6).decay(60.0)  # of which float64 keeps nothing
    with pytest.raises(ValueError, match=r"hold 1\.000000 .* condition again on the points to keep$"):
        kept.merge(gone).remove(gone, max_share=1.0)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_weights_to_decay_by_are_finite(bad: float) -> None:
    state = AttentionState.observe(*points(3))
    for log_weight in (bad, torch.tensor([0.0, bad])):
        with pytest.raises(ValueError, match="log_weight must be finite"):
            state.decay(log_weight)


def test_removing_what_dominates_is_refused_before_it_cancels() -> None:
    data = points(6)
    kept, gone = some(data, 0, 3), some(data, 3, 6).decay(25.0)
    whole = kept.merge(gone)
    with pytest.raises(ValueError, match=r"hold 1\.0000.*max_share=0.999.*cancels"):
        whole.remove(gone)
    assert_same(whole.remove(gone, max_share=1.0), kept, 1e-2)


def test_the_largest_share_decides() -> None:
    data = points(6)
    kept, gone = some(data, 0, 3), some(data, 3, 6)
    whole = kept.merge(gone)
    share = float((gone.lse - whole.lse).exp().max())
    assert_same(whole.remove(gone, max_share=share + 1e-9), kept)
    with pytest.raises(ValueError, match=f"hold {share:.6f}"):
        whole.remove(gone, max_share=share - 1e-9)


def test_removing_needs_float64() -> None:
    state = AttentionState.observe(*points(3)).to(dtype=torch.float32)
    with pytest.raises(ValueError, match="remove needs float64"):
        state.remove(state)


def test_a_refused_removal_leaves_the_state_as_it_was() -> None:
    data = points(9)
    state = some(data, 0, 4)
    before = copy_of(state)
    with pytest.raises(ValueError, match="cannot remove"):
        state.remove(some(data, 0, 9))
    assert_identical(state, before)


# Decaying


@given(n=sizes, m=sizes, seed=seeds, sharpness=sharpnesses, shift=st.floats(-50, 50))
def test_decaying_is_weighting(n: int, m: int, seed: int, sharpness: float, shift: float) -> None:
    q, k, v = data = points(n + m, seed=seed, sharpness=sharpness)
    log_weight = torch.zeros(B, n + m, dtype=torch.float64)
    log_weight[:, :n] = shift
    state = some(data, 0, n).decay(shift).merge(some(data, n, n + m))
    assert_state(state, *softmax(q, k, v, log_weight))
    assert state.count.tolist() == [n + m] * B


def test_tasks_of_a_batch_may_decay_apart() -> None:
    data = points(4)
    shift = torch.tensor([-1.0, 2.0])
    found = some(data, 0, 4).decay(shift)
    torch.testing.assert_close(found.lse, some(data, 0, 4).lse + shift.double().view(-1, 1, 1, 1))


@pytest.mark.parametrize("shift", [-3.0, 700.0, torch.tensor([-3.0, 5.0])])
def test_nothing_decays_to_nothing(shift: float | Tensor) -> None:
    assert_identical(nothing().decay(shift), nothing())


@pytest.mark.parametrize("shift", [float("inf"), -float("inf"), float("nan")])
def test_decays_that_are_no_numbers_are_refused(shift: float) -> None:
    with pytest.raises(ValueError, match="log_weight must be finite"):
        some(points(3), 0, 3).decay(shift)


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


# Never changing


@pytest.mark.parametrize("n", [1, 4])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_state_does_not_alias_what_it_was_made_of(n: int, dtype: torch.dtype) -> None:
    q, k, v = points(n, dtype=dtype)
    mask, log_weight = torch.ones(B, n, dtype=torch.bool), torch.zeros(B, n, dtype=dtype)
    for state in (
        AttentionState.observe(q, k, v),
        AttentionState.observe(q, k, v, mask, log_weight),
        AttentionState.scan(q, k, v, mask, log_weight),
    ):
        before = copy_of(state)
        kept = [t.clone() for t in (q, k, v, mask, log_weight)]
        for tensor in (q, k, v, log_weight):
            tensor.fill_(7.0)
        mask.fill_(False)
        assert_identical(state, before)
        for tensor, old in zip((q, k, v, mask, log_weight), kept, strict=True):
            tensor.copy_(old)


def test_verbs_leave_their_arguments_as_they_were() -> None:
    data = points(6)
    left, right = some(data, 0, 3), some(data, 3, 6)
    before = copy_of(left), copy_of(right)
    left.merge(right).remove(right)
    left.decay(-2.0)
    left.to(dtype=torch.float32)
    AttentionState.scan(*data, initial=left)
    assert_identical(left, before[0])
    assert_identical(right, before[1])


def test_a_state_cannot_be_changed() -> None:
    state = some(points(3), 0, 3)
    with pytest.raises(FrozenInstanceError):
        state.value = torch.zeros(1)  # type: ignore[misc]


# Files


def saved(tmp_path: Path) -> tuple[AttentionState, Path]:
    state = replace(some(points(5), 0, 5), fingerprint="abc")
    state.save(tmp_path / "state")
    return state, tmp_path / "state"


def test_a_state_comes_back_from_its_file(tmp_path: Path) -> None:
    state, path = saved(tmp_path)
    found = AttentionState.load(path)
    assert_identical(found, state)
    assert found.fingerprint == "abc"
    assert found.low is None
    assert found.value.dtype == torch.float64
    assert_identical(AttentionState.load(path, device="cpu"), state)


@pytest.mark.parametrize("n", [0, 1, 3])
def test_small_states_come_back_from_their_files(tmp_path: Path, n: int) -> None:
    state = some(points(n), 0, n)
    state.save(tmp_path / "state")
    found = AttentionState.load(tmp_path / "state")
    assert_identical(found, state)
    assert found.fingerprint is None


def test_pairs_of_float32_come_back_from_their_file(tmp_path: Path) -> None:
    state = some(points(5), 0, 5).to(dtype=torch.float32)
    state.save(tmp_path / "state")
    found = AttentionState.load(tmp_path / "state")
    assert_identical(found, state)
    assert_identical(found.to(dtype=torch.float64), state.to(dtype=torch.float64))


def test_a_missing_state_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"there is no file .*nowhere: expected a constmem.state"):
        AttentionState.load(tmp_path / "nowhere")


@pytest.mark.parametrize("size", [0, 7, 200, 2000])
def test_a_truncated_state_file_is_refused(tmp_path: Path, size: int) -> None:
    _, path = saved(tmp_path)
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(
        ValueError, match=r"not a readable safetensors file .*; write the constmem.state again"
    ):
        AttentionState.load(path)


def test_a_file_that_is_no_state_is_refused(tmp_path: Path) -> None:
    save_file({"value": torch.rand(3)}, tmp_path / "foreign")
    with pytest.raises(ValueError, match=r"holds 'no constmem header' where 'constmem.state' was expected"):
        AttentionState.load(tmp_path / "foreign")


def test_a_state_file_of_a_newer_version_is_refused(tmp_path: Path) -> None:
    state, path = saved(tmp_path)
    tensors = {"value": state.value, "lse": state.lse.contiguous(), "count": state.count}
    save_file(tensors, path, {"format": "constmem.state", "version": "2", "fingerprint": ""})
    with pytest.raises(ValueError, match="format version 2; this constmem reads version 1: install"):
        AttentionState.load(path)


Change = Callable[[dict[str, Tensor]], object]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: (t.pop("lse"), t.pop("count")), r"lacks \['count', 'lse'\]"),
        (lambda t: t.update(lse=t["lse"][:1]), "do not fit|different batches"),
        (lambda t: t.update(lse=t["lse"].float()), "lse that does not fit"),
        (lambda t: t.update(mask=torch.ones(B)), r"holds \['mask'\], which nobody knows"),
        (lambda t: t["value"][0, 0, 0, 0].fill_(torch.nan), "value with NaN or infinity"),
        (lambda t: t["lse"][0, 0, 0, 0].fill_(torch.inf), "lse with NaN or infinity"),
        (lambda t: t["count"].fill_(-3), "counts that are no whole numbers"),
        (lambda t: t.update(count=t["count"].double()), "counts that are no whole numbers"),
        (lambda t: t.update(value_low=t["value"].float()), r"lacks \['lse_low'\]"),
        (lambda t: t.update(value=t["value"].long(), lse=t["lse"].long()), "does not fit"),
    ],
)
def test_a_file_that_is_whole_but_holds_no_state_is_refused(
    tmp_path: Path, change: Change, message: str
) -> None:
    _, path = saved(tmp_path)
    tensors, header = read_tensors(path, kind="constmem.state", version=1)
    change(tensors)
    write_tensors(path, tensors, header)  # with a checksum of what it holds now
    with pytest.raises(ValueError, match=f"state is damaged: it .*({message})"):
        AttentionState.load(path)


@pytest.mark.parametrize("where", ["fsync", "replace"])
def test_a_full_disk_leaves_the_old_state_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    state, path = saved(tmp_path)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, where, full)
    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(OSError, match="No space left"):
        state.decay(-1.0).save(path)
    monkeypatch.undo()
    assert_identical(AttentionState.load(path), state)
    assert list(tmp_path.iterdir()) == [path]


# Transforms


class Both(nn.Module):
    """Two observations merged, decayed and removed again, on plain tensors."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        left = AttentionState.observe(q, k[..., :3, :], v[..., :3, :], mask[..., :3])
        right = AttentionState.observe(q, k[..., 3:, :], v[..., 3:, :], mask[..., 3:])
        state = left.decay(-0.25).merge(right)
        return state.value, state.lse


class Prefixes(nn.Module):
    """A scan on plain tensors."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        states = AttentionState.scan(q, k, v, mask, chunk=4)
        return states.value, states.lse


both_ways = pytest.mark.parametrize("function", [Both(), Prefixes()], ids=["merge", "scan"])
Function = Callable[..., tuple[Tensor, Tensor]]


def plain(dtype: torch.dtype = torch.float64, b: int = B) -> tuple[Tensor, ...]:
    return *points(7, dtype=dtype, b=b), torch.arange(b * 7).view(b, 7) % 4 > 0


@pytest.mark.compiles
@both_ways
def test_the_algebra_compiles(function: Function) -> None:
    arguments = plain()
    torch._dynamo.reset()
    compiled = torch.compile(function, backend="eager", fullgraph=True)
    for found, expected in zip(compiled(*arguments), function(*arguments), strict=True):
        torch.testing.assert_close(found, expected)


@pytest.mark.compiles
@both_ways
def test_compiled_gradients_are_the_same(function: Function) -> None:
    q, k, v, mask = plain()
    torch._dynamo.reset()
    compiled = torch.compile(function, backend="aot_eager")
    grads = []
    for f in (compiled, function):
        leaves = [t.clone().requires_grad_() for t in (q, k, v)]
        value, lse = f(*leaves, mask)
        grads.append(torch.autograd.grad(value.square().sum() + lse.sum(), leaves))
    for found, expected in zip(*grads, strict=True):
        torch.testing.assert_close(found, expected)


@pytest.mark.compiles
@both_ways
def test_the_algebra_is_exported(function: nn.Module) -> None:
    arguments = plain()
    exported = torch.export.export(function, arguments).module()
    other = tuple(t if i == 3 else t.flip(-1) + 0.5 for i, t in enumerate(arguments))
    for found, expected in zip(exported(*other), function(*other), strict=True):
        torch.testing.assert_close(found, expected)


@pytest.mark.compiles
@both_ways
def test_the_algebra_is_mapped_over_further_axes(function: Function) -> None:
    q, k, v, mask = plain(b=6)
    k, v, mask = (t.unflatten(0, (3, 2)) for t in (k, v, mask))
    found = torch.vmap(function, in_dims=(None, 0, 0, 0))(q, k, v, mask)
    for i in range(3):
        for one, other in zip(found, function(q, k[i], v[i], mask[i]), strict=True):
            torch.testing.assert_close(one[i], other)


@pytest.mark.compiles
def test_single_points_are_mapped_too() -> None:
    q, k, v, _ = plain(b=6)
    k, v = (t[..., :1, :].unflatten(0, (3, 2)) for t in (k, v))
    found = torch.vmap(lambda k, v: AttentionState.observe(q, k, v).value)(k, v)
    torch.testing.assert_close(found, v.expand(-1, -1, -1, -1, S, -1))

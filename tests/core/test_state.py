"""The algebra of attention states, law by law, against softmaxes written in numpy."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from constmem import AttentionState
from tests.conftest import Refuses
from tests.core.states import (
    B,
    C,
    S,
    assert_identical,
    assert_same,
    assert_state,
    copy_of,
    nothing,
    points,
    seeds,
    sharpnesses,
    sizes,
    softmax,
    some,
)

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

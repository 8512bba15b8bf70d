"""Machine code for many streams at once: threads and large memory change no bit."""

import os

import pytest
import torch

from constmem import CMANP
from constmem.core.state import AttentionState
from constmem.kernels import cpu

pytestmark = pytest.mark.skipif(cpu.library() is None, reason="there is no C++ compiler")
LARGE = 2**25  # bytes from which a result is taken to be fresh memory


def model(dim: int = 64) -> CMANP:
    return CMANP(dim_x=1, dim_y=1, dim=dim, depth=6, num_heads=4, num_slots=128, num_latents=4).eval()


def states(batch: int, cmanp: CMANP) -> AttentionState:
    x, y = torch.randn(1, 12, 1), torch.randn(1, 12, 1)
    first = cmanp.condition(x, y)
    noise = torch.randn(batch, *first.value.shape[1:], dtype=torch.float64)
    lse = first.lse + torch.randn(batch, *first.lse.shape[1:], dtype=torch.float64)
    return AttentionState(first.value + noise, lse, first.count.expand(batch), first.fingerprint)


@pytest.mark.parametrize("streams", [1, 7, 90])
@torch.no_grad()
def test_updating_many_streams_is_to_the_bit_updating_each_alone(streams: int) -> None:
    cmanp = model()
    state, x, y = states(streams, cmanp), torch.randn(streams, 1, 1), torch.randn(streams, 1, 1)
    assert (state.value.nbytes > LARGE) == (streams == 90)
    alone = [
        cmanp.update(
            AttentionState(state.value[i : i + 1], state.lse[i : i + 1], state.count[:1], state.fingerprint),
            x[i : i + 1],
            y[i : i + 1],
        )
        for i in range(streams)
    ]
    before = torch.get_num_threads()
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            together = cmanp.update(state, x, y)
            assert torch.equal(together.value, torch.cat([one.value for one in alone]))
            assert torch.equal(together.lse, torch.cat([one.lse for one in alone]))
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("shared", [True, False])
@torch.no_grad()
def test_merging_many_states_in_threads_is_to_the_bit_merging_in_one(shared: bool) -> None:
    value, other = torch.randn(2, 86, 24, 128, 16, dtype=torch.float64)  # 34 MB each
    lse, other_lse = torch.randn(2, 86, 24, 128, dtype=torch.float64)
    if shared:
        other = other[..., :1, :].expand(value.shape)
    found = []
    before = torch.get_num_threads()
    try:
        for threads in (1, 5):
            torch.set_num_threads(threads)
            found.append(cpu.merge(value, lse, other, other_lse))
    finally:
        torch.set_num_threads(before)
    part = slice(40, 43)  # small enough for no thread and no large page
    small = cpu.merge(value[part], lse[part], other[part], other_lse[part])
    for merged, merged_lse in found:
        assert torch.equal(merged, found[0][0])
        assert torch.equal(merged[part], small[0])
        assert torch.equal(merged_lse[part], small[1])


@torch.no_grad()
def test_channels_that_fill_no_whole_vector_are_merged_in_large_memory_too() -> None:
    value, other = torch.randn(2, 350, 24, 128, 4, dtype=torch.float64)
    lse, other_lse = torch.randn(2, 350, 24, 128, dtype=torch.float64)
    assert value.nbytes > LARGE
    merged, merged_lse = cpu.merge(value, lse, other, other_lse)
    share = torch.sigmoid(other_lse - lse)[..., None]
    torch.testing.assert_close(merged, torch.lerp(value, other, share), atol=3e-15, rtol=0)
    torch.testing.assert_close(merged_lse, torch.logaddexp(lse, other_lse), atol=1e-15, rtol=4e-16)


@torch.no_grad()
def test_single_points_of_many_streams_are_observed_in_threads_to_the_bit() -> None:
    cmanp, x, y = model(), torch.randn(200, 1, 1), torch.randn(200, 1, 1)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = cmanp.observe(x, y)
        torch.set_num_threads(3)
        several = cmanp.observe(x, y)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(one.value, several.value)
    assert torch.equal(one.lse, several.lse)


def test_memory_is_given_again_only_when_nobody_looks_at_it_any_more() -> None:
    shape = 2, LARGE // 16 + 8
    first = cpu.empty(*shape)
    where, seen = first.data_ptr(), first[1, 3:5].numpy()
    seen[:] = 7.0
    del first
    second = cpu.empty(*shape)
    second.fill_(1.0)
    assert second.data_ptr() != where  # an array still shows the first one's numbers
    assert seen.tolist() == [7.0, 7.0]
    del seen
    third = cpu.empty(*shape)
    assert third.data_ptr() == where
    assert third.shape == shape
    assert float(second.sum()) == second.numel()


def test_one_piece_is_kept_at_most_and_none_that_is_small_or_huge(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "_left", [])
    sizes = [LARGE // 8 + 8, LARGE // 8 + 16, LARGE // 8 + 24]
    pieces = [cpu.empty(n) for n in sizes]
    del pieces[0], pieces[0]
    assert [len(piece) for piece in cpu._left] == [8 * sizes[1]]
    cpu.empty(100)
    monkeypatch.setattr(cpu, "LARGEST", LARGE + 1)
    cpu.empty(sizes[0])
    assert [len(piece) for piece in cpu._left] == [8 * sizes[1]]


@torch.no_grad()
def test_states_that_are_kept_do_not_change_when_others_are_made_of_them() -> None:
    cmanp = model()
    first, x, y = states(90, cmanp), torch.randn(90, 1, 1), torch.randn(90, 1, 1)
    second = cmanp.update(first, x, y)
    kept = second.value.clone()
    for _ in range(3):
        third = cmanp.update(second, x, y)
    assert torch.equal(second.value, kept)
    assert torch.equal(third.value, cmanp.update(second, x, y).value)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there are no forked processes here")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_what_a_forked_process_writes_to_large_results_is_its_own() -> None:
    numbers = cpu.empty(LARGE // 8 + 1)
    numbers[:3] = 1.0
    child = os.fork()
    if child == 0:
        memoryview(numbers.numpy())[0] = 2.0
        os._exit(0)
    os.waitpid(child, 0)
    assert numbers[:3].tolist() == [1.0, 1.0, 1.0]

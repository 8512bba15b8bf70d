"""Machine code that multiplies bfloat16: within 2e-3 of float64, scores exact; float32 where a CPU cannot."""

import contextlib
import copy
import logging
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from constmem import CMANP
from constmem.core.algebra import EMPTY
from constmem.core.layers import MLP
from constmem.core.observation import Observation
from constmem.core.state import AttentionState
from constmem.kernels import cpu, paths

_found = cpu.library()
pytestmark = pytest.mark.skipif(_found is None, reason="there is no C++ compiler")
HAS = _found is not None and bool(_found.has_bfloat16())
able = pytest.mark.skipif(not HAS, reason="this CPU multiplies no bfloat16")
WAYS = "autocast", "high", "medium"
WIDTHS = (64, 4, 128), (33, 3, 31), (16, 2, 5), (80, 2, 17), (48, 1, 16)  # tokens, heads, slots


@contextlib.contextmanager
def asked_for(way: str) -> Iterator[None]:
    """Coarser products, asked for in one of the ways PyTorch has."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest" if way == "autocast" else way)
    try:
        with torch.autocast("cpu", torch.bfloat16, enabled=way == "autocast"):
            yield
    finally:
        torch.set_float32_matmul_precision(before)


@pytest.fixture(scope="module")
def trained() -> CMANP:
    return CMANP.from_pretrained("emnist").eval()


def strokes(n: int, batch: int = 1) -> tuple[Tensor, Tensor]:
    """Pixels of a smooth stroke, as a trained model of digits knows them."""
    x = 2 * torch.rand(batch, n, 2) - 1
    grey = (-(((0.5 * (3 * x[..., :1]).sin() + x[..., 1:]) / 0.15) ** 2)).exp() - 0.5
    return x, grey


@able
@pytest.mark.parametrize("n", [2, 7, 20, 100, 784, 4097])
@torch.no_grad()
def test_values_of_trained_weights_are_within_two_thousandths_and_scores_exact(
    trained: CMANP, n: int
) -> None:
    x, y = strokes(n)
    exact = copy.deepcopy(trained).double().condition(x.double(), y.double())
    fine = trained.condition(x, y)
    with asked_for("autocast"):
        coarse = trained.condition(x, y)
    largest = float(exact.value.abs().max())
    assert float((coarse.value - exact.value).abs().max()) < 2e-3 * largest
    assert float((fine.value - exact.value).abs().max()) < 4e-6 * largest
    assert float((coarse.lse - exact.lse).abs().max()) < 3e-5
    assert torch.allclose(coarse.lse, fine.lse, atol=2e-6, rtol=0)  # scores and their sums are float32


@able
@torch.no_grad()
def test_predictions_are_as_likely_as_in_float32_to_a_thousandth(trained: CMANP) -> None:
    x, y = strokes(584, batch=4)
    fine = trained.condition(x[:, :200], y[:, :200])
    with asked_for("autocast"):
        coarse = trained.condition(x[:, :200], y[:, :200])
    likely = [trained.query(state, x[:, 200:]).log_prob(y[:, 200:]).mean() for state in (fine, coarse)]
    assert not torch.equal(fine.value, coarse.value)
    assert abs(float(likely[0] - likely[1])) < 1e-3


def observation(dim: int, heads: int, slots: int) -> Observation:
    found = Observation(dim=dim, depth=2, num_slots=slots, num_heads=heads)
    with torch.no_grad():
        for p in (found.tokens_scale, found.tokens_shift, found.slots_scale, found.slots_shift):
            p.add_(0.3 * torch.randn_like(p))
    return found


def in_float64(
    found: Observation, data: Tensor, mask: Tensor | None, weight: Tensor | None, embed: MLP | None
) -> tuple[AttentionState, float]:
    """The state by PyTorch's operators on float64 numbers, and the size of the values it is made of."""
    wide, wide_embed = copy.deepcopy(found).double(), None if embed is None else copy.deepcopy(embed).double()
    weight = None if weight is None else weight.double()
    tokens = data.double() if wide_embed is None else wide_embed(data.double())
    _, values = wide(tokens)
    return wide.observe(tokens, mask, weight), float(values.abs().max())


@able
@pytest.mark.parametrize(
    ("dim", "heads", "slots"), [(64, 4, 128), (33, 3, 31), (16, 2, 5), (80, 2, 17), (48, 1, 16)]
)
@pytest.mark.parametrize("kind", ["plain", "masked", "weighted", "embedded"])
@torch.no_grad()
def test_any_sizes_masks_and_weights_agree_with_float64(dim: int, heads: int, slots: int, kind: str) -> None:
    found = observation(dim, heads, slots)
    embed = MLP(dim_in=3, dim_hidden=17, dim_out=dim, depth=3) if kind == "embedded" else None
    for batch, n in ((2, 2), (1, 3), (1, 63), (5, 65), (1, 301)):
        data = torch.randn(batch, n, 3 if embed else dim)
        mask = torch.rand(batch, n) < 0.6 if kind == "masked" else None
        weight = 30 * torch.randn(batch, n) if kind == "weighted" else None
        expected, size = in_float64(found, data, mask, weight, embed)
        with asked_for("high"):
            seen = found.observe(data, mask, weight, embed=embed)
        torch.testing.assert_close(seen.lse, expected.lse, atol=1e-4, rtol=1e-6)
        torch.testing.assert_close(seen.value, expected.value, atol=1.5e-3 * size, rtol=0)
        assert torch.equal(seen.count, expected.count)


@able
@pytest.mark.parametrize("way", WAYS)
@torch.no_grad()
def test_every_way_to_ask_gives_the_same_and_not_what_float32_gives(way: str) -> None:
    found, data = observation(64, 4, 31), torch.randn(1, 200, 64)
    fine = found.observe(data)
    with asked_for("high"):
        expected = found.observe(data)
    with asked_for(way):
        coarse = found.observe(data)
    assert torch.equal(coarse.value, expected.value)
    assert not torch.equal(coarse.value, fine.value)
    assert torch.equal(found.observe(data).value, fine.value)  # and no longer than it is asked for


@able
@torch.no_grad()
def test_a_value_that_comes_again_and_again_is_not_rounded_the_same_way_each_time() -> None:
    found, token = observation(16, 2, 5), torch.randn(1, 1, 16)
    weight = torch.full((1, 640), -0.3)  # a share that no bfloat16 is
    weight[0, 0] = 0.0
    with asked_for("high"):
        seen = found.observe(token.expand(1, 640, 16), None, weight)
    expected = found.observe(token)
    assert float((seen.value - expected.value).abs().max()) < 2e-4 * float(expected.value.abs().max())


@able
@torch.no_grad()
def test_a_few_points_that_outweigh_all_others_are_as_exact_as_in_float32() -> None:
    found, data = observation(64, 4, 31), torch.randn(1, 500, 64)
    weight = torch.zeros(1, 500)
    weight[0, [3, 250, 499]] = 40.0
    expected, _ = in_float64(found, data, None, weight, None)
    with asked_for("high"):
        seen = found.observe(data, None, weight)
    torch.testing.assert_close(seen.value, expected.value, atol=1e-5, rtol=0)


@able
@torch.no_grad()
def test_points_masked_out_are_as_if_they_had_never_been_there() -> None:
    found, data, mask = observation(32, 2, 9), torch.randn(1, 250, 32), torch.rand(1, 250) < 0.5
    with asked_for("high"):
        masked, left = found.observe(data, mask), found.observe(data[mask][None])
        nothing = found.observe(data, torch.zeros_like(mask))
    assert torch.equal(masked.value, left.value)
    assert torch.equal(masked.lse, left.lse)
    assert torch.equal(nothing.value, torch.zeros_like(nothing.value))
    assert torch.equal(nothing.lse, torch.full_like(nothing.lse, EMPTY))


@able
@torch.no_grad()
def test_several_threads_see_what_one_thread_sees() -> None:
    found, data = observation(64, 4, 40), torch.randn(1, 3000, 64)
    before, states = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 7, 7):
            torch.set_num_threads(threads)
            with asked_for("high"):
                states.append(found.observe(data))
    finally:
        torch.set_num_threads(before)
    for state in states[1:]:
        torch.testing.assert_close(state.value, states[0].value, atol=1e-3, rtol=0)
        torch.testing.assert_close(state.lse, states[0].lse, atol=1e-6, rtol=0)
    assert torch.equal(states[2].value, states[3].value)


@torch.no_grad()
def test_autocast_runs_machine_code_and_updates_stay_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    model = CMANP(dim_x=1, dim_y=1, dim=32, depth=2, num_heads=2, num_slots=21, num_latents=4).eval()
    x, y = torch.randn(2, 9, 1), torch.randn(2, 9, 1)
    calls, observe = [], cpu.observe
    monkeypatch.setattr(cpu, "observe", lambda *given: calls.append(1) or observe(*given))
    exact = model.update(model.condition(x[:, :8], y[:, :8]), x[:, 8:], y[:, 8:])
    with asked_for("autocast"):
        state = model.condition(x[:, :8], y[:, :8])
        assert len(calls) == 2
        updated = model.update(state, x[:, 8:], y[:, 8:])
    alone = model.update(state, x[:, 8:], y[:, 8:])
    assert updated.value.dtype == torch.float64
    assert torch.equal(updated.value, alone.value)
    assert torch.allclose(updated.value, exact.value, atol=2e-2)


@torch.no_grad()
def test_a_cpu_without_such_products_computes_in_float32_and_says_so_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    flags = ("-mno-avx512bf16",) if HAS else ()
    older = paths.load(paths.built((*paths.FLAGS, *flags)))
    assert not older.has_bfloat16()
    monkeypatch.setattr(cpu, "library", lambda: older)
    cpu._say_exact.cache_clear()
    found, data = observation(16, 2, 5), torch.randn(1, 100, 16)
    with caplog.at_level(logging.WARNING, logger="constmem"):
        fine = found.observe(data)
        assert not caplog.records  # nobody asked
        for way in WAYS:
            with asked_for(way):
                assert torch.equal(found.observe(data).value, fine.value)
    assert [record.message for record in caplog.records if "bfloat16" in record.message] == [
        "products of bfloat16 were asked for, and this CPU has none (AVX512-BF16): float32 serves"
    ]


def test_where_products_of_bfloat16_die_tests_run_with_fewer_instructions(
    held_to: Callable[..., str | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA", raising=False)
    dies = "import os; os.environ.get('ONEDNN_MAX_CPU_ISA') == {!r} or os.kill(os.getpid(), 4)"
    assert held_to("flags: avx512f", dies.format("none")) is None  # nobody is asked
    assert held_to("flags: amx_bf16", "pass") is None
    for name in ("AVX512_CORE_BF16", "AVX512_CORE"):
        assert held_to("flags: amx_bf16", dies.format(name)) == name
    assert held_to("flags: amx_bf16", dies.format("none")) == "AVX2"
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    assert held_to("flags: amx_bf16", dies.format("none")) is None

"""Events in machine code: tokens, clocks, features of gaps and quantiles as operators have them."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.utils import prune

from constmem import CMHP, kernels
from constmem.data import Events
from constmem.kernels import cpu, cpu_reading
from constmem.point_processes.heads import GapFeatures, LogNormalMixture

pytestmark = pytest.mark.skipif(cpu.library() is None, reason="there is no C++ compiler")
MARKS = 3
KINDS: dict[str, dict[str, Any]] = {
    "as published now": {},
    "no gaps": {"gap_tokens": False},
    "no recency": {"recency": False},
    "nothing turns": {"relative_time": False},
    "no embedding": {"embed_depth": 0},
    "one head": {"num_heads": 1},
    "bare": {"gap_tokens": False, "recency": False, "relative_time": False, "mass": False, "last_events": 0},
}


@pytest.fixture
def done(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of what machine code did."""
    names: list[str] = []
    run = cpu.run
    monkeypatch.setattr(cpu, "run", lambda name, *given: [names.append(name), run(name, *given)])
    return names


def process(**options: Any) -> CMHP:
    sizes = {"dim": 32, "depth": 2, "num_slots": 5, "num_latents": 3, "num_heads": 2}
    model = CMHP(num_marks=MARKS, **sizes | options).eval()
    model.set_scales(stream(2, 20))
    return model


def stream(batch: int, n: int) -> Events:
    gaps = torch.rand(batch, n, dtype=torch.float64) * 3 + 0.01
    gaps[:, 4] = 0.0  # at the same time as the one before
    marks = torch.randint(-1, MARKS, (batch, n))
    return Events.from_gaps(gaps, marks=marks, num_marks=MARKS, unit="s", t_start=torch.full((batch,), 7.0))


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_streaming_agrees_with_float64_operators(kind: str, done: list[str]) -> None:
    model, events = process(**KINDS[kind]), stream(3, 12)
    wide = copy.deepcopy(model).double()
    state, expected = model.empty(events.t_start), wide.empty(events.t_start)
    for time, mark in zip(events.times.T, events.marks.T, strict=True):
        state, expected = model.update(state, time, mark), wide.update(expected, time, mark)
    assert done.count("update") == 12
    for name, t in expected.memory.items():
        torch.testing.assert_close(state.memory[name], t, atol=2e-5, rtol=2e-6)
    torch.testing.assert_close(model.read(state).double(), wide.read(expected), atol=2e-4, rtol=0)


@torch.no_grad()
def test_what_machine_code_does_not_know_is_left_to_operators(done: list[str]) -> None:
    events = stream(1, 6)
    for model in (process(absolute_time=True), process(num_heads=32 // 4), process().double()):
        one = model.update(model.empty(events.t_start), events.times[:, 0], events.marks[:, 0])
        assert "update" not in done
        assert one.count.tolist() == [1]
    model = process()
    prune.identity(model.gaps.project, "weight")  # type: ignore[union-attr]
    state = model.update(model.empty(events.t_start), events.times[:, 0], events.marks[:, 0])
    assert "update" not in done
    prune.remove(model.gaps.project, "weight")  # type: ignore[union-attr]
    again = model.update(model.empty(events.t_start), events.times[:, 0], events.marks[:, 0])
    assert done.count("update") == 1
    torch.testing.assert_close(state.memory["value"], again.memory["value"], atol=1e-5, rtol=0)
    with torch.enable_grad():
        learned = model.update(model.empty(events.t_start), events.times[:, 0], events.marks[:, 0])
    assert learned.memory["value"].requires_grad
    assert done.count("update") == 1


@torch.no_grad()
def test_an_update_sees_every_change_of_a_weight(done: list[str]) -> None:
    model, events = process(), stream(1, 6)
    before = model.empty(events.t_start)
    for parameter in model.observing_parameters():
        if not parameter.requires_grad:
            continue
        first = model.update(before, events.times[:, 0] + 1, events.marks[:, 0].clamp_min(0))
        parameter.data.view(-1)[:] += 0.5
        fresh = model.empty(events.t_start)
        second = model.update(fresh, events.times[:, 0] + 1, events.marks[:, 0].clamp_min(0))
        expected = copy.deepcopy(model).double()
        exact = expected.update(
            expected.empty(events.t_start), events.times[:, 0] + 1, events.marks[:, 0].clamp_min(0)
        )
        torch.testing.assert_close(second.memory["lse"], exact.memory["lse"], atol=1e-4, rtol=1e-5)
        torch.testing.assert_close(second.memory["value"], exact.memory["value"], atol=1e-4, rtol=1e-5)
        before = fresh
        assert first.fingerprint != second.fingerprint
    assert done.count("update") == 2 * sum(p.requires_grad for p in model.observing_parameters())


def test_parameters_are_listed_as_pytorch_lists_them() -> None:
    for options in KINDS.values():
        model = process(**options)
        parts = [model.marks, model.stack.observation, *filter(None, (model.gaps, model.embed))]
        expected = [p for part in parts for p in part.parameters()]
        found = model.observing_parameters()
        assert all(a is b for a, b in zip(found, expected, strict=False))
        assert len(found) == len(expected) + 2 + (model.log_rates is not None)


@pytest.mark.usefixtures("library")
@torch.no_grad()
def test_features_of_gaps_agree_with_float64_and_no_gap_gives_the_bias(done: list[str]) -> None:
    features = GapFeatures(dim=13)
    z = torch.tensor([[0.0, -0.3, 2.5, 9.0], [-20.0, torch.nan, torch.inf, -torch.inf]])
    found = features(z)
    assert done == ["gap_vectors"]
    wide = copy.deepcopy(features).double()
    torch.testing.assert_close(found.double(), wide(z.double()), atol=2e-6, rtol=0)
    assert torch.equal(found[1, 1], features.project.bias)
    assert features(z[:0]).shape == (0, 4, 13)


@torch.no_grad()
def test_turned_values_keep_channels_that_are_no_pair(done: list[str]) -> None:
    value, clock = torch.randn(2, 3, 5, dtype=torch.float64), torch.tensor([0.0, 1e9], dtype=torch.float64)
    found = kernels.turned(value, clock, torch.tensor([1.0, 1e-3], dtype=torch.float64))
    assert found is not None
    assert done == ["turned"]
    assert torch.equal(found[0], value[0].float())
    assert torch.equal(found[1, :, 4], value[1, :, 4].float())
    angle = 1e9 * torch.tensor([1.0, 1e-3], dtype=torch.float64)
    a, b = value[1, :, :2], value[1, :, 2:4]
    expected = torch.cat([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()], -1)
    torch.testing.assert_close(found[1, :, :4].double(), expected, atol=1e-7, rtol=1e-6)
    assert kernels.turned(value.float(), clock, clock) is None


def mixture(k: int, dtype: torch.dtype, *batch: int) -> LogNormalMixture:
    numbers = (torch.randn(*batch, k, dtype=dtype) for _ in range(3))
    weight, loc, scale = numbers
    return LogNormalMixture(3 * weight, 4 * loc, (2 * scale).exp())


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_quantiles_have_their_probability_in_both_tails(dtype: torch.dtype, done: list[str]) -> None:
    levels = torch.tensor([1e-300, 1e-30, 1e-8, 0.3, 0.5, 0.7, 1 - 1e-12], dtype=torch.float64)
    for k in (1, 2, 7, 16):
        gap = mixture(k, dtype, 40)
        exact = LogNormalMixture(gap.log_weights.double(), gap.loc.double(), gap.scale.double())
        found = exact.icdf(levels[:, None])
        below, above = exact.log_cdf(found).exp(), exact.log_survival(found).exp()
        ordinary = (found > 1e-300) & (found < 1e300)
        low = ordinary & (levels[:, None] <= 0.5)
        high = ordinary & (levels[:, None] > 0.5)
        torch.testing.assert_close(below[low], levels[:, None].expand_as(found)[low], rtol=1e-9, atol=0)
        torch.testing.assert_close(
            above[high], 1 - levels[:, None].expand_as(found)[high], rtol=1e-4, atol=1e-15
        )
        close = gap.icdf(levels[:, None]).double()
        inside = ordinary & (found > 1e-30) & (found < 1e30)
        torch.testing.assert_close(close[inside], found[inside], rtol=1e-5, atol=0)
    assert done == ["quantiles"] * 8


def test_quantiles_by_operators_are_the_same(done: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    gap, levels = mixture(5, torch.float64, 4), torch.rand(9, 1, dtype=torch.float64)
    found = gap.icdf(levels)
    monkeypatch.setattr(cpu_reading.cpu, "library", lambda: None)
    torch.testing.assert_close(gap.icdf(levels), found, rtol=1e-10, atol=0)
    assert done == ["quantiles"]


def test_levels_are_broadcast_and_ends_are_exact(done: list[str]) -> None:
    gap = mixture(3, torch.float64, 2, 4)
    levels = torch.tensor([0.0, 1.0, -0.1, 1.5, torch.nan, 0.25], dtype=torch.float64)
    found = gap.icdf(levels[:, None, None])
    assert found.shape == (6, 2, 4)
    assert bool((found[0] == 0).all() & (found[1] == torch.inf).all() & found[2:5].isnan().all())
    for index in ((0, 0), (1, 3)):
        assert torch.equal(found[5][index], gap[index].icdf(levels[5]))
    assert torch.equal(gap.icdf(levels[5]), found[5])
    assert gap[:0].icdf(levels[5]).shape == (0, 4)
    lost = LogNormalMixture(*(torch.full((1, 3), torch.nan) for _ in range(3)))
    assert bool(lost.icdf(torch.tensor([0.3])).isnan().all())
    assert len(done) >= 5


def spread(numbers: Tensor) -> float:
    return float(numbers.max() - numbers.min())


def test_many_mixtures_in_threads_are_what_they_are_one_by_one() -> None:
    gap, before = mixture(16, torch.float32, 3000), torch.get_num_threads()
    alone = gap.median
    try:
        torch.set_num_threads(4)
        assert torch.equal(gap.median, alone)
    finally:
        torch.set_num_threads(before)
    assert spread(alone.log()) > 1

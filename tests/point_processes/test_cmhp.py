"""What constant memory promises of event streams: the algebra of states, naive references, flat memory."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from constmem.core.state import AttentionState
from constmem.data import Events
from constmem.point_processes import CMHP
from tests.laws.models import MARKS, small, stream

MB = 2**20
OPTIONS = ("last_events", "recency", "mass", "relative_time", "gap_tokens", "mark_given_gap")


def close(found: Tensor, expected: Tensor, atol: float = 1e-8) -> None:
    torch.testing.assert_close(found, expected, atol=atol, rtol=1e-6)


def naive(model: CMHP, events: Events) -> Tensor:
    """What is known after each event of one sequence, from a plain softmax over all events so far."""
    clock = (events.times[0] - events.t_start[0]) * torch.exp(-model.log_gap_mean)
    tokens = model.marks(events.marks[0])
    if model.absolute_time:
        d = tokens.shape[-1]
        angle = clock[:, None] * 1e4 ** (-torch.arange(0, d, 2, dtype=torch.float64) / d)
        tokens[:, 0::2] = tokens[:, 0::2] + angle.sin()
        tokens[:, 1::2] = tokens[:, 1::2] + angle.cos()
    gaps = events.gaps[0]
    z = ((gaps.clamp_min(model.tick).log() - model.log_gap_mean) / model.log_gap_std).where(
        gaps > 0, torch.nan
    )
    if model.gaps is not None:
        tokens = tokens + model.gaps(z)
    if model.embed is not None:
        tokens = model.embed(tokens)
    k, v = model.stack.observation(tokens[None])  # (1, depth, h, t, c)
    q = model.stack.observation.prepared().queries
    rates = 0.0 if model.log_rates is None else model.log_rates.exp()
    known = []
    for i in range(len(clock)):
        ago = clock[: i + 1] - clock[i]
        scores = q @ k[0, ..., : i + 1, :].mT  # (depth, h, s, i)
        scores = scores + (rates[..., None] if isinstance(rates, Tensor) else rates) * ago
        seen = v[0, ..., : i + 1, :]
        if model.relative_time:
            pairs = seen.shape[-1] // 2
            turn = torch.exp(
                1j * ago[:, None] * 10.0 ** (-3 * torch.arange(pairs).double() / max(pairs - 1, 1))
            )
            turned = torch.complex(seen[..., :pairs], seen[..., pairs : 2 * pairs]) * turn
            seen = torch.cat([turned.real, turned.imag], -1)
        value = scores.softmax(-1) @ seen
        state = AttentionState(value[None], value[None, ..., 0], torch.ones(1, dtype=torch.int64))
        out = model.project(model.stack.read(state, model.latents[None])[-1].flatten(1))[0]
        if model.last_events:
            recent = []
            for j in range(i - model.last_events + 1, i + 1):  # oldest first
                mark, gap = (
                    (events.marks[0, j], z[j]) if j >= 0 else (torch.tensor(-2), z.new_tensor(torch.nan))
                )
                recent.append(model.last_mark(mark) + model.last_gap(gap))
            out = out + model.last(torch.cat(recent))
        if model.mass is not None:
            out = out + model.mass(torch.log1p(scores.exp().sum(-1)).flatten())
        known.append(model.norm(out))
    return torch.stack(known)


OFF: dict[str, Any] = dict.fromkeys(OPTIONS, False) | {"last_events": 0}
CHANGES: list[dict[str, Any]] = [{}, OFF, {"absolute_time": True}, {"last_events": 1}]
CHANGES += [{name: off} for name, off in OFF.items()]


@pytest.mark.parametrize("changes", CHANGES)
def test_all_prefixes_in_one_pass_equal_a_naive_softmax_in_value_and_gradient(
    changes: dict[str, Any],
) -> None:
    model, events = small("cmhp", **changes), stream(37)
    before = model.forecast(events).features
    known = torch.cat([before[:, 1:], model.read(model.condition(events))[:, None]], 1)
    expected = naive(model, events)
    close(known[0], expected)
    weights = torch.randn_like(expected)
    parameters = [p for n, p in model.named_parameters() if not n.startswith(("gap_head", "mark_head"))]
    found = torch.autograd.grad((known[0] * weights).sum(), parameters, allow_unused=True)
    wanted = torch.autograd.grad((expected * weights).sum(), parameters, allow_unused=True)
    for a, b in zip(found, wanted, strict=True):
        close(torch.zeros(()) if a is None else a, torch.zeros(()) if b is None else b, atol=1e-7)


@pytest.mark.parametrize("option", OPTIONS)
def test_every_option_matters(option: str) -> None:
    with_, without = small("cmhp"), small("cmhp", **{option: OFF[option]})
    without.load_state_dict({n: t for n, t in with_.state_dict().items() if n in without.state_dict()})
    with torch.no_grad():
        a, b = with_.log_prob(stream(12)), without.log_prob(stream(12))
    assert not torch.allclose(a.mark if option == "mark_given_gap" else a.time, b.mark + b.time)


@pytest.mark.parametrize("absolute", [True, False])
def test_only_by_absolute_time_does_it_matter_when_the_watch_began(absolute: bool) -> None:
    model = small("cmhp", absolute_time=absolute, gap_tokens=False, last_events=1)
    times, marks = [[5.0, 6.0, 6.5, 9.0]], [[0, 1, 2, 0]]
    found = []
    for start in (5.0, 1.0):
        events = Events.from_arrival_times(times, marks=marks, t_start=start, unit="hour", num_marks=MARKS)
        with torch.no_grad():
            found.append(model.log_prob(events).time[:, 2:])  # the first gap is the second event's last
    assert torch.allclose(*found) != absolute


def test_the_faithful_model_sees_a_set_and_the_options_see_an_order() -> None:
    """Two simultaneous events in either order: only a model that knows the last event tells them apart."""
    times, marks = [[1.0, 2.0, 2.0]], ([[0, 1, 2]], [[0, 2, 1]])
    both = [Events.from_arrival_times(times, marks=m, unit="hour", num_marks=MARKS) for m in marks]
    with torch.no_grad():
        for kind, same in (("cmhp-faithful", True), ("cmhp", False)):
            model = small(kind)
            one, other = (model.query(model.condition(e)).mean for e in both)
            assert torch.allclose(one, other) == same


# The algebra


def halves(model: CMHP, events: Events, cut: int) -> tuple[Any, Any]:
    """States of the two parts of streams: the second knows only when the last event of the first was."""
    first = model.update(model.empty(events.t_start), events.times[:, :cut], events.marks[:, :cut])
    start = model.empty(events.t_start, last_time=events.times[:, cut - 1])
    return first, model.update(start, events.times[:, cut:], events.marks[:, cut:])


@pytest.mark.parametrize("kind", ["cmhp", "cmhp-faithful"])
def test_parts_of_a_stream_merge_in_any_order_and_the_later_one_has_the_last_event(kind: str) -> None:
    model, events = small(kind), stream(30, 30)
    with torch.no_grad():
        first, second = halves(model, events, 11)
        whole = model.condition(events)
        for merged in (first.merge(second), second.merge(first)):
            close(merged.memory["value"], whole.memory["value"])
            close(merged.memory["lse"], whole.memory["lse"])
            for name in ("last_time", "last_gap", "last_mark", "count"):
                assert torch.equal(getattr(merged, name), getattr(whole, name))
            close(model.query(merged).mean, model.query(whole).mean)
        nothing = model.empty(events.t_start)
        close(model.query(nothing.merge(whole)).mean, model.query(whole).mean)
        close(model.query(whole.merge(nothing)).mean, model.query(whole).mean)
        assert nothing.merge(nothing).last_mark.tolist() == [-2, -2]


def test_an_earlier_part_of_a_stream_can_be_removed() -> None:
    model, events = small("cmhp"), stream(30, 30)
    with torch.no_grad():
        first, second = halves(model, events, 11)
        left = first.merge(second).remove(first, max_share=1.0)
        close(left.memory["value"], second.memory["value"], atol=1e-6)
        assert left.count.tolist() == [19, 19]
        close(model.query(left).mean, model.query(second).mean, atol=1e-5)
        with pytest.raises(ValueError, match="stream 0 holds its last event"):
            first.merge(second).remove(second)


def test_recency_is_a_weight_that_halves_with_time() -> None:
    """With scores of zero and one rate, a slot reads sum v_j exp(rate t_j) / sum exp(rate t_j)."""
    model, events = small("cmhp", relative_time=False), stream(9)
    assert model.log_rates is not None
    with torch.no_grad():
        model.stack.observation.query.zero_()
        state = model.condition(events)
        clock = model.scale.since(events.t_start, events.times)
        alone = [model.observe(events.window(i, i + 1), start=events.t_start) for i in range(9)]
        v = torch.stack(
            [one.memory["value"][0, :, :, 0] for one in alone], -2
        )  # a single event's is all of it
    rates = model.log_rates.detach().exp()
    weights = torch.exp(rates[..., None] * (clock[0] - clock[0, -1]))
    expected = (weights / weights.sum(-1, keepdim=True)) @ v
    close(state.memory["value"][0], expected)
    close(state.memory["lse"][0], weights.sum(-1).log() + rates * clock[0, -1])


def test_late_and_strongly_weighted_events_stay_exact() -> None:
    """Rates of thousands over long breaks: a naive exponential would overflow after one event."""
    model = small("cmhp")
    assert model.log_rates is not None
    with torch.no_grad():
        model.log_rates.fill_(math.log(3000.0))
        gaps = torch.tensor([[1.0, 1e4, 1e-3, 1e-3, 5e5, 1e-4]], dtype=torch.float64)
        events = Events.from_gaps(gaps, t_start=1e9, unit="hour", num_marks=MARKS)
        forecast, state = model.forecast(events), model.empty(events.t_start)
        for i in range(6):
            close(model.query(state).mean, forecast.mean[:, i], atol=1e-5)
            state = model.update(state, events.times[:, i], events.marks[:, i])
        close(model.query(model.condition(events)).mean, model.query(state).mean, atol=1e-5)
    assert torch.isfinite(forecast.mean).all()


def test_the_gradient_of_rates_keeps_its_digits_a_long_time_after_the_start() -> None:
    """Rates are multiplied by the clock, and most of that cancels: in float32 a fifth of it was noise."""
    gaps = [[1.0, 1e7] + [0.5, 1.3, 2.0] * 8]
    events = Events.from_gaps(gaps, unit="hour", num_marks=MARKS)
    exact, single = small("cmhp"), small("cmhp").float()
    for model in (exact, single):
        model.loss(events).backward()
    wanted = exact.log_rates.grad
    assert float((single.log_rates.grad - wanted).abs().max()) < 1e-3 * float(wanted.abs().max())


# Memory


def test_a_state_is_as_large_after_many_events_as_after_one() -> None:
    model = small("cmhp")
    with torch.no_grad():
        sizes = {model.condition(stream(n)).nbytes for n in (1, 10, 5000)}
        state = model.update(model.condition(stream(5000)), stream(5000).times[:, -1] + 1)
    assert sizes == {state.nbytes}
    depth, heads, slots, channels = model.stack.layout
    assert state.nbytes == 8 * (depth * heads * slots * (channels + 1) + 5 + 3 * 3)


Peak = Callable[[Callable[[], object]], int]


@pytest.mark.once
def test_the_likelihood_of_a_long_stream_needs_the_memory_of_one_chunk(peak: Peak) -> None:
    """An event's prefix state alone is 1,000 bytes here; its likelihoods are 8."""
    model, events = small("cmhp").float(), stream(8000)
    few = events.trim(1000)

    def score(events: Events) -> None:
        with torch.no_grad():
            model.log_prob(events, chunk=200)

    score(few)
    small_peak, large = peak(lambda: score(few)), peak(lambda: score(events))
    assert large - small_peak < 7000 * 64
    assert peak(lambda: model.forecast(few, chunk=1000).mean) > 2 * small_peak


@pytest.mark.once
def test_training_on_a_long_stream_needs_the_memory_of_one_chunk(peak: Peak) -> None:
    """Backwards, chunks are computed again; without that every event would keep its whole read."""
    model, events = small("cmhp").float(), stream(1600)
    few = events.trim(800)

    def step(events: Events, chunk: int) -> None:
        model.loss(events, chunk=chunk).backward()

    step(few, 400)
    small_peak, large = peak(lambda: step(few, 400)), peak(lambda: step(events, 400))
    dense = peak(lambda: step(events, 1600))
    assert large - small_peak < MB / 8
    assert dense > 2 * large


@pytest.mark.parametrize("wrong", [-1, True])
def test_a_number_of_last_events_that_makes_no_sense_is_refused(wrong: Any) -> None:
    with pytest.raises(ValueError, match="last_events"):
        small("cmhp", last_events=wrong)

"""The laws of event models, for every one of them: causal, exact, streamed, merged, saved."""

import math
from dataclasses import replace
from functools import reduce
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from constmem.core.monoid import Monoid
from constmem.data import Events
from constmem.point_processes import MODELS, PointProcess
from tests.conftest import Refuses
from tests.laws.models import KINDS, MARKS, close, small, stream

every_model = pytest.mark.parametrize("kind", KINDS)
every_monoid = pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "gru"])


def changed(events: Events, k: int) -> Events:
    """The first sequence with another mark at event k, and later times from there on."""
    times, marks = events.times.clone(), events.marks.clone()
    times[0, k:] += 3.7
    marks[0, k] = (marks[0, k] + 1) % MARKS
    return replace(events, times=times, marks=marks, t_end=None)


def parts(model: Any, events: Events, cuts: list[int]) -> list[Any]:
    """The states of consecutive parts, each of exactly its own events."""
    edges = [0, *sorted(cuts), events.times.shape[1]]
    return [model.observe(events.window(a, b), start=events.t_start) for a, b in pairwise(edges)]


def same(model: Any, found: Any, expected: Any) -> None:
    """Two states are the same in all that they say."""
    for name in ("start", "last_time", "last_gap", "last_mark", "count"):
        assert torch.equal(getattr(found, name), getattr(expected, name)), name
    one, other = model.query(found), model.query(expected)
    close(one.gap.log_prob(torch.ones(())), other.gap.log_prob(torch.ones(())))
    close(one.mark_logits(), other.mark_logits())


# Merging


@every_monoid
@given(cuts=st.lists(st.integers(0, 14), max_size=4), seed=st.integers(0, 5))
def test_parts_of_streams_merge_to_the_state_of_all_events_in_any_grouping(
    kind: str, cuts: list[int], seed: int
) -> None:
    model, events = small(kind), stream(14, 6, 0, seed=seed)
    events = replace(events, times=events.times.floor())  # some are simultaneous, across a cut too
    with torch.no_grad():
        whole, some = model.observe(events), parts(model, events, cuts)
        from_left = reduce(lambda state, part: state.merge(part), some)
        from_right = reduce(lambda state, part: part.merge(state), reversed(some))
        same(model, from_left, whole)
        same(model, from_right, whole)


@every_monoid
def test_nothing_merges_with_anything_and_a_merged_state_goes_on(kind: str) -> None:
    model, events = small(kind), stream(12, 5)
    with torch.no_grad():
        whole, nothing = model.observe(events), model.empty(events.t_start)
        first, later = parts(model, events, [7])
        for merged in (nothing.merge(whole), whole.merge(nothing), nothing.merge(first).merge(later)):
            same(model, merged, whole)
        same(model, nothing.merge(nothing), nothing)
        more, marks = events.times[:, -1] + 2.5, torch.tensor([0, 1])
        updated = model.update(first.merge(later), more, marks)
        same(model, updated, model.update(whole, more, marks))


def test_a_transition_says_why_its_states_do_not_merge() -> None:
    model, events = small("gru"), stream(6)
    first, later = parts(model, events, [3])
    assert not isinstance(first, Monoid)
    with pytest.raises(NotImplementedError, match=r"cannot merge .*Transition"):
        first.merge(later)


@every_monoid
def test_parts_that_do_not_belong_together_are_not_merged(kind: str, refuses: Refuses) -> None:
    model, events = small(kind), stream(6, 6)
    state = model.observe(events)
    with pytest.raises(ValueError, match="2 and 4 streams"):
        state.merge(state.repeat(2))
    with pytest.raises(ValueError, match="different starts"):
        state.merge(model.observe(stream(6, 6, start=101.0)))
    with refuses(TypeError, "cannot merge"):
        state.merge(small("gru").observe(events))
    if kind != "trivial":
        other = small(kind)
        with torch.no_grad():
            state = model.observe(events)
            other.marks.table[0] += 1
            with pytest.raises(ValueError, match="different weights"):
                state.merge(other.observe(events))


@every_model
def test_a_state_never_aliases_what_it_has_seen(kind: str) -> None:
    model, events = small(kind), stream(1, 1)
    times, marks = events.times[:, -1] + 1, torch.tensor([1, 2])
    start = events.t_start.clone()
    with torch.no_grad():
        first = model.condition(events)
        states = first, model.update(first, times, marks), model.empty(start)
    kept = [{name: t.clone() for name, t in state.tensors().items()} for state in states]
    for tensor in (times, marks, start, events.times, events.marks, events.t_start):
        tensor.zero_()
    for state, before in zip(states, kept, strict=True):
        for name, t in state.tensors().items():
            assert torch.equal(t, before[name]), name


# Likelihood


@every_model
def test_nothing_before_a_changed_event_changes_in_its_last_bit(kind: str) -> None:
    model, events = small(kind).float(), stream(45, 20)
    events = replace(events, t_end=None)
    for k in (1, 7, 33, 44):
        other = changed(events, k)
        with torch.no_grad():
            here, there = model.log_prob(events), model.log_prob(other)
            forecasts = model.forecast(events), model.forecast(other)
        assert torch.equal(here.time[0, :k], there.time[0, :k])
        assert torch.equal(here.mark[0, :k], there.mark[0, :k])
        for a, b in zip(*(
            (f.gap.log_weights, f.gap.loc, f.gap.scale, f.mark_logits()) for f in forecasts
        ), strict=True):  # fmt: skip
            assert torch.equal(a[0, : k + 1], b[0, : k + 1])  # the forecast of event k does not see it
        assert not torch.equal(here.time[0, k], there.time[0, k])


@every_model
def test_the_forecast_depends_on_the_event_before(kind: str) -> None:
    if kind == "trivial":
        return
    model, events = small(kind), stream(12)
    with torch.no_grad():
        here, there = model.forecast(events), model.forecast(changed(events, 7))
    assert not torch.allclose(here.mean[0, 8], there.mean[0, 8])


@every_model
def test_padding_changes_nothing(kind: str) -> None:
    model, events = small(kind), stream(9, 4, t_end=True)
    wide = Events.cat([events, stream(17, t_end=True)]).select([0, 1])
    with torch.no_grad():
        one, other = model.log_prob(events), model.log_prob(wide)
        alone = model.log_prob(events.select([1]).trim())
    close(other.time[:, :9], one.time)
    close(other.mark[:, :9], one.mark)
    close(other.survival, one.survival)
    close(alone.time[0], one.time[1, :4])
    close(alone.survival[0], one.survival[1])
    assert bool((other.time[:, 9:] == 0).all())
    assert int(other.scored.sum()) == 8 + 3


@every_model
def test_the_chunk_changes_neither_likelihood_nor_gradient(kind: str) -> None:
    events = stream(21, 13, t_end=True)

    def gradients(chunk: int | None) -> tuple[Tensor, list[Tensor]]:
        model = small(kind)
        loss = model.loss(events, chunk=chunk)
        loss.backward()
        return loss.detach(), [p.grad for p in model.parameters() if p.grad is not None]

    whole, grads = gradients(None)
    assert any(float(g.abs().max()) > 1e-3 for g in grads)
    for chunk in (1, 5, 8):
        loss, found = gradients(chunk)
        close(loss, whole)
        for a, b in zip(found, grads, strict=True):
            close(a, b)


@every_model
def test_streaming_equals_the_pass_over_all_prefixes(kind: str) -> None:
    model, events = small(kind), stream(14, 14)
    with torch.no_grad():
        forecast = model.forecast(events)
        state = model.empty(events.t_start)
        for i in range(14):
            one = model.query(state)
            close(one.gap.log_prob(torch.ones(2)), forecast.gap[:, i].log_prob(torch.ones(2)))
            close(one.mark_logits(events.gaps[:, i]), forecast.mark_logits(events.gaps)[:, i])
            close(one.mark_logits(), forecast.mark_logits()[:, i])
            close(one.last_time, forecast.last_time[:, i])
            state = model.update(state, events.times[:, i], events.marks[:, i])
        at_once, in_chunks = model.condition(events), model.condition(events, chunk=4)
        together = model.update(model.empty(events.t_start), events.times, events.marks, chunk=5)
    for other in (at_once, in_chunks, together):
        close(model.query(other).mean, model.query(state).mean)
        assert torch.equal(other.count, state.count)
        assert torch.equal(other.last_time, state.last_time)


@every_model
def test_a_likelihood_is_that_of_its_forecasts(kind: str) -> None:
    model, events = small(kind), stream(8, 5, t_end=True)
    with torch.no_grad():
        found, forecast = model.log_prob(events), model.forecast(events)
        after = model.query(model.condition(events))
    gaps = events.gaps.clamp_min(float(model.tick))
    time = forecast.gap.log_prob(gaps)
    mark = forecast.mark_logits(events.gaps).gather(-1, events.marks.clamp_min(0)[..., None]).squeeze(-1)
    close(found.time[events.mask], time[events.mask])
    close(found.mark[events.mask], mark[events.mask])
    last = torch.stack([row[m][-1] for row, m in zip(events.times, events.mask, strict=True)])
    assert events.t_end is not None
    close(found.survival, after.gap.log_survival(events.t_end - last))


@every_model
def test_a_likelihood_can_go_on_from_a_state(kind: str) -> None:
    """One long stream: train, validate and test on its parts, each with all that came before."""
    model, events = small(kind), stream(20, 20)
    late = replace(events, times=events.times[:, 12:], marks=events.marks[:, 12:], mask=events.mask[:, 12:])
    with torch.no_grad():
        early = model.empty(events.t_start)
        early = model.update(early, events.times[:, :12], events.marks[:, :12])
        whole, part = model.log_prob(events), model.log_prob(late, initial=early)
        end, known = model.condition(late, initial=early), model.condition(events)
    close(part.time, whole.time[:, 12:])
    close(part.mark, whole.mark[:, 12:])
    close(model.query(end).mean, model.query(known).mean)
    assert bool(part.scored.all())


@every_model
def test_densities_of_forecasts_integrate_to_one(kind: str) -> None:
    model, events = small(kind), stream(5)
    with torch.no_grad():
        gap = model.forecast(events).gap
    u = torch.linspace(-60, 60, 40_001, dtype=torch.float64)
    each = torch.stack([(gap[0, i].log_prob(u.exp()) + u).exp().sum() * (u[1] - u[0]) for i in range(5)])
    close(each, torch.ones(5, dtype=torch.float64))


@every_model
def test_unknown_marks_are_left_out_of_the_likelihood_and_have_their_own_effect(kind: str) -> None:
    model, events = small(kind), stream(8)
    marks = events.marks.clone()
    marks[0, 3] = -1
    hidden = replace(events, marks=marks)
    with torch.no_grad():
        found, known = model.log_prob(hidden), model.log_prob(events)
    assert found.mark[0, 3] == 0
    assert torch.equal(found.time[0, :4], known.time[0, :4])
    assert torch.isfinite(found.time).all()
    if kind != "trivial":
        assert not torch.allclose(found.time[0, 4:], known.time[0, 4:])


@every_model
def test_simultaneous_events_have_a_finite_likelihood_and_gradient(kind: str) -> None:
    model = small(kind)
    events = Events.from_gaps(
        [[0.0, 0.0, 1.0, 0.0, 0.0]], marks=[[0, 1, 2, 0, 1]], unit="hour", num_marks=MARKS
    )
    loss = model.loss(events)
    loss.backward()
    assert torch.isfinite(loss)
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)
    floored = model.log_prob(
        Events.from_gaps([[0.0, 0.0]], marks=[[0, 1]], unit="hour", num_marks=MARKS)
    ).time[0, 1]
    close(floored, model.forecast(events).gap[0, 1].log_prob(model.tick))


@every_model
def test_sequences_of_one_event_or_none_are_no_trouble(kind: str) -> None:
    model = small(kind)
    events = Events.from_arrival_times(
        [[5.0], [], [5.0, 7.0]], marks=[[1], [], [0, 2]], t_start=4.0, t_end=9.0, unit="hour", num_marks=MARKS
    )
    with torch.no_grad():
        found = model.log_prob(events)
        state = model.condition(events)
    assert found.scored.sum() == 1
    assert state.count.tolist() == [1, 0, 2]
    assert torch.isfinite(found.survival).all()
    prior = model.query(model.empty(events.t_start))
    close(model.query(state).mean[1], prior.mean[1])
    close(found.survival[1], prior.gap.log_survival(torch.full((3,), 5.0))[1])
    nothing = Events.from_arrival_times([[], []], t_start=1.0, unit="hour", num_marks=MARKS)
    with torch.no_grad():
        assert model.log_prob(nothing).time.shape == (2, 0)
        assert model.forecast(nothing).mean.shape == (2, 0)
        assert model.condition(nothing).count.tolist() == [0, 0]


@every_model
def test_streams_that_get_fewer_events_stay_as_they_are(kind: str) -> None:
    model, events = small(kind), stream(6, 6)
    mask = torch.tensor([[True, True, True], [True, False, False]])
    later = events.times[:, -1:] + torch.tensor([[1.0, 2.0, 3.0], [1.0, -99.0, torch.nan]]).double()
    marks = torch.tensor([[0, 1, 2], [2, 7, 7]])
    with torch.no_grad():
        state = model.condition(events)
        both = model.update(state, later, marks, mask=mask)
        alone = model.update(state.select(slice(1, 2)), later[1:, 0], marks[1:, 0])
        idle = model.update(state, later[:, 0], marks[:, 0], mask=torch.tensor([True, False]))
    assert both.count.tolist() == [9, 7]
    close(model.query(both).mean[1], model.query(alone).mean[0])
    close(model.query(idle).mean[1], model.query(state).mean[1])


@every_model
def test_a_state_survives_its_file(kind: str, tmp_path: Path) -> None:
    model, events = small(kind), stream(6, 6)
    with torch.no_grad():
        state = model.condition(events)
        state.save(tmp_path / "state.safetensors")
        loaded = model.state_type.load(tmp_path / "state.safetensors")
        for name, part in state.tensors().items():
            assert torch.equal(loaded.tensors()[name], part)
        same(model, loaded, state)
    assert loaded.fingerprint == state.fingerprint
    assert loaded.nbytes == state.nbytes


@every_model
def test_a_model_survives_its_files(kind: str, tmp_path: Path) -> None:
    model, events = small(kind), stream(6)
    model.save_pretrained(tmp_path)
    loaded = PointProcess.from_pretrained(tmp_path)
    assert type(loaded) is type(model)
    assert loaded.unit == "hour"
    with torch.no_grad():
        assert torch.equal(loaded.log_prob(events).time, model.log_prob(events).time)
        assert loaded.condition(events).fingerprint == model.condition(events).fingerprint


@every_model
def test_the_unit_of_time_changes_nothing_but_the_unit(kind: str) -> None:
    """Counted in minutes, every log density is log 60 lower, and marks are as likely as before."""
    model, events = small(kind), stream(10)
    with torch.no_grad():
        hours = model.log_prob(events)
    fast = Events(60 * events.times, events.marks, events.mask, 60 * events.t_start, None, "minute", MARKS)
    train = stream(40)
    model.set_scales(
        Events(60 * train.times, train.marks, train.mask, 60 * train.t_start, None, "minute", MARKS)
    )
    with torch.no_grad():
        minutes = model.log_prob(fast)
    close(minutes.time[:, 1:], hours.time[:, 1:] - math.log(60), atol=1e-4)
    close(minutes.mark, hours.mark, atol=1e-4)


def test_every_public_method_of_the_contract_is_derived_in_the_base() -> None:
    derived = (
        "condition",
        "update",
        "query",
        "forecast",
        "log_prob",
        "loss",
        "sample",
        "empty",
        "set_scales",
    )
    for kind in MODELS.values():
        assert not set(derived) & set(vars(kind))

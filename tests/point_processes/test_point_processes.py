"""One contract for all event models: causal, exact, streamed, sampled, and clear about bad input."""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from constmem.data import Events
from constmem.point_processes import MODELS, PointProcess
from constmem.point_processes import model as prediction
from tests.laws.processes import KINDS, MARKS, small, stream

Refuses = Callable[..., Any]
every_model = pytest.mark.parametrize("kind", KINDS)


def close(found: Tensor, expected: Tensor, atol: float = 1e-6) -> None:
    torch.testing.assert_close(found, expected, atol=atol, rtol=1e-6)


def changed(events: Events, k: int) -> Events:
    """The first sequence with another mark at event k, and later times from there on."""
    times, marks = events.times.clone(), events.marks.clone()
    times[0, k:] += 3.7
    marks[0, k] = (marks[0, k] + 1) % MARKS
    return replace(events, times=times, marks=marks, t_end=None)


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
    wide = events._widened(17)
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
def test_a_prediction_knows_its_mean_median_and_quantiles(kind: str) -> None:
    model, events = small(kind), stream(6, 6)
    with torch.no_grad():
        nxt = model.query(model.condition(events))
        levels = nxt.quantiles([0.1, 0.5, 0.9])
    assert levels.shape == (2, 3)
    close(nxt.gap.cdf(levels.T), torch.tensor([[0.1], [0.5], [0.9]]).double().expand(3, 2))
    close(nxt.median, levels[:, 1])
    close(nxt.mean, nxt.gap.mean)
    random = torch.Generator().manual_seed(0)
    gaps = nxt.gap.sample((4000,), generator=random)
    with torch.no_grad():
        given = torch.stack([nxt.mark_logits(gap).exp() for gap in gaps[:400]]).mean(0)
    close(nxt.mark_logits().exp().detach(), given, atol=0.05)  # marks, whenever the event comes


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
def test_reads_at_some_positions_are_an_estimate_of_reads_at_all(kind: str) -> None:
    model, events = small(kind), stream(30, 30)
    random = torch.Generator().manual_seed(0)
    with torch.no_grad():
        all_of_them = float(model.loss(events))
        some = [float(model.loss(events, reads=0.3, generator=random)) for _ in range(60)]
    mean = sum(some) / 60
    spread = math.sqrt(sum((x - mean) ** 2 for x in some) / 60)
    assert spread > 1e-3
    assert abs(mean - all_of_them) < 4 * spread / math.sqrt(60)


# Streams


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
        for name, part in state.memory.items():
            assert torch.equal(loaded.memory[name], part)
        close(model.query(loaded).mean, model.query(state).mean)
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


# Samples


@every_model
def test_samples_are_seeded_and_follow_the_density(kind: str) -> None:
    model, events = small(kind), stream(6)
    with torch.no_grad():
        state = model.condition(events).repeat(1500)
        nxt = model.query(state)
        given = nxt.mark_logits().exp()
    draws = [model.sample(state, n=2, generator=torch.Generator().manual_seed(s)) for s in (2, 2, 3)]
    assert torch.equal(draws[0].times, draws[1].times)
    assert not torch.equal(draws[0].times, draws[2].times)
    pit = nxt.gap.cdf(draws[0].gaps[:, 0]).sort().values
    even = (torch.arange(1500) + 0.5) / 1500
    assert float((pit - even).abs().max()) < 1.63 / math.sqrt(1500)
    share = torch.bincount(draws[0].marks[:, 0], minlength=MARKS) / 1500
    close(share.double(), given[0].double(), atol=0.05)
    gaps, marks = draws[0].gaps[:, 0], draws[0].marks[:, 0]
    with torch.no_grad():
        second = model.query(model.update(state, draws[0].times[:, 0], marks))
        logits = nxt.mark_logits(gaps)
    pit = second.gap.cdf(draws[0].gaps[:, 1]).sort().values
    assert float((pit - even).abs().max()) < 1.63 / math.sqrt(1500)
    surprise = -logits.gather(-1, marks[:, None]).mean()
    entropy = -(logits.exp() * logits).sum(-1).mean()
    assert float(surprise) == pytest.approx(float(entropy), abs=0.06)


@every_model
def test_samples_until_a_time_end_there(kind: str) -> None:
    model = small(kind)
    with torch.no_grad():
        state = model.condition(stream(6, 6)).repeat(20)
    until = state.last_time + 8.0
    future = model.sample(state, until=until, generator=torch.Generator().manual_seed(0))
    assert bool((future.times <= until[:, None]).all())
    assert future.lengths.min() < future.lengths.max()
    assert future.t_end is not None
    assert torch.equal(future.t_end, until)
    again = model.sample(state, n=int(future.lengths.max()), generator=torch.Generator().manual_seed(0))
    assert bool((future.lengths == (again.times <= until[:, None]).sum(-1)).float().mean() > 0.2)
    assert model.sample(state, until=state.last_time).times.shape == (40, 0)
    with pytest.raises(RuntimeError, match="limit="):
        model.sample(state, until=until + 1e6, limit=3)
    for never in (math.nan, math.inf):
        with pytest.raises(ValueError, match=f"until={never} for stream 0 is no time to stop at"):
            model.sample(state, until=never, limit=3)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({}, "either"),
        ({"n": 1, "until": 9e9}, "either"),
        ({"until": 1.0}, "before"),
        ({"n": 0}, "at least 1"),
    ],
)
def test_a_sample_needs_one_end(wrong: dict[str, Any], message: str) -> None:
    model = small("gru")
    with pytest.raises(ValueError, match=message):
        model.sample(model.condition(stream(4)), **wrong)


# Bad input


@every_model
def test_events_that_do_not_fit_are_refused(kind: str, refuses: Refuses) -> None:
    model, events = small(kind), stream(5, 5)
    state = model.condition(events)
    last, marks = state.last_time, torch.zeros(2, dtype=torch.int64)
    for times, kinds, message in (
        (last - torch.tensor([0.0, 0.1]), marks, "event 0 of stream 1"),
        (torch.stack([last + 2, last + 1], 1), torch.zeros(2, 2, dtype=torch.int64), "event 1 of stream 0"),
        (last + torch.nan, marks, "finite"),
        (last + 1, marks + MARKS, "mark 3"),
        (last + 1, marks - 2, "mark -2"),
        (last[:1] + 1, marks[:1], "2 streams"),
    ):
        with refuses(ValueError, message):
            model.update(state, times, kinds)
    with refuses(TypeError, "whole"):
        model.update(state, last + 1, marks.float())
    with refuses(TypeError, "times is not a sequence of numbers"):
        model.update(state, ["noon", "one"], marks)
    with refuses(TypeError, "marks is boolean"):
        model.update(state, last + 1, torch.tensor([True, False]))
    holes = torch.tensor([[False, True], [True, True]])
    with refuses(ValueError, "come last"):
        model.update(state, (last + 1)[:, None].expand(2, 2), marks[:, None].expand(2, 2), mask=holes)
    other = replace(events, unit="second")
    with refuses(ValueError, "'second'"):
        model.log_prob(other)
    with refuses(ValueError, "7 marks"):
        model.log_prob(replace(events, num_marks=7))
    with refuses(ValueError, "events come in order"):
        model.log_prob(events, initial=state)


@every_model
def test_numbers_need_be_no_tensors(kind: str) -> None:
    model = small(kind)
    with torch.no_grad():
        state = model.update(model.empty([3.0, 5.0]), [4.0, 5.5], [0, 1])
        state = model.update(state, [[5, 6], [6, 7]], np.array([[0, 2], [1, 1]]), mask=[[True, False]] * 2)
        start = torch.tensor([3.0, 5.0]).double()
        times, marks = torch.tensor([[4.0, 5.0], [5.5, 6.0]]).double(), torch.tensor([[0, 0], [1, 1]])
        expected = model.update(model.empty(start), times, marks)
        close(model.query(state).mean, model.query(expected).mean)
        one = model.update(model.empty(3), 4.0, 0)
        assert torch.equal(one.last_time, torch.tensor([4.0]).double())


def test_a_state_of_other_weights_or_models_is_refused(refuses: Refuses) -> None:
    model, other = small("cmhp"), small("cmhp")
    with torch.no_grad():
        state = model.condition(stream(5))
        other.marks.table[0] += 1
        with refuses(ValueError, "other weights"):
            other.query(state)
        with refuses(TypeError, "a state of CMHP .*, not EventState"):
            model.query(small("gru").condition(stream(5)))


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


# The transformer


def test_a_transformer_remembers_every_event_and_says_so() -> None:
    model = small("thp")
    few, many = (model.condition(stream(n)).nbytes for n in (10, 1000))
    per_event = 2 * 2 * 8 * 8 + 1 + 8 + 8  # layers, key and value, width, float64; mask, time and mark
    assert many - few == 990 * per_event


def test_dropout_comes_from_the_generator() -> None:
    model = small("thp", dropout=0.5).train()
    events = stream(30)
    torch.manual_seed(3)
    before = torch.get_rng_state()
    losses = [
        float(model.loss(events, generator=torch.Generator().manual_seed(s)).detach()) for s in (1, 1, 2)
    ]
    assert losses[0] == losses[1] != losses[2]
    assert torch.equal(torch.get_rng_state(), before)


def test_what_was_dropped_forwards_is_dropped_backwards_too() -> None:
    """The gradient through recomputed chunks is that of the very loss, by finite differences."""
    model, events = small("thp", dropout=0.5).train(), stream(30)

    def loss() -> Tensor:
        return model.loss(events, chunk=7, generator=torch.Generator().manual_seed(1))  # type: ignore[no-any-return]

    loss().backward()
    direction = torch.randn_like(model.marks.table)
    step = 1e-6
    sides = []
    for sign in (1, -1):
        with torch.no_grad():
            model.marks.table.add_(sign * step * direction)
            sides.append(float(loss()))
            model.marks.table.sub_(sign * step * direction)
    slope = (sides[0] - sides[1]) / (2 * step)
    assert float((model.marks.table.grad * direction).sum()) == pytest.approx(slope, rel=1e-4)


def test_marks_are_averaged_over_equally_likely_gaps_at_once_or_one_by_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, events = small("cmhp"), stream(9, 4)
    with torch.no_grad():
        forecast = model.forecast(events)
        gaps = forecast.quantiles([(i + 0.5) / 16 for i in range(16)])
        each = torch.stack([forecast.mark_logits(gap).exp() for gap in gaps.unbind(-1)])
        at_once = forecast.mark_logits()
        close(at_once.exp(), each.mean(0))
        monkeypatch.setattr(prediction, "AT_ONCE", 0)
        close(forecast.mark_logits(), at_once)


def test_asking_for_the_next_event_takes_hundreds_of_operators() -> None:
    """Each takes a CPU some microseconds, however small the model; thousands would be felt."""
    model = small("cmhp")
    with torch.no_grad():
        state = model.condition(stream(9, 4))
        with Operators() as asked:
            nxt = model.query(state)
        with Operators() as answered:
            nxt.median, nxt.mark_logits()
    assert asked.count < 400
    assert answered.count < 1200


class Operators(TorchDispatchMode):
    """Counts the operators that are run inside."""

    count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return function(*args, **(kwargs or {}))


@every_model
def test_a_training_step_neither_waits_for_its_device_nor_looks_elsewhere(kind: str) -> None:
    """On a device without numbers: whatever needs one, or a tensor of another device, is an error."""
    model, events = small(kind).to("meta").train(), stream(70, 21, 0, t_end=True).to("meta")
    model.loss(events).backward()
    assert all(p.grad.is_meta for p in model.parameters() if p.grad is not None)
    assert model.log_prob(events).survival.is_meta


@pytest.mark.parametrize("kind", ["cmhp", "cmhp-faithful"])
def test_reading_after_every_event_changes_nothing(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU reads padding and all, a CPU only what is asked for."""
    model, events = small(kind), stream(40, 21, 1, 0, t_end=True)

    def results() -> list[Tensor]:
        found = model.log_prob(events)
        assert found.survival is not None
        gradients = torch.autograd.grad(model.loss(events), [*model.parameters()], allow_unused=True)
        return [found.time, found.mark, found.survival, *(g for g in gradients if g is not None)]

    few = results()
    monkeypatch.setattr(model, "_few", lambda _: None)
    for one, other in zip(results(), few, strict=True):
        close(one, other)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@every_model
def test_a_gpu_gives_the_same_likelihood_gradient_and_stream(kind: str) -> None:
    events = stream(40, 21, t_end=True)
    here, there = small(kind), small(kind).cuda()
    far = events.to("cuda")
    for model, data in ((here, events), (there, far)):
        model.loss(data, chunk=16).backward()
    for a, b in zip(here.parameters(), there.parameters(), strict=True):
        if a.grad is not None:
            torch.testing.assert_close(b.grad.cpu(), a.grad, atol=1e-6, rtol=1e-5)
    with torch.no_grad():
        close(there.log_prob(far).time.cpu(), here.log_prob(events).time)
        state = there.update(there.condition(far), far.times[:, -1] + 1)
        known = here.update(here.condition(events), events.times[:, -1] + 1)
        close(there.query(state).mean.cpu(), here.query(known).mean)
    assert there.sample(state, n=5, generator=torch.Generator("cuda").manual_seed(0)).times.is_cuda

"""What follows from the contract of event models: estimates, samples, devices, and what is refused."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.conftest import Refuses
from tests.laws.models import KINDS, MARKS, close, small, stream

every_model = pytest.mark.parametrize("kind", KINDS)


@pytest.mark.once
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


@pytest.mark.once
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


@pytest.mark.parametrize("learning", [False, True])
def test_a_state_of_other_weights_or_models_is_refused(learning: bool, refuses: Refuses) -> None:
    model, other = small("cmhp"), small("cmhp")
    with torch.no_grad():
        other.marks.table[0] += 1
    with torch.set_grad_enabled(learning):
        state = model.condition(stream(5))
        with refuses(ValueError, "other weights"):
            other.query(state)
        with refuses(ValueError, "other weights"):
            other.update(state, state.last_time + 1)
        with refuses(TypeError, "a state of CMHP .*, not EventState"):
            model.query(small("gru").condition(stream(5)))
        unknown = model.update(state.signed(None), state.last_time + 1)
        assert unknown.fingerprint is None


@pytest.mark.once
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


@every_model
def test_weights_written_to_before_the_chunks_are_computed_again_are_noticed(kind: str) -> None:
    model, events = small(kind), stream(40, 21)
    loss = model.loss(events, chunk=16)
    with torch.no_grad():
        next(p for p in model.parameters() if p.requires_grad).mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


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

"""The scale of time, predictions of the next event, and what a model warns of."""

import copy
import pickle
import subprocess
import sys
import warnings
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from constmem.point_processes import CMHP, MODELS
from constmem.point_processes import model as prediction
from constmem.point_processes.events import Events
from tests.conftest import Refuses
from tests.laws.models import KINDS, MARKS, close, small, stream

every_model = pytest.mark.parametrize("kind", KINDS)


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
def test_a_prediction_can_be_copied_and_sent_to_another_process(kind: str) -> None:
    model = small(kind)
    with torch.no_grad():
        here = model.query(model.condition(stream(6, 6)))
        for there in (copy.deepcopy(here), pickle.loads(pickle.dumps(here))):  # noqa: S301
            assert torch.equal(there.median, here.median)
            assert torch.equal(there.mark_logits(), here.mark_logits())
            assert torch.equal(there.last_time, here.last_time)


# Times far away, and scales that do not fit


@every_model
def test_a_gap_so_long_that_others_vanish_beside_it_is_refused(kind: str) -> None:
    model = small(kind)
    events = Events.from_gaps([[1.0, 2.0, 1e300, 1.0]], unit="hour", num_marks=MARKS)
    for refused in (model.loss, model.condition, model.set_scales):
        with pytest.raises(ValueError, match="look for a wrong time"):
            refused(events)
    state = model.condition(stream(5))
    with pytest.raises(ValueError, match="look for a wrong time"):
        model.update(state, state.last_time + 1e300)


@every_model
def test_the_longest_gap_that_is_taken_has_a_finite_gradient(kind: str) -> None:
    model = small(kind).float()
    longest = 0.99e12 * float(model.log_gap_mean.exp())
    events = Events.from_gaps([[1.0, 0.5, longest, 1.0, 2.0]], unit="hour", num_marks=MARKS)
    model.loss(events).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is None or bool(parameter.grad.isfinite().all()), name


def test_times_beyond_the_longest_are_no_infinity_where_nobody_looks() -> None:
    """On a GPU the loss waits for no number, so it cannot refuse one."""
    start, far = torch.zeros(2).double(), torch.tensor([1e300, torch.inf]).double()
    assert bool((small("cmhp").scale.since(start, far) == 1e12).all())


@pytest.mark.parametrize("name", MODELS)
def test_a_model_without_scales_warns_once_of_gaps_far_from_one(name: str) -> None:
    model = MODELS[name](num_marks=1).eval()
    milliseconds = Events.from_gaps([[0.0, 1000.0, 2500.0, 1500.0]], unit="millisecond")
    with pytest.warns(UserWarning, match="typically 1.5e[+]03, but this model expects 1: .*set_scales"):
        model.condition(milliseconds)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.condition(milliseconds)
        model.set_scales(milliseconds)
        model.condition(milliseconds)
        MODELS[name](num_marks=1).condition(Events.from_gaps([[0.0, 0.3, 2.0]], unit="second"))
    streamed = MODELS[name](num_marks=1).eval()
    state = streamed.update(streamed.empty(0.0), 0.0)
    with pytest.warns(UserWarning, match="expects 1"):
        streamed.update(state, 1e9)


def test_events_that_are_none_come_with_advice(refuses: Refuses) -> None:
    model: Any = CMHP(num_marks=1)
    with refuses(TypeError, r"expected Events, not list: Events\.from_arrival_times"):
        model.loss([[1.0, 2.0]])


@pytest.mark.once
def test_a_process_is_imported_without_data_sets_and_without_a_compiler() -> None:
    code = "import sys, constmem; constmem.CMHP; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    found = set(done.stdout.split())
    assert "constmem.point_processes.cmhp" in found
    assert not [name for name in found if name.startswith(("constmem.data", "torch._dynamo"))]

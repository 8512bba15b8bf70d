"""The laws of states that hold for every model of both families."""

from pathlib import Path
from typing import Any

import pytest
import torch

from constmem import NeuralProcess, Stream
from constmem.core.monoid import NOTHING, Monoid
from tests.laws.models import EVENT_MODELS, POINT_MODELS, data, small, stream

every = pytest.mark.parametrize("name", [*POINT_MODELS, *EVENT_MODELS])
modes = pytest.mark.parametrize(("grad", "training"), [(a, b) for a in (True, False) for b in (True, False)])


def seen(model: Any, *, first: int = 0, last: int = 11) -> Any:
    """The state of some points, or events, of two tasks."""
    if isinstance(model, NeuralProcess):
        x, y, _, _ = data()
        return model.condition(x[:, first:last], y[:, first:last])
    events = stream(11, 11)
    return model.observe(events.window(first, last), start=events.t_start)


def asked(model: Any, state: Any) -> torch.Tensor:
    predicted = model.query(state, data()[2]) if isinstance(model, NeuralProcess) else model.query(state)
    mean: torch.Tensor = predicted.mean
    return mean


def extended(model: Any, state: Any) -> Any:
    if isinstance(model, NeuralProcess):
        x, y, _, _ = data(seed=5)
        return model.update(state, x, y)
    return model.update(state, state.last_time + 1.0, torch.tensor([0, 1]))


def with_other_weights(model: Any) -> Any:
    """The same model after a step."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.01)
    return model


@every
@torch.no_grad()
def test_a_state_is_what_it_was_after_a_file_a_move_and_a_choice(name: str, tmp_path: Path) -> None:
    model = small(name)
    state = seen(model)
    state.save(tmp_path / "state")
    loaded = type(state).load(tmp_path / "state", device="cpu")
    for again in (loaded, state.to("cpu"), state.detach(), state.select(torch.arange(2))):
        assert type(again) is type(state)
        assert again.fingerprint == state.fingerprint
        assert (again.nbytes, again.batch, again.layout) == (state.nbytes, 2, state.layout)
        assert torch.equal(again.count, state.count)
        torch.testing.assert_close(asked(model, again), asked(model, state), rtol=0, atol=0)
    second = asked(model, state.select(slice(1, 2))) if name in EVENT_MODELS else None
    assert second is None or torch.allclose(second, asked(model, state)[1:])
    assert state.nbytes == sum(t.nbytes for t in state.tensors().values())


@every
def test_a_state_never_changes_when_it_is_used(name: str) -> None:
    model = small(name)
    state = seen(model)
    before = {part: t.clone() for part, t in state.tensors().items()}
    asked(model, state)
    extended(model, state)
    assert all(torch.equal(t, before[part]) for part, t in state.tensors().items())


@every
@modes
def test_the_state_of_other_weights_is_refused_in_every_mode(name: str, grad: bool, training: bool) -> None:
    model, other = small(name).train(training), with_other_weights(small(name).train(training))
    if not model.observing_parameters():
        return  # stored points depend on no weights: see the laws of points
    with torch.set_grad_enabled(grad):
        state = seen(model)
        assert state.fingerprint == extended(model, state).fingerprint == model.fingerprint()
        for wrong in (lambda: asked(other, state), lambda: extended(other, state)):
            with pytest.raises(ValueError, match="other weights"):
                wrong()
        with_other_weights(model)
        with pytest.raises(ValueError, match="other weights"):
            asked(model, state)


@every
@torch.no_grad()
def test_nothing_is_the_identity_of_merging_and_signed_by_nobody(name: str) -> None:
    model = small(name)
    if not issubclass(model.state_type, Monoid):
        return
    state = seen(model)
    empty = model.empty(2) if isinstance(model, NeuralProcess) else model.empty(stream(11, 11).t_start)
    assert empty.count.tolist() == [0, 0]
    assert empty.fingerprint in (NOTHING, model.fingerprint())
    for merged in (state.merge(empty), empty.merge(state)):
        assert merged.fingerprint == state.fingerprint
        torch.testing.assert_close(asked(model, merged), asked(model, state), rtol=1e-9, atol=1e-9)


@every
@pytest.mark.parametrize("damage", ["nan", "missing", "unknown", "negative"])
@torch.no_grad()
def test_a_damaged_state_is_refused(name: str, damage: str) -> None:
    model = small(name)
    state = seen(model)
    tensors = {part: t.clone() for part, t in state.tensors().items()}
    floating = next(part for part, t in tensors.items() if t.is_floating_point() and t.numel())
    if damage == "nan":
        tensors[floating].view(-1)[0] = torch.nan
    elif damage == "missing":
        del tensors[floating]
    elif damage == "unknown":
        tensors["lask"] = torch.ones(2, 11, dtype=torch.bool)
    elif "count" in tensors:
        tensors["count"] -= 100
    else:
        return  # stored points are counted
    with pytest.raises(ValueError, match=r"^(holds|lacks) "):
        type(state).of_tensors(tensors, state.fingerprint)


@every
def test_a_stream_runs_on_every_model(name: str, tmp_path: Path) -> None:
    model = small(name)
    if isinstance(model, NeuralProcess):
        x, y, xt, _ = data()
        running, asks = Stream(model, batch=2), (xt,)
        for i in range(11):
            running.observe(x[:, i : i + 1], y[:, i : i + 1])
    else:
        events = stream(11, 11)
        running, asks = Stream(model, batch=2, start=events.t_start), ()
        for i in range(11):
            running.observe(events.times[:, i], events.marks[:, i])
    running.save(tmp_path / "stream")
    with torch.no_grad():
        expected = asked(model, seen(model))
    for each in (running, Stream.load(tmp_path / "stream", model)):
        torch.testing.assert_close(each.predict(*asks).mean, expected, rtol=1e-6, atol=1e-7)

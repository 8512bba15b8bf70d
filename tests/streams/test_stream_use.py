"""A `Stream` among changed weights, threads, other kinds of data and events."""

import copy
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from threading import Barrier, Event
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from constmem import AttentionState, Decay, Events, Stream, Window
from constmem.point_processes import MODELS as EVENT_MODELS
from tests.conftest import Refuses
from tests.laws import models as small_models
from tests.streams.made import (
    MODEL,
    Forget,
    Model,
    assert_predicts,
    assert_state,
    built,
    condition,
    every_kind,
    query,
    task,
)

# Weights


@every_kind
@pytest.mark.parametrize("grad", [True, False])
def test_predictions_follow_the_weights_or_are_refused(model: Model, forget: Forget, grad: bool) -> None:
    x, y, xt = task()
    model, other = (built(seed, type(model)) for seed in (1, 2))
    stream = Stream(model, batch=2, forget=forget)
    stream.observe(x, y)
    before = stream.predict(xt)
    model.head.load_state_dict(other.head.state_dict())  # of the decoder alone: states go on
    with torch.set_grad_enabled(grad):
        assert_predicts(stream.predict(xt), query(stream.state, xt, model), 0.0)
        assert float((stream.predict(xt).mean - before.mean).abs().max()) > 1e-4
        model.load_state_dict(other.state_dict())
        if model.observing_parameters():
            for ask in (lambda: stream.predict(xt), lambda: stream.observe(x, y)):
                with pytest.raises(ValueError, match=r"other weights|different weights"):
                    ask()
        else:
            assert_predicts(stream.predict(xt), query(stream.state, xt, other), 0.0)


# Threads


def together(*jobs: Callable[[], None]) -> None:
    """Run jobs in threads of their own, all at once; what one raises is raised here."""
    start = Barrier(len(jobs))
    with ThreadPoolExecutor(len(jobs)) as pool:

        def run(job: Callable[[], None]) -> None:
            start.wait()
            job()

        for done in [pool.submit(run, job) for job in jobs]:
            done.result()


@every_kind
def test_no_point_of_eight_writers_is_lost(model: Model, forget: Forget) -> None:
    x, y, _ = task(8 * 25)
    stream = Stream(model, batch=2, forget=None if forget is None else Window(8 * 25, 3))

    def write(first: int) -> None:
        for i in range(first, 8 * 25, 8):
            stream.observe(x[:, i : i + 1], y[:, i : i + 1])

    together(*(partial(write, first) for first in range(8)))
    assert stream.count.tolist() == [8 * 25] * 2
    whole = condition(x, y, model)
    if isinstance(whole, AttentionState):
        assert_state(stream.state, whole)
    else:  # the same points, in another order
        assert torch.equal(stream.state.x.sort(1).values, whole.x.sort(1).values)


@every_kind
def test_predictions_are_never_older_than_the_last_observation(model: Model, forget: Forget) -> None:
    x, y, xt = task(30)
    for _ in range(5):
        stream, done = Stream(model, batch=2, forget=forget), Event()

        def write() -> None:
            try:
                for i in range(30):
                    stream.observe(x[:, i : i + 1], y[:, i : i + 1])  # noqa: B023
            finally:
                done.set()  # noqa: B023

        def read() -> None:
            while not done.is_set():  # noqa: B023
                stream.predict(xt)  # noqa: B023

        together(write, read, read)
        assert_predicts(stream.predict(xt), query(stream.state, xt, model), 0.0)


def test_a_reader_that_was_overtaken_leaves_nothing_stale(monkeypatch: pytest.MonkeyPatch) -> None:
    x, y, xt = task(2)
    model = built()
    stream = Stream(model, batch=2)
    stream.observe(x[:, :1], y[:, :1])
    read = model.read

    def slow(state: Any) -> Any:
        memory = read(state)
        monkeypatch.setattr(model, "read", read)
        stream.observe(x[:, 1:], y[:, 1:])  # while the reader is about to remember what it has read
        return memory

    monkeypatch.setattr(model, "read", slow)
    assert_predicts(stream.predict(xt), query(condition(x[:, :1], y[:, :1], model), xt, model))
    assert_predicts(stream.predict(xt), query(condition(x, y, model), xt, model))


def test_a_stream_can_be_copied() -> None:
    x, y, xt = task()
    stream = Stream(MODEL, batch=2)
    stream.observe(x, y)
    again = copy.deepcopy(stream)
    again.observe(x, y)
    assert stream.count.tolist() == [30, 30]
    assert again.count.tolist() == [60, 60]
    assert_predicts(stream.predict(xt), query(condition(x, y), xt))


# What may be given


def test_one_stream_takes_points_without_its_axis_and_arrays_and_lists() -> None:
    x, y, xt = task(b=1)
    expected = Stream(MODEL)
    expected.observe(x, y)
    kinds: list[Callable[[Tensor], Any]] = [
        lambda t: t[0], lambda t: t[0, :, 0], lambda t: t.numpy(), lambda t: t[0].numpy(),
        lambda t: t[0, :, 0].tolist(), Tensor.tolist, lambda t: Frame(t[0].numpy()),
    ]  # fmt: skip
    for kind in kinds:
        stream = Stream(MODEL)
        stream.observe(kind(x), kind(y))
        assert_predicts(stream.predict(kind(xt)), expected.predict(xt), 1e-6)
    stream = Stream(MODEL)
    for a, b in zip(x.flatten().tolist(), y.flatten().tolist(), strict=True):
        stream.observe(a, b)
    assert_predicts(stream.predict(xt), expected.predict(xt))
    stream = Stream(MODEL, forget=Decay(3.0))
    stream.observe(np.arange(40), np.arange(40.0))  # whole numbers, and float64 with weights
    assert stream.count.item() == 40


class Frame:
    """What NumPy knows how to read, as it does a frame of columns."""

    def __init__(self, numbers: Any) -> None:
        self.numbers = numbers

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        return self.numbers


def test_what_cannot_be_meant_is_refused_with_advice_that_helps(refuses: Refuses) -> None:
    x, y, _ = task()
    two, one = Stream(MODEL, batch=2), Stream(MODEL)
    with refuses(ValueError, r"x has shape \(30,\), .* \(batch, points, 1\)"):
        two.observe(x[0, :, 0], y[0, :, 0])
    with refuses(ValueError, "x is a batch of 2, but the stream one of 1"):
        one.observe(x, y)
    for words in (["a", "b"], np.array(["2024-01-01"], dtype="datetime64[D]")):
        with pytest.raises(TypeError, match="x must be numbers"):
            one.observe(words, [1.0, 2.0])
    with refuses(ValueError, r"they must be the same"):
        one.observe([1.0, 2.0], [1.0])
    assert one.count.item() == two.count.sum().item() == 0


# Events


@pytest.mark.parametrize("name", EVENT_MODELS)
@pytest.mark.parametrize("batch", [1, 2])
def test_a_stream_of_events_predicts_what_its_model_does(name: str, batch: int, tmp_path: Path) -> None:
    model = small_models.small(name)
    events = small_models.stream(*[12] * batch)
    stream = Stream(model, batch=batch, start=events.t_start)
    stream.observe(events.times[:, :1], events.marks[:, :1])
    stream.observe(events.times[:, 1], events.marks[:, 1])
    stream.observe(events.times[:, 2:], events.marks[:, 2:])
    stream.save(tmp_path / "stream")
    with torch.no_grad():
        expected = model.query(model.condition(events))
    for each in (stream, Stream.load(tmp_path / "stream", model), stream.fork()):
        torch.testing.assert_close(each.predict().mean, expected.mean, rtol=1e-6, atol=0)
        assert each.count.tolist() == [12] * batch
    with pytest.raises(TypeError, match="of events, predict"):
        stream.predict(torch.zeros(1, 1, 1))
    with pytest.raises(ValueError, match="times are finite, absolute and never decrease"):
        stream.observe(events.times[:, :1], events.marks[:, :1])
    assert stream.count.tolist() == [12] * batch


def test_a_watch_begins_with_the_first_event_unless_it_is_said_when(tmp_path: Path) -> None:
    model = small_models.small("cmhp")
    times, marks = [100.0, 100.5, 103.0], np.array([0, 2, 1])
    stream = Stream(model)
    with pytest.raises(ValueError, match="not known when observation began: give start="):
        stream.predict()
    stream.save(tmp_path / "new")
    again = Stream.load(tmp_path / "new", model)
    for each in (stream, again):
        each.observe(times, marks)
    events = Events.from_arrival_times([times], marks=[marks.tolist()], unit="hour", num_marks=3)
    with torch.no_grad():
        expected = model.query(model.condition(events)).mean
    for each in (stream, again):
        torch.testing.assert_close(each.predict().mean, expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", ["trivial", "thp", "cmhp"])
def test_a_window_slides_over_events(name: str, tmp_path: Path) -> None:
    model = small_models.small(name)
    events = small_models.stream(20, 20)
    stream = Stream(model, batch=2, forget=Window(6, 3), start=events.t_start)
    for i in range(20):
        stream.observe(events.times[:, i], events.marks[:, i])
    count = int(stream.count[0])
    assert 6 <= count <= 8
    with torch.no_grad():
        last = model.observe(events.window(20 - count, 20), start=events.t_start)
    torch.testing.assert_close(stream.predict().mean, model.query(last).mean, rtol=1e-5, atol=0)
    stream.save(tmp_path / "stream")
    again = Stream.load(tmp_path / "stream", model)
    torch.testing.assert_close(again.predict().mean, stream.predict().mean, rtol=1e-9, atol=0)


def test_ways_to_forget_that_states_of_events_do_not_allow_are_refused() -> None:
    with pytest.raises(
        ValueError, match=r"GRU\w* cannot forget by Window.* use forget=None, or a model whose"
    ):
        Stream(small_models.small("gru"), forget=Window(9))
    with pytest.raises(ValueError, match=r"CMHP cannot forget by Decay.* use forget=Window"):
        Stream(small_models.small("cmhp"), forget=Decay(5.0))

"""Exported models of events say what the library says; states go both ways."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from constmem import CMHP, Stream
from constmem.integrations.onnx import export, export_named
from constmem.point_processes.states import ConstantState

pytestmark = [pytest.mark.slow, pytest.mark.compiles]  # `make slow-test`
pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")
from constmem.integrations.onnx_runner import EventRunner, Runner  # noqa: E402


@pytest.fixture(scope="module")
def model() -> CMHP:
    torch.manual_seed(0)
    return CMHP(num_marks=3, dim=16, depth=1, num_slots=4, num_latents=4, num_heads=2, hidden=12).eval()


@pytest.fixture(scope="module")
def folder(model: CMHP, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("onnx")
    model.save_pretrained(made / "model")
    return export_named(str(made / "model"), made / "graphs", half=False)


def events(batch: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    times = torch.rand(batch, count, dtype=torch.float64).cumsum(1) + 1e6
    return times, torch.randint(-1, 3, (batch, count))


def same(runner: EventRunner, model: CMHP, state: Any) -> None:
    for name, tensor in state.tensors().items():
        np.testing.assert_allclose(runner.state[name], tensor, atol=1e-4, rtol=1e-9, err_msg=name)
    with torch.no_grad():
        wanted = model.query(state)
        gap = torch.full((runner.batch,), 0.7, dtype=torch.float64)
        marks = wanted.mark_logits(gap).exp()
    found = runner.predict()
    for name in ("log_weights", "loc", "scale"):
        np.testing.assert_allclose(found[name], getattr(wanted.gap, name), atol=1e-5)
    np.testing.assert_allclose(found["mean"], wanted.mean, rtol=1e-4)
    np.testing.assert_allclose(runner.mark_probabilities(0.7), marks, atol=1e-5)


@pytest.mark.parametrize(("batch", "steps"), [(1, [1] * 30), (1, (20, 1)), (2, (1, 7)), (1, ())])
def test_any_number_of_streams_and_events_is_predicted_alike(
    batch: int, steps: Any, model: CMHP, folder: Path
) -> None:
    start = torch.full((batch,), 1e6, dtype=torch.float64)
    runner, state = EventRunner(folder, start=start), model.empty(start)
    times, marks = events(batch, sum(steps))
    i = 0
    for count in steps:
        runner.observe(times[:, i : i + count], marks[:, i : i + count])
        with torch.no_grad():
            state = model.update(state, times[:, i : i + count], marks[:, i : i + count])
        i += count
    same(runner, model, state)


def test_states_go_both_ways_through_files(model: CMHP, folder: Path, tmp_path: Path) -> None:
    times, marks = events(1, 9)
    runner = EventRunner(folder, start=[1e6])
    runner.observe(times[0, :5], marks[0, :5])
    runner.save(tmp_path / "state")
    with torch.no_grad():
        state = model.update(ConstantState.load(tmp_path / "state"), times[:, 5:], marks[:, 5:])
    runner.observe(times[:, 5:], marks[:, 5:])
    same(runner, model, state)
    state.save(tmp_path / "state")
    other = EventRunner(folder)
    other.load(tmp_path / "state")
    same(other, model, state)
    with torch.no_grad():
        other.observe([2e6], [1])
        same(other, model, model.update(state, torch.tensor([2e6]).double(), torch.tensor([1])))


@pytest.mark.parametrize("counts", [(7, 5), (1, 1), (0, 4), (4, 0)])
def test_parts_of_streams_merge_in_any_order_as_in_the_library(
    counts: tuple[int, int], model: CMHP, folder: Path, tmp_path: Path
) -> None:
    start = torch.full((2,), 1e6, dtype=torch.float64)
    times, marks = events(2, sum(counts))
    times = times.round(decimals=0)  # some are simultaneous
    first, later = (slice(counts[0]), slice(counts[0], None))
    before = times[:, counts[0] - 1] if counts[0] else start
    for swapped in (False, True):
        mine = EventRunner(folder, start=start)
        other = EventRunner(folder, start=start, last_time=before)
        mine.observe(times[:, first], marks[:, first])
        other.observe(times[:, later], marks[:, later])
        with torch.no_grad():
            part = model.update(model.empty(start), times[:, first], marks[:, first])
            rest = model.update(model.empty(start, last_time=before), times[:, later], marks[:, later])
            whole = model.update(part, times[:, later], marks[:, later])
        if swapped:
            mine, other, part, rest = other, mine, rest, part
        mine.merge(other)
        same(mine, model, part.merge(rest))
        with torch.no_grad():
            np.testing.assert_allclose(mine.predict()["loc"], model.query(whole).gap.loc, atol=1e-5)
        mine.save(tmp_path / "state")
        same(mine, model, ConstantState.load(tmp_path / "state"))


def test_only_parts_of_the_same_streams_merge(folder: Path) -> None:
    runner = EventRunner(folder, start=[0.0])
    with pytest.raises(ValueError, match="as many of them"):
        runner.merge(EventRunner(folder, start=[0.0, 1.0]))
    with pytest.raises(ValueError, match=r"count time from one start: .* start="):
        runner.merge(EventRunner(folder, start=[1.0]))
    with pytest.raises(ValueError, match="last_time must be"):
        EventRunner(folder, start=[1.0], last_time=[0.0])
    with pytest.raises(ValueError, match="last_time must be"):
        EventRunner(folder, last_time=[0.0])


def test_graphs_observe_events_from_nothing(folder: Path) -> None:
    times, marks = events(2, 5)
    runner = EventRunner(folder, start=[1e6, 1e6])
    found = runner._run("observe", times=times.numpy(), marks=marks.numpy())
    runner.observe(times, marks)
    for name, array in runner.state.items():
        np.testing.assert_allclose(found[f"{name}_out"], array, atol=1e-6, err_msg=name)


def test_observation_begins_with_the_first_event_where_nothing_else_is_said(
    model: CMHP, folder: Path
) -> None:
    stream, runner = Stream(model), EventRunner(folder)
    for times, marks in (([7.0, 9.0], [0, 2]), ([9.5], [1])):
        stream.observe(times, marks)
        runner.observe(times, marks)
        same(runner, model, stream.state)
        runner.observe([], [])  # no events are no news
        same(runner, model, stream.state)


def test_a_fork_goes_on_by_itself(folder: Path) -> None:
    runner = EventRunner(folder)
    runner.observe([7.0], [0])
    fork = runner.fork()
    fork.observe([9.0], [1])
    assert (runner.count.tolist(), fork.count.tolist(), type(fork)) == ([1], [2], EventRunner)


def test_twenty_thousand_single_events_stay_exact(model: CMHP, folder: Path) -> None:
    start = torch.full((1,), 1e6, dtype=torch.float64)
    runner, (times, marks) = EventRunner(folder, start=start), events(1, 20_000)
    for i in range(20_000):
        runner.observe(times[:, i : i + 1], marks[:, i : i + 1])
    with torch.no_grad():
        same(runner, model, model.update(model.empty(start), times, marks))


@pytest.mark.parametrize("gap", [-1.0, float("nan"), [1.0, 2.0]])
def test_marks_after_a_gap_that_is_none_are_refused(gap: Any, folder: Path) -> None:
    with pytest.raises(ValueError, match="gap must be"):
        EventRunner(folder).mark_probabilities(gap)


@pytest.mark.parametrize(
    ("times", "marks", "message"),
    [
        ([3.0, 2.0], [0, 0], "in order"),
        ([float("nan")], [0], "finite"),
        ([3.0], [3], "from 0 to 2"),
        ([3.0], [0.5], "whole numbers"),
        ([3.0, 4.0], [0], "one shape"),
    ],
)
def test_events_that_do_not_fit_are_refused(times: Any, marks: Any, message: str, folder: Path) -> None:
    runner = EventRunner(folder)
    with pytest.raises(ValueError, match=message):
        runner.observe(times, marks)
    assert runner.count.tolist() == [0]


def test_runners_know_their_own_kind(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="a model of events, not of points"):
        Runner(folder)
    with pytest.raises(ValueError, match="start must be"):
        EventRunner(folder, start=[])
    with pytest.raises(ValueError, match="only CMANP, CMHP"):
        export(torch.nn.Linear(1, 1), tmp_path)  # type: ignore[arg-type]

"""The way of a call: through few files, with the weights verified once."""

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

import constmem
from constmem import CMANP, CMHP, Decay, Stream, Window
from constmem.kernels import Snapshot
from constmem.kernels.paths import library

PACKAGE = Path(constmem.__file__).parent


def passed(work: Callable[[], object]) -> set[str]:
    """The files of the package whose code runs in the third call: what is made once has been made by then."""
    work()
    work()
    found: set[str] = set()

    def enter(frame: FrameType, event: str, _: Any) -> None:
        if event == "call":
            found.add(frame.f_code.co_filename)

    before = sys.getprofile()
    sys.setprofile(enter)
    try:
        work()
    finally:
        sys.setprofile(before)
    inside = [Path(name) for name in found if Path(name).is_relative_to(PACKAGE)]
    return {str(path.relative_to(PACKAGE)) for path in inside}


@pytest.mark.skipif(library() is None, reason="there is no C++ compiler, so that operators serve")
@torch.no_grad()
def test_conditioning_passes_eight_files_at_most_and_a_query_ten() -> None:
    model = CMANP.from_pretrained("emnist")
    x, y = 2 * torch.rand(1, 100, 2) - 1, torch.rand(1, 100, 1) - 0.5
    state = model.condition(x, y)
    conditioned, asked = passed(lambda: model.condition(x, y)), passed(lambda: model.query(state, x))
    assert "neural_processes/base.py" in conditioned & asked  # files are seen at all
    assert len(conditioned) <= 8, sorted(conditioned)
    assert len(asked) <= 10, sorted(asked)


@torch.no_grad()
def test_every_call_verifies_the_weights_once(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: dict[str, int] = {"dim": 16, "depth": 1, "num_slots": 4, "num_latents": 4, "num_heads": 2}
    model, process = CMANP(dim_x=1, dim_y=1, **sizes).eval(), CMHP(num_marks=3, **sizes).eval()  # type: ignore[arg-type]
    x, y, one = torch.rand(1, 9, 1), torch.rand(1, 9, 1), torch.rand(1, 1, 1)
    times, marks = torch.arange(1.0, 4.0)[None], torch.ones(1, 3, dtype=torch.int64)
    state, events = model.condition(x, y), process.update(process.empty(torch.zeros(1)), times, marks)
    streams = [Stream(model, forget=forget) for forget in (None, Window(points=5, buckets=5), Decay(3.0))]
    for stream in streams:
        stream.observe(x, y)
    calls: dict[str, Callable[[], object]] = {
        "condition": lambda: model.condition(x, y),
        "observe": lambda: model.observe(x, y),
        "update": lambda: model.update(state, one, one),
        "update with several": lambda: model.update(state, x, y),
        "update of nothing": lambda: model.update(model.empty(), one, one),
        "query": lambda: model.query(state, x),
        "predict": lambda: streams[0].predict(x),
        "update with an event": lambda: process.update(events, torch.tensor([5.0]), torch.tensor([1])),
        "query of events": lambda: process.query(events),
    }
    calls |= {f"{stream.forget}": lambda stream=stream: stream.observe(x, y) for stream in streams}  # type: ignore[misc]
    seen: list[Snapshot] = []
    holds = Snapshot.holds
    monkeypatch.setattr(Snapshot, "holds", lambda self, tensors: seen.append(self) or holds(self, tensors))
    found = {}
    for name, call in calls.items():
        call()
        seen.clear()
        call()
        found[name] = len(seen)
    assert found == dict.fromkeys(calls, 1)

"""Files that version 0.1.0 wrote go on loading, and answer as they did then (tests/core/old)."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from constmem import NeuralProcess, PointProcess, Stream

OLD = Path(__file__).parent / "old"
ANSWERS = load_file(OLD / "answers.safetensors")
POINTS, EVENTS = ("cmanp", "lbanp", "np"), ("trivial", "gru", "thp", "cmhp")
old = pytest.warns(UserWarning, match="has no checksum, as older versions wrote none")


def assert_answers(found: torch.Tensor, name: str) -> None:
    torch.testing.assert_close(found, ANSWERS[name], atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("name", POINTS)
@torch.no_grad()
def test_models_states_and_streams_of_points(name: str) -> None:
    with old:
        model = NeuralProcess.from_pretrained(OLD / name)
    x, y, xt, mask = (ANSWERS[part] for part in ("x", "y", "xt", "mask"))
    assert_answers(model.query(model.condition(x, y, mask=mask), xt).mean, f"{name}.mean")
    with old:
        state = model.state_type.load(OLD / name / "state.safetensors")
    assert_answers(model.query(state, xt).mean, f"{name}.mean")
    assert torch.equal(state.count, mask.sum(1))
    for kind in ("all", "window", "decay"):
        path = OLD / name / f"{kind}.safetensors"
        if not path.exists():
            assert (name, kind) == ("lbanp", "decay")
            continue
        with old:
            stream = Stream.load(path, model)
        assert_answers(stream.predict(xt).mean, f"{name}.{kind}")
        stream.observe(x, y)


@torch.no_grad()
def test_states_as_pairs_of_float32() -> None:
    with old:
        model = NeuralProcess.from_pretrained(OLD / "cmanp")
    with old:
        state = model.state_type.load(OLD / "cmanp" / "paired.safetensors")
    assert_answers(model.query(state, ANSWERS["xt"]).mean, "cmanp.mean")


@pytest.mark.parametrize("name", EVENTS)
@torch.no_grad()
def test_models_and_states_of_events(name: str) -> None:
    with old:
        model = PointProcess.from_pretrained(OLD / name)
    with old:
        state = model.state_type.load(OLD / name / "state.safetensors")
    assert state.count.tolist() == [5, 3]
    assert_answers(model.query(state).mean, f"{name}.mean")


@pytest.mark.parametrize("name", ["emnist", "gp"])
def test_shipped_weights_are_known_by_their_checksums(name: str) -> None:
    assert NeuralProcess.from_pretrained(name).domain  # no warning, which would be an error here

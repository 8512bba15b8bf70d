"""States of neural processes belong to the weights that made them, in memory and in files."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from constmem import NeuralProcess
from constmem.core.files import read_tensors, write_tensors
from tests.laws.points import (
    Factory,
    assert_predicts,
    assert_unchanged,
    built,
    pieces,
    small_cmanp,
    task,
    tensors,
)

# States and weights belong together


def all_ways(model: NeuralProcess, x: Tensor, y: Tensor) -> dict[str, Any]:
    return {
        "condition": model.condition(x, y),
        "chunks": model.condition(x, y, chunk=7),
        "observe": model.observe(x, y),
        "generator": model.condition_chunks(pieces(x, y)),
        "update": model.update(model.empty(2), x, y),
        "merge": model.empty(2).merge(model.observe(x, y)),
    }


@pytest.mark.parametrize("way", ["condition", "chunks", "observe", "generator", "update", "merge"])
def test_a_state_of_other_weights_is_refused(constant_factory: Factory, way: str) -> None:
    model, other = built(constant_factory), constant_factory().eval().requires_grad_(False)
    x, y, xt = task()
    state = all_ways(model, x, y)[way]
    before = tensors(state)
    for attempt in (
        lambda: other.query(state, xt),
        lambda: other.update(state, x, y),
        lambda: other.condition_chunks([(x, y)], initial=state),
    ):
        with pytest.raises(
            ValueError, match=r"made by other weights \(fingerprint \w{16}, this model \w{16}\)"
        ):
            attempt()
    assert_unchanged(state, before)
    with pytest.raises(ValueError, match="cannot merge states made by different weights"):
        state.merge(other.condition(x, y))


def change_in_place(parameter: torch.nn.Parameter) -> None:
    with torch.no_grad():
        parameter.mul_(1.5)


def test_the_fingerprint_is_that_of_the_weights_a_state_depends_on(
    constant: NeuralProcess,
) -> None:
    x, y, xt = task()
    state = constant.condition(x, y)
    first = constant.fingerprint()
    assert state.fingerprint == first == constant.fingerprint()
    observing = {id(p) for p in constant.observing_parameters()}
    others = [p for p in constant.parameters() if id(p) not in observing]
    change_in_place(others[0])
    assert constant.fingerprint() == first  # the decoder may change: states stay valid
    constant.query(state, xt)
    for parameter in constant.observing_parameters():
        before = constant.fingerprint()
        if bool(parameter.any()):
            change_in_place(parameter)
            assert constant.fingerprint() != before
    with pytest.raises(ValueError, match="made by other weights"):
        constant.query(state, xt)


def test_every_parameter_a_state_depends_on_is_named(constant_factory: Factory) -> None:
    model = built(constant_factory).requires_grad_(True)
    x, y, _ = task()
    state = model.condition(x, y)
    torch.cat([t.flatten() for t in state.tensors().values() if t.requires_grad]).square().sum().backward()
    used = {id(p) for p in model.parameters() if p.grad is not None and bool(p.grad.any())}
    assert used == {id(p) for p in model.observing_parameters()}


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("training", [True, False])
def test_states_of_other_weights_are_refused_in_every_mode(
    constant_factory: Factory, grad: bool, training: bool
) -> None:
    a, b = (built(constant_factory).requires_grad_(True).train(training) for _ in range(2))
    with torch.no_grad():
        for parameter in b.observing_parameters():
            parameter.mul_(1.1)
    x, y, xt = task()
    with torch.set_grad_enabled(grad):
        state = a.update(a.update(a.empty(x.shape[0]), x, y), x, y)
        assert state.fingerprint == a.condition(x, y).fingerprint == a.fingerprint()
        for wrong in (
            lambda: b.query(state, xt),
            lambda: b.update(state, x, y),
            lambda: b.condition_chunks([(x, y)], initial=state),
            lambda: b.condition(x, y).merge(state),
        ):
            with pytest.raises(ValueError, match=r"other weights|different weights"):
                wrong()


def test_a_step_of_training_gives_states_a_new_name(constant_factory: Factory) -> None:
    model = built(constant_factory).requires_grad_(True).train()
    x, y, xt = task()
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
    before = model.condition(x, y)
    model.query(before, xt).mean.sum().backward()
    optimiser.step()
    with pytest.raises(ValueError, match="other weights"):
        model.query(before, xt)
    assert model.query(before.signed(None), xt).mean.isfinite().all()  # at one's own risk
    assert model.condition(x, y).fingerprint not in (before.fingerprint, None)


@torch.no_grad()
def test_what_nobody_knows_stays_unknown(constant_factory: Factory) -> None:
    """A state of unknown weights must not come out of an update with a name it has no right to."""
    model = built(constant_factory)
    x, y, _ = task()
    unknown = model.condition(x, y).signed(None)
    assert model.update(unknown, x, y).fingerprint is None
    assert model.update(unknown, x[:, :1], y[:, :1]).fingerprint is None


def test_a_cmanp_refuses_the_state_of_another_shape_of_model() -> None:
    model = small_cmanp().eval().requires_grad_(False)
    x, y, xt = task()
    for settings in ({"depth": 1}, {"num_slots": 5}, {"num_heads": 4}, {"dim": 8}):
        other = small_cmanp(**settings).eval().requires_grad_(False)
        message = r"this state is of another model: it has \(depth, heads, slots, channels\)"
        for attempt in (
            lambda: model.query(other.condition(x, y), xt),  # noqa: B023
            lambda: model.update(other.condition(x, y), x, y),  # noqa: B023
            lambda: model.condition_chunks([(x, y)], initial=other.condition(x, y)),  # noqa: B023
        ):
            with pytest.raises(ValueError, match=message):
                attempt()


def test_a_state_on_another_device_is_refused() -> None:
    model = small_cmanp().eval().requires_grad_(False)
    x, y, xt = task()
    state = model.condition(x, y)
    elsewhere = replace(state, value=state.value.to("meta"), lse=state.lse.to("meta"))
    with pytest.raises(ValueError, match=r"the state is on meta, the model on cpu: use state.to\('cpu'\)"):
        model.query(elsewhere, xt)


def test_a_state_of_another_precision_is_refused_where_it_would_be_mixed() -> None:
    model = small_cmanp().eval().requires_grad_(False)
    x, y, xt = task()
    single = model.condition(x, y).to(dtype=torch.float32)
    with pytest.raises(ValueError, match=r"cannot merge states that differ: .*float32 .*float64"):
        model.update(single, x, y)
    assert_predicts(model.query(single, xt), model.query(model.condition(x, y), xt))


# Files


def test_a_model_comes_back_from_its_folder(model: NeuralProcess, tmp_path: Path) -> None:
    x, y, xt = task()
    model.save_pretrained(tmp_path / "deep" / "model")
    again = type(model).from_pretrained(tmp_path / "deep" / "model")
    assert not again.training
    assert again.config == model.config
    assert again.fingerprint() == model.fingerprint()
    with torch.no_grad():
        expected = model.query(model.condition(x, y), xt)
        assert_predicts(again.query(again.condition(x, y), xt), expected, 0.0)
        assert_predicts(again.query(model.condition(x, y), xt), expected, 0.0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_model_comes_back_in_its_own_precision(
    model: NeuralProcess, tmp_path: Path, dtype: torch.dtype
) -> None:
    model.to(dtype).save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path)
    for one, other in zip(again.parameters(), model.parameters(), strict=True):
        assert one.dtype == dtype
        assert torch.equal(one, other)
    assert again.fingerprint() == model.fingerprint()


def test_a_state_comes_back_from_its_file(model: NeuralProcess, tmp_path: Path) -> None:
    x, y, xt = task()
    state = model.condition(x, y)
    state.save(tmp_path / "state")
    again = type(state).load(tmp_path / "state")
    assert_unchanged(again, tensors(state))
    assert_predicts(model.query(again, xt), model.query(state, xt), 0.0)
    assert again.fingerprint == state.fingerprint
    more = model.update(again, x, y)
    assert_predicts(model.query(more, xt), model.query(model.update(state, x, y), xt), 0.0)


def test_a_state_file_remembers_its_weights(constant_factory: Factory, tmp_path: Path) -> None:
    model, other = built(constant_factory), constant_factory().eval().requires_grad_(False)
    x, y, xt = task()
    model.condition(x, y).save(tmp_path / "state")
    again = type(model.empty()).load(tmp_path / "state")
    with pytest.raises(ValueError, match="made by other weights"):
        other.query(again, xt)


def test_folders_that_hold_no_model_are_refused(model: NeuralProcess, tmp_path: Path) -> None:
    load = type(model).from_pretrained
    with pytest.raises(FileNotFoundError, match="needs a folder that save_pretrained wrote"):
        load(tmp_path)
    model.save_pretrained(tmp_path)
    config = tmp_path / "config.json"
    good = config.read_text()
    for content in ("{", "[]", "{}", '{"model": "cmanp"}', "3"):
        config.write_text(content)
        with pytest.raises(ValueError, match=r"config.json is damaged or of another kind"):
            load(tmp_path)
    config.write_text(json.dumps({**json.loads(good), "model": "other"}))
    with pytest.raises(ValueError, match=f"holds a 'other', not a '{model.name}'"):
        load(tmp_path)
    content = json.loads(good)
    settings = content["config"]
    changed = {"colour": 3, "dim_x": 5} | ({"num_heads": 1} if "num_heads" in settings else {})
    for name, value in changed.items():
        config.write_text(json.dumps({**content, "config": {**settings, name: value}}))
        with pytest.raises(ValueError, match=r"config.json is not the one that was saved with these weights"):
            load(tmp_path)
    weights, header = read_tensors(tmp_path / "model.safetensors", kind="constmem.model", version=1)
    header.pop("config")  # as in files of before
    write_tensors(tmp_path / "model.safetensors", weights, header)
    for change, message in (
        ({"colour": 3}, r"has settings that .* does not know"),
        ({"dim_x": 5}, r"do not fit its config.json"),
        ({"dim_x": 10**15}, r"dim_x is 1000000000000000, far beyond what the weights"),
        ({next(name for name in settings if name.endswith("depth")): 10**6}, "far beyond"),
    ):
        config.write_text(json.dumps({**content, "config": {**settings, **change}}))
        with pytest.raises(ValueError, match=message):
            load(tmp_path)
    config.write_text("[" * 10**5)
    with pytest.raises(ValueError, match="damaged or of another kind"):
        load(tmp_path)
    config.write_text(good)
    name = next(name for name, tensor in weights.items() if tensor.is_floating_point())
    for bad in (torch.nan, torch.inf):
        damaged = weights | {name: torch.full_like(weights[name], bad)}
        write_tensors(tmp_path / "model.safetensors", damaged, header)
        with pytest.raises(ValueError, match="holds NaN or infinity"):
            load(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"expected a constmem.model"):
        load(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"nothing of the kind")
    with pytest.raises(ValueError, match="not a readable safetensors file"):
        load(tmp_path)

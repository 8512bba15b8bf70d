"""Weights of CANP, ANP and BANP from the version that had a ReLU too many go on predicting what they did.

The folders in `older` were written by that version: weights, settings, and what it predicted with them.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.distributions import Distribution

from constmem.core.files import read_tensors, write_tensors
from constmem.core.model import KIND, VERSION
from constmem.neural_processes import MODELS, NeuralProcess
from constmem.training import loop as train
from constmem.training.recipes import changed, recipe

OLDER = Path(__file__).parent / "older"
every = pytest.mark.parametrize("name", ["canp", "anp", "banp"])


def loaded(name: str) -> tuple[NeuralProcess, dict[str, Tensor]]:
    with (
        pytest.warns(UserWarning, match="has no checksum"),
        pytest.warns(UserWarning, match=r"earlier version.*loaded as it was trained, with value_relu=True"),
    ):
        model = NeuralProcess.from_pretrained(OLDER / name)
    return model, load_file(OLDER / name / "predicted.safetensors")


def predicted(model: NeuralProcess, then: dict[str, Tensor]) -> Distribution:
    with torch.no_grad():
        return model.query(model.condition(then["x"], then["y"]), then["xt"])


def assert_predicts(model: NeuralProcess, then: dict[str, Tensor]) -> None:
    now = predicted(model, then)
    torch.testing.assert_close(now.mean, then["mean"], atol=1e-5, rtol=0)
    torch.testing.assert_close(now.stddev, then["stddev"], atol=1e-5, rtol=0)


@every
def test_older_weights_predict_what_they_did_and_say_what_they_are(name: str) -> None:
    assert_predicts(*loaded(name))


@every
def test_without_the_relu_older_weights_would_predict_something_else(name: str) -> None:
    model, then = loaded(name)
    published = MODELS[name](**model.config | {"value_relu": False}).eval()
    published.load_state_dict(model.state_dict())
    assert (predicted(published, then).mean - then["mean"]).abs().max() > 1e-3


@every
def test_older_weights_saved_again_say_by_themselves_what_they_are(name: str, tmp_path: Path) -> None:
    model, then = loaded(name)
    model.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["config"]["value_relu"] is True
    assert_predicts(NeuralProcess.from_pretrained(tmp_path), then)  # a warning would be an error here


@every
def test_new_weights_are_of_the_published_model_and_say_so(name: str, tmp_path: Path) -> None:
    model = MODELS[name](dim_x=1, dim_y=1, dim=8, num_heads=2)
    model.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["config"]["value_relu"] is False
    assert NeuralProcess.from_pretrained(tmp_path).config == model.config


def small_run(*more: str) -> train.Run:
    sets = ["steps=4", "batch=2", "warmup=1", "model.dim=8", "model.num_heads=2", *more]
    return train.Run("digits", "canp", "improved", changed(recipe("digits", "canp"), sets))


def test_an_older_run_is_resumed_with_its_relu_only(tmp_path: Path) -> None:
    train.train(small_run(), out=tmp_path, stop_after=2)
    path = tmp_path / "run.json"
    about: Any = json.loads(path.read_text())
    del about["run"]["recipe"]["model"]["value_relu"]  # as it was written then
    path.write_text(json.dumps(about))
    with pytest.raises(ValueError, match=r"recipe.model.value_relu is True there, False here"):
        train.train(small_run(), out=tmp_path, resume=True)
    train.train(small_run("model.value_relu=true"), out=tmp_path, resume=True)
    assert NeuralProcess.from_pretrained(tmp_path).config["value_relu"] is True


def test_training_on_from_older_weights_asks_for_their_relu(tmp_path: Path) -> None:
    MODELS["canp"](**small_run().recipe.model).save_pretrained(tmp_path / "older")
    path = tmp_path / "older" / "config.json"
    about = json.loads(path.read_text())
    del about["config"]["value_relu"]
    path.write_text(json.dumps(about))
    weights, header = read_tensors(tmp_path / "older" / "model.safetensors", kind=KIND, version=VERSION)
    header.pop("config")  # by which its files know each other today
    write_tensors(tmp_path / "older" / "model.safetensors", weights, header)
    start = f"start={tmp_path / 'older'}"
    with (
        pytest.warns(UserWarning, match="earlier version"),
        pytest.raises(ValueError, match=r"weights for model.value_relu=True"),
    ):
        train.train(small_run(start), out=tmp_path / "refused")
    with pytest.warns(UserWarning, match="earlier version"):
        train.train(small_run(start, "model.value_relu=true"), out=tmp_path / "run")
    assert NeuralProcess.from_pretrained(tmp_path / "run").config["value_relu"] is True

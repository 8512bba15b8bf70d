"""The training loop: resumable bit for bit, stopped in good order, honest about bad settings."""

import contextlib
import dataclasses
import json
import os
import signal
import time
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
import torch

from constmem.core import MODELS
from constmem.core.costs import progress
from constmem.core.files import read_tensors, write_tensors
from constmem.core.model import KIND, VERSION
from constmem.data import DATASETS
from constmem.neural_processes import CMANP, NeuralProcess
from constmem.neural_processes import MODELS as NEURAL_PROCESSES
from constmem.training import folder as run_folder
from constmem.training import loop as train
from constmem.training import recipes, sources
from constmem.training.folder import StoppedError
from constmem.training.log import Log
from constmem.training.loop import Run
from constmem.training.recipes import EventRecipe, PointRecipe, changed, recipe
from constmem.training.steps import Muon

FORMAT: dict[str, Any] = {"kind": run_folder.KIND, "version": run_folder.VERSION}
SMALL = ["steps=12", "batch=4", "warmup=3", "num_targets=8", "model.dim=8", "model.depth=1",
         "model.num_slots=4", "model.num_latents=4", "model.hidden=8", "model.num_heads=2"]  # fmt: skip


def small_run(*more: str) -> Run:
    return Run("digits", "cmanp", "improved", changed(recipe("digits", "cmanp"), [*SMALL, *more]))


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return CMANP.from_pretrained(folder).state_dict()


def kept(folder: Path) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """All that a checkpoint holds: weights, moments, random numbers, step; and the weights kept beside it."""
    tensors, header = read_tensors(folder / run_folder.CHECKPOINT, **FORMAT)
    best = NeuralProcess.from_pretrained(folder).state_dict()
    return tensors | {f"best.{name}": tensor for name, tensor in best.items()}, header


@pytest.mark.parametrize(  # the last two draw samples, and one of them stores its data
    ("model", "optimiser"), [("cmanp", "muon"), ("cmanp", "adam"), ("np", "adam"), ("bnp", "muon")]
)
def test_a_resumed_run_equals_an_uninterrupted_one_bit_for_bit(
    tmp_path: Path, model: str, optimiser: str
) -> None:
    taken = signature(NEURAL_PROCESSES[model]).parameters
    sizes = [item for item in SMALL if item.partition("=")[0].removeprefix("model.") in taken]
    settings = changed(recipe("digits", model), [*SMALL[:4], *sizes, f"optimiser={optimiser}"])
    run = Run("digits", model, "improved", settings)
    train.train(run, out=tmp_path / "whole", validate_every=4)
    train.train(run, out=tmp_path / "parts", validate_every=4, stop_after=5)
    train.train(run, out=tmp_path / "parts", validate_every=4, resume=True)
    (whole, about), (parts, about_parts) = kept(tmp_path / "whole"), kept(tmp_path / "parts")
    assert about == about_parts
    assert about["step"] == str(run.recipe.steps)
    assert whole.keys() == parts.keys()
    assert {name.partition(".")[0] for name in whole} == {"model", "optimiser", "generator", "best"}
    assert all(torch.equal(whole[name], parts[name]) for name in whole)


def test_training_changes_the_weights_and_lowers_the_loss(tmp_path: Path) -> None:
    run = small_run("steps=60", "lr=0.005")
    train.train(run, out=tmp_path)
    entries = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    losses = [entry["loss"] for entry in entries if "loss" in entry]
    assert losses[-1] < losses[0]
    fresh = train.build(run).state_dict()
    assert any(not torch.equal(fresh[name], t) for name, t in weights(tmp_path).items())


def test_training_leaves_the_arithmetic_of_the_process_alone_and_a_cpu_exact(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    rate = train._rate

    def watched(*given: Any) -> float:
        seen.append(torch.get_float32_matmul_precision())
        return rate(*given)

    monkeypatch.setattr(train, "_rate", watched)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        train.train(small_run(), out=tmp_path)
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision(before)
    assert set(seen) == {"highest"}  # though the recipe would have a GPU round


def test_a_folder_that_holds_a_run_is_not_overwritten(tmp_path: Path) -> None:
    train.train(small_run("steps=2"), out=tmp_path)
    with pytest.raises(FileExistsError, match="--resume"):
        train.train(small_run("steps=2"), out=tmp_path)


def test_a_run_begun_on_another_kind_of_device_goes_on_with_new_random_numbers(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = small_run()
    train.train(run, out=tmp_path, stop_after=5)
    path = tmp_path / run_folder.CHECKPOINT
    tensors, header = read_tensors(path, **FORMAT)
    tensors["generator"] = torch.zeros(16, dtype=torch.uint8)  # as large as a GPU's
    write_tensors(path, tensors, header)
    with caplog.at_level("WARNING", "constmem"):
        train.train(run, out=tmp_path, resume=True)
    assert "another device's" in caplog.text
    entries = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert max(entry.get("step", 0) for entry in entries) == run.recipe.steps


def test_a_run_of_other_settings_is_not_resumed(tmp_path: Path) -> None:
    train.train(small_run("steps=2"), out=tmp_path)
    with pytest.raises(
        ValueError, match=r"other settings \(recipe.steps is 2 there, 3 here\): resume it with those"
    ):
        train.train(small_run("steps=3"), out=tmp_path, resume=True)


def test_a_run_begins_with_the_weights_of_another(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    train.train(small_run("steps=3"), out=first)
    run = small_run("steps=2", f"start={first}", "lr=1e-30", "warmup=0")
    train.train(run, out=second, stop_after=1)
    (first / "model.safetensors").rename(first / "gone")  # which is not looked at again
    train.train(run, out=second, resume=True)
    begun, ended = (CMANP(**run.recipe.model) for _ in range(2))
    for model, path in ((begun, first / "gone"), (ended, second / "model.safetensors")):
        model.load_state_dict(read_tensors(path, kind=KIND, version=VERSION)[0])
    for one, other in zip(begun.parameters(), ended.parameters(), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize(
    ("start", "changes", "message"),
    [
        ("first", ["model.num_slots=3"], r"weights for model\.num_slots=\d+: --set these too"),
        ("nowhere", [], "nowhere"),
        ("gp", [], r"weights for other data, model\.dim_x=1.*: begin without it"),
    ],
)
def test_weights_that_a_run_cannot_begin_with_leave_no_folder(
    start: str, changes: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    train.train(small_run("steps=1"), out=Path("first"))
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        train.train(small_run("steps=1", f"start={start}", *changes), out=Path("second"))
    assert not Path("second").exists()


@pytest.mark.parametrize("mine", ["config.json", "model.safetensors", "metrics.jsonl", "eval.json"])
def test_a_run_writes_over_nothing_that_lies_in_its_folder(mine: str, tmp_path: Path) -> None:
    (tmp_path / mine).write_text("mine")
    (tmp_path / "notes.txt").write_text("mine, too")  # which is in nobody's way
    with pytest.raises(
        FileExistsError, match=f"holds {mine}, which a run would write over: take another --out"
    ):
        train.train(small_run("steps=1"), out=tmp_path)
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {
        mine: "mine",
        "notes.txt": "mine, too",
    }
    (tmp_path / mine).unlink()
    train.train(small_run("steps=1"), out=tmp_path)


def test_a_run_of_a_version_that_knew_fewer_settings_goes_on(tmp_path: Path) -> None:
    run = small_run("steps=2")
    train.train(run, out=tmp_path, stop_after=1)
    path = tmp_path / "run.json"
    content = json.loads(path.read_text())
    del content["run"]["recipe"]["start"]
    path.write_text(json.dumps(content))
    train.train(run, out=tmp_path, resume=True)
    assert json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[-1])["step"] == 2


def test_a_loss_that_is_not_finite_stops_the_run_and_keeps_the_last_good_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = small_run()
    train.train(run, out=tmp_path, stop_after=4)
    before = (tmp_path / "checkpoint.safetensors").read_bytes()
    monkeypatch.setattr(CMANP, "loss", lambda self, *_, **__: self.latents.sum() * float("nan"))
    with pytest.raises(StoppedError, match="nan at step 5: start anew"):
        train.train(run, out=tmp_path, resume=True)
    assert (tmp_path / "checkpoint.safetensors").read_bytes() == before


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_the_run_with_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    original, calls = sources.Source.__getattribute__, []

    def noticed(self: sources.Source, name: str) -> object:
        if name == "sample":
            calls.append(name)
            if len(calls) == 3:
                os.kill(os.getpid(), number)
        return original(self, name)

    monkeypatch.setattr(sources.Source, "__getattribute__", noticed)
    with pytest.raises(StoppedError, match="after step 3"):
        train.train(small_run(), out=tmp_path)
    monkeypatch.undo()
    train.train(small_run(), out=tmp_path, resume=True)
    assert json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[-1])["step"] == 12


@pytest.mark.parametrize(("place", "moment"), [(train, "_validate"), (run_folder.Keeper, "save")])
def test_a_signal_while_it_validates_or_writes_loses_nothing_and_is_answered_at_once(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    place: Any,
    moment: str,
) -> None:
    original = getattr(place, moment)

    def interrupted(*given: Any, **named: Any) -> Any:
        os.kill(os.getpid(), signal.SIGINT)
        return original(*given, **named)

    monkeypatch.setattr(place, moment, interrupted)
    run = small_run("validate_every=4")
    with contextlib.suppress(StoppedError):  # none where all was done already
        train.train(run, out=tmp_path, stop_after=8)
    monkeypatch.undo()
    assert "stopping as soon as a checkpoint is written; once more: at once" in capfd.readouterr().err
    train.train(run, out=tmp_path, resume=True)
    train.train(run, out=tmp_path / "whole")
    one, other = weights(tmp_path), weights(tmp_path / "whole")
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    train.train(small_run("steps=2"), out=tmp_path / "a")
    other = small_run("steps=2", "model.num_slots=6")
    train.train(other, out=tmp_path / "b", stop_after=1)
    (tmp_path / "a" / "checkpoint.safetensors").replace(tmp_path / "b" / "checkpoint.safetensors")
    with pytest.raises(ValueError, match="another model"):
        train.train(other, out=tmp_path / "b", resume=True)


@pytest.mark.parametrize(("wrote", "now"), [("adam", "muon"), ("muon", "adam")])
def test_a_checkpoint_of_another_optimiser_is_refused(tmp_path: Path, wrote: str, now: str) -> None:
    for name in (wrote, now):
        train.train(small_run(f"optimiser={name}"), out=tmp_path / name, stop_after=1)
    (tmp_path / wrote / "checkpoint.safetensors").replace(tmp_path / now / "checkpoint.safetensors")
    with pytest.raises(ValueError, match=f"(?i)training by {wrote}, not by {now}"):
        train.train(small_run(f"optimiser={now}"), out=tmp_path / now, resume=True)


def test_a_checkpoint_gives_frozen_parameters_no_state(tmp_path: Path) -> None:
    model = CMANP(dim_x=1, dim_y=1, dim=16, num_heads=2)
    frozen, learns = model.latents, model.stack.observation.query
    frozen.requires_grad_(False)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter) if parameter.requires_grad else None
    own: dict[str, Any] = {"out": tmp_path, "lr": 0.1, "model": model, "generator": torch.Generator()}
    kept = [run_folder.Keeper(optimiser=Muon(model, lr=0.1), **own) for _ in range(2)]
    kept[0].optimiser.step()
    kept[0].save(1, Log(tmp_path, 0, "nothing"))
    assert kept[1].load() == 1
    one, other = (keeper.optimiser.state for keeper in kept)
    assert frozen not in other
    assert other[learns].keys() == one[learns].keys()
    assert all(torch.equal(other[learns][key], one[learns][key]) for key in one[learns])


def test_a_device_that_is_not_there_is_named(tmp_path: Path) -> None:
    for name in ("tpu", "cuda:99"):
        with pytest.raises(ValueError, match=f"there is no device '{name}' here"):
            train.train(small_run(), out=tmp_path / "run", device=name)
    assert not (tmp_path / "run").exists()


def test_the_rate_warms_up_and_falls_to_zero() -> None:
    r = dataclasses.replace(recipe("digits", "cmanp"), steps=100, warmup=10, lr=1.0)
    rates = [train._rate(r, step) for step in range(101)]
    assert rates[0] == pytest.approx(0.1)
    assert max(rates) == pytest.approx(1.0)
    assert rates[100] == pytest.approx(0.0, abs=1e-12)
    assert rates[10:] == sorted(rates[10:], reverse=True)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("lrr=1", "did you mean 'lr'"),
        ("steps=many", "steps must be a whole number, not 'many'"),
        ("steps=[", "steps must be a whole number"),
        ("model.dim_x=3", "model.dim_x cannot be set: it follows from the data"),
        ("precision=fp8", "float32, tf32, bf16"),
        ("steps", "key=value"),
        ("steps=0", "steps is 0, but must be 1 or more"),
        ("batch=-1", "batch is -1, but must be 1 or more"),
        ("num_targets=0", "num_targets is 0, but must be 1 or more"),
        ("validate_every=0", "validate_every is 0"),
        ("lr=-0.1", "lr is -0.1, but must be above 0"),
        ("lr=nan", "lr is nan, but must be above 0"),
        ("warmup=-1", "warmup is -1, but must be 0 or more"),
        ("matern=1.5", "matern is 1.5, but must be from 0 to 1"),
        ("jitter=inf", "jitter is inf, but must be 0 or more, and finite"),
    ],
)
def test_a_setting_that_does_not_fit_is_named(override: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        changed(recipe("emnist", "cmanp"), [override])


def test_fewer_steps_shorten_the_warm_up_unless_it_is_told() -> None:
    found = recipe("emnist", "cmanp")
    assert changed(found, [], steps=600).warmup == 60
    assert changed(found, ["warmup=200"], steps=600).warmup == 200
    assert changed(found, [], steps=100_000).warmup == found.warmup
    assert changed(found, ["steps=600"]).warmup == found.warmup
    assert changed(recipe("emnist", "cmanp", "faithful"), [], steps=600).warmup == 0


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("max_points=6", "max_points is 6, but must be at least 7"),
        ("max_points=65", "and at most 64, the pixels of an image"),
        ("num_targets=62", "num_targets is 62, but an image has 64 pixels.*: take at most 61"),
    ],
)
def test_tasks_that_the_data_cannot_give_are_refused_before_a_folder_is_made(
    tmp_path: Path, override: str, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        train.train(small_run(override), out=tmp_path / "run")
    assert not list(tmp_path.iterdir())


def test_an_unknown_model_setting_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="there is no setting 'num_slot' of cmanp: did you mean 'num_slots'"):
        train.train(small_run("model.num_slot=3"), out=tmp_path)
    for value in ("wide", "1.5", "true", "0", "-4"):
        with pytest.raises(ValueError, match="dim must be a whole number of at least 1, not "):
            train.train(small_run(f"model.dim={value}"), out=tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("model", "told"),
    [
        ("cnp-small", "there is no 'cnp-small': cnp has no variants; use cnp itself"),
        ("lbanp-matched", "there is no 'lbanp-matched': lbanp has no variants; use lbanp itself"),
        ("cmanp-smal", "there is no variant of cmanp 'smal': did you mean 'small'"),
        (
            "cmanp-other",
            f"there is no variant of cmanp 'other': choose from {', '.join(MODELS['cmanp'].variants)}$",
        ),
        ("cmanp-", f"there is no variant of cmanp '': choose from {', '.join(MODELS['cmanp'].variants)}$"),
    ],
)
def test_a_variant_that_a_model_does_not_have_is_refused_with_those_it_has(model: str, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        recipe("emnist", model)
    run = Run("emnist", model, "improved", recipe("emnist", model.partition("-")[0]))
    with pytest.raises(ValueError, match=told):  # before any data are looked for
        train.train(run, out=Path("nowhere"), data_dir=Path("nowhere"))


def test_every_variant_can_be_built_and_is_another_model_than_the_one_it_varies() -> None:
    for name, entry in MODELS.items():
        dataset = "taxi" if entry.of_events else "gp"
        plain = train.build(Run(dataset, name, "improved", recipe(dataset, name)))
        for variant in entry.variants:
            model = f"{name}-{variant}"
            built = train.build(Run(dataset, model, "improved", recipe(dataset, model)))
            assert built.config != plain.config


@pytest.mark.parametrize("dataset", ["emnist", "celeba32", "celeba128", "gp"])
def test_the_matched_cmanp_has_as_many_parameters_as_lbanp_within_one_in_a_hundred(dataset: str) -> None:
    matched, lbanp = (
        sum(p.numel() for p in train.build(Run(dataset, m, "improved", recipe(dataset, m))).parameters())
        for m in ("cmanp-matched", "lbanp")
    )
    assert matched == pytest.approx(lbanp, rel=0.01)
    if dataset == "emnist":
        assert (matched, lbanp) == (787_298, 792_642)  # as docs/training.md says; the latter as published


def test_every_data_set_has_both_recipes_for_every_model() -> None:
    built = set()
    for dataset in DATASETS.values():
        for model, entry in MODELS.items():
            for name in recipes.NAMES if entry.of_events == dataset.of_events else ():
                chosen = recipe(dataset.name, model, name)
                assert isinstance(chosen, EventRecipe if entry.of_events else PointRecipe)
                sizes = model, str(chosen.model), dataset.dim_y, dataset.num_marks
                if sizes not in built:
                    built.add(sizes)
                    assert train.build(Run(dataset.name, model, name, chosen)).name == model


def test_progress_tells_the_rate_since_the_first_report_and_the_time_left(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = iter([0.0, 20.0, 30.0, 45.0, 50.0])
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    with progress("run", 1200) as report:
        for done in (1000, 1050, 1100, 1200):  # resumed after 950 steps; every 15 s is often enough
            report(done, "loss 1")
    assert capsys.readouterr().err.splitlines() == [
        "run 1000/1200 loss 1", "run 1100/1200 (4.0/s, 25 s left) loss 1", "run 1200/1200 (6.7/s) loss 1"
    ]  # fmt: skip
    clock = iter([0.0, 1.0, 41.0])
    with progress("slow", 3) as report:
        report(0)
        report(1)
    assert capsys.readouterr().err.splitlines() == ["slow 1/3 (40 s each, 80 s left)"]

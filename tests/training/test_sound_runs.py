"""Runs that go wrong: reported at once and exactly, and never at the cost of what was good before."""

import copy
import json
from collections.abc import Callable
from math import isfinite
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from constmem.core import costs
from constmem.core.checks import first_not_finite
from constmem.neural_processes import CNP, EQTNP
from constmem.training import loop as train
from constmem.training import sources
from constmem.training.folder import CHECKPOINT, StoppedError
from constmem.training.log import Log, read_metrics
from constmem.training.loop import Run
from constmem.training.recipes import changed, recipe
from constmem.training.steps import clipped


def small_run(*more: str, model: str = "cnp") -> Run:
    small = ["steps=12", "batch=4", "warmup=0", "num_targets=8", "model.dim=8"]
    return Run("digits", model, "improved", changed(recipe("digits", model), [*small, *more]))


def strict_entries(folder: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl, read by the letter of JSON: NaN and Infinity are none of it."""

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line, parse_constant=refuse) for line in lines]


def spoils_losses(monkeypatch: pytest.MonkeyPatch, bad: dict[int, float]) -> None:
    """Multiply the losses of some steps, counted from 1, by a number."""
    original, count = CNP.loss, 0

    def loss(self: CNP, *given: Any, **named: Any) -> Tensor:
        nonlocal count
        count += 1
        return original(self, *given, **named) * bad.get(count, 1.0)

    monkeypatch.setattr(CNP, "loss", loss)


# Losses


@pytest.mark.parametrize("factor", [float("nan"), float("-inf")])
def test_where_many_losses_are_not_finite_the_first_step_is_named_though_few_are_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, factor: float
) -> None:
    spoils_losses(monkeypatch, dict.fromkeys([7, 8, 9, 12], factor))
    with pytest.raises(StoppedError, match=r"became nan at step 7: .*smaller lr .*no checkpoint yet$"):
        train.train(small_run(), out=tmp_path)


@pytest.mark.parametrize("optimiser", ["adam", "muon"])
def test_a_single_batch_whose_loss_is_not_finite_is_passed_over_and_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, optimiser: str
) -> None:
    spoils_losses(monkeypatch, {3: float("nan"), 5: float("inf")})
    train.train(small_run(f"optimiser={optimiser}"), out=tmp_path)
    assert "2 of the last" in caplog.text
    assert "the first of them step 3" in caplog.text
    assert all(p.isfinite().all() for p in CNP.from_pretrained(tmp_path).parameters())
    assert all(isfinite(entry["loss"]) for entry in strict_entries(tmp_path) if "loss" in entry)


@pytest.mark.parametrize("most", [0.0, 0.5, 100.0])
def test_gradients_are_clipped_as_by_pytorch_and_are_nothing_where_one_is_not_finite(most: float) -> None:
    ours = [torch.nn.Parameter(torch.zeros(shape)) for shape in ((3, 4), (5,), ())]
    theirs = copy.deepcopy(ours)
    for a, b in zip(ours, theirs, strict=True):
        a.grad = torch.randn(a.shape)
        b.grad = a.grad.clone()
    assert bool(clipped(ours, most))
    torch.nn.utils.clip_grad_norm_(theirs, most or float("inf"))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a.grad, b.grad)
    assert ours[0].grad is not None
    for bad in (float("nan"), float("inf")):
        ours[0].grad[1, 2] = bad
        assert not bool(clipped(ours, most))
        assert all(p.grad is not None and bool((p.grad == 0).all()) for p in ours)


def test_the_last_good_checkpoint_is_named_with_its_step_and_left_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train.train(small_run(), out=tmp_path, stop_after=4)
    files = [tmp_path / CHECKPOINT, tmp_path / "model.safetensors"]
    before = [path.read_bytes() for path in files]
    spoils_losses(monkeypatch, dict.fromkeys([2, 3, 4, 5], float("nan")))
    with pytest.raises(StoppedError) as caught:
        train.train(small_run(), out=tmp_path, resume=True)
    message = str(caught.value)
    assert "the loss became nan at step 6: start anew, in another --out" in message
    assert f"the last good checkpoint is {files[0]}, of step 4: --resume goes on from it" in message
    assert f"--set start={tmp_path} begins a new run" in message
    assert [path.read_bytes() for path in files] == before
    monkeypatch.undo()
    train.train(small_run(f"start={tmp_path}", "steps=1"), out=tmp_path / "anew")  # as it is advised


class Watched(Tensor):
    """A loss that remembers what is asked of it."""

    asked: ClassVar[list[str]] = []

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.asked.append(func.__name__)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


def test_noting_a_loss_is_one_copy_and_waits_for_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = torch.tensor(0.0).as_subclass(Watched)
    seen: list[list[float]] = []

    def stepper(*_given: Any, **_named: Any) -> Any:
        def step(_rate: float) -> Tensor:
            Tensor.add_(kept.as_subclass(Tensor), 1.0)  # as a replay does, in place of the last
            return kept

        return step

    monkeypatch.setattr(train, "_stepper", stepper)
    monkeypatch.setattr(train.Keeper, "last_finite", lambda _, losses, __: seen.append(losses) or 1.0)
    Watched.asked.clear()
    train.train(small_run("validate_every=12"), out=tmp_path)
    assert [name for name in Watched.asked if name != "as_subclass"] == ["clone"] * 12
    assert seen == [[float(i) for i in range(1, 13)]]


# Weights and validations


def test_a_validation_that_is_not_finite_stops_a_run_before_anything_bad_is_written(tmp_path: Path) -> None:
    run = small_run("optimiser=adam", "clip=0", "lr=1e30", "validate_every=1")
    with pytest.raises(StoppedError, match=r"the validation after step 1 gave .*no checkpoint yet$"):
        train.train(run, out=tmp_path, save_every=0)
    assert not (tmp_path / CHECKPOINT).exists()
    assert not (tmp_path / "model.safetensors").exists()
    assert "loss" in strict_entries(tmp_path)[-1]  # of step 1, which was good


def test_a_bad_validation_leaves_the_best_weights_and_the_checkpoint_as_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scores = iter([0.5, float("nan")])
    monkeypatch.setattr(train, "_validate", lambda *_: next(scores))
    contents: list[bytes] = []
    original = train.Keeper.save

    def save(self: Any, step: int, log: Log) -> None:
        original(self, step, log)
        contents[:] = [(tmp_path / name).read_bytes() for name in (CHECKPOINT, "model.safetensors")]

    monkeypatch.setattr(train.Keeper, "save", save)
    with pytest.raises(StoppedError, match=r"validation after step 8 gave nan.*safetensors, of step 4"):
        train.train(small_run("validate_every=4"), out=tmp_path, save_every=0)
    assert contents == [(tmp_path / name).read_bytes() for name in (CHECKPOINT, "model.safetensors")]
    assert [entry["validation"] for entry in strict_entries(tmp_path) if "validation" in entry] == [0.5]


@pytest.mark.parametrize("validates", [False, True])
def test_weights_that_are_not_finite_are_never_written_over_good_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, validates: bool
) -> None:
    train.train(small_run("validate_every=6"), out=tmp_path, stop_after=4)
    files = [tmp_path / CHECKPOINT, tmp_path / "model.safetensors"]
    before = [path.read_bytes() for path in files]
    rate = train._rate
    monkeypatch.setattr(train, "_rate", lambda of, step: float("inf") if step == 5 else rate(of, step))
    monkeypatch.setattr(train, "_validate", lambda *_: 100.0)  # says that all is well
    with pytest.raises(StoppedError, match=r"step 6 left \S+ with numbers that are not finite.*of step 4"):
        train.train(
            small_run("validate_every=6"),
            out=tmp_path,
            resume=True,
            stop_after=6,
            validate_every=6 if validates else 100,
        )
    assert [path.read_bytes() for path in files] == before


def test_moments_of_the_optimiser_that_overflowed_are_not_a_checkpoint_to_go_on_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spoils_losses(monkeypatch, {1: 1e25})
    monkeypatch.setattr(train, "clipped", lambda *_: torch.tensor(True))  # which would pass it over
    with pytest.raises(StoppedError, match=r"left optimiser\S*exp_avg"):
        train.train(small_run("optimiser=adam", "clip=0"), out=tmp_path, stop_after=1)
    assert not (tmp_path / CHECKPOINT).exists()


def test_the_first_tensor_that_is_not_finite_is_named() -> None:
    good = {"a": torch.ones(3), "step": torch.tensor(4), "b": torch.zeros(0)}
    assert first_not_finite(good) is None
    assert first_not_finite({"step": torch.tensor(4)}) is None
    bad = {**good, "c": torch.tensor([1.0, float("-inf")]), "d": torch.tensor(float("nan"))}
    assert first_not_finite(bad) == "c"


def test_a_log_of_an_older_version_with_nan_in_it_is_cleared_of_it(tmp_path: Path) -> None:
    lines = [{"data": "x"}, {"step": 1, "validation": float("nan")}, {"step": 2, "validation": 0.25}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    log = Log(tmp_path, 2, "x")
    log.step(3, float("inf"), 0.1)
    log.close()
    assert log.best == 0.25
    assert [entry.get("validation") for entry in strict_entries(tmp_path)] == [None, None, 0.25, None]
    assert "loss" not in read_metrics(tmp_path)[-1]


# Folders of runs that never began


def refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(costs, "WORTH_ASKING", 0)
    monkeypatch.setattr(costs, "available", lambda _: 1000)


def interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(train, "progress", stop)  # before signals are held back


@pytest.mark.parametrize(("cause", "error"), [(refused, MemoryError), (interrupted, KeyboardInterrupt)])
def test_a_run_that_never_took_a_step_leaves_no_folder(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    cause: Callable[[pytest.MonkeyPatch], None],
    error: type[BaseException],
) -> None:
    out = tmp_path / "runs" / "one"
    cause(monkeypatch)
    with pytest.raises(error):
        train.train(small_run(model="eqtnp"), out=out)
    monkeypatch.undo()
    assert not list(tmp_path.iterdir())
    train.train(small_run("steps=1", model="eqtnp"), out=out)  # of other settings, in the same place


def test_what_a_folder_held_before_a_run_that_never_began_is_still_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    refused(monkeypatch)
    with pytest.raises(MemoryError):
        train.train(small_run(model="eqtnp"), out=tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_a_run_that_goes_on_keeps_its_folder_though_no_step_can_be_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = small_run(model="eqtnp")
    train.train(run, out=tmp_path, stop_after=1)
    before = {path: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()}
    refused(monkeypatch)
    with pytest.raises(MemoryError):
        train.train(run, out=tmp_path, resume=True)
    assert {path: path.read_bytes() for path in before} == before


# Memory, asked for before a loss is compiled


@pytest.mark.compiles
def test_a_compiled_loss_is_refused_too_where_memory_is_too_little(monkeypatch: pytest.MonkeyPatch) -> None:
    run = small_run(model="eqtnp")
    source = sources.open_source("digits", run.recipe, data_dir=None, device=torch.device("cpu"))
    model: EQTNP = train.build(run)
    compiled = torch.compile(model.loss, backend="eager")
    generator = torch.Generator().manual_seed(0)
    task = source.sample(generator)
    refused(monkeypatch)
    message = rf"EQTNP, given {task.xc.shape[1]} points and 8 targets in a batch of 4, would need about"
    with pytest.raises(MemoryError, match=message):
        source.loss(model, compiled, task, generator)
    monkeypatch.setattr(costs, "available", lambda _: 10**9)
    assert source.loss(model, compiled, task, generator).isfinite()


def test_under_autocast_half_as_many_bytes_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    model: EQTNP = train.build(small_run(model="eqtnp"))
    whole = model.estimated_peak(4, 30, 8, learning=True)
    assert train.build(small_run(model="eqtnp")).to("meta").estimated_peak(4, 30, 8, learning=True) == whole
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert model.estimated_peak(4, 30, 8, learning=True) == whole // 2
        monkeypatch.setattr(costs, "WORTH_ASKING", 0)
        monkeypatch.setattr(costs, "available", lambda _: whole * 3 // 4)
        model.afford(4, 30, 8)
    with pytest.raises(MemoryError, match="given 30 points and 8 targets in a batch of 4"):
        model.afford(4, 30, 8)


def test_estimates_are_about_what_training_took_on_a_gpu() -> None:
    results, seen = Path(__file__).parents[2] / "benchmarks" / "results", set()
    for table in ("celeba32", "celeba64", "celeba128"):
        for row in json.loads((results / f"{table}.json").read_text())["rows"]:
            model = train.build(Run(table, row["model"], row["recipe"], recipe(table, row["model"])))
            settings, took = row["settings"], row["peak_memory"]["training"]
            assert settings["precision"] == "bf16"
            sizes = settings["batch"], settings["max_points"] - 3, settings["num_targets"]
            with torch.autocast("cpu", dtype=torch.bfloat16):
                estimated = model.estimated_peak(*sizes, learning=True)
            if estimated:  # a model whose memory grows with its points
                assert 0.4 < estimated / took < 1.25, (table, row["model"])
                seen.add(row["model"])
    assert seen == {"canp", "anp", "bnp", "banp", "tnpd", "eqtnp", "lbanp"}

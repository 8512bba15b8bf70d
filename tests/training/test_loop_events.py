"""Event models through the same loop: resumable, validated, the best weights kept."""

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from constmem.core.files import read_tensors
from constmem.evaluation.runs import evaluate_run
from constmem.evaluation.tables import print_runs
from constmem.point_processes import PointProcess
from constmem.training import folder as run_folder
from constmem.training import loop as train
from constmem.training import sources
from constmem.training.loop import Run
from constmem.training.recipes import changed, recipe
from constmem.training.sources import open_source

FORMAT: dict[str, Any] = {"kind": run_folder.KIND, "version": run_folder.VERSION}
SMALL = ["steps=12", "batch=4", "warmup=2", "model.dim=8", "model.hidden=8", "model.components=2",
         "validate_every=4"]  # fmt: skip
SIZES = {"cmhp": ["model.num_slots=3", "model.num_latents=2", "model.depth=1", "model.num_heads=2"],
         "thp": ["model.num_heads=2"]}  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A tiny pack in the prepared format: alternating marks, whose gaps tell them apart."""
    random = np.random.default_rng(0)
    lengths = random.integers(3, 9, 30)
    marks = np.concatenate([np.arange(n) % 2 for n in lengths])
    gaps = np.where(marks == 0, 0.1, 2.0) * random.lognormal(0, 0.2, len(marks))
    offsets = np.concatenate([[0], lengths.cumsum()])
    times = np.concatenate([gaps[a:b].cumsum() for a, b in itertools.pairwise(offsets)])
    split = np.repeat([0, 1, 2], [18, 6, 6]).astype(np.int8)
    np.savez(
        tmp_path / "events_taxi.npz", times=times, marks=marks.astype(np.int32), offsets=offsets, split=split,
        unit=np.array("hour"), num_marks=np.array(10),
    )  # fmt: skip
    return tmp_path


def small_run(model: str, *more: str) -> Run:
    sizes = SIZES.get(model.partition("-")[0], [])
    return Run("taxi", model, "improved", changed(recipe("taxi", model), [*SMALL, *sizes, *more]))


def weights(folder: Path) -> dict[str, Any]:
    return PointProcess.from_pretrained(folder).state_dict()


def entries(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("model", ["cmhp", "thp", "gru"])
def test_a_resumed_run_equals_an_uninterrupted_one_bit_for_bit(
    model: str, folder: Path, tmp_path: Path
) -> None:
    run = small_run(model)
    train.train(run, out=tmp_path / "whole", data_dir=folder)
    train.train(run, out=tmp_path / "parts", data_dir=folder, stop_after=5)
    train.train(run, out=tmp_path / "parts", data_dir=folder, resume=True)
    whole, parts = weights(tmp_path / "whole"), weights(tmp_path / "parts")
    assert all(torch.equal(whole[name], parts[name]) for name in whole)
    (last, about), (resumed, about_resumed) = (
        read_tensors(tmp_path / name / run_folder.CHECKPOINT, **FORMAT) for name in ("whole", "parts")
    )
    assert about == about_resumed
    assert last.keys() == resumed.keys()
    assert all(torch.equal(last[name], resumed[name]) for name in last)
    assert float(whole["log_gap_std"]) > 1.0  # the scale of the data, not of a new model


def test_the_weights_kept_are_the_best_by_validation(folder: Path, tmp_path: Path) -> None:
    run = small_run("gru", "steps=40", "lr=0.5", "warmup=1", "clip=0")  # a rate that does harm
    train.train(run, out=tmp_path / "run", data_dir=folder)
    found = [e["validation"] for e in entries(tmp_path / "run") if "validation" in e]
    assert len(found) == 10
    assert max(found) > found[-1]
    source = open_source("taxi", run.recipe, data_dir=folder, device=torch.device("cpu"))
    model = PointProcess.from_pretrained(tmp_path / "run")
    with torch.no_grad():
        totals, counts = zip(*(source.score(model, batch) for batch in source.validation()), strict=True)
    assert sum(totals) / sum(counts) == pytest.approx(max(found), rel=1e-5)


def test_before_a_validation_the_latest_weights_are_kept(folder: Path, tmp_path: Path) -> None:
    train.train(small_run("gru"), out=tmp_path / "run", data_dir=folder, stop_after=3)
    fresh = train.build(small_run("gru")).state_dict()
    assert any(not torch.equal(fresh[name], t) for name, t in weights(tmp_path / "run").items())


def test_training_learns_marks_from_gaps_and_gaps_from_marks(folder: Path, tmp_path: Path) -> None:
    run = small_run("gru", "steps=150", "lr=0.02", "batch=18", "validate_every=50")
    train.train(run, out=tmp_path / "run", data_dir=folder)
    found = [e["validation"] for e in entries(tmp_path / "run") if "validation" in e]
    assert max(found) > found[0]
    trivial = small_run("trivial", "steps=150", "lr=0.02", "batch=18", "validate_every=50")
    train.train(trivial, out=tmp_path / "trivial", data_dir=folder)
    floor = max(e["validation"] for e in entries(tmp_path / "trivial") if "validation" in e)
    assert max(found) > floor + 0.5


def test_every_sequence_is_drawn_as_often_as_any_other(folder: Path) -> None:
    run = small_run("gru", "batch=3")
    source = open_source("taxi", run.recipe, data_dir=folder, device=torch.device("cpu"))
    random = torch.Generator().manual_seed(0)
    counts: dict[float, int] = {}
    for _ in range(600):
        batch = source.sample(random)
        assert int(batch.lengths.max()) == batch.times.shape[1]
        for first in batch.times[:, 1].tolist():
            counts[first] = counts.get(first, 0) + 1
    assert len(counts) == 18
    assert all(60 < n < 145 for n in counts.values())  # 100 expected, 9.1 the deviation


def test_models_of_points_and_of_events_are_told_apart() -> None:
    with pytest.raises(ValueError, match=r"data set of events.*cmhp"):
        recipe("taxi", "cmanp")
    with pytest.raises(ValueError, match=r"data set of points.*cmanp"):
        recipe("emnist", "cmhp")
    with pytest.raises(ValueError, match="did you mean 'taxi'"):
        recipe("taxy", "cmhp")
    with pytest.raises(ValueError, match="no variant"):
        recipe("taxi", "gru-faithful")


def test_the_papers_cmhp_is_the_same_by_its_name_and_by_the_papers_recipe() -> None:
    plain = recipe("taxi", "cmhp-faithful").model
    assert plain == recipe("taxi", "cmhp", "faithful").model
    assert plain["recency"] is False


def test_a_run_of_events_is_scored_and_printed(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train.train(small_run("cmhp"), out=tmp_path / "run", data_dir=folder)
    row = evaluate_run(tmp_path / "run", data_dir=folder, device="cpu")
    scores = row.scores["test"]
    assert scores.nll == pytest.approx(scores.time_nll + scores.mark_nll)
    assert scores.sequences == 6
    assert json.loads((tmp_path / "run" / "eval.json").read_text())["scores"]["test"]["nll"] == scores.nll
    print_runs([row])
    assert "NLL" in capsys.readouterr().out


@pytest.mark.parametrize("length", [1, 7, 8, 9, 38, 100, 129, 493, 5000])
def test_lengths_are_rounded_up_by_little_and_to_few(length: int) -> None:
    rounded = sources._round(length)
    assert length <= rounded <= max(length + 7, 1.25 * length)
    assert len({sources._round(n) for n in range(1, 513)}) <= 24


def test_batches_do_not_depend_on_how_they_are_padded(folder: Path) -> None:
    """What a GPU is given, longer rows of the same sequences, has the same loss."""
    run = small_run("cmhp", "model.dropout=0.0")
    source = open_source("taxi", run.recipe, data_dir=folder, device=torch.device("cpu"))
    batch = source.sample(torch.Generator().manual_seed(0))
    model = train.build(run)
    source.prepare(model)
    longer = batch._widened(sources._round(batch.times.shape[1]) + 8)
    with torch.no_grad():
        assert float(model.loss(longer)) == pytest.approx(float(model.loss(batch)), rel=1e-5)


GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
KINDS = [pytest.param(kind, marks=GPU) for kind in ("cmhp", "cmhp-faithful", "thp", "gru", "trivial")]


@pytest.mark.parametrize("kind", KINDS)
def test_a_gpu_trains_like_a_cpu(kind: str, folder: Path, tmp_path: Path) -> None:
    """The same batches, the same steps; the rates are small, so that rounding does not grow."""
    run = small_run(kind, "model.dropout=0.0", "precision=float32", "lr=1e-4")
    train.train(run, out=tmp_path / "cpu", data_dir=folder)
    train.train(run, out=tmp_path / "cuda", data_dir=folder, device="cuda")
    here, there = weights(tmp_path / "cpu"), weights(tmp_path / "cuda")
    for name in here:
        torch.testing.assert_close(there[name], here[name], atol=2e-4, rtol=1e-3)
    losses = [[e["loss"] for e in entries(tmp_path / where) if "loss" in e][-1:] for where in ("cpu", "cuda")]
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)


@pytest.mark.parametrize("kind", KINDS)
def test_a_captured_step_is_the_step(kind: str, folder: Path, tmp_path: Path) -> None:
    """Also where something is dropped, and after a run was resumed."""
    run = small_run(kind, "precision=float32", "lr=1e-4", "steps=30")
    train.train(run, out=tmp_path / "plain", data_dir=folder, device="cuda", compiled=False)
    train.train(run, out=tmp_path / "captured", data_dir=folder, device="cuda", stop_after=11)
    train.train(run, out=tmp_path / "captured", data_dir=folder, device="cuda", resume=True)
    plain, captured = weights(tmp_path / "plain"), weights(tmp_path / "captured")
    for name in plain:
        torch.testing.assert_close(captured[name], plain[name], atol=2e-4, rtol=1e-3)


@pytest.mark.parametrize("kind", KINDS)
def test_sequences_longer_than_a_chunk_train_on_a_gpu(
    kind: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PointProcess, "_stride", lambda *_: 3)
    train.train(small_run(kind), out=tmp_path / "run", data_dir=folder, device="cuda")
    assert all(torch.isfinite(t).all() for t in weights(tmp_path / "run").values())

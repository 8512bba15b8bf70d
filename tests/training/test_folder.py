"""Run folders that were damaged, cut short or left half way: named, never half believed."""

import errno
import fcntl
import json
import logging
import math
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from constmem.core import files
from constmem.core.files import advice_on, read_tensors, write_bytes, write_tensors
from constmem.evaluation import runs
from constmem.evaluation.rows import read_rows
from constmem.evaluation.runs import evaluate_run
from constmem.neural_processes import CMANP, NeuralProcess
from constmem.training import loop as train
from constmem.training.folder import read_run
from constmem.training.log import Log, read_metrics
from constmem.training.loop import Run
from constmem.training.recipes import FROM_DATA, changed, recipe

SETTINGS = ["steps=6", "batch=4", "num_targets=8", "model.dim=8", "validate_every=2"]
RUN = Run("digits", "cnp", "improved", changed(recipe("digits", "cnp"), SETTINGS))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train.train(RUN, out=tmp_path_factory.mktemp("runs") / "cnp", stop_after=4)


@pytest.fixture
def folder(trained: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(trained, tmp_path / "run"))


def resumed(folder: Path) -> Path:
    return train.train(RUN, out=folder, resume=True)


def scored(folder: Path) -> Any:
    return evaluate_run(folder, data_dir=None, device="cpu")


@pytest.mark.parametrize("verb", [resumed, scored])
@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", r"run\.json is damaged or of another kind \(.*\): train again"),
        (b"\xff\xfe\x00", r"run\.json is damaged or of another kind"),
        (b"[]", r"run\.json does not say which dataset, model, recipe"),
        (b'{"run": 3}', r"run\.json does not say which dataset"),
        (b'{"run": {"dataset": "digits", "model": "cnp"}}', "does not say which recipe, recipe_name, seed"),
        (
            b'{"run": {"dataset": "digits", "model": "cnp", "recipe_name": "", "recipe": 3, "seed": 0}}',
            "does not say which recipe its run has",
        ),
    ],
)
def test_a_damaged_record_of_a_run_is_named(
    folder: Path, verb: Callable[[Path], Any], content: bytes, message: str
) -> None:
    (folder / "run.json").write_bytes(content)
    with pytest.raises(ValueError, match=message):
        verb(folder)


def test_half_a_last_line_of_the_metrics_is_left_out_and_mended(folder: Path) -> None:
    path = folder / "metrics.jsonl"
    whole = read_metrics(folder)
    path.write_text(path.read_text() + '{"step": 4, "lo')
    assert read_metrics(folder) == whole
    Log(folder, 4, "the digits")
    assert [json.loads(line) for line in path.read_text().splitlines()] == whole


@pytest.mark.parametrize(
    "line",
    [
        '{"step": 4, "lo',
        "[3]",
        '{"step": "4"}',
        '{"step": 4, "seconds": null}',
        '{"step": 4, "validation": "good"}',
        '{"step": 4, "loss": true}',
        '{"step": 4.5}',
        f'{{"step": {"9" * 30}}}',
        "[" * 100_000,
    ],
)
def test_a_damaged_line_among_the_metrics_is_named(folder: Path, line: str) -> None:
    path = folder / "metrics.jsonl"
    first, *others = path.read_text().splitlines()
    path.write_text("\n".join([first, line, *others]))
    with pytest.raises(ValueError, match=r"line 2 of .*metrics\.jsonl is damaged: .*delete that line"):
        resumed(folder)


@pytest.mark.filterwarnings("ignore:.*no checksum")
@pytest.mark.parametrize(("name", "loss"), [("points", 0.979545), ("events", 1.383510)])
def test_runs_of_the_first_version_are_scored_and_go_on(tmp_path: Path, name: str, loss: float) -> None:
    """Stopped after step 4 of 6; the losses of step 6 are what that version itself had on going on."""
    with zipfile.ZipFile(Path(__file__).with_name("runs_of_version_0.1.zip")) as archive:
        archive.extractall(tmp_path)
    folder = tmp_path / name
    about = read_run(folder)["run"]
    if name == "points":  # of so many simulated events it takes half a minute
        assert math.isfinite(scored(folder).scores["test"].crps)
    sizes = [f"model.{key}={value}" for key, value in about["recipe"]["model"].items()]
    sizes = [size for size in sizes if size.partition("=")[0] not in FROM_DATA]
    kept = ("steps", "batch", "warmup", "validate_every", *(["num_targets"] if name == "points" else []))
    sizes += [f"{key}={about['recipe'][key]}" for key in kept]
    settings = changed(recipe(about["dataset"], about["model"]), sizes)
    train.train(Run(about["dataset"], about["model"], "improved", settings), out=folder, resume=True)
    last = [entry["loss"] for entry in read_metrics(folder) if entry.get("step") == 6 and "loss" in entry]
    assert last == [pytest.approx(loss, abs=1e-4)]


def test_lost_metrics_are_told_of_and_neither_training_nor_scoring_needs_them(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (folder / "metrics.jsonl").unlink()
    assert scored(folder).steps == 0
    with caplog.at_level(logging.WARNING, logger="constmem"):
        resumed(folder)
    assert "the best validation is sought again from step 4" in caplog.text


def test_what_a_killed_process_has_left_half_written_is_cleared_when_the_run_goes_on(folder: Path) -> None:
    left = folder / f".checkpoint.safetensors.{'0123456789abcdef' * 2}"
    mine = folder / ".notes"
    for path in (left, mine):
        path.write_text("half")
    resumed(folder)
    assert mine.exists()
    assert not left.exists()


@pytest.mark.parametrize("lacks", ["generator", "step"])
def test_a_checkpoint_that_lacks_something_is_named(folder: Path, lacks: str) -> None:
    path = folder / "checkpoint.safetensors"
    tensors, header = read_tensors(path, kind="constmem.checkpoint", version=1)
    tensors.pop(lacks, None)
    header.pop(lacks, None)
    write_tensors(path, tensors, header)
    with pytest.raises(ValueError, match=r"checkpoint\.safetensors lacks its step or its random numbers"):
        resumed(folder)


def test_a_version_that_is_no_number_is_refused_like_any_other(tmp_path: Path) -> None:
    write_tensors(tmp_path / "a", {"x": torch.zeros(1)}, {"format": "k", "version": "new"})
    with pytest.raises(ValueError, match="format version new; this constmem reads version 1"):
        read_tensors(tmp_path / "a", kind="k", version=1)


@pytest.mark.parametrize(
    "content", [b"[]", b"3", b'{"model": ["cnp"], "config": {}}', b'{"model": "cnp", "config": [1]}', b"\xff"]
)
def test_a_damaged_config_is_named(folder: Path, content: bytes) -> None:
    (folder / "config.json").write_bytes(content)
    with pytest.raises(ValueError, match=r"config\.json is damaged or of another kind.*save the model again"):
        NeuralProcess.from_pretrained(folder)


def test_weights_of_another_model_are_told_in_a_few_words(folder: Path) -> None:
    other = NeuralProcess.from_pretrained(folder).family()["canp"](dim_x=2, dim_y=1)
    other.save_pretrained(folder.parent / "other")
    shutil.copy(folder.parent / "other" / "model.safetensors", folder)
    with pytest.raises(ValueError, match=r"config\.json") as caught:
        NeuralProcess.from_pretrained(folder)
    assert len(str(caught.value)) < 600


def test_weights_cannot_be_put_where_there_is_no_device(folder: Path) -> None:
    with pytest.raises(ValueError, match="there is no device 'cuda:99' here"):
        NeuralProcess.from_pretrained(folder, device="cuda:99")


def test_a_name_of_no_weights_is_told_with_those_there_are() -> None:
    with pytest.raises(FileNotFoundError, match="or one of the names 'emnist', 'gp'"):
        NeuralProcess.from_pretrained("emnst")


def test_all_runs_without_scores_are_named_at_once(folder: Path, tmp_path: Path) -> None:
    others = [folder, tmp_path / "b c"]
    others[1].mkdir()
    with pytest.raises(FileNotFoundError, match=r"constmem eval .*run '.*b c'` first"):
        read_rows(others)


def test_a_full_disk_is_told_with_the_file_that_was_meant(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    write_bytes(tmp_path / "a", b"old")
    monkeypatch.setattr(files.os, "fsync", full)
    with pytest.raises(OSError, match=r"No space left on device: '.*/a'$") as caught:
        write_bytes(tmp_path / "a", b"new")
    assert "make room" in advice_on(caught.value)
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("a", b"old")]


def test_scores_that_cannot_be_kept_are_told(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(runs, "write_text", mock.Mock(side_effect=OSError(errno.ENOSPC, "no space left")))
    with caplog.at_level(logging.WARNING, "constmem"), pytest.raises(OSError, match="no space"):
        scored(folder)
    (told,) = (r.getMessage() for r in caplog.records if "could not be kept" in r.getMessage())
    assert json.loads(told.partition(": ")[2])["scores"]["test"]["points"] > 0


# Locks


def in_use(folder: Path) -> subprocess.Popen[str]:
    """Another process that holds a folder until it is killed."""
    code = (
        "import sys, time; from pathlib import Path; from constmem.training.folder import claimed\n"
        "with claimed(Path(sys.argv[1])):\n    print('held', flush=True)\n    time.sleep(600)"
    )
    other = subprocess.Popen([sys.executable, "-c", code, str(folder)], stdout=subprocess.PIPE, text=True)
    assert other.stdout is not None
    assert other.stdout.readline() == "held\n"
    return other


def test_a_folder_that_another_process_trains_in_is_refused_and_left_alone(folder: Path) -> None:
    left = folder / f".checkpoint.safetensors.{'0123456789abcdef' * 2}"  # the other may be writing it
    left.write_text("half")
    other = in_use(folder)
    try:
        before = {path: path.read_bytes() for path in folder.iterdir() if path.is_file()}
        with pytest.raises(BlockingIOError, match=rf"is being trained by process {other.pid} on .*: wait"):
            resumed(folder)
        assert {path: path.read_bytes() for path in before} == before
    finally:
        other.kill()
        other.communicate()
    assert (folder / "lock").exists()  # of a process that was killed: it holds nothing back
    resumed(folder)
    assert not (folder / "lock").exists()
    assert not left.exists()


def test_a_folder_that_cannot_be_locked_is_trained_in_with_a_warning(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(fcntl, "flock", mock.Mock(side_effect=OSError(errno.ENOLCK, "no locks available")))
    with caplog.at_level(logging.WARNING, logger="constmem"):
        resumed(folder)
    assert "cannot be locked" in caplog.text


def test_a_folder_without_a_run_says_so(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"there is no run in .*: train one there first"):
        read_run(tmp_path)


def test_a_folder_of_runs_names_one_of_them(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "run.json").write_text("{}")
    with pytest.raises(FileNotFoundError, match=f"no run in .*: name those in it, such as {tmp_path / 'b'}"):
        read_run(tmp_path)


def test_shipped_weights_are_found_beside_a_folder_of_their_name_unless_it_holds_a_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shipped = CMANP.from_pretrained("emnist").config
    Path("emnist").mkdir()
    Path("emnist/notes.txt").write_text("on letters")
    assert CMANP.from_pretrained("emnist").config == shipped
    Path("emnist/config.json").write_text("{}")  # of something else
    assert CMANP.from_pretrained("emnist").config == shipped
    CMANP(dim_x=1, dim_y=1, dim=8, num_heads=2).save_pretrained("emnist")
    assert CMANP.from_pretrained("emnist").config["dim"] == 8

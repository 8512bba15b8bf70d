"""The command line as a person meets it."""

import json
import re
import subprocess
import sys
from pathlib import Path
from statistics import mean, stdev

import numpy as np
import pytest
import torch
from sklearn.ensemble import RandomForestRegressor

import constmem
from constmem import cli
from constmem.cli import train
from constmem.core import EVENTS, POINTS, with_variants
from constmem.data import DATASETS, power_plant
from constmem.evaluation.demo import demo, power_stream
from tests.command import command


def test_help_does_not_import_torch(tmp_path: Path) -> None:
    code = (
        "import sys\nfrom constmem.cli import app\n"
        "try:\n    app(['--help'])\nexcept SystemExit:\n    pass\n"
        "sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, cwd=tmp_path, check=False)
    assert done.returncode == 0, done.stderr
    assert b"train" in done.stdout


def test_help_names_every_model_and_data_set_and_the_version_is_that_of_the_package(tmp_path: Path) -> None:
    shown = command("train", "--help", cwd=tmp_path).stdout.replace("│", " ").split()
    words = {word.strip(",;.") for word in shown}
    assert words >= {*DATASETS, *with_variants(POINTS), *with_variants(EVENTS)}
    assert command("--version", cwd=tmp_path).stdout == f"constmem {constmem.__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("train", "emmist", "cmanp"), "did you mean 'emnist'"),
        (("train", "digits", "cmnap"), "cmanp"),
        (("train", "digits", "lbanp-matched"), "lbanp has no variants; use lbanp itself"),
        (("train", "digits", "cmanp", "--set", "stepz=3"), "did you mean 'steps'"),
        (("train", "digits", "cmanp", "--set", "reads=0.5"), "no setting 'reads' for these data"),
        (
            ("train", "gp", "cmanp", "--set", "max_points=20"),
            "no setting 'max_points' for these data",
        ),
        (("train", "taxi", "cmhp", "--set", "augment=turn"), "no setting 'augment' for these data"),
        (("eval", "nowhere"), "there is no run in nowhere"),
        (("train", "a.xlsx", "cnp", "--x", "a", "--y", "b"), "'a.xlsx' is none: their names end in .csv"),
        (("train", "a.csv", "--x", "a", "--y", "b", "--unit", "hour"), "'cmanp-small' is one of points"),
        (("train", "a.json"), "no file a.json to read events from"),
        (("train", "digits", "--device", "tpu"), "there is no device 'tpu' here"),
        (("train", "digits", "--steps", "0"), "steps is 0, but must be 1 or more"),
        (("table", "--json", "--markdown"), "--markdown and --json are two forms of one table"),
        (("fit", "a.csv", "--target", "b", "--out", "c", "--size", "0"), "greater than or equal to 16"),
    ],
)
def test_what_is_unknown_ends_with_code_2_and_the_nearest_name(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: tuple[str, ...],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["constmem", *arguments])
    with pytest.raises(SystemExit, match="2"):
        cli.main()
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_too_little_memory_is_told_without_a_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def dies() -> None:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes.")

    monkeypatch.setattr(cli, "app", dies)
    with pytest.raises(SystemExit, match="2"):
        cli.main()
    assert "constmem: out of memory (DefaultCPUAllocator" in capsys.readouterr().err


def test_what_to_run_next_names_the_data_folder_unless_the_variable_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("constmem.training.train", lambda *_, **__: None)
    monkeypatch.delenv("CONSTMEM_DATA", raising=False)
    folder = tmp_path / "my packs"
    train("taxi", "gru", data_dir=folder, out=Path("run"))
    where = f"--data-dir '{folder}'"
    assert f"next: constmem eval run {where}; constmem plot run {where}\n" in capsys.readouterr().out
    monkeypatch.setenv("CONSTMEM_DATA", str(folder))
    train("taxi", "gru", data_dir=folder, out=Path("run"))
    assert "next: constmem eval run; constmem plot run\n" in capsys.readouterr().out


def test_a_missing_data_set_is_told_with_where_it_was_looked_for(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=f"(?s){tmp_path}.*prepare"):
        train("emnist", "cmanp", data_dir=tmp_path, out=tmp_path / "run")


def test_a_run_is_trained_and_scored(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = {"dim": 8, "depth": 1, "num_slots": 4, "num_latents": 4, "hidden": 8, "num_heads": 2}
    small = [f"--set=model.{key}={value}" for key, value in sizes.items()]
    small += ["--set=batch=4", "--set=warmup=1"]
    done = command("train", "digits", "cmanp", "--steps", "3", "--out", "run", *small, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    cli.evaluate([tmp_path / "run"], as_json=True)
    (row,) = json.loads(capsys.readouterr().out)
    scores = row["scores"]["test"]
    assert row["steps"] == 3
    assert scores["points"] > 1000
    assert 0 <= scores["coverage"]["0.5"] <= scores["coverage"]["0.95"] <= 1
    assert json.loads((tmp_path / "run" / "eval.json").read_text()) == row


def test_the_ending_of_a_files_name_may_be_in_capitals(tmp_path: Path) -> None:
    rows = [(f"g{i % 12}", i / 120, i % 7) for i in range(120)]
    (tmp_path / "S.CSV").write_text("g,a,b\n" + "".join(f"{g},{a},{b}\n" for g, a, b in rows))
    small = ["--steps=1", "--set=batch=4", "--set=model.dim=8", "--set=jitter=0"]
    points = command("train", "S.CSV", "cnp", "--x=a", "--y=b", "--group=g", *small, cwd=tmp_path)
    assert points.returncode == 0, points.stderr
    events = ["--user=g", "--mark=-", "--time=a"]
    trained = command("train", "S.CSV", "gru", *events, *small[:3], "--out=events", cwd=tmp_path)
    assert trained.returncode == 0, trained.stderr
    done = command("forecast", "events", "S.CSV", "--out=N.CSV", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "N.CSV").read_text().startswith("g,event,a,")


def test_runs_of_several_seeds_are_scored_one_by_one_and_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    small = ["batch=4", "warmup=1", "model.dim=8", "model.pre_depth=2", "model.decoder_depth=2"]
    folders = [Path(f"run{seed}") for seed in range(2)]
    for seed, folder in enumerate(folders):
        train("digits", "cnp", seed=seed, steps=2, out=folder, change=small)
    capsys.readouterr()
    cli.evaluate(folders, as_json=True)
    rows = json.loads(capsys.readouterr().out)
    assert [row["seed"] for row in rows] == [0, 1]
    values = [row["scores"]["test"]["crps"] for row in rows]
    for row, folder in zip(rows, folders, strict=True):
        together = row.pop("over_seeds")
        assert together["seeds"] == [0, 1]
        assert together["crps"]["test"] == pytest.approx({"mean": mean(values), "spread": stdev(values)})
        assert json.loads((folder / "eval.json").read_text()) == row
    cli.evaluate(folders)
    assert "digits cnp improved, mean of 2 seeds" in capsys.readouterr().out
    cli.table(folders, as_json=True)
    assert json.loads(capsys.readouterr().out) == [together]


@pytest.mark.parametrize("resumed", [False, True])
def test_ctrl_c_before_training_begins_is_answered_with_what_was_kept(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    resumed: bool,
) -> None:
    def stopped(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("constmem.training.loop.open_source", stopped)
    monkeypatch.setattr("sys.argv", ["constmem", "train", "digits", "cnp", "--out", "run", "--resume"])
    if resumed:
        Path("run").mkdir()
        Path("run/run.json").write_text("{}")
    with pytest.raises(SystemExit, match="130"):
        cli.main()
    assert "constmem: stopped before the first step; every run is as it was\n" in capsys.readouterr().err
    assert Path("run/run.json").exists() == resumed


def test_the_demo_learns_a_stream_completes_digits_and_draws_both(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    demo(tmp_path, rows=1000, trees=3)
    shown = capsys.readouterr().out
    for name in ("power.png", "digits.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
        assert name in shown.replace("\n", "")
    assert "1,000" in shown
    errors = [float(found) for found in re.findall(r"pixels: error ([\d.]+)", shown)]
    assert len(errors) == 5
    assert errors == sorted(errors, reverse=True)
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_the_demo_finds_a_place_it_cannot_write_to_before_it_learns_anything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("constmem.evaluation.demo._acts", lambda *_: pytest.fail("began"))
    (tmp_path / "taken").write_text("")
    with pytest.raises(FileExistsError):
        demo(tmp_path / "taken")


def test_the_power_plant_is_learned_better_with_every_chunk_in_the_same_memory() -> None:
    found = list(power_stream(3000, trees=3))
    x, y = power_plant()
    errors = [moment.error[0] for moment in found]
    assert errors == sorted(errors, reverse=True)
    linear = np.linalg.lstsq(np.c_[x[:3000], np.ones(3000)], y[:3000])[0]
    straight = np.sqrt(np.mean((np.c_[x[8000:], np.ones(len(x) - 8000)] @ linear - y[8000:]) ** 2))
    assert errors[-1] < 0.85 * straight  # of least squares
    forest = RandomForestRegressor(3, random_state=0).fit(x[:3000], y[:3000]).predict(x[8000:])
    assert found[-1].error[1] == pytest.approx(np.sqrt(np.mean((forest - y[8000:]) ** 2)))
    assert all(0.86 < moment.inside < 0.94 for moment in found)
    assert len({moment.held[0] for moment in found}) == 1
    assert found[-1].held[1] > 2 * found[0].held[1]
    assert [moment.seen for moment in found] == [1000, 2000, 3000]


def test_the_demo_runs_on_one_thread_and_leaves_their_number_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []
    monkeypatch.setattr("constmem.evaluation.demo._acts", lambda *_: seen.append(torch.get_num_threads()))
    torch.set_num_threads(2)
    try:
        demo(tmp_path)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(1)
    assert seen == [1]

"""Own data: from a CSV file or arrays to tasks, a trained model, its scores and a stream."""

import json
import math
import re
import runpy
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from constmem import CMANP, NeuralProcess, Scales, Stream
from constmem.data import Table, TableTasks
from constmem.evaluation.runs import evaluate_run
from constmem.training import context_note, fit_file, fit_table
from constmem.training.loop import Run, _validate, train
from constmem.training.recipes import PointRecipe, changed, table_recipe
from constmem.training.sources import open_source
from tests.command import command
from tests.training.files import write

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")
SIZES = {"dim": 8, "depth": 1, "num_slots": 4, "num_latents": 4, "hidden": 8, "num_heads": 2}
TINY = [*(f"model.{key}={value}" for key, value in SIZES.items()), "batch=4", "warmup=1", "num_targets=8"]


def rows(n: int = 60) -> list[list[Any]]:
    return [[i, f"s{i % 6}", 1000 + 3 * i, math.sin(i), i * i] for i in range(n)]


HEADER = ["number", "sensor", "time", "heat", "dust"]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return write(tmp_path / "air.csv", HEADER, rows())


# Reading


@pytest.mark.parametrize("delimiter", [",", ";", "\t"])
def test_columns_are_read_by_name_in_the_order_asked_for(tmp_path: Path, delimiter: str) -> None:
    path = write(tmp_path / "air.csv", HEADER, rows(), delimiter)
    table = Table.read(path, x=["time", "number"], y=["heat"], group="sensor")
    expected = torch.tensor([[1000.0 + 3 * i, i, math.sin(i)] for i in range(60)], dtype=torch.float64)
    assert torch.equal(table.x, expected[:, :2])
    assert torch.equal(table.y, expected[:, 2:])
    assert table.groups is not None
    assert table.groups.tolist() == [i % 6 for i in range(60)]
    assert "60 rows in 6 groups, 2 inputs, 1 outputs" in table.statement


@pytest.mark.parametrize(
    ("x", "y", "message"),
    [
        ("tame", "heat", "no column 'tame': did you mean 'time'"),
        ("time", "zzz", "choose from number, sensor, time, heat, dust"),
        ("sensor", "heat", "line 2, column 'sensor' .* is 's0', not a number"),
        ("time", "time", "'time' is asked for twice"),
    ],
)
def test_columns_that_cannot_be_are_named(file: Path, x: str, y: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Table.read(file, x=[x], y=[y])


@pytest.mark.parametrize(
    ("line", "column", "cell", "message"),
    [
        (9, 2, "nan", "line 9, column 'time' .* is nan: every number must be finite"),
        (30, 3, "", "line 30, column 'heat' .* is empty, not a number"),
        (7, 3, "1e200", "line 7, column 'heat' .* is 1e200: .* 1e18"),
        (8, 2, "-2e18", "line 8, column 'time' .* is -2e18: .* 1e18"),
        (61, 3, "1,5", "line 61, column 'heat' .* is '1,5', not a number"),
    ],
)
def test_a_bad_cell_is_told_with_its_line_and_column(
    tmp_path: Path, line: int, column: int, cell: str, message: str
) -> None:
    content = rows()
    content[line - 2][column] = cell
    with pytest.raises(ValueError, match=message):
        Table.read(write(tmp_path / "bad.csv", HEADER, content), x=["time"], y=["heat"])


def test_ragged_short_constant_and_missing_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no file"):
        Table.read(tmp_path / "none.csv", x=["time"], y=["heat"])
    ragged = write(tmp_path / "ragged.csv", HEADER, [*rows(), [1, 2]])
    with pytest.raises(ValueError, match=r"line 62 .* has 2 cells, its header 5"):
        Table.read(ragged, x=["time"], y=["heat"])
    short = write(tmp_path / "short.csv", HEADER, rows(49))
    with pytest.raises(ValueError, match="has 49 rows, but 50 are the fewest"):
        Table.read(short, x=["time"], y=["heat"])
    same = write(tmp_path / "same.csv", ["a", "b"], [[i, 7] for i in range(60)])
    with pytest.raises(ValueError, match=r"'b' .* is 7.0 in all 60 rows"):
        Table.read(same, x=["a"], y=["b"])
    few = write(tmp_path / "few.csv", ["a", "b", "g"], [[i, i, i % 3] for i in range(60)])
    with pytest.raises(ValueError, match="3 groups, but 5 are the fewest"):
        Table.read(few, x=["a"], y=["b"], group="g")
    with pytest.raises(ValueError, match=r"each of the 60 groups of few\.csv has a single row"):
        Table.read(few, x=["a"], y=["b"], group="a")
    twice = write(tmp_path / "twice.csv", ["a", "b", "a"], [[i, i, i] for i in range(60)])
    with pytest.raises(ValueError, match=r"twice\.csv has 2 columns 'a': give each a name of its own"):
        Table.read(twice, x=["a"], y=["b"])
    (tmp_path / "empty.csv").write_text("")
    with pytest.raises(ValueError, match=r"empty\.csv is empty, or its first line is"):
        Table.read(tmp_path / "empty.csv", x=["a"], y=["b"])


@pytest.mark.parametrize("kind", [list, torch.tensor, np.array])
def test_groups_keep_their_names_through_a_file(tmp_path: Path, kind: Callable[[Any], Any]) -> None:
    places = [("kitchen", "attic", "hall", "cellar", "loft")[i % 5] for i in range(60)]
    groups: list[Any] = [9 * (i % 5) for i in range(60)] if kind is torch.tensor else places
    Table.of(torch.rand(60), torch.rand(60), kind(groups)).save(tmp_path / "table")
    table = Table.load(tmp_path / "table").take(torch.arange(7, 20))
    assert table.groups is not None
    assert [table.labels[i] for i in table.groups] == [str(group) for group in groups[7:20]]


def test_a_file_that_is_no_text_or_no_csv_is_named_and_lines_are_those_of_the_file(tmp_path: Path) -> None:
    path, content = tmp_path / "odd.csv", b"a,b,note\n" + b"1,2,x\n" * 60
    for last in (b"1,2,caf\xe9\n", b"1,2," + b"x" * 200_000 + b"\n"):
        path.write_bytes(content + last)
        with pytest.raises(ValueError, match=r"odd\.csv is not a CSV file of UTF-8 text"):
            Table.read(path, x=["a"], y=["b"])
    path.write_bytes(b'a,b,note\n1,2,"two\nlines"\n1,none,x\n')
    with pytest.raises(ValueError, match="line 4, column 'b'"):
        Table.read(path, x=["a"], y=["b"])


def test_arrays_are_taken_in_one_or_two_dimensions_and_checked() -> None:
    table = Table.of(range(60), [[float(i), -i] for i in range(60)], groups=[10 * (i % 6) for i in range(60)])
    assert (table.x.shape, table.y.shape, table.num_groups) == ((60, 1), (60, 2), 6)
    assert Table.of([0.1 * i for i in range(60)], range(60)).x[3, 0] == 0.1 * 3  # not through float32
    with pytest.raises(ValueError, match=r"y\[3, 0\] is nan"):
        Table.of(range(60), [float("nan") if i == 3 else i for i in range(60)])
    with pytest.raises(ValueError, match=r"x\[3, 0\] is -1e\+200: .* 1e18"):
        Table.of([-1e200 if i == 3 else i for i in range(60)], range(60))
    with pytest.raises(ValueError, match="as many rows"):
        Table.of(range(60), range(61))


# Tasks


def test_parts_share_no_row_and_no_group(file: Path) -> None:
    alone = Table.read(file, x=["number"], y=["heat"])
    parts = [set(part.x[:, 0].tolist()) for part in alone.parts()]
    assert [len(part) for part in parts] == [48, 6, 6]
    assert set.union(*parts) == set(range(60))
    grouped = Table.read(file, x=["number"], y=["heat"], group="sensor")
    groups = [set(part.groups.tolist()) for part in grouped.parts() if part.groups is not None]
    assert [len(group) for group in groups] == [4, 1, 1]
    assert set.union(*groups) == set(range(6))


@pytest.mark.parametrize("many", [False, True])
@pytest.mark.parametrize("grouped", [False, True])
def test_a_task_is_of_one_group_and_its_targets_are_not_in_its_context(
    grouped: bool, many: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if many:  # as if the groups were too long to be shuffled as a whole
        monkeypatch.setattr("constmem.data.tasks.STRETCH", 1)
    groups = [min(i // 9, 6) for i in range(90)]  # six of nine rows and one of the rest
    table = Table.of(range(90), [1000 + i for i in range(90)], groups if grouped else None)
    tasks = TableTasks(table, device=CPU, max_context=20, num_targets=15)
    generator = torch.Generator().manual_seed(0)
    sizes = set()
    for _ in range(20):
        task = tasks.sample(8, generator=generator)
        assert task.mask_c is not None
        assert task.mask_t is not None
        for i in range(8):
            context = task.xc[i, task.mask_c[i], 0].tolist()
            targets = task.xt[i, task.mask_t[i], 0].tolist()
            assert len(set(context + targets)) == len(context) + len(targets)
            assert len(targets) > 0
            if grouped:
                assert len({groups[int(row)] for row in context + targets}) == 1
            assert task.yt[i, task.mask_t[i], 0].tolist() == [1000 + row for row in targets]
            sizes.add(len(context))
    assert {0, 3, 8} <= sizes
    assert max(sizes) <= 20


def test_every_row_is_context_and_target_equally_often() -> None:
    table = Table.of(range(60), [float(i) for i in range(60)])
    tasks = TableTasks(table, device=CPU, max_context=20, num_targets=20)
    generator = torch.Generator().manual_seed(0)
    shown, asked = torch.zeros(60), torch.zeros(60)
    for _ in range(40):
        task = tasks.sample(64, generator=generator)
        assert task.mask_c is not None
        assert task.mask_t is not None
        shown += torch.bincount(task.xc[task.mask_c][:, 0].long(), minlength=60)
        asked += torch.bincount(task.xt[task.mask_t][:, 0].long(), minlength=60)
    for counts in (shown, asked):
        assert float(counts.max() / counts.min()) < 1.4


def test_jitter_moves_the_inputs_by_so_many_deviations_and_no_output() -> None:
    table = Table.of([100.0 * i for i in range(2000)], range(2000))
    tasks = TableTasks(table, device=CPU, max_context=50, num_targets=50)
    task = tasks.sample(64, generator=torch.Generator().manual_seed(0), jitter=0.1)
    assert task.mask_t is not None
    moved = (task.xt - 100 * task.yt)[task.mask_t]
    assert float(moved.std()) == pytest.approx(0.1 * float(table.x.std()), rel=0.05)


def test_held_out_rows_are_asked_for_given_contexts_of_training_rows(file: Path) -> None:
    table = Table.read(file, x=["number"], y=["heat"])
    training, _, test = table.parts()
    settings = table_recipe("cmanp", dim_x=1, dim_y=1, rows=60, grouped=False)
    source = open_source("air", settings, data_dir=None, device=CPU, own=table)
    known, held_out = set(training.x[:, 0].tolist()), set(test.x[:, 0].tolist())
    asked = 0
    for task in source.tests["test"]():
        assert task.mask_c is not None
        assert set(task.xc[task.mask_c][:, 0].tolist()) <= known
        assert set(task.xt.flatten().tolist()) <= held_out
        asked += task.xt.numel()
    assert asked >= 1000
    (full,) = source.tests["full"]()
    assert sorted(full.xc.flatten().tolist()) == sorted(known)
    model = CMANP(dim_x=1, dim_y=1, dim=8, depth=1, num_slots=4, num_latents=4, num_heads=2)
    source.prepare(model)
    assert model.scales is not None
    torch.testing.assert_close(model.scales.x_mean, training.x.mean(0))


def test_the_same_seed_gives_the_same_evaluation_tasks(file: Path) -> None:
    table = Table.read(file, x=["number"], y=["heat"], group="sensor")
    settings = table_recipe("cmanp", dim_x=1, dim_y=1, rows=60, grouped=True)
    source = open_source("air", settings, data_dir=None, device=CPU, own=table)
    once, again = ([task.xt for task in source.tests["test"]()] for _ in range(2))
    assert all(map(torch.equal, once, again))


# Training


def test_weights_to_begin_with_bring_their_units_or_get_those_of_the_data(tmp_path: Path) -> None:
    x = torch.linspace(5000, 6000, 60)
    recipe = changed(table_recipe("cmanp", dim_x=1, dim_y=1, rows=60, grouped=False), TINY)
    CMANP(**recipe.model).save_pretrained(tmp_path / "plain")
    starts = {"own": tmp_path / "plain", "brought": tmp_path / "own"}  # the second begins with the first
    for (name, start), rows in zip(starts.items(), (x, x + 1e6), strict=True):
        change = [*TINY, f"start={start}"]
        model = fit_table(Table.of(rows, rows), "cmanp", out=tmp_path / name, steps=1, change=change)
        assert model.scales is not None
        assert 5400 < float(model.scales.x_mean) < 5600


def test_a_table_becomes_a_model_in_its_own_units(tmp_path: Path) -> None:
    """A steep line far from zero: only a model that knows the units can come near it."""
    x = torch.linspace(5000, 6000, 300, dtype=torch.float64)
    y = 1e4 + 3 * x + torch.randn(300, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    change = [*TINY, "lr=0.01", "batch=8"]
    model = fit_table(Table.of(x, y), "cmanp", out=tmp_path / "run", steps=150, change=change)
    stream = Stream(model)
    stream.observe(x[None, ::3, None], y[None, ::3, None])
    error = (stream.predict(x[None, 1::3, None]).mean[0, :, 0] - y[1::3]).square().mean().sqrt()
    assert float(error) < 0.5 * float(y.std())
    again = NeuralProcess.from_pretrained(tmp_path / "run")
    assert again.fingerprint() == model.fingerprint()
    about = tmp_path / "run" / "run.json"
    about.write_text(json.dumps(json.loads(about.read_text()) | {"device": "a large one"}))
    row = evaluate_run(tmp_path / "run", data_dir=None, device="cpu")
    assert row.device == "a large one"  # where it was trained
    assert row.evaluated_on != "a large one"
    assert set(row.scores) == {"test", "full"}
    assert row.scores["full"].points == 30
    assert row.scores["full"].rmse < 0.5 * float(y.std())


def test_the_best_validated_weights_are_kept(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    noise = Table.of(torch.randn(80, 3, generator=generator), torch.randn(80, generator=generator))
    change = [*TINY, "lr=0.02", "jitter=0"]
    model = fit_table(noise, "cmanp", out=tmp_path, steps=200, change=change)  # memorises noise
    entries = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    found = [entry["validation"] for entry in entries if "validation" in entry]
    assert len(found) == 4
    assert found[-1] < max(found)
    options = json.loads((tmp_path / "run.json").read_text())["run"]["recipe"]
    source = open_source("x", PointRecipe(**options), data_dir=None, device=CPU, own=noise)
    assert _validate(model, source) == pytest.approx(max(found), abs=1e-6)


def test_a_resumed_run_on_a_table_is_the_uninterrupted_one_and_refuses_other_rows(tmp_path: Path) -> None:
    x = torch.linspace(0, 1, 60)
    table = Table.of(x, x.sin())
    recipe = table_recipe("cmanp", dim_x=1, dim_y=1, rows=60, grouped=False)
    run = Run("table", "cmanp", "own data", changed(recipe, [*TINY, "steps=12"]))
    train(run, out=tmp_path / "whole", own=table)
    train(run, out=tmp_path / "parts", own=table, stop_after=5)
    train(run, out=tmp_path / "parts", own=table, resume=True)
    whole, parts = (
        NeuralProcess.from_pretrained(tmp_path / name).state_dict() for name in ("whole", "parts")
    )
    assert all(torch.equal(whole[name], parts[name]) for name in whole)
    assert "scales.x_mean" in whole
    with pytest.raises(ValueError, match="other rows"):
        train(run, out=tmp_path / "parts", own=Table.of(x, x.cos()), resume=True)


# What a file's run finds out


def options(file: Path, group: str = "sensor") -> tuple[Any, ...]:
    return file, "cmanp", {"--x": "time", "--y": "heat", "--group": group}, {}


def test_the_jitter_that_validates_best_is_trained_with_and_a_resumed_run_keeps_it(
    file: Path, tmp_path: Path
) -> None:
    how: dict[str, Any] = {"out": tmp_path / "run", "change": [*TINY, "steps=8"]}
    first, _ = fit_file(*options(file), **how)
    scores = {float(jitter): float(found) for found, jitter in re.findall(r"(-?\d\S+) with ([\d.]+)", first)}
    assert set(scores) == {0.0, 0.1, 0.3}
    recipe = json.loads((tmp_path / "run" / "run.json").read_text())["run"]["recipe"]
    assert recipe["steps"] == 8
    assert scores[recipe["jitter"]] == max(scores.values())
    assert first.startswith(f"jitter={recipe['jitter']} validated best in 2 steps each")
    assert len(fit_file(*options(file), **how, resume=True)) == 1  # nothing is tried again
    set_by_hand = {"out": tmp_path / "set", "change": [*TINY, "steps=2", "jitter=0.2"]}
    assert len(fit_file(*options(file), **set_by_hand)) == 1
    recipe = json.loads((tmp_path / "set" / "run.json").read_text())["run"]["recipe"]
    assert recipe["jitter"] == 0.2
    with pytest.raises(FileExistsError, match="holds a run already"):
        fit_file(*options(file), **how)


def test_a_file_is_split_by_time_where_asked_and_the_run_remembers_it(file: Path, tmp_path: Path) -> None:
    table = Table.read(file, x="number", y="heat", group="sensor", by="time")
    parts = table.parts()
    assert [part.x[:, 0].tolist() for part in parts] == [
        [*range(48)], [*range(48, 54)], [*range(54, 60)]
    ]  # fmt: skip
    assert "split by time" in table.statement
    fit_file(*options(file), split="time", out=tmp_path / "run", change=[*TINY, "steps=1", "jitter=0"])
    kept = Table.load(tmp_path / "run" / "table.safetensors")
    assert kept.by == "time"
    assert not kept.equals(Table.read(file, x="time", y="heat", group="sensor"))
    assert evaluate_run(tmp_path / "run", data_dir=None, device="cpu").scores["test"].points > 0


class Averages:
    """Predicts the mean of what it is shown, or nothing but zero if told to ignore it."""

    device = CPU

    def __init__(self, ignores: bool) -> None:
        self.ignores = ignores

    def eval(self) -> "Averages":
        return self

    def condition(self, _: torch.Tensor, y: torch.Tensor, mask: Any = None) -> torch.Tensor:
        mask = torch.ones_like(y[..., 0], dtype=torch.bool) if mask is None else mask
        total, count = (y * mask[..., None]).sum(1), mask.sum(1).clamp_min(1)
        return 0 * total if self.ignores else total / count[:, None]

    def query(self, state: torch.Tensor, xt: torch.Tensor) -> Any:
        return torch.distributions.Normal(state[:, None].expand(-1, xt.shape[1], -1), 1.0)


@pytest.mark.parametrize("ignores", [False, True])
def test_it_is_said_whether_context_helps(tmp_path: Path, ignores: bool) -> None:
    levels = torch.randn(20, generator=torch.Generator().manual_seed(0)).double() * 3
    table = Table.of(torch.arange(400) / 7, levels.repeat(20) + 0.01 * torch.rand(400), [*range(20)] * 20)
    recipe = table_recipe("cmanp", dim_x=1, dim_y=1, rows=400, grouped=True)
    run = {"dataset": "t", "model": "cmanp", "recipe_name": "own data", "seed": 0, "recipe": asdict(recipe)}
    (tmp_path / "run.json").write_text(json.dumps({"run": run}))
    note = context_note(Averages(ignores), table, tmp_path)  # type: ignore[arg-type]
    shown, unseen = (float(found) for found in re.findall(r"(\d\.\d+) (?:given|without)", note))
    squares, given = [], []  # the same by a loop
    for task in open_source("t", recipe, data_dir=None, device=CPU, own=table).validation():
        for i in range(len(task.yt)):
            known = task.yc[i][task.mask_c[i]].numpy()
            for y in task.yt[i][task.mask_t[i]].numpy():
                squares.append(float(y[0]) ** 2)
                given.append(float(y[0] - (known.mean() if len(known) and not ignores else 0)) ** 2)
    scale = float(table.y.std())
    assert unseen == pytest.approx(np.sqrt(np.mean(squares)) / scale, abs=1e-3)
    assert shown == pytest.approx(np.sqrt(np.mean(given)) / scale, abs=1e-3)
    assert note.startswith("warning") == ignores
    assert ("context does not help" in note) == ignores


def test_parquet_rows_are_those_of_the_csv_file(file: Path) -> None:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    names = {name: list(column) for name, column in zip(HEADER, zip(*rows(), strict=True), strict=True)}
    parquet.write_table(arrow.table(names), file.with_suffix(".parquet"))
    one, other = (
        Table.read(file.with_suffix(suffix), x=["time", "dust"], y="heat", group="sensor")
        for suffix in (".csv", ".parquet")
    )
    assert one.equals(other)
    with pytest.raises(ValueError, match=r"row 0, column 'sensor' .* is 's0', not a number"):
        Table.read(file.with_suffix(".parquet"), x="sensor", y="heat")


# The command line, the example


def test_a_csv_file_is_trained_on_and_scored_at_the_command_line(file: Path) -> None:
    tiny = [f"--set={item}" for item in TINY]
    columns = ["--x", "time, dust", "--y", "heat", "--group", "sensor"]
    done = command("train", "air.csv", *columns, "--steps", "3", *tiny, cwd=file.parent)
    assert done.returncode == 0, done.stderr
    assert "next: constmem eval runs/air-cmanp-small-0;" in done.stdout
    done = command("eval", "runs/air-cmanp-small-0", "--json", cwd=file.parent)
    assert done.returncode == 0, done.stderr
    (row,) = json.loads(done.stdout)
    assert row["dataset"] == "air.csv"
    assert math.isfinite(row["scores"]["test"]["log_likelihood"])
    about = json.loads((file.parent / "runs" / "air-cmanp-small-0" / "run.json").read_text())
    assert about["run"]["columns"] == {
        "file": "air.csv",
        "x": ["time", "dust"],
        "y": ["heat"],
        "group": "sensor",
    }


SENSORS = ("air.csv", "--x", "time", "--y", "heat", "--group", "sensor")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("air.csv", "cmanp", "--group", "sensor"), "--x a,b for the inputs"),
        (("air.csv",), "Columns are number, sensor, time, heat, dust"),
        (("air.csv", "--x", "time", "--y", "heat"), "constmem fit air.csv --target heat --out air.model"),
        ((*SENSORS, "--split", "tiem"), "no way to split rows 'tiem': did you mean 'time'"),
        (("nothing.csv",), "there is no file nothing.csv"),
        (("air.csv", "cmanp", "--x", "tme", "--y", "heat", "--group", "-"), "did you mean 'time'"),
        (("digits", "cmanp", "--x", "time"), "'digits' is none"),
        (("air.csv", "cmnap", "--x", "time", "--y", "heat"), "did you mean 'cmanp'"),
        (("air.csv", "cmanp", "--x", "time", "--y", "heat", "--recipe", "faithful"), "no recipe"),
    ],
)
def test_mistakes_at_the_command_line_end_with_code_2(
    file: Path, arguments: tuple[str, ...], message: str, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    from constmem.cli import main

    monkeypatch.chdir(file.parent)
    monkeypatch.setattr(sys, "argv", ["constmem", "train", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert message in capsys.readouterr().err
    assert not (file.parent / "runs").exists()  # nothing in the way of the next try


def test_the_example_runs_from_csv_to_stream(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["own_data.py", "--steps", "2", "--out", str(tmp_path / "out")])
    runpy.run_path(str(ROOT / "examples" / "own_data.py"), run_name="__main__")
    shown = capsys.readouterr().out
    assert "readings" in shown
    assert "bytes" in shown
    assert (tmp_path / "out" / "model" / "model.safetensors").exists()


def test_scales_of_the_training_rows_alone(file: Path) -> None:
    table = Table.read(file, x=["number"], y=["heat"])
    training, *_ = table.parts()
    found, whole = Scales.of(training.x, training.y), Scales.of(table.x, table.y)
    assert not torch.equal(found.x_mean, whole.x_mean)

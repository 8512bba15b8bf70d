"""Which rows are seeds of each other: those of the same data, settings and steps, and how others are told."""

import json
import subprocess
import sys
from collections.abc import Callable
from math import inf, isnan, nan
from pathlib import Path
from typing import Any

import pytest
import torch

from constmem import cli
from constmem.data import Table
from constmem.evaluation.comparison import (
    Figure,
    as_json,
    compare,
    json_text,
    over_seeds,
    print_runs,
    read_rows,
    tabulate,
)
from constmem.evaluation.results import evaluate_run, evaluate_runs
from constmem.training import fit_table

SCORES: dict[str, Any] = {
    "log_likelihood": 1.0, "log_likelihood_by_batch": 2.0, "rmse": 0.25, "crps": 0.125,
    "coverage": {"0.9": 0.875},
}  # fmt: skip
OF_EVENTS: dict[str, Any] = {"nll": -0.4, "time_nll": -0.7, "mark_nll": 0.3, "rmse": 0.28, "unit": "hour"}
TINY = [
    "batch=4", "warmup=1", "model.dim=8", "model.depth=1", "model.num_slots=4", "model.num_latents=4",
    "model.hidden=8", "model.num_heads=2",
]  # fmt: skip
Row = dict[str, Any]


def row(seed: int = 0, scores: Row | None = None, **more: Any) -> Row:
    """A row as `constmem eval` writes it of rows of one's own."""
    base = {
        "dataset": "s.csv", "model": "cmanp-small", "recipe": "own data", "seed": seed,
        "settings": {"batch": 8, "steps": 400}, "scores": {"test": SCORES | (scores or {})},
        "published": None, "steps": 400, "minutes": 1.0, "parameters": 1234, "device": "CPU",
        "data": "s.csv: 40 rows, 1 inputs, 1 outputs", "contents": "aa",
        "columns": {"file": "d1/s.csv", "x": ["a"], "y": ["b"], "group": None},
        "date": f"2026-01-0{seed + 1}",
    }  # fmt: skip
    return base | more


def columns(**more: Any) -> Row:
    own: Row = row()["columns"]
    return own | more


def names(rows: list[Row]) -> list[str]:
    """The first column of tables."""
    return [cells[0] for _, _, lines in tabulate(compare(rows)) for cells in lines]


def labels(
    capsys: pytest.CaptureFixture[str], rows: list[Row], folders: list[Path] | None = None
) -> list[str]:
    """What `constmem eval` calls its runs."""
    print_runs(rows, folders)
    lines = capsys.readouterr().out.splitlines()
    return [line.split("│")[1].strip() for line in lines if line[0] == "│"]


@pytest.mark.parametrize(
    ("other", "note"),
    [
        ({"columns": columns(file="d2/s.csv")}, "file=d2/s.csv"),
        ({"columns": columns(y=["b", "c"])}, "y=b,c"),
        ({"columns": columns(group="who")}, "group=who"),
        ({"data": "s.csv: 50 rows, 1 inputs, 1 outputs"}, "data=s.csv: 50 rows, 1 inputs, 1 outputs"),
        ({"contents": "bb"}, "contents=bb"),
        ({"parameters": 99}, "parameters=99"),
        ({"steps": 26}, "26 of 400 steps"),
        ({"settings": {"batch": 8, "steps": 400, "lr": 0.5}}, "lr=0.5"),
    ],
)
def test_rows_of_other_data_or_steps_are_no_seeds_of_each_other_and_say_what_differs(
    capsys: pytest.CaptureFixture[str], other: Row, note: str
) -> None:
    rows = [row(0), row(1), row(0, **other), row(3, **other), row(4, **other)]
    assert sorted(entry.seeds for entry in compare(rows)) == [[0, 1], [0, 3, 4]]
    assert f"CMANP-small ({note})" in names(rows)
    assert len(set(names(rows))) == 2
    found = labels(capsys, rows)
    assert len(set(found)) == len(rows) + 2
    assert f"s.csv cmanp-small own data ({note}) #3" in found
    assert f"s.csv cmanp-small own data ({note}), mean of 3 seeds" in found
    assert [len(r["over_seeds"]["seeds"]) for r in over_seeds(rows)] == [2, 2, 3, 3, 3]


def test_rows_of_one_seed_but_other_data_do_not_replace_each_other() -> None:
    assert len(compare([row(0), row(0, columns=columns(file="d2/s.csv"))])) == 2
    assert len(compare([row(0), row(0, date="2027-01-01")])) == 1


def test_data_that_differ_after_all_columns_are_the_same_are_told_apart_among_three() -> None:
    other = columns(file="d2/s.csv")
    rows = [row(0), row(0, columns=other, contents="bb"), row(0, columns=other, contents="cc")]
    assert sorted(names(rows)) == [
        "CMANP-small (file=d1/s.csv)",
        "CMANP-small (file=d2/s.csv, contents=bb)",
        "CMANP-small (file=d2/s.csv, contents=cc)",
    ]


def test_a_run_that_was_stopped_says_so_though_it_is_alone(capsys: pytest.CaptureFixture[str]) -> None:
    stopped = row(steps=1026, settings={"batch": 8, "steps": 4000})
    assert names([stopped]) == ["CMANP-small (1,026 of 4,000 steps)"]
    assert labels(capsys, [stopped]) == ["s.csv cmanp-small own data (1,026 of 4,000 steps) #0"]
    assert names([row()]) == ["CMANP-small"]
    assert names([row(steps=0)]) == ["CMANP-small (steps unknown)"]  # its metrics were lost
    events = row(scores=OF_EVENTS, dataset="e.csv", model="gru", steps=26)
    assert names([events]) == ["GRU (26 of 400 steps)"]


def test_eval_tells_runs_apart_by_settings_that_have_a_column_in_tables_only(
    capsys: pytest.CaptureFixture[str],
) -> None:
    rows = [row(), row(settings={"batch": 9, "steps": 200, "start": "old"}, steps=200)]
    assert labels(capsys, rows) == [
        "s.csv cmanp-small own data (steps=400, batch=8, start=none) #0",
        "s.csv cmanp-small own data (steps=200, batch=9, start=old) #0",
    ]
    assert sorted(names(rows)) == ["CMANP-small (start=none)", "CMANP-small (start=old)"]


def test_a_mean_is_told_apart_from_a_single_run_too(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [row(0), row(1), row(2, columns=columns(file="d2/s.csv"))]
    assert labels(capsys, rows)[-1] == "s.csv cmanp-small own data (file=d1/s.csv), mean of 2 seeds"


def test_runs_that_nothing_else_tells_apart_are_called_by_their_folders(
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = labels(capsys, [row(0), row(0), row(1)], [Path("one"), Path("two"), Path("three")])
    first = "s.csv cmanp-small own data #"
    assert found[:3] == [f"{first}0, one", f"{first}0, two", f"{first}1"]


@pytest.mark.parametrize("odd", [nan, inf, -inf])
def test_seeds_that_are_not_all_finite_have_no_mean_and_no_spread(odd: float) -> None:
    figure = Figure.of([1.0, odd, 2.0])
    assert isnan(figure.mean)
    assert figure.spread is not None
    assert isnan(figure.spread)
    assert (figure.text(2), figure.short()) == ("nan ± nan", "nan ± nan")
    assert Figure.of([odd]).spread is None


def strict(text: str) -> Any:
    """JSON as others read it: without NaN and Infinity."""

    def refuse(word: str) -> Any:
        raise AssertionError(f"{word} is no JSON")

    return json.loads(text, parse_constant=refuse)


@pytest.mark.parametrize("base", [SCORES, OF_EVENTS])
def test_a_model_that_failed_is_shown_and_given_as_null_in_json(
    capsys: pytest.CaptureFixture[str], base: Row
) -> None:
    failed = {key: nan if isinstance(value, float) else value for key, value in base.items()}
    rows = [row(0, scores=base), row(1, scores=failed)]
    rows = [r | {"scores": {"test": base if r["seed"] == 0 else failed}} for r in rows]
    (entry,) = strict(as_json(compare(rows)))
    figures = entry["scores"]["test"]["nll"] if base is OF_EVENTS else entry["by_point"]["test"]
    assert figures == {"mean": None, "spread": None}
    given = strict(json_text(over_seeds(rows)))
    assert given[1]["scores"]["test"]["rmse"] is None
    assert given[0]["scores"]["test"] == base
    print_runs(rows)
    assert "nan ± nan" in capsys.readouterr().out
    assert any("nan ± nan" in cell for _, _, lines in tabulate(compare(rows)) for cell in lines[0])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"scores": {"test": SCORES | {"rmse": None}}}, "the rmse null on 'test', which should be a number"),
        ({"scores": {"test": SCORES | {"crps": "low"}}}, "the crps \"low\" on 'test'"),
        ({"scores": {"test": SCORES | {"coverage": {"0.9": None}}}}, "the coverage of 0.9 null on 'test'"),
        ({"scores": {"test": SCORES | {"coverage": 3}}}, "the coverage 3 on 'test'"),
        ({"scores": {"test": OF_EVENTS | {"nll": None}}}, "the nll null on 'test'"),
        ({"scores": {"test": None}}, "no scores on 'test', but null"),
        ({"scores": None}, "the scores null, which should be a dictionary"),
        ({"seed": "one"}, 'the seed "one", which should be a whole number'),
        ({"seed": None}, "the seed null"),
        ({"settings": []}, "the settings [], which should be a dictionary"),
        ({"model": 3}, "the model 3, which should be text"),
    ],
)
def test_a_row_of_something_else_than_numbers_is_refused_by_its_name(
    tmp_path: Path, change: Row, message: str
) -> None:
    path = tmp_path / "rows.json"
    path.write_text(json.dumps([row(0), row(1) | change]))
    with pytest.raises(ValueError, match=r"rows.json: the row of s.csv .* own data") as caught:
        read_rows([path])
    assert message in str(caught.value)


def test_scores_of_marks_may_be_null(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    path.write_text(json.dumps(row() | {"scores": {"test": OF_EVENTS | {"accuracy": None}}}))
    assert compare(read_rows([path]))[0].seeds == [0]


Trained = Callable[..., Path]


@pytest.fixture
def trained(tmp_path: Path) -> Trained:
    def train(name: str, shift: float = 0.0, seed: int = 0) -> Path:
        x = torch.linspace(0, 1, 60)
        table = Table.of(x, x.square() + shift * x)
        fit_table(table, "cmanp", out=tmp_path / name, steps=2, seed=seed, change=TINY)
        return tmp_path / name

    return train


def test_runs_on_other_numbers_of_the_same_shape_are_not_pooled_and_those_on_the_same_are(
    trained: Trained,
) -> None:
    folders = [trained("a"), trained("b", seed=1), trained("c", shift=1.0, seed=2)]
    rows = evaluate_runs(folders, data_dir=None, device="cpu")
    assert sorted(entry.seeds for entry in compare(rows)) == [[0, 1], [2]]
    assert rows[0]["columns"] == {"file": None}
    assert sorted(e.seeds for e in compare(read_rows(folders))) == [[0, 1], [2]]


def test_eval_looks_at_all_folders_before_it_scores_the_first(trained: Trained, tmp_path: Path) -> None:
    good = trained("good")
    with pytest.raises(FileNotFoundError, match=r"no run in .*nowhere"):
        cli.evaluate([good, tmp_path / "nowhere"])
    untrained = tmp_path / "untrained"
    untrained.mkdir()
    (untrained / "run.json").write_text((good / "run.json").read_text())
    with pytest.raises(FileNotFoundError, match=r"no trained model in .*untrained"):
        cli.evaluate([good, untrained])
    assert not (good / "eval.json").exists()
    evaluate_run(good, data_dir=None, device="cpu")
    assert (good / "eval.json").exists()


def test_the_table_command_gives_valid_json_of_a_model_that_failed(tmp_path: Path) -> None:
    (tmp_path / "rows.json").write_text(json.dumps([row(0), row(1, scores={"rmse": nan, "crps": inf})]))
    call = [sys.executable, "-m", "constmem.cli", "table", "rows.json", "--json"]
    done = subprocess.run(call, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode == 0, done.stderr
    (entry,) = strict(done.stdout)
    assert entry["crps"]["test"] == {"mean": None, "spread": None}
    assert entry["by_point"]["test"]["mean"] == 1.0

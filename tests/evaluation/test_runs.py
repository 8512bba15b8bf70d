"""Runs: scored from their folders, damage named, and printed one by one and over seeds."""

import json
import re
from collections.abc import Callable
from math import nan
from pathlib import Path
from typing import Any

import pytest
import torch

from constmem import cli
from constmem.data import Table
from constmem.evaluation.rows import Row, compare, json_text, read_rows
from constmem.evaluation.runs import evaluate_run, evaluate_runs, metrics_of
from constmem.evaluation.tables import as_json, over_seeds, print_runs
from constmem.training import fit_table
from tests.evaluation.made import (
    COLUMNS,
    SETTINGS,
    THREE,
    event_content,
    event_row,
    image_row,
    own_content,
    own_row,
    row,
    scored,
)

TINY = [
    "batch=4", "warmup=1", "model.dim=8", "model.depth=1", "model.num_slots=4", "model.num_latents=4",
    "model.hidden=8", "model.num_heads=2",
]  # fmt: skip
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
    assert rows[0].columns == {"file": None}
    assert rows[0].steps == 2
    assert read_rows(folders) == rows


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


@pytest.mark.parametrize("value", ['"ten"', "null", "true", "[1]", "{}"])
@pytest.mark.parametrize("key", ["step", "seconds", "peak_memory", "loss"])
def test_a_log_with_something_else_than_numbers_is_named(tmp_path: Path, key: str, value: str) -> None:
    content = {"step": "1", "seconds": "2.0", "peak_memory": "3", "loss": "4.0"} | {key: value}
    line = ", ".join(f'"{name}": {text}' for name, text in content.items())
    (tmp_path / "metrics.jsonl").write_text(f'{{"data": "x"}}\n{{{line}}}\n')
    with pytest.raises(ValueError, match=rf"metrics\.jsonl is damaged: {key} is .*not a number"):
        metrics_of(tmp_path)


def test_a_run_with_a_damaged_log_is_not_scored_and_says_so(trained: Trained) -> None:
    folder = trained("run")
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": "three"}\n{"step": 4}\n')
    with pytest.raises(ValueError, match=r"metrics\.jsonl is damaged: step is"):
        evaluate_run(folder, data_dir=None, device="cpu")
    assert not (folder / "eval.json").exists()


# What is printed


def printed(capsys: pytest.CaptureFixture[str], rows: list[Row], folders: Any = None) -> list[dict[str, str]]:
    """The lines of the table that `constmem eval` prints, under their heads."""
    print_runs(rows, folders)
    shown = capsys.readouterr().out.splitlines()
    heads, found = (
        [[cell.strip() for cell in line.split(bar)[1:-1]] for line in shown if line[0] == bar] for bar in "┃│"
    )
    head = [" ".join(filter(None, words)) for words in zip(*heads, strict=True)]  # a long one is broken
    return [dict(zip(head, line, strict=True)) for line in found]


def test_runs_are_printed_one_by_one_and_then_as_mean_and_deviation_over_seeds(
    capsys: pytest.CaptureFixture[str],
) -> None:
    *single, mean = printed(capsys, [*THREE, scored(0, 0.9, 0.9, 0.9, model="cnp")])
    assert [line["run"] for line in single] == [
        "emnist cmanp improved #0", "emnist cmanp improved #1", "emnist cmanp improved #4",
        "emnist cnp improved #0",
    ]  # fmt: skip
    assert single[0]["RMSE"] == "0.2000"
    assert mean["run"] == "emnist cmanp improved, mean of 3 seeds"
    assert (mean["log-likelihood"], mean["by batch"]) == ("1.167 ± 0.208", "2.167 ± 0.208")
    assert (mean["RMSE"], mean["CRPS"], mean["90 %"]) == (
        "0.4000 ± 0.2646",
        "0.1300 ± 0.0361",
        "92.0 ± 2.6 %",
    )
    assert mean["minutes"] == "3.7"


def test_runs_on_events_are_printed_the_same_way(capsys: pytest.CaptureFixture[str]) -> None:
    scores = ({"rmse": 0.25, "accuracy": 0.90}, {"rmse": 0.75, "accuracy": 0.96})
    *single, mean = printed(capsys, [event_row(seed, scores=own) for seed, own in enumerate(scores)])
    assert [line["run"] for line in single] == ["taxi gru improved #0", "taxi gru improved #1"]
    assert mean["run"] == "taxi gru improved, mean of 2 seeds"
    assert (mean["NLL"], mean["mark error"]) == ("-0.405 ± 0.007", "7.0 ± 4.2 %")
    assert mean["gap RMSE"] == "0.5000 ± 0.3536 hours"


def test_which_error_of_marks_is_meant_is_said_and_unknown_ones_have_no_column(
    capsys: pytest.CaptureFixture[str],
) -> None:
    (line,) = printed(capsys, [event_row(scores={"accuracy": 0.7, "accuracy_given_gap": 0.8})])
    assert (line["mark error"], line["mark error, gap known"]) == ("30.0 %", "20.0 %")
    (line,) = printed(capsys, [event_row(scores={"accuracy": nan, "accuracy_given_gap": nan})])
    assert not any("mark error" in head for head in line)


def test_what_the_spread_is_stands_below_where_there_is_one(capsys: pytest.CaptureFixture[str]) -> None:
    print_runs(THREE)
    assert "±: the standard deviation over seeds" in capsys.readouterr().out
    print_runs(THREE[:1])
    assert "standard deviation" not in capsys.readouterr().out


def test_grey_levels_are_explained_only_where_their_column_is_shown(
    capsys: pytest.CaptureFixture[str],
) -> None:
    print_runs([row(own_content())])
    assert "grey level" not in capsys.readouterr().out
    content = own_content()
    content["scores"] = {"test": content["scores"]["test"] | {"level_log_likelihood": -1.5}}
    print_runs([row(content)])
    assert "grey level: log-probability" in capsys.readouterr().out


def test_runs_that_differ_say_in_what_also_beside_their_mean(capsys: pytest.CaptureFixture[str]) -> None:
    other = [row(r.content() | {"settings": SETTINGS | {"lr": 0.5}}) for r in THREE[:2]]
    assert not any("mean" in line["run"] for line in printed(capsys, [THREE[2], other[0]]))
    assert [line["run"] for line in printed(capsys, [*THREE, *other])][-2:] == [
        "emnist cmanp improved (lr=0.002), mean of 3 seeds",
        "emnist cmanp improved (lr=0.5), mean of 2 seeds",
    ]
    rows = [own_row(), own_row(settings={"batch": 9, "steps": 200, "start": "old"}, steps=200)]
    assert [line["run"] for line in printed(capsys, rows)] == [
        "s.csv cmanp-small own data (steps=400, batch=8, start=none) #0",
        "s.csv cmanp-small own data (steps=200, batch=9, start=old) #0",
    ]
    rows = [own_row(0), own_row(1), own_row(2, columns=COLUMNS | {"file": "d2/s.csv"})]
    assert printed(capsys, rows)[-1]["run"] == "s.csv cmanp-small own data (file=d1/s.csv), mean of 2 seeds"


def test_runs_that_nothing_else_distinguishes_are_named_by_their_folders(
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = printed(capsys, [own_row(0), own_row(0), own_row(1)], [Path("one"), Path("two"), Path("three")])
    first = "s.csv cmanp-small own data #"
    assert [line["run"] for line in found[:3]] == [f"{first}0, one", f"{first}0, two", f"{first}1"]


def test_rows_are_given_as_json_each_with_the_mean_and_spread_over_its_seeds() -> None:
    lonely = image_row(model="cnp")
    *seeds, last = json.loads(json.dumps(over_seeds([*THREE, lonely])))
    assert last == lonely.content()  # nothing to be a mean of
    (entry,) = json.loads(as_json(compare(THREE)))
    for given, found in zip(THREE, seeds, strict=True):
        assert found.pop("over_seeds") == entry
        assert found == given.content()


@pytest.mark.parametrize("content", [own_content(), event_content()])
def test_a_model_that_failed_is_printed_and_is_null_in_json(
    capsys: pytest.CaptureFixture[str], content: dict[str, Any]
) -> None:
    base = content["scores"]["test"]
    failed = {key: nan if isinstance(value, float) else value for key, value in base.items()}
    rows = [row(content), row(content | {"seed": 1, "scores": {"test": failed}})]
    given = json.loads(json_text(over_seeds(rows)), parse_constant=pytest.fail)
    assert given[1]["scores"]["test"]["rmse"] is None
    assert given[0]["scores"]["test"] == base
    print_runs(rows)
    assert re.search("nan ± nan", capsys.readouterr().out)

"""Tables: ours beside the published, a column only where there is something to show, in every form."""

import json
from math import inf, nan
from pathlib import Path
from typing import Any

import pytest

from constmem.cli import table
from constmem.evaluation import PUBLISHED
from constmem.evaluation.rows import Row, compare, read_rows
from constmem.evaluation.tables import as_json, markdown, tabulate
from tests.command import command
from tests.evaluation.made import (
    EVENTS,
    POINTS,
    THREE,
    event_content,
    event_row,
    image_row,
    own_content,
    row,
)

ROOT = Path(__file__).parents[2]


def lines(rows: list[Row], *, scores: bool = False) -> list[dict[str, str]]:
    ((_, head, cells),) = tabulate(compare(rows), scores=scores)
    return [dict(zip(head, line, strict=True)) for line in cells]


def test_the_figure_to_compare_is_first_beside_the_published_and_the_one_by_point_after_it() -> None:
    ((name, head, (cells,)),) = tabulate(compare([image_row()]))
    assert name == "EMNIST"
    assert head[2:8] == [
        "seen, by batch", "published", "by point", "unseen, by batch", "published", "by point",
    ]  # fmt: skip
    assert cells[2:8] == ["2.00", "1.36", "1.00", "1.50", "1.09", "0.50"]
    assert cells[8:] == ["1,234", "100 x 256", "2.0", "a GPU", "1"]


def test_seeds_are_shown_as_a_mean_and_a_spread_with_their_number() -> None:
    (line,) = lines([image_row(0), image_row(1), image_row(4)])
    assert (line["seen, by batch"], line["seeds"]) == ("2.17 ± 0.21", "3")
    (line,) = lines(THREE, scores=True)
    assert (line["RMSE"], line["CRPS"], line["90 %"]) == (
        "0.4000 ± 0.2646",
        "0.1300 ± 0.0361",
        "92.0 ± 2.6 %",
    )
    assert "0.4000 ± 0.2646" in markdown(compare(THREE), scores=True)
    assert "RMSE" not in markdown(compare(THREE))
    line = lines([event_row(0), event_row(1), event_row(4)])[0]
    assert (line["NLL"], line["seeds"], line["minutes"]) == ("-0.417 ± 0.021", "3", "3.7")


def test_every_score_of_events_is_under_its_head_in_its_unit() -> None:
    assert lines([event_row()])[0] == {
        "model": "GRU", "recipe": "improved", "NLL": "-0.400", "published": "-0.453", "time": "-0.700",
        "mark": "0.300", "RMSE (hour)": "0.2800", "MAE, median (hour)": "0.1349", "accuracy": "90.0 %",
        "given the gap": "92.0 %", "top 5": "99.8 %", "KS": "0.006", "parameters": "38,522",
        "steps x batch": "100 x 64", "minutes": "2.0", "device": "CPU", "seeds": "1",
    }  # fmt: skip


def test_what_nobody_published_or_knows_has_no_column() -> None:
    ((_, head, _),) = tabulate(compare([image_row(dataset="my.csv", published=None)]))
    assert "published" not in head
    likelihoods = {"log_likelihood": 1.0, "log_likelihood_by_batch": 1.2, "exact": 1.3, "exact_by_batch": 1.5}
    exact = image_row(dataset="gp", scores={"rbf": POINTS | likelihoods}, published={"rbf": 1.24})
    ((_, head, (cells,)),) = tabulate(compare([exact]))
    assert head[2:6] == ["rbf, by batch", "published", "exact", "by point"]
    assert cells[2:6] == ["1.20", "1.24", "1.50", "1.00"]
    rows = [
        image_row(0, peak_memory={"training": 5 * 10**9, "evaluation": None}),
        image_row(1, peak_memory={"training": 7 * 10**9, "evaluation": None}),
        image_row(model="cnp"),
    ]
    cnp, cmanp = lines(rows)
    assert (cnp["training, GB"], cmanp["training, GB"]) == ("", "7.0")
    assert "evaluation, GB" not in cnp


def test_the_silence_after_the_last_event_has_a_column_where_it_is_known() -> None:
    known = [event_row(s, model="cmhp", scores={"survival_nll": 0.5 + s}) for s in (0, 1)]
    first, second = lines([*known, event_row(scores={"survival_nll": None})])[:2]
    assert (first["model"], first["survival"]) == ("GRU", "")
    assert (second["model"], second["survival"]) == ("CMHP", "1.000 ± 0.707")
    assert "survival" not in lines([event_row(), event_row(1)])[0]


def test_what_others_published_is_below_and_says_so() -> None:
    below = {line["model"]: line for line in lines([event_row(), event_row(model="cmhp")])[2:]}
    assert {name: line["NLL"] for name, line in below.items()} == {
        "RMTPP": "-0.346", "AttNHP": "-0.493", "NHP": "-0.514", "S2P2": "-0.522",
    }  # fmt: skip
    assert all(line["recipe"] == "published elsewhere" for line in below.values())
    assert all(line["seeds"] == line["time"] == "" for line in below.values())


@pytest.mark.parametrize(
    ("dataset", "figures"),  # NLL, RMSE, accuracy
    [
        ("mooc", {"THP": (0.267, 0.202, "33.6 %"), "CMHP": (-0.040, 0.168, "23.7 %")}),
        ("reddit", {"THP": (0.268, 0.238, "61.0 %"), "CMHP": (0.528, 0.262, "60.9 %")}),
    ],
)
def test_the_papers_rows_are_labelled_as_of_another_protocol(dataset: str, figures: dict[str, Any]) -> None:
    ours, *paper = lines([event_row(dataset=dataset, published=None)])
    assert "published" not in ours
    assert all("another protocol" in line["recipe"] for line in paper)
    found = {
        line["model"]: (float(line["NLL"]), float(line["RMSE (hour)"]), line["accuracy"]) for line in paper
    }
    assert found == figures


def test_simulated_data_show_the_true_process_and_no_marks() -> None:
    settings = {"batch": 64, "steps": 100, "model": {"num_marks": 1}}
    ours, true = lines(
        [event_row(dataset="hawkes1", published=None, true={"test": 0.056}, settings=settings)]
    )
    assert not {"mark", "accuracy", "given the gap", "top 5"} & ours.keys()
    assert (true["model"], true["NLL"], true["time"]) == ("the true process", "0.056", "0.056")


def test_points_and_events_make_tables_of_their_own_in_markdown_and_json() -> None:
    entries = compare(
        [event_row(), image_row(0), image_row(1), image_row(model="np", published=PUBLISHED["emnist"]["np"])]
    )
    assert [name for name, _, _ in tabulate(entries)] == ["EMNIST", "Taxi"]
    points, events = (part.splitlines() for part in markdown(entries).split("\n\n"))
    assert len({line.count("|") for line in points}) == len({line.count("|") for line in events}) == 1
    assert points[2].startswith("| NP | improved | 2.00 | 0.79 |")
    again = json.loads(as_json(entries))
    assert [entry["model"] for entry in again] == ["np", "cmanp", "gru"]
    assert again[1]["by_batch"]["seen"]["mean"] == pytest.approx(2.05)


@pytest.mark.parametrize("content", [own_content(), event_content()])
def test_a_model_that_failed_is_shown_and_is_null_in_json(content: dict[str, Any]) -> None:
    base = content["scores"]["test"]
    failed = {key: nan if isinstance(value, float) else value for key, value in base.items()}
    rows = [row(content), row(content | {"seed": 1, "scores": {"test": failed}})]
    (entry,) = json.loads(as_json(compare(rows)))
    figure = (
        entry["scores"]["test"]["nll"] if "nll" in EVENTS.keys() & base.keys() else entry["by_point"]["test"]
    )
    assert figure == {"mean": None, "spread": None}
    assert any("nan ± nan" in cell for _, _, cells in tabulate(compare(rows)) for cell in cells[0])


def test_the_committed_rows_of_both_optimisers_are_distinguished() -> None:
    results = ROOT / "benchmarks" / "results"
    entries = compare(read_rows([results / "emnist.json", results / "emnist-adam.json"]))
    ((_, _, cells),) = tabulate(entries)
    names = [tuple(line[:2]) for line in cells]
    assert len(set(names)) == len(names)
    assert ("TNP-D (optimiser=adam, lr=0.0015)", "improved") in names
    assert ("TNP-D (optimiser=muon, lr=0.002)", "improved") in names


def test_the_command_prints_committed_rows_and_writes_valid_json(tmp_path: Path) -> None:
    results = ROOT / "benchmarks" / "results" / "emnist.json"
    done = command("table", str(results), "--markdown", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == markdown(compare(read_rows([results])))
    failed = own_content(1, scores={"test": POINTS | {"rmse": nan, "crps": inf}})
    (tmp_path / "rows.json").write_text(json.dumps([own_content(0), failed]))
    done = command("table", "rows.json", "--out", "table.json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (entry,) = json.loads((tmp_path / "table.json").read_text(), parse_constant=pytest.fail)
    assert entry["crps"]["test"] == {"mean": None, "spread": None}
    assert entry["by_point"]["test"]["mean"] == 1.0
    done = command("table", cwd=tmp_path)
    assert done.returncode == 2
    assert "no scored runs" in done.stderr


def test_the_command_shows_event_rows_as_text_markdown_and_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "eval.json").write_text(json.dumps(event_content(0)))
    (tmp_path / "taxi.json").write_text(json.dumps({"command": "x", "rows": [event_content(1)]}))
    paths, entries = [tmp_path / "run", tmp_path / "taxi.json"], compare([event_row(0), event_row(1)])
    table(paths, as_markdown=False, as_json=False)
    assert "-0.405 ± 0.007" in capsys.readouterr().out
    table(paths, as_markdown=True, as_json=False)
    assert capsys.readouterr().out.strip() == markdown(entries)
    table(paths, as_markdown=False, as_json=True)
    assert json.loads(capsys.readouterr().out) == json.loads(as_json(entries))

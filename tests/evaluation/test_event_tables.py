"""Tables of event runs: seeds together, others' figures below, the documents made of committed rows."""

import json
import runpy
import sys
from pathlib import Path
from statistics import stdev
from typing import Any

import event_tables
import pytest
import record
import tables

from constmem.cli import table
from constmem.evaluation.comparison import as_json, compare, markdown, print_runs, tabulate
from constmem.evaluation.comparison.rows import Figure
from constmem.evaluation.results import PUBLISHED

ROOT = Path(__file__).parents[2]
SCORES = {
    "nll": -0.4, "time_nll": -0.7, "mark_nll": 0.3, "rmse": 0.28, "mae": 0.2, "mae_median": 0.1349,
    "accuracy": 0.9, "accuracy_given_gap": 0.92, "top5": 0.998, "ks": 0.006, "unit": "hour",
}  # fmt: skip


def row(seed: int = 0, *, scores: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    """A row as `constmem eval` writes it; the NLL of seed s is -0.4 - s / 100."""
    own = SCORES | {"nll": -0.4 - seed / 100} | (scores or {})
    base = {
        "dataset": "taxi", "model": "gru", "recipe": "improved", "seed": seed,
        "settings": {"batch": 64, "steps": 100, "model": {"num_marks": 10}}, "scores": {"test": own},
        "published": PUBLISHED["taxi"]["gru"], "true": None, "steps": 100, "minutes": 2.0 + seed,
        "parameters": 38522, "device": "CPU", "date": f"2026-01-0{seed + 1}",
    }  # fmt: skip
    return base | more


def lines(rows: list[dict[str, Any]]) -> list[dict[str, str]]:
    ((_, head, cells),) = tabulate(compare(rows))
    assert len(set(head)) == len(head)
    return [dict(zip(head, line, strict=True)) for line in cells]


def test_seeds_become_a_mean_and_a_spread() -> None:
    (entry,) = compare([row(0), row(1), row(4)])
    found = entry.scores["test"]["nll"]
    assert found.mean == pytest.approx(-0.4 - 0.05 / 3)
    assert found.spread == pytest.approx(stdev([-0.4, -0.41, -0.44]))
    line = lines([row(0), row(1), row(4)])[0]
    assert line["NLL"] == "-0.417 ± 0.021"
    assert line["seeds"] == "3"
    assert line["minutes"] == "3.7"


def test_eval_prints_events_one_by_one_and_then_the_mean_and_deviation_over_their_seeds(
    capsys: pytest.CaptureFixture[str],
) -> None:
    scores = ({"rmse": 0.25, "accuracy": 0.90}, {"rmse": 0.75, "accuracy": 0.96})
    print_runs([row(seed, scores=own) for seed, own in enumerate(scores)])
    shown = capsys.readouterr().out.splitlines()
    heads, found = (
        [[cell.strip() for cell in line.split(bar)[1:-1]] for line in shown if line[0] == bar] for bar in "┃│"
    )
    head = [" ".join(filter(None, words)) for words in zip(*heads, strict=True)]  # a long one is broken
    mean = dict(zip(head, found[-1], strict=True))
    assert [line[0] for line in found[:2]] == ["taxi gru improved #0", "taxi gru improved #1"]
    assert mean["run"] == "taxi gru improved, mean of 2 seeds"
    assert mean["NLL"] == "-0.405 ± 0.007"
    assert mean["mark error"] == "7.0 ± 4.2 %"
    assert mean["gap RMSE"] == "0.5000 ± 0.3536 hour"


def test_seeds_without_marks_have_no_mean_of_them() -> None:
    nan = {"accuracy": float("nan"), "top5": float("nan")}
    (entry,) = compare([row(seed, scores=nan) for seed in range(2)])
    assert "accuracy" not in entry.scores["test"]
    assert "nll" in entry.scores["test"]


def test_every_score_stands_under_its_head_in_its_unit() -> None:
    line = lines([row()])[0]
    assert line == {
        "model": "GRU", "recipe": "improved", "NLL": "-0.400", "published": "-0.453", "time": "-0.700",
        "mark": "0.300", "RMSE (hour)": "0.2800", "MAE, median (hour)": "0.1349", "accuracy": "90.0 %",
        "given the gap": "92.0 %", "top 5": "99.8 %", "KS": "0.006", "parameters": "38,522",
        "steps x batch": "100 x 64", "minutes": "2.0", "device": "CPU", "seeds": "1",
    }  # fmt: skip


def test_the_silence_after_the_last_event_has_a_column_where_anybody_knows_of_it() -> None:
    known = [row(s, model="cmhp", scores={"survival_nll": 0.5 + s}) for s in (0, 1)]
    first, second = lines([*known, row(scores={"survival_nll": None})])[:2]
    assert (first["model"], first["survival"]) == ("GRU", "")
    assert (second["model"], second["survival"]) == ("CMHP", "1.000 ± 0.707")
    assert "survival" not in lines([row(scores={"survival_nll": None}), row(1)])[0]


def test_what_others_published_stands_below_and_says_so() -> None:
    below = {line["model"]: line for line in lines([row(), row(model="cmhp")])[2:]}
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
    ours, *paper = lines([row(dataset=dataset, published=None)])
    assert "published" not in ours
    assert all("another protocol" in line["recipe"] for line in paper)
    found = {
        line["model"]: (float(line["NLL"]), float(line["RMSE (hour)"]), line["accuracy"]) for line in paper
    }
    assert found == figures


def test_simulated_data_show_the_true_process_and_no_marks() -> None:
    settings = {"batch": 64, "steps": 100, "model": {"num_marks": 1}}
    simulated = row(dataset="hawkes1", published=None, true={"test": 0.056}, settings=settings)
    ours, true = lines([simulated])
    assert not {"mark", "accuracy", "given the gap", "top 5"} & ours.keys()
    assert (true["model"], true["NLL"], true["time"]) == ("the true process", "0.056", "0.056")


def test_models_stand_in_order_and_settings_tell_apart_those_of_one_name() -> None:
    plain = row()["settings"]
    ablated = plain | {"model": {"num_marks": 10, "recency": False}}
    rows = [
        row(model="cmhp", settings=ablated), row(model="cmhp"), row(model="cmhp-faithful"), row(model="thp"),
        row(model="trivial"), row(), row(model="cmhp", settings=plain | {"lr": 0.1}),
    ]  # fmt: skip
    found = [line["model"] for line in lines(rows)[:7]]
    assert found[:3] == ["no history", "GRU", "THP"]
    assert sorted(found[3:6]) == ["CMHP (lr=0.002)", "CMHP (lr=0.002, recency=False)", "CMHP (lr=0.1)"]
    assert found[6] == "CMHP-faithful"


def test_points_and_events_make_tables_of_their_own() -> None:
    others = {"rmse": 0.1, "crps": 0.1, "coverage": {"0.9": 0.9}}
    scores = {"seen": others | {"log_likelihood": 1.0, "log_likelihood_by_batch": 2.0}}
    points = row(dataset="emnist", model="cnp", published=None) | {"scores": scores}
    found = tabulate(compare([row(), points]))
    assert [name for name, _, _ in found] == ["EMNIST", "Taxi"]
    assert "seen, by batch" in found[0][1]
    assert "NLL" in found[1][1]


@pytest.mark.parametrize(
    ("number", "text"),
    [(0.28, "0.2800"), (2.6861, "2.686"), (74.21, "74.21"), (512.34, "512.3"), (97531.2, "97,531")],
)
def test_errors_in_any_unit_have_about_four_digits(number: float, text: str) -> None:
    assert Figure(number, None).short() == text


def test_the_command_shows_event_rows_as_text_markdown_and_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "eval.json").write_text(json.dumps(row(0)))
    (tmp_path / "taxi.json").write_text(json.dumps({"command": "x", "rows": [row(1)]}))
    paths = [tmp_path / "run", tmp_path / "taxi.json"]
    table(paths, as_markdown=False, as_json=False)
    assert "-0.405 ± 0.007" in capsys.readouterr().out
    table(paths, as_markdown=True, as_json=False)
    assert capsys.readouterr().out.strip() == markdown(compare([row(0), row(1)]))
    table(paths, as_markdown=False, as_json=True)
    (entry,) = json.loads(capsys.readouterr().out)
    assert entry["scores"]["test"]["nll"]["mean"] == pytest.approx(-0.405)
    assert entry == json.loads(as_json(compare([row(0), row(1)])))[0]


def test_the_page_shows_a_table_where_there_are_rows_and_nothing_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = tmp_path / "benchmarks" / "results"
    results.mkdir(parents=True)
    content = {"command": "constmem train taxi gru", "note": "A note.", "rows": [row()]}
    (results / "taxi.json").write_text(json.dumps(content))
    page = tmp_path / "page.md"
    page.write_text(
        "before\n<!-- taxi -->\nold\n<!-- /taxi -->\nbetween\n<!-- mooc -->\n<!-- /mooc -->\nafter\n"
    )
    monkeypatch.setattr(tables, "ROOT", tmp_path)
    for dataset in ("taxi", "mooc"):
        page.write_text(tables.place(page, dataset, tables.events(dataset)))
    text = page.read_text()
    assert text.startswith("before\n<!-- taxi -->\n### Taxi\n\n| Taxi | recipe | NLL |")
    assert "`constmem train taxi gru`\n\nA note.\n<!-- /taxi -->\nbetween" in text
    assert text.endswith("<!-- mooc -->\n<!-- /mooc -->\nafter\n")
    assert "old" not in text
    with pytest.raises(SystemExit, match="no marks <!-- wiki -->"):
        tables.place(page, "wiki", "")


def test_the_agreement_of_pages_and_rows_covers_every_event_data_set_and_the_costs() -> None:
    own = {name for path, name, _ in tables.documents() if path.name == "event-models.md"}
    assert own >= {"taxi", "mooc", "reddit", "wiki", "taobao", "hawkes1", "event cost"}
    assert own >= {"ablation taxi", "ablation mooc"}
    assert ("reproduction.md", "events") in {(path.name, name) for path, name, _ in tables.documents()}


def test_the_summary_has_a_line_a_model_and_a_column_a_data_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(record, "RESULTS", tmp_path)
    found = {"taxi": [row(0), row(1), row(model="cmhp")], "mooc": [row(dataset="mooc", model="trivial")]}
    found |= {name: [row(dataset=name, model="thp-gap")] for name in ("reddit", "wiki", "taobao")}
    for name, rows in found.items():
        (tmp_path / f"{name}.json").write_text(json.dumps({"rows": rows}))
    head, _, *below = event_tables.summary().splitlines()
    assert head == "| NLL, accuracy | Taxi | Mooc | Reddit | Wikipedia | Taobao |"
    assert below == [
        "| no history |  | -0.400, 90.0 % |  |  |  |",
        "| GRU | -0.405 ± 0.007, 90.0 % |  |  |  |  |",
        "| THP-gap |  |  | -0.400, 90.0 % | -0.400, 90.0 % | -0.400, 90.0 % |",
        "| CMHP | -0.400, 90.0 % |  |  |  |  |",
    ]


def test_committed_costs_say_that_a_cmhp_never_grows() -> None:
    costs = [r for r in tables.rows("event_cost") if r["what"] == "cost"]
    by_model = {name: {r["events"]: r for r in costs if r["model"] == name} for name in LARGEST}
    assert {name: max(own) for name, own in by_model.items()} == LARGEST
    cmhp, cached = by_model["CMHP"], by_model["THP, KV cache"]
    assert {r["remembered"] for r in cmhp.values()} == {8816}
    assert cmhp[10**6]["peak"] <= 1.05 * cmhp[10]["peak"]
    assert cached[10**5]["remembered"] > 5000 * cmhp[10**5]["remembered"]


def test_committed_rows_put_cmhp_where_the_pages_say() -> None:
    def best(key: str, model: str, other: str) -> set[str]:
        """Data sets on which a model has a lower mean than another."""
        found = {name: {e.model: e.scores["test"][key].mean for e in compare(tables.rows(name))}
                 for name in event_tables.REAL}  # fmt: skip
        return {name for name, own in found.items() if own[model] < own[other]}

    assert best("nll", "cmhp", "thp") == best("accuracy", "thp", "cmhp") == set(event_tables.REAL)
    assert best("nll", "cmhp", "gru") == {"taxi", "mooc", "taobao"}
    assert best("nll", "gru-gap", "cmhp") - {"mooc"} == {"taxi", "reddit", "taobao"}  # level on Mooc
    assert best("accuracy", "cmhp", "gru") >= {"mooc", "reddit", "wiki"}
    (simulated,) = tables.rows("hawkes1")
    assert simulated["scores"]["test"]["nll"] - simulated["true"]["test"] < 0.001
    assert simulated["scores"]["test"]["ks_p_value"] > 0.01


LARGEST = {"CMHP": 10**6, "GRU": 10**6, "THP, KV cache": 10**5, "THP, recomputed": 10**4}


def test_the_example_goes_from_csv_to_a_stream(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["events.py", "--steps", "2", "--out", str(tmp_path / "out")])
    runpy.run_path(str(ROOT / "examples" / "events.py"), run_name="__main__")
    shown = capsys.readouterr().out
    assert "no history" in shown
    followed = [line.split()[-1] for line in shown.splitlines() if " to " in line]
    assert len(followed) == 12
    assert len(set(followed)) == 1  # bytes
    assert (tmp_path / "out" / "model" / "model.safetensors").exists()

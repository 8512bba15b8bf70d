"""The documents: tables made of committed rows, what they say of event models, and the example."""

import json
import runpy
import sys
from pathlib import Path

import event_tables
import pytest
import record
import tables

from constmem.evaluation.rows import compare, typed_rows
from tests.evaluation.made import event_content as row

ROOT = Path(__file__).parents[2]


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
        found: dict[str, dict[str, float]] = {}
        for name in event_tables.REAL:
            entries = compare(typed_rows(tables.rows(name), name))
            figures = {e.first.model: e.figure("test", key) for e in entries if e.first.of_events}
            found[name] = {model: figure.mean for model, figure in figures.items() if figure is not None}
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

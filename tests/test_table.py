"""The table of results: seeds together, recipes apart, ours beside the published."""

import json
import subprocess
import sys
from pathlib import Path
from statistics import stdev
from typing import Any

import pytest

from constmem.comparison import as_json, compare, markdown, read_rows, tabulate
from constmem.results import PUBLISHED

ROOT = Path(__file__).parents[1]
SETTINGS = {"batch": 256, "steps": 100}


def row(seed: int = 0, **more: Any) -> dict[str, Any]:
    """A row as `constmem eval` writes it; the log-likelihood of seed s is 1 + s / 10, by batch 2 + s / 10."""
    scores = {"log_likelihood": 1 + seed / 10, "log_likelihood_by_batch": 2 + seed / 10}
    base = {
        "dataset": "emnist", "model": "cmanp", "recipe": "improved", "seed": seed, "settings": SETTINGS,
        "scores": {"seen": scores, "unseen": {key: value - 0.5 for key, value in scores.items()}},
        "published": PUBLISHED["emnist"]["cmanp"], "steps": 100, "minutes": 2.0 + seed, "parameters": 1234,
        "device": "a GPU", "date": f"2026-01-0{seed + 1}",
    }  # fmt: skip
    return base | more


def test_seeds_become_a_mean_and_a_spread_with_their_number() -> None:
    (entry,) = compare([row(0), row(1), row(4)])
    assert entry.seeds == [0, 1, 4]
    assert entry.by_batch["seen"].mean == pytest.approx(2 + 0.5 / 3)
    assert entry.by_batch["seen"].spread == pytest.approx(stdev([2.0, 2.1, 2.4]))
    assert entry.by_point["unseen"].mean == pytest.approx(0.5 + 0.5 / 3)
    assert entry.minutes == pytest.approx(2 + 5 / 3)
    ((_, head, (cells,)),) = tabulate([entry])
    assert dict(zip(head, cells, strict=True))["seeds"] == "3"
    assert "2.17 ± 0.21" in cells


def test_the_figure_to_compare_stands_first_beside_the_published_and_the_one_by_point_behind() -> None:
    ((name, head, (cells,)),) = tabulate(compare([row()]))
    assert name == "EMNIST"
    assert head[2:8] == [
        "seen, by batch",
        "published",
        "by point",
        "unseen, by batch",
        "published",
        "by point",
    ]
    assert cells[2:8] == ["2.00", "1.36", "1.00", "1.50", "1.09", "0.50"]
    assert cells[8:] == ["1,234", "100 x 256", "2.0", "a GPU", "1"]


def test_recipes_settings_and_models_are_kept_apart_and_in_the_order_of_the_paper() -> None:
    rows = [
        row(model="cmanp"), row(model="cnp"), row(model="tnpd"), row(1, recipe="faithful"),
        row(model="cmanp-small"), row(1, settings={**SETTINGS, "steps": 7}), row(dataset="gp"),
    ]  # fmt: skip
    found = [(entry.dataset, entry.recipe, entry.model) for entry in compare(rows)]
    assert found == [
        ("emnist", "faithful", "cmanp"), ("emnist", "improved", "cnp"), ("emnist", "improved", "tnpd"),
        ("emnist", "improved", "cmanp"), ("emnist", "improved", "cmanp"),
        ("emnist", "improved", "cmanp-small"), ("gp", "improved", "cmanp"),
    ]  # fmt: skip


def test_of_two_rows_of_one_seed_the_newer_counts() -> None:
    newer = row(0, date="2027-01-01", parameters=99)
    for rows in ([row(0), newer], [newer, row(0)]):
        (entry,) = compare(rows)
        assert (entry.parameters, entry.seeds) == (99, [0])


def test_a_data_set_without_published_figures_has_no_column_for_them() -> None:
    ((_, head, _),) = tabulate(compare([row(dataset="my.csv", published=None)]))
    assert "published" not in head


def test_exact_likelihoods_and_peak_memory_have_columns_where_they_are_known() -> None:
    scores = {"log_likelihood": 1.0, "log_likelihood_by_batch": 1.2, "exact": 1.3, "exact_by_batch": 1.5}
    exact = row(dataset="gp", scores={"rbf": scores}, published={"rbf": 1.24})
    ((_, head, (cells,)),) = tabulate(compare([exact]))
    assert head[2:6] == ["rbf, by batch", "published", "exact", "by point"]
    assert cells[2:6] == ["1.20", "1.24", "1.50", "1.00"]
    rows = [
        row(0, peak_memory={"training": 5 * 10**9, "evaluation": None}),
        row(1, peak_memory={"training": 7 * 10**9, "evaluation": None}),
        row(model="cnp"),
    ]
    ((_, head, (cnp, cmanp)),) = tabulate(compare(rows))
    assert head[10:13] == ["minutes", "training, GB", "device"]
    assert (cnp[11], cmanp[11]) == ("", "7.0")


def test_markdown_is_a_table_of_equal_rows_and_json_says_the_same() -> None:
    entries = compare([row(0), row(1), row(model="np", published=PUBLISHED["emnist"]["np"])])
    lines = markdown(entries).splitlines()
    assert len(lines) == 4
    assert len({line.count("|") for line in lines}) == 1
    assert lines[2].startswith("| NP | improved | 2.00 | 0.79 |")
    again = json.loads(as_json(entries))
    assert [entry["model"] for entry in again] == ["np", "cmanp"]
    assert again[1]["by_batch"]["seen"]["mean"] == pytest.approx(2.05)


def test_rows_are_read_from_run_folders_and_from_files_of_rows(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "eval.json").write_text(json.dumps(row(0)))
    (tmp_path / "many.json").write_text(json.dumps({"command": "x", "rows": [row(1), row(2)]}))
    (tmp_path / "list.json").write_text(json.dumps([row(3)]))
    found = read_rows([tmp_path / "run", tmp_path / "many.json", tmp_path / "list.json"])
    assert [r["seed"] for r in found] == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "no run folder or JSON file"),
        ("{", "is damaged or of another kind"),
        ("3", "a row without dataset"),
        ("[3]", "a row without"),
        ("[{}]", "a row without dataset, model"),
    ],
)
def test_files_without_rows_are_refused_by_name(tmp_path: Path, content: str | None, message: str) -> None:
    path = tmp_path / "rows.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        read_rows([path])


def test_a_run_without_scores_says_how_to_get_them(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="constmem eval"):
        read_rows([tmp_path])


def test_a_data_set_without_rows_is_told_with_those_there_are() -> None:
    with pytest.raises(ValueError, match="no rows of gp: there are emnist"):
        compare([row()], dataset="gp")


def command(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    call = [sys.executable, "-m", "constmem.cli", "table", *arguments]
    return subprocess.run(call, capture_output=True, text=True, cwd=cwd, check=False)


def test_the_command_prints_the_committed_rows_and_writes_files(tmp_path: Path) -> None:
    results = ROOT / "benchmarks" / "results" / "emnist.json"
    done = command(str(results), "--markdown", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == markdown(compare(read_rows([results])))
    done = command(str(results), "--out", "table.json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert {entry["dataset"] for entry in json.loads((tmp_path / "table.json").read_text())} == {"emnist"}
    done = command(cwd=tmp_path)
    assert done.returncode == 2
    assert "no scored runs" in done.stderr

"""The table of results: seeds together, recipes apart, ours beside the published."""

import json
import re
import subprocess
import sys
from pathlib import Path
from statistics import stdev
from typing import Any

import pytest

from constmem.evaluation.comparison import (
    as_json,
    compare,
    markdown,
    over_seeds,
    print_runs,
    read_rows,
    tabulate,
)
from constmem.evaluation.results import PUBLISHED

ROOT = Path(__file__).parents[2]
SETTINGS = {"batch": 256, "steps": 100}
OTHERS: dict[str, Any] = {"rmse": 0.25, "crps": 0.125, "coverage": {"0.5": 0.625, "0.9": 0.875}}


def row(seed: int = 0, **more: Any) -> dict[str, Any]:
    """A row as `constmem eval` writes it; the log-likelihood of seed s is 1 + s / 10, by batch 2 + s / 10."""
    scores = OTHERS | {"log_likelihood": 1 + seed / 10, "log_likelihood_by_batch": 2 + seed / 10}
    unseen = scores | {key: scores[key] - 0.5 for key in ("log_likelihood", "log_likelihood_by_batch")}
    base = {
        "dataset": "emnist", "model": "cmanp", "recipe": "improved", "seed": seed, "settings": SETTINGS,
        "scores": {"seen": scores, "unseen": unseen},
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


def scored(seed: int, rmse: float, crps: float, inside: float) -> dict[str, Any]:
    """A row of one test set with other scores of its own."""
    base = row(seed)
    own = base["scores"]["seen"] | {"rmse": rmse, "crps": crps, "coverage": {"0.9": inside}}
    return base | {"scores": {"seen": own}}


THREE = [scored(0, 0.2, 0.10, 0.90), scored(1, 0.3, 0.12, 0.91), scored(4, 0.7, 0.17, 0.95)]


def test_every_score_has_its_mean_and_spread_over_seeds_in_json_and_in_the_table_if_asked_for() -> None:
    (entry,) = json.loads(as_json(compare(THREE)))
    for name, values in (("rmse", [0.2, 0.3, 0.7]), ("crps", [0.10, 0.12, 0.17])):
        assert entry[name]["seen"] == pytest.approx({"mean": sum(values) / 3, "spread": stdev(values)})
    inside = entry["coverage"]["seen"]["0.9"]
    assert inside == pytest.approx({"mean": 0.92, "spread": stdev([0.90, 0.91, 0.95])})
    ((_, head, (cells,)),) = tabulate(compare(THREE), scores=True)
    line = dict(zip(head, cells, strict=True))
    assert line["RMSE"] == "0.4000 ± 0.2646"
    assert line["CRPS"] == "0.1300 ± 0.0361"
    assert line["90 %"] == "92.0 ± 2.6 %"
    assert "0.4000 ± 0.2646" in markdown(compare(THREE), scores=True)
    assert "RMSE" not in markdown(compare(THREE))


def printed(rows: list[dict[str, Any]], capsys: pytest.CaptureFixture[str]) -> list[list[str]]:
    print_runs(rows)
    lines = capsys.readouterr().out.splitlines()
    return [[cell.strip() for cell in re.split("[│┃]", line)[1:-1]] for line in lines if line[0] in "│┃"]


def test_eval_prints_runs_one_by_one_and_then_the_mean_and_deviation_over_their_seeds(
    capsys: pytest.CaptureFixture[str],
) -> None:
    head, *lines = printed([*THREE, scored(0, 0.9, 0.9, 0.9) | {"model": "cnp"}], capsys)
    runs = [line[0] for line in lines]
    assert runs == [
        "emnist cmanp improved #0", "emnist cmanp improved #1", "emnist cmanp improved #4",
        "emnist cnp improved #0", "emnist cmanp improved, mean of 3 seeds",
    ]  # fmt: skip
    mean = dict(zip(head, lines[-1], strict=True))
    assert mean["log-likelihood"] == "1.167 ± 0.208"
    assert mean["by batch"] == "2.167 ± 0.208"
    assert mean["RMSE"] == "0.4000 ± 0.2646"
    assert mean["CRPS"] == "0.1300 ± 0.0361"
    assert mean["90 %"] == "92.0 ± 2.6 %"
    assert mean["minutes"] == "3.7"
    assert lines[0][head.index("RMSE")] == "0.2000"


def test_what_the_spread_is_stands_below_where_there_is_one(capsys: pytest.CaptureFixture[str]) -> None:
    print_runs(THREE)
    assert "±: the standard deviation over seeds" in capsys.readouterr().out
    print_runs(THREE[:1])
    assert "standard deviation" not in capsys.readouterr().out


def test_runs_of_other_settings_are_no_seeds_of_each_other(capsys: pytest.CaptureFixture[str]) -> None:
    other = [r | {"settings": SETTINGS | {"lr": 0.5}} for r in THREE[:2]]
    assert not any("mean" in line[0] for line in printed([THREE[2], other[0]], capsys))
    runs = [line[0] for line in printed([*THREE, *other], capsys)]
    assert runs[-2:] == [
        "emnist cmanp improved (lr=0.002), mean of 3 seeds",
        "emnist cmanp improved (lr=0.5), mean of 2 seeds",
    ]


def test_eval_gives_rows_as_json_each_with_the_mean_and_spread_over_its_seeds() -> None:
    lonely = row(model="cnp")
    *seeds, last = json.loads(json.dumps(over_seeds([*THREE, lonely])))
    assert last == lonely  # nothing to be a mean of
    (entry,) = json.loads(as_json(compare(THREE)))
    for given, found in zip(THREE, seeds, strict=True):
        assert found.pop("over_seeds") == entry
        assert found == given


def test_rows_that_differ_by_optimiser_are_told_apart_by_it() -> None:
    rows = [row(), row(settings=SETTINGS | {"optimiser": "adam", "steps": 7}), row(model="cnp")]
    ((_, _, cells),) = tabulate(compare(rows))
    assert [line[0] for line in cells] == ["CNP", "CMANP (optimiser=muon)", "CMANP (optimiser=adam)"]


def test_the_committed_rows_of_both_optimisers_are_told_apart() -> None:
    results = ROOT / "benchmarks" / "results"
    entries = compare(read_rows([results / "emnist.json", results / "emnist-adam.json"]))
    ((_, _, cells),) = tabulate(entries)
    names = [tuple(line[:2]) for line in cells]
    assert len(set(names)) == len(names)
    assert ("TNP-D (optimiser=adam, lr=0.0015)", "improved") in names
    assert ("TNP-D (optimiser=muon, lr=0.002)", "improved") in names


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
    newer = row(0, date="2027-01-01", minutes=99.0)
    for rows in ([row(0), newer], [newer, row(0)]):
        (entry,) = compare(rows)
        assert (entry.minutes, entry.seeds) == (99.0, [0])


def test_a_data_set_without_published_figures_has_no_column_for_them() -> None:
    ((_, head, _),) = tabulate(compare([row(dataset="my.csv", published=None)]))
    assert "published" not in head


def test_exact_likelihoods_and_peak_memory_have_columns_where_they_are_known() -> None:
    likelihoods = {"log_likelihood": 1.0, "log_likelihood_by_batch": 1.2, "exact": 1.3, "exact_by_batch": 1.5}
    scores = OTHERS | likelihoods
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

"""What the page on streams says of scaling out: the committed rows, and nothing else."""

import json
from pathlib import Path

import ray_scale

ROWS = json.loads((ray_scale.RESULTS / "ray_scale.json").read_text())["rows"]


def test_the_cost_model_on_the_page_is_that_of_the_rows() -> None:
    page = (Path(__file__).parents[2] / "docs" / "streams.md").read_text()
    first, last = ray_scale.MARKS
    assert page.partition(first)[2].partition(last)[0].strip() == ray_scale.cost_model(ROWS)


def test_states_of_workers_are_those_of_one_pass() -> None:
    assert {(row["model"], row["grouped"], row["workers"]) for row in ROWS} == {
        (model, grouped, workers)
        for model in ray_scale.MODELS
        for grouped in (False, True)
        for workers in (1, 2)
    }
    assert all(each["apart"] <= 1e-5 for row in ROWS for each in row["each"])


def test_rows_that_cost_nothing_but_one_merge_are_multiplied_out_by_hand() -> None:
    row = {"rows_a_cpu_second": 1_000_000, "merge_ms": 1.0}
    assert ray_scale._cells(row, 1e12) == "12 days of a core; 1,000 cores: 32 minutes, 32 minutes of merging"
    assert ray_scale._time(119.4) == "119 s"
    assert ray_scale._cells(row, 1e7) == "10 s of a core; 1,000 cores: 0.019 s, 0.019 s of merging"

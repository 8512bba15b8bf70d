"""Entries: which rows are seeds of each other, their means and spreads, and what distinguishes the others."""

from math import nan
from statistics import stdev
from typing import Any

import pytest

from constmem.evaluation.entries import EventEntry, PointEntry, compare, full_name
from constmem.evaluation.rows import Row
from tests.evaluation.made import COLUMNS, SETTINGS, THREE, event_row, image_row, own_row


def names(rows: list[Row]) -> list[str]:
    entries = compare(rows)
    return [full_name(entry, entries) for entry in entries]


def test_seeds_become_a_mean_and_a_spread() -> None:
    (entry,) = compare([image_row(0), image_row(1), image_row(4)])
    assert isinstance(entry, PointEntry)
    assert entry.seeds == [0, 1, 4]
    assert entry.by_batch["seen"].mean == pytest.approx(2 + 0.5 / 3)
    assert entry.by_batch["seen"].spread == pytest.approx(stdev([2.0, 2.1, 2.4]))
    assert entry.by_point["unseen"].mean == pytest.approx(0.5 + 0.5 / 3)
    assert entry.minutes == pytest.approx(2 + 5 / 3)
    (entry,) = compare(THREE)
    assert isinstance(entry, PointEntry)
    assert vars(entry.rmse["seen"]) == pytest.approx({"mean": 0.4, "spread": stdev([0.2, 0.3, 0.7])})
    assert vars(entry.crps["seen"]) == pytest.approx({"mean": 0.13, "spread": stdev([0.10, 0.12, 0.17])})
    inside = entry.coverage["seen"]["0.9"]
    assert vars(inside) == pytest.approx({"mean": 0.92, "spread": stdev([0.90, 0.91, 0.95])})


def test_seeds_of_events_become_a_mean_and_a_spread() -> None:
    (entry,) = compare([event_row(0), event_row(1), event_row(4)])
    assert isinstance(entry, EventEntry)
    found = entry.scores["test"]["nll"]
    assert found.mean == pytest.approx(-0.4 - 0.05 / 3)
    assert found.spread == pytest.approx(stdev([-0.4, -0.41, -0.44]))
    assert entry.unit == "hour"


def test_seeds_without_marks_have_no_mean_of_them() -> None:
    unknown = {"accuracy": nan, "top5": nan}
    (entry,) = compare([event_row(seed, scores=unknown) for seed in range(2)])
    assert isinstance(entry, EventEntry)
    assert "accuracy" not in entry.scores["test"]
    assert "nll" in entry.scores["test"]


@pytest.mark.parametrize(
    ("other", "note"),
    [
        ({"columns": COLUMNS | {"file": "d2/s.csv"}}, "file=d2/s.csv"),
        ({"columns": COLUMNS | {"y": ["b", "c"]}}, "y=b,c"),
        ({"columns": COLUMNS | {"group": "who"}}, "group=who"),
        ({"data": "s.csv: 50 rows, 1 inputs, 1 outputs"}, "data=s.csv: 50 rows, 1 inputs, 1 outputs"),
        ({"contents": "bb"}, "contents=bb"),
        ({"parameters": 99}, "parameters=99"),
        ({"steps": 26}, "26 of 400 steps"),
        ({"settings": {"batch": 8, "steps": 400, "lr": 0.5}}, "lr=0.5"),
    ],
)
def test_rows_of_other_data_or_steps_are_no_seeds_of_each_other_and_say_what_differs(
    other: dict[str, Any], note: str
) -> None:
    rows = [own_row(0), own_row(1), own_row(0, **other), own_row(3, **other), own_row(4, **other)]
    assert sorted(entry.seeds for entry in compare(rows)) == [[0, 1], [0, 3, 4]]
    assert f"CMANP-small ({note})" in names(rows)
    assert len(set(names(rows))) == 2


def test_rows_of_one_seed_but_other_data_do_not_replace_each_other() -> None:
    assert len(compare([own_row(0), own_row(0, columns=COLUMNS | {"file": "d2/s.csv"})])) == 2
    assert len(compare([own_row(0), own_row(0, date="2027-01-01")])) == 1


def test_data_that_differ_where_all_columns_are_the_same_are_distinguished_among_three() -> None:
    other = COLUMNS | {"file": "d2/s.csv"}
    rows = [own_row(0), own_row(0, columns=other, contents="bb"), own_row(0, columns=other, contents="cc")]
    assert sorted(names(rows)) == [
        "CMANP-small (file=d1/s.csv)",
        "CMANP-small (file=d2/s.csv, contents=bb)",
        "CMANP-small (file=d2/s.csv, contents=cc)",
    ]


def test_a_run_that_was_stopped_says_so_though_it_is_alone() -> None:
    assert names([own_row(steps=1026, settings={"batch": 8, "steps": 4000})]) == [
        "CMANP-small (1,026 of 4,000 steps)"
    ]
    assert names([own_row()]) == ["CMANP-small"]
    assert names([own_row(steps=0)]) == ["CMANP-small (steps unknown)"]  # its metrics were lost
    assert names([event_row(steps=26)]) == ["GRU (26 of 100 steps)"]


def test_settings_that_have_a_column_are_not_repeated_in_the_name() -> None:
    rows = [own_row(), own_row(settings={"batch": 9, "steps": 200, "start": "old"}, steps=200)]
    assert sorted(names(rows)) == ["CMANP-small (start=none)", "CMANP-small (start=old)"]
    rows = [
        image_row(),
        image_row(settings=SETTINGS | {"optimiser": "adam", "steps": 7}),
        image_row(model="cnp"),
    ]
    assert names(rows) == ["CNP", "CMANP (optimiser=muon)", "CMANP (optimiser=adam)"]


def test_recipes_settings_and_models_are_separate_and_in_the_order_of_the_paper() -> None:
    rows = [
        image_row(model="cmanp"), image_row(model="cnp"), image_row(model="tnpd"),
        image_row(1, recipe="faithful"), image_row(model="cmanp-small"),
        image_row(1, settings={**SETTINGS, "steps": 7}), image_row(dataset="gp"),
    ]  # fmt: skip
    found = [(entry.dataset, entry.recipe, entry.model) for entry in compare(rows)]
    assert found == [
        ("emnist", "faithful", "cmanp"), ("emnist", "improved", "cnp"), ("emnist", "improved", "tnpd"),
        ("emnist", "improved", "cmanp"), ("emnist", "improved", "cmanp"),
        ("emnist", "improved", "cmanp-small"), ("gp", "improved", "cmanp"),
    ]  # fmt: skip


def test_event_models_are_in_order_and_settings_distinguish_those_of_one_name() -> None:
    plain = event_row().settings
    ablated = plain | {"model": {"num_marks": 10, "recency": False}}
    rows = [
        event_row(model="cmhp", settings=ablated), event_row(model="cmhp"), event_row(model="cmhp-faithful"),
        event_row(model="thp"), event_row(model="trivial"), event_row(),
        event_row(model="cmhp", settings=plain | {"lr": 0.1}),
    ]  # fmt: skip
    found = names(rows)
    assert found[:3] == ["no history", "GRU", "THP"]
    assert sorted(found[3:6]) == ["CMHP (lr=0.002)", "CMHP (lr=0.002, recency=False)", "CMHP (lr=0.1)"]
    assert found[6] == "CMHP-faithful"

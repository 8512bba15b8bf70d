"""Rows: read in types, refused where they are something else; entries: which are seeds of each other."""

import json
from math import inf, isnan, nan
from pathlib import Path
from statistics import stdev
from typing import Any

import pytest

from constmem.evaluation import Figure
from constmem.evaluation.rows import Entry, Row, compare, json_text, read_rows
from tests.evaluation.made import (
    COLUMNS,
    EVENTS,
    POINTS,
    SETTINGS,
    THREE,
    event_content,
    event_row,
    image_content,
    image_row,
    own_content,
    own_row,
    row,
)


def test_rows_are_read_from_run_folders_and_from_files_of_rows(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "eval.json").write_text(json.dumps(image_content(0)))
    (tmp_path / "many.json").write_text(
        json.dumps({"command": "x", "rows": [image_content(1), event_content(2)]})
    )
    (tmp_path / "list.json").write_text(json.dumps([image_content(3)]))
    found = read_rows([tmp_path / "run", tmp_path / "many.json", tmp_path / "list.json"])
    assert [r.seed for r in found] == [0, 1, 2, 3]
    assert [r.of_events for r in found] == [False, False, True, False]


@pytest.mark.parametrize("content", [image_content(2), own_content(), event_content(1)])
def test_a_row_is_written_as_it_was_read(content: dict[str, Any]) -> None:
    found = row(content)
    assert row(json.loads(json.dumps(found.content()))) == found
    assert found.content() == {key: value for key, value in content.items() if value is not None}


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


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        ({"scores": {"test": POINTS | {"rmse": None}}}, ("rmse", "'test'", "null", "number")),
        ({"scores": {"test": POINTS | {"crps": "low"}}}, ("crps", "'test'", "low")),
        ({"scores": {"test": POINTS | {"coverage": {"0.9": None}}}}, ("0.9", "coverage", "'test'")),
        ({"scores": {"test": POINTS | {"coverage": 3}}}, ("coverage", "'test'", "dictionary")),
        ({"scores": {"test": EVENTS | {"nll": None}}}, ("nll", "'test'", "number")),
        ({"scores": {"test": {"rmse": 1.0}}}, ("'test'", "lack", "crps", "another version")),
        ({"scores": {"test": None}}, ("'test'", "null")),
        ({"scores": None}, ("scores", "dictionary")),
        ({"seed": "one"}, ("seed", "one", "whole number")),
        ({"seed": True}, ("seed", "whole number")),
        ({"steps": 1.5}, ("steps", "whole number")),
        ({"settings": []}, ("settings", "dictionary")),
        ({"model": 3}, ("model", "3", "text")),
        ({"peak_memory": {"training": "much"}}, ("training", "peak_memory")),
    ],
)
def test_a_row_of_something_else_is_refused_by_its_name(
    tmp_path: Path, change: dict[str, Any], parts: tuple[str, ...]
) -> None:
    path = tmp_path / "rows.json"
    path.write_text(json.dumps([own_content(0), own_content(1) | change]))
    with pytest.raises(ValueError, match=r"rows.json: the row of s.csv .* own data") as caught:
        read_rows([path])
    assert all(part in str(caught.value) for part in parts), caught.value


def test_scores_of_marks_may_be_null(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    path.write_text(json.dumps(event_content(scores={"accuracy": None})))
    (found,) = read_rows([path])
    assert isnan(found.scores["test"].accuracy)  # type: ignore[union-attr]


def test_of_two_rows_of_one_seed_the_newer_counts() -> None:
    newer = own_row(0, date="2027-01-01")
    for rows in ([own_row(0), newer, own_row(1)], [newer, own_row(1), own_row(0)]):
        (entry,) = compare(rows)
        assert {found.seed: found for found in entry.rows} == {0: newer, 1: own_row(1)}


def test_rows_of_one_data_set_can_be_chosen() -> None:
    assert compare([own_row(), event_row()], dataset="taxi") == [Entry([event_row()])]
    with pytest.raises(ValueError, match=r"no rows of gp: there are s\.csv, taxi"):
        compare([own_row(), event_row()], dataset="gp")


@pytest.mark.parametrize("odd", [nan, inf, -inf])
def test_seeds_that_are_not_all_finite_have_no_mean_and_no_spread(odd: float) -> None:
    figure = Figure.of([1.0, odd, 2.0])
    assert isnan(figure.mean)
    assert figure.spread is not None
    assert isnan(figure.spread)
    assert (figure.text(2), figure.short()) == ("nan ± nan", "nan ± nan")
    assert Figure.of([odd]).spread is None


@pytest.mark.parametrize(
    ("number", "text"),
    [(0.28, "0.2800"), (2.6861, "2.686"), (74.21, "74.21"), (512.34, "512.3"), (97531.2, "97,531")],
)
def test_errors_in_any_unit_have_about_four_digits(number: float, text: str) -> None:
    assert Figure(number, None).short() == text


def test_json_has_null_for_what_is_not_finite() -> None:
    def refuse(word: str) -> Any:
        raise AssertionError(f"{word} is no JSON")

    text = json_text({"a": [nan, 1.0], "b": {"c": (inf, "x")}})
    assert json.loads(text, parse_constant=refuse) == {"a": [None, 1.0], "b": {"c": [None, "x"]}}


# Entries


def figure(entry: Entry, test: str, key: str, level: str | None = None) -> dict[str, float | None]:
    found = entry.figure(test, key, level)
    assert found is not None
    return vars(found)


def names(rows: list[Row]) -> list[str]:
    entries = compare(rows)
    return [entry.name(entries) for entry in entries]


def test_seeds_become_a_mean_and_a_spread() -> None:
    (entry,) = compare([image_row(0), image_row(1), image_row(4)])
    assert entry.seeds == [0, 1, 4]
    by_batch, by_point = (
        figure(entry, "seen", "log_likelihood_by_batch"),
        figure(entry, "unseen", "log_likelihood"),
    )
    assert by_batch == pytest.approx({"mean": 2 + 0.5 / 3, "spread": stdev([2.0, 2.1, 2.4])})
    assert by_point["mean"] == pytest.approx(0.5 + 0.5 / 3)
    assert entry.about["minutes"] == pytest.approx(2 + 5 / 3)
    (entry,) = compare(THREE)
    assert figure(entry, "seen", "rmse") == pytest.approx({"mean": 0.4, "spread": stdev([0.2, 0.3, 0.7])})
    assert figure(entry, "seen", "crps") == pytest.approx({"mean": 0.13, "spread": stdev([0.10, 0.12, 0.17])})
    inside = figure(entry, "seen", "coverage", "0.9")
    assert inside == pytest.approx({"mean": 0.92, "spread": stdev([0.90, 0.91, 0.95])})
    assert entry.figure("seen", "coverage", "0.5") is None  # which not all of them have


def test_seeds_of_events_become_a_mean_and_a_spread() -> None:
    (entry,) = compare([event_row(0), event_row(1), event_row(4)])
    found = figure(entry, "test", "nll")
    assert found == pytest.approx({"mean": -0.4 - 0.05 / 3, "spread": stdev([-0.4, -0.41, -0.44])})
    assert entry.unit == "hour"


def test_seeds_without_marks_have_no_mean_of_them() -> None:
    unknown = {"accuracy": nan, "top5": nan}
    (entry,) = compare([event_row(seed, scores=unknown) for seed in range(2)])
    assert entry.figure("test", "accuracy") is None
    assert entry.figure("test", "nll") is not None


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
    found = [(e.first.dataset, e.first.recipe, e.first.model) for e in compare(rows)]
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

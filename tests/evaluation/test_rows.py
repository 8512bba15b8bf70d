"""Rows: read from files in types, refused where they are something else, and grouped by seeds."""

import json
from math import inf, isnan, nan
from pathlib import Path
from typing import Any

import pytest

from constmem.evaluation.rows import Figure, grouped, json_text, read_rows
from tests.evaluation.made import (
    EVENTS,
    POINTS,
    event_content,
    event_row,
    image_content,
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
        ((first, second),) = grouped(rows)
        assert {first.seed: first, second.seed: second} == {0: newer, 1: own_row(1)}


def test_rows_of_one_data_set_can_be_chosen() -> None:
    assert grouped([own_row(), event_row()], dataset="taxi") == [[event_row()]]
    with pytest.raises(ValueError, match=r"no rows of gp: there are s\.csv, taxi"):
        grouped([own_row(), event_row()], dataset="gp")


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

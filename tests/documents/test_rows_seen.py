"""The picture of errors against rows seen: what the committed rows say, and what the page says of them."""

import json
from pathlib import Path
from typing import Any

import drawing
import pytest

ROWS = [row for row in json.loads(drawing.STREAMS.read_text())["rows"] if "rmse_in_deviations" in row]


def of(table: str) -> list[dict[str, Any]]:
    return [row for row in ROWS if row["part"] == table]


@pytest.mark.parametrize("table", drawing.TABLES)
def test_errors_fall_all_the_way_and_memory_is_constant_after_the_warm_up(table: str) -> None:
    rows = of(table)
    assert [row["seen"] for row in rows[:5]] == [10, 30, 100, 300, 1000]
    errors = [row["rmse_in_deviations"] for row in rows]
    assert errors == sorted(errors, reverse=True)
    assert len(set(errors)) == len(errors)
    assert len({row["state_bytes"] for row in rows if row["seen"] > 1024}) == 1
    assert all(row["state_bytes"] <= row["rows_bytes"] for row in rows if row["seen"] <= 1024)
    assert rows[-1]["forest_bytes"] > 10 * rows[-1]["state_bytes"]


def test_the_forest_is_ahead_where_the_page_says_so() -> None:
    ahead = {
        (row["part"], row["seen"]): row["forest_rmse_in_deviations"] < row["rmse_in_deviations"]
        for row in ROWS
    }
    assert [seen for (table, seen), won in ahead.items() if table == "kin8nm" and won] == [10]
    assert ahead["power", 10]
    assert not ahead["power", 30]
    assert not any(ahead["protein", seen] for seen in (10, 30, 100, 300))
    assert not ahead["power", 1000]
    assert not ahead["protein", 1000]
    assert ahead["power", 8611]
    assert not ahead["power", 3000]
    assert ahead["protein", 3000]
    assert ahead["protein", 10_000]


def test_the_picture_is_drawn_from_the_rows(tmp_path: Path) -> None:
    assert drawing.rows_seen(tmp_path / "rows.png").read_bytes().startswith(b"\x89PNG")

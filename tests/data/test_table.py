"""Tables of whatever a newcomer has: frames, lists, one name, words and dates."""

from dataclasses import replace
from datetime import date, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from constmem.data import Table

N = 60


@pytest.fixture
def file(tmp_path: Path) -> Path:
    rows = "".join(f"{i},{i * i},2024-01-{i % 28 + 1:02d},s{i % 6}\n" for i in range(N))
    (tmp_path / "a.csv").write_text("age,income,day,place\n" + rows)
    return tmp_path / "a.csv"


def test_a_single_column_may_be_given_by_its_name(file: Path) -> None:
    one, two = Table.read(file, x="age", y="income"), Table.read(file, x=["age"], y=["income"])
    assert one.equals(two)
    with pytest.raises(ValueError, match=r"a\.csv: there is no column 'aeg': did you mean 'age'"):
        Table.read(file, x="aeg", y="income")


@pytest.mark.parametrize(("column", "cell"), [("day", "2024-01-01"), ("place", "s0")])
def test_words_and_dates_in_a_file_are_named_with_what_to_do(file: Path, column: str, cell: str) -> None:
    with pytest.raises(ValueError, match=rf"line 2, column '{column}' .* is '{cell}', not a number: .*dates"):
        Table.read(file, x=["age", column], y="income")


class Frame:
    """What a data frame is to numpy."""

    def __init__(self, values: Any) -> None:
        self.values = np.asarray(values)

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        return self.values if dtype is None else self.values.astype(dtype)


def test_frames_lists_arrays_and_tensors_make_the_same_table() -> None:
    rows = [[float(i), i * 0.1] for i in range(N)]
    expected = Table.of(rows, range(N))
    assert expected.x[3, 1] == 3 * 0.1  # not through float32
    for kind in (Frame, np.array, torch.DoubleTensor, lambda r: np.array(r, object), tuple):
        assert Table.of(kind(rows), range(N)).equals(expected)
    assert Table.of(np.array([i % 2 == 0 for i in range(N)]), range(N)).x[0].item() == 1.0


@pytest.mark.parametrize(
    ("values", "shown"),
    [
        (["blue" if i == 3 else "1" for i in range(N)], r"x\[0\] is '1'"),
        ([[1.0, "blue"] for _ in range(N)], r"x\[0, 0\] is '1.0'"),
        ([[1.0, None] for _ in range(N)], r"x\[0, 1\] is 'None'"),
        ([datetime(2024, 1, 1)] * N, r"x\[0\] is '2024-01-01 00:00:00'"),
        ([date(2024, 1, 1)] * N, r"x\[0\] is '2024-01-01'"),
        (np.arange(N).astype("datetime64[D]"), r"x\[0\] is '1970-01-01'"),
        (np.arange(N).astype("timedelta64[D]"), r"x\[0\] is '0 days'"),
    ],
)
def test_words_and_dates_in_arrays_are_named_with_what_to_do(values: Any, shown: str) -> None:
    with pytest.raises(ValueError, match=f"{shown}: every value must be a number: count dates"):
        Table.of(values, range(N))


@pytest.mark.parametrize(
    "change",
    [
        {"x": torch.zeros(60)},
        {"y": torch.zeros(59, 1)},
        {"x": torch.full((60, 1), torch.nan)},
        {"groups": torch.zeros(3)},
    ],
)
def test_a_file_of_rows_that_do_not_fit_each_other_is_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    table = Table.of(np.arange(60.0), np.arange(60.0) ** 2)
    wrong = {name: t.double() if name in "xy" else t.long() for name, t in change.items()}
    replace(table, **wrong).save(tmp_path / "t")
    with pytest.raises(ValueError, match=r"t is damaged .*: write the table again"):
        Table.load(tmp_path / "t")


@pytest.mark.parametrize("wrong", [None, 3, [0], [], ["age", None]])
def test_names_of_columns_that_are_none_are_refused(file: Path, wrong: Any) -> None:
    for given in ({"x": wrong, "y": "income"}, {"x": "age", "y": wrong}):
        with pytest.raises(TypeError, match="must be the name of a column, or a list of names"):
            Table.read(file, **given)

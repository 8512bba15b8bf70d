"""Tables of every kind become the same standardised numbers, and what cannot is named."""

from datetime import UTC, date, datetime
from decimal import Decimal

import numpy as np
import pandas as pd
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from constmem.tabular.columns import BUCKETS, FAR, LEVELS, Columns
from constmem.tabular.frames import concatenated
from constmem.tabular.inputs import frame_of

NAN = float("nan")
WHEN = [datetime(2024, 1, 1, 6), datetime(2024, 1, 6, 12, 30), None, datetime(2024, 7, 3)]
MIXED = {
    "size": [1.0, 2.0, NAN, 5.0],
    "count": [3, 1, 4, 1],
    "garden": [True, False, True, True],
    "town": ["Ulm", "Bern", None, "Ulm"],
    "sold": WHEN,
    "nothing": [None, None, None, None],
}


def _encoded(x: object) -> np.ndarray:
    frame = frame_of(x)
    return Columns.freeze(frame)(frame)


def test_numbers_are_standardised_by_the_warm_up_and_missing_ones_become_the_mean_and_say_so() -> None:
    warm = np.array([[1.0, NAN], [3.0, 2.0], [5.0, 6.0]])
    columns = Columns.freeze(frame_of(warm))
    x = columns(frame_of(np.array([[7.0, NAN], [NAN, 4.0]])))
    deviation = np.std([1, 3, 5])
    np.testing.assert_allclose(x, [[4 / deviation, 0, 1], [0, 0, 0]])  # two numbers, then what was missing


@pytest.mark.parametrize(
    "table",
    [
        pd.DataFrame(MIXED),
        pd.DataFrame(MIXED).astype({"town": "category", "count": "Int64", "garden": "boolean"}),
        pd.DataFrame(MIXED).astype({"town": "string", "count": "float32"}),
        pd.DataFrame(MIXED).assign(sold=pd.Series(pd.to_datetime(WHEN)).dt.tz_localize("UTC")),
        pl.DataFrame(MIXED),
        pl.DataFrame(MIXED).with_columns(pl.col("town").cast(pl.Categorical), pl.col("count").cast(pl.UInt8)),
        pl.DataFrame(MIXED)[["nothing", "sold", "town", "garden", "count", "size"]],
        {**MIXED, "size": [Decimal(1), Decimal(2), None, Decimal(5)]},
        {**MIXED, "sold": [None if w is None else w.replace(tzinfo=UTC) for w in WHEN]},
    ],
    ids=["pandas", "nullable", "strings", "time zone", "polars", "types", "order", "decimal", "aware"],
)
def test_every_kind_of_table_becomes_the_same_numbers(table: object) -> None:
    frozen = Columns.freeze(frame_of(MIXED))
    np.testing.assert_allclose(frozen(frame_of(table)), frozen(frame_of(MIXED)))
    again = Columns.freeze(frozen.matched(frame_of(table)))
    assert again.text() == frozen.text()


def test_lists_and_object_arrays_are_tables_too() -> None:
    rows = [[1, "a", date(2024, 1, 1)], [2.5, None, date(2024, 2, 1)], [None, "b", None]]
    expected = _encoded(
        {"x": [1, 2.5, NAN], "y": ["a", None, "b"], "z": [date(2024, 1, 1), date(2024, 2, 1), None]}
    )
    np.testing.assert_allclose(_encoded(rows), expected)
    np.testing.assert_allclose(_encoded(np.array(rows, dtype=object)), expected)
    np.testing.assert_allclose(_encoded([[1, 2], [3, 4]]), _encoded(np.array([[1, 2], [3, 4]])))


def test_categories_are_one_hot_with_the_weight_of_one_number() -> None:
    columns = Columns.freeze(frame_of({"c": ["a", "b", "a", "c"]}))
    x = columns(frame_of({"c": ["a", "b", "c", None, "never seen"]}))
    shares = np.array([0.5, 0.25, 0.25])
    spread = np.sqrt((shares * (1 - shares)).sum())
    np.testing.assert_allclose(x[:3], (np.eye(3) - shares) / spread)
    np.testing.assert_allclose(x[3:], 0)  # as far from all of them as the average is
    warm = columns(frame_of({"c": ["a", "b", "a", "c"]}))
    assert warm.var(0).sum() == pytest.approx(1)


def test_many_categories_stay_within_a_bound_and_those_unseen_share_buckets() -> None:
    names = [f"user {i}" for i in range(5000)]
    columns = Columns.freeze(frame_of({"c": names + ["often"] * 9}))
    assert columns.width == LEVELS + BUCKETS
    x = columns(frame_of({"c": ["often", "user 4999", "new one"]}))
    assert x[0].argmax() == 0
    assert (x[1:, LEVELS:] > 0).sum(1).tolist() == [1, 1]  # one bucket each
    np.testing.assert_array_equal(x, columns(frame_of({"c": ["often", "user 4999", "new one"]})))


def test_dates_become_calendar_features() -> None:
    days = np.arange("2024-01-01", "2024-12-31", dtype="datetime64[D]")
    columns = Columns.freeze(frame_of({"day": days}))
    x = columns(frame_of({"day": days}))
    assert x.shape == (365, 6)
    assert x[:, 0].mean() == pytest.approx(0, abs=1e-9)
    assert x[:, 0].std() == pytest.approx(1)
    np.testing.assert_allclose(x[:, 1:3] ** 2 @ [1, 1], 1)
    weekday = (days.astype("datetime64[D]").astype(int) + 3) % 7
    np.testing.assert_array_equal(x[:, 5], weekday >= 5)
    angle = weekday * 2 * np.pi / 7
    np.testing.assert_allclose(x[:, 3:5], np.stack([np.sin(angle), np.cos(angle)], 1), atol=1e-6)
    assert Columns.freeze(frame_of({"t": days + np.timedelta64(90, "m")})).width == 8  # and the time of day


def test_constant_and_empty_columns_do_no_harm() -> None:
    columns = Columns.freeze(frame_of({"same": [7.0] * 5, "none": [None] * 5, "big": [1e9] * 5}))
    x = columns(frame_of({"same": [7.0, 8.0], "none": [None, "text"], "big": [1e9, 2e9]}))
    np.testing.assert_allclose(x, [[0, 0, 0], [1 / 7, 1, 1]])


@given(st.lists(st.floats(allow_nan=True, allow_infinity=False, width=64), min_size=1, max_size=20))
def test_no_finite_number_is_too_large(values: list[float]) -> None:
    x = _encoded(np.array(values)[:, None])
    assert np.isfinite(x).all()
    assert np.abs(x).max() <= FAR + 800


def test_the_largest_numbers_stay_finite_where_the_warm_up_was_tiny() -> None:
    columns = Columns.freeze(frame_of(np.array([[-1e-9], [1e-9]])))
    x = columns(frame_of(np.array([[1.7e308], [-1.7e308]])))[:, 0]
    np.testing.assert_allclose(x, [FAR + np.log(1.7976931348623157e308), -x[0]])


def test_a_column_without_a_value_in_the_warm_up_is_empty_however_the_rows_come() -> None:
    late = {"n": [NAN] * 4 + [5.0], "t": [None] * 4 + ["x"], "d": [None] * 4 + [date(2024, 1, 1)]}
    at_once = frame_of(late).rows(0, 4)
    first = frame_of({name: values[:4] for name, values in late.items()})
    assert Columns.freeze(at_once) == Columns.freeze(first)


def test_numbers_far_out_grow_like_their_logarithm() -> None:
    columns = Columns.freeze(frame_of(np.array([[-1.0], [1.0]])))
    x = columns(frame_of(np.array([[FAR], [FAR + 1], [-1e12]])))[:, 0]
    np.testing.assert_allclose(x, [FAR, FAR + np.log(2), -(FAR + np.log1p(1e12 - FAR))])


def test_frozen_columns_come_back_from_their_text_and_their_fingerprint_sees_every_change() -> None:
    frozen = Columns.freeze(frame_of(MIXED))
    again = Columns.of(frozen.text())
    assert again == frozen
    assert again.text() == frozen.text()
    for name, values in {"size": [1.0, 2.0, NAN, 5.1], "town": ["Ulm", "Bern", None, "Bern"]}.items():
        assert Columns.freeze(frame_of({**MIXED, name: values})).text() != frozen.text()


def test_the_warm_up_may_learn_what_an_empty_column_is() -> None:
    whole = frame_of({"a": [None, None, "x"], "b": [1.0, NAN, 3.0]})
    parts = concatenated(frame_of({"a": [None, None], "b": [1.0, NAN]}), frame_of({"a": ["x"], "b": [3.0]}))
    assert Columns.freeze(parts).text() == Columns.freeze(whole).text()
    with pytest.raises(
        ValueError, match=r"column 'b' held numbers before, and now holds text \(row 0: 'no'\)"
    ):
        concatenated(parts, frame_of({"a": ["x"], "b": ["no"]}))


REFUSED = {
    "infinite": (
        {"a": [1.0, 2.0], "b": ["x", "y"]},
        {"a": [0.0, np.inf], "b": ["x", "y"]},
        "row 1 of column 'a' is inf",
    ),
    "text": (
        {"a": [1.0, 2.0]},
        {"a": [None, "two"]},
        "column 'a' held numbers .* text .row 1: 'two'",
    ),
    "numbers": ({"a": ["x", "y"]}, {"a": [1, 2]}, "column 'a' held text .* numbers .row 0: 1.0"),
    "dates": ({"a": [1.0, 2.0]}, {"a": [date(2024, 1, 1)]}, "held numbers .* dates .row 0: 2024-01-01"),
    "unseen": ({"a": [1.0]}, {"a": [1.0], "z": [1.0]}, "unseen at fit time:\n- z"),
    "lost": ({"a": [1.0], "z": [1.0]}, {"a": [1.0]}, "seen at fit time, yet now missing:\n- z"),
    "fewer": (np.zeros((2, 3)), np.zeros((2, 2)), "X has 2 features, but constmem is expecting 3"),
    "mixed": ({"a": [1.0]}, {"a": [1.0, "x"]}, "mixes numbers .row 0: 1.0. and text .row 1: 'x'."),
    "lengths": ({"a": [1.0]}, {"a": [1.0], "b": [1.0, 2.0]}, "different lengths"),
    "no rows": ({"a": [1.0]}, {"a": []}, "0 sample"),
    "no columns": ({"a": [1.0]}, np.zeros((3, 0)), "0 feature"),
    "ragged": ({"a": [1.0]}, [[1, 2], [3]], "every row needs the same columns"),
    "flat": ({"a": [1.0]}, np.zeros(3), "Reshape your data"),
    "complex": ({"a": [1.0]}, np.zeros((3, 1), complex), "Complex data not supported"),
    "twice": ({"a": [1.0]}, pd.DataFrame([[1, 2]], columns=["a", "a"]), "more than once"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_wrong_is_named_and_the_frozen_columns_stay_as_they_were(case: str) -> None:
    good, bad, message = REFUSED[case]
    columns = Columns.freeze(frame_of(good))
    before = columns(frame_of(good)), columns.text()
    with pytest.raises(ValueError, match=f"(?s){message}"):
        columns(frame_of(bad))
    np.testing.assert_array_equal(columns(frame_of(good)), before[0])
    assert columns.text() == before[1]


def test_names_are_needed_all_or_none_and_their_absence_is_said() -> None:
    columns = Columns.freeze(frame_of(pd.DataFrame({"a": [1.0, 2.0], "b": [3.0, 5.0]})))
    with pytest.warns(UserWarning, match="taken in the order given"):
        columns(frame_of(np.zeros((1, 2))))
    with pytest.raises(TypeError, match="string names"):
        frame_of(pd.DataFrame([[1, 2]], columns=["a", 7]))
    assert frame_of(pd.DataFrame([[1, 2]])).names is None


def test_objects_that_are_no_values_are_named() -> None:
    with pytest.raises(TypeError, match="row 1 of column 'a' holds dict"):
        frame_of({"a": [1.0, {}]})

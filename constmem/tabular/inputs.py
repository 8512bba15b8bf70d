"""Whatever holds a table (arrays, lists, dictionaries, pandas, polars) as a `Frame`; targets as arrays."""

import math
import numbers
from collections.abc import Iterable, Mapping
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any

import numpy as np
from numpy.typing import NDArray

from constmem.tabular.frames import MOMENT, Frame, Kind, plural


def frame_of(x: Any) -> Frame:
    """Whatever holds a table, as a frame; the input is never changed, nor kept."""
    if isinstance(x, Frame):
        return x
    source = type(x).__module__.partition(".")[0]
    if source == "scipy" and hasattr(x, "tocsr"):
        raise TypeError("Sparse data was passed, but dense data is required: use X.toarray()")
    if source in ("pandas", "polars") and hasattr(x, "columns"):
        return _of_columns([(name, x[name]) for name in x.columns] if _unique(x.columns) else [], len(x))
    if source == "pandas":
        raise ValueError(_reshape(x.to_numpy()))
    if isinstance(x, Mapping):
        columns = [(name, values) for name, values in x.items()]
        for name, values in columns:
            if isinstance(values, str) or not hasattr(values, "__len__"):
                raise ValueError(
                    f"column {name!r} is {values!r}, no list: give [{values!r}] for a single row"
                )
        lengths = {len(values) for _, values in columns}
        if len(lengths) > 1:
            raise ValueError(f"columns have different lengths {sorted(lengths)}: every row needs all of them")
        return _of_columns(columns, lengths.pop() if lengths else 0)
    array = _filled(x) if isinstance(x, np.ndarray) else _array(x)
    if array.ndim != 2:
        raise ValueError(_reshape(array))
    if array.dtype.kind == "c":
        raise ValueError(f"Complex data not supported: X holds {array.dtype}; give real and imaginary parts")
    _not_empty(*array.shape)
    if array.dtype.kind in "fiub":
        values = array.astype(np.float64)
        kinds: list[Kind] = ["number"] * values.shape[1]
        for i in np.flatnonzero(np.isnan(values[0])):
            if np.isnan(values[:, i]).all():
                kinds[i] = "empty"
        return Frame(None, tuple(kinds), values)
    return _of_columns([(i, array[:, i]) for i in range(array.shape[1])], len(array))


def _filled(x: NDArray[Any]) -> NDArray[Any]:
    """An array as it is; what a mask hides is missing."""
    if not np.ma.is_masked(x):
        return x
    if x.dtype.kind not in "fiub":
        raise TypeError(
            f"X is a masked array of {x.dtype}: give X.astype(object).filled(None), None is missing"
        )
    filled: NDArray[Any] = np.ma.filled(x.astype(np.float64), np.nan)
    return filled


def _array(x: Any) -> NDArray[Any]:
    try:
        array = np.asarray(x.detach() if hasattr(x, "detach") else x)
    except ValueError as error:  # rows of different lengths
        raise ValueError(f"X is no table ({error}): every row needs the same columns") from error
    return np.array(x, dtype=object) if array.dtype.kind in "US" else array  # [1, 'a'] has become text


def _reshape(array: NDArray[Any]) -> str:
    return (
        f"Expected 2D array, got {array.ndim}D array of shape {array.shape} instead. Reshape your data "
        "either using array.reshape(-1, 1) if your data has a single feature or array.reshape(1, -1) if it "
        "contains a single sample."
    )


def _not_empty(rows: int, columns: int) -> None:
    for count, what in ((rows, "sample"), (columns, "feature")):
        if count == 0:
            raise ValueError(
                f"Found array with 0 {what}(s) (shape=({rows}, {columns})) while a minimum of 1 is required."
            )


def _unique(names: Iterable[Any]) -> bool:
    names = list(names)
    twice = sorted({str(name) for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"column names must be unique, but {', '.join(twice)} stand more than once: rename")
    return True


def _of_columns(columns: list[tuple[Any, Any]], rows: int) -> Frame:
    _not_empty(rows, len(columns))
    text = [isinstance(name, str) for name, _ in columns]
    if any(text) and not all(text):
        kinds = sorted({type(name).__name__ for name, _ in columns})
        raise TypeError(
            f"Feature names are only supported if all input features have string names, but your input has "
            f"{kinds} as feature name / column name types: convert them by X.columns = X.columns.astype(str)"
        )
    values = np.full((rows, len(columns)), np.nan)
    kinds_of: list[Kind] = []
    others: dict[int, NDArray[Any]] = {}
    for i, (name, given) in enumerate(columns):
        kind, column = _column(given, f"column {name!r}")
        kinds_of.append(kind)
        if kind == "number":
            values[:, i] = column
        elif kind != "empty":
            others[i] = column
    return Frame(tuple(n for n, _ in columns) if all(text) else None, tuple(kinds_of), values, others)


def _column(given: Any, label: str) -> tuple[Kind, NDArray[Any]]:
    """One column as numbers, moments or text."""
    source = type(given).__module__.partition(".")[0]
    if source == "pandas":
        column = _of_pandas(given)
    elif source == "polars":
        column = _of_polars(given)
    else:
        column = given if isinstance(given, np.ndarray) else np.array([*given, None], object)[:-1]
    if column.dtype.kind in "fiub":
        column = column.astype(np.float64)
        return ("empty" if np.isnan(column).all() else "number"), column
    if column.dtype.kind == "m":
        return _column(column / np.timedelta64(1, "s"), label)
    if column.dtype.kind == "M":
        column = column.astype(MOMENT)
        return ("empty" if np.isnat(column).all() else "date"), column
    if column.dtype.kind == "c":
        raise ValueError(f"Complex data not supported: {label} holds {column.dtype}")
    return _of_objects(column, label)


def _of_pandas(series: Any) -> NDArray[Any]:
    import pandas as pd

    if isinstance(series.dtype, pd.CategoricalDtype):
        return np.array([None if pd.isna(v) else str(v) for v in series], object)
    if isinstance(series.dtype, pd.DatetimeTZDtype):
        return series.dt.tz_convert("UTC").dt.tz_localize(None).to_numpy(MOMENT)  # type: ignore[no-any-return]
    if pd.api.types.is_numeric_dtype(series.dtype) and series.dtype.kind != "c":
        return series.to_numpy(np.float64, na_value=np.nan)  # type: ignore[no-any-return]
    return series.to_numpy()  # type: ignore[no-any-return]


def _of_polars(series: Any) -> NDArray[Any]:
    import polars as pl

    if series.dtype.is_numeric() or series.dtype == pl.Boolean:
        return series.cast(pl.Float64).to_numpy()  # type: ignore[no-any-return]
    if series.dtype.is_temporal() and series.dtype != pl.Time:
        return series.to_numpy()  # type: ignore[no-any-return]
    if series.dtype in (pl.Categorical, pl.Enum):
        series = series.cast(pl.String)
    return np.array([*series.to_list(), None], object)[:-1]


def _of_objects(column: NDArray[Any], label: str) -> tuple[Kind, NDArray[Any]]:
    """A column of Python objects, which must be of one kind."""
    kinds: dict[Kind, int] = {}
    for row, value in enumerate(column):
        kinds.setdefault(_kind(value, label, row), row)
    found = [kind for kind in kinds if kind != "empty"]
    if len(found) > 1:
        a, b = found[:2]
        raise ValueError(
            f"{label} mixes {plural(a)} (row {kinds[a]}: {column[kinds[a]]!r}) and {plural(b)} (row "
            f"{kinds[b]}: {column[kinds[b]]!r}): convert it to one of them, for instance by .astype(str)"
        )
    kind: Kind = found[0] if found else "empty"
    absent = [_absent(value) for value in column]
    if kind == "number":
        return kind, np.array([np.nan if a else float(v) for v, a in zip(column, absent, strict=True)])
    if kind == "date":
        times = [np.datetime64("NaT") if a else moment(v) for v, a in zip(column, absent, strict=True)]
        return kind, np.array(times, MOMENT)
    pairs = zip(column, absent, strict=True)
    return kind, np.array([*(None if a else str(v) for v, a in pairs), None], object)[:-1]


def _kind(value: Any, label: str, row: int) -> Kind:
    if isinstance(value, str):
        return "text"
    if _absent(value):
        return "empty"
    if isinstance(value, numbers.Real | Decimal | np.bool_):
        return "number"
    if isinstance(value, date | np.datetime64):
        return "date"
    raise TypeError(
        f"argument must be a string, a number or a date, but row {row} of {label} holds "
        f"{type(value).__name__} {value!r}"
    )


def _absent(value: Any) -> bool:
    if value is None or type(value).__name__ in ("NAType", "NaTType"):  # pandas', without importing it
        return True
    if isinstance(value, np.datetime64):
        return bool(np.isnat(value))
    return isinstance(value, float | np.floating | Decimal) and math.isnan(value)


def moment(value: Any) -> Any:
    """A date or time as numpy has it; with a time zone, in UTC."""
    if isinstance(value, datetime) and value.tzinfo is not None:
        value = value.astimezone(UTC).replace(tzinfo=None)
    return np.datetime64(value, "us")


def targets_of(y: Any, rows: int) -> NDArray[Any]:
    """Targets as an array, one entry or row for each row of the table."""
    if y is None:
        raise ValueError("requires y to be passed, but the target y is None: give one target a row")
    y = y.detach() if hasattr(y, "detach") else y
    targets = np.asarray(y.to_numpy() if hasattr(y, "to_numpy") else y)
    if np.ma.is_masked(y):
        raise ValueError("Input y is a masked array: leave rows without a target out, as in X[~y.mask]")
    if targets.ndim not in (1, 2):
        raise ValueError(f"y has shape {targets.shape}: (rows,) or (rows, targets) is needed")
    if len(targets) != rows:
        raise ValueError(f"X has {rows} rows, but y has {len(targets)}: inconsistent numbers of samples")
    if targets.dtype.kind == "c":
        raise ValueError("Complex data not supported: y holds complex numbers")
    return targets


def numbers_of(y: Any, rows: int) -> tuple[NDArray[np.float64], bool]:
    """Finite numbers to predict, (rows, targets), and whether they came as (rows,)."""
    given = targets_of(y, rows)
    if given.dtype.kind in "Mm":
        raise ValueError("y holds dates or durations: give numbers, as days or seconds since some moment")
    try:
        targets = np.asarray(given, np.float64)
    except (TypeError, ValueError) as error:
        raise ValueError(f"y must hold numbers ({error}): for classes use StreamingClassifier") from error
    if not targets.size:
        raise ValueError(f"y has shape {targets.shape}, of no targets: give one column for each target")
    bad = ~np.isfinite(targets)
    if bad.any():
        where = tuple(int(i) for i in np.argwhere(bad)[0])
        what = "NaN" if np.isnan(targets[where]) else "infinity"
        raise ValueError(
            f"Input y contains {what}: row {where[0]} is {targets[where]}, in {int(bad.sum())} of "
            f"{bad.size} places; leave rows without a target out"
        )
    return targets.reshape(rows, -1), targets.ndim == 1


def labels_of(y: Any, rows: int) -> NDArray[Any]:
    """Classes to predict, as they are; refuses rows that have none, and bytes."""
    labels = targets_of(y, rows)
    if labels.dtype.kind == "S":
        raise TypeError("y holds bytes, not text: decode them, as in np.char.decode(y)")
    if labels.dtype.kind in "Mm":
        raise ValueError("y holds dates or durations, not classes: give text, as y.astype(str)")
    if labels.dtype.kind == "O":
        absent = [row for row, v in enumerate(labels.ravel()) if _absent(v) or v != v]
        if absent:
            raise ValueError(f"Input y contains NaN: row {absent[0]} has no class; leave such rows out")
        text = [isinstance(v, str) for v in labels.ravel()]
        odd = [v for v in labels.ravel() if not isinstance(v, str | numbers.Real | np.bool_)]
        if odd or (any(text) and not all(text)):
            held = f"{type(odd[0]).__name__} {odd[0]!r}" if odd else "text and numbers"
            raise ValueError(f"y holds {held}: classes are text, or whole numbers; convert them to one kind")
        labels = labels.astype(str) if any(text) else np.array(labels.tolist())  # which can be saved
    elif labels.dtype.kind == "f" and not np.isfinite(labels).all():
        row = int(np.flatnonzero(~np.isfinite(labels))[0])
        what = "NaN" if np.isnan(labels.ravel()[row]) else "infinity"
        raise ValueError(f"Input y contains {what}: row {row} has no class; leave such rows out")
    return labels


def extended(order: NDArray[Any], labels: NDArray[Any]) -> NDArray[Any]:
    """Known classes, then those among the labels that are new."""
    if len(order) and (order.dtype.kind in "US") != (labels.dtype.kind in "US"):
        raise ValueError(
            f"classes were {order.tolist()[:3]} before, and now {labels.tolist()[:3]}: text and numbers do "
            "not mix; convert them to what they were"
        )
    known = set(order.tolist())
    new = [label for label in np.unique(labels).tolist() if label not in known]
    return np.concatenate([order, np.array(new, labels.dtype)]) if new else order


def one_hot(labels: NDArray[Any], order: NDArray[Any]) -> NDArray[np.float64]:
    """Indicators of classes, (rows, classes)."""
    place = {label: i for i, label in enumerate(order.tolist())}
    return np.eye(len(place))[[place[label] for label in labels.tolist()]]

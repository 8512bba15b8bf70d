"""`Frame`: rows of a table as columns of numbers, dates and text."""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

Kind = Literal["number", "date", "text", "empty"]
MOMENT = "datetime64[us]"
EPOCH = np.datetime64(0, "us")


@dataclass(frozen=True)
class Frame:
    """Rows of a table, column by column, with one of four kinds for each column.

    Args:
        names: of the columns; None where an array has none.
        kinds: number (and boolean), date, text (and categories), or empty: nothing but missing values.
        values: (rows, columns); NaN is missing, and columns of another kind are NaN throughout.
        others: dates as datetime64 (missing NaT) and text as objects (missing None), by column.
    """

    names: tuple[str, ...] | None
    kinds: tuple[Kind, ...]
    values: NDArray[np.float64]
    others: dict[int, NDArray[Any]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.values)

    def label(self, index: int) -> str:
        """How errors name a column."""
        return f"column {index}" if self.names is None else f"column {self.names[index]!r}"

    def rows(self, start: int, stop: int) -> "Frame":
        """Some of the rows."""
        return self.at(slice(start, stop))

    def at(self, rows: "slice | NDArray[Any]") -> "Frame":
        """The rows a slice or a mask chooses."""
        others = {i: column[rows] for i, column in self.others.items()}
        return Frame(self.names, self.kinds, self.values[rows], others)

    def ordered(self, indices: Sequence[int]) -> "Frame":
        """The same columns in another order."""
        names = None if self.names is None else tuple(self.names[i] for i in indices)
        others = {new: self.others[old] for new, old in enumerate(indices) if old in self.others}
        return Frame(names, tuple(self.kinds[i] for i in indices), self.values[:, list(indices)], others)

    def written(self) -> dict[str, Any]:
        """All of it but the numbers, as JSON takes it."""
        others = {
            i: column.astype(np.int64).tolist() if column.dtype.kind == "M" else column.tolist()
            for i, column in self.others.items()
        }
        return {"names": self.names, "kinds": self.kinds, "others": others}

    @staticmethod
    def of(written: dict[str, Any], values: NDArray[np.float64]) -> "Frame":
        """The frame of these numbers that was `written`; refuses what no frame can hold."""
        names, kinds = written["names"], tuple(written["kinds"])
        others = {int(i): np.array([*column, None], object)[:-1] for i, column in written["others"].items()}
        words = {type(word) for i, column in others.items() for word in column if kinds[i] == "text"}
        if len({len(values), *map(len, others.values())}) > 1:
            raise ValueError("holds columns of different lengths")
        if len({len(kinds), values.shape[1], len(names or kinds)}) > 1:
            raise ValueError("holds rows and columns that do not fit each other")
        if not set(kinds) <= set(get_args(Kind)) or not words <= {str, type(None)}:
            raise ValueError("holds columns of an unknown kind, or text with something else in it")
        dates = {i: c.astype(np.int64).astype(MOMENT) for i, c in others.items() if kinds[i] == "date"}
        return Frame(None if names is None else tuple(names), kinds, values, others | dates)

    def infinite(self) -> str | None:
        """Where the first infinite value stands, in words, if there is one."""
        bad = np.isinf(self.values)
        if not bad.any():
            return None
        row, column = (int(i) for i in np.argwhere(bad)[0])
        return f"row {row} of {self.label(column)} is {self.values[row, column]}"


def concatenated(first: Frame, second: Frame) -> Frame:
    """The rows of both; kinds must agree, but a column that is empty in one takes the other's kind."""
    kinds: list[Kind] = []
    for i, (a, b) in enumerate(zip(first.kinds, second.kinds, strict=True)):
        if a != b and "empty" not in (a, b):
            raise ValueError(
                f"{second.label(i)} held {plural(a)} before, and now holds {plural(b)} "
                f"{example(second, i)}: convert it to what it was"
            )
        kinds.append(b if a == "empty" else a)
    others = {
        i: np.concatenate([other_column(frame, i, kind) for frame in (first, second)])
        for i, kind in enumerate(kinds)
        if kind in ("date", "text")
    }
    names = first.names if second.names is None else second.names
    return Frame(names, tuple(kinds), np.concatenate([first.values, second.values]), others)


def aligned(frame: Frame, mine: tuple[str, ...] | None, count: int) -> Frame:
    """The frame with its columns in the order of these names; refuses others, or another number of them."""
    its = frame.names
    if mine is None or its is None or mine == its:
        if len(frame.kinds) != count:
            raise ValueError(
                f"X has {len(frame.kinds)} features, but constmem is expecting {count} features as input: "
                "give the columns of the first call"
            )
        if (mine is None) != (its is None):
            had, has = ("names", "no names") if its is None else ("no names", "names")
            warnings.warn(
                f"X has {has} of columns, but had {had} in the first call: they are taken in the order given",
                stacklevel=3,
            )
        return frame
    unseen, lost = sorted(set(its) - set(mine)), sorted(set(mine) - set(its))
    if unseen or lost:
        words = "The feature names should match those that were passed during fit.\n"
        if unseen:
            words += "Feature names unseen at fit time:\n" + "".join(f"- {name}\n" for name in unseen)
        if lost:
            words += "Feature names seen at fit time, yet now missing:\n"
            words += "".join(f"- {name}\n" for name in lost)
        raise ValueError(words + "Give these columns; their order does not matter.")
    return frame.ordered([its.index(name) for name in mine])


def plural(kind: Kind) -> str:
    """A kind of column in words."""
    return {"number": "numbers", "date": "dates", "text": "text", "empty": "no values"}[kind]


def example(frame: Frame, index: int) -> str:
    """The first value of a column that is there, and its row, in words."""
    column = frame.others.get(index, frame.values[:, index])
    row = int(np.flatnonzero(~missing(column))[0])
    value = str(column[row]) if column.dtype.kind == "M" else repr(column[row : row + 1].tolist()[0])
    return f"(row {row}: {value})"


def other_column(frame: Frame, index: int, kind: Kind) -> NDArray[Any]:
    """A column of dates or text, all missing where the frame's own is empty."""
    if index in frame.others:
        return frame.others[index]
    if kind == "date":
        return np.full(len(frame), np.datetime64("NaT"), MOMENT)
    return np.full(len(frame), None, object)


def missing(column: NDArray[Any]) -> NDArray[np.bool_]:
    """Which values of a column are missing."""
    if column.dtype.kind == "M":
        return np.asarray(np.isnat(column))
    if column.dtype.kind == "O":
        return np.fromiter((value is None for value in column), bool, len(column))
    return np.asarray(np.isnan(column))

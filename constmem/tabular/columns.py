"""`Columns`: how the columns of one table become standardised numbers, frozen after a warm-up."""

import json
import zlib
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from constmem.tabular.frames import EPOCH, Frame, Kind, aligned, example, missing, other_column, plural

LEVELS = 24  # categories of one column with a number of their own
BUCKETS = 8  # that share all others, where there were more
FAR = 30.0  # deviations; beyond, numbers grow like their logarithm, so that one row cannot drown all others
ODD = -7046029254386353131  # of a hash: 64 bits, half of them set
SECONDS = {"year": 365.2425 * 86400.0, "week": 7 * 86400.0, "day": 86400.0}
MONDAY = 4 * 86400.0  # of the first week after the epoch, a Thursday


@dataclass(frozen=True)
class Column:
    """What the warm-up said about one column.

    Args:
        center, scale: numbers become (value - center) / scale; dates likewise, in seconds since 1970.
        absent: whether values were missing, so that a number says so.
        levels: the categories with a number of their own; the most frequent ones where there were many.
        shares: how frequent each was.
        hashed: whether all other categories share a few numbers.
        clock: whether dates had a time of day.
    """

    name: str | None
    kind: Kind
    center: float = 0.0
    scale: float = 1.0
    absent: bool = False
    levels: tuple[str, ...] = ()
    shares: tuple[float, ...] = ()
    hashed: bool = False
    clock: bool = False


def center_and_scale(values: NDArray[np.float64]) -> tuple[float, float]:
    """Mean and deviation of what is not NaN; of a constant, a scale that suits its size."""
    there = values[~np.isnan(values)]
    if not len(there):
        return 0.0, 1.0
    largest = float(np.abs(there).max()) or 1.0
    small = there / largest  # whose squares are finite
    center, deviation = float(small.mean()), float(small.std())
    if deviation < 1e-12:  # constant but for rounding
        return center * largest, max(largest, 1.0)
    return center * largest, deviation * largest


def _number(name: str | None, column: NDArray[Any]) -> Column:
    center, scale = center_and_scale(column)
    return Column(name, "number", center, scale, absent=bool(np.isnan(column).any()))


def _text(name: str | None, column: NDArray[Any]) -> Column:
    there = [value for value in column if value is not None]
    counts = Counter(there)
    hashed = len(counts) > LEVELS
    kept = sorted(counts, key=lambda level: (-counts[level], level))[:LEVELS]
    shares = np.array([counts[level] / len(there) for level in kept])
    spread = float(np.sqrt((shares * (1 - shares)).sum()))  # of all numbers of the column together
    return Column(
        name, "text", scale=spread or 1.0, absent=len(there) < len(column), levels=tuple(kept),
        shares=tuple(shares.tolist()), hashed=hashed,
    )  # fmt: skip


def _date(name: str | None, column: NDArray[Any]) -> Column:
    seconds = _seconds(column)
    center, scale = center_and_scale(seconds)
    clock = bool(np.nanmax(np.abs(seconds % SECONDS["day"])) > 0)
    return Column(name, "date", center, scale, absent=bool(np.isnan(seconds).any()), clock=clock)


FREEZE: dict[Kind, Callable[[str | None, NDArray[Any]], Column]] = {
    "number": _number,
    "text": _text,
    "date": _date,
    "empty": lambda name, _: Column(name, "empty"),
}


def _seconds(column: NDArray[Any]) -> NDArray[np.float64]:
    seconds = (column - EPOCH) / np.timedelta64(1, "s")
    return np.where(np.isnat(column), np.nan, seconds)


def within_reach(numbers: NDArray[np.float64], gone: NDArray[np.bool_]) -> NDArray[np.float64]:
    """Zero where nothing is given, and no number that drowns all others."""
    numbers = np.where(gone, 0.0, numbers)
    size = np.abs(numbers)
    if size.size and size.max() > FAR:
        far = np.sign(numbers) * (FAR + np.log1p(np.clip(size - FAR, 0, np.finfo(np.float64).max)))
        return np.where(size > FAR, far, numbers)
    return numbers


def encoded_names(column: Column) -> list[str]:
    """What each number of a column that is no number stands for."""
    if column.kind == "empty":
        return ["absent"]
    if column.kind == "text":
        names = [*column.levels, *(f"bucket {i}" for i in range(BUCKETS if column.hashed else 0))]
    else:
        names = ["time", "sin year", "cos year", "sin week", "cos week", "weekend"]
        names += ["sin day", "cos day"] if column.clock else []
    return names + (["absent"] if column.absent else [])


def encoded(column: Column, frame: Frame, index: int) -> NDArray[np.float64]:
    """The numbers of a column that is none: categories, calendar features, or whether a value is there."""
    names = encoded_names(column)
    if column.kind == "empty":
        there = ~missing(frame.others.get(index, frame.values[:, index]))
        return there[:, None].astype(np.float64)
    given = other_column(frame, index, column.kind)
    gone = missing(given)
    made = np.zeros((len(frame), len(names)))
    if column.kind == "text":
        _one_hot(column, given, made)
    else:
        _calendar(column, given, made)
    made[gone] = 0.0
    if column.absent:
        made[:, -1] = gone
    return made


def _one_hot(column: Column, given: NDArray[Any], made: NDArray[np.float64]) -> None:
    position = {level: i for i, level in enumerate(column.levels)}
    count = len(column.levels)
    for row, value in enumerate(given):
        at = position.get(value)
        if at is not None:
            made[row, at] = 1.0
        elif column.hashed and value is not None:
            made[row, count + zlib.crc32(value.encode()) % BUCKETS] = 1.0
        elif value is not None:  # never seen: as far from all categories as their average is
            made[row, :count] = column.shares
    made[:, :count] -= np.array(column.shares)
    made /= column.scale


def _calendar(column: Column, given: NDArray[Any], made: NDArray[np.float64]) -> None:
    seconds = np.nan_to_num(_seconds(given))
    made[:, 0] = within_reach((seconds - column.center) / column.scale, np.isnat(given))
    for i, (unit, start) in enumerate({"year": 0.0, "week": MONDAY, "day": 0.0}.items()):
        if unit == "day" and not column.clock:
            break
        angle = 2 * np.pi * (seconds - start) / SECONDS[unit]
        at = 1 + 2 * i + (unit == "day")
        made[:, at], made[:, at + 1] = np.sin(angle), np.cos(angle)
    made[:, 5] = ((seconds - MONDAY) % SECONDS["week"]) >= 5 * SECONDS["day"]


@dataclass(frozen=True)
class Columns:
    """Frames to matrices: frozen, so that states of the same columns can be merged.

    Numbers are standardised, by the warm-up; a missing one becomes the mean, beside a number that says so
    where the warm-up had missing values. Categories are one-hot (many of them: the frequent ones, others
    hashed), dates become calendar features, columns without a value only say whether one is there now.

    Example:
        >>> from constmem.tabular.inputs import frame_of
        >>> columns = Columns.freeze(frame_of({"size": [1.0, 3.0], "town": ["Ulm", "Bern"]}))
        >>> columns(frame_of({"town": ["Rome"], "size": [2.0]}))
        array([[0., 0., 0.]])
    """

    columns: tuple[Column, ...]

    @staticmethod
    def freeze(frame: Frame) -> "Columns":
        """Learn means, deviations and categories from these rows."""
        refuse_infinite(frame)
        names = frame.names or (None,) * len(frame.kinds)
        made = []
        for i, (name, kind) in enumerate(zip(names, frame.kinds, strict=True)):
            column = frame.values[:, i] if kind in ("number", "empty") else other_column(frame, i, kind)
            made.append(FREEZE["empty" if missing(column).all() else kind](name, column))
        return Columns(tuple(made))

    @property
    def names(self) -> tuple[str, ...] | None:
        """Names of the columns; None where the table has none."""
        found = tuple(c.name for c in self.columns if c.name is not None)
        return found or None

    @cached_property
    def width(self) -> int:
        """How many numbers a row becomes."""
        return len(self._centers) + len(self._absent) + sum(len(encoded_names(c)) for _, c in self._others)

    def text(self) -> str:
        """All of it as JSON."""
        return json.dumps([asdict(column) for column in self.columns])

    @staticmethod
    def of(text: str) -> "Columns":
        """The columns that `text` was made of."""
        found = json.loads(text)
        unknown = {column["kind"] for column in found} - FREEZE.keys()
        if unknown:
            raise ValueError(f"holds columns of unknown kinds {sorted(unknown)}")
        lists = ("levels", "shares")
        return Columns(tuple(Column(**{**c, **{key: tuple(c[key]) for key in lists}}) for c in found))

    def __call__(self, frame: Frame) -> NDArray[np.float64]:
        """The rows as standardised numbers, (n, width), none of them missing or infinite."""
        return self.numbers(self.matched(frame))

    def numbers(self, frame: Frame) -> NDArray[np.float64]:
        """The same of rows that `matched` has looked at."""
        with np.errstate(over="ignore"):  # brought within reach, too
            numbers = (frame.values[:, self._numbers] - self._centers) / self._scales
        gone = np.isnan(numbers)
        parts = [within_reach(numbers, gone), gone[:, self._absent]]
        for i, column in self._others:
            parts.append(encoded(column, frame, i))
        return np.concatenate(parts, axis=1, dtype=np.float64)

    def matched(self, frame: Frame) -> Frame:
        """The frame with its columns in our order; refuses other columns, kinds and infinite values."""
        frame = aligned(frame, self.names, len(self.columns))
        refuse_infinite(frame)
        if frame.kinds != self._kinds:
            for i, (column, kind) in enumerate(zip(self.columns, frame.kinds, strict=True)):
                if kind != column.kind and "empty" not in (kind, column.kind):
                    raise ValueError(
                        f"{frame.label(i)} held {plural(column.kind)} when the columns were frozen, and "
                        f"now holds {plural(kind)} {example(frame, i)}: convert it to what it was"
                    )
        return frame

    @cached_property
    def _kinds(self) -> tuple[Kind, ...]:
        return tuple(column.kind for column in self.columns)

    @cached_property
    def _numbers(self) -> NDArray[np.intp]:
        return np.flatnonzero([kind == "number" for kind in self._kinds])

    @cached_property
    def _centers(self) -> NDArray[np.float64]:
        return np.array([self.columns[i].center for i in self._numbers], np.float64)

    @cached_property
    def _scales(self) -> NDArray[np.float64]:
        return np.array([self.columns[i].scale for i in self._numbers], np.float64)

    @cached_property
    def _absent(self) -> NDArray[np.intp]:
        return np.flatnonzero([self.columns[i].absent for i in self._numbers])

    @cached_property
    def _others(self) -> tuple[tuple[int, Column], ...]:
        return tuple((i, c) for i, c in enumerate(self.columns) if c.kind != "number")


def fold_of(x: NDArray[np.float64], folds: int) -> NDArray[np.int64]:
    """Which of a power of two of folds each row belongs to: by a hash of its numbers, so always the same."""
    bits = np.ascontiguousarray(x + 0.0).view(np.int64)  # + 0.0: there are two zeros
    with np.errstate(over="ignore"):
        mixed = (bits ^ (bits >> 29)) * (np.arange(1, 2 * x.shape[1], 2) * ODD)
        total = mixed.sum(1)
        total = (total ^ (total >> 32)) * ODD
    return np.asarray((total >> 40) & (folds - 1))


def refuse_infinite(frame: Frame) -> None:
    """Name the first infinite value, if there is one."""
    where = frame.infinite()
    if where:
        raise ValueError(f"X contains infinity: {where}. Leave the row out, or give NaN for a missing value")

"""`Columns`: how the columns of one table become standardised numbers, frozen after a warm-up."""

import hashlib
import json
from dataclasses import asdict, dataclass
from functools import cached_property

import numpy as np
from jaxtyping import Float
from numpy.typing import NDArray

from constmem.tabular.encodings import FREEZE, Column, encoded, encoded_names, within_reach
from constmem.tabular.frames import Frame, Kind, aligned, example, other_column, plural


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
            made.append(FREEZE[kind](name, column))
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

    @cached_property
    def fingerprint(self) -> str:
        """The same for the same frozen columns, and no others."""
        return hashlib.sha256(self.text().encode()).hexdigest()

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

    def __call__(self, frame: Frame) -> Float[np.ndarray, "n width"]:
        """The rows as standardised numbers, none of them missing or infinite."""
        frame = self.matched(frame)
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


def refuse_infinite(frame: Frame) -> None:
    """Name the first infinite value, if there is one."""
    where = frame.infinite()
    if where:
        raise ValueError(f"X contains infinity: {where}. Leave the row out, or give NaN for a missing value")

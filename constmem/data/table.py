"""Rows of numbers, from a CSV or Parquet file or arrays: read, checked, split and kept."""

import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import isfinite
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch
from jaxtyping import Float64, Int64
from numpy.typing import NDArray
from torch import Tensor

from constmem.core.checks import dense, known
from constmem.core.files import read_tensors, write_tensors
from constmem.data.rows import place_of, read_text

By = Literal["group", "time"]
KIND, VERSION = "constmem.table", 1
LEAST_ROWS, LEAST_GROUPS = 50, 5
POWER_PLANT = Path(__file__).parent / "power_plant.csv"  # its licence is beside it
LARGEST = 1e18  # in size: squares of what is larger do not fit into float32
TOO_LARGE = "numbers beyond 1e18 in size cannot be learned from; use a larger unit or leave the row out"
NO_NUMBER = (
    "every value must be a number: count dates in days or seconds from a start, replace words by numbers, or "
    "leave the row or column out (only groups may be text)"
)


def power_plant() -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """9,568 hours of a power plant: weather and vacuum, and megawatts (Tüfekci and Kaya 2014, CC BY 4.0).

    The rows come with the package, in `power_plant.csv`, in random order; what they are is written beside it.
    """
    rows = np.loadtxt(POWER_PLANT, delimiter=",", skiprows=1)
    return rows[:, :-1], rows[:, -1]


@dataclass(frozen=True, eq=False)
class Table:
    """Rows with inputs x and outputs y; where there are groups, each is a task of its own.

    Args:
        x, y: inputs and outputs of each row, in float64.
        groups: the number of each row's group; None: all rows are one task.
        name: of the data, for run folders and figures.
        labels: what the groups are called, by their numbers.
        by: how they are split: at random by "group" (by row where there are none), or by "time", the first
            rows of all groups to train on, the last to test on.

    Example:
        >>> table = Table.of([[0.5], [1.0]] * 30, [[1.0], [2.0]] * 30)
        >>> parts = table.parts()
        >>> [len(part) for part in parts]  # to train, validate and test on
        [48, 6, 6]
    """

    x: Float64[Tensor, "n x"]
    y: Float64[Tensor, "n y"]
    groups: Int64[Tensor, " n"] | None = None
    name: str = "table"
    labels: tuple[str, ...] = ()
    by: By = "group"

    @staticmethod
    def of(x: Any, y: Any, groups: Any = None, *, name: str = "table", by: By = "group") -> "Table":
        """A table of arrays: x and y of (rows, columns) or (rows,), groups of numbers or text (rows,)."""
        sides = _side("x", x), _side("y", y)
        numbered, order = None, {}
        if groups is not None:
            try:
                labels = groups.tolist() if hasattr(groups, "tolist") else list(groups)
                order = {label: i for i, label in enumerate(sorted(set(labels)))}
            except (TypeError, RuntimeError) as error:
                raise TypeError(f"groups must be one number or text for each row ({error})") from error
            numbered = torch.tensor([order[label] for label in labels], dtype=torch.int64)
        lengths = {"x": len(sides[0]), "y": len(sides[1])}
        lengths |= {} if numbered is None else {"groups": len(numbered)}
        if len(set(lengths.values())) > 1:
            raise ValueError(f"x, y and groups must have as many rows as each other, not {lengths}")
        return _checked(Table(sides[0], sides[1], numbered, name, tuple(map(str, order)), by))

    @staticmethod
    def read(
        path: str | os.PathLike[str],
        *,
        x: str | Sequence[str],
        y: str | Sequence[str],
        group: str | None = None,
        by: By = "group",
    ) -> "Table":
        """The columns x and y of a CSV or Parquet file; rows of one group together.

        Args:
            path: the file; of ;, tab and comma, what the first line holds most of separates its columns.
            x, y: the name, or the names, of the columns with inputs and outputs: numbers all of them.
            group: name of the column that says which rows belong together; any text.
            by: how to split; by "time", the rows of the file are in its order.
        """
        path = Path(path)
        x, y = _columns("x", x), _columns("y", y)
        names, lines = read_text(path)
        wanted = [*x, *y]
        places = [place_of(name, names, path) for name in wanted]
        group_place = None if group is None else place_of(group, names, path)
        rows, labels = [], []
        for where, cells in lines:
            rows.append([_number(cells[i], f"{where}, column {names[i]!r} of {path}") for i in places])
            labels.append("" if group_place is None else cells[group_place].strip())
        if twice := [name for name in wanted if wanted.count(name) > 1]:
            raise ValueError(f"the column {twice[0]!r} is asked for twice: a column is an input or an output")
        numbers = torch.tensor(rows, dtype=torch.float64).reshape(-1, len(places))
        order = {label: i for i, label in enumerate(dict.fromkeys(labels))}
        groups = None if group is None else torch.tensor([order[label] for label in labels])
        called = () if group is None else tuple(order)
        table = Table(numbers[:, : len(x)], numbers[:, len(x) :], groups, path.name, called, by)
        _varied(table, wanted, path)
        return _checked(table)

    @staticmethod
    def columns(path: str | os.PathLike[str]) -> list[str]:
        """The names of a file's columns."""
        return read_text(Path(path))[0]

    def __len__(self) -> int:
        return self.x.shape[0]

    @property
    def num_groups(self) -> int:
        """How many groups there are."""
        return 1 if self.groups is None else int(self.groups.unique().numel())

    @property
    def statement(self) -> str:
        """What the data are, to stand beside figures made with them."""
        groups = "" if self.groups is None else f" in {self.num_groups:,} groups"
        size = f"{len(self):,} rows{groups}, {self.x.shape[1]} inputs, {self.y.shape[1]} outputs"
        return f"{self.name}: {size}{', split by time' if self.by == 'time' else ''}"

    def take(self, index: Int64[Tensor, " k"]) -> "Table":
        """Some of the rows, in the order of `index`."""
        groups = None if self.groups is None else self.groups[index]
        return replace(self, x=self.x[index], y=self.y[index], groups=groups)

    def parts(self) -> tuple["Table", "Table", "Table"]:
        """Eight, one and one tenths of the rows, or of the groups where there are any: random, always alike.

        By time, they are the first, the next and the last rows of all groups.
        """
        if self.by == "time":
            ends = [len(self) * tenths // 10 for tenths in (0, 8, 9, 10)]
            train, validation, test = (self.take(torch.arange(start, stop)) for start, stop in pairwise(ends))
            return train, validation, test
        owner = torch.arange(len(self)) if self.groups is None else self.groups
        units = owner.unique()
        units = units[torch.randperm(len(units), generator=torch.Generator().manual_seed(0))]
        tenth = max(len(units) // 10, 1)
        shares = units[2 * tenth :], units[:tenth], units[tenth : 2 * tenth]
        train, validation, test = (self.take(torch.isin(owner, share).nonzero()[:, 0]) for share in shares)
        return train, validation, test

    def equals(self, other: object) -> bool:
        """Whether it is a table of the same rows, in the same order."""
        if not isinstance(other, Table):
            return False
        mine, theirs = ([t for t in (of.x, of.y, of.groups) if t is not None] for of in (self, other))
        return self.by == other.by and len(mine) == len(theirs) and all(map(torch.equal, mine, theirs))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the rows, atomically, as a safetensors file."""
        tensors = {"x": self.x, "y": self.y} | ({} if self.groups is None else {"groups": self.groups})
        header = {"format": KIND, "version": str(VERSION), "name": self.name}
        write_tensors(path, tensors, header | {"labels": json.dumps(self.labels), "by": self.by})

    @staticmethod
    def load(path: str | os.PathLike[str]) -> "Table":
        """Read a table that `save` wrote."""
        tensors, header = read_tensors(path, kind=KIND, version=VERSION)
        try:
            labels = tuple(json.loads(header.get("labels", "[]")))
            by: Any = known("way to split rows", header.get("by", "group"), get_args(By))
            table = Table(tensors["x"], tensors["y"], tensors.get("groups"), header["name"], labels, by)
            table._require_sound()
        except (KeyError, ValueError, TypeError, RecursionError) as error:
            raise ValueError(f"{path} is damaged ({error!r}): write the table again") from error
        return table

    def _require_sound(self) -> None:
        """Refuse tensors that cannot be a table's."""
        for side in (self.x, self.y):
            if side.ndim != 2 or side.dtype != torch.float64 or not bool(side.isfinite().all()):
                raise ValueError("its x and y are no rows of finite numbers")
        groups = self.x.new_zeros(len(self), dtype=torch.int64) if self.groups is None else self.groups
        if groups.dtype != torch.int64 or {len(self.y), *groups.shape} != {len(self)} or groups.ndim != 1:
            raise ValueError("its x, y and groups do not have as many rows as each other")


def _side(side: str, numbers: Any) -> Float64[Tensor, "n c"]:
    """Numbers of any array, frame or list as (rows, columns), every one of them finite and not too large."""
    if isinstance(numbers, Tensor):
        dense(side, numbers)
        tensor = numbers.detach().cpu().double()
    else:
        array = np.asarray(numbers)  # of a data frame, too
        if array.dtype.kind not in "biuf":
            array = _converted(side, array)
        tensor = torch.from_numpy(array.astype(np.float64))
    tensor = tensor[:, None] if tensor.ndim == 1 else tensor
    if tensor.ndim != 2:
        raise ValueError(f"{side} has shape {tuple(tensor.shape)}, but (rows, columns) is needed")
    for wrong, why in (
        (~torch.isfinite(tensor), "every number must be finite; leave such rows out"),
        (tensor.abs() > LARGEST, TOO_LARGE),
    ):
        if wrong.any():
            row, column = wrong.nonzero()[0].tolist()
            raise ValueError(f"{side}[{row}, {column}] is {tensor[row, column].item()}: {why}")
    return tensor


def _converted(side: str, array: Any) -> Any:
    """Numbers among other objects; the first that is none is named."""
    for place in np.ndindex(array.shape):
        value = array[place]
        if not isinstance(value, int | float | np.number) or isinstance(value, np.timedelta64):
            raise ValueError(f"{side}[{', '.join(map(str, place))}] is {str(value)[:60]!r}: {NO_NUMBER}")
    return array.astype(np.float64)


def _columns(side: str, given: Any) -> list[str]:
    """The names of columns, from several or from one."""
    names = [given] if isinstance(given, str) else list(given) if isinstance(given, Iterable) else []
    if not names or not all(isinstance(name, str) for name in names):
        raise TypeError(f"{side} must be the name of a column, or a list of names, not {given!r}")
    return names


def _number(cell: str, where: str) -> float:
    try:
        number = float(cell)
    except ValueError:
        shown = repr(cell) if cell.strip() else "empty"
        raise ValueError(f"{where} is {shown}, not a number: {NO_NUMBER}") from None
    if not isfinite(number):
        raise ValueError(f"{where} is {cell.strip()}: every number must be finite; leave the row out")
    if abs(number) > LARGEST:
        raise ValueError(f"{where} is {cell.strip()}: {TOO_LARGE}")
    return number


def _varied(table: Table, names: list[str], path: Path) -> None:
    numbers = torch.cat([table.x, table.y], 1)
    for name, column in zip(names, numbers.unbind(1), strict=True):
        if len(column) and bool((column == column[0]).all()):
            raise ValueError(
                f"the column {name!r} of {path} is {column[0].item()} in all {len(column)} rows: "
                "there is nothing to learn from it; leave it out"
            )


def _checked(table: Table) -> Table:
    known("way to split rows", table.by, get_args(By))
    if len(table) < LEAST_ROWS:
        raise ValueError(
            f"{table.name} has {len(table)} rows, but {LEAST_ROWS} are the fewest that can be split into "
            "rows to train, validate and test on"
        )
    if table.groups is not None and table.num_groups < LEAST_GROUPS:
        raise ValueError(
            f"{table.name} has {table.num_groups} groups, but {LEAST_GROUPS} are the fewest that can be "
            "split: take a column of more groups, or none"
        )
    if table.groups is not None and table.num_groups == len(table):
        raise ValueError(
            f"each of the {len(table)} groups of {table.name} has a single row, so none has both a context "
            "and a target: take a column that several rows share, or none"
        )
    return table

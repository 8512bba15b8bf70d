"""Rows of numbers, from a CSV file or arrays: read, checked, parted and kept."""

import difflib
import json
import os
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float64, Int64
from torch import Tensor

from constmem.core.files import read_tensors, write_tensors
from constmem.data.csv_files import Lines, opened

KIND, VERSION = "constmem.table", 1
LEAST_ROWS, LEAST_GROUPS = 50, 5
LARGEST = 1e18  # in size: squares of what is larger do not fit into float32
TOO_LARGE = "numbers beyond 1e18 in size cannot be learned from; use a larger unit or leave the row out"


@dataclass(frozen=True, eq=False)
class Table:
    """Rows with inputs x and outputs y; where there are groups, each is a task of its own.

    Args:
        x, y: inputs and outputs of each row, in float64.
        groups: the number of each row's group; None: all rows are one task.
        name: of the data, for run folders and figures.
        labels: what the groups are called, by their numbers.

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

    @staticmethod
    def of(x: Any, y: Any, groups: Any = None, *, name: str = "table") -> "Table":
        """A table of arrays: x and y of (rows, columns) or (rows,), groups of numbers or text (rows,)."""
        sides = []
        for side, numbers in (("x", x), ("y", y)):
            here = numbers.detach().cpu() if isinstance(numbers, Tensor) else numbers
            tensor = torch.as_tensor(here, dtype=torch.float64)
            tensor = tensor[:, None] if tensor.ndim == 1 else tensor
            if tensor.ndim != 2:
                raise ValueError(f"{side} has shape {tuple(tensor.shape)}, but (rows, columns) is needed")
            bad = (~torch.isfinite(tensor)).nonzero()
            if len(bad):
                row, column = bad[0].tolist()
                raise ValueError(
                    f"{side}[{row}, {column}] is {tensor[row, column].item()}: every number must be finite; "
                    "leave such rows out"
                )
            far = (tensor.abs() > LARGEST).nonzero()
            if len(far):
                row, column = far[0].tolist()
                raise ValueError(f"{side}[{row}, {column}] is {tensor[row, column].item()}: {TOO_LARGE}")
            sides.append(tensor)
        numbered, order = None, {}
        if groups is not None:
            told = groups.tolist() if hasattr(groups, "tolist") else list(groups)
            order = {label: i for i, label in enumerate(sorted(set(told)))}
            numbered = torch.tensor([order[label] for label in told], dtype=torch.int64)
        lengths = {"x": len(sides[0]), "y": len(sides[1])}
        lengths |= {} if numbered is None else {"groups": len(numbered)}
        if len(set(lengths.values())) > 1:
            raise ValueError(f"x, y and groups must have as many rows as each other, not {lengths}")
        return _checked(Table(sides[0], sides[1], numbered, name, tuple(map(str, order))))

    @staticmethod
    def read(
        path: str | os.PathLike[str], *, x: Sequence[str], y: Sequence[str], group: str | None = None
    ) -> "Table":
        """The columns x and y of a CSV file whose first line names them; rows of one group together.

        Args:
            path: the file; of ;, tab and comma, what the first line holds most of parts its columns.
            x, y: names of the columns with inputs and outputs: numbers all of them.
            group: name of the column that says which rows belong together; any text.
        """
        path = Path(path)
        with _opened(path) as (names, lines):
            wanted = [*x, *y]
            places = [_place(name, names, path) for name in wanted]
            group_place = None if group is None else _place(group, names, path)
            rows, labels = [], []
            for line, cells in lines:
                rows.append(
                    [_number(cells[i], f"line {line}, column {names[i]!r} of {path}") for i in places]
                )
                labels.append("" if group_place is None else cells[group_place].strip())
        _distinct(wanted)
        numbers = torch.tensor(rows, dtype=torch.float64).reshape(-1, len(places))
        order = {label: i for i, label in enumerate(dict.fromkeys(labels))}
        groups = None if group is None else torch.tensor([order[label] for label in labels])
        called = () if group is None else tuple(order)
        table = Table(numbers[:, : len(x)], numbers[:, len(x) :], groups, path.name, called)
        _varied(table, wanted, path)
        return _checked(table)

    @staticmethod
    def columns(path: str | os.PathLike[str]) -> list[str]:
        """The names of a CSV file's columns: its first line."""
        with _opened(Path(path)) as (names, _):
            return names

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
        return f"{self.name}: {len(self):,} rows{groups}, {self.x.shape[1]} inputs, {self.y.shape[1]} outputs"

    def take(self, index: Int64[Tensor, " k"]) -> "Table":
        """Some of the rows, in the order of `index`."""
        groups = None if self.groups is None else self.groups[index]
        return Table(self.x[index], self.y[index], groups, self.name, self.labels)

    def parts(self, *, seed: int = 0) -> tuple["Table", "Table", "Table"]:
        """Eight, one and one tenths of the rows, or of the groups where there are any, chosen at random."""
        owner = torch.arange(len(self)) if self.groups is None else self.groups
        units = owner.unique()
        units = units[torch.randperm(len(units), generator=torch.Generator().manual_seed(seed))]
        tenth = max(len(units) // 10, 1)
        shares = units[2 * tenth :], units[:tenth], units[tenth : 2 * tenth]
        train, validation, test = (self.take(torch.isin(owner, share).nonzero()[:, 0]) for share in shares)
        return train, validation, test

    def equals(self, other: "Table") -> bool:
        """Whether the rows are the same, in the same order."""
        mine, theirs = ([t for t in (of.x, of.y, of.groups) if t is not None] for of in (self, other))
        return len(mine) == len(theirs) and all(map(torch.equal, mine, theirs))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the rows, atomically, as a safetensors file."""
        tensors = {"x": self.x, "y": self.y} | ({} if self.groups is None else {"groups": self.groups})
        header = {"format": KIND, "version": str(VERSION), "name": self.name}
        write_tensors(path, tensors, header | {"labels": json.dumps(self.labels)})

    @staticmethod
    def load(path: str | os.PathLike[str]) -> "Table":
        """Read a table that `save` wrote."""
        tensors, header = read_tensors(path, kind=KIND, version=VERSION)
        try:
            labels = tuple(json.loads(header.get("labels", "[]")))
            return Table(tensors["x"], tensors["y"], tensors.get("groups"), header["name"], labels)
        except (KeyError, ValueError, TypeError) as error:
            raise ValueError(f"{path} is damaged ({error!r}): write the table again") from error


def _opened(path: Path) -> AbstractContextManager[tuple[list[str], Lines]]:
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path} to read a table from")
    return opened(path)


def _place(name: str, names: list[str], path: Path) -> int:
    if name in names:
        if names.count(name) > 1:
            raise ValueError(f"{path} has {names.count(name)} columns {name!r}: give each a name of its own")
        return names.index(name)
    if not any(names):
        raise ValueError(f"{path} is empty, or its first line is: that line names the columns")
    near = difflib.get_close_matches(name, names, n=3)
    hint = f"did you mean {' or '.join(map(repr, near))}?" if near else f"there are {', '.join(names)}"
    raise ValueError(f"{path} has no column {name!r}: {hint}")


def _number(cell: str, where: str) -> float:
    try:
        number = float(cell)
    except ValueError:
        shown = repr(cell) if cell.strip() else "empty"
        raise ValueError(
            f"{where} is {shown}, not a number: correct the cell, leave the row out, or take another column "
            "(only a group may be text)"
        ) from None
    if not isfinite(number):
        raise ValueError(f"{where} is {cell.strip()}: every number must be finite; leave the row out")
    if abs(number) > LARGEST:
        raise ValueError(f"{where} is {cell.strip()}: {TOO_LARGE}")
    return number


def _distinct(wanted: list[str]) -> None:
    twice = {name for name in wanted if wanted.count(name) > 1}
    if twice:
        raise ValueError(f"the column {twice.pop()!r} is asked for twice: a column is an input or an output")


def _varied(table: Table, names: list[str], path: Path) -> None:
    numbers = torch.cat([table.x, table.y], 1)
    for name, column in zip(names, numbers.unbind(1), strict=True):
        if len(column) and bool((column == column[0]).all()):
            raise ValueError(
                f"the column {name!r} of {path} is {column[0].item()} in all {len(column)} rows: "
                "there is nothing to learn from it; leave it out"
            )


def _checked(table: Table) -> Table:
    if len(table) < LEAST_ROWS:
        raise ValueError(
            f"{table.name} has {len(table)} rows, but {LEAST_ROWS} are the fewest that can be parted into "
            "rows to train, validate and test on"
        )
    if table.groups is not None and table.num_groups < LEAST_GROUPS:
        raise ValueError(
            f"{table.name} has {table.num_groups} groups, but {LEAST_GROUPS} are the fewest that can be "
            "parted: take a column of more groups, or none"
        )
    if table.groups is not None and table.num_groups == len(table):
        raise ValueError(
            f"each of the {len(table)} groups of {table.name} has a single row, so none has both a context "
            "and a target: take a column that several rows share, or none"
        )
    return table

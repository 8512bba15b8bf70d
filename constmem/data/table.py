"""Rows of numbers as tasks: from a CSV file or arrays to random contexts and targets."""

import csv
import difflib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float64, Int64
from torch import Tensor

from constmem.data.sizes import draw_skewed, first
from constmem.data.task import Task
from constmem.files import read_tensors, write_tensors
from constmem.state import accumulator

KIND, VERSION = "constmem.table", 1
LEAST_ROWS, LEAST_GROUPS = 50, 5
KEYS = 4096  # rows of a group up to which its rows are shuffled; of more, some are drawn


@dataclass(frozen=True, eq=False)
class Table:
    """Rows with inputs x and outputs y; where there are groups, each is a task of its own.

    Args:
        x, y: inputs and outputs of each row, in float64.
        groups: the number of each row's group; None: all rows are one task.
        name: of the data, for run folders and figures.

    Example:
        >>> table = Table.of([[0.5], [1.0]] * 30, [[1.0], [2.0]] * 30)
        >>> parts = table.parts()
        >>> [len(part) for part in parts]  # to train, validate and test on
        [48, 6, 6]
    """

    x: Float64[Tensor, "n x"]
    y: Float64[Tensor, "n y"]
    groups: Int64[Tensor, "n"] | None = None
    name: str = "table"

    @staticmethod
    def of(x: Any, y: Any, groups: Any = None, *, name: str = "table") -> "Table":
        """A table of arrays: x and y of (rows, columns) or (rows,), groups of whole numbers (rows,)."""
        sides = []
        for side, numbers in (("x", x), ("y", y)):
            tensor = torch.as_tensor(numbers).detach().cpu().double()
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
            sides.append(tensor)
        numbered = None
        if groups is not None:
            numbered = torch.as_tensor(groups).detach().cpu().unique(return_inverse=True)[1].long()
        lengths = {"x": len(sides[0]), "y": len(sides[1])}
        lengths |= {} if numbered is None else {"groups": len(numbered)}
        if len(set(lengths.values())) > 1:
            raise ValueError(f"x, y and groups must have as many rows as each other, not {lengths}")
        return _checked(Table(sides[0], sides[1], numbered, name))

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
        if not path.is_file():
            raise FileNotFoundError(f"there is no file {path} to read a table from")
        with path.open(newline="", encoding="utf-8-sig") as file:
            header = file.readline()
            delimiter = max(",;\t", key=header.count)
            names = [name.strip() for name in next(csv.reader([header], delimiter=delimiter), [])]
            wanted = [*x, *y]
            places = [_place(name, names, path) for name in wanted]
            group_place = None if group is None else _place(group, names, path)
            rows, labels = [], []
            for line, cells in enumerate(csv.reader(file, delimiter=delimiter), start=2):
                if not any(cell.strip() for cell in cells):
                    continue
                if len(cells) != len(names):
                    raise ValueError(f"line {line} of {path} has {len(cells)} cells, its header {len(names)}")
                rows.append(
                    [_number(cells[i], f"line {line}, column {names[i]!r} of {path}") for i in places]
                )
                labels.append("" if group_place is None else cells[group_place].strip())
        _distinct(wanted)
        numbers = torch.tensor(rows, dtype=torch.float64).reshape(-1, len(places))
        order = {label: i for i, label in enumerate(dict.fromkeys(labels))}
        groups = None if group is None else torch.tensor([order[label] for label in labels])
        table = Table(numbers[:, : len(x)], numbers[:, len(x) :], groups, path.name)
        _varied(table, wanted, path)
        return _checked(table)

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

    def take(self, index: Int64[Tensor, "k"]) -> "Table":
        """Some of the rows, in the order of `index`."""
        groups = None if self.groups is None else self.groups[index]
        return Table(self.x[index], self.y[index], groups, self.name)

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
        write_tensors(path, tensors, {"format": KIND, "version": str(VERSION), "name": self.name})

    @staticmethod
    def load(path: str | os.PathLike[str]) -> "Table":
        """Read a table that `save` wrote."""
        tensors, header = read_tensors(path, kind=KIND, version=VERSION)
        return Table(tensors["x"], tensors["y"], tensors.get("groups"), header["name"])


class TableTasks:
    """Random tasks of a table's rows: some are shown as context, others asked for as targets.

    Args:
        table: the rows; those of a task are all of one group, where there are groups.
        device: where the tasks are made.
        max_context, num_targets: of one task at most.
    """

    def __init__(self, table: Table, *, device: torch.device, max_context: int, num_targets: int) -> None:
        owner = torch.zeros(len(table), dtype=torch.long) if table.groups is None else table.groups
        order = owner.argsort(stable=True)
        _, counts = owner.unique(return_counts=True)
        self.x, self.y = (t[order].to(device, accumulator(device)) for t in (table.x, table.y))
        self.counts = counts.to(device)
        self.starts = (counts.cumsum(0) - counts).to(device)
        self.longest = int(counts.max())
        self.max_context, self.num_targets = min(max_context, self.longest), min(num_targets, self.longest)

    def sample(self, batch: int, *, generator: torch.Generator, skew: float = 1.0) -> Task:
        """Tasks of one fixed shape, a context size drawn for each and told by a mask.

        Nc ~ U{0..max} where skew is 1, but a target is left to every task; no target is in its context.
        """
        where = generator.device
        chosen = torch.randint(len(self.counts), (batch,), generator=generator, device=where)
        return self._tasks(chosen.to(self.x.device), generator, skew)

    def each(self, *, seed: int, rounds: int = 1) -> Iterator[Task]:
        """Every group as a task, `rounds` times over; the same tasks for the same seed on any device."""
        generator = torch.Generator().manual_seed(seed)
        for _ in range(rounds):
            for groups in torch.arange(len(self.counts), device=self.x.device).split(64):
                yield self._tasks(groups, generator, 1.0)

    def held_out(self, table: Table, *, seed: int, least: int = 1000) -> Iterator[Task]:
        """Rows that are no context of any task as targets, each task with a random context of these rows.

        Every row is asked for at least once, and few rows several times, until `least` were asked for;
        the same tasks for the same seed on any device.
        """
        generator = torch.Generator().manual_seed(seed)
        x, y = (t.to(self.x) for t in (table.x, table.y))
        for _ in range(-(-least // len(table))):
            order = torch.randperm(len(table), generator=generator).to(self.x.device)
            for rows in order.split(self.num_targets):
                task = self._tasks(torch.zeros(1, dtype=torch.long, device=self.x.device), generator, 1.0)
                yield Task(task.xc, task.yc, x[rows][None], y[rows][None], task.mask_c)

    def everything(self, table: Table, *, limit: int = 10_000) -> Iterator[Task]:
        """The same rows as targets, with all of these rows (the first `limit`) as the context."""
        x, y = (t.to(self.x)[None] for t in (table.x, table.y))
        yield Task(self.x[None, :limit], self.y[None, :limit], x, y)

    def _tasks(self, chosen: Int64[Tensor, "b"], generator: torch.Generator, skew: float) -> Task:
        device, batch = self.x.device, len(chosen)
        sizes = self.counts[chosen]
        most = self.max_context
        drawn = draw_skewed(batch, low=0, high=most, skew=skew, generator=generator).to(device)
        context = torch.minimum(drawn, sizes - 1)
        rows, fresh = self._shuffled(sizes, most + self.num_targets, generator)
        rows = rows + self.starts[chosen][:, None]
        slots = torch.arange(self.num_targets, device=device) + context[:, None]  # behind the context
        mask_c = first(context, most) & fresh[:, :most]
        mask_t = (slots < sizes[:, None]) & fresh.gather(1, slots)
        xc, yc = (t[rows[:, :most]] for t in (self.x, self.y))
        xt, yt = (t[rows.gather(1, slots)] for t in (self.x, self.y))
        return Task(xc, yc, xt, yt, mask_c, mask_t)

    def _shuffled(
        self, sizes: Int64[Tensor, "b"], count: int, generator: torch.Generator
    ) -> tuple[Int64[Tensor, "b n"], Tensor]:
        """Rows of each group in random order, and which of them have not come before."""
        device, batch = self.x.device, len(sizes)
        if self.longest <= KEYS:
            width = max(self.longest, count)
            keys = torch.rand(batch, width, generator=generator, device=generator.device).to(device)
            order = torch.where(first(sizes, width), keys, 2.0).argsort(1)[:, :count]  # the real ones first
            return torch.minimum(order, sizes[:, None] - 1), torch.ones_like(order, dtype=torch.bool)
        u = torch.rand(batch, count, generator=generator, device=generator.device, dtype=torch.float64)
        rows = (u.to(device) * sizes[:, None]).long()
        ordered, order = rows.sort(dim=1, stable=True)
        repeats = torch.zeros_like(ordered, dtype=torch.bool)
        repeats[:, 1:] = ordered[:, 1:] == ordered[:, :-1]
        return rows, ~torch.zeros_like(repeats).scatter(1, order, repeats)


def _place(name: str, names: list[str], path: Path) -> int:
    if name in names:
        return names.index(name)
    near = difflib.get_close_matches(name, names, n=3)
    hint = f"did you mean {' or '.join(map(repr, near))}?" if near else f"there are {', '.join(names)}"
    raise ValueError(f"{path} has no column {name!r}: {hint}")


def _number(cell: str, where: str) -> float:
    try:
        number = float(cell)
    except ValueError:
        shown = repr(cell) if cell.strip() else "empty"
        raise ValueError(f"{where} is {shown}, not a number: correct the cell or leave the row out") from None
    if not isfinite(number):
        raise ValueError(f"{where} is {cell.strip()}: every number must be finite; leave the row out")
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
    return table

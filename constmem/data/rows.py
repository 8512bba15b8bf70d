"""From the rows of a table to tasks: some rows are shown as context, others asked for as targets."""

from collections.abc import Iterator
from dataclasses import replace

import torch
from jaxtyping import Int64
from torch import Tensor

from constmem.core.algebra import accumulator
from constmem.data.sizes import draw_skewed, first
from constmem.data.table import Table
from constmem.data.task import Task

STRETCH = 4096  # rows of a group that are shuffled for a task


class TableTasks:
    """Random tasks of a table's rows: some are shown as context, others asked for as targets.

    Args:
        table: the rows; those of a task are all of one group, where there are groups.
        device: where the tasks are made.
        max_context, num_targets: of one task at most.
    """

    def __init__(self, table: Table, *, device: torch.device, max_context: int, num_targets: int) -> None:
        owner = torch.zeros(len(table), dtype=torch.long) if table.groups is None else table.groups
        order = torch.randperm(len(owner), generator=torch.Generator().manual_seed(0))
        order = order[owner[order].argsort(stable=True)]  # group by group, in random order inside
        _, counts = owner.unique(return_counts=True)
        self.x, self.y = (t[order].to(device, accumulator(device)) for t in (table.x, table.y))
        self.counts = counts.to(device)
        self.starts = (counts.cumsum(0) - counts).to(device)
        self.x_std = self.x.std(0)
        self.longest = int(counts.max())
        self.max_context, self.num_targets = min(max_context, self.longest), min(num_targets, self.longest)

    def sample(
        self, batch: int, *, generator: torch.Generator, skew: float = 1.0, jitter: float = 0.0
    ) -> Task:
        """Tasks of one fixed shape, a context size drawn for each and told by a mask.

        Nc ~ U{0..max} where skew is 1, but a target is left to every task; no target is in its context.
        With jitter, noise of so many standard deviations on the inputs keeps few rows from being
        learned by heart.
        """
        where = generator.device
        chosen = torch.randint(len(self.counts), (batch,), generator=generator, device=where)
        task = self._tasks(chosen.to(self.x.device), generator, skew)
        if jitter == 0:
            return task
        xc, xt = (
            x + jitter * self.x_std * torch.randn(x.shape, generator=generator, device=where).to(x)
            for x in (task.xc, task.xt)
        )
        return replace(task, xc=xc, xt=xt)

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

    def _tasks(self, chosen: Int64[Tensor, " b"], generator: torch.Generator, skew: float) -> Task:
        device, batch, most = self.x.device, len(chosen), self.max_context
        sizes = self.counts[chosen]
        drawn = draw_skewed(batch, low=0, high=most, skew=skew, generator=generator).to(device)
        context = torch.minimum(drawn, sizes - 1)
        rows = self._shuffled(sizes, most + self.num_targets, generator) + self.starts[chosen][:, None]
        slots = torch.arange(self.num_targets, device=device) + context[:, None]  # behind the context
        xc, yc = (t[rows[:, :most]] for t in (self.x, self.y))
        xt, yt = (t[rows.gather(1, slots)] for t in (self.x, self.y))
        return Task(xc, yc, xt, yt, first(context, most), slots < sizes[:, None])

    def _shuffled(
        self, sizes: Int64[Tensor, " b"], count: int, generator: torch.Generator
    ) -> Int64[Tensor, "b n"]:
        """Distinct rows of each group in random order; the last again and again where there are too few.

        Of a long group a stretch is shuffled that starts anywhere; its rows came in random order already.
        """
        device, width = self.x.device, max(min(self.longest, STRETCH), count)
        draws = torch.rand(len(sizes), width + 1, generator=generator, device=generator.device).to(device)
        start = (draws[:, -1:].double() * sizes[:, None]).long()
        real = first(sizes, width)
        order = torch.where(real, draws[:, :-1], 2.0).argsort(1)[:, :count]  # the real ones first
        return (start + torch.minimum(order, sizes[:, None] - 1)) % sizes[:, None]

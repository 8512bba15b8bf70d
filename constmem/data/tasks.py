"""From images and tables to tasks: random pixels or rows as context and targets, made on the device."""

from collections.abc import Iterator
from dataclasses import replace

import torch
from jaxtyping import Float, Int, Int64, UInt8
from torch import Tensor

from constmem.core import checks
from constmem.core.algebra import accumulator
from constmem.data.images import Images
from constmem.data.table import Table
from constmem.data.task import LEAST, Task, draw_sizes, draw_skewed, draw_split, first, spread_sizes

STRETCH = 4096  # rows of a group that are shuffled for a task
SHOWN = 10_000  # rows of a context, at most


def image_tasks(
    pixels: UInt8[Tensor, "b h w c"],
    *,
    generator: torch.Generator,
    max_points: int = 200,
    sizes: tuple[int, int] | None = None,
    padded: bool = False,
) -> Task:
    """Tasks by the reference protocol: one context and one target size for the whole batch.

    Nc ~ U[3, max-3), Nt ~ U[3, max-Nc); the pixels of an image are distinct.

    Args:
        pixels: images, on the device where the tasks are wanted.
        generator: source of all randomness, on the same device; one on the CPU gives the same
            tasks on every device, but chooses the pixels there.
        max_points: a task has fewer points than this: 200 for 32x32, 800 for 64x64, 1600 for 128x128.
        sizes: (Nc, Nt) where they are known already; drawn by `draw_sizes` with a generator on the
            CPU they spare waiting for the device.
        padded: give the sizes by masks over max_points - 1 points instead: shapes never change and
            nothing waits for the device, so that steps can be compiled or captured in a graph.
    """
    _check(pixels)
    if sizes is None:
        _fits("max_points", max_points, pixels)
        if padded:
            split = draw_split(pixels.shape[0], generator=generator, max_points=max_points)
            mask_c, mask_t = (mask.to(pixels.device) for mask in split)
            x, y = _points(pixels, _choose(pixels, max_points - 1, generator))
            return Task(x, y, x, y, mask_c, mask_t)
        sizes = draw_sizes(generator=generator, max_points=max_points)
    n, m = sizes
    _fits("Nc + Nt", n + m, pixels)
    x, y = _points(pixels, _choose(pixels, n + m, generator))
    return Task(x[:, :n], y[:, :n], x[:, n:], y[:, n:])


def static_image_tasks(
    pixels: UInt8[Tensor, "b h w c"],
    *,
    generator: torch.Generator,
    num_context_max: int = 197,
    num_targets: int = 100,
    skew: float = 1.0,
) -> Task:
    """Tasks of one fixed shape, a context size drawn for each image and given by a mask.

    Nc ~ U{3..max} where skew is 1; every target is real and none of them is in the context.
    Nothing waits for the device, so that steps on these tasks can be compiled or captured in a graph.

    Args:
        pixels: images, on the device where the tasks are wanted.
        generator: source of all randomness, on the same device.
        num_context_max: slots of the context.
        num_targets: targets of each image.
        skew: how strongly small contexts are preferred; at 2 context sizes are about as frequent
            as the targets that the reference protocol scores at them.
    """
    _check(pixels)
    n = num_context_max
    if n < LEAST:
        raise ValueError(f"num_context_max is {n}, but a context has {LEAST} points or more")
    checks.positive("num_targets", num_targets)
    _fits("num_context_max + num_targets", n + num_targets, pixels)
    counts = draw_skewed(pixels.shape[0], low=LEAST, high=n, skew=skew, generator=generator)
    x, y = _points(pixels, _choose(pixels, n + num_targets, generator))
    return Task(x[:, :n], y[:, :n], x[:, n:], y[:, n:], first(counts.to(pixels.device), n))


def evaluation_tasks(images: Images, *, seed: int, batch: int = 20, max_points: int = 200) -> Iterator[Task]:
    """A fixed evaluation set: every image once, by the reference protocol but for one thing.

    The sizes of the batches are spread evenly over those of the protocol (`spread_sizes`), and the
    images shuffled, so that the mean over a few batches does not hang on which sizes came up. All is
    drawn on the CPU: the same seed gives the same tasks on any device; they are made where the images are.
    """
    checks.positive("batch", batch)
    _fits("max_points", max_points, images.pixels)
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(images), generator=generator).to(images.pixels.device).split(batch)
    sizes = spread_sizes(len(order), generator=generator, max_points=max_points)
    return (
        image_tasks(images.pixels[index], generator=generator, sizes=size)
        for index, size in zip(order, sizes, strict=True)
    )


def image_points(
    pixels: UInt8[Tensor, "b h w c"],
) -> tuple[Float[Tensor, "b n 2"], Float[Tensor, "b n c"]]:
    """Every pixel of every image as a point, row by row."""
    _check(pixels)
    b, h, w, _ = pixels.shape
    return _points(pixels, torch.arange(h * w, device=pixels.device).expand(b, -1))


def augmented(
    pixels: UInt8[Tensor, "b h w c"], how: str, *, generator: torch.Generator
) -> UInt8[Tensor, "b h w c"]:
    """Half of the images changed at random, half of them as they are.

    Args:
        pixels: images, square where they are to be turned.
        how: "none", "mirror" (left and right swapped) or "turn" (one of the eight symmetries each).
        generator: source of all randomness, on the device of the images.
    """
    if how == "none":
        return pixels
    size = 4, len(pixels), 1, 1, 1
    chance = torch.rand(size, generator=generator, device=generator.device).to(pixels.device) < 0.5
    if how == "mirror":
        return torch.where(chance[0], pixels.flip(2), pixels)
    if how != "turn" or pixels.shape[1] != pixels.shape[2]:
        raise ValueError(f"cannot augment images of {tuple(pixels.shape[1:3])} pixels by {how!r}")
    turned = torch.where(chance[1], pixels.flip(1), pixels)
    turned = torch.where(chance[2], turned.flip(2), turned)
    turned = torch.where(chance[3], turned.transpose(1, 2), turned)
    return torch.where(chance[0], turned, pixels)


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
        """Tasks of one fixed shape, a context size drawn for each and given by a mask.

        Nc ~ U{0..max} where skew is 1, but a target is left to every task; no target is in its context.
        With jitter, noise of so many standard deviations on the inputs keeps few rows from being
        memorised.
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

    def everything(self, table: Table) -> Iterator[Task]:
        """The same rows as targets, with all of these rows (the first `SHOWN`) as the context."""
        x, y = (t.to(self.x)[None] for t in (table.x, table.y))
        yield Task(self.x[None, :SHOWN], self.y[None, :SHOWN], x, y)

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


def _choose(pixels: Tensor, count: int, generator: torch.Generator) -> Int[Tensor, "b n"]:
    """Distinct pixels in random order: the places of the largest of independent random numbers.

    They must come sorted: an unsorted top-k may follow the order of pixels, which would separate
    context from targets.
    """
    b, h, w, _ = pixels.shape
    keys = torch.rand(b, h * w, generator=generator, device=generator.device)
    return keys.topk(count, sorted=True).indices.to(pixels.device)


def _points(pixels: Tensor, chosen: Int[Tensor, "b n"]) -> tuple[Tensor, Tensor]:
    """x = (row, col) in [-1, 1] and y in [-0.5, 0.5] of the chosen pixels.

    Whole numbers are divided once, by a number on the device: every device rounds that alike.
    """
    b, h, w, c = pixels.shape
    rows, cols = chosen // w, chosen % w
    x = torch.stack(
        [_ratio(2 * rows - (h - 1), max(h - 1, 1)), _ratio(2 * cols - (w - 1), max(w - 1, 1))], -1
    )
    values = pixels.reshape(b, h * w, c).gather(1, chosen[..., None].expand(-1, -1, c))
    return x, _ratio(2 * values.int() - 255, 510)


def _ratio(numerator: Tensor, denominator: int) -> Tensor:
    return numerator.float() / torch.full((), float(denominator), device=numerator.device)


def _check(pixels: Tensor) -> None:
    if pixels.dtype != torch.uint8 or pixels.ndim != 4:
        raise ValueError(
            f"pixels are {pixels.dtype} of shape {tuple(pixels.shape)}, but uint8 of shape "
            "(batch, height, width, channels) is needed"
        )


def _fits(name: str, count: int, pixels: Tensor) -> None:
    h, w = pixels.shape[1:3]
    if count > h * w:
        raise ValueError(
            f"{name} is {count}, but an image of {h}x{w} has only {h * w} pixels: take fewer points, "
            "or load the images at a larger size"
        )

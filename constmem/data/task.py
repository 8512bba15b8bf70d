"""A batch of regression tasks, and how many context and target points each gets by the reference protocol."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from constmem.core import checks

LEAST = 3  # of context points, and of targets


@dataclass(frozen=True, eq=False)
class Task:
    """A batch of tasks of the same shape; what the masks leave out (True = real) may hold anything.

    Args:
        xc, yc: context inputs and outputs.
        xt, yt: target inputs and outputs.
        mask_c, mask_t: which context and target points are real; None: all of them.
        exact: log-likelihood of each target (0 where masked out) under the process that it came from,
            where that is known: on the average no model has a higher one.

    Example:
        Masked targets do not count.

        >>> x, y = torch.zeros(1, 3, 1), torch.zeros(1, 3, 1)
        >>> task = Task(x, y, x, y, mask_t=torch.tensor([[True, True, False]]))
        >>> task.point_log_likelihood(torch.tensor([[1.0, 3.0, 100.0]])).tolist()
        [[1.0, 3.0, 0.0]]
    """

    xc: Float[Tensor, "b n x"]
    yc: Float[Tensor, "b n y"]
    xt: Float[Tensor, "b m x"]
    yt: Float[Tensor, "b m y"]
    mask_c: Bool[Tensor, "b n"] | None = None
    mask_t: Bool[Tensor, "b m"] | None = None
    exact: Float[Tensor, "b m"] | None = None

    def __post_init__(self) -> None:
        device = self.xc.device
        pairs = (("c", self.xc, self.yc, self.mask_c), ("t", self.xt, self.yt, self.mask_t))
        for side, x, y, mask in pairs:
            checks.points(f"x{side}", x, self.xc.shape[-1], device=device)
            checks.points(f"y{side}", y, self.yc.shape[-1], like=x, device=device)
            if mask is not None:
                checks.mask(mask, x)
        if self.xc.shape[0] != self.xt.shape[0]:
            raise ValueError(
                f"the context is a batch of {self.xc.shape[0]}, the targets one of {self.xt.shape[0]}: "
                "they must be the same"
            )

    @staticmethod
    def stack(tasks: Sequence["Task"]) -> "Task":
        """Batches of any sizes as one batch: padded to the largest of them, with masks."""
        if len(tasks) == 1:
            return tasks[0]
        xc, yc, mask_c = _padded([(task.xc, task.yc, task.mask_c) for task in tasks])
        xt, yt, mask_t = _padded([(task.xt, task.yt, task.mask_t) for task in tasks])
        known = [F.pad(t.exact, (0, xt.shape[1] - t.exact.shape[1])) for t in tasks if t.exact is not None]
        exact = torch.cat(known) if len(known) == len(tasks) else None
        return Task(xc, yc, xt, yt, mask_c, mask_t, exact)

    @property
    def batch(self) -> int:
        """How many tasks there are."""
        return self.xc.shape[0]

    @property
    def num_context(self) -> Int[Tensor, " b"]:
        """How many real context points each task has."""
        return _count(self.xc, self.mask_c)

    @property
    def num_targets(self) -> Int[Tensor, " b"]:
        """How many real target points each task has: what a sum of log-likelihoods is divided by."""
        return _count(self.xt, self.mask_t)

    def point_log_likelihood(self, log_prob: Float[Tensor, "b m *y"]) -> Float[Tensor, "b m"]:
        """The log-likelihood of each target: summed over channels where there are any, 0 if masked out."""
        point = log_prob.sum(-1) if log_prob.ndim == 3 else log_prob
        return point if self.mask_t is None else torch.where(self.mask_t, point, 0.0)

    def to(self, device: torch.device | str) -> "Task":
        """The same tasks on another device."""
        parts: dict[str, Any] = {name: t if t is None else t.to(device) for name, t in vars(self).items()}
        return Task(**parts)


def _padded(sides: list[tuple[Tensor, Tensor, Tensor | None]]) -> tuple[Tensor, Tensor, Tensor | None]:
    """Points of several batches as one batch, with zeros after the fewer ones, and a mask where needed."""
    xs, ys, masks = zip(*sides, strict=True)
    rest = [max(x.shape[1] for x in xs) - x.shape[1] for x in xs]
    x, y = (torch.cat([F.pad(p, (0, 0, 0, r)) for p, r in zip(ps, rest, strict=True)]) for ps in (xs, ys))
    if not any(rest) and all(mask is None for mask in masks):
        return x, y, None
    real = (
        torch.ones(x.shape[:2], dtype=torch.bool, device=x.device) if mask is None else mask
        for x, mask in zip(xs, masks, strict=True)
    )
    return x, y, torch.cat([F.pad(mask, (0, r)) for mask, r in zip(real, rest, strict=True)])


def _count(points: Tensor, mask: Tensor | None) -> Tensor:
    if mask is not None:
        return mask.sum(-1)
    return torch.full(points.shape[:1], points.shape[1], device=points.device)


# Sizes


def draw_counts(
    batch: int, *, generator: torch.Generator, max_points: int
) -> tuple[Int[Tensor, " b"], Int[Tensor, " b"]]:
    """Context and target counts for each task: Nc ~ U{3..max-4}, then Nt ~ U{3..max-1-Nc}."""
    if max_points < 2 * LEAST + 1:
        raise ValueError(
            f"max_points is {max_points}, but a task has at least {LEAST} context and {LEAST} target "
            f"points and fewer than max_points in all: {2 * LEAST + 1} is the smallest that works"
        )
    u = torch.rand(2, batch, generator=generator, device=generator.device, dtype=torch.float64)
    return _counts(u, max_points)


def _counts(u: Float[Tensor, "2 b"], max_points: int) -> tuple[Int[Tensor, " b"], Int[Tensor, " b"]]:
    """Counts from numbers of the unit square."""
    context = LEAST + (u[0] * (max_points - 2 * LEAST)).long()
    targets = LEAST + (u[1] * (max_points - LEAST - context)).long()
    return context, targets


def spread_sizes(batches: int, *, generator: torch.Generator, max_points: int) -> list[tuple[int, int]]:
    """Context and target counts for batches to evaluate on, distributed as those of `draw_sizes` but evenly.

    Log-likelihood depends so much on the context size that forty sizes drawn at random leave a mean
    uncertain by 0.05 and more. These are a lattice of the unit square from a random start: batch k of n
    gets (k / n, k g) modulo 1, with g the golden ratio.
    """
    start = torch.rand(2, 1, generator=generator, dtype=torch.float64)
    k = torch.arange(batches, dtype=torch.float64)
    lattice = torch.stack([(k + start[0]) / batches, (start[1] + k * 0.6180339887498949) % 1.0])
    context, targets = _counts(lattice, max_points)
    return list(zip(context.tolist(), targets.tolist(), strict=True))


def draw_sizes(*, generator: torch.Generator, max_points: int) -> tuple[int, int]:
    """One context and one target count for a whole batch, as numbers.

    Numbers must reach the host: with a generator on a GPU the host waits for it. A generator on
    the CPU spares that.
    """
    context, targets = draw_counts(1, generator=generator, max_points=max_points)
    n, m = torch.cat([context, targets]).tolist()
    return n, m


def draw_split(
    batch: int, *, generator: torch.Generator, max_points: int
) -> tuple[Bool[Tensor, "b n"], Bool[Tensor, "b n"]]:
    """One context and one target count for a whole batch, as masks of max_points - 1 points in random order.

    The first Nc are the context and the next Nt the targets; nothing reaches the host.
    """
    context, targets = draw_counts(1, generator=generator, max_points=max_points)
    place = torch.arange(max_points - 1, device=generator.device).expand(batch, -1)
    return place < context, (place >= context) & (place < context + targets)


def draw_skewed(
    batch: int, *, low: int, high: int, skew: float, generator: torch.Generator
) -> Int[Tensor, " b"]:
    """Counts from low to high whose frequency falls like (1 - position)^(skew - 1).

    A skew of 1 is uniform; one of 2 falls linearly, as the number of targets of the reference
    protocol does, so that a context size is trained on about as often as targets are scored at it.
    """
    if skew <= 0:
        raise ValueError(f"skew is {skew}, but must be above 0 (1: uniform; more: smaller counts)")
    u = torch.rand(batch, generator=generator, device=generator.device, dtype=torch.float64)
    position = 1 - (1 - u) ** (1 / skew)  # the inverse of the cumulative distribution
    return low + (position * (high + 1 - low)).long().clamp_max(high - low)


def first(counts: Int[Tensor, " b"], slots: int) -> Bool[Tensor, "b n"]:
    """A mask whose first `counts` of `slots` points are real."""
    return torch.arange(slots, device=counts.device) < counts[:, None]

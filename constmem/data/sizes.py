"""How many context and target points a task gets, by the reference protocol."""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

LEAST = 3  # of context points, and of targets


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

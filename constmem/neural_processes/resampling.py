"""Points drawn from points with replacement: in an order of their own, from the real ones only."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from constmem.core.algebra import accumulator
from constmem.core.fold import Chunk


def ordered(x: Tensor, y: Tensor, mask: Tensor | None) -> Chunk:
    """The points in an order that depends on what they are, not on how they came; real ones first."""
    points = torch.cat([x, y], -1).to(accumulator(x.device))
    weights = torch.arange(2, points.shape[-1] + 2, dtype=points.dtype, device=points.device).sqrt()
    key = (points * weights).sum(-1)  # no two different points in practice have the same
    if mask is not None:
        key = key.masked_fill(~mask, float("inf"))
    order = key.argsort(dim=-1, stable=True)
    x, y = (t.gather(1, order[..., None].expand_as(t)) for t in (x, y))
    return x, y, None if mask is None else mask.gather(1, order)


def drawn(
    uniforms: Float[Tensor, "2 #b k n"], x: Float[Tensor, "b n x"], mask: Tensor | None
) -> Int[Tensor, "2 b k n"]:
    """Indices of points drawn with replacement from the real ones, wherever those are."""
    b, n = x.shape[:2]
    if mask is None:
        return (uniforms * n).long().clamp_max(n - 1).expand(2, b, -1, -1)
    count = mask.sum(-1)[:, None, None]
    which = torch.minimum((uniforms * count).long(), count - 1).clamp_min(0)
    numbers = torch.arange(1, n + 1, device=x.device).expand(b, n).contiguous()
    place = torch.searchsorted(mask.cumsum(-1), numbers) % max(n, 1)  # of the first real point, the second...
    return place[None, :, None].expand_as(which).gather(-1, which)


def picked(points: Float[Tensor, "b k n p"], draws: Int[Tensor, "b k n"]) -> Float[Tensor, "b k n p"]:
    """The points that were drawn, of each version."""
    return points.gather(2, draws[..., None].expand(-1, -1, -1, points.shape[-1]))


def repeated(points: Tensor, k: int) -> Tensor:
    """The same points for each of k versions, without a copy."""
    return points[:, None].expand(points.shape[0], k, *points.shape[1:])

"""Trees whose leaves are features: grown greedily on warm-up rows, one test a level for all of its nodes."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

BINS = 32  # thresholds are quantiles between them
RATE = 0.3  # part of a tree's fit that the trees after it no longer see
SHRINK = 3.0  # rows of zeros that every leaf is thought to hold


def grow(
    z: Float[Tensor, "n d"], y: Float[Tensor, "n k"], *, count: int, depth: int
) -> tuple[Int[Tensor, "t l"], Float[Tensor, "t l"]]:
    """Columns and thresholds tested at each level of `count` trees, each grown on what the last ones left."""
    levels = torch.linspace(0, 1, BINS + 1, dtype=torch.float64)[1:-1]
    edges = torch.quantile(z, levels, 0).mT.contiguous()
    bins = torch.searchsorted(edges, z.mT.contiguous()).mT  # (n, d): z > edges[bin - 1]
    left = y - y.mean(0)
    columns, thresholds = [], []
    for _ in range(count):
        leaf = torch.zeros(len(z), dtype=torch.int64)
        for _ in range(depth):
            column, edge = divmod(_best(leaf, bins, left), BINS - 1)
            columns.append(column)
            thresholds.append(float(edges[column, edge]))
            leaf = 2 * leaf + (bins[:, column] > edge)
        rows = _sums(leaf, torch.ones_like(left[:, :1]), 2**depth)
        left = left - RATE * (_sums(leaf, left, 2**depth) / (rows + SHRINK))[leaf]
    shape = count, depth
    return torch.tensor(columns).view(shape), torch.tensor(thresholds, dtype=torch.float64).view(shape)


def leaves(
    z: Float[Tensor, "n d"], columns: Int[Tensor, "t l"], thresholds: Float[Tensor, "t l"]
) -> Float[Tensor, "n p"]:
    """Which leaf of each tree a row falls into, as one-hot numbers."""
    count, depth = columns.shape
    powers = 2 ** torch.arange(depth - 1, -1, -1)
    leaf = ((z[:, columns] > thresholds) * powers).sum(-1)  # (n, t)
    made = z.new_zeros(len(z), count, 2**depth)
    return made.scatter_(2, leaf[..., None], 1.0).flatten(1)


def _best(leaf: Tensor, bins: Tensor, left: Tensor) -> int:
    """The split, column * (BINS - 1) + edge, that explains most of what is left if made in every leaf."""
    n, d = bins.shape
    leaves = int(leaf.max()) + 1
    cell = (leaf[:, None] * d + torch.arange(d)) * BINS + bins  # (n, d)
    shape = leaves, d, BINS
    rows = _sums(cell.flatten(), left.new_ones(n * d, 1), leaves * d * BINS).view(shape).cumsum(2)
    gain = left.new_zeros(d, BINS - 1)
    for target in left.mT:
        sums = _sums(cell.flatten(), target[:, None].expand(n, d).reshape(-1, 1), leaves * d * BINS)
        sums = sums.view(shape).cumsum(2)
        low, high = sums[..., :-1], sums[..., -1:] - sums[..., :-1]
        high_rows = rows[..., -1:] - rows[..., :-1]
        gain += (low.square() / (rows[..., :-1] + SHRINK) + high.square() / (high_rows + SHRINK)).sum(0)
    return int(gain.argmax())


def _sums(index: Tensor, values: Tensor, size: int) -> Tensor:
    """Sums of values by index, (size, k)."""
    return values.new_zeros(size, values.shape[1]).index_add_(0, index, values)

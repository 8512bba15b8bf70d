"""`Features`: fixed nonlinear features of numeric columns, frozen after a warm-up; trees give some."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Float, Int
from torch import Tensor

from constmem.tabular.kernel import Kernel, side_by_side, times_upper

SIZE = 762
WARM = 2048  # rows that inducing points and lengths are chosen among
FEW = 64  # inducing points, however many columns there are
FEWEST = 8  # rows that lengths can be learned from
CLIP = 4.0  # deviations: what lies further out is no further from anything
PIECE = 512  # rows at once: what is computed of them fits into a processor's cache
KNOTS = 64  # quantiles kept of each column
TREES, DEPTH = 8, 4
GROWN = 1024, 4  # rows that trees see, at most, and one of how many: trees that saw all targets overfit
PRODUCTS, FAR = 16, 8.0  # columns that are multiplied with one another, clipped at so many deviations
RANK = 3.0**0.5  # ranks are spread evenly over -RANK to RANK: one deviation wide, as the columns are
BINS = 32  # thresholds are quantiles between them
RATE = 0.3  # part of a tree's fit that the trees after it no longer see
SHRINK = 3.0  # rows of zeros that every leaf is thought to hold


@dataclass(frozen=True, eq=False)
class Features:
    """Features of rows in groups, frozen after a warm-up: the same rows always give the same features.

    The constant; the columns; their ranks in the warm-up; products of the columns that matter most; a
    kernel's inducing points, whitened, so that inner products of features are the kernel's; leaves of trees.

    Attributes:
        centre, scale: mean and deviation of each column.
        knots: quantiles of each column, in deviations.
        rates, share: of the kernel.
        points: the inducing points, in deviations.
        columns, thresholds: that trees test, level by level.

    Example:
        >>> x = torch.randn(50, 3, dtype=torch.float64)
        >>> features = Features.anchor(x, seed=0)
        >>> torch.allclose(features(x[:7]), features(x)[:7], atol=1e-6)
        True
    """

    centre: Float[Tensor, " d"]
    scale: Float[Tensor, " d"]
    knots: Float[Tensor, "d q"]
    rates: Float[Tensor, "2 e"]
    share: Float[Tensor, ""]
    points: Float[Tensor, "m d"]
    columns: Int[Tensor, "t l"]
    thresholds: Float[Tensor, "t l"]

    def __post_init__(self) -> None:
        where = self._coordinates(self.points)
        kernel = Kernel(self.rates, self.share)
        d = len(self.centre)
        chosen = self.rates[0, :d].argsort(descending=True, stable=True)[:PRODUCTS]
        made = kernel, where, kernel.whitener(where), chosen[_pairs(d)]
        object.__setattr__(self, "_made", made)  # of the rest: not remembered

    @staticmethod
    def anchor(
        x: Float[Tensor, "n d"], y: Float[Tensor, "n k"] | None = None, *, seed: int = 0, size: int = SIZE
    ) -> "Features":
        """Features of at most about `size` numbers a row, made by warm-up rows.

        Args:
            x: rows without missing or infinite values, at least one; of many, some are drawn.
            y: their targets; without them lengths are the usual ones, and no trees are grown.
        """
        if not len(x) or not x.shape[1]:
            raise ValueError(f"features need a row and a column at least, not {tuple(x.shape)}")
        random = torch.Generator().manual_seed(seed)
        rows = torch.randperm(len(x), generator=random)[:WARM]
        x = x[rows].double()
        d = x.shape[1]
        centre, scale = x.mean(0), x.std(0, correction=0)
        scale = torch.where(scale > 1e-9 * centre.abs() + 1e-300, scale, 1.0)
        z = (x - centre) / scale
        knots = torch.quantile(z, torch.linspace(0, 1, KNOTS, dtype=torch.float64), 0).mT.contiguous()
        u = _coordinates(z, knots)
        kernel, tests = Kernel.usual(d), (torch.zeros(0, DEPTH).long(), torch.zeros(0, DEPTH).double())
        if y is not None and len(x) >= FEWEST:
            y = y[rows].double()
            y = (y - y.mean(0)) / y.var(0, correction=0).mean().sqrt().clamp(min=1e-12)
            kernel = Kernel.learned(u, y, random)
            some = min(GROWN[0], len(x) // GROWN[1])
            if some >= 2**DEPTH:
                tests = grow(z[:some], y[:some], count=TREES, depth=DEPTH)
        used = 1 + 2 * d + _pairs(d).shape[1] + len(tests[0]) * 2**DEPTH
        room = max(size - used, FEW)
        points = z[kernel.inducing(u, room)]
        return Features(centre, scale, knots, kernel.rates, kernel.share, points, *tests)

    def __call__(self, x: Float[Tensor, "n d"]) -> Float[Tensor, "n p"]:
        """Features of rows, in float64."""
        made = x.new_empty(len(x), self.width, dtype=torch.float64)
        group, whitener = self.groups.get("kernel", slice(0)), self._made[2]  # type: ignore[attr-defined]

        def fill(rows: slice) -> None:
            torch.cat(self._parts(x[rows]), 1, out=made[rows])
            times_upper(made[rows, group], whitener)

        side_by_side(fill, [slice(start, start + PIECE) for start in range(0, len(x), PIECE)])
        return made

    def predict(
        self, x: Float[Tensor, "n d"], weights: Sequence[Float[Tensor, "p k"]]
    ) -> list[Float[Tensor, "n k"]]:
        """The products of features and each of the weights: far cheaper than the features."""
        group, whitener = self.groups.get("kernel", slice(0)), self._made[2]  # type: ignore[attr-defined]
        every = torch.cat([*weights], 1)
        every[group] = whitener @ every[group]  # the weights of covariances that are not whitened
        piece = x.new_empty(min(len(x), PIECE), self.width, dtype=torch.float64)
        made = [torch.cat(self._parts(rows), 1, out=piece[: len(rows)]) @ every for rows in x.split(PIECE)]
        return list(torch.cat(made).split([w.shape[1] for w in weights], 1))

    def _parts(self, x: Tensor) -> list[Tensor]:
        """Features of a few rows by group, but covariances with the inducing points not whitened yet."""
        kernel, where, _, pairs = self._made  # type: ignore[attr-defined]
        z = (x.double() - self.centre) / self.scale
        u = self._coordinates(z)
        left, right = z.clamp(-FAR, FAR)[:, pairs].unbind(1)
        covariances = kernel(u, where) if len(where) else z[:, :0]
        trees = leaves(z, self.columns, self.thresholds)
        return [torch.ones_like(z[:, :1]), z, u[:, z.shape[1] :], left * right, covariances, trees]

    @cached_property
    def groups(self) -> dict[str, slice]:
        """Which features belong together, by name."""
        d, trees = len(self.centre), len(self.columns) * 2**DEPTH
        products, points = _pairs(d).shape[1], len(self.points)
        sizes = {"constant": 1, "columns": d, "ranks": d, "products": products, "kernel": points}
        made, start = {}, 0
        for name, size in {**sizes, "trees": trees}.items():
            if size:
                made[name] = slice(start, start + size)
            start += size
        return made

    @cached_property
    def width(self) -> int:
        """Number of features."""
        stop: int = max(group.stop for group in self.groups.values())
        return stop

    @property
    def nbytes(self) -> int:
        """Bytes of all that must be remembered."""
        return sum(t.nbytes for t in self.tensors().values())

    def tensors(self) -> dict[str, Tensor]:
        """All it is made of, by name."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__}

    @staticmethod
    def of(tensors: dict[str, Tensor]) -> "Features":
        """The features made of what `tensors` gave; refuses what does not fit together."""
        made = Features(**tensors)
        (d,), trees = made.centre.shape, made.columns
        wide = {*made.scale.shape, made.knots.shape[0], made.points.shape[1]} == {d}
        if not wide or trees.ndim != 2 or trees.shape != made.thresholds.shape:
            raise ValueError("holds features whose shapes do not fit each other")
        if bool(((trees < 0) | (trees >= d)).any()):
            raise ValueError("holds trees that test columns which are not there")
        return made

    def _coordinates(self, z: Tensor) -> Tensor:
        return _coordinates(z, self.knots)


def _pairs(columns: int) -> Tensor:
    """Which of the columns that matter most are multiplied, (2, pairs)."""
    count = min(columns, PRODUCTS)
    return torch.triu_indices(count, count)


def _coordinates(z: Tensor, knots: Tensor) -> Tensor:
    """Where rows lie for the kernel: columns, clipped, and their ranks in the warm-up, (n, 2 d)."""
    across = z.mT.contiguous()
    below = torch.searchsorted(knots, across) + torch.searchsorted(knots, across, right=True)
    ranks = (below.mT.double() / knots.shape[1] - 1.0) * RANK
    return torch.cat([z.clamp(-CLIP, CLIP), ranks], 1)


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

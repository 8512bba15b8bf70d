"""`Features`: fixed nonlinear features of numeric columns, frozen after a warm-up; trees give some."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from jaxtyping import Float, Int
from torch import Tensor

from constmem.core.moments import Moments
from constmem.tabular.evidence import Posterior, posterior
from constmem.tabular.kernel import CLIP, Kernel, coordinates, side_by_side, times_upper
from constmem.tabular.lengths import learned, placed

SIZE = 756
WARM = 2048  # rows that inducing points are chosen among
FEW = 64  # inducing points, however many columns there are
FEWEST = 8  # rows that lengths can be learned from
PIECE = 512  # rows at once: what is computed of them fits into a processor's cache
KNOTS = 64  # quantiles kept of each column
TREES, DEPTH = 8, 4
ENOUGH = 1.5  # rows an inducing point, so that points move to what rows show and not to their noise
GROWN = 1024, 4  # rows that trees see, at most, and one of how many: trees that saw all targets overfit
PRODUCTS, FAR = 16, 8.0  # columns that are multiplied with one another, clipped at so many deviations
FINER = 16.0  # how much shorter the lengths of a second kernel are, where the first has no use for the room
BINS = 32  # thresholds are quantiles between them
RATE = 0.3  # part of a tree's fit that the trees after it no longer see
SHRINK = 3.0  # rows of zeros that every leaf is thought to hold


@dataclass(frozen=True, eq=False)
class Features:
    """Features of rows in groups, frozen after a warm-up: the same rows always give the same features.

    The constant; the columns; their ranks in the warm-up; products of columns that matter most; a kernel's
    inducing points, whitened, so that inner products of features are the kernel's; leaves of trees; a finer
    kernel's points, if the first one's lengths are so long that a few points say all about it. Products, or
    products and trees, are left out where more inducing points have the larger evidence.

    Attributes:
        centre, scale: mean and deviation of each column.
        knots: quantiles of each column, in deviations.
        rates, share: of the kernel.
        points: the inducing points: columns and ranks as the kernel takes them; of older ones columns alone.
        columns, thresholds: that trees test, level by level.
        multiplied: columns that are multiplied with one another; None: those of the shortest lengths.
        finer: the inducing points of the finer kernel, likewise.

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
    multiplied: Int[Tensor, " c"] | None = None  # both are None in what was saved before there were any
    finer: Float[Tensor, "f d"] | None = None

    @cached_property
    def kernels(self) -> dict[str, tuple[Kernel, Float[Tensor, "m e"], Float[Tensor, "m m"]]]:
        """Kernels by the names of their groups, where their inducing points lie, and their whiteners."""
        made = {}
        first = Kernel(self.rates, self.share)
        for name, kernel, points in (
            ("kernel", first, self.points),
            ("finer", first.finer(FINER, extent=CLIP), self.finer),
        ):
            if points is not None and len(points):
                old = points.shape[1] == len(self.centre)
                where = coordinates(points, self.knots) if old else points.double()
                made[name] = kernel, where, kernel.whitener(where)
        return made

    @cached_property
    def pairs(self) -> Int[Tensor, "2 pairs"]:
        """Columns whose products are features."""
        columns = _shortest(self.rates) if self.multiplied is None else self.multiplied
        return columns[_pairs(len(columns))]

    @staticmethod
    def anchor(
        x: Float[Tensor, "n d"], y: Float[Tensor, "n k"] | None = None, *, seed: int = 0, size: int = SIZE
    ) -> "Features":
        """Features of at most about `size` numbers a row, made by warm-up rows.

        Whether there are products and trees is decided by evidence; the room that is left is the kernel's.

        Args:
            x: rows without missing or infinite values, at least one; of many, some are drawn.
            y: their targets; without them lengths are the usual ones, and no trees are grown.
        """
        if not len(x) or not x.shape[1]:
            raise ValueError(f"features need a row and a column at least, not {tuple(x.shape)}")
        random = torch.Generator().manual_seed(seed)
        rows, d = torch.randperm(len(x), generator=random), x.shape[1]
        every, x = x[rows].double(), x[rows[:WARM]].double()
        centre, scale = x.mean(0), x.std(0, correction=0)
        scale = torch.where(scale > 1e-9 * centre.abs() + 1e-300, scale, 1.0)
        z = (x - centre) / scale
        knots = torch.quantile(z, torch.linspace(0, 1, KNOTS, dtype=torch.float64), 0).mT.contiguous()
        u = coordinates((every - centre) / scale, knots)
        kernel, tests = Kernel.usual(d), (torch.zeros(0, DEPTH).long(), torch.zeros(0, DEPTH).double())
        if y is not None and len(x) >= FEWEST:
            y = y[rows].double()
            y = (y - y.mean(0)) / y.var(0, correction=0).mean().sqrt().clamp(min=1e-12)
            kernel = learned(u, y, random)
            some = min(GROWN[0], len(x) // GROWN[1])
            if some >= 2**DEPTH:
                tests = grow(z[:some], y[:some], count=TREES, depth=DEPTH)
        warm = u[:WARM]
        room, fine = size - 1 - 2 * d, kernel.finer(FINER, extent=CLIP)
        points = warm[kernel.inducing(warm, max(room, FEW))]  # the first are those that less room takes
        rest = room - len(points) if len(points) < len(warm) else 0  # all other rows are copies, or nearly
        finer = warm[fine.inducing(warm, rest)] if rest >= FEW else warm[:0]

        def made(*, products: bool, trees: int) -> Features:
            multiplied = _shortest(kernel.rates)[: None if products else 0]
            left = room - _pairs(len(multiplied)).shape[1] - trees * 2**DEPTH
            some = points[: max(left, FEW)]
            return Features(
                centre, scale, knots, kernel.rates, kernel.share, some.float(), tests[0][:trees],
                tests[1][:trees], multiplied, finer[: max(left - len(some), 0)].float(),
            )  # fmt: skip

        sizes = sorted({0, len(tests[0])}, reverse=True)
        tried = [made(products=True, trees=sizes[0])] + [made(products=False, trees=trees) for trees in sizes]
        if y is None or len(x) < FEWEST:
            return tried[0]
        found = {each: each._posterior(x, y) for each in tried}
        best = max(tried, key=lambda each: found[each].log_evidence)
        last = [each._placed(u, y, found[each], random) for each in dict.fromkeys([best, tried[-1]])]
        return max(last, key=lambda each: each._posterior(x, y).log_evidence) if len(last) > 1 else last[0]

    def _placed(self, u: Tensor, y: Tensor, found: Posterior, random: torch.Generator) -> "Features":
        """The same, with inducing points where they explain more of the rows, if these are enough."""
        if len(u) < ENOUGH * len(self.points) or "finer" in self.groups:
            return self
        kernel, points, _ = self.kernels["kernel"]
        return replace(self, points=placed(kernel, found, u, y, points, random).float())

    def _posterior(self, x: Float[Tensor, "n d"], y: Float[Tensor, "m k"]) -> Posterior:
        return posterior(Moments.observe(self(x), y[: len(x)]), self.groups)

    def __call__(self, x: Float[Tensor, "n d"]) -> Float[Tensor, "n p"]:
        """Features of rows, in float64."""
        made = x.new_empty(len(x), self.width, dtype=torch.float64)
        kernels = self.kernels

        def fill(rows: slice) -> None:
            torch.cat(self._parts(x[rows]), 1, out=made[rows])
            for name, (_, _, whitener) in kernels.items():
                times_upper(made[rows, self.groups[name]], whitener)

        side_by_side(fill, [slice(start, start + PIECE) for start in range(0, len(x), PIECE)])
        return made

    def predict(
        self, x: Float[Tensor, "n d"], weights: Sequence[Float[Tensor, "p k"]]
    ) -> list[Float[Tensor, "n k"]]:
        """The products of features and each of the weights: far cheaper than the features."""
        every = torch.cat([*weights], 1)
        for name, (_, _, whitener) in self.kernels.items():
            every[self.groups[name]] = whitener @ every[self.groups[name]]  # of covariances not whitened
        piece = x.new_empty(min(len(x), PIECE), self.width, dtype=torch.float64)
        made = [torch.cat(self._parts(rows), 1, out=piece[: len(rows)]) @ every for rows in x.split(PIECE)]
        return list(torch.cat(made).split([w.shape[1] for w in weights], 1))

    def _parts(self, x: Tensor) -> list[Tensor]:
        """Features of a few rows by group, but covariances with the inducing points not whitened yet."""
        z = (x.double() - self.centre) / self.scale
        u = coordinates(z, self.knots)
        left, right = z.clamp(-FAR, FAR)[:, self.pairs].unbind(1)
        made = {"constant": torch.ones_like(z[:, :1]), "columns": z, "ranks": u[:, z.shape[1] :]}
        made |= {"products": left * right, "trees": leaves(z, self.columns, self.thresholds)}
        made |= {name: kernel(u, where) for name, (kernel, where, _) in self.kernels.items()}
        return [made[name] for name in self.groups]

    @cached_property
    def groups(self) -> dict[str, slice]:
        """Which features belong together, by name."""
        d, trees = len(self.centre), len(self.columns) * 2**DEPTH
        sizes = {"constant": 1, "columns": d, "ranks": d, "products": self.pairs.shape[1]}
        sizes |= {"kernel": len(self.points), "trees": trees}
        made, start = {}, 0
        for name, size in {**sizes, "finer": 0 if self.finer is None else len(self.finer)}.items():
            if size:
                made[name] = slice(start, start + size)
            start += size
        return made

    @cached_property
    def width(self) -> int:
        """Number of features."""
        return int(max(group.stop for group in self.groups.values()))

    @property
    def fitted(self) -> int:
        """How many numbers were fitted to targets to make them: lengths, unless they are the usual ones."""
        usual = Kernel.usual(len(self.centre)).rates
        return 0 if torch.equal(self.rates, usual) else usual.numel()

    @property
    def nbytes(self) -> int:
        """Bytes of all that must be remembered."""
        return sum(t.nbytes for t in self.tensors().values())

    def tensors(self) -> dict[str, Tensor]:
        """All it is made of, by name."""
        every = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return {name: tensor for name, tensor in every.items() if tensor is not None}

    @staticmethod
    def of(tensors: dict[str, Tensor]) -> "Features":
        """The features made of what `tensors` gave; refuses what does not fit together."""
        made = Features(**tensors)
        (d,), trees = made.centre.shape, made.columns
        multiplied = trees[:0, 0] if made.multiplied is None else made.multiplied
        finer = made.points if made.finer is None else made.finer
        wide = {*made.scale.shape, made.knots.shape[0]} == {d}
        wide &= made.points.shape[1] == finer.shape[1] in (d, 2 * d)
        if not wide or trees.ndim != 2 or trees.shape != made.thresholds.shape:
            raise ValueError("holds features whose shapes do not fit each other")
        made.kernels  # noqa: B018 - refuses points that cannot be whitened
        if any(bool(((columns < 0) | (columns >= d)).any()) for columns in (trees, multiplied)):
            raise ValueError("holds trees or products of columns which are not there")
        return made


def _shortest(rates: Float[Tensor, "2 e"]) -> Int[Tensor, " c"]:
    """The columns that matter most to the smooth kernel."""
    return rates[0, : rates.shape[1] // 2].argsort(descending=True, stable=True)[:PRODUCTS]


def _pairs(columns: int) -> Int[Tensor, "2 pairs"]:
    """Pairs of columns to be multiplied."""
    return torch.triu_indices(columns, columns)


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

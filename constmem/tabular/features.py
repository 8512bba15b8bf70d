"""`Features`: fixed nonlinear features of numeric columns, frozen after a warm-up."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

SIZE = 768
CLIP = 4.0  # deviations
KNOTS = 64  # quantiles kept of each column


@dataclass(frozen=True, eq=False)
class Features:
    """Features of rows in groups, frozen after a warm-up: the same rows always give the same features.

    Groups: the constant, the columns themselves, their ranks, Fourier features at several length scales,
    soft and hard conjunctions of thresholds.
    """

    centre: Float[Tensor, " d"]
    scale: Float[Tensor, " d"]
    knots: Float[Tensor, "d q"]
    waves: Float[Tensor, "f d"]
    phases: Float[Tensor, " f"]
    columns: Tensor
    thresholds: Tensor
    signs: Tensor
    sharpness: Tensor
    sizes: Tensor

    @staticmethod
    def anchor(
        x: Float[Tensor, "n d"], y: Float[Tensor, "n k"] | None = None, *, seed: int = 0, size: int = SIZE
    ) -> "Features":
        """Features of about `size` numbers a row, whose scales and thresholds come from warm-up rows."""
        x = x.double()
        n, d = x.shape
        random = torch.Generator().manual_seed(seed)
        centre, scale = x.mean(0), x.std(0, correction=0)
        scale = torch.where(scale > 1e-12 * (1 + centre.abs()), scale, torch.ones_like(scale))
        z = (x - centre) / scale
        knots = torch.quantile(z, torch.linspace(0, 1, KNOTS, dtype=torch.float64), 0).mT.contiguous()
        left = max(size - 1 - 2 * d, 64)
        f = left // 8  # of each of four Fourier groups
        h = (left - 4 * f) // 2
        normal = torch.randn(4 * f, d, generator=random, dtype=torch.float64) / d**0.5
        lengths = torch.tensor([0.3, 0.7, 2.0, 0.3], dtype=torch.float64).repeat_interleave(f)
        waves = normal / lengths[:, None]
        phases = torch.rand(4 * f, generator=random, dtype=torch.float64) * 2 * torch.pi
        order = torch.randint(1, 5, (2 * h,), generator=random)
        columns = torch.randint(0, d, (2 * h, 4), generator=random)
        at = torch.randint(0, n, (2 * h, 4), generator=random)
        thresholds = z[at, columns]
        signs = torch.randint(0, 2, (2 * h, 4), generator=random) * 2.0 - 1.0
        signs = torch.where(torch.arange(4) < order[:, None], signs, 0.0).double()
        sharpness = torch.cat([torch.full((h,), 4.0), torch.full((h,), torch.inf)]).double()
        sizes = torch.tensor([1, d, d, f, f, f, f, h, h])
        return Features(centre, scale, knots, waves, phases, columns, thresholds, signs, sharpness, sizes)

    @property
    def groups(self) -> dict[str, slice]:
        """Which features belong together, by name."""
        names = "constant raw rank short middle long rank_waves soft hard".split()
        stops = self.sizes.cumsum(0).tolist()
        return {n: slice(b - s, b) for n, b, s in zip(names, stops, self.sizes.tolist(), strict=True)}

    @property
    def width(self) -> int:
        """Number of features."""
        return int(self.sizes.sum())

    @property
    def nbytes(self) -> int:
        """Bytes of all it is made of."""
        return sum(t.nbytes for t in self.tensors().values())

    def tensors(self) -> dict[str, Tensor]:
        """All it is made of, by name."""
        return dict(vars(self))

    @staticmethod
    def of(tensors: dict[str, Tensor]) -> "Features":
        """The features made of what `tensors` gave."""
        return Features(**tensors)

    def __call__(self, x: Float[Tensor, "n d"]) -> Float[Tensor, "n p"]:
        """Features of rows, in float64."""
        z = (x.double() - self.centre) / self.scale
        right = torch.searchsorted(self.knots, z.mT.contiguous(), right=True)
        lower = torch.searchsorted(self.knots, z.mT.contiguous())
        rank = ((right + lower).mT.double() / self.knots.shape[1] - 1.0) * 1.7
        f = len(self.phases) // 4 * 3
        clipped = z.clamp(-CLIP, CLIP)
        angles = torch.cat([clipped @ self.waves[:f].mT, rank @ self.waves[f:].mT], 1) + self.phases
        gap = (z[:, self.columns] - self.thresholds) * self.signs
        h = len(self.sharpness) // 2
        soft = (gap[:, :h] * 4.0).sigmoid()
        hard = (gap[:, h:] > 0).double()
        both = torch.cat([soft, hard], 1)
        both = torch.where(self.signs == 0, 1.0, both).prod(-1)
        return torch.cat([torch.ones_like(z[:, :1]), z, rank, angles.cos() * 2**0.5, both], 1)

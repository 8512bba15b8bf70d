"""Normals whose targets belong together: deviations of their own, and a few directions in common."""

from math import log, pi
from typing import Any, NoReturn

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.distributions import Normal

from constmem.neural_processes.heads import PreciseHead, Std, std_of
from constmem.neural_processes.regression import Inverse


class LowRankHead(PreciseHead):
    """Mean, own deviation and loadings of every target, each from its own token alone.

    Args:
        rank: how many directions targets have in common.
    """

    def __init__(self, *, dim: int, hidden: int, dim_y: int, rank: int, std: Std = "bounded") -> None:
        super().__init__(dim=dim, hidden=hidden, dim_out=(2 + rank) * dim_y)
        self.rank, self.dim_y, self.std = rank, dim_y, std

    def forward(
        self, tokens: Float[Tensor, "b m d"]
    ) -> tuple[Float[Tensor, "b m y"], Float[Tensor, "b m y"], Float[Tensor, "b m y r"]]:
        """Mean, deviation, and loadings in units of that deviation."""
        mean, raw, loading = self.raw(tokens).split([self.dim_y, self.dim_y, self.rank * self.dim_y], -1)
        return mean, std_of(raw, self.std), loading.unflatten(-1, (self.dim_y, -1)) / self.rank**0.5


class JointNormal(Normal):
    """Normals of targets that have r standard normal numbers z in common:

        y = mean + std (loading z + e),        e ~ N(0, 1) for every target and channel

    It is the normal of each target by itself, with deviation std (1 + |loading|^2)^1/2: `log_prob`, `cdf` and
    `icdf` are those. What it predicts at a target does not depend on which others are asked for, nor on their
    order. `joint_log_prob` is of all targets of a task together, and `rsample` draws them together.

    Args:
        loading: in units of the deviation, so that both scale with the data.

    Example:
        >>> one = torch.ones(1, 2, 1)
        >>> dist = JointNormal(0 * one, 0.1 * one, 10 * one[..., None])  # two targets, hardly ever apart
        >>> y = dist.rsample((1000,), generator=torch.Generator().manual_seed(0))
        >>> bool((y[:, 0, 0] - y[:, 0, 1]).std() < 0.2), bool(y.std() > 0.9)
        (True, True)
    """

    has_rsample = True

    def __init__(
        self,
        mean: Float[Tensor, "b m y"],
        std: Float[Tensor, "b m y"],
        loading: Float[Tensor, "b m y r"],
    ) -> None:
        wide = torch.promote_types(mean.dtype, torch.float32)
        self.own, self.loading = std.to(wide), loading.to(wide)
        size = (1 + self.loading.square().sum(-1)).sqrt()
        super().__init__(mean.to(wide), self.own * size, validate_args=False)

    def joint_log_prob(
        self, value: Float[Tensor, "b m y"], mask: Bool[Tensor, "b m"] | None = None
    ) -> Float[Tensor, " b"]:
        """Of all targets of a task together, in float64: those that are masked out count for nothing.

        With z = (y - mean) / std, L the loadings and C = 1 + L'L, which is only r by r:

            log p = -1/2 (z'z - z'L C^-1 L'z + log det C) - sum log std - n/2 log(2 pi)
        """
        own, loading = self.own.double(), self.loading.double()
        z, one = (value.double() - self.loc.double()) / own, -own.log() - 0.5 * log(2 * pi)
        if mask is not None:
            real = mask[..., None]
            z, one = torch.where(real, z, 0.0), torch.where(real, one, 0.0)
            loading = torch.where(real[..., None], loading, 0.0)
        z, loading = z.flatten(1), loading.flatten(1, 2)  # (b, my), (b, my, r)
        eye = torch.eye(loading.shape[-1], dtype=z.dtype, device=z.device)
        inverse, log_det = Inverse.apply(eye + loading.mT @ loading)  # type: ignore[no-untyped-call]
        shared = (loading.mT @ z[..., None]).squeeze(-1)  # (b, r)
        explained = (shared[:, None] @ inverse @ shared[..., None]).flatten()
        found: Tensor = one.sum((1, 2)) - 0.5 * (z.square().sum(1) - explained + log_det)
        return found

    def covariance(self) -> Float[Tensor, "b n n"]:
        """Of all targets and channels of a task, the channels of a target side by side."""
        factor = (self.own[..., None] * self.loading).flatten(1, 2)
        return factor @ factor.mT + torch.diag_embed(self.own.square().flatten(1))

    def rsample(
        self, sample_shape: Any = (), *, generator: torch.Generator | None = None
    ) -> Float[Tensor, "*s b m y"]:
        shape, (b, m, y, r) = tuple(sample_shape), self.loading.shape
        how: dict[str, Any] = {"generator": generator, "device": self.own.device, "dtype": self.own.dtype}
        shared, noise = torch.randn((*shape, b, r), **how), torch.randn((*shape, b, m, y), **how)
        common = torch.einsum("bmyr,...br->...bmy", self.loading, shared)
        return self.loc + self.own * (common + noise)

    def sample(
        self, sample_shape: Any = (), *, generator: torch.Generator | None = None
    ) -> Float[Tensor, "*s b m y"]:
        with torch.no_grad():
            return self.rsample(sample_shape, generator=generator)

    def expand(self, *_: Any, **__: Any) -> NoReturn:
        raise NotImplementedError(
            "targets that belong together are not expanded: query a state with more tasks"
        )

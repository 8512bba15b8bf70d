"""From tokens to distributions: the last step of every model."""

from typing import Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn
from torch.distributions import Normal

from constmem.embed import MLP

Std = Literal["bounded", "exp"]


def std_of(raw: Tensor, kind: Std) -> Tensor:
    """A standard deviation from an unconstrained number: 0.05 + 0.95 softplus, or the exponential."""
    if kind == "bounded":
        return 0.05 + 0.95 * F.softplus(raw)
    return raw.exp()


class Gaussian(nn.Module):
    """Independent normals: an MLP gives a mean and a standard deviation for every output channel."""

    def __init__(self, *, dim: int, hidden: int, dim_y: int, std: Std = "bounded") -> None:
        super().__init__()
        if std not in ("bounded", "exp"):
            raise ValueError(f"std must be 'bounded' or 'exp', not {std!r}")
        self.std: Std = std
        self.norm = nn.LayerNorm(dim)
        self.predictor = MLP(dim_in=dim, dim_hidden=hidden, dim_out=2 * dim_y, depth=2)

    def forward(
        self, tokens: Float[Tensor, "b m d"]
    ) -> tuple[Float[Tensor, "b m y"], Float[Tensor, "b m y"]]:
        """Mean and standard deviation."""
        mean, raw = self.predictor(self.norm(tokens)).chunk(2, -1)
        return mean, std_of(raw, self.std)


def normal(mean: Tensor, std: Tensor) -> Normal:
    """A normal distribution in at least float32; its arguments were checked at the border."""
    wide = torch.promote_types(mean.dtype, torch.float32)
    return Normal(mean.to(wide), std.to(wide), validate_args=False)

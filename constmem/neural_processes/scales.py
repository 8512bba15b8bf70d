"""The units of the data, kept inside a model: it computes with (x - mean) / std and answers in your units."""

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from constmem.core.algebra import accumulator
from constmem.core.fold import Chunk

PARTS = ("x_mean", "x_std", "y_mean", "y_std")


class Scales(nn.Module):
    """Mean and standard deviation of every channel of the data a model is made for.

    Inside, x' = (x - x_mean) / x_std and y' = (y - y_mean) / y_std. A predicted N(m, s) of y' is
    N(y_mean + y_std m, y_std s) of y, and log p(y) = log p(y') - sum log y_std. Kept in float64,
    whatever the precision of the model: a time stamp has more digits than float32 holds.

    Args:
        x_mean, x_std: of each input channel.
        y_mean, y_std: of each output channel.

    Example:
        >>> x, y = torch.rand(100, 2) * 40 + 1000, torch.rand(100, 1)
        >>> x_in, _, _ = Scales.of(x, y)((x[None], y[None], None))
        >>> bool(x_in.mean().abs() < 1e-4), round(x_in.std(1, correction=0).mean().item(), 4)
        (True, 1.0)
    """

    def __init__(self, *, x_mean: Any, x_std: Any, y_mean: Any, y_std: Any) -> None:
        super().__init__()
        self.x_mean: Tensor
        self.x_std: Tensor
        self.y_mean: Tensor
        self.y_std: Tensor
        for name, numbers in zip(PARTS, (x_mean, x_std, y_mean, y_std), strict=True):
            tensor = torch.as_tensor(numbers, dtype=torch.float64).detach().clone()
            if tensor.ndim != 1 or not bool(torch.isfinite(tensor).all()):
                raise ValueError(f"{name} must be one finite number for each channel, not {numbers!r}")
            if name.endswith("std") and not bool((tensor > 0).all()):
                raise ValueError(f"{name} is {tensor.tolist()}, but every deviation must be above 0")
            self.register_buffer(name, tensor)
        for side in "xy":
            dims = [getattr(self, f"{side}_{part}").shape[0] for part in ("mean", "std")]
            if dims[0] != dims[1]:
                raise ValueError(f"{side}_mean has {dims[0]} channels and {side}_std {dims[1]}: one each")

    @staticmethod
    def of(x: Float[Tensor, "n x"], y: Float[Tensor, "n y"]) -> "Scales":
        """The scales of these rows: those a model is to be trained on, without the held-out ones."""
        found: dict[str, Tensor] = {}
        for side, rows in (("x", x), ("y", y)):
            if rows.ndim != 2 or rows.shape[0] < 2:
                raise ValueError(f"{side} has shape {tuple(rows.shape)}, but (rows, channels) is needed")
            wide = rows.double()
            found[f"{side}_mean"], std = wide.mean(0), wide.std(0, correction=0)
            constant = (wide.amax(0) == wide.amin(0)).nonzero().flatten().tolist()
            if constant:
                raise ValueError(
                    f"column {constant[0]} of {side} is constant over all {len(rows)} rows: "
                    "there is nothing to learn from it; leave it out"
                )
            found[f"{side}_std"] = std
        return Scales(**found)

    @property
    def dims(self) -> tuple[int, int]:
        """(dim_x, dim_y)."""
        return self.x_mean.shape[0], self.y_mean.shape[0]

    def forward(self, chunk: Chunk) -> Chunk:
        """Points in the model's own units."""
        x, y, mask = chunk
        return self.inputs(x), ((y - self.y_mean) / self.y_std).to(y.dtype), mask

    def inputs(self, x: Float[Tensor, "*b x"]) -> Float[Tensor, "*b x"]:
        """Inputs in the model's own units."""
        return ((x - self.x_mean) / self.x_std).to(x.dtype)

    def restored(
        self, mean: Float[Tensor, "*b y"], std: Float[Tensor, "*b y"]
    ) -> tuple[Float[Tensor, "*b y"], Float[Tensor, "*b y"]]:
        """A predicted mean and deviation in the units of the data."""
        wide = torch.promote_types(mean.dtype, torch.float32)
        return (self.y_mean + self.y_std * mean).to(wide), (self.y_std * std).to(wide)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Scales":  # noqa: ARG002
        """Follow the model to another device, but not to another precision."""
        where = fn(torch.empty(0, device=self.x_mean.device)).device
        for name in PARTS:
            setattr(self, name, getattr(self, name).to(where, accumulator(where)))
        return self

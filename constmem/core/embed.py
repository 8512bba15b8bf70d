"""From data to tokens: multi-layer perceptrons on points; times, gaps and marks of events as vectors."""

from collections.abc import Iterable
from math import pi

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from constmem.core.initial import RELU, keep_variance


class MLP(nn.Module):
    """`depth` linear layers with ReLU between them."""

    def __init__(self, *, dim_in: int, dim_hidden: int, dim_out: int, depth: int) -> None:
        super().__init__()
        if depth < 1:
            raise ValueError(f"an MLP needs a depth of at least 1, not {depth}")
        widths = [dim_in] + [dim_hidden] * (depth - 1) + [dim_out]
        gains = [RELU] * (depth - 1) + [1.0]
        self.layers = nn.ModuleList(
            keep_variance(nn.Linear(before, after), gain=gain)
            for before, after, gain in zip(widths[:-1], widths[1:], gains, strict=True)
        )

    def forward(self, x: Float[Tensor, "*b i"]) -> Float[Tensor, "*b o"]:
        return perceptron(x, self.weights())

    def weights(self) -> list[tuple[Float[Tensor, "o i"], Float[Tensor, " o"]]]:
        """Every layer's weight and bias, past the modules' calls and look-ups: small updates feel those."""
        parameters = [layer._parameters for layer in self.layers]
        return [(p["weight"], p["bias"]) for p in parameters]  # type: ignore[misc]


def perceptron(
    x: Float[Tensor, "*b i"], layers: Iterable[tuple[Float[Tensor, "_o _i"], Float[Tensor, " _o"]]]
) -> Float[Tensor, "*b o"]:
    """Linear layers, each a weight and a bias, with ReLU between them."""
    in_place = not torch.is_grad_enabled()  # what is needed no more is written over: a sixth faster
    for i, (weight, bias) in enumerate(layers):
        x = F.linear(x if i == 0 else F.relu(x, inplace=in_place), weight, bias)
    return x


def sinusoids(times: Float[Tensor, "*b"], dim: int) -> Float[Tensor, "*b d"]:
    """sin and cos of time at `dim` / 2 frequencies from 1 down to 1e-4, in turns; float64 in, float64 out.

    Sine and cosine of a large float32 are noise: times come in float64, and counted from their start.
    """
    pairs = (dim + 1) // 2
    last = -8 * (pairs - 1) / dim  # the frequency of pair i is 1e4^(-2 i / dim)
    angles = times[..., None] * torch.logspace(0, last, pairs, dtype=times.dtype, device=times.device)
    return torch.stack([angles.sin(), angles.cos()], -1).flatten(-2)[..., :dim]


class GapFeatures(nn.Module):
    """A standardised log gap as a vector: linear in z, in waves of z, and in whether there is a gap at all.

    NaN stands for no gap (nothing came before, or at the very same time), which has a vector of its own.
    """

    WAVES = (0.25, 0.5, 1.0, 2.0)  # half-turns a deviation

    def __init__(self, *, dim: int) -> None:
        super().__init__()
        self.project = keep_variance(nn.Linear(2 + 2 * len(self.WAVES), dim))
        self.waves: Tensor
        self.register_buffer("waves", pi * torch.tensor(self.WAVES), persistent=False)

    def forward(self, z: Float[Tensor, "*b"]) -> Float[Tensor, "*b d"]:
        there = ~z.isnan()
        z = z.nan_to_num(0.0).clamp(-8.0, 8.0)[..., None]
        angles = z * self.waves
        columns = torch.cat([torch.ones_like(z), z, angles.sin(), angles.cos()], -1)
        out: Tensor = self.project((columns * there[..., None]).to(self.project.weight.dtype))
        return out


class MarkEmbedding(nn.Module):
    """A vector for every mark, one for an unknown mark (`UNKNOWN`), one for no event yet (`NOTHING`)."""

    UNKNOWN, NOTHING = -1, -2

    def __init__(self, *, num_marks: int, dim: int) -> None:
        super().__init__()
        self.num_marks = num_marks
        self.table = nn.Parameter(torch.randn(num_marks + 2, dim))

    def forward(self, marks: Int[Tensor, "*b"]) -> Float[Tensor, "*b d"]:
        index = torch.where(marks < 0, self.num_marks - 1 - marks, marks)  # -1 and -2 stand behind the marks
        return F.embedding(index, self.table)

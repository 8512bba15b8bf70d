"""From data to tokens: multi-layer perceptrons on points."""

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from constmem.initial import RELU, keep_variance


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
        for i, (weight, bias) in enumerate(self.weights()):
            x = F.linear(x if i == 0 else F.relu(x), weight, bias)
        return x

    def weights(self) -> list[tuple[Float[Tensor, "o i"], Float[Tensor, " o"]]]:
        """Every layer's weight and bias, past the modules' calls and look-ups: small updates feel those."""
        parameters = [layer._parameters for layer in self.layers]
        return [(p["weight"], p["bias"]) for p in parameters]  # type: ignore[misc]

"""Fixed queries absorbed into the projection of keys: what is left for tokens to meet."""

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor


class Absorbed(NamedTuple):
    """All that meets normalised tokens: rows whose products with them are scores, and what makes values."""

    rows: Float[Tensor, "s d"]  # q Wk of all slots of all heads
    score: Float[Tensor, " s"]  # what the shift of keys adds to every score
    project: Float[Tensor, "h c d"]  # from mean tokens to values
    shift: Float[Tensor, "h c"]

    @property
    def single(self) -> tuple[Float[Tensor, "sv d"], Float[Tensor, " sv"]]:
        """Scores and values of a token by one product."""
        weight = torch.cat([self.rows, self.project.flatten(0, 1)])
        return weight, torch.cat([self.score, self.shift.flatten()])


def absorb(
    queries: Float[Tensor, "*depth h s c"], weight: Float[Tensor, "kv d"], shift: Float[Tensor, " kv"]
) -> Absorbed:
    """Queries, and the projection to keys and values of all heads, as tokens meet them; differentiable."""
    queries = queries.flatten(0, -3)
    heads, _, channels = queries.shape
    (key, value), (key_shift, value_shift) = weight.chunk(2), shift.chunk(2)
    rows = (queries @ key.unflatten(0, (heads, channels))).flatten(0, 1)
    score = (queries @ key_shift.view(heads, channels, 1)).flatten()
    return Absorbed(rows, score, value.unflatten(0, (heads, channels)), value_shift.view(heads, channels))

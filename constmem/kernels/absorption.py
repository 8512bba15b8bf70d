"""Fixed queries absorbed into the projection of keys: what is left for tokens to meet."""

from typing import NamedTuple

from jaxtyping import Float
from torch import Tensor


class Absorbed(NamedTuple):
    """All that meets normalised tokens: rows whose products with them are scores, and what makes values."""

    rows: Float[Tensor, "s d"]  # q Wk of all slots of all heads
    score: Float[Tensor, " s"]  # what the shift of keys adds to every score
    project: Float[Tensor, "h c d"]  # from mean tokens to values
    shift: Float[Tensor, "h c"]


def absorb(
    queries: Float[Tensor, "h s c"], weight: Float[Tensor, "kv d"], shift: Float[Tensor, " kv"]
) -> Absorbed:
    """Queries, and the projection to keys and values of all heads, as tokens meet them; differentiable."""
    heads, _, channels = queries.shape
    (key, value), (key_shift, value_shift) = weight.chunk(2), shift.chunk(2)
    rows = (queries @ key.unflatten(0, (heads, channels))).flatten(0, 1)
    score = (queries @ key_shift.view(heads, channels, 1)).flatten()
    return Absorbed(rows, score, value.unflatten(0, (heads, channels)), value_shift.view(heads, channels))

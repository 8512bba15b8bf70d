"""Targets that read a context level by level: layer i of the decoder attends to level i."""

from collections.abc import Iterable
from typing import NamedTuple

from jaxtyping import Bool, Float
from torch import Tensor, nn


class Levels(NamedTuple):
    """Tokens of a ragged context at every level of a model, and which of them are real (None: all)."""

    tokens: tuple[Float[Tensor, "b n d"], ...]
    mask: Bool[Tensor, "b n"] | None


def decode_levels(
    tokens: Float[Tensor, "b m d"],
    levels: Iterable[Float[Tensor, "b n d"]],
    cross: nn.ModuleList,
    feed: nn.ModuleList,
    mask: Bool[Tensor, "b n"] | None = None,
) -> Float[Tensor, "b m d"]:
    """The targets' tokens after attending to all levels; they never see each other."""
    for level, attend, forward in zip(levels, cross, feed, strict=True):
        tokens = forward(attend(tokens, level, mask))
    return tokens

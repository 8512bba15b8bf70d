"""What an `Observation` computes from its parameters alone, before it meets any data."""

from collections.abc import Mapping
from math import sqrt
from typing import NamedTuple

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

NAMES = "slots", "slots_scale", "slots_shift", "tokens_scale", "tokens_shift", "query", "key_value"


class Prepared(NamedTuple):
    """The fixed queries, scaled, and the projection of normalised tokens to keys and values of all blocks."""

    queries: Float[Tensor, "depth h s c"]
    weight: Float[Tensor, "kv d"]
    shift: Float[Tensor, " kv"]


def prepare(own: Mapping[str, Tensor], heads: int) -> Prepared:
    """A `Prepared` of parameters by their `NAMES`; tokens' scale and shift go into the projection."""
    scale = 1 / sqrt(own["query"].shape[-1] // heads)
    q = normed_slots(own) @ (own["query"] * scale).mT
    q = q.unflatten(-1, (heads, -1)).transpose(1, 2).contiguous()
    weight = (own["key_value"] * own["tokens_scale"]).flatten(0, 2)
    return Prepared(q, weight, (own["key_value"] @ own["tokens_shift"]).flatten())


def normed_slots(own: Mapping[str, Tensor]) -> Float[Tensor, "depth s d"]:
    """The slots after their normalisation."""
    slots = own["slots"]
    return F.layer_norm(slots, slots.shape[-1:]) * own["slots_scale"] + own["slots_shift"]

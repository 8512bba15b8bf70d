"""What an `Observation` computes from its parameters alone, before it meets any data."""

from collections.abc import Mapping
from math import sqrt
from typing import Any, NamedTuple

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor


class Prepared(NamedTuple):
    """The fixed queries, scaled, and the projection of normalised tokens to keys and values of all blocks."""

    queries: Float[Tensor, "depth h s c"]
    weight: Float[Tensor, "kv d"]
    shift: Float[Tensor, " kv"]


def prepare(own: Mapping[str, Any], heads: int) -> Prepared:
    """A `Prepared` of parameters by their names; scale and shift of tokens are folded into the projection."""
    scale = 1 / sqrt(own["query"].shape[-1] // heads)
    q = normed_slots(own) @ (own["query"] * scale).mT
    q = q.unflatten(-1, (heads, -1)).transpose(1, 2).contiguous()
    weight = (own["key_value"] * own["tokens_scale"]).flatten(0, 2)
    return Prepared(q, weight, (own["key_value"] @ own["tokens_shift"]).flatten())


def normed_slots(own: Mapping[str, Any]) -> Float[Tensor, "depth s d"]:
    """The slots after their normalisation."""
    slots, scale, shift = (own[name] for name in ("slots", "slots_scale", "slots_shift"))
    found: Tensor = F.layer_norm(slots, slots.shape[-1:]) * scale + shift
    return found

"""A transformer with a key-value cache, updated point by point: what streams are usually fed to.

It has the weights and layers of a `TNPD`, but data attend only to themselves and what came before: so an
update need not touch old points again. It still must read all of their keys and values, and keep them.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from constmem.core.layers import attend
from constmem.neural_processes import TNPD


@dataclass
class Cache:
    """Keys and values of all points seen, for every layer; room is doubled when it runs out."""

    keys: Float[Tensor, "depth b h room c"]
    values: Float[Tensor, "depth b h room c"]
    count: int

    @property
    def nbytes(self) -> int:
        """Bytes remembered."""
        return self.keys.nbytes + self.values.nbytes

    def with_room(self) -> "Cache":
        """The same with room for one point more."""
        if self.count < self.keys.shape[-2]:
            return self
        more = max(16, self.count)
        return Cache(F.pad(self.keys, (0, 0, 0, more)), F.pad(self.values, (0, 0, 0, more)), self.count)


class CachedTransformer:
    """Update and query of a causal transformer with a cache."""

    def __init__(self, model: TNPD) -> None:
        self.model = model

    def empty(self, batch: int = 1) -> Cache:
        """Nothing seen yet."""
        dim, heads, depth = (self.model.config[key] for key in ("dim", "num_heads", "depth"))
        shape = depth, batch, heads, 0, dim // heads
        keys, values = torch.zeros(2, *shape, device=self.model.device).unbind(0)
        return Cache(keys, values, 0)

    def filled(self, points: int, batch: int = 1) -> Cache:
        """A cache as large as after so many points, with random content: what an update costs is the same."""
        nothing = self.empty(batch)
        *shape, _, channels = nothing.keys.shape
        keys, values = torch.randn(2, *shape, points + 64, channels, device=self.model.device).unbind(0)
        return Cache(keys, values, points)

    def update(self, cache: Cache, x: Float[Tensor, "b 1 x"], y: Float[Tensor, "b 1 y"]) -> Cache:
        """The cache with one point more (the old one must not be used again: its room is shared)."""
        cache = cache.with_room()
        token = self.model.embed(torch.cat([x, y], -1))
        n = cache.count + 1
        for i, layer in enumerate(self.model.layers):
            q, k, v = layer.project(token, token)  # type: ignore[operator]
            cache.keys[i, :, :, n - 1 : n], cache.values[i, :, :, n - 1 : n] = k, v
            token = _finished(layer, token, attend(q, cache.keys[i, :, :, :n], cache.values[i, :, :, :n]))
        return Cache(cache.keys, cache.values, n)

    def query(self, cache: Cache, xt: Float[Tensor, "b m x"]) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation at targets, which attend to all that is cached."""
        tokens = self.model.embed(torch.cat([xt, xt.new_zeros(*xt.shape[:2], self.model.dim_y)], -1))
        for i, layer in enumerate(self.model.layers):
            q, _, _ = layer.project(tokens, tokens)  # type: ignore[operator]
            keys, values = cache.keys[i, :, :, : cache.count], cache.values[i, :, :, : cache.count]
            tokens = _finished(layer, tokens, attend(q, keys, values))
        mean, std = self.model.head(tokens)
        return mean, std


def _finished(layer: torch.nn.Module, tokens: Tensor, seen: Float[Tensor, "b h m c"]) -> Tensor:
    """The rest of a layer, after its attention."""
    tokens = layer.norm(tokens + layer.out(seen.transpose(1, 2).flatten(2)))  # type: ignore[operator]
    out: Tensor = layer.norm_feed(tokens + layer.contract(F.relu(layer.expand(tokens))))  # type: ignore[operator]
    return out

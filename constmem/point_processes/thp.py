"""Transformer Hawkes Process with a mixture head: causal self-attention over all events so far.

Its state is the keys and values of every event (a KV cache): it grows with the stream, and an update costs
O(N). Recomputing without a cache would cost O(N^2).
"""

from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn

from constmem.core.checks import positive
from constmem.core.layers import check_heads
from constmem.point_processes.base import PointProcess
from constmem.point_processes.chunks import Chunk, shifted
from constmem.point_processes.heads import MarkEmbedding, sinusoids
from constmem.point_processes.states import EventState


class THP(PointProcess):
    """A causal transformer on marks and times; `state.nbytes` grows with every event.

    The encoding of time is added again before every layer, norms come last (post-norm), and the next
    gap is a mixture of log-normals.

    Args:
        num_marks: kinds of events.
        dim, depth, num_heads, hidden: width, layers, heads, width inside feed-forward layers and heads.
        components: log-normals of the mixture.
        dropout: after attention and feed-forward layers and before the heads, while training.
        mark_given_gap: the mark is predicted from the gap too.
        unit: of the times it is trained on; `standardise` sets it.
    """

    name: ClassVar[str] = "thp"

    def __init__(
        self,
        *,
        num_marks: int,
        dim: int = 64,
        depth: int = 2,
        num_heads: int = 4,
        hidden: int = 64,
        components: int = 16,
        dropout: float = 0.1,
        mark_given_gap: bool = False,
        unit: str | None = None,
    ) -> None:
        config = {k: v for k, v in locals().items() if k not in ("self", "__class__")}
        super().__init__(
            num_marks=num_marks, features=dim, hidden=hidden, components=components,
            mark_given_gap=mark_given_gap, dropout=dropout, unit=unit, config=config,
        )  # fmt: skip
        positive("depth", depth)
        self.marks = MarkEmbedding(num_marks=num_marks, dim=dim)
        self.nothing = nn.Parameter(torch.randn(dim))
        self.layers = nn.ModuleList(_Layer(dim, num_heads, hidden, dropout) for _ in range(depth))

    def _blank(self, batch: int) -> dict[str, Tensor]:
        depth, dim = len(self.layers), len(self.nothing)
        cache = self.nothing.new_zeros(batch, 0, depth, 2, dim)
        mask = torch.zeros(batch, 0, dtype=torch.bool, device=self.device)
        return {"cache": cache, "mask": mask, "known": self.nothing.expand(batch, -1)}

    def _read(self, state: EventState) -> Float[Tensor, "b f"]:
        return state.memory["known"]

    def _observe(self, state: EventState, chunk: Chunk) -> dict[str, Tensor]:
        return self._scan(state, chunk, chunk.real)[1]

    def _scan(
        self,
        state: EventState,
        chunk: Chunk,
        wanted: Bool[Tensor, "b t"] | None,  # noqa: ARG002
    ) -> tuple[Float[Tensor, "b t f"], dict[str, Tensor]]:
        tokens: Tensor = self.marks(chunk.marks)
        clock = self._since(state.start[:, None], chunk.times)
        time = sinusoids(clock, tokens.shape[-1]).to(tokens.dtype)
        cache, seen = state.memory["cache"], state.memory["mask"]
        seen = torch.cat([seen, chunk.real], 1)
        visible = _visible(state.memory["mask"], chunk.times.shape[1])
        kept: list[Tensor] = []
        for i, layer in enumerate(self.layers):
            tokens, pair = layer(tokens + time, cache[:, :, i], visible)
            kept.append(pair)
        memory = {
            "cache": torch.cat([cache, torch.stack(kept, 2)], 1),
            "mask": seen,
            "known": chunk.last_of(tokens, state.memory["known"]),
        }
        return shifted(state.memory["known"], tokens), memory


def _visible(before: Bool[Tensor, "b n"], t: int) -> Bool[Tensor, "b 1 t nt"] | None:
    """Who sees whom: all real events before the chunk, and those of the chunk up to itself."""
    b, n = before.shape
    if n == 0:
        return None  # the kernel knows what causal means, and needs no mask of t x t
    past = torch.ones(t, t, dtype=torch.bool, device=before.device).tril()
    return torch.cat([before[:, None, :].expand(b, t, n), past.expand(b, t, t)], -1)[:, None]


class _Layer(nn.Module):
    """Self-attention and feed-forward, each followed by its residual and a norm."""

    def __init__(self, dim: int, num_heads: int, hidden: int, dropout: float) -> None:
        super().__init__()
        check_heads(dim, num_heads)
        self.num_heads = num_heads
        self.query, self.out = nn.Linear(dim, dim), nn.Linear(dim, dim)
        self.key_value = nn.Linear(dim, 2 * dim)
        self.feed = nn.Sequential(nn.Linear(dim, hidden), nn.GELU(), nn.Linear(hidden, dim))
        self.norms = nn.ModuleList([nn.LayerNorm(dim), nn.LayerNorm(dim)])
        self.dropout = nn.Dropout(dropout)

    def forward(
        self, x: Float[Tensor, "b t d"], cache: Float[Tensor, "b n 2 d"], visible: Tensor | None
    ) -> tuple[Float[Tensor, "b t d"], Float[Tensor, "b t 2 d"]]:
        """New tokens, and the keys and values to remember."""
        pair = self.key_value(x).unflatten(-1, (2, -1))
        k, v = (self._heads(t) for t in torch.cat([cache, pair], 1).unbind(2))
        q = self._heads(self.query(x))
        out = F.scaled_dot_product_attention(q, k, v, visible, is_causal=visible is None)
        x = self.norms[0](x + self.dropout(self.out(out.transpose(1, 2).flatten(2))))
        return self.norms[1](x + self.dropout(self.feed(x))), pair

    def _heads(self, x: Any) -> Tensor:
        split: Tensor = x.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
        return split

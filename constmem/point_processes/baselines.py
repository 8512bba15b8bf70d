"""What the constant memory is compared with: no memory, a recurrent network, a transformer."""

from dataclasses import replace
from typing import Any, ClassVar, Unpack

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn

from constmem.core.checks import positive
from constmem.core.layers import check_heads
from constmem.point_processes.base import PointProcess, Scanned, Transition
from constmem.point_processes.chunks import Chunk, shifted
from constmem.point_processes.heads import GapFeatures, MarkEmbedding, sinusoids
from constmem.point_processes.model import EventSettings, HeadSettings
from constmem.point_processes.states import EventMonoid, EventState, StoredEvents


class Trivial(PointProcess[EventMonoid]):
    """A renewal process of independent marks, which every model should beat: no memory of anything.

    One mixture for all gaps, one distribution for all marks. Settings are those of `EventModel`.
    """

    name: ClassVar[str] = "trivial"
    state_type = EventMonoid

    def __init__(
        self,
        *,
        dim: int = 16,
        mark_given_gap: bool = False,
        dropout: float = 0.0,
        **rest: Unpack[HeadSettings],
    ) -> None:
        super().__init__(dim=dim, mark_given_gap=mark_given_gap, dropout=dropout, **rest)
        self.known = nn.Parameter(torch.randn(dim))

    def _blank(self, batch: int) -> dict[str, Tensor]:  # noqa: ARG002
        return {}

    def read(self, state: EventMonoid) -> Float[Tensor, "b f"]:
        """The same whatever was seen."""
        return self.known.expand(state.batch, -1)

    def _observe(self, state: EventMonoid, chunk: Chunk) -> dict[str, Tensor]:  # noqa: ARG002
        return {}

    def _scan(self, state: EventMonoid, chunk: Chunk, wanted: Tensor | None) -> Scanned:  # noqa: ARG002
        return self.known.expand(*chunk.times.shape, -1), {}


class GRU(Transition):
    """A gated recurrent unit reads log gap and mark of each event; its state is one vector.

    Intensity-free learning of point processes: constant memory too, but states of two parts do not merge.
    Settings are those of `EventModel`; `dim` is the width of the state, too.
    """

    name: ClassVar[str] = "gru"

    def __init__(self, **settings: Unpack[EventSettings]) -> None:
        super().__init__(**settings)
        dim = self.config["dim"]
        self.marks = MarkEmbedding(num_marks=self.num_marks, dim=dim)
        self.gaps = GapFeatures(dim=dim)
        self.cell = nn.GRU(dim, dim, batch_first=True)

    def train(self, mode: bool = True) -> "GRU":
        """As ever, but for the cell, which has no dropout: cuDNN keeps what gradients need only so."""
        super().train(mode)
        self.cell.train()
        return self

    def _blank(self, batch: int) -> dict[str, Tensor]:
        return {"known": torch.zeros(batch, self.cell.hidden_size, dtype=self.dtype, device=self.device)}

    def read(self, state: EventState) -> Float[Tensor, "b f"]:
        """The vector after the last event."""
        return state.memory["known"]

    def _scan(self, state: EventState, chunk: Chunk, wanted: Tensor | None) -> Scanned:  # noqa: ARG002
        tokens = self.marks(chunk.marks) + self.gaps(self.scale.standard(chunk.gaps))
        before = state.memory["known"]
        after, _ = self.cell(tokens, before[None].contiguous())
        return shifted(before, after), {"known": chunk.last_of(after, before)}


class THP(PointProcess[StoredEvents]):
    """Transformer Hawkes Process: a causal transformer on marks and times, of all events so far.

    Its states hold the keys and values of every event (a KV cache): an update costs O(N). Without a cache it
    would cost O(N^2).

    The encoding of time is added again before every layer, norms come last (post-norm), and the next
    gap is a mixture of log-normals. Dropout comes after attention and feed-forward layers, too, which are
    `hidden` wide inside.

    Args:
        depth: number of layers.
        num_heads: of each.
        settings: those of `EventModel`.
    """

    name: ClassVar[str] = "thp"
    state_type = StoredEvents

    def __init__(self, *, depth: int = 2, num_heads: int = 4, **settings: Unpack[EventSettings]) -> None:
        super().__init__(**settings)
        dim, hidden, dropout = (self.config[key] for key in ("dim", "hidden", "dropout"))
        positive("depth", depth)
        self.marks = MarkEmbedding(num_marks=self.num_marks, dim=dim)
        self.nothing = nn.Parameter(torch.randn(dim))
        self.layers = nn.ModuleList(_Layer(dim, num_heads, hidden, dropout) for _ in range(depth))

    def _blank(self, batch: int) -> dict[str, Tensor]:
        depth, dim = len(self.layers), len(self.nothing)
        times = torch.zeros(batch, 0, dtype=torch.float64, device=self.device)
        return {
            "cache": self.nothing.new_zeros(batch, 0, depth, 2, dim),
            "mask": torch.zeros_like(times, dtype=torch.bool),
            "known": self.nothing.expand(batch, -1),
            "times": times,
            "marks": torch.zeros_like(times, dtype=torch.int64),
        }

    def read(self, state: StoredEvents) -> Float[Tensor, "b f"]:
        """What the last layer gave for the last event."""
        return self._caught_up(state).memory["known"]

    def _observe(self, state: StoredEvents, chunk: Chunk) -> dict[str, Tensor]:
        return self._scan(state, chunk, None)[1]

    def _scan(self, state: StoredEvents, chunk: Chunk, wanted: Tensor | None) -> Scanned:  # noqa: ARG002
        before = self._caught_up(state).memory
        tokens: Tensor = self.marks(chunk.marks)
        clock = self.scale.since(state.start[:, None], chunk.times)
        time = sinusoids(clock, tokens.shape[-1]).to(tokens.dtype)
        visible = _visible(before["mask"], chunk.times.shape[1])
        kept: list[Tensor] = []
        for i, layer in enumerate(self.layers):
            tokens, pair = layer(tokens + time, before["cache"][:, :, i], visible)
            kept.append(pair)
        more = {"cache": torch.stack(kept, 2), "mask": chunk.real, "times": chunk.times, "marks": chunk.marks}
        memory = {name: torch.cat([before[name], more[name]], 1) for name in before if name != "known"}
        memory["known"] = chunk.last_of(tokens, before["known"])
        return shifted(before["known"], tokens), memory

    def _caught_up(self, state: StoredEvents) -> StoredEvents:
        """The state with the keys and values of events that a merge has brought."""
        done = state.cached
        if done == state.memory["mask"].shape[1]:
            return state
        cut = {name: t if name == "known" else t[:, :done] for name, t in state.memory.items()}
        times, marks, mask = (state.memory[name][:, done:] for name in ("times", "marks", "mask"))
        chunk = Chunk(times, torch.zeros_like(times), marks, mask)
        return replace(state, memory=self._scan(replace(state, memory=cut), chunk, None)[1])


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

"""Constant Memory Hawkes Process: stacked CMABs over events, in a state that never grows.

All blocks look at the events themselves through fixed queries, so what a prefix leaves behind is one
`AttentionState`. A plain CMAB sees a set: order enters only through the encoding of absolute time
(`absolute_time`, which also lets a model memorise its sequences), and nothing marks the last event. Four
options mend that, each with exact updates in constant time:

    last_events    marks and log gaps of the last few events, in order, stand beside the latents
    recency        exp(rate t) weighs events: the score of event j is q k_j + rate t_j, and the running
                   log-sum-exp absorbs it, since a common factor cancels in every softmax
    mass           log(1 + sum_j exp(q k_j + rate (t_j - t))): a softmax forgets how many events there
                   were, but the normaliser knows; with recency this is the intensity of a Hawkes process
    relative_time  values are stored as v_j exp(i w t_j) and read as v_j exp(i w (t_j - t))
"""

from collections.abc import Sequence
from typing import Any, ClassVar, Unpack

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Float64, Int64
from torch import Tensor, nn

from constmem import kernels
from constmem.core.block import CMABStack
from constmem.core.checks import positive
from constmem.core.layers import MLP, Residual, applied, keep_variance
from constmem.core.state import AttentionState
from constmem.point_processes.base import PointProcess, Scanned
from constmem.point_processes.chunks import Chunk, shifted, windows
from constmem.point_processes.heads import LONGEST, GapFeatures, MarkEmbedding, sinusoids, unhooked
from constmem.point_processes.model import HeadSettings
from constmem.point_processes.padding import NOTHING
from constmem.point_processes.states import RECENT, ConstantState


class CMHP(PointProcess[ConstantState]):
    """A point process in constant memory: update, query, likelihood and (training's) gradients too.

    Args:
        depth: number of blocks.
        num_slots: learned queries a block looks at the events with; they size the state.
        num_latents: vectors the blocks hand to each other; flattened they are what is known.
        embed_depth: layers of the MLP on an event's token; 0: the sum of its parts is the token.
        absolute_time: a token holds the time since the start, as the paper's do; by it sequences are
            memorised. Without, a model knows times only by how long ago they were.
        gap_tokens: a token holds the log gap before its event.
        last_events: how many of them are remembered one by one; 0, and all that follows off, is the paper's.
        recency, mass, relative_time: see the module.
        rest: `num_marks`, `dim`, `hidden` and what else all models have: see `EventModel`.

    Example:
        >>> from constmem.point_processes.events import Events
        >>> model = CMHP(num_marks=2, dim=16, num_slots=4, num_latents=4).eval()
        >>> events = Events.from_gaps([[0.0, 1.0, 0.5, 2.0]], marks=[[0, 1, 1, 0]], unit="s", num_marks=2)
        >>> with torch.no_grad():
        ...     at_once = model.condition(events)
        ...     streamed = model.empty(events.t_start)
        ...     for time, mark in zip(events.times.T, events.marks.T):
        ...         streamed = model.update(streamed, time, mark)
        ...     same = torch.allclose(model.query(streamed).mean, model.query(at_once).mean, rtol=1e-4)
        >>> same, streamed.nbytes == at_once.nbytes
        (True, True)
    """

    name: ClassVar[str] = "cmhp"
    state_type = ConstantState

    def __init__(
        self,
        *,
        dim: int = 64,
        depth: int = 2,
        num_slots: int = 8,
        num_latents: int = 4,
        num_heads: int = 4,
        embed_depth: int = 2,
        absolute_time: bool = False,
        gap_tokens: bool = True,
        last_events: int = 4,
        recency: bool = True,
        mass: bool = True,
        relative_time: bool = True,
        mark_given_gap: bool = True,
        residual: Residual = "normed",
        dropout: float = 0.1,
        **rest: Unpack[HeadSettings],
    ) -> None:
        super().__init__(dim=dim, mark_given_gap=mark_given_gap, dropout=dropout, **rest)
        num_marks, hidden = self.num_marks, self.config["hidden"]
        positive("num_latents", num_latents)
        if not isinstance(last_events, int) or isinstance(last_events, bool) or last_events < 0:
            raise ValueError(f"last_events must be a whole number of at least 0, not {last_events!r}")
        self.marks = MarkEmbedding(num_marks=num_marks, dim=dim)
        self.gaps = GapFeatures(dim=dim) if gap_tokens else None
        self.embed = MLP(dim_in=dim, dim_hidden=dim, dim_out=dim, depth=embed_depth) if embed_depth else None
        self.stack = CMABStack(
            depth=depth, dim=dim, num_slots=num_slots, num_heads=num_heads, hidden=hidden, residual=residual
        )
        self.latents = nn.Parameter(torch.randn(num_latents, dim))
        self.project = keep_variance(nn.Linear(num_latents * dim, dim))
        self.last_mark = MarkEmbedding(num_marks=num_marks, dim=dim) if last_events else None
        self.last_gap = GapFeatures(dim=dim) if last_events else None
        self.last = keep_variance(nn.Linear(last_events * dim, dim)) if last_events else None
        self.last_events = last_events
        self.log_rates = nn.Parameter(_spread(self.stack)) if recency else None
        self.mass = keep_variance(nn.Linear(self.log_masses, dim)) if mass else None
        self.norm = nn.LayerNorm(dim)
        self.relative_time, self.absolute_time = relative_time, absolute_time

    @property
    def log_masses(self) -> int:
        """How many softmax normalisers there are: blocks x heads x slots."""
        depth, heads, slots, _ = self.stack.layout
        return depth * heads * slots

    def observing_parameters(self) -> Sequence[Tensor]:
        own: Any = self._modules  # past the look-ups of modules: small updates feel those
        parts = own["marks"], own["stack"]._modules["observation"], own.get("gaps"), own.get("embed")
        weights: list[Tensor] = [p for part in parts if part is not None for p in _parameters(part)]
        rates = [] if self.log_rates is None else [self.log_rates]
        return [*weights, *rates, self.log_gap_mean, self.log_gap_std]

    # The contract

    def _blank(self, batch: int) -> dict[str, Tensor]:
        state = self.stack.empty(batch)
        blank = {"value": state.value, "lse": state.lse}
        if self.last_events > 1:
            times = torch.zeros(batch, self.last_events - 1, dtype=torch.float64, device=self.device)
            nothing = torch.full_like(times, NOTHING, dtype=torch.int64)
            blank |= dict(zip(RECENT, (times, times.clone(), nothing), strict=True))
        return blank

    def _observe(self, state: ConstantState, chunk: Chunk) -> dict[str, Tensor]:
        if chunk.times.shape[1] == 1 and chunk.mask is None:
            found = self._observe_at_once(state, chunk)
            if found is not None:
                return dict(zip(("value", "lse"), found, strict=True)) | state.recent_after(chunk)
        clock = self.scale.since(state.start[:, None], chunk.times)
        seen = (self._observe_one if chunk.times.shape[1] == 1 else self._observe_some)(chunk, clock)
        joined = state.attention.merge(seen)
        return {"value": joined.value, "lse": joined.lse} | state.recent_after(chunk)

    def _scan(self, state: ConstantState, chunk: Chunk, wanted: Bool[Tensor, "b t"] | None) -> Scanned:
        clock = self.scale.since(state.start[:, None], chunk.times)
        q, k, v = self._attended(chunk, clock)
        rates, held = self._rates(), state.attention
        drift = None if rates is None else (rates, clock)
        few = 8 if k.device.type == "cpu" else 32  # the result is the same
        prefixes = AttentionState.scan(q, k, v, chunk.mask, drift=drift, initial=held, chunk=few)
        memory = {"value": prefixes.value[:, -1].clone(), "lse": prefixes.lse[:, -1].clone()}
        memory |= state.recent_after(chunk)
        before = held.value, held.lse, self.scale.since(state.start, state.last_time)
        after = prefixes.value, prefixes.lse, clock
        parts = [shifted(*pair).flatten(0, 1) for pair in zip(before, after, strict=True)]
        parts += [windows(*pair).flatten(0, 1) for pair in zip(state.last, chunk[1:3], strict=True)]
        if wanted is None:
            return self._known(*parts, rates=rates).unflatten(0, clock.shape), memory
        index = wanted.flatten().nonzero().squeeze(-1)  # only what is asked for is read
        known = self._known(*(part[index] for part in parts), rates=rates)
        features = known.new_zeros(wanted.numel(), known.shape[-1]).index_copy(0, index, known)
        return features.unflatten(0, wanted.shape), memory

    def read(self, state: ConstantState) -> Float[Tensor, "b f"]:
        """What is known after all events seen."""
        clock = self.scale.since(state.start, state.last_time)
        return self._known(
            state.memory["value"], state.memory["lse"], clock, *state.last, rates=self._rates()
        )

    # Inside

    def _rates(self) -> Float64[Tensor, "depth h s"] | None:
        """By how much a typical gap makes events count less; float64, since it is multiplied by the clock."""
        return None if self.log_rates is None else self.log_rates.double().exp()

    def _observe_at_once(self, state: ConstantState, chunk: Chunk) -> tuple[Tensor, Tensor] | None:
        """Value and lse of the state with one event more of each stream, where that takes one call."""
        own: Any = self._modules
        gaps = None if self.gaps is None else self.gaps.weights()
        odd = self.absolute_time or (gaps is None) != (self.gaps is None) or not unhooked(own["marks"])
        if torch.is_grad_enabled() or odd:
            return None
        prepared = own["stack"]._modules["observation"].prepared(own.get("embed"))
        turns = _turns_on_cpu(self.stack.layout[-1] // 2 if self.relative_time else 0)
        event = kernels.Event(
            chunk.marks, chunk.gaps, chunk.times, state.start, own["marks"].table, gaps, self.scale,
            self.log_rates, turns, int(LONGEST),
        )  # fmt: skip
        held = state.memory["value"], state.memory["lse"]
        found = None if prepared.plans is None else kernels.update(prepared.plans, event, *held)
        return None if found is None else found[:2]

    def _parts(self, chunk: Chunk, clock: Float64[Tensor, "b t"]) -> Float[Tensor, "b t d"]:
        """Mark, time since the start and log gap of each event, as far as asked for, in one vector."""
        tokens: Tensor = self.marks(chunk.marks)
        if self.absolute_time:
            tokens = tokens + sinusoids(clock, tokens.shape[-1]).to(tokens.dtype)
        if self.gaps is not None:
            tokens = tokens + self.gaps(self.scale.standard(chunk.gaps))
        return tokens

    def _attended(self, chunk: Chunk, clock: Float64[Tensor, "b t"]) -> tuple[Tensor, Tensor, Tensor]:
        """Queries (depth, h, s, c), keys and values (b, depth, h, t, c) of all blocks."""
        prepared, tokens = self.stack.observation.prepared(self.embed), self._parts(chunk, clock)
        k, v = self.stack.observation(tokens if self.embed is None else self.embed(tokens), prepared)
        return prepared.queries, k, _turned(v, clock[:, None, None]) if self.relative_time else v

    def _observe_one(self, chunk: Chunk, clock: Float64[Tensor, "b 1"]) -> AttentionState:
        """One event of each stream: its scores are the log-normalisers, its values what every slot reads."""
        seen = self.stack.observe(self._parts(chunk, clock), chunk.mask, embed=self.embed)
        rates = self._rates()
        value, lse, now = seen.value, seen.lse, clock[:, :, None, None]
        return AttentionState(
            _turned(value, now) if self.relative_time else value,
            lse if rates is None else lse + rates * now,
            seen.count,
        )

    def _observe_some(self, chunk: Chunk, clock: Float64[Tensor, "b t"]) -> AttentionState:
        """Several events: rate x time is one more channel of queries and keys, counted from the last."""
        (q, k, v), rates = self._attended(chunk, clock), self._rates()
        if rates is None:
            return AttentionState.observe(q, k, v, chunk.mask)
        last = clock[:, -1:]
        ago = (clock - last).to(k.dtype)[:, None, None, :, None].expand(*k.shape[:-1], 1)
        q = torch.cat([q, rates[..., None].to(q.dtype)], -1)
        seen = AttentionState.observe(q, torch.cat([k, ago], -1), F.pad(v, (0, 1)), chunk.mask)
        return AttentionState(seen.value[..., :-1], seen.lse + rates * last[:, :, None, None], seen.count)

    def _known(
        self, value: Float[Tensor, "n depth h s c"], lse: Float[Tensor, "n depth h s"],
        clock: Float64[Tensor, " n"], gaps: Float64[Tensor, "n k"], marks: Int64[Tensor, "n k"],
        *, rates: Float64[Tensor, "depth h s"] | None,
    ) -> Float[Tensor, "n d"]:  # fmt: skip
        """What n states, each with its last events, say of the next one."""
        now = clock[:, None, None, None]
        parts: Any = self._modules  # past the look-ups of modules: small queries feel those
        value = self._back(value, clock) if self.relative_time else value.to(self.dtype)
        latents = self.latents.expand(value.shape[0], -1, -1)
        known = applied(parts["project"], parts["stack"].read_value(value, latents)[-1].flatten(1))
        if "last" in parts:
            last = parts["last_mark"](marks) + parts["last_gap"](self.scale.standard(gaps))
            known = known + applied(parts["last"], last.flatten(1))
        if "mass" in parts:
            ago = lse if rates is None else lse - rates * now
            known = known + applied(parts["mass"], _softplus(ago).to(known.dtype).flatten(1))
        return applied(parts["norm"], known)

    def _back(
        self, value: Float[Tensor, "n depth h s c"], clock: Float64[Tensor, " n"]
    ) -> Float[Tensor, "n depth h s c"]:
        """Values as of now, in the model's precision."""
        found = None
        if self.dtype == torch.float32 and not torch.is_grad_enabled():
            found = kernels.turned(value, -clock, _turns_on_cpu(value.shape[-1] // 2))
        return _turned(value.to(self.dtype), -clock[:, None, None, None]) if found is None else found


def _spread(stack: CMABStack) -> Float[Tensor, "depth h s"]:
    """Initial log-rates: slots remember from one typical gap to a few hundred."""
    depth, heads, slots, _ = stack.layout
    return torch.linspace(-6.0, 1.0, slots).expand(depth, heads, slots).clone()


def _softplus(numbers: Tensor) -> Tensor:
    """log(1 + exp); exported, of simpler functions: onnxruntime has none of float64."""
    if not torch.compiler.is_exporting():
        return F.softplus(numbers)
    return numbers.clamp_min(0.0) + (1.0 + (-numbers.abs()).exp()).log()


def _turns(pairs: int, device: torch.device | None = None) -> Float64[Tensor, " p"]:
    return torch.logspace(0, -3, pairs, dtype=torch.float64, device=device)


_kept: dict[int, Tensor] = {}  # of numbers alone: machine code looks at them every time


def _turns_on_cpu(pairs: int) -> Float64[Tensor, " p"]:
    """The same, remembered, but not those that are symbols of a tracer: the next call would find them."""
    found = _kept[pairs] if pairs in _kept else _turns(pairs, torch.device("cpu"))
    return _kept.setdefault(pairs, found) if type(found) is Tensor else found


def _parameters(module: nn.Module) -> list[Tensor]:
    """As `module.parameters()`, in a tenth of the time."""
    own = [p for p in module._parameters.values() if p is not None]
    inner = (part for part in module._modules.values() if part is not None)
    return own + [p for part in inner for p in _parameters(part)]


def _turned(v: Float[Tensor, "*h c"], clock: Float64[Tensor, "*#h"]) -> Float[Tensor, "*h c"]:
    """Pairs of channels as complex numbers times exp(i w clock), with w from 1 down to 1e-3."""
    pairs = v.shape[-1] // 2
    angles = clock[..., None] * _turns(pairs, v.device)
    cos, sin = angles.cos().to(v.dtype), angles.sin().to(v.dtype)
    a, b = v[..., : 2 * pairs].chunk(2, -1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos, v[..., 2 * pairs :]], -1)

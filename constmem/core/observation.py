"""What a stack of blocks makes of data: keys, values and fixed queries of all blocks, in one pass.

The slots are parameters, so everything that depends on them alone can be computed before any data come: a
`Prepared`, which never changes. Where gradients are not wanted an observation keeps the last one it made, and
uses it again while every bit of the weights is the same (`kernels.Snapshot`).
"""

from collections.abc import Mapping
from math import sqrt
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn
from torch.autograd import forward_ad

from constmem import kernels
from constmem.core import checks
from constmem.core.algebra import bias_of
from constmem.core.layers import MLP, check_heads, normed_slots, refreshed
from constmem.core.state import AttentionState
from constmem.kernels import Snapshot

NAMES = "slots", "slots_scale", "slots_shift", "tokens_scale", "tokens_shift", "query", "key_value"


class Prepared(NamedTuple):
    """All that an observation, and an embedding before it, compute from their weights alone; immutable."""

    queries: Float[Tensor, "depth h s c"]  # fixed, scaled
    weight: Float[Tensor, "kv d"]  # from normalised tokens to keys and values of all blocks
    shift: Float[Tensor, " kv"]
    single: tuple[Float[Tensor, "sv d"], Float[Tensor, " sv"]] | None = None  # one token's scores and values
    plans: kernels.Plans | None = None  # of faster ways; None where gradients go through the weights


class _Kept(NamedTuple):
    """A `Prepared`, and by what to know that it still holds."""

    embed: MLP | None
    where: str
    settings: tuple[object, ...]
    weights: Snapshot
    known: Snapshot | None  # the caller's, of these weights and more: while it is fresh, they hold
    prepared: Prepared

    def serves(self, embed: MLP | None) -> bool:
        """Whether it was made for this, if no weight has changed."""
        return self.embed is embed and self.settings == _settings(self.where)


class Observation(nn.Module):
    """The slots of `depth` blocks, and their view of tokens as keys and values.

    One normalisation of the tokens serves all blocks: its scale and shift, which each block has of
    its own, are folded into one wide projection.
    """

    matrices = ("query", "key_value")  # for the optimiser: linear maps, not tables of vectors

    def __init__(self, *, dim: int, depth: int, num_slots: int, num_heads: int) -> None:
        super().__init__()
        check_heads(dim, num_heads)
        self.dim, self.num_heads = dim, num_heads
        self._kept: _Kept | None = None
        std = 1 / sqrt(dim)
        self.slots = nn.Parameter(torch.randn(depth, num_slots, dim))
        self.slots_scale = nn.Parameter(torch.ones(depth, 1, dim))
        self.slots_shift = nn.Parameter(torch.zeros(depth, 1, dim))
        self.tokens_scale = nn.Parameter(torch.ones(depth, 1, dim))
        self.tokens_shift = nn.Parameter(torch.zeros(depth, dim, 1))
        self.query = nn.Parameter(std * torch.randn(depth, dim, dim))
        self.key_value = nn.Parameter(std * torch.randn(2, depth, dim, dim))

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_kept": None}  # a copy has weights of its own

    def weights(self) -> list[Tensor]:
        """What it observes with: its parameters, or what pruning and parametrizations make of them."""
        own = refreshed(self)._parameters if self._forward_pre_hooks else self._parameters
        return [own[name] if name in own else getattr(self, name) for name in NAMES]  # type: ignore[misc]

    def prepare(self) -> Prepared:
        """Compute the fixed queries, scaled, and the wide projection to keys and values; differentiable."""
        return _prepare(self._named(), self.num_heads)

    def prepare_exactly(self) -> Prepared:
        """The same in float64, where no setting has products rounded."""
        return _exactly(self._named(), self.num_heads)

    def prepared(self, embed: MLP | None = None) -> Prepared:
        """`prepare`, with plans of faster ways; kept, where no gradient is wanted, while no weight changes.

        Args:
            embed: makes tokens of points.
        """
        kept = None if torch.is_grad_enabled() else self._kept
        if kept is not None and kept.known is not None and kept.known.fresh and kept.serves(embed):
            return kept.prepared
        where = self.slots.device
        if torch.is_grad_enabled() or where.type not in ("cpu", "cuda") or not Snapshot.possible(where):
            return self.prepare()
        weights = self._read(embed)
        known = Snapshot.covering(weights)
        if kept is not None and kept.serves(embed) and kept.weights.holds(weights):
            kept = kept._replace(known=known)
        else:
            made_for = embed, where.type, _settings(where.type)
            kept = _Kept(*made_for, Snapshot(weights), known, self._frozen(embed))
        self._kept = kept
        return kept.prepared

    def _frozen(self, embed: MLP | None) -> Prepared:
        """`prepare`, with all that can be computed before any data come, of copies of the weights."""
        prepared, layers = self.prepare(), [] if embed is None else embed.weights()
        single = kernels.absorb(*prepared[:3]).single
        if layers is None:  # of an embedding that is no plain perceptron
            return prepared._replace(single=single)
        own = {name: _copy(t) for name, t in self._named().items()}
        copies = [(_copy(weight), _copy(bias)) for weight, bias in layers]
        plans = kernels.Plans(lambda: _exactly(own, self.num_heads)[:3], copies, own["slots"])
        return prepared._replace(single=single, plans=plans)

    def _read(self, embed: MLP | None) -> list[Tensor]:
        """All weights that a `Prepared` depends on."""
        layers = [] if embed is None else embed.weights() or []
        return [*self.weights(), *(t for layer in layers for t in layer)]

    def _named(self) -> dict[str, Tensor]:
        return dict(zip(NAMES, self.weights(), strict=True))

    def observe(
        self,
        data: Float[Tensor, "b n i"],
        mask: Tensor | None = None,
        log_weight: Tensor | None = None,
        *,
        embed: MLP | None = None,
    ) -> AttentionState:
        """The state of exactly these tokens (or points that `embed` makes tokens), for all blocks at once."""
        prepared = self.prepared(embed)
        bias = None if mask is log_weight is None else bias_of(mask, log_weight, data.dtype)
        found = None if prepared.plans is None else kernels.observe(prepared.plans, data, bias)
        if found is not None:
            shape = data.shape[0], *prepared.queries.shape
            count = _counted(data) if mask is None else mask.sum(-1)
            return AttentionState(found[0].view(shape), found[1].view(shape[:-1]), count)
        tokens = data if embed is None else embed(data)
        if tokens.shape[1] == 1 and bias is None:
            single = prepared.single or kernels.absorb(*prepared[:3]).single
            out = F.linear(F.layer_norm(tokens[:, 0], (self.dim,)), *single)
            return AttentionState.of(*self._of_one(out), _counted(data))
        k, v = self.forward(tokens, prepared)
        return AttentionState.observe(prepared.queries, k, v, mask, log_weight)

    def extended(
        self,
        state: AttentionState,
        data: Float[Tensor, "b 1 i"],
        *,
        embed: MLP | None = None,
    ) -> AttentionState | None:
        """The state with one point more for each task, where that takes one call and all is surely finite."""
        if torch.is_grad_enabled() or not _extensible(state, data):
            return None
        prepared = self.prepared(embed)
        if prepared.plans is None or state.value.shape[1:] != prepared.queries.shape:
            return None
        limit = checks.largest(data.dtype)
        found = kernels.update(prepared.plans, data, state.value, state.lse, limit)
        if found is None:
            return None
        made = AttentionState(found.value, found.lse, state.count + 1, state.fingerprint)
        if found.numbers is None:
            finite = checks.surely_finite(data)
        else:
            finite = checks.within(found.numbers(), limit)
        return made if finite else None  # asked last: a GPU is at work meanwhile

    def chunk(self) -> int:
        """How many tokens are best observed at a time: machine code holds only tiles of them."""
        slots = self.slots
        return 4096 if torch.is_grad_enabled() else kernels.chunk(slots.dtype, slots.device) or 4096

    def forward(
        self, tokens: Float[Tensor, "b n d"], prepared: Prepared | None = None
    ) -> tuple[Float[Tensor, "b depth h n c"], Float[Tensor, "b depth h n c"]]:
        """Keys and values of every token for every block."""
        prepared = self.prepared() if prepared is None else prepared
        kv = F.linear(F.layer_norm(tokens, (self.dim,)), prepared.weight, prepared.shift)
        b, n, _ = kv.shape
        kv = kv.view(b, n, 2, len(self.slots), self.num_heads, self.dim // self.num_heads)
        k, v = kv.permute(2, 0, 3, 4, 1, 5).unbind(0)
        return k, v

    def _of_one(self, out: Float[Tensor, "b sv"]) -> tuple[Tensor, Tensor]:
        """The softmax over one token is one: its scores are the lse, its values every slot's value."""
        depth, slots, dim = self.slots.shape
        heads = self.num_heads
        scores, v = out.split([depth * heads * slots, depth * dim], -1)
        value = v.view(-1, depth, heads, 1, dim // heads).expand(-1, -1, -1, slots, -1)
        return value, scores.reshape(-1, depth, heads, slots)


def _prepare(own: Mapping[str, Tensor], heads: int) -> Prepared:
    """A `Prepared` of parameters by their `NAMES`; tokens' scale and shift go into the projection."""
    scale = 1 / sqrt(own["query"].shape[-1] // heads)
    q = normed_slots(own["slots"], own["slots_scale"], own["slots_shift"]) @ (own["query"] * scale).mT
    q = q.unflatten(-1, (heads, -1)).transpose(1, 2).contiguous()
    weight = (own["key_value"] * own["tokens_scale"]).flatten(0, 2)
    return Prepared(q, weight, (own["key_value"] @ own["tokens_shift"]).flatten())


def _exactly(own: Mapping[str, Tensor], heads: int) -> Prepared:
    with torch.autocast(own["slots"].device.type, enabled=False):
        return _prepare({name: t.double() for name, t in own.items()}, heads)


def _extensible(state: AttentionState, data: Tensor) -> bool:
    """Whether these are plain states where the points are, as many as there are points."""
    value = state.value
    same = len(value) == len(data) and value.device == data.device
    return same and data.dtype == torch.float32 and state.low is None


def _settings(where: str) -> tuple[object, ...]:
    """How PyTorch computes products there, and whether numbers are more than numbers to it."""
    autocast = torch.is_autocast_enabled(where), torch.get_autocast_dtype(where)
    with_tangents = torch._C._is_tracing(), forward_ad._current_level
    return *autocast, torch.get_float32_matmul_precision(), *with_tangents


def _copy(t: Tensor) -> Tensor:
    return t.detach().clone(memory_format=torch.contiguous_format)


def _counted(data: Float[Tensor, "b n i"]) -> Tensor:
    if torch.compiler.is_exporting():  # of which a filled tensor would keep the number
        return torch.zeros(data.shape[:1], dtype=torch.int64, device=data.device) + data.shape[1]
    return torch.full(data.shape[:1], data.shape[1], device=data.device)

"""What a stack of blocks makes of data: keys, values and fixed queries of all blocks, in one pass.

The slots are parameters, so everything that depends on them alone is computed once and remembered while
they stay the same; where there is machine code for it, points go through embedding, normalisation,
projection and softmax without a tensor of their size ever being written.
"""

from collections.abc import Callable
from math import sqrt
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from constmem.algebra import bias_of
from constmem.attention import check_heads
from constmem.embed import MLP
from constmem.kernels import native
from constmem.state import AttentionState


class Prepared(NamedTuple):
    """What an `Observation` computes from its parameters alone, before it meets any data."""

    queries: Float[Tensor, "depth h s c"]
    weight: Float[Tensor, "kv d"]
    shift: Float[Tensor, " kv"]


class _Memory(NamedTuple):
    """A `Prepared`, and by what to know that it still holds."""

    key: object
    bits: Callable[[], object]
    sum: object
    prepared: Prepared
    absorbed: tuple[Tensor, Tensor]
    plans: dict[tuple[int, ...], native.Plan]  # by where the weights of an embedding lie


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
        self._memory: _Memory | None = None
        std = 1 / sqrt(dim)
        self.slots = nn.Parameter(torch.randn(depth, num_slots, dim))
        self.slots_scale = nn.Parameter(torch.ones(depth, 1, dim))
        self.slots_shift = nn.Parameter(torch.zeros(depth, 1, dim))
        self.tokens_scale = nn.Parameter(torch.ones(depth, 1, dim))
        self.tokens_shift = nn.Parameter(torch.zeros(depth, dim, 1))
        self.query = nn.Parameter(std * torch.randn(depth, dim, dim))
        self.key_value = nn.Parameter(std * torch.randn(2, depth, dim, dim))

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_memory": None}  # a copy has weights of its own to remember things of

    def normed_slots(self) -> Float[Tensor, "depth s d"]:
        """The slots after their normalisation."""
        return F.layer_norm(self.slots, (self.dim,)) * self.slots_scale + self.slots_shift

    def prepared(self) -> Prepared:
        """The fixed queries, scaled, and the wide projection to keys and values.

        On a CPU, where computing them would take most of a small update's time, they are remembered
        while the parameters stay the same. Version counters do not tell all, since some code writes to
        `parameter.data` behind their back: so a sample of their bits is added up each time.
        """
        parameters = [p for p in self._parameters.values() if p is not None]
        if torch.is_grad_enabled() or parameters[0].device.type != "cpu" or native.traced():
            return self._prepare()
        autocast = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")
        key = parameters[0].dtype, autocast, [_identity(p) for p in parameters]
        memory = self._memory
        if memory is None or memory.key != key or memory.sum != memory.bits():
            bits = _bits_of([p.detach() for p in parameters])
            prepared = self._prepare()
            memory = _Memory(key, bits, bits(), prepared, _absorbed(prepared), {})
            self._memory = memory
        return memory.prepared

    def _prepare(self) -> Prepared:
        scale = 1 / sqrt(self.dim // self.num_heads)
        q = self.normed_slots() @ (self.query * scale).mT
        q = q.unflatten(-1, (self.num_heads, -1)).transpose(1, 2).contiguous()
        weight = (self.key_value * self.tokens_scale).flatten(0, 2)
        return Prepared(q, weight, (self.key_value @ self.tokens_shift).flatten())

    def observe(
        self,
        data: Float[Tensor, "b n i"],
        mask: Tensor | None = None,
        log_weight: Tensor | None = None,
        *,
        embed: MLP | None = None,
    ) -> AttentionState:
        """The state of exactly these tokens (or points that `embed` makes tokens), for all blocks at once."""
        prepared = self.prepared()
        plan = self._plan(prepared, data, embed)
        if plan is not None:
            value, lse = native.observe(plan, data, bias_of(mask, log_weight, data.dtype))
            shape = data.shape[0], *prepared.queries.shape[:3]
            count = torch.full(data.shape[:1], data.shape[1]) if mask is None else mask.sum(-1)
            return AttentionState(value.view(*shape, -1), lse.view(shape), count)
        tokens = data if embed is None else embed(data)
        if tokens.shape[1] == 1 and mask is None and log_weight is None:
            return self._observe_single(tokens[:, 0], prepared)
        k, v = self._keys_values(tokens, prepared)
        return AttentionState.observe(prepared.queries, k, v, mask, log_weight)

    def chunk(self) -> int:
        """How many tokens are best observed at a time: machine code holds only tiles of them."""
        slots = self.slots
        plain = torch.is_grad_enabled() or slots.device.type != "cpu" or slots.dtype != torch.float32
        return 4096 if plain or not native.usable() else 65_536

    def _plan(self, prepared: Prepared, data: Tensor, embed: MLP | None) -> native.Plan | None:
        """How machine code observes such data, where there is any, nothing is learned, all is float32."""
        memory = self._memory
        if memory is None or memory.prepared is not prepared or data.shape[1] == 0:
            return None
        layers = [] if embed is None else embed.weights()
        tensors = [data, *prepared, *(t for layer in layers for t in layer)]
        if any(t.dtype != torch.float32 for t in tensors) or torch.is_autocast_enabled("cpu"):
            return None
        if not all(t.is_contiguous() for layer in layers for t in layer):
            return None
        if not native.usable():
            return None
        key = tuple(t.data_ptr() for layer in layers for t in layer)
        if key not in memory.plans:
            memory.plans.clear()
            weights = native.pack(prepared.queries.flatten(0, 1), prepared.weight, prepared.shift)
            memory.plans[key] = native.Plan(weights, layers)
        return memory.plans[key]

    def _observe_single(self, token: Float[Tensor, "b d"], prepared: Prepared) -> AttentionState:
        """The softmax over one token is one: its scores are the lse, its values every slot's value."""
        depth, heads, slots, channels = prepared.queries.shape
        known = self._memory is not None and self._memory.prepared is prepared
        absorbed = self._memory.absorbed if self._memory and known else _absorbed(prepared)
        out = F.linear(F.layer_norm(token, (self.dim,)), *absorbed)
        scores, v = out.split([depth * heads * slots, depth * heads * channels], -1)
        count = torch.ones(token.shape[0], dtype=torch.int64, device=token.device)
        value = v.view(-1, depth, heads, 1, channels).expand(-1, -1, -1, slots, -1)
        return AttentionState.of(value, scores.reshape(-1, depth, heads, slots), count)

    def forward(
        self, tokens: Float[Tensor, "b n d"], prepared: Prepared | None = None
    ) -> tuple[Float[Tensor, "b depth h n c"], Float[Tensor, "b depth h n c"]]:
        """Keys and values of every token for every block."""
        return self._keys_values(tokens, self.prepared() if prepared is None else prepared)

    def _keys_values(self, tokens: Tensor, prepared: Prepared) -> tuple[Tensor, Tensor]:
        kv = F.linear(F.layer_norm(tokens, (self.dim,)), prepared.weight, prepared.shift)
        b, n, _ = kv.shape
        kv = kv.view(b, n, 2, len(self.slots), self.num_heads, self.dim // self.num_heads)
        k, v = kv.permute(2, 0, 3, 4, 1, 5).unbind(0)
        return k, v


def _absorbed(prepared: Prepared) -> tuple[Float[Tensor, "sv d"], Float[Tensor, " sv"]]:
    """The queries absorbed into the key projection: one product gives a token's scores and values."""
    q = prepared.queries
    wk, wv = prepared.weight.chunk(2)
    bk, bv = prepared.shift.chunk(2)
    scores = q @ wk.unflatten(0, (*q.shape[:2], -1)), q @ bk.unflatten(0, (*q.shape[:2], -1, 1))
    return torch.cat([scores[0].flatten(0, 2), wv]), torch.cat([scores[1].flatten(), bv])


def _bits_of(parameters: list[Tensor]) -> Callable[[], object]:
    """Adds up the bits of small parameters, and of every 61st number of large ones."""
    if native.usable() and all(p.element_size() >= 4 for p in parameters):
        return native.Watch(parameters, _stride).sum
    words = {8: torch.int64, 4: torch.int32, 2: torch.int16}
    bits = [p.view(-1).view(words[p.element_size()])[:: _stride(p)] for p in parameters]
    return lambda: [int(b.sum()) for b in bits]


def _stride(p: Tensor) -> int:
    return 61 if p.numel() > 999 else 1


def _identity(p: Tensor) -> tuple[int, int]:
    return p.data_ptr(), 0 if p.is_inference() else p._version

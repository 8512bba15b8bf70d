"""What a stack of blocks makes of data: keys, values and fixed queries of all blocks, in one pass.

The slots are parameters, so everything that depends on them alone is computed once and remembered while
they stay the same; where there is machine code for it, or a kernel for the GPU, points go through
embedding, normalisation, projection and softmax without a tensor of their size ever being written.
"""

from collections.abc import Callable
from math import sqrt
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from constmem.core.algebra import bias_of
from constmem.core.layers import MLP, check_heads
from constmem.core.preparation import NAMES, Prepared, normed_slots, prepare
from constmem.core.state import AttentionState
from constmem.core.unchanged import bits_of, identities, products
from constmem.kernels import gpu, native
from constmem.kernels.absorption import absorb

UNKNOWN: Any = object()  # of a plan: not made yet, or cleared by another thread


class _Memory(NamedTuple):
    """A `Prepared`, and by what to know that it still holds."""

    key: object
    bits: Callable[[], object]
    sum: object
    prepared: Prepared
    absorbed: tuple[Tensor, Tensor]
    plans: dict[object, Any]  # of the CPU's machine code or the GPU's kernels, by the embedding they include
    latest: tuple[object, Any] = (None, None)  # one more point's plan, and by what to know that it holds


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

    def train(self, mode: bool = True) -> "Observation":
        """As of any module; what was computed from the weights is forgotten where the mode changes."""
        self._memory = self._memory if mode == self.training else None
        return super().train(mode)

    def normed_slots(self) -> Float[Tensor, "depth s d"]:
        """The slots after their normalisation."""
        return normed_slots(self._own())

    def prepared(self) -> Prepared:
        """The fixed queries, scaled, and the wide projection to keys and values.

        Computing them would take most of a small update's time: they are remembered while the parameters
        stay the same. Version counters do not tell all, since some code writes to `parameter.data` behind
        their back: so on a CPU a sample of their bits is added up each time. On a GPU, where that would mean
        waiting for it, version counters are all there is.
        """
        parameters = [p for p in self._parameters.values() if p is not None]
        where = parameters[0].device.type
        if native.traced() or (where == "cuda" and torch.cuda.is_current_stream_capturing()):
            return self._prepare()
        if torch.is_grad_enabled() or where not in ("cpu", "cuda"):
            self._memory = None  # a step may follow, and fused optimisers write without counting
            return self._prepare()
        key = parameters[0].dtype, products(where), identities(parameters)
        memory = self._memory
        if memory is None or memory.key != key or memory.sum != memory.bits():
            bits = bits_of([p.detach() for p in parameters]) if where == "cpu" else bool
            prepared = self._prepare()
            memory = _Memory(key, bits, bits(), prepared, absorb(*prepared).single, {})
            self._memory = memory
        return memory.prepared

    def _known(self, prepared: Prepared) -> _Memory | None:
        """What is remembered with it; nothing for a compiler, which would compile anew once it changes."""
        memory = None if native.traced() else self._memory
        return memory if memory is not None and memory.prepared is prepared else None

    def _own(self) -> dict[str, Tensor]:
        return {name: getattr(self, name) for name in NAMES}

    def _prepare(self) -> Prepared:
        return prepare(self._own(), self.num_heads)

    def prepared_exactly(self) -> Prepared:
        """The same in float64, where no setting has products rounded; never remembered."""
        self._memory = None if torch.is_grad_enabled() else self._memory  # as above
        with torch.autocast(self.slots.device.type, enabled=False):
            return prepare({name: p.double() for name, p in self._own().items()}, self.num_heads)

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
        bias = bias_of(mask, log_weight, data.dtype)
        found = self._by_machine(prepared, data, bias, embed)
        if found is not None:
            shape = data.shape[0], *prepared.queries.shape
            count = _counted(data) if mask is None else mask.sum(-1)
            return AttentionState(found[0].view(shape), found[1].view(shape[:-1]), count)
        tokens = data if embed is None else embed(data)
        if tokens.shape[1] == 1 and bias is None:
            memory = self._known(prepared)
            single = absorb(*prepared).single if memory is None else memory.absorbed
            out = F.linear(F.layer_norm(tokens[:, 0], (self.dim,)), *single)
            return AttentionState.of(*self._single(out), _counted(data))
        k, v = self._keys_values(tokens, prepared)
        return AttentionState.observe(prepared.queries, k, v, mask, log_weight)

    def extended(
        self,
        state: AttentionState,
        data: Float[Tensor, "b 1 i"],
        *,
        embed: MLP | None = None,
        weights: object = None,
    ) -> AttentionState | None:
        """The state with one point more for each task, where machine code can do it in one call.

        Args:
            weights: what equals itself only while no weight is replaced or changed in place, here and in
                `embed`; None if that is not known, and each has to be looked at.
        """
        if torch.is_grad_enabled() or not _extensible(state, data):
            return None
        kernels = gpu.usable(data.device)
        if not (0 < data.shape[0] <= gpu.FEW if kernels else native.usable()):
            return None
        memory = self._ready(data, embed, weights, kernels)
        if memory is None or state.value.shape[1:] != memory.prepared.queries.shape:
            return None
        plan, given = memory.latest[1], (data, state.value, state.lse)
        if plan is None:
            return None
        found = gpu.attempt(lambda: gpu.extended(plan, *given)) if kernels else native.update(plan, *given)
        return None if found is None else AttentionState(*found, state.count + 1, state.fingerprint)

    def _ready(self, data: Tensor, embed: MLP | None, weights: object, kernels: bool) -> _Memory | None:
        """What is remembered, with the latest plan for one more point: by kernels, or machine code."""
        where = data.device.type
        memory, key = self._memory, (kernels, where, products(where), weights)
        if weights and memory and memory.latest[0] == key and memory.sum == memory.bits():
            return memory
        prepared, memory = self.prepared(), self._memory
        if memory is None or memory.prepared is not prepared:
            return None
        layers = [] if embed is None else embed.weights()
        plan: Any
        if kernels:
            plan = gpu.attempt(lambda: self._kernel_plan(memory, layers))
        else:
            plan = self._plan(memory, data, layers)
            if plan is not None and plan.weights.channels != plan.shape[-1]:  # padded channels
                plan = None
        self._memory = ready = memory._replace(latest=(key, plan))
        return ready

    def chunk(self) -> int:
        """How many tokens are best observed at a time: machine code holds only tiles of them."""
        slots = self.slots
        if torch.is_grad_enabled() or slots.dtype == torch.float64:
            return 4096
        if slots.device.type != "cpu":
            return gpu.CHUNK if gpu.usable(slots.device) else 4096
        return native.LONGEST if slots.dtype == torch.float32 and native.usable() else 4096

    def _by_machine(
        self, prepared: Prepared, data: Tensor, bias: Tensor | None, embed: MLP | None
    ) -> tuple[Tensor, Tensor] | None:
        """Value and lse by the CPU's machine code or the GPU's kernels, where either serves."""
        memory = self._known(prepared)
        layers = [] if embed is None else embed.weights()
        width = layers[0][0].shape[1] if layers else self.dim
        if memory is None or data.shape[1] == 0 or data.shape[2] != width:
            return None
        bias = None if bias is None else bias.expand(data.shape[:2])
        if gpu.usable(data.device):
            return gpu.attempt(lambda: self._by_kernels(memory, data, bias, layers))
        plan = self._plan(memory, data, layers)
        return None if plan is None else native.observe(plan, data, bias)

    def _by_kernels(
        self, memory: _Memory, data: Tensor, bias: Tensor | None, layers: list[tuple[Tensor, Tensor]]
    ) -> tuple[Tensor, Tensor] | None:
        """What the GPU's kernels make of the data; None of what they cannot take."""
        plan = self._kernel_plan(memory, layers)
        if plan is None or data.shape[0] == 0:
            return None
        if data.shape[1] > 1 or bias is not None:
            return gpu.observe(plan, data, bias)
        with torch.autocast("cuda", enabled=False):
            tokens = gpu.normed_tokens(plan, data[:, 0])[:, : plan.width]
            value, lse = self._single(F.linear(tokens, *plan.single))
        return value[..., :1, :].double().expand_as(value), lse.double()

    def _kernel_plan(self, memory: _Memory, layers: list[tuple[Tensor, Tensor]]) -> gpu.Plan | None:
        """How the GPU's kernels observe, where they can."""
        precision = gpu.precision_of(self.slots.dtype)
        if precision is None:
            return None
        key = precision, *identities(t for layer in layers for t in layer)
        plan: gpu.Plan | None = memory.plans.get(key, UNKNOWN)
        if plan is UNKNOWN:
            plan = gpu.plan(absorb(*self.prepared_exactly()), layers, precision)
            memory.plans.clear()
            memory.plans[key] = plan
        return plan

    def _plan(self, memory: _Memory, data: Tensor, layers: list[tuple[Tensor, Tensor]]) -> native.Plan | None:
        """How machine code observes such data, where there is any, all is float32 and on the CPU."""
        if data.dtype != torch.float32 or data.device.type != "cpu" or not native.usable():
            return None
        key = tuple((t.data_ptr(), t.is_contiguous(), t.dtype) for layer in layers for t in layer)
        plan: native.Plan | None = memory.plans.get(key, UNKNOWN)
        if plan is UNKNOWN:
            known = all(native.reads(t) for t in (self.slots, *(t for layer in layers for t in layer)))
            exact = (t.float() for t in self.prepared_exactly()) if known else ()
            plan = native.Plan(native.pack(*exact), layers) if known else None
            memory.plans.clear()
            memory.plans[key] = plan
        return plan

    def _single(self, out: Float[Tensor, "b sv"]) -> tuple[Tensor, Tensor]:
        """The softmax over one token is one: its scores are the lse, its values every slot's value."""
        depth, slots, dim = self.slots.shape
        heads = self.num_heads
        scores, v = out.split([depth * heads * slots, depth * dim], -1)
        value = v.view(-1, depth, heads, 1, dim // heads).expand(-1, -1, -1, slots, -1)
        return value, scores.reshape(-1, depth, heads, slots)

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


def _extensible(state: AttentionState, data: Tensor) -> bool:
    """Whether these are plain float64 states where the points are, as many as there are points."""
    value = state.value
    return (
        value.dtype == state.lse.dtype == torch.float64
        and value.device == data.device
        and data.dtype == torch.float32
        and state.low is None
        and value.shape[:-1] == state.lse.shape
        and value.shape[0] == data.shape[0]
    )


def _counted(data: Float[Tensor, "b n i"]) -> Tensor:
    return torch.full(data.shape[:1], data.shape[1], device=data.device)

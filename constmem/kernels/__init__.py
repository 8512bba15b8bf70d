"""How it is computed: functions on tensors, each of which takes the fastest path that can serve it.

- `attend` (and `attend_backward`) is attention by PyTorch's operators, `scores` and `EMPTY` what it means.
- `observe`, `update` and `merge` make and join states: by machine code on a CPU, by kernels on a GPU. `Plans`
  lay out the weights for both, of which a `Snapshot` tells whether they are still the same.
- `fold` conditions while learning; `attention` and `feed_forward` are whole layers: kernels on a GPU.
- A `Program` of `Layer`s reads, `quantiles`, `gap_vectors` and `turned` predict events: machine code.
- `Graphs` captures what a model does over and over on a GPU.

All but the first return None where no such path serves, and PyTorch's operators do. A path that fails says so
in one line of the log and is not tried again: `PATHS` shows why (`failed`), `reset()` forgets it.
"""

from collections.abc import Callable, Sequence
from math import prod
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from constmem.kernels import cpu, gpu
from constmem.kernels.cpu import Event
from constmem.kernels.cpu_reading import Kind, Layer, Program, gap_vectors, quantiles, serves, turned
from constmem.kernels.fused import attend, attend_backward
from constmem.kernels.gpu_fold import fold
from constmem.kernels.graphs import Graphs
from constmem.kernels.layers import attention, feed_forward
from constmem.kernels.paths import CPU, GPU, PATHS, cache_folder, library
from constmem.kernels.reference import (
    EMPTY,
    Chunk,
    Others,
    OthersLse,
    Slots,
    SlotsLse,
    absorb,
    accumulate,
    joined,
    scores,
)
from constmem.kernels.snapshot import Snapshot

__all__ = [
    "EMPTY", "PATHS", "Chunk", "Event", "Graphs", "Kind", "Layer", "Plans", "Program", "Snapshot", "absorb",
    "accumulate", "attend", "attend_backward", "attention", "cache_folder", "chunk", "feed_forward", "fold",
    "gap_vectors", "joined", "merge", "observe", "quantiles", "reset", "scores", "serves", "turned", "update",
]  # fmt: skip

Exact = Callable[[], tuple[Float[Tensor, "*depth h s c"], Float[Tensor, "kv d"], Float[Tensor, " kv"]]]
_UNKNOWN: Any = object()


class Plans:
    """How the paths observe with one set of weights, which does not change: laid out at first use.

    Args:
        exact: gives the queries, and the projection to keys and values, in float64.
        layers: weight and bias of each layer of an embedding; none where data are tokens.
        slots: one of the weights, of the width of a token.
    """

    def __init__(self, exact: Exact, layers: Sequence[tuple[Tensor, Tensor]], slots: Tensor) -> None:
        self.exact, self.layers, self.slots = exact, layers, slots
        self.inputs = layers[0][0].shape[1] if layers else slots.shape[-1]
        self._laid: dict[str, Any] = {}  # by precision; another thread may lay out the same at the same time

    def cpu(self) -> cpu.Plan | None:
        """For machine code, if there is any that can read these weights."""
        plan: cpu.Plan | None = self._laid.get("cpu", _UNKNOWN)
        if plan is _UNKNOWN:
            weights = [self.slots, *(t for layer in self.layers for t in layer)]
            known = cpu.usable() and all(map(cpu.reads, weights))
            exact = (t.float() for t in self.exact()) if known else ()
            plan = self._laid["cpu"] = cpu.Plan(cpu.pack(*exact), self.layers) if known else None
            if known:
                CPU.chosen()
        return plan

    def gpu(self) -> gpu.Plan | None:
        """For the GPU's kernels, in the precision that is asked for, if they can take it."""
        precision = gpu.precision_of(self.slots.dtype)
        if precision is None:
            return None
        plan: gpu.Plan | None = self._laid.get(precision, _UNKNOWN)
        if plan is _UNKNOWN:
            plan = self._laid[precision] = gpu.plan(absorb(*self.exact()), self.layers, precision)
        return plan


def observe(
    plans: Plans, data: Float[Tensor, "b n i"], bias: Float[Tensor, "b n"] | None
) -> tuple[Float[Tensor, "b h s c"], Float[Tensor, "b h s"]] | None:
    """Value and lse of each task's points, for heads of all blocks; those of bias `EMPTY` are left out."""
    if data.shape[1] == 0 or data.shape[2] != plans.inputs:
        return None
    bias = None if bias is None else bias.expand(data.shape[:2])
    plan = plans.cpu()
    if plan is not None:
        return cpu.observe(plan, data, bias) if cpu.reads(data) else None
    return GPU.attempt(lambda: gpu.seen(plans.gpu(), data, bias)) if gpu.usable(data.device) else None


class Updated(NamedTuple):
    """States after an update; where a GPU copies the numbers of the points, what waits for these."""

    value: Float[Tensor, "b *h s c"]
    lse: Float[Tensor, "b *h s"]
    numbers: Callable[[], list[float]] | None


def update(
    plans: Plans, data: Float[Tensor, "b 1 i"] | Event, value: Float[Tensor, "b *h s c"],
    lse: Float[Tensor, "b *h s"],
) -> Updated | None:  # fmt: skip
    """States in float64 with one point, or one event, more for each task."""
    ready = plans.cpu()
    if (data.table if isinstance(data, Event) else data).shape[-1] != plans.inputs:
        return None
    if ready is not None:
        fits = value.shape[1:].numel() == prod(ready.shape) and value.shape[:-1] == lse.shape
        doubles = value.dtype == lse.dtype == torch.float64
        made = cpu.update(ready, data, value, lse) if fits and doubles else None
        return None if made is None else Updated(*made, None)
    if isinstance(data, Event) or not 0 < data.shape[0] <= gpu.FEW or not gpu.usable(data.device):
        return None
    plan, latest = GPU.attempt(plans.gpu), Snapshot.latest()
    if plan is None:
        return None
    pending = None if latest is None else latest.pending(data.device, data.numel())
    check, numbers = pending or (None, None)
    found = GPU.attempt(lambda: gpu.extended(plan, data, value, lse, check))
    if found is None:
        return None
    return Updated(*found, numbers if len(data) <= gpu.FEWEST else None)


def merge(
    value: Slots, lse: SlotsLse, other_value: Others, other_lse: OthersLse
) -> tuple[Slots, SlotsLse] | None:
    """The algebra's `merge` of float64 tensors of one shape, in one pass."""
    given = value, lse, other_value, other_lse
    if cpu.merges(*given):
        return cpu.merge(*given)
    return GPU.attempt(lambda: gpu.merge(*given)) if gpu.merges(*given) else None


def chunk(dtype: torch.dtype, device: torch.device) -> int | None:
    """How many points are best observed at a time by what serves there; None where operators do."""
    if dtype == torch.float64 or torch.compiler.is_compiling():
        return None
    if device.type != "cpu":
        return gpu.CHUNK if gpu.usable(device) else None
    return cpu.LONGEST if dtype == torch.float32 and library() is not None else None


def reset() -> None:
    """Let all paths be tried again, as in a new process."""
    for path in PATHS:
        path.reset()
    library.cache_clear()
    gpu.forget()

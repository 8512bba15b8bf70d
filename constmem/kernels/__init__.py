"""How it is computed: functions on tensors, each of which takes the fastest path that can serve it.

`attend` is PyTorch's operators. `observe`, `update` and `merge` are machine code on a CPU and kernels of our
own on a GPU; `fold`, `attention` and `feed_forward` are such kernels. These return None where no such path
serves, and PyTorch's operators do. A path that fails says so in one line of the log and is not tried again:
`PATHS` shows them (`Path.failed`), `reset()` has them tried anew.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from constmem.kernels import cpu, gpu, library
from constmem.kernels.fused import attend, attend_backward, choose
from constmem.kernels.gpu_fold import fold
from constmem.kernels.graphs import Graphs
from constmem.kernels.layers import attention, feed_forward
from constmem.kernels.library import cache_folder
from constmem.kernels.paths import CPU, GPU, PATHS, Path, traced
from constmem.kernels.reference import EMPTY, Absorbed, Chunk, absorb, accumulate, joined, perceptron, scores

__all__ = [
    "EMPTY",
    "PATHS",
    "Absorbed",
    "Chunk",
    "Graphs",
    "Path",
    "Plans",
    "absorb",
    "accumulate",
    "attend",
    "attend_backward",
    "attention",
    "cache_folder",
    "checksum",
    "choose",
    "chunk",
    "feed_forward",
    "fold",
    "joined",
    "merge",
    "observe",
    "perceptron",
    "plain",
    "reset",
    "scores",
    "update",
]

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
        """For machine code, if it can read these weights."""
        plan: cpu.Plan | None = self._laid.get("cpu", _UNKNOWN)
        if plan is _UNKNOWN:
            known = all(cpu.reads(t) for t in (self.slots, *(t for layer in self.layers for t in layer)))
            exact = (t.float() for t in self.exact()) if known else ()
            plan = self._laid["cpu"] = cpu.Plan(cpu.pack(*exact), self.layers) if known else None
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
    if gpu.usable(data.device):
        return GPU.attempt(lambda: _by_kernels(plans, data, bias))
    if not _by_machine_code(data):
        return None
    plan = plans.cpu()
    return None if plan is None else cpu.observe(plan, data, bias)


def update(
    plans: Plans, data: Float[Tensor, "b 1 i"], value: Float[Tensor, "b *h s c"], lse: Float[Tensor, "b *h s"]
) -> tuple[Float[Tensor, "b *h s c"], Float[Tensor, "b *h s"]] | None:
    """States in float64 with one point more for each task."""
    if data.shape[2] != plans.inputs:
        return None
    if gpu.usable(data.device):
        few = 0 < data.shape[0] <= gpu.FEW
        plan = GPU.attempt(plans.gpu) if few else None
        return None if plan is None else GPU.attempt(lambda: gpu.extended(plan, data, value, lse))
    ready = plans.cpu() if _by_machine_code(data) else None
    if ready is None or ready.weights.channels != ready.shape[-1]:  # padded channels
        return None
    return cpu.update(ready, data, value, lse)


def merge(
    value: Float[Tensor, "*h s c"],
    lse: Float[Tensor, "*h s"],
    other_value: Float[Tensor, "*#h s c"],
    other_lse: Float[Tensor, "*#h s"],
) -> tuple[Float[Tensor, "*h s c"], Float[Tensor, "*h s"]] | None:
    """The algebra's `merge` of float64 tensors of one shape, in one pass."""
    given = value, lse, other_value, other_lse
    if cpu.merges(*given):
        return cpu.merge(*given)
    return GPU.attempt(lambda: gpu.merge(*given)) if gpu.merges(*given) else None


def chunk(dtype: torch.dtype, device: torch.device) -> int | None:
    """How many points are best observed at a time by what serves there; None where operators do."""
    if dtype == torch.float64:
        return None
    if gpu.usable(device):
        return gpu.CHUNK
    return cpu.LONGEST if dtype == torch.float32 and device.type == "cpu" and cpu.usable() else None


def checksum(tensors: Sequence[Tensor]) -> cpu.Checksum | None:
    """What finds a number that changes with any bit of these; None where there is no machine code for it."""
    able = cpu.usable() and all(t.device.type == "cpu" and t.is_contiguous() for t in tensors)
    able = able and all(t.data_ptr() or t.numel() == 0 for t in tensors)  # memory may have been given back
    return cpu.Checksum(tensors) if able else None


def plain(device: torch.device) -> bool:
    """Whether tensors there are ordinary ones, which something may be remembered of."""
    return not traced() and not (device.type == "cuda" and torch.cuda.is_current_stream_capturing())


def reset() -> None:
    """Have all paths tried anew, as in a new process."""
    for path in PATHS:
        path.reset()
    library.library.cache_clear()
    gpu.forget()


def _by_machine_code(data: Tensor) -> bool:
    if data.dtype != torch.float32 or data.device.type != "cpu" or not cpu.usable():
        return False
    CPU.chosen()
    return True


def _by_kernels(
    plans: Plans, data: Tensor, bias: Tensor | None
) -> tuple[Float[Tensor, "b h s c"], Float[Tensor, "b h s"]] | None:
    """What the GPU's kernels make of the data; None of what they cannot take."""
    plan = plans.gpu()
    if plan is None or data.shape[0] == 0:
        return None
    GPU.chosen()
    if data.shape[1] > 1 or bias is not None:
        return gpu.observe(plan, data, bias)
    heads, channels, _ = plan.project.shape
    with torch.autocast("cuda", enabled=False):
        out = F.linear(gpu.normed_tokens(plan, data[:, 0])[:, : plan.width], *plan.single).double()
    lse, value = out.split([len(plan.score), heads * channels], -1)
    lse = lse.unflatten(-1, (heads, -1))
    return value.view(-1, heads, 1, channels).expand(-1, -1, lse.shape[-1], -1), lse

"""How it is computed: functions on tensors, each of which takes the fastest path that can serve.

- `attend` (and `attend_backward`) is attention by PyTorch's operators, `scores` and `EMPTY` what it means.
- `observe`, `update` and `merge` make and join states: by machine code on a CPU, by kernels on a GPU. `Plans`
  lay out the weights for both, of which a `Snapshot` tells whether they are still the same.
- `fold` conditions while learning; `attention` and `feed_forward` are whole layers: kernels on a GPU.
- A `Program` of `Layer`s reads, `quantiles`, `gap_vectors` and `turned` predict events: machine code.
- `Graphs` captures what a model does over and over on a GPU.
- `absorb`, `joined`, `chunk` and `cache_folder` are what these share with those who call them.

All but the first return None where no such path serves, and PyTorch's operators do. A path that fails says so
in one line of the log and is not tried again: `PATHS` shows why (`failed`), `reset()` forgets it.
"""

import threading
from collections.abc import Callable, Sequence
from math import inf
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from constmem.kernels import cpu, gpu
from constmem.kernels.cpu import Event, Slots, SlotsLse
from constmem.kernels.cpu_reading import Kind, Layer, Program, gap_vectors, quantiles, serves, turned
from constmem.kernels.gpu import absorb
from constmem.kernels.gpu_fold import Chunk, fold, joined
from constmem.kernels.graphs import Checksum, Graphs, checksum
from constmem.kernels.layers import attention, feed_forward
from constmem.kernels.operators import EMPTY, attend, attend_backward, scores
from constmem.kernels.paths import CPU, GPU, PATHS, cache_folder, library, traced

__all__ = [
    "EMPTY", "PATHS", "Chunk", "Event", "Graphs", "Kind", "Layer", "Plans", "Program", "Snapshot", "absorb",
    "attend", "attend_backward", "attention", "cache_folder", "chunk", "feed_forward", "fold",
    "gap_vectors", "joined", "merge", "observe", "quantiles", "reset", "scores", "serves", "turned", "update",
]  # fmt: skip
Exact = Callable[[], tuple[Float[Tensor, "*depth h s c"], Float[Tensor, "kv d"], Float[Tensor, " kv"]]]
_UNKNOWN: Any = object()
_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}


def reset() -> None:
    """Let all paths be tried again, as in a new process."""
    for path in PATHS:
        path.reset()
    library.cache_clear()
    gpu.forget()


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
    """States after an update, and what gives those numbers of the points that are to be checked yet.

    A GPU copies them; machine code has checked all; None where nobody has looked at any.
    """

    value: Float[Tensor, "b *h s c"]
    lse: Float[Tensor, "b *h s"]
    numbers: Callable[[], list[float]] | None


def update(
    plans: Plans, data: Float[Tensor, "b 1 i"] | Event, value: Float[Tensor, "b *h s c"],
    lse: Float[Tensor, "b *h s"], limit: float = inf,
) -> Updated | None:  # fmt: skip
    """States in float64 with one point, or one event, more for each task; of points within the limit."""
    ready = plans.cpu()
    if (data.table if isinstance(data, Event) else data).shape[-1] != plans.inputs:
        return None
    if not value.dtype == lse.dtype == torch.float64 or value.shape[:-1] != lse.shape:
        return None
    if ready is not None:
        fits = value.numel() == len(value) * ready.numbers
        made = cpu.update(ready, data, value, lse, limit) if fits else None
        return None if made is None else Updated(*made, list)  # of none
    if isinstance(data, Event) or not 0 < data.shape[0] <= gpu.FEW or not gpu.usable(data.device):
        return None
    plan, latest = GPU.attempt(plans.gpu), Snapshot.latest()
    if plan is None:
        return None
    check, numbers = (None, None) if latest is None else latest.pending(data.device, data.numel())
    found = GPU.attempt(lambda: gpu.extended(plan, data, value, lse, check))
    if found is None:
        return None
    return Updated(*found, numbers if len(data) <= gpu.FEWEST else None)


def merge(
    value: Slots, lse: SlotsLse, other_value: Float[Tensor, "*#h s c"], other_lse: Float[Tensor, "*#h s"]
) -> tuple[Slots, SlotsLse] | None:
    """The algebra's `merge` of float64 tensors of one shape, in one pass; None if a gradient is wanted."""
    given = value, lse, other_value, other_lse
    fits = (
        value.dtype == other_value.dtype == lse.dtype == other_lse.dtype == torch.float64
        and value.shape == other_value.shape
        and value.shape[:-1] == lse.shape == other_lse.shape  # no path checks sizes
        and not (torch.is_grad_enabled() and any(t.requires_grad for t in given))
    )
    if fits and value.is_cpu:
        return cpu.merge(*given) if cpu.usable() else None
    fits = fits and value.shape[-1] <= gpu.WIDEST["half"] and gpu.usable(value.device)
    return GPU.attempt(lambda: gpu.merge(*given)) if fits else None


def chunk(dtype: torch.dtype, device: torch.device) -> int | None:
    """How many points are best observed at a time by what serves there; None where operators do."""
    if dtype == torch.float64 or torch.compiler.is_compiling():
        return None
    if device.type != "cpu":
        return gpu.CHUNK if gpu.usable(device) else None
    return cpu.LONGEST if dtype == torch.float32 and library() is not None else None


class _Verified(threading.local):
    """The snapshots that a thread has just verified, innermost last."""

    snapshots: tuple["Snapshot", ...] = ()


_verified = _Verified()


class Snapshot:
    """What some tensors held at one moment; `holds` says whether tensors still hold the same.

    Version counters and addresses do not tell whether weights are the same: code writes through
    `parameter.data`, through NumPy arrays that share the memory, by fused optimisers and by kernels of its
    own, and swaps tensors for others. So all bits are verified each time: by a checksum of 64 bits, at the
    speed of reading them (on a CPU half a million bytes take microseconds, on a GPU it is one launch), or
    else by comparison with a copy.

    Example:
        >>> weight = torch.nn.Parameter(torch.randn(3, 4))
        >>> before = Snapshot([weight])
        >>> before.holds([weight]), before.holds([weight.detach().clone()])
        (True, True)
        >>> weight.data[1, 2] += 1  # no version counter tells
        >>> before.holds([weight])
        False
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        kept = [t.detach() for t in tensors]
        self._kinds = [(t.shape, t.dtype, t.device) for t in kept]
        self._now: Callable[[], int | None] | None = None
        self._sum: int | None = None
        self._where: list[int] = []
        self._copy = None if self._summed(kept) else _bits(kept)

    @staticmethod
    def possible(device: torch.device) -> bool:
        """Whether tensors there are ordinary ones, of which something may be remembered."""
        return not traced() and not (device.type == "cuda" and torch.cuda.is_current_stream_capturing())

    @staticmethod
    def latest() -> "Snapshot | None":
        """What this thread has verified last."""
        return _verified.snapshots[-1] if _verified.snapshots else None

    @staticmethod
    def covering(tensors: Sequence[Tensor]) -> "Snapshot | None":
        """What this thread has verified last, if that was of these tensors, and perhaps more."""
        last = Snapshot.latest()
        return last if last is not None and {t.data_ptr() for t in tensors} <= {*last._where} else None

    def holds(self, tensors: Sequence[Tensor]) -> bool:
        """Whether these, one by one, have the shapes, kinds and bits of those the snapshot was taken of."""
        if self._now is not None and self._in_place(tensors):
            return self._now() == self._sum
        tensors = [t.detach() for t in tensors]
        if [(t.shape, t.dtype, t.device) for t in tensors] != self._kinds:
            return False
        if self._copy is not None:
            return all(torch.equal(a, b) for a, b in zip(_bits(tensors), self._copy, strict=True))
        return self._summed(tensors)

    def __enter__(self) -> None:
        """Inside of `with snapshot`, which was just verified, this thread need not do so again."""
        _verified.snapshots = *_verified.snapshots, self

    def __exit__(self, *_: object) -> None:
        _verified.snapshots = _verified.snapshots[:-1]

    @property
    def fresh(self) -> bool:
        """Whether this thread is inside of `with snapshot`."""
        return self in _verified.snapshots

    @property
    def on_gpu(self) -> bool:
        """Whether a GPU verifies it, which may be given other work meanwhile."""
        return isinstance(self._now, Checksum)

    def begin(self, tensors: Sequence[Tensor], *, deferred: bool = False) -> bool:
        """Have a GPU verify these, if they lie there where they lay; `end`, in this thread, must follow.

        Args:
            deferred: until the launch of an `update`, which can do both.
        """
        now = self._now
        return isinstance(now, Checksum) and self._in_place(tensors) and now.begin(deferred=deferred)

    def pending(self, device: torch.device, numbers: int) -> tuple[Any, Callable[[], list[float]] | None]:
        """What a launch there has to verify, if that was deferred, and what then gives points' numbers."""
        now = self._now
        check = now.taken(device, numbers) if isinstance(now, Checksum) else None
        return check, None if check is None else lambda: now.numbers(numbers)  # type: ignore[union-attr]

    def end(self) -> bool:
        """What `holds` would have said at `begin`: it waits for that."""
        assert isinstance(self._now, Checksum)
        return self._now.end() == self._sum

    def _in_place(self, tensors: Sequence[Tensor]) -> bool:
        return (
            list(map(Tensor.data_ptr, tensors)) == self._where
            and all(map(Tensor.is_contiguous, tensors))  # in the order that it was
            and list(map(Tensor.numel, tensors)) == self._sizes
        )

    def _summed(self, tensors: list[Tensor]) -> bool:
        """Whether these have the checksum of those before, if there were any; it is theirs from now on."""
        now = checksum(tensors)
        found = None if now is None else now()
        if found is None or self._sum not in (None, found):
            return False
        self._now, self._sum = now, found
        self._kept = tensors  # so that their memory goes to no others
        self._where, self._sizes = [t.data_ptr() for t in tensors], [t.numel() for t in tensors]
        return True

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_now": None, "_kept": None}  # a copy's tensors lie elsewhere


def _bits(tensors: Sequence[Tensor]) -> list[Tensor]:
    """A copy of the tensors' bits as integers, together: few launches on a GPU."""
    words = [t.contiguous().view(-1).view(_WORDS[t.element_size()]) for t in tensors]
    kinds = dict.fromkeys(w.dtype for w in words)
    return [torch.cat([w for w in words if w.dtype == kind]) for kind in kinds]

"""The CPU's own machine code for observing and merging: built once from `native.cpp`, where a compiler is.

What PyTorch needs a dozen operators and a buffer the size of the data for, one call does here tile by
tile. The library is compiled for the very machine at first use (a few seconds, kept in the user's cache
folder); without a compiler, or with CONSTMEM_NATIVE=0, everything runs on PyTorch's operators as before.

An embedding's layers, but for the last, and the normalisation are computed in float64, all else in float32.
Where coarser products are asked for, shares and values alone are multiplied as bfloat16; a CPU without such
products computes in float32.
"""

import contextlib
import ctypes
import functools
import mmap
import weakref
from array import array
from collections.abc import Callable, Sequence
from math import log2, prod
from typing import NamedTuple

import torch
from jaxtyping import Float, Float64, Int64
from torch import Tensor

from constmem.kernels.paths import NUMBER, POINTER, coarse, log, traced
from constmem.kernels.paths import library as library  # tests put another in its place

Slots = Float[Tensor, "*h s c"]
SlotsLse = Float[Tensor, "*h s"]
LONGEST = 65_536  # points that running sums of float32 add up: of more, roundings of one kind would show
VECTOR = 16  # channels of a head, and slots, are padded to a multiple of this
_LOG2E = log2(torch.e)
SHORT = "machine code found too little memory: take fewer points or tasks at a time"
SMALLEST, LARGEST = 2**25, 2**29  # bytes of a result whose memory is kept for the next one


class Weights(NamedTuple):
    """The weights of an observation in the order the machine code reads them."""

    queries: Float[Tensor, "h c s"]
    key: Float[Tensor, "h d c"]
    key_shift: Float[Tensor, " hc"]
    value: Float[Tensor, "h d c"]
    value_shift: Float[Tensor, " hc"]
    slots: int  # before they were padded
    channels: int


class Plan:
    """How points become a state: an embedding's layers, then keys, values and queries."""

    def __init__(self, weights: Weights, layers: Sequence[tuple[Tensor, Tensor]]) -> None:
        heads, width, channels = weights.key.shape
        widths = [layers[0][0].shape[1] if layers else width, *(w.shape[0] for w, _ in layers)]
        where = ((weight.data_ptr() for weight, _ in layers), (bias.data_ptr() for _, bias in layers))
        parts = [array("q", numbers) for numbers in (*where, widths)]
        places = (part.buffer_info()[0] for part in parts)
        sizes = heads, weights.slots, channels
        content = array("q", (len(layers), *places, *sizes, *(t.data_ptr() for t in weights[:5])))
        self.pointer = content.buffer_info()[0]  # of `Plan` of native_tile.h
        self.shape, self.numbers, self.weights = sizes, prod(sizes), weights
        self.halves = _halves()  # as is asked for now: settings that change get another plan
        self._kept = layers, parts, content  # what the addresses point to


def pack(
    queries: Float[Tensor, "*depth h s c"], weight: Float[Tensor, "kv d"], shift: Float[Tensor, " kv"]
) -> Weights:
    """Weights as `Observation.prepared` gives them, scaled to base two, padded and turned."""
    queries = queries.flatten(0, -3)  # heads of all blocks in a row
    heads, slots, channels = queries.shape
    more = -channels % VECTOR

    def padded(t: Tensor) -> Tensor:
        t = t.unflatten(0, (heads, channels))
        return torch.nn.functional.pad(t, (0, 0, 0, more) if t.ndim == 3 else (0, more))

    (key, value), (key_shift, value_shift) = weight.chunk(2), shift.chunk(2)
    return Weights(
        torch.nn.functional.pad(_LOG2E * queries.mT, (0, -slots % VECTOR, 0, more)).contiguous(),
        padded(key).transpose(1, 2).contiguous(),
        padded(key_shift).flatten().contiguous(),
        padded(value).transpose(1, 2).contiguous(),
        padded(value_shift).flatten().contiguous(),
        slots,
        channels,
    )


def _halves() -> bool:
    """Whether to multiply as bfloat16: where that is asked for, and this CPU can."""
    asked = coarse("cpu")
    if asked and not has_bfloat16():
        _say_exact()
    return asked and has_bfloat16()


def has_bfloat16() -> bool:
    """Whether there is machine code that multiplies bfloat16, and a CPU that can run it."""
    found = library()
    return found is not None and bool(found.has_bfloat16())


@functools.cache
def _say_exact() -> None:
    """One line in the log, the first time."""
    log.warning("products of bfloat16 were asked for, and this CPU has none (AVX512-BF16): float32 serves")


def observe(
    plan: Plan, data: Float[Tensor, "b n i"], bias: Float[Tensor, "b n"] | None
) -> tuple[Float[Tensor, "b h s c"], Float[Tensor, "b h s"]]:
    """Value and lse of each task's points, for all heads; points of bias `EMPTY` are left out."""
    b, n, _ = data.shape
    if n > LONGEST:
        cuts = [slice(i, i + LONGEST) for i in range(0, n, LONGEST)]
        parts = (observe(plan, data[:, cut], None if bias is None else bias[:, cut]) for cut in cuts)
        return functools.reduce(lambda before, part: merge(*before, *part), parts)
    heads, slots, channels = plan.shape
    data = data.contiguous()
    lse = torch.empty(b, heads, slots, dtype=torch.float64, device="cpu")
    if n == 1 and bias is None:
        value = torch.empty(b, heads, 1, channels, dtype=torch.float64, device="cpu")
        where = value.data_ptr(), lse.data_ptr()
        run("observe_one", plan.pointer, b, data.data_ptr(), torch.get_num_threads(), *where)
        return value[..., : plan.weights.channels].expand(-1, -1, slots, -1), lse
    value = empty(b, heads, slots, channels)
    bias = None if bias is None else bias.float().contiguous()
    weights = None if bias is None else bias.data_ptr()
    run(
        "observe", plan.pointer, b, n, data.data_ptr(), weights, torch.get_num_threads(), plan.halves,
        value.data_ptr(), lse.data_ptr(),
    )  # fmt: skip
    return value[..., : plan.weights.channels], lse


def contiguous(
    value: Slots, lse: SlotsLse, other_value: Slots, other_lse: SlotsLse
) -> tuple[Slots, SlotsLse, Float[Tensor, "*h _s c"], SlotsLse]:
    """Two states to merge as they are read: of one point, whose value all slots share, it is there once."""
    shared = other_value.stride(-2) == 0 and other_value.shape[-2] > 1
    other_value = other_value[..., :1, :] if shared else other_value
    return value.contiguous(), lse.contiguous(), other_value.contiguous(), other_lse.contiguous()


def merge(value: Slots, lse: SlotsLse, other_value: Slots, other_lse: SlotsLse) -> tuple[Slots, SlotsLse]:
    """The algebra's `merge` of float64 tensors in one pass."""
    value, lse, other_value, other_lse = contiguous(value, lse, other_value, other_lse)
    merged, merged_lse = empty(*value.shape), torch.empty_like(lse)
    shared = value.shape[-2] // max(other_value.shape[-2], 1)
    run(
        "merge", lse.numel(), value.shape[-1], value.data_ptr(), lse.data_ptr(), other_value.data_ptr(),
        shared, other_lse.data_ptr(), torch.get_num_threads(), merged.data_ptr(), merged_lse.data_ptr(),
    )  # fmt: skip
    return merged, merged_lse


class Event(NamedTuple):
    """One event of each stream: what its token is made of, and what its time does to what slots see of it."""

    marks: Int64[Tensor, "b 1"]  # negative ones stand behind the others in the table
    gaps: Float64[Tensor, "b 1"]
    times: Float64[Tensor, "b 1"]
    start: Float64[Tensor, " b"]
    table: Float[Tensor, "marks d"]
    project: (
        tuple[Tensor, Tensor, Tensor] | None
    )  # waves of a gap; weight (d, 2 + 2 w) and bias of its features
    scale: Sequence[Float[Tensor, ""]]  # mean and deviation of log gaps, and the shortest gap
    log_rates: Float[Tensor, "*h s"] | None
    turns: Float64[Tensor, " p"]  # of pairs of channels, angles a typical gap
    longest: int  # typical gaps since a start


def _laid(event: Event, plan: Plan, tasks: int) -> "array[int] | None":
    """`Event` of native_events.h; None where machine code cannot read it, or finds too little there."""
    (heads, slots, _), (count, width), none = plan.shape, event.table.shape, event.table[:0]
    waves, weight, bias = event.project or (none, none, none)
    rates = none if event.log_rates is None else event.log_rates
    weights = event.table, weight, bias, *event.scale, waves, rates
    given = *event[:4], event.turns
    sizes = [*(t.numel() for t in event[:4]), *(t.numel() for t in (weight, bias, rates))]
    wanted = [tasks] * 4 + ([width * (2 + 2 * len(waves)), width] if event.project else [0, 0])
    wanted.append(0 if event.log_rates is None else heads * slots)
    plain = all(reads(t) and t.is_contiguous() for t in weights)
    if sizes != wanted or not plain or not all(t.is_cpu and t.is_contiguous() for t in given):
        return None
    where = map(Tensor.data_ptr, (*event[:4], *weights, event.turns))  # 0 of nothing
    return array("q", (*where, count - 2, len(waves), len(event.turns), event.longest))


def update(
    plan: Plan, data: Float[Tensor, "b 1 i"] | Event, value: Float[Tensor, "b *h s c"],
    lse: Float[Tensor, "b *h s"], limit: float,
) -> tuple[Float[Tensor, "b *h s c"], Float[Tensor, "b *h s"]] | None:  # fmt: skip
    """States in float64 with one point, or event, more for each task: `observe` and `merge` in one call.

    None where machine code cannot read them, or a number of a point is beyond the limit.
    """
    value, lse = value.contiguous(), lse.contiguous()
    event = _laid(data, plan, len(value)) if isinstance(data, Event) else None
    points = data.contiguous() if isinstance(data, Tensor) and reads(data) else None
    if event is None and points is None:
        return None
    small = value.nbytes <= SMALLEST
    merged, merged_lse = torch.empty_like(value) if small else empty(*value.shape), torch.empty_like(lse)
    taken = run(
        "update", plan.pointer, len(value), None if points is None else points.data_ptr(), limit,
        None if event is None else event.buffer_info()[0], value.data_ptr(), lse.data_ptr(),
        torch.get_num_threads(), merged.data_ptr(), merged_lse.data_ptr(),
    )  # fmt: skip
    return (merged, merged_lse) if taken else None


def checksum(tensors: Sequence[Tensor]) -> Callable[[], int]:
    """What finds a number that changes with any bit of these, at the speed of reading them."""
    found = library()
    assert found is not None  # as `usable` says
    where = (POINTER * len(tensors))(*(t.data_ptr() for t in tensors))
    sizes = (NUMBER * len(tensors))(*(t.nbytes for t in tensors))
    return functools.partial(found.checksum, len(tensors), where, sizes)


def reads(t: Tensor) -> bool:
    """Whether machine code knows numbers of this kind, where they are."""
    return t.dtype == torch.float32 and t.device.type == "cpu"


def usable() -> bool:
    """Whether there is machine code, and ordinary tensors to run it on."""
    return not traced() and library() is not None


def run(function: str, *given: object) -> bool:
    """Call machine code, and say whether it took what it was given. Where memory was short it answers 1."""
    found = library()
    if found is None:
        raise RuntimeError("there is no machine code: ask cpu.usable() first")
    if (answer := getattr(found, function)(*given)) == 1:
        raise MemoryError(SHORT)
    return bool(answer == 0)


def empty(*shape: int) -> Float[Tensor, "..."]:
    """Float64 numbers of any content on a CPU: where they are many, in memory an earlier result has left.

    States of many streams are updated by writing new ones, a hundred megabytes at a time. When those before
    are let go, allocators give so much memory back to the system, which has to clear it for the next update:
    fresh pages cost more than writing to them does. So the last such piece is kept. No more is held for that
    than during an update, which has old and new states.
    """
    size = 8 * prod(shape)
    if not SMALLEST < size <= LARGEST:
        return torch.empty(shape, dtype=torch.float64, device="cpu")
    memory = _taken(size)
    view = (ctypes.c_char * size).from_buffer(memory)  # lives as long as the tensor's storage
    weakref.finalize(view, _leave, memory).atexit = False
    return torch.frombuffer(view, dtype=torch.float64).view(shape)


_left: list[mmap.mmap] = []


def _taken(size: int) -> mmap.mmap:
    """What was left, if it fits, or a new piece in large pages."""
    while _left:
        memory = _left.pop()
        if len(memory) == size:
            return memory
    private: dict[str, int] = {}  # what a forked process writes there is its own
    if hasattr(mmap, "MAP_PRIVATE"):
        private = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS}
    memory = mmap.mmap(-1, size, **private)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # systems may be built without
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def _leave(memory: mmap.mmap) -> None:
    """Keep a piece that is no longer used, in place of the one kept before."""
    _left[:] = [memory]

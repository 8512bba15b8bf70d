"""The CPU's own machine code for observing and merging: built once from `native.cpp`, where a compiler is.

What PyTorch needs a dozen operators and a buffer the size of the data for, one call does here tile by
tile. The library is compiled for the very machine at first use (a few seconds, kept in the user's cache
folder); without a compiler, or with CONSTMEM_NATIVE=0, everything runs on PyTorch's operators as before.

An embedding's layers, but for the last, and the normalisation are computed in float64, all else in float32.
Where coarser products are asked for, shares and values alone are multiplied as bfloat16; a CPU without such
products computes in float32.
"""

import ctypes
import functools
import logging
import os
import subprocess
from collections.abc import Callable, Sequence
from math import log2
from pathlib import Path
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd import forward_ad

from constmem.kernels import spare
from constmem.kernels.compiled import FLAGS, built

LONGEST = 65_536  # points that running sums of float32 add up: of more, roundings of one kind would show
VECTOR = 16  # channels of a head, and slots, are padded to a multiple of this
_LOG2E = log2(torch.e)
_log = logging.getLogger("constmem")
_Pointer, _Number = ctypes.c_void_p, ctypes.c_int64


class _Plan(ctypes.Structure):
    """`Plan` of native.cpp: where weights lie, and their sizes."""

    _fields_ = (
        ("layers", _Number), ("weight", _Pointer), ("bias", _Pointer), ("widths", _Pointer),
        ("heads", _Number), ("slots", _Number), ("channels", _Number), ("queries", _Pointer),
        ("key", _Pointer), ("key_shift", _Pointer), ("value", _Pointer), ("value_shift", _Pointer),
    )  # fmt: skip


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
        addresses = _Pointer * len(layers)
        parts = (
            addresses(*(weight.data_ptr() for weight, _ in layers)),
            addresses(*(bias.data_ptr() for _, bias in layers)),
            (_Number * len(widths))(*widths),
        )
        where = [ctypes.cast(part, _Pointer) for part in parts]
        sizes = heads, weights.slots, channels
        content = _Plan(len(layers), *where, *sizes, *(t.data_ptr() for t in weights[:5]))
        self.pointer = ctypes.byref(content)
        self.shape = sizes
        self.weights = weights
        self._kept = layers, parts  # what the addresses point to


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


def coarse(device: str) -> bool:
    """Whether products coarser than float32 are asked for: by autocast, or by PyTorch's own setting."""
    return torch.is_autocast_enabled(device) or torch.get_float32_matmul_precision() != "highest"


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
    _log.warning("products of bfloat16 were asked for, and this CPU has none (AVX512-BF16): float32 serves")


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
    lse = torch.empty(b, heads, slots, dtype=torch.float64)
    if n == 1 and bias is None:
        value = torch.empty(b, heads, 1, channels, dtype=torch.float64)
        _require().observe_one(
            plan.pointer, b, data.data_ptr(), torch.get_num_threads(), value.data_ptr(), lse.data_ptr()
        )
        return value[..., : plan.weights.channels].expand(-1, -1, slots, -1), lse
    value = spare.empty(b, heads, slots, channels)
    bias = None if bias is None else bias.float().contiguous()
    weights = None if bias is None else bias.data_ptr()
    _require().observe(
        plan.pointer, b, n, data.data_ptr(), weights, torch.get_num_threads(), _halves(), value.data_ptr(),
        lse.data_ptr(),
    )  # fmt: skip
    return value[..., : plan.weights.channels], lse


def merge(
    value: Float[Tensor, "*h s c"],
    lse: Float[Tensor, "*h s"],
    other_value: Float[Tensor, "*h s c"],
    other_lse: Float[Tensor, "*h s"],
) -> tuple[Float[Tensor, "*h s c"], Float[Tensor, "*h s"]]:
    """The algebra's `merge` of float64 tensors in one pass."""
    shared = other_value.stride(-2) == 0 and other_value.shape[-2] > 1  # one point: the same for every slot
    other_value = other_value[..., :1, :] if shared else other_value
    tensors = value, lse, other_value, other_lse
    value, lse, other_value, other_lse = (t if t.is_contiguous() else t.contiguous() for t in tensors)
    merged, merged_lse = spare.empty(*value.shape), torch.empty_like(lse)
    _require().merge(
        lse.numel(), value.shape[-1], value.data_ptr(), lse.data_ptr(), other_value.data_ptr(),
        value.shape[-2] if shared else 1, other_lse.data_ptr(), torch.get_num_threads(), merged.data_ptr(),
        merged_lse.data_ptr(),
    )  # fmt: skip
    return merged, merged_lse


def update(
    plan: Plan,
    data: Float[Tensor, "b 1 i"],
    value: Float[Tensor, "b *h s c"],
    lse: Float[Tensor, "b *h s"],
) -> tuple[Float[Tensor, "b *h s c"], Float[Tensor, "b *h s"]]:
    """States in float64 with one point more for each task: `observe` and `merge` in one call."""
    data, value, lse = (t if t.is_contiguous() else t.contiguous() for t in (data, value, lse))
    merged, merged_lse = spare.empty(*value.shape), torch.empty_like(lse)
    _require().update(
        plan.pointer, data.shape[0], data.data_ptr(), value.data_ptr(), lse.data_ptr(),
        torch.get_num_threads(), merged.data_ptr(), merged_lse.data_ptr(),
    )  # fmt: skip
    return merged, merged_lse


def merges(*tensors: Tensor) -> bool:
    """Whether `merge` can take these: float64 on a CPU, of one shape, no gradient, nothing traced."""
    value, lse, other_value, other_lse = tensors
    return (
        value.dtype == other_value.dtype == lse.dtype == other_lse.dtype == torch.float64
        and value.device.type == "cpu"
        and value.shape == other_value.shape
        and value.shape[:-1] == lse.shape == other_lse.shape  # machine code checks no sizes
        and not (torch.is_grad_enabled() and any(t.requires_grad for t in tensors))
        and usable()
    )


class Watch:
    """Tells by the bits of every `step`-th number whether tensors were written to."""

    def __init__(self, tensors: Sequence[Tensor], step: Callable[[Tensor], int]) -> None:
        count = len(tensors)
        words = [t.numel() * t.element_size() // 4 for t in tensors]
        steps = [step(t) * t.element_size() // 4 or 1 for t in tensors]
        self._kept = tensors  # their memory must not go to others
        self._content = (
            (_Pointer * count)(*(t.data_ptr() for t in tensors)),
            (_Number * count)(*words),
            (_Number * count)(*steps),
        )

    def sum(self) -> int:
        """A number that changes when they do."""
        return int(_require().sum_of_bits(len(self._kept), *self._content))


def reads(t: Tensor) -> bool:
    """Whether machine code can read it: it knows numbers of one kind only."""
    return t.dtype == torch.float32 and t.device.type == "cpu" and t.is_contiguous()


def usable() -> bool:
    """Whether there is machine code, and ordinary tensors to run it on."""
    return not traced() and library() is not None


def traced() -> bool:
    """Whether tensors are symbols of a compiler, a trace or a function transform, or have tangents."""
    if torch.compiler.is_compiling() or torch._C._is_tracing() or transformed():
        return True
    return forward_ad._current_level >= 0


def transformed() -> bool:
    """Whether a function transform (vmap, grad of grad) is at work; asked while compiling, too."""
    return torch._C._functorch.maybe_current_level() is not None


def _require() -> ctypes.CDLL:
    found = library()
    if found is None:
        raise RuntimeError("there is no machine code: ask native.usable() first")
    return found


@functools.cache
def library() -> ctypes.CDLL | None:
    """The compiled library, built if need be; None, after one line in the log, where that is not possible."""
    if os.environ.get("CONSTMEM_NATIVE", "1") == "0":
        return None
    try:
        return load(built(FLAGS))
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:  # no home folder is a RuntimeError
        detail = (getattr(error, "stderr", None) or str(error)).strip()[:500]
        _log.warning("no machine code for this CPU, PyTorch's operators serve instead: %s", detail)
        return None


def load(path: Path) -> ctypes.CDLL:
    """A library with its functions' types declared."""
    found = ctypes.CDLL(str(path))
    found.observe.argtypes = [_Pointer, _Number, _Number, *[_Pointer] * 2, *[_Number] * 2, *[_Pointer] * 2]
    found.observe_one.argtypes = [_Pointer, _Number, _Pointer, _Number, *[_Pointer] * 2]
    found.merge.argtypes = [*[_Number] * 2, *[_Pointer] * 3, _Number, _Pointer, _Number, *[_Pointer] * 2]
    found.update.argtypes = [_Pointer, _Number, *[_Pointer] * 3, _Number, *[_Pointer] * 2]
    for function in (found.observe, found.observe_one, found.merge, found.update):
        function.restype = None
    found.has_bfloat16.argtypes, found.has_bfloat16.restype = [], _Number
    found.sum_of_bits.argtypes = [_Number, _Pointer, _Pointer, _Pointer]
    found.sum_of_bits.restype = ctypes.c_uint64
    return found

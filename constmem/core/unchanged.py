"""By what to know that weights and settings are still those that something was computed from."""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from constmem.kernels import native


def identities(tensors: Iterable[Tensor]) -> list[tuple[object, ...]]:
    """Others once a tensor is replaced, turned or changed in place; not if its `data` is written to."""
    return [(t.data_ptr(), t.stride(), 0 if t.is_inference() else t._version) for t in tensors]


def bits_of(tensors: list[Tensor]) -> Callable[[], object]:
    """Adds up the bits of small tensors on a CPU, and of every 61st number of large ones."""
    in_order = all(t.is_contiguous() for t in tensors)
    if native.usable() and in_order and all(t.element_size() >= 4 for t in tensors):
        return native.Watch(tensors, _stride).sum
    if in_order:
        bits = [_bits(t) for t in tensors]
        return lambda: [int(b.sum()) for b in bits]
    return lambda: [int(_bits(t).sum()) for t in tensors]  # of copies, where they lie in another order


def _bits(t: Tensor) -> Tensor:
    words = {8: torch.int64, 4: torch.int32, 2: torch.int16}
    return t.reshape(-1).view(words[t.element_size()])[:: _stride(t)]


def _stride(t: Tensor) -> int:
    return 61 if t.numel() > 999 else 1


def products(where: str) -> tuple[object, ...]:
    """How PyTorch's settings have products computed on that kind of device."""
    autocast = torch.is_autocast_enabled(where), torch.get_autocast_dtype(where)
    return *autocast, torch.get_float32_matmul_precision()

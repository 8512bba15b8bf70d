"""By what to know that weights are still those that something was computed from: every bit of them."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from constmem import kernels

_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}


class Snapshot:
    """What some tensors held at one moment; `holds` says whether tensors still hold the same.

    Version counters and addresses do not tell: code writes through `parameter.data`, through NumPy arrays
    that share the memory, by fused optimisers and by kernels of its own, and swaps tensors for others. So all
    bits are looked at each time: on a CPU with machine code as a checksum of 64 bits, at the speed of reading
    them (a hundred thousand weights take microseconds), elsewhere by comparison with a copy.

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
        tensors = [t.detach() for t in tensors]
        self._kinds = [(t.shape, t.dtype, t.device) for t in tensors]
        self._checksum = kernels.checksum(tensors)
        self._sum = None if self._checksum is None else self._checksum()
        self._copy = _bits(tensors) if self._checksum is None else []

    def holds(self, tensors: Sequence[Tensor]) -> bool:
        """Whether these, one by one, have the shapes, kinds and bits of those the snapshot was taken of."""
        if self._checksum is not None and self._checksum.reads(tensors):
            return self._checksum() == self._sum
        tensors = [t.detach() for t in tensors]
        if [(t.shape, t.dtype, t.device) for t in tensors] != self._kinds:
            return False
        if self._sum is None:
            return all(torch.equal(a, b) for a, b in zip(_bits(tensors), self._copy, strict=True))
        elsewhere = kernels.checksum(tensors)
        if elsewhere is None or elsewhere() != self._sum:
            return False
        self._checksum = elsewhere
        return True

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_checksum": None}  # a copy is asked about tensors that lie elsewhere


def _bits(tensors: Sequence[Tensor]) -> list[Tensor]:
    """A copy of the tensors' bits as integers, together: few launches on a GPU."""
    words = [t.contiguous().view(-1).view(_WORDS[t.element_size()]) for t in tensors]
    return [
        torch.cat([w for w in words if w.dtype == kind]) for kind in dict.fromkeys(w.dtype for w in words)
    ]


def products(where: str) -> tuple[object, ...]:
    """How PyTorch's settings have products computed on that kind of device."""
    autocast = torch.is_autocast_enabled(where), torch.get_autocast_dtype(where)
    return *autocast, torch.get_float32_matmul_precision()

"""Large results in memory that an earlier result has left: fresh pages cost more than writing to them does.

States of many streams are updated by writing new ones, a hundred megabytes at a time. When those before are
let go, allocators give so much memory back to the system, which has to clear it for the next update. Here the
last such piece is kept. No more is held for that than during an update, which has old and new states.
"""

import contextlib
import ctypes
import mmap
import weakref
from math import prod

import torch
from jaxtyping import Float
from torch import Tensor

SMALLEST, LARGEST = 2**25, 2**29  # bytes; smaller pieces allocators keep, larger ones nobody should
_left: list[mmap.mmap] = []


def empty(*shape: int) -> Float[Tensor, "..."]:
    """Float64 numbers of any content on a CPU: where they are many, in memory that was left."""
    size = 8 * prod(shape)
    if not SMALLEST < size <= LARGEST:
        return torch.empty(shape, dtype=torch.float64)
    memory = _taken(size)
    view = (ctypes.c_char * size).from_buffer(memory)  # lives as long as the tensor's storage
    weakref.finalize(view, _leave, memory).atexit = False
    return torch.frombuffer(view, dtype=torch.float64).view(shape)


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
    """Keep a piece that nobody looks at any more, in place of the one kept before."""
    _left[:] = [memory]

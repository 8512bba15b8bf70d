"""Ways to compute the same thing: which of them serves, which has failed and why."""

import logging
from collections.abc import Callable
from typing import TypeVar

import torch
from torch.autograd import forward_ad

log = logging.getLogger("constmem")
_Result = TypeVar("_Result")


class Path:
    """One way to compute; PyTorch's operators serve where it cannot, after one line in the log.

    Attributes:
        name: as the log has it.
        failed: why it is not tried again; None while it is.
        sizes: whether it runs at each size it was rehearsed at.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.reset()

    def reset(self) -> None:
        """As in a process that has not tried it yet."""
        self.failed: str | None = None
        self.sizes: dict[object, bool] = {}
        self._said: set[str] = set()

    def chosen(self) -> None:
        """Say, the first time, that this is what serves."""
        if "" not in self._said:
            self._said.add("")
            log.debug("%s: chosen", self.name)

    def unfit(self, why: str) -> None:
        """Say once why it cannot take something; it goes on serving all else."""
        if why not in self._said:
            self._said.add(why)
            log.warning("no %s for this, PyTorch's operators serve: %s", self.name, why[:500])

    def attempt(self, work: Callable[[], _Result]) -> _Result | None:
        """What `work` gives; None if it fails, but for want of memory: after that it is not tried again."""
        try:
            return work()
        except Exception as error:  # whatever a compiler or a driver comes up with
            if isinstance(error, MemoryError | torch.OutOfMemoryError) or "out of memory" in str(error):
                raise  # as drivers say it, too
            self.failed = f"{type(error).__name__}: {error}"
            self.unfit(self.failed)
            return None

    def rehearsed(self, size: object, work: Callable[[], object]) -> bool:
        """Whether `work`, done once for each size, did not fail; other sizes need other resources."""
        if size not in self.sizes:
            before = self.failed
            self.attempt(work)
            self.sizes[size] = self.failed == before
            self.failed = before
        return self.sizes[size]


CPU = Path("machine code for this CPU")
GPU = Path("kernels of our own on the GPU")
FOLD = Path("kernels of our own for gradients on the GPU")
LAYERS = Path("kernels of our own for whole layers on the GPU")
GRAPHS = Path("CUDA graphs")
CHECKSUM = Path("checksum of weights on the GPU")
PATHS = CPU, GPU, FOLD, LAYERS, GRAPHS, CHECKSUM


def traced() -> bool:
    """Whether tensors are symbols of a compiler, a trace or a function transform, or have tangents."""
    if torch.compiler.is_compiling() or torch._C._is_tracing() or transformed():
        return True
    return forward_ad._current_level >= 0


def transformed() -> bool:
    """Whether a function transform (vmap, grad of grad) is at work; asked while compiling, too."""
    return torch._C._functorch.maybe_current_level() is not None


def coarse(device: str) -> bool:
    """Whether products coarser than float32 are asked for: by autocast, or by PyTorch's own setting."""
    return torch.is_autocast_enabled(device) or torch.get_float32_matmul_precision() != "highest"

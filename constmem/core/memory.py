"""Asking before it is too late: how much memory a device has free, and refusing work that needs more."""

import os
from pathlib import Path
from typing import NamedTuple

import torch

WORTH_ASKING = 2**28  # bytes below which nobody is asked: small inputs should cost nothing
_CGROUPS = (
    (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")),
    (
        Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
        Path("/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ),
)


class Needs(NamedTuple):
    """Numbers that must be in memory at a model's worst moment, for each context point and each target."""

    point: int
    target: int

    def times(self, versions: int) -> "Needs":
        """As much for each of several versions of the data."""
        return Needs(self.point * versions, self.target * versions)


def available(device: torch.device) -> int | None:
    """Bytes free on a device, with what PyTorch has only cached there; None if nobody knows."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    if device.type != "cpu":
        return None
    found = [left for left in (_of_machine(), *(_of_group(*files) for files in _CGROUPS)) if left is not None]
    return min(found, default=None)


class Peak:
    """The most bytes a GPU has held since this was made, beyond those it held then.

    Data and weights that are there already do not count. None where nobody counts: on a CPU.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self.before = device, 0
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            self.before = torch.cuda.memory_allocated(device)

    def __call__(self) -> int | None:
        """How many so far."""
        if self.device.type != "cuda":
            return None
        return torch.cuda.max_memory_allocated(self.device) - self.before


def require(needed: int, device: torch.device, what: str) -> None:
    """Refuse work that would need more than there is, saying how much of both.

    Nobody is asked while work is compiled or captured, and so not when that is run either: ask before.

    Args:
        needed: bytes at the worst moment, as estimated.
        what: who would need them, and for what.
    """
    if needed < WORTH_ASKING or torch.compiler.is_compiling():
        return
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return
    free = available(device)
    if free is not None and needed > free:
        raise MemoryError(
            f"{what} would need about {needed / 1e9:,.1f} GB, but {device} has {free / 1e9:,.1f} GB free: "
            "take fewer points, a smaller batch or targets in smaller pieces (chunk=), or a model of "
            "constant memory such as CMANP"
        )


def _of_machine() -> int | None:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, AttributeError):  # not Linux, or not allowed to look
        return None


def _of_group(limit: Path, used: Path) -> int | None:
    try:
        return int(limit.read_text()) - int(used.read_text())
    except (OSError, ValueError):  # there is no such group, or no limit ("max")
        return None

"""What the numbers of some tensors were at one moment, and whether they are still the same.

Version counters and addresses do not tell: code writes through `parameter.data`, through NumPy arrays that
share the memory, by fused optimisers and by kernels of its own, and swaps tensors for others. So all bits are
verified each time: by a checksum of 64 bits, at the speed of reading them (on a CPU half a million bytes take
microseconds, on a GPU it is one launch), or else by comparison with a copy.
"""

import threading
from collections.abc import Callable, Sequence
from math import gcd
from typing import Any

import torch
from torch import Tensor

from constmem.kernels import cpu, gpu
from constmem.kernels.graphs import graph_of
from constmem.kernels.paths import CAPTURED, CHECKSUM, traced

NUMBERS = 256  # of points, that an update's launch may copy to the host
REPEATS = 16  # of a checksum, before its launch is worth capturing
_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}


class _Verified(threading.local):
    """The snapshots that a thread has just verified, innermost last."""

    snapshots: tuple["Snapshot", ...] = ()


_verified = _Verified()


class Snapshot:
    """What some tensors held at one moment; `holds` says whether tensors still hold the same.

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

    def pending(self, device: torch.device, numbers: int) -> tuple[Any, Callable[[], list[float]]] | None:
        """What a launch there has to verify, if that was deferred, and what then gives points' numbers."""
        now = self._now
        check = now.taken(device, numbers) if isinstance(now, Checksum) else None
        return None if check is None else (check, lambda: now.numbers(numbers))  # type: ignore[union-attr]

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
        now = _checksum(tensors)
        found = None if now is None else now()
        if found is None or self._sum not in (None, found):
            return False
        self._now, self._sum = now, found
        self._kept = tensors  # so that their memory goes to no others
        self._where, self._sizes = [t.data_ptr() for t in tensors], [t.numel() for t in tensors]
        return True

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_now": None, "_kept": None}  # a copy's tensors lie elsewhere


def _checksum(tensors: Sequence[Tensor]) -> Callable[[], int | None] | None:
    """What finds a number that changes with any bit of these; None where nothing can."""
    where = {t.device for t in tensors}
    able = len(where) == 1 and all(t.is_contiguous() for t in tensors)
    if not able or not all(t.data_ptr() or t.numel() == 0 for t in tensors):  # memory was given back
        return None
    if gpu.usable(device := where.pop()):
        return None if CHECKSUM.failed else CHECKSUM.attempt(lambda: Checksum(tensors))
    return cpu.checksum(tensors) if device.type == "cpu" and cpu.usable() else None


def _bits(tensors: Sequence[Tensor]) -> list[Tensor]:
    """A copy of the tensors' bits as integers, together: few launches on a GPU."""
    words = [t.contiguous().view(-1).view(_WORDS[t.element_size()]) for t in tensors]
    kinds = dict.fromkeys(w.dtype for w in words)
    return [torch.cat([w for w in words if w.dtype == kind]) for kind in kinds]


class Checksum:
    """A number that changes with any bit of some tensors on a GPU: one launch, one copy and one wait.

    Between `begin` and `end` the GPU can be given other work, so that one wait serves for both; a launch that
    is made in between may find the number, too (`taken`), so that there is only one.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        kernels, before, device = gpu.merging(), 0, tensors[0].device
        word = gcd(4, *(t.data_ptr() for t in tensors), *(t.nbytes for t in tensors))  # bytes
        rows: list[tuple[int, int, int]] = []
        for t in tensors:
            words = t.nbytes // word
            starts = range(0, words, kernels.WORDS)
            rows += [(t.data_ptr() + word * i, min(words - i, kernels.WORDS), before + i) for i in starts]
            before += words
        self._table = torch.tensor(rows, dtype=torch.int64, device=device).view(-1, 3)
        self._sums = torch.empty(len(rows), dtype=torch.int64, device=device)
        self._here = torch.empty(len(rows), dtype=torch.int64, pin_memory=device.type == "cuda")
        self._numbers = torch.empty(NUMBERS, pin_memory=device.type == "cuda")
        self._deferred = False  # until another launch
        self._bits, self._calls, self._one_at_a_time = 8 * word, 0, threading.RLock()
        self._graph: torch.cuda.CUDAGraph | None = None

    def __call__(self) -> int | None:
        """The number; None where it could not be found."""
        return self.end() if self.begin() else None

    def begin(self, *, deferred: bool = False) -> bool:
        """Have the GPU find the number, if it can; `end` must follow, in this thread.

        Args:
            deferred: until another launch, or else until the end.
        """
        self._one_at_a_time.acquire()
        self._deferred = deferred
        if deferred or CHECKSUM.attempt(self._begin):
            return True
        self._one_at_a_time.release()
        return False

    def taken(self, device: torch.device, numbers: int) -> Any:
        """What a launch there has to sum, if that was deferred; it copies so many numbers of points."""
        if not self._deferred or self._table.device != device or numbers > NUMBERS:
            return None
        self._deferred = False
        return gpu.merging().Check(self._table, self._bits, self._here, self._numbers)

    def numbers(self, count: int) -> list[float]:
        """Those of points, as that launch has copied them."""
        self._synchronise()
        found: list[float] = self._numbers[:count].tolist()
        return found

    def end(self) -> int | None:
        """Wait for what was begun."""
        try:
            if self._deferred and not CHECKSUM.attempt(self._begin):
                return None
            return CHECKSUM.attempt(self._end)
        finally:
            self._deferred = False
            self._one_at_a_time.release()

    def _begin(self) -> bool:
        self._calls += 1
        if self._calls == REPEATS and self._table.is_cuda and not CAPTURED.failed:
            found = CAPTURED.attempt(lambda: graph_of(self._launch, self._table.device))
            self._graph = None if found is None else found[0]
        if self._graph is None:
            self._launch()
        else:
            self._graph.replay()
        return True

    def _end(self) -> int:
        self._synchronise()
        return int(sum(self._here.tolist()) % 2**64)

    def _synchronise(self) -> None:
        if self._table.is_cuda:
            torch.cuda.current_stream(self._table.device).synchronize()

    def _launch(self) -> None:
        gpu.merging().checksum(self._table, self._bits, self._sums)
        self._here.copy_(self._sums, non_blocking=True)

"""Small launches on a GPU captured in a CUDA graph when they come again: a model's work, checksums of memory.

A graph reads weights where they lie, so training in place is seen; it is captured again for other shapes,
other precisions and weights that lie elsewhere. What it returns is a copy: nothing a caller holds is ever
written to again.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from math import gcd
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from constmem.kernels import cpu, gpu
from constmem.kernels.paths import CAPTURED, CHECKSUM, GRAPHS

LARGEST = 2**22  # numbers given: beyond, launches are no longer what takes the time
PATIENCE = 2  # calls before one is worth capturing
NUMBERS = 256  # of points, that an update's launch may copy to the host
REPEATS = 16  # of a checksum, before its launch is worth capturing
KEPT = 4  # graphs of one model
REMEMBERED = 64  # kinds of calls that are counted
Result = TypeVar("Result", Tensor, tuple[Tensor, Tensor], tuple[Tensor, ...])


class _Captured(NamedTuple):
    """A graph, what it reads and what it writes; weights are held so that they stay where they are."""

    graph: torch.cuda.CUDAGraph
    given: tuple[Tensor, ...]
    result: Any
    weights: list[Tensor]


class Graphs:
    """The graphs captured of one model's work; copies of the model begin with none."""

    def __init__(self) -> None:
        self._captured: dict[object, _Captured] = {}
        self._calls: dict[object, int] = {}
        self._one_at_a_time = threading.Lock()  # on one CUDA stream, as PyTorch's threads are by default

    def __deepcopy__(self, _: Any) -> "Graphs":
        return Graphs()

    def __reduce__(self) -> tuple[type["Graphs"], tuple[()]]:
        return Graphs, ()

    def run(self, module: nn.Module, work: Callable[..., Result], *given: Tensor) -> Result:
        """work(*given), which depends on nothing but `given` and the weights of `module`."""
        numbers = sum(t.numel() for t in given)
        if torch.is_grad_enabled() or numbers > LARGEST or GRAPHS.failed or not gpu.usable(given[0].device):
            return work(*given)
        weights = list(_weights(module))
        settings = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
        precision = torch.get_float32_matmul_precision(), torch.is_inference_mode_enabled()
        kinds = tuple((t.shape, t.dtype, t.device) for t in given)
        key = work.__name__, kinds, settings, precision, tuple(w.data_ptr() for w in weights)
        if key not in self._captured:
            if len(self._calls) >= REMEMBERED:
                self._calls.clear()
            self._calls[key] = self._calls.get(key, 0) + 1
            if self._calls[key] <= PATIENCE:
                return work(*given)
            if len(self._captured) >= KEPT:
                self._captured.clear()
            found = GRAPHS.attempt(lambda: _capture(work, given, weights))
            if found is None:
                return work(*given)
            self._calls.clear()
            self._captured[key] = found
        held = self._captured[key]
        with self._one_at_a_time:
            for here, new in zip(held.given, given, strict=True):
                here.copy_(new)
            held.graph.replay()
            copied: Result = _copied(held.result)
        return copied


def _copied(result: Any) -> Any:
    """A tensor, or several, in memory of their own."""
    return result.clone() if isinstance(result, Tensor) else tuple(t.clone() for t in result)


def _capture(work: Callable[..., Any], given: tuple[Tensor, ...], weights: list[Tensor]) -> _Captured:
    given = tuple(t.clone() for t in given)
    autocast = torch.autocast(  # weights cast before would be read where they no longer are
        "cuda",
        torch.get_autocast_dtype("cuda"),
        enabled=torch.is_autocast_enabled("cuda"),
        cache_enabled=False,
    )
    with autocast:
        graph, result = _graph(lambda: work(*given), given[0].device)
    return _Captured(graph, given, result, weights)


def _graph(work: Callable[[], Any], device: torch.device) -> tuple[torch.cuda.CUDAGraph, Any]:
    """What does that work again, and what it writes its results to."""
    with torch.cuda.device(device):
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            work()  # what libraries allocate once, they allocate now
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            return graph, work()


class Checksum:
    """A number that changes with any bit of some tensors on a GPU: one launch, one copy and one wait.

    Between `begin` and `end` the GPU can be given other work, so that one wait serves for both; a launch that
    is made in between may find the number, too (`taken`), so that there is only one.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        kernels, before, device = gpu.triton("states"), 0, tensors[0].device
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
        return gpu.triton("states").Check(self._table, self._bits, self._here, self._numbers)

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
            found = CAPTURED.attempt(lambda: _graph(self._launch, self._table.device))
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
        gpu.triton("states").checksum(self._table, self._bits, self._sums)
        self._here.copy_(self._sums, non_blocking=True)


def checksum(tensors: Sequence[Tensor]) -> Callable[[], int | None] | None:
    """What finds a number that changes with any bit of these; None where nothing can."""
    where = {t.device for t in tensors}
    able = len(where) == 1 and all(t.is_contiguous() for t in tensors)
    if not able or not all(t.data_ptr() or t.numel() == 0 for t in tensors):  # memory was given back
        return None
    if gpu.usable(device := where.pop()):
        return None if CHECKSUM.failed else CHECKSUM.attempt(lambda: Checksum(tensors))
    return cpu.checksum(tensors) if device.type == "cpu" and cpu.usable() else None


def _weights(module: nn.Module) -> Iterator[Tensor]:
    """All parameters, past the bookkeeping of `parameters()`, which would take as long as the work itself."""
    for parameter in module._parameters.values():
        if parameter is not None:
            yield parameter
    for child in module._modules.values():
        if child is not None:
            yield from _weights(child)

"""Work of small launches on a GPU, captured in a CUDA graph when it comes again, and replayed.

A graph reads weights where they lie, so training in place is seen; it is captured again for other shapes,
other precisions and weights that lie elsewhere. What it returns is a copy: nothing a caller holds is ever
written to again.
"""

import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from constmem.kernels import gpu
from constmem.kernels.paths import GRAPHS

LARGEST = 2**22  # numbers given: beyond, launches are no longer what takes the time
PATIENCE = 2  # calls before one is worth capturing
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
        graph, result = graph_of(lambda: work(*given), given[0].device)
    return _Captured(graph, given, result, weights)


def graph_of(work: Callable[[], Any], device: torch.device) -> tuple[torch.cuda.CUDAGraph, Any]:
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


def _weights(module: nn.Module) -> Iterator[Tensor]:
    """All parameters, past the bookkeeping of `parameters()`, which would take as long as the work itself."""
    for parameter in module._parameters.values():
        if parameter is not None:
            yield parameter
    for child in module._modules.values():
        if child is not None:
            yield from _weights(child)

"""Training steps as CUDA graphs: one launch instead of hundreds, for one shape of batches or for several."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from constmem.data import Events
from constmem.point_processes.chunks import seeded

WARM = 3  # steps before a graph of the only shape there is
MET = 2  # the time at which a shape of events is met that its graph is captured


def once(step: Callable[[], Tensor], generator: torch.Generator) -> Callable[[], Tensor]:
    """Capture a step that draws its own batches, always of one shape, once it is warm."""
    warm, graph, loss, side = 0, torch.cuda.CUDAGraph(), torch.empty(0), torch.cuda.Stream()

    def run() -> Tensor:
        nonlocal warm, loss
        warm += 1
        if warm <= WARM:
            return _aside(side, step)
        if warm == WARM + 1:
            graph.register_generator_state(generator)
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                loss = step()
        graph.replay()
        return loss

    return run


class ByShape:
    """Capture a step for every shape of event batches that is met more than once.

    Batches are drawn outside, and written over the one that a graph was captured with. What is dropped
    is drawn from PyTorch's own generator, seeded before each replay as it is before each step without
    a graph: both take the same steps. All graphs share their memory, since one step runs at a time.

    Args:
        step: from a batch and a generator (None: PyTorch's own) to the loss.
        seeds: draws the seed of a step from a generator; none where nothing is dropped.
        fits: whether the step of a batch can be captured.
    """

    def __init__(
        self,
        step: Callable[[Events, torch.Generator | None], Tensor],
        seeds: Callable[[torch.Generator], list[int]],
        fits: Callable[[Events], bool],
    ) -> None:
        self._step, self._seeds, self._fits = step, seeds, fits
        self._met: Counter[Any] = Counter()
        self._graphs: dict[Any, tuple[torch.cuda.CUDAGraph, Events, Tensor]] = {}
        self._pool: Any = torch.cuda.graph_pool_handle()
        self._side = torch.cuda.Stream()

    def __call__(self, batch: Events, generator: torch.Generator) -> Tensor:
        """Take one step."""
        shape = batch.times.shape
        self._met[shape] += 1
        if self._met[shape] < MET or not self._fits(batch):
            return _aside(self._side, lambda: self._step(batch, generator))
        if shape not in self._graphs:
            self._graphs[shape] = self._captured(batch)
        graph, inputs, loss = self._graphs[shape]
        for here, new in zip(_tensors(inputs), _tensors(batch), strict=True):
            here.copy_(new)
        seeds = self._seeds(generator)
        if seeds:
            with seeded(seeds[0], batch.device):
                graph.replay()
        else:
            graph.replay()
        return loss.clone()  # the next replay writes over it

    def _captured(self, batch: Events) -> tuple[torch.cuda.CUDAGraph, Events, Tensor]:
        inputs, graph = _copy(batch), torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            loss = self._step(inputs, None)
        return graph, inputs, loss


def _tensors(events: Events) -> list[Tensor]:
    parts = events.times, events.marks, events.mask, events.t_start, events.t_end
    return [part for part in parts if part is not None]


def _copy(events: Events) -> Events:
    """The same events in memory of their own, which may be written over."""
    names = "times", "marks", "mask", "t_start", "t_end"
    copies: dict[str, Any] = dict(zip(names, (part.clone() for part in _tensors(events)), strict=False))
    return replace(events, **copies)


def _aside(side: torch.cuda.Stream, step: Callable[[], Tensor]) -> Tensor:
    """Take a step on another stream: gradients remember theirs, and a captured one must not wait for it."""
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        result = step()
    torch.cuda.current_stream().wait_stream(side)
    return result

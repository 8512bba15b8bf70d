"""A walk over the chunks of a long stream whose backward pass walks again, from the last chunk to the first.

Forwards, nothing is kept but the state before each chunk. Backwards, each chunk is computed once more from
its state, with a graph, and handed what its likelihoods and the state after it are worth. So the peak is
that of one chunk, however many there are.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from constmem.point_processes.chunks import Chunk
from constmem.point_processes.states import EventState

Score = Callable[..., tuple[Tensor, Tensor, Any]]  # (state, chunk, wanted) to log-probabilities and a state


@dataclass(frozen=True)
class Walk:
    """What to do with which chunks.

    Attributes:
        score: from a state, a chunk and the places wanted to log-probabilities of gaps and marks, and the
            state after the chunk.
        chunks: the events, and which of them are wanted.
        seeds: of PyTorch's own generator for each chunk, where something is drawn; else empty.
    """

    score: Score
    chunks: Sequence[tuple[Chunk, Tensor]]
    seeds: Sequence[int]

    def step(self, i: int, state: Any) -> tuple[Tensor, Tensor, Any]:
        """The log-probabilities of chunk i, and the state after it."""
        if not self.seeds:
            return self.score(state, *self.chunks[i])
        with seeded(self.seeds[i], state.device):
            return self.score(state, *self.chunks[i])


def walk(plan: Walk, state: Any, parameters: Sequence[Tensor]) -> tuple[Tensor, Tensor, Any]:
    """Log-probabilities of gaps and marks of all chunks, and the state after them; lean in its gradient."""
    if len(plan.chunks) == 1 or not torch.is_grad_enabled():
        return _walked(plan, state)[:3]
    names = tuple(state.memory)
    inputs = *state.memory.values(), *parameters
    end: list[EventState] = []
    time, mark, *memory = _Rewind.apply(plan, state, names, end, *inputs)  # type: ignore[no-untyped-call]
    return time, mark, replace(end[0], memory=dict(zip(names, memory, strict=True)))


def _walked(plan: Walk, state: Any) -> tuple[Tensor, Tensor, Any, list[Any]]:
    times, marks, states = [], [], []
    for i in range(len(plan.chunks)):
        states.append(state)
        time, mark, state = plan.step(i, state)
        times.append(time)
        marks.append(mark)
    return torch.cat(times, 1), torch.cat(marks, 1), state, states


class _Rewind(torch.autograd.Function):
    """`_walked` with a backward pass that walks the chunks a second time."""

    @staticmethod
    def forward(
        ctx: Any, plan: Walk, state: Any, names: tuple[str, ...], end: list[Any], *inputs: Tensor
    ) -> tuple[Tensor, ...]:
        time, mark, last, ctx.states = _walked(plan, state.detach())
        end.append(last)
        ctx.plan, ctx.names = plan, names
        ctx.parameters = inputs[len(names) :]
        device = time.device.type
        ctx.autocast = device, torch.get_autocast_dtype(device), torch.is_autocast_enabled(device)
        memory = [last.memory[name] for name in names]
        ctx.mark_non_differentiable(*(t for t in memory if not t.is_floating_point()))
        ctx.set_materialize_grads(False)
        return time, mark, *memory

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_time: Tensor | None, grad_mark: Tensor | None, *grad_memory: Any) -> Any:
        parameters = [p for p in ctx.parameters if p.requires_grad]
        grads: list[Tensor | None] = [None] * len(parameters)
        upstream = dict(zip(ctx.names, grad_memory, strict=True))
        device, dtype, enabled = ctx.autocast
        stop = sum(chunk.times.shape[1] for chunk, _ in ctx.plan.chunks)
        for i in reversed(range(len(ctx.plan.chunks))):
            start = stop - ctx.plan.chunks[i][0].times.shape[1]
            memory = {name: _leaf(t) for name, t in ctx.states[i].memory.items()}
            with torch.enable_grad(), torch.autocast(device, dtype=dtype, enabled=enabled):
                time, mark, after = ctx.plan.step(i, replace(ctx.states[i], memory=memory))
            pairs = [(time, _part(grad_time, start, stop)), (mark, _part(grad_mark, start, stop))]
            pairs += [(after.memory[name], grad) for name, grad in upstream.items()]
            pairs = [(out, grad) for out, grad in pairs if grad is not None and out.requires_grad]
            leaves = [t for t in memory.values() if t.requires_grad]
            outs, given = zip(*pairs, strict=True)
            found = torch.autograd.grad(outs, [*leaves, *parameters], given, allow_unused=True)
            for j, grad in enumerate(found[len(leaves) :]):
                known = grads[j]
                grads[j] = grad if known is None else known if grad is None else known + grad
            parts = iter(found)
            upstream = {name: next(parts) if t.requires_grad else None for name, t in memory.items()}
            stop = start
        summed = iter(grads)
        of_parameters = [next(summed) if p.requires_grad else None for p in ctx.parameters]
        return None, None, None, None, *(upstream[name] for name in ctx.names), *of_parameters


def _leaf(t: Tensor) -> Tensor:
    return t.detach().requires_grad_(t.is_floating_point())


def _part(grad: Tensor | None, start: int, stop: int) -> Tensor | None:
    return None if grad is None else grad[:, start:stop]


@contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """PyTorch's own generator, which dropout uses, from a seed; afterwards it is as it was before."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield

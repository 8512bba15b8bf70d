"""Events a few at a time: cut from sequences, checked as they come, walked over again for gradients.

Forwards, nothing is kept of a long stream but the state before each chunk. Backwards, each chunk is
computed once more from its state, with a graph, and handed the gradients of its likelihoods and of the state
after it. So the peak is that of one chunk, however many there are.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from math import inf
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float64, Int64, Shaped
from torch import Tensor, nn

from constmem.core import checks
from constmem.point_processes.events import Events
from constmem.point_processes.padding import NOTHING, UNKNOWN, exact, numbers, out_of_range, refuse

FEW = 32  # events that are checked one by one
Recent = tuple[Float64[Tensor, "b k"], Float64[Tensor, "b k"], Int64[Tensor, "b k"]]  # times, gaps, marks
Scored = tuple[Tensor, Tensor, Any]  # log-probabilities of gaps and marks, and the state after them
Score = Callable[..., Scored]  # of a state, a chunk and the places wanted


class Chunk(NamedTuple):
    """Events in a row of each stream, the real ones first; `mask` is None where all are."""

    times: Float64[Tensor, "b t"]
    gaps: Float64[Tensor, "b t"]
    marks: Int64[Tensor, "b t"]
    mask: Bool[Tensor, "b t"] | None

    @property
    def real(self) -> Bool[Tensor, "b t"]:
        """Which events are real."""
        return torch.ones_like(self.marks, dtype=torch.bool) if self.mask is None else self.mask

    def last_of(self, each: Tensor, before: Tensor) -> Tensor:
        """The entry of each stream's last real event, or what was before where there is none."""
        if self.mask is None:
            return each[:, -1].clone() if each.shape[1] > 1 else each[:, 0]  # which keeps no chunk alive
        count = self.mask.sum(-1)
        index = (count - 1).clamp_min(0).reshape(-1, *[1] * (each.ndim - 1))
        last = each.gather(1, index.expand(-1, 1, *each.shape[2:])).squeeze(1)
        return torch.where((count > 0).reshape(-1, *[1] * (last.ndim - 1)), last, before)

    def latest(self, each: Shaped[Tensor, "b t"], before: Shaped[Tensor, "b k"]) -> Shaped[Tensor, "b k"]:
        """The entries of each stream's last k events, oldest first, from those before."""
        k, joined = before.shape[1], torch.cat([before, each], 1)
        if self.mask is None:
            return joined[:, joined.shape[1] - k :]
        return joined.gather(1, self.mask.sum(-1, keepdim=True) + torch.arange(k, device=each.device))


def shifted(before: Tensor, each: Tensor) -> Tensor:
    """What stood before each event, from what was before all of them and what stands after each."""
    return torch.cat([before[:, None], each[:, :-1]], 1)


def windows(before: Shaped[Tensor, "b k"], each: Shaped[Tensor, "b t"]) -> Shaped[Tensor, "b t k"]:
    """The k entries before each event, oldest first, from those before all of them."""
    return torch.cat([before, each[:, :-1]], 1).unfold(1, before.shape[1], 1)


def newest(*parts: Recent) -> Recent:
    """The latest of the last events of some parts, as many as one has; of simultaneous ones without a gap
    between them those of the last part are the later."""
    times, gaps, marks = (torch.cat(each, 1) for each in zip(*parts, strict=True))
    nothing = marks == NOTHING
    times, gaps, marks = without((times, gaps, marks), nothing)
    order = (gaps == 0).long().argsort(dim=1, stable=True)
    by_time = torch.where(nothing, -torch.inf, times).gather(1, order).argsort(dim=1, stable=True)
    kept = order.gather(1, by_time)[:, times.shape[1] - parts[0][0].shape[1] :]
    return times.gather(1, kept), gaps.gather(1, kept), marks.gather(1, kept)


def without(last: Recent, gone: Tensor) -> Recent:
    """Nothing in place of some of the events."""
    times, gaps, marks = last
    nothing = marks.masked_fill(gone, NOTHING)
    return times.masked_fill(gone, 0.0), gaps.masked_fill(gone, 0.0), nothing


def pieces(events: Events, last_time: Float64[Tensor, " b"], chunk: int) -> Iterator[Chunk]:
    """Cut sequences into chunks; gaps are counted from the event before, or from `last_time`."""
    checks.positive("chunk", chunk)
    for i in range(0, events.times.shape[1], chunk):
        here = slice(i, i + chunk)
        mask = events.mask[:, here]
        times = torch.where(mask, events.times[:, here], last_time[:, None])
        times = times.cummax(1).values  # padding stays at the last real time
        gaps = times - torch.cat([last_time[:, None], times], 1)[:, :-1]
        yield Chunk(times, gaps, events.marks[:, here], mask)
        last_time = times[:, -1]


def streamed(
    last_time: Float64[Tensor, " b"], times: Any, marks: Any, mask: Any, num_marks: int, chunk: int
) -> Iterator[Chunk]:
    """New events of streams as chunks: (b,) one of each, (b, k) a few; refused if they do not fit."""
    checks.positive("chunk", chunk)
    b, device = len(last_time), last_time.device
    times = exact("times", numbers("times", times)).to(device, copy=True)
    marks = (
        torch.full_like(times, 0 if num_marks == 1 else UNKNOWN, dtype=torch.int64)
        if marks is None
        else numbers("marks", marks).to(device, copy=True)
    )
    if not times.ndim and not marks.ndim and b == 1:
        times, marks = times[None], marks[None]
    if times.ndim not in (1, 2) or len(times) != b or marks.shape != times.shape:
        raise ValueError(
            f"times {tuple(times.shape)} and marks {tuple(marks.shape)} must be of one shape, (b,) or (b, k) "
            f"with b = {b} streams"
        )
    if marks.is_floating_point():
        raise TypeError("marks must be whole numbers, not floating ones: use marks.long()")
    if mask is not None:
        mask = torch.as_tensor(mask, device=device)
        if mask.dtype != torch.bool or mask.shape != times.shape:
            raise ValueError(
                f"mask is {mask.dtype} of shape {tuple(mask.shape)}, but boolean (True = real) of the shape "
                f"of times, {tuple(times.shape)}, is needed"
            )
    if times.ndim == 1:
        times, marks = times[:, None], marks[:, None]
        mask = None if mask is None else mask[:, None]
    if mask is not None:
        times = torch.where(mask, times, last_time[:, None]).cummax(1).values if times.shape[1] else times
        marks = torch.where(mask, marks, UNKNOWN)
    before = last_time[:, None]
    if times.shape[1] != 1:
        before = torch.cat([before, times], 1)[:, :-1]
    _require_fitting(times, before, marks, mask, num_marks)
    gaps = times - before
    for i in range(0, times.shape[1], chunk):
        here = slice(i, i + chunk)
        yield Chunk(times[:, here], gaps[:, here], marks[:, here], None if mask is None else mask[:, here])


def _require_fitting(
    times: Tensor, before: Tensor, marks: Tensor, mask: Tensor | None, num_marks: int
) -> None:
    """Refuse times that decrease and marks out of range; a device is waited for once."""
    if mask is None and times.numel() <= FEW and times.device.type == "cpu":  # sooner outside of PyTorch
        every = zip(times.flatten().tolist(), before.flatten().tolist(), strict=True)
        if all(old <= new < inf for new, old in every) and all(
            UNKNOWN <= mark < num_marks for mark in marks.flatten().tolist()
        ):
            return
    packed = torch.ones_like(marks[:, 1:], dtype=torch.bool) if mask is None else mask[:, :-1] | ~mask[:, 1:]
    refuse(
        (~((times >= before) & times.isfinite()), lambda k, i: (
            f"event {i} of stream {k} is at {times[k, i].item()}, but the one before it was at "
            f"{before[k, i].item()}: times are finite, absolute and never decrease"
        )),
        ((marks < UNKNOWN) | (marks >= num_marks), lambda k, i: (
            f"event {i} of stream {k} has mark {marks[k, i].item()}: {out_of_range(num_marks)}"
        )),
        (~packed, lambda k, _: (
            f"stream {k} has a missing event before a real one: the missing ones come last"
        )),
    )  # fmt: skip


def walk(
    score: Score, chunks: Sequence[tuple[Chunk, Tensor]], seeds: Sequence[int], state: Any, model: nn.Module
) -> Scored:
    """Log-probabilities of gaps and marks of all chunks, and the state after them; lean in its gradient.

    Args:
        chunks: the events, and which of them are wanted.
        seeds: of PyTorch's own generator for each chunk, where something is drawn; else empty.
        model: whose parameters a gradient may be wanted of.
    """
    lean, parameters = len(chunks) > 1 and torch.is_grad_enabled(), [*model.parameters()]
    times, marks = [], []
    each: Sequence[int | None] = seeds or [None] * len(chunks)
    for (chunk, wanted), seed in zip(chunks, each, strict=True):
        step = partial(_taken, score, seed, chunk, wanted)
        time, mark, state = _rewound(step, state, parameters) if lean else step(state)
        times.append(time)
        marks.append(mark)
    return torch.cat(times, 1), torch.cat(marks, 1), state


def _taken(score: Score, seed: int | None, chunk: Chunk, wanted: Tensor, state: Any) -> Scored:
    with nullcontext() if seed is None else seeded(seed, state.device):
        return score(state, chunk, wanted)


def _rewound(step: Score, state: Any, parameters: Sequence[Tensor]) -> Scored:
    """A step that is taken again in the backward pass."""
    end: list[Any] = []
    time, mark, *memory = _Rewind.apply(step, state, end, *state.memory.values(), *parameters)  # type: ignore[no-untyped-call]
    return time, mark, replace(end[0], memory=dict(zip(end[0].memory, memory, strict=True)))


class _Rewind(torch.autograd.Function):
    """A step without a graph, whose backward pass takes it a second time with one."""

    @staticmethod
    def forward(ctx: Any, step: Score, state: Any, end: list[Any], *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.step, ctx.state, ctx.parameters = step, state.detach(), inputs[len(state.memory) :]
        ctx.save_for_backward(*inputs)  # so that PyTorch notices if one is written to before the second time
        time, mark, after = step(ctx.state)
        end.append(after)
        device = time.device.type
        ctx.autocast = device, torch.get_autocast_dtype(device), torch.is_autocast_enabled(device)
        ctx.mark_non_differentiable(*(t for t in after.memory.values() if not t.is_floating_point()))
        ctx.set_materialize_grads(False)
        return time, mark, *after.memory.values()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        _ = ctx.saved_tensors
        held = ctx.state.memory.items()
        leaves = {name: t.detach().requires_grad_(t.is_floating_point()) for name, t in held}
        device, dtype, enabled = ctx.autocast
        with torch.enable_grad(), torch.autocast(device, dtype=dtype, enabled=enabled):
            time, mark, after = ctx.step(replace(ctx.state, memory=leaves))
        pairs = zip((time, mark, *after.memory.values()), grads, strict=True)
        outs, given = zip(*((t, g) for t, g in pairs if g is not None and t.requires_grad), strict=True)
        inputs = *leaves.values(), *ctx.parameters
        wanted = [t for t in inputs if t.requires_grad]
        found = iter(torch.autograd.grad(outs, wanted, given, allow_unused=True))
        return None, None, None, *(next(found) if t.requires_grad else None for t in inputs)


@contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """PyTorch's own generator, which dropout uses, from a seed; afterwards it is as it was before."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield

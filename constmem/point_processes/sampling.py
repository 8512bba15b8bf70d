"""Ancestral sampling: the next gap, its mark given the gap, and on from there."""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from constmem.core import checks
from constmem.point_processes.events import Events

if TYPE_CHECKING:
    from constmem.point_processes.base import PointProcess


@torch.no_grad()
def sample(
    model: "PointProcess[Any]",
    state: Any,
    *,
    n: int | None,
    until: float | Tensor | None,
    generator: torch.Generator | None,
    limit: int,
) -> Events:
    """A future of each stream: see `PointProcess.sample`."""
    if (n is None) == (until is None):
        raise ValueError("say either how many events to draw, n=, or up to when, until=")
    if n is not None:
        checks.positive("n", n)
    begin = state.last_time
    end = None if until is None else torch.as_tensor(until, dtype=torch.float64, device=begin.device)
    end = None if end is None else end.expand(begin.shape)
    if end is not None and not bool(end.isfinite().all()):
        k = int((~end.isfinite()).nonzero()[0])
        raise ValueError(f"until={end[k].item()} for stream {k} is no time to stop at: give one, or n=")
    if end is not None and bool((end < begin).any()):
        k = int((end < begin).nonzero()[0])
        raise ValueError(f"until={end[k].item()} is before the last event of stream {k}, {begin[k].item()}")
    times: list[Tensor] = []
    marks: list[Tensor] = []
    alive: list[Tensor] = []
    running = torch.ones_like(begin, dtype=torch.bool)
    while n is None or len(times) < n:
        if len(times) == limit:
            raise RuntimeError(f"{limit} events were drawn before until= was reached: allow more by limit=")
        time, mark = _next(model, state, generator)
        running = running if end is None else running & (time <= end)
        if not bool(running.any()):
            break
        state = model.update(state, time, mark, mask=None if end is None else running)
        times.append(state.last_time)
        marks.append(torch.where(running, mark, -1))
        alive.append(running)
    shape = (len(begin), 0)
    return Events(
        torch.stack(times, 1) if times else begin.new_empty(shape),
        torch.stack(marks, 1) if times else torch.empty(shape, dtype=torch.int64, device=begin.device),
        torch.stack(alive, 1) if times else torch.empty(shape, dtype=torch.bool, device=begin.device),
        begin,
        end,
        model.unit or "unit",
        model.num_marks,
    )


def _next(model: "PointProcess[Any]", state: Any, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
    """Time and mark of one more event of every stream."""
    prediction = model.query(state)
    gap = prediction.gap.sample(generator=generator).double()
    chances = prediction.mark_logits(gap).exp()
    return state.last_time + gap, torch.multinomial(chances, 1, generator=generator).squeeze(-1)

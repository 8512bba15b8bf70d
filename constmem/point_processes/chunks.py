"""Events a few at a time: cut from sequences, or as they come from streams, checked."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float64, Int64, Shaped
from torch import Tensor

from constmem.core import checks
from constmem.point_processes.events import Events
from constmem.point_processes.states import EventState


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
            return each[:, -1]
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

    def clock_after(self, state: EventState) -> dict[str, Any]:
        """The clock of a state once these events are seen."""
        seen = self.times.shape[1] if self.mask is None else self.mask.sum(-1)
        return {
            "last_time": self.last_of(self.times, state.last_time),
            "last_gap": self.last_of(self.gaps, state.last_gap),
            "last_mark": self.last_of(self.marks, state.last_mark),
            "count": state.count + seen,
        }


def shifted(before: Tensor, each: Tensor) -> Tensor:
    """What stood before each event, from what was before all of them and what stands after each."""
    return torch.cat([before[:, None], each[:, :-1]], 1)


def windows(before: Shaped[Tensor, "b k"], each: Shaped[Tensor, "b t"]) -> Shaped[Tensor, "b t k"]:
    """The k entries before each event, oldest first, from those before all of them."""
    return torch.cat([before, each[:, :-1]], 1).unfold(1, before.shape[1], 1)


def pieces(events: Events, last_time: Float64[Tensor, " b"], chunk: int) -> Iterator[Chunk]:
    """Cut sequences into chunks; gaps are counted from the event before, or from `last_time`."""
    for i in range(0, events.times.shape[1], chunk):
        here = slice(i, i + chunk)
        mask = events.mask[:, here]
        times = torch.where(mask, events.times[:, here], last_time[:, None])
        times = times.cummax(1).values  # padding stays at the last real time
        gaps = times - torch.cat([last_time[:, None], times], 1)[:, :-1]
        yield Chunk(times, gaps, events.marks[:, here], mask)
        last_time = times[:, -1]


def streamed(
    last_time: Float64[Tensor, " b"],
    times: Tensor,
    marks: Tensor | None,
    mask: Tensor | None,
    num_marks: int,
    chunk: int,
) -> Iterator[Chunk]:
    """New events of streams as chunks: (b,) one of each, (b, k) a few; refused if they do not fit."""
    optional = {"marks": marks, "mask": mask}
    checks.tensors(times=times, **{name: t for name, t in optional.items() if t is not None})
    marks = torch.full_like(times, 0 if num_marks == 1 else -1, dtype=torch.int64) if marks is None else marks
    if times.ndim not in (1, 2) or len(times) != len(last_time) or marks.shape != times.shape:
        raise ValueError(
            f"times {tuple(times.shape)} and marks {tuple(marks.shape)} must be of one shape, (b,) or (b, k) "
            f"with b = {len(last_time)} streams"
        )
    if not times.is_floating_point() or marks.is_floating_point() or marks.dtype == torch.bool:
        raise TypeError(f"times must be floating (float64), marks whole, not {times.dtype}, {marks.dtype}")
    if times.ndim == 1:
        times, marks = times[:, None], marks[:, None]
        mask = None if mask is None else mask[:, None]
    times, marks = times.double(), marks.long()
    if mask is not None:
        times = torch.where(mask, times, last_time[:, None]).cummax(1).values if times.shape[1] else times
    before = torch.cat([last_time[:, None], times], 1)[:, :-1]
    real = torch.ones_like(marks, dtype=torch.bool) if mask is None else mask
    marks = torch.where(real, marks, -1)
    _require_fitting(times, before, marks, real, num_marks)
    for i in range(0, times.shape[1], chunk):
        here = slice(i, i + chunk)
        part = None if mask is None else mask[:, here]
        yield Chunk(times[:, here], (times - before)[:, here], marks[:, here], part)


def _require_fitting(times: Tensor, before: Tensor, marks: Tensor, real: Tensor, num_marks: int) -> None:
    """Refuse times that decrease and marks out of range; the device is waited for once."""
    good_times = (times >= before) & torch.isfinite(times)
    good_marks = (marks >= -1) & (marks < num_marks)
    packed = real[:, :-1] | ~real[:, 1:]
    if bool(good_times.all() & good_marks.all() & packed.all()):
        return
    if not bool(good_times.all()):
        k, i = (~good_times).nonzero()[0].tolist()
        raise ValueError(
            f"event {i} of stream {k} is at {times[k, i].item()}, but the one before it was at "
            f"{before[k, i].item()}: times are finite, absolute and never decrease"
        )
    if not bool(good_marks.all()):
        k, i = (~good_marks).nonzero()[0].tolist()
        raise ValueError(
            f"event {i} of stream {k} has mark {marks[k, i].item()}: marks go from 0 to num_marks - 1 = "
            f"{num_marks - 1}, and -1 is an unknown one"
        )
    k = int((~packed).nonzero()[0, 0])
    raise ValueError(f"stream {k} has a missing event before a real one: the missing ones come last")

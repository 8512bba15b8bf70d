"""Checks of event sequences at the border: what is wrong, in which sequence, at which index."""

import torch
from torch import Tensor

from constmem.core import checks


def check_events(
    times: Tensor, marks: Tensor, mask: Tensor, t_start: Tensor, t_end: Tensor | None, *, unit: str,
    num_marks: int,
) -> None:  # fmt: skip
    """Refuse anything but a batch as `Events` describes it; the device is waited for once."""
    if not isinstance(unit, str) or not unit:
        raise ValueError(f"unit is {unit!r}, but must name what times are counted in, such as 'second'")
    checks.positive("num_marks", num_marks)
    _check_shapes(times, marks, mask, t_start, t_end)
    before = torch.cat([t_start[:, None], times], 1)[:, :-1]
    finite = torch.isfinite(times) & torch.isfinite(t_start)[:, None]
    sorted_ = (times >= before) | ~finite  # what is not finite is told first
    packed = mask[:, :-1] | ~mask[:, 1:]
    repeated = mask | (times == before)
    in_range = torch.where(mask, (marks >= -1) & (marks < num_marks), marks == -1)
    whole = torch.isfinite(t_start).all()
    if t_end is not None:
        last = times[:, -1] if times.shape[1] else t_start
        whole = whole & torch.isfinite(t_end).all() & (t_end >= last).all()
    good = torch.stack([x.all() for x in (finite, sorted_, packed, repeated, in_range, whole)])
    if bool(good.all()):
        return
    _explain(times, marks, mask, t_start, t_end, num_marks, finite, sorted_, packed, in_range)


def _check_shapes(times: Tensor, marks: Tensor, mask: Tensor, t_start: Tensor, t_end: Tensor | None) -> None:
    if times.ndim != 2:
        raise ValueError(f"times has shape {tuple(times.shape)}, but (sequences, events) is needed")
    b = times.shape[:1]
    wanted = (
        ("times", times, torch.float64, times.shape),
        ("marks", marks, torch.int64, times.shape),
        ("mask", mask, torch.bool, times.shape),
        ("t_start", t_start, torch.float64, b),
        *(() if t_end is None else (("t_end", t_end, torch.float64, b),)),
    )
    for name, tensor, dtype, shape in wanted:
        if tensor.dtype != dtype:
            raise TypeError(f"{name} is {tensor.dtype}, but {dtype} is needed: convert it first")
        if tensor.shape != shape:
            raise ValueError(
                f"{name} has shape {tuple(tensor.shape)}, but {tuple(shape)} is needed beside times"
            )
        if tensor.device != times.device:
            raise ValueError(f"{name} is on {tensor.device}, but times on {times.device}: move one of them")


def _explain(
    times: Tensor, marks: Tensor, mask: Tensor, t_start: Tensor, t_end: Tensor | None, num_marks: int,
    finite: Tensor, sorted_: Tensor, packed: Tensor, in_range: Tensor,
) -> None:  # fmt: skip
    """Raise what a batch that failed its checks deserves; the first fault in reading order."""
    _explain_bounds(t_start, t_end)
    if not bool(finite.all()):
        k, i = _first(~finite)
        raise ValueError(f"times[{k}, {i}] is {times[k, i].item()}: every time must be finite")
    if not bool(packed.all()):
        k, i = _first(~packed)
        raise ValueError(
            f"sequence {k} has padding at index {i} before a real event: put the real events first"
        )
    if not bool(sorted_.all()):
        k, i = _first(~sorted_)
        raise ValueError(
            f"the times of sequence {k} decrease at index {i}: {times[k, i].item()} comes after "
            + (f"{times[k, i - 1].item()}" if i else f"its t_start, {t_start[k].item()}")
            + "; times are absolute and sorted (for differences use from_gaps)"
        )
    if not bool(in_range.all()):
        k, i = _first(~in_range)
        if not bool(mask[k, i]):
            raise ValueError(f"marks[{k}, {i}] is {marks[k, i].item()}, but is padding: it must be -1")
        raise ValueError(
            f"marks[{k}, {i}] is {marks[k, i].item()}: marks go from 0 to num_marks - 1 = {num_marks - 1}, "
            "and -1 is an unknown one"
        )
    if t_end is not None:
        last = times[:, -1] if times.shape[1] else t_start
        if not bool((t_end >= last).all()):
            k = int((t_end < last).nonzero()[0])
            raise ValueError(
                f"t_end of sequence {k} is {t_end[k].item()}, before its last event at {last[k].item()}: "
                "leave out events after t_end, or give a later one"
            )
    raise ValueError("padding must repeat the last real time of its sequence (t_start where there is none)")


def _explain_bounds(t_start: Tensor, t_end: Tensor | None) -> None:
    for name, bound in (("t_start", t_start), *(() if t_end is None else (("t_end", t_end),))):
        if not bool(torch.isfinite(bound).all()):
            k = int((~torch.isfinite(bound)).nonzero()[0])
            raise ValueError(f"{name} of sequence {k} is {bound[k].item()}: it must be finite")


def _first(bad: Tensor) -> tuple[int, int]:
    k, i = bad.nonzero()[0].tolist()
    return k, i

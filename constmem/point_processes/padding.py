"""From ragged sequences to padded tensors, and what is wrong with them: which sequence, at which index."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Float64, Int64
from numpy.typing import NDArray
from torch import Tensor

from constmem.core import checks

Given = NDArray[Any] | Sequence[Any] | int | float  # numbers that are no tensor yet
Sequences = Iterable[Any]  # of sequences of numbers: lists, arrays or tensors
Bounds = Given | Tensor | None
Fault = tuple[Tensor, Callable[[int, int], str]]  # where something is wrong, and what to say of a place
UNKNOWN, NOTHING = -1, -2  # an unknown mark; no event yet


def numbers(name: str, given: Any) -> Tensor:
    """Numbers as they are given, of a tensor, an array or lists: whole ones as int64, others as float64."""
    if isinstance(given, Tensor):
        if given.dtype == torch.bool:
            raise TypeError(f"{name} is boolean, but numbers are needed (a mask is given by mask=)")
        checks.dense(name, given)
        if given.is_complex() or given.is_meta:
            raise TypeError(f"{name} holds {given.dtype} on {given.device}, but real numbers are needed")
        return given.detach().double() if given.is_floating_point() else given.detach().long()
    try:
        array = np.asarray(given)
        if array.dtype.kind in "MmUS":
            raise TypeError(f"it holds {array.dtype}")
        whole = array.dtype.kind == "i" or (array.dtype.kind == "u" and array.itemsize < 8)
        values = array.astype(np.int64 if whole else np.float64)
    except (TypeError, ValueError) as error:
        raise TypeError(f"{name} is not a sequence of numbers ({error}){_advice(given)}") from error
    if array.dtype.kind in "uO":
        for index, found in np.ndenumerate(array):
            if isinstance(found, int | np.integer) and int(found) != float(found):
                raise _rounded(name, index, int(found))
    return torch.as_tensor(values)


def exact(name: str, values: Tensor) -> Float64[Tensor, "*b"]:
    """The same numbers in float64; whole ones that it would round are refused."""
    if values.is_floating_point():
        return values
    wide = values.double()
    if values.numel() and int(values.abs().max()) > 2**53:
        wrong = (wide.long() != values).nonzero()
        if len(wrong):
            index = tuple(wrong[0].tolist())
            raise _rounded(name, index, int(values[index]))
    return wide


def require_kept(name: str, gaps: Tensor, start: Tensor, times: Tensor) -> None:
    """Refuse gaps that float64 rounds away, as their times are beyond whole numbers."""
    if not len(gaps) or not bool(times.abs().max() > 2**53):
        return
    kept = torch.cat([start[None].to(times), times]).diff()
    lost = (kept - gaps).abs()
    if bool(lost.max() > 1e-3 * gaps.double().mean()):
        i = int(lost.argmax())
        raise ValueError(
            f"{name}[{i}] is {gaps[i].item()}, but {kept[i].item()} at a time of {times[i].item()}, as "
            "float64 rounds times of that size: begin with a t_start nearer to 0"
        )


def _rounded(name: str, index: Sequence[int], found: int) -> ValueError:
    return ValueError(
        f"{name}{''.join(f'[{i}]' for i in index)} is {found}, which float64 would round to "
        f"{int(float(found))}: count times from the start of their sequence while they are whole numbers, as "
        "in [row - row[0] for row in times]"
    )


def moments(name: str, given: Any) -> Float64[Tensor, " b"]:
    """One time for each stream, from as many or from a single number."""
    values = exact(name, numbers(name, given))
    if values.ndim > 1:
        raise ValueError(f"{name} has shape {tuple(values.shape)}, but one time for each stream is needed")
    return values.reshape(-1)


def _advice(given: Any) -> str:
    """What to do with what is no number."""
    kind = getattr(getattr(given, "dtype", None), "kind", "")
    if kind in ("M", "m") or type(given).__name__ in ("Timestamp", "datetime", "DatetimeIndex"):
        return ": count timestamps in a unit, as in (stamps - stamps[0]) / np.timedelta64(1, 's')"
    if isinstance(given, str):
        return (
            ": of a data frame give the rows of each sequence, as in [part['time'] for _, part in "
            "frame.groupby('user')]"
        )
    return ": give numbers, such as seconds since a start"


def each_of(what: str, sequences: Any) -> Iterator[tuple[int, Any]]:
    """Sequences with their numbers."""
    try:
        return enumerate(sequences)
    except TypeError as error:
        kind = type(sequences).__name__
        raise TypeError(f"{what} must be a list of sequences, as in [[1.0, 2.0]], not {kind}") from error


def one_sequence(what: str, k: int, row: Any, *, whole: bool = False) -> Tensor:
    """One sequence of finite numbers, or (`whole`) of whole ones as int64."""
    values = numbers(f"{what}[{k}]", row).cpu()
    if not values.ndim:
        raise ValueError(
            f"{what}[{k}] is one number, not a sequence of them: a single sequence is a list of one, as in "
            "[[1.0, 2.0]]"
        )
    if values.ndim != 1:
        raise ValueError(
            f"{what}[{k}] has shape {tuple(values.shape)}, but one number for each event is needed"
        )
    finite = torch.isfinite(values)
    if not bool(finite.all()):
        i = int((~finite).nonzero()[0])
        raise ValueError(f"{what}[{k}][{i}] is {values[i].item()}: every number must be finite")
    if not whole:
        return values
    if values.is_floating_point() and bool((values != values.round()).any()):
        i = int((values != values.round()).nonzero()[0])
        raise ValueError(f"marks[{k}][{i}] is {values[i].item()}: marks are whole numbers")
    return values.long()


def bounds_of(name: str, bounds: Bounds, count: int) -> Tensor:
    """One number a sequence, from as many or from one for all."""
    values = numbers(name, bounds).cpu()
    if values.ndim > 1 or (values.ndim == 1 and len(values) != count):
        raise ValueError(
            f"{name} has shape {tuple(values.shape)}, but one number is needed, or one for each of the "
            f"{count} sequences"
        )
    return values.expand(count).clone()


def marks_of(
    marks: Sequences | None, rows: list[Tensor], num_marks: int | None
) -> tuple[Int64[Tensor, "b t"], int]:
    """Padded marks beside times, and how many kinds there are."""
    checks.positive("num_marks", 1 if num_marks is None else num_marks)
    if marks is None:
        num_marks = 1 if num_marks is None else num_marks
        known = 0 if num_marks == 1 else UNKNOWN
        kinds = [torch.full((len(row),), known) for row in rows]
        return pad(kinds, [UNKNOWN] * len(rows), torch.int64, repeat=False)[0], num_marks
    kinds = [one_sequence("marks", k, row, whole=True) for k, row in each_of("marks", marks)]
    if len(kinds) != len(rows):
        raise ValueError(f"there are marks for {len(kinds)} sequences, but times for {len(rows)}")
    for k, (kind, row) in enumerate(zip(kinds, rows, strict=True)):
        if len(kind) != len(row):
            raise ValueError(f"sequence {k} has {len(row)} times but {len(kind)} marks: each event needs one")
    if num_marks is None:
        largest = max((int(kind.max()) for kind in kinds if len(kind)), default=0)
        raise ValueError(
            "num_marks is needed beside marks, since a part of the data may lack some kinds: the largest "
            f"mark here is {largest}, so that it is {largest + 1} or more"
        )
    return pad(kinds, [UNKNOWN] * len(rows), torch.int64, repeat=False)[0], num_marks


def pad(
    rows: list[Tensor], empty: Sequence[int | float], dtype: torch.dtype, *, repeat: bool = True
) -> tuple[Tensor, Tensor]:
    """Rows of one width, filled up with their last value or with that of `empty`, and what is real."""
    width = max((len(row) for row in rows), default=0)
    out = torch.empty(len(rows), width, dtype=dtype)
    mask = torch.zeros(len(rows), width, dtype=torch.bool)
    for k, row in enumerate(rows):
        n = len(row)
        out[k, :n] = row
        out[k, n:] = row[-1] if repeat and n else empty[k]
        mask[k, :n] = True
    return out, mask


def check_events(
    times: Tensor, marks: Tensor, mask: Tensor, t_start: Tensor, t_end: Tensor | None, *, unit: str,
    num_marks: int,
) -> None:  # fmt: skip
    """Refuse anything but a batch as `Events` describes it; the device is waited for once."""
    if not isinstance(unit, str) or not unit:
        raise ValueError(f"unit is {unit!r}, but must name what times are counted in, such as 'second'")
    checks.positive("num_marks", num_marks)
    _check_shapes(times, marks, mask, t_start, t_end)
    before, last = torch.cat([t_start[:, None], times], 1).split([times.shape[1], 1], 1)
    bounds = {"t_start": t_start} | ({} if t_end is None else {"t_end": t_end})

    def finite(name: str) -> Fault:
        return ~bounds[name].isfinite()[
            :, None
        ], lambda k, _: f"{name} of sequence {k} is {bounds[name][k].item()}: it must be finite"

    def range_of(k: int, i: int) -> str:
        if not bool(mask[k, i]):
            return f"marks[{k}, {i}] is {marks[k, i].item()}, but is padding: it must be -1"
        return f"marks[{k}, {i}] is {marks[k, i].item()}: {out_of_range(num_marks)}"

    in_range = torch.where(mask, (marks >= UNKNOWN) & (marks < num_marks), marks == UNKNOWN)
    refuse(
        *map(finite, bounds),
        (~times.isfinite(), lambda k, i: (
            f"times[{k}, {i}] is {times[k, i].item()}: every time must be finite"
        )),
        (mask[:, 1:] & ~mask[:, :-1], lambda k, i: (
            f"sequence {k} has padding at index {i} before a real event: put the real events first"
        )),
        (times < before, lambda k, i: (
            f"the times of sequence {k} decrease at index {i}: {times[k, i].item()} comes after "
            f"{'' if i else 'its t_start, '}{before[k, i].item()}; times are absolute and sorted (for "
            "differences use from_gaps)"
        )),
        (~in_range, range_of),
        (last > (torch.inf if t_end is None else t_end[:, None]), lambda k, _: (
            f"t_end of sequence {k} is {bounds['t_end'][k].item()}, before its last event at "
            f"{last[k, 0].item()}: leave out events after t_end, or give a later one"
        )),
        (~mask & (times != before), lambda *_: (
            "padding must repeat the last real time of its sequence (t_start where there is none)"
        )),
    )  # fmt: skip


def refuse(*faults: Fault) -> None:
    """Raise what the first of some faults says of the first place it is at; a device is waited for once."""
    there = torch.stack([bad.any() for bad, _ in faults]).tolist()
    for (bad, say), found in zip(faults, there, strict=True):
        if found:
            raise ValueError(say(*bad.nonzero()[0].tolist()))


def out_of_range(num_marks: int) -> str:
    """What is wrong with a mark."""
    return f"marks go from 0 to num_marks - 1 = {num_marks - 1}, and -1 is an unknown one"


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

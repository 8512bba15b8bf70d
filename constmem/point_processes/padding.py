"""From ragged sequences to padded tensors: times, marks and bounds, each checked by its sequence."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Float64, Int64
from torch import Tensor

Sequences = Iterable[Any]  # of sequences of numbers: lists, arrays or tensors
Bounds = int | float | Sequence[int | float] | Tensor | None
UNKNOWN = -1  # a mark nobody told


def one_sequence(what: str, k: int, row: Any, *, whole: bool = False) -> Tensor:
    """One sequence of finite numbers as float64, or of whole numbers as int64."""
    try:
        values = (
            row.detach().cpu() if isinstance(row, Tensor) else torch.as_tensor(np.asarray(row, np.float64))
        )
    except (TypeError, ValueError) as error:
        raise TypeError(f"{what}[{k}] is not a sequence of numbers ({error})") from error
    if not values.ndim:
        raise ValueError(
            f"{what}[{k}] is one number, not a sequence of them: a single sequence is a list of one, as in "
            "[[1.0, 2.0]]"
        )
    if values.ndim != 1:
        raise ValueError(
            f"{what}[{k}] has shape {tuple(values.shape)}, but one number for each event is needed"
        )
    values = values.double()
    finite = torch.isfinite(values)
    if not bool(finite.all()):
        i = int((~finite).nonzero()[0])
        raise ValueError(f"{what}[{k}][{i}] is {values[i].item()}: every number must be finite")
    if not whole:
        return values
    if bool((values != values.round()).any()):
        i = int((values != values.round()).nonzero()[0])
        raise ValueError(f"marks[{k}][{i}] is {values[i].item()}: marks are whole numbers")
    return values.long()


def bounds_of(name: str, bounds: Bounds, count: int) -> Float64[Tensor, " b"]:
    """One number a sequence, from as many or from one for all."""
    values = torch.as_tensor(
        np.asarray(bounds, dtype=np.float64) if not isinstance(bounds, Tensor) else bounds
    )
    values = values.detach().cpu().double()
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
    if marks is None:
        num_marks = 1 if num_marks is None else num_marks
        known = 0 if num_marks == 1 else UNKNOWN
        kinds = [torch.full((len(row),), known) for row in rows]
        return pad(kinds, [UNKNOWN] * len(rows), torch.int64, repeat=False)[0], num_marks
    kinds = [one_sequence("marks", k, row, whole=True) for k, row in enumerate(marks)]
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

"""Streams of points and events, one or many; rows of many keys as padded batches of one key a line."""

from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from constmem.core import checks
from constmem.neural_processes import NeuralProcess
from constmem.point_processes import PointProcess

AnyModel = NeuralProcess[Any, Any] | PointProcess[Any]


def listed(keys: Sequence[Hashable]) -> list[Hashable]:
    """Keys as a list, of whatever they are."""
    if isinstance(keys, str | bytes):
        raise TypeError(f"keys must be a list with one key for each row, not the text {keys!r}: [{keys!r}]")
    try:
        names = keys.tolist() if hasattr(keys, "tolist") else keys
        return list(names)
    except TypeError as error:
        raise TypeError(f"keys must be a list with one key for each row, not {keys!r}") from error


def checked(keys: Sequence[Hashable]) -> list[Hashable]:
    """Keys as a list of texts and whole numbers."""
    names = listed(keys)
    for name in names:
        if not isinstance(name, str | int) or isinstance(name, bool):
            raise TypeError(f"a key must be a text or a whole number, not {name!r}")
    return names


def grouped(
    names: list[Hashable], points: int
) -> tuple[list[Hashable], list[tuple[list[Hashable], NDArray[np.int64]]]]:
    """Different keys in the order of their last rows, and batches: keys with the rows of each, padded by -1.

    Keys with about as many rows each are taken together, so that at most half of a batch is padding.
    """
    numbers: dict[Hashable, int] = {}
    try:
        code = np.fromiter((numbers.setdefault(name, len(numbers)) for name in names), np.int64, len(names))
    except TypeError as error:
        raise TypeError(f"a key must be a text or a whole number ({error})") from error
    different = checked(list(numbers))
    rows = np.argsort(code, kind="stable")
    sizes = np.bincount(code)
    starts = np.cumsum(sizes) - sizes
    last = rows[starts + sizes - 1]
    order = [different[i] for i in np.argsort(last)]
    groups = []
    by_size = np.argsort(sizes, kind="stable")
    at = 0
    while at < len(by_size):
        least = sizes[by_size[at]]
        end = at + 1
        while end < len(by_size) and (most := sizes[by_size[end]]) <= 2 * least:
            if (end + 1 - at) * most > points:
                break
            end += 1
        chosen = by_size[at:end]
        width = sizes[chosen[-1]]
        step = np.arange(width)
        table = np.where(step < sizes[chosen, None], starts[chosen, None] + step, -1)
        groups.append(([different[i] for i in chosen], np.where(table < 0, -1, rows[table])))
        at = end
    return order, groups


def rows_of(model: AnyModel, x: Any, y: Any) -> tuple[Tensor, Any]:
    """Rows of points, or times and marks, as tensors of one line for each row; no marks are None."""
    where = model.device
    if isinstance(model, PointProcess):
        times = checks.as_tensor("times", x, where)
        marks = None if y is None else checks.as_tensor("marks", y, where)
        for name, t in (("times", times), ("marks", marks)):
            if t is not None and t.shape != times.shape[:1]:
                raise ValueError(f"{name} has shape {tuple(t.shape)}, but one for each row is needed")
        return times, marks
    rows = []
    for name, given, dim in (("x", x, model.dim_x), ("y", y, model.dim_y)):
        t = checks.as_tensor(name, given, where)
        t = t if t.is_floating_point() else t.double()
        t = t[:, None] if t.ndim == 1 and dim == 1 else t
        if t.ndim != 2 or t.shape[1] != dim:
            raise ValueError(f"{name} has shape {tuple(t.shape)}, but (rows, {dim}) is needed")
        if bool((bad := ~t.isfinite().all(1)).any()):
            row = int(bad.nonzero()[0])
            raise ValueError(f"{name} of row {row} is {t[row].tolist()}: leave out rows that are not finite")
        rows.append(t)
    if len(rows[0]) != len(rows[1]):
        raise ValueError(f"x has {len(rows[0])} rows, but y {len(rows[1])}: they must be the same")
    return rows[0], rows[1]

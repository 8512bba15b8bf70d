"""Streams of points and events, one or many; rows of many keys as padded batches of one key a line."""

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator, Sequence, Sized
from functools import partial
from typing import Any, ClassVar, Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from constmem import kernels
from constmem.core import EVENTS, checks
from constmem.core.files import CONFIG, home_of, read_config
from constmem.neural_processes import CMANP, NeuralProcess
from constmem.point_processes import PointProcess

SMALL = 2**16  # bytes of a state of which a batch is updated at once, even where only one of them is wanted

AnyModel = NeuralProcess[Any, Any] | PointProcess[Any]


def load_model(folder: str | os.PathLike[str]) -> AnyModel:
    """The model in a folder, of points or of events, or one that comes with the package."""
    about = read_config(home_of(folder) / CONFIG)
    family: Any = PointProcess if about["model"] in EVENTS else NeuralProcess
    found: AnyModel = family.from_pretrained(folder)
    return found


class Table(ABC):
    """What a pool needs of an estimator of tables, which lives further up: states of rows, and answers."""

    state_type: ClassVar[type[Any]]
    device = torch.device("cpu")

    @abstractmethod
    def empty(self, batch: int = 1) -> Any:
        """States of no rows."""

    @abstractmethod
    def rows(self, x: Any, y: Any) -> tuple[Tensor, Tensor]:
        """Rows and targets as tensors of one line for each row."""

    @abstractmethod
    def update(self, state: Any, x: Tensor, y: Tensor, *, mask: Tensor | None = None) -> Any:
        """The states with more rows of each stream."""

    @abstractmethod
    def query(self, state: Any, places: NDArray[np.int64], x: Any) -> Any:
        """A distribution for each row, asked of the state at its place in the batch."""

    @abstractmethod
    def _name_of_weights(self) -> str: ...

    @abstractmethod
    def _require_own(self, state: Any) -> None: ...


@runtime_checkable
class Estimator(Protocol):
    """What can be held by key: an estimator that says how."""

    def by_key(self) -> Table:
        """What a pool needs of it."""


Pooled = AnyModel | Estimator


def listed(keys: Sequence[Hashable]) -> list[Hashable]:
    """Keys as a list, of any type."""
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
    if not set(map(type, names)) <= {str, int}:
        for name in names:
            if not isinstance(name, str | int) or isinstance(name, bool):
                raise TypeError(f"a key must be a text or a whole number, not {name!r}")
    return names


def fits(model: AnyModel | Table, blank: Any, names: list[Hashable], state: Any) -> None:
    """Refuse states that cannot be held under these keys, beside states like `blank`."""
    if len(set(names)) != len(names) or len(names) != state.batch:
        raise ValueError(f"{len(set(names))} different keys cannot name a batch of {state.batch} states")
    model._require_own(state)
    held, given = ({k: (t.dtype, t.shape[1:]) for k, t in s.tensors().items()} for s in (blank, state))
    if held != given:
        dtype = getattr(blank, blank.LEAD).dtype
        raise ValueError(f"the state is not in the precision of those held here: state.to(dtype={dtype})")


def one_size(model: Any) -> tuple[Any, Any]:
    """What holds states by key, and its state of nothing; models whose states grow are refused."""
    found: Any = model.by_key() if hasattr(model, "by_key") else model
    if not isinstance(found, NeuralProcess | PointProcess | Table):
        kinds = "of a neural or a point process, or of a fitted estimator"
        raise TypeError(f"a pool is {kinds}, not of a {type(model).__name__}")
    nothing: Any = 0.0 if isinstance(found, PointProcess) else 1
    one = found.empty(nothing)
    if any(0 in t.shape for t in one.tensors().values()):
        raise ValueError(
            f"states of one size are needed, and those of {type(found).__name__} grow with what they are "
            "shown: use CMANP, CNP, NP or CMHP, or a Stream for each key"
        )
    return found, one


def named(keys: Sequence[Hashable]) -> list[Hashable] | NDArray[Any]:
    """Keys as a list, of whatever they are; arrays of whole numbers stay."""
    whole = isinstance(keys, np.ndarray) and keys.ndim == 1 and keys.dtype.kind in "iu"
    return keys if whole else listed(keys)  # type: ignore[return-value]


def coded(names: list[Hashable] | NDArray[Any]) -> tuple[list[Hashable], NDArray[np.int64]]:
    """The different keys, and the place of each row's key among them."""
    if isinstance(names, np.ndarray):
        least = int(names.min())
        if int(names.max()) - least < 4 * len(names):  # a table of all numbers between is small
            at = names.astype(np.int64) - names.min().astype(np.int64)
            there = np.bincount(at) > 0
            return [least + place for place in np.flatnonzero(there).tolist()], (np.cumsum(there) - 1)[at]
        names = names.tolist()
    numbers: dict[Hashable, int] = {}
    try:
        code = np.fromiter((numbers.setdefault(name, len(numbers)) for name in names), np.int64, len(names))
    except TypeError as error:
        raise TypeError(f"a key must be a text or a whole number ({error})") from error
    return checked(list(numbers)), code


def grouped(
    names: list[Hashable] | NDArray[Any], points: int
) -> tuple[list[Hashable], list[tuple[list[Hashable], NDArray[np.int64]]]]:
    """Different keys in the order of their last rows, and batches: keys with the rows of each, padded by -1.

    Keys with about as many rows each are taken together, so that at most half of a batch is padding.
    """
    different, code = coded(names)
    few = len(different) <= 2**16  # numbers of 16 bits are sorted without comparing them
    rows = np.argsort(code.astype(np.uint16) if few else code, kind="stable")
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


def rows_of(model: AnyModel | Table, names: Sized, x: Any, y: Any) -> tuple[Tensor, Any]:
    """Rows of points, or times and marks, as tensors of one line for each name; no marks are None."""
    given = model.rows(x, y) if isinstance(model, Table) else _rows(model, x, y)
    if len(names) != len(given[0]):
        raise ValueError(f"there are {len(names)} keys, but {len(given[0])} rows: each row needs one")
    return given


def _rows(model: AnyModel, x: Any, y: Any) -> tuple[Tensor, Any]:
    where = model.device
    if isinstance(model, PointProcess):
        times = _tensor_on(where, "times", x)
        marks = None if y is None else _tensor_on(where, "marks", y)
        for name, t in (("times", times), ("marks", marks)):
            if t is not None and t.shape != times.shape[:1]:
                raise ValueError(f"{name} has shape {tuple(t.shape)}, but one for each row is needed")
        return times, marks
    rows = []
    for name, given, dim in (("x", x, model.dim_x), ("y", y, model.dim_y)):
        t = _tensor_on(where, name, given)
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


def _tensor_on(where: torch.device, name: str, given: Any) -> Tensor:
    tensor = checks.as_tensor(name, given, where)
    if tensor.device != where:
        raise ValueError(
            f"{name} is on {tensor.device}, but the model is on {where}: use {name}.to({str(where)!r})"
        )
    return tensor


def blaming(what: str, names: Any, work: Callable[[NDArray[np.int64]], Any]) -> Any:
    """What work makes of all places; where it refuses them, the error names one that it refuses."""
    some = np.arange(len(names))
    try:
        return work(some)
    except ValueError:
        if len(some) == 1:
            raise
        while len(some) > 1:
            half = some[: len(some) // 2]
            try:
                work(half)
                some = some[len(half) :]
            except ValueError:
                some = half
        try:
            work(some)
        except ValueError as error:
            raise ValueError(f"{what} {names[some[0]]!r}: {error}") from error
        raise


def one_by_one(model: AnyModel, state: Any, places: NDArray[np.int64], x: Tensor, y: Tensor | None) -> Any:
    """A batch of states with more rows, each taken by itself, in order: `places` says whose each is.

    The first rows of all streams are taken together, then the second ones, in batches of one size where that
    matters to the last bit. So every bit of a state depends on the rows of its own stream alone, on one
    machine: not on which calls they came in, nor on what came for other streams beside them.
    """
    table = {name: t.clone(memory_format=torch.contiguous_format) for name, t in state.tensors().items()}
    alike = _row_by_row(model)
    tile = 1024 if alike else 32 if state.nbytes <= SMALL * state.batch else 1

    def extended(rows: NDArray[np.int64], signature: str | None, some: NDArray[np.int64]) -> Any:
        padded = rows[some] if alike else np.resize(rows[some], tile)
        at, line = (torch.from_numpy(i).to(x.device) for i in (places[padded], padded))
        part: Any = model.state_type._made({name: t[at] for name, t in table.items()}, signature)
        given: Any = x[line, None], None if y is None else y[line, None]
        return model.update(part, *given)

    signature = state.fingerprint
    with torch.no_grad(), model._verified():
        for rows in _rounds(places):
            for start in range(0, len(rows), tile):
                some = rows[start : start + tile]
                made = blaming("row", some.tolist(), partial(extended, some, signature))
                signature = made.fingerprint
                at = torch.from_numpy(places[some]).to(x.device)
                for name, t in made.tensors().items():
                    table[name][at] = t[: len(some)]
    return model.state_type._made(table, signature)


def _rounds(places: NDArray[np.int64]) -> Iterator[NDArray[np.int64]]:
    """Rows such that no stream is in one round twice, and those of each stream come in their order."""
    order = np.argsort(places, kind="stable")
    ordered = places[order]
    first = np.flatnonzero(np.diff(ordered, prepend=-1))
    rank = np.arange(len(places)) - np.repeat(first, np.diff(first, append=len(places)))
    by_rank = np.argsort(rank, kind="stable")
    yield from np.split(order[by_rank], np.cumsum(np.bincount(rank))[:-1])


def _row_by_row(model: AnyModel) -> bool:
    """Whether a batch of any size is computed row by row anyway, as machine code does."""
    return (
        isinstance(model, CMANP)
        and model.regression is None
        and model.device.type == "cpu"
        and kernels.chunk(model.dtype, model.device) is not None
    )

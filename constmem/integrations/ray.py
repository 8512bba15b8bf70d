"""States and estimators from a Ray Dataset: workers observe their blocks, and the states are merged."""

from collections.abc import Iterable, Sequence
from copy import deepcopy
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import numpy as np
import torch

from constmem.core.monoid import merged
from constmem.neural_processes import NeuralProcess
from constmem.streams import one_size
from constmem.streams.journal import Layout
from constmem.streams.pool import StreamPool

ROWS = 2**19  # observed at once by a worker, which sends one state of them
GROUPED = 2**20  # the same where it sends one for each key among them
FITTED = 2**17  # and where rows may have many columns
T = TypeVar("T")


def condition_dataset(
    model: NeuralProcess[Any, Any],
    dataset: Any,
    *,
    x: Sequence[str],
    y: Sequence[str],
    batch_size: int | None = ROWS,
    workers: int = 2,
) -> Any:
    """The state of all rows of a dataset: `model.condition` of a table that fits on no machine.

    Each worker observes its batches, and sends a state for each. Those are merged here, two by two, as they
    come: at no time are there more than a few. The result is that of one pass, but for rounding.

    Args:
        model: whose states merge: CMANP, CNP, NP.
        dataset: of `ray.data`: from Parquet, CSV and others; filtered and mapped as one likes.
        x, y: the columns of inputs and outputs.
        batch_size: rows of which a worker sends one state. None: the blocks of the dataset as they are, which
            saves a step; of a dataset read with `concurrency=workers` they are observed where they are read.
        workers: how many, each with a CPU of its own.

    Example:
        state = condition_dataset(model, ray.data.read_parquet("s3://..."), x=["lon", "lat"], y=["heat"])
    """
    _require(model, x, y)
    work = _Conditioned(model, [*x], [*y], batch_size or ROWS)
    made = _mapped(dataset, work, [*x, *y], batch_size, workers)
    layout = Layout(model, model.empty(1), single=False)
    state: Any = merged(layout.of_rows(row[None]) for rows in made for row in rows["state"])
    return model.empty(1) if state is None else state


def condition_groups_dataset(
    model: NeuralProcess[Any, Any],
    dataset: Any,
    *,
    key: str,
    x: Sequence[str],
    y: Sequence[str],
    batch_size: int | None = GROUPED,
    workers: int = 2,
) -> StreamPool:
    """A pool with the state of each key's rows, wherever in the dataset they stand.

    States travel, not rows: no shuffle of the dataset. A worker sends one state for each key of a batch (of a
    block, where `batch_size` is None), so a dataset that is sorted by key, or batches that are large, send
    least.
    """
    _require(model, x, y)
    work = _Grouped(model, [*x], [*y], batch_size or GROUPED, key)
    pool, layout = StreamPool(model), Layout(model, model.empty(1), single=False)
    for rows in _mapped(dataset, work, [key, *x, *y], batch_size, workers):
        starts = np.flatnonzero(rows["first"][1:]) + 1  # a block may be of several batches
        columns = (np.split(rows[name], starts) for name in ("key", "state"))
        for names, states in zip(*columns, strict=True):
            pool._merge(names.tolist(), layout.of_rows(states))
    return pool


def states_aggregate(
    model: NeuralProcess[Any, Any], *, x: Sequence[str], y: Sequence[str], name: str = "state"
) -> Any:
    """The state of rows as an aggregation of Ray's, beside its own: of a dataset, or of each of its groups.

    A column `name` holds the bytes of a state, which `model.state_type.unpacked` reads. What is grouped stays
    in Ray, on all of its machines: for more keys than one machine holds.

    Example:
        states = dataset.groupby("sensor").aggregate(states_aggregate(model, x=["hour"], y=["heat"]), Count())
    """
    from ray.data.aggregate import AggregateFn
    from ray.data.block import BlockAccessor

    _require(model, x, y)
    work = _Conditioned(model, [*x], [*y], ROWS)
    kind, nothing = model.state_type, model.empty(1).packed()

    def merge(one: bytes, other: bytes) -> bytes:
        made: bytes = kind.unpacked(one).merge(kind.unpacked(other)).packed()
        return made

    def accumulate(held: bytes, block: Any) -> bytes:
        rows: Any = BlockAccessor.for_block(block)
        return merge(held, work.state(rows.to_numpy([*x, *y])).packed()) if rows.num_rows() else held

    # A plain AggregateFn: of one that names its column, all other columns are dropped.
    return AggregateFn(init=lambda _: nothing, merge=merge, name=name, accumulate_block=accumulate)


def fit_dataset(
    estimator: T, dataset: Any, *, target: str, batch_size: int = FITTED, workers: int = 2, warmup: int = 8192
) -> T:
    """The estimator, fitted on all rows of a dataset, read once.

    Columns and features are frozen by the first `warmup` rows; then workers learn their batches into spawned
    estimators, which are merged. The result is that of one pass, but for rounding.
    """
    one: Any = estimator
    options = dataset.context.execution_options
    kept, options.preserve_order = options.preserve_order, True  # else chance says which rows are the first
    try:
        first = dataset.limit(warmup).to_pandas()
    finally:
        options.preserve_order = kept
    if not len(first):
        raise ValueError("the dataset has no rows: there is nothing to fit")
    _column(target, first.columns)
    names = [name for name in first.columns if name != target]
    one.fit(first[names], first[target])
    base = one.spawn()
    work = _Fitted(type(one), _saved(base), names, target)
    rows = _mapped(dataset, work, [*names, target], batch_size, workers)
    states = (_loaded(type(one), content) for each in rows for content in each["state"])
    one.learner_ = base.merge(merged(states)).learner_
    return estimator


class _Conditioned:
    """From batches of rows to states, on the CPU of a worker."""

    def __init__(self, model: NeuralProcess[Any, Any], x: list[str], y: list[str], rows: int) -> None:
        self.model, self.x, self.y = deepcopy(model).cpu().eval(), x, y
        self.rows = rows  # observed at once

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        torch.set_num_threads(1)  # it has come to a worker, which has one CPU

    def _rows(self, batch: dict[str, Any], columns: list[str]) -> torch.Tensor:
        """Columns as numbers of the model's kind, (rows, columns)."""
        made = np.empty((len(batch[columns[0]]), len(columns)))
        for name, column in zip(columns, made.T, strict=True):
            try:
                column[:] = batch[name]
            except (TypeError, ValueError) as error:
                raise ValueError(f"column {name!r} holds what is no number: {error}") from error
            if not (fine := np.isfinite(column)).all():
                raise ValueError(f"column {name!r} holds {column[~fine][0]}: leave such rows out")
        return torch.from_numpy(made).to(self.model.dtype)

    def state(self, batch: dict[str, Any]) -> Any:
        """The state of all of them."""
        x, y = (self._rows(batch, columns)[None] for columns in (self.x, self.y))
        pieces = zip(x.split(self.rows, 1), y.split(self.rows, 1), strict=True)
        with torch.no_grad():
            return merged(self.model.condition(*piece) for piece in pieces)

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        return {"state": self._sent(self.state(batch))}

    def _sent(self, state: Any) -> Any:
        """States as Ray carries them: a line of bytes for each."""
        return Layout(self.model, self.model.empty(1), single=False).rows(state)


class _Grouped(_Conditioned):
    """From batches of rows to the states of their keys."""

    def __init__(self, model: Any, x: list[str], y: list[str], rows: int, key: str) -> None:
        super().__init__(model, x, y, rows)
        self.key = key

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        x, y = (self._rows(batch, columns) for columns in (self.x, self.y))
        pool = StreamPool(self.model)
        for start in range(0, len(x), self.rows):
            piece = slice(start, start + self.rows)
            pool.observe(batch[self.key][piece], x[piece], y[piece])
        first = np.arange(len(pool)) == 0
        return {"key": np.asarray(pool.keys), "first": first, "state": self._sent(pool.state(pool.keys))}


class _Fitted:
    """From batches of rows to estimators."""

    def __init__(self, kind: Any, base: bytes, names: list[str], target: str) -> None:
        self.kind, self.base, self.names, self.target = kind, base, names, target

    def __call__(self, batch: Any) -> dict[str, Any]:
        torch.set_num_threads(1)
        own = _loaded(self.kind, self.base)
        own.partial_fit(batch[self.names], batch[self.target])
        state = np.empty(1, object)
        state[0] = _saved(own)
        return {"state": state}


def _mapped(
    dataset: Any, work: "_Conditioned | _Fitted", columns: list[str], batch_size: int | None, workers: int
) -> Iterable[dict[str, Any]]:
    """Columns of what the workers make of the dataset's batches, as it comes."""
    if not hasattr(dataset, "map_batches"):
        raise TypeError(f"a dataset of ray.data is needed, not a {type(dataset).__name__}")
    schema = dataset.schema()
    if schema is None:
        return ()
    for name in columns:
        _column(name, schema.names)
    of_frames = "pandas" if isinstance(work, _Fitted) else "numpy"
    from ray.data import TaskPoolStrategy  # type: ignore[import-not-found,import-untyped,unused-ignore]

    blocks = dataset.select_columns(list(dict.fromkeys(columns)))  # a key may be an input, too
    if batch_size is not None:  # the largest block would keep one worker busy, and the rest idle
        blocks = blocks.repartition(target_num_rows_per_block=batch_size)
    made = blocks.map_batches(
        work.__call__,
        batch_size=batch_size,
        batch_format=of_frames,
        compute=TaskPoolStrategy(size=workers),
        num_cpus=1,
    )
    columns_made: Iterable[dict[str, Any]] = made.iter_batches(batch_size=None, batch_format="numpy")
    return columns_made


def _require(model: NeuralProcess[Any, Any], x: Sequence[str], y: Sequence[str]) -> None:
    if not isinstance(model, NeuralProcess):
        raise TypeError(f"a neural process is needed, not a {type(model).__name__}")
    one_size(model)
    for what, given, dim in (("x", x, model.dim_x), ("y", y, model.dim_y)):
        if isinstance(given, str) or len(given) != dim:
            raise ValueError(f"{what}={given!r}: a list of {dim} column(s) is needed")


def _column(name: str, names: Iterable[str]) -> None:
    if name not in (known := list(names)):
        raise ValueError(
            f"there is no column {name!r} in the dataset: there are {', '.join(map(repr, known))}"
        )


def _saved(estimator: Any) -> bytes:
    """The file that an estimator is saved as."""
    with TemporaryDirectory() as folder:
        estimator.save(Path(folder) / "estimator")
        return (Path(folder) / "estimator").read_bytes()


def _loaded(kind: Any, content: bytes) -> Any:
    with TemporaryDirectory() as folder:
        (Path(folder) / "estimator").write_bytes(content)
        return kind.load(Path(folder) / "estimator")

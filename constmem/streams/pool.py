"""`StreamPool`: any number of streams of one model, each known by a key, as one batched state."""

import json
import os
from collections.abc import Hashable, Sequence
from functools import partial
from itertools import islice
from threading import Lock
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from constmem.core import checks
from constmem.core.files import read_tensors, write_tensors
from constmem.core.monoid import NOTHING
from constmem.point_processes import PointProcess
from constmem.streams import Pooled, Table, blaming, checked, fits, grouped, listed, named, one_size, rows_of

KIND, VERSION = "constmem.pool", 1
KEYS = "keys"  # the tensor of a file that holds them, as JSON in UTF-8
POINTS = 8192  # observed at once, padding included


class StreamPool:
    """Streams of one model by key: rows of many of them are observed, and many are asked, in one call.

    All states lie in one table, a row for each key, which grows as new keys come. Rows of one key are taken
    in their order, however often it stands in a call. A call happens whole or not at all. Any number of
    threads may use one pool.

    Args:
        model: a trained model of points or of events whose state does not grow; or a fitted estimator of
            tables, whose columns, features and units all streams share.
        most: how many streams may be held; None: as many as fit. Beyond it a new key is refused: `pop` some,
            those of `oldest` for instance, and keep them elsewhere.

    Example:
        >>> from constmem import CMANP, Stream
        >>> model = CMANP(dim_x=1, dim_y=1, dim=16, depth=2, num_slots=8, num_latents=8).eval()
        >>> pool = StreamPool(model)
        >>> x, y = torch.rand(4, 1), torch.rand(4, 1)
        >>> pool.observe(["a", "b", "a", "a"], x, y)  # four rows of two streams
        >>> pool.count(["a", "b"]).tolist(), len(pool)
        ([3, 1], 2)
        >>> alone = Stream(model)
        >>> alone.observe(x[[0, 2, 3]], y[[0, 2, 3]])
        >>> both = pool.predict(["a", "b"], torch.zeros(2, 5, 1)).mean
        >>> torch.allclose(both[:1], alone.predict(torch.zeros(1, 5, 1)).mean, atol=1e-6)
        True
    """

    def __init__(self, model: Pooled, *, most: int | None = None) -> None:
        if most is not None:
            checks.positive("most", most)
        self.model, self._blank = one_size(model)
        self.most = most
        self._table = {name: t[:0] for name, t in self._blank.tensors().items()}
        self._places: dict[Hashable, int] = {}  # by key, the least recently observed first
        self._free: list[int] = []  # places that were given back
        self._fingerprint: str | None = self._blank.fingerprint
        self._writing = Lock()

    def observe(
        self, keys: Sequence[Hashable], x: Any, y: Any = None, *, start: Any = None, points: int = POINTS
    ) -> None:
        """Observe rows, each in the stream its key names; after an error the pool is as it was.

        Args:
            keys: one for each row, texts or whole numbers.
            x, y: of points (rows, channels), or (rows,) of one channel. Of events times and marks, (rows,),
                those of one key in order. Of tables what the estimator's `partial_fit` takes.
            start: when the observation of new streams of events began; None: each with its first event.
            points: how many are computed with at once, padding included; never changes a result.
        """
        checks.positive("points", points)
        rows = named(keys)
        given = rows_of(self.model, rows, x, y)
        if not len(rows):
            return
        order, groups = grouped(rows, points)
        with self._writing, torch.no_grad():
            self._require_room(order)
            extended = partial(self._extended, *given, start)
            made = [(each[0], blaming("stream", each[0], partial(extended, *each))) for each in groups]
            self._put(made)
            for name in order:  # now the most recent
                self._places[name] = self._places.pop(name)

    def predict(self, keys: Sequence[Hashable], xt: Any = None, *, chunk: int = 4096) -> Any:
        """Predictions of the streams named: at targets (keys, targets, channels), or their next events.

        A key may stand several times; targets (targets, channels) are asked of each. Of a table one row for
        each key; a Student's t for each, or a categorical distribution over the estimator's `classes_`.
        """
        if isinstance(self.model, Table):
            number: dict[Hashable, int] = {}
            places = [number.setdefault(name, len(number)) for name in checked(keys)]
            return self.model.query(self.state([*number]), np.array(places, np.int64), xt)
        state = self.state(keys)
        with torch.no_grad():
            if isinstance(self.model, PointProcess):
                if xt is not None:
                    raise TypeError("predict(keys, xt) is of points; of events, predict(keys) gives the next")
                return self.model.query(state)
            if xt is None:
                raise TypeError("predict of streams of points needs the targets: predict(keys, xt)")
            xt = checks.as_tensor("xt", xt, self.model.device)
            xt = xt if xt.is_floating_point() else xt.double()
            xt = xt.expand(state.batch, *xt.shape) if xt.ndim == 2 else xt
            return self.model.query(state, xt, chunk=chunk)

    def state(self, keys: Sequence[Hashable]) -> Any:
        """The states of the streams named, as one batch: of the model's own kind."""
        with self._writing:
            return self._taken(checked(keys))

    def count(self, keys: Sequence[Hashable]) -> Tensor:
        """How many points (or events) each of them has seen."""
        found: Tensor = self.state(keys).count
        return found

    def put(self, keys: Sequence[Hashable], state: Any) -> None:
        """Hold these states under these keys, in place of those held before."""
        names = checked(keys)
        fits(self.model, self._blank, names, state)
        with self._writing:
            self._require_room(names)
            self._put([(names, state)])

    def pop(self, keys: Sequence[Hashable]) -> Any:
        """Remove some streams; returns their states, for a file, a store or another pool's `put`."""
        names = checked(keys)
        with self._writing:
            state = self._taken(names)
            self._free += [self._places.pop(name) for name in dict.fromkeys(names)]
        return state

    def merge(self, other: "StreamPool") -> None:
        """Merge all streams of another pool: states of the same key, as if one had seen both."""
        if other is self:
            raise ValueError("a pool cannot be merged with itself: its rows would count twice")
        with other._writing:
            names, theirs = other.keys, other._taken(other.keys)
        self._merge(names, theirs)

    def _merge(self, names: list[Hashable], theirs: Any) -> None:
        """The same with states that are in no pool."""
        if not names:
            return
        self.model._require_own(theirs)
        with self._writing:
            self._require_room(names)
            known = torch.tensor([name in self._places for name in names], device=theirs.device)
            shared = [name for name in names if name in self._places]
            new = [name for name in names if name not in self._places]
            made = [(new, theirs.select(~known) if shared else theirs)] if new else []
            if shared:
                made.append((shared, self._taken(shared).merge(theirs.select(known) if new else theirs)))
            self._put(made)

    def oldest(self, number: int) -> list[Hashable]:
        """The keys whose last rows are the longest ago."""
        with self._writing:
            return list(islice(self._places, number))

    @property
    def keys(self) -> list[Hashable]:
        """The least recently observed first."""
        return list(self._places)

    @property
    def nbytes(self) -> int:
        """Bytes held, places in reserve included."""
        return sum(t.nbytes for t in self._table.values())

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, key: Hashable) -> bool:
        return key in self._places

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write all streams (without their model), atomically, as one safetensors file."""
        with self._writing:
            names = list(self._places)
            state = self._taken(names)
        text = np.frombuffer(json.dumps(names).encode(), np.uint8).copy()
        signature = {"state": self.model.state_type.KIND, "fingerprint": self.model._name_of_weights() or ""}
        header = {"format": KIND, "version": str(VERSION)} | signature
        write_tensors(path, state.tensors() | {KEYS: torch.from_numpy(text)}, header)

    @staticmethod
    def load(path: str | os.PathLike[str], model: Pooled, *, most: int | None = None) -> "StreamPool":
        """A pool that `save` wrote, with the model it ran on."""
        pool = StreamPool(model, most=most)
        made, device = pool.model.state_type, pool.model.device
        tensors, header = read_tensors(path, kind=KIND, version=VERSION)
        own = made.KIND, pool.model._name_of_weights() or ""
        if (found := (header.get("state"), header.get("fingerprint"))) != own:
            raise ValueError(
                f"{path} holds states {found[0]!r} of the weights {found[1]!r}, but this model makes "
                f"{own[0]!r} of {own[1]!r}: load the model it ran on"
            )
        try:
            names = checked(json.loads(tensors.pop(KEYS).numpy().tobytes()))
            if names and len(names) <= (most or len(names)):
                pool.put(names, made.of_tensors(tensors, own[1] or None).to(device))
        except (KeyError, TypeError, ValueError, RecursionError) as error:
            raise ValueError(f"{path} is damaged: {error}; save the pool again") from error
        if len(pool) < len(names):
            raise ValueError(f"{path} holds {len(names)} streams, more than most={most}: allow more")
        return pool

    # Inside

    def _extended(self, x: Any, y: Any, start: Any, keys: Any, lines: Any, some: NDArray[np.int64]) -> Any:
        """The states of some keys with more rows; `lines` has one for each, and -1 where it has less."""
        names, rows = [keys[place] for place in some], lines[some]
        at = torch.from_numpy(rows).to(self.model.device)
        mask, index = at >= 0, at.clamp_min(0)
        x, y = x[index], None if y is None else y[index]
        if not isinstance(self.model, PointProcess):
            state = self._states(names, self._blank)
            return self.model.update(state, x, y, mask=None if rows.min() >= 0 else mask)
        starts = x[:, 0] if start is None else checks.one_each("start", start, 1, at.device).expand(len(at))
        fresh = self.model.empty(starts.double())
        return self.model.update(self._states(names, fresh), x, y, mask=mask)

    def _states(self, names: list[Hashable], fresh: Any) -> Any:
        """What is held of these streams, or the empty state for those not seen yet (one for all, or each)."""
        places = [self._places.get(name, -1) for name in names]
        at = torch.tensor(places, device=self.model.device)
        new, at = at < 0, at.clamp_min(0)
        tensors = {}
        for name, blank in fresh.tensors().items():
            held = self._table[name]
            known = held[at] if len(held) else blank.expand(len(names), *blank.shape[1:])
            tensors[name] = torch.where(new.reshape(-1, *[1] * (blank.ndim - 1)), blank, known)
        signature = fresh.fingerprint if min(places) == max(places) == -1 else self._fingerprint
        return self.model.state_type._made(tensors, signature)

    def _taken(self, names: list[Hashable]) -> Any:
        missing = [name for name in names if name not in self._places]
        if missing:
            more = f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""
            raise KeyError(f"there is no stream {missing[0]!r}{more} here: observe rows of it first")
        at = torch.tensor([self._places[name] for name in names], dtype=torch.int64, device=self.model.device)
        taken = {name: t[at] for name, t in self._table.items()}
        return self.model.state_type._made(taken, self._fingerprint)

    def _require_room(self, names: Sequence[Hashable]) -> None:
        number = sum(name not in self._places for name in names)
        if self.most is not None and len(self._places) + number > self.most:
            raise ValueError(
                f"{number} new streams beside {len(self._places)} exceed most={self.most}: pop some first"
            )

    def _put(self, made: list[tuple[list[Hashable], Any]]) -> None:
        """Write states into the table: all of them, or none where the model or the memory do not allow it."""
        signatures = {state.fingerprint for _, state in made} - {NOTHING}
        held = {self._fingerprint} - {NOTHING} if self._places else set()
        if len(signatures | held) > 1:
            raise ValueError(
                f"the pool holds states of the weights {self._fingerprint}, but the model's have changed: "
                "make a new pool, or give the model its weights back"
            )
        new = [name for names, _ in made for name in names if name not in self._places]
        self._reserve(len(new))
        for name in new:
            self._places[name] = self._free.pop()
        for names, state in made:
            at = torch.tensor([self._places[name] for name in names], device=self.model.device)
            for name, t in state.tensors().items():
                self._table[name][at] = t
        self._fingerprint = next(iter(signatures), self._fingerprint if held else NOTHING)

    def _reserve(self, number: int) -> None:
        """Make room for more streams: the table grows by half of itself at least."""
        size = len(self._table["count"])
        lacking = number - len(self._free)
        if lacking > 0:
            more = max(lacking, size // 2)
            self._table = {
                name: torch.cat([t, t.new_empty(more, *t.shape[1:])]) for name, t in self._table.items()
            }
            self._free += range(size + more - 1, size - 1, -1)


def condition_groups(
    model: Pooled, keys: Sequence[Hashable], x: Any, y: Any = None, *, points: int = POINTS
) -> tuple[list[Hashable], Any]:
    """The different keys, in the order in which they first appear, and the state of each one's rows."""
    pool = StreamPool(model)
    pool.observe(keys, x, y, points=points)
    names = list(dict.fromkeys(listed(keys)))
    return names, pool.state(names)

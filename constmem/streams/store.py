"""`Store`: streams by key that outlive the process: all that it has acknowledged is on disk."""

import os
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from threading import RLock
from typing import Any

import numpy as np
from torch import Tensor

from constmem.core import checks
from constmem.core.monoid import Monoid
from constmem.neural_processes import NeuralProcess
from constmem.point_processes import PointProcess
from constmem.streams import AnyModel, checked, fits, rows_of
from constmem.streams.database import Database, Position
from constmem.streams.journal import Journaled, Layout
from constmem.streams.pool import StreamPool

LONGEST = 1024  # letters of a key, or of a source's name


class Store:
    """Streams of one model by key, in a file: any number of them, of which the latest used are in memory.

    When `observe` returns, its rows are on disk, and so is the position of the source they came from, in one
    transaction. Rows go to a journal first. States are written later, some with each call, and opening the
    store again applies the journal: all that was acknowledged is there, nothing twice. Rows of a stream are
    taken one by one, so that every bit of its state depends on its own rows and their order alone: not on
    calls, other streams, or when the process was killed.

    Args:
        path: an SQLite file, made where it is missing. One process at a time holds it, and none
            that is forked from that one.
        model: of points or of events, whose state does not grow.
        memory: bytes for states in memory.
        single: whether values are kept in float32 on disk: half the size, about 1e-7 of each value lost
            whenever a state is read back, and with it the promise on every bit. Counts and times stay exact.
        power: whether what was taken in outlives a loss of power, too; without it, only kills and crashes.
        journal: rows that are taken in again, at most, when the store is opened.

    Example:
        >>> import tempfile
        >>> from constmem import CMANP
        >>> model = CMANP(dim_x=1, dim_y=1, dim=16, depth=2, num_slots=8, num_latents=8).eval()
        >>> path = tempfile.mkdtemp() + "/store.sqlite"
        >>> with Store(path, model) as store:
        ...     store.observe(["ann", "bob"], [0.1, 0.5], [1.0, 2.0], source="sensors", position=2)
        True
        >>> with Store(path, model) as store:  # the same rows again, as after a crash
        ...     store.observe(["ann", "bob"], [0.1, 0.5], [1.0, 2.0], source="sensors", position=2)
        ...     store.count(["ann", "bob"]).tolist(), store.position("sensors")
        False
        ([1, 1], 2)
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        model: AnyModel,
        *,
        memory: int = 2**28,
        single: bool = False,
        power: bool = True,
        journal: int = 32_768,
    ) -> None:
        checks.positive("memory", memory)
        checks.positive("journal", journal)
        if not isinstance(model, NeuralProcess | PointProcess):
            raise TypeError(
                f"a store is of a neural or a point process, not of a {type(model).__name__}: streams of an "
                "estimator are held by a StreamPool"
            )
        self.model = model
        pool = StreamPool(model)
        layout = Layout(model, pool._blank, single)
        self._lock = RLock()
        self._database = Database(path, layout.about, power=power)
        self._open, self._process = True, os.getpid()
        try:
            self._held = Journaled(self._database, pool, layout, memory, journal)
        except BaseException:
            self._database.close()
            raise

    def observe(
        self,
        keys: Sequence[Hashable],
        x: Any,
        y: Any = None,
        *,
        source: str | None = None,
        position: Position | None = None,
    ) -> bool:
        """Observe rows, each in the stream its key names; when this returns, they are on disk.

        After an error nothing has changed, in memory or on disk.

        Args:
            keys, x, y: as of `StreamPool.observe`.
            source: where they come from; None: no position is remembered.
            position: of the last of these rows there. Whole numbers count up: rows at or before the position
                that is known are not taken again, and the answer is False.
        """
        if (source is None) is not (position is None):
            raise ValueError(
                "give a source and a position in it, or neither: one says nothing without the other"
            )
        return all(self.observe_all(keys, x, y, {} if source is None else {source: position}))  # type: ignore[dict-item]

    def observe_all(
        self, keys: Sequence[Hashable], x: Any, y: Any, positions: dict[str, Position]
    ) -> tuple[bool, ...]:
        """`observe` with positions of several sources: which are new; unless all are, nothing is taken."""
        rows = _named(keys)
        given = rows_of(self.model, rows, x, y)
        _require_places(positions)
        with self._locked() as held:
            new = tuple(self._is_new(name, place) for name, place in positions.items())
            if all(new) and (rows or positions):
                numbers: dict[Hashable, int] = {}
                places = np.array([numbers.setdefault(name, len(numbers)) for name in rows], np.int64)
                held.take(list(numbers), places, *given, positions)
            return new

    def _is_new(self, source: str, position: Position) -> bool:
        known = self._database.position(source)
        if isinstance(known, int) and isinstance(position, int):
            return position > known
        return known != position

    def position(self, source: str) -> Position | None:
        """The position of the last row taken from a source; None: nothing was."""
        with self._locked():
            return self._database.position(source)

    def sources(self, more: Sequence[str] = ()) -> int:
        """How many sources have a position, or would with these."""
        with self._locked() as held:
            return len(held.positions) + len(set(more) - held.positions.keys())

    def move(self, source: str, position: Position) -> None:
        """Remember the position of a source of which all rows were left out."""
        _require_places({source: position})
        with self._locked() as held:
            held.take([], np.zeros(0, np.int64), Tensor(), None, {source: position})

    def predict(self, keys: Sequence[Hashable], xt: Any = None, *, chunk: int = 4096) -> Any:
        """As of `StreamPool.predict`."""
        with self._locked() as held:
            held.load(_named(keys))
            return held.pool.predict(keys, xt, chunk=chunk)

    def state(self, keys: Sequence[Hashable]) -> Any:
        """The states of the streams named, as one batch."""
        with self._locked() as held:
            held.load(_named(keys))
            return held.pool.state(keys)

    def count(self, keys: Sequence[Hashable]) -> Tensor:
        """How many points (or events) each of them has seen."""
        found: Tensor = self.state(keys).count
        return found

    def known(self, keys: Sequence[Hashable]) -> list[Hashable]:
        """Those of the keys that name a stream, damaged ones too."""
        with self._locked() as held:
            return held.there(_named(keys))

    def put(self, keys: Sequence[Hashable], state: Any) -> None:
        """Hold these states under these keys, in place of those held before; on disk when it returns."""
        names = _named(keys)
        with self._locked() as held:
            fits(self.model, held.pool._blank, names, state)
            held.put(names, state)

    def create(self, keys: Sequence[Hashable], *, start: Any = 0.0) -> None:
        """New streams that have seen nothing; of events, `start` is when observation began."""
        names = list(dict.fromkeys(_named(keys)))
        starts = checks.one_each("start", start, len(names), self.model.device).double()
        checks.all_finite("start", starts)
        with self._locked() as held:
            self._require_new(names)
            points = isinstance(self.model, NeuralProcess)
            held.put(names, self.model.empty(len(names) if points else starts))  # type: ignore[arg-type]

    def merge(self, into: Hashable, other: Hashable) -> None:
        """Merge another stream into this one; the other stays as it is."""
        if into == other:
            raise ValueError(f"{into!r} cannot be merged into itself: its points would count twice")
        with self._locked() as held:
            mine, theirs = self.state([into]), self.state([other])
            if not isinstance(mine, Monoid):
                raise ValueError(f"states of {type(self.model).__name__} do not merge: {into!r} is as it was")
            held.put([into], mine.merge(theirs))

    def fork(self, key: Hashable, to: Hashable) -> None:
        """Copy a stream to a new key; both go on from there, each by itself."""
        with self._locked() as held:
            state = self.state([key])
            self._require_new(_named([to]))
            held.put([to], state)

    def delete(self, keys: Sequence[Hashable]) -> int:
        """Delete streams, on disk too, damaged ones as well; returns how many there were."""
        with self._locked() as held:
            if names := held.there(_named(keys)):
                held.delete(names)
            return len(names)

    def keys(self, prefix: str = "", *, after: str | None = None, most: int = 1000) -> list[str]:
        """The keys that are texts, in order, from the one behind `after`."""
        checks.positive("most", most)
        with self._locked() as held:
            names = self._database.keys(prefix, after, most) + held.unwritten
            found = {name for name in names if isinstance(name, str) and name.startswith(prefix)}
            return sorted(name for name in found if name > (after or ""))[:most]

    def flush(self) -> None:
        """Write all states: the store then opens faster; without, nothing is lost either."""
        with self._locked() as held:
            held.flush()

    def check(self) -> None:
        """Verify every page and every checksum of the file; an error says what is damaged."""
        with self._locked():
            self._database.check()

    def close(self) -> None:
        """Write all states and close the file."""
        if self._process != os.getpid():
            return  # it is another process's to close
        with self._lock:
            if self._open:
                self._open = False
                try:
                    self._held.flush()
                finally:
                    self._database.close()

    @property
    def nbytes(self) -> int:
        """Bytes of states in memory."""
        return self._held.pool.nbytes

    def __len__(self) -> int:
        return self._held.number

    def __contains__(self, key: Hashable) -> bool:
        return bool(self.known([key]))

    def __enter__(self) -> "Store":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @contextmanager
    def _locked(self) -> Iterator[Journaled]:
        if self._process != os.getpid():
            owner = f"{self._process}, from which this one was forked"
            raise ValueError(f"the store {self._database.path} is held by process {owner}: open it there")
        with self._lock:
            if not self._open:
                raise ValueError(f"the store {self._database.path} is closed: open it again")
            yield self._held

    def _require_new(self, names: list[Hashable]) -> None:
        if taken := self.known(names):
            raise ValueError(f"there is a stream {taken[0]!r} already: delete it first, or take another name")


def _named(keys: Sequence[Hashable]) -> list[Hashable]:
    """Keys that a store takes; the database refuses those that it cannot hold before anything is changed."""
    names = checked(keys)
    for name in names:
        if isinstance(name, str) and not 0 < len(name) <= LONGEST:
            raise ValueError(f"a key must have 1 to {LONGEST} letters, not {len(name):,}: {name[:20]!r}")
    return names


def _require_places(positions: dict[str, Position]) -> None:
    for name, place in positions.items():
        if not isinstance(name, str) or isinstance(place, bool) or not isinstance(place, str | int):
            raise TypeError(
                f"a position is a whole number or a text of a named source, not {place!r} of {name!r}"
            )
        if isinstance(place, int) and not -(2**63) <= place < 2**63:
            raise ValueError(f"the position {place} of {name!r} does not fit 64 bits")
        if not 0 < len(name) <= LONGEST or (isinstance(place, str) and len(place) > LONGEST):
            raise ValueError(f"sources and positions have at most {LONGEST} letters, and a source has one")

"""States in memory over a database: rows go to a journal at once, states to the file later."""

import json
import logging
from collections.abc import Hashable, Iterable, Sequence
from itertools import islice
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from constmem.core.files import packed, unpacked
from constmem.core.monoid import NOTHING
from constmem.neural_processes import NeuralProcess
from constmem.streams import AnyModel, one_by_one
from constmem.streams.database import DamagedError, Database, Position
from constmem.streams.pool import StreamPool

ENTRY, VERSION = "constmem.journal", 1
ROUNDED = ("value", "lse")  # what is kept in float32 where that is asked for: no time and no sum
FEWEST = 64  # states that memory has room for, however large they are
TOGETHER = 1024  # states written in one transaction
log = logging.getLogger("constmem.streams")


class Layout:
    """How a state of a model lies in a file: one tensor after another, in float32 where that is asked for."""

    def __init__(self, model: AnyModel, blank: Any, single: bool) -> None:
        self.model, self.fingerprint = model, model._name_of_weights()
        rounded = ROUNDED if single else ()
        self.parts = [
            (name, t.dtype, torch.float32 if name.split(".")[-1] in rounded else t.dtype, t.shape[1:])
            for name, t in blank.tensors().items()
        ]

    @property
    def about(self) -> dict[str, Any]:
        """What another layout must say too, to read what this one has written."""
        parts = {name: [str(kept), *shape] for name, _, kept, shape in self.parts}
        return {"state": self.model.state_type.KIND, "fingerprint": self.fingerprint or "", "layout": parts}

    def rows(self, state: Any) -> NDArray[np.uint8]:
        """The bytes of a batch, a line for each state."""
        tensors = state.tensors()
        columns = [
            tensors[name].detach().cpu().to(kept).contiguous().view(len(tensors[name]), -1).numpy()
            for name, _, kept, _ in self.parts
        ]
        return np.concatenate([column.view(np.uint8) for column in columns], 1)

    def of_rows(self, rows: NDArray[np.uint8]) -> Any:
        """The batch of states that `rows` gave; ValueError where it cannot have."""
        tensors, at = {}, 0
        for name, dtype, kept, shape in self.parts:
            width = kept.itemsize * int(np.prod(shape))
            part = torch.from_numpy(np.ascontiguousarray(rows[:, at : at + width])).view(kept)
            tensors[name] = part.reshape(len(rows), *shape).to(dtype)
            at += width
        state: Any = self.model.state_type.of_tensors(tensors, self.fingerprint)
        return state.to(self.model.device)


class Journaled:
    """Streams by key: the latest used in memory, all of them in a database, together with its journal.

    Args:
        memory: bytes for states in memory.
        longest: rows of the journal beyond which states are written so that it can be cut.
    """

    def __init__(
        self, database: Database, pool: StreamPool, layout: Layout, memory: int, longest: int
    ) -> None:
        self.database, self.pool, self.layout, self.longest = database, pool, layout, longest
        self.most = max(memory // pool._blank.nbytes, FEWEST)
        self.positions = database.positions
        self.number: int = database.found("select count(*) from states")[0][0]
        self._upto: dict[Hashable, int] = {}  # by key in memory, the latest used last: entries that it holds
        self._first: dict[Hashable, int] = {}  # the first entry that the file lacks, the oldest first
        self._rows: dict[int, int] = {}  # of each entry in the journal
        self._last = self._waiting = 0  # the latest entry; rows of all
        for (number,) in database.found("select id from journal order by id"):
            for (content,) in database.found("select content from journal where id = ?", number):
                self._replay(number, content)

    def there(self, names: Iterable[Hashable]) -> list[Hashable]:
        """Those of these streams that there are, damaged ones too."""
        return [name for name in dict.fromkeys(names) if name in self._upto or self.database.holds(name)]

    @property
    def unwritten(self) -> list[Hashable]:
        """Streams whose states the file does not have, or not as they are."""
        return list(self._first)

    def load(self, names: Sequence[Hashable]) -> None:
        """Bring those of these streams that there are into memory."""
        for name in names:
            if name in self._upto:
                self._upto[name] = self._upto.pop(name)  # the latest used
        missing = [name for name in dict.fromkeys(names) if name not in self._upto]
        found = list(self.database.states(missing)) if missing else []
        self._make_room(len(missing), set(names))
        if found:
            try:
                rows = np.stack([np.frombuffer(content, np.uint8) for _, _, content in found])
                state = self.layout.of_rows(rows)
            except ValueError as error:
                raise DamagedError(f"{self.database.path} is damaged: it {error}") from error
            self.pool.put([name for name, _, _ in found], state)
            self._upto |= {name: upto for name, upto, _ in found}

    def take(
        self,
        names: list[Hashable],
        places: NDArray[np.int64],
        x: Tensor,
        y: Tensor | None,
        positions: dict[str, Position],
    ) -> None:
        """Take in rows of different streams, `places` says whose each is; journal and positions in one go."""
        if not names:
            with self.database.transaction():
                self.database.place(positions)
            self.positions |= positions
            return
        self.load(names)
        made = self._extended(names, places, x, y)
        self._require_place(names, made)
        tensors = {"places": torch.from_numpy(places), "x": x} | ({} if y is None else {"y": y})
        entry = packed(tensors, _header("observe", names))
        behind = len(self._first) > self.most // 2 or self._waiting > self.longest
        with self.database.transaction():
            self.database.append(self._last + 1, entry)
            self.database.place(positions)
            written = self._write(list(islice(self._first, 2 * len(names) + 8))) if behind else []
        self._written(written)
        self.positions |= positions
        self._entered(self._last + 1, len(places))
        self._hold(names, made)

    def put(self, names: list[Hashable], state: Any) -> None:
        """Hold these states, in the file at once."""
        self.load(names)
        state = state.signed(self.layout.fingerprint) if state.fingerprint is None else state
        self._require_place(names, state)
        rows = self.layout.rows(state)
        with self.database.transaction():
            self.database.write_states((n, self._last, row) for n, row in zip(names, rows, strict=True))
        self.number += sum(name not in self._upto for name in names)
        self.pool.put(names, state)
        self._upto |= dict.fromkeys(names, self._last)
        self._written(names)

    def delete(self, names: list[Hashable]) -> None:
        """Delete existing streams, in the file at once."""
        with self.database.transaction():
            self.database.append(self._last + 1, packed({}, _header("delete", names)))
            self.database.delete_states(names)
        self._entered(self._last + 1, 1)
        self.number -= sum(name not in self._upto for name in names)
        self._drop(names)

    def flush(self) -> None:
        """Write all states, and cut the journal."""
        while True:
            with self.database.transaction():
                written = self._write(list(islice(self._first, TOGETHER)))
            self._written(written)
            if not self._first:
                return

    # Inside

    def _extended(self, names: list[Hashable], places: NDArray[np.int64], x: Tensor, y: Tensor | None) -> Any:
        """The states of these streams, which are in memory or new, with more rows."""
        model = self.pool.model
        if isinstance(model, NeuralProcess):
            fresh: Any = self.pool._blank
        else:
            first = np.unique(places, return_index=True)[1]
            fresh = model.empty(x[torch.from_numpy(first).to(x.device)].double())
        return one_by_one(model, self.pool._states(names, fresh), places, x, y)

    def _require_place(self, names: list[Hashable], state: Any) -> None:
        """Refuse, before anything is written, what memory cannot hold afterwards."""
        if state.fingerprint not in (NOTHING, self.layout.fingerprint):
            raise ValueError(f"weights have changed since {self.database.path} was opened: give them back")
        self.pool._reserve(sum(name not in self._upto for name in names))

    def _hold(self, names: list[Hashable], state: Any) -> None:
        """Keep states in memory that the file does not have yet."""
        self.number += sum(name not in self._upto for name in names)
        self.pool.put(names, state)
        for name in names:
            self._upto.pop(name, None)
            self._upto[name] = self._last
            self._first.setdefault(name, self._last)

    def _drop(self, names: Iterable[Hashable]) -> None:
        held = [name for name in names if name in self._upto]
        self.number -= len(held)
        if held:
            self.pool.pop(held)
        for name in held:
            del self._upto[name]
        self._written(held)

    def _entered(self, number: int, rows: int) -> None:
        self._last, self._rows[number] = number, rows
        self._waiting += rows

    def _write(self, names: list[Hashable]) -> list[Hashable]:
        """Inside of a transaction: write the states of these, and cut the journal."""
        if names:
            rows = zip(names, self.layout.rows(self.pool.state(names)), strict=True)
            self.database.write_states((name, self._upto[name], row) for name, row in rows)
        done = set(names)
        rest = (first for name, first in self._first.items() if name not in done)
        self.database.forget(next(rest, self._last))  # the last entry stays: no number is used twice
        return names

    def _written(self, names: Iterable[Hashable]) -> None:
        """These are in the file now."""
        for name in names:
            self._first.pop(name, None)
        oldest = min(next(iter(self._first.values()), self._last), self._last)
        for number in [number for number in self._rows if number < oldest]:
            self._waiting -= self._rows.pop(number)

    def _make_room(self, number: int, needed: set[Hashable]) -> None:
        """Drop the least used streams from memory, so that this many fit."""
        excess = len(self._upto) + number - self.most
        if excess <= 0:
            return
        if len(needed) > self.most:
            raise ValueError(
                f"{len(needed)} streams at once are more than memory holds, {self.most}: take fewer "
                "at a time, or give the store more memory="
            )
        others = (name for name in self._upto if name not in needed)
        spare = list(islice(others, max(excess, self.most // 64)))
        if waiting := [name for name in spare if name in self._first]:
            with self.database.transaction():
                self._write(waiting)
            self._written(waiting)
        self.pool.pop(spare)
        for name in spare:
            del self._upto[name]

    def _replay(self, number: int, content: bytes) -> None:
        """Take in an entry of the journal again, as far as the states do not hold it."""
        what = f"entry {number} of the journal in {self.database.path}"
        tensors, header = unpacked(content, what, kind=ENTRY, version=VERSION)
        names: list[Hashable] = json.loads(header["keys"])
        places = tensors["places"].numpy() if "places" in tensors else np.zeros(0, np.int64)
        self._entered(number, max(len(places), 1))
        for start in range(0, len(names), self.most):  # there may have been more memory when it was written
            part = range(start, min(start + self.most, len(names)))
            lost = self._damaged([names[i] for i in part])
            lacking = [i for i in part if self._upto.get(names[i], 0) < number and names[i] not in lost]
            chosen = [names[i] for i in lacking]
            if header["verb"] == "delete":
                if any(map(self.database.holds, chosen)):  # written by an eviction during this replay
                    with self.database.transaction():
                        self.database.delete_states(chosen)
                self._drop(chosen)
            elif chosen:
                at = np.full(len(names), -1)
                at[lacking] = np.arange(len(lacking))
                rows = np.flatnonzero(at[places] >= 0)
                lines = (tensors[n][rows].to(self.pool.model.device) if n in tensors else None for n in "xy")
                self._hold(chosen, self._extended(chosen, at[places][rows], *lines))  # type: ignore[arg-type]

    def _damaged(self, names: list[Hashable]) -> set[Hashable]:
        """Those of these whose states cannot be read; all others are brought into memory."""
        lost = set()
        try:
            self.load(names)
        except ValueError:
            for name in names:
                try:
                    self.load([name])
                except ValueError as error:
                    lost.add(name)
                    log.warning("%s; what came for it since cannot be taken in", error)
        return lost


def _header(verb: str, names: list[Hashable]) -> dict[str, str]:
    return {"format": ENTRY, "version": str(VERSION), "verb": verb, "keys": json.dumps(names)}

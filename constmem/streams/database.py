"""The file of a store: SQLite tables of states, of a journal of later rows, and of positions."""

import errno
import hashlib
import json
import os
import sqlite3
from collections.abc import Hashable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Key = Hashable
Position = int | str
VERSION = 2
SEAL = 8  # bytes of the checksum behind each content
SCHEMA = """
create table about (name text primary key, value text not null);
create table states (key primary key, upto integer not null, content blob not null);
create table journal (id integer primary key, content blob not null);
create table sources (name text primary key, position blob not null);
"""
WRITE = (
    "insert into states values (?, ?, ?) "
    "on conflict (key) do update set upto = excluded.upto, content = excluded.content"
)


class DamagedError(ValueError):
    """A file, or a part of it, is not what was written."""


class Database:
    """One SQLite file in WAL mode, held by one process; every content is sealed by a checksum.

    Args:
        about: what the states are of; a file of anything else is refused.
        power: whether what was committed outlives a loss of power, too, at the cost of waiting for the disk.
            A process that is killed loses nothing either way.
    """

    def __init__(self, path: str | os.PathLike[str], about: dict[str, Any], *, power: bool = True) -> None:
        self.path = Path(path)
        if self.path.is_dir():
            raise IsADirectoryError(errno.EISDIR, "a store is a file, and this is a folder", str(path))
        with self._clear():
            self._sqlite = sqlite3.connect(
                self.path, isolation_level=None, check_same_thread=False, timeout=1
            )
        try:
            with self._clear():
                self._open(about, power)
        except BaseException:
            self._sqlite.close()
            raise

    def _open(self, about: dict[str, Any], power: bool) -> None:
        run = self._sqlite.execute
        run("pragma locking_mode = exclusive")
        run("pragma journal_mode = wal")
        run(f"pragma synchronous = {'full' if power else 'normal'}")
        run("pragma cache_size = -65536")  # kB
        wanted = {"format": "constmem.store", "version": VERSION} | about
        with self.transaction():
            known = {name for (name,) in run("select name from sqlite_master where type = 'table'")}
            if not known:
                for statement in filter(str.strip, SCHEMA.split(";")):
                    run(statement)
                run("insert into about values ('about', ?)", (json.dumps(wanted),))
        if known and not known >= {"about", "states", "journal", "sources"}:
            raise ValueError(f"{self.path} is a database, but no store: its tables are {sorted(known)}")
        found = self._about()
        for name, value in json.loads(json.dumps(wanted)).items():
            if found.get(name) != value:
                raise ValueError(
                    f"{self.path} is a store whose {name} is {found.get(name)!r}, but here it is {value!r}: "
                    "open it with the model and settings it was made with, or take another file"
                )
        self.positions, self._lost = self._read_positions()

    def _about(self) -> dict[str, Any]:
        row = self._sqlite.execute("select value from about where name = 'about'").fetchone()
        try:
            found: dict[str, Any] = json.loads(row[0])
            found["format"]
        except (TypeError, ValueError, KeyError) as error:
            raise self._damaged("what it says about itself cannot be read") from error
        return found

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """All that is written inside of it is there afterwards, or nothing of it."""
        with self._clear():
            self._sqlite.execute("begin immediate")
            try:
                yield
                self._sqlite.execute("commit")
            except BaseException:
                with suppress(sqlite3.Error):  # SQLite has done so by itself
                    self._sqlite.execute("rollback")
                raise

    def states(self, keys: Iterable[Key]) -> Iterator[tuple[Key, int, bytes]]:
        """Those that are there: the key, up to which entry of the journal they hold it, and the content."""
        query = "select upto, content from states where key = ?"
        with self._clear():
            for key in keys:
                for upto, content in self._sqlite.execute(query, (key,)).fetchall():
                    what = f"the state of {key!r}"
                    yield key, upto, self._opened(f"{key!r} {upto}", content, what, "that stream")

    def found(self, query: str, *given: Any) -> list[Any]:
        """The rows that answer a query."""
        with self._clear():
            return self._sqlite.execute(query, given).fetchall()

    def holds(self, key: Key) -> bool:
        """Whether there is a state of that key, damaged or not."""
        return bool(self.found("select 1 from states where key = ?", key))

    def write_states(self, rows: Iterable[tuple[Key, int, NDArray[np.uint8]]]) -> None:
        """Inside of a transaction: what is held of these keys from now on."""
        sealed = ((key, upto, _sealed(f"{key!r} {upto}", row.tobytes())) for key, upto, row in rows)
        self._sqlite.executemany(WRITE, sealed)

    def delete_states(self, keys: Iterable[Key]) -> None:
        """Inside of a transaction."""
        self._sqlite.executemany("delete from states where key = ?", ((key,) for key in keys))

    def keys(self, prefix: str, after: str | None, number: int) -> list[str]:
        """Texts in order, from where those stand that begin so, and behind `after`."""
        start = max(prefix, after or "")
        low = ">" if start == after else ">="
        query = f"select key from states where typeof(key) = 'text' and key {low} ? order by key limit ?"
        return [key for (key,) in self.found(query, start, number)]

    def append(self, entry: int, content: bytes | bytearray) -> None:
        """Inside of a transaction: one more entry of the journal."""
        self._sqlite.execute("insert into journal values (?, ?)", (entry, content))

    def forget(self, before: int) -> None:
        """Inside of a transaction: entries that all states hold."""
        self._sqlite.execute("delete from journal where id < ?", (before,))

    def position(self, source: str) -> Position | None:
        """How far a source was taken in; None: nothing was. Refused where that is damaged."""
        if source not in self.positions and self._lost is not None:
            raise self._lost
        return self.positions.get(source)

    def _read_positions(self) -> tuple[dict[str, Position], DamagedError | None]:
        """Of every source, and an error where one is not what was written."""
        found, lost = {}, None
        for raw, content in self.found("select cast(name as blob), cast(position as blob) from sources"):
            name = raw.decode(errors="backslashreplace")
            try:
                found[name] = json.loads(self._opened(f"source {name}", content, "a position", "its source"))
            except DamagedError:
                lost = DamagedError(
                    f"{self.path} is damaged: the position of {name!r}, or that name, is not what was "
                    "written, so that rows of a source could be taken twice; take a copy of it, or say where "
                    "sources were by store.move(source, position)"
                )
        return found, lost

    def place(self, positions: dict[str, Position]) -> None:
        """Inside of a transaction: how far these sources were taken in."""
        run = self._sqlite.executemany
        sealed = (
            (name, _sealed(f"source {name}", json.dumps(at).encode())) for name, at in positions.items()
        )
        run("insert or replace into sources values (?, ?)", sealed)

    def check(self) -> None:
        """Verify every page and every checksum; raises where something is damaged."""
        found = [row[0] for row in self.found("pragma integrity_check(3)")]
        if found != ["ok"]:
            raise self._damaged("; ".join(found))
        with self._clear():
            for (key,) in self._sqlite.execute("select key from states"):  # there may be millions
                list(self.states([key]))
        if (lost := self._read_positions()[1]) is not None:
            raise lost

    def close(self) -> None:
        """Close the file."""
        with self._clear():
            self._sqlite.close()

    def _opened(self, salt: str, content: Any, what: str, lost: str) -> bytes:
        if not isinstance(content, bytes) or _seal(salt, content[:-SEAL]) != content[-SEAL:]:
            raise self._damaged(f"{what} is not what was written", lost)
        return content[:-SEAL]

    def _damaged(self, why: str, lost: str = "it") -> DamagedError:
        return DamagedError(
            f"{self.path} is damaged: {why}; take a copy of it, or delete {lost} and begin again"
        )

    @contextmanager
    def _clear(self) -> Iterator[None]:
        """Errors of SQLite in this library's words."""
        try:
            yield
        except UnicodeEncodeError as error:
            raise ValueError(f"a key must be a text that UTF-8 can hold: {error}") from error
        except OverflowError as error:
            raise ValueError("a number must fit 64 bits: write a larger key as a text") from error
        except sqlite3.Error as error:
            name, path = getattr(error, "sqlite_errorname", "SQLITE_ERROR"), str(self.path)
            if name.startswith(("SQLITE_BUSY", "SQLITE_LOCKED")):
                why = "another process holds this store, or another Store of this one: close it first"
                raise BlockingIOError(errno.EAGAIN, why, path) from error
            if name.startswith(("SQLITE_FULL", "SQLITE_IOERR")):
                why = f"the store could not be read or written ({error}): nothing of this call was taken, "
                why += "and all that was taken before it is kept"
                raise OSError(errno.ENOSPC if "FULL" in name else errno.EIO, why, path) from error
            if name.startswith(("SQLITE_CANTOPEN", "SQLITE_READONLY", "SQLITE_PERM", "SQLITE_AUTH")):
                why = f"the store cannot be opened to write ({error})"
                raise PermissionError(errno.EACCES, why, path) from error
            raise self._damaged(str(error)) from error


def _seal(salt: str, content: bytes) -> bytes:
    digest = hashlib.sha256(content)
    digest.update(salt.encode(errors="surrogatepass"))
    return digest.digest()[:SEAL]


def _sealed(salt: str, content: bytes) -> bytes:
    return content + _seal(salt, content)

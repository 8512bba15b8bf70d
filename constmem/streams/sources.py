"""Where rows come from: JSON lines or a Redis stream, each taken into a store exactly once."""

import hashlib
import json
import os
import re
import reprlib
import select
import time
from collections.abc import Callable, Hashable, Iterator
from itertools import chain, takewhile
from typing import Any

import numpy as np
from numpy.typing import NDArray

from constmem.core.checks import extra
from constmem.point_processes import PointProcess
from constmem.streams import AnyModel, blaming
from constmem.streams.store import Store

LONGEST = 2**20  # bytes of a line
PATIENCE = 30.0  # seconds between attempts to reach Redis, at most
Row = tuple[Hashable, Any, Any]
Report = Callable[[str], None]
Stop = Callable[[], bool]


class BadRowError(ValueError):
    """A row that cannot be taken, and where it stands."""


class Rows:
    """How JSON holds rows: {"key", "x", "y"} of points, {"key", "time", "mark"} of events."""

    def __init__(self, model: AnyModel) -> None:
        self.events = isinstance(model, PointProcess)
        self.names = ("key", "time", "mark") if self.events else ("key", "x", "y")
        self.widths = (1, 1) if isinstance(model, PointProcess) else (model.dim_x, model.dim_y)
        self.marks = model.num_marks if isinstance(model, PointProcess) else 0

    def read(self, given: Any) -> Row:
        """Key, x and y, or key, time and mark, of one row; ValueError says what is wrong with it."""
        if not isinstance(given, dict):
            raise ValueError(f"a row is an object such as {self.example}, not {_shown(given)}")
        if unknown := given.keys() - set(self.names):
            raise ValueError(f"a row has no {_shown(min(map(str, unknown)))}: it is such as {self.example}")
        key = given.get("key")
        if not isinstance(key, str | int) or isinstance(key, bool):
            raise ValueError(f"the key of a row is a text or a whole number, not {_shown(key)}")
        return key, *self.values(given)

    def values(self, given: dict[str, Any]) -> tuple[Any, Any]:
        """x and y, or time and mark."""
        if not self.events:
            return numbers("x", given.get("x"), self.widths[0]), numbers("y", given.get("y"), self.widths[1])
        mark = given.get("mark", -1)
        if not isinstance(mark, int) or isinstance(mark, bool) or not -1 <= mark < self.marks:
            below = f"below {self.marks}, or -1 if unknown"
            raise ValueError(f"a mark is a whole number {below}, not {_shown(mark)}")
        return numbers("time", given.get("time"), 1)[0], mark

    def columns(self, x: list[Any], y: list[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
        """The same of many rows, as columns."""
        first, second = self.names[1:]
        inputs, outputs = column(x, self.widths[0]), column(y, self.widths[1])
        whole = not self.events or (set(map(type, y)) == {int} and min(y) >= -1 and max(y) < self.marks)
        if whole and inputs is not None and outputs is not None:
            return (inputs[:, 0], np.array(y)) if self.events else (inputs, outputs)
        given = [{first: a, second: b} for a, b in zip(x, y, strict=True)]
        rows = blaming("row", range(len(x)), lambda some: [self.values(given[i]) for i in some])
        return np.array([a for a, _ in rows]), np.array([b for _, b in rows])

    @property
    def example(self) -> str:
        """A row as text."""
        if self.events:
            return '{"key": "ann", "time": 12.5, "mark": 0}'
        x, y = (0.5 if width == 1 else [0.5] * width for width in self.widths)
        return json.dumps({"key": "ann", "x": x, "y": y})


def numbers(name: str, given: Any, width: int) -> list[float]:
    """A list of `width` finite numbers; a single one may stand without a list."""
    values = [given] if width == 1 and not isinstance(given, list) else given
    if not isinstance(values, list) or len(values) != width:
        many = "a number" if width == 1 else f"a list of {width} numbers"
        raise ValueError(f"{name} is {many}, not {_shown(given)}")
    for value in values:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError(f"{name} holds {_shown(value)}, which is no number")
        if not abs(value) <= 1e300:  # NaN, and whole numbers that no float holds
            raise ValueError(f"{name} holds {_shown(value)}: leave out rows that are not finite")
    return [float(value) for value in values]


def column(given: list[Any], width: int) -> NDArray[np.float64] | None:
    """`width` finite numbers of each row, (rows, width); None where `numbers` would find something else."""
    flat = given
    if set(map(type, given)) == {list}:
        if set(map(len, given)) != {width}:
            return None
        flat = list(chain.from_iterable(given))
    elif width != 1:
        return None
    if not set(map(type, flat)) <= {int, float}:
        return None
    try:
        found = np.array(flat, np.float64).reshape(-1, width)
    except OverflowError:
        return None
    return found if bool((np.abs(found) <= 1e300).all()) else None


def _shown(value: Any) -> str:
    text = (reprlib.repr if isinstance(value, list | dict) else repr)(value)  # lists in lists may be deep
    return text if len(text) <= 40 else f"{text[:40]}..."


class Consumer:
    """Takes rows of one source into a store, with their positions; bad ones end it, or are left out.

    Args:
        source: the name under which the store remembers how far it was taken in.
        skip: whether to leave out bad rows, and go on.
        report: is told what a person may want to know.
    """

    def __init__(self, store: Store, source: str, *, skip: bool = False, report: Report = print) -> None:
        self.store, self.source, self.skip, self.report = store, source, skip, report
        self.rows = Rows(store.model)
        self.taken = self.skipped = 0

    def take(self, batch: list[tuple[Any, str]]) -> None:
        """Take rows as they came, each with the position behind it: all, or those before a bad one."""
        good: list[tuple[Row | None, str]] = []
        for given, position in batch:
            try:
                good.append((self.rows.read(_parsed(given)), position))
            except ValueError as error:
                if not self.skip:
                    self._commit(good)
                self._bad(position, error)
                good.append((None, position))
        self._commit(good)

    def _commit(self, batch: list[tuple[Row | None, str]]) -> None:
        """In one transaction; where rows are refused, the bad ones are found by halving."""
        if not batch:
            return
        rows = [row for row, _ in batch if row is not None]
        if not rows:
            self.store.move(self.source, batch[-1][1])
            return
        keys, x, y = ([row[i] for row in rows] for i in range(3))
        try:
            self.store.observe(keys, x, y, source=self.source, position=batch[-1][1])
            self.taken += len(rows)
        except ValueError as error:
            if (half := len(batch) // 2) > 0:
                self._commit(batch[:half])
                self._commit(batch[half:])
            else:
                self._bad(batch[0][1], error)
                self._commit([(None, batch[0][1])])

    def _bad(self, position: str, error: ValueError) -> None:
        if not self.skip:
            raise BadRowError(f"{self.source} at {position.partition(' ')[0]}: {error}") from error
        self.skipped += 1
        if self.skipped <= 10:
            self.report(f"left out: {self.source} at {position.partition(' ')[0]}: {error}")


def _parsed(given: bytes | dict[bytes, bytes]) -> Any:
    """A row of JSON; of fields, each value but the key is JSON by itself."""
    try:
        if isinstance(given, bytes):
            return json.loads(given)
        named = ((name.decode(), value) for name, value in given.items())
        return {name: value.decode() if name == "key" else json.loads(value) for name, value in named}
    except (json.JSONDecodeError, RecursionError) as error:  # or lists in lists without end
        raise ValueError(f"this is not JSON: {error}") from error


def consume_lines(consumer: Consumer, handle: int, *, batch: int = 512, stop: Stop = lambda: False) -> None:
    """Take JSON lines of a file descriptor, from behind those that were taken before, to the end.

    The position is the number of lines, and a digest of them: after a stop, give the same lines again.
    """
    before, expected = _left(consumer, "0 ", r"\d+ [0-9a-f]*").split(" ")
    skipped, digest, number = int(before), hashlib.sha256(), 0
    if skipped:
        consumer.report(f"lines taken before, passed over: {skipped:,}")
    for lines in _lines(handle, batch, stop):
        items = []
        for line in lines:
            number += 1
            digest.update(line + b"\n")
            name = f"{number} {digest.copy().hexdigest()[:16]}" if number >= skipped else ""
            if number == skipped and name != f"{skipped} {expected}":
                raise ValueError(
                    f"these are not the lines of which {skipped:,} were taken as {consumer.source!r} before: "
                    "give the same from the beginning, or another --source for others"
                )
            if number > skipped:
                items.append((line, name))
        consumer.take([(line, name) for line, name in items if line.strip()])
    if number < skipped and not stop():
        before = f"{skipped:,} of {consumer.source!r} were taken before"
        raise ValueError(f"there are only {number:,} lines, but {before}")


def _left(consumer: Consumer, beginning: str, form: str) -> str:
    """Where the source was left; refuses places of another kind."""
    found = str(consumer.store.position(consumer.source) or beginning)
    if not re.fullmatch(form, found):
        raise ValueError(
            f"{consumer.source!r} is something else here, left at {found!r}: give another --source"
        )
    return found


def _lines(handle: int, batch: int, stop: Stop) -> Iterator[list[bytes]]:
    """What is there of complete lines, some at a time."""
    rest = b""
    while not stop():
        if not select.select([handle], [], [], 0.2)[0]:
            continue
        block = os.read(handle, 2**18)
        *lines, rest = (rest + block).split(b"\n")
        if len(rest) > LONGEST:
            raise ValueError(f"a line is longer than {LONGEST:,} bytes: one row is one line")
        if not block and rest:
            lines.append(rest)
        for start in range(0, len(lines), batch):
            yield lines[start : start + batch]
        if not block:
            return


def consume_redis(
    consumer: Consumer, url: str, stream: str, *, batch: int = 512, idle: float | None = None,
    stop: Stop = lambda: False,
) -> None:  # fmt: skip
    """Take a Redis stream, from behind the entry that was taken last; waits for more, and for Redis.

    An entry has a field `row` with a row as JSON, or the fields of a row, each as JSON; its key as it is.

    Args:
        idle: end when nothing came for so many seconds; None: never.
    """
    with extra("redis", "a Redis stream is read by the package redis"):
        import redis
    client, waited, last = redis.Redis.from_url(url, socket_timeout=30), 0.5, time.monotonic()
    checked = False  # whether it is the stream that it was
    while not stop():
        position = _left(consumer, "0-0", r"\d+-\d+")
        try:
            if not checked:
                _require_same_stream(client, consumer, stream, position)
            found: Any = client.xread({stream: position}, count=batch, block=200)
            waited, checked = 0.5, True
        except (redis.ResponseError, redis.AuthenticationError) as error:
            raise ValueError(f"Redis refuses to read {stream!r}: {error}") from error
        except (redis.ConnectionError, redis.TimeoutError) as error:
            consumer.report(f"Redis does not answer ({error}): trying again in {waited:g} s")
            if idle is not None and time.monotonic() - last > idle:
                raise OSError(f"Redis does not answer: {error}") from error
            for _ in takewhile(lambda _: not stop(), range(int(10 * waited))):
                time.sleep(0.1)
            waited, checked = min(2 * waited, PATIENCE), False
            continue
        entries = found[0][1] if found else []
        consumer.take([(fields.get(b"row", fields), name.decode()) for name, fields in entries])
        if entries:
            last = time.monotonic()
        elif idle is not None and time.monotonic() - last > idle:
            return


def _require_same_stream(client: Any, consumer: Consumer, stream: str, position: str) -> None:
    """Refuse a stream that was created again, and say where entries were deleted before they were taken."""
    if position == "0-0" or not client.exists(stream):
        return
    about, names = client.xinfo_stream(stream), ("last-generated-id", "max-deleted-entry-id")
    here, (latest, deleted) = _number(position), (_number(about.get(name, b"0-0")) for name in names)
    if latest < here:
        raise ValueError(
            f"the Redis stream {stream!r} ends before {position}, where {consumer.source!r} was left: it "
            "was created again; give another --source to take it from its beginning"
        )
    were = "were" if deleted > here else "may have been"  # Redis does not record what it trimmed
    if deleted > here or (latest > here and not client.xrevrange(stream, position, count=1)):
        consumer.report(f"warning: entries of {stream!r} behind {position} {were} deleted, and not taken")


def _number(name: Any) -> tuple[int, int]:
    first, _, second = (name.decode() if isinstance(name, bytes) else str(name)).partition("-")
    return int(first), int(second or 0)

"""One thread that answers requests of a store, within limits: what waits is done in one batch."""

import asyncio
import logging
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import accumulate
from threading import Condition, Thread
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from constmem.point_processes import PointProcess
from constmem.streams.database import DamagedError
from constmem.streams.store import Store

if TYPE_CHECKING:
    Future = asyncio.Future
LEVELS = [0.05, 0.5, 0.95]
TOGETHER, ROWS = 256, 16_384  # requests answered by one batch, and their rows or targets
log = logging.getLogger("constmem.serve")


class Failure(Exception):  # noqa: N818  # an answer, not a defect
    """An answer that says what is wrong, why, and what to do."""

    def __init__(self, status: int, kind: str, message: str, *, wait: int | None = None) -> None:
        super().__init__(message)
        self.status, self.kind, self.message, self.wait = status, kind, message, wait


@dataclass(frozen=True)
class Limits:
    """How much one request, and all of them together, may ask for."""

    body: int = 2**20  # bytes
    rows: int = 10_000  # of a request: rows, targets or keys
    waiting: int = 1024  # requests that wait for an answer
    streams: int = 10_000_000  # in the store; and as many sources
    seconds: float = 30.0  # for a body to arrive, and for an answer


@dataclass(eq=False)
class Observe:
    """Rows to observe: columns, and where they come from."""

    keys: list[str]
    x: Any
    y: Any
    source: str | None = None
    position: int | None = None
    done: "Future[Any] | None" = None

    def __len__(self) -> int:
        return len(self.keys)


@dataclass(eq=False)
class Predict:
    """Targets of streams, as many of each: (keys, targets, channels); None of events."""

    keys: list[str]
    x: list[Any] | None
    done: "Future[Any] | None" = None

    def __len__(self) -> int:
        return len(self.keys) * (1 if self.x is None else len(self.x[0]))


@dataclass(eq=False)
class Work:
    """Anything else to do with the store; where that gives nothing, an answer; keys that may be new to it."""

    call: Callable[[Store], Any]
    answer: dict[str, int] = field(default_factory=dict)
    new: list[str] = field(default_factory=list)
    done: "Future[Any] | None" = None

    def __len__(self) -> int:
        return 1


class Batches:
    """Answers requests from one thread; `close` answers all that wait, then closes the store."""

    def __init__(self, store: Store, limits: Limits) -> None:
        self.store, self.limits = store, limits
        self.batches = self.rows = self.predictions = 0
        self._waiting: list[Observe | Predict | Work] = []
        self._answers: list[tuple[Any, Any]] = []
        self._changed = Condition()
        self._closing = False
        self._thread = Thread(target=self._run, name="store")
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether requests are answered."""
        return self._thread.is_alive() and not self._closing

    @property
    def waiting(self) -> int:
        """How many requests wait."""
        return len(self._waiting)

    def submit(self, request: Observe | Predict | Work) -> "Future[Any]":
        """Have a request answered, from an event loop: the answer is awaited, or a `Failure`."""
        loop = asyncio.get_running_loop()
        request.done = loop.create_future()
        with self._changed:
            if self._closing:
                raise Failure(503, "stopping", "the service is stopping: nothing of this was taken", wait=5)
            if len(self._waiting) >= self.limits.waiting:
                raise Failure(
                    429, "busy", f"{len(self._waiting)} requests wait already: try again later", wait=1
                )
            self._waiting.append(request)
            self._changed.notify()
        return request.done

    def close(self) -> None:
        """Answer what waits, and close the store."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join()
        try:
            self.store.close()
        except OSError as error:  # a full disk, for instance; the next start applies the journal
            log.error("as the service stopped, %s", error.strerror)

    def _run(self) -> None:
        torch.set_num_threads(1)
        while True:
            with self._changed:
                while not self._waiting and not self._closing:
                    self._changed.wait()
                number = self._fitting()
                batch, self._waiting = self._waiting[:number], self._waiting[number:]
                if not batch:
                    return
            self.batches += 1
            if rows := [each for each in batch if isinstance(each, Observe)]:
                self._answer(rows, self._observed)
                self._deliver()
            groups = defaultdict(list)
            for each in batch:
                if isinstance(each, Work):
                    self._answer([each], self._worked)
                elif isinstance(each, Predict):
                    groups[0 if each.x is None else len(each.x[0]).bit_length()].append(each)
            for group in groups.values():
                self._answer(group, self._predicted)
            self._deliver()

    def _fitting(self) -> int:
        """How many of those that wait are answered together: large ones must not use up memory, or time."""
        sizes = accumulate(map(len, self._waiting[:TOGETHER]))
        return max(1, sum(size <= ROWS for size in sizes))

    def _answer(self, requests: list[Any], work: Callable[[list[Any]], list[Any]]) -> None:
        """Do work for some requests; where that fails, for each by itself, to find which one failed."""
        try:
            answers = work(requests)
        except Exception as error:
            if len(requests) > 1 and not isinstance(error, OSError):
                for each in requests:
                    self._answer([each], work)
                return
            answers = [_failure(error)] * len(requests)
        self._answers += zip(requests, answers, strict=True)

    def _deliver(self) -> None:
        """Hand answers over to the event loop, all at once."""
        answers, self._answers = self._answers, []
        if answers:
            loop = answers[0][0].done.get_loop()
            with suppress(RuntimeError):  # it is closed: no client waits any more
                loop.call_soon_threadsafe(_resolve, answers)

    def _observed(self, requests: list[Observe]) -> list[dict[str, int]]:
        """Take in the rows of all in one transaction, but for those that were taken before."""
        keys: list[Any] = []
        x: list[Any] = []
        y: list[Any] = []
        positions: dict[str, Any] = {}
        answers = []
        for each in requests:
            if each.source is not None:
                known = positions.get(each.source, self.store.position(each.source))
                if known is not None and each.position <= known:
                    answers.append({"taken": 0})
                    continue
                positions[each.source] = each.position
            keys += each.keys
            x.append(np.asarray(each.x))
            y.append(np.asarray(each.y))
            answers.append({"taken": len(each.keys)})
        if keys:
            self._require_room(keys)
            sources, most = self.store.sources(list(positions)), self.limits.streams
            if positions and sources > most:
                raise Failure(507, "full", f"there would be {sources:,} sources, and {most:,} are allowed")
            self.store.observe_all(keys, np.concatenate(x), np.concatenate(y), positions)
            self.rows += len(keys)
        return answers

    def _worked(self, requests: list[Work]) -> list[Any]:
        for each in requests:
            if each.new:
                self._require_room(each.new)
        return [each.call(self.store) or each.answer for each in requests]

    def _require_room(self, keys: list[Any]) -> None:
        names, most = set(keys), self.limits.streams
        if len(self.store) + len(names) > most:
            new = len(names) - len(self.store.known(list(names)))
            if len(self.store) + new > most:
                raise Failure(507, "full", f"there are {len(self.store):,} streams, and {most:,} are allowed")

    def _predicted(self, requests: list[Predict]) -> list[dict[str, Any]]:
        """Answers for all in one batch; fewer targets than others have are filled up."""
        names = [key for each in requests for key in each.keys]
        if isinstance(self.store.model, PointProcess):
            found = self.store.predict(names)
            with torch.no_grad():
                columns = {
                    "mean": found.mean,
                    "quantiles": found.quantiles(LEVELS),
                    "marks": found.mark_logits().exp(),
                    "last_time": found.last_time,
                }
        else:
            most = max(len(each.x[0]) for each in requests if each.x is not None)
            rows = [row + row[-1:] * (most - len(row)) for each in requests for row in each.x or []]
            found = self.store.predict(names, np.asarray(rows))
            columns = {"mean": found.mean, "stddev": found.stddev}
        self.predictions += len(names)
        arrays = {name: np.asarray(t) for name, t in columns.items()}
        answers, start = [], 0
        for each in requests:
            here = slice(start, start + len(each.keys))
            wide = None if each.x is None else len(each.x[0])
            parts = ((name, a[here] if wide is None else a[here, :wide]) for name, a in arrays.items())
            answers.append({name: part.tolist() for name, part in parts})
            start = here.stop
        return answers


def _resolve(answers: list[tuple[Any, Any]]) -> None:
    for each, answer in answers:
        if each.done.done():  # the client has gone
            continue
        if isinstance(answer, Failure):
            each.done.set_exception(answer)
        else:
            each.done.set_result(answer)


def _failure(error: Exception) -> Failure:
    """An error in words for a client; unexpected ones are logged, and not shown."""
    if isinstance(error, Failure):
        return error
    if isinstance(error, KeyError):
        return Failure(404, "not_found", str(error.args[0]))
    if isinstance(error, ValueError | TypeError) and not isinstance(error, DamagedError):
        return Failure(409 if "already" in str(error) else 422, "refused", str(error))
    log.error("a request failed", exc_info=error)
    if isinstance(error, OSError):
        return Failure(
            507, "storage", "the store cannot be written: nothing of this was taken; try again later"
        )
    return Failure(500, "internal", "the service failed to answer; its log says why")

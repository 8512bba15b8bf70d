"""Threads at once on one stream or estimator, and processes short of memory, threads, room or rights."""

import contextlib
import errno
import json
import os
import random
import resource
import subprocess
import sys
import threading
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from constmem import Stream
from constmem.core.files import write_bytes
from constmem.kernels import paths as library

from . import calls, kills, samples, shells
from .pool import Case
from .verdict import REFUSED, RIGHT, Finding, close, require

WRITERS, READERS, TURNS = 4, 2, 6


def together(works: list[Callable[[], None]]) -> None:
    """Run all of them in threads that take turns as often as they can; what one finds, all have found."""
    found: list[BaseException] = []

    def guarded(work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            found.append(error)

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=guarded, args=(work,)) for work in works]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(before)
    if found:
        raise Finding(f"in a thread: {found[0]!r}") from found[0]


def raced_stream(draw: random.Random, folder: Path) -> str:
    """Writers and readers on one stream: no point is lost, and the last prediction knows all of them."""
    model = calls.model("cmanp")
    stream = Stream(model)
    points = [(calls.tensor(draw, 1, TURNS, 2), calls.tensor(draw, 1, TURNS, 2)) for _ in range(WRITERS)]
    xt = calls.tensor(draw, 1, 3, 2)

    def write(x: torch.Tensor, y: torch.Tensor) -> None:
        for i in range(TURNS):
            stream.observe(x[:, i : i + 1], y[:, i : i + 1])

    def read() -> None:
        before = 0
        for _ in range(TURNS):
            require(bool(stream.predict(xt).mean.isfinite().all()), "a prediction in between is not finite")
            now = int(stream.count)
            require(now >= before, f"{now} points after {before}")
            before = now
            stream.save(folder / f"{threading.get_ident()}")

    together([*(lambda p=p: write(*p) for p in points), *[read] * READERS])
    require(int(stream.count) == WRITERS * TURNS, f"{int(stream.count)} of {WRITERS * TURNS} points are left")
    with torch.no_grad():
        x, y = (torch.cat(parts, 1) for parts in zip(*points, strict=True))
        expected = model.query(model.condition(x, y), xt)
    require(close(stream.predict(xt).mean, expected.mean), "the last prediction does not know all points")
    return RIGHT


def raced_estimator(draw: random.Random, folder: Path) -> str:
    """Writers and readers on one estimator: no row is lost, and no answer is of half a change."""
    base = shells.fitted(draw.random() < 0.5, None)
    estimator = base.spawn()
    discrete = hasattr(estimator, "predict_proba")
    parts = [samples.rows(TURNS * 2, seed=draw.randrange(2**31)) for _ in range(WRITERS)]
    query = samples.rows(3, seed=1)[0]
    first = samples.rows(4, seed=2)
    estimator.partial_fit(first[0], first[2] if discrete else first[1])

    def write(part: Any) -> None:
        columns, y, labels = part
        for i in range(TURNS):
            at = slice(2 * i, 2 * i + 2)
            estimator.partial_fit(
                {name: c[at] for name, c in columns.items()}, (labels if discrete else y)[at]
            )

    def read() -> None:
        for _ in range(TURNS):
            require(
                bool(np.isfinite(shells._answer(estimator, query)).all()),
                "an answer in between is not finite",
            )
            estimator.save(folder / f"{threading.get_ident()}")
            type(estimator).load(folder / f"{threading.get_ident()}")

    together([*(lambda p=p: write(p) for p in parts), *[read] * READERS])
    whole = base.spawn().partial_fit(first[0], first[2] if discrete else first[1])
    for columns, y, labels in parts:
        whole.partial_fit(columns, labels if discrete else y)
    seen = estimator.learner_.seen
    require(seen == whole.learner_.seen, f"{seen} of {whole.learner_.seen} rows are left")
    sums, expected = kills.remembered(estimator), kills.remembered(whole)
    require(all(close(sums[name], expected[name], 1e-9) for name in expected), "other sums than of all rows")
    return RIGHT


# Limits


def limited(set_limits: Callable[[], None], work: Callable[[], str]) -> str:
    """Work in a process of its own under limits; it must live to say how it ended."""
    read, write = os.pipe()
    words = "MemoryError"  # where there is no room to say more
    pid = os.fork()
    if pid == 0:
        try:
            set_limits()
            words = work()
        except MemoryError:
            _, most = resource.getrlimit(resource.RLIMIT_AS)
            resource.setrlimit(resource.RLIMIT_AS, (most, most))
            words = "MemoryError"
        except OSError as error:
            words = f"OSError {errno.errorcode.get(error.errno or 0, '')}"
        except RuntimeError as error:
            words = "MemoryError" if "alloc" in str(error) or "memory" in str(error).lower() else repr(error)
        except BaseException as error:
            words = repr(error)
        finally:
            try:
                os.write(write, words.encode()[:2000])
            finally:
                os._exit(0)
    os.close(write)
    _, status = os.waitpid(pid, 0)
    text = os.read(read, 4096).decode()
    os.close(read)
    require(status == 0, f"the process ended with status {status}")
    return text


def memory(draw: random.Random, _: Path) -> str:
    """Too little memory (RLIMIT_AS): the right answer, or an error; never the end of the process."""
    model = calls.model(draw.choice(("cmanp", "cnp", "lbanp")))
    x, y, xt = calls.tensor(draw, 1, 60_000, 2), calls.tensor(draw, 1, 60_000, 2), calls.tensor(draw, 1, 3, 2)
    chunk = draw.choice((512, 4096, 60_000))
    library.library()  # machine code, if any, is loaded before memory is short
    room = int(2 ** draw.uniform(14, 27))

    def answer() -> list[float]:
        with torch.no_grad():
            mean: list[float] = model.query(model.condition(x, y, chunk=chunk), xt).mean.flatten().tolist()
        return mean

    # In a process of its own: memory that this one has freed would be there for the next to take.
    expected = json.loads(limited(lambda: None, lambda: json.dumps(answer())))

    def narrow() -> None:
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + room, resource.RLIM_INFINITY))

    def work() -> str:
        torch.get_num_threads = lambda: 4  # for our machine code; PyTorch's own threads end the process
        return "right" if close(answer(), expected) else "another answer"

    outcome = limited(narrow, work)
    require(outcome in ("right", "MemoryError", "OSError ENOMEM"), f"with {room} bytes: {outcome}")
    return RIGHT if outcome == "right" else REFUSED


def threads(draw: random.Random, _: Path) -> str:
    """No thread can be started (RLIMIT_NPROC, as another user): the work is done all the same."""
    model = calls.model("cmanp")
    n = draw.choice((1, 100, 20_000))
    x, y, xt = calls.tensor(draw, 1, n, 2), calls.tensor(draw, 1, n, 2), calls.tensor(draw, 1, 3, 2)
    with torch.no_grad():
        expected = model.query(model.condition(x, y), xt).mean

    def alone() -> None:
        library.library()
        if os.geteuid() == 0:  # who has no such limit
            os.setuid(54_321)
        resource.setrlimit(resource.RLIMIT_NPROC, (1, 1))

    def work() -> str:
        torch.get_num_threads = lambda: 4  # for our machine code; PyTorch's own threads end the process
        q, k = calls.tensor(draw, 2, 64, 16), calls.tensor(draw, 1, 2, n, 16)
        from constmem import AttentionState

        one = AttentionState.observe(q, k, k)
        with torch.no_grad():
            found = model.query(model.condition(x, y), xt).mean
        return "right" if close(found, expected) and bool(one.lse.isfinite().all()) else "another answer"

    outcome = limited(alone, work)
    require(outcome == "right", f"without threads: {outcome}")
    return RIGHT


def room(draw: random.Random, folder: Path) -> str:
    """No room for a file (RLIMIT_FSIZE, a full disk, a folder nobody may write to): the old one stays."""
    how = draw.choice(("size", "full", "rights"))
    kinds = {"stream": lambda path: Stream(calls.model("cmanp")).save(path),
             "estimator": lambda path: shells.fitted(False, None).save(path),
             "bytes": lambda path: write_bytes(path, bytes(9000))}  # fmt: skip
    save = kinds[draw.choice(list(kinds))]
    place = folder / "place"
    place.mkdir()
    if how == "full" and not _mounted(place):
        how = "size"
    path = place / "file"
    try:
        path.write_bytes(b"old")
        if how == "rights":
            place.chmod(0o555)
            path.chmod(0o444)

        def narrow() -> None:
            if how == "size":
                resource.setrlimit(resource.RLIMIT_FSIZE, (500, 500))
            elif how == "full":
                with contextlib.suppress(OSError), (place / "filler").open("wb") as file:
                    file.write(bytes(2**20))
            elif os.geteuid() == 0:
                os.setuid(54_321)

        outcome = limited(narrow, lambda: save(path) or "saved")
        wanted = {"size": "OSError EFBIG", "full": "OSError ENOSPC", "rights": "OSError EACCES"}[how]
        require(outcome == wanted, f"{how}: {outcome}")
        require(path.read_bytes() == b"old", f"{how}: the old file has changed")
        left = {each.name for each in place.iterdir()} - {"file", "filler"}
        require(not left, f"{how}: left behind {left}")
    finally:
        place.chmod(0o755)
        if how == "full":
            subprocess.run(["umount", "-l", str(place)], check=False, capture_output=True)
    return REFUSED


def _mounted(place: Path) -> bool:
    """A small disk of its own, where this user may make one."""
    if not _may_mount():
        return False
    command = ["mount", "-t", "tmpfs", "-o", "size=32k", "tmpfs", str(place)]
    return subprocess.run(command, check=False, capture_output=True).returncode == 0


@cache
def _may_mount() -> bool:
    return os.geteuid() == 0


def kinds() -> dict[str, Case]:
    """Races and limits."""
    return {"threads on a stream": raced_stream, "threads on an estimator": raced_estimator,
            "little memory": memory,            "no threads": threads, "no room": room}  # fmt: skip

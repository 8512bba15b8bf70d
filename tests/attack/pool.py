"""Worker processes with a watchdog: a crash or a hang of one is an observation, not the end."""

import json
import mmap
import os
import random
import resource
import select
import shutil
import signal
import struct
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from .verdict import Finding

HANG = 5.0  # seconds of the processor's time; a loaded machine is no hang
STUCK = 90.0  # seconds on the wall: waiting for ever costs no processor time
ROOM = 6 * 2**30  # bytes that a worker may take beyond what it has
PIECE = 100  # cases handed out at once, at most; an eighth of a kind otherwise
CELL = struct.Struct("qqqdd")  # case now, right, refused, when it began: wall and processor
Case = Callable[[random.Random, Path], str]


@dataclass
class Tally:
    """What came of the cases of one kind."""

    tried: int = 0
    right: int = 0
    refused: int = 0
    findings: list[str] = field(default_factory=list)

    @property
    def held(self) -> int:
        return self.right + self.refused


@dataclass
class _Worker:
    pid: int
    read: int
    cell: mmap.mmap
    kind: str
    until: int
    text: bytes = b""


def run(cases: Mapping[str, tuple[Case, int]], *, seed: int, workers: int = 2) -> dict[str, Tally]:
    """Run so many cases of every kind; a case is the same for the same seed, in any order."""
    with tempfile.TemporaryDirectory(prefix="attack-", dir=scratch(), ignore_cleanup_errors=True) as folder:
        return _run(cases, seed, workers, Path(folder))


def _run(cases: Mapping[str, tuple[Case, int]], seed: int, workers: int, folder: Path) -> dict[str, Tally]:
    tallies = {kind: Tally() for kind in cases}
    waiting = []
    for kind, (_, count) in cases.items():
        piece = max(1, min(PIECE, count // 8))
        waiting += [(kind, first, min(first + piece, count)) for first in range(0, count, piece)]
    waiting.reverse()
    live: dict[int, _Worker] = {}
    while waiting or live:
        while waiting and len(live) < workers:
            kind, first, until = waiting.pop()
            worker = _start(cases[kind][0], kind, first, until, seed, folder)
            live[worker.read] = worker
        ready, _, _ = select.select(list(live), [], [], 0.25)
        for handle in ready:
            worker = live[handle]
            if block := os.read(handle, 2**16):
                worker.text += block
                continue
            del live[handle]
            os.close(handle)
            _, status = os.waitpid(worker.pid, 0)
            rest = _ended(worker, status, tallies[worker.kind])
            if rest is not None:
                waiting.append((worker.kind, rest, worker.until))
        for worker in list(live.values()):
            _watch(worker, tallies[worker.kind])
    return tallies


def _start(case: Case, kind: str, first: int, until: int, seed: int, folder: Path) -> _Worker:
    cell = mmap.mmap(-1, CELL.size)
    cell[:] = CELL.pack(first, 0, 0, time.monotonic(), 0.0)
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(read)
        _work(case, kind, first, until, seed, folder, cell, write)
    os.close(write)
    return _Worker(pid, read, cell, kind, until)


def _work(
    case: Case, kind: str, first: int, until: int, seed: int, folder: Path, cell: mmap.mmap, write: int
) -> None:
    """The life of a worker; never returns."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + ROOM, resource.RLIM_INFINITY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    silence = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(silence, stream)
    right = refused = 0
    for number in range(first, until):
        cell[:] = CELL.pack(number, right, refused, time.monotonic(), time.process_time())
        place = folder / f"{kind}-{number}"
        place.mkdir()
        os.chdir(place)  # what a case leaves in its working folder is gone with it
        try:
            outcome = case(random.Random(f"{seed} {kind} {number}"), place)
            right, refused = right + (outcome == "right"), refused + (outcome == "refused")
            if outcome not in ("right", "refused"):
                raise Finding(f"an outcome {outcome!r}")
        except BaseException as error:
            words = (
                str(error)
                if isinstance(error, Finding)
                else "".join(traceback.format_exception(error))[-1500:]
            )
            os.write(write, (json.dumps([number, words]) + "\n").encode())
        os.chdir(folder)
        shutil.rmtree(place, ignore_errors=True)
    cell[:] = CELL.pack(until, right, refused, time.monotonic(), time.process_time())
    os._exit(0)


def scratch() -> str | None:
    """A folder in memory, where there is one: most cases write a file."""
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


def _ended(worker: _Worker, status: int, tally: Tally) -> int | None:
    """Take what a worker has found; where it ended early, return the case to go on from."""
    number, right, refused, _, _ = CELL.unpack(worker.cell[:])
    tally.right, tally.refused = tally.right + right, tally.refused + refused
    found = [json.loads(line) for line in worker.text.decode().splitlines()]
    tally.findings += [f"{worker.kind} {i}: {words}" for i, words in found]
    tally.tried += right + refused + len(found)
    if number == worker.until and status == 0:
        return None
    if not os.WIFSIGNALED(status) or os.WTERMSIG(status) != signal.SIGKILL:
        tally.findings.append(f"{worker.kind} {number}: the process ended with status {status}")
    tally.tried += 1
    return number + 1 if number + 1 < worker.until else None


def _watch(worker: _Worker, tally: Tally) -> None:
    """Kill a worker that hangs, which is a finding."""
    number, _, _, began, before = CELL.unpack(worker.cell[:])
    wall = time.monotonic() - began
    if wall < HANG:
        return
    try:
        words = Path(f"/proc/{worker.pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return
    used = (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK") - before
    if used > HANG or wall > STUCK:
        tally.findings.append(f"{worker.kind} {number}: still busy after {used:.1f} of {wall:.1f} s")
        os.kill(worker.pid, signal.SIGKILL)
        worker.cell[:] = CELL.pack(number, *CELL.unpack(worker.cell[:])[1:3], time.monotonic() + 1e9, 0.0)


def again(cases: Mapping[str, tuple[Case, int]], kind: str, number: int, *, seed: int) -> str:
    """One case once more, in this process, to look at it."""
    folder = Path(tempfile.mkdtemp(prefix="attack-", dir=scratch()))
    print(f"in {folder}", file=sys.stderr)
    os.chdir(folder)
    return cases[kind][0](random.Random(f"{seed} {kind} {number}"), folder)


def as_json(tallies: Mapping[str, Tally], *, seconds: float) -> str:
    """The tallies and how long they took, as text."""
    rows = [
        {"kind": kind, "tried": t.tried, "right": t.right, "refused": t.refused, "findings": t.findings}
        for kind, t in tallies.items()
    ]
    return json.dumps({"seconds": round(seconds), "rows": rows})

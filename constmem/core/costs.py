"""What work costs: the memory it needs and what is free, and the time it takes, shown on the terminal."""

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol, runtime_checkable

import torch

if TYPE_CHECKING:
    from rich.console import Console


WORTH_ASKING = 2**28  # bytes below which free memory is not checked: small inputs should cost nothing
_CGROUPS = (
    (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")),
    (
        Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
        Path("/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ),
)


class Needs(NamedTuple):
    """Numbers that must be in memory at a model's worst moment, for each context point and each target."""

    point: int
    target: int

    def times(self, versions: int) -> "Needs":
        """As much for each of several versions of the data."""
        return Needs(self.point * versions, self.target * versions)


def available(device: torch.device) -> int | None:
    """Bytes free on a device, with what PyTorch has only cached there; None if that is not known."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    if device.type != "cpu":
        return None
    found = [left for left in (_of_machine(), *(_of_group(*files) for files in _CGROUPS)) if left is not None]
    return min(found, default=None)


class Peak:
    """The most bytes a GPU has held since this was made, beyond those it held then.

    Data and weights that are there already do not count. None where that is not counted: on a CPU.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self.before = device, 0
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            self.before = torch.cuda.memory_allocated(device)

    def __call__(self) -> int | None:
        """How many so far."""
        if self.device.type != "cuda":
            return None
        return torch.cuda.max_memory_allocated(self.device) - self.before


def require_room(needed: int, device: torch.device, what: str) -> None:
    """Refuse work that would need more than there is, saying how much of both.

    Nothing is checked while work is compiled or captured, and so not when that is run either: check before.

    Args:
        needed: bytes at the worst moment, as estimated.
        what: who would need them, and for what.
    """
    if needed < WORTH_ASKING or torch.compiler.is_compiling():
        return
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return
    free = available(device)
    if free is not None and needed > free:
        raise MemoryError(
            f"{what} would need about {needed / 1e9:,.1f} GB, but {device} has {free / 1e9:,.1f} GB free: "
            "take fewer points, a smaller batch or targets in smaller pieces (chunk=), or a model of "
            "constant memory such as CMANP"
        )


def _of_machine() -> int | None:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, AttributeError):  # not Linux, or not allowed to look
        return None


def _of_group(limit: Path, used: Path) -> int | None:
    try:
        return int(limit.read_text()) - int(used.read_text())
    except (OSError, ValueError):  # there is no such group, or no limit ("max")
        return None


@runtime_checkable
class Report(Protocol):
    """Called with how much is done and a few words on how it goes."""

    def __call__(self, done: int, words: str = "") -> None: ...


@contextmanager
def progress(title: str, total: int, *, every: float = 15.0) -> Iterator[Report]:
    """Show how many of `total` steps are done, how fast they go and how long the rest will take."""
    if sys.stderr.isatty():
        from rich.console import Console

        with _bar(title, total, Console(stderr=True)) as report:
            yield report
    else:
        yield _lines(title, total, every)


@contextmanager
def counted(title: str) -> Iterator[Callable[[int, int], None]]:
    """The same for work that says with every report how much there is: called with (done, total)."""
    with ExitStack() as stack:
        report: Report | None = None

        def count(done: int, total: int) -> None:
            nonlocal report
            report = report or stack.enter_context(progress(title, total))
            report(done)

        yield count


@contextmanager
def _bar(title: str, total: int, console: "Console") -> Iterator[Report]:
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=None),  # what the words leave
        TextColumn("{task.completed}/{task.total}"),
        TextColumn("{task.fields[pace]}"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        TextColumn("{task.fields[words]}"),
    )
    rate_at = _rate_since_the_first()
    with Progress(*columns, console=console) as bar:
        task = bar.add_task(title, total=total, words="", pace="")

        def report(done: int, words: str = "") -> None:
            bar.update(task, completed=done, words=words, pace=_pace(rate_at(done, time.monotonic())))

        yield report


def _lines(title: str, total: int, every: float) -> Report:
    last = time.monotonic()
    rate_at = _rate_since_the_first()

    def report(done: int, words: str = "") -> None:
        nonlocal last
        now = time.monotonic()
        rate = rate_at(done, now)
        if now - last < every and done < total:
            return
        last = now
        left = f", {(total - done) / rate:.0f} s left" if done < total and rate > 0 else ""
        speed = f"({_pace(rate)}{left}) " if rate > 0 else ""
        print(f"{title} {done}/{total} {speed}{words}".rstrip(), file=sys.stderr, flush=True)

    return report


def _rate_since_the_first() -> Callable[[int, float], float]:
    """From how much is done, and when, to steps a second; a resumed run does not start at nothing."""
    first: tuple[int, float] | None = None

    def rate(done: int, now: float) -> float:
        nonlocal first
        first = first or (done, now)
        return (done - first[0]) / max(now - first[1], 1e-9)

    return rate


def _pace(rate: float) -> str:
    """Steps a second in words, or seconds a step; nothing before there is any."""
    if rate <= 0:
        return ""
    return f"{rate:.1f}/s" if rate >= 0.1 else f"{1 / rate:.0f} s each"

"""How far a piece of work has come, on the terminal: a bar, or a line now and then."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    from rich.console import Console


@runtime_checkable
class Report(Protocol):
    """Called with how much is done and a few words on how it goes."""

    def __call__(self, done: int, words: str = "") -> None: ...


@contextmanager
def progress(title: str, total: int, *, every: float = 15.0) -> Iterator[Report]:
    """Show that `done` of `total` steps are behind us, how fast they go and how long the rest will take."""
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

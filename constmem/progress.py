"""Progress of long work: a bar on a terminal, now and then a plain line elsewhere."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol, runtime_checkable


@runtime_checkable
class Report(Protocol):
    """Called with how much is done and a few words on how it goes."""

    def __call__(self, done: int, words: str = "") -> None: ...


@contextmanager
def progress(title: str, total: int, *, every: float = 15.0) -> Iterator[Report]:
    """Show that `done` of `total` steps are behind us, how fast they go and how long the rest will take."""
    if sys.stderr.isatty():
        with _bar(title, total) as report:
            yield report
    else:
        yield _lines(title, total, every)


@contextmanager
def _bar(title: str, total: int) -> Iterator[Report]:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed}/{task.total}"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        TextColumn("{task.fields[words]}"),
    )
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(title, total=total, words="")
        yield lambda done, words="": bar.update(task, completed=done, words=words)


def _lines(title: str, total: int, every: float) -> Report:
    last = time.monotonic()
    first: tuple[int, float] | None = None  # how much was done when: a resumed run does not start at nothing

    def report(done: int, words: str = "") -> None:
        nonlocal last, first
        now = time.monotonic()
        first = first or (done, now)
        if now - last < every and done < total:
            return
        last = now
        rate = (done - first[0]) / max(now - first[1], 1e-9)
        left = f", {(total - done) / rate:.0f} s left" if done < total and rate > 0 else ""
        pace = f"{rate:.1f}/s" if rate >= 0.1 else f"{1 / max(rate, 1e-9):.0f} s each"
        speed = f"({pace}{left}) " if rate > 0 else ""
        print(f"{title} {done}/{total} {speed}{words}".rstrip(), file=sys.stderr, flush=True)

    return report

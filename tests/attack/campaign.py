"""All attacks by name, how many cases of each, and lines that can be broken on purpose."""

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import constmem.core.files as files
import constmem.streams.stream as stream
import constmem.tabular.base as tabular

from . import calls, given, kills, limits, packed, parts, pool, runs, shells, stored, stores
from .pool import Case, Tally

GROUPS: dict[str, tuple[Callable[[], dict[str, Case]], dict[str, tuple[int, int]]]] = {
    "damaged files of this library": (stored.kinds, {  # cases in the short form, and in the long one
        "states": (250, 26_000), "streams": (150, 9_000), "models": (150, 8_000), "estimators": (150, 9_000),
        "data of runs": (150, 9_000),
    }),
    "damaged files of users": (given.kinds, {
        "tables": (100, 8_000), "table files": (100, 6_000), "event files": (100, 6_000),
    }),
    "damaged packs and archives": (packed.kinds, {
        "packs": (60, 4_000), "archives": (60, 4_000),
    }),
    "calls": (calls.kinds, {
        "models of points": (80, 5_000), "models of events": (40, 2_500), "states and moments": (100, 5_000),
    }),
    "steps": (shells.kinds, {"calls of streams": (30, 1_500), "calls of estimators": (15, 600)}),
    "streams by key": (stores.kinds, {"calls of stores": (20, 1_500), "calls of pools": (30, 1_500)}),
    "parts": (parts.kinds, {"blocks": (60, 1_500), "scales": (40, 1_000), "rows of river": (20, 500)}),
    "runs and commands": (runs.kinds, {"runs": (15, 1_000), "commands": (6, 200)}),
    "kills": (kills.kinds, {
        "killed streams": (2, 110), "killed estimators": (2, 80), "killed updates": (1, 60),
        "killed training": (1, 30), "killed compiling": (1, 54),
    }),
    "races and limits": (limits.kinds, {
        "threads on a stream": (3, 60), "threads on an estimator": (2, 40), "little memory": (6, 60),
        "no threads": (2, 40), "no room": (4, 80),
    }),
}  # fmt: skip
SHORT, LONG = 0, 1


def _without_checksums() -> None:
    files._require_whole = lambda *_: None  # type: ignore[assignment]


def _without_renaming() -> None:
    def write(path: Any, content: bytes) -> Path:
        Path(path).write_bytes(content)
        return Path(path)

    files.write_bytes = write  # type: ignore[assignment]


def _without_locks() -> None:
    stream.Lock = nullcontext  # type: ignore[assignment,misc]
    tabular.RLock = nullcontext  # type: ignore[assignment,misc]


BROKEN = {"checksums": _without_checksums, "renaming": _without_renaming, "locks": _without_locks}


def counted(form: int, only: Mapping[str, int] | None = None) -> dict[str, tuple[Case, int]]:
    """The cases to run: all of one form, or so many of the kinds named."""
    made: dict[str, tuple[Case, int]] = {}
    for kinds, counts in GROUPS.values():
        wanted = {kind: count[form] for kind, count in counts.items()} if only is None else dict(only)
        if wanted.keys() & counts.keys():
            found = kinds()
            made |= {kind: (found[kind], count) for kind, count in wanted.items() if kind in found}
    return made


def run(
    form: int, *, seed: int = 0, only: Mapping[str, int] | None = None, workers: int = 2
) -> dict[str, Tally]:
    """Attack, in so many processes at once."""
    return pool.run(counted(form, only), seed=seed, workers=workers)


def group_of(kind: str) -> str:
    """The group that a kind of attack is listed under."""
    return next(name for name, (_, counts) in GROUPS.items() if kind in counts)

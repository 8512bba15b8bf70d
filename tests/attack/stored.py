"""Files of this library, damaged: states, streams, models, estimators and the data of runs."""

import random
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from . import damage, samples
from .pool import Case
from .samples import Sample
from .verdict import REFUSED, RIGHT, Refused, attempt, require, same

Samples = Callable[[], dict[str, Sample]]


def attack(collection: Samples) -> Case:
    """Damage one file of a collection: what is read must answer as before, or nothing is read."""
    found = cache(collection)
    expected = cache(lambda: {name: sample.expected() for name, sample in found().items()})
    expected()  # before workers are forked

    def case(draw: random.Random, folder: Path) -> str:
        name = draw.choice(list(found()))
        sample = found()[name]
        which = draw.choice(list(sample.files))
        before = sample.files[which]
        others = [content for other in found().values() for content in other.files.values()]
        binary = not which.endswith(".json")
        how = draw.choice(("bytes", "bytes", "bytes", "header", "sealed", "numbers")) if binary else "bytes"
        match how:
            case "bytes":
                content = damage.in_bytes(draw, before, others)
            case "header" | "sealed":
                content = damage.in_header(draw, before, sealed=how == "sealed")
            case _:
                content = damage.in_numbers(draw, before)
        for other, kept in sample.files.items():
            (folder / other).write_bytes(content if other == which else kept)
        expects = next(
            (expected()[n] for n, s in found().items() if content in s.files.values()), expected()[name]
        )
        outcome = judged(
            lambda: sample.read(folder), sample.answer, expects, exact=how in ("bytes", "header")
        )
        written = any(content in other.files.values() for other in found().values())
        require(outcome == REFUSED or how != "bytes" or not binary or written, "other bytes were read")
        return outcome

    return case


def judged(read: Callable[[], Any], answer: Callable[[Any], Any], expected: Any, *, exact: bool) -> str:
    """Read something and ask it; exact: a right answer is the one that was expected.

    A file with a checksum of its own that fits is a file that somebody wrote: it may answer otherwise.
    """
    made = attempt(read)
    if isinstance(made, Refused):
        return REFUSED
    given = attempt(lambda: answer(made))
    if isinstance(given, Refused):
        require(not exact, f"was read, but refuses to answer: {given.error!r}")
        return REFUSED
    require(not exact or same(given, expected), "was read without a word, and answers otherwise")
    return RIGHT


def kinds() -> dict[str, Case]:
    """The attacks on files of this library."""
    return {
        "states": attack(samples.states),
        "streams": attack(samples.streams),
        "models": attack(samples.models),
        "estimators": attack(samples.estimators),
        "data of runs": attack(samples.own_data),
    }

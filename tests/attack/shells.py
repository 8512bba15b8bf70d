"""What changes: streams and estimators, led through random steps beside plain references."""

import random
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from constmem import Decay, Stream, StreamingClassifier, StreamingRegressor, Window
from tests.laws import models as made

from . import calls, samples
from .pool import Case
from .verdict import REFUSED, RIGHT, Refused, attempt, close, require, same

FORGETS = (None, None, Decay(4), Window(6, 3))


def streams(draw: random.Random, folder: Path) -> str:
    """Observe, predict, save and load, fork: beside a list of all points and what of it should count."""
    name = draw.choice(("cmanp", "cnp", "lbanp", "tnpd"))
    forget = draw.choice(FORGETS)
    if isinstance(forget, Decay) and name in ("lbanp", "tnpd"):
        forget = None
    model = calls.model(name)
    stream = Stream(model, forget=forget)
    x, y = torch.zeros(1, 0, 2, dtype=torch.float64), torch.zeros(1, 0, 2, dtype=torch.float64)
    outcome = RIGHT
    for _ in range(draw.randint(1, 5)):
        n = draw.randint(0, 5)
        dx, dy = calls.tensor(draw, 1, n, 2), calls.tensor(draw, 1, n, 2)
        wrong = draw.random() < 0.3
        given: list[Any] = [dx, dy]
        if wrong:
            which = draw.randrange(2)
            given[which] = calls.spoiled(draw, given[which])
        elif draw.random() < 0.3:
            given = [t[0].numpy() if draw.random() < 0.5 else t[0].tolist() for t in given] if n else given
        before = stream.count.item()
        chunk = draw.choice(calls.SIZES[:6])
        done = attempt(partial(stream.observe, *given, chunk=chunk))
        if isinstance(done, Refused):
            require(wrong, f"refused what is right: {done.error!r}")
            require(stream.count.item() == before, "an observation that was refused has changed the stream")
            outcome = REFUSED
        elif wrong:
            xt = calls.tensor(draw, 1, 2, 2)
            require(bool(stream.predict(xt).mean.isfinite().all()), "answers what is not finite")
            return RIGHT
        else:
            x, y = torch.cat([x, dx], 1), torch.cat([y, dy], 1)
        if draw.random() < 0.3:
            stream.save(folder / "stream")
            stream = Stream.load(folder / "stream", model)
        if draw.random() < 0.2:
            stream.fork().observe(calls.tensor(draw, 1, 1, 2), calls.tensor(draw, 1, 1, 2))
    xt = calls.tensor(draw, 1, 3, 2)
    found = stream.predict(xt)
    if isinstance(forget, Window):  # buckets of two: whole ones are let go
        n = x.shape[1]
        start = max(0, (n - forget.points + forget.bucket - 1) // forget.bucket * forget.bucket) if n else 0
        require(
            n - start - forget.bucket <= stream.count.item() <= forget.points + forget.bucket,
            "another window",
        )
        kept = n - int(stream.count)
        x, y = x[:, kept:], y[:, kept:]
    with torch.no_grad():
        if isinstance(forget, Decay):
            ages = torch.arange(x.shape[1] - 1, -1, -1, dtype=torch.float64)[None]
            state = model.observe(x, y, log_weight=-forget.rate * ages) if x.shape[1] else model.empty(1)
        else:
            state = model.condition(x, y) if x.shape[1] else model.empty(1)
        expected = model.query(state, xt)
    require(close(found.mean, expected.mean), f"{name} {forget}: answers otherwise than all points at once")
    return outcome


@cache
def fitted(discrete: bool, forget: Any) -> Any:
    """An estimator with frozen columns and no rows yet."""
    x, y, labels = samples.rows(80)
    kind: Any = StreamingClassifier if discrete else StreamingRegressor
    return kind(size=24, forget=forget).fit(x, labels if discrete else y)


def estimators(draw: random.Random, folder: Path) -> str:
    """Learn in pieces, merge, remove, save and load: beside all rows learned at once, in one order."""
    discrete, forget = draw.random() < 0.5, draw.choice((None, None, None, 20.0))
    base = fitted(discrete, forget)
    n = draw.randint(1, 30)
    x, y, labels = samples.rows(n, seed=draw.randrange(2**31))
    targets = labels if discrete else y
    query = samples.rows(3, seed=1)[0]
    if draw.random() < 0.4:
        return _wrong(draw, base, x, targets)
    expected = base.spawn().partial_fit(x, targets)
    cut = draw.randint(0, n)
    parts = [({k: v[at] for k, v in x.items()}, targets[at]) for at in (slice(0, cut), slice(cut, n))]
    parts = [part for part in parts if len(part[1])]
    how = draw.choice(("pieces", "merge", "remove", "save"))
    found = base.spawn()
    if forget is None and how == "merge":
        for part in parts:
            found = (
                base.spawn().partial_fit(*part).merge(found)
                if found.learner_.seen
                else base.spawn().partial_fit(*part)
            )
    else:
        for part in parts:
            found.partial_fit(*part)
    if forget is None and how == "remove":
        more, more_y, more_labels = samples.rows(4, seed=draw.randrange(2**31))
        extra = more_labels if discrete else more_y
        found.partial_fit(more, extra).remove(more, extra)
    if how == "save":
        before = _answer(found, query)
        found.save(folder / "estimator")
        found = type(found).load(folder / "estimator")
        require(same(_answer(found, query), before), "answers otherwise after saving and loading")
    require(
        close(_answer(found, query), _answer(expected, query), 1e-4),
        f"{how}: answers otherwise than all rows at once",
    )
    return RIGHT


def _answer(estimator: Any, query: Any) -> Any:
    return (
        estimator.predict_proba(query)
        if isinstance(estimator, StreamingClassifier)
        else estimator.predict(query)
    )


ODD_TABLES: tuple[Any, ...] = (
    None, "x", 3, [], [[]], [1.0, 2.0], [[1.0, "a"], [2.0]], np.zeros((2, 2, 2)), np.zeros((0, 3)),
    {"a": [1.0]},
    {"a": [1.0], "b": [2.0, 3.0], "word": ["red"]}, {"a": [1j], "b": [1.0], "word": ["red"]}, object(), {},
    {"a": [float("inf")], "b": [1.0], "word": ["red"]}, {"a": ["x"], "b": [1.0], "word": ["red"]},
    {"a": [1e308], "b": [-1e308], "word": [None]}, {"a": [None], "b": [None], "word": [None]},
    {"a": [1.0], "b": [1.0], "word": [7]}, {"a": [[1.0]], "b": [1.0], "word": ["red"]}, {1: [1.0],
    2: [1.0], 3: ["a"]},
)  # fmt: skip
ODD_TARGETS: tuple[Any, ...] = (
    None, "x", 3, [], [None], [float("nan")], [float("inf")], [1e308], [[1.0, 2.0]], ["a"], [1j],
    [[["a"]]], [object()],
    [b"a"], [True], [2**70], [[1.0]], np.zeros(3),
)  # fmt: skip


def _wrong(draw: random.Random, base: Any, x: Any, y: Any) -> str:
    """Rows or targets that are none: refused, with the estimator as it was, or answered in finite numbers."""
    which = draw.randrange(3)
    one = {name: column[:1] for name, column in x.items()}
    given = draw.choice(ODD_TABLES) if which != 1 else one, draw.choice(ODD_TARGETS) if which != 0 else y[:1]
    estimator = base.spawn().partial_fit(x, y)
    before = _answer(estimator, one)
    how = draw.choice(("partial_fit", "predict", "remove", "fit"))
    if how == "fit":
        estimator = type(base)(size=24)
    work = {"partial_fit": lambda: estimator.partial_fit(*given),
            "predict": lambda: _answer(estimator, given[0]),
            "remove": lambda: estimator.remove(*given),
            "fit": lambda: estimator.fit(*given)}[how]  # fmt: skip
    done = attempt(work)
    if isinstance(done, Refused):
        if how != "fit":
            require(
                close(_answer(estimator, one), before), f"{how} was refused and has changed the estimator"
            )
        return REFUSED
    answer = attempt(lambda: _answer(estimator, one if how != "fit" else given[0]))
    require(
        isinstance(answer, Refused) or bool(np.isfinite(answer).all()),
        f"{how} of {given!r}: answers are not finite",
    )
    return RIGHT


def kinds() -> dict[str, Case]:
    """The attacks on what changes."""
    for discrete in (False, True):
        for forget in (None, 20.0):
            fitted(discrete, forget)
    for name in ("cmanp", "cnp", "lbanp", "tnpd"):
        made.small(name)
    return {"calls of streams": streams, "calls of estimators": estimators}

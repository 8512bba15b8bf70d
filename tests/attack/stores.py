"""Stores and pools of streams, led through random steps beside lists of rows; any step may be the last."""

import random
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from constmem import Store, StreamPool
from tests.laws import models as made

from . import calls
from .pool import Case
from .verdict import REFUSED, RIGHT, Refused, attempt, close, require, same

NAMES = (
    "ann",
    "bob",
    "ann/1",
    "Ünï",
    "7",
    "",
    "x" * 2000,
    7,
    -(2**63),
    2**70,
    1.5,
    None,
    b"ann",
    True,
    "\0",
    "\ud800",
)
GOOD = 4  # of them, which are used most
ODD_PLACES = (None, -1, 2**70, 1.5, True, "a", "", "x" * 5000, [1])
Rows = dict[Any, list[tuple[Tensor, Tensor]]]


def _expected(model: Any, rows: list[tuple[Tensor, Tensor]]) -> Any:
    if not rows:
        return model.empty(1)
    x, y = (torch.stack(part)[None] for part in zip(*rows, strict=True))
    with torch.no_grad():
        return model.condition(x, y)


def _require_all(held: Any, model: Any, rows: Rows, what: str) -> None:
    """Every stream has seen its rows, and answers as all of them at once."""
    names = [*rows]
    require(len(held) == len(names), f"{what}: {len(held)} streams, not {len(names)}")
    if not names:
        return
    counts = held.state(names).count.tolist()
    require(counts == [len(rows[name]) for name in names], f"{what}: streams have seen {counts} rows")
    xt = torch.linspace(-1, 1, 4, dtype=torch.float64).reshape(1, 2, 2)
    found = held.predict(names, xt.expand(len(names), -1, -1)).mean
    with torch.no_grad():
        expected = torch.cat([model.query(_expected(model, rows[name]), xt).mean for name in names])
    require(close(found, expected), f"{what}: answers otherwise than all rows at once")


def _observed(draw: random.Random, held: Any, rows: Rows, **place: Any) -> tuple[Any, bool]:
    """Rows of some streams, right or wrong; what came of it, and whether it had to be refused or may be."""
    n = draw.randint(1, 6)
    wrong = draw.random() < 0.3
    names = [draw.choice(NAMES if wrong else NAMES[:GOOD]) for _ in range(n)]
    x, y = calls.tensor(draw, n, 2), calls.tensor(draw, n, 2)
    given: list[Any] = [names, x, y]
    if wrong:
        which = draw.randrange(3)
        given[which] = names[: draw.randint(0, n)] if which == 0 else calls.spoiled(draw, given[which])
    done = attempt(partial(held.observe, *given, **place))
    if not isinstance(done, Refused) and done is not False and not wrong:
        for name, *row in zip(names, x, y, strict=True):
            rows.setdefault(name, []).append((row[0], row[1]))
    return done, wrong


def stores(draw: random.Random, folder: Path) -> str:
    """Observe, create, fork, merge, delete, end the process, open again: beside lists of rows."""
    model, path, rows, outcome = made.small("cmanp"), folder / "store", {}, RIGHT
    store, place = Store(path, model, memory=draw.choice((1, 2**20))), 0
    for _ in range(draw.randint(2, 9)):
        before = {name: store.state([name]) for name in rows}
        match draw.choice(("observe", "observe", "observe", "again", "odd place", "fork", "merge", "delete",
                           "create", "end", "end")):  # fmt: skip
            case "observe":
                done, wrong = _observed(draw, store, rows, source="s", position=place + 1)
                if wrong and not isinstance(done, Refused):
                    _finite(store)
                    store.close()
                    return RIGHT
                place += not isinstance(done, Refused)
            case "again":  # rows whose position was taken
                done, wrong = _observed(draw, store, rows, source="s", position=place)
                wrong = wrong or place == 0
                if not isinstance(done, Refused) and place:
                    require(done is False, "takes rows a second time")
                elif not isinstance(done, Refused):
                    store.close()
                    return RIGHT
            case "odd place":
                odd = draw.choice(ODD_PLACES)
                row = ["ann"], calls.tensor(draw, 1, 2), calls.tensor(draw, 1, 2)
                done, wrong = attempt(partial(store.observe, *row, source="odd", position=odd)), True
                if not isinstance(done, Refused):
                    if done:
                        rows.setdefault("ann", []).append((row[1][0], row[2][0]))
                    wrong = False
            case "fork":
                one, to = draw.choice(NAMES), draw.choice(NAMES)
                done, wrong = attempt(partial(store.fork, one, to)), one not in rows or to in rows
                wrong = wrong or to not in NAMES[:GOOD]
                if not isinstance(done, Refused):
                    rows[to] = [*rows[one]]
            case "merge":
                one, other = draw.choice(NAMES), draw.choice(NAMES)
                done = attempt(partial(store.merge, one, other))
                wrong = one not in rows or other not in rows or one == other
                if not isinstance(done, Refused):
                    rows[one] = rows[one] + rows[other]
            case "delete":
                gone = [draw.choice(NAMES) for _ in range(draw.randint(0, 2))]
                done, wrong = attempt(partial(store.delete, gone)), not {*gone} <= {*NAMES[:GOOD]}
                if not isinstance(done, Refused):
                    for name in gone:
                        rows.pop(name, None)
            case "create":
                new = draw.choice(NAMES)
                done, wrong = attempt(partial(store.create, [new])), new in rows or new not in NAMES[:GOOD]
                if not isinstance(done, Refused):
                    rows[new] = []
            case _:
                store._database.close() if draw.random() < 0.7 else store.close()  # as if killed
                store = Store(path, model, memory=draw.choice((1, 2**20)))
                done, wrong = None, False
                for name, state in before.items():
                    require(same(store.state([name]).tensors(), state.tensors()), "other bits after opening")
        if isinstance(done, Refused):
            require(wrong, f"refused what is right: {done.error!r}")
            outcome = REFUSED
            for name, state in before.items():
                require(same(store.state([name]).tensors(), state.tensors()), "refused, and changed a stream")
    _require_all(store, model, rows, "a store")
    store.check()
    store.close()
    return outcome


def pools(draw: random.Random, folder: Path) -> str:
    """Observe, pop, put, merge, save and load: beside lists of rows."""
    model, rows, outcome = made.small(draw.choice(("cmanp", "cnp"))), {}, RIGHT
    pool = StreamPool(model)
    for _ in range(draw.randint(2, 7)):
        match draw.choice(("observe", "observe", "pop", "merge", "load")):
            case "observe":
                before = {name: pool.state([name]) for name in rows}
                done, wrong = _observed(draw, pool, rows)
                if isinstance(done, Refused):
                    require(wrong, f"refused what is right: {done.error!r}")
                    require(len(pool) == len(rows), "refused, and there are other streams")
                    for name, state in before.items():
                        require(same(pool.state([name]).tensors(), state.tensors()), "refused, and changed")
                    outcome = REFUSED
                elif wrong:
                    _finite(pool)
                    return RIGHT
            case "pop" if rows:
                name = draw.choice([*rows])
                state = pool.pop([name])
                require(name not in pool, "is there after it was taken out")
                if draw.random() < 0.5:
                    pool.put([name], state)
                else:
                    del rows[name]
            case "merge":
                other, more = StreamPool(model), {}
                if isinstance(_observed(draw, other, more)[0], Refused) or len(other) != len(more):
                    continue
                pool.merge(other)
                for name, own in more.items():
                    rows[name] = rows.get(name, []) + own
            case "load":
                pool.save(folder / "pool")
                pool = StreamPool.load(folder / "pool", model)
    _require_all(pool, model, rows, "a pool")
    return outcome


def _finite(held: Any) -> None:
    """What took something odd answers in finite numbers."""
    names = [name for name in NAMES[:GOOD] if name in held]
    if names:
        found = held.predict(names, torch.zeros(len(names), 1, 2, dtype=torch.float64)).mean
        require(bool(found.isfinite().all()), "answers what is not finite")


def kinds() -> dict[str, Case]:
    """The attacks on streams by key."""
    for name in ("cmanp", "cnp"):
        made.small(name)
    return {"calls of stores": stores, "calls of pools": pools}

"""Public calls with every kind of argument, right and wrong, beside references that are slow and plain."""

import random
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from constmem import AttentionState
from constmem.core.moments import Moments
from constmem.neural_processes import MODELS as POINT_MODELS
from constmem.point_processes import MODELS as EVENT_MODELS
from tests.laws import models as made

from .pool import Case
from .verdict import REFUSED, RIGHT, Refused, attempt, close, require

HUGE = (float("nan"), float("inf"), -float("inf"), 1e30, -1e160, 1e308)
NO_TENSORS: tuple[Any, ...] = (None, "x", 3, [[1.0]], np.ones((2, 3, 2)), {"a": 1}, object(), 2.5, (), True)
SIZES: tuple[Any, ...] = (1, 2, 3, 7, 4096, 10**9, 0, -1, True, 2.0, "3", None)


@cache
def model(name: str) -> Any:
    """A small model, built once in each process."""
    return made.small(name)


def tensor(draw: random.Random, *shape: int) -> Tensor:
    """Normal numbers in float64."""
    return torch.randn(
        *shape, generator=torch.Generator().manual_seed(draw.randrange(2**40)), dtype=torch.float64
    )


def spoiled(draw: random.Random, given: Tensor) -> Any:
    """A tensor made into something that a caller may hand in by mistake."""
    match draw.randrange(12):
        case 0:
            return draw.choice(NO_TENSORS)
        case 1:
            return given.to(draw.choice((torch.int64, torch.bool, torch.complex64, torch.int8)))
        case 2:
            return given[draw.choice((slice(0, 0), slice(0, 1), ..., 0 if len(given) else ...))]
        case 3:
            return given[..., None] if draw.random() < 0.5 else given[None]
        case 4:
            return torch.cat([given, given], draw.randrange(given.ndim))
        case 5:
            return given.to_sparse() if draw.random() < 0.5 else given.to("meta")
        case 6 | 7 | 8 if given.numel() and given.is_floating_point():
            spoilt = given.clone()
            spoilt.view(-1)[draw.randrange(given.numel())] = draw.choice(HUGE)
            return spoilt
        case 9:
            return given.mT if given.ndim > 1 else given[:, None]
        case 10:
            return given.requires_grad_() if given.is_floating_point() else given
        case _:
            return given.to(draw.choice((torch.float16, torch.bfloat16, torch.float32)))


def some_mask(draw: random.Random, b: int, n: int) -> Tensor:
    return torch.tensor(
        [[draw.random() < 0.7 for _ in range(n)] for _ in range(b)], dtype=torch.bool
    ).reshape(b, n)


def points(draw: random.Random, _: Path) -> str:
    """Conditioning, updating, merging and querying a model of points in pieces, beside all at once."""
    of = model(draw.choice(list(POINT_MODELS)))
    b, n, m = draw.randint(1, 3), draw.randint(0, 9), draw.randint(0, 4)
    x, y, xt = tensor(draw, b, n, 2), tensor(draw, b, n, 2), tensor(draw, b, m, 2)
    mask = some_mask(draw, b, n) if draw.random() < 0.4 else None
    cut, chunk = draw.randint(0, n), draw.choice(SIZES[:6])
    keep = torch.ones(b, n, dtype=torch.bool) if mask is None else mask
    expected = []
    with torch.no_grad():
        for k in range(b):  # one task after another, and only the points that count
            state = (
                of.condition(x[k : k + 1, keep[k]], y[k : k + 1, keep[k]])
                if bool(keep[k].any())
                else of.empty(1)
            )
            expected.append(of.query(state, xt[k : k + 1]))
    given: dict[str, Any] = {"x": x, "y": y, "xt": xt, "mask": mask, "chunk": chunk}
    wrong = draw.random() < 0.6
    if wrong:
        name = draw.choice(list(given))
        given[name] = (
            draw.choice(SIZES)
            if name == "chunk"
            else spoiled(draw, given[name] if mask is not None or name != "mask" else keep)
        )
    parts = _halves(given["x"], cut), _halves(given["y"], cut), _halves(given["mask"], cut)

    how = draw.choice(("condition", "update", "merge", "chunks", "forward"))

    def work() -> Any:
        if how == "condition" or (wrong and draw.random() < 0.5):
            state = of.condition(given["x"], given["y"], mask=given["mask"], chunk=given["chunk"])
        elif how == "forward":
            return of(given["x"], given["y"], given["xt"], given["mask"], given["chunk"])
        else:
            (x1, x2), (y1, y2), (m1, m2) = parts
            first = of.condition(x1, y1, mask=m1, chunk=given["chunk"])
            if how == "update":
                state = of.update(first, x2, y2, mask=m2, chunk=given["chunk"])
            elif how == "merge":
                state = of.condition(x2, y2, mask=m2).merge(first)
            else:
                state = of.condition_chunks([(x2, y2, m2)], initial=first)
        return of.query(state, given["xt"], chunk=given["chunk"])

    with torch.set_grad_enabled(draw.random() < 0.3):
        found = attempt(work)
    if isinstance(found, Refused):
        require(wrong, f"refused what is right: {found.error!r}")
        return REFUSED
    if not wrong:
        means = torch.cat([each.mean for each in expected])
        require(close(found.mean, means), f"{of.name} answers otherwise than all points at once")
        require(
            close(found.stddev, torch.cat([each.stddev for each in expected])), f"{of.name}: another spread"
        )
    elif how != "forward":  # which is for training, and looks at no values
        require(bool(found.mean.isfinite().all()), f"{of.name} took {name} and answers what is not finite")
    return RIGHT


def _halves(given: Any, cut: int) -> tuple[Any, Any]:
    if not isinstance(given, Tensor) or given.ndim < 2 or given.layout is not torch.strided:
        return given, given
    return given[:, :cut], given[:, cut:]


def events(draw: random.Random, _: Path) -> str:
    """Conditioning, updating and merging a model of events, in pieces, beside all events at once."""
    of = model(draw.choice(list(EVENT_MODELS)))
    b, n = draw.randint(1, 3), draw.randint(1, 7)
    whole = made.stream(*[n] * b, seed=draw.randrange(2**31))
    cut, chunk = draw.randint(0, n), draw.choice(SIZES[:6])
    with torch.no_grad():
        expected = of.query(of.condition(whole))
    given: dict[str, Any] = {"times": whole.times[:, cut:], "marks": whole.marks[:, cut:], "chunk": chunk}
    wrong = draw.random() < 0.6
    if wrong:
        name = draw.choice(list(given))
        given[name] = draw.choice(SIZES) if name == "chunk" else spoiled(draw, given[name])

    def work() -> Any:
        first = of.condition(whole.window(0, cut), chunk=chunk)
        if not wrong and draw.random() < 0.3 and of.name != "gru":  # whose states cannot merge
            later = of.observe(whole.window(cut, n), start=whole.t_start, chunk=chunk)
            return of.query(first.merge(later))
        return of.query(of.update(first, given["times"], given["marks"], chunk=given["chunk"]))

    with torch.set_grad_enabled(draw.random() < 0.3):
        found = attempt(work)
    if isinstance(found, Refused):
        require(wrong, f"refused what is right: {found.error!r}")
        return REFUSED
    if not wrong:
        require(
            close(found.mean.log(), expected.mean.log(), 1e-5),
            f"{of.name} answers otherwise than all at once",
        )
    else:
        require(bool(found.mean.isfinite().all()), f"{of.name} took {name} and answers what is not finite")
    return RIGHT


def algebra(draw: random.Random, _: Path) -> str:
    """Slots and moments: observe, merge, remove, decay, beside NumPy in float64."""
    return (_slots if draw.random() < 0.6 else _moments)(draw)


def _slots(draw: random.Random) -> str:
    b, h, s, c, n = (draw.randint(1, 3) for _ in range(5))
    n = draw.randint(0, 8)
    sharp = draw.choice((1.0, 30.0, 1e4))
    q, k, v = sharp * tensor(draw, h, s, c), tensor(draw, b, h, n, c), tensor(draw, b, h, n, c)
    weight = tensor(draw, b, n) if draw.random() < 0.5 else None
    cut = draw.randint(0, n)
    given: dict[str, Any] = {"q": q, "k": k, "v": v, "log_weight": weight}
    wrong = draw.random() < 0.4
    if wrong:
        name = draw.choice(("q", "k", "v"))
        given[name] = spoiled(draw, given[name])

    def work() -> Any:
        if wrong:
            return AttentionState.observe(**given)
        weights = torch.zeros(b, n, dtype=torch.float64) if weight is None else weight
        parts = [AttentionState.observe(q, k[..., at, :], v[..., at, :], log_weight=weights[:, at])
                 for at in (slice(0, cut), slice(cut, n))]  # fmt: skip
        shift = draw.choice((0.0, -2.0, 3.0))
        return parts[0].merge(parts[1]).decay(shift).decay(-shift)

    found = attempt(work)
    if isinstance(found, Refused):
        require(wrong, f"refused what is right: {found.error!r}")
        return REFUSED
    if not wrong and n:
        scores = np.einsum("hsc,bhnc->bhsn", q.numpy(), k.numpy())
        scores = scores + (0.0 if weight is None else weight.numpy()[:, None, None])
        top = scores.max(-1, keepdims=True)
        shares = np.exp(scores - top)
        require(close(found.lse, (np.log(shares.sum(-1)) + top[..., 0])), "another normaliser than NumPy's")
        value = np.einsum("bhsn,bhnc->bhsc", shares / shares.sum(-1, keepdims=True), v.numpy())
        require(close(found.value, value), "another value than NumPy's")
        require(found.count.tolist() == [n] * b, "another count")
    return RIGHT


def _moments(draw: random.Random) -> str:
    n, p, k = draw.randint(0, 9), draw.randint(1, 5), draw.randint(1, 2)
    phi, y = tensor(draw, n, p), tensor(draw, n, k)
    weight = tensor(draw, n).abs() if draw.random() < 0.5 else None
    cut, factor = draw.randint(0, n), draw.choice((1.0, 0.5, 0.0, -1.0, 2.0, float("nan")))
    given: dict[str, Any] = {"phi": phi, "y": y, "weight": weight}
    wrong = draw.random() < 0.4
    if wrong:
        name = draw.choice(("phi", "y"))
        given[name] = spoiled(draw, given[name])

    def work() -> Any:
        if wrong:
            return Moments.observe(**given).decay(factor)
        one, two = (
            Moments.observe(phi[at], y[at], None if weight is None else weight[at])
            for at in (slice(0, cut), slice(cut, n))
        )
        both = two.merge(one)
        return both.remove(one).merge(one) if draw.random() < 0.5 else both

    found = attempt(work)
    if isinstance(found, Refused):
        require(wrong, f"refused what is right: {found.error!r}")
        return REFUSED
    if not wrong:
        w = np.ones(n) if weight is None else weight.numpy()
        f, t = phi.numpy(), y.numpy()
        require(close(found.gram, (f * w[:, None]).T @ f), "another Gram matrix than NumPy's")
        require(close(found.cross, (f * w[:, None]).T @ t), "other cross moments than NumPy's")
        require(close(found.square, (t**2 * w[:, None]).sum(0)), "other squares than NumPy's")
        require(close(found.count, w.sum()), "another count")
    return RIGHT


def kinds() -> dict[str, Case]:
    """The attacks on models and states."""
    for name in (*POINT_MODELS, *EVENT_MODELS):
        model(name)
    return {"models of points": points, "models of events": events, "states and moments": algebra}

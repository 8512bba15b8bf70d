"""What stands alone: one block, the scales of data, and the estimators with river's verbs."""

import random
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from constmem import CMAB, Scales, StreamingClassifier, StreamingRegressor
from constmem.integrations.river import StreamingRiverClassifier, StreamingRiverRegressor
from tests.core.in_numpy import array, written_out

from . import calls, samples
from .pool import Case
from .verdict import REFUSED, RIGHT, Refused, attempt, close, require

DIM = 6


@cache
def _block(residual: Any) -> CMAB:
    """A small block away from the ones and zeros that parameters start from."""
    block = CMAB(dim=DIM, num_slots=3, num_heads=2, hidden=5, residual=residual).double()
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return block


def blocks(draw: random.Random, _: Path) -> str:
    """Observe in two parts, merge and read, beside the block written out in NumPy."""
    residual = draw.choice(("normed", "raw"))
    block = _block(residual)
    b, n, k = draw.randint(1, 3), draw.randint(1, 6), draw.randint(1, 3)
    latents, tokens = calls.tensor(draw, b, k, DIM), calls.tensor(draw, b, n, DIM)
    cut = draw.randint(0, n)
    given: dict[str, Any] = {"tokens": tokens, "latents": latents}
    wrong = draw.random() < 0.5
    if wrong:
        name = draw.choice(list(given))
        given[name] = calls.spoiled(draw, given[name])

    def work() -> Any:
        if wrong:
            return block.read(block.observe(given["tokens"]), given["latents"])
        return block.read(block.observe(tokens[:, cut:]).merge(block.observe(tokens[:, :cut])), latents)

    with torch.set_grad_enabled(draw.random() < 0.3):
        found = attempt(work)
    if isinstance(found, Refused):
        require(wrong, f"refused what is right: {found.error!r}")
        return REFUSED
    if not wrong:
        raw = residual == "raw"
        expected = [written_out(block.stack, 0, array(latents[i]), array(tokens[i]), raw) for i in range(b)]
        require(close(found, np.stack(expected)), "another block than NumPy's")
    return RIGHT


def scales(draw: random.Random, _: Path) -> str:
    """Scales of rows, and a model that takes and predicts data in them, beside NumPy and the plain model."""
    n, m = draw.randint(2, 9), draw.randint(0, 3)
    size = 10.0 ** draw.randint(-6, 6)
    shift = size * 10.0 ** draw.randint(-3, 5)  # leaves float64 ten digits of every deviation
    x, y = size * calls.tensor(draw, n, 2) + shift, calls.tensor(draw, n, 2) / size
    given: list[Any] = [x, y]
    wrong = draw.random() < 0.5
    if wrong:
        which = draw.randrange(2)
        given[which] = calls.spoiled(draw, given[which])
    model = calls.model("cmanp")
    xt = size * calls.tensor(draw, 1, m, 2) + shift

    def work() -> Any:
        found = Scales.of(*given)
        if wrong:
            return found, found((given[0][None], given[1][None], None))
        model.set_scales(found)
        try:
            with torch.no_grad():
                return found, model.query(model.condition(x[None], y[None]), xt)
        finally:
            model.set_scales(None)

    done = attempt(work)
    if isinstance(done, Refused):
        require(wrong, f"refused what is right: {done.error!r}")
        return REFUSED
    found, answer = done
    numbers = [getattr(found, name) for name in ("x_mean", "x_std", "y_mean", "y_std")]
    require(all(bool(t.isfinite().all()) for t in numbers), "scales that are not finite")
    if not wrong:
        rows = x.numpy(), y.numpy()
        means, stds = zip(*((np.mean(t, 0), np.std(t, 0)) for t in rows), strict=True)
        for part, expected in zip(numbers, (means[0], stds[0], means[1], stds[1]), strict=True):
            require(np.allclose(part.numpy(), expected, rtol=1e-9), "other scales than NumPy's")
        own = [torch.from_numpy((t - c) / s) for t, c, s in zip(rows, means, stds, strict=True)]
        with torch.no_grad():
            target = (xt - torch.from_numpy(means[0])) / torch.from_numpy(stds[0])
            plain = model.query(model.condition(own[0][None], own[1][None]), target)
        for part, expected in (
            (answer.mean, plain.mean.numpy() * stds[1] + means[1]),
            (answer.stddev, plain.stddev.numpy() * stds[1]),
        ):
            require(bool(np.allclose(part, expected, rtol=1e-4, atol=1e-4 * stds[1].max())), "other units")
    return RIGHT


ODD: tuple[Any, ...] = (
    float("nan"), float("inf"), 1e308, "red", "", None, True, b"a", 1j, [1.0], {}, object(), 2**70,
    np.float32(1),
)  # fmt: skip


def river(draw: random.Random, _: Path) -> str:
    """Rows as dictionaries, one at a time, beside the estimator that is given them as one table."""
    discrete = draw.random() < 0.5
    size = {"size": 24, "warmup": 8}
    made: Any = (StreamingRiverClassifier if discrete else StreamingRiverRegressor)(**size)
    n = draw.randint(1, 14)
    columns, y, labels = samples.rows(n, seed=draw.randrange(2**31))
    names = ["a", "b"] if draw.random() < 0.5 else list(columns)
    targets: list[Any] = (labels if discrete else y).tolist()
    rows: list[dict[Any, Any]] = [{name: columns[name][i] for name in names} for i in range(n)]
    wrong = draw.random() < 0.5
    if wrong:
        at = draw.randrange(n)
        if draw.random() < 0.7:
            rows[at][draw.choice((*names, "more", 3))] = draw.choice(ODD)
        else:
            targets[at] = draw.choice(ODD)
    learned = []
    refused = False
    for row, target in zip(rows, targets, strict=True):
        before = dict(row)
        done = attempt(lambda row=row, target=target: made.learn_one(row, target))
        require(str(row) == str(before), "a row that was learned has changed")
        if isinstance(done, Refused):
            require(wrong, f"refused what is right: {done.error!r}")
            refused = True
        else:
            learned.append((row, target))
    ask = {name: columns[name][0] for name in names}
    answer = attempt(lambda: made.predict_proba_one(ask) if discrete else made.predict_one(ask))
    if isinstance(answer, Refused):
        require(wrong, f"refused what is right: {answer.error!r}")
        return REFUSED
    numbers = list(answer.values()) if discrete else [answer]
    require(bool(np.isfinite(numbers).all()), f"answers {answer!r}")
    if not wrong:
        kind: Any = StreamingClassifier if discrete else StreamingRegressor
        whole = kind(**size)
        for row, target in learned:
            whole.partial_fit({name: [row[name]] for name in sorted(names)}, [target])
        one = {name: [ask[name]] for name in sorted(names)}
        expected = whole.predict_proba(one)[0] if discrete else whole.predict(one)
        require(close(numbers, expected, 1e-5), "answers otherwise than the estimator")
    return REFUSED if refused else RIGHT


def kinds() -> dict[str, Case]:
    """The attacks on what stands alone."""
    calls.model("cmanp")
    _block("normed"), _block("raw")
    return {"blocks": blocks, "scales": scales, "rows of river": river}

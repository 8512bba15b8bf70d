"""Conditioning on a GPU: the machine's ceilings, the kernels' tiles and stages, rates, memory and errors."""

import copy
import time
import traceback
from collections.abc import Callable, Iterator
from math import ceil
from typing import Any
from unittest import mock

import on_gpu
import torch
from literal import Literal
from on_gpu import MODES, Row, extra, mode, ms, seconds
from torch import Tensor

from constmem.kernels import gpu

DONE = 2 * (3 * 64 + 3 * 64**2 + 2 * 3072 * 64)  # operations of a point, with queries and values absorbed
EXPONENTIALS = 3072  # of a point: one for each slot of each head of each block
LITERALS = {  # the key of how many times faster a row is -> its name, precision and chunk; as written first
    "times_the_literal": ("literal, chunks of 16,384", "plain float32", 16_384),
    "times_at_once": ("literal, at once", "plain float32", None),
    "times_the_literal_in_tf32": ("literal, tf32, chunks of 16,384", "plain tf32", 16_384),
    "times_at_once_in_tf32": ("literal, tf32, at once", "plain tf32", None),
}
_notes: dict[str, float] = {}  # ceilings, for the sections that come after


def ceilings() -> Iterator[Row]:
    """The machine's own rates."""
    import ceilings as machine

    torch.set_float32_matmul_precision("high")
    _notes["exponentials"] = machine.exponential_rate()
    _notes["float16"] = machine.product_rate(torch.float16)
    rates = {
        "float16 product, FLOP/s": _notes["float16"],
        "bfloat16 product, FLOP/s": machine.product_rate(torch.bfloat16),
        "tf32 product, FLOP/s": machine.product_rate(torch.float32),
        "copy, bytes/s": machine.copy_rate(),
        "exponentials/s": _notes["exponentials"],
    }
    yield {"what": "ceilings", **{name: float(f"{rate:.4g}") for name, rate in rates.items()}}


def tiles() -> Iterator[Row]:
    """The kernel's sizes, each timed at 2^20 points."""
    from constmem.kernels import triton_observe as kernels

    model, (x, y) = on_gpu.trained(), on_gpu.strokes(2**20)
    points = torch.cat([x, y], -1)
    candidates = {
        "half": [(64, 128, 4, 3, 3), (64, 128, 4, 2, 3), (64, 128, 4, 3, 6), (64, 64, 4, 3, 4),
                 (64, 64, 4, 4, 4), (64, 64, 4, 3, 8), (128, 128, 8, 3, 1), (128, 64, 4, 3, 2)],
        "exact": [(128, 64, 8, 2, 1), (128, 32, 8, 2, 1), (64, 64, 4, 2, 2)],
        "tf32": [(128, 64, 8, 2, 2), (64, 64, 4, 2, 4), (64, 64, 4, 2, 3)],
    }  # fmt: skip
    for name, cuts in candidates.items():
        found: dict[tuple[int, ...], float] = {}
        for cut in cuts:
            precision = kernels.PRECISIONS[name]._replace(tiles=kernels.Tiles(*cut))
            try:
                with mode(name), mock.patch.dict(kernels.PRECISIONS, {name: precision}):
                    observe = lambda: model.stack.observe(points, embed=model.embed)  # noqa: E731
                    found[cut] = seconds(observe, rounds=5, warm=2)
                yield {"what": "tiles", "precision": name, "tiles": cut, "milliseconds": ms(found[cut])}
            except Exception:
                traceback.print_exc()
        best = min(found, key=found.__getitem__)
        yield {"what": "best tiles", "precision": name, "tiles": best, "milliseconds": ms(found[best])}


def stages() -> Iterator[Row]:
    """Where the time goes: embedding, softmax, joining, at as many tokens as exist at a time."""
    import ceilings as machine

    from constmem.kernels import triton_observe as kernels

    model, (x, y) = on_gpu.trained(), on_gpu.strokes(262_144)
    points = torch.cat([x, y], -1)
    for name in MODES:
        with mode(name):
            model.stack.observe(points, embed=model.embed)
            plan = next(iter(model.stack.observation._memory.plans.values()))
        work = stages_of(plan, points, kernels.PRECISIONS[name])
        times = {stage: machine.gpu_seconds(run) for stage, run in work.items()}
        yield {"what": "stages", "precision": name,
               "tokens": gpu.TOKENS // (64 * kernels.PRECISIONS[name].operands.itemsize),
               "microseconds": {stage: round(1e6 * t, 1) for stage, t in times.items()}}  # fmt: skip


def stages_of(plan: gpu.Plan, points: Tensor, precision: Any) -> dict[str, Callable[[], Any]]:
    """The launches that make a state, one by one."""
    from constmem.kernels import triton_observe as kernels

    partial = gpu._partial(plan, points, None, precision)
    n = min(gpu.TOKENS // (64 * precision.operands.itemsize), points.shape[1])
    tokens = torch.empty(n, 64, dtype=precision.operands, device=on_gpu.DEVICE)
    value, lse = gpu.observe(plan, points[:, :n], None)
    join = plan.score, plan.project, plan.shift, value, lse, precision
    meet = {"points": n, "first": False, "precision": precision}
    return {
        "embed": lambda: gpu._embed(plan, points[0, :n], tokens, precision.embedding),
        "softmax": lambda: kernels.softmax(tokens, None, plan.absorbed, partial, **meet),
        "join": lambda: kernels.joined(partial, *join),
    }


def errors() -> Iterator[Row]:
    """How far states of the trained model are from those of float64, relative to their largest value."""
    model = on_gpu.trained()
    exact = copy.deepcopy(model).double()
    for n in (100, 784, 100_000):
        x, y = on_gpu.strokes(n, tasks=4 if n < 1000 else 1)
        reference = exact.condition(x.double(), y.double(), chunk=4096)
        for name in ("plain bf16", "plain tf32", "plain float32", *MODES):
            with mode(name):
                state = model.condition(x, y)
            value, lse = state.value - reference.value, state.lse - reference.lse
            yield {"what": "error", "points": n, "precision": name,
                   "value": float(f"{value.abs().max() / reference.value.abs().max():.3g}"),
                   "value_rms": float(f"{value.norm() / reference.value.norm():.3g}"),
                   "lse": float(f"{lse.abs().max():.3g}")}  # fmt: skip


def condition() -> Iterator[Row]:
    """Conditioning of one task: time, extra peak, rate, against the literal algorithm."""
    model = on_gpu.trained()
    for n in (10**4, 10**5, 10**6, 10**7):
        x, y = on_gpu.strokes(n)
        rounds = 3 if n >= 10**6 else 7
        slow: dict[str, float] = {}
        literal: dict[str, str] = {}
        work: dict[str, tuple[str, Callable[[], Any]]] = {}
        for key, (name, how, chunk) in LITERALS.items():
            if chunk or n <= 10**6:
                run = lambda chunk=chunk: Literal(model, chunk).condition(x, y)  # noqa: B023, E731
                work[name], literal[name] = (how, run), key
        for name in ("plain bf16", "plain tf32"):
            work[f"{name}, chunks of 131,072"] = name, lambda: model.condition(x, y, chunk=131_072)  # noqa: B023
        for name in MODES:
            work[name] = name, lambda: model.condition(x, y)  # noqa: B023
        for name, (how, run) in work.items():
            try:
                with mode(how):
                    took = seconds(run, rounds=1 if n > 10**6 and "literal" in name else rounds, warm=1)
                    peak = extra(run)
            except Exception:
                traceback.print_exc()
                continue
            if name in literal:
                slow[literal[name]] = took
            row = {"what": "condition", "points": n, "how": name, "milliseconds": ms(took),
                   "extra_bytes": peak, "points_a_second": float(f"{n / took:.4g}")}  # fmt: skip
            row |= {key: round(before / took, 1) for key, before in slow.items()}
            if name == "half" and _notes:
                row["of_exponential_ceiling"] = round(n * EXPONENTIALS / took / _notes["exponentials"], 3)
                row["of_product_ceiling"] = round(n * DONE / took / _notes["float16"], 3)
            yield row


def streamed() -> Iterator[Row]:
    """1e8 points that are made as they come, and forgotten: is memory flat?"""
    model = on_gpu.trained()
    x, y = on_gpu.strokes(2**20)

    def chunks(n: int) -> Iterator[tuple[Tensor, Tensor]]:
        for i in range(ceil(n / 2**20)):
            yield x, (y + 1e-6 * i)[:, : n - i * 2**20] if n - i * 2**20 < 2**20 else y + 1e-6 * i

    def cut(n: int) -> Iterator[tuple[Tensor, Tensor]]:
        return ((a[:, : b.shape[1]], b) for a, b in chunks(n))

    for n in (10**6, 10**7, 10**8):
        with mode("half"):
            run = lambda: model.condition_chunks(cut(n))  # noqa: B023, E731
            peak = extra(run) if n < 10**8 else 0
            start = time.perf_counter()
            if n == 10**8:
                peak = extra(run)
            else:
                run()
            torch.cuda.synchronize()
        took = time.perf_counter() - start
        yield {"what": "streamed", "points": n, "how": "half", "milliseconds": ms(took), "extra_bytes": peak,
               "points_a_second": float(f"{n / took:.4g}")}  # fmt: skip


def likelihood() -> Iterator[Row]:
    """How much predictions of the trained model change with the precision of conditioning."""
    model = on_gpu.trained()
    x, y = on_gpu.strokes(784, tasks=64, seed=1)
    xc, yc, xt, yt = x[:, :200], y[:, :200], x[:, 200:], y[:, 200:]
    exact = copy.deepcopy(model).double()
    torch.set_float32_matmul_precision("highest")
    state = exact.condition(xc.double(), yc.double())
    score = lambda state: float(model.query(state, xt).log_prob(yt).sum(-1).mean())  # noqa: E731
    reference = score(state.signed(model.fingerprint()))
    for name in ("plain bf16", "plain tf32", *MODES):
        with mode(name):
            state = model.condition(xc, yc)
        torch.set_float32_matmul_precision("highest")
        yield {"what": "log-likelihood", "conditioning": name, "float64": round(reference, 6),
               "change": float(f"{score(state) - reference:.3g}"), "data": "random strokes"}  # fmt: skip

"""What a GPU makes of it, side by side with the paper's algorithm: conditioning, updates, reads, training.

    python benchmarks/gpu.py                          # two minutes; writes results/gpu.json
    python benchmarks/gpu.py tiles condition          # only these sections
    python benchmarks/gpu.py --out FOLDER/gpu.json

Times are wall clock, launches and waiting included, of a model at the paper's size with the weights that
come with the package. A section that fails prints its traceback, and the others go on.
"""

import argparse
import contextlib
import copy
import itertools
import statistics
import time
import traceback
from collections.abc import Callable, Iterator
from math import ceil
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from literal import Literal
from record import RESULTS, provenance, write
from torch import Tensor

from constmem import CMANP
from constmem.kernels import gpu

DEVICE = "cuda"
FLOPS = 2 * (3 * 64 + 3 * 64**2 + 64 * 768 + 2 * 3072 * 16)  # of a point, as few as the algorithm needs
DONE = 2 * (3 * 64 + 3 * 64**2 + 2 * 3072 * 64)  # of a point, with queries and values absorbed
EXPONENTIALS = 3072  # of a point: one for each slot of each head of each block
MODES = ("half", "tf32", "exact")
Row = dict[str, Any]
_notes: dict[str, Any] = {}  # ceilings, for the sections that come after


def seconds(work: Callable[[], Any], rounds: int = 5, warm: int = 2, calls: int = 1) -> float:
    """Median wall time of a call."""
    for _ in range(warm):
        work()
    times = []
    for _ in range(rounds):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            work()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - start) / calls)
    return statistics.median(times)


def extra(work: Callable[[], Any]) -> int:
    """Bytes allocated at the worst moment beyond what was there before."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    work()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def strokes(n: int, tasks: int = 1, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Pixels at random places of smooth random strokes, in the units of the shipped model."""
    random = torch.Generator(DEVICE).manual_seed(seed)
    draw = torch.rand(tasks, 1, 4, generator=random, device=DEVICE)
    x = 2 * torch.rand(tasks, n, 2, generator=random, device=DEVICE) - 1
    off = (3 * draw[..., 0] * x[..., 0] + 6 * draw[..., 1]).sin() * 0.6 + x[..., 1] * (draw[..., 2] - 0.3)
    y = (-((off / (0.1 + 0.1 * draw[..., 3])) ** 2)).exp() - 0.5
    return x, y[..., None]


@contextlib.contextmanager
def mode(name: str) -> Iterator[None]:
    """Our kernels in one precision, or "plain ...": PyTorch's operators."""
    before = torch.get_float32_matmul_precision()
    with contextlib.ExitStack() as stack:
        if name.startswith("plain"):
            stack.enter_context(mock.patch.object(gpu, "usable", return_value=False))
            torch.set_float32_matmul_precision("highest" if name == "plain float32" else "high")
            if name == "plain bf16":
                stack.enter_context(torch.autocast("cuda", torch.bfloat16))
        else:
            stack.enter_context(mock.patch.object(gpu, "precision_of", return_value=name))
            torch.set_float32_matmul_precision("highest")
        try:
            yield
        finally:
            torch.set_float32_matmul_precision(before)
    if gpu._failures:
        raise RuntimeError(f"the kernels failed: {gpu._failures.pop()}")


def trained() -> CMANP:
    return CMANP.from_pretrained("emnist", device=DEVICE)


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
    """The kernel's sizes: each timed at 2^20 points, the best kept for what comes after."""
    from constmem.kernels import triton as kernels

    model, (x, y) = trained(), strokes(2**20)
    points = torch.cat([x, y], -1)
    candidates = {
        "half": [(64, 128, 4, 3, 3), (64, 64, 4, 3, 4), (128, 64, 8, 3, 2), (128, 128, 8, 3, 1),
                 (128, 128, 4, 3, 2), (64, 128, 4, 2, 3), (128, 64, 4, 3, 2), (64, 128, 4, 3, 6)],
        "exact": [(128, 64, 8, 2, 1), (64, 32, 4, 2, 2), (128, 32, 8, 2, 1)],
        "tf32": [(128, 64, 8, 2, 2), (64, 64, 4, 2, 4)],
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
                gpu._failures.clear()
        best = min(found, key=found.__getitem__)
        kernels.PRECISIONS[name] = kernels.PRECISIONS[name]._replace(tiles=kernels.Tiles(*best))
        yield {"what": "best tiles", "precision": name, "tiles": best, "milliseconds": ms(found[best])}


def stages() -> Iterator[Row]:
    """Where the time goes: embedding, softmax, joining, at as many tokens as exist at a time."""
    import ceilings as machine

    from constmem.kernels import triton as kernels

    model, (x, y) = trained(), strokes(131_072)
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
    from constmem.kernels import triton as kernels

    partial = gpu._partial(plan, points, None, precision)
    n = min(gpu.TOKENS // (64 * precision.operands.itemsize), points.shape[1])
    tokens = torch.empty(n, 64, dtype=precision.operands, device=DEVICE)
    return {
        "embed": lambda: gpu._embed(plan, points[0, :n], tokens, precision.embedding),
        "softmax": lambda: kernels.softmax(
            tokens, None, plan.absorbed, partial, points=n, precision=precision
        ),
        "join": lambda: kernels.joined(partial, precision),
    }


def errors() -> Iterator[Row]:
    """How far states of the trained model are from those of float64, relative to their largest value."""
    model = trained()
    exact = copy.deepcopy(model).double()
    for n in (100, 784, 100_000):
        x, y = strokes(n, tasks=4 if n < 1000 else 1)
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
    model = trained()
    for n in (10**4, 10**5, 10**6, 10**7):
        x, y = strokes(n)
        rounds = 3 if n >= 10**6 else 7
        slow: dict[str, float] = {}
        work: dict[str, tuple[str, Callable[[], Any]]] = {}
        for chunk in (16_384, *([None] if n <= 10**6 else [])):
            name = f"literal, {'at once' if chunk is None else 'chunks of 16,384'}"
            work[name] = "plain tf32", lambda chunk=chunk: Literal(model, chunk).condition(x, y)  # noqa: B023
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
            if "literal" in name:
                slow[name] = took
            row = {"what": "condition", "points": n, "how": name, "milliseconds": ms(took),
                   "extra_bytes": peak, "points_a_second": float(f"{n / took:.4g}")}  # fmt: skip
            if slow:
                row["times_the_literal"] = round(min(slow.values()) / took, 1)
            if name == "half" and _notes:
                row["of_exponential_ceiling"] = round(n * EXPONENTIALS / took / _notes["exponentials"], 3)
                row["of_product_ceiling"] = round(n * DONE / took / _notes["float16"], 3)
            yield row


def streamed() -> Iterator[Row]:
    """1e8 points that are made as they come, and forgotten: is memory flat?"""
    model = trained()
    x, y = strokes(2**20)

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


def update() -> Iterator[Row]:
    """One point more: for one stream, and for thousands at once, against the literal loop."""
    model = trained()
    literal = Literal(model)
    x, y = strokes(1000)
    kept = literal.condition(x, y)

    def literally() -> None:
        current = kept
        for i in range(10):
            current = literal.update(current, x[:, i : i + 1], y[:, i : i + 1])

    with mode("plain tf32"):
        slow = seconds(literally, rounds=5) / 10
    yield {"what": "update", "streams": 1, "how": "literal", "milliseconds": ms(slow)}
    for streams, name in itertools.product((1, 16, 256, 4096), ("plain tf32", "half", "exact")):
        try:
            one_x, one_y = strokes(1, tasks=streams)
            with mode(name):
                state = model.condition(*strokes(100, tasks=streams))

                def chain(state=state, one_x=one_x, one_y=one_y) -> None:
                    current = state
                    for _ in range(20):
                        current = model.update(current, one_x, one_y)

                took = seconds(chain, rounds=5) / 20
                peak = extra(lambda: model.update(state, one_x, one_y))  # noqa: B023
            yield {"what": "update", "streams": streams, "how": name, "milliseconds": ms(took),
                   "extra_bytes": peak, "times_the_literal": round(streams * slow / took, 1),
                   "literal": "measured on one stream, times the streams"}  # fmt: skip
        except Exception:
            traceback.print_exc()


def read() -> Iterator[Row]:
    """Reading a state, and a query of one and of a thousand targets."""
    model = trained()
    literal = Literal(model)
    x, y = strokes(1000)
    kept = literal.condition(x, y)

    def read_literally() -> Tensor:
        latents = model.latents.expand(1, -1, -1)
        for block in range(len(model.stack.readings)):
            latents = literal._read(block, kept.embedding[block], latents)
        return latents

    with mode("plain tf32"):
        state = model.condition(x, y)
        slow = seconds(read_literally)
        query = {m: seconds(lambda: literal.query(kept, x[:, :m])) for m in (1, 1000)}  # noqa: B023
    yield {"what": "read", "how": "literal", "milliseconds": ms(slow)}
    for name in ("plain tf32", "plain bf16", "half"):
        with mode(name):
            if name == "half":
                torch.set_float32_matmul_precision("high")
            took = seconds(lambda: model.read(state), warm=5, rounds=9)
        how = "constmem, replayed, tf32" if name == "half" else f"constmem, eager, {name.split()[1]}"
        yield {"what": "read", "how": how, "milliseconds": ms(took),
               "times_the_literal": round(slow / took, 2)}  # fmt: skip
    for m, before in query.items():
        with mode("half"):
            memory = model.read(state)
            took = seconds(lambda: model.predict(memory, x[:, :m]))  # noqa: B023
        yield {"what": "query of what was read", "targets": m, "how": "constmem", "milliseconds": ms(took),
               "literal_milliseconds": ms(before), "times_the_literal": round(before / took, 2)}  # fmt: skip


def small() -> Iterator[Row]:
    """A hundred tasks of a hundred points: not slower than the plain path."""
    model = trained()
    x, y = strokes(100, tasks=100)
    for name in ("plain bf16", "plain tf32", "plain float32", *MODES):
        with mode(name):
            took = seconds(lambda: model.condition(x, y), rounds=9)
        yield {"what": "condition 100 tasks of 100 points", "how": name, "milliseconds": ms(took)}


def likelihood() -> Iterator[Row]:
    """How much predictions of the trained model change with the precision of conditioning."""
    model = trained()
    x, y = strokes(784, tasks=64, seed=1)
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


def training() -> Iterator[Row]:
    """Constant-memory training: the peak of a step at up to 1e6 context points."""
    torch.manual_seed(0)
    model = CMANP(dim_x=2, dim_y=1).to(DEVICE)
    for n in (10**4, 10**5, 10**6):
        x, y = strokes(n)

        def step(x=x, y=y) -> None:
            model.zero_grad()
            model.loss(x, y, x[:, :100], y[:, :100]).backward()

        with torch.enable_grad(), mode("plain tf32"):
            took = seconds(step, rounds=1, warm=1)
            peak = extra(step)
        yield {"what": "forward and backward", "points": n, "milliseconds": ms(took), "extra_bytes": peak}


def steps() -> Iterator[Row]:
    """A training step of 100 tasks of 100 + 100 points against the literal one, eager and captured."""
    import training_step

    with torch.enable_grad():
        yield from (
            {**row, "what": "training step", "how": row["what"]} for row in training_step.measured(rounds=3)
        )


SECTIONS = {
    section.__name__: section
    for section in (ceilings, tiles, stages, errors, condition, streamed, update, read, small, likelihood,
                    training, steps)
}  # fmt: skip


def ms(seconds: float) -> float:
    return float(f"{1e3 * seconds:.4g}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("sections", nargs="*", help=f"of {', '.join(SECTIONS)}; all but steps if none")
    parser.add_argument("--out", type=Path, default=RESULTS / "gpu.json")
    parser.add_argument("--seconds", type=float, default=110.0, help="start no section after so long")
    options = parser.parse_args()
    unknown = set(options.sections) - SECTIONS.keys()
    if unknown:
        parser.error(f"unknown sections: {', '.join(sorted(unknown))}")
    about = provenance(0, "pixels of random strokes, 2 inputs, 1 output") | {"device": device_name()}
    begun, rows = time.perf_counter(), []
    for name in options.sections or [name for name in SECTIONS if name != "steps"]:
        here = time.perf_counter()
        if here - begun > options.seconds:
            print(f"-- {name}: left out, {options.seconds:.0f} s are over", flush=True)
            continue
        try:
            with torch.no_grad():
                for row in SECTIONS[name]():
                    rows.append({"section": name, **row})
                    print(row, flush=True)
                    write(options.out, rows, **about)
        except Exception:
            traceback.print_exc()
            gpu._failures.clear()
        print(f"-- {name}: {time.perf_counter() - here:.1f} s", flush=True)
        torch.cuda.empty_cache()


def device_name() -> str:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"


if __name__ == "__main__":
    main()

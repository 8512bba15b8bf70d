"""What benchmarks on a GPU share: data, times, peaks, how to run in one precision or another, a program."""

import argparse
import contextlib
import statistics
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from record import RESULTS, provenance, write
from torch import Tensor

from constmem import CMANP, kernels
from constmem.kernels import gpu

DEVICE = "cuda"
MODES = ("half", "tf32", "exact")
Row = dict[str, Any]


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
            stack.enter_context(mock.patch.object(gpu, "usable", lambda _: False))  # noqa: PT008 (counts calls)
            torch.set_float32_matmul_precision("highest" if name == "plain float32" else "high")
            if name == "plain bf16":
                stack.enter_context(torch.autocast("cuda", torch.bfloat16))
        else:
            stack.enter_context(mock.patch.object(gpu, "precision_of", lambda _: name))  # noqa: PT008
            torch.set_float32_matmul_precision("highest")
        try:
            yield
            failures = [path.failed for path in kernels.PATHS if path.failed is not None]
        finally:
            torch.set_float32_matmul_precision(before)
            kernels.reset()  # which may serve in another precision
    if failures:
        raise RuntimeError(f"the kernels failed: {failures[-1]}")


def trained() -> CMANP:
    return CMANP.from_pretrained("emnist", device=DEVICE)


def ms(seconds: float) -> float:
    return float(f"{1e3 * seconds:.4g}")


def measure(name: str, sections: Sequence[Callable[[], Iterator[Row]]], doc: str | None) -> None:
    """A program that runs the sections asked for, all if none, and writes their rows as they come."""
    known = {section.__name__: section for section in sections}
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("sections", nargs="*", help=f"of {', '.join(known)}; all if none")
    parser.add_argument("--out", type=Path, default=RESULTS / f"{name}.json")
    parser.add_argument("--seconds", type=float, default=110.0, help="start no section after so long")
    options = parser.parse_args()
    unknown = set(options.sections) - known.keys()
    if unknown:
        parser.error(f"unknown sections: {', '.join(sorted(unknown))}")
    about = provenance(0, "pixels of random strokes, 2 inputs, 1 output", torch.device(DEVICE))
    begun, rows = time.perf_counter(), []
    for section in options.sections or known:
        here = time.perf_counter()
        if here - begun > options.seconds:
            print(f"-- {section}: left out, {options.seconds:.0f} s are over", flush=True)
            continue
        try:
            with torch.no_grad():
                for row in known[section]():
                    rows.append({"section": section, **row})
                    print(row, flush=True)
                    write(options.out, rows, **about)
        except Exception:
            traceback.print_exc()
            kernels.reset()
        print(f"-- {section}: {time.perf_counter() - here:.1f} s", flush=True)
        torch.cuda.empty_cache()

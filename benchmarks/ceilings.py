"""What a GPU can do at most, measured on the very machine: matrix products, exponentials, copies."""

import statistics
from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl

REPEATS = 64  # exponentials of every number in registers


@triton.jit
def _exponentials(out, N: tl.constexpr, R: tl.constexpr):
    at = tl.program_id(0) * N + tl.arange(0, N)
    x = (at % 97).to(tl.float32) * -0.01
    for _ in range(R):
        x = tl.exp2(x) * -0.5
    tl.store(out + at, x)


def gpu_seconds(work: Callable[[], Any], rounds: int = 7) -> float:
    """Median seconds of the device's own clock, after two calls to warm up."""
    for _ in range(2):
        work()
    times = []
    for _ in range(rounds):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        work()
        stop.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(stop) / 1e3)
    return statistics.median(times)


def product_rate(dtype: torch.dtype, size: int = 8192) -> float:
    """Floating-point operations a second of a large matrix product of random numbers."""
    a, b = (torch.randn(size, size, device="cuda", dtype=dtype) for _ in range(2))
    return 2 * size**3 / gpu_seconds(lambda: a @ b)


def copy_rate(size: int = 2**31) -> float:
    """Bytes read and written a second by a copy on the device."""
    a = torch.empty(size, device="cuda", dtype=torch.uint8).random_()
    b = torch.empty_like(a)
    return 2 * size / gpu_seconds(lambda: b.copy_(a))


def exponential_rate(programs: int = 132 * 64, numbers: int = 4096) -> float:
    """Exponentials to base two a second, of numbers in registers."""
    out = torch.empty(programs * numbers, device="cuda")
    work = lambda: _exponentials[(programs,)](out, N=numbers, R=REPEATS, num_warps=8)  # noqa: E731
    return programs * numbers * REPEATS / gpu_seconds(work)

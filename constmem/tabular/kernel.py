"""`Kernel`: a smooth and a rough kernel with a length for every coordinate."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from ctypes import (
    CFUNCTYPE,
    byref,
    c_char,
    c_char_p,
    c_double,
    c_float,
    c_int,
    c_void_p,
    py_object,
    pythonapi,
)
from dataclasses import dataclass
from functools import cache
from threading import Lock
from typing import Any, TypeVar

import numpy as np
import torch
from jaxtyping import Float, Int
from scipy.linalg import cython_blas  # type: ignore[import-untyped]
from threadpoolctl import ThreadpoolController  # type: ignore[import-untyped]
from torch import Tensor

DISTINCT = 1e-8, 1e-6  # variance that a further inducing point must add, smooth and rough: more than rounding
CLIP = 4.0  # deviations: what lies further out is no further from anything
RANK = 3.0**0.5  # ranks are spread evenly over -RANK to RANK: one deviation wide, as the columns are
EXACT = 1e4  # squared length whose rounding is a thousandth of what `DISTINCT` allows


@dataclass(frozen=True, eq=False)
class Kernel:
    """k(u, v) = share * exp(-|s (u - v)|² / 2) + (1 - share) * exp(-|r (u - v)|), so that k(u, u) = 1.

    Attributes:
        rates: (2, e) inverse lengths: s of the smooth part and r of the rough part.
        share: of the smooth part.
        rounding: how much more of distances is lost to rounding than usual, where rates are large.
    """

    rates: Float[Tensor, "2 e"]
    share: Float[Tensor, ""]
    rounding: float = 1.0

    def __call__(self, u: Float[Tensor, "n e"], v: Float[Tensor, "m e"]) -> Float[Tensor, "n m"]:
        """Covariances of rows, in units of the variance."""
        smooth, rough = (distance(u * rate, v * rate) for rate in self.rates)
        near, far = exp(smooth.mul_(-0.5)), exp(sqrt(rough).neg_())
        return near.mul_(self.share).add_(far, alpha=float(1 - self.share))

    @staticmethod
    def usual(columns: int) -> "Kernel":
        """Lengths before anything is known: smooth in the columns, rough in their ranks."""
        rate = 0.5 / columns**0.5
        rates = rate * torch.tensor([[1.0, 0.05], [0.4, 2.0]], dtype=torch.float64)
        return Kernel(rates.repeat_interleave(columns, 1), torch.tensor(0.75, dtype=torch.float64))

    def inducing(self, u: Float[Tensor, "n e"], size: int) -> Int[Tensor, " m"]:
        """Which rows to take as inducing points: one by one, those that the others explain least."""
        left = torch.ones(len(u), dtype=torch.float64)
        factor = u.new_zeros(len(u), min(size, len(u)))
        chosen = []
        for j in range(factor.shape[1]):
            row = int(left.argmax())
            if left[row] < self._distinct:  # the others are copies, or nearly
                break
            column = self(u, u[row : row + 1])[:, 0] - factor[:, :j] @ factor[row, :j]
            factor[:, j] = column / left[row].sqrt()
            left = (left - factor[:, j].square()).clamp(min=0.0)
            chosen.append(row)
        return torch.tensor(chosen)

    @property
    def _distinct(self) -> float:
        """Rounding shows where points are close: in the square of a distance, or in its root."""
        smooth, rough = DISTINCT
        return self.rounding * float(smooth * self.share + rough * (1 - self.share))

    def finer(self, times: float, *, extent: float) -> "Kernel":
        """The smooth part with lengths so many times shorter, for coordinates of at most this extent."""
        rates = self.rates * times
        longest = float((rates[0] * extent).square().sum())
        return Kernel(rates, torch.ones_like(self.share), rounding=max(1.0, longest / EXACT))

    def whitener(self, u: Float[Tensor, "m e"]) -> Float[Tensor, "m m"]:
        """W such that the rows of k(v, u) W have the inner products k(v, v') that u can explain."""
        eye = torch.eye(len(u), dtype=torch.float64)
        factor = torch.linalg.cholesky(self(u, u) + 1e-3 * self._distinct * eye)
        inverse: Tensor = torch.linalg.solve_triangular(factor, eye, upper=False)
        return inverse.mT.contiguous()


def coordinates(z: Float[Tensor, "n d"], knots: Float[Tensor, "d q"]) -> Float[Tensor, "n e"]:
    """Where rows lie for the kernel: columns, clipped, and their ranks among the knots, (n, 2 d)."""
    across = z.mT.contiguous()
    below = torch.searchsorted(knots, across) + torch.searchsorted(knots, across, right=True)
    ranks = (below.mT.double() / knots.shape[1] - 1.0) * RANK
    return torch.cat([z.clamp(-CLIP, CLIP), ranks], 1)


def times_upper(rows: Float[Tensor, "n m"], upper: Float[Tensor, "m m"]) -> None:
    """Multiply rows by an upper triangular matrix, in their own place: half the work of any other matrix.

    Rows may be some columns of a wider table. BLAS stores matrices by columns: it sees a lower triangle, to
    be multiplied from the left, and rows that are its columns.
    """
    if rows.dtype != upper.dtype or rows.stride(-1) != 1 or not upper.is_contiguous():
        raise ValueError("numbers of one precision are needed, one beside another in every row")
    routine, number = _triangular(rows.dtype)
    n, m = rows.shape
    if n and m:
        words = (byref(c_char(letter)) for letter in (b"L", b"L", b"N", b"N"))
        sizes = byref(c_int(m)), byref(c_int(n)), byref(number(1.0))
        ends = upper.data_ptr(), byref(c_int(m)), rows.data_ptr(), byref(c_int(max(rows.stride(0), m)))
        routine(*words, *sizes, *ends)


@cache
def _triangular(dtype: torch.dtype) -> tuple[Callable[..., None], Any]:
    """BLAS' product with a triangle, as SciPy gives it to compiled code: other threads go on meanwhile."""
    name, number = {torch.float64: ("dtrmm", c_double), torch.float32: ("strmm", c_float)}[dtype]
    capsule = py_object(cython_blas.__pyx_capi__[name])
    pythonapi.PyCapsule_GetName.restype, pythonapi.PyCapsule_GetPointer.restype = c_char_p, c_void_p
    signature = c_char_p(pythonapi.PyCapsule_GetName(capsule))
    return CFUNCTYPE(None, *[c_void_p] * 11)(pythonapi.PyCapsule_GetPointer(capsule, signature)), number


def exp(t: Tensor) -> Tensor:
    """The exponential, in place: numpy's takes half the time of PyTorch's on one core."""
    np.exp(t.numpy(), out=t.numpy())
    return t


def sqrt(t: Tensor) -> Tensor:
    """The square root, in place, likewise."""
    np.sqrt(t.numpy(), out=t.numpy())
    return t


def distance(u: Tensor, v: Tensor) -> Tensor:
    """Squared distances of rows."""
    far = u.square().sum(1)[:, None] + v.square().sum(1)
    return far.addmm_(u, v.mT, alpha=-2.0).clamp_(min=0.0)


A = TypeVar("A")
B = TypeVar("B")


def side_by_side(work: Callable[[A], B], pieces: Sequence[A]) -> list[B]:
    """The work on each piece, on as many threads as PyTorch may use: they meet once, at the end.

    Libraries' own threads would meet at every product, and wait for one another where cores are busy.
    """
    most = torch.get_num_threads()
    threads = min(most, len(pieces))
    with _one_thread_a_product():
        if threads < 2:
            return [work(piece) for piece in pieces]
        try:
            with ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
                return list(pool.map(work, pieces))
        finally:
            torch.set_num_threads(most)  # what was set in one thread, new ones begin with


def shares(count: int, *, least: int) -> list[slice]:
    """Rows cut into as many equal parts as threads may work on them, but into none of fewer than `least`."""
    size = max(least, -(-count // torch.get_num_threads()))
    return [slice(start, min(start + size, count)) for start in range(0, count, size)]


@cache
def _blas() -> ThreadpoolController:
    return ThreadpoolController().select(user_api="blas")


_lock = Lock()
_limits: list[Any] = []  # of whoever is inside; the first one has limited, and the last one restores


@contextmanager
def _one_thread_a_product() -> Iterator[None]:
    with _lock:
        _limits.append(_limits[0] if _limits else _blas().limit(limits=1))
    try:
        yield
    finally:
        with _lock:
            limit = _limits.pop()
            if not _limits:
                limit.restore_original_limits()

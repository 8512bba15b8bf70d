"""The gradients of states on a GPU, in Triton.

Forwards (`triton_observe.py`) every row a of a matrix takes the mean of tokens, m = sum p h with
p = exp(a h - lse). Given the gradients g of m and e of lse, and delta = g m - e,

    ds = p (g h - delta),    da = sum over tokens of ds h,    dh = sum over rows of ds a + p g.

A token's share p follows from the lse of all tokens, so a stretch of them needs no others. One kernel keeps a
few rows and walks over tokens, the other keeps a few tokens and walks over rows: both compute the scores
again, neither waits for the other, and nothing of the size of the scores is written.

The gradient of every row comes divided by a number that leaves |g h - delta| below 2, and shares multiplied
by 2^LIFT: so float16, which rounds like TF32, has room for all of it. What g h and delta have in common is
often most of both: delta is that of g as rounded, so that the changes of a row's scores add up to zero.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from jaxtyping import Bool, Float
from torch import Tensor

from constmem.kernels.triton_observe import LN2, Tiles, launch

LIFT = 14.0


class Precision(NamedTuple):
    """Operands of matrix products, whose sums are float32, how those of float32 are multiplied, and tiles."""

    operands: torch.dtype
    products: str
    rows: Tiles
    tokens: Tiles


# What was fast on an H200 at d = 64 (`benchmarks/gpu_training.py tiles`), and how many such programs a
# multiprocessor holds.
PRECISIONS = {
    "half": Precision(torch.float16, "tf32", Tiles(128, 64, 8, 3, 2), Tiles(64, 128, 8, 2, 2)),
    "tf32": Precision(torch.float32, "tf32", Tiles(128, 64, 8, 2, 1), Tiles(64, 128, 8, 2, 1)),
    "exact": Precision(torch.float32, "tf32x3", Tiles(128, 32, 8, 2, 1), Tiles(32, 128, 8, 1, 1)),
}


@triton.jit
def _met(
    a, g, lse, delta, tokens, mask, at, stop, found,
    MASKED: tl.constexpr, RAGGED: tl.constexpr, LIFT: tl.constexpr, D: tl.constexpr, T: tl.constexpr,
    PRODUCTS: tl.constexpr,
):  # fmt: skip
    """Gradients of rows after one more tile of tokens."""
    places, dims = at + tl.arange(0, T), tl.arange(0, D)
    where = tokens + places[:, None] * D + dims[None, :]
    if RAGGED:
        h = tl.load(where, mask=(places < stop)[:, None], other=0.0)
    else:
        h = tl.load(where)
    scores = tl.dot(a, tl.trans(h), input_precision=PRODUCTS)
    slopes = tl.dot(g, tl.trans(h), input_precision=PRODUCTS)
    shares = tl.exp2(tl.minimum(scores - lse[:, None], LIFT))  # finite, whatever is not there
    if MASKED:
        seen = tl.load(mask + places, mask=places < stop, other=0) != 0
        shares = tl.where(seen[None, :], shares, 0.0)
    changes = shares * (slopes - delta[:, None])
    return tl.dot(changes.to(h.dtype), h, acc=found, input_precision=PRODUCTS)


@triton.jit(do_not_specialize=["n", "stretch"])
def _rows(
    tokens, mask, absorbed, grad, lse, delta, found, n, stretch, slots,
    MASKED: tl.constexpr, LIFT: tl.constexpr, S: tl.constexpr, D: tl.constexpr, T: tl.constexpr,
    PRODUCTS: tl.constexpr,
):  # fmt: skip
    """Add to the gradients of a few rows, in float64, those of one stretch of one task's tokens."""
    block, part, task = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    own, dims = block * S + tl.arange(0, S), tl.arange(0, D)
    a = tl.load(absorbed + own[:, None] * D + dims[None, :])
    row = task.to(tl.int64) * slots + own
    g = tl.load(grad + row[:, None] * D + dims[None, :])
    level, mean = tl.load(lse + row), tl.load(delta + row)
    sums = tl.zeros((S, D), tl.float32)
    tokens += task.to(tl.int64) * n * D
    mask += task.to(tl.int64) * n
    start = part * stretch
    stop = tl.minimum(start + stretch, n)
    whole = start + tl.maximum(stop - start, 0) // T * T
    for at in range(start, whole, T):
        sums = _met(a, g, level, mean, tokens, mask, at, stop, sums, MASKED, False, LIFT, D, T, PRODUCTS)
    if whole < stop:
        sums = _met(a, g, level, mean, tokens, mask, whole, stop, sums, MASKED, True, LIFT, D, T, PRODUCTS)
    place = (task.to(tl.int64) * tl.num_programs(1) + part) * slots + own
    place = found + place[:, None] * D + dims[None, :]
    tl.store(place, tl.load(place) + sums)


@triton.jit(do_not_specialize=["n"])
def _tokens(
    tokens, mask, absorbed, grad, lse, delta, size, found, n, slots,
    MASKED: tl.constexpr, LIFT: tl.constexpr, S: tl.constexpr, D: tl.constexpr, T: tl.constexpr,
    PRODUCTS: tl.constexpr,
):  # fmt: skip
    """The gradients of a tile of one task's tokens."""
    task, dims, places = tl.program_id(1), tl.arange(0, D), tl.program_id(0) * T + tl.arange(0, T)
    there = (places < n)[:, None]
    place = (task.to(tl.int64) * n + places)[:, None] * D + dims[None, :]
    h = tl.load(tokens + place, mask=there, other=0.0)
    grad += task.to(tl.int64) * slots * D
    lse, delta = lse + task * slots, delta + task * slots
    sums = tl.zeros((T, D), tl.float32)
    for at in range(0, slots, S):
        rows = at + tl.arange(0, S)
        block = rows[:, None] * D + dims[None, :]
        a, g = tl.load(absorbed + block), tl.load(grad + block)
        scores = tl.dot(h, tl.trans(a), input_precision=PRODUCTS)
        slopes = tl.dot(h, tl.trans(g), input_precision=PRODUCTS)
        shares = tl.exp2(tl.minimum(scores - tl.load(lse + rows)[None, :], LIFT))
        changes = shares * (slopes * LN2 - tl.load(delta + rows)[None, :])  # to base two, as a is
        sums = tl.dot(shares.to(h.dtype), g, acc=sums, input_precision=PRODUCTS)
        sums = tl.dot(changes.to(h.dtype), a, acc=sums, input_precision=PRODUCTS)
    sums = sums * tl.load(size + task)
    if MASKED:
        seen = tl.load(mask + task.to(tl.int64) * n + places, mask=places < n, other=0) != 0
        sums = tl.where(seen[:, None], sums, 0.0)
    tl.store(found + place, sums, mask=there)


def rows(
    tokens: Float[Tensor, "b n d"], mask: Bool[Tensor, "b n"] | None, absorbed: Float[Tensor, "s d"],
    grad: Float[Tensor, "b s d"], lse: Float[Tensor, "b s"], delta: Float[Tensor, "b s"],
    found: Float[Tensor, "b p s d"], precision: Precision,
) -> None:  # fmt: skip
    """Add the gradients of all rows, one stretch of every task's tokens for each part of `found`.

    Args:
        absorbed: the rows, to base two.
        grad: of their mean tokens, each divided by a number of its own.
        lse: to base two, less LIFT.
        delta: divided likewise.
    """
    (tasks, n, d), tiles = tokens.shape, precision.rows
    stretch = triton.cdiv(triton.cdiv(n, found.shape[1]), tiles.tokens) * tiles.tokens
    launch(
        _rows, (found.shape[2] // tiles.rows, found.shape[1], tasks),
        tokens, tokens if mask is None else mask, absorbed, grad, lse, delta, found, n, stretch,
        found.shape[2], **_options(precision, mask, d, tiles),
    )  # fmt: skip


def tokens(
    given: Float[Tensor, "b n d"], mask: Bool[Tensor, "b n"] | None, absorbed: Float[Tensor, "s d"],
    grad: Float[Tensor, "b s d"], lse: Float[Tensor, "b s"], delta: Float[Tensor, "b s"],
    size: Float[Tensor, " b"], found: Float[Tensor, "b n d"], precision: Precision,
) -> None:  # fmt: skip
    """Write the gradients of tokens, multiplied by `size`; zeros where they are masked out.

    Args:
        lse: to base two, less LIFT and the logarithm of what a row's gradient is to be multiplied by.
        delta: times ln 2.
    """
    (tasks, n, d), tiles = given.shape, precision.tokens
    launch(
        _tokens, (triton.cdiv(n, tiles.tokens), tasks),
        given, given if mask is None else mask, absorbed, grad, lse, delta, size, found, n,
        absorbed.shape[0], **_options(precision, mask, d, tiles),
    )  # fmt: skip


def parts(tasks: int, slots: int, d: int, multiprocessors: int, precision: Precision) -> int:
    """Into how many stretches tokens are best cut, so that every program has a place to run."""
    tiles = precision.rows
    programs = max(1, tiles.programs * 64 // max(d, 64)) * multiprocessors
    return max(1, programs // (slots // tiles.rows * tasks))


def _options(precision: Precision, mask: Tensor | None, d: int, tiles: Tiles) -> dict[str, Any]:
    return {
        "MASKED": mask is not None, "LIFT": LIFT, "S": tiles.rows, "D": d, "T": tiles.tokens,
        "PRODUCTS": precision.products, "num_warps": tiles.warps, "num_stages": tiles.stages,
    }  # fmt: skip

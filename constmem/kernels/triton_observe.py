"""Observing on a GPU in a few launches: the kernels, written in Triton, and how to launch them.

The queries are fixed and tokens are normalised without learned numbers, so everything learned moves out of
the loop over points. With the queries absorbed into the key projection, a = q Wk, and the value projection
left for the end,

    score = a h,    value = Wv (sum exp(score) h / sum exp(score)) + bv,

keys and values of all heads of all blocks are the very same normalised tokens h: the softmaxes of all slots
are rows of one matrix that meets a tile of tokens twice. Nothing of the size of the data is written but
tokens, a bounded number at a time; the state of each stretch of points is joined with others in float64.

Normalised tokens have a mean of zero: turned so that one channel is zero, they have room for a channel of
ones there, by which products add up the shares of a softmax.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

# Numbers that change from call to call are not specialised on: a stream should not wait for a compiler.
NOTHING = tl.constexpr(-(2.0**99))  # below the score of any point, above what masks add to one
LOG2E, LN2 = tl.constexpr(1.4426950408889634), tl.constexpr(0.6931471805599453)


class Tiles(NamedTuple):
    """How work is cut: slots and tokens a program meets at a time, its warps, its stages of loading, and how
    many such programs a multiprocessor holds."""

    rows: int
    tokens: int
    warps: int
    stages: int
    programs: int


class Precision(NamedTuple):
    """Operands of matrix products, whose sums are float32, and how those of float32 are multiplied.

    An embedding and the normalisation after it amplify rounding: in "float64" neither is felt.

    Shares of a softmax are multiplied by 2^lift, to make use of all of a narrow range.
    """

    operands: torch.dtype
    products: str
    embedding: str
    lift: float
    tiles: Tiles

    def cut(self, d: int) -> Tiles:
        """The tiles for tokens of d channels: as many bytes at a time, however wide they are."""
        return self.tiles if d <= 64 else self.tiles._replace(tokens=self.tiles.tokens // 2)


PRECISIONS = {
    "half": Precision(torch.float16, "tf32", "bfloat16 x 3", 15.0, Tiles(64, 128, 4, 3, 3)),
    "tf32": Precision(torch.float32, "tf32", "tf32x3", 0.0, Tiles(128, 64, 8, 2, 2)),
    "exact": Precision(torch.float32, "tf32x3", "float64", 0.0, Tiles(128, 64, 8, 2, 1)),
}
CUT = {"bfloat16 x 3": tl.bfloat16, "float16 x 3": tl.float16}  # products of halves of float32
EMBEDDED = 128  # points a program embeds
JOINED = 16  # slots a program joins


@triton.jit
def _product(x, w, HALVES: tl.constexpr, PRODUCTS: tl.constexpr):
    """x w, where float32 may be cut in two halves: of the four products of those, the least is left out."""
    if HALVES is None:
        found = tl.dot(x, w, input_precision=PRODUCTS, out_dtype=x.dtype)
    else:
        high, w_high = x.to(HALVES), w.to(HALVES)
        low, w_low = (x - high.to(tl.float32)).to(HALVES), (w - w_high.to(tl.float32)).to(HALVES)
        found = tl.dot(high, w_high, acc=tl.dot(high, w_low, acc=tl.dot(low, w_high)))
    return found


@triton.jit(do_not_specialize=["n"])
def _tokens(
    points, weight, bias, tokens, n, inputs, width,
    LAYERS: tl.constexpr, IN: tl.constexpr, D: tl.constexpr, T: tl.constexpr, PRODUCTS: tl.constexpr,
    KIND: tl.constexpr, HALVES: tl.constexpr,
):  # fmt: skip
    """A tile of points through the embedding and the normalisation; the last channel of tokens is one."""
    rows = tl.program_id(0) * T + tl.arange(0, T)
    before, dims = tl.arange(0, IN), tl.arange(0, D)
    there = rows[:, None] < n
    given = there & (before[None, :] < inputs)
    x = tl.load(points + rows[:, None].to(tl.int64) * inputs + before[None, :], mask=given, other=0.0)
    x = x.to(KIND)
    for layer in tl.static_range(LAYERS):
        from_dims = before if layer == 0 else dims
        w = tl.load(weight + layer * D * D + from_dims[:, None] * D + dims[None, :]).to(KIND)
        x = _product(x, w, HALVES, PRODUCTS) + tl.load(bias + layer * D + dims)[None, :]
        if layer + 1 < LAYERS:
            x = tl.maximum(x, 0.0)
    x = x * tl.rsqrt(tl.sum(x * x, 1) / width + 1e-5)[:, None]
    x = tl.where((dims == D - 1)[None, :], 1.0, x)
    tl.store(
        tokens + rows[:, None].to(tl.int64) * D + dims[None, :], x.to(tokens.dtype.element_ty), mask=there
    )


@triton.jit
def _met(
    a, tokens, bias, at, stop, m, seen,
    BIASED: tl.constexpr, RAGGED: tl.constexpr, LIFT: tl.constexpr, D: tl.constexpr, T: tl.constexpr,
    PRODUCTS: tl.constexpr,
):  # fmt: skip
    """Running softmaxes after one more tile of tokens."""
    rows, dims = at + tl.arange(0, T), tl.arange(0, D)
    place = tokens + rows[:, None] * D + dims[None, :]
    if RAGGED:
        h = tl.load(place, mask=(rows < stop)[:, None], other=0.0)
    else:
        h = tl.load(place)
    scores = tl.dot(a, tl.trans(h), input_precision=PRODUCTS)
    if BIASED:
        extra = tl.load(bias + rows, mask=rows < stop, other=-float("inf"))
        scores += extra[None, :] * LOG2E
        scores = tl.where((extra > NOTHING)[None, :], scores, -float("inf"))
    elif RAGGED:
        scores = tl.where((rows < stop)[None, :], scores, -float("inf"))
    top = tl.maximum(m, tl.max(scores, 1))
    shares = tl.exp2(scores - (top - LIFT)[:, None])
    seen = tl.dot(shares.to(h.dtype), h, acc=seen * tl.exp2(m - top)[:, None], input_precision=PRODUCTS)
    return top, seen


@triton.jit(do_not_specialize=["n", "stretch", "new"])
def _softmax(
    tokens, bias, absorbed, top, acc, n, stretch, slots, new,
    BIASED: tl.constexpr, LIFT: tl.constexpr, S: tl.constexpr, D: tl.constexpr, T: tl.constexpr,
    PRODUCTS: tl.constexpr,
):  # fmt: skip
    """The softmaxes of a few slots over one stretch of one task's tokens."""
    block, part, task = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    rows, dims = block * S + tl.arange(0, S), tl.arange(0, D)
    a = tl.load(absorbed + rows[:, None] * D + dims[None, :])
    place = (task * tl.num_programs(1) + part) * slots + rows
    old = rows >= new  # all of them are, or none
    m = tl.load(top + place, mask=old, other=NOTHING)
    seen = tl.load(acc + place[:, None] * D + dims[None, :], mask=old[:, None], other=0.0)
    tokens += task.to(tl.int64) * n * D
    bias += task * n
    start = part * stretch
    stop = tl.minimum(start + stretch, n)
    whole = start + tl.maximum(stop - start, 0) // T * T
    for at in range(start, whole, T):
        m, seen = _met(a, tokens, bias, at, stop, m, seen, BIASED, False, LIFT, D, T, PRODUCTS)
    if whole < stop:
        m, seen = _met(a, tokens, bias, whole, stop, m, seen, BIASED, True, LIFT, D, T, PRODUCTS)
    tl.store(top + place, m)
    tl.store(acc + place[:, None] * D + dims[None, :], seen)


@triton.jit(do_not_specialize=["parts"])
def _joined(
    top, acc, score, project, shift, value, lse, parts, padded, slots, channels,
    LIFT: tl.constexpr, S: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """The stretches of one task as one softmax, in float64, and its mean tokens projected to values."""
    own, head, task = tl.program_id(0) * S + tl.arange(0, S), tl.program_id(1), tl.program_id(2)
    there, rows, dims = own < slots, head * slots + own, tl.arange(0, D)
    m, seen = tl.full((S,), NOTHING, tl.float64), tl.zeros((S, D), tl.float64)
    for part in range(parts):
        place = (task * parts + part) * padded + rows
        here = tl.load(top + place, mask=there, other=NOTHING).to(tl.float64)
        best = tl.maximum(m, here)
        keep, take = tl.exp2(m - best), tl.exp2(here - best)
        more = tl.load(acc + place[:, None] * D + dims[None, :], mask=there[:, None], other=0.0)
        seen = seen * keep[:, None] + more.to(tl.float64) * take[:, None]
        m = best
    sums = tl.sum(tl.where((dims == D - 1)[None, :], seen, 0.0), 1)
    nothing = sums == 0.0
    sums = tl.where(nothing, 1.0, sums)
    mean = seen / sums[:, None]
    place = task.to(tl.int64) * tl.num_programs(1) * slots + rows
    found = (m - LIFT + tl.log2(sums)) * LN2 + tl.load(score + rows, mask=there, other=0.0)
    tl.store(lse + place, tl.where(nothing, NOTHING * 2.0, found), mask=there)
    for c in range(channels):
        w = tl.load(project + (head * channels + c) * D + dims)
        v = tl.sum(mean * w[None, :], 1) + tl.load(shift + head * channels + c)
        tl.store(value + place * channels + c, tl.where(nothing, 0.0, v), mask=there)


def tokens_of(
    points: Float[Tensor, "n i"], weight: Float[Tensor, "l d d"], bias: Float[Tensor, "l d"],
    tokens: Float[Tensor, "n d"], *, width: int, products: str,
) -> None:  # fmt: skip
    """Write the normalised tokens of points; `weight` as (in, out)."""
    n, inputs = points.shape
    layers, d, _ = weight.shape
    wide, halves = products == "float64", CUT.get(products)
    tile = 16 if n <= 16 else EMBEDDED if d <= 64 and not wide else EMBEDDED // 2
    launch(
        _tokens, (triton.cdiv(n, tile),), points, weight, bias, tokens, n, inputs, width,
        LAYERS=layers, IN=max(16, triton.next_power_of_2(inputs)), D=d, T=tile,
        PRODUCTS="ieee" if wide or halves else products, KIND=tl.float64 if wide else tl.float32,
        HALVES=halves, num_warps=max(4, tile // 16),
    )  # fmt: skip


def softmax(
    tokens: Float[Tensor, "bn d"],
    bias: Float[Tensor, "b n"] | None,
    absorbed: Float[Tensor, "s d"],
    partial: tuple[Float[Tensor, "b p s"], Float[Tensor, "b p s d"]],
    *,
    points: int,
    first: bool,
    precision: Precision,
) -> None:
    """Let every task's tokens be met by all slots, one stretch of them for each part of `partial`."""
    tasks, parts, slots = partial[0].shape
    tiles = precision.cut(tokens.shape[1])
    stretch = triton.cdiv(triton.cdiv(points, parts), tiles.tokens) * tiles.tokens
    launch(
        _softmax, (slots // tiles.rows, parts, tasks), tokens, tokens if bias is None else bias, absorbed,
        *partial, points, stretch, slots, slots if first else 0,
        BIASED=bias is not None, LIFT=precision.lift, S=tiles.rows, D=tokens.shape[1], T=tiles.tokens,
        PRODUCTS=precision.products, num_warps=tiles.warps, num_stages=tiles.stages,
    )  # fmt: skip


def joined(
    partial: tuple[Float[Tensor, "b p r"], Float[Tensor, "b p r d"]],
    score: Float[Tensor, " hs"],
    project: Float[Tensor, "h c d"],
    shift: Float[Tensor, "h c"],
    value: Float[Tensor, "b h s c"],
    lse: Float[Tensor, "b h s"],
    precision: Precision,
) -> None:
    """Write value and lse of all parts together, in float64."""
    _, parts, padded, d = partial[1].shape
    tasks, heads, slots, channels = value.shape
    launch(
        _joined, (triton.cdiv(slots, JOINED), heads, tasks), *partial, score, project, shift, value, lse,
        parts, padded, slots, channels, LIFT=precision.lift, S=JOINED, D=d,
    )  # fmt: skip


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
    """Launch on the device the tensors are on, whichever is the current one."""
    device = arguments[0].device
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        kernel[grid](*arguments, **options)
        return
    with torch.cuda.device(device):
        kernel[grid](*arguments, **options)

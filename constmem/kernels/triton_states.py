"""States on a GPU, in Triton: merged, given a point more; and checksums of the memory that weights lie in.

One point's softmax is one: its scores are the lse, its values every slot's value. So a program needs no more
of it than a token, which it makes itself where that takes less time than another launch. Whether the weights
are still those that it was made by is verified by other programs of the same launch.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor

from constmem.kernels.triton_observe import launch

WORDS = 4096  # that a program reads for a checksum
MERGED = 64  # slots a program merges


@triton.jit
def mixed_words(row, BITS: tl.constexpr, SIZE: tl.constexpr):
    """The sum of what each word and its place are mixed to: one to one, so no single word changes unseen."""
    at, where, words, first = tl.arange(0, SIZE), tl.load(row), tl.load(row + 1), tl.load(row + 2)
    kind = tl.uint32 if BITS == 32 else tl.uint16 if BITS == 16 else tl.uint8
    word = tl.load(where.to(tl.pointer_type(kind)) + at, mask=at < words, other=0)
    x = ((first + at).to(tl.uint64) << 32) | word.to(tl.uint64)
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    x = tl.where(at < words, x ^ (x >> 31), 0)
    return tl.sum(x.to(tl.int64), 0)


@triton.jit
def _checksum(table, sums, BITS: tl.constexpr, SIZE: tl.constexpr):
    """The sum of one piece of memory."""
    piece = tl.program_id(0).to(tl.int64)
    tl.store(sums + piece, mixed_words(table + 3 * piece, BITS, SIZE))


def checksum(table: Int[Tensor, "p 3"], bits: int, sums: Int[Tensor, " p"]) -> None:
    """A number for each piece of memory (address, words, words before it), in which all its bits are."""
    launch(_checksum, (len(table),), table, sums, BITS=bits, SIZE=WORDS)


@triton.jit
def _mixed(a, b, mine, theirs):
    """log(exp(a) + exp(b)), and what lies between the two values by sigmoid(b - a)."""
    lesser = tl.exp(-tl.abs(a - b))  # NaN if one of them is, which a minimum or maximum would lose
    first = (a >= b)[:, None]
    near, far = tl.where(first, mine, theirs), tl.where(first, theirs, mine)
    return tl.maximum(a, b) + tl.log(1.0 + lesser), near + (far - near) * (lesser / (1.0 + lesser))[:, None]


@triton.jit(do_not_specialize=["slots", "shared"])
def _merge(
    value, lse, other, other_lse, merged, merged_lse, slots, channels, shared,
    S: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """A few slots of two states as those of one."""
    rows, cs = tl.program_id(0).to(tl.int64) * S + tl.arange(0, S), tl.arange(0, C)
    there = rows < slots
    a, b = tl.load(lse + rows, mask=there, other=0.0), tl.load(other_lse + rows, mask=there, other=0.0)
    real = there[:, None] & (cs < channels)[None, :]
    mine = tl.load(value + rows[:, None] * channels + cs[None, :], mask=real, other=0.0)
    theirs = tl.load(other + (rows // shared)[:, None] * channels + cs[None, :], mask=real, other=0.0)
    found, out = _mixed(a, b, mine, theirs)
    tl.store(merged_lse + rows, found, mask=there)
    tl.store(merged + rows[:, None] * channels + cs[None, :], out, mask=real)


@triton.jit
def _token(point, weight, bias, inputs, WIDTH: tl.constexpr, LAYERS: tl.constexpr, D: tl.constexpr):
    """One point through the embedding and the normalisation, in float64."""
    dims = tl.arange(0, D)
    x = tl.load(point + dims, mask=dims < inputs, other=0.0).to(tl.float64)
    for layer in tl.static_range(LAYERS):
        w = tl.load(weight + layer * D * D + dims[:, None] * D + dims[None, :])
        x = tl.sum(w.to(tl.float64) * x[:, None], 0) + tl.load(bias + layer * D + dims)
        if layer + 1 < LAYERS:
            x = tl.maximum(x, 0.0)
    return (x * tl.rsqrt(tl.sum(x * x, 0) / WIDTH + 1e-5)).to(tl.float32)


@triton.jit
def _taken(
    points, embedding, embedding_bias, weight, bias, value, lse, merged, merged_lse, copy, tasks, inputs,
    COPY: tl.constexpr, EMBEDDED: tl.constexpr, LAYERS: tl.constexpr, WIDTH: tl.constexpr,
    HEADS: tl.constexpr, SLOTS: tl.constexpr, CHANNELS: tl.constexpr, S: tl.constexpr, C: tl.constexpr,
    D: tl.constexpr,
):  # fmt: skip
    """A few slots of one head after one more point (or its token), for every task of a stride."""
    own, head = tl.program_id(0) * S + tl.arange(0, S), tl.program_id(1)
    cs, dims, there = tl.arange(0, C), tl.arange(0, D), own < SLOTS
    used, real = (dims < WIDTH)[None, :], there[:, None] & (cs < CHANNELS)[None, :]
    rows, values = head * SLOTS + own, HEADS * SLOTS + head * CHANNELS + cs
    a = tl.load(weight + rows[:, None] * WIDTH + dims[None, :], mask=there[:, None] & used, other=0.0)
    asked = (cs < CHANNELS)[:, None] & used
    w = tl.load(weight + values[:, None] * WIDTH + dims[None, :], mask=asked, other=0.0)
    score = tl.load(bias + rows, mask=there, other=0.0)
    shift = tl.load(bias + values, mask=cs < CHANNELS, other=0.0)
    for task in range(tl.program_id(2), tasks, tl.num_programs(2)):
        if EMBEDDED:
            h = tl.load(points + task * D + dims)
        else:
            h = _token(points + task * inputs, embedding, embedding_bias, inputs, WIDTH, LAYERS, D)
        here, seen = tl.sum(a * h[None, :], 1) + score, tl.sum(w * h[None, :], 1) + shift
        place = task * (HEADS * SLOTS) + rows.to(tl.int64)
        at = place[:, None] * CHANNELS + cs[None, :]
        before = tl.load(lse + place, mask=there, other=0.0)
        mine = tl.load(value + at, mask=real, other=0.0)
        found, out = _mixed(before, here.to(tl.float64), mine, seen.to(tl.float64)[None, :])
        tl.store(merged_lse + place, found, mask=there)
        tl.store(merged + at, out, mask=real)
        if COPY:
            if tl.program_id(0) + head == 0:
                given, number = dims < inputs, task * inputs + dims
                tl.store(copy + number, tl.load(points + number, mask=given, other=0.0), mask=given)


@triton.jit(do_not_specialize=["tasks", "pieces"])
def _extended(
    points, embedding, embedding_bias, weight, bias, value, lse, merged, merged_lse, table, sums, copy, tasks,
    inputs, pieces,
    BITS: tl.constexpr, WORDS: tl.constexpr, COPY: tl.constexpr, EMBEDDED: tl.constexpr, LAYERS: tl.constexpr,
    WIDTH: tl.constexpr, HEADS: tl.constexpr, SLOTS: tl.constexpr, CHANNELS: tl.constexpr, S: tl.constexpr,
    C: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """One more point for each task; programs beyond those of heads sum pieces of memory meanwhile."""
    head = tl.program_id(1)
    if head < HEADS:
        _taken(
            points, embedding, embedding_bias, weight, bias, value, lse, merged, merged_lse, copy, tasks,
            inputs, COPY, EMBEDDED, LAYERS, WIDTH, HEADS, SLOTS, CHANNELS, S, C, D,
        )  # fmt: skip
    else:
        piece = ((head - HEADS) * tl.num_programs(0) + tl.program_id(0)).to(tl.int64)
        if (piece < pieces) & (tl.program_id(2) == 0):
            tl.store(sums + piece, mixed_words(table + 3 * piece, BITS, WORDS))


def merge(
    value: Float[Tensor, "*h s c"],
    lse: Float[Tensor, "*h s"],
    other: Float[Tensor, "*h t c"],
    other_lse: Float[Tensor, "*h s"],
) -> tuple[Float[Tensor, "*h s c"], Float[Tensor, "*h s"]]:
    """The algebra's `merge` of contiguous float64 tensors; `other` has one value, or one for each slot."""
    merged, merged_lse = torch.empty_like(value), torch.empty_like(lse)
    slots, channels = lse.numel(), value.shape[-1]
    shared = value.shape[-2] // other.shape[-2]
    launch(
        _merge, (triton.cdiv(slots, MERGED),), value, lse, other, other_lse, merged, merged_lse,
        slots, channels, shared, S=MERGED, C=triton.next_power_of_2(channels),
    )  # fmt: skip
    return merged, merged_lse


class Check(NamedTuple):
    """Memory to sum, and where the results go: into the host's memory, which a GPU can write to."""

    table: Int[Tensor, "p 3"]  # pieces: address, words, words before it
    bits: int  # of a word
    sums: Int[Tensor, " p"]  # of each piece
    copy: Float[Tensor, " n"]  # of the numbers of points


def extended(
    points: Float[Tensor, "b 1 i"] | Float[Tensor, "b i"],
    embedding: tuple[Float[Tensor, "l d d"], Float[Tensor, "l d"]],
    single: tuple[Float[Tensor, "sv w"], Float[Tensor, " sv"]],
    value: Float[Tensor, "b *h s c"],
    lse: Float[Tensor, "b *h s"],
    programs: int,
    *,
    embedded: bool,
    check: Check | None = None,
) -> tuple[Float[Tensor, "b *h s c"], Float[Tensor, "b *h s"]]:
    """Contiguous float64 states with one point more each; `single` gives scores and values of its token.

    Args:
        check: what to sum in the same launch; points that are not embedded yet are copied by it.
    """
    merged, merged_lse = torch.empty_like(value), torch.empty_like(lse)
    tasks, *_, slots, channels = value.shape
    (layers, d, _), (outputs, width) = embedding[0].shape, single[0].shape
    pieces, heads = -(-slots // MERGED), outputs // (slots + channels)  # triton.cdiv takes microseconds
    nothing = lse.view(torch.int64)
    table, bits, sums, copy = check or (nothing[:0], 32, nothing, lse)
    grid = pieces, heads - len(table) // -pieces, max(1, min(tasks, programs // (pieces * heads)))
    launch(
        _extended, grid, points, *embedding, *single, value, lse, merged, merged_lse, table, sums, copy,
        tasks, points.shape[-1], len(table), BITS=bits, WORDS=WORDS, COPY=check is not None and not embedded,
        EMBEDDED=embedded, LAYERS=layers, WIDTH=width, HEADS=heads, SLOTS=slots, CHANNELS=channels, S=MERGED,
        C=1 << (channels - 1).bit_length(), D=d, num_warps=4 if embedded and d <= 64 else 8,
    )  # fmt: skip
    return merged, merged_lse

"""A whole attention layer in one launch forward, and a few backward, written in Triton.

    q = norm(x) Wq',  k, v = norm(y) Wkv',  out = sum over heads softmax(q k' / sqrt(c)) v Wo' + bo + residual

All keys of a task fit into one tile, so that a softmax is complete at once and nothing of it is kept. A head
is told from the others by zeros in their place: tiles of its own few channels would be no faster, and some
compilers read beyond such narrow ones. The backward pass computes it again, a program for each head of each
task, and writes the gradients of q, k and v and the heads' results. Then one kernel takes the gradients back
through projection and normalisation, dx = J' (dq Wq + dk Wk + dv Wv); another multiplies them with what was
projected, dW = dq' norm(x), a program for each weight and part of rows.
"""

from collections.abc import Sequence
from typing import Any

import triton
import triton.language as tl
from jaxtyping import Bool, Float
from torch import Tensor

from constmem.kernels.triton_feed_forward import norm_backward, normalised, normed_rows, products
from constmem.kernels.triton_observe import LN2, LOG2E, NOTHING, launch

# Queries of a tile, and warps: what a program holds in its registers without spilling any.
FORWARD, WIDE, BACKWARD = (64, 4), (32, 8), (32, 8)


@triton.jit
def _seen(mask, task, n, MASKED: tl.constexpr, N: tl.constexpr):
    """Which keys are real."""
    keys = tl.arange(0, N)
    seen = keys < n
    if MASKED:
        seen = seen & (tl.load(mask + task * n + keys, mask=seen, other=0) != 0)
    return seen


@triton.jit
def _projected(tokens, weight, D: tl.constexpr, PRODUCTS: tl.constexpr):
    """Tokens times D rows of a weight."""
    ds = tl.arange(0, D)
    w = tl.load(weight + ds[:, None] * D + ds[None, :])
    return tl.dot(tokens, tl.trans(w.to(tokens.dtype)), input_precision=PRODUCTS)


@triton.jit
def _shares(q, k, seen, PRODUCTS: tl.constexpr):
    """Softmax of scores to base two over the keys that are seen: shares, and what to multiply them with."""
    scores = tl.dot(q, tl.trans(k), input_precision=PRODUCTS)
    scores = tl.where(seen[None, :], scores, -float("inf"))
    shares = tl.exp2(scores - tl.maximum(tl.max(scores, 1), NOTHING)[:, None])
    total = tl.sum(shares, 1)
    return shares, (1.0 / tl.where(total == 0.0, 1.0, total))[:, None]  # nothing seen: shares of zero


@triton.jit(do_not_specialize=["m", "n"])
def _forward(
    x, y, mask, scale, shift, y_scale, y_shift, query, key_value, project, bias, out, m, n, eps, rate,
    MASKED: tl.constexpr, NORMED: tl.constexpr, OPERANDS: tl.constexpr, PRODUCTS: tl.constexpr,
    D: tl.constexpr, C: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """A tile of one task's queries through the layer."""
    task, ds = tl.program_id(0), tl.arange(0, D)  # the only axis without a limit is that of tasks
    rows = tl.program_id(1) * M + tl.arange(0, M)
    x, y, out = x + task * m * D, y + task * n * D, out + task * m * D
    tokens = normed_rows(y, y_scale, y_shift, tl.arange(0, N), n, eps, D).to(OPERANDS)
    seen = _seen(mask, task, n, MASKED, N)
    place, there = rows[:, None] * D + ds[None, :], (rows < m)[:, None]
    asking = normed_rows(x, scale, shift, rows, m, eps, D)
    if NORMED:
        result = asking + tl.load(bias + ds)[None, :]
    else:
        result = tl.load(x + place, mask=there, other=0.0) + tl.load(bias + ds)[None, :]
    q = _projected(asking.to(OPERANDS), query, D, PRODUCTS) * (rate * LOG2E)
    k = _projected(tokens, key_value, D, PRODUCTS).to(OPERANDS)
    v = _projected(tokens, key_value + D * D, D, PRODUCTS).to(OPERANDS)
    value = tl.zeros((M, D), tl.float32)
    for head in range(D // C):
        own = (ds // C == head)[None, :]
        shares, rest = _shares(tl.where(own, q, 0.0).to(OPERANDS), k, seen, PRODUCTS)
        value = tl.where(own, tl.dot(shares.to(OPERANDS), v, input_precision=PRODUCTS) * rest, value)
    result += _projected(value.to(OPERANDS), project, D, PRODUCTS)
    tl.store(out + place, result, mask=there)


@triton.jit(do_not_specialize=["m", "n"])
def _backward(
    x, y, mask, scale, shift, y_scale, y_shift, query, key_value, project, grad, values, grad_q, grad_kv,
    m, n, eps, rate,
    MASKED: tl.constexpr, OPERANDS: tl.constexpr, PRODUCTS: tl.constexpr,
    D: tl.constexpr, C: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """The gradients of one head's q, k and v in one task, and the head's result."""
    task, ds = tl.program_id(0), tl.arange(0, D)
    own = (ds // C == tl.program_id(1))[None, :]
    x, y, grad = x + task * m * D, y + task * n * D, grad + task * m * D
    keys, seen = tl.arange(0, N), _seen(mask, task, n, MASKED, N)
    tokens = normed_rows(y, y_scale, y_shift, keys, n, eps, D).to(OPERANDS)
    k = _projected(tokens, key_value, D, PRODUCTS).to(OPERANDS)
    v = _projected(tokens, key_value + D * D, D, PRODUCTS).to(OPERANDS)
    grad_k, grad_v = tl.zeros((N, D), tl.float32), tl.zeros((N, D), tl.float32)
    for start in range(0, m, M):
        rows = start + tl.arange(0, M)
        there = (rows < m)[:, None]
        g = tl.load(grad + rows[:, None] * D + ds[None, :], mask=there, other=0.0).to(OPERANDS)
        back = tl.load(project + ds[:, None] * D + ds[None, :]).to(OPERANDS)
        grad_value = tl.dot(g, back, input_precision=PRODUCTS)
        asking = normed_rows(x, scale, shift, rows, m, eps, D).to(OPERANDS)
        q = tl.where(own, _projected(asking, query, D, PRODUCTS) * (rate * LOG2E), 0.0).to(OPERANDS)
        shares, rest = _shares(q, k, seen, PRODUCTS)
        value = tl.dot(shares.to(OPERANDS), v, input_precision=PRODUCTS) * rest
        grad_value = tl.where(own, grad_value * rest, 0.0)  # which is all that has to be multiplied
        mean = tl.sum(value * grad_value, 1)
        grad_value = grad_value.to(OPERANDS)
        grad_v = tl.dot(tl.trans(shares.to(OPERANDS)), grad_value, acc=grad_v, input_precision=PRODUCTS)
        grad_scores = tl.dot(grad_value, tl.trans(v), input_precision=PRODUCTS)
        grad_scores = (shares * (grad_scores - mean[:, None])).to(OPERANDS)
        grad_k = tl.dot(tl.trans(grad_scores), q, acc=grad_k, input_precision=PRODUCTS)
        here = tl.dot(grad_scores, k, input_precision=PRODUCTS) * rate
        place = (task * m + rows)[:, None] * D + ds[None, :]
        tl.store(grad_q + place, here.to(OPERANDS), mask=there & own)
        tl.store(values + place, value.to(OPERANDS), mask=there & own)
    place, there = (task * n + keys)[:, None] * 2 * D + ds[None, :], (keys < n)[:, None] & own
    tl.store(grad_kv + place, (grad_k * LN2).to(OPERANDS), mask=there)  # q is to base two
    tl.store(grad_kv + place + D, grad_v.to(OPERANDS), mask=there)


def forward(
    x: Float[Tensor, "b m d"],
    y: Float[Tensor, "b n d"],
    mask: Bool[Tensor, "b n"] | None,
    weights: Sequence[Tensor],
    out: Float[Tensor, "b m d"],
    *,
    heads: int,
    eps: float,
    normed: bool,
    half: bool,
) -> None:
    """Write the layer's result; `weights`: scale and shift of x and of y, then q's, kv's, out's, a bias."""
    tiles = _tiles(x, y, heads, FORWARD if y.shape[1] <= 128 else WIDE, half)
    launch(
        _forward, (len(x), triton.cdiv(x.shape[1], tiles["M"])), x, y, y if mask is None else mask, *weights,
        out, x.shape[1], y.shape[1], eps, tiles["C"] ** -0.5, MASKED=mask is not None, NORMED=normed, **tiles,
    )  # fmt: skip


def backward(
    x: Float[Tensor, "b m d"],
    y: Float[Tensor, "b n d"],
    mask: Bool[Tensor, "b n"] | None,
    weights: Sequence[Tensor],
    grad: Float[Tensor, "b m d"],
    found: tuple[Float[Tensor, "b m d"], Float[Tensor, "b m d"], Float[Tensor, "b n dd"]],
    *,
    heads: int,
    eps: float,
    half: bool,
) -> None:
    """Write the heads' results and the gradients of q and of k and v; `weights` but the last bias."""
    tiles = _tiles(x, y, heads, BACKWARD, half)
    launch(
        _backward, (len(x), heads), x, y, y if mask is None else mask, *weights, grad, *found,
        x.shape[1], y.shape[1], eps, tiles["C"] ** -0.5, MASKED=mask is not None, **tiles,
    )  # fmt: skip


def _tiles(x: Tensor, y: Tensor, heads: int, cut: tuple[int, int], half: bool) -> dict[str, Any]:
    d, (queries, warps) = x.shape[-1], cut
    sizes = {"D": d, "C": d // heads, "M": queries, "N": max(16, triton.next_power_of_2(y.shape[1]))}
    return products(half) | sizes | {"num_warps": warps, "num_stages": 1}


@triton.jit(do_not_specialize=["rows"])
def _inward(
    x, scale, query, key_value, grad_q, grad_kv, grad, grad_x, partial, rows, eps,
    ASKS: tl.constexpr, ANSWERS: tl.constexpr, NORMED: tl.constexpr, OPERANDS: tl.constexpr,
    PRODUCTS: tl.constexpr, D: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    """A tile of rows back through the projections to q (ASKS) or k and v (ANSWERS) and the normalisation."""
    tile, ds = tl.program_id(0), tl.arange(0, D)
    place = tile * T + tl.arange(0, T)
    there, square = (place < rows)[:, None], ds[:, None] * D + ds[None, :]
    place = place[:, None] * D + ds[None, :]
    gn = tl.zeros((T, D), tl.float32)
    if ASKS:
        w = tl.load(query + square).to(OPERANDS)
        gn = tl.dot(tl.load(grad_q + place, mask=there, other=0.0), w, acc=gn, input_precision=PRODUCTS)
    if ANSWERS:
        wide = 2 * place - ds[None, :]
        w = tl.load(key_value + square).to(OPERANDS)
        gn = tl.dot(tl.load(grad_kv + wide, mask=there, other=0.0), w, acc=gn, input_precision=PRODUCTS)
        w = tl.load(key_value + D * D + square).to(OPERANDS)
        gn = tl.dot(tl.load(grad_kv + wide + D, mask=there, other=0.0), w, acc=gn, input_precision=PRODUCTS)
    unit, rate = normalised(tl.load(x + place, mask=there, other=0.0), eps, D)
    partial += tile * 3 * D + ds
    g = tl.zeros((T, D), tl.float32)
    if ASKS:  # they have the residual
        g = tl.load(grad + place, mask=there, other=0.0)
    if NORMED:
        gn += g
    tl.store(partial, tl.sum(g, 0))
    tl.store(partial + D, tl.sum(gn * unit, 0))
    tl.store(partial + 2 * D, tl.sum(gn, 0))
    gx = norm_backward(gn, unit, rate, tl.load(scale + ds), D)
    if not NORMED:
        gx += g
    tl.store(grad_x + place, gx, mask=there)


@triton.jit
def _product(
    left, right, scale, shift, rows, eps, first,
    WIDE: tl.constexpr, NORM: tl.constexpr, OPERANDS: tl.constexpr, PRODUCTS: tl.constexpr,
    D: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    """left' right over some of the rows, for D of `left`'s channels; `right` may have to be normalised."""
    ds, found = tl.arange(0, D), tl.zeros((D, D), tl.float32)
    for tile in range(tl.program_id(1), tl.cdiv(rows, T), tl.num_programs(1)):
        place = tile * T + tl.arange(0, T)
        there = (place < rows)[:, None]
        a = tl.load(left + place[:, None] * WIDE + (first + ds)[None, :], mask=there, other=0.0)
        if NORM:
            b = normed_rows(right, scale, shift, place, rows, eps, D)
        else:
            b = tl.load(right + place[:, None] * D + ds[None, :], mask=there, other=0.0)
        found = tl.dot(tl.trans(a.to(OPERANDS)), b.to(OPERANDS), acc=found, input_precision=PRODUCTS)
    return found


@triton.jit(do_not_specialize=["asking", "answering"])
def _outer(
    x, y, scale, shift, y_scale, y_shift, grad, values, grad_q, grad_kv, partial, asking, answering, eps,
    OPERANDS: tl.constexpr, PRODUCTS: tl.constexpr, D: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    """The gradient of one square weight over some of the rows: q's, out's, k's or v's."""
    piece, ds = tl.program_id(0), tl.arange(0, D)
    if piece == 0:
        found = _product(grad_q, x, scale, shift, asking, eps, 0, D, True, OPERANDS, PRODUCTS, D, T)
    elif piece == 1:
        found = _product(grad, values, scale, shift, asking, eps, 0, D, False, OPERANDS, PRODUCTS, D, T)
    else:
        found = _product(
            grad_kv, y, y_scale, y_shift, answering, eps, (piece - 2) * D, 2 * D, True, OPERANDS, PRODUCTS,
            D, T,
        )  # fmt: skip
    partial += (tl.program_id(1) * 4 + piece) * D * D
    tl.store(partial + ds[:, None] * D + ds[None, :], found)


def inward(
    x: Float[Tensor, "*b d"], scale: Float[Tensor, " d"], asks: tuple[Tensor, Tensor, Tensor] | None,
    answers: tuple[Tensor, Tensor] | None, grad_x: Float[Tensor, "*b d"], partial: Float[Tensor, "t v"], *,
    tile: int, eps: float, normed: bool, half: bool,
) -> None:  # fmt: skip
    """Write the gradient of x, and for every tile those of out's bias, scale and shift.

    Args:
        asks: the weight of q, the gradient of q, and that of the layer's result, where x asks.
        answers: the weight of k and v, and their gradients, where x answers.
    """
    query, grad_q, grad = asks or (x, x, x)
    key_value, grad_kv = answers or (x, x)
    launch(
        _inward, (len(partial),), x, scale, query, key_value, grad_q, grad_kv, grad, grad_x, partial,
        x.numel() // x.shape[-1], eps, ASKS=asks is not None, ANSWERS=answers is not None, NORMED=normed,
        **products(half), D=x.shape[-1], T=tile, num_warps=4,
    )  # fmt: skip


def outer(
    x: Float[Tensor, "b m d"],
    y: Float[Tensor, "b n d"],
    norms: Sequence[Tensor],
    grad: Float[Tensor, "b m d"],
    found: tuple[Float[Tensor, "b m d"], Float[Tensor, "b m d"], Float[Tensor, "b n dd"]],
    partial: Float[Tensor, "p 4 d d"],
    *,
    tile: int,
    eps: float,
    half: bool,
) -> None:
    """Write the gradients of q's, out's, k's and v's weights over parts of the rows, from `backward`'s."""
    d = x.shape[-1]
    launch(
        _outer, (4, len(partial)), x, y, *norms, grad, *found, partial, x.numel() // d, y.numel() // d, eps,
        **products(half), D=d, T=tile, num_warps=4,
    )  # fmt: skip

"""A whole attention layer in one launch forward, and a few backward, written in Triton.

    q = norm(x) Wq',  k, v = norm(y) Wkv',  out = sum over heads softmax(q k' / sqrt(c)) v Wo' + bo + residual

All keys of a task fit into one tile, so that a softmax is complete at once and nothing of it is kept. The
backward pass computes it again, a program for each head of each task, and writes the gradients of q, k and v
and the heads' results; the kernels of `triton_projection.py` take them from there.
"""

from collections.abc import Sequence
from typing import Any

import triton
import triton.language as tl
from jaxtyping import Bool, Float
from torch import Tensor

from constmem.kernels.triton import LN2, LOG2E, NOTHING, launch
from constmem.kernels.triton_norm import normed_rows, products

QUERIES = 64  # of a tile


@triton.jit
def _seen(mask, task, n, MASKED: tl.constexpr, N: tl.constexpr):
    """Which keys are real."""
    keys = tl.arange(0, N)
    seen = keys < n
    if MASKED:
        seen = seen & (tl.load(mask + task * n + keys, mask=seen, other=0) != 0)
    return seen


@triton.jit
def _projected(tokens, weight, first, D: tl.constexpr, C: tl.constexpr, PRODUCTS: tl.constexpr):
    """Tokens times C rows of a weight, from `first` on."""
    w = tl.load(weight + (first + tl.arange(0, C))[:, None] * D + tl.arange(0, D)[None, :])
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
    task, ds, cs = tl.program_id(1), tl.arange(0, D), tl.arange(0, C)
    rows = tl.program_id(0) * M + tl.arange(0, M)
    x, y, out = x + task * m * D, y + task * n * D, out + task * m * D
    tokens = normed_rows(y, y_scale, y_shift, tl.arange(0, N), n, eps, D).to(OPERANDS)
    seen = _seen(mask, task, n, MASKED, N)
    place, there = rows[:, None] * D + ds[None, :], (rows < m)[:, None]
    asking = normed_rows(x, scale, shift, rows, m, eps, D)
    if NORMED:
        result = asking + tl.load(bias + ds)[None, :]
    else:
        result = tl.load(x + place, mask=there, other=0.0) + tl.load(bias + ds)[None, :]
    asking = asking.to(OPERANDS)
    for first in range(0, D, C):
        q = _projected(asking, query, first, D, C, PRODUCTS) * (rate * LOG2E)
        k = _projected(tokens, key_value, first, D, C, PRODUCTS).to(OPERANDS)
        v = _projected(tokens, key_value, D + first, D, C, PRODUCTS).to(OPERANDS)
        shares, rest = _shares(q.to(OPERANDS), k, seen, PRODUCTS)
        value = tl.dot(shares.to(OPERANDS), v, input_precision=PRODUCTS) * rest
        back = tl.load(project + ds[None, :] * D + (first + cs)[:, None]).to(OPERANDS)  # (c, d)
        result = tl.dot(value.to(OPERANDS), back, acc=result, input_precision=PRODUCTS)
    tl.store(out + place, result, mask=there)


@triton.jit(do_not_specialize=["m", "n"])
def _backward(
    x, y, mask, scale, shift, y_scale, y_shift, query, key_value, project, grad, values, grad_q, grad_kv,
    m, n, eps, rate,
    MASKED: tl.constexpr, OPERANDS: tl.constexpr, PRODUCTS: tl.constexpr,
    D: tl.constexpr, C: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """The gradients of one head's q, k and v in one task, and the head's result."""
    first, task, ds, cs = tl.program_id(0) * C, tl.program_id(1), tl.arange(0, D), tl.arange(0, C)
    x, y, grad = x + task * m * D, y + task * n * D, grad + task * m * D
    keys, seen = tl.arange(0, N), _seen(mask, task, n, MASKED, N)
    tokens = normed_rows(y, y_scale, y_shift, keys, n, eps, D).to(OPERANDS)
    k = _projected(tokens, key_value, first, D, C, PRODUCTS).to(OPERANDS)
    v = _projected(tokens, key_value, D + first, D, C, PRODUCTS).to(OPERANDS)
    grad_k, grad_v = tl.zeros((N, C), tl.float32), tl.zeros((N, C), tl.float32)
    for start in range(0, m, M):
        rows = start + tl.arange(0, M)
        there = (rows < m)[:, None]
        g = tl.load(grad + rows[:, None] * D + ds[None, :], mask=there, other=0.0).to(OPERANDS)
        back = tl.load(project + ds[:, None] * D + (first + cs)[None, :]).to(OPERANDS)  # (d, c)
        grad_value = tl.dot(g, back, input_precision=PRODUCTS)
        asking = normed_rows(x, scale, shift, rows, m, eps, D).to(OPERANDS)
        q = (_projected(asking, query, first, D, C, PRODUCTS) * (rate * LOG2E)).to(OPERANDS)
        shares, rest = _shares(q, k, seen, PRODUCTS)
        value = tl.dot(shares.to(OPERANDS), v, input_precision=PRODUCTS) * rest
        grad_value = grad_value * rest  # which is all that has to be multiplied
        mean = tl.sum(value * grad_value, 1)
        grad_value = grad_value.to(OPERANDS)
        grad_v = tl.dot(tl.trans(shares.to(OPERANDS)), grad_value, acc=grad_v, input_precision=PRODUCTS)
        grad_scores = tl.dot(grad_value, tl.trans(v), input_precision=PRODUCTS)
        grad_scores = (shares * (grad_scores - mean[:, None])).to(OPERANDS)
        grad_k = tl.dot(tl.trans(grad_scores), q, acc=grad_k, input_precision=PRODUCTS)
        here = tl.dot(grad_scores, k, input_precision=PRODUCTS) * rate
        place = (task * m + rows)[:, None] * D + (first + cs)[None, :]
        tl.store(grad_q + place, here.to(OPERANDS), mask=there)
        tl.store(values + place, value.to(OPERANDS), mask=there)
    place, there = (task * n + keys)[:, None] * 2 * D + (first + cs)[None, :], (keys < n)[:, None]
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
    tiles = _tiles(x, y, heads)
    launch(
        _forward, (triton.cdiv(x.shape[1], tiles["M"]), len(x)), x, y, y if mask is None else mask, *weights,
        out, x.shape[1], y.shape[1], eps, tiles["C"] ** -0.5, MASKED=mask is not None, NORMED=normed,
        **products(half), **tiles, num_warps=4,
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
    tiles = _tiles(x, y, heads)
    launch(
        _backward, (heads, len(x)), x, y, y if mask is None else mask, *weights, grad, *found,
        x.shape[1], y.shape[1], eps, tiles["C"] ** -0.5, MASKED=mask is not None,
        **products(half), **tiles, num_warps=4 if tiles["N"] <= 128 else 8,
    )  # fmt: skip


def _tiles(x: Tensor, y: Tensor, heads: int) -> dict[str, Any]:
    d = x.shape[-1]
    return {"D": d, "C": d // heads, "M": QUERIES, "N": max(16, triton.next_power_of_2(y.shape[1]))}

"""A whole attention layer in one launch forward, and a few backward, written in Triton.

    q = norm(x) Wq',  k, v = norm(y) Wkv',  out = sum over heads softmax(q k' / sqrt(c)) v Wo' + bo + residual

All keys of a task fit into one tile, so that a softmax is complete at once and nothing of it is kept. A head
is told from the others by zeros in their place: tiles of its own few channels would be no faster, and some
compilers read beyond such narrow ones. The backward pass computes it again, a program for each head of each
task, and writes the gradients of q, k and v and the heads' results; the kernels of `triton_projection.py`
take them from there.
"""

from collections.abc import Sequence
from typing import Any

import triton
import triton.language as tl
from jaxtyping import Bool, Float
from torch import Tensor

from constmem.kernels.triton import LN2, LOG2E, NOTHING, launch
from constmem.kernels.triton_norm import normed_rows, products

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

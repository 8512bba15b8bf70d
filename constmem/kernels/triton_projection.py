"""From the gradients of q, k and v to those of tokens and weights, written in Triton.

One kernel takes the gradients back through projection and normalisation, dx = J' (dq Wq + dk Wk + dv Wv);
another multiplies them with what was projected, dW = dq' norm(x), a program for each weight and part of rows.
"""

from collections.abc import Sequence

import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

from constmem.kernels.triton import launch
from constmem.kernels.triton_norm import norm_backward, normalised, normed_rows, products


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
        found = _product(
            grad_q, x, scale, shift, asking, eps, 0, D, True, OPERANDS, PRODUCTS, D, T
        )  # fmt: skip
    elif piece == 1:
        found = _product(
            grad, values, scale, shift, asking, eps, 0, D, False, OPERANDS, PRODUCTS, D, T
        )  # fmt: skip
    else:
        found = _product(
            grad_kv, y, y_scale, y_shift, answering, eps, (piece - 2) * D, 2 * D, True, OPERANDS, PRODUCTS,
            D, T,
        )  # fmt: skip
    partial += (tl.program_id(1) * 4 + piece) * D * D
    tl.store(partial + ds[:, None] * D + ds[None, :], found)


def inward(
    x: Float[Tensor, "*b d"],
    scale: Float[Tensor, " d"],
    asks: tuple[Tensor, Tensor, Tensor] | None,
    answers: tuple[Tensor, Tensor] | None,
    grad_x: Float[Tensor, "*b d"],
    partial: Float[Tensor, "t v"],
    *,
    tile: int,
    eps: float,
    normed: bool,
    half: bool,
) -> None:
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

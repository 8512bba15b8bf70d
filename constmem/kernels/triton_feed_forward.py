"""A whole gated feed-forward layer in one launch, forward and backward, and normalisation, in Triton.

    n = norm(x),   (c, t) = n We' + be,   out = (c gelu(t)) Wo' + bo + residual

Nothing but x and the result touches memory. The backward pass computes the rest again from x: one launch for
the gradient of x, one for those of the weights, whose programs walk over tiles of rows, keep the sums in
registers and write them once. Biases are loaded where they are added: kept, they would take the registers.
"""

from collections.abc import Sequence
from typing import Any

import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

from constmem.kernels.triton_observe import launch

PIECE = 64  # hidden channels met at a time
HALF, TF32 = tl.bfloat16, "tf32"  # operands of half the size; how those of float32 are multiplied
RSQRT2, RSQRT2PI = tl.constexpr(0.7071067811865476), tl.constexpr(0.3989422804014327)


@triton.jit
def normalised(x, eps, D: tl.constexpr):
    """(x - mean) / deviation of every row, and 1 / deviation."""
    x = x - (tl.sum(x, 1) / D)[:, None]
    rate = tl.rsqrt(tl.sum(x * x, 1) / D + eps)
    return x * rate[:, None], rate


@triton.jit
def normed_rows(x, scale, shift, rows, count, eps, D: tl.constexpr):
    """Some rows of x, normalised; those that are not there have zeros for x."""
    ds = tl.arange(0, D)
    given = tl.load(x + rows[:, None] * D + ds[None, :], mask=(rows < count)[:, None], other=0.0)
    unit, _ = normalised(given, eps, D)
    return unit * tl.load(scale + ds)[None, :] + tl.load(shift + ds)[None, :]


@triton.jit
def norm_backward(grad, unit, rate, scale, D: tl.constexpr):
    """The gradient of a normalisation's input."""
    grad = grad * scale[None, :]
    along = tl.sum(grad * unit, 1) / D
    return (grad - (tl.sum(grad, 1) / D)[:, None] - unit * along[:, None]) * rate[:, None]


def products(half: bool) -> dict[str, Any]:
    """Operands of matrix products, whose sums are float32; the smaller ones leave room to load ahead."""
    return {"OPERANDS": HALF if half else tl.float32, "PRODUCTS": TF32, "num_stages": 2 if half else 1}


@triton.jit
def _gelu(t):
    """t Phi(t) and its slope Phi(t) + t phi(t); Phi by Abramowitz and Stegun 7.1.26, within 1e-7."""
    bell = tl.exp(-0.5 * t * t)
    k = 1.0 / (1.0 + 0.3275911 * RSQRT2 * tl.abs(t))
    tail = 0.5 * bell * k * (
        0.254829592 + k * (-0.284496736 + k * (1.421413741 + k * (-1.453152027 + k * 1.061405429)))
    )  # fmt: skip
    phi = tl.where(t > 0, 1.0 - tail, tail)
    return t * phi, phi + t * bell * RSQRT2PI


@triton.jit
def _weights(
    expand, contract, first, D: tl.constexpr, H: tl.constexpr, P: tl.constexpr, OPERANDS: tl.constexpr
):  # fmt: skip
    """The weights of P hidden channels from `first` on: content, gate and back."""
    ds, hs = tl.arange(0, D), first + tl.arange(0, P)
    content = tl.load(expand + hs[:, None] * D + ds[None, :]).to(OPERANDS)
    gate = tl.load(expand + H * D + hs[:, None] * D + ds[None, :]).to(OPERANDS)
    back = tl.load(contract + ds[:, None] * H + hs[None, :]).to(OPERANDS)
    return content, gate, back


@triton.jit
def _hidden(n, content, gate, bias, H: tl.constexpr, P: tl.constexpr, PRODUCTS: tl.constexpr):
    """Content, active gate and the gate's slope at some hidden channels."""
    hs = tl.arange(0, P)
    t = tl.dot(n, tl.trans(gate), input_precision=PRODUCTS) + tl.load(bias + H + hs)[None, :]
    active, slope = _gelu(t)
    c = tl.dot(n, tl.trans(content), input_precision=PRODUCTS) + tl.load(bias + hs)[None, :]
    return c, active, slope


@triton.jit(do_not_specialize=["rows"])
def _forward(
    x, scale, shift, expand, expand_bias, contract, contract_bias, out, rows, eps,
    NORMED: tl.constexpr, OPERANDS: tl.constexpr, PRODUCTS: tl.constexpr,
    D: tl.constexpr, H: tl.constexpr, P: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    """Tiles of rows through the layer, half of the hidden channels at a time."""
    ds = tl.arange(0, D)
    a, b, back_bias = tl.load(scale + ds), tl.load(shift + ds), tl.load(contract_bias + ds)
    wc, wg, wo = _weights(expand, contract, 0, D, H, P, OPERANDS)
    if P < H:
        wc2, wg2, wo2 = _weights(expand, contract, P, D, H, P, OPERANDS)
    for tile in range(tl.program_id(0), tl.cdiv(rows, T), tl.num_programs(0)):
        place = tile * T + tl.arange(0, T)
        there, place = (place < rows)[:, None], place[:, None] * D + ds[None, :]
        given = tl.load(x + place, mask=there, other=0.0)
        unit, _ = normalised(given, eps, D)
        n = unit * a[None, :] + b[None, :]
        if NORMED:
            result = n + back_bias[None, :]
        else:
            result = given + back_bias[None, :]
        n = n.to(OPERANDS)
        c, active, _ = _hidden(n, wc, wg, expand_bias, H, P, PRODUCTS)
        result = tl.dot((c * active).to(OPERANDS), tl.trans(wo), acc=result, input_precision=PRODUCTS)
        if P < H:
            c, active, _ = _hidden(n, wc2, wg2, expand_bias + P, H, P, PRODUCTS)
            result = tl.dot((c * active).to(OPERANDS), tl.trans(wo2), acc=result, input_precision=PRODUCTS)
        tl.store(out + place, result, mask=there)


@triton.jit
def _inner(
    n, grad, grad_n, content, gate, back, bias, H: tl.constexpr, P: tl.constexpr, PRODUCTS: tl.constexpr
):
    """The gradient of n by way of some hidden channels, added to `grad_n`."""
    c, active, slope = _hidden(n, content, gate, bias, H, P, PRODUCTS)
    grad_hidden = tl.dot(grad, back, input_precision=PRODUCTS)
    grad_n = tl.dot((grad_hidden * active).to(n.dtype), content, acc=grad_n, input_precision=PRODUCTS)
    return tl.dot((grad_hidden * c * slope).to(n.dtype), gate, acc=grad_n, input_precision=PRODUCTS)


@triton.jit(do_not_specialize=["rows"])
def _backward(
    x, scale, shift, expand, expand_bias, contract, grad, grad_x, partial, rows, eps,
    NORMED: tl.constexpr, OPERANDS: tl.constexpr, PRODUCTS: tl.constexpr,
    D: tl.constexpr, H: tl.constexpr, P: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    """Tiles of rows back through the layer; the gradients of the last bias, scale and shift."""
    ds = tl.arange(0, D)
    wc, wg, wo = _weights(expand, contract, 0, D, H, P, OPERANDS)
    if P < H:
        wc2, wg2, wo2 = _weights(expand, contract, P, D, H, P, OPERANDS)
    for tile in range(tl.program_id(0), tl.cdiv(rows, T), tl.num_programs(0)):
        place = tile * T + tl.arange(0, T)
        there, place = (place < rows)[:, None], place[:, None] * D + ds[None, :]
        unit, _ = normalised(tl.load(x + place, mask=there, other=0.0), eps, D)
        n = (unit * tl.load(scale + ds)[None, :] + tl.load(shift + ds)[None, :]).to(OPERANDS)
        g = tl.load(grad + place, mask=there, other=0.0).to(OPERANDS)
        gn = tl.zeros((T, D), tl.float32)
        gn = _inner(n, g, gn, wc, wg, wo, expand_bias, H, P, PRODUCTS)
        if P < H:
            gn = _inner(n, g, gn, wc2, wg2, wo2, expand_bias + P, H, P, PRODUCTS)
        again = tl.load(grad + place, mask=there, other=0.0, volatile=True)  # cheaper than to keep it
        unit, rate = normalised(tl.load(x + place, mask=there, other=0.0, volatile=True), eps, D)
        if NORMED:
            gn += again
        tl.store(partial + tile * 3 * D + ds, tl.sum(again, 0))
        tl.store(partial + tile * 3 * D + D + ds, tl.sum(gn * unit, 0))
        tl.store(partial + tile * 3 * D + 2 * D + ds, tl.sum(gn, 0))
        gx = norm_backward(gn, unit, rate, tl.load(scale + ds), D)
        if not NORMED:
            gx += again
        tl.store(grad_x + place, gx, mask=there)


@triton.jit(do_not_specialize=["rows"])
def _backward_weights(
    x, scale, shift, expand, expand_bias, contract, grad, partial, rows, eps,
    OPERANDS: tl.constexpr, PRODUCTS: tl.constexpr,
    D: tl.constexpr, H: tl.constexpr, P: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    """The gradients of the weights of P hidden channels over some of the rows."""
    ds, first = tl.arange(0, D), tl.program_id(0) * P
    wc, wg, wo = _weights(expand, contract, first, D, H, P, OPERANDS)
    gc, gg, go = tl.zeros((D, P), tl.float32), tl.zeros((D, P), tl.float32), tl.zeros((D, P), tl.float32)
    gbc, gbg = tl.zeros((P,), tl.float32), tl.zeros((P,), tl.float32)
    for tile in range(tl.program_id(1), tl.cdiv(rows, T), tl.num_programs(1)):
        place = tile * T + tl.arange(0, T)
        there, place = (place < rows)[:, None], place[:, None] * D + ds[None, :]
        unit, _ = normalised(tl.load(x + place, mask=there, other=0.0), eps, D)
        n = (unit * tl.load(scale + ds)[None, :] + tl.load(shift + ds)[None, :]).to(OPERANDS)
        g = tl.load(grad + place, mask=there, other=0.0).to(OPERANDS)
        c, active, slope = _hidden(n, wc, wg, expand_bias + first, H, P, PRODUCTS)
        go = tl.dot(tl.trans(g), (c * active).to(OPERANDS), acc=go, input_precision=PRODUCTS)
        grad_hidden = tl.dot(g, wo, input_precision=PRODUCTS)
        grad_c, grad_t = grad_hidden * active, grad_hidden * c * slope
        gbc += tl.sum(grad_c, 0)
        gbg += tl.sum(grad_t, 0)
        gc = tl.dot(tl.trans(n), grad_c.to(OPERANDS), acc=gc, input_precision=PRODUCTS)
        gg = tl.dot(tl.trans(n), grad_t.to(OPERANDS), acc=gg, input_precision=PRODUCTS)
    hs = first + tl.arange(0, P)
    partial += tl.program_id(1) * (3 * D * H + 2 * H)
    tl.store(partial + hs[None, :] * D + ds[:, None], gc)
    tl.store(partial + H * D + hs[None, :] * D + ds[:, None], gg)
    partial += 2 * H * D
    tl.store(partial + hs, gbc)
    tl.store(partial + H + hs, gbg)
    tl.store(partial + 2 * H + ds[:, None] * H + hs[None, :], go)


def forward(
    x: Float[Tensor, "*b d"],
    weights: Sequence[Tensor],
    out: Float[Tensor, "*b d"],
    *,
    tile: int,
    programs: int,
    eps: float,
    normed: bool,
    half: bool,
) -> None:
    """Write the layer's result; `weights` are scale, shift, expand, its bias, contract, its bias."""
    d, hidden = weights[4].shape
    launch(
        _forward, (programs,), x, *weights, out, x.numel() // d, eps,
        NORMED=normed, **products(half), D=d, H=hidden, P=min(hidden, PIECE), T=tile,
        num_warps=4,
    )  # fmt: skip


def backward(
    x: Float[Tensor, "*b d"], weights: Sequence[Tensor], grad: Float[Tensor, "*b d"],
    grad_x: Float[Tensor, "*b d"], matrices: Float[Tensor, "p k"], vectors: Float[Tensor, "t v"], *,
    tile: int, programs: int, piece: int, eps: float, normed: bool, half: bool,
) -> None:  # fmt: skip
    """Write the gradients of x and, for every part of the rows, of the weights.

    Args:
        weights: as in `forward`, but the last bias.
        matrices: of expand, its bias and contract, a row for each of the programs that share the rows.
        vectors: of contract's bias, scale and shift, a row for each tile.
        piece: hidden channels of a program that computes `matrices`.
    """
    d, hidden = weights[4].shape
    launch(
        _backward, (programs,), x, *weights, grad, grad_x, vectors, x.numel() // d, eps,
        NORMED=normed, **products(half), D=d, H=hidden, P=min(hidden, PIECE), T=tile,
        num_warps=4,
    )  # fmt: skip
    launch(
        _backward_weights, (hidden // piece, len(matrices)), x, *weights, grad, matrices, x.numel() // d, eps,
        **products(half), D=d, H=hidden, P=piece, T=tile, num_warps=4,
    )  # fmt: skip

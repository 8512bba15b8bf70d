"""What the kernels of whole layers share: normalisation, its gradient, and how products are computed."""

from typing import Any

import triton
import triton.language as tl

HALF, TF32 = tl.bfloat16, "tf32"  # operands of half the size; how those of float32 are multiplied


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

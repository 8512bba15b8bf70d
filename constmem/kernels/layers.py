"""Whole layers as single operators on a GPU while a model learns: what they can take, and their gradients.

The kernels (`triton_feed_forward.py`) are operators of PyTorch's: compilers leave them alone and graphs
capture them. They keep nothing for the backward pass but their inputs. Each is rehearsed once at the sizes
it is first wanted for; where that fails, one line in the log says so and PyTorch's own operators serve, as
they do without a gradient, in float64, at sizes beyond what a program can hold, or with CONSTMEM_NATIVE=0.
"""

import functools
import importlib
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from constmem.kernels import gpu

WIDTHS, HIDDEN = (16, 32, 64), (16, 32, 64, 128)
TILE = 64  # rows a program meets at a time
PIECE = 32  # hidden channels whose weights' gradients a program keeps
HELD = 2  # programs a multiprocessor holds
FEED_FORWARD = "x scale shift expand expand_bias contract contract_bias"


def half(x: Tensor) -> bool | None:
    """Whether products have operands of bfloat16 (else TF32); None where the kernels must not serve."""
    if not (x.dtype == torch.float32 and torch.is_grad_enabled() and _plain() and on_gpu(x)):
        return None
    if torch.is_autocast_enabled("cuda"):
        return True if torch.get_autocast_dtype("cuda") == torch.bfloat16 else None
    return False if _coarse() else None


def on_gpu(x: Tensor) -> bool:
    """Whether these are numbers on a GPU, few enough to be counted by 32 bits."""
    return x.device.type == "cuda" and 0 < x.numel() < 2**31


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _coarse() -> bool:
    """Whether products of float32 may be rounded; compiled code is made anew when that changes."""
    return torch.get_float32_matmul_precision() != "highest"


def _plain() -> bool:
    """Whether no program is exported and no function transformed."""
    if torch.compiler.is_compiling():
        return not torch.compiler.is_exporting()
    return torch._C._functorch.peek_interpreter_stack() is None


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def feeds_forward(dim: int, hidden: int, half: bool, index: int | None) -> bool:
    """Whether a feed-forward layer of these sizes runs as one operator there."""
    return _feeds_forward(dim, hidden, half, index)


@functools.cache
def _feeds_forward(dim: int, hidden: int, half: bool, index: int | None) -> bool:
    if dim not in WIDTHS or hidden not in HIDDEN or not gpu.able(index):
        return False
    return gpu.attempt(lambda: _rehearse(dim, hidden, half, index), []) is not None


def _rehearse(dim: int, hidden: int, half: bool, index: int | None) -> bool:
    """Compile and run every kernel once, outside of any graph."""
    new = functools.partial(torch.zeros, device=gpu.place(index))
    weights = new(dim), new(dim), new(2 * hidden, dim), new(2 * hidden), new(dim, hidden), new(dim)
    x = new(TILE + 1, dim)
    for normed in (True, False):
        _forward(x, *weights, 1e-5, normed, half)
        _backward(x, x, *weights[:-1], 1e-5, normed, half)
    return True


def feed_forward(
    x: Float[Tensor, "*b d"],
    scale: Float[Tensor, " d"],
    shift: Float[Tensor, " d"],
    expand: Float[Tensor, "hh d"],
    expand_bias: Float[Tensor, " hh"],
    contract: Float[Tensor, "d h"],
    contract_bias: Float[Tensor, " d"],
    *,
    eps: float,
    normed: bool,
    half: bool,
) -> Float[Tensor, "*b d"]:
    """(c gelu(t)) Wo' + bo + residual with (c, t) = norm(x) We' + be, differentiable once."""
    found: Tensor = _forward(
        x, scale, shift, expand, expand_bias, contract, contract_bias, eps, normed, half
    )  # fmt: skip
    return found


@functools.cache
def _kernels() -> Any:
    return importlib.import_module("constmem.kernels.triton_feed_forward")


def _launches(x: Tensor) -> dict[str, int]:
    """How many programs share the tiles of x."""
    tiles = -(-x.numel() // (x.shape[-1] * TILE))
    return {"tile": TILE, "programs": min(tiles, HELD * gpu.multiprocessors(x.device))}


def _partial(x: Tensor, expand: Tensor) -> tuple[Tensor, Tensor]:
    """Where the gradients of matrices and vectors go, before they are summed."""
    (hh, d), tiles = expand.shape, -(-x.numel() // (x.shape[-1] * TILE))
    splits = min(tiles, max(1, HELD * gpu.multiprocessors(x.device) * 2 * PIECE // max(hh, 2 * PIECE)))
    matrices = x.new_empty(splits, hh * d + hh + d * hh // 2)
    return matrices, x.new_empty(tiles, 3 * d)


def _define(name: str, arguments: str, results: str) -> Any:
    """An operator of PyTorch's that a function implements: tensors, then eps, normed and half."""
    tensors = ", ".join(f"Tensor {argument}" for argument in arguments.split())
    schema = f"({tensors}, float eps, bool normed, bool half) -> {results}"
    return torch.library.custom_op(f"constmem::{name}", mutates_args=(), schema=schema)


@_define("feed_forward", FEED_FORWARD, "Tensor")
def _forward(x: Tensor, *rest: Any) -> Tensor:
    *weights, eps, normed, half = rest
    x = x.contiguous()
    out = torch.empty_like(x)
    rows = x.view(-1, x.shape[-1]), weights, out.view(-1, x.shape[-1])
    _kernels().forward(*rows, **_launches(x), eps=eps, normed=normed, half=half)
    return out


@_define("feed_forward_backward", "grad " + FEED_FORWARD.rpartition(" ")[0], "(Tensor, Tensor, Tensor)")
def _backward(grad: Tensor, x: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    *weights, eps, normed, half = rest
    x, grad = x.contiguous(), grad.contiguous()
    grad_x = torch.empty_like(x)
    matrices, vectors = _partial(x, weights[2])
    x, grad, out = (t.view(-1, t.shape[-1]) for t in (x, grad, grad_x))
    _kernels().backward(
        x, weights, grad, out, matrices, vectors, **_launches(x), piece=min(PIECE, weights[4].shape[1]),
        eps=eps, normed=normed, half=half,
    )  # fmt: skip
    return grad_x, matrices, vectors


@_forward.register_fake  # type: ignore[untyped-decorator]
def _(x: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@_backward.register_fake  # type: ignore[untyped-decorator]
def _(_: Tensor, x: Tensor, __: Tensor, ___: Tensor, expand: Tensor, *____: Any) -> tuple[Tensor, ...]:
    return torch.empty_like(x, memory_format=torch.contiguous_format), *_partial(x, expand)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:  # noqa: ARG001
    *tensors, _, ctx.eps, ctx.normed, ctx.half = inputs
    ctx.save_for_backward(*tensors)


def _gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    expand = ctx.saved_tensors[3]
    (hh, d), h = expand.shape, expand.shape[0] // 2
    grad_x, matrices, vectors = _backward(grad, *ctx.saved_tensors, ctx.eps, ctx.normed, ctx.half)
    wide, bias, narrow = matrices.sum(0).split([hh * d, hh, d * h])
    last, scale, shift = vectors.sum(0).split(d)
    return grad_x, scale, shift, wide.view(hh, d), bias, narrow.view(d, h), last, None, None, None


_forward.register_autograd(_gradients, setup_context=_keep)

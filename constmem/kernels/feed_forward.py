"""A gated feed-forward layer as one operator, and its gradients."""

import functools
import importlib
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from constmem.kernels.layers import TILE, WIDTHS, define, rehearsed, shared, tensors, tiles_of

HIDDEN = (16, 32, 64, 128)  # channels
PIECE = 32  # hidden channels whose weights' gradients a program keeps
READ = "x scale shift expand expand_bias contract"
NUMBERS = ", float eps, bool normed, bool half"


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def fits(dim: int, hidden: int, half: bool, index: int | None) -> bool:
    """Whether a layer of these sizes runs as one operator on that GPU."""
    return _fits(dim, hidden, half, index)


@functools.cache
def _fits(dim: int, hidden: int, half: bool, index: int | None) -> bool:
    def rehearsal(device: torch.device) -> None:
        new = functools.partial(torch.zeros, device=device)
        weights = new(dim), new(dim), new(2 * hidden, dim), new(2 * hidden), new(dim, hidden), new(dim)
        x = new(TILE + 1, dim)
        for normed in (True, False):
            _forward(x, *weights, 1e-5, normed, half)
            _backward(x, x, *weights[:-1], 1e-5, normed, half)

    return dim in WIDTHS and hidden in HIDDEN and rehearsed(index, rehearsal)


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
    weights = scale, shift, expand, expand_bias, contract, contract_bias
    found: Tensor = _forward(x.float(), *weights, eps, normed, half)
    return found


@functools.cache
def _kernels() -> Any:
    return importlib.import_module("constmem.kernels.triton_feed_forward")


def _partial(x: Tensor, expand: Tensor) -> tuple[Tensor, Tensor]:
    """Where the gradients of matrices and vectors go, before they are summed."""
    hh, d = expand.shape
    matrices = x.new_empty(shared(x, max(1, hh // (2 * PIECE))), hh * d + hh + d * hh // 2)
    return matrices, x.new_empty(tiles_of(x), 3 * d)


@define("feed_forward", tensors(READ + " contract_bias") + NUMBERS, "Tensor")
def _forward(x: Tensor, *rest: Any) -> Tensor:
    *weights, eps, normed, half = rest
    x = x.contiguous()
    out = torch.empty_like(x)
    _kernels().forward(
        x, weights, out, tile=TILE, programs=shared(x, 1), eps=eps, normed=normed, half=half
    )  # fmt: skip
    return out


@define("feed_forward_backward", tensors("grad " + READ) + NUMBERS, "(Tensor, Tensor, Tensor)")
def _backward(grad: Tensor, x: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    *weights, eps, normed, half = rest
    x = x.contiguous()
    grad_x, partial = torch.empty_like(x), _partial(x, weights[2])
    _kernels().backward(
        x, weights, grad.contiguous(), grad_x, *partial, tile=TILE, programs=shared(x, 1),
        piece=min(PIECE, weights[4].shape[1]), eps=eps, normed=normed, half=half,
    )  # fmt: skip
    return grad_x, *partial


@_forward.register_fake  # type: ignore[untyped-decorator]
def _(x: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@_backward.register_fake  # type: ignore[untyped-decorator]
def _(_: Tensor, x: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(x, memory_format=torch.contiguous_format), *_partial(x, rest[2])


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:  # noqa: ARG001
    *read, _, ctx.eps, ctx.normed, ctx.half = inputs
    ctx.save_for_backward(*read)


def _gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    expand = ctx.saved_tensors[3]
    (hh, d), h = expand.shape, expand.shape[0] // 2
    grad_x, matrices, vectors = _backward(grad, *ctx.saved_tensors, ctx.eps, ctx.normed, ctx.half)
    wide, bias, narrow = matrices.sum(0).split([hh * d, hh, d * h])
    last, scale, shift = vectors.sum(0).split(d)
    return grad_x, scale, shift, wide.view(hh, d), bias, narrow.view(d, h), last, None, None, None


_forward.register_autograd(_gradients, setup_context=_keep)

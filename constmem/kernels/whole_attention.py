"""A multi-head attention layer as one operator, and its gradients."""

import functools
import importlib
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from constmem.kernels import layers
from constmem.kernels.layers import TILE, WIDTHS, define, rehearsed, shared, tiles_of

CHANNELS = (16, 32, 64)  # of a head
KEYS = (16, 32, 64, 128, 256)  # of a task, padded
GIVEN = "Tensor x, Tensor? y, Tensor? mask, Tensor scale, Tensor shift, Tensor? y_scale, Tensor? y_shift"
READ = f"{GIVEN}, Tensor query, Tensor key_value, Tensor project"
NUMBERS = "int heads, float eps, bool normed, bool half"


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def fits(dim: int, heads: int, keys: int, half: bool, index: int | None) -> bool:
    """Whether a layer of these sizes runs as one operator on that GPU; `keys` are `padded`."""
    return dim in WIDTHS and dim // heads in CHANNELS and _fits(dim, heads, keys, half, index)


def padded(keys: int) -> int | None:
    """The size of a tile that holds so many keys; None if there is none."""
    for size in KEYS:
        if keys <= size:
            return size
    return None


@functools.cache
def _fits(dim: int, heads: int, keys: int, half: bool, index: int | None) -> bool:
    def rehearsal(device: torch.device) -> None:
        new = functools.partial(torch.zeros, device=device)
        x, y, mask = new(1, min(keys, TILE), dim), new(1, keys, dim), new(1, keys, dtype=torch.bool)
        square = new(dim, dim), new(2 * dim, dim), new(dim, dim)
        for normed in (True, False):
            numbers = heads, 1e-5, normed, half
            for given in ((y, None, None, y[0, 0], y[0, 0], None, None), (x, y, mask, *4 * [y[0, 0]])):
                _forward(*given, *square, y[0, 0], *numbers)
                _backward(given[0], *given, *square, *numbers)

    return rehearsed(index, rehearsal)


def attention(
    x: Float[Tensor, "b m d"],
    y: Float[Tensor, "b n d"] | None,
    mask: Bool[Tensor, "b n"] | None,
    norm: nn.LayerNorm,
    norm_y: nn.LayerNorm | None,
    query: Float[Tensor, "d d"],
    key_value: Float[Tensor, "dd d"],
    project: Float[Tensor, "d d"],
    bias: Float[Tensor, " d"],
    *,
    heads: int,
    normed: bool,
    half: bool,
) -> Float[Tensor, "b m d"]:
    """softmax(q k' / sqrt(c)) v Wo' + bo + residual, where x attends to y (None: to itself)."""
    norms = norm.weight, norm.bias, *((None, None) if norm_y is None else (norm_y.weight, norm_y.bias))
    weights = *norms, query, key_value, project, bias
    y = None if y is None else y.float()
    found: Tensor = _forward(x.float(), y, mask, *weights, heads, norm.eps, normed, half)
    return found


@functools.cache
def _kernels() -> tuple[Any, Any]:
    """Those of the softmax and those of projections."""
    names = "triton_attention", "triton_projection"
    softmax, projection = (importlib.import_module(f"constmem.kernels.{name}") for name in names)
    return softmax, projection


def _contiguous(x: Tensor, y: Tensor | None, mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    x = x.contiguous()
    return x, x if y is None else y.contiguous(), None if mask is None else mask.contiguous()


@define("attention", f"{READ}, Tensor bias, {NUMBERS}", "Tensor")
def _forward(x: Tensor, y: Tensor | None, mask: Tensor | None, *rest: Any) -> Tensor:
    scale, shift, y_scale, y_shift, *weights, heads, eps, normed, half = rest
    norm_y = (scale, shift) if y is None else (y_scale, y_shift)
    x, y, mask = _contiguous(x, y, mask)
    out = torch.empty_like(x)
    weights = [scale, shift, *norm_y, *weights]
    softmax, _ = _kernels()
    softmax.forward(x, y, mask, weights, out, heads=heads, eps=eps, normed=normed, half=half)
    return out


def _empty(x: Tensor, y: Tensor | None) -> tuple[Tensor, ...]:
    """Where the gradients go: of x and y, of vectors by their tiles, of q's, out's, k's and v's weights."""
    d, other = x.shape[-1], x[:0] if y is None else y
    rows = [torch.empty_like(t, memory_format=torch.contiguous_format) for t in (x, other)]
    vectors = [x.new_empty(tiles_of(t), 3 * d) for t in (x, other)]
    parts = shared(x, 4) if y is None else max(shared(x, 4), shared(y, 4))
    return *rows, *vectors, x.new_empty(parts, 4, d, d)


@define("attention_backward", f"Tensor grad, {READ}, {NUMBERS}", f"({', '.join(['Tensor'] * 5)})")
def _backward(
    grad: Tensor, x: Tensor, y: Tensor | None, mask: Tensor | None, *rest: Any
) -> tuple[Tensor, ...]:
    scale, shift, y_scale, y_shift, query, key_value, project, heads, eps, normed, half = rest
    own, (softmax, projection) = y is None, _kernels()
    norm = scale, shift
    norm_y = norm if own else (y_scale, y_shift)
    found = grad_x, grad_y, vectors, vectors_y, squares = _empty(x, y)
    x, y, mask = _contiguous(x, y, mask)
    grad = grad.contiguous()
    operands = layers.HALF if half else torch.float32
    values, grad_q = (torch.empty_like(x, dtype=operands) for _ in range(2))
    grad_kv = y.new_empty(*y.shape[:-1], 2 * y.shape[-1], dtype=operands)
    inner = values, grad_q, grad_kv
    weights = [*norm, *norm_y, query, key_value, project]
    softmax.backward(x, y, mask, weights, grad, inner, heads=heads, eps=eps, half=half)
    asks, answers = (query, grad_q, grad), (key_value, grad_kv)
    also: dict[str, Any] = {"tile": TILE, "eps": eps, "half": half}
    projection.inward(x, scale, asks, answers if own else None, grad_x, vectors, normed=normed, **also)
    if not own:
        projection.inward(y, y_scale, None, answers, grad_y, vectors_y, normed=normed, **also)
    projection.outer(x, y, [*norm, *norm_y], grad, inner, squares, **also)
    return found


@_forward.register_fake  # type: ignore[untyped-decorator]
def _(x: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@_backward.register_fake  # type: ignore[untyped-decorator]
def _(_: Tensor, x: Tensor, y: Tensor | None, *__: Any) -> tuple[Tensor, ...]:
    return _empty(x, y)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:  # noqa: ARG001
    *read, _, ctx.heads, ctx.eps, ctx.normed, ctx.half = inputs
    ctx.save_for_backward(*read)


def _gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    given = ctx.saved_tensors
    found = _backward(grad, *given, ctx.heads, ctx.eps, ctx.normed, ctx.half)
    grad_x, grad_y, vectors, vectors_y, squares = found
    own, d = given[1] is None, grad_x.shape[-1]
    bias, scale, shift = vectors.sum(0).split(d)
    _, y_scale, y_shift = (None, None, None) if own else vectors_y.sum(0).split(d)
    norms = scale, shift, y_scale, y_shift
    query, project, key_value = squares.sum(0).view(4 * d, d).split([d, d, 2 * d])
    weights = query, key_value, project, bias
    return grad_x, None if own else grad_y, None, *norms, *weights, None, None, None, None


_forward.register_autograd(_gradients, setup_context=_keep)

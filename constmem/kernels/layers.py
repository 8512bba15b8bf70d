"""Whole layers as single operators: on a GPU, in coarse arithmetic, at sizes a program can hold.

The operators are PyTorch's to see: compilers leave them alone and graphs capture them. They keep nothing for
the backward pass but their inputs. Each is rehearsed once at the sizes it is first wanted for. PyTorch's own
operators serve where that fails, where exact products are asked for, on other devices, at other sizes.
"""

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from constmem.kernels import gpu
from constmem.kernels.paths import LAYERS

HALF = torch.bfloat16
WIDTHS = (16, 32, 64)  # of tokens
HIDDEN = (16, 32, 64, 128)  # channels of a feed-forward layer
CHANNELS = (16, 32, 64)  # of a head
KEYS = (16, 32, 64, 128, 256)  # of a task, padded
TILE = 64  # rows a program meets at a time
HELD = 2  # programs a multiprocessor holds
PIECE = 32  # hidden channels whose weights' gradients a program keeps
FEED = "Tensor x, Tensor scale, Tensor shift, Tensor expand, Tensor expand_bias, Tensor contract"
GIVEN = "Tensor x, Tensor? y, Tensor? mask, Tensor scale, Tensor shift, Tensor? y_scale, Tensor? y_shift"
READ = f"{GIVEN}, Tensor query, Tensor key_value, Tensor project"
NUMBERS, FIVE = "float eps, bool normed, bool half", f"({', '.join(['Tensor'] * 5)})"
F = TypeVar("F", bound=Callable[..., Any])
Norm = tuple[Float[Tensor, " d"], Float[Tensor, " d"]]  # scale and shift


def half(weight: Tensor, *tokens: Tensor) -> bool | None:
    """Whether products have operands of bfloat16 (else TF32); None where the kernels must not serve."""
    if not (_plain() and all(on_gpu(x) for x in tokens)):
        return None
    cast = cast_to()  # embeddings come in this type
    kinds = torch.float32, cast
    if cast not in (None, HALF) or weight.dtype != torch.float32 or any(x.dtype not in kinds for x in tokens):
        return None
    return True if cast == HALF else False if _coarse() else None


def cast_to() -> torch.dtype | None:
    """The type of operands under autocast."""
    return torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else None


def on_gpu(x: Tensor) -> bool:
    """Whether these are numbers on a GPU, few enough to be counted by 32 bits."""
    return x.device.type == "cuda" and 0 < x.numel() < 2**30


def _constant(function: F) -> F:
    """Mark what a compiler may call once, as `torch.compiler.assume_constant_result` does.

    That imports the whole compiler, which takes longer than all of this package.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


@_constant
def _coarse() -> bool:
    """Whether products of float32 may be rounded; code is compiled again when that changes."""
    return torch.get_float32_matmul_precision() != "highest"


def _plain() -> bool:
    """Whether no program is exported and no function transformed."""
    if torch.compiler.is_compiling():
        return not torch.compiler.is_exporting()
    return torch._C._functorch.peek_interpreter_stack() is None


def rehearsed(size: object, index: int | None, work: Callable[[torch.device], None]) -> bool:
    """Whether kernels are at hand on that GPU and run there: `work` compiles them, outside of any graph."""
    return gpu.able(index) and LAYERS.rehearsed((size, index), lambda: work(gpu.place(index)))


def _tiles(x: Tensor) -> int:
    """How many tiles of rows there are."""
    return -(-x.numel() // (x.shape[-1] * TILE))


def _shared(x: Tensor, pieces: int) -> int:
    """Among how many programs the rows are shared, if each has `pieces` companions on the same rows."""
    return min(_tiles(x), max(1, HELD * gpu.multiprocessors(x.device) // pieces))


def _define(name: str, arguments: str, results: str) -> Callable[[Callable[..., Any]], Any]:
    """An operator of PyTorch's that a function is to implement, by its tensors and numbers."""
    schema = f"({arguments}) -> {results}"
    return torch.library.custom_op(f"constmem::{name}", mutates_args=(), schema=schema)


def feed_forward(
    x: Float[Tensor, "*b d"], scale: Float[Tensor, " d"], shift: Float[Tensor, " d"],
    expand: Float[Tensor, "hh d"], expand_bias: Float[Tensor, " hh"], contract: Float[Tensor, "d h"],
    contract_bias: Float[Tensor, " d"], *, eps: float, normed: bool,
) -> Float[Tensor, "*b d"] | None:  # fmt: skip
    """(c gelu(t)) Wo' + bo + residual with (c, t) = norm(x) We' + be, differentiable once; None if unfit."""
    coarse, (dim, hidden) = half(scale, x), contract.shape
    if coarse is None or not feeds(dim, hidden, coarse, x.device.index):
        return None
    weights = scale, shift, expand, expand_bias, contract, contract_bias
    found: Tensor = _feed(x.float(), *weights, eps, normed, coarse)
    return found


@_constant
def feeds(dim: int, hidden: int, half: bool, index: int | None) -> bool:
    """Whether a feed-forward layer of these sizes runs as one operator on that GPU."""

    def rehearsal(device: torch.device) -> None:
        new = functools.partial(torch.zeros, device=device)
        weights = new(dim), new(dim), new(2 * hidden, dim), new(2 * hidden), new(dim, hidden), new(dim)
        x = new(TILE + 1, dim)
        for normed in (True, False):
            _feed(x, *weights, 1e-5, normed, half)
            _feed_backward(x, x, *weights[:-1], 1e-5, normed, half)

    return dim in WIDTHS and hidden in HIDDEN and rehearsed(("feed", dim, hidden, half), index, rehearsal)


def _feed_empty(x: Tensor, expand: Tensor) -> tuple[Tensor, Tensor]:
    """Where the gradients of matrices and vectors go, before they are summed."""
    hh, d = expand.shape
    matrices = x.new_empty(_shared(x, max(1, hh // (2 * PIECE))), hh * d + hh + d * hh // 2)
    return matrices, x.new_empty(_tiles(x), 3 * d)


@_define("feed_forward", f"{FEED}, Tensor contract_bias, {NUMBERS}", "Tensor")
def _feed(x: Tensor, *rest: Any) -> Tensor:
    *weights, eps, normed, half = rest
    x = x.contiguous()
    out, also = torch.empty_like(x), {"eps": eps, "normed": normed, "half": half}
    gpu.triton("feed_forward").forward(x, weights, out, tile=TILE, programs=_shared(x, 1), **also)
    return out


@_define("feed_forward_backward", f"Tensor grad, {FEED}, {NUMBERS}", "(Tensor, Tensor, Tensor)")
def _feed_backward(grad: Tensor, x: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    *weights, eps, normed, half = rest
    x = x.contiguous()
    grad_x, partial = torch.empty_like(x), _feed_empty(x, weights[2])
    gpu.triton("feed_forward").backward(
        x, weights, grad.contiguous(), grad_x, *partial, tile=TILE, programs=_shared(x, 1),
        piece=min(PIECE, weights[4].shape[1]), eps=eps, normed=normed, half=half,
    )  # fmt: skip
    return grad_x, *partial


@_feed_backward.register_fake  # type: ignore[untyped-decorator]
def _(_: Tensor, x: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(x, memory_format=torch.contiguous_format), *_feed_empty(x, rest[2])


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:  # noqa: ARG001
    *read, _ = (t for t in inputs if t is None or isinstance(t, Tensor))  # no gradient needs the last bias
    ctx.save_for_backward(*read)
    ctx.numbers = inputs[len(read) + 1 :]


def _feed_gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    expand = ctx.saved_tensors[3]
    (hh, d), h = expand.shape, expand.shape[0] // 2
    grad_x, matrices, vectors = _feed_backward(grad, *ctx.saved_tensors, *ctx.numbers)
    wide, bias, narrow = matrices.sum(0).split([hh * d, hh, d * h])
    last, scale, shift = vectors.sum(0).split(d)
    return grad_x, scale, shift, wide.view(hh, d), bias, narrow.view(d, h), last, None, None, None


def attention(
    x: Float[Tensor, "b m d"], y: Float[Tensor, "b n d"] | None, mask: Bool[Tensor, "b n"] | None,
    norm: Norm, norm_y: Norm | None, weights: tuple[Tensor, Tensor, Tensor, Tensor], *, heads: int,
    eps: float, normed: bool,
) -> Float[Tensor, "b m d"] | None:  # fmt: skip
    """softmax(q k' / sqrt(c)) v Wo' + bo + residual, where x attends to y (None: to itself); None if unfit.

    Args:
        weights: of query, key and value, and the projection of what comes out, with its bias.
    """
    context = x if y is None else y
    coarse = half(norm[0], x, context) if len(x) == len(context) else None
    keys = None if coarse is None else padded(context.shape[1])
    if coarse is None or keys is None or not attends(x.shape[2], heads, keys, coarse, x.device.index):
        return None
    given = x.float(), None if y is None else y.float(), mask, *norm, *(norm_y or (None, None))
    found: Tensor = _attention(*given, *weights, heads, eps, normed, coarse)
    return found


def padded(keys: int) -> int | None:
    """The size of a tile that holds so many keys; None if there is none."""
    for size in KEYS:  # a compiler understands
        if keys <= size:
            return size
    return None


@_constant
def attends(dim: int, heads: int, keys: int, half: bool, index: int | None) -> bool:
    """Whether an attention layer of these sizes runs as one operator on that GPU; `keys` are `padded`."""

    def rehearsal(device: torch.device) -> None:
        new = functools.partial(torch.zeros, device=device)
        x, y, mask = new(1, min(keys, TILE), dim), new(1, keys, dim), new(1, keys, dtype=torch.bool)
        square = new(dim, dim), new(2 * dim, dim), new(dim, dim)
        for normed in (True, False):
            numbers = heads, 1e-5, normed, half
            for given in ((y, None, None, y[0, 0], y[0, 0], None, None), (x, y, mask, *4 * [y[0, 0]])):
                _attention(*given, *square, y[0, 0], *numbers)
                _attention_backward(given[0], *given, *square, *numbers)

    size = "attention", dim, heads, keys, half
    return dim in WIDTHS and dim // heads in CHANNELS and rehearsed(size, index, rehearsal)


def _contiguous(x: Tensor, y: Tensor | None, mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    x = x.contiguous()
    return x, x if y is None else y.contiguous(), None if mask is None else mask.contiguous()


@_define("attention", f"{READ}, Tensor bias, int heads, {NUMBERS}", "Tensor")
def _attention(x: Tensor, y: Tensor | None, mask: Tensor | None, *rest: Any) -> Tensor:
    scale, shift, y_scale, y_shift, *weights, heads, eps, normed, half = rest
    norm_y = (scale, shift) if y is None else (y_scale, y_shift)
    x, y, mask = _contiguous(x, y, mask)
    out, own = torch.empty_like(x), [scale, shift, *norm_y, *weights]
    gpu.triton("attention").forward(x, y, mask, own, out, heads=heads, eps=eps, normed=normed, half=half)
    return out


def _attention_empty(x: Tensor, y: Tensor | None) -> tuple[Tensor, ...]:
    """Where the gradients go: of x and y, of vectors by their tiles, of q's, out's, k's and v's weights."""
    d, other = x.shape[-1], x[:0] if y is None else y
    rows = [torch.empty_like(t, memory_format=torch.contiguous_format) for t in (x, other)]
    vectors = [x.new_empty(_tiles(t), 3 * d) for t in (x, other)]
    parts = _shared(x, 4) if y is None else max(_shared(x, 4), _shared(y, 4))
    return *rows, *vectors, x.new_empty(parts, 4, d, d)


@_define("attention_backward", f"Tensor grad, {READ}, int heads, {NUMBERS}", FIVE)
def _attention_backward(
    grad: Tensor, x: Tensor, y: Tensor | None, mask: Tensor | None, *rest: Any
) -> tuple[Tensor, ...]:
    scale, shift, y_scale, y_shift, query, key_value, project, heads, eps, normed, half = rest
    own, kernels = y is None, gpu.triton("attention")
    norms = scale, shift, *((scale, shift) if own else (y_scale, y_shift))
    found = grad_x, grad_y, vectors, vectors_y, squares = _attention_empty(x, y)
    x, y, mask = _contiguous(x, y, mask)
    grad = grad.contiguous()
    operands = HALF if half else torch.float32
    values, grad_q = torch.empty_like(x, dtype=operands), torch.empty_like(x, dtype=operands)
    grad_kv = y.new_empty(*y.shape[:-1], 2 * y.shape[-1], dtype=operands)
    inner = values, grad_q, grad_kv
    weights = [*norms, query, key_value, project]
    kernels.backward(x, y, mask, weights, grad, inner, heads=heads, eps=eps, half=half)
    asks, answers = (query, grad_q, grad), (key_value, grad_kv)
    also: dict[str, Any] = {"tile": TILE, "eps": eps, "half": half}
    kernels.inward(x, scale, asks, answers if own else None, grad_x, vectors, normed=normed, **also)
    if not own:
        kernels.inward(y, y_scale, None, answers, grad_y, vectors_y, normed=normed, **also)
    kernels.outer(x, y, [*norms], grad, inner, squares, **also)
    return found


@_attention_backward.register_fake  # type: ignore[untyped-decorator]
def _(_: Tensor, x: Tensor, y: Tensor | None, *__: Any) -> tuple[Tensor, ...]:
    return _attention_empty(x, y)


def _attention_gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    given = ctx.saved_tensors
    grad_x, grad_y, vectors, vectors_y, squares = _attention_backward(grad, *given, *ctx.numbers)
    own, d = given[1] is None, grad_x.shape[-1]
    bias, scale, shift = vectors.sum(0).split(d)
    _, y_scale, y_shift = (None, None, None) if own else vectors_y.sum(0).split(d)
    norms = scale, shift, y_scale, y_shift
    query, project, key_value = squares.sum(0).view(4 * d, d).split([d, d, 2 * d])
    weights = query, key_value, project, bias
    return grad_x, None if own else grad_y, None, *norms, *weights, None, None, None, None


for _operator, _gradients in ((_feed, _feed_gradients), (_attention, _attention_gradients)):
    _operator.register_fake(lambda x, *_: torch.empty_like(x, memory_format=torch.contiguous_format))
    _operator.register_autograd(_gradients, setup_context=_keep)

"""When whole layers run as single operators: on a GPU, in coarse arithmetic, at sizes a program can hold.

The operators (`feed_forward.py`, `whole_attention.py`) are PyTorch's to see: compilers leave them alone and
graphs capture them. They keep nothing for the backward pass but their inputs. Each is rehearsed once at the
sizes it is first wanted for; where that fails, one line in the log says so and PyTorch's own operators serve,
as they do where exact float32 or float64 is asked for, on other devices, at other sizes, or with
CONSTMEM_NATIVE=0.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from constmem.kernels import gpu

HALF = torch.bfloat16
WIDTHS = (16, 32, 64)  # of tokens
TILE = 64  # rows a program meets at a time
HELD = 2  # programs a multiprocessor holds


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


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _coarse() -> bool:
    """Whether products of float32 may be rounded; compiled code is made anew when that changes."""
    return torch.get_float32_matmul_precision() != "highest"


def _plain() -> bool:
    """Whether no program is exported and no function transformed."""
    if torch.compiler.is_compiling():
        return not torch.compiler.is_exporting()
    return torch._C._functorch.peek_interpreter_stack() is None


def rehearsed(index: int | None, work: Callable[[torch.device], None]) -> bool:
    """Whether kernels are at hand on that GPU and run there: `work` compiles them, outside of any graph."""

    def done() -> bool:
        work(gpu.place(index))
        return True

    return gpu.able(index) and gpu.attempt(done, []) is not None


def tiles_of(x: Tensor) -> int:
    """How many tiles of rows there are."""
    return -(-x.numel() // (x.shape[-1] * TILE))


def shared(x: Tensor, pieces: int) -> int:
    """Among how many programs the rows are shared, if each has `pieces` companions on the same rows."""
    return min(tiles_of(x), max(1, HELD * gpu.multiprocessors(x.device) // pieces))


def define(name: str, arguments: str, results: str) -> Callable[[Callable[..., Any]], Any]:
    """An operator of PyTorch's that a function is to implement, by its tensors and numbers."""
    schema = f"({arguments}) -> {results}"
    return torch.library.custom_op(f"constmem::{name}", mutates_args=(), schema=schema)


def tensors(names: str) -> str:
    """Tensors of these names, as a schema has them."""
    return ", ".join(f"Tensor {name}" for name in names.split())

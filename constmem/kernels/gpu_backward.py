"""The gradients of what a GPU observes, by kernels of our own: what they read, and whether they run.

`triton_backward.py` holds the kernels and their formulas. They are rehearsed once at the sizes they are first
wanted for, before anything depends on them; where that fails, one line in the log says so.
"""

import functools
import importlib
from math import log2, sqrt
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor

from constmem.kernels import gpu

NOTHING = -(2.0**99)  # a log-normaliser below this has seen nothing
failures: list[str] = []


class Whole(NamedTuple):
    """What a part of the points must know of the softmaxes over all of them, as the kernels read it.

    The gradient of every row is divided by its `size`. Rows' own gradients are multiplied by it at the end;
    those of tokens, to which all rows add, by the `largest` of a task, and shares by what is left.
    """

    precision: Any
    absorbed: Float[Tensor, "r d"]  # to base two, in operands
    grad: Float[Tensor, "b r d"]  # of mean tokens
    level: Float[Tensor, "b r"]  # lse to base two, less what shares are lifted by
    delta: Float[Tensor, "b r"]
    shared_level: Float[Tensor, "b r"]  # the same for tokens' gradients
    shared_delta: Float[Tensor, "b r"]
    largest: Float[Tensor, " b"]
    size: Float[Tensor, "b s"]  # in float64
    sums: Float[Tensor, "b p r d"]  # gradients of rows so far


@functools.cache
def _kernels() -> Any:
    return importlib.import_module("constmem.kernels.triton_backward")


@functools.cache
def rehearsed(width: int, precision: str, device: torch.device) -> bool:
    """Whether the kernels run there on tokens of this width; they are compiled by that."""

    def work() -> bool:
        new = functools.partial(torch.zeros, device=device)
        rows, mean = new(1, width).double(), new(1, 1, width).double()
        given = whole(rows, mean, mean[..., 0], mean, mean[..., 0], precision)
        tokens = new(1, 129, width)
        for mask in (None, new(1, 129, dtype=torch.bool)):
            part(given, tokens, mask, rows=True, tokens_too=True)
        return True

    return gpu.attempt(work, failures) is not None


def whole(
    absorbed: Float[Tensor, "s d"],
    mean: Float[Tensor, "b s d"],
    lse: Float[Tensor, "b s"],
    grad_mean: Float[Tensor, "b s d"],
    grad_lse: Float[Tensor, "b s"],
    precision: str,
) -> Whole:
    """The softmaxes over all points, all in float64, and the gradients of their mean tokens and lse."""
    kernels = _kernels()
    how = kernels.PRECISIONS[precision]
    slots, width = absorbed.shape
    wide, missing = gpu.padded(width), -slots % gpu.ROWS
    delta = (grad_mean * mean).sum(-1) - grad_lse
    reach = sqrt(width) * grad_mean.norm(dim=-1)  # no normalised token is longer than sqrt(width)
    size = torch.maximum(reach, delta.abs()).clamp_min(1e-300)
    largest = size.amax(1)
    level = torch.where(lse <= NOTHING, float("inf"), lse * log2(torch.e) - kernels.LIFT)
    levels = (level, level - (size / largest[:, None]).log2())
    deltas = (delta / size, delta / size * kernels.LN2.value)
    grad = F.pad(grad_mean / size[..., None], (0, wide - width, 0, missing))
    rows = F.pad(absorbed * log2(torch.e), (0, wide - width, 0, missing))
    parts = kernels.parts(len(mean), len(rows), wide, gpu.multiprocessors(mean.device), how)
    level, shared_level = (F.pad(t, (0, missing), value=float("inf")).float() for t in levels)
    delta, shared_delta = (F.pad(t, (0, missing)).float() for t in deltas)
    return Whole(
        how, rows.to(how.operands).contiguous(), grad.to(how.operands).contiguous(),
        level, delta, shared_level, shared_delta, (largest * 2**-kernels.LIFT).float(), size,
        torch.zeros(len(mean), parts, len(rows), wide, device=mean.device),
    )  # fmt: skip


def part(
    whole: Whole,
    tokens: Float[Tensor, "b n d"],
    mask: Bool[Tensor, "b n"] | None,
    *,
    rows: bool,
    tokens_too: bool,
) -> Float[Tensor, "b n d"] | None:
    """Add what some normalised tokens have to do with the gradients of `rows`; give their own, if wanted."""
    width, wide = tokens.shape[-1], whole.grad.shape[-1]
    given = F.pad(tokens, (0, wide - width)).to(whole.precision.operands).contiguous()
    mask = None if mask is None else mask.contiguous()
    kernels, common = _kernels(), (given, mask, whole.absorbed, whole.grad)
    if rows:
        kernels.rows(*common, whole.level, whole.delta, whole.sums, whole.precision)
    if not tokens_too:
        return None
    found = torch.empty(given.shape, device=given.device)
    levels = whole.shared_level, whole.shared_delta, whole.largest
    kernels.tokens(*common, *levels, found, whole.precision)
    return found[..., :width]


def gradient_of_rows(whole: Whole, width: int) -> Float[Tensor, "s d"]:
    """That of all parts together, in float64."""
    slots = whole.size.shape[1]
    sums = whole.sums.sum(1, dtype=torch.float64)[:, :slots, :width]
    lift: float = _kernels().LIFT
    return (sums * whole.size[..., None]).sum(0) * 2.0**-lift

"""The gradients of what a GPU observes, by kernels of our own: what they read, and whether they run.

`triton_backward.py` holds the kernels and their formulas. They are rehearsed once in each width and precision
they are wanted in, before anything depends on them; where that fails, one line in the log says so.
"""

import functools
import importlib
from math import log, log2, sqrt
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor

from constmem.kernels import gpu
from constmem.kernels.absorption import Absorbed

NOTHING = -(2.0**99)  # a log-normaliser below this has seen nothing
failures: list[str] = []  # after the first, these kernels are not tried again
unfit: list[str] = []  # failures of rehearsals, each of one width in one precision


class Whole(NamedTuple):
    """What a part of the points must know of the softmaxes over all of them, as the kernels read it.

    The gradient of every row is divided by its `size`. Rows' own gradients are multiplied by it at the end;
    those of tokens, to which all rows add, by the `largest` of a task, and shares by what is left.
    """

    plan: gpu.Plan
    precision: Any
    turn: Float[Tensor, "w w"]  # of tokens, in float64
    grad: Float[Tensor, "b r d"]  # of mean tokens, turned
    level: Float[Tensor, "b r"]  # lse to base two, less what shares are lifted by
    delta: Float[Tensor, "b r"]
    shared_level: Float[Tensor, "b r"]  # the same for tokens' gradients
    shared_delta: Float[Tensor, "b r"]
    largest: Float[Tensor, " b"]
    size: Float[Tensor, "b s"]  # in float64
    sums: Float[Tensor, "b p r d"]  # gradients of rows so far, in float64


@functools.cache
def _kernels() -> Any:
    return importlib.import_module("constmem.kernels.triton_backward")


@functools.cache
def rehearsed(d: int, precision: str, device: torch.device) -> bool:
    """Whether the kernels run there on tokens of d channels; they are compiled by that."""

    def work() -> bool:
        new = functools.partial(torch.zeros, dtype=torch.float64, device=device)
        plan = gpu.plan(Absorbed(new(1, d), new(1), new(1, d, d), new(1, d)), [], precision)
        assert plan is not None  # others of this width were made
        given = whole(plan, new(1, 1, d), new(1, 1), new(1, 1, d), new(1, 1))
        points = new(1, 129, d).float()
        for mask in (None, new(1, 129).bool()):
            part(given, points, mask, rows=True, tokens=True)
        return True

    return gpu.attempt(work, unfit) is not None


def whole(
    plan: gpu.Plan,
    mean: Float[Tensor, "b s w"],
    lse: Float[Tensor, "b s"],
    grad_mean: Float[Tensor, "b s w"],
    grad_lse: Float[Tensor, "b s"],
) -> Whole:
    """Mean tokens and lse over all points, in float64 like their gradients, as `plan` gave them."""
    kernels = _kernels()
    precision = kernels.PRECISIONS[plan.precision]
    b, slots, width = mean.shape
    rows, d = plan.absorbed.shape
    turn, missing = gpu.turn_of(width, mean.device), rows - slots
    reach = sqrt(width) * grad_mean.norm(dim=-1)  # no normalised token is longer than sqrt(width)
    size = (reach + grad_lse.abs()).clamp_min(1e-150)  # whose square is a number
    largest = size.amax(1)
    level = torch.where(lse <= NOTHING, float("inf"), lse * log2(torch.e) - kernels.LIFT)
    levels = level, level - (size / largest[:, None]).log2()
    grad = ((grad_mean / size[..., None]) @ turn.T).to(precision.operands)
    delta = (grad * (mean @ turn.T)).sum(-1) - grad_lse / size  # of the rounded gradient
    deltas = delta, delta * log(2.0)
    grad = F.pad(grad, (0, d - width, 0, missing))
    parts = kernels.parts(b, rows, d, gpu.multiprocessors(mean.device), precision)
    level, shared_level = (F.pad(t, (0, missing), value=float("inf")).float() for t in levels)
    delta, shared_delta = (F.pad(t, (0, missing)).float() for t in deltas)
    return Whole(
        plan, precision, turn, grad.contiguous(),
        level, delta, shared_level, shared_delta, (largest * 2.0**-kernels.LIFT).float(), size,
        mean.new_zeros(b, parts, rows, d),
    )  # fmt: skip


def part(
    whole: Whole,
    points: Float[Tensor, "b n i"],
    mask: Bool[Tensor, "b n"] | None,
    *,
    rows: bool,
    tokens: bool,
) -> Float[Tensor, "b n w"] | None:
    """Add what some points have to do with the gradients of rows; give those of their normalised tokens."""
    kernels = _kernels()
    given = gpu.operands(whole.plan, points)
    mask = None if mask is None else mask.contiguous()
    common = given, mask, whole.plan.absorbed, whole.grad
    if rows:
        kernels.rows(*common, whole.level, whole.delta, whole.sums, whole.precision)
    if not tokens:
        return None
    found = torch.empty(given.shape, device=given.device)
    levels = whole.shared_level, whole.shared_delta, whole.largest
    kernels.tokens(*common, *levels, found, whole.precision)
    return found[..., : len(whole.turn)] @ whole.turn.float()


def gradient_of_rows(whole: Whole) -> Float[Tensor, "s w"]:
    """That of all parts together, in float64."""
    slots, width = whole.size.shape[1], len(whole.turn)
    sums = whole.sums.sum(1)[:, :slots, :width] @ whole.turn
    found: Tensor = (sums * whole.size[..., None]).sum(0) * 2.0 ** -_kernels().LIFT
    return found

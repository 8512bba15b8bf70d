"""Conditioning on many points while learning, in constant memory, by the GPU's kernels.

What `core.fold` does, with the queries absorbed into the key projection: all that meets the points are rows
a = q Wk, which take mean tokens and log-normalisers of them,

    m = sum p h,    lse = log sum exp(a h),    p = exp(a h - lse).

Rows before and values Wv m + bv behind are small, and plain autograd's. Forwards chunks are merged; backwards
their tokens are computed again and their gradients follow from the whole softmax (`triton_gradients.py` has
the kernels and their formulas). They are rehearsed once in each width and precision they are wanted in.
"""

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from math import log, log2, sqrt
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor

from constmem.kernels import gpu
from constmem.kernels.operators import EMPTY
from constmem.kernels.paths import FOLD

LEAST = 2**14  # points of a task: of fewer, mean tokens are no longer small against them
FORWARD, BACKWARD = 2**18, 2**16  # points handled at a time, where one chunk has no more
LONGEST = 2**23  # points of a chunk: its numbers are counted by 32 bits
MOST = 2**16 - 1  # tasks: of programs, a GPU takes no more along one axis
NOTHING = EMPTY / 2  # a log-normaliser below this has seen nothing
Chunk = tuple[Tensor, Tensor, Tensor | None]  # x, y, mask
Exact = Callable[[], tuple[Tensor, Tensor, Tensor]]
Layers = Sequence[tuple[Tensor, Tensor]]
Embed = Callable[[Tensor, Iterable[tuple[Tensor, Tensor]]], Tensor]  # points through layers, differentiable


def joined(*chunks: Chunk) -> Chunk:
    """Concatenate chunks; there is a mask if any of them has one."""
    if len(chunks) == 1:
        return chunks[0]
    xs, ys, masks = zip(*chunks, strict=True)
    if all(mask is None for mask in masks):
        return torch.cat(xs, 1), torch.cat(ys, 1), None
    filled = [
        torch.ones(x.shape[:2], dtype=torch.bool, device=x.device) if mask is None else mask
        for x, mask in zip(xs, masks, strict=True)
    ]
    return torch.cat(xs, 1), torch.cat(ys, 1), torch.cat(filled, 1)


def fold(
    exact: Exact, slots: Tensor, layers: Layers, chunks: list[Chunk], embed: Embed
) -> tuple[Float[Tensor, "b h s c"], Float[Tensor, "b h s"]] | None:
    """Value and lse of all chunks together, with a lean gradient; None where the kernels cannot serve.

    Args:
        exact: gives queries, weight and shift, as `absorb` takes them, in float64; of `slots` among others.
        layers: of the embedding, whose `embed` they are.
        chunks: kept until the backward pass.
    """
    fits = _fits(slots, layers, chunks)
    return FOLD.attempt(lambda: _folded(exact(), layers, chunks, embed)) if fits else None


def _fits(slots: Tensor, layers: Layers, chunks: list[Chunk]) -> bool:
    """Whether these are many plain points to learn from, and float32 weights, on a GPU whose kernels run."""
    width = layers[0][0].shape[1] if layers else slots.shape[-1]
    sizes = [x.shape[1] for x, *_ in chunks]
    given = [t for chunk in chunks for t in chunk if t is not None]
    return (
        torch.is_grad_enabled()
        and gpu.usable(slots.device)
        and FOLD.failed is None
        and all(w.dtype == torch.float32 for w in (slots, *(w for layer in layers for w in layer)))
        and all(t.device == slots.device and not t.is_inference() for t in given)
        and len({len(t) for t in given}) == 1
        and 0 < len(given[0]) <= MOST
        and all(x.shape[2] + y.shape[2] == width for x, y, _ in chunks)  # kernels check no sizes
        and sum(sizes) >= LEAST
        and max(sizes) <= LONGEST
    )


def _folded(
    exact: tuple[Tensor, Tensor, Tensor], layers: Layers, chunks: list[Chunk], embed: Embed
) -> tuple[Tensor, Tensor] | None:
    queries = exact[0].flatten(0, -3)  # (h, s, c), of all blocks
    absorbed = gpu.absorb(queries, *exact[1:])
    plan = _plan(absorbed.rows.detach(), layers)
    if plan is None or not rehearsed(plan.absorbed.shape[1], plan.precision, queries.device):
        return None
    weights = (t for layer in layers for t in layer)
    points, masks = (t for x, y, _ in chunks for t in (x, y)), [mask for *_, mask in chunks]
    mean, lse = _MeanTokens.apply(plan, embed, masks, absorbed.rows, *weights, *points)  # type: ignore[no-untyped-call]
    value = mean.unflatten(1, queries.shape[:2]) @ absorbed.project.mT + absorbed.shift[:, None]
    return value, (lse + absorbed.score).unflatten(1, queries.shape[:2])


@torch.no_grad()
def _plan(rows: Float[Tensor, "s d"], layers: Layers) -> gpu.Plan | None:
    """How the kernels take mean tokens: as values that are not projected."""
    slots, width = rows.shape
    eye = torch.eye(width, dtype=rows.dtype, device=rows.device)
    given = gpu.Absorbed(rows, rows.new_zeros(slots), eye[None], rows.new_zeros(1, width))
    return gpu.plan(given, layers, gpu.precision_of(torch.float32) or "exact")


def rehearsed(d: int, precision: str, device: torch.device) -> bool:
    """Whether the kernels run there on tokens of d channels; they are compiled by that."""

    def work() -> None:
        new = functools.partial(torch.zeros, dtype=torch.float64, device=device)
        plan = gpu.plan(gpu.Absorbed(new(1, d), new(1), new(1, d, d), new(1, d)), [], precision)
        assert plan is not None  # others of this width were made
        given = whole(plan, new(1, 1, d), new(1, 1), new(1, 1, d), new(1, 1))
        points = new(1, 129, d).float()
        for mask in (None, new(1, 129).bool()):
            part(given, points, mask, rows=True, tokens=True)

    return FOLD.rehearsed((d, precision, device), work)


def _points(chunks: list[Chunk]) -> tuple[Float[Tensor, "b n i"], Tensor | None]:
    """Chunks together as points, and their mask."""
    x, y, mask = joined(*chunks)
    return torch.cat([x, y], -1).float(), mask


def _groups(chunks: Iterable[Chunk], points: int) -> Iterator[list[Chunk]]:
    """As many chunks at a time as have so many points; those of nothing are left out."""
    group: list[Chunk] = []
    held = 0
    for chunk in chunks:
        tasks, n, _ = chunk[0].shape
        if n:
            group.append(chunk)
        held += tasks * n
        if held >= points:
            yield group
            group, held = [], 0
    if group:
        yield group


class _MeanTokens(torch.autograd.Function):
    """Softmaxes over all chunks, and a backward pass that walks the chunks a second time."""

    @staticmethod
    def forward(
        ctx: Any,
        plan: gpu.Plan,
        embed: Embed,
        masks: list[Tensor | None],
        rows: Tensor,  # noqa: ARG004 (the plan has them)
        *tensors: Tensor,
    ) -> tuple[Tensor, Tensor]:
        _, chunks = _divided(tensors, masks)
        state: tuple[Tensor, Tensor] | None = None
        for group in _groups(chunks, FORWARD):
            given, mask = _points(group)
            bias = None if mask is None else torch.where(mask, 0.0, EMPTY)
            found = gpu.observe(plan, given, bias)
            state = found if state is None else gpu.merge(*state, *found)
        assert state is not None  # there are points
        mean, lse = state[0][:, 0], state[1][:, 0]  # of one head, as it were
        ctx.plan, ctx.embed = plan, embed
        ctx.save_for_backward(mean, lse, *tensors, *masks)
        ctx.set_materialize_grads(False)
        return mean, lse

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_mean: Tensor | None, grad_lse: Tensor | None) -> Any:
        mean, lse, *saved = ctx.saved_tensors
        grad_mean = torch.zeros_like(mean) if grad_mean is None else grad_mean
        grad_lse = torch.zeros_like(lse) if grad_lse is None else grad_lse
        rows, needed = ctx.needs_input_grad[3], ctx.needs_input_grad[4:]
        leaves = [t.detach().requires_grad_(need) for t, need in zip(saved, needed, strict=False)]

        def work() -> list[Tensor | None]:
            given = whole(ctx.plan, mean, lse, grad_mean, grad_lse)
            with torch.autocast(mean.device.type, enabled=False):
                return _gradients(given, leaves, saved[len(leaves) :], ctx.embed, rows=rows)

        found = FOLD.attempt(work)
        if found is None:
            raise RuntimeError(
                f"kernels of our own failed in a backward pass: {FOLD.failed}; they are not "
                "tried again: repeat the step, and PyTorch's operators serve"
            )
        return None, None, None, *found


def _divided(
    tensors: Sequence[Tensor], masks: Sequence[Tensor | None]
) -> tuple[Sequence[Tensor], Iterator[Chunk]]:
    """The weights of an embedding, and chunks, of all their tensors."""
    count = len(tensors) - 2 * len(masks)
    return tensors[:count], zip(tensors[count::2], tensors[count + 1 :: 2], masks, strict=True)


def _gradients(
    whole: "Whole", leaves: list[Tensor], masks: Sequence[Tensor | None], embed: Embed, *, rows: bool
) -> list[Tensor | None]:
    """Those of rows, where they are wanted, and of the leaves that are."""
    weights, chunks = _divided(leaves, masks)
    for group in _groups(chunks, BACKWARD):  # each is a part of the whole softmax
        wanted = [t for t in (*weights, *(t for x, y, _ in group for t in (x, y))) if t.requires_grad]
        with torch.enable_grad():
            points, mask = _points(group)
            layers = zip(weights[::2], weights[1::2], strict=True)
            h = F.layer_norm(embed(points, layers), (whole.plan.width,)) if wanted else points
        grad = part(whole, points.detach(), mask, rows=rows, tokens=bool(wanted))
        if wanted:
            torch.autograd.backward([h], [grad], inputs=wanted)  # adds them up
    return [gradient_of_rows(whole) if rows else None, *(leaf.grad for leaf in leaves)]


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


def whole(
    plan: gpu.Plan,
    mean: Float[Tensor, "b s w"],
    lse: Float[Tensor, "b s"],
    grad_mean: Float[Tensor, "b s w"],
    grad_lse: Float[Tensor, "b s"],
) -> Whole:
    """Mean tokens and lse over all points, in float64 like their gradients, as `plan` gave them."""
    kernels = gpu.triton("gradients")
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
    kernels = gpu.triton("gradients")
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
    found: Tensor = (sums * whole.size[..., None]).sum(0) * 2.0 ** -gpu.triton("gradients").LIFT
    return found

"""Conditioning on many points while learning, in constant memory, by the GPU's kernels.

What `fold` does, with the queries absorbed into the key projection (`kernels/triton.py`): all that meets the
points are rows a = q Wk, which take mean tokens and log-normalisers of them,

    m = sum p h,    lse = log sum exp(a h),    p = exp(a h - lse).

Rows before and values Wv m + bv behind are small, and plain autograd's. Forwards chunks are merged; backwards
their tokens are computed again and their gradients follow from the whole softmax, as in `fold`.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from constmem.core.algebra import bias_of, settle
from constmem.core.fold import Chunk, accumulate, joined
from constmem.core.layers import MLP, perceptron
from constmem.core.observation import Observation
from constmem.core.state import AttentionState
from constmem.kernels import gpu, gpu_backward
from constmem.kernels.absorption import Absorbed, absorb

LEAST = 2**14  # points of a task: of fewer, mean tokens are no longer small against them
FORWARD, BACKWARD = 2**18, 2**16  # points handled at a time, where one chunk has no more
LONGEST = 2**23  # points of a chunk: its numbers are counted by 32 bits
MOST = 2**16 - 1  # tasks: of programs, a GPU takes no more along one axis


def fused_fold(observation: Observation, embed: MLP | None, chunks: list[Chunk]) -> AttentionState | None:
    """The state of all chunks together, with a lean gradient; None where the kernels cannot serve."""
    if not _fits(observation, embed, chunks):
        return None
    return gpu.attempt(lambda: _state(observation, embed, chunks), gpu_backward.failures)


def _fits(observation: Observation, embed: MLP | None, chunks: list[Chunk]) -> bool:
    """Whether these are many plain points to learn from, and float32 weights, on a GPU whose kernels run."""
    slots, layers = observation.slots, [] if embed is None else embed.weights()
    width = layers[0][0].shape[1] if layers else observation.dim
    sizes = [x.shape[1] for x, *_ in chunks]
    given = [t for chunk in chunks for t in chunk if t is not None]
    return (
        torch.is_grad_enabled()
        and gpu.usable(slots.device)
        and not gpu_backward.failures
        and all(w.dtype == torch.float32 for w in (slots, *(w for layer in layers for w in layer)))
        and all(t.device == slots.device and not t.is_inference() for t in given)
        and len({len(t) for t in given}) == 1
        and 0 < len(given[0]) <= MOST
        and all(x.shape[2] + y.shape[2] == width for x, y, _ in chunks)  # kernels check no sizes
        and sum(sizes) >= LEAST
        and max(sizes) <= LONGEST
    )


def _state(observation: Observation, embed: MLP | None, chunks: list[Chunk]) -> AttentionState | None:
    prepared = observation.prepared_exactly()
    queries = prepared.queries.flatten(0, 1)  # (h, s, c), of all blocks
    absorbed = absorb(queries, prepared.weight, prepared.shift)
    found = _mean_tokens(absorbed.rows, [] if embed is None else embed.weights(), chunks)
    if found is None:
        return None
    mean, lse = found
    value = mean.unflatten(1, queries.shape[:2]) @ absorbed.project.mT + absorbed.shift[:, None]
    shape = len(mean), *prepared.queries.shape
    value, lse = settle(value.view(shape), (lse + absorbed.score).view(shape[:-1]))
    return AttentionState(value, lse, _counted(chunks))


def _counted(chunks: list[Chunk]) -> Int[Tensor, " b"]:
    """How many real points each task has."""
    x = chunks[0][0]
    unmasked = sum(x.shape[1] for x, _, mask in chunks if mask is None)
    count = torch.full(x.shape[:1], unmasked, device=x.device)
    return sum((mask.sum(-1) for *_, mask in chunks if mask is not None), count)


def _points(chunks: list[Chunk]) -> tuple[Float[Tensor, "b n i"], Tensor | None]:
    """Chunks one behind the other as points, and their mask."""
    x, y, mask = joined(*chunks)
    return torch.cat([x, y], -1).float(), mask


def _tokens(points: Float[Tensor, "b n i"], weights: Sequence[Tensor], width: int) -> Float[Tensor, "b n d"]:
    """Points as normalised tokens, by an embedding of weights and biases in turns."""
    layers = zip(weights[::2], weights[1::2], strict=True)
    return F.layer_norm(perceptron(points, layers), (width,))


def _mean_tokens(
    rows: Float[Tensor, "s d"], layers: list[tuple[Tensor, Tensor]], chunks: list[Chunk]
) -> tuple[Float[Tensor, "b s d"], Float[Tensor, "b s"]] | None:
    """Mean tokens and lse in float64; None of what is too wide for the kernels."""
    plan = _plan(rows.detach(), layers)
    if plan is None or not gpu_backward.rehearsed(plan.absorbed.shape[1], plan.precision, rows.device):
        return None
    weights = (t for layer in layers for t in layer)
    points = (t for x, y, _ in chunks for t in (x, y))
    masks = [mask for *_, mask in chunks]
    mean, lse = _MeanTokens.apply(plan, masks, rows, *weights, *points)  # type: ignore[no-untyped-call]
    return mean, lse


@torch.no_grad()
def _plan(rows: Float[Tensor, "s d"], layers: list[tuple[Tensor, Tensor]]) -> gpu.Plan | None:
    """How the kernels take mean tokens: as values that are not projected."""
    precision = gpu.precision_of(torch.float32)
    assert precision is not None  # of float32
    slots, width = rows.shape
    eye = torch.eye(width, dtype=rows.dtype, device=rows.device)
    given = Absorbed(rows, rows.new_zeros(slots), eye[None], rows.new_zeros(1, width))
    return gpu.plan(given, layers, precision)


def _groups(chunks: Iterable[Chunk], points: int) -> Iterator[list[Chunk]]:
    """Chunks one behind the other, as many as have so many points; those of nothing are left out."""
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
        masks: list[Tensor | None],
        rows: Tensor,  # noqa: ARG004 (the plan has them)
        *tensors: Tensor,
    ) -> tuple[Tensor, Tensor]:
        _, chunks = _divided(tensors, masks)
        state: tuple[Tensor, Tensor] | None = None
        for group in _groups(chunks, FORWARD):
            given, mask = _points(group)
            part = gpu.observe(plan, given, bias_of(mask, None, torch.float32))
            state = part if state is None else gpu.merge(*state, *part)
        assert state is not None  # there are points
        mean, lse = state[0][:, 0], state[1][:, 0]  # of one head, as it were
        ctx.plan = plan
        ctx.save_for_backward(mean, lse, *tensors, *masks)
        ctx.set_materialize_grads(False)
        return mean, lse

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_mean: Tensor | None, grad_lse: Tensor | None) -> Any:
        mean, lse, *saved = ctx.saved_tensors
        grad_mean = torch.zeros_like(mean) if grad_mean is None else grad_mean
        grad_lse = torch.zeros_like(lse) if grad_lse is None else grad_lse
        rows, needed = ctx.needs_input_grad[2], ctx.needs_input_grad[3:]
        leaves = [t.detach().requires_grad_(need) for t, need in zip(saved, needed, strict=False)]

        def work() -> list[Tensor | None]:
            whole = gpu_backward.whole(ctx.plan, mean, lse, grad_mean, grad_lse)
            with torch.autocast(mean.device.type, enabled=False):
                return _gradients(whole, leaves, saved[len(leaves) :], rows=rows)

        found = gpu.attempt(work, gpu_backward.failures)
        if found is None:
            raise RuntimeError(
                f"kernels of our own failed in a backward pass: {gpu_backward.failures[-1]}; they are not "
                "tried again: repeat the step, and PyTorch's operators serve"
            )
        return None, None, *found


def _divided(
    tensors: Sequence[Tensor], masks: Sequence[Tensor | None]
) -> tuple[Sequence[Tensor], Iterator[Chunk]]:
    """The weights of an embedding, and chunks, of tensors one behind the other."""
    count = len(tensors) - 2 * len(masks)
    return tensors[:count], zip(tensors[count::2], tensors[count + 1 :: 2], masks, strict=True)


def _gradients(
    whole: gpu_backward.Whole, leaves: list[Tensor], masks: Sequence[Tensor | None], *, rows: bool
) -> list[Tensor | None]:
    """Those of rows, where they are wanted, and of the leaves that are."""
    weights, chunks = _divided(leaves, masks)
    grads: dict[int, Tensor] = {}
    for group in _groups(chunks, BACKWARD):
        accumulate(grads, _part_backward(whole, weights, group, rows=rows))
    grad_rows = gpu_backward.gradient_of_rows(whole) if rows else None
    return [grad_rows, *(grads.get(id(leaf)) for leaf in leaves)]


def _part_backward(
    whole: gpu_backward.Whole, weights: Sequence[Tensor], group: list[Chunk], *, rows: bool
) -> Iterator[tuple[Tensor, Tensor]]:
    """Gradients of the leaves some chunks depend on, as a part of the whole softmax."""
    leaves = *weights, *(t for x, y, _ in group for t in (x, y))
    wanted = [t for t in leaves if t.requires_grad]
    with torch.enable_grad():
        points, mask = _points(group)
        h = [_tokens(points, weights, whole.plan.width)] if wanted else []
    grad = gpu_backward.part(whole, points.detach(), mask, rows=rows, tokens=bool(wanted))
    return zip(wanted, torch.autograd.grad(h, wanted, [grad]) if wanted else (), strict=True)

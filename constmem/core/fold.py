"""Chunks of points, and conditioning on them in constant memory, forwards and backwards.

Forwards, chunks are observed one after another and merged. Backwards, nothing was kept but the
chunks themselves (the user's own data) and the final state: each chunk's keys and values are
computed again, and their gradients follow from the *whole* softmax, since a point's share of it is
exp(score - lse). So the peak is that of one chunk, however many there are.
"""

from collections.abc import Callable, Iterable, Iterator
from functools import reduce
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from constmem import kernels
from constmem.core.algebra import bias_of, is_nothing, settle
from constmem.core.layers import MLP, perceptron
from constmem.core.monoid import Monoid
from constmem.core.observation import Observation
from constmem.core.state import AttentionState
from constmem.kernels import Chunk, joined

__all__ = [
    "Chunk", "ConditioningError", "filled", "fold", "fused_fold", "joined", "nothing", "numbered",
    "slices", "streamed",
]  # fmt: skip
AnyMonoid = TypeVar("AnyMonoid", bound=Monoid)


def slices(x: Tensor, y: Tensor, mask: Tensor | None, chunk: int) -> Iterator[Chunk]:
    """Cut points into chunks (one of nothing, where there are none)."""
    if x.shape[1] <= chunk:
        yield x, y, mask
        return
    for i in range(0, x.shape[1], chunk):
        here = slice(i, i + chunk)
        yield x[:, here], y[:, here], None if mask is None else mask[:, here]


def numbered(
    chunks: Iterable[tuple[Tensor, ...]], check: Callable[[Tensor, Tensor, Tensor | None], None]
) -> Iterator[Chunk]:
    """The user's own chunks as they come, each checked; errors say which one is meant."""
    for number, chunk in enumerate(chunks):
        if not isinstance(chunk, tuple | list) or len(chunk) not in (2, 3):
            raise TypeError(f"chunk {number} is not a pair (x, y) or triple (x, y, mask) of tensors")
        x, y, mask = chunk[0], chunk[1], chunk[2] if len(chunk) == 3 else None
        try:
            check(x, y, mask)
        except (TypeError, ValueError) as error:
            raise type(error)(f"chunk {number}: {error}") from error
        yield x, y, mask


def filled(parts: Iterator[tuple[Tensor, ...]], m: int) -> tuple[Tensor, ...]:
    """The parts as one; without gradients they are written into place as they come, and held once."""
    if torch.is_grad_enabled():
        return tuple(torch.cat(each, 1) for each in zip(*parts, strict=True))
    whole: tuple[Tensor, ...] = ()
    start = 0
    for part in parts:
        whole = whole or tuple(t.new_empty(t.shape[0], m, *t.shape[2:]) for t in part)
        stop = start + part[0].shape[1]
        for place, t in zip(whole, part, strict=True):
            place[:, start:stop] = t
        start = stop
    return whole


def nothing() -> ValueError:
    """The error of an iterable that had no chunk."""
    return ValueError(
        "the iterable yielded no chunk: if there is really no data, use model.empty(batch), "
        "which predicts the prior; an exhausted iterator cannot be used twice"
    )


class ConditioningError(RuntimeError):
    """Conditioning on a stream of chunks broke off; `state` holds all that came before."""

    def __init__(self, message: str, state: Monoid) -> None:
        super().__init__(message)
        self.state = state


def streamed(parts: Iterable[AnyMonoid], initial: AnyMonoid | None) -> AnyMonoid:
    """The merge of `initial` and of all parts, each forgotten once it is merged."""
    state = initial
    try:
        for part in parts:
            state = part if state is None else state.merge(part)
    except Exception as error:
        if state is None:
            raise
        raise ConditioningError(
            f"conditioning broke off after {state.count.tolist()} points: {error}; "
            "what was seen so far is this error's .state, to go on from with initial=",
            state,
        ) from error
    if state is None:
        raise nothing()
    return state


def fold(project: nn.Module, q: Tensor, chunks: list[Chunk]) -> AttentionState:
    """The state of all chunks together, reduce(merge, map(observe, chunks)), with a lean gradient.

    Args:
        project: maps (x, y) to keys and values, point by point.
        q: the fixed queries.
        chunks: kept until the backward pass; nothing computed from them is.
    """
    parameters = dict(project.named_parameters())
    points = [t for x, y, _ in chunks for t in (x, y)]
    masks = [mask for *_, mask in chunks]
    inputs = tuple(parameters), masks, q, *parameters.values(), *points
    value, lse, count = _Fold.apply(project, *inputs)  # type: ignore[no-untyped-call]
    return AttentionState(value, lse, count)


def fused_fold(observation: Observation, embed: MLP | None, chunks: list[Chunk]) -> AttentionState | None:
    """The same of what an observation sees, by a GPU's kernels; None where they cannot serve."""
    layers = [] if embed is None else embed.weights()
    if layers is None:
        return None
    slots, exact = observation.slots, lambda: observation.prepare_exactly()[:3]
    found = kernels.fold(exact, slots, layers, chunks, perceptron)
    if found is None:
        return None
    shape = slots.shape[0], observation.num_heads
    value, lse = settle(*(t.unflatten(1, shape) for t in found))
    unmasked = sum(x.shape[1] for x, _, mask in chunks if mask is None)
    count = torch.full(value.shape[:1], unmasked, device=value.device)
    return AttentionState(value, lse, sum((m.sum(-1) for *_, m in chunks if m is not None), count))


class _Fold(torch.autograd.Function):
    """Chunks observed and merged, with a backward pass that walks them a second time."""

    @staticmethod
    def forward(
        ctx: Any,
        project: nn.Module,
        names: tuple[str, ...],
        masks: list[Tensor | None],
        q: Tensor,
        *tensors: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        points = tensors[len(names) :]
        chunks = zip(points[::2], points[1::2], masks, strict=True)
        seen = ((project(x, y), mask) for x, y, mask in chunks)
        state = reduce(AttentionState.merge, (AttentionState.observe(q, k, v, mask) for (k, v), mask in seen))
        device = state.value.device.type
        ctx.project, ctx.names = project, names
        ctx.autocast = device, torch.get_autocast_dtype(device), torch.is_autocast_enabled(device)
        ctx.save_for_backward(state.value, state.lse, q, *tensors, *masks)
        ctx.mark_non_differentiable(state.count)
        ctx.set_materialize_grads(False)
        return state.value, state.lse, state.count

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_value: Tensor | None, grad_lse: Tensor | None, _: None) -> Any:
        value, lse, q, *saved = ctx.saved_tensors
        tensors = saved[: len(ctx.needs_input_grad) - 4]
        grad_value = torch.zeros_like(value) if grad_value is None else grad_value
        leaves = [
            t.detach().requires_grad_(needed)
            for t, needed in zip(tensors, ctx.needs_input_grad[4:], strict=True)
        ]
        parameters = dict(zip(ctx.names, leaves, strict=False))
        project = _with({id(p): parameters[name] for name, p in ctx.project.named_parameters()}, ctx.project)
        points = leaves[len(ctx.names) :]
        nothing = is_nothing(lse)  # all is masked out there, and has no share in what is nothing
        grad_value = grad_value.masked_fill(nothing[..., None], 0.0)
        grad_lse = None if grad_lse is None else grad_lse.masked_fill(nothing, 0.0)
        whole = value, lse, grad_value, grad_lse
        grad_q = torch.zeros_like(q)
        device, dtype, enabled = ctx.autocast
        for x, y, mask in zip(points[::2], points[1::2], saved[len(tensors) :], strict=True):
            with torch.enable_grad(), torch.autocast(device, dtype=dtype, enabled=enabled):
                k, v = project(x, y)
            grad_part, *upstream = _part_backward(q, k.detach(), v.detach(), mask, *whole)
            grad_q += grad_part
            if not k.requires_grad or k.shape[-2] == 0:
                continue
            wanted = [t for t in (*parameters.values(), x, y) if t.requires_grad]
            torch.autograd.backward((k, v), upstream, inputs=wanted)  # adds them up
        return None, None, None, grad_q, *(leaf.grad for leaf in leaves)


def _with(others: dict[int, Tensor], module: nn.Module) -> nn.Module:
    """A module like this with other parameters in place of its own, by their identities.

    It shares all else. `functional_call` would change the module itself for a while, which other threads may
    be using.
    """
    found: nn.Module = object.__new__(type(module))
    found.__dict__.update(module.__dict__)
    own, inner = module._parameters.items(), module._modules.items()
    found._parameters = {name: p if p is None else others[id(p)] for name, p in own}  # type: ignore[misc]
    found._modules = {name: None if m is None else _with(others, m) for name, m in inner}
    return found


def _part_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    value: Tensor,
    lse: Tensor,
    grad_value: Tensor,
    grad_lse: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of one chunk's q, k and v as a part of the whole softmax."""
    if k.shape[-2] == 0:
        return torch.zeros_like(q), k, v
    wide = torch.promote_types(k.dtype, torch.float32)
    flat_k, flat_v = (t.flatten(1, -3) for t in (k, v))
    flat_q, bias = q.detach().flatten(0, -3), bias_of(mask, None, k.dtype)
    grad_q, grad_k, grad_v = kernels.attend_backward(
        flat_q,
        flat_k,
        flat_v,
        bias,
        (value.flatten(1, -3).to(k.dtype), lse.flatten(1, -2).to(wide)),
        grad_value.flatten(1, -3).to(k.dtype),
        None if grad_lse is None else grad_lse.flatten(1, -2).to(wide),
    )
    return grad_q.view_as(q), grad_k.reshape(k.shape), grad_v.reshape(v.shape)

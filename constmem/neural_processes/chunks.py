"""Points a few at a time: cut, cleared of what masks leave out, and put together again."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from constmem.core.fold import Chunk


def cleared(x: Tensor, y: Tensor, mask: Tensor | None) -> Chunk:
    """Put zeros where the mask leaves points out, so that whatever stood there cannot leak."""
    if mask is None:
        return x, y, None
    keep = mask[..., None]
    return torch.where(keep, x, 0.0), torch.where(keep, y, 0.0), mask


def slices(x: Tensor, y: Tensor, mask: Tensor | None, chunk: int) -> Iterator[Chunk]:
    """Cut points into chunks (one of nothing, where there are none), each cleared."""
    if x.shape[1] <= chunk:
        yield cleared(x, y, mask)
        return
    for i in range(0, x.shape[1], chunk):
        here = slice(i, i + chunk)
        yield cleared(x[:, here], y[:, here], None if mask is None else mask[:, here])


def numbered(
    chunks: Iterable[tuple[Tensor, ...]], check: Callable[[Tensor, Tensor, Tensor | None], None]
) -> Iterator[Chunk]:
    """The user's own chunks as they come, each checked and cleared; errors say which one is meant."""
    for number, chunk in enumerate(chunks):
        if not isinstance(chunk, tuple | list) or len(chunk) not in (2, 3):
            raise TypeError(f"chunk {number} is not a pair (x, y) or triple (x, y, mask) of tensors")
        x, y, mask = chunk[0], chunk[1], chunk[2] if len(chunk) == 3 else None
        try:
            check(x, y, mask)
        except (TypeError, ValueError) as error:
            raise type(error)(f"chunk {number}: {error}") from error
        yield cleared(x, y, mask)


def mean_of_real(numbers: Float[Tensor, "b n"], mask: Tensor | None) -> Float[Tensor, ""]:
    """The mean over all points of the batch that are not masked out."""
    if mask is None:
        return numbers.sum() / max(numbers.numel(), 1)
    return torch.where(mask, numbers, 0.0).sum() / mask.sum().clamp_min(1)


def filled(parts: Iterator[tuple[Tensor, Tensor]], m: int) -> tuple[Tensor, Tensor]:
    """The parts as one; without gradients they are written into place as they come, and held once."""
    if torch.is_grad_enabled():
        means, stds = zip(*parts, strict=True)
        return torch.cat(means, 1), torch.cat(stds, 1)
    mean = std = torch.empty(0)
    start = 0
    for part_mean, part_std in parts:
        if start == 0:
            b, _, *rest = part_mean.shape
            mean, std = part_mean.new_empty(b, m, *rest), part_std.new_empty(b, m, *rest)
        stop = start + part_mean.shape[1]
        mean[:, start:stop], std[:, start:stop] = part_mean, part_std
        start = stop
    return mean, std


def batch_of(memory: Tensor | tuple[Any, ...]) -> int:
    """The batch of what `read` gave: its first tensor's."""
    while not isinstance(memory, Tensor):
        memory = memory[0]
    return memory.shape[0]


def nothing() -> ValueError:
    """The error of a stream that had no chunk."""
    return ValueError(
        "the iterable yielded no chunk: if there is really no data, use model.empty(batch), "
        "which predicts the prior; an exhausted iterator cannot be used twice"
    )

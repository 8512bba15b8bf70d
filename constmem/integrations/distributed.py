"""States of several processes merged into one on every process, over `torch.distributed` (gloo or NCCL)."""

from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from constmem.core.monoid import Monoid, merged

M = TypeVar("M", bound=Monoid)


def all_merge(state: M, *, group: dist.ProcessGroup | None = None) -> M:
    """The state of what all processes have seen, the same to the last bit on each of them.

    Every process calls it with the state of its own share of the data: `torchrun` starts them, for instance,
    and `torch.distributed.init_process_group` joins them. States of one size (CMANP, CNP, CMHP) travel once,
    in about the time of an all-gather of their bytes.

    Args:
        state: of this process; on the GPU where the processes talk by NCCL.
        group: the processes that take part; None: all.

    Example:
        state = all_merge(model.condition(x[rank::size], y[rank::size]))  # under torchrun
    """
    if not isinstance(state, Monoid):
        raise TypeError(f"a {type(state).__name__} does not merge: only states of monoids can be shared so")
    where = state.device if dist.get_backend(group) == "nccl" else torch.device("cpu")
    own = torch.frombuffer(bytearray(state.packed()), dtype=torch.uint8)
    parts = _gathered(own, where, group)  # in the order of their ranks, so that event streams stay in theirs
    whole = merged(type(state).unpacked(part.cpu().numpy().tobytes()) for part in parts)
    assert whole is not None
    return whole.to(state.device)


def _gathered(content: Tensor, where: torch.device, group: dist.ProcessGroup | None) -> list[Tensor]:
    """The bytes of every process, which may differ in number."""
    size = torch.tensor([content.numel()], device=where)
    sizes = [torch.zeros_like(size) for _ in range(dist.get_world_size(group))]
    dist.all_gather(sizes, size, group=group)
    longest = max(int(each) for each in sizes)
    padded = torch.zeros(longest, dtype=torch.uint8, device=where)
    padded[: content.numel()] = content.to(where)
    everyone = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(everyone, padded, group=group)
    return [part[: int(each)] for part, each in zip(everyone, sizes, strict=True)]

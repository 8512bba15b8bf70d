"""States of several processes merged into one on every process, over `torch.distributed` (gloo or NCCL)."""

from typing import TypeVar

import torch
import torch.distributed as dist
from safetensors.torch import load, save
from torch import Tensor

from constmem.core.monoid import Monoid

M = TypeVar("M", bound=Monoid)
NAME = "fingerprint"  # the tensor in which a state's signature travels; "-" where nobody knows it


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
    parts = _gathered(_packed(state), where, group)
    states = [_unpacked(part, state) for part in parts]
    while len(states) > 1:  # pairs of neighbours, so that parts of event streams meet in their order
        pairs = zip(states[::2], states[1::2], strict=False)
        states = [a.merge(b) for a, b in pairs] + (states[-1:] if len(states) % 2 else [])
    return states[0]


def _packed(state: Monoid) -> Tensor:
    """A state as bytes: what its file would hold."""
    word = "-" if state.fingerprint is None else state.fingerprint
    named = {name: t.detach().cpu().contiguous() for name, t in state.tensors().items()}
    content = save(named | {NAME: torch.tensor(list(word.encode()), dtype=torch.uint8)})
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


def _unpacked(content: Tensor, like: M) -> M:
    tensors = load(content.cpu().numpy().tobytes())
    word = bytes(tensors.pop(NAME).tolist()).decode()
    made: M = type(like).of_tensors(tensors, None if word == "-" else word)
    return made.to(like.device)


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

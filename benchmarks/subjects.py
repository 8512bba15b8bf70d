"""Whom the library is measured against, all doing the same: from points to what a query needs, and back."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from literal import Literal
from torch import Tensor

from constmem.neural_processes import CMANP, EQTNP, LBANP, TNPD, NeuralProcess

DIM_X, DIM_Y = 2, 3
NAMES = {"cmanp": "constmem", "lbanp": "LBANP", "tnpd": "TNP-D", "eqtnp": "EQTNP"}
LARGEST = {"TNP-D": 4096, "EQTNP": 4096, "LBANP": 10**6, "literal": 10**6}  # beyond, it takes too long


class Subject(NamedTuple):
    """One way to condition on points until a query can be answered."""

    name: str
    condition: Callable[[Tensor, Tensor], Any]


def points(n: int, device: torch.device, *, batch: int = 1, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Random points of two inputs and three outputs."""
    generator = torch.Generator().manual_seed(seed)
    both = torch.rand(batch, n, DIM_X + DIM_Y, generator=generator).to(device)
    return both[..., :DIM_X].contiguous(), both[..., DIM_X:].contiguous()


def model(kind: Callable[..., Any], device: torch.device, **sizes: int) -> Any:
    """A model of the published sizes with random weights."""
    torch.manual_seed(0)
    return kind(dim_x=DIM_X, dim_y=DIM_Y, **sizes).to(device).eval()


def ours(process: NeuralProcess[Any, Any], chunk: int | None = None) -> Subject:
    """A model of the library: condition, then read."""
    return Subject(NAMES[process.name], lambda x, y: process.read(process.condition(x, y, chunk=chunk)))


def everybody(device: torch.device) -> list[Subject]:
    """The library, the paper's algorithm taken literally, and the baselines with fused attention."""
    cmanp = model(CMANP, device)
    literal = Subject("literal", lambda x, y: Literal(cmanp, 16_384).condition(x, y))
    return [ours(cmanp), literal, *(ours(model(kind, device)) for kind in (LBANP, EQTNP, TNPD))]

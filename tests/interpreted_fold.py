"""Runs constant-memory training by the GPU's kernels in Triton's interpreter: a program that tests start.

TRITON_INTERPRET=1 python tests/interpreted_fold.py '[[CASE, SETTINGS], ...]'     # prints JSON
"""

import copy
import json
import sys
from collections.abc import Callable
from typing import Any
from unittest import mock

import interpreted
import torch
from torch import Tensor, nn

from constmem import CMANP, fused_fold
from constmem.embed import MLP
from constmem.kernels import gpu, gpu_backward
from constmem.state import AttentionState

Given = tuple[Tensor, Tensor, Tensor | None]


def ready() -> None:
    """Let a few hundred points be enough, and come in several groups."""
    interpreted.ready()
    fused_fold.LEAST, fused_fold.FORWARD, fused_fold.BACKWARD = 1, 150, 100


def gradients(state: AttentionState, modules: nn.ModuleList, points: list[Tensor]) -> dict[str, Tensor]:
    """Of every weight and point, where rows matter by many orders of magnitude more or less."""
    random = torch.Generator().manual_seed(3)
    rates = [torch.randn(t.shape, generator=random, dtype=t.dtype) for t in (state.value, state.lse)]
    rows = (5 * torch.randn(state.lse.shape, generator=random, dtype=torch.float64)).exp()
    rows[..., 0] = 0.0
    loss = (rows[..., None] * rates[0] * state.value).sum() + (rows * rates[1] * state.lse).sum()
    wanted = {**dict(modules.named_parameters()), **{f"points {i}": t for i, t in enumerate(points)}}
    found = torch.autograd.grad(loss, list(wanted.values()), allow_unused=True, materialize_grads=True)
    return dict(zip(wanted, found, strict=True))


def fold(
    *, dim: int, heads: int, slots: int, embedded: bool, masked: bool, tasks: int, precision: str,
    sharpness: float = 1.0, sizes: tuple[int, ...] = (64, 0, 70, 1, 64, 31), scale: float = 1.0,
) -> dict[str, Any]:  # fmt: skip
    """Errors of value, lse and all gradients relative to plain autograd in float64, on the whole data."""
    gpu.precision_of = lambda _: precision
    with torch.no_grad():
        observation = interpreted.observation(dim, heads, slots, sharpness)
    embed = MLP(dim_in=3, dim_hidden=17, dim_out=dim, depth=3) if embedded else None
    own = nn.ModuleList([observation] if embed is None else [observation, embed])
    wide = copy.deepcopy(own).double()
    x, y = torch.randn(tasks, sum(sizes), (3 if embedded else dim) - 1), torch.randn(tasks, sum(sizes), 1)
    mask = torch.rand(tasks, sum(sizes)) < 0.6 if masked else None
    if mask is not None and tasks > 1:
        mask[-1] = False  # a task of nothing but masked points
    given = [t.split(sizes, 1) for t in (x, y)]
    masks = [None] * len(sizes) if mask is None else list(mask.split(sizes, 1))
    masks[2] = masks[2] if mask is None or tasks > 1 else None  # a chunk without one among others
    chunks: list[Given] = [
        (a.clone().requires_grad_(), b.clone().requires_grad_(), m)
        for a, b, m in zip(*given, masks, strict=True)
    ]
    joined = fused_fold.joined(*chunks)
    whole = [t.detach().double().requires_grad_() for t in joined[:2]]
    found = fused_fold.fused_fold(observation, embed, chunks)
    assert found is not None, gpu_backward.failures

    def plainly() -> AttentionState:
        points = torch.cat(whole, -1)
        return wide[0].observe(points, joined[2], embed=wide[1] if embedded else None)

    expected = interpreted.exactly(plainly)
    leaves = [t for chunk in chunks for t in chunk[:2] if t is not None]
    mine = gradients(found, own, leaves)
    theirs = gradients(expected, wide, whole)
    for i in (0, 1):
        mine[f"whole {i}"] = torch.cat([mine.pop(f"points {j}") for j in range(i, len(leaves), 2)], 1)
        theirs[f"whole {i}"] = theirs.pop(f"points {i}")
    pairs = {name: (mine[name], grad) for name, grad in theirs.items()}
    return interpreted.errors(found, expected) | {
        "gradients": {name: relative(*pair) for name, pair in pairs.items()},
        "failures": gpu._failures + gpu_backward.failures,
    }


def relative(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).abs().max()) / max(float(expected.abs().max()), 1e-30)


def model(*, precision: str, frozen: str = "") -> dict[str, Any]:
    """The gradients of a model's loss by kernels and by operators, relative to each other; and the calls."""
    gpu.precision_of = lambda _: precision
    torch.manual_seed(0)
    sizes = {"dim": 16, "depth": 2, "num_slots": 4, "num_latents": 4, "hidden": 16, "num_heads": 2}
    own = CMANP(dim_x=2, dim_y=1, **sizes)  # type: ignore[arg-type]
    for name, parameter in own.named_parameters():
        parameter.requires_grad_(not (frozen and frozen in name))
    x, y = torch.randn(1, 230, 2), torch.randn(1, 230, 1)

    def learnt() -> list[Tensor]:
        own.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=False):
            (-own(x, y, x[:, :9], None, 100).log_prob(y[:, :9]).mean()).backward()
        return [p.grad.clone() for p in own.parameters() if p.grad is not None]

    with (
        mock.patch.object(gpu, "observe", wraps=gpu.observe) as forward,
        mock.patch.object(gpu_backward, "part", wraps=gpu_backward.part) as backward,
    ):
        mine = learnt()
    theirs = interpreted.exactly(learnt)
    return {
        "calls": [forward.call_count, backward.call_count],
        "errors": [relative(a, b) for a, b in zip(mine, theirs, strict=True)],
        "failures": gpu._failures + gpu_backward.failures,
    }


CASES: dict[str, Callable[..., Any]] = {case.__name__: case for case in (fold, model)}

if __name__ == "__main__":
    torch.set_num_threads(1)
    ready()
    print(json.dumps([CASES[name](**settings) for name, settings in json.loads(sys.argv[1])]))

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

from constmem import CMANP
from constmem.core.algebra import EMPTY
from constmem.core.fold import Chunk, fused_fold
from constmem.core.layers import MLP
from constmem.core.state import AttentionState
from constmem.kernels import gpu, gpu_fold
from constmem.kernels.gpu import Absorbed
from constmem.kernels.paths import FOLD


def ready() -> None:
    """Let a few hundred points be enough, and come in several groups."""
    interpreted.ready()
    gpu_fold.LEAST, gpu_fold.FORWARD, gpu_fold.BACKWARD = 1, 150, 100


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


def cut(x: Tensor, y: Tensor, mask: Tensor | None) -> list[Chunk]:
    """Chunks of very different sizes, points of which have gradients; one has no mask, if others have."""
    sizes = (64, 0, 70, 1, 64, x.shape[1] - 199)
    masks = [None] * len(sizes) if mask is None else [None, *mask.split(sizes, 1)[1:]]
    given = [[part.clone().requires_grad_() for part in t.split(sizes, 1)] for t in (x, y)]
    return list(zip(*given, masks, strict=True))


def fold(
    *, dim: int, heads: int, slots: int, embedded: bool, masked: bool, tasks: int, precision: str,
    sharpness: float = 1.0,
) -> dict[str, Any]:  # fmt: skip
    """Errors of value, lse and all gradients relative to plain autograd in float64, on the whole data."""
    gpu.precision_of = lambda _: precision
    observation = interpreted.observation(dim, heads, slots, sharpness)
    embed = MLP(dim_in=3, dim_hidden=17, dim_out=dim, depth=3) if embedded else None
    own = nn.ModuleList([observation] if embed is None else [observation, embed])
    wide = copy.deepcopy(own).double()
    x, y = torch.randn(tasks, 230, (3 if embedded else dim) - 1), torch.randn(tasks, 230, 1)
    mask = torch.rand(tasks, 230) < 0.6 if masked else None
    if mask is not None:
        mask[:, :64] = True
    chunks = cut(x, y, mask)
    found = fused_fold(observation, embed, chunks)
    assert found is not None, FOLD.failed
    whole = [t.double().requires_grad_() for t in (x, y)]
    expected = interpreted.exactly(
        lambda: wide[0].observe(torch.cat(whole, -1), mask, embed=wide[1] if embedded else None)
    )
    mine = gradients(found, own, [t for chunk in chunks for t in chunk[:2] if t is not None])
    theirs = gradients(expected, wide, whole)
    parts = [mine.pop(f"points {i}") for i in range(2 * len(chunks))]
    mine |= {f"points {i}": torch.cat(parts[i::2], 1) for i in (0, 1)}
    return interpreted.errors(found, expected) | {
        "gradients": {name: relative(mine[name], grad) for name, grad in theirs.items()},
        "failures": interpreted.failures(),
    }


def relative(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).abs().max()) / max(float(expected.abs().max()), 1e-30)


def part(*, precision: str, apart: float, away: float = 0.0) -> dict[str, float]:
    """Errors of gradients that are tiny and uneven.

    Args:
        apart: points are exp(-apart) of a softmax.
        away: how much all points lie in one direction, and half of the rows look in the other.
    """
    torch.manual_seed(0)
    rows, points = 0.5 * torch.randn(70, 16).double(), torch.randn(2, 150, 16)
    direction = torch.tensor([1.0, -1.0]).repeat(8)
    points += away * direction
    rows[:35] -= 3 * away * direction
    h = nn.functional.layer_norm(points.double(), (16,))
    nothing = torch.zeros(70).double(), torch.eye(16)[None].double(), torch.zeros(1, 16).double()
    plan = gpu.plan(Absorbed(rows, *nothing), [], precision)
    assert plan is not None
    scores, even = h @ rows.T, (2 * torch.randn(2, 70, 1).double()).exp()
    lse, mean = scores.logsumexp(1) + apart, torch.randn(2, 70, 16).double()
    mean -= mean.mean(-1, keepdim=True)  # as of normalised tokens
    grad_mean, grad_lse = 1e-9 * even * mean.roll(1, 0), 1e-9 * even[..., 0] * mean[..., 0]
    whole = gpu_fold.whole(plan, mean, lse, grad_mean, grad_lse)
    found = gpu_fold.part(whole, points, None, rows=True, tokens=True)
    assert found is not None
    shares = (scores - lse[:, None]).exp()
    slopes = h @ grad_mean.mT - (grad_mean * mean).sum(-1)[:, None] + grad_lse[:, None]
    tokens = (shares * slopes) @ rows + shares @ grad_mean
    tokens -= tokens.mean(-1, keepdim=True)  # which a normalisation never asks for
    by_rows = ((shares * slopes).mT @ h).sum(0)
    return {
        "rows": relative(gpu_fold.gradient_of_rows(whole), by_rows),
        "tokens": relative(found, tokens),
    }


def near(*, precision: str) -> float:
    """The error of the slots' gradient by values alone, of tokens a hundredth of their length apart."""
    gpu.precision_of = lambda _: precision
    observation = interpreted.observation(16, 2, 5, 1.0)
    wide, points = copy.deepcopy(observation).double(), torch.randn(1, 230, 16) + 100 * torch.randn(16)
    found = fused_fold(observation, None, cut(points[..., :15], points[..., 15:], None))
    assert found is not None, FOLD.failed
    expected = interpreted.exactly(lambda: wide.observe(points.double()))
    rates = torch.randn(found.value.shape, dtype=torch.float64)
    (mine,) = torch.autograd.grad((rates * found.value).sum(), observation.slots)
    (theirs,) = torch.autograd.grad((rates * expected.value).sum(), wide.slots)
    return relative(mine, theirs)


def few_among_many() -> float:
    """The error of what few points add to a gradient of rows, after others that are 1e9 times as many."""
    torch.manual_seed(0)
    rows, points = 0.5 * torch.randn(70, 16).double(), torch.randn(1, 150, 16)
    nothing = torch.zeros(70).double(), torch.eye(16)[None].double(), torch.zeros(1, 16).double()
    plan = gpu.plan(Absorbed(rows, *nothing), [], "exact")
    assert plan is not None
    mean, grad = torch.randn(2, 1, 70, 16).double()
    whole = gpu_fold.whole(plan, mean, mean.new_full((1, 70), 20.0), grad, grad[..., 0])
    sums = []
    for level in (whole.level, whole.level + 30, whole.level + 30):
        gpu_fold.part(whole._replace(level=level), points, None, rows=True, tokens=False)
        sums.append(gpu_fold.gradient_of_rows(whole))
    return relative(sums[2] - sums[1], sums[0] * 2.0**-30)


def leaves_out() -> dict[str, bool]:
    """Whether what is masked out leaves no trace in any gradient, and a task of nothing else has none."""
    gpu.precision_of = lambda _: "half"
    observation = interpreted.observation(16, 2, 5, 1.0).requires_grad_(False)
    embed = MLP(dim_in=3, dim_hidden=16, dim_out=16, depth=2)
    x, y, mask = torch.randn(2, 230, 2), torch.randn(2, 230, 1), torch.rand(2, 230) < 0.5
    mask[:, :64], mask[1] = False, False
    seen = []
    for junk in (0.0, 99.0):
        given = (torch.where(mask[..., None], t, junk).requires_grad_() for t in (x, y))
        x_in, y_in = given
        state = fused_fold(observation, embed, [(x_in, y_in, mask)])
        assert state is not None, FOLD.failed
        seen.append(gradients(state, nn.ModuleList([embed]), [x_in, y_in]))
    found, other = seen
    points = torch.cat([other["points 0"], other["points 1"]], -1)
    return {
        "same": all(torch.equal(found[name], other[name]) for name in found),
        "none": not bool(points[~mask].any()) and bool(points[mask].any()),
        "finite": all(bool(t.isfinite().all()) for t in found.values()),
        "nothing": bool((state.lse[1] == EMPTY).all()) and bool((state.value[1] == 0).all()),
    }


def model(*, precision: str, frozen: str = "nothing") -> dict[str, Any]:
    """How a model's gradients by kernels differ from those by operators; points of forward and backward."""
    gpu.precision_of = lambda _: precision
    torch.manual_seed(0)
    sizes = {"dim": 16, "depth": 2, "num_slots": 4, "num_latents": 4, "hidden": 16, "num_heads": 2}
    own = CMANP(dim_x=2, dim_y=1, **sizes)  # type: ignore[arg-type]
    for name, parameter in own.named_parameters():
        parameter.requires_grad_(frozen not in name)
    x, y = torch.randn(1, 530, 2), torch.randn(1, 530, 1)
    gpu_fold.rehearsed(16, precision, x.device)

    def learnt() -> list[Tensor]:
        own.zero_grad()
        (-own(x, y, x[:, :9], None, 50).log_prob(y[:, :9]).mean()).backward()
        return [p.grad.clone() for p in own.parameters() if p.grad is not None]

    with (
        mock.patch.object(gpu, "observe", wraps=gpu.observe) as forward,
        mock.patch.object(gpu_fold, "part", wraps=gpu_fold.part) as backward,
    ):
        mine = learnt()
    theirs = interpreted.exactly(learnt)
    return {
        "points": [[call.args[1].shape[1] for call in calls.mock_calls] for calls in (forward, backward)],
        "errors": [relative(a, b) for a, b in zip(mine, theirs, strict=True)],
        "failures": interpreted.failures(),
    }


def no_number() -> dict[str, bool]:
    """Whether a gradient that is no number shows in its task and no other; and tiny ones stay numbers."""
    gpu.precision_of = lambda _: "half"
    observation, points = interpreted.observation(16, 2, 5, 1.0), torch.randn(2, 230, 16, requires_grad=True)
    found = {}
    for name, wrong in (("nan", float("nan")), ("inf", float("inf"))):
        state = fused_fold(observation, None, [(points[..., :15], points[..., 15:], None)])
        assert state is not None, FOLD.failed
        upstream = torch.ones_like(state.value)
        upstream[0, 0, 0, 0, 0] = wrong
        grads = torch.autograd.grad(state.value, [points, observation.slots], upstream)
        found[f"{name} in its task"] = not bool(grads[0][0].isfinite().any())
        found[f"{name} in no other"] = bool(grads[0][1].isfinite().all())
        found[f"{name} in its slot"] = not bool(grads[1][0, 0].isfinite().any())
        found[f"{name} in no other slot"] = bool(grads[1].flatten(0, 1)[1:].isfinite().all())
    state = fused_fold(observation, None, [(points[..., :15], points[..., 15:], None)])
    assert state is not None, FOLD.failed
    (tiny,) = torch.autograd.grad(1e-200 * state.value.sum(), points)
    return found | {"tiny": bool(tiny.isfinite().all())}


def learning() -> tuple[MLP, Tensor, Tensor, AttentionState]:
    """An embedding, points, a mask, and their state, which has gradients."""
    gpu.precision_of = lambda _: "exact"
    observation, embed = (
        interpreted.observation(16, 2, 5, 1.0),
        MLP(dim_in=3, dim_hidden=8, dim_out=16, depth=2),
    )
    points, mask = torch.randn(1, 230, 3), torch.rand(1, 230) < 0.5
    state = fused_fold(observation, embed, [(points[..., :2], points[..., 2:], mask)])
    assert state is not None, FOLD.failed
    return embed, points, mask, state


def changed() -> list[str]:
    """What is said where a weight, the points or the mask change before the backward pass."""
    said = []
    for what in range(3):
        embed, points, mask, state = learning()
        with torch.no_grad():
            (embed.layers[0].weight, points, mask)[what].zero_()  # type: ignore[operator]
        said.append(error_of(state.value.sum().backward))
    return said


def breaks() -> dict[str, Any]:
    """What is said where kernels fail in the backward pass: for good, or for want of memory."""
    *_, state = learning()
    said = {}
    errors = {"starved": torch.OutOfMemoryError("no memory"), "broken": ValueError("no such tile")}
    for name, error in errors.items():
        with mock.patch.object(gpu_fold, "part", side_effect=error):
            said[name] = error_of(lambda: state.value.sum().backward(retain_graph=True)), FOLD.failed
    FOLD.reset()
    return said


def error_of(work: Callable[[], Any]) -> str:
    try:
        work()
    except RuntimeError as error:
        return str(error)
    return "nothing"


def second() -> str:
    """What happens to those who ask for second derivatives."""
    gpu.precision_of = lambda _: "exact"
    observation = interpreted.observation(16, 2, 5, 1.0)
    state = fused_fold(observation, None, cut(torch.randn(1, 230, 15), torch.randn(1, 230, 1), None))
    assert state is not None, FOLD.failed
    (first,) = torch.autograd.grad(state.value.sum(), [observation.slots], create_graph=True)
    return error_of(first.sum().backward)


CASES: dict[str, Callable[..., Any]] = {
    case.__name__: case
    for case in (fold, part, near, few_among_many, leaves_out, no_number, model, changed, breaks, second)
}

if __name__ == "__main__":
    torch.set_num_threads(1)
    ready()
    print(json.dumps([CASES[name](**settings) for name, settings in json.loads(sys.argv[1])]))

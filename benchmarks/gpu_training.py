"""Constant-memory training on a GPU: time and peaks of steps, errors of gradients, tiles of the kernels.

python benchmarks/gpu_training.py                 # a minute; writes results/gpu_training.json
python benchmarks/gpu_training.py tiles           # only this section
"""

import copy
import traceback
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import on_gpu
import torch
from literal import Literal
from on_gpu import MODES, Row, extra, mode, ms, seconds
from torch import Tensor

from constmem import CMANP
from constmem.kernels import gpu, gpu_fold
from constmem.kernels.gpu import absorb

PLAIN = ("plain bf16", "plain tf32", "plain float32")
POINTS = 2**16  # of which the backward pass takes gradients at a time
DONE = {"rows": 3 * 2 * 64, "tokens": 4 * 2 * 64}  # operations of a row and a token
CANDIDATES = {
    "half": {"rows": [(64, 64, 4, 3, 4), (64, 64, 4, 4, 4), (64, 128, 4, 2, 2), (128, 64, 8, 3, 2),
                      (128, 128, 8, 2, 1)],
             "tokens": [(64, 128, 8, 3, 2), (64, 128, 8, 2, 2), (64, 64, 4, 3, 4), (32, 128, 8, 3, 2),
                        (128, 128, 8, 2, 1)]},
    "tf32": {"rows": [(64, 64, 4, 2, 3), (64, 32, 4, 2, 4), (64, 128, 4, 2, 2), (128, 64, 8, 2, 1)],
             "tokens": [(32, 128, 8, 2, 2), (32, 64, 4, 2, 4), (64, 64, 4, 2, 2), (64, 128, 8, 2, 1)]},
    "exact": {"rows": [(64, 32, 4, 1, 2), (128, 32, 8, 2, 1), (64, 64, 8, 1, 1)],
              "tokens": [(32, 128, 8, 1, 1), (32, 64, 4, 1, 2), (32, 64, 8, 1, 1)]},
}  # fmt: skip


def steps() -> Iterator[Row]:
    """Training at up to 1e6 context points: a step, and what observes in it, with its peaks."""
    torch.manual_seed(0)
    model = CMANP(dim_x=2, dim_y=1).to(on_gpu.DEVICE)
    literal = Literal(model, None)
    for n in (2 * 10**4, 10**5, 10**6):  # of fewer, operators serve in any case
        x, y = on_gpu.strokes(n)

        def step(x=x, y=y) -> None:
            model.zero_grad()
            model.loss(x, y, x[:, :100], y[:, :100]).backward()

        def observing(x=x, y=y) -> None:
            model.zero_grad()
            state = model.condition(x, y)
            (state.value.sum() + state.lse.sum()).backward()

        def literally(x=x, y=y) -> None:
            model.zero_grad()
            literal.loss(x, y, x[:, :100], y[:, :100]).backward()

        ours = dict.fromkeys(PLAIN + MODES, step)
        yield from _trained("forward and backward", n, {"literal": literally} | ours)
        yield from _trained("condition, forward and backward", n, dict.fromkeys(PLAIN + MODES, observing))


def _trained(what: str, n: int, works: dict[str, Callable[[], None]]) -> Iterator[Row]:
    """Side by side: the paper's algorithm, PyTorch's operators, and our kernels in each precision."""
    before: dict[str, float] = {}
    for name, work in works.items():
        try:
            with torch.enable_grad(), mode("plain float32" if name == "literal" else name):
                if name in ("half", "tf32"):  # layers, too, as with these products asked for
                    torch.set_float32_matmul_precision("high")
                took, peak = seconds(work, rounds=3, warm=2), extra(work)
        except Exception:
            traceback.print_exc()
            continue
        row = {"what": what, "points": n, "how": name, "milliseconds": ms(took), "extra_bytes": peak}
        if name in MODES:
            row |= {f"times_{other.replace(' ', '_')}": round(t / took, 2) for other, t in before.items()}
        else:
            before[name] = took
        yield row


def errors() -> Iterator[Row]:
    """How far the gradients of all that observes are from those of float64, relative to their largest."""
    model = on_gpu.trained()
    exact = copy.deepcopy(model).double()
    x, y = on_gpu.strokes(100_000)
    with torch.enable_grad():
        reference = _gradients(exact, x.double(), y.double())
        for name in PLAIN + MODES:
            with mode(name):
                found = _gradients(model, x, y)
            errors = [
                float((a - b).abs().max() / b.abs().max()) for a, b in zip(found, reference, strict=True)
            ]
            yield {"what": "error of gradients", "points": 100_000, "precision": name,
                   "worst": float(f"{max(errors):.3g}"),
                   "median": float(f"{sorted(errors)[len(errors) // 2]:.3g}")}  # fmt: skip


def _gradients(model: CMANP, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    """By values alone, which is all that is read of a state: gradients by lse are larger, and better."""
    value = model.condition(x, y).value
    random = torch.Generator(on_gpu.DEVICE).manual_seed(0)
    rates = torch.randn(value.shape, generator=random, dtype=torch.float64, device=on_gpu.DEVICE)
    return torch.autograd.grad((rates * value).sum(), model.observing_parameters())


def tiles() -> Iterator[Row]:
    """The sizes of both kernels of the backward pass, each timed at as many points as it meets at a time."""
    import ceilings as machine

    from constmem.kernels import triton_gradients as kernels

    model, (x, y) = on_gpu.trained(), on_gpu.strokes(POINTS)
    points = torch.cat([x, y], -1)
    for name, by_kernel in CANDIDATES.items():
        with mode(name):
            plan = _plan(model)
        value, lse = gpu.observe(plan, points, None)
        for kernel, cuts in by_kernel.items():
            for cut in cuts:
                precision = kernels.PRECISIONS[name]._replace(**{kernel: kernels.Tiles(*cut)})
                try:
                    with mock.patch.dict(kernels.PRECISIONS, {name: precision}):
                        work = _launch(kernel, plan, points, value[:, 0], lse[:, 0])
                        took = machine.gpu_seconds(work)
                except Exception:
                    traceback.print_exc()
                    continue
                rate = DONE[kernel] * len(plan.absorbed) * POINTS / took
                yield {"precision": name, "kernel": kernel, "tiles": cut,
                       "microseconds": round(1e6 * took, 1), "TFLOP/s": round(rate / 1e12, 1)}  # fmt: skip


def _plan(model: CMANP) -> gpu.Plan:
    """How the kernels meet points while this model learns."""
    rows = absorb(*model.stack.observation.prepare_exactly()[:3]).rows
    plan = gpu_fold._plan(rows.detach(), model.embed.weights())
    assert plan is not None
    return plan


def _launch(kernel: str, plan: gpu.Plan, points: Tensor, mean: Tensor, lse: Tensor) -> Callable[[], Any]:
    """One of the two kernels on tokens that are there already."""
    from constmem.kernels import triton_gradients as kernels

    whole = gpu_fold.whole(plan, mean, lse, torch.randn_like(mean), torch.randn_like(lse))
    tokens = gpu.operands(plan, points)
    common = tokens, None, plan.absorbed, whole.grad
    if kernel == "rows":
        return lambda: kernels.rows(*common, whole.level, whole.delta, whole.sums, whole.precision)
    shared = whole.shared_level, whole.shared_delta, whole.largest
    found = torch.empty(tokens.shape, device=tokens.device)
    return lambda: kernels.tokens(*common, *shared, found, whole.precision)


if __name__ == "__main__":
    on_gpu.measure("gpu_training", (steps, errors, tiles), __doc__)

"""Whole layers as operators of our own on a GPU, against PyTorch's operators, eager and compiled.

    python benchmarks/layers.py     # needs a GPU, a minute and a half; writes results/layers.json

Sizes are those of CMANP on images: batch 192, 197 context and 200 target points, 128 slots and latents of 64
channels, 4 heads. Errors are relative to the largest number of a float64 layer's; times are of forward and
backward under bfloat16 autocast, captured in a graph; last comes the whole training step.
"""

import argparse
import copy
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from record import provenance, save
from torch import Tensor, nn
from training_step import milliseconds, our_step

from constmem import CMANP
from constmem.core.layers import CrossAttention, FeedForward, SelfAttention
from constmem.data import Task
from constmem.kernels import layers

BATCH, CONTEXT, TARGETS, SLOTS, DIM, HEADS, HIDDEN = 192, 197, 200, 128, 64, 4, 128
LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "feed-forward, 128 rows": (lambda: FeedForward(dim=DIM, hidden=HIDDEN), (SLOTS,)),
    "feed-forward, 200 rows": (lambda: FeedForward(dim=DIM, hidden=HIDDEN), (TARGETS,)),
    "self-attention, 128": (lambda: SelfAttention(dim=DIM, num_heads=HEADS), (SLOTS,)),
    "cross-attention, 128 to 128": (lambda: CrossAttention(dim=DIM, num_heads=HEADS), (SLOTS, SLOTS)),
    "cross-attention, 200 to 128": (lambda: CrossAttention(dim=DIM, num_heads=HEADS), (TARGETS, SLOTS)),
}


@contextmanager
def only(whole: bool) -> Iterator[None]:
    """Whole layers where they serve, or nowhere."""
    torch._dynamo.reset()
    with mock.patch.object(layers, "half", layers.half if whole else lambda *_: None):
        yield


def report(what: str, work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What came of it, be it an error; printed too."""
    start = time.perf_counter()
    try:
        found = work()
    except Exception as error:  # the next measurement may do better
        found = {"failed": f"{type(error).__name__}: {error}"[:300]}
    row = {"what": what} | found | {"seconds": round(time.perf_counter() - start, 1)}
    print(row, flush=True)
    return row


def given(name: str) -> tuple[nn.Module, list[Tensor], Tensor]:
    """A layer, its inputs, and a gradient of its result."""
    torch.manual_seed(0)
    make, counts = LAYERS[name]
    inputs = [torch.randn(BATCH, count, DIM, device="cuda", requires_grad=True) for count in counts]
    return make().cuda(), inputs, torch.randn_like(inputs[0])


def gradients(
    work: Callable[..., Tensor], layer: nn.Module, inputs: list[Tensor], toward: Tensor, half: bool = True
) -> list[Tensor]:
    """The result, and the gradients of inputs and weights."""
    with torch.autocast("cuda", torch.bfloat16, enabled=half, cache_enabled=False):
        out = work(*inputs)
    return [out.detach(), *torch.autograd.grad(out, [*inputs, *layer.parameters()], toward)]


def errors(name: str) -> dict[str, Any]:
    """Errors of the value and the worst gradient, whole and by operators."""
    layer, inputs, toward = given(name)
    exact = copy.deepcopy(layer).double()
    wide = [i.detach().double().requires_grad_() for i in inputs]
    expected = gradients(exact, exact, wide, toward.double(), half=False)
    found = {}
    for whole in (True, False):
        with only(whole):
            seen = gradients(layer, layer, inputs, toward)
        value, *rest = (
            float((a - b).abs().max() / b.abs().max()) for a, b in zip(seen, expected, strict=True)
        )
        found["whole" if whole else "operators"] = {"value": f"{value:.1e}", "gradient": f"{max(rest):.1e}"}
    return found


def captured(name: str, *, whole: bool, compiled: bool) -> dict[str, Any]:
    """Microseconds of forward and backward, replayed."""
    layer, inputs, toward = given(name)
    with only(whole):
        work = torch.compile(layer) if compiled else layer
        side, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                gradients(work, layer, inputs, toward)
        torch.cuda.current_stream().wait_stream(side)
        with torch.cuda.graph(graph):
            gradients(work, layer, inputs, toward)
    times = [1e3 * milliseconds(graph.replay, 50) for _ in range(5)]
    return {"microseconds": round(statistics.median(times), 1)}


def step(whole: bool) -> dict[str, Any]:
    """Milliseconds of a captured training step."""
    torch.manual_seed(0)
    x = torch.rand(BATCH, CONTEXT + TARGETS, 2, device="cuda")
    y = torch.rand(BATCH, CONTEXT + TARGETS, 3, device="cuda")
    task = Task(x[:, :CONTEXT], y[:, :CONTEXT], x[:, CONTEXT:], y[:, CONTEXT:])
    with only(whole):
        run = our_step(CMANP(dim_x=2, dim_y=3).cuda(), task, precision="bf16", compiled=True)
        losses = [float(run()) for _ in range(8)]
    times = [milliseconds(run) for _ in range(5)]
    return {"milliseconds": round(statistics.median(times), 2), "losses": [round(loss, 4) for loss in losses]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=100, help="start nothing after so long")
    limit = time.perf_counter() + parser.parse_args().seconds
    torch.set_float32_matmul_precision("high")
    work: list[tuple[str, Callable[[], dict[str, Any]]]] = []
    for name in LAYERS:
        work.append((f"{name}: errors", lambda name=name: errors(name)))
        work += [
            (f"{name}: {what}", lambda name=name, whole=whole: captured(name, whole=whole, compiled=False))
            for what, whole in (("whole", True), ("operators, eager", False))
        ]
    work += [("training step, whole", lambda: step(True)), ("training step, operators", lambda: step(False))]
    work += [
        (f"{name}: operators, compiled", lambda name=name: captured(name, whole=False, compiled=True))
        for name in LAYERS
    ]
    rows = [report(what, measure) for what, measure in work if time.perf_counter() < limit]
    data = f"random tokens, batch {BATCH}, seed 0"
    save("layers", rows, **(provenance(0, data, torch.device("cuda"))))


if __name__ == "__main__":
    main()

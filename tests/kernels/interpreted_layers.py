"""Runs the kernels of whole layers in Triton's interpreter, on a CPU: a program that tests start.

TRITON_INTERPRET=1 python tests/interpreted_layers.py '[[CASE, SETTINGS], ...]'     # prints JSON
"""

import copy
import json
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import interpreted
import torch
from torch import Tensor, nn

from constmem import CMANP
from constmem.core import layers as core_layers
from constmem.core.layers import CrossAttention, FeedForward, SelfAttention
from constmem.kernels import gpu, layers

calls: Counter[str] = Counter()


def ready() -> None:
    """Let whole layers serve tensors of a CPU; numbers of half precision are float16, which NumPy knows."""
    interpreted.ready()
    import triton.language as tl

    from constmem.kernels import triton_feed_forward as triton_norm

    triton_norm.TF32, triton_norm.HALF, layers.HALF = "ieee", tl.float16, torch.float16
    layers.on_gpu = core_layers.on_gpu = lambda _: True
    layers._coarse = lambda: True
    gpu.able = lambda _: True
    gpu.place = lambda _: torch.device("cpu")
    for name in ("_feed", "_attention"):
        setattr(layers, name, counted(name, getattr(layers, name)))
    layers.rehearsed = uncounted(layers.rehearsed)


def counted(name: str, work: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def run(*arguments: Any) -> Tensor:
        calls[name] += 1
        return work(*arguments)

    return run


def uncounted(work: Callable[..., bool]) -> Callable[..., bool]:
    def run(*arguments: Any) -> bool:
        before = dict(calls)
        found = work(*arguments)
        calls.clear()
        calls.update(before)
        return found

    return run


def layer(kind: str, dim: int, heads: int, hidden: int, residual: Any) -> nn.Module:
    """A layer whose every parameter matters."""
    torch.manual_seed(dim)
    found: nn.Module = {
        "feed": lambda: FeedForward(dim=dim, hidden=hidden, residual=residual),
        "self": lambda: SelfAttention(dim=dim, num_heads=heads, residual=residual),
        "cross": lambda: CrossAttention(dim=dim, num_heads=heads, residual=residual),
    }[kind]()
    with torch.no_grad():
        for p in found.parameters():
            p.add_(0.2 * torch.randn_like(p))
    return found


def results(work: Callable[..., Tensor], inputs: Sequence[Tensor], weights: Sequence[Tensor]) -> list[Tensor]:
    """The result, and the gradients of some sum of it by all inputs and weights."""
    out = work(*inputs)
    toward = torch.arange(out.numel(), dtype=out.dtype).view_as(out).sin() + 0.3
    return [out.detach(), *torch.autograd.grad(out, [*inputs, *weights], toward)]


def agrees(
    *, kind: str, dim: int, residual: str, m: int, n: int = 0, heads: int = 2, hidden: int = 64,
    half: bool = False, masked: bool = False,
) -> dict[str, Any]:  # fmt: skip
    """The largest errors against float64, relative to the largest number."""
    layers.rehearsed = lambda *_: True
    found = layer(kind, dim, heads, hidden, residual)
    exact = copy.deepcopy(found).double()
    inputs = [torch.randn(3, m, dim)] + ([torch.randn(3, n, dim)] if kind == "cross" else [])
    mask = torch.rand(3, inputs[-1].shape[1]) < 0.6
    mask[1] = False
    extra = [mask] if masked else []
    calls.clear()
    layers.cast_to = lambda: torch.float16 if half else None
    weights = list(found.parameters())
    seen = results(lambda *i: found(*i, *extra), [i.requires_grad_() for i in inputs], weights)
    wide = [i.detach().double().requires_grad_() for i in inputs]
    expected = results(lambda *i: exact(*i, *extra), wide, [*exact.parameters()])
    errors = [float((a - b).abs().max() / b.abs().max()) for a, b in zip(seen, expected, strict=True)]
    unseen = float(seen[2][~mask].abs().max()) if masked and kind == "cross" else 0.0
    return {"errors": errors, "calls": sum(calls.values()), "unseen": unseen}


def model() -> dict[str, Any]:
    """Gradients of a model's loss by whole layers, rehearsed before, against float64 and operators."""
    torch.manual_seed(0)
    sizes = {"dim": 32, "depth": 1, "num_slots": 5, "num_latents": 6, "hidden": 32, "num_heads": 2}
    found = CMANP(dim_x=1, dim_y=1, **sizes)  # type: ignore[arg-type]
    exact = copy.deepcopy(found).double()
    task = [torch.randn(2, count, 1) for count in (7, 7, 9, 9)]
    calls.clear()
    loss = found.loss(*task)
    expected = exact.loss(*(t.double() for t in task))
    grads = torch.autograd.grad(loss, [*found.parameters()])
    right = torch.autograd.grad(expected, [*exact.parameters()])
    errors = [float((a - b).abs().max() / b.abs().max()) for a, b in zip(grads, right, strict=True)]
    learning = dict(calls)
    with torch.no_grad():
        errors.append(float(found.loss(*task) - loss))
    return {"errors": errors, "calls": learning, "twice": dict(calls)}


def compiled() -> dict[str, Any]:
    """What a compiler sees of three layers, and how its gradients differ, at sizes that change."""
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd

    graphs: list[list[str]] = []

    def keep(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append([n.name for n in graph.graph.nodes if "constmem" in str(n.target)])
        return make_boxed_func(graph)

    whole = [layer(kind, 16, 1, 16, "normed") for kind in ("feed", "self", "cross")]
    weights = [p for part in whole for p in part.parameters()]

    def work(x: Tensor, y: Tensor) -> Tensor:
        feed, own, cross = whole
        out: Tensor = cross(own(feed(x)), y)
        return out

    fast = torch.compile(work, backend=aot_autograd(fw_compiler=keep, bw_compiler=keep), fullgraph=True)
    differences = []
    for m, n in ((3, 5), (4, 6)):
        inputs = torch.randn(1, m, 16, requires_grad=True), torch.randn(1, n, 16, requires_grad=True)
        pairs = zip(results(fast, inputs, weights), results(work, inputs, weights), strict=True)
        differences.append(max(float((a - b).abs().max()) for a, b in pairs))
    return {"graphs": graphs, "differences": differences}


CASES: dict[str, Callable[..., Any]] = {case.__name__: case for case in (model, compiled, agrees)}

if __name__ == "__main__":
    torch.set_num_threads(1)
    ready()
    print(json.dumps([CASES[name](**settings) for name, settings in json.loads(sys.argv[1])]))

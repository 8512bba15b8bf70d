"""Whole layers as operators of a GPU agree with float64, and serve only where they can."""

import copy
import importlib.util
import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from constmem import kernels
from constmem.core import layers as core_layers
from constmem.core.layers import CrossAttention, FeedForward, SelfAttention
from constmem.kernels import gpu, layers
from constmem.kernels.paths import GPU

has_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")


FEED, OWN, CROSS = (
    {"kind": "feed", "dim": 64, "hidden": 128, "m": 43},
    {"kind": "self", "dim": 64, "heads": 4, "m": 65},
    {"kind": "cross", "dim": 64, "heads": 2, "m": 67, "n": 33, "masked": True},
)
EXACT: list[dict[str, Any]] = [
    *(case | {"residual": residual} for case in (FEED, OWN, CROSS) for residual in ("normed", "raw")),
    {"kind": "feed", "dim": 32, "hidden": 64, "m": 5, "residual": "raw"},
    {"kind": "self", "dim": 32, "heads": 2, "m": 7, "masked": True, "residual": "normed"},
    {"kind": "cross", "dim": 32, "heads": 1, "m": 3, "n": 16, "residual": "raw"},
]
HALF: list[dict[str, Any]] = [case | {"residual": "normed", "half": True} for case in (FEED, OWN, CROSS)]


@pytest.fixture(scope="module")
def interpreted() -> dict[str, Any]:
    """What a program with Triton's interpreter found of all cases."""
    cases = [("model", {}), ("compiled", {}), *(("agrees", case) for case in EXACT + HALF)]
    program = Path(__file__).with_name("interpreted_layers.py")
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", str(program), json.dumps(cases)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    model, compiled, *agreements = json.loads(done.stdout)
    exact, half = agreements[: len(EXACT)], agreements[len(EXACT) :]
    return {"model": model, "compiled": compiled, "exact": exact, "half": half}


@pytest.mark.slow
@has_triton
def test_values_and_all_gradients_agree_with_float64_at_every_size(interpreted: dict[str, Any]) -> None:
    for case, found in zip(EXACT, interpreted["exact"], strict=True):
        assert found["calls"] == 1, case  # it was indeed the kernels
        assert max(found["errors"]) < 1e-5, case
        assert found["unseen"] == 0, case


@pytest.mark.slow
@has_triton
def test_half_precision_rounds_operands_and_nothing_else(interpreted: dict[str, Any]) -> None:
    for case, found in zip(HALF, interpreted["half"], strict=True):
        assert found["calls"] == 1, case
        assert 1e-5 < max(found["errors"]) < 4e-3, case


@pytest.mark.slow
@has_triton
def test_a_model_learns_and_predicts_by_whole_layers(interpreted: dict[str, Any]) -> None:
    assert interpreted["model"]["calls"] == {"_feed": 5, "_attention": 4}
    assert interpreted["model"]["twice"] == {"_feed": 10, "_attention": 8}
    assert max(interpreted["model"]["errors"]) < 1e-4


def test_functions_are_marked_as_pytorch_marks_what_a_compiler_calls_once() -> None:
    marked = torch.compiler.assume_constant_result(lambda: True)
    for function in (layers._coarse, layers.feeds, layers.attends):
        assert vars(function) == vars(marked) != {}


@pytest.mark.slow
@has_triton
@pytest.mark.compiles
def test_a_compiler_leaves_layers_whole_at_every_size(interpreted: dict[str, Any]) -> None:
    forward, backward, *more = interpreted["compiled"]["graphs"]
    assert forward == ["feed_forward", "attention", "attention_1"]
    assert sorted(backward) == ["attention_backward", "attention_backward_1", "feed_forward_backward"]
    assert all(graph in (forward, backward) for graph in more)
    assert interpreted["compiled"]["differences"] == [0, 0]


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A process that seems to have a GPU, on which nothing has been rehearsed."""
    kernels.reset()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    for module, name in ((layers, "on_gpu"), (core_layers, "on_gpu")):
        monkeypatch.setattr(module, name, lambda _: True)
    monkeypatch.setattr(layers, "_coarse", lambda: True)
    monkeypatch.setattr(gpu, "place", lambda _: torch.device("cpu"))
    yield
    monkeypatch.undo()
    kernels.reset()


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if "PyTorch's operators" in record.getMessage()]


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize("layer", [FeedForward(dim=32, hidden=64), SelfAttention(dim=32, num_heads=2)])
def test_kernels_that_fail_are_told_once_and_operators_serve(
    layer: nn.Module, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: Any) -> None:
        raise RuntimeError("out of resource: shared memory")

    monkeypatch.setattr(gpu, "able", lambda _: True)
    monkeypatch.setattr(layers, "_feed", broken)
    monkeypatch.setattr(layers, "_attention", broken)
    x = torch.randn(1, 5, 32)
    with caplog.at_level(logging.INFO, "constmem"):
        out = [layer(x) for _ in range(3)]
    monkeypatch.setattr(layers, "on_gpu", lambda _: False)
    assert torch.equal(out[0], layer(x))
    assert len(lines(caplog)) == 1
    assert "out of resource" in lines(caplog)[0]
    assert GPU.failed is None  # observing has kernels of its own


@pytest.mark.usefixtures("fresh")
def test_switched_off_kernels_are_not_rehearsed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CONSTMEM_NATIVE", "0")
    assert not layers.feeds(32, 64, True, 0)
    assert not layers.attends(32, 2, 16, True, 0)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, fresh: None) -> list[Any]:  # noqa: ARG001
    """What whole layers were asked for, where all that fit would serve."""
    found: list[Any] = []

    def serve(x: Tensor, *rest: Any) -> Tensor:
        found.append(rest[-1])
        return x

    monkeypatch.setattr(layers, "rehearsed", lambda *_: True)
    monkeypatch.setattr(layers, "_feed", serve)
    monkeypatch.setattr(layers, "_attention", serve)
    return found


def all_layers(
    dim: int = 32, heads: int = 2, hidden: int = 64, n: int = 5, dtype: Any = torch.float32
) -> None:
    x, y = torch.randn(1, 3, dim, dtype=dtype), torch.randn(1, n, dim, dtype=dtype)
    FeedForward(dim=dim, hidden=hidden).to(dtype)(x)
    SelfAttention(dim=dim, num_heads=heads).to(dtype)(y)
    CrossAttention(dim=dim, num_heads=heads).to(dtype)(x, y)


def test_whole_layers_serve_by_the_precision_that_is_asked_for(
    asked: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    all_layers()
    monkeypatch.setattr(layers, "cast_to", lambda: torch.bfloat16)
    monkeypatch.setattr(layers, "_coarse", lambda: False)
    all_layers()
    assert asked == [False] * 3 + [True] * 3
    weight, embedded = torch.ones(2), torch.ones(2, 2).bfloat16()  # as linear layers give it
    assert layers.half(weight, embedded) is True
    assert layers.half(weight.bfloat16(), embedded) is None


def test_sizes_beyond_a_program_get_operators(asked: list[Any]) -> None:
    all_layers(dim=24, heads=2)
    all_layers(dim=128, heads=8)
    assert asked == []
    all_layers(heads=4)  # 8 channels a head
    all_layers(hidden=256, n=257)
    assert asked == [False]  # the first feed-forward layer alone


def test_in_other_precisions_and_transformed_operators_serve(
    asked: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    all_layers(dtype=torch.float64)
    torch.func.vmap(FeedForward(dim=32, hidden=64))(torch.randn(2, 1, 3, 32))
    monkeypatch.setattr(layers, "_coarse", lambda: False)
    all_layers()
    monkeypatch.setattr(layers, "cast_to", lambda: torch.float16)
    all_layers()
    assert asked == []


def test_other_devices_get_operators() -> None:
    assert not layers.on_gpu(torch.randn(2, 2))
    assert layers.half(torch.ones(2), torch.randn(2, 2)) is None
    assert not layers._coarse()


def worst(layer: nn.Module, inputs: list[Tensor], half: bool) -> float:
    """The largest error of value and gradients against float64, relative to the largest number."""
    exact = copy.deepcopy(layer).double()
    found = [i.clone().requires_grad_() for i in inputs]
    wide = [i.double().requires_grad_() for i in inputs]
    with torch.autocast("cuda", torch.bfloat16, enabled=half):
        out = layer(*found)
    expected = exact(*wide)
    toward = torch.randn_like(out)
    got = torch.autograd.grad(out, [*found, *layer.parameters()], toward)
    right = torch.autograd.grad(expected, [*wide, *exact.parameters()], toward.double())
    pairs = zip([out, *got], [expected, *right], strict=True)
    return max(float(((a - b).abs().max() / b.abs().max()).detach()) for a, b in pairs)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
@pytest.mark.parametrize("half", [True, False])
@pytest.mark.parametrize("residual", ["normed", "raw"])
def test_a_gpu_learns_by_whole_layers_as_float64_does(residual: Any, half: bool) -> None:
    torch.set_float32_matmul_precision("high")
    try:
        x, y = torch.randn(5, 200, 64, device="cuda"), torch.randn(5, 128, 64, device="cuda")
        feed = FeedForward(dim=64, hidden=128, residual=residual).cuda()
        own, cross = (
            kind(dim=64, num_heads=4, residual=residual).cuda() for kind in (SelfAttention, CrossAttention)
        )
        assert layers.feeds(64, 128, half, 0)
        assert layers.attends(64, 4, 128, half, 0)
        limit = 3e-2 if half else 1e-2  # TF32 operands are cut off, not rounded
        assert worst(feed, [x], half) < limit
        assert worst(own, [y], half) < limit
        assert worst(cross, [x, y], half) < limit
    finally:
        torch.set_float32_matmul_precision("highest")

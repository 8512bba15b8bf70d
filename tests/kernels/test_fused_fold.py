"""Constant-memory training by the GPU's kernels has the gradients of plain autograd in float64."""

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
from unittest import mock

import pytest
import torch
from torch import Tensor

from constmem import CMANP, kernels
from constmem.core.fold import fused_fold
from constmem.kernels import cpu, gpu, gpu_fold
from constmem.kernels.paths import FOLD

has_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
NAMES = "dim", "heads", "slots", "embedded", "masked", "tasks", "precision"
WIDE, BARE, NARROW = (33, 3, 31, True, True, 2), (40, 1, 16, False, False, 1), (16, 2, 5, True, True, 1)
FOLDS: list[tuple[tuple[Any, ...], float]] = [
    *(((*sizes, "exact"), 1e-5) for sizes in (WIDE, BARE, NARROW)),
    ((*BARE, "tf32"), 1e-5),  # which the interpreter does not round
    *(((*sizes, "half"), 3e-3) for sizes in (WIDE, BARE, NARROW, (100, 2, 3, True, False, 1))),
]
SHARP = {"precision": "half", "sharpness": 300.0}
MODELS: list[dict[str, Any]] = [
    {"precision": "exact"},
    {"precision": "half"},
    {"precision": "exact", "frozen": "embed."},
    {"precision": "exact", "frozen": "observation"},
]
PARTS: list[dict[str, Any]] = [
    *({"precision": p, "apart": apart} for p in ("exact", "half") for apart in (0.0, 9.0)),
    {"precision": "exact", "apart": 0.0, "away": 10.0},
]  # 150 points of 150, and of a million; and far below a score of zero


CASES: dict[str, list[dict[str, Any]]] = {
    "fold": [dict(zip(NAMES, case, strict=True)) for case, _ in FOLDS],
    "part": PARTS,
    "model": MODELS,
    "near": [{"precision": "half"}, {"precision": "exact"}],
    **{name: [{}] for name in ("few_among_many", "leaves_out", "no_number", "changed", "breaks", "second")},
}
CASES["fold"].append(CASES["fold"][2] | SHARP)


@pytest.fixture(scope="module")
def interpreted() -> dict[str, list[Any]]:
    """What a program with Triton's interpreter found of all cases, by their names."""
    cases = [(name, settings) for name, several in CASES.items() for settings in several]
    program = Path(__file__).with_name("interpreted_fold.py")
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", str(program), json.dumps(cases)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    results = iter(json.loads(done.stdout))
    return {name: [next(results) for _ in several] for name, several in CASES.items()}


@pytest.mark.slow
@has_triton
def test_states_and_all_gradients_of_several_chunks_agree_with_float64(
    interpreted: dict[str, list[Any]],
) -> None:
    for (case, tolerance), found in zip(FOLDS, interpreted["fold"], strict=False):
        assert found["failures"] == [], case
        assert found["counted"], case
        assert found["value"] < tolerance, case
        assert found["lse"] < tolerance, case
        assert len(found["gradients"]) == 7 + 6 * case[3] + 2, case
        for name, error in found["gradients"].items():
            assert error < tolerance, (case, name)


@pytest.mark.slow
@has_triton
def test_gradients_of_sharp_softmaxes_are_as_good_as_their_values_in_half_precision(
    interpreted: dict[str, list[Any]],
) -> None:
    found = interpreted["fold"][-1]
    assert found["value"] < 5e-3
    assert all(error < 1e-2 for error in found["gradients"].values())


@pytest.mark.slow
@has_triton
def test_a_part_of_a_million_points_has_the_gradients_of_the_formula(
    interpreted: dict[str, list[Any]],
) -> None:
    for case, found in zip(PARTS, interpreted["part"], strict=True):
        tolerance = 2e-3 if case["precision"] == "half" else 3e-5
        assert all(error < tolerance for error in found.values()), (case, found)


@pytest.mark.slow
@has_triton
def test_points_that_lie_close_together_have_gradients_too(interpreted: dict[str, list[Any]]) -> None:
    half, exact = interpreted["near"]
    assert half < 3e-2  # of scores that hardly differ
    assert exact < 3e-3


@pytest.mark.slow
@has_triton
def test_gradients_of_few_points_are_not_lost_among_those_of_many(interpreted: dict[str, list[Any]]) -> None:
    assert interpreted["few_among_many"][0] < 1e-5


@pytest.mark.slow
@has_triton
def test_masked_points_leave_no_trace_in_gradients(interpreted: dict[str, list[Any]]) -> None:
    assert interpreted["leaves_out"][0] == {"same": True, "none": True, "finite": True, "nothing": True}


@pytest.mark.slow
@has_triton
def test_a_model_learns_by_the_kernels_what_it_would_by_operators(interpreted: dict[str, list[Any]]) -> None:
    for case, found in zip(MODELS, interpreted["model"], strict=True):
        assert found["failures"] == [], case
        tolerance = 1e-2 if case["precision"] == "half" else 1e-4
        assert all(error < tolerance for error in found["errors"]), case


@pytest.mark.slow
@has_triton
def test_chunks_are_met_a_bounded_number_of_points_at_a_time(interpreted: dict[str, list[Any]]) -> None:
    for found in interpreted["model"]:
        assert found["points"] == [[150, 150, 150, 80], [100, 100, 100, 100, 100, 30]]


@pytest.mark.slow
@has_triton
def test_gradients_that_are_no_numbers_are_seen_but_not_in_other_tasks(
    interpreted: dict[str, list[Any]],
) -> None:
    found = interpreted["no_number"][0]
    assert len(found) == 9
    assert all(found.values()), found


@pytest.mark.slow
@has_triton
def test_what_changes_before_the_backward_pass_is_noticed(interpreted: dict[str, list[Any]]) -> None:
    said = interpreted["changed"][0]
    assert len(said) == 3
    assert all("modified by an inplace operation" in line for line in said), said


@pytest.mark.slow
@has_triton
def test_kernels_that_fail_in_a_backward_pass_say_what_to_do(interpreted: dict[str, list[Any]]) -> None:
    (said, failures), starved = (interpreted["breaks"][0][why] for why in ("broken", "starved"))
    assert "no such tile" in said
    assert "repeat the step" in said
    assert "no such tile" in failures  # so that operators serve from then on
    assert starved == ["no memory", None]  # which may come back


@pytest.mark.slow
@has_triton
def test_second_derivatives_are_refused_here_too(interpreted: dict[str, list[Any]]) -> None:
    assert "once_differentiable" in interpreted["second"][0]


def small() -> CMANP:
    sizes = {"dim": 16, "depth": 1, "num_slots": 4, "num_latents": 4, "hidden": 16, "num_heads": 2}
    return CMANP(dim_x=1, dim_y=1, **sizes)  # type: ignore[arg-type]


def learnt(model: CMANP, x: Tensor, y: Tensor) -> list[Tensor]:
    model.zero_grad()
    (-model(x, y, x[:, :3], None, 4).log_prob(y[:, :3]).mean()).backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A process that has not yet asked for kernels, of which a few points are thought worthy."""
    kernels.reset()
    monkeypatch.setattr(gpu, "usable", lambda _: True)
    monkeypatch.setattr(cpu, "library", lambda: None)
    monkeypatch.setattr(gpu_fold, "LEAST", 9)
    yield
    kernels.reset()


@pytest.mark.usefixtures("fresh")
def test_kernels_that_fail_a_rehearsal_are_told_once_and_operators_learn_instead(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model, (x, y) = small(), torch.randn(2, 1, 9, 1)
    with mock.patch.object(gpu, "usable", return_value=False):
        expected = learnt(model, x, y)
    broken = mock.Mock(side_effect=RuntimeError("out of resource: shared memory"))
    monkeypatch.setattr(gpu_fold, "whole", broken)
    with caplog.at_level(logging.INFO, "constmem"):
        for _ in range(3):
            for one, other in zip(learnt(model, x, y), expected, strict=True):
                torch.testing.assert_close(one, other)
    assert broken.call_count == 1  # it is never tried again
    assert len([r for r in caplog.records if "out of resource" in r.getMessage()]) == 1
    monkeypatch.setattr(gpu, "precision_of", lambda _: "half")
    learnt(model, x, y)
    assert broken.call_count == 2  # other precisions need other resources


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize(
    ("points", "change", "asked"),
    [
        (9, "nothing", 1), (8, "nothing", 0), (9, "float64", 0), (9, "failed", 0), (9, "uneven", 0),
        (9, "narrow", 0), (9, "inference", 0), (9, "no gradients", 0),
        (9, "crowded", 0),
    ],
)  # fmt: skip
def test_kernels_are_asked_where_many_plain_points_come(
    points: int, change: str, asked: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, (x, y) = small(), torch.randn(2, 2, points, 1)
    if change == "failed":
        FOLD.failed = "before"
    if change == "float64":
        model = model.double()
    state = mock.Mock(return_value=None)
    monkeypatch.setattr(gpu_fold, "_folded", state)
    chunks = [(x[:, :4], y[:, :4], None), (x[:, 4:], y[:, 4:], None)]
    if change == "uneven":
        chunks[1] = (x[:1, 4:], y[:1, 4:], None)
    if change == "crowded":
        monkeypatch.setattr(gpu_fold, "MOST", 1)
    if change == "narrow":
        chunks[1] = (x[:, 4:, :0], y[:, 4:], None)
    if change == "inference":
        with torch.inference_mode():
            chunks[1] = (x[:, 4:].clone(), y[:, 4:], None)
    with torch.set_grad_enabled(change != "no gradients"):
        assert fused_fold(model.stack.observation, model.embed, chunks) is None
    assert state.call_count == asked


def by_gradient(state: Any, model: CMANP) -> list[Tensor]:
    """The state, and the gradients of all that observes, of which rows matter differently."""
    random = torch.Generator(state.value.device).manual_seed(0)
    rates = torch.randn(state.value.shape, generator=random, dtype=torch.float64, device=state.value.device)
    loss = (rates * state.value).sum() + (rates[..., 0] * state.lse).sum()
    return [
        state.value.detach(),
        state.lse.detach(),
        *torch.autograd.grad(loss, model.observing_parameters()),
    ]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
@pytest.mark.parametrize(("precision", "tolerance"), [("exact", 1e-4), ("tf32", 1e-2), ("half", 1e-2)])
@pytest.mark.parametrize(("tasks", "masked", "width"), [(1, False, 64), (3, True, 64), (1, True, 128)])
def test_a_gpu_learns_from_many_points_as_float64_does(
    precision: str, tolerance: float, tasks: int, masked: bool, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu, "precision_of", lambda _: precision)
    torch.manual_seed(0)
    if width == 64:
        model = CMANP.from_pretrained("emnist", device="cuda")
    else:
        model = CMANP(dim_x=2, dim_y=1, dim=width, depth=2, num_slots=50, num_latents=8).cuda()
    exact = copy.deepcopy(model).double()
    x = 2 * torch.rand(tasks, 40_001, 2, device="cuda") - 1
    y = torch.rand(tasks, 40_001, 1, device="cuda") - 0.5
    mask = torch.rand(tasks, 40_001, device="cuda") < 0.7 if masked else None
    with mock.patch.object(gpu_fold, "part", wraps=gpu_fold.part) as part:
        found = by_gradient(model.condition(x, y, mask=mask), model)
    assert part.called == (width <= gpu.WIDEST[precision])  # operators serve wider ones
    assert FOLD.failed is None
    assert all(FOLD.sizes.values())
    expected = by_gradient(exact.condition(x.double(), y.double(), mask=mask), exact)
    for one, other in zip(found, expected, strict=True):
        assert float((one - other).abs().max()) < tolerance * float(other.abs().max())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
def test_a_gpu_learns_from_points_that_lie_close_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "precision_of", lambda _: "half")
    model = CMANP.from_pretrained("emnist", device="cuda")
    exact, found = copy.deepcopy(model).double(), []
    x, y = 0.3 + 0.02 * torch.rand(2, 1, 40_001, 2, device="cuda")
    rates = torch.randn(1, *model.layout, dtype=torch.float64, device="cuda")
    for one, dtype in ((model, torch.float32), (exact, torch.float64)):
        value = one.condition(x.to(dtype), y[..., :1].to(dtype)).value
        found += torch.autograd.grad((rates * value).sum(), one.stack.observation.slots)
    assert FOLD.failed is None
    assert all(FOLD.sizes.values())
    assert float((found[0] - found[1]).abs().max()) < 0.05 * float(found[1].abs().max())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
def test_the_peak_of_learning_does_not_grow_with_the_points(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "precision_of", lambda _: "half")
    model, peaks = CMANP(dim_x=2, dim_y=1).cuda(), []
    for n in (2**17, 2**17, 2**20):  # kernels are compiled by the first
        x, y = torch.rand(1, n, 2, device="cuda"), torch.rand(1, n, 1, device="cuda")
        model.zero_grad()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        (-model(x, y, x[:, :9]).log_prob(y[:, :9]).mean()).backward()
        peaks.append(torch.cuda.max_memory_allocated() - before)
    assert FOLD.failed is None
    assert all(FOLD.sizes.values())
    assert peaks[2] < peaks[1] + 2**23

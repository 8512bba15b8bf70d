"""The GPU's kernels agree with float64, in Triton's interpreter and on a GPU; failing costs one log line."""

import copy
import importlib.util
import json
import logging
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from constmem import CMANP, kernels
from constmem.core import checks
from constmem.core.observation import Observation
from constmem.core.state import AttentionState
from constmem.kernels import cpu, gpu, graphs
from constmem.kernels.gpu import absorb
from constmem.kernels.paths import GPU
from constmem.neural_processes import cmanp

has_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
KINDS = "plain", "masked", "weighted", "embedded", "sharp"
WIDTHS = {"plain": (40, 1, 16), "masked": (33, 3, 31), "weighted": (16, 2, 5), "embedded": (33, 3, 31),
          "sharp": (16, 2, 5)}  # fmt: skip
SMALL = {"dim": 16, "depth": 1, "num_slots": 4, "num_latents": 4, "hidden": 16, "num_heads": 2}


PRECISIONS = {"exact": 1e-5, "half": 2e-3}
SIZES = [(16, 1, 70, 3, 2), (33, 3, 5, 1, 3), (16, 2, 5, 16, 0), (40, 1, 5, 17, 1), (100, 2, 3, 1, 2)]
EXTENDED = [dict(zip(("dim", "heads", "slots", "tasks", "depth"), size, strict=True)) for size in SIZES]


def observed(kind: str, precision: str) -> dict[str, Any]:
    dim, heads, slots = WIDTHS[kind]
    return {"dim": dim, "heads": heads, "slots": slots, "kind": kind, "precision": precision}


CASES: dict[str, list[dict[str, Any]]] = {
    "observe": [observed(kind, p) for p in PRECISIONS for kind in KINDS if (kind, p) != ("sharp", "half")],
    **{name: [{}] for name in ("leaves_out", "trained", "update", "verifies", "merge", "changed")},
    "extend": EXTENDED,
    "checksum": [{}],
}


@pytest.fixture(scope="module")
def interpreted() -> dict[str, list[Any]]:
    """What a program with Triton's interpreter found of all cases, by their names."""
    cases = [(name, settings) for name, several in CASES.items() for settings in several]
    program = Path(__file__).with_name("interpreted.py")
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", str(program), json.dumps(cases)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    results = iter(json.loads(done.stdout))
    return {name: [next(results) for _ in several] for name, several in CASES.items()}


@pytest.mark.slow
@has_triton
@pytest.mark.parametrize("precision", PRECISIONS)
def test_the_kernels_agree_with_float64_operators_at_every_size(
    interpreted: dict[str, list[Any]], precision: str
) -> None:
    tolerance, compared = PRECISIONS[precision], 0
    for case, rows in zip(CASES["observe"], interpreted["observe"], strict=True):
        for row in rows if case["precision"] == precision else ():
            assert row["failures"] == [], case
            assert row["plans"] == 1, case  # it was indeed the kernels that observed
            assert row["lse"] < tolerance, case
            assert row["value"] < tolerance, case
            assert row["counted"], case
            compared += 1
    assert compared >= 4


@pytest.mark.slow
@has_triton
def test_masks_states_of_the_trained_model_updates_and_merges_hold_in_the_kernels_too(
    interpreted: dict[str, list[Any]],
) -> None:
    out, trained, updated, merged = (interpreted[n][0] for n in ("leaves_out", "trained", "update", "merge"))
    assert out == {"same": True, "empty": True}
    assert trained["failures"] == updated["failures"] == []
    assert trained["value"] < 2e-3
    assert trained["lse"] < 2e-3
    assert updated["value"] < 1e-5
    assert updated["lse"] < 1e-5
    assert updated["counted"]
    assert updated["by_kernels"] == 10
    assert all(difference <= 4e-15 for difference in merged.values()), merged
    assert all(d == 0 for name, d in merged.items() if "nothing" in name), merged


@pytest.mark.slow
@has_triton
def test_one_point_more_takes_one_launch_and_of_many_tasks_two(interpreted: dict[str, list[Any]]) -> None:
    for case, found in zip(EXTENDED, interpreted["extend"], strict=True):
        assert found["failures"] == [], case
        assert found["launches"] == [int(case["tasks"] > gpu.FEWEST), 1], case
        assert found["value"] < 1e-5, case
        assert found["lse"] < 1e-5, case
        assert found["counted"], case


@pytest.mark.slow
@has_triton
def test_an_update_verifies_the_weights_and_copies_its_points_in_the_one_launch_it_takes(
    interpreted: dict[str, list[Any]],
) -> None:
    (found,) = interpreted["verifies"]
    assert found["failures"] == []
    assert found["launches"] == ["_extended"]
    assert found["value"] < 1e-5
    assert found["counted"]
    assert len(found["answers"]) == 15
    for name, answer in found["answers"].items():
        assert "was made by other weights" in answer, name
    assert "x[0, 0, 0] is nan" in found["missing"]


@pytest.mark.slow
@has_triton
def test_weights_changed_between_updates_are_seen_by_the_kernels(interpreted: dict[str, list[Any]]) -> None:
    (differences,) = interpreted["changed"]
    assert len(differences) == 2 * 15
    assert max(differences) < 1e-4


@pytest.mark.slow
@has_triton
def test_the_checksum_is_that_of_its_formula_and_sees_every_bit(interpreted: dict[str, list[Any]]) -> None:
    (found,) = interpreted["checksum"]
    assert found == {"formula": 0, "missed": 0, "imagined": 0, "failures": []}


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that has not yet asked for kernels, on a machine that seems to have a GPU."""
    kernels.reset()
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    yield
    monkeypatch.undo()
    kernels.reset()


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if "PyTorch's operators" in record.getMessage()]


CUDA = torch.device("cuda", 0)


@pytest.mark.usefixtures("fresh")
def test_without_triton_one_line_in_the_log_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "constmem.kernels.triton_observe", None)
    with caplog.at_level(logging.INFO, "constmem"):
        assert not any(gpu.usable(CUDA) for _ in range(3))
    assert len(lines(caplog)) == 1


@pytest.mark.usefixtures("fresh")
def test_a_gpu_too_old_is_told_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (7, 5))
    with caplog.at_level(logging.INFO, "constmem"):
        assert not any(gpu.usable(CUDA) for _ in range(3))
    assert len(lines(caplog)) == 1
    assert "(7, 5)" in lines(caplog)[0]


@pytest.mark.usefixtures("fresh")
def test_switched_off_kernels_are_not_asked_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CONSTMEM_NATIVE", "0")
    with caplog.at_level(logging.INFO, "constmem"):
        assert not gpu.usable(CUDA)
    assert lines(caplog) == []


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels that would serve a CPU, until they fail."""
    monkeypatch.setattr(cpu, "library", lambda: None)
    monkeypatch.setattr(gpu, "usable", lambda _: GPU.failed is None)
    monkeypatch.setattr(gpu, "precision_of", lambda _: "half")


@pytest.mark.usefixtures("fresh", "on_cpu")
@torch.no_grad()
def test_a_kernel_that_fails_is_told_once_and_operators_serve(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = CMANP(dim_x=1, dim_y=1, **SMALL).eval()
    x, y = torch.randn(1, 9, 1), torch.randn(1, 9, 1)
    with mock.patch.object(gpu, "usable", return_value=False):
        expected = model.update(model.condition(x, y), x[:, :1], y[:, :1])
    broken = mock.Mock(side_effect=RuntimeError("out of resource: shared memory"))
    monkeypatch.setattr(gpu, "observe", broken)
    with caplog.at_level(logging.INFO, "constmem"):
        for _ in range(3):
            found = model.update(model.condition(x, y), x[:, :1], y[:, :1])
            assert torch.equal(found.value, expected.value)
    assert broken.call_count == 1  # it is never tried again
    assert len(lines(caplog)) == 1
    assert "out of resource" in lines(caplog)[0]


@pytest.mark.usefixtures("fresh", "on_cpu")
@torch.no_grad()
def test_tokens_too_wide_for_the_kernels_are_told_once_and_operators_serve(
    caplog: pytest.LogCaptureFixture,
) -> None:
    found, data = Observation(dim=256, depth=1, num_slots=4, num_heads=2), torch.randn(1, 5, 256)
    with mock.patch.object(gpu, "usable", return_value=False):
        expected = found.observe(data)
    with caplog.at_level(logging.INFO, "constmem"):
        for _ in range(3):
            assert torch.equal(found.observe(data).value, expected.value)
    assert len(lines(caplog)) == 1
    assert "256 channels" in lines(caplog)[0]


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("no memory"), RuntimeError("Triton Error [CUDA]: out of memory")]
)
def test_too_little_memory_is_no_reason_to_give_the_kernels_up(error: Exception) -> None:
    with pytest.raises(type(error), match="memory"):
        GPU.attempt(mock.Mock(side_effect=error))
    assert GPU.failed is None


def test_products_are_as_exact_as_pytorchs_own_would_be() -> None:
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("highest")
        assert gpu.precision_of(torch.float32) == "exact"
        assert gpu.precision_of(torch.bfloat16) == "half"
        assert gpu.precision_of(torch.float64) is None
        torch.set_float32_matmul_precision("high")
        assert gpu.precision_of(torch.float32) == "half"
    finally:
        torch.set_float32_matmul_precision(before)


def test_weights_beyond_the_range_of_float16_get_wider_products() -> None:
    queries, weight, shift = (
        torch.randn(2, 4, 8).double(),
        torch.randn(32, 16).double(),
        torch.zeros(32).double(),
    )
    small = gpu.plan(absorb(queries, weight, shift), [], "half")
    large = gpu.plan(absorb(1e6 * queries, weight, shift), [], "half")
    assert small is not None
    assert large is not None
    assert (small.precision, large.precision) == ("half", "tf32")
    assert bool(large.absorbed.isfinite().all())


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_one_sum_tells_whether_all_numbers_are_finite(bad: float) -> None:
    x, y = torch.randn(2, 5, 3), torch.randn(2, 5, 1)
    assert checks.surely_finite(x, y)
    for tensor in (x, y):
        spoilt = tensor.clone()
        spoilt[1, 3, 0] = bad
        assert not checks.surely_finite(x, spoilt)
        assert not checks.surely_finite(spoilt, y)
    assert not checks.surely_finite(torch.tensor([float("inf")]), torch.tensor([-float("inf")]))
    for size in (checks.FEW, checks.FEW + 1):  # looked at one by one, and added up
        points = torch.ones(1, 1, size)
        assert checks.surely_finite(points)
        points[0, 0, -1] = bad
        assert not checks.surely_finite(points)


class Replay:
    """In place of a CUDA graph: does the work again with what lies in its input."""

    def __init__(self, work: Any, given: tuple[Tensor, ...], result: Any) -> None:
        self.work, self.given, self.result = work, given, result

    def replay(self) -> None:
        found = self.work(*self.given)
        both = ((self.result, found),) if isinstance(found, Tensor) else zip(self.result, found, strict=True)
        for here, new in both:
            here.copy_(new)


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The inputs of graphs captured so far."""
    made: list[Any] = []

    def capture(work: Any, given: tuple[Tensor, ...], weights: list[Tensor]) -> Any:
        given, result = tuple(t.clone() for t in given), work(*given)
        made.append(given)
        return graphs._Captured(Replay(work, given, result), given, result, weights)  # type: ignore[arg-type]

    monkeypatch.setattr(graphs, "_capture", capture)
    monkeypatch.setattr(gpu, "usable", lambda _: True)
    monkeypatch.setattr(cmanp, "on_gpu", lambda _: True)
    return made


@torch.no_grad()
def test_a_read_that_comes_again_is_captured_once_and_gives_fresh_tensors(captures: list[Any]) -> None:
    model = CMANP(dim_x=1, dim_y=1, **SMALL).eval()
    values = [torch.randn(1, *model.layout).double() for _ in range(2)]
    expected = [model._read(value) for value in values]
    for _ in range(4):
        read = [model._graphs.run(model, model._read, value) for value in values]
        assert all(torch.equal(a, b) for a, b in zip(read, expected, strict=True))
    assert len(captures) == 1
    assert copy.deepcopy(model)._graphs._captured == {}


@pytest.mark.usefixtures("captures")
def test_threads_that_replay_one_graph_get_their_own_results() -> None:
    model = CMANP(dim_x=1, dim_y=1, **SMALL).eval()
    values = [torch.randn(1, *model.layout).double() for _ in range(4)]
    wrong = []

    def reads(value: Tensor) -> None:
        with torch.no_grad():
            expected = model._read(value)
            wrong.extend(i for i in range(100) if not torch.equal(model.read(state_of(value)), expected))

    threads = [threading.Thread(target=reads, args=(value,)) for value in values]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def state_of(value: Tensor) -> AttentionState:
    return AttentionState(value, value[..., 0], torch.ones(1, dtype=torch.int64))


@torch.no_grad()
def test_queries_of_as_many_targets_are_captured_once(captures: list[Any]) -> None:
    model = CMANP(dim_x=1, dim_y=1, **SMALL).eval()
    memories = [torch.randn(1, 1, 4, 16) for _ in range(2)]
    targets = [torch.randn(1, 3, 1) for _ in range(2)]
    expected = [model._decode(memory, xt) for memory, xt in zip(memories, targets, strict=True)]
    for _ in range(4):
        found = [model.decode(memory, xt) for memory, xt in zip(memories, targets, strict=True)]
        for one, other in zip(found, expected, strict=True):
            assert torch.equal(one[0], other[0])
            assert torch.equal(one[1], other[1])
    assert len(captures) == 1
    model.decode(memories[0], torch.randn(1, 5, 1))  # of another number it is not, as yet
    assert len(captures) == 1


@torch.no_grad()
def test_weights_trained_in_place_are_seen_and_replaced_ones_captured_anew(captures: list[Any]) -> None:
    model = CMANP(dim_x=1, dim_y=1, **SMALL).eval()
    value = torch.randn(1, *model.layout).double()
    run = lambda: model._graphs.run(model, model._read, value)  # noqa: E731
    for _ in range(4):
        before = run()
    model.latents.mul_(2)
    assert not torch.equal(run(), before)
    assert torch.equal(run(), model._read(value))
    assert len(captures) == 1
    model.latents = torch.nn.Parameter(model.latents + 1)
    for _ in range(4):
        assert torch.equal(run(), model._read(value))
    assert len(captures) == 2


@pytest.mark.usefixtures("fresh")
@torch.no_grad()
def test_a_capture_that_fails_is_told_once_and_leaves_the_kernels_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = CMANP(dim_x=1, dim_y=1, **SMALL).eval()
    value = torch.randn(1, *model.layout).double()
    broken = mock.Mock(side_effect=RuntimeError("operation not permitted when stream is capturing"))
    monkeypatch.setattr(graphs, "_capture", broken)
    monkeypatch.setattr(gpu, "usable", lambda _: True)
    with caplog.at_level(logging.INFO, "constmem"):
        for _ in range(6):
            assert torch.equal(model._graphs.run(model, model._read, value), model._read(value))
    assert broken.call_count == 1
    assert len(lines(caplog)) == 1
    assert GPU.failed is None


def test_nothing_is_captured_while_learning(captures: list[Any]) -> None:
    model = CMANP(dim_x=1, dim_y=1, **SMALL)
    value = torch.randn(1, *model.layout).double()
    for _ in range(5):
        assert model._graphs.run(model, model._read, value).requires_grad
    assert captures == []


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
@pytest.mark.parametrize("mine", [True, False])
def test_nan_in_a_merged_lse_stays_nan_in_the_kernel(mine: bool) -> None:
    value, lse = torch.zeros(1, 2, 3, device="cuda").double(), torch.zeros(1, 2, device="cuda").double()
    spoilt = lse.clone()
    spoilt[0, 1] = float("nan")
    merged, merged_lse = gpu.merge(value, *((spoilt, value, lse) if mine else (lse, value, spoilt)))
    assert merged_lse.isnan().tolist() == [[False, True]]
    assert merged.isnan().any(-1).tolist() == [[False, True]]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
@pytest.mark.parametrize(("precision", "tolerance"), [("highest", 1e-5), ("high", 2e-3)])
@pytest.mark.parametrize("tasks", [1, 3, gpu.FEWEST + 1])
@torch.no_grad()
def test_a_gpu_observes_updates_and_reads_as_float64_does(
    precision: str, tolerance: float, tasks: int
) -> None:
    torch.set_float32_matmul_precision(precision)
    try:
        model = CMANP.from_pretrained("emnist", device="cuda")
        exact = copy.deepcopy(model).double()
        x = 2 * torch.rand(tasks, 3000, 2, device="cuda") - 1
        y = torch.rand(tasks, 3000, 1, device="cuda") - 0.5
        state = model.update(model.condition(x[:, :-1], y[:, :-1]), x[:, -1:], y[:, -1:])
        expected = exact.condition(x.double(), y.double())
        assert GPU.failed is None
        size = float(expected.value.abs().max())
        assert float((state.value - expected.value).abs().max()) < tolerance * size
        read = [model.read(state) for _ in range(5)]
        assert all(torch.equal(r, read[-1]) for r in read[3:])
        means = [model.predict(read[0], x[:, :7]).mean for _ in range(5)]
        torch.testing.assert_close(means[0], means[-1], atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(read[0], read[-1], atol=1e-4, rtol=1e-4)
    finally:
        torch.set_float32_matmul_precision("highest")

"""Exported graphs say what the library says, without PyTorch; states go both ways."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from constmem import CMANP, AttentionState
from constmem.cli import app
from constmem.integrations.onnx import export
from constmem.neural_processes import CNP
from constmem.neural_processes.points import Scales

pytestmark = [pytest.mark.slow, pytest.mark.compiles]  # `make slow-test`
pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")
from constmem.integrations.onnx_runner import Runner, read, write  # noqa: E402

SIZES: dict[str, Any] = {
    "dim": 16,
    "depth": 1,
    "num_slots": 6,
    "num_latents": 5,
    "num_heads": 2,
    "hidden": 12,
}


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> tuple[CMANP, Path]:
    """A model whose weights float16 holds, and the folder that one with weights near them was exported to."""
    torch.manual_seed(0)
    made, rounded = (CMANP(dim_x=2, dim_y=1, embed_depth=2, **SIZES).eval() for _ in range(2))
    made.set_scales(Scales(x_mean=[1e6, 2.0], x_std=[2.0, 3.0], y_mean=[0.5], y_std=[2.0]))
    rounded.set_scales(made.scales)
    small = {k: t.half().float() if t.dtype == torch.float32 else t for k, t in made.state_dict().items()}
    rounded.load_state_dict(small)
    return rounded, export(made, tmp_path_factory.mktemp("onnx"), half=True)


@pytest.fixture(scope="module")
def model(exported: tuple[CMANP, Path]) -> CMANP:
    return exported[0]


@pytest.fixture(scope="module")
def folder(exported: tuple[CMANP, Path]) -> Path:
    return exported[1]


def points(count: int, batch: int = 1) -> tuple[Tensor, Tensor]:
    """Times of day, which float32 could not hold, and what was seen then."""
    x = torch.rand(batch, count, 2, dtype=torch.float64) * 4 + torch.tensor([1e6, 0.0])
    return x, torch.sin(x.sum(-1, keepdim=True))


def same(runner: Runner, model: CMANP, state: AttentionState, targets: int = 9) -> None:
    xt = points(targets, runner.batch)[0]
    with torch.no_grad():
        wanted = model.query(state, xt)
    mean, std = runner.predict(xt.numpy())
    np.testing.assert_allclose(mean, wanted.mean, atol=1e-5)
    np.testing.assert_allclose(std, wanted.stddev, atol=1e-5)
    np.testing.assert_array_equal(runner.count, state.count)


@pytest.mark.parametrize(("batch", "steps"), [(1, (1, 1, 1)), (1, (700, 600)), (4, (3, 1, 0)), (1, ())])
def test_any_number_of_streams_points_and_targets_is_predicted_alike(
    batch: int, steps: tuple[int, ...], model: CMANP, folder: Path
) -> None:
    runner, state = Runner(folder, batch=batch), model.empty(batch)
    for count in steps:
        x, y = points(count, batch)
        runner.observe(x.numpy(), y.numpy())
        with torch.no_grad():
            state = model.update(state, x, y)
    for targets in (1, 9):
        same(runner, model, state, targets)
    assert runner.nbytes == state.nbytes


def test_streams_merge_fork_and_go_both_ways_through_files(
    model: CMANP, folder: Path, tmp_path: Path
) -> None:
    x, y = points(20)
    first, second = Runner(folder), Runner(folder)
    first.observe(x[0, :7], y[0, :7])
    second.observe(x[0, 7:], y[0, 7:])
    before = first.fork()
    first.merge(second)
    with torch.no_grad():
        whole, part = model.condition(x, y), model.condition(x[:, :7], y[:, :7])
    same(first, model, whole)
    same(before, model, part)
    first.save(tmp_path / "state")
    same(first, model, AttentionState.load(tmp_path / "state"))
    model.update(AttentionState.load(tmp_path / "state"), x, y)  # signed by these weights
    other = Runner(folder)
    other.about = other.about | {"fingerprint": "of others"}
    with pytest.raises(ValueError, match="same exported model"):
        first.merge(other)
    part.save(tmp_path / "part")
    second.load(tmp_path / "part")
    same(second, model, part)


KINDS: dict[str, dict[str, Any]] = {
    "moments": {"moments": 6, "experts": 3, "dim_y": 2},
    "levels": {"levels": 16, "components": 3, "dim_y": 1},
    "joint": {"rank": 3, "dim_y": 2},
    "mixture": {"normals": 3, "dim_y": 1},
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_prediction_is_exported(kind: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = CMANP(dim_x=2, **SIZES, **KINDS[kind]).eval()
    if kind == "moments":
        model.set_scales(Scales(x_mean=[1.0, 2.0], x_std=[2.0, 3.0], y_mean=[0.5, 0.0], y_std=[2.0, 1.0]))
        for part in (model.weigh, model.head.predictor.layers[-1]):  # type: ignore[union-attr,index]
            torch.nn.init.normal_(part.weight, std=0.3)  # type: ignore[union-attr,arg-type]
    export(model, tmp_path)
    x, y, xt = torch.rand(2, 40, 2), torch.rand(2, 40, model.dim_y) - 0.5, torch.rand(2, 1030, 2)
    if model.dim_y == 1:
        listed, nested = Runner(tmp_path), Runner(tmp_path)
        listed.observe(x[0], y[0, :, 0])  # one channel, as a stream takes it
        nested.observe(x[:1], y[:1])
        np.testing.assert_array_equal(listed.predict(xt[0])[0], nested.predict(xt[0])[0])
    first, second = (Runner(tmp_path, batch=2) for _ in range(2))
    first.observe(x[:, :7], y[:, :7])
    first.observe(x[:, 7:8], y[:, 7:8])
    second.observe(x[:, 8:], y[:, 8:])
    first.merge(second)
    with torch.no_grad():
        whole = model.condition(x, y)
        wanted = model.query(whole, xt)
    mean, std = first.predict(xt)
    np.testing.assert_allclose(mean, wanted.mean, atol=1e-5)
    np.testing.assert_allclose(std, wanted.stddev, atol=1e-5)
    for name, tensor in whole.tensors().items():
        np.testing.assert_allclose(first.state[name], tensor, atol=1e-5, err_msg=name)
    first.save(tmp_path / "state")
    with torch.no_grad():
        read = model.query(model.update(model.state_type.load(tmp_path / "state"), x, y), xt)
        both = model.query(model.update(whole, x, y), xt)
    torch.testing.assert_close(read.mean, both.mean, atol=1e-4, rtol=0)
    whole.save(tmp_path / "state")
    second.load(tmp_path / "state")
    np.testing.assert_allclose(second.predict(xt)[0], wanted.mean, atol=1e-5)


def test_a_model_with_moments_predicts_nothing_at_no_targets(tmp_path: Path) -> None:
    runner = Runner(export(CMANP(dim_x=2, dim_y=3, moments=4, experts=2, **SIZES).eval(), tmp_path), batch=2)
    assert [part.shape for part in runner.predict(np.zeros((2, 0, 2)))] == [(2, 0, 3)] * 2


def test_many_single_updates_stay_exact(model: CMANP, folder: Path) -> None:
    """A thousand here; `python benchmarks/onnx_cost.py` does 20,000 of the shipped weights."""
    x, y = points(1000)
    runner = Runner(folder)
    for i in range(1000):
        runner.observe(x[:, i : i + 1], y[:, i : i + 1])
    with torch.no_grad():
        whole = model.condition(x, y)
    np.testing.assert_allclose(runner.state["value"], whole.value, atol=1e-5)
    np.testing.assert_allclose(runner.state["lse"], whole.lse, atol=1e-5)


def test_the_runner_needs_no_torch_and_no_constmem(folder: Path) -> None:
    code = (
        "import sys\nfrom constmem_runner import Runner\nrunner = Runner('.')\n"
        "runner.observe([[1e6, 1.0]], [[0.5]])\nprint(runner.predict([[1e6, 2.0]])[0].shape)\n"
        "assert not {'torch', 'constmem'} & sys.modules.keys()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, check=False
    )
    assert done.stdout == "(1, 1, 1)\n", done.stderr


def test_float16_weights_are_stored_so_and_cast_back(folder: Path) -> None:
    import onnx

    kinds = [tensor.data_type for tensor in onnx.load(folder / "read.onnx").graph.initializer]
    assert kinds.count(onnx.TensorProto.FLOAT16) >= 20


@pytest.mark.parametrize(
    ("x", "y", "message"),
    [
        ([[1.0, 2.0]], [[1.0], [2.0]], "x has 1 points, y 2"),
        ([[1.0, 2.0, 3.0]], [[1.0]], r"x has shape \(1, 3\), but \(n, 2\)"),
        ([[1.0, float("nan")]], [[1.0]], r"x holds nan at \(0, 0, 1\)"),
        ([["a", "b"]], [[1.0]], "x must be numbers"),
        ([[1.0, 2.0]], [[-1e30]], r"y holds -1e\+30 at \(0, 0, 0\)"),
        ([[1e300, 2.0]], [[1.0]], r"x holds 1e\+300"),  # float32 would make infinity of it
    ],
)
def test_points_that_do_not_fit_are_refused(x: Any, y: Any, message: str, folder: Path) -> None:
    runner = Runner(folder)
    with pytest.raises((ValueError, TypeError), match=message):
        runner.observe(x, y)
    assert runner.count.tolist() == [0]


def test_damaged_files_and_states_of_others_are_refused(model: CMANP, folder: Path, tmp_path: Path) -> None:
    path, runner = tmp_path / "state", Runner(folder)
    with torch.no_grad():
        state = model.condition(*points(5))
        state.save(path)
    content = path.read_bytes()
    for place in (4, 40, len(content) // 2, len(content) - 1):
        path.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
        with pytest.raises(ValueError, match=r"damaged|holds"):
            runner.load(path)
    path.write_bytes(content[:-9])
    with pytest.raises(ValueError, match="damaged"):
        runner.load(path)
    runner.save(path)
    arrays, words = read(path, runner.about["state"])
    words = {name: words[name] for name in ("format", "fingerprint")}
    write(path, {name: t.astype(np.float32) if t.ndim > 1 else t for name, t in arrays.items()}, words)
    with pytest.raises(ValueError, match="not kept in float64"):
        runner.load(path)
    state.signed("0123456789abcdef").save(path)
    with pytest.raises(ValueError, match="made by other weights"):
        runner.load(path)
    graph = folder / "read.onnx"
    whole = graph.read_bytes()
    try:
        graph.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
        with pytest.raises(ValueError, match=r"read.onnx is damaged"):
            Runner(folder)
    finally:
        graph.write_bytes(whole)
    with pytest.raises(FileNotFoundError, match="constmem export"):
        Runner(tmp_path)
    (tmp_path / "model.json").write_text("[]")
    with pytest.raises(ValueError, match=r"model.json is None of version None, not constmem\.onnx"):
        Runner(tmp_path)
    about = json.loads((folder / "model.json").read_text())
    (tmp_path / "model.json").write_text(json.dumps({**about, "version": 9}))
    with pytest.raises(ValueError, match=r"of version 9, not constmem\.onnx of version 4"):
        Runner(tmp_path)
    for name in about:
        left = {key: value for key, value in about.items() if key != name}
        (tmp_path / "model.json").write_text(json.dumps(left))
        with pytest.raises(
            ValueError, match=r"model.json is (damaged|None of|constmem.onnx of version None)"
        ):
            Runner(tmp_path)
    (tmp_path / "model.json").write_text(json.dumps(about))
    with pytest.raises(FileNotFoundError, match=r"observe.onnx"):
        Runner(tmp_path)


def test_models_that_have_no_graphs_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"only CMANP, CMHP and estimators .* not CNP"):
        export(CNP(dim_x=1, dim_y=1), tmp_path)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="not to 'tflite'"):
        app(["export", "emnist", "--to", "tflite", "--out", str(tmp_path)], standalone_mode=False)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("moments", [0, 6])
def test_observe_and_query_are_exported_for_any_number_of_tasks_points_and_targets(moments: int) -> None:
    sizes = {"dim": 16, "depth": 1, "num_slots": 4, "num_latents": 4, "num_heads": 2, "hidden": 8}
    model = CMANP(dim_x=2, dim_y=1, moments=moments, **sizes).eval()  # type: ignore[arg-type]

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, x: Tensor, y: Tensor, xt: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            state = self.model.observe(x, y)
            found = self.model.query(state, xt)
            return found.mean, found.stddev, state.count

    b, n, m = (torch.export.Dim(name) for name in "bnm")
    axes = {0: b, 1: n}, {0: b, 1: n}, {0: b, 1: m}
    given = torch.rand(3, 5, 2), torch.rand(3, 5, 1), torch.rand(3, 7, 2)
    with torch.no_grad():
        exported = torch.export.export(Both(), given, dynamic_shapes=axes).module()
        for batch, points, targets in ((2, 90, 5000), (5, 3, 2)):
            x, xt = torch.rand(batch, points, 2), torch.rand(batch, targets, 2)
            y = torch.rand(batch, points, 1)
            mean, std, count = exported(x, y, xt)
            wanted = model.query(model.observe(x, y), xt)
            torch.testing.assert_close(mean, wanted.mean, atol=1e-5, rtol=0)
            torch.testing.assert_close(std, wanted.stddev, atol=1e-5, rtol=0)
            assert count.tolist() == [points] * batch

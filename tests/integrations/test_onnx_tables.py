"""Exported estimators say what the library's say, row for row; files go both ways."""

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from constmem import CMANP, StreamingClassifier, StreamingRegressor
from constmem.cli import app
from constmem.integrations.onnx import export

pytestmark = [pytest.mark.slow, pytest.mark.compiles]  # `make slow-test`
pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")
from constmem.integrations.onnx_table_runner import TableRunner  # noqa: E402

STEPS = (1, 1, 3, 70, 5, 100, 300, 40, 30)  # rows at once: some wait in the library, some do not


def table(rows: int, seed: int) -> tuple[dict[str, Any], Any]:
    """Numbers, some missing, categories, some missing or rare, and dates; targets with heavy tails."""
    random = np.random.default_rng(seed)
    x = random.normal(size=(rows, 2))
    town = np.array(["Ulm", "Bern", "Rome"], object)[random.integers(0, 3, rows)]
    y = np.sin(2 * x[:, 0]) + 0.5 * (town == "Ulm") + 0.1 * random.standard_t(4, rows)
    town[::17], x[::13, 1] = None, np.nan
    day = np.datetime64("2024-03-01", "s") + random.integers(0, 10**7, rows)
    return {"u": x[:, 0], "v": x[:, 1], "town": town, "day": day}, y


def cut(x: dict[str, Any], start: int, stop: int) -> dict[str, Any]:
    return {name: column[start:stop] for name, column in x.items()}


def names(y: Any) -> Any:
    return np.where(y > 0.5, "high", np.where(y < -0.5, "low", "middle"))


ASKED, THEIR = table(40, 2)


def same(runner: TableRunner, estimator: Any) -> None:
    if isinstance(estimator, StreamingClassifier):
        np.testing.assert_allclose(runner.predict_proba(ASKED), estimator.predict_proba(ASKED), atol=1e-6)
        np.testing.assert_array_equal(runner.predict(ASKED), estimator.predict(ASKED))
        return
    for found, wanted in zip(runner.predict(ASKED, True), estimator.predict(ASKED, True), strict=True):
        np.testing.assert_allclose(found, wanted, atol=2e-6)
    np.testing.assert_allclose(runner.predict(ASKED), estimator.predict(ASKED), atol=2e-6)
    np.testing.assert_allclose(
        runner.predict_interval(ASKED, 0.8), estimator.predict_interval(ASKED, 0.8), atol=5e-6
    )
    np.testing.assert_allclose(
        runner.log_density(ASKED, THEIR), estimator.log_density(ASKED, THEIR), atol=2e-5
    )


MADE: dict[str, Any] = {
    "regressor": lambda: StreamingRegressor(size=200),
    "without residuals": lambda: StreamingRegressor(size=200, pretrained=False),
    "classifier": lambda: StreamingClassifier(size=200),
}


@pytest.fixture(scope="module", params=MADE)
def exported(request: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    x, y = table(500, 0)
    estimator = MADE[request.param]()
    estimator.fit(x, names(y) if request.param == "classifier" else y)
    folder = tmp_path_factory.mktemp("onnx")
    estimator.save(folder / "model.safetensors")
    app(
        ["export", str(folder / "model.safetensors"), "--out", str(folder / "graphs")],
        standalone_mode=False,
    )
    return request.param, folder


def both(exported: tuple[str, Path]) -> tuple[TableRunner, Any, Any]:
    """Runner, estimator, and targets as both take them."""
    kind, folder = exported
    estimator = type(MADE[kind]()).load(folder / "model.safetensors")
    return TableRunner(folder / "graphs"), estimator, names if kind == "classifier" else np.asarray


def test_rows_that_come_one_by_one_or_many_at_once_are_learned_alike(exported: tuple[str, Path]) -> None:
    runner, estimator, target = both(exported)
    size, start = runner.nbytes, 0
    assert runner.batch == 1
    x, y = table(sum(STEPS), 1)
    y = target(y)
    same(runner, estimator)
    fork, few = runner.fork(), target(table(3, 4)[1])
    fork.partial_fit(table(3, 4)[0], few)  # goes on by itself
    for rows in STEPS:
        for learner in (runner, estimator):
            learner.partial_fit(cut(x, start, start + rows), y[start : start + rows])
        start += rows
        if rows != 100:  # twice without a question in between
            same(runner, estimator)
    assert runner.nbytes == size
    assert runner.seen == estimator.learner_.seen
    assert fork.seen == 503


def test_parts_are_merged_and_files_go_both_ways(exported: tuple[str, Path], tmp_path: Path) -> None:
    runner, estimator, target = both(exported)
    x, y = table(200, 3)
    y = target(y)
    parts = runner.spawn(), estimator.spawn()
    for part, whole in zip(parts, (runner, estimator), strict=True):
        part.partial_fit(x, y)
        whole.merge(part)
    same(runner, estimator)
    runner.partial_fit(cut(x, 0, 9), y[:9])
    runner.save(tmp_path / "state")
    read = type(estimator).load(tmp_path / "state")
    same(runner, read)
    read.partial_fit(x, y)
    read.save(tmp_path / "state")
    runner.load(tmp_path / "state")
    same(runner, read)


def test_classes_that_turn_up_late_are_learned(exported: tuple[str, Path], tmp_path: Path) -> None:
    runner, estimator, _ = both(exported)
    if not isinstance(estimator, StreamingClassifier):
        with pytest.raises(ValueError, match="this is a regressor"):
            runner.predict_proba(ASKED)
        return
    x, y = table(90, 3)
    late = np.where(y > 1, "very high", names(y))
    for learner in (runner, estimator):
        learner.partial_fit(x, late)
    same(runner, estimator)
    assert runner.classes.tolist() == ["high", "low", "middle", "very high"]
    runner.save(tmp_path / "state")
    same(runner, StreamingClassifier.load(tmp_path / "state"))
    with pytest.raises(ValueError, match="this is a classifier"):
        runner.predict_interval(ASKED)


def test_the_runner_needs_onnxruntime_and_numpy_alone(exported: tuple[str, Path]) -> None:
    code = (
        "import sys\nfrom constmem_runner import TableRunner\nrunner = TableRunner('.')\n"
        "row = {'u': [1.0], 'v': [None], 'town': ['Oslo'], 'day': ['2024-05-01']}\n"
        "import datetime\nrow['day'] = [datetime.date(2024, 5, 1)]\nprint(len(runner.predict(row)))\n"
        "others = {'torch', 'constmem', 'sklearn', 'scipy', 'pandas', 'jaxtyping', 'safetensors'}\n"
        "assert not others & sys.modules.keys()"
    )
    where = exported[1] / "graphs"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=where, capture_output=True, text=True, check=False
    )
    assert done.stdout == "1\n", done.stderr


def test_a_model_exported_over_a_table_brings_its_own_runner(
    exported: tuple[str, Path], tmp_path: Path
) -> None:
    sizes: dict[str, Any] = {
        "dim": 8,
        "depth": 1,
        "num_slots": 4,
        "num_latents": 4,
        "num_heads": 2,
        "hidden": 8,
    }
    shutil.copytree(exported[1] / "graphs", tmp_path / "graphs")
    export(CMANP(dim_x=1, dim_y=1, **sizes), tmp_path / "graphs")
    code = "from constmem_runner import Runner; print(Runner('.').batch)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path / "graphs", capture_output=True, text=True, check=False
    )
    assert done.stdout == "1\n", done.stderr


def test_what_does_not_fit_is_refused(exported: tuple[str, Path], tmp_path: Path) -> None:
    runner, estimator, target = both(exported)
    x, y = table(200, 4)
    with pytest.raises(ValueError, match="X has 200 rows"):
        runner.partial_fit(x, target(y)[:9])
    with pytest.raises(ValueError, match="town"):
        runner.partial_fit({**x, "town": np.ones(200)}, target(y))
    with pytest.raises(ValueError, match="nothing was learned"):
        runner.spawn().predict(x)
    type(estimator)(size=200).fit(x, target(y)).save(tmp_path / "other")
    with pytest.raises(ValueError, match="has frozen other columns or features"):
        runner.load(tmp_path / "other")
    with pytest.raises(ValueError, match="none with itself"):
        runner.merge(runner)
    content = bytearray((tmp_path / "other").read_bytes())
    content[len(content) // 2] ^= 1
    (tmp_path / "other").write_bytes(content)
    with pytest.raises(ValueError, match="damaged"):
        runner.load(tmp_path / "other")
    assert runner.seen == estimator.learner_.seen
    same(runner, estimator)


def test_estimators_that_cannot_be_exported_are_named(tmp_path: Path) -> None:
    x, y = table(200, 5)
    with pytest.raises(ValueError, match="once its warm-up is over"):
        export(StreamingRegressor().partial_fit(x, y), tmp_path)
    with pytest.raises(ValueError, match="forget=100"):
        export(StreamingRegressor(forget=100, size=200).fit(x, y), tmp_path)
    with pytest.raises(ValueError, match="without half"):
        export(StreamingRegressor(size=200).fit(x, y), tmp_path, half=True)
    assert list(tmp_path.iterdir()) == []

"""Damaged files of tables and of estimators are refused in words; threads share an estimator."""

import json
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from constmem.core.files import read_tensors, write_tensors
from constmem.tabular.base import KIND, VERSION
from constmem.tabular.estimators import StreamingClassifier, StreamingRegressor
from constmem.tabular.files import table_file


def test_a_parquet_file_whose_pages_are_damaged_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    parquet.write_table(pa.table({"a": np.random.default_rng(0).normal(size=500)}), path)
    content = bytearray(path.read_bytes())
    content[4:40] = b"\xff" * 36
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"t\.parquet is not a readable Parquet file"):
        list(table_file(path).chunks({"a": "number"}))


def test_names_of_columns_that_go_on_in_the_second_line_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text('a,b,"c\n1,2,3"\n4,5,6\n')  # whose first row would be lost
    file = table_file(path)
    with pytest.raises(ValueError, match="go on in its second line"):
        file.kinds()


def test_a_table_that_is_no_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_bytes(b"a,b\xff\n1,2\n")
    with pytest.raises(ValueError, match=r"t\.csv is not a CSV file of UTF-8 text"):
        table_file(tmp_path / "t.csv")


@pytest.mark.parametrize(
    "change", [("params", 3), ("names", None), ("features", "gone"), ("flat", "gone"), ("class", 7)]
)
def test_a_file_of_an_estimator_whose_settings_are_damaged_is_refused(
    tmp_path: Path, change: tuple[str, Any]
) -> None:
    x = np.random.default_rng(0).normal(size=(60, 2))
    StreamingRegressor(size=24).fit(x, x[:, 0]).save(tmp_path / "m")
    tensors, words = read_tensors(tmp_path / "m", kind=KIND, version=VERSION)
    content = json.loads(words["content"])
    content["about"].pop(change[0])
    if change[1] != "gone":
        content["about"][change[0]] = change[1]
    write_tensors(tmp_path / "m", tensors, words | {"content": json.dumps(content)})
    with pytest.raises(ValueError, match=r"m is damaged|holds a 7"):
        StreamingRegressor.load(tmp_path / "m")


def test_what_an_estimator_saves_is_read_and_written_without_pytorch(tmp_path: Path) -> None:
    runner = pytest.importorskip("constmem.integrations.onnx_runner", exc_type=ImportError)
    x = np.random.default_rng(0).normal(size=(300, 3))
    StreamingRegressor(size=100).fit(x, x[:, 0]).save(tmp_path / "theirs")
    tensors, words = runner.read(tmp_path / "theirs", KIND)
    runner.write(tmp_path / "mine", tensors, {name: words[name] for name in ("format", "content")})
    again, _ = read_tensors(tmp_path / "mine", kind=KIND, version=VERSION)
    assert {name: t.numpy().dtype for name, t in again.items()} == {n: t.dtype for n, t in tensors.items()}
    assert len(StreamingRegressor.load(tmp_path / "mine").predict(x)) == 300


def test_numbers_too_large_to_be_squared_are_named() -> None:
    x = np.random.default_rng(0).normal(size=(200, 2))
    model = StreamingRegressor(size=24).fit(x, x[:, 0])
    model.learner_.memory.traces[0].moments.gram.fill_(np.nan)  # as sums that have overflowed
    model.learner_.memory.traces[0].forget_answers()
    with pytest.raises(ValueError, match="too large to be squared"):
        model.predict(x)


def test_classes_of_bytes_are_refused_with_advice() -> None:
    with pytest.raises(TypeError, match="y holds bytes, not text: decode them"):
        StreamingClassifier().fit(np.ones((2, 1)), np.array([b"a", b"b"]))


def test_threads_that_learn_and_ask_lose_no_row_and_see_no_half_of_a_change() -> None:
    random = np.random.default_rng(0)
    x = random.normal(size=(240, 2))
    y = np.sin(x[:, 0])
    base = StreamingRegressor(size=24).fit(x, y)
    shared, errors = base.spawn().partial_fit(x[:4], y[:4]), []

    def learn(first: int) -> None:
        for start in range(first, first + 40, 4):
            shared.partial_fit(x[start : start + 4], y[start : start + 4])

    def ask() -> None:
        try:
            for _ in range(20):
                assert np.isfinite(shared.predict(x[:3], return_std=True)).all()
        except Exception as error:
            errors.append(error)

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        works = [threading.Thread(target=learn, args=(first,)) for first in range(40, 240, 40)]
        works += [threading.Thread(target=ask) for _ in range(2)]
        for work in works:
            work.start()
        for work in works:
            work.join()
    finally:
        sys.setswitchinterval(before)
    assert not errors
    rows = [*range(4), *range(40, 240)]
    alone = base.spawn().partial_fit(x[rows], y[rows])
    mine, its = (e.learner_.memory.tensors() for e in (shared, alone))
    for name in ("0.gram", "0.cross"):
        np.testing.assert_allclose(mine[name].numpy(), its[name].numpy(), rtol=1e-9, atol=1e-9)
    assert shared.learner_.seen == alone.learner_.seen == 204

"""What a `Stream` refuses, and how it comes back from files."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from constmem import Stream, Window
from constmem.core.files import read_tensors, write_tensors
from constmem.neural_processes import TNPD
from tests.conftest import Refuses
from tests.streams.made import (
    MODEL,
    STORING,
    Forget,
    Model,
    assert_identical,
    assert_predicts,
    built,
    condition,
    every_forgetting,
    every_kind,
    query,
    show,
    task,
)

# Errors


@contextmanager
def breaking(model: Model, error: BaseException, after: int) -> Iterator[None]:
    """The model's observation raises once it was called so many times."""
    observe, calls = model._observe, 0

    def broken(*arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls > after:
            raise error
        return observe(*arguments)

    model._observe = broken  # type: ignore[method-assign]
    try:
        yield
    finally:
        model._observe = observe  # type: ignore[method-assign]
        assert calls == after + 1


@every_forgetting
@pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError("a cosmic ray")], ids=["stop", "error"])
@pytest.mark.parametrize("after", [0, 2])
def test_a_stream_broken_off_is_as_it_was(forget: Forget, error: BaseException, after: int) -> None:
    x, y, xt = task()
    model = built()
    stream, other = (Stream(model, batch=2, forget=forget) for _ in range(2))
    stream.observe(x[:, :10], y[:, :10])
    other.observe(x[:, :10], y[:, :10])
    before = stream.predict(xt)
    with pytest.raises(type(error)), breaking(model, error, after):
        stream.observe(x[:, 10:], y[:, 10:], chunk=3)
    assert_identical(stream.state, other.state)
    assert_predicts(stream.predict(xt), before, 0.0)
    stream.observe(x[:, 10:], y[:, 10:], chunk=3)
    other.observe(x[:, 10:], y[:, 10:], chunk=3)
    assert_identical(stream.state, other.state)
    assert torch.equal(stream.count, other.count)


@every_kind
def test_bad_points_are_refused_and_leave_the_stream_as_it_was(
    model: Model, forget: Forget, refuses: Refuses
) -> None:
    x, y, xt = task()
    stream = Stream(model, batch=2, forget=forget)
    stream.observe(x[:, :10], y[:, :10])
    state, before = stream.state, stream.predict(xt)
    bad = y[:, 10:].clone()
    bad[1, 15, 0] = torch.nan
    with pytest.raises(ValueError, match=r"y\[1, 15, 0\] is nan"):
        stream.observe(x[:, 10:], bad, chunk=4)
    with refuses(ValueError, r"y has \(batch, points\) \(2, 19\), but x has \(2, 20\)"):
        stream.observe(x[:, 10:], y[:, 11:])
    with refuses(ValueError, "x is a batch of 1, but the stream one of 2"):
        stream.observe(x[:1, 10:], y[:1, 10:])
    with refuses(ValueError, "mask has shape"):
        stream.observe(x, y, mask=torch.ones(2, 3, dtype=torch.bool))
    with pytest.raises(ValueError, match="chunk must be a whole number of at least 1, not 0"):
        stream.observe(x, y, chunk=0)
    assert_identical(stream.state, state)
    assert_predicts(stream.predict(xt), before, 0.0)


def test_bad_targets_are_refused() -> None:
    _, _, xt = task()
    stream = Stream(MODEL, batch=2)
    xt[1, 3, 0] = torch.inf
    with pytest.raises(ValueError, match=r"xt\[1, 3, 0\] is inf"):
        stream.predict(xt)
    with pytest.raises(ValueError, match=r"xt has shape \(2, 7, 2\), but \(batch, points, 1\) is needed"):
        stream.predict(torch.zeros(2, 7, 2))
    with pytest.raises(ValueError, match="xt is a batch of 3, but the state one of 2"):
        stream.predict(torch.zeros(3, 7, 1))
    with pytest.raises(ValueError, match="batch must be a whole number of at least 1, not 0"):
        Stream(MODEL, batch=0)


# Files


@every_kind
@pytest.mark.parametrize("seen", [0, 1, 13])
def test_a_stream_comes_back_from_its_file_and_goes_on(
    model: Model, forget: Forget, seen: int, tmp_path: Path
) -> None:
    x, y, xt = task()
    stream = Stream(model, batch=2, forget=forget)
    stream.observe(x[:, :seen], y[:, :seen])
    stream.save(tmp_path / "stream")
    again = Stream.load(tmp_path / "stream", model)
    assert again.forget == forget
    assert again.nbytes == stream.nbytes
    assert_predicts(again.predict(xt), stream.predict(xt), 0.0)
    for each in (stream, again):
        show(each, x[:, seen:], y[:, seen:], [1] * (30 - seen))
    assert torch.equal(again.count, stream.count)
    assert_identical(again.state, stream.state)


def test_a_stream_of_masked_points_comes_back_bucket_by_bucket(tmp_path: Path) -> None:
    x, y, xt = task(10)
    mask = torch.arange(20).view(2, 10) % 3 > 0
    stream = Stream(STORING, batch=2, forget=Window(6, 3))
    stream.observe(x[:, :7], y[:, :7])
    stream.observe(x[:, 7:], y[:, 7:], mask=mask[:, 7:])
    stream.save(tmp_path / "stream")
    again = Stream.load(tmp_path / "stream", STORING)
    assert_identical(again.state, stream.state)
    assert_predicts(again.predict(xt), stream.predict(xt), 0.0)


def test_stored_points_go_on_with_any_model_that_stores_them(tmp_path: Path) -> None:
    x, y, xt = task()
    stream = Stream(STORING, batch=2)
    stream.observe(x, y)
    stream.save(tmp_path / "stream")
    torch.manual_seed(2)
    other = TNPD(dim_x=1, dim_y=1, dim=16, depth=2).eval()
    again = Stream.load(tmp_path / "stream", other)
    assert_predicts(again.predict(xt), query(condition(x, y, other), xt, other))
    with pytest.raises(ValueError, match=r"remembers a 'constmem.points', but CMANP a 'constmem.state'"):
        Stream.load(tmp_path / "stream", MODEL)
    wide = TNPD(dim_x=2, dim_y=1, dim=16, depth=2).eval()
    with pytest.raises(ValueError, match=r"another model: it has \(dim_x, dim_y\) \(1, 1\)"):
        Stream.load(tmp_path / "stream", wide)


@every_forgetting
def test_a_stream_of_other_weights_is_refused(forget: Forget, tmp_path: Path) -> None:
    x, y, _ = task()
    stream = Stream(MODEL, batch=2, forget=forget)
    stream.observe(x, y)
    stream.save(tmp_path / "stream")
    with pytest.raises(ValueError, match=r"stream was written by other weights \(fingerprint \w{16}, this m"):
        Stream.load(tmp_path / "stream", built(seed=2))


@every_forgetting
def test_a_stream_is_refused_once_its_model_has_learned(forget: Forget) -> None:
    """States of the old weights must not be mixed with those of the new."""
    x, y, xt = task()
    model = built()
    stream = Stream(model, batch=2, forget=forget)
    stream.observe(x[:, :10], y[:, :10])
    with torch.no_grad():
        model.stack.observation.slots.mul_(1.5)
        with pytest.raises(ValueError, match=r"other weights|different weights"):
            stream.observe(x[:, 10:], y[:, 10:])
        with pytest.raises(ValueError, match=r"other weights|different weights"):
            model.query(stream.state, xt)


def test_files_that_are_no_streams_are_refused(tmp_path: Path) -> None:
    x, y, _ = task()
    with pytest.raises(FileNotFoundError, match=r"expected a constmem.stream"):
        Stream.load(tmp_path / "nowhere", MODEL)
    condition(x, y).save(tmp_path / "state")
    with pytest.raises(ValueError, match=r"holds 'constmem.state' where 'constmem.stream' was expected"):
        Stream.load(tmp_path / "state", MODEL)
    path = tmp_path / "stream"
    Stream(MODEL, batch=2).save(path)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ValueError, match="cut short"):
        Stream.load(path, MODEL)


def damage(path: Path, change: Callable[[dict[str, Tensor], dict[str, str]], object]) -> None:
    """Write a file anew, with a checksum of what it holds now."""
    tensors, header = read_tensors(path, kind="constmem.stream", version=2)
    change(tensors, header)
    write_tensors(path, tensors, header)


def shell(**changes: Any) -> Callable[[dict[str, Tensor], dict[str, str]], object]:
    return lambda _, header: header.update(shell=json.dumps(json.loads(header["shell"]) | changes))


def test_a_stream_of_a_newer_version_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "stream"
    Stream(MODEL).save(path)
    damage(path, lambda _, header: header.update(version="3"))
    with pytest.raises(ValueError, match="format version 3; this constmem reads version 2"):
        Stream.load(path, MODEL)


@pytest.mark.parametrize(
    "change",
    [
        lambda tensors, _: tensors.pop("0.lse"),
        lambda tensors, _: tensors.update({"0.lse": tensors["0.lse"][..., 1:].contiguous()}),
        lambda tensors, _: tensors.update({"0.other": tensors["0.lse"].clone()}),
        lambda tensors, _: tensors.update({"7.lse": tensors["0.lse"].clone()}),
        lambda tensors, _: tensors.update({"lse": tensors["0.lse"].clone()}),
        lambda tensors, _: tensors["0.value"].fill_(torch.nan),
        lambda tensors, _: tensors["0.lse"].fill_(torch.inf),
        lambda tensors, _: tensors["0.count"].fill_(-1),
        lambda tensors, _: tensors["1.count"].fill_(1000),
        lambda tensors, _: tensors.update({"1.value": tensors["1.value"][:1], "1.lse": tensors["1.lse"][:1]}),
        lambda _, header: header.pop("shell"),
        lambda _, header: header.update(shell="{"),
        lambda _, header: header.update(shell="[" * 10**5),
        shell(parts=0),
        shell(parts=2),
        shell(parts=5),
        shell(parts=10**12),
        shell(parts=2.0),
        shell(parts=None),
        shell(filled=3),
        shell(filled=10**9),
        shell(filled=-1),
        shell(filled=0.5),
        shell(forget=None),
        shell(forget={"kind": "Sieve"}),
        shell(forget={"kind": "Decay", "half_life": 5.0}),
        shell(forget={"kind": "Window", "points": 9, "buckets": 1}),
        shell(forget={"kind": "Window", "points": 0, "buckets": 3}),
        shell(forget={"kind": "Window", "points": 9, "buckets": 3, "more": 1}),
        shell(forget=[]),
    ],
)
def test_a_damaged_stream_is_refused(
    tmp_path: Path, change: Callable[[dict[str, Tensor], dict[str, str]], object]
) -> None:
    x, y, _ = task(11)
    path = tmp_path / "stream"
    stream = Stream(MODEL, batch=2, forget=Window(9, 3))
    stream.observe(x, y)
    stream.save(path)
    assert Stream.load(path, MODEL).count.tolist() == [11, 11]
    damage(path, change)
    with pytest.raises(ValueError, match=r"stream is damaged"):
        Stream.load(path, MODEL)

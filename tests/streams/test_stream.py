"""`Stream`: the one mutable object, and what it forgets."""

import copy
import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from threading import Barrier, Event
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.distributions import Distribution

from constmem import CMANP, AttentionState, Decay, Events, NeuralProcess, Stream, Window
from constmem.core.files import read_tensors, write_tensors
from constmem.neural_processes import LBANP, TNPD, StoredPoints
from constmem.point_processes import MODELS as EVENT_MODELS
from tests.conftest import Refuses
from tests.laws import models as small_models

Forget = Decay | Window | None
Model = NeuralProcess[Any, Any]


def built(seed: int = 1, kind: type[Model] = CMANP) -> Any:
    sizes = {"dim_x": 1, "dim_y": 1, "dim": 16, "depth": 2, "num_latents": 5, "num_heads": 2, "hidden": 12}
    torch.manual_seed(seed)
    model = kind(**sizes, num_slots=6) if kind is CMANP else kind(**sizes)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model.eval()


MODEL, STORING = built(), built(kind=LBANP)  # a state of constant size, and one that is the stored points
every_model = pytest.mark.parametrize("model", [MODEL, STORING], ids=["cmanp", "lbanp"])
every_forgetting = pytest.mark.parametrize(
    "forget", [None, Decay(5.0), Window(9, 3)], ids=["all", "decay", "window"]
)
every_kind = pytest.mark.parametrize(  # stored points have no weights, so they cannot decay
    ("model", "forget"),
    [
        (MODEL, None),
        (MODEL, Decay(5.0)),
        (MODEL, Window(9, 3)),
        (STORING, None),
        (STORING, Window(9, 3)),
    ],
    ids=["cmanp-all", "cmanp-decay", "cmanp-window", "lbanp-all", "lbanp-window"],
)


def task(n: int = 30, b: int = 2, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    random = torch.Generator().manual_seed(seed)
    x, y, xt = (torch.randn(b, m, 1, generator=random) for m in (n, n, 7))
    return x, y, xt


def show(stream: Stream, x: Tensor, y: Tensor, sizes: list[int], **options: Any) -> None:
    start = 0
    for size in sizes:
        stream.observe(x[:, start : start + size], y[:, start : start + size], **options)
        start += size


def condition(x: Tensor, y: Tensor, model: Model = MODEL) -> Any:
    with torch.no_grad():
        return model.condition(x, y)


def query(state: Any, xt: Tensor, model: Model = MODEL) -> Distribution:
    with torch.no_grad():
        return model.query(state, xt)


def assert_predicts(found: Distribution, expected: Distribution, tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(found.mean, expected.mean, atol=tolerance, rtol=0)
    torch.testing.assert_close(found.stddev, expected.stddev, atol=tolerance, rtol=0)


def assert_state(found: Any, expected: Any, tolerance: float = 1e-5) -> None:
    if isinstance(found, AttentionState):
        torch.testing.assert_close(found.value, expected.value, atol=tolerance, rtol=0)
        torch.testing.assert_close(found.lse, expected.lse, atol=tolerance, rtol=1e-6)
    else:
        for mine, theirs in zip(real_points(found), real_points(expected), strict=True):
            assert torch.equal(mine, theirs)


def real_points(state: StoredPoints) -> list[Tensor]:
    """The points of each task that are not masked out."""
    points = torch.cat([state.x, state.y], -1)
    return [points[i] if state.mask is None else points[i][state.mask[i]] for i in range(state.batch)]


def assert_identical(found: Any, expected: Any) -> None:
    mine, theirs = found.tensors(), expected.tensors()
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)


# Observing and predicting


@every_model
def test_a_stream_predicts_what_its_model_does(model: Model) -> None:
    x, y, xt = task()
    stream = Stream(model, batch=2)
    assert_predicts(stream.predict(xt), query(model.empty(2), xt, model), 0.0)
    show(stream, x, y, [1, 9, 0, 20])
    assert stream.count.tolist() == [30, 30]
    assert_predicts(stream.predict(xt), query(condition(x, y, model), xt, model))
    assert_state(stream.state, condition(x, y, model))


@every_kind
def test_the_state_is_read_once_until_the_next_observation(
    model: Model, forget: Forget, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, y, xt = task()
    reads = []
    read = model.read
    monkeypatch.setattr(model, "read", lambda state: reads.append(state) or read(state))
    stream = Stream(model, batch=2, forget=forget)
    show(stream, x, y, [1] * 20)
    assert len(reads) == 0  # observing never reads
    first, again, _ = stream.predict(xt), stream.predict(xt), stream.predict(xt[:, :3])
    assert len(reads) == 1
    assert_predicts(first, again, 0.0)
    stream.observe(x[:, 20:], y[:, 20:])
    assert len(reads) == 1
    changed = stream.predict(xt)
    assert len(reads) == 2
    assert float((changed.mean - first.mean).abs().max()) > 1e-4


@every_kind
def test_no_gradients_are_recorded(model: Model, forget: Forget) -> None:
    x, y, xt = task()
    stream = Stream(model, batch=2, forget=forget)
    stream.observe(x.requires_grad_(), y)
    assert not stream.predict(xt).mean.requires_grad
    assert not any(tensor.requires_grad for tensor in stream.state.tensors().values())


@every_kind
@pytest.mark.parametrize("chunk", [1, 4, 4096])
def test_the_chunk_changes_nothing(model: Model, forget: Forget, chunk: int) -> None:
    x, y, _ = task()
    stream, other = (Stream(model, batch=2, forget=forget) for _ in range(2))
    show(stream, x, y, [7, 23], chunk=chunk)
    show(other, x, y, [7, 23])
    assert_state(stream.state, other.state)
    assert torch.equal(stream.count, other.count)


@every_forgetting
def test_the_bytes_held_do_not_grow(forget: Forget) -> None:
    x, y, _ = task(200)
    stream = Stream(MODEL, batch=2, forget=forget)
    sizes = []
    for i in range(200):
        stream.observe(x[:, i : i + 1], y[:, i : i + 1])
        sizes.append(stream.nbytes)
    one = MODEL.empty(2).nbytes
    limit = one * (4 if isinstance(forget, Window) else 1)
    assert max(sizes) == limit
    assert set(sizes[50:]) == {limit}


def test_stored_points_are_held_once_and_a_window_bounds_them() -> None:
    x, y, _ = task(200)
    point = x[:, :1].nbytes + y[:, :1].nbytes
    everything, window = Stream(STORING, batch=2), Stream(STORING, batch=2, forget=Window(9, 3))
    for i in range(200):
        for stream in (everything, window):
            stream.observe(x[:, i : i + 1], y[:, i : i + 1])
        assert everything.nbytes == (i + 1) * point
        assert window.nbytes == int(window.count[0]) * point <= 12 * point


def test_stored_points_cannot_decay() -> None:
    with pytest.raises(
        ValueError, match=r"LBANP cannot forget by Decay\(half_life=5.0\): .* use forget=Window"
    ):
        Stream(STORING, forget=Decay(5.0))


@every_model
def test_masked_points_are_left_out(model: Model) -> None:
    x, y, xt = task()
    mask = torch.rand(2, 30) < 0.5
    stream = Stream(model, batch=2)
    stream.observe(x.masked_fill(~mask[..., None], torch.nan), y, mask=mask)
    with torch.no_grad():
        expected = model.condition(x, y, mask=mask)
    assert_predicts(stream.predict(xt), query(expected, xt, model))
    assert torch.equal(stream.count, mask.sum(1))


@pytest.mark.parametrize("forget", [5, "window", Window])
def test_a_way_to_forget_that_is_none_is_refused(forget: Any, refuses: Refuses) -> None:
    with refuses(TypeError, r"forget must be None, Window\(points=...\) or Decay\(half_life=...\), not "):
        Stream(MODEL, forget=forget)


@every_kind
def test_a_fork_goes_its_own_way(model: Model, forget: Forget) -> None:
    x, y, xt = task()
    stream = Stream(model, batch=2, forget=forget)
    stream.observe(x[:, :10], y[:, :10])
    before = stream.predict(xt)
    fork = stream.fork()
    assert_predicts(fork.predict(xt), before, 0.0)
    fork.observe(x[:, 10:], y[:, 10:])
    assert_predicts(stream.predict(xt), before, 0.0)
    whole = Stream(model, batch=2, forget=forget)
    show(whole, x, y, [10, 20])
    assert_state(fork.state, whole.state)
    stream.observe(-x[:, 10:], y[:, 10:])
    assert_state(fork.state, whole.state)
    assert float((fork.predict(xt).mean - stream.predict(xt).mean).abs().max()) > 1e-4


# Forgetting by decay


@pytest.mark.parametrize("half_life", [0.5, 5.0, 1000.0])
@pytest.mark.parametrize("sizes", [[30], [1] * 30, [0, 7, 23], [29, 1]])
def test_decay_is_weighting_every_point_by_its_age(half_life: float, sizes: list[int]) -> None:
    x, y, xt = task()
    stream = Stream(MODEL, batch=2, forget=Decay(half_life))
    show(stream, x, y, sizes)
    ages = np.arange(29, -1, -1)
    log_weight = torch.as_tensor(np.log(0.5) * ages / half_life, dtype=torch.float32).expand(2, -1)
    with torch.no_grad():
        expected = MODEL.observe(x, y, log_weight=log_weight)
    assert_state(stream.state, expected, 2e-5)
    assert_predicts(stream.predict(xt), query(expected, xt), 5e-5)
    assert stream.count.tolist() == [30, 30]


def test_after_a_half_life_a_point_counts_half() -> None:
    x, y, _ = task(2)
    stream = Stream(MODEL, batch=2, forget=Decay(1.0))
    show(stream, x, y, [1, 1])
    state, old, new = stream.state, condition(x[:, :1], y[:, :1]), condition(x[:, 1:], y[:, 1:])
    expected = np.log(0.5 * old.lse.exp().numpy() + new.lse.exp().numpy())
    np.testing.assert_allclose(state.lse, expected, atol=1e-6)


@given(sizes=st.lists(st.integers(0, 12), min_size=1, max_size=6), chunk=st.integers(1, 20))
def test_decay_does_not_depend_on_how_points_arrive(sizes: list[int], chunk: int) -> None:
    n = sum(sizes)
    x, y, _ = task(n)
    stream, single = (Stream(MODEL, batch=2, forget=Decay(3.0)) for _ in range(2))
    show(stream, x, y, sizes, chunk=chunk)
    show(single, x, y, [1] * n)
    assert_state(stream.state, single.state, 2e-5)


def test_masked_points_count_as_steps_of_decay() -> None:
    x, y, _ = task(10)
    mask = torch.arange(20).view(2, 10) % 3 > 0
    together, apart = (Stream(MODEL, batch=2, forget=Decay(2.0)) for _ in range(2))
    together.observe(x, y, mask=mask)
    for i in range(10):
        apart.observe(x[:, i : i + 1], y[:, i : i + 1], mask=mask[:, i : i + 1])
    assert_state(together.state, apart.state, 2e-5)
    assert torch.equal(together.count, mask.sum(1))


def test_decay_does_not_depend_on_the_dtype_of_the_data() -> None:
    """Ages up to a thousand are no bfloat16 numbers."""
    x, y, _ = (t.bfloat16() for t in task(1000))
    stream, other = (Stream(MODEL, batch=2, forget=Decay(200.0)) for _ in range(2))
    stream.observe(x, y)
    other.observe(x.float(), y.float())
    assert_state(stream.state, other.state)


def test_decay_over_ages_forgets_without_breaking() -> None:
    x, y, xt = task(30)
    stream = Stream(MODEL, batch=2, forget=Decay(0.01))
    show(stream, x, y, [10] * 3)
    assert_predicts(stream.predict(xt), query(condition(x[:, -1:], y[:, -1:]), xt))


@pytest.mark.parametrize("half_life", [0.0, -1.0, float("inf"), float("nan")])
def test_half_lives_that_are_no_positive_numbers_are_refused(half_life: float) -> None:
    with pytest.raises(ValueError, match=f"half_life must be a positive number of points, not {half_life}"):
        Decay(half_life)


# Forgetting by a window


@given(
    points=st.integers(1, 12),
    buckets=st.integers(1, 12),
    sizes=st.lists(st.integers(0, 15), min_size=1, max_size=6),
)
@every_model
def test_a_window_remembers_the_last_points_and_at_most_a_bucket_more(
    model: Model, points: int, buckets: int, sizes: list[int]
) -> None:
    window = Window(points, min(buckets, points))
    x, y, _ = task(sum(sizes))
    stream = Stream(model, batch=2, forget=window)
    start = 0
    for size in sizes:
        stop = start + size
        stream.observe(x[:, start:stop], y[:, start:stop])
        start = stop
        count = int(stream.count[0])
        assert min(stop, points) <= count <= min(stop, points + window.bucket)
        assert_state(stream.state, condition(x[:, stop - count : stop], y[:, stop - count : stop], model))


@given(sizes=st.lists(st.integers(0, 15), min_size=1, max_size=6))
@every_model
def test_a_window_does_not_depend_on_how_points_arrive(model: Model, sizes: list[int]) -> None:
    n = sum(sizes)
    x, y, _ = task(n)
    stream, single = (Stream(model, batch=2, forget=Window(8, 3)) for _ in range(2))
    show(stream, x, y, sizes)
    show(single, x, y, [1] * n)
    assert torch.equal(stream.count, single.count)
    assert_state(stream.state, single.state)


def test_a_window_of_points_and_buckets_slides_by_a_bucket() -> None:
    x, y, _ = task(30)
    stream = Stream(MODEL, batch=2, forget=Window(6, 3))
    counts = []
    for i in range(14):
        stream.observe(x[:, i : i + 1], y[:, i : i + 1])
        counts.append(int(stream.count[0]))
    assert counts == [1, 2, 3, 4, 5, 6, 7, 6, 7, 6, 7, 6, 7, 6]


@every_model
def test_a_window_passes_masks_on(model: Model) -> None:
    x, y, _ = task(10)
    mask = torch.arange(20).view(2, 10) % 3 > 0
    stream = Stream(model, batch=2, forget=Window(20, 4))
    stream.observe(x[:, :6], y[:, :6], mask=mask[:, :6])
    stream.observe(x[:, 6:], y[:, 6:], mask=mask[:, 6:])
    with torch.no_grad():
        assert_state(stream.state, model.condition(x, y, mask=mask))
    assert torch.equal(stream.count, mask.sum(1))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, 1), "points must be a whole number of at least 1, not 0"),
        ((5, 0), "buckets must be a whole number of at least 1, not 0"),
        ((5, 6), "6 buckets cannot share 5 points"),
        ((2.5, 1), "points must be a whole number of at least 1, not 2.5"),
    ],
)
def test_windows_that_cannot_be_are_refused(
    refuses: Refuses, arguments: tuple[Any, Any], message: str
) -> None:
    with refuses(ValueError, message):
        Window(*arguments)


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


# Weights


@every_kind
@pytest.mark.parametrize("grad", [True, False])
def test_predictions_follow_the_weights_or_are_refused(model: Model, forget: Forget, grad: bool) -> None:
    x, y, xt = task()
    model, other = (built(seed, type(model)) for seed in (1, 2))
    stream = Stream(model, batch=2, forget=forget)
    stream.observe(x, y)
    before = stream.predict(xt)
    model.head.load_state_dict(other.head.state_dict())  # of the decoder alone: states go on
    with torch.set_grad_enabled(grad):
        assert_predicts(stream.predict(xt), query(stream.state, xt, model), 0.0)
        assert float((stream.predict(xt).mean - before.mean).abs().max()) > 1e-4
        model.load_state_dict(other.state_dict())
        if model.observing_parameters():
            for ask in (lambda: stream.predict(xt), lambda: stream.observe(x, y)):
                with pytest.raises(ValueError, match=r"other weights|different weights"):
                    ask()
        else:
            assert_predicts(stream.predict(xt), query(stream.state, xt, other), 0.0)


# Threads


def together(*jobs: Callable[[], None]) -> None:
    """Run jobs in threads of their own, all at once; what one raises is raised here."""
    start = Barrier(len(jobs))
    with ThreadPoolExecutor(len(jobs)) as pool:

        def run(job: Callable[[], None]) -> None:
            start.wait()
            job()

        for done in [pool.submit(run, job) for job in jobs]:
            done.result()


@every_kind
def test_no_point_of_eight_writers_is_lost(model: Model, forget: Forget) -> None:
    x, y, _ = task(8 * 25)
    stream = Stream(model, batch=2, forget=None if forget is None else Window(8 * 25, 3))

    def write(first: int) -> None:
        for i in range(first, 8 * 25, 8):
            stream.observe(x[:, i : i + 1], y[:, i : i + 1])

    together(*(partial(write, first) for first in range(8)))
    assert stream.count.tolist() == [8 * 25] * 2
    whole = condition(x, y, model)
    if isinstance(whole, AttentionState):
        assert_state(stream.state, whole)
    else:  # the same points, in another order
        assert torch.equal(stream.state.x.sort(1).values, whole.x.sort(1).values)


@every_kind
def test_predictions_are_never_older_than_the_last_observation(model: Model, forget: Forget) -> None:
    x, y, xt = task(30)
    for _ in range(5):
        stream, done = Stream(model, batch=2, forget=forget), Event()

        def write() -> None:
            try:
                for i in range(30):
                    stream.observe(x[:, i : i + 1], y[:, i : i + 1])  # noqa: B023
            finally:
                done.set()  # noqa: B023

        def read() -> None:
            while not done.is_set():  # noqa: B023
                stream.predict(xt)  # noqa: B023

        together(write, read, read)
        assert_predicts(stream.predict(xt), query(stream.state, xt, model), 0.0)


def test_a_reader_that_was_overtaken_leaves_nothing_stale(monkeypatch: pytest.MonkeyPatch) -> None:
    x, y, xt = task(2)
    model = built()
    stream = Stream(model, batch=2)
    stream.observe(x[:, :1], y[:, :1])
    read = model.read

    def slow(state: Any) -> Any:
        memory = read(state)
        monkeypatch.setattr(model, "read", read)
        stream.observe(x[:, 1:], y[:, 1:])  # while the reader is about to remember what it has read
        return memory

    monkeypatch.setattr(model, "read", slow)
    assert_predicts(stream.predict(xt), query(condition(x[:, :1], y[:, :1], model), xt, model))
    assert_predicts(stream.predict(xt), query(condition(x, y, model), xt, model))


def test_a_stream_can_be_copied() -> None:
    x, y, xt = task()
    stream = Stream(MODEL, batch=2)
    stream.observe(x, y)
    again = copy.deepcopy(stream)
    again.observe(x, y)
    assert stream.count.tolist() == [30, 30]
    assert again.count.tolist() == [60, 60]
    assert_predicts(stream.predict(xt), query(condition(x, y), xt))


# What may be given


def test_one_stream_takes_points_without_its_axis_and_arrays_and_lists() -> None:
    x, y, xt = task(b=1)
    expected = Stream(MODEL)
    expected.observe(x, y)
    kinds: list[Callable[[Tensor], Any]] = [
        lambda t: t[0], lambda t: t[0, :, 0], lambda t: t.numpy(), lambda t: t[0].numpy(),
        lambda t: t[0, :, 0].tolist(), Tensor.tolist, lambda t: Frame(t[0].numpy()),
    ]  # fmt: skip
    for kind in kinds:
        stream = Stream(MODEL)
        stream.observe(kind(x), kind(y))
        assert_predicts(stream.predict(kind(xt)), expected.predict(xt), 1e-6)
    stream = Stream(MODEL)
    for a, b in zip(x.flatten().tolist(), y.flatten().tolist(), strict=True):
        stream.observe(a, b)
    assert_predicts(stream.predict(xt), expected.predict(xt))
    stream = Stream(MODEL, forget=Decay(3.0))
    stream.observe(np.arange(40), np.arange(40.0))  # whole numbers, and float64 with weights
    assert stream.count.item() == 40


class Frame:
    """What NumPy knows how to read, as it does a frame of columns."""

    def __init__(self, numbers: Any) -> None:
        self.numbers = numbers

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        return self.numbers


def test_what_cannot_be_meant_is_refused_with_advice_that_helps(refuses: Refuses) -> None:
    x, y, _ = task()
    two, one = Stream(MODEL, batch=2), Stream(MODEL)
    with refuses(ValueError, r"x has shape \(30,\), .* \(batch, points, 1\)"):
        two.observe(x[0, :, 0], y[0, :, 0])
    with refuses(ValueError, "x is a batch of 2, but the stream one of 1"):
        one.observe(x, y)
    for words in (["a", "b"], np.array(["2024-01-01"], dtype="datetime64[D]")):
        with pytest.raises(TypeError, match="x must be numbers"):
            one.observe(words, [1.0, 2.0])
    with refuses(ValueError, r"they must be the same"):
        one.observe([1.0, 2.0], [1.0])
    assert one.count.item() == two.count.sum().item() == 0


# Events


@pytest.mark.parametrize("name", EVENT_MODELS)
@pytest.mark.parametrize("batch", [1, 2])
def test_a_stream_of_events_predicts_what_its_model_does(name: str, batch: int, tmp_path: Path) -> None:
    model = small_models.small(name)
    events = small_models.stream(*[12] * batch)
    stream = Stream(model, batch=batch, start=events.t_start)
    stream.observe(events.times[:, :1], events.marks[:, :1])
    stream.observe(events.times[:, 1], events.marks[:, 1])
    stream.observe(events.times[:, 2:], events.marks[:, 2:])
    stream.save(tmp_path / "stream")
    with torch.no_grad():
        expected = model.query(model.condition(events))
    for each in (stream, Stream.load(tmp_path / "stream", model), stream.fork()):
        torch.testing.assert_close(each.predict().mean, expected.mean, rtol=1e-6, atol=0)
        assert each.count.tolist() == [12] * batch
    with pytest.raises(TypeError, match="of events, predict"):
        stream.predict(torch.zeros(1, 1, 1))
    with pytest.raises(ValueError, match="times are finite, absolute and never decrease"):
        stream.observe(events.times[:, :1], events.marks[:, :1])
    assert stream.count.tolist() == [12] * batch


def test_a_watch_begins_with_the_first_event_unless_it_is_said_when(tmp_path: Path) -> None:
    model = small_models.small("cmhp")
    times, marks = [100.0, 100.5, 103.0], np.array([0, 2, 1])
    stream = Stream(model)
    with pytest.raises(ValueError, match="nobody knows when the watch began: give start="):
        stream.predict()
    stream.save(tmp_path / "new")
    again = Stream.load(tmp_path / "new", model)
    for each in (stream, again):
        each.observe(times, marks)
    events = Events.from_arrival_times([times], marks=[marks.tolist()], unit="hour", num_marks=3)
    with torch.no_grad():
        expected = model.query(model.condition(events)).mean
    for each in (stream, again):
        torch.testing.assert_close(each.predict().mean, expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", ["trivial", "thp", "cmhp"])
def test_a_window_slides_over_events(name: str, tmp_path: Path) -> None:
    model = small_models.small(name)
    events = small_models.stream(20, 20)
    stream = Stream(model, batch=2, forget=Window(6, 3), start=events.t_start)
    for i in range(20):
        stream.observe(events.times[:, i], events.marks[:, i])
    count = int(stream.count[0])
    assert 6 <= count <= 8
    with torch.no_grad():
        last = model.observe(events.window(20 - count, 20), start=events.t_start)
    torch.testing.assert_close(stream.predict().mean, model.query(last).mean, rtol=1e-5, atol=0)
    stream.save(tmp_path / "stream")
    again = Stream.load(tmp_path / "stream", model)
    torch.testing.assert_close(again.predict().mean, stream.predict().mean, rtol=1e-9, atol=0)


def test_ways_to_forget_that_states_of_events_do_not_allow_are_refused() -> None:
    with pytest.raises(
        ValueError, match=r"GRU\w* cannot forget by Window.* use forget=None, or a model whose"
    ):
        Stream(small_models.small("gru"), forget=Window(9))
    with pytest.raises(ValueError, match=r"CMHP cannot forget by Decay.* use forget=Window"):
        Stream(small_models.small("cmhp"), forget=Decay(5.0))

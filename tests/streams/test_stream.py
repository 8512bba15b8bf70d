"""`Stream`: the one mutable object, and what it forgets."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from constmem import Decay, Stream, Window
from tests.conftest import Refuses
from tests.streams.made import (
    MODEL,
    STORING,
    Forget,
    Model,
    assert_predicts,
    assert_state,
    condition,
    every_forgetting,
    every_kind,
    every_model,
    query,
    show,
    task,
)

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

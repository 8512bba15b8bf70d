"""Streams by key: each is what it would be alone, however their rows come."""

import json
from collections.abc import Hashable
from dataclasses import replace
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from constmem import Stream, StreamPool, condition_groups
from constmem.core.files import read_tensors, write_tensors
from constmem.streams import grouped
from tests.conftest import Refuses
from tests.laws import models as small_models

CONSTANT_EVENTS = ("gru", "cmhp", "trivial")


def rows(n: int, keys: int, seed: int = 0) -> tuple[list[str], Tensor, Tensor]:
    """Rows of some keys, few of which have most of them."""
    random = np.random.default_rng(seed)
    names = [f"k{int(i)}" for i in np.minimum(random.zipf(1.5, n), keys)]
    x, y = (torch.from_numpy(random.standard_normal((n, 2))) for _ in range(2))
    return names, x, y


def alone(model: Any, names: list[str], x: Tensor, y: Tensor) -> dict[str, Stream]:
    """Each key with a stream of its own, row by row."""
    streams = {name: Stream(model) for name in dict.fromkeys(names)}
    for name, xs, ys in zip(names, x, y, strict=True):
        streams[name].observe(xs[None, None], ys[None, None])
    return streams


@pytest.mark.parametrize(
    ("kind", "points"), [("cmanp", 1), ("cnp", 8192), *((kind, 7) for kind in small_models.CONSTANT)]
)
def test_every_stream_is_what_it_would_be_alone(kind: str, points: int) -> None:
    model = small_models.small(kind)
    names, x, y = rows(60, 9)
    pool = StreamPool(model)
    for start in range(0, 60, 25):  # keys stand several times in a call, and in several calls
        here = slice(start, start + 25)
        pool.observe(names[here], x[here], y[here], points=points)
    streams = alone(model, names, x, y)
    assert len(pool) == len(streams)
    asked = sorted(streams)
    xt = torch.randn(len(asked), 5, 2, dtype=torch.float64)
    found = pool.predict(asked, xt)
    assert pool.count(asked).tolist() == [int(streams[name].count) for name in asked]
    for i, name in enumerate(asked):
        expected = streams[name].predict(xt[i : i + 1])
        torch.testing.assert_close(found.mean[i : i + 1], expected.mean, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(found.variance[i : i + 1], expected.variance, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("kind", CONSTANT_EVENTS)
def test_streams_of_events_are_what_they_would_be_alone(kind: str) -> None:
    model = small_models.small(kind)
    random = np.random.default_rng(3)
    names = [f"user {i}" for i in random.integers(5, size=40)]
    times, marks = 100 + np.cumsum(random.exponential(size=40)), random.integers(small_models.MARKS, size=40)
    pool = StreamPool(model)
    pool.observe(names[:23], times[:23], marks[:23])
    pool.observe(names[23:], times[23:], marks[23:])
    asked = sorted(set(names))
    found = pool.predict(asked)
    for i, name in enumerate(asked):
        stream = Stream(model)
        for time, mark in zip(times, marks, strict=True):
            if names[int(np.flatnonzero(times == time)[0])] == name:
                stream.observe([time], [mark])
        torch.testing.assert_close(found.mean[i : i + 1], stream.predict().mean, rtol=1e-8, atol=0)
    assert pool.count(asked).tolist() == [names.count(name) for name in asked]


@given(
    st.lists(st.integers(0, 12), min_size=1, max_size=80),
    st.integers(1, 50),
)
@settings(deadline=None, max_examples=60)
def test_rows_are_grouped_each_once_in_their_order_with_little_padding(names: list[int], points: int) -> None:
    keys: list[Hashable] = list(names)
    order, groups = grouped(keys, points)
    found = {
        key: [int(i) for i in line if i >= 0]
        for part, table in groups
        for key, line in zip(part, table, strict=True)
    }
    assert found == {key: [i for i, name in enumerate(names) if name == key] for key in set(names)}
    last = {key: max(places) for key, places in found.items()}
    assert order == sorted(last, key=lambda key: last[key])
    for part, table in groups:
        assert len(part) == 1 or table.size <= points
        assert (table >= 0).mean() >= 0.5


@given(
    st.lists(st.integers(0, 12), min_size=1, max_size=80),
    st.sampled_from(("int8", "uint8", "int64", "uint64")),
    st.booleans(),
)
@settings(deadline=None, max_examples=60)
def test_keys_in_an_array_are_grouped_like_those_in_a_list(names: list[int], kind: str, apart: bool) -> None:
    limits = np.iinfo(kind)
    wide = [int(limits.min) if apart and name == 0 else int(limits.max) - name for name in names]
    order, groups = grouped(np.array(wide, kind), 20)
    keys: list[Hashable] = list(wide)
    expected, _ = grouped(keys, 20)
    assert order == expected
    assert {type(key) for key in order} == {int}
    found = {
        key: line[line >= 0].tolist() for part, table in groups for key, line in zip(part, table, strict=True)
    }
    assert found == {key: [i for i, name in enumerate(wide) if name == key] for key in set(wide)}


def test_a_call_that_fails_changes_nothing() -> None:
    model = small_models.small("cmanp")
    names, x, y = rows(30, 5)
    pool = StreamPool(model, most=6)
    pool.observe(names, x, y)
    before = {name: t.clone() for name, t in pool.state(pool.keys).tensors().items()}
    keys = pool.keys
    spoiled = x.clone()
    spoiled[-1] = float("nan")
    with pytest.raises(ValueError, match="x of row 29 is"):
        pool.observe(names, spoiled, y)
    with pytest.raises(ValueError, match=r"exceed most=6"):
        pool.observe(["new 1", "new 2", "new 3"], x[:3], y[:3])
    with pytest.raises(ValueError, match="each row needs one"):
        pool.observe(names[1:], x, y)
    with pytest.raises(TypeError, match="a text or a whole number"):
        pool.observe([None, *names[1:]], x, y)
    with pytest.raises(TypeError, match="not the text"):
        pool.observe("ab", x[:2], y[:2])
    with pytest.raises(KeyError, match="no stream 'nobody'"):
        pool.predict(["nobody"], x[:1])
    assert pool.keys == keys
    for name, t in pool.state(keys).tensors().items():
        assert torch.equal(t, before[name])


def test_a_pool_refuses_weights_that_changed_even_for_new_keys() -> None:
    model, other = small_models.small("cmanp"), small_models.small("cmanp")
    with torch.no_grad():
        next(other.parameters()).add_(0.5)
        for parameter in other.parameters():
            parameter.mul_(1.5)
    names, x, y = rows(20, 4)
    pool = StreamPool(model)
    pool.observe(names, x, y)
    model.load_state_dict(other.state_dict())
    for keys in (names, ["new"] * 20):
        with pytest.raises(ValueError, match=r"made by other weights|have changed"):
            pool.observe(keys, x, y)
    with pytest.raises(ValueError, match="made by other weights"):
        pool.predict(names[:1], x[:1])


def test_streams_are_let_go_and_taken_back(tmp_path: Path) -> None:
    model = small_models.small("cmanp")
    names, x, y = rows(50, 8)
    pool = StreamPool(model)
    pool.observe(names, x, y)
    order = [name for i, name in enumerate(names) if name not in names[i + 1 :]]
    assert pool.keys == order
    assert pool.oldest(2) == order[:2]
    size, xt = pool.nbytes, x[:3]
    expected = pool.predict(order, xt).mean
    states = pool.pop(order[:2])
    assert len(pool) == len(order) - 2
    assert order[0] not in pool
    states.save(tmp_path / "two")
    pool.observe(["another"], x[:1], y[:1])  # takes a place that was given back
    assert pool.nbytes == size
    pool.put(order[:2], model.state_type.load(tmp_path / "two"))
    assert torch.equal(pool.predict(order, xt).mean, expected)


@pytest.mark.parametrize("kind", ["cmanp", "cnp", "cmhp"])
def test_a_pool_is_saved_and_loaded_whole(kind: str, tmp_path: Path) -> None:
    model = small_models.small(kind)
    names, x, y = rows(40, 6)
    given_ = (x, y) if kind != "cmhp" else (torch.arange(40.0), torch.arange(40) % small_models.MARKS)
    pool = StreamPool(model)
    pool.observe([*names[:20], *range(20)], *given_)
    pool.save(tmp_path / "pool")
    again = StreamPool.load(tmp_path / "pool", model)
    assert again.keys == pool.keys
    for name, t in again.state(pool.keys).tensors().items():
        assert torch.equal(t, pool.state(pool.keys).tensors()[name])
    if kind != "cmhp":
        pool.observe(names, x, y)
        again.observe(names, x, y)
        assert torch.equal(again.predict(names, x[:2]).mean, pool.predict(names, x[:2]).mean)
    with pytest.raises(ValueError, match="load the model it ran on"):
        StreamPool.load(tmp_path / "pool", small_models.small("np"))
    tensors, header = read_tensors(tmp_path / "pool", kind="constmem.pool", version=1)
    short = json.dumps(json.loads(tensors["keys"].numpy().tobytes())[1:]).encode()
    spoiled = tensors | {"keys": torch.tensor(list(short), dtype=torch.uint8)}
    write_tensors(tmp_path / "spoiled", spoiled, {k: v for k, v in header.items() if k != "checksum"})
    with pytest.raises(ValueError, match="is damaged"):
        StreamPool.load(tmp_path / "spoiled", model)


def test_an_empty_pool_is_saved_too(tmp_path: Path) -> None:
    model = small_models.small("cmanp")
    StreamPool(model).save(tmp_path / "none")
    assert len(StreamPool.load(tmp_path / "none", model)) == 0


def test_pools_merge_key_by_key() -> None:
    model = small_models.small("cmanp")
    names, x, y = rows(60, 9)
    left, right, whole = StreamPool(model), StreamPool(model), StreamPool(model)
    left.observe(names[:25], x[:25], y[:25])
    right.observe(names[25:], x[25:], y[25:])
    whole.observe(names, x, y)
    left.merge(right)
    asked = sorted(whole.keys, key=str)
    assert sorted(left.keys, key=str) == asked
    assert torch.equal(left.count(asked), whole.count(asked))
    torch.testing.assert_close(
        left.predict(asked, x[:4]).mean, whole.predict(asked, x[:4]).mean, rtol=1e-9, atol=1e-9
    )
    different, state = condition_groups(model, names, x, y)
    assert different == list(dict.fromkeys(names))
    torch.testing.assert_close(state.value, whole.state(different).value, rtol=1e-9, atol=1e-12)


def test_models_that_store_their_points_are_refused(refuses: Refuses) -> None:
    with pytest.raises(ValueError, match="grow with what they are shown"):
        StreamPool(small_models.small("tnpd"))
    with refuses(TypeError, "of a neural or a point process"):
        StreamPool(torch.nn.Linear(1, 1))  # type: ignore[arg-type]


@pytest.mark.once
def test_threads_lose_no_rows() -> None:
    model = small_models.small("cmanp")
    pool = StreamPool(model)
    names, x, y = rows(64, 5)

    def work(part: int) -> None:
        for i in range(part, 64, 4):
            pool.observe([names[i]], x[i : i + 1], y[i : i + 1])
            pool.predict([names[i]], x[:1])

    threads = [Thread(target=work, args=(part,)) for part in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert pool.count(pool.keys).sum() == 64
    whole = StreamPool(model)
    whole.observe(names, x, y)
    asked = whole.keys
    torch.testing.assert_close(
        pool.predict(asked, x[:2]).mean, whole.predict(asked, x[:2]).mean, rtol=1e-9, atol=1e-9
    )


@pytest.mark.parametrize("start", [1.7e9 + 100.5, [1.7e9 + 100.5], np.array(1.7e9 + 100.5)], ids=type)
def test_the_beginning_of_streams_keeps_its_digits(start: Any) -> None:
    model = small_models.small("cmhp")
    times = [1.7e9 + 101, 1.7e9 + 102]
    pool, alone = StreamPool(model), Stream(model, start=start)
    pool.observe(["a", "a"], times, [0, 1], start=start)
    alone.observe(times, [0, 1])
    assert pool.state(["a"]).start.item() == 1.7e9 + 100.5
    assert torch.allclose(pool.predict(["a"]).mean, alone.predict().mean)
    with pytest.raises(ValueError, match="start has shape"):
        pool.observe(["b", "c"], times, [0, 1], start=[0.0, 1.0])


@pytest.mark.parametrize("bad", [0, 12, 19])
def test_an_error_names_the_stream_of_the_row_that_is_refused(bad: int) -> None:
    names = [f"k{i}" for i in range(20)]
    pool = StreamPool(small_models.small("cmhp"))
    pool.observe(names, [5.0] * 20, [0] * 20)
    with pytest.raises(ValueError, match=f"^stream 'k{bad}': event 0 of stream 0 is at 1.0"):
        pool.observe(names, [1.0 if i == bad else 6.0 for i in range(20)], [0] * 20)
    points = StreamPool(small_models.small("cmanp"))
    _, x, y = rows(20, 5)
    x[bad, 0] = 1e200
    with pytest.raises(ValueError, match=rf"^stream 'k{bad}': x\[0, 0, 0\] is 1e\+200"):
        points.observe(names, x, y)


def test_a_pool_that_is_too_large_to_load_is_not_called_damaged(tmp_path: Path) -> None:
    model = small_models.small("cmanp")
    names, x, y = rows(30, 5)
    pool = StreamPool(model)
    pool.observe(names, x, y)
    pool.save(tmp_path / "pool")
    assert StreamPool.load(tmp_path / "pool", model, most=5).most == 5
    with pytest.raises(ValueError, match="holds 5 streams, more than most=4") as caught:
        StreamPool.load(tmp_path / "pool", model, most=4)
    assert "damaged" not in str(caught.value)


def test_a_state_in_another_precision_is_refused_and_its_key_stays_unknown(refuses: Refuses) -> None:
    model = small_models.small("cmanp")
    pool = StreamPool(model)
    state = model.condition(torch.randn(1, 4, 2), torch.randn(1, 4, 2))
    for wrong in (state.to(dtype=torch.float32), replace(state, value=state.value.float())):
        with refuses(ValueError, "not in the precision"):
            pool.put(["a"], wrong)
        assert "a" not in pool
    pool.put(["a"], state)
    assert pool.count(["a"]).tolist() == [4]


def test_a_pool_is_not_merged_with_itself(refuses: Refuses) -> None:
    pool = StreamPool(small_models.small("cmanp"))
    pool.observe(["a"], torch.randn(1, 2), torch.randn(1, 2))
    with refuses(ValueError, "count twice"):
        pool.merge(pool)
    assert pool.count(["a"]).tolist() == [1]

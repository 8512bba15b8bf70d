"""Streams of one estimator by key: each answers as an estimator of its own rows would."""

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from constmem import StreamingClassifier, StreamingRegressor, StreamPool, condition_groups
from constmem.core.files import read_tensors, write_tensors

KEYS = 7


def table(n: int = 260, seed: int = 0) -> tuple[list[str], pd.DataFrame, Any]:
    """Rows of some keys, of numbers and text; few keys have most of them."""
    random = np.random.default_rng(seed)
    keys = [f"k{int(i)}" for i in np.minimum(random.zipf(1.4, n), KEYS)]
    x = pd.DataFrame({"a": random.normal(size=n), "b": random.normal(size=n)})
    x["c"] = random.choice(["red", "blue", None], n)
    x.loc[random.random(n) < 0.1, "b"] = np.nan
    y = np.sin(2 * x["a"]) + (x["c"] == "red") + 0.1 * random.normal(size=n)
    return keys, x, y.to_numpy()


def template(kind: str, x: Any, y: Any) -> Any:
    if kind == "classes":
        return StreamingClassifier(size=80).fit(x, np.where(y > 0.5, "up", "down"))
    if kind == "two targets":
        return StreamingRegressor(size=80, pretrained=False).fit(x, np.stack([y, 3 - y], 1))
    return StreamingRegressor(size=80, pretrained=False).fit(x, y)


def targets(kind: str, y: Any) -> Any:
    return {"classes": np.where(y > 0.5, "up", "down"), "two targets": np.stack([y, 3 - y], 1)}.get(kind, y)


@pytest.mark.parametrize(
    ("kind", "points"), [("number", 1), ("number", 8192), ("two targets", 30), ("classes", 30)]
)
def test_every_stream_answers_as_an_estimator_of_its_own(kind: str, points: int) -> None:
    keys, x, y = table()
    shared = template(kind, x, y)
    pool = StreamPool(shared)
    given = targets(kind, y)
    for start in range(0, len(x), 100):  # keys stand several times in a call, and in several calls
        here = slice(start, start + 100)
        pool.observe(keys[here], x[here], given[here], points=points)
    assert pool.count(sorted(set(keys))).tolist() == [keys.count(key) for key in sorted(set(keys))]
    asked = [*keys[:40], "k1", "k2"]  # in any order, a key several times
    rows = pd.concat([x[:40], x[50:52]])
    found = pool.predict(asked, rows)
    for key in set(asked):
        own, places = np.array(keys) == key, np.flatnonzero(np.array(asked) == key)
        alone = shared.spawn().partial_fit(x[own], given[own])
        if kind == "classes":
            np.testing.assert_allclose(
                found.probs[places], alone.predict_proba(rows.iloc[places]), rtol=0, atol=1e-9
            )
            continue
        np.testing.assert_allclose(found.mean[places], alone.predict(rows.iloc[places]), rtol=0, atol=1e-9)
        values = torch.from_numpy(np.concatenate([given[:40], given[50:52]]))
        density = found.log_prob(values)[places]
        expected = alone.log_density(rows.iloc[places], values[places].numpy())
        np.testing.assert_allclose(density.reshape(len(places), -1).sum(1), expected, rtol=0, atol=1e-8)


def test_pools_of_an_estimator_grow_evict_merge_and_are_kept(tmp_path: Path) -> None:
    keys, x, y = table()
    shared = template("number", x, y)
    whole, left, right = StreamPool(shared), StreamPool(shared.spawn()), StreamPool(shared)
    whole.observe(keys, x, y)
    left.observe(keys[:100], x[:100], y[:100])
    right.observe(keys[100:], x[100:], y[100:])
    left.merge(right)
    asked = sorted(whole.keys, key=str)
    expected = whole.predict(asked, x[: len(asked)]).mean
    torch.testing.assert_close(left.predict(asked, x[: len(asked)]).mean, expected, rtol=0, atol=1e-9)
    whole.save(tmp_path / "pool")
    shared.save(tmp_path / "estimator")
    again = StreamPool.load(tmp_path / "pool", StreamingRegressor.load(tmp_path / "estimator"))
    assert again.keys == whole.keys
    assert torch.equal(again.predict(asked, x[: len(asked)]).mean, expected)
    gone = again.oldest(2)
    away = again.pop(gone)
    assert len(again) == len(asked) - 2
    with pytest.raises(KeyError, match="there is no stream"):
        again.predict(gone[:1], x[:1])
    away.save(tmp_path / "two")
    again.put(gone, type(away).load(tmp_path / "two"))
    assert torch.equal(again.predict(asked, x[: len(asked)]).mean, expected)
    names, state = condition_groups(shared, keys, x, y)
    assert names == list(dict.fromkeys(keys))
    assert torch.equal(state.count, whole.count(names))
    torch.testing.assert_close(state.gram, whole.state(names).gram)
    tensors, header = read_tensors(tmp_path / "pool", kind="constmem.pool", version=1)
    about = {name: word for name, word in header.items() if name != "checksum"}
    for spoiled in ({"cross": tensors["cross"][:, 1:]}, {"square": -tensors["square"]}):
        write_tensors(tmp_path / "spoiled", tensors | spoiled, about)
        with pytest.raises(ValueError, match="is damaged"):
            StreamPool.load(tmp_path / "spoiled", shared)


def test_what_a_pool_of_an_estimator_does_not_serve_is_refused() -> None:
    keys, x, y = table()
    for forget in (100, "auto", "window:50"):
        made = StreamingRegressor(size=80, pretrained=False, forget=forget).fit(x, y)
        with pytest.raises(ValueError, match="hold an estimator for each key"):
            StreamPool(made)
    with pytest.raises(ValueError, match=r"StreamingRegressor\(pretrained=False\)"):
        StreamPool(StreamingRegressor(size=80).fit(x, y))
    with pytest.raises(ValueError, match="learn some more rows first"):
        StreamPool(StreamingRegressor(pretrained=False).partial_fit(x, y))
    classes, numbers = template("classes", x, y), template("number", x, y)
    pool = StreamPool(numbers)
    pool.observe(keys, x, y)
    before = {name: t.clone() for name, t in pool.state(pool.keys).tensors().items()}
    names = pool.keys
    with pytest.raises(ValueError, match="Input y contains NaN"):
        pool.observe(keys, x, np.full(len(x), np.nan))
    with pytest.raises(ValueError, match="2 targets"):
        pool.observe(keys, x, np.stack([y, y], 1))
    with pytest.raises(ValueError, match="each row needs one"):
        pool.observe(keys[1:], x, y)
    with pytest.raises(ValueError, match="each row needs one"):
        pool.predict(keys[:2], x[:3])
    with pytest.raises(ValueError, match="minimum of 1 is required"):
        pool.predict([], x[:0])
    with pytest.raises(ValueError, match="column"):
        pool.observe(keys, x.drop(columns="a"), y)
    with pytest.raises(ValueError, match="fit it with rows of all classes"):
        StreamPool(classes).observe(["a"], x[:1], ["sideways"])
    other = StreamPool(template("number", x[:200], y[:200]))
    other.observe(keys, x, y)
    with pytest.raises(ValueError, match="other columns and features"):
        pool.merge(other)
    assert pool.keys == names
    for name, t in pool.state(names).tensors().items():
        assert torch.equal(t, before[name])


def test_what_the_estimator_learns_later_does_not_change_the_pool() -> None:
    keys, x, y = table()
    shared = template("classes", x, y)
    pool = StreamPool(shared)
    pool.observe(keys, x, targets("classes", y))
    before = pool.predict(keys[:9], x[:9]).probs
    shared.partial_fit(x[:3], ["sideways"] * 3)
    assert torch.equal(pool.predict(keys[:9], x[:9]).probs, before)

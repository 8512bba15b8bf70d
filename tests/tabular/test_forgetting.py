"""Memories that forget: what they remember, and what they answer, against plain sums."""

import itertools
from math import inf

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from constmem.tabular.answers import mixed_mean
from constmem.tabular.estimators import StreamingRegressor
from constmem.tabular.evidence import LIVES
from constmem.tabular.features import Features
from constmem.tabular.forgetting import HORIZONS, Forgetting, Memory
from constmem.tabular.precisions import RECENT
from constmem.tabular.trace import Trace

WAYS = {"all": None, "half-life": 40.0, "window": "window:70", "auto": "auto"}


def _rows(count: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 2, generator=random, dtype=torch.float64)
    noise = torch.randn(count, 1, generator=random, dtype=torch.float64)
    return x, torch.sin(2 * x[:, :1]) + 0.1 * noise


def _memory(forget: object) -> Memory:
    x, y = _rows(100, seed=9)
    features = Features.anchor(x, y, seed=0, size=64)
    return Memory(features, 2, 1, Forgetting.of(forget))


def _weights(forget: object, count: int) -> list[np.ndarray]:
    """How much each row should count, of every trace."""
    age = np.arange(count - 1, -1, -1)
    if forget == "window:70":
        return [(age < 70).astype(float)]
    lives = HORIZONS if forget == "auto" else (inf,) if forget is None else (forget,)
    return [0.5 ** (age / life) for life in lives]


@pytest.mark.parametrize("way", WAYS)
@settings(max_examples=4)
@given(cuts=st.lists(st.integers(1, 699), max_size=6), one_by_one=st.integers(0, 40))
def test_moments_are_the_weighted_sums_of_all_rows_however_they_came(
    way: str, cuts: list[int], one_by_one: int
) -> None:
    memory, (x, y) = _memory(WAYS[way]), _rows(700)
    ends = sorted({*cuts, *range(one_by_one), 700})
    for start, stop in zip([0, *ends], ends, strict=False):
        memory.learn(x[start:stop], y[start:stop])
    memory.fold()
    phi, targets = memory.features(x).numpy(), y.numpy()
    traces = [trace for trace in memory.traces if isinstance(trace, Trace)]
    for trace, weight in zip(traces, _weights(WAYS[way], 700), strict=True):
        gram, cross = (phi * weight[:, None]).T @ phi, (phi * weight[:, None]).T @ targets
        np.testing.assert_allclose(trace.moments.gram.numpy(), gram, rtol=1e-9, atol=1e-9)
        np.testing.assert_allclose(trace.moments.cross.numpy(), cross, rtol=1e-9, atol=1e-9)
        assert float(trace.moments.count) == pytest.approx(weight.sum())
    assert memory.seen == 700


@pytest.mark.parametrize("waiting", [1, 2, 50, RECENT - 1])
def test_answers_hold_for_rows_that_wait_as_for_those_folded_in(waiting: int) -> None:
    memory, (x, y), (asked, _) = _memory(None), _rows(400 + waiting), _rows(20, seed=5)
    memory.learn(x[:400], y[:400])
    memory.fold()
    memory.answers(asked)  # precisions are found here, and then kept
    before = memory.traces[0].base()
    half = 400 + waiting // 2
    memory.learn(x[400:half], y[400:half])
    memory.answers(asked)  # a correction that grows in steps
    memory.learn(x[half:], y[half:])
    (trace,), (answer,) = memory.traces, memory.answers(asked)
    assert float(trace.moments.count) == 400  # they do wait

    precisions = trace.tensors()["precisions"].tolist()
    added = np.concatenate(
        [
            np.full(g.stop - g.start, p)
            for g, p in zip(memory.features.groups.values(), precisions, strict=True)
        ]
    )
    phi, query = memory.features(x).numpy(), memory.features(asked).numpy()
    inverse = np.linalg.inv(phi.T @ phi + np.diag(added))
    np.testing.assert_allclose(answer.mean, query @ inverse @ phi.T @ y.numpy(), rtol=1e-7, atol=1e-8)
    base = trace.base()
    lacking = 1 - (query[:, memory.features.groups["kernel"]] ** 2).sum(1)
    leverage = np.einsum("np,pq,nq->n", query, inverse, query) + base.missed * (lacking - base.usual)
    ratio = answer.variance[:, 0] / (1 + leverage)
    assert answer.freedom == pytest.approx(before.freedom + waiting)
    known = [(phi[:n], y.numpy()[:n]) for n in (400, 400 + waiting)]
    few, all_left = (
        (t.T @ t - t.T @ f @ np.linalg.solve(f.T @ f + np.diag(added), f.T @ t)).item() for f, t in known
    )
    noise = (float(before.noise) * before.freedom + all_left - few) / answer.freedom
    np.testing.assert_allclose(ratio, noise, rtol=1e-6)

    memory.fold()
    (folded,) = memory.answers(asked)
    np.testing.assert_allclose(folded.mean, answer.mean, rtol=1e-7, atol=1e-8)
    np.testing.assert_allclose(folded.variance, answer.variance, rtol=0.05)  # the average row has moved
    assert folded.freedom == pytest.approx(answer.freedom)


@pytest.mark.parametrize("way", ["half-life", "window"])
def test_what_is_forgotten_does_not_count(way: str) -> None:
    memory, (x, y) = _memory(WAYS[way]), _rows(900)
    memory.learn(x[:400], y[:400] + 3)
    for i in range(400, 900):
        memory.learn(x[i : i + 1], y[i : i + 1])
        if i % 50 == 0:
            memory.answers(x[:1])
    (answer,) = memory.answers(x[:50])
    assert np.median(np.abs(answer.mean - y[:50].numpy())) < 0.2  # noise 0.1; what is forgotten was 3 higher
    if way == "window":
        memory.fold()
        memory.traces[0].forget_answers(search=True)
        fresh = _memory(None)
        fresh.learn(x[-70:], y[-70:])
        fresh.fold()
        np.testing.assert_allclose(memory.answers(x)[0].mean, fresh.answers(x)[0].mean, rtol=0, atol=1e-6)


def test_horizons_are_mixed_by_how_well_they_predict() -> None:
    memory, (x, y) = _memory("auto"), _rows(3000)
    for start in range(0, 2000, 100):
        memory.learn(x[start : start + 100], y[start : start + 100])
    steady = memory.weights
    assert steady[[0, 3, 4]].sum() < 0.2  # nothing changes: a hundred rows are too few
    for start in range(2000, 2300, 20):
        memory.learn(x[start : start + 20], -y[start : start + 20])
    assert memory.weights[1:3].sum() < 0.1  # everything has changed
    answers, now = memory.answers(x[:99]), -y[:99].numpy()
    error = np.abs(mixed_mean(answers, memory.weights) - now).mean()
    assert error < np.abs(answers[2].mean - now).mean() / 2  # that of all rows
    assert memory.weights.sum() == pytest.approx(1)


@pytest.mark.parametrize("cuts", [(0, 300), (0, 5, 6, 7, 100, 300), (0, 290, 295, 299, 300)])
def test_an_echo_answers_as_the_weighted_posterior_of_its_rows(cuts: tuple[int, ...]) -> None:
    memory, (x, y), (asked, _) = _memory("auto"), _rows(300), _rows(20, seed=5)
    for start, stop in itertools.pairwise(cuts):
        memory.learn(x[start:stop], y[start:stop])
        memory.answers(asked)
    elder, echo = memory.traces[0], memory.traces[-1]
    answer = memory.answers(asked)[-1]
    kept = slice(300 - int(LIVES * echo.half_life), 300)
    phi, query = memory.features(x[kept]).numpy(), memory.features(asked).numpy()
    weight, targets = 0.5 ** (np.arange(len(phi) - 1, -1, -1) / echo.half_life), y[kept].numpy()
    groups = memory.features.groups
    precisions = [elder.base().precisions[name] for name in groups]
    added = np.repeat(precisions, [group.stop - group.start for group in groups.values()])
    inverse = np.linalg.inv((phi * weight[:, None]).T @ phi + np.diag(added))
    coefficients = inverse @ (phi * weight[:, None]).T @ targets
    np.testing.assert_allclose(answer.mean, query @ coefficients, rtol=1e-6, atol=1e-7)
    left = (weight @ targets**2)[0] - (targets.T * weight @ phi @ coefficients).item()
    noise = (float(elder.base().noise) + left) / (1 + weight.sum())
    leverage = np.einsum("np,pq,nq->n", query, inverse, query)
    np.testing.assert_allclose(answer.variance[:, 0], noise * (1 + leverage), rtol=1e-6)
    assert answer.freedom == pytest.approx(1 + weight.sum())


@pytest.mark.parametrize("way", WAYS)
def test_memory_comes_back_from_its_tensors_and_does_not_grow(way: str) -> None:
    memory, (x, y) = _memory(WAYS[way]), _rows(2000)
    memory.learn(x[:400], y[:400])
    size = memory.nbytes
    for start in range(400, 2000, 37):
        memory.learn(x[start : start + 37], y[start : start + 37])
        memory.answers(x[:3])
    assert memory.nbytes == size
    tensors = {name: tensor.clone() for name, tensor in memory.tensors().items()}
    again = _memory(WAYS[way])
    again.restore(tensors)
    for mine, its in zip(memory.answers(x[:9]), again.answers(x[:9]), strict=True):
        np.testing.assert_allclose(its.mean, mine.mean, rtol=1e-9, atol=1e-9)
        np.testing.assert_allclose(its.variance, mine.variance, rtol=1e-9)
    np.testing.assert_array_equal(again.weights, memory.weights)
    for each in (memory, again):
        each.learn(x[:200], y[:200])
    np.testing.assert_allclose(again.traces[0].moments.gram, memory.traces[0].moments.gram, rtol=1e-12)


def test_streams_with_the_same_half_life_merge_and_windows_do_not() -> None:
    (x, y), (a, b) = _rows(300), (_memory(40.0), _memory(40.0))
    a.learn(x[:200], y[:200])
    b.learn(x[200:], y[200:])
    gram = a.tensors()["0.count"] + b.tensors()["0.count"]
    a.merge(b)
    assert a.tensors()["0.count"] == gram
    windows = _memory("window:70"), _memory("window:70")
    with pytest.raises(ValueError, match="cannot be merged"):
        windows[0].merge(windows[1])
    with pytest.raises(ValueError, match="use forget=None"):
        a.remove(x[:1], y[:1])


@pytest.mark.parametrize(
    "forget", [0, -1.0, True, "window", "window:0", "window:x", "often", inf, float("nan")]
)
def test_what_forget_may_be_is_said(forget: object) -> None:
    with pytest.raises(ValueError, match=r"is none of: None .*window:1000"):
        Forgetting.of(forget)


@pytest.mark.parametrize("window", [1, 2, 3, 8])
def test_a_window_of_few_rows_remembers_just_these(window: int) -> None:
    random = np.random.default_rng(2)
    x = random.normal(size=(600, 3))
    y = x[:, 0] + np.sin(x[:, 1]) + 0.1 * random.normal(size=600)
    model = StreamingRegressor(size=64, warmup=50, forget=f"window:{window}")
    for start in range(0, 600, 3):
        model.partial_fit(x[start : start + 3], y[start : start + 3])
    fresh = model.spawn().partial_fit(x[-window:], y[-window:])
    mine, its = (each.learner_.memory.tensors() for each in (model, fresh))
    np.testing.assert_allclose(mine["0.gram"], its["0.gram"], rtol=0, atol=1e-6)
    np.testing.assert_allclose(mine["0.cross"], its["0.cross"], rtol=0, atol=1e-6)

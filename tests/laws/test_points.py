"""The contract of every neural process, as laws on states and predictions."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributions import Distribution

from constmem import NeuralProcess
from tests.laws.models import POINT_MODELS
from tests.laws.points import (
    DIM_Y,
    Factory,
    assert_predicts,
    assert_unchanged,
    built,
    factory_of,
    small_cmanp,
    task,
    tensors,
)

# Laws


def test_predictions_depend_on_the_context(model: NeuralProcess) -> None:
    """Without this the laws below would say nothing."""
    x, y, xt = task()
    prior = model.query(model.empty(2), xt)
    seen = model.query(model.condition(x, y), xt)
    one_more = model.query(model.condition(x[:, :-1], y[:, :-1]), xt)
    assert float((seen.mean - prior.mean).abs().max()) > 1e-2
    assert float((seen.mean - one_more.mean).abs().max()) > 1e-4
    assert float((seen.mean[0] - seen.mean[1]).abs().max()) > 1e-2


@pytest.mark.parametrize("sizes", [(10, 10, 10), (1, 28, 1), (0, 30), (29, 1, 0), (1,) * 30])
def test_updating_is_conditioning_on_the_union(model: NeuralProcess, sizes: tuple[int, ...]) -> None:
    x, y, xt = task()
    state = model.empty(2)
    start = 0
    for size in sizes:
        state = model.update(state, x[:, start : start + size], y[:, start : start + size])
        start += size
        assert state.count.tolist() == [start, start]
    assert_predicts(model.query(state, xt), model.query(model.condition(x, y), xt))


@settings(max_examples=8)  # of every model
@given(chunk=st.integers(1, 40), seed=st.integers(0, 2**31))
@pytest.mark.parametrize("factory", [factory_of(name) for name in POINT_MODELS], ids=POINT_MODELS)
def test_the_chunk_changes_nothing(factory: Factory, chunk: int, seed: int) -> None:
    model = built(factory)
    x, y, xt = task(seed=seed)
    state = model.condition(x, y, chunk=chunk)
    assert state.count.tolist() == [30, 30]
    assert_predicts(model.query(state, xt), model.query(model.condition(x, y), xt))
    updated = model.update(model.condition(x[:, :3], y[:, :3]), x[:, 3:], y[:, 3:], chunk=chunk)
    assert_predicts(model.query(updated, xt), model.query(state, xt))


@settings(max_examples=8)
@given(seed=st.integers(0, 2**31))
@pytest.mark.parametrize("factory", [factory_of(name) for name in POINT_MODELS], ids=POINT_MODELS)
def test_the_order_of_the_context_changes_nothing(factory: Factory, seed: int) -> None:
    model = built(factory)
    x, y, xt = task(seed=seed)
    order = torch.randperm(30, generator=torch.Generator().manual_seed(seed))
    shuffled = model.condition(x[:, order], y[:, order], chunk=11)
    assert_predicts(model.query(shuffled, xt), model.query(model.condition(x, y), xt))


def test_the_order_of_merging_changes_nothing(model: NeuralProcess) -> None:
    x, y, xt = task()
    a, b, c = (model.observe(x[:, i : i + 10], y[:, i : i + 10]) for i in (0, 10, 20))
    expected = model.query(model.condition(x, y), xt)
    empty = model.empty(2)
    for state in (a.merge(b).merge(c), c.merge(a.merge(b)), b.merge(c.merge(empty)).merge(empty.merge(a))):
        assert_predicts(model.query(state, xt), expected)


def test_targets_do_not_see_each_other(model: NeuralProcess) -> None:
    x, y, xt = task()
    state = model.condition(x, y)
    together = model.query(state, xt)
    for i in range(xt.shape[1]):
        alone = model.query(state, xt[:, i : i + 1])
        torch.testing.assert_close(alone.mean, together.mean[:, i : i + 1], atol=1e-5, rtol=0)
        torch.testing.assert_close(alone.stddev, together.stddev[:, i : i + 1], atol=1e-5, rtol=0)


def test_tasks_of_a_batch_do_not_see_each_other(model: NeuralProcess) -> None:
    x, y, xt = task()
    together = model.query(model.condition(x, y), xt)
    for i in range(2):
        one = slice(i, i + 1)
        alone = model.query(model.condition(x[one], y[one]), xt[one])
        torch.testing.assert_close(alone.mean, together.mean[one], atol=1e-5, rtol=0)


@pytest.mark.parametrize("junk", [1e6, float("nan")])
@pytest.mark.parametrize("chunk", [7, 4096])
def test_masking_is_leaving_out(model: NeuralProcess, junk: float, chunk: int) -> None:
    x, y, xt = task()
    mask = torch.rand(2, 30) < 0.5
    dirty_x, dirty_y = (t.masked_fill(~mask[..., None], junk) for t in (x, y))
    chunks = [(dirty_x[:, i : i + 9], dirty_y[:, i : i + 9], mask[:, i : i + 9]) for i in range(0, 30, 9)]
    states = [
        model.condition(dirty_x, dirty_y, mask=mask, chunk=chunk),
        model.observe(dirty_x, dirty_y, mask=mask),
        model.condition_chunks(chunks),
        model.update(model.empty(2), dirty_x, dirty_y, mask=mask, chunk=chunk),
    ]
    directly = model(dirty_x, dirty_y, xt, mask, chunk)
    for i in range(2):
        one = slice(i, i + 1)
        left = model.condition(x[one][:, mask[i]], y[one][:, mask[i]])
        expected = model.query(left, xt[one])
        torch.testing.assert_close(directly.mean[one], expected.mean, atol=1e-5, rtol=0)
        for state in states:
            assert state.count[i] == mask[i].sum()
            found = model.query(state, xt)
            torch.testing.assert_close(found.mean[one], expected.mean, atol=1e-5, rtol=0)
            torch.testing.assert_close(found.stddev[one], expected.stddev, atol=1e-5, rtol=1e-5)


def test_weights_are_counted_as_repetitions(constant: NeuralProcess) -> None:
    x, y, xt = task(10)
    log_weight = torch.zeros(2, 10)
    log_weight[:, 3] = np.log(2)
    weighted = constant.observe(x, y, log_weight=log_weight)
    twice = constant.observe(torch.cat([x, x[:, 3:4]], 1), torch.cat([y, y[:, 3:4]], 1))
    assert_predicts(constant.query(weighted, xt), constant.query(twice, xt))


def test_an_empty_context_predicts_the_prior(model: NeuralProcess) -> None:
    x, y, xt = task()
    nobody = torch.zeros(2, 30, dtype=torch.bool)
    prior = model.query(model.empty(2), xt)
    assert bool(prior.mean.isfinite().all())
    assert bool((prior.stddev > 0).all())
    for state in (
        model.condition(x[:, :0], y[:, :0]),
        model.observe(x[:, :0], y[:, :0]),
        model.condition_chunks([(x[:, :0], y[:, :0])]),
        model.update(model.empty(2), x[:, :0], y[:, :0]),
        model.condition(x, y, mask=nobody),
        model.condition(x, y, mask=nobody, chunk=7),
        model.observe(x, y, mask=nobody),
        model.empty(2).merge(model.empty(2)),
    ):
        assert state.count.tolist() == [0, 0]
        assert_predicts(model.query(state, xt), prior, 1e-6)
    assert_predicts(model(x[:, :0], y[:, :0], xt), prior, 1e-6)


def test_no_targets_give_no_predictions(model: NeuralProcess) -> None:
    x, y, xt = task()
    assert model.query(model.condition(x, y), xt[:, :0]).mean.shape == (2, 0, DIM_Y)


def test_a_state_does_not_alias_the_data(model: NeuralProcess) -> None:
    for n in (1, 30):
        x, y, xt = task(n)
        mask = torch.ones(2, n, dtype=torch.bool)
        for state in (
            model.condition(x, y),
            model.condition(x, y, mask=mask, chunk=7),
            model.observe(x, y),
            model.condition_chunks([(x, y)]),
            model.update(model.empty(2), x, y),
        ):
            before, expected, data = tensors(state), model.query(state, xt), (x.clone(), y.clone())
            x.zero_(), y.zero_(), mask.zero_()
            assert_unchanged(state, before)
            assert_predicts(model.query(state, xt), expected, 0.0)
            x.copy_(data[0]), y.copy_(data[1]), mask.fill_(True)


def test_using_a_state_does_not_change_it(model: NeuralProcess) -> None:
    x, y, xt = task()
    state = model.condition(x, y)
    before = tensors(state)
    model.update(state, x, y)
    state.merge(state)
    model.query(state, xt)
    model.condition_chunks([(x, y)], initial=state)
    assert_unchanged(state, before)


def test_data_is_left_as_it_was(model: NeuralProcess) -> None:
    x, y, xt = task()
    mask = torch.rand(2, 30) < 0.5
    before = [t.clone() for t in (x, y, xt, mask)]
    model.query(model.condition(x, y, mask=mask, chunk=7), xt)
    for tensor, old in zip((x, y, xt, mask), before, strict=True):
        assert torch.equal(tensor, old)


def test_removing_undoes_updating(constant: NeuralProcess) -> None:
    x, y, xt = task()
    kept, gone = constant.condition(x[:, :20], y[:, :20]), constant.observe(x[:, 20:], y[:, 20:])
    left = kept.merge(gone).remove(gone)
    assert left.count.tolist() == [20, 20]
    assert_predicts(constant.query(left, xt), constant.query(kept, xt))


def test_the_state_is_as_large_for_one_point_as_for_many(constant: NeuralProcess) -> None:
    sizes = {constant.empty(1).nbytes}
    for n in (1, 2, 1000):
        x, y, _ = task(n, b=1)
        sizes |= {constant.condition(x, y).nbytes, constant.update(constant.empty(1), x, y).nbytes}
    assert len(sizes) == 1


# Predictions


def test_a_prediction_is_a_distribution(model: NeuralProcess) -> None:
    x, y, xt = task()
    found = model.query(model.condition(x, y), xt)
    assert isinstance(found, Distribution)
    assert found.mean.shape == found.stddev.shape == found.sample().shape == (2, 7, DIM_Y)
    assert found.sample((5,)).shape == (5, 2, 7, DIM_Y)
    assert bool((found.stddev > 0).all())
    assert found.log_prob(torch.randn(2, 7, DIM_Y)).sum(-1).shape == (2, 7)


def test_a_cmanp_predicts_independent_normals() -> None:
    model = built(small_cmanp)
    x, y, xt = task()
    found = model.query(model.condition(x, y), xt)
    target = torch.randn(2, 7, DIM_Y)
    deviation = (target - found.mean) / found.stddev
    expected = -0.5 * deviation**2 - found.stddev.log() - 0.5 * np.log(2 * np.pi)
    torch.testing.assert_close(found.log_prob(target), expected)


def test_reading_and_predicting_are_the_halves_of_a_query(model: NeuralProcess) -> None:
    x, y, xt = task()
    state = model.condition(x, y)
    assert_predicts(model.predict(model.read(state), xt), model.query(state, xt), 0.0)


@pytest.mark.parametrize("chunk", [1, 3, 7])
@pytest.mark.parametrize("learning", [False, True])
def test_predicting_in_chunks_is_predicting_at_once(model: NeuralProcess, chunk: int, learning: bool) -> None:
    x, y, xt = task()
    with torch.set_grad_enabled(learning):
        state = model.condition(x, y)
        at_once = model.query(state, xt)
        assert_predicts(model.query(state, xt, chunk=chunk), at_once)
        assert_predicts(model.predict(model.read(state), xt, chunk=chunk), at_once)
        assert_predicts(model(x, y, xt, None, chunk), at_once)


def test_the_trained_path_is_the_deployed_path(factory: Factory) -> None:
    model = built(factory).requires_grad_(True)
    x, y, xt = task()
    trained = model(x, y, xt, None, 7)
    with torch.no_grad():
        deployed = model.query(model.condition(x, y, chunk=7), xt)
    assert_predicts(trained, deployed)
    assert trained.mean.requires_grad
    assert not deployed.mean.requires_grad


def test_a_float64_model_is_exact(factory: Factory) -> None:
    model = built(factory).double()
    x, y, xt = (t.double() for t in task())
    whole = model.query(model.condition(x, y), xt)
    assert whole.mean.dtype == torch.float64
    assert_predicts(model.query(model.condition(x, y, chunk=4), xt), whole, 1e-12)
    yt = torch.randn(2, 7, DIM_Y).double()
    some, rest = model.condition(x[:, :11], y[:, :11]), model.condition(x[:, 11:], y[:, 11:])
    for state in (model.condition(x.flip(1), y.flip(1)), rest.merge(some)):  # mixtures are more than moments
        found = model.query(state, xt).log_prob(yt)
        torch.testing.assert_close(found, whole.log_prob(yt), atol=1e-10, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_data_of_any_floating_dtype_is_taken(model: NeuralProcess, dtype: torch.dtype) -> None:
    x, y, xt = (t.to(dtype) for t in task())
    found = model.query(model.condition(x, y), xt)
    expected = model.query(model.condition(x.float(), y.float()), xt.float())
    assert found.mean.dtype == torch.float32
    assert_predicts(found, expected)

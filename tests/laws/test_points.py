"""The contract of every neural process, as laws on states and predictions."""

import json
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.distributions import Distribution

from constmem import CMANP, ConditioningError, NeuralProcess
from constmem.core import checks
from constmem.core.files import read_tensors, write_tensors
from constmem.core.monoid import State
from tests.conftest import Refuses
from tests.laws.models import CONSTANT, POINT_MODELS, fresh, moved

Factory = Callable[[], NeuralProcess]
DIM_X, DIM_Y = 2, 3


def small_cmanp(**settings: Any) -> CMANP:
    found: CMANP = fresh("cmanp", **{"dim_y": DIM_Y, "num_slots": 6, **settings})
    return found


def factory_of(name: str) -> Factory:
    return partial(fresh, name, dim_y=DIM_Y)


def built(factory: Factory) -> NeuralProcess:
    """A model whose parameters are away from the ones and zeros they start from, ready to evaluate."""
    torch.manual_seed(1)
    found: NeuralProcess = moved(factory()).eval().requires_grad_(False)
    return found


@pytest.fixture(params=POINT_MODELS)
def factory(request: pytest.FixtureRequest) -> Factory:
    return factory_of(request.param)


@pytest.fixture
def model(factory: Factory) -> NeuralProcess:
    return built(factory)


@pytest.fixture(params=CONSTANT)
def constant_factory(request: pytest.FixtureRequest) -> Factory:
    return factory_of(request.param)


@pytest.fixture
def constant(constant_factory: Factory) -> NeuralProcess:
    return built(constant_factory)


def task(n: int = 30, m: int = 7, b: int = 2, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    random = torch.Generator().manual_seed(seed)
    sizes = (n, DIM_X), (n, DIM_Y), (m, DIM_X)
    x, y, xt = (torch.randn(b, points, dim, generator=random) for points, dim in sizes)
    return x, y, xt


def assert_predicts(found: Distribution, expected: Distribution, tolerance: float = 1e-4) -> None:
    """Far above the rounding of float32, and far below what any broken law would change."""
    torch.testing.assert_close(found.mean, expected.mean, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(found.stddev, expected.stddev, atol=tolerance, rtol=tolerance)


def tensors(state: State) -> dict[str, Tensor]:
    """Copies of all tensors a state holds."""
    return {name: t.clone() for name, t in state.tensors().items()}


def assert_unchanged(state: State, before: dict[str, Tensor]) -> None:
    after = tensors(state)
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())


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


@pytest.mark.parametrize("junk", [0.0, 1e6, float("nan"), float("inf")])
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
            torch.testing.assert_close(found.stddev[one], expected.stddev, atol=1e-5, rtol=0)


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


@pytest.mark.parametrize("chunk", [1, 3, 7, 100])
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


# Streams of chunks


def pieces(x: Tensor, y: Tensor, size: int = 8) -> Iterator[tuple[Tensor, Tensor]]:
    for i in range(0, x.shape[1], size):
        yield x[:, i : i + size], y[:, i : i + size]


@pytest.mark.parametrize("learning", [False, True])
def test_conditioning_on_a_generator_is_conditioning_on_all(factory: Factory, learning: bool) -> None:
    model = built(factory).requires_grad_(learning)
    x, y, xt = task()
    state = model.condition_chunks(pieces(x, y))
    assert state.count.tolist() == [30, 30]
    assert_predicts(model.query(state, xt), model.query(model.condition(x, y), xt))


@pytest.mark.parametrize("learning", [False, True])
def test_a_generator_goes_on_from_an_initial_state(factory: Factory, learning: bool) -> None:
    model = built(factory).requires_grad_(learning)
    x, y, xt = task()
    first = model.condition(x[:, :12], y[:, :12])
    state = model.condition_chunks(pieces(x[:, 12:], y[:, 12:]), initial=first)
    assert state.count.tolist() == [30, 30]
    assert_predicts(model.query(state, xt), model.query(model.condition(x, y), xt))
    assert_predicts(model.query(model.condition_chunks([], initial=first), xt), model.query(first, xt), 0.0)


def test_every_chunk_is_let_go_before_the_next_is_asked_for(model: NeuralProcess) -> None:
    """Nothing of a chunk is held once the generator is asked for another."""
    x, y, _ = task()
    alive: list[int] = []
    handed: list[weakref.ref[Tensor]] = []

    def watched() -> Iterator[tuple[Tensor, Tensor]]:
        for i in range(0, 30, 6):
            alive.append(sum(ref() is not None for ref in handed))
            piece = x[:, i : i + 6].clone()
            handed.append(weakref.ref(piece))
            yield piece, y[:, i : i + 6]
            del piece

    model.condition_chunks(watched())
    assert max(alive) <= 1


def test_chunks_may_be_empty(factory: Factory) -> None:
    for learning in (False, True):
        model = built(factory).requires_grad_(learning)
        x, y, xt = task()
        chunks = [(x[:, :0], y[:, :0]), (x[:, :9], y[:, :9]), (x[:, :0], y[:, :0]), (x[:, 9:], y[:, 9:])]
        found = model.query(model.condition_chunks(chunks), xt)
        assert_predicts(found, model.query(model.condition(x, y), xt))
        if learning:
            found.mean.sum().backward()
            assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)


def test_a_generator_that_breaks_off_leaves_what_was_seen(model: NeuralProcess) -> None:
    x, y, xt = task()

    def broken() -> Iterator[tuple[Tensor, Tensor]]:
        yield from pieces(x[:, :16], y[:, :16])
        raise OSError("the cable was pulled")

    with pytest.raises(ConditioningError, match=r"after \[16, 16\] points: the cable was pulled") as caught:
        model.condition_chunks(broken())
    assert isinstance(caught.value.__cause__, OSError)
    state = caught.value.state
    assert_predicts(model.query(state, xt), model.query(model.condition(x[:, :16], y[:, :16]), xt))
    whole = model.condition_chunks(pieces(x[:, 16:], y[:, 16:]), initial=state)
    assert_predicts(model.query(whole, xt), model.query(model.condition(x, y), xt))


def test_a_generator_that_breaks_at_once_leaves_the_initial_state(model: NeuralProcess) -> None:
    x, y, _ = task()
    state = model.condition(x, y)
    before = tensors(state)

    def broken() -> Iterator[tuple[Tensor, Tensor]]:
        raise OSError("no such disk")
        yield x, y

    with pytest.raises(ConditioningError, match="no such disk") as caught:
        model.condition_chunks(broken(), initial=state)
    assert_unchanged(caught.value.state, before)
    with pytest.raises(OSError, match="no such disk"):
        model.condition_chunks(broken())


@pytest.mark.parametrize("learning", [False, True])
def test_a_generator_that_yields_nothing_is_refused(factory: Factory, learning: bool) -> None:
    model = built(factory).requires_grad_(learning)
    x, y, _ = task()
    used = pieces(x, y)
    model.condition_chunks(used)
    for empty in (used, [], iter(())):
        with pytest.raises(ValueError, match=r"the iterable yielded no chunk: .*model.empty"):
            model.condition_chunks(empty)


@pytest.mark.parametrize("chunk", [3, (1, 2, 3, 4), (torch.zeros(1),), {"x": 1, "y": 2}])
def test_chunks_that_are_no_pairs_are_refused(model: NeuralProcess, refuses: Refuses, chunk: Any) -> None:
    x, y, _ = task()
    with refuses(TypeError, r"chunk 0 is not a pair \(x, y\) or triple"):
        model.condition_chunks([chunk])
    with refuses(ConditioningError, r"chunk 1 is not a pair \(x, y\) or triple"):
        model.condition_chunks([(x, y), chunk])


# Bad input


@pytest.mark.parametrize("junk", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize(("name", "channel"), [("x", 1), ("y", 2)])
@pytest.mark.parametrize("chunk", [4, 4096])
def test_a_value_that_is_no_number_is_named(
    model: NeuralProcess, junk: float, name: str, channel: int, chunk: int
) -> None:
    x, y, xt = task()
    state = model.condition(x, y)
    before = tensors(state)
    {"x": x, "y": y}[name][1, 17, channel] = junk
    message = rf"^{name}\[1, 17, {channel}\] is {junk}: every value of {name} must be finite"
    for attempt in (
        lambda: model.condition(x, y, chunk=chunk),
        lambda: model.update(state, x, y, chunk=chunk),
        lambda: model.observe(x, y),
        lambda: model.condition(x, y, chunk=chunk, mask=torch.ones(2, 30, dtype=torch.bool)),
    ):
        with pytest.raises(ValueError, match=message):
            attempt()
    assert_unchanged(state, before)
    assert bool(model.query(state, xt).mean.isfinite().all())


def test_a_value_that_is_no_number_is_named_with_its_chunk(model: NeuralProcess) -> None:
    x, y, xt = task()
    y[0, 17, 2] = float("nan")
    with pytest.raises(
        ConditioningError, match=r"after \[16, 16\] points: chunk 2: y\[0, 1, 2\] is nan"
    ) as e:
        model.condition_chunks(pieces(x, y))
    assert_predicts(model.query(e.value.state, xt), model.query(model.condition(x[:, :16], y[:, :16]), xt))
    y[0, 3, 1] = float("inf")
    with pytest.raises(ValueError, match=r"^chunk 0: y\[0, 3, 1\] is inf"):
        model.condition_chunks(pieces(x, y))


def test_many_large_numbers_are_looked_at_closely_and_taken(model: NeuralProcess) -> None:
    x, y, _ = task()
    y = torch.full_like(y, 0.99 * checks.largest(torch.float32))
    assert model.condition(x, y).count.tolist() == [30, 30]


@pytest.mark.parametrize("junk", [float("nan"), float("inf")])
def test_targets_that_are_no_numbers_are_named(model: NeuralProcess, junk: float) -> None:
    x, y, xt = task()
    xt[1, 5, 0] = junk
    with pytest.raises(ValueError, match=rf"xt\[1, 5, 0\] is {junk}"):
        model.query(model.condition(x, y), xt)


WRONG_SHAPES = [
    (lambda x, y: (x[0], y), r"x has shape \(30, 2\), but \(batch, points, 2\) is needed: if these are"),
    (lambda x, y: (x, y[0]), r"y has shape \(30, 3\), but \(batch, points, 3\) is needed: if these are"),
    (lambda x, y: (y, x), r"x has shape \(2, 30, 3\), but \(batch, points, 2\) is needed"),
    (lambda x, _: (x, x), r"y has shape \(2, 30, 2\), but \(batch, points, 3\) is needed"),
    (lambda x, y: (x[None], y), r"x has shape \(1, 2, 30, 2\), but"),
    (lambda x, y: (x, y[:, 1:]), r"y has \(batch, points\) \(2, 29\), but x has \(2, 30\)"),
    (lambda x, y: (x[:1], y), r"y has \(batch, points\) \(2, 30\), but x has \(1, 30\)"),
    (lambda x, y: (x.to("meta"), y), r"x is on meta, but the model is on cpu: move one"),
    (lambda x, y: (x, y.to("meta")), r"y is on meta, but the model is on cpu: move one"),
]
WRONG_TYPES = [
    (lambda x, y: (x.long(), y), "x must be a floating-point tensor, not torch.int64: use x.float"),
    (lambda x, y: (x, y > 0), "y must be a floating-point tensor, not torch.bool"),
    (lambda x, y: (x.numpy(), y), "x must be a floating-point tensor, not ndarray"),
    (lambda x, y: (x, y.tolist()), "y must be a floating-point tensor, not list"),
    (lambda _, y: (None, y), "x must be a floating-point tensor, not NoneType"),
]


@pytest.mark.parametrize(
    ("change", "message", "kind"),
    [(*case, ValueError) for case in WRONG_SHAPES] + [(*case, TypeError) for case in WRONG_TYPES],
)
def test_data_that_does_not_fit_is_refused(
    model: NeuralProcess,
    refuses: Refuses,
    change: Callable[[Tensor, Tensor], Any],
    message: str,
    kind: type[Exception],
) -> None:
    x, y, xt = task()
    state = model.condition(x, y)
    before = tensors(state)
    wrong = change(x, y)
    for attempt in (
        lambda: model.condition(*wrong),
        lambda: model.observe(*wrong),
        lambda: model.update(state, *wrong),
        lambda: model(*wrong, xt),
    ):
        with refuses(kind, message):
            attempt()
    with refuses(kind, f"chunk 0: {message}"):
        model.condition_chunks([wrong])
    assert_unchanged(state, before)


@pytest.mark.parametrize(
    ("mask", "kind", "message"),
    [
        (torch.ones(2, 30), TypeError, r"mask must be boolean \(True = real\), not torch.float32: use mask"),
        (torch.ones(2, 29, dtype=torch.bool), ValueError, r"mask has shape \(2, 29\) on cpu, but one entry"),
        (torch.ones(30, dtype=torch.bool), ValueError, r"mask has shape \(30,\) on cpu, but one entry"),
        (torch.ones(2, 30, dtype=torch.bool, device="meta"), ValueError, "on meta, but one entry a point"),
    ],
)
def test_masks_that_do_not_fit_are_refused(
    model: NeuralProcess, mask: Tensor, kind: type[Exception], message: str
) -> None:
    x, y, xt = task()
    for attempt in (
        lambda: model.condition(x, y, mask=mask),
        lambda: model.observe(x, y, mask=mask),
        lambda: model.update(model.empty(2), x, y, mask=mask),
        lambda: model.condition_chunks([(x, y, mask)]),
        lambda: model(x, y, xt, mask),
    ):
        with pytest.raises(kind, match=message):
            attempt()


def test_weights_that_do_not_fit_are_refused(constant: NeuralProcess) -> None:
    x, y, _ = task()
    with pytest.raises(ValueError, match=r"log_weight has shape \(2, 29\)"):
        constant.observe(x, y, log_weight=torch.zeros(2, 29))


@pytest.mark.parametrize("junk", [float("nan"), float("inf")])
def test_weights_that_are_no_numbers_are_refused(constant: NeuralProcess, junk: float) -> None:
    x, y, _ = task()
    log_weight = torch.zeros(2, 30)
    log_weight[1, 4] = junk
    with pytest.raises(ValueError, match="log_weight"):
        constant.observe(x, y, log_weight=log_weight)


@pytest.mark.parametrize("chunk", [0, -3, 2.5, True])
def test_chunks_below_one_are_refused(model: NeuralProcess, refuses: Refuses, chunk: Any) -> None:
    x, y, xt = task()
    state = model.condition(x, y)
    for attempt in (
        lambda: model.condition(x, y, chunk=chunk),
        lambda: model.update(state, x, y, chunk=chunk),
        lambda: model.query(state, xt, chunk=chunk),
        lambda: model.predict(model.read(state), xt, chunk=chunk),
        lambda: model(x, y, xt, None, chunk),
    ):
        with refuses(ValueError, f"chunk must be a whole number of at least 1, not {chunk}"):
            attempt()


@pytest.mark.parametrize(
    ("change", "kind", "message"),
    [
        (lambda xt: xt[..., :1], ValueError, r"xt has shape \(2, 7, 1\), but \(batch, points, 2\) is needed"),
        (
            lambda xt: xt[0],
            ValueError,
            r"xt has shape \(7, 2\), but \(batch, points, 2\) is needed: if",
        ),
        (lambda xt: xt[0] * torch.nan, ValueError, r"xt has shape \(7, 2\), but \(batch, points, 2\) is n"),
        (lambda xt: xt[:1], ValueError, "xt is a batch of 1, but the state one of 2"),
        (lambda xt: xt.long(), TypeError, "xt must be a floating-point tensor, not torch.int64"),
        (lambda xt: xt.tolist(), TypeError, "xt must be a floating-point tensor, not list"),
        (lambda xt: xt.to("meta"), ValueError, "xt is on meta, but the model is on cpu"),
    ],
)
def test_targets_that_do_not_fit_are_refused(
    model: NeuralProcess,
    refuses: Refuses,
    change: Callable[[Tensor], Any],
    kind: type[Exception],
    message: str,
) -> None:
    x, y, xt = task()
    state = model.condition(x, y)
    before = tensors(state)
    with refuses(kind, message):
        model.query(state, change(xt))
    assert_unchanged(state, before)


def test_a_state_of_another_batch_is_refused(model: NeuralProcess, refuses: Refuses) -> None:
    x, y, xt = task()
    state = model.condition(x[:1], y[:1])
    before = tensors(state)
    with refuses(ValueError, "x is a batch of 2, but the state one of 1"):
        model.update(state, x, y)
    with refuses(ValueError, "xt is a batch of 2, but the state one of 1"):
        model.query(state, xt)
    with refuses((ConditioningError, ValueError), "cannot merge states that differ"):
        model.condition_chunks([(x, y)], initial=state)
    assert_unchanged(state, before)


def test_what_is_no_state_is_refused(model: NeuralProcess, refuses: Refuses) -> None:
    x, y, xt = task()
    for wrong in (None, xt, "state"):
        for attempt in (lambda: model.query(wrong, xt), lambda: model.update(wrong, x, y)):  # noqa: B023
            with refuses(TypeError, "expected a state of"):
                attempt()


def test_removing_what_was_never_there_is_refused(constant: NeuralProcess) -> None:
    x, y, xt = task()
    state, other = constant.condition(x[:, :10], y[:, :10]), constant.condition(x[:, 10:], y[:, 10:])
    before = tensors(state)
    with pytest.raises(ValueError, match=r"cannot remove \[20, 20\] points from a state of \[10, 10\]"):
        state.remove(other)
    assert_unchanged(state, before)
    assert bool(constant.query(state, xt).mean.isfinite().all())


# States and weights belong together


def all_ways(model: NeuralProcess, x: Tensor, y: Tensor) -> dict[str, Any]:
    return {
        "condition": model.condition(x, y),
        "chunks": model.condition(x, y, chunk=7),
        "observe": model.observe(x, y),
        "generator": model.condition_chunks(pieces(x, y)),
        "update": model.update(model.empty(2), x, y),
        "merge": model.empty(2).merge(model.observe(x, y)),
    }


@pytest.mark.parametrize("way", ["condition", "chunks", "observe", "generator", "update", "merge"])
def test_a_state_of_other_weights_is_refused(constant_factory: Factory, way: str) -> None:
    model, other = built(constant_factory), constant_factory().eval().requires_grad_(False)
    x, y, xt = task()
    state = all_ways(model, x, y)[way]
    before = tensors(state)
    for attempt in (
        lambda: other.query(state, xt),
        lambda: other.update(state, x, y),
        lambda: other.condition_chunks([(x, y)], initial=state),
    ):
        with pytest.raises(
            ValueError, match=r"made by other weights \(fingerprint \w{16}, this model \w{16}\)"
        ):
            attempt()
    assert_unchanged(state, before)
    with pytest.raises(ValueError, match="cannot merge states made by different weights"):
        state.merge(other.condition(x, y))


def change_in_place(parameter: torch.nn.Parameter) -> None:
    with torch.no_grad():
        parameter.mul_(1.5)


def test_the_fingerprint_is_that_of_the_weights_a_state_depends_on(
    constant: NeuralProcess,
) -> None:
    x, y, xt = task()
    state = constant.condition(x, y)
    first = constant.fingerprint()
    assert state.fingerprint == first == constant.fingerprint()
    observing = {id(p) for p in constant.observing_parameters()}
    others = [p for p in constant.parameters() if id(p) not in observing]
    change_in_place(others[0])
    assert constant.fingerprint() == first  # the decoder may change: states stay valid
    constant.query(state, xt)
    for parameter in constant.observing_parameters():
        before = constant.fingerprint()
        if bool(parameter.any()):
            change_in_place(parameter)
            assert constant.fingerprint() != before
    with pytest.raises(ValueError, match="made by other weights"):
        constant.query(state, xt)


def test_every_parameter_a_state_depends_on_is_named(constant_factory: Factory) -> None:
    model = built(constant_factory).requires_grad_(True)
    x, y, _ = task()
    state = model.condition(x, y)
    torch.cat([t.flatten() for t in state.tensors().values() if t.requires_grad]).square().sum().backward()
    used = {id(p) for p in model.parameters() if p.grad is not None and bool(p.grad.any())}
    assert used == {id(p) for p in model.observing_parameters()}


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("training", [True, False])
def test_states_of_other_weights_are_refused_in_every_mode(
    constant_factory: Factory, grad: bool, training: bool
) -> None:
    a, b = (built(constant_factory).requires_grad_(True).train(training) for _ in range(2))
    with torch.no_grad():
        for parameter in b.observing_parameters():
            parameter.mul_(1.1)
    x, y, xt = task()
    with torch.set_grad_enabled(grad):
        state = a.update(a.update(a.empty(x.shape[0]), x, y), x, y)
        assert state.fingerprint == a.condition(x, y).fingerprint == a.fingerprint()
        for wrong in (
            lambda: b.query(state, xt),
            lambda: b.update(state, x, y),
            lambda: b.condition_chunks([(x, y)], initial=state),
            lambda: b.condition(x, y).merge(state),
        ):
            with pytest.raises(ValueError, match=r"other weights|different weights"):
                wrong()


def test_a_step_of_training_gives_states_a_new_name(constant_factory: Factory) -> None:
    model = built(constant_factory).requires_grad_(True).train()
    x, y, xt = task()
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
    before = model.condition(x, y)
    model.query(before, xt).mean.sum().backward()
    optimiser.step()
    with pytest.raises(ValueError, match="other weights"):
        model.query(before, xt)
    assert model.query(before.signed(None), xt).mean.isfinite().all()  # at one's own risk
    assert model.condition(x, y).fingerprint not in (before.fingerprint, None)


@torch.no_grad()
def test_what_nobody_knows_stays_unknown(constant_factory: Factory) -> None:
    """A state of unknown weights must not come out of an update with a name it has no right to."""
    model = built(constant_factory)
    x, y, _ = task()
    unknown = model.condition(x, y).signed(None)
    assert model.update(unknown, x, y).fingerprint is None
    assert model.update(unknown, x[:, :1], y[:, :1]).fingerprint is None


def test_a_cmanp_refuses_the_state_of_another_shape_of_model() -> None:
    model = small_cmanp().eval().requires_grad_(False)
    x, y, xt = task()
    for settings in ({"depth": 1}, {"num_slots": 5}, {"num_heads": 4}, {"dim": 8}):
        other = small_cmanp(**settings).eval().requires_grad_(False)
        message = r"this state is of another model: it has \(depth, heads, slots, channels\)"
        for attempt in (
            lambda: model.query(other.condition(x, y), xt),  # noqa: B023
            lambda: model.update(other.condition(x, y), x, y),  # noqa: B023
            lambda: model.condition_chunks([(x, y)], initial=other.condition(x, y)),  # noqa: B023
        ):
            with pytest.raises(ValueError, match=message):
                attempt()


def test_a_state_on_another_device_is_refused() -> None:
    model = small_cmanp().eval().requires_grad_(False)
    x, y, xt = task()
    state = model.condition(x, y)
    elsewhere = replace(state, value=state.value.to("meta"), lse=state.lse.to("meta"))
    with pytest.raises(ValueError, match=r"the state is on meta, the model on cpu: use state.to\('cpu'\)"):
        model.query(elsewhere, xt)


def test_a_state_of_another_precision_is_refused_where_it_would_be_mixed() -> None:
    model = small_cmanp().eval().requires_grad_(False)
    x, y, xt = task()
    single = model.condition(x, y).to(dtype=torch.float32)
    with pytest.raises(ValueError, match=r"cannot merge states that differ: .*float32 .*float64"):
        model.update(single, x, y)
    assert_predicts(model.query(single, xt), model.query(model.condition(x, y), xt))


# Files


def test_a_model_comes_back_from_its_folder(model: NeuralProcess, tmp_path: Path) -> None:
    x, y, xt = task()
    model.save_pretrained(tmp_path / "deep" / "model")
    again = type(model).from_pretrained(tmp_path / "deep" / "model")
    assert not again.training
    assert again.config == model.config
    assert again.fingerprint() == model.fingerprint()
    with torch.no_grad():
        expected = model.query(model.condition(x, y), xt)
        assert_predicts(again.query(again.condition(x, y), xt), expected, 0.0)
        assert_predicts(again.query(model.condition(x, y), xt), expected, 0.0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_model_comes_back_in_its_own_precision(
    model: NeuralProcess, tmp_path: Path, dtype: torch.dtype
) -> None:
    model.to(dtype).save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path)
    for one, other in zip(again.parameters(), model.parameters(), strict=True):
        assert one.dtype == dtype
        assert torch.equal(one, other)
    assert again.fingerprint() == model.fingerprint()


def test_a_state_comes_back_from_its_file(model: NeuralProcess, tmp_path: Path) -> None:
    x, y, xt = task()
    state = model.condition(x, y)
    state.save(tmp_path / "state")
    again = type(state).load(tmp_path / "state")
    assert_unchanged(again, tensors(state))
    assert_predicts(model.query(again, xt), model.query(state, xt), 0.0)
    assert again.fingerprint == state.fingerprint
    more = model.update(again, x, y)
    assert_predicts(model.query(more, xt), model.query(model.update(state, x, y), xt), 0.0)


def test_a_state_file_remembers_its_weights(constant_factory: Factory, tmp_path: Path) -> None:
    model, other = built(constant_factory), constant_factory().eval().requires_grad_(False)
    x, y, xt = task()
    model.condition(x, y).save(tmp_path / "state")
    again = type(model.empty()).load(tmp_path / "state")
    with pytest.raises(ValueError, match="made by other weights"):
        other.query(again, xt)


def test_folders_that_hold_no_model_are_refused(model: NeuralProcess, tmp_path: Path) -> None:
    load = type(model).from_pretrained
    with pytest.raises(FileNotFoundError, match="needs a folder that save_pretrained wrote"):
        load(tmp_path)
    model.save_pretrained(tmp_path)
    config = tmp_path / "config.json"
    good = config.read_text()
    for content in ("{", "[]", "{}", '{"model": "cmanp"}', "3"):
        config.write_text(content)
        with pytest.raises(ValueError, match=r"config.json is damaged or of another kind"):
            load(tmp_path)
    config.write_text(json.dumps({**json.loads(good), "model": "other"}))
    with pytest.raises(ValueError, match=f"holds a 'other', not a '{model.name}'"):
        load(tmp_path)
    content = json.loads(good)
    settings = content["config"]
    changed = {"colour": 3, "dim_x": 5} | ({"num_heads": 1} if "num_heads" in settings else {})
    for name, value in changed.items():
        config.write_text(json.dumps({**content, "config": {**settings, name: value}}))
        with pytest.raises(ValueError, match=r"config.json is not the one that was saved with these weights"):
            load(tmp_path)
    weights, header = read_tensors(tmp_path / "model.safetensors", kind="constmem.model", version=1)
    header.pop("config")  # as in files of before
    write_tensors(tmp_path / "model.safetensors", weights, header)
    for change, message in (
        ({"colour": 3}, r"has settings that .* does not know"),
        ({"dim_x": 5}, r"do not fit its config.json"),
        ({"dim_x": 10**15}, r"dim_x is 1000000000000000, far beyond what the weights"),
        ({next(name for name in settings if name.endswith("depth")): 10**6}, "far beyond"),
    ):
        config.write_text(json.dumps({**content, "config": {**settings, **change}}))
        with pytest.raises(ValueError, match=message):
            load(tmp_path)
    config.write_text("[" * 10**5)
    with pytest.raises(ValueError, match="damaged or of another kind"):
        load(tmp_path)
    config.write_text(good)
    name = next(name for name, tensor in weights.items() if tensor.is_floating_point())
    for bad in (torch.nan, torch.inf):
        damaged = weights | {name: torch.full_like(weights[name], bad)}
        write_tensors(tmp_path / "model.safetensors", damaged, header)
        with pytest.raises(ValueError, match="holds NaN or infinity"):
            load(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"expected a constmem.model"):
        load(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"nothing of the kind")
    with pytest.raises(ValueError, match="not a readable safetensors file"):
        load(tmp_path)


# PyTorch's own tools


@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")
@pytest.mark.parametrize("grad", [True, False])
def test_tasks_may_be_mapped_over(model: NeuralProcess, grad: bool) -> None:
    x, y, xt = task(b=3)

    def mean(x: Tensor, y: Tensor, xt: Tensor) -> Tensor:
        return model.query(model.condition(x[None], y[None]), xt[None]).mean[0]

    with torch.set_grad_enabled(grad):
        found = torch.func.vmap(mean, randomness="same")(x, y, xt)  # of the versions that a BNP draws
        expected = model.query(model.condition(x, y), xt).mean
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


def test_sparse_points_are_refused_with_advice(model: NeuralProcess, refuses: Refuses) -> None:
    x, y, _ = task()
    with refuses(TypeError, r"x is torch.sparse_coo: .* use x.to_dense\(\)"):
        model.condition(x.to_sparse(), y)


@pytest.mark.parametrize(
    ("points", "advice"),
    [
        (np.zeros((5, DIM_X)), r"not ndarray: torch.as_tensor\(x, dtype=torch.float32\)"),
        ([[0.0, 1.0]], r"not list: torch.as_tensor\(x, dtype=torch.float32\)"),
        (torch.zeros(1, 5, DIM_X).long(), r"not torch.int64: use x.float\(\)"),
        (torch.zeros(5, DIM_X), r"if these are the points of one task, x.reshape\(1, -1, 2\)"),
        (torch.zeros(DIM_X), r"if these are the points of one task, x.reshape\(1, -1, 2\)"),
        (torch.zeros(1, 5, 7), r"\(batch, points, 2\) is needed$"),
    ],
)
def test_advice_on_points_of_another_kind_is_right(
    model: NeuralProcess, refuses: Refuses, points: Any, advice: str
) -> None:
    with refuses((TypeError, ValueError), advice):
        model.condition(points, torch.zeros(1, 5, DIM_Y))


@pytest.mark.parametrize("name", ["gp", "emnist"])
@torch.no_grad()
def test_data_far_from_what_shipped_weights_know_are_warned_of_once(name: str) -> None:
    def asked(x: float, y: float) -> None:
        model = NeuralProcess.from_pretrained(name)
        xs, ys = torch.full((1, 3, model.dim_x), x), torch.full((1, 3, model.dim_y), y)
        model.query(model.condition(xs, ys), xs)
        model.query(model.condition(xs, ys), xs)

    asked(0.9, -0.4)  # no warning, which would be an error here
    for x, y, channel in ((27.0, 0.1, "x"), (0.1, 255.0, "y")):
        with pytest.warns(UserWarning, match=f"channel 0 of {channel} goes from .* trained on") as told:
            asked(x, y)
        assert len(told) == 1


# Building


@pytest.mark.parametrize(
    "settings",
    [{"dim_x": 0}, {"dim_y": -1}, {"depth": 0}, {"num_slots": 0}, {"num_latents": 0}, {"hidden": 0}],
)
def test_a_cmanp_of_no_size_is_refused(settings: dict[str, int]) -> None:
    name, number = next(iter(settings.items()))
    with pytest.raises(ValueError, match=f"{name} must be a whole number of at least 1, not {number}"):
        CMANP(**{"dim_x": 1, "dim_y": 1, **settings})  # type: ignore[arg-type]


def test_a_cmanp_of_impossible_settings_is_refused(refuses: Refuses) -> None:
    with refuses(ValueError, "dim=64 does not split into num_heads=5"):
        CMANP(dim_x=1, dim_y=1, num_heads=5)
    with refuses(ValueError, "std must be 'bounded' or 'exp', not 'wide'"):
        CMANP(dim_x=1, dim_y=1, std="wide")  # type: ignore[arg-type]
    with refuses(ValueError, "residual must be 'normed' or 'raw'"):
        CMANP(dim_x=1, dim_y=1, residual="none")  # type: ignore[arg-type]
    with refuses(ValueError, "an MLP needs a depth of at least 1, not 0"):
        CMANP(dim_x=1, dim_y=1, embed_depth=0)


@pytest.mark.parametrize("residual", ["normed", "raw"])
@pytest.mark.parametrize("std", ["bounded", "exp"])
def test_a_cmanp_of_every_kind_updates_as_it_conditions(residual: str, std: str) -> None:
    model = built(lambda: small_cmanp(residual=residual, std=std))
    x, y, xt = task()
    found = model.query(model.update(model.condition(x[:, :11], y[:, :11]), x[:, 11:], y[:, 11:]), xt)
    assert_predicts(found, model.query(model.condition(x, y), xt), 3e-5)
    if std == "bounded":
        assert bool((found.stddev >= 0.05).all())


def test_the_two_standard_deviations_differ() -> None:
    bounded, free = built(lambda: small_cmanp(std="bounded")), built(lambda: small_cmanp(std="exp"))
    x, y, xt = task()
    one, other = (m.query(m.condition(x, y), xt) for m in (bounded, free))
    torch.testing.assert_close(one.mean, other.mean)
    raw = other.stddev.log()
    torch.testing.assert_close(one.stddev, 0.05 + 0.95 * raw.exp().log1p())


# Compiling


@pytest.mark.compiles
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # the compiler's own
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize(  # that every model's loss compiles is a law of its own (test_losses.py)
    "factory", [small_cmanp, factory_of("cnp")]
)
def test_a_training_step_in_chunks_compiles(factory: Factory) -> None:
    x, y, xt = (t.double() for t in task(12))
    yt = torch.randn(2, 7, DIM_Y).double()
    torch._dynamo.reset()
    losses, grads = [], []
    for compiled in (True, False):
        model = built(factory).double().requires_grad_(True).train()

        def loss(model: NeuralProcess = model) -> Tensor:
            out: Tensor = -model(x, y, xt, None, chunk=7).log_prob(yt).sum(-1).mean()
            return out

        optimiser = torch.optim.SGD(model.parameters(), lr=0.01)
        step = torch.compile(loss, backend="aot_eager") if compiled else loss
        for _ in range(2):
            optimiser.zero_grad()
            value = step()
            value.backward()
            optimiser.step()
        losses.append(value.detach())
        grads.append([p.grad for p in model.parameters()])
    torch.testing.assert_close(losses[0], losses[1], atol=1e-8, rtol=0)
    for found, expected in zip(*grads, strict=True):
        torch.testing.assert_close(found, expected, atol=1e-7, rtol=1e-7)


@pytest.mark.compiles
@pytest.mark.parametrize(
    "factory", [small_cmanp, factory_of("cnp"), factory_of("lbanp")]
)  # every kind of state
def test_conditioning_and_querying_compile(factory: Factory) -> None:
    model = built(factory)
    x, y, xt = task()

    def predict(x: Tensor, y: Tensor, xt: Tensor) -> Tensor:
        mean: Tensor = model.query(model.condition(x, y, chunk=7), xt).mean
        return mean

    torch._dynamo.reset()
    compiled = torch.compile(predict, backend="eager")
    for n in (x.shape[1], 8, 6):  # sizes become symbols at the second
        points = x[:, :n], y[:, :n], xt
        torch.testing.assert_close(compiled(*points), predict(*points), atol=1e-5, rtol=0)

"""What neural processes take: streams of chunks; and what they refuse, by name."""

import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from constmem import ConditioningError, NeuralProcess
from constmem.core import checks
from tests.conftest import Refuses
from tests.laws.points import (
    Factory,
    assert_predicts,
    assert_unchanged,
    built,
    pieces,
    task,
    tensors,
)

# Streams of chunks


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

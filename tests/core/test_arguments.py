"""Arguments that no state is made of are refused in words, before anything is computed."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from constmem import CMANP, AttentionState, Decay, Events, Stream
from constmem.core.moments import Moments
from constmem.data import Table
from constmem.neural_processes import MODELS
from tests.conftest import Refuses
from tests.laws import models as made

Q, K = torch.randn(2, 3, 4), torch.randn(1, 2, 5, 4)


@pytest.mark.parametrize(
    ("q", "k", "v", "message"),
    [
        (None, K, K, "q must be a tensor"),
        (Q, K.long(), K, "k holds torch.int64"),
        (Q, K, K.to_sparse(), "v is torch.sparse_coo"),
        (Q, K, K.to("meta"), "v holds torch.float32 on meta"),
        (Q, K, K[..., :3], "q, k and v have shapes"),
        (Q, K[:, :1], K[:, :1], "q, k and v have shapes"),
        (Q[..., :2], K, K, "q, k and v have shapes"),
        (Q, K[:, :, :4], K, "q, k and v have shapes"),
    ],
)
def test_queries_keys_and_values_that_do_not_fit_are_refused(
    q: Any, k: Any, v: Any, message: str, refuses: Refuses
) -> None:
    with refuses((TypeError, ValueError), message):
        AttentionState.observe(q, k, v)


@pytest.mark.parametrize(
    "wrong", [None, [[1.0]], torch.zeros(3), torch.zeros(3, 2).to_sparse(), torch.zeros(3, 2) * 1j]
)
def test_features_that_are_no_rows_of_numbers_are_refused(wrong: Any, refuses: Refuses) -> None:
    with refuses((TypeError, ValueError), ""):
        Moments.observe(wrong, torch.zeros(3, 1))


@pytest.mark.parametrize("chunk", [0, -1, "3", 2.0, True])
@pytest.mark.parametrize(
    "call",
    [
        lambda m, e, c: m.condition(e, chunk=c),
        lambda m, e, c: m.update(m.condition(e), e.times + 1e4, chunk=c),
        lambda m, e, c: m.log_prob(e, chunk=c),
        lambda m, e, c: m.forecast(e, chunk=c),
        lambda m, e, c: m.loss(e, chunk=c),
    ],
)
def test_a_chunk_of_events_is_a_whole_number_of_at_least_one(
    call: Callable[..., Any], chunk: Any, refuses: Refuses
) -> None:
    with refuses(ValueError, "chunk must be a whole number of at least 1"):
        call(made.small("gru"), made.stream(4), chunk)


def test_sparse_masks_and_times_are_refused(refuses: Refuses) -> None:
    model, (x, y, _, _) = made.small("cnp"), made.data(n=4)
    mask = torch.ones(2, 4, dtype=torch.bool)
    with refuses(TypeError, r"mask is torch.sparse_coo: .*use mask.to_dense"):
        model.condition(x, y, mask=mask.to_sparse())
    process = made.small("gru")
    with refuses(TypeError, r"times is torch.sparse_coo"):
        process.update(process.empty(0.0), torch.ones(1, 1).to_sparse())


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Events.from_arrival_times(3, unit="hour"), "times must be a list of sequences"),
        (lambda: Events.from_gaps(None, unit="hour"), "gaps must be a list of sequences"),
        (
            lambda: Events.from_arrival_times([[1.0]], marks=7, unit="hour", num_marks=2),
            "marks must be a list",
        ),
        (lambda: Events.from_arrival_times([[1.0]], unit="hour", num_marks="2"), "num_marks must be a whole"),
        (lambda: Decay("5"), "half_life must be a positive number"),
        (lambda: Stream(made.small("gru"), start=[1.0, 2.0]), r"start has shape \(2,\), but one number"),
        (lambda: Stream(made.small("cnp")).predict(torch.zeros(1, 2).to_sparse()), "xt is torch.sparse_coo"),
        (lambda: Table.of(range(60), range(60), 3), "groups must be one number or text for each row"),
        (lambda: CMANP.from_pretrained("gp", device=[]), r"there is no device '\[\]' here"),
    ],
)
def test_what_a_caller_may_hand_in_by_mistake_is_named(
    call: Callable[[], Any], message: str, refuses: Refuses
) -> None:
    with refuses((TypeError, ValueError), message):
        call()


def test_a_time_to_sample_until_is_one_number_or_one_for_each_stream(refuses: Refuses) -> None:
    process = made.small("gru")
    state = process.condition(made.stream(4))
    assert process.sample(state, until=float(state.last_time) + 1.0).t_end is not None
    with refuses(ValueError, r"until has shape \(2,\), but one number is needed, or 1"):
        process.sample(state, until=[1e6, 2e6])


def test_targets_of_a_training_call_that_are_no_tensor_are_named(refuses: Refuses) -> None:
    x, y, _, _ = made.data(n=4)
    with refuses(TypeError, "xt must be a floating-point tensor, not dict"):
        made.small("cnp")(x, y, {"a": 1})


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.int64, torch.bool])
def test_weights_of_points_may_be_of_any_real_kind(dtype: torch.dtype) -> None:
    x, y, _, _ = made.data(n=40)
    weight = torch.zeros(x.shape[:2], dtype=dtype)
    model = made.small("cmanp")
    found, plain = model.observe(x, y, log_weight=weight), model.observe(x, y)
    assert torch.allclose(found.value, plain.value, atol=1e-6)
    assert torch.allclose(found.lse, plain.lse, atol=1e-6)
    direct = AttentionState.observe(Q, K, K, log_weight=torch.zeros(1, 5, dtype=dtype))
    assert torch.allclose(direct.lse, AttentionState.observe(Q, K, K).lse, atol=1e-6)


@pytest.mark.parametrize("change", [lambda w: w * 1j, lambda w: w.to_sparse()])
def test_weights_of_points_that_are_no_plain_real_numbers_are_refused(
    change: Callable[[torch.Tensor], torch.Tensor], refuses: Refuses
) -> None:
    x, y, _, _ = made.data(n=4)
    with refuses((TypeError, ValueError), "of real numbers|to_dense"):
        made.small("cmanp").observe(x, y, log_weight=change(torch.zeros(x.shape[:2])))


def test_a_decay_of_other_tasks_than_a_state_has_is_refused(refuses: Refuses) -> None:
    x, y, _, _ = made.data(n=4)
    state = made.small("cmanp").condition(x, y)
    for wrong in (torch.zeros(state.batch + 1), torch.zeros(0), torch.zeros(state.batch, 2)):
        with refuses(ValueError, "log_weight has shape"):
            state.decay(wrong)
    with refuses(TypeError, "real numbers are needed"):
        state.decay(torch.zeros(state.batch) * 1j)
    assert torch.equal(state.decay(torch.full((state.batch,), -1.0)).lse, state.decay(-1.0).lse)
    moments = Moments.observe(torch.randn(2, 5, 3), torch.randn(2, 5, 1))
    with refuses(ValueError, "factor has shape"):
        moments.decay(torch.ones(3))


def test_a_bound_of_removal_that_is_no_number_is_refused(refuses: Refuses) -> None:
    x, y, _, _ = made.data(n=4)
    model = made.small("cmanp")
    with refuses(ValueError, "max_share=nan"):
        model.condition(x, y).remove(model.condition(x[:, :1], y[:, :1]), max_share=float("nan"))


@pytest.mark.parametrize("change", [lambda a: a[::-1], lambda a: a.astype(">f8"), lambda a: a[::-1].tolist()])
def test_arrays_in_any_order_of_rows_and_bytes_are_taken(change: Callable[[Any], Any]) -> None:
    a = np.linspace(0.0, 1.0, 5)
    model = made.small("cmanp")
    model = type(model)(**model.config | {"dim_x": 1, "dim_y": 1}).eval()
    plain, other = Stream(model), Stream(model)
    plain.observe(np.array(change(a), dtype=np.float64), a)
    other.observe(change(a), a)
    assert torch.equal(other.state.value, plain.state.value)


@pytest.mark.parametrize(
    "given", [torch.ones(3) * 1j, np.ones(3) * 1j, np.ma.array(np.ones(3), mask=[1, 0, 0])]
)
def test_numbers_of_which_a_part_would_be_lost_are_refused(given: Any, refuses: Refuses) -> None:
    model = made.small("cmanp")
    stream = Stream(type(model)(**model.config | {"dim_x": 1, "dim_y": 1}).eval())
    for x, y in ((given, torch.ones(3)), (torch.ones(3), given)):
        with refuses(TypeError, "real numbers are needed|mask would be lost"):
            stream.observe(x, y)
    with refuses(TypeError, "real numbers are needed|mask would be lost"):
        stream.predict(given)
    assert stream.count.item() == 0


@pytest.mark.parametrize("name", sorted(MODELS))
def test_the_usual_precision_of_new_tensors_changes_nothing(name: str) -> None:
    model, (xc, yc, xt, yt) = made.small(name), made.data(n=6)

    def answers() -> list[torch.Tensor]:
        with torch.no_grad():
            found = model.query(model.update(model.condition(xc, yc), xc[:, :1], yc[:, :1]), xt)
        drawn = torch.Generator().manual_seed(0)
        return [found.mean, found.stddev, model.loss(xc, yc, xt, yt, generator=drawn).detach()]

    expected = answers()
    torch.set_default_dtype(torch.float64)
    try:
        found = answers()
    finally:
        torch.set_default_dtype(torch.float32)
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other.to(one))


def test_nothing_can_be_removed_from_a_batch_of_no_tasks() -> None:
    x, y, _, _ = made.data(n=4)
    state = made.small("cmanp").condition(x, y)
    assert state.select(slice(0, 0)).remove(state.select(slice(0, 0))).batch == 0

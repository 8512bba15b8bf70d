"""States of event models: the last events they remember, and files, of which damaged ones are refused."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from constmem.core.files import write_tensors
from tests.laws.models import KINDS, small, stream

every_model = pytest.mark.parametrize("kind", KINDS)
Tensors = dict[str, Tensor]


def without(name: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {key: t for key, t in tensors.items() if key != name}


def put(name: str, change: Callable[[Tensor], Tensor]) -> Callable[[Tensors], Tensors]:
    return lambda tensors: tensors | {name: change(tensors[name]).contiguous()}


def renamed(tensors: Tensors) -> Tensors:
    return {"mamory" + key[6:] if key.startswith("memory") else key: t for key, t in tensors.items()} | {
        "stort": tensors["start"].clone()
    }


DAMAGE: dict[str, Callable[[Tensors], Tensors]] = {
    "a clock that is missing": without("last_gap"),
    "tensors that nobody knows": renamed,
    "a clock of another batch": put("last_time", lambda t: t[:1]),
    "a clock of more axes": put("start", lambda t: t[:, None]),
    "a clock in float32": put("start", Tensor.float),
    "a count below zero": put("count", Tensor.neg),
    "a mark that cannot be": put("last_mark", lambda t: t - 9),
    "a time that is not finite": put("last_time", lambda t: t * torch.nan),
    "another batch throughout its memory": lambda tensors: (
        {key: torch.cat([t, t]) if key.startswith("memory") else t for key, t in tensors.items()}
        | {"last_gap": tensors["last_gap"][:1]}
    ),
}


@every_model
@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_state_is_refused(kind: str, damage: str, tmp_path: Path) -> None:
    model: Any = small(kind)
    with torch.no_grad():
        state = model.condition(stream(6, 6))
    header = {"format": state.KIND, "version": "1", "fingerprint": state.fingerprint or ""}
    path = tmp_path / "state"
    write_tensors(path, DAMAGE[damage](state.tensors()), header)
    with pytest.raises(ValueError, match="damaged"):
        type(state).load(path)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "trivial"])
def test_a_memory_that_is_damaged_or_of_another_model_is_refused(kind: str) -> None:
    model = small(kind)
    with torch.no_grad():
        state = model.condition(stream(6, 6))
    kept = state.tensors()
    for name in (name for name in kept if name.startswith("memory.")):
        if name.startswith("memory.recent") or name in ("memory.times", "memory.marks"):
            gone = {key: t for key, t in kept.items() if key != name}  # all of these, or none
        else:
            gone = kept | {name: kept[name][..., None]}
        with pytest.raises(ValueError, match=r"lacks|does not fit"):
            type(state).of_tensors(gone)
    other = next(small(name) for name in ("cmhp", "gru") if name != kind.partition("-")[0])
    with pytest.raises(ValueError, match="lacks"):
        type(other.condition(stream(3))).of_tensors(kept)


@pytest.mark.parametrize(
    ("kind", "change"), [("gru", {"dim": 6}), ("thp", {"dim": 6}), ("cmhp", {"num_slots": 4})]
)
def test_a_state_of_another_size_is_refused_even_if_nobody_knows_its_weights(kind: str, change: Any) -> None:
    model, other = small(kind), small(kind, **change)
    with torch.no_grad():
        state = model.condition(stream(5)).signed(None)
        model.query(state)
        with pytest.raises(ValueError, match="state is of another model"):
            other.query(state)


def test_the_events_of_a_transformers_state_fit_its_cache() -> None:
    model = small("thp")
    with torch.no_grad():
        tensors = model.condition(stream(6)).tensors()
    for name, part in (("times", slice(5)), ("mask", slice(5)), ("marks", slice(4))):
        with pytest.raises(ValueError, match="do not fit each other"):
            model.state_type.of_tensors(tensors | {f"memory.{name}": tensors[f"memory.{name}"][:, part]})


def test_values_and_normalisers_of_a_constant_state_fit_each_other() -> None:
    model = small("cmhp")
    with torch.no_grad():
        tensors = model.condition(stream(6)).tensors()
    for name in ("memory.lse", "memory.recent_gaps"):
        with pytest.raises(ValueError, match="do not fit each other"):
            model.state_type.of_tensors(tensors | {name: tensors[name][..., :-1]})


# The last events


def part(times: list[float], marks: list[int], last_time: float | None = None) -> Any:
    """The state of some events of a stream watched from 0 on, whose event before them was at `last_time`."""
    model = small("cmhp")
    start = torch.zeros(1, dtype=torch.float64)
    state = model.empty(start, last_time=None if last_time is None else start + last_time)
    with torch.no_grad():
        return model.update(state, torch.tensor([times]).double(), torch.tensor([marks]))


def remembered(state: Any) -> list[list[float]]:
    gaps, marks = state.last
    return [gaps[0].tolist(), marks[0].tolist()]


def test_simultaneous_events_across_a_cut_keep_their_order_in_any_order_of_merging() -> None:
    whole = part([1.0, 5.0, 5.0, 6.0], [0, 1, 2, 0])
    first, second = part([1.0, 5.0], [0, 1]), part([5.0, 6.0], [2, 0], last_time=5.0)
    for merged in (first.merge(second), second.merge(first)):
        assert remembered(merged) == remembered(whole) == [[1.0, 4.0, 0.0, 1.0], [0, 1, 2, 0]]
    ends = part([1.0, 5.0], [0, 1]).merge(part([5.0], [2], last_time=5.0))
    assert int(ends.last_mark) == 2


def test_removing_forgets_the_events_of_the_part_and_no_others() -> None:
    first, second = part([1.0, 5.0], [0, 1]), part([5.0, 6.0], [2, 0], last_time=5.0)
    assert remembered(first.merge(second).remove(first)) == remembered(second)
    before, middle, after = (
        part([1.0, 2.0], [0, 1]), part([3.0], [2], last_time=2.0), part([4.0], [1], last_time=3.0)
    )  # fmt: skip
    assert remembered(before.merge(middle).merge(after).remove(middle)) == remembered(before.merge(after))


def test_a_state_of_nothing_can_be_saved_and_others_share_no_memory(tmp_path: Path) -> None:
    nothing = small("cmhp").empty(torch.zeros(1, dtype=torch.float64))
    nothing.save(tmp_path / "a")
    assert remembered(type(nothing).load(tmp_path / "a")) == [[0.0] * 4, [-2] * 4]
    many = part([0.01 * i for i in range(1, 500)], [0] * 499)
    assert many.memory["recent_times"].untyped_storage().nbytes() == 3 * 8


def test_states_that_remember_other_numbers_of_events_are_not_merged() -> None:
    four, two = (
        small("cmhp", last_events=k).train().empty(torch.zeros(1, dtype=torch.float64)) for k in (4, 2)
    )
    with pytest.raises(ValueError, match="cannot merge"):
        four.merge(two)

"""The models that constant memory is compared with: what is theirs alone."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.laws.models import small, stream


def test_a_transformer_remembers_every_event_and_says_so() -> None:
    model = small("thp")
    few, many = (model.condition(stream(n)).nbytes for n in (10, 1000))
    per_event = 2 * 2 * 8 * 8 + 1 + 8 + 8  # layers, key and value, width, float64; mask, time and mark
    assert many - few == 990 * per_event


def test_dropout_comes_from_the_generator() -> None:
    model = small("thp", dropout=0.5).train()
    events = stream(30)
    torch.manual_seed(3)
    before = torch.get_rng_state()
    losses = [
        float(model.loss(events, generator=torch.Generator().manual_seed(s)).detach()) for s in (1, 1, 2)
    ]
    assert losses[0] == losses[1] != losses[2]
    assert torch.equal(torch.get_rng_state(), before)


def test_what_was_dropped_forwards_is_dropped_backwards_too() -> None:
    """The gradient through recomputed chunks is that of the very loss, by finite differences."""
    model, events = small("thp", dropout=0.5).train(), stream(30)

    def loss() -> Tensor:
        return model.loss(events, chunk=7, generator=torch.Generator().manual_seed(1))  # type: ignore[no-any-return]

    loss().backward()
    direction = torch.randn_like(model.marks.table)
    step = 1e-6
    sides = []
    for sign in (1, -1):
        with torch.no_grad():
            model.marks.table.add_(sign * step * direction)
            sides.append(float(loss()))
            model.marks.table.sub_(sign * step * direction)
    slope = (sides[0] - sides[1]) / (2 * step)
    assert float((model.marks.table.grad * direction).sum()) == pytest.approx(slope, rel=1e-4)


@torch.no_grad()
def test_keys_and_values_of_a_later_part_are_computed_once_it_is_known_what_came_before() -> None:
    model, events = small("thp"), stream(9, 4)
    first, later = (
        model.observe(events.window(0, 5)),
        model.observe(events.window(5, 9), start=events.t_start),
    )
    whole, merged = model.observe(events), first.merge(later)
    assert merged.cached == 5
    assert merged.memory["mask"].sum(1).tolist() == [9, 4]
    again = model.update(merged, merged.last_time + 1)
    assert again.cached == 10
    expected = model.update(whole, whole.last_time + 1)
    for b, n in enumerate((10, 5)):
        for name in ("cache", "times", "marks"):
            found, wanted = (s.memory[name][b][s.memory["mask"][b]] for s in (again, expected))
            assert len(found) == n
            torch.testing.assert_close(found, wanted)
    with pytest.raises(ValueError, match="merge in order of time"):
        later.merge(first)


@torch.no_grad()
def test_a_transformers_state_of_an_earlier_version_goes_on_but_does_not_merge() -> None:
    model, events = small("thp"), stream(6, 6)
    state = model.condition(events)
    old = {name: t for name, t in state.tensors().items() if name not in ("memory.times", "memory.marks")}
    older = model.state_type.of_tensors(old, state.fingerprint)
    after = state.last_time + 1
    assert torch.equal(
        model.query(model.update(older, after)).mean, model.query(model.update(state, after)).mean
    )
    for one, other in ((older, state), (state, older)):
        with pytest.raises(ValueError, match="earlier version"):
            one.merge(replace(other))

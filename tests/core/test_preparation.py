"""What is computed from weights follows them, however they are written to: right, or refused."""

import copy
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import reduce
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize, prune

from constmem import CMANP
from constmem.core.observation import Observation
from constmem.core.state import AttentionState
from constmem.kernels import Snapshot, cpu
from tests.laws import models as made

DEVICES = [
    pytest.param("cpu", id="machine code"),
    pytest.param("operators", id="operators"),
    pytest.param(
        "cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]
    ),
]


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "operators":
        monkeypatch.setattr(cpu, "library", lambda: None)
        return "cpu"
    return str(request.param)


def small(device: str = "cpu") -> CMANP:
    sizes = {"dim": 32, "depth": 2, "num_slots": 20, "num_latents": 4, "hidden": 16, "num_heads": 2}
    model = CMANP(dim_x=1, dim_y=1, **sizes).eval()  # type: ignore[arg-type]
    return model.to(device)


def points(device: str = "cpu") -> tuple[Tensor, Tensor]:
    return torch.randn(2, 9, 1, device=device), torch.randn(2, 9, 1, device=device)


def one_weight(model: CMANP) -> None:
    model.stack.observation.key_value.data[1, 0, 5, 7] += 3.0


def one_bias(model: CMANP) -> None:
    model.embed.layers[2].bias.data[3] += 3.0  # type: ignore[index, operator]


def signs(model: CMANP) -> None:
    model.stack.observation.key_value.data.neg_()


def exchanged(model: CMANP) -> None:
    query = model.stack.observation.query.data
    query[0] = query[0].flip(0)


def grown(model: CMANP) -> None:
    model.stack.observation.key_value.data.mul_(1.5)


def through_numpy(model: CMANP) -> None:
    if model.device.type == "cpu":
        model.stack.observation.slots.detach().numpy()[1, 3, 4] = 5.0
    else:
        model.stack.observation.slots.data[1, 3, 4] = 5.0


def fused_optimiser(model: CMANP) -> None:
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    torch.optim.Adam(model.parameters(), lr=0.1, fused=True).step()
    model.zero_grad()


def loaded(model: CMANP) -> None:
    model.load_state_dict({name: t + 0.3 for name, t in model.state_dict().items()})


def assigned(model: CMANP) -> None:
    model.load_state_dict({name: t + 0.3 for name, t in model.state_dict().items()}, assign=True)


def copied(model: CMANP) -> None:
    with torch.no_grad():
        model.stack.observation.slots.copy_(torch.randn_like(model.stack.observation.slots))


def swapped(model: CMANP) -> None:
    own = model.stack.observation
    own.query = nn.Parameter(own.query.detach() + 0.3)


def other_data(model: CMANP) -> None:
    model.embed.layers[1].weight.data = torch.randn_like(model.embed.layers[1].weight)  # type: ignore[arg-type]


def transposed(model: CMANP) -> None:
    own = model.stack.observation
    own.query.data = own.query.data.mT  # the same memory, read in another order


def pruned(model: CMANP) -> None:
    prune.l1_unstructured(model.stack.observation, "key_value", amount=0.5)
    prune.random_unstructured(model.embed.layers[1], "weight", amount=0.5)  # type: ignore[arg-type]


def parametrized(model: CMANP) -> None:
    parametrize.register_parametrization(model.stack.observation, "query", nn.Tanh())
    parametrize.register_parametrization(model.embed.layers[1], "weight", nn.Tanh())  # type: ignore[arg-type]


def weight_norm(model: CMANP) -> None:
    layer: Any = nn.utils.parametrizations.weight_norm(model.embed.layers[1])  # type: ignore[arg-type]
    layer.parametrizations.weight.original0.data.mul_(2.0)


WRITES = [
    one_weight, one_bias, signs, exchanged, grown, through_numpy, fused_optimiser, loaded, assigned, copied,
    swapped, other_data, transposed, pruned, parametrized, weight_norm,
]  # fmt: skip


def effective(model: CMANP) -> CMANP:
    """A fresh float64 model with the numbers this one now computes with."""
    fresh = small()
    own = fresh.stack.observation, model.stack.observation
    pairs: list[Any] = [(*own, [name for name, _ in own[0].named_parameters()])]
    pairs += [(a, b, ["weight", "bias"]) for a, b in zip(fresh.embed.layers, model.embed.layers, strict=True)]
    rest = {name: t for name, t in model.state_dict().items() if name in fresh.state_dict()}
    fresh.load_state_dict(rest, strict=False)
    for mine, theirs, names in pairs:
        for name in names:
            masked = hasattr(theirs, f"{name}_orig")  # by pruning
            parts = [f"{name}_orig", f"{name}_mask"] if masked else [name]
            found = reduce(Tensor.mul, [getattr(theirs, part).detach().cpu() for part in parts])
            getattr(mine, name).data = found.clone()
    return fresh.double()


def assert_close(found: AttentionState, expected: AttentionState) -> None:
    torch.testing.assert_close(found.lse.cpu(), expected.lse, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(found.value.cpu(), expected.value, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("write", WRITES)
def test_after_any_write_states_are_those_of_the_new_weights_and_old_ones_are_refused(
    write: Callable[[CMANP], None], device: str
) -> None:
    model, (x, y) = small(device), points(device)
    with torch.no_grad():
        for _ in range(3):  # so that all is kept that may be kept
            old = model.update(model.condition(x, y), x[:, :1], y[:, :1])
        model.query(old, x)
        name = model.fingerprint()
    write(model)
    exact = effective(model)
    wide = x.double().cpu(), y.double().cpu()
    with torch.no_grad():
        for refused in (lambda: model.update(old, x[:, :1], y[:, :1]), lambda: model.query(old, x)):
            with pytest.raises(ValueError, match="other weights"):
                refused()
        new = model.condition(x, y)
        with pytest.raises(ValueError, match="weights"):
            new.merge(old)
        assert new.fingerprint == model.fingerprint() != name
        expected = exact.condition(*wide)
        assert_close(new, expected)
        assert_close(model.observe(x[:, :1], y[:, :1]), exact.observe(wide[0][:, :1], wide[1][:, :1]))
        for _ in range(2):
            new = model.update(new, x[:, :1], y[:, :1])
            expected = exact.update(expected, wide[0][:, :1], wide[1][:, :1])
        assert_close(new, expected)
        mean = model.query(new, x).mean.cpu().double()
        torch.testing.assert_close(mean, exact.query(expected, wide[0]).mean, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("write", [one_weight, one_bias, grown])
def test_a_state_without_a_name_is_updated_with_the_new_weights(
    write: Callable[[CMANP], None], device: str
) -> None:
    model, (x, y) = small(device), points(device)
    with torch.no_grad():
        for _ in range(3):
            state = model.update(model.empty(2), x[:, :1], y[:, :1])
        write(model)
        found = model.update(model.empty(2), x[:, :1], y[:, :1])
        expected = effective(model).observe(x[:, :1].double().cpu(), y[:, :1].double().cpu())
        assert_close(found, expected)
        assert not torch.allclose(found.value, state.value, atol=1e-3)


@pytest.mark.parametrize("way", ["kept weights", "functional_call"])
@torch.no_grad()
def test_weights_lent_for_one_call_leave_nothing_behind(way: str, device: str) -> None:
    model, (x, y) = small(device), points(device)
    before = model.condition(x, y)
    others = {name: p.detach() + 0.3 for name, p in model.named_parameters()}
    lent = copy.deepcopy(model)
    lent.load_state_dict(others)
    if way == "kept weights":
        mine = {name: p.detach().clone() for name, p in model.named_parameters()}
        model.load_state_dict(others)
        found = model.query(model.condition(x, y), x).mean
        model.load_state_dict(mine)
    else:
        found = torch.func.functional_call(model, others, (x, y, x)).mean
    torch.testing.assert_close(found, lent.query(lent.condition(x, y), x).mean)
    after = model.condition(x, y)
    assert torch.equal(after.value, before.value)
    assert after.fingerprint == before.fingerprint
    grown = [model.update(state, x[:, :1], y[:, :1]).lse for state in (before, after)]
    assert torch.equal(*grown)


def test_a_pruned_model_learns_and_its_new_weights_are_seen() -> None:
    model, (x, y) = small(), points()
    pruned(model)
    optimiser = torch.optim.SGD(model.parameters(), lr=0.05)
    losses = []
    for _ in range(5):
        optimiser.zero_grad()
        loss = model.loss(x, y, x, y)
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
        with torch.no_grad():
            exact = effective(model).condition(x.double(), y.double())
            assert_close(model.condition(x, y), exact)
    assert losses[-1] < losses[0]
    assert (
        int((model.stack.observation.key_value == 0).sum()) >= model.stack.observation.key_value.numel() // 2
    )


@pytest.mark.filterwarnings("ignore:.*:DeprecationWarning")
def test_a_quantized_model_conditions_updates_and_predicts() -> None:
    model = CMANP.from_pretrained("emnist")
    x, y = 2 * torch.rand(1, 60, 2) - 1, torch.rand(1, 60, 1) - 0.5
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        small_one = torch.ao.quantization.quantize_dynamic(copy.deepcopy(model), {nn.Linear})
    with torch.no_grad():
        exact, found = model.condition(x, y), small_one.condition(x, y)
        assert found.fingerprint != exact.fingerprint
        with pytest.raises(ValueError, match="other weights"):
            small_one.query(exact, x)
        grown = small_one.update(small_one.condition(x[:, 1:], y[:, 1:]), x[:, :1], y[:, :1])
        assert float((grown.value - found.value).abs().mean()) < 0.01  # scales depend on what comes together
        means = [m.query(s, x).mean for m, s in ((model, exact), (small_one, found))]
    assert float((means[0] - means[1]).abs().mean()) < 0.1


def test_what_is_prepared_does_not_change_with_the_weights_it_was_made_of() -> None:
    found = Observation(dim=16, depth=1, num_slots=4, num_heads=2)
    with torch.no_grad():
        before = found.prepared()
        assert found.prepared() is before
        kept = [t.clone() for t in before[:3]]
        found.key_value.data.mul_(2.0)
        after = found.prepared()
    assert after is not before
    assert all(torch.equal(a, b) for a, b in zip(before[:3], kept, strict=True))
    assert not torch.equal(after.weight, before.weight)
    assert found.prepare().weight.requires_grad


BITS = [torch.float32, torch.float64, torch.bfloat16]


@pytest.mark.parametrize("dtype", BITS)
@pytest.mark.parametrize("size", [1, 31, 32, 127, 128, 129, 5000])
def test_a_snapshot_sees_every_single_bit(dtype: torch.dtype, size: int, device: str) -> None:
    weights = [torch.randn(size, device=device).to(dtype), torch.randn(3, 5, device=device)]
    before = Snapshot(weights)
    assert before.holds(weights)
    assert before.holds([t.clone() for t in weights])
    places = {0, size - 1, size // 2, *torch.randint(0, size, (8,)).tolist()}
    words = {8: torch.int64, 4: torch.int32, 2: torch.int16}[weights[0].element_size()]
    for place in places:
        bits = weights[0].view(words)
        for bit in (0, 8 * weights[0].element_size() - 2):
            bits[place] ^= 1 << bit
            assert not before.holds(weights)
            bits[place] ^= 1 << bit
            assert before.holds(weights)
        bits[place] = ~bits[place]
        assert not before.holds(weights)
        bits[place] = ~bits[place]
    assert not before.holds([weights[1], weights[0]])


def test_a_snapshot_sees_numbers_that_changed_places_or_signs_all_at_once(device: str) -> None:
    weights = [torch.randn(64, 64, device=device), torch.zeros(7, device=device)]
    before = Snapshot(weights)
    for change in (Tensor.neg_, Tensor.zero_, lambda t: t.mul_(2.0)):
        kept = weights[0].clone()
        change(weights[0].data)
        assert not before.holds(weights)
        weights[0].data.copy_(kept)
    for order in (lambda t: t.flip(0), lambda t: t.roll(16, 1), lambda t: t.roll(1, 0), lambda t: t.mT):
        assert not before.holds([order(weights[0]), weights[1]])
    weights[1].neg_()  # minus zero is another bit
    assert not before.holds(weights)
    assert not before.holds([kept, torch.zeros(8, device=device)])


def test_a_snapshot_sees_a_tensor_that_became_shorter_where_it_lies(device: str) -> None:
    weight = torch.randn(6, 4, device=device)
    before = Snapshot([weight])
    assert not before.holds([weight[:5]])
    assert before.holds([weight])


@torch.no_grad()
def test_a_mask_that_changes_is_a_change_of_weights(device: str) -> None:
    model, (x, y) = small(device), points(device)
    pruned(model)
    state = model.condition(x, y)
    mask: Any = model.embed.layers[1].weight_mask
    mask[mask.nonzero()[0, 0]] = 0.0
    with pytest.raises(ValueError, match="other weights"):
        model.query(state, x)
    assert_close(model.condition(x, y), effective(model).condition(x.double().cpu(), y.double().cpu()))


@torch.no_grad()
def test_one_models_weights_verified_says_nothing_of_anothers(device: str) -> None:
    one, other, (x, y) = small(device), small(device), points(device)
    for _ in range(2):
        with one._verified():
            other.stack.observation.prepared(other.embed)
    one_weight(other)
    with one._verified():
        found = other.stack.observe(torch.cat([x, y], -1), embed=other.embed)
    assert_close(found, effective(other).condition(x.double().cpu(), y.double().cpu()))


@torch.no_grad()
def test_an_update_is_checked_against_the_very_state_it_extends() -> None:
    model, (x, y) = small(), points()
    state = model.condition(x, y)
    signed = replace(state, fingerprint="another")
    with pytest.raises(ValueError, match="other weights"):
        model.update(signed, x[:, :1], y[:, :1])


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # PyTorch's own, of its fused attention
@torch.no_grad()
def test_conditioning_and_querying_may_be_vmapped_over_what_was_prepared_before() -> None:
    model = small()
    x, y = torch.randn(3, 2, 5, 1), torch.randn(3, 2, 5, 1)
    state = model.update(model.condition(x[0], y[0]), x[0, :, :1], y[0, :, :1])  # kept by machine code

    def seen(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        new = model.condition(x, y)
        return new.lse, model.query(new, x).mean, model.query(state, x).mean

    found = torch.func.vmap(seen)(x, y)
    for i in range(3):
        for one, other in zip(found, seen(x[i], y[i]), strict=True):
            torch.testing.assert_close(one[i], other, atol=1e-5, rtol=1e-5)


@pytest.mark.filterwarnings("ignore:.*:DeprecationWarning")
@pytest.mark.parametrize("name", [*made.POINT_MODELS, *made.EVENT_MODELS])
def test_every_model_can_be_quantized_and_predicts_about_the_same(name: str) -> None:
    model = made.fresh(name).eval()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        smaller = torch.ao.quantization.quantize_dynamic(copy.deepcopy(model), {nn.Linear})
    with torch.no_grad():
        if name in made.EVENT_MODELS:
            exact, found = (m.query(m.condition(made.stream(5, 5))).mean.log() for m in (model, smaller))
        else:
            x, y, xt, _ = (t.float() for t in made.data())
            exact, found = (m.query(m.condition(x, y), xt).mean for m in (model, smaller))
    assert float((found - exact).abs().mean()) < 0.3


@pytest.fixture
def verified_later(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Have snapshots verified as on a GPU, from before the work until after it; what was done, in order."""
    done: list[str] = []
    begun: list[Any] = []

    def begin(snapshot: Snapshot, tensors: list[Tensor], **_: bool) -> bool:
        done.append("begun")
        begun.append(snapshot.holds(tensors))
        return True

    def end(_: Snapshot) -> bool:
        done.append("ended")
        return bool(begun.pop())

    monkeypatch.setattr(Snapshot, "on_gpu", True)
    monkeypatch.setattr(Snapshot, "begin", begin)
    monkeypatch.setattr(Snapshot, "end", end)
    return done


def test_weights_verified_after_the_work_are_found_the_same(verified_later: list[str]) -> None:
    model, (x, y) = small(), points()
    with torch.no_grad():
        state = model.condition(x, y)
        verified_later.clear()
        later = model.update(state, x[:, :1], y[:, :1])
        assert verified_later == ["begun", "ended"]
        one_weight(model)
        for refused in (lambda: model.update(state, x[:, :1], y[:, :1]), lambda: model.query(state, x)):
            with pytest.raises(ValueError, match="made by other weights"):
                refused()
        again = model.condition(x, y)
        new = model.update(again, x[:, :1], y[:, :1])
        other = copy.deepcopy(model)
        assert torch.equal(new.value, other.update(other.condition(x, y), x[:, :1], y[:, :1]).value)
        assert not torch.allclose(new.value, later.value)
        assert model.query(new, x).mean.isfinite().all()


def test_what_failed_with_weights_that_are_no_more_is_done_again(verified_later: list[str]) -> None:
    model, (x, y) = small(), points()
    with torch.no_grad():
        model.condition(x, y)
        old = model.fingerprint()
        one_weight(model)
        seen: list[str] = []

        def work() -> str:
            seen.append(model.fingerprint())
            if len(seen) == 1:
                raise RuntimeError("of the old weights")
            return "done"

        assert model._while_verifying(work) == "done"
        assert seen == [old, model.fingerprint()]
        assert old != seen[1]
        with pytest.raises(ZeroDivisionError):  # and what fails by itself still does, once
            model._while_verifying(lambda: seen.append("more") or 1 // 0)  # type: ignore[func-returns-value]
    assert seen.count("more") == 1
    assert verified_later.count("begun") == verified_later.count("ended")

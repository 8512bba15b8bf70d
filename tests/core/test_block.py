"""CMAB and its stack: observe and read, against the block written out in numpy."""

from copy import deepcopy
from typing import Any, TypeVar

import numpy as np
import pytest
import torch
from literal import Literal
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook
from torch.nn.utils import prune

from constmem import CMAB, CMANP, AttentionState, CMABStack
from constmem.core.layers import MLP, CrossAttention, FeedForward, SelfAttention, applied
from constmem.core.observation import Observation
from tests.conftest import Refuses
from tests.core.in_numpy import Array, array, attended, fed, layer, written_out

RESIDUALS = "normed", "raw"
Module = TypeVar("Module", bound=nn.Module)


def shaken(module: Module) -> Module:
    """Parameters away from the ones and zeros they start from, in float64."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return module.double()


def small_stack(residual: str = "normed", depth: int = 3) -> CMABStack:
    return shaken(
        CMABStack(depth=depth, dim=12, num_slots=5, num_heads=3, hidden=7, residual=residual)  # type: ignore[arg-type]
    )


def data(n: int = 9, b: int = 2, dim: int = 12) -> tuple[Tensor, Tensor]:
    return torch.randn(b, 4, dim).double(), torch.randn(b, n, dim).double()


@pytest.mark.parametrize("residual", RESIDUALS)
def test_a_stack_equals_blocks_written_out_in_numpy(residual: str) -> None:
    stack = small_stack(residual)
    latents, tokens = data()
    levels = stack(latents, tokens)
    for task in range(2):
        expected = array(latents[task])
        for block, level in enumerate(levels):
            expected = written_out(stack, block, expected, array(tokens[task]), residual == "raw")
            np.testing.assert_allclose(array(level[task]), expected, atol=1e-10)


def mlp(module: MLP, x: Array) -> Array:
    for i, linear in enumerate(module.layers):
        x = (np.maximum(x, 0) if i else x) @ array(linear.weight).T + array(linear.bias)
    return x


@pytest.mark.parametrize("residual", RESIDUALS)
def test_a_model_equals_its_prediction_written_out_in_numpy(residual: str) -> None:
    model = shaken(
        CMANP(dim_x=2, dim_y=3, dim=12, depth=2, num_slots=5, num_latents=4, num_heads=3, residual=residual)  # type: ignore[arg-type]
    ).eval()
    x, y, xt = (torch.randn(2, n, c).double() for n, c in ((8, 2), (8, 3), (6, 2)))
    with torch.no_grad():
        found = model.query(model.condition(x, y), xt)
    raw = residual == "raw"
    for task in range(2):
        tokens = mlp(model.embed, np.concatenate([array(x[task]), array(y[task])], -1))
        latents, targets = array(model.latents), mlp(model.embed_target, array(xt[task]))
        for block in range(2):
            latents = written_out(model.stack, block, latents, tokens, raw)
            targets = fed(model.feed[block], attended(model.cross[block], targets, latents, raw), raw)
        mean, free = np.split(mlp(model.head.predictor, layer(targets, model.head.norm)), 2, -1)
        np.testing.assert_allclose(array(found.mean[task]), mean, atol=1e-10)
        np.testing.assert_allclose(
            array(found.stddev[task]), 0.05 + 0.95 * np.log1p(np.exp(free)), atol=1e-10
        )


@pytest.mark.parametrize("residual", RESIDUALS)
def test_a_model_equals_the_literal_algorithm(residual: str) -> None:
    model = shaken(
        CMANP(dim_x=1, dim_y=2, dim=12, depth=3, num_slots=5, num_latents=4, num_heads=3, residual=residual)  # type: ignore[arg-type]
    ).eval()
    x, y, xt = (torch.randn(2, n, c).double() for n, c in ((20, 1), (20, 2), (6, 1)))
    with torch.no_grad():
        state = model.condition(x, y, chunk=7)
        found = model.query(state, xt)
        for chunk in (None, 6):
            literal = Literal(model, chunk)
            written = literal.condition(x, y)
            for block in range(3):
                torch.testing.assert_close(state.value[:, block], written.embedding[block])
                torch.testing.assert_close(state.lse[:, block], written.log_c[block])
            torch.testing.assert_close(model.read(state), torch.stack(written.latents, 1))
            mean, std = literal.query(written, xt)
            torch.testing.assert_close(found.mean, mean)
            torch.testing.assert_close(found.stddev, std)


def test_updating_equals_the_literal_update() -> None:
    model = shaken(CMANP(dim_x=1, dim_y=1, dim=12, depth=2, num_slots=5, num_latents=4, num_heads=3)).eval()
    x, y = torch.randn(2, 9, 1).double(), torch.randn(2, 9, 1).double()
    with torch.no_grad():
        literal = Literal(model)
        written, state = literal.condition(x[:, :5], y[:, :5]), model.condition(x[:, :5], y[:, :5])
        for i in range(5, 9):
            written = literal.update(written, x[:, i : i + 1], y[:, i : i + 1])
            state = model.update(state, x[:, i : i + 1], y[:, i : i + 1])
            torch.testing.assert_close(model.read(state), torch.stack(written.latents, 1))


# Observe and read


def test_a_block_reads_what_it_observed() -> None:
    block = shaken(CMAB(dim=12, num_slots=5, num_heads=3, hidden=7))
    latents, tokens = data()
    mask = torch.arange(18).view(2, 9) % 3 > 0
    assert torch.equal(block(latents, tokens), block.read(block.observe(tokens), latents))
    assert torch.equal(block(latents, tokens, mask), block.read(block.observe(tokens, mask), latents))


def test_a_stack_reads_what_it_observed() -> None:
    stack = small_stack()
    latents, tokens = data()
    mask = torch.arange(18).view(2, 9) % 3 > 0
    found = stack(latents, tokens, mask)
    expected = stack.read(stack.observe(tokens, mask), latents)
    assert len(found) == 3
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_a_block_is_a_stack_of_one() -> None:
    block = shaken(CMAB(dim=12, num_slots=5, num_heads=3, hidden=7))
    latents, tokens = data()
    assert torch.equal(block(latents, tokens), block.stack(latents, tokens)[0])
    assert block.observe(tokens).value.shape == (2, 1, 3, 5, 4)


@pytest.mark.parametrize("residual", RESIDUALS)
def test_blocks_see_tokens_as_a_set(residual: str) -> None:
    stack = small_stack(residual)
    latents, tokens = data()
    for one, other in zip(stack(latents, tokens), stack(latents, tokens.flip(1)), strict=True):
        torch.testing.assert_close(one, other)
    assert not torch.allclose(stack(latents, tokens)[-1], stack(latents, 2 * tokens - tokens[:, :1])[-1])


def test_weights_reach_the_blocks() -> None:
    stack = small_stack()
    _, tokens = data(4)
    twice = stack.observe(torch.cat([tokens, tokens[:, :1]], 1))
    log_weight = torch.zeros(2, 4).double()
    log_weight[:, 0] = np.log(2)
    for weighted in (stack.observe(tokens, None, log_weight), stack.observe(tokens, log_weight=log_weight)):
        torch.testing.assert_close(weighted.value, twice.value)
        torch.testing.assert_close(weighted.lse, twice.lse)
    block = CMAB(dim=12, num_slots=5, num_heads=3).double()
    found = block.observe(tokens, log_weight=log_weight)
    torch.testing.assert_close(found.lse, block.observe(torch.cat([tokens, tokens[:, :1]], 1)).lse)


def test_having_seen_no_tokens_is_being_empty() -> None:
    for module in (small_stack(), shaken(CMAB(dim=12, num_slots=5, num_heads=3))):
        latents, tokens = data()
        for state in (
            module.observe(tokens[:, :0]),
            module.observe(tokens, torch.zeros(2, 9, dtype=torch.bool)),
        ):
            empty = module.empty(2)
            assert torch.equal(state.value, empty.value)
            assert torch.equal(state.lse, empty.lse)
            assert state.count.tolist() == [0, 0]
        read = module.read(module.empty(2), latents)
        assert all(level.isfinite().all() for level in read)


def test_states_have_the_layout_a_stack_says() -> None:
    stack = small_stack()
    assert stack.layout == (3, 3, 5, 4)
    assert stack.observe(data()[1]).value.shape[1:] == stack.layout
    assert stack.empty(7).value.shape == (7, *stack.layout)
    assert stack.empty(7).lse.shape == (7, *stack.layout[:-1])


# Building


def test_blocks_are_initialised_independently() -> None:
    stack = CMABStack(depth=3, dim=16, num_slots=4, num_heads=2)
    o = stack.observation
    for parameter in (o.slots, o.query, o.key_value[0], o.key_value[1]):
        assert not torch.equal(parameter[0], parameter[1])
        assert not torch.equal(parameter[1], parameter[2])
    assert not torch.equal(o.key_value[0], o.key_value[1])
    for (name, one), other in zip(
        stack.readings[0].named_parameters(), stack.readings[1].parameters(), strict=True
    ):
        assert "norm" in name or "bias" in name or not torch.equal(one, other)


def test_projections_start_by_keeping_the_variance() -> None:
    o = Observation(dim=64, depth=2, num_slots=8, num_heads=4)
    for parameter in (o.query, o.key_value):
        assert abs(float(parameter.detach().std()) * 64**0.5 - 1) < 0.05


def test_the_two_residuals_differ() -> None:
    normed, raw = small_stack("normed"), small_stack("raw")
    raw.load_state_dict(normed.state_dict())
    latents, tokens = data()
    one, other = normed(latents, tokens)[-1], raw(latents, tokens)[-1]
    assert bool(one.isfinite().all())
    assert bool(other.isfinite().all())
    assert float((one - other).detach().abs().max()) > 0.1


@pytest.mark.parametrize("sizes", [{"dim": 12, "num_heads": 5}, {"dim": 12, "num_heads": 0}])
def test_widths_that_do_not_split_into_heads_are_refused(sizes: dict[str, int]) -> None:
    message = f"dim=12 does not split into num_heads={sizes['num_heads']} equal heads"
    for build in (
        lambda: CMABStack(depth=2, **sizes),
        lambda: CMAB(**sizes),
        lambda: CrossAttention(**sizes),
        lambda: SelfAttention(**sizes),
    ):
        with pytest.raises(ValueError, match=message):
            build()


@pytest.mark.parametrize("name", ["depth", "num_slots", "hidden"])
@pytest.mark.parametrize("number", [0, -1, True])
def test_sizes_below_one_are_refused(name: str, number: int) -> None:
    with pytest.raises(ValueError, match=f"{name} must be a whole number of at least 1, not {number}"):
        CMABStack(**{"depth": 2, "dim": 8, "num_heads": 2, name: number})  # type: ignore[arg-type]


def test_sizes_that_are_not_whole_are_refused(refuses: Refuses) -> None:
    with refuses(ValueError, "num_slots must be a whole number of at least 1, not 2.5"):
        CMABStack(depth=2, dim=8, num_heads=2, num_slots=2.5)  # type: ignore[arg-type]


def test_unknown_residuals_are_refused(refuses: Refuses) -> None:
    for build in (
        lambda: CMABStack(depth=1, dim=8, num_heads=2, residual="none"),  # type: ignore[arg-type]
        lambda: CMAB(dim=8, num_heads=2, residual="none"),  # type: ignore[arg-type]
        lambda: FeedForward(dim=8, hidden=8, residual="none"),  # type: ignore[arg-type]
    ):
        with refuses(ValueError, "residual must be 'normed' or 'raw', not 'none'"):
            build()


@pytest.mark.parametrize(("dim", "num_heads", "num_slots"), [(33, 3, 31), (5, 1, 3), (64, 4, 128)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_sizes_may_be_odd(dim: int, num_heads: int, num_slots: int, dtype: torch.dtype) -> None:
    block = CMAB(dim=dim, num_heads=num_heads, num_slots=num_slots).to(dtype)
    tokens = torch.randn(2, 4, dim, dtype=dtype)
    with torch.no_grad():
        without = block.observe(tokens)
    assert_observed(without, block.observe(tokens), 1e-5 if dtype == torch.float32 else 1e-9)


# What is remembered of the parameters


def assert_observed(found: AttentionState, expected: AttentionState, tolerance: float) -> None:
    torch.testing.assert_close(found.value, expected.value, atol=tolerance, rtol=0)
    torch.testing.assert_close(found.lse, expected.lse, atol=tolerance, rtol=0)


def deepcopy_without_memory(block: CMAB) -> CMAB:
    fresh = CMAB(dim=block.stack.observation.dim, num_slots=block.stack.layout[2])
    fresh.to(block.stack.observation.slots.dtype).load_state_dict(block.state_dict())
    return fresh


def test_what_is_remembered_follows_the_dtype() -> None:
    block = CMAB(dim=64, num_slots=32)
    tokens = torch.randn(2, 9, 64)
    with torch.no_grad():
        single = block.observe(tokens)
        double = block.double().observe(tokens.double())
        again = block.float().observe(tokens)
        expected = deepcopy_without_memory(block.double()).observe(tokens.double())
    assert_observed(again, single, 0.0)
    assert_observed(double, expected, 0.0)
    assert not torch.equal(single.value, double.value)


def test_what_is_remembered_does_not_leave_autocast() -> None:
    block = CMAB(dim=64, num_slots=32)
    tokens = torch.randn(2, 9, 64)
    with torch.no_grad():
        with torch.autocast("cpu", dtype=torch.bfloat16):
            rough = block.observe(tokens)
        exact = block.observe(tokens)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            rough_again = block.observe(tokens)
        expected = deepcopy_without_memory(block).observe(tokens)
    assert_observed(exact, expected, 0.0)
    assert_observed(rough, expected, 0.1)
    assert_observed(rough_again, rough, 0.0)


def test_what_is_remembered_follows_the_precision_of_products() -> None:
    block = CMAB(dim=16, num_slots=4)
    remembered = []
    with torch.no_grad():
        for precision in ("high", "highest", "highest"):
            torch.set_float32_matmul_precision(precision)
            block.observe(torch.randn(1, 3, 16))
            remembered.append(block.stack.observation.prepared())
    assert remembered[0] is not remembered[1]  # on a GPU their products are rounded
    assert remembered[1] is remembered[2]


def test_copies_of_a_block_do_not_share_what_is_remembered() -> None:
    block = CMAB(dim=64, num_slots=32)
    tokens = torch.randn(2, 9, 64)
    with torch.no_grad():
        before = block.observe(tokens)
        copy = deepcopy(block)
        copy.stack.observation.slots.mul_(-1)
        changed = copy.observe(tokens)
        assert_observed(block.observe(tokens), before, 0.0)
        assert_observed(changed, deepcopy_without_memory(copy).observe(tokens), 0.0)
    assert not torch.equal(changed.value, before.value)


def test_parameters_lent_for_a_call_are_used() -> None:
    """torch.func.functional_call with fresh tensors, whose addresses come again and again."""
    for dim in (8, 64):
        block = CMAB(dim=dim, num_slots=4)
        tokens, latents = torch.randn(1, 9, dim), torch.randn(1, 3, dim)
        for _ in range(5):
            lent = {name: torch.randn_like(p) for name, p in block.named_parameters()}
            with torch.no_grad():
                found = torch.func.functional_call(block, lent, (latents, tokens))
            expected = torch.func.functional_call(block, lent, (latents, tokens))  # computed with a graph
            size = float(expected.detach().abs().max())  # of weights without measure
            torch.testing.assert_close(found, expected, atol=1e-5 * size, rtol=0)
            del lent


@pytest.mark.parametrize("n", [1, 9])
def test_with_gradients_nothing_is_remembered(n: int) -> None:
    block = shaken(CMAB(dim=12, num_slots=5, num_heads=3))
    _, tokens = data(n)
    with torch.no_grad():
        block.observe(tokens)
        block.stack.observation.key_value.mul_(1.5)
    state = block.observe(tokens)
    (state.value.square().sum() + state.lse.square().sum()).backward()
    for name, parameter in block.stack.observation.named_parameters():
        assert parameter.grad is not None, name
        assert float(parameter.grad.abs().max()) > 0, name
    with torch.no_grad():
        assert_observed(block.observe(tokens), state, 1e-12)


@pytest.mark.parametrize(
    "way", ["plain", "hook", "pre-hook", "backward hook", "global hook", "pruned", "deleted"]
)
@pytest.mark.parametrize("kind", [nn.Linear, nn.LayerNorm])
def test_a_layer_gives_what_its_call_gives_and_hooks_are_called(kind: type[nn.Module], way: str) -> None:
    layer: Any = nn.Linear(8, 5) if kind is nn.Linear else nn.LayerNorm(8)
    nn.init.normal_(layer.weight)
    called: list[str] = []
    handles = []
    if way == "hook":
        handles.append(layer.register_forward_hook(lambda *_: called.append(way)))
    elif way == "pre-hook":
        handles.append(layer.register_forward_pre_hook(lambda *_: called.append(way)))
    elif way == "backward hook":
        handles.append(layer.register_full_backward_hook(lambda *_: called.append(way)))
    elif way == "global hook":
        handles.append(register_module_forward_hook(lambda *_: called.append(way)))
    elif way == "pruned":
        prune.random_unstructured(layer, "weight", amount=3)
    elif way == "deleted":
        weight = layer.weight.detach() * 2
        del layer.weight
        layer.weight = weight
    x = torch.randn(3, 8, requires_grad=True)
    found = applied(layer, x)
    found.sum().backward()
    times = len(called)
    expected = layer(x)
    for handle in handles:
        handle.remove()
    assert torch.equal(found, expected)
    assert times == (1 if handles else 0)

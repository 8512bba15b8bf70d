"""Machine code: the numbers of PyTorch's operators in float64; nothing is lost where it cannot be built."""

import copy
import warnings
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

from constmem import CMANP, kernels
from constmem.core.algebra import EMPTY
from constmem.core.block import CMABStack
from constmem.core.layers import MLP
from constmem.core.observation import Observation
from constmem.core.state import AttentionState
from constmem.kernels import cpu
from constmem.neural_processes import Scales

pytestmark = pytest.mark.skipif(cpu.library() is None, reason="there is no C++ compiler")


def observation(dim: int, heads: int, slots: int, sharpness: float = 1.0) -> Observation:
    found = Observation(dim=dim, depth=2, num_slots=slots, num_heads=heads)
    with torch.no_grad():
        for p in (found.tokens_scale, found.tokens_shift, found.slots_scale, found.slots_shift):
            p.add_(0.3 * torch.randn_like(p))
        found.query.mul_(sharpness)
    return found


def exact(
    found: Observation, data: Tensor, mask: Tensor | None, weight: Tensor | None, embed: MLP | None
) -> AttentionState:
    """The same by PyTorch's operators on float64 numbers."""
    wide, wide_embed = copy.deepcopy(found).double(), None if embed is None else copy.deepcopy(embed).double()
    return wide.observe(
        data.double(), mask, None if weight is None else weight.double(), embed=wide_embed
    )  # no machine code in float64


WIDTHS = (64, 4, 128), (33, 3, 31), (16, 2, 5), (40, 1, 16)  # tokens, heads, slots
SIZES = (1, 1), (3, 1), (2, 2), (1, 63), (1, 64), (5, 65), (1, 300)  # tasks, points


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize(("dim", "heads", "slots"), WIDTHS)
@pytest.mark.parametrize("kind", ["plain", "masked", "weighted", "embedded", "sharp"])
@torch.no_grad()
def test_observing_agrees_with_float64_operators(dim: int, heads: int, slots: int, kind: str) -> None:
    torch.manual_seed(dim)
    found = observation(dim, heads, slots, 300.0 if kind == "sharp" else 1.0)
    embed = MLP(dim_in=3, dim_hidden=17, dim_out=dim, depth=3) if kind == "embedded" else None
    for batch, n in SIZES:
        data = torch.randn(batch, n, 3 if embed else dim)
        mask = torch.rand(batch, n) < 0.6 if kind == "masked" else None
        weight = 30 * torch.randn(batch, n) if kind == "weighted" else None
        plans = found.prepared(embed).plans
        assert plans is not None
        assert plans.cpu() is not None
        seen = found.observe(data, mask, weight, embed=embed)
        expected = exact(found, data, mask, weight, embed)
        size = float(expected.lse.abs().clamp(1, 1e6).max())
        torch.testing.assert_close(seen.lse, expected.lse, atol=2e-6 * size, rtol=1e-6)
        torch.testing.assert_close(seen.value, expected.value, atol=1e-5 * size, rtol=0)
        assert torch.equal(seen.count, expected.count)


@pytest.mark.usefixtures("library")
@torch.no_grad()
def test_tasks_of_masked_points_only_are_exactly_empty() -> None:
    found = observation(16, 2, 5)
    state = found.observe(torch.randn(2, 70, 16), torch.zeros(2, 70, dtype=torch.bool))
    assert torch.equal(state.value, torch.zeros_like(state.value))
    assert torch.equal(state.lse, torch.full_like(state.lse, EMPTY))


@pytest.mark.usefixtures("library")
@torch.no_grad()
def test_scores_may_climb_far_above_those_seen_first() -> None:
    found, n = observation(16, 2, 5), 130
    weight = torch.linspace(-4000, 4000, n)[None]
    weight[0, 70] = 5000.0  # all but this point vanish
    data = torch.randn(1, n, 16)
    state, expected = found.observe(data, None, weight), exact(found, data, None, weight, None)
    torch.testing.assert_close(state.value, expected.value, atol=1e-5, rtol=0)
    torch.testing.assert_close(state.lse, expected.lse, atol=0, rtol=1e-6)


@pytest.mark.usefixtures("library")
@torch.no_grad()
def test_points_that_come_again_and_again_do_not_wear_sums_out() -> None:
    found, n = observation(16, 2, 5), 400_000
    token, mask = torch.randn(1, 1, 16), torch.rand(1, n) < 0.99
    state = found.observe(token.expand(1, n, 16), mask)
    one = exact(found, token, None, None, None)
    torch.testing.assert_close(state.value, one.value, atol=2e-5, rtol=0)
    torch.testing.assert_close(state.lse, one.lse + mask.sum().log(), atol=1e-5, rtol=0)
    assert torch.equal(state.count, mask.sum(-1))


@torch.no_grad()
def test_the_number_of_threads_changes_nothing_that_matters() -> None:
    found, data = observation(16, 2, 5), torch.randn(1, 1000, 16)
    before = torch.get_num_threads()
    try:
        states = []
        for threads in (1, 2, 7):
            torch.set_num_threads(threads)
            states.append(found.observe(data))
    finally:
        torch.set_num_threads(before)
    for state in states[1:]:
        torch.testing.assert_close(state.value, states[0].value, atol=1e-6, rtol=0)
        torch.testing.assert_close(state.lse, states[0].lse, atol=1e-6, rtol=0)


def by_formula(value: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> tuple[Tensor, Tensor]:
    share = torch.sigmoid(other_lse - lse)[..., None]
    return torch.lerp(value, other, share), torch.logaddexp(lse, other_lse)


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("scale", [1e-6, 1.0, 40.0, 1e4, 1e28])
@pytest.mark.parametrize(("slots", "channels"), [(1, 1), (5, 3), (33, 8), (128, 16)])
def test_merging_agrees_with_the_formula_to_the_last_digits(scale: float, slots: int, channels: int) -> None:
    random = torch.Generator().manual_seed(slots)
    value, other = torch.randn(2, 3, 2, slots, channels, dtype=torch.float64, generator=random)
    lse, other_lse = scale * torch.randn(2, 3, 2, slots, dtype=torch.float64, generator=random)
    other_lse[0] = EMPTY
    lse[1, 0] = EMPTY
    shared = other[..., :1, :].expand(other.shape)
    for part in (other, shared):
        merged, merged_lse = cpu.merge(value, lse, part, other_lse)
        expected, expected_lse = by_formula(value, lse, part, other_lse)
        torch.testing.assert_close(merged, expected, atol=3e-15, rtol=0)
        torch.testing.assert_close(merged_lse, expected_lse, atol=3e-16, rtol=4e-16)
        assert torch.equal(merged[0], value[0])  # nothing was added
        assert torch.equal(merged_lse[0], lse[0].maximum(torch.tensor(EMPTY, dtype=torch.float64)))
        assert torch.equal(merged[1, 0], part[1, 0])  # to nothing


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("which", [0, 1, 2, 3])
def test_merging_what_is_not_a_number_gives_none(which: int) -> None:
    random = torch.Generator().manual_seed(0)
    values = torch.randn(2, 1, 2, 5, 16, dtype=torch.float64, generator=random)
    lses = torch.randn(2, 1, 2, 5, dtype=torch.float64, generator=random)
    tensors = values[0], lses[0], values[1], lses[1]
    tensors[which][0, 1, 2] = torch.nan
    for found, expected in zip(cpu.merge(*tensors), by_formula(*tensors), strict=True):
        assert torch.equal(found.isnan(), expected.isnan())
        torch.testing.assert_close(found, expected, atol=1e-14, rtol=0, equal_nan=True)


@pytest.mark.parametrize("code", ["machine code", "operators"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.no_grad()
def test_weights_may_lie_in_any_order(code: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    if code == "operators":
        monkeypatch.setattr(cpu, "library", lambda: None)
    model = CMANP(dim_x=1, dim_y=1, dim=32, depth=3, num_heads=2, num_slots=4, num_latents=4).eval()
    model.to(dtype).to(memory_format=torch.channels_last)
    own = model.stack.observation
    own.slots_scale = torch.nn.Parameter(torch.full((1,), 1.5, dtype=dtype).expand(own.slots_scale.shape))
    assert not own.key_value.is_contiguous()
    x, y = torch.randn(2, 9, 1), torch.randn(2, 9, 1)
    straight = copy.deepcopy(model)
    for p in straight.parameters():
        p.data = p.data.clone(memory_format=torch.contiguous_format)
    for change in (lambda: None, lambda: own.key_value.data.mul_(1.5)):
        change()
        straight.stack.observation.key_value.copy_(own.key_value)
        close = 1e-5 if dtype == torch.float32 else 3e-2
        for n in (1, 9):
            found, expected = (
                each.update(each.empty(2), x[:, :n], y[:, :n]).value for each in (model, straight)
            )
            torch.testing.assert_close(found, expected, atol=close, rtol=0)


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("batch", [1, 3])
@torch.no_grad()
def test_an_update_by_one_point_is_to_the_bit_what_observing_and_merging_give(batch: int) -> None:
    model = CMANP(dim_x=2, dim_y=1, dim=32, depth=2, num_heads=2, num_slots=21, num_latents=4).eval()
    model.set_scales(Scales.of(5 + 3 * torch.randn(50, 2), 7 * torch.randn(50, 1)))
    x, y = torch.randn(batch, 9, 2), torch.randn(batch, 9, 1)
    state = model.condition(x[:, :8], y[:, :8])
    last = x[:, 8:], y[:, 8:]
    points = torch.cat(model._scaled((*last, None))[:2], -1)
    assert model.stack.observation.extended(state, points, embed=model.embed) is not None
    fast, slow = model.update(state, *last), state.merge(model.observe(*last))
    assert torch.equal(fast.value, slow.value)
    assert torch.equal(fast.lse, slow.lse)
    assert fast.count.tolist() == [9] * batch
    assert fast.fingerprint == model.fingerprint()
    whole = model.condition(x, y)
    assert torch.allclose(fast.value, whole.value, atol=1e-5)


@pytest.mark.parametrize("junk", [float("nan"), float("inf")])
@pytest.mark.parametrize("batch", [3, 40])
@torch.no_grad()
def test_an_update_by_one_point_names_what_is_not_finite(junk: float, batch: int) -> None:
    model = CMANP(dim_x=2, dim_y=1, dim=32, depth=1, num_heads=2, num_slots=4, num_latents=4).eval()
    model.set_scales(Scales.of(5 + 3 * torch.randn(50, 2), 7 * torch.randn(50, 1)))
    x, y = torch.randn(batch, 1, 2), torch.randn(batch, 1, 1)
    state = model.empty(batch)
    for name, tensor, last in (("y", y, 0), ("x", x, 1)):
        tensor[2, 0, last] = junk
        with pytest.raises(ValueError, match=rf"^{name}\[2, 0, {last}\] is {junk}: every value"):
            model.update(state, x, y)
    huge = torch.full((batch, 1, 2), 3e16), torch.zeros(batch, 1, 1)  # large enough to be looked at closely
    assert model.update(state, *huge).count.tolist() == [1] * batch


@pytest.mark.parametrize("kind", ["lse in float32", "lse too short"])
@torch.no_grad()
def test_machine_code_is_never_handed_an_lse_of_another_size_than_the_value(kind: str) -> None:
    model = CMANP(dim_x=1, dim_y=1, dim=32, depth=1, num_heads=2, num_slots=4, num_latents=4).eval()
    x, y = torch.randn(2, 9, 1), torch.randn(2, 9, 1)
    state = model.condition(x[:, :8], y[:, :8])
    odd = replace(state, lse=state.lse.float() if kind == "lse in float32" else state.lse[:1])
    assert model.stack.observation.extended(odd, torch.cat([x, y], -1)[:, 8:], embed=model.embed) is None
    assert kernels.merge(state.value, odd.lse, state.value, state.lse) is None
    assert kernels.merge(state.value, state.lse, state.value, odd.lse) is None
    assert kernels.merge(state.value, odd.lse, state.value, odd.lse) is None


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("dim", [24, 32])
@pytest.mark.parametrize("points", [1, 9])
@torch.no_grad()
def test_a_batch_of_no_tasks_is_conditioned_on_updated_and_queried(dim: int, points: int) -> None:
    model = CMANP(dim_x=1, dim_y=1, dim=dim, depth=1, num_heads=2, num_slots=4, num_latents=4).eval()
    x, y = torch.randn(0, points, 1), torch.randn(0, points, 1)
    state = model.update(model.condition(x, y), x[:, :1], y[:, :1])
    assert state.value.shape == (0, 1, 2, 4, dim // 2)
    assert state.lse.shape == (0, 1, 2, 4)
    assert model.query(state, x).mean.shape == (0, points, 1)


@pytest.mark.parametrize("kind", ["padded channels", "float32 pairs", "another batch", "learning"])
def test_what_one_call_cannot_update_goes_the_long_way(kind: str) -> None:
    dim = 24 if kind == "padded channels" else 32
    model = CMANP(dim_x=1, dim_y=1, dim=dim, depth=1, num_heads=2, num_slots=4, num_latents=4).eval()
    x, y = torch.randn(2, 9, 1), torch.randn(2, 9, 1)
    with torch.set_grad_enabled(kind == "learning"):
        state = model.condition(x[:, :8], y[:, :8])
        points = torch.cat([x, y], -1)[:, 8:]
        if kind == "float32 pairs":
            state = state.to(dtype=torch.float32)
        if kind == "another batch":
            points = points[:1]
        assert model.stack.observation.extended(state, points, embed=model.embed) is None
        if kind == "another batch":
            with pytest.raises(ValueError, match="batch of 1"):
                model.update(state, x[:1, 8:], y[:1, 8:])
        elif kind != "float32 pairs":
            whole = model.condition(x, y)
            assert torch.allclose(model.update(state, x[:, 8:], y[:, 8:]).value, whole.value, atol=1e-5)


@torch.no_grad()
def test_machine_code_of_the_cpu_is_never_handed_memory_of_another_device() -> None:
    model = CMANP(dim_x=1, dim_y=1, dim=16, depth=1, num_slots=4, num_latents=4).eval()
    plans, points = model.stack.observation.prepared(model.embed).plans, torch.randn(1, 5, 2)
    assert plans is not None
    assert kernels.observe(plans, points, None) is not None
    assert kernels.observe(plans, points.to("meta"), None) is None
    elsewhere = [(weight.to("meta"), bias.to("meta")) for weight, bias in plans.layers]
    assert kernels.observe(kernels.Plans(plans.exact, elsewhere, plans.slots), points, None) is None


@pytest.mark.filterwarnings("ignore:.*jit.script:DeprecationWarning")  # PyTorch's own, of dual_level
@torch.no_grad()
def test_tangents_are_not_lost_in_silence() -> None:
    model = CMANP(dim_x=1, dim_y=1, dim=32, depth=1, num_heads=2, num_slots=4, num_latents=4).eval()
    x, y, along = torch.randn(2, 5, 1), torch.randn(2, 5, 1), torch.randn(2, 5, 1)
    state = model.condition(x, y)
    last = x[:, :1], y[:, :1], along[:, :1]
    with forward_ad.dual_level():
        moved = forward_ad.make_dual(last[0], last[2])
        found = forward_ad.unpack_dual(model.update(state, moved, last[1]).value).tangent
        with pytest.raises(NotImplementedError, match="forward mode"):
            model.condition(forward_ad.make_dual(x, along), y)
    assert found is not None
    wide = copy.deepcopy(model).double()
    before, step = state.signed(wide.fingerprint()), 1e-5
    moved_x = (last[0].double() + by * last[2] for by in (step, -step))
    ahead, behind = (wide.update(before, x, last[1].double()).value for x in moved_x)
    torch.testing.assert_close(found, (ahead - behind) / (2 * step), atol=1e-4, rtol=1e-3)


@pytest.mark.compiles
@torch.no_grad()
def test_a_traced_update_is_made_of_operators() -> None:
    model = CMANP(dim_x=1, dim_y=1, dim=32, depth=1, num_heads=2, num_slots=4, num_latents=4).eval()
    model.requires_grad_(False)
    x, y = torch.randn(2, 9, 1), torch.randn(2, 9, 1)
    state = model.condition(x[:, :8], y[:, :8])

    def updated(value: Tensor, lse: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        found = model.update(AttentionState(value, lse, state.count), x, y)
        return found.value, found.lse

    given = state.value, state.lse, x[:, 8:], y[:, 8:]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # sizes are constants; and PyTorch would have us export instead
        traced = torch.jit.trace(updated, given, check_trace=False)
        found = traced(*given)
    for one, other in zip(found, updated(*given), strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=0)


@pytest.mark.compiles
@torch.no_grad()
def test_a_compiled_update_is_not_compiled_again_for_weights_that_moved() -> None:
    model = CMANP(dim_x=1, dim_y=1, dim=32, depth=1, num_heads=2, num_slots=4, num_latents=4).eval()
    x, y = torch.randn(2, 9, 1), torch.randn(2, 9, 1)
    graphs = []

    def backend(graph: torch.fx.GraphModule, _: object) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    torch._dynamo.reset()
    compiled = torch.compile(lambda state: model.update(state, x[:, 8:], y[:, 8:]).value, backend=backend)
    state = model.condition(x[:, :8], y[:, :8])
    for _ in range(3):
        plain = model.update(state, x[:, 8:], y[:, 8:]).value
        torch.testing.assert_close(compiled(state), plain, atol=1e-5, rtol=1e-5)
        model.stack.observation.slots.mul_(1.0)
    assert len(graphs) == 1


@torch.no_grad()
def test_the_same_points_give_the_same_bits_every_time() -> None:
    found, data = observation(64, 4, 128), torch.randn(1, 3000, 64)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        states = [found.observe(data) for _ in range(5)]
    finally:
        torch.set_num_threads(before)
    for state in states[1:]:
        assert torch.equal(state.value, states[0].value)
        assert torch.equal(state.lse, states[0].lse)


@torch.no_grad()
def test_shapes_that_do_not_fit_never_reach_machine_code() -> None:
    stack = CMABStack(depth=1, dim=16, num_slots=4, num_heads=2)
    tokens, mask = torch.randn(3, 10, 16), torch.rand(1, 10) < 0.5
    whole = stack.observe(tokens, mask.expand(3, -1))
    assert torch.equal(stack.observe(tokens, mask).lse, whole.lse)  # as PyTorch would broadcast it
    for width in (8, 40):
        with pytest.raises(RuntimeError):
            stack.observe(tokens[..., :1].expand(-1, -1, width))
    with pytest.raises(RuntimeError):
        stack.observe(tokens, torch.ones(3, 9, dtype=torch.bool))
    other = CMABStack(depth=1, dim=16, num_slots=64, num_heads=2).observe(tokens)
    assert stack.observation.extended(other, tokens[:, :1]) is None


@pytest.mark.parametrize("where", ["token", "weight"])
@torch.no_grad()
def test_what_is_not_a_number_is_not_taken_for_nothing(where: str) -> None:
    stack = CMABStack(depth=1, dim=16, num_slots=4, num_heads=2)
    tokens, weight = torch.randn(1, 10, 16), torch.zeros(1, 10)
    (tokens[0, 3] if where == "token" else weight[0, 3:4]).fill_(torch.nan)
    state = stack.observe(tokens, None, weight)
    assert bool(state.lse.isnan().all())
    assert bool(state.value.isnan().all())

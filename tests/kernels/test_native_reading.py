"""Layers in machine code: the numbers of numpy in float64; operators wherever more than these is wanted."""

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune
from torch.nn.utils.parametrize import remove_parametrizations
from torch.utils._python_dispatch import TorchDispatchMode

from constmem import CMANP, CMHP, CMABStack, Events
from constmem.core.block import through_levels
from constmem.core.layers import MLP, CrossAttention, FeedForward
from constmem.kernels import cpu, cpu_reading, operators
from tests.core.in_numpy import Array, array, attended, fed, layer, read

pytestmark = pytest.mark.skipif(cpu.library() is None, reason="there is no C++ compiler")
RESIDUALS = pytest.mark.parametrize("residual", ["normed", "raw"])
EXACT = 2e-6  # of the largest number


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What machine code did."""
    done: list[str] = []
    run = cpu_reading.Program.run

    def noted(self: cpu_reading.Program, *given: Any) -> Tensor | None:
        found = run(self, *given)
        if found is not None:
            done.append("layers")
        return found

    monkeypatch.setattr(cpu_reading.Program, "run", noted)
    return done


def shaken(module: nn.Module) -> Any:
    """Parameters away from the ones and zeros they start from."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return module


def off(found: Tensor, expected: Array) -> float:
    """The largest difference, of the largest number; not a number where one is none."""
    if not expected.size:
        return 0.0
    return float(np.abs(array(found) - expected).max() / np.abs(expected).max())


class Decoder:
    """Layers as a model has them for its targets."""

    def __init__(self, dim: int, heads: int, residual: Any = "normed", depth: int = 2) -> None:
        sizes = {"dim": dim, "residual": residual}
        cross = (CrossAttention(num_heads=heads, **sizes) for _ in range(depth))
        feed = (FeedForward(hidden=dim + 3, **sizes) for _ in range(depth))
        self.cross, self.feed = shaken(nn.ModuleList(cross)), shaken(nn.ModuleList(feed))
        self.raw = residual == "raw"

    def __call__(self, x: Tensor, levels: list[Tensor], mask: Tensor | None = None) -> Tensor:
        return through_levels(x, levels, self.cross, self.feed, mask)

    def by_operators(self, x: Tensor, levels: list[Tensor], mask: Tensor | None = None) -> Tensor:
        with torch.enable_grad():
            return self(x, levels, mask).detach()

    def in_numpy(self, x: Tensor, levels: list[Tensor], mask: Tensor | None = None) -> Array:
        out = []
        for i, tokens in enumerate(array(x)):
            here = slice(None) if mask is None else mask[i].numpy()
            for level, cross, feed in zip(levels, self.cross, self.feed, strict=True):
                context = array(level[i])[here]
                if len(context):
                    tokens = attended(cross, tokens, context, self.raw)
                else:
                    residual = tokens if self.raw else layer(tokens, cross.norm)
                    tokens = array(cross.attention.out.bias) + residual
                tokens = fed(feed, tokens, self.raw)
            out.append(tokens)
        return np.stack(out)


SIZES = [  # width, heads, tasks, targets, latents
    (64, 4, 1, 130, 128), (64, 4, 2, 1, 128), (33, 3, 1, 17, 65), (33, 3, 9, 16, 16), (40, 5, 1, 3, 70),
    (6, 6, 3, 1, 33), (16, 2, 1, 1, 1), (12, 1, 2, 5, 1), (7, 1, 1, 64, 64), (16, 2, 1, 4, 0),
]  # fmt: skip


@pytest.mark.usefixtures("library")
@RESIDUALS
@torch.no_grad()
def test_a_decoder_agrees_with_numpy_at_any_size(residual: str, calls: list[str]) -> None:
    for dim, heads, tasks, m, n in SIZES:
        decoder = Decoder(dim, heads, residual)
        x, levels = torch.randn(tasks, m, dim), [torch.randn(tasks, n, dim) for _ in range(2)]
        assert off(decoder(x, levels), decoder.in_numpy(x, levels)) < EXACT, (dim, heads, tasks, m, n)
    assert calls == ["layers"] * len(SIZES)


@pytest.mark.usefixtures("library")
@torch.no_grad()
def test_masked_latents_are_not_seen_and_none_at_all_give_the_bias(calls: list[str]) -> None:
    for dim, heads, tasks, m, n in SIZES[:6]:
        decoder = Decoder(dim, heads)
        x, levels = torch.randn(tasks, m, dim), [torch.randn(tasks, n, dim) for _ in range(2)]
        mask = torch.rand(tasks, n) < 0.5
        mask[0] = tasks == 1
        mask[0, 0] = tasks == 1
        levels[0][~mask] = torch.nan  # if they were seen, all would be
        levels[1][~mask] = 1e30
        assert off(decoder(x, levels, mask), decoder.in_numpy(x, levels, mask)) < EXACT, (dim, m, n)
    assert len(calls) == 6


@pytest.mark.usefixtures("library")
@torch.no_grad()
def test_scores_of_any_sharpness_are_no_worse_than_operators_in_float32(calls: list[str]) -> None:
    for m in (1, 33):
        for sharpness in (30.0, 1e4, 1e30):
            decoder = Decoder(32, 4, depth=1)
            decoder.cross[0].attention.query.weight.mul_(sharpness)
            x, levels = torch.randn(1, m, 32), [torch.randn(1, 70, 32)]
            expected = decoder.in_numpy(x, levels)
            usual = off(decoder.by_operators(x, levels), expected)
            assert off(decoder(x, levels), expected) <= EXACT + 2 * usual, (m, sharpness)
    assert len(calls) == 6


@pytest.mark.usefixtures("library")
@torch.no_grad()
def test_scores_far_below_those_of_masked_latents_count(calls: list[str]) -> None:
    for m in (1, 33):
        decoder = Decoder(32, 4, depth=1)
        decoder.cross[0].attention.query.weight.mul_(1e4)
        x, level, mask = torch.randn(1, m, 32), torch.randn(1, 70, 32), torch.zeros(1, 70, dtype=torch.bool)
        mask[0, 5] = True  # an only one, whose share is one whatever its score
        assert off(decoder(x, [level], mask), decoder.in_numpy(x, [level], mask)) < EXACT
    assert len(calls) == 2


@pytest.mark.usefixtures("library")
@torch.no_grad()
def test_tokens_far_from_zero_and_gates_of_any_size_lose_nothing(calls: list[str]) -> None:
    decoder = Decoder(32, 4, depth=1)
    x, levels = 1000 + torch.randn(1, 20, 32), [torch.randn(1, 40, 32) - 1000]
    assert off(decoder(x, levels), decoder.in_numpy(x, levels)) < 3 * EXACT
    few = decoder(x[:, :1], levels)
    assert off(few, decoder.in_numpy(x[:, :1], levels)) < 3 * EXACT
    decoder.feed[0].expand.weight[35:].mul_(1e20)
    assert off(decoder(x, levels), decoder.in_numpy(x, levels)) < 3 * EXACT
    assert len(calls) == 3


@pytest.mark.usefixtures("library")
@RESIDUALS
@torch.no_grad()
def test_a_reading_agrees_with_numpy_block_by_block(residual: Any, calls: list[str]) -> None:
    sizes = (64, 4, 128, 128), (64, 4, 8, 4), (33, 3, 70, 17), (12, 1, 1, 1), (16, 2, 5, 65)
    for dim, heads, slots, latents in sizes:
        stack = shaken(
            CMABStack(depth=2, dim=dim, num_heads=heads, num_slots=slots, hidden=24, residual=residual)
        )
        given, value = torch.randn(2, latents, dim), torch.randn(2, *stack.layout, dtype=torch.float64)
        levels = stack.read_value(value, given)
        seen = array(value.float().transpose(2, 3).flatten(3))
        for task in range(2):
            expected = array(given[task])
            for block in range(2):
                expected = read(stack, block, expected, seen[task, block], residual == "raw")
                assert off(levels[block][task], expected) < 2 * EXACT, (dim, heads, slots, latents, block)
                expected = array(levels[block][task])
    assert calls == ["layers"] * len(sizes)


@torch.no_grad()
def test_points_become_tokens_as_a_perceptron_makes_them(calls: list[str]) -> None:
    for depth, m in ((1, 3), (4, 1), (4, 70)):
        embed, decoder = shaken(MLP(dim_in=3, dim_hidden=11, dim_out=16, depth=depth)), Decoder(16, 2)
        x, levels = torch.randn(2, m, 3), [torch.randn(2, 9, 16) for _ in range(2)]
        found = through_levels(x, levels, decoder.cross, decoder.feed, embed=embed)
        wide = copy.deepcopy(embed).double()(x.double())
        assert off(found, decoder.in_numpy(wide, levels)) < 2 * EXACT
    assert len(calls) == 3


@torch.no_grad()
def test_neither_threads_nor_other_tasks_change_a_bit(calls: list[str]) -> None:
    decoder, before = Decoder(64, 4), torch.get_num_threads()
    x, levels = torch.randn(3, 1100, 64), [torch.randn(3, 40, 64) for _ in range(2)]
    alone = [decoder(x[i : i + 1], [level[i : i + 1] for level in levels]) for i in range(3)]
    try:
        torch.set_num_threads(5)
        together = decoder(x, levels)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(together, torch.cat(alone))
    assert len(calls) == 4


@torch.no_grad()
def test_tokens_may_lie_anywhere(calls: list[str]) -> None:
    decoder, x, level = Decoder(16, 2), torch.randn(1, 5, 16), torch.randn(1, 7, 16)
    expected = decoder(x.repeat(3, 1, 1), [level.repeat(3, 1, 1)] * 2)
    turned = x.mT.contiguous().mT.expand(3, -1, -1)
    assert torch.equal(
        decoder(turned, [level.expand(3, -1, -1), level.mT.contiguous().mT.repeat(3, 1, 1)]), expected
    )
    assert len(calls) == 2


# Where operators serve


def hook(module: nn.Module) -> Callable[[], None]:
    return module.register_forward_hook(lambda *_: None).remove


def pre_hook(module: nn.Module) -> Callable[[], None]:
    return module.register_forward_pre_hook(lambda *_: None).remove


def global_hook(_: nn.Module) -> Callable[[], None]:
    return nn.modules.module.register_module_forward_hook(lambda *_: None).remove


def pruned(module: nn.Module) -> Callable[[], None]:
    prune.identity(module, "weight")
    return lambda: prune.remove(module, "weight")


def parametrised(module: nn.Module) -> Callable[[], None]:
    parametrizations.weight_norm(module)

    def undo() -> None:
        weight = nn.Parameter(module.weight.clone())
        remove_parametrizations(module, "weight")
        del module.weight  # a tensor, as long as gradients are not wanted
        module.weight = weight

    return undo


WAYS = hook, pre_hook, global_hook, pruned, parametrised


@pytest.mark.parametrize("way", WAYS)
@torch.no_grad()
def test_modules_that_do_more_than_their_weights_are_called(way: Any, calls: list[str]) -> None:
    decoder, x, levels = Decoder(16, 2), torch.randn(1, 5, 16), [torch.randn(1, 7, 16)] * 2
    stack = CMABStack(depth=1, dim=16, num_slots=4, num_heads=2)
    value, latents = torch.randn(1, *stack.layout, dtype=torch.float64), torch.randn(1, 3, 16)
    inner = [decoder.cross[0].attention.key_value, decoder.feed[1].contract]
    inner += [stack.readings[0].data[1].attention.query, stack.readings[0].out]
    outer = [decoder.cross, decoder.cross[1], decoder.feed[0].norm, decoder.cross[0].attention]
    outer += [stack.readings[0], stack.readings[0].latents, stack.readings[0].data[2], stack.observation]
    for module in inner if way in (pruned, parametrised) else inner + outer:
        of_stack = any(module is part for part in stack.modules())
        work = (lambda: stack.read_value(value, latents)[0]) if of_stack else lambda: decoder(x, levels)
        first = work()
        assert len(calls) == 1
        undo = way(module)
        assert torch.allclose(work(), first, atol=1e-5)
        assert len(calls) == 1, type(module)
        undo()
        assert torch.allclose(work(), first, atol=1e-5)
        assert len(calls) == 2, type(module)
        calls.clear()


@pytest.mark.parametrize("way", [pruned, nn.utils.weight_norm])
@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
@torch.no_grad()
def test_every_linear_map_of_a_model_may_be_pruned(way: Callable[[nn.Module], object]) -> None:
    model = CMANP(dim_x=2, dim_y=1, dim=16, depth=2, num_slots=4, num_latents=4, hidden=8).eval()
    x, y = torch.randn(1, 5, 2), torch.randn(1, 5, 1)
    expected = model.query(model.condition(x, y), x).mean
    for module in [module for module in model.modules() if type(module) is nn.Linear]:
        way(module)
        assert torch.allclose(model.query(model.condition(x, y), x).mean, expected, atol=1e-4)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_gradients_other_numbers_and_transforms_get_operators(calls: list[str]) -> None:
    decoder, x, levels = Decoder(16, 2), torch.randn(2, 5, 16), [torch.randn(2, 7, 16)] * 2
    found = decoder(x, levels)
    found.sum().backward()
    assert decoder.cross[0].attention.query.weight.grad is not None
    with torch.no_grad():
        mapped = torch.func.vmap(lambda x, level: decoder(x[None], [level[None]] * 2)[0])(x, levels[0])
        assert torch.allclose(mapped, found, atol=1e-5)
        with torch.autocast("cpu", torch.bfloat16):
            decoder(x, levels)
        with _Watched() as watched:
            decoder(x, levels)
        assert watched.operators > 10
        long = [torch.randn(1, cpu_reading.KEYS + 1, 16)] * 2
        decoder(x[:1], long)
        decoder(torch.randn(cpu_reading.FEW + 1, 3, 16), [torch.randn(cpu_reading.FEW + 1, 7, 16)] * 2)
        assert decoder(x[:0], [level[:0] for level in levels]).shape == (0, 5, 16)
        assert decoder(x[:, :0], levels).shape == (2, 0, 16)
        program = torch.export.export(_Module(decoder), (x, levels[0]))
        assert torch.allclose(program.module()(x, levels[0]), found, atol=1e-5)
        assert not calls
        decoder.cross.double(), decoder.feed.double()
        decoder(x.double(), [level.double() for level in levels])
    assert not calls


class _Watched(TorchDispatchMode):
    """Counts the operators that are run inside."""

    operators = 0

    def __torch_dispatch__(self, function: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operators += 1
        return function(*args, **(kwargs or {}))


class _Module(nn.Module):
    """What is exported has to be one."""

    def __init__(self, decoder: Decoder) -> None:
        super().__init__()
        self.cross, self.feed = decoder.cross, decoder.feed

    def forward(self, x: Tensor, level: Tensor) -> Tensor:
        return through_levels(x, [level, level], self.cross, self.feed)


@torch.no_grad()
def test_every_change_of_weights_and_modules_is_seen(calls: list[str]) -> None:
    decoder, x, levels = Decoder(16, 2), torch.randn(1, 5, 16), [torch.randn(1, 7, 16)] * 2
    linear = decoder.feed[0].expand

    def swapped() -> None:
        linear.weight.data = torch.randn_like(linear.weight)

    def replaced() -> None:
        decoder.cross[1].attention = CrossAttention(dim=16, num_heads=4).attention

    def other() -> None:
        decoder.feed = Decoder(16, 2).feed

    def norm() -> None:
        decoder.feed[0].norm = nn.LayerNorm(16)

    def turned() -> None:
        square = decoder.cross[0].attention.query.weight
        square.data = square.data.mT

    def none() -> None:
        """As it was before."""

    def filled() -> None:
        decoder.feed[0].expand.weight.numpy().fill(0.1)

    for change in (none, lambda: linear.weight.data.mul_(2), swapped, replaced, other, norm, filled, none):
        change()
        assert off(decoder(x, levels), decoder.in_numpy(x, levels)) < EXACT
    assert len(calls) == 8
    turned()
    assert off(decoder(x, levels), decoder.in_numpy(x, levels)) < EXACT
    assert len(calls) == 8  # machine code reads rows that lie one after another


class _Doubled(nn.Linear):
    """A linear map that does more than its weights say."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


class _Zero(nn.Module):
    """Attention that reads nothing."""

    num_heads = 2

    def forward(self, x: Tensor, *_: Any) -> Tensor:
        return torch.zeros_like(x)


@torch.no_grad()
def test_a_layer_of_another_kind_is_called(calls: list[str]) -> None:
    decoder, x, levels = Decoder(16, 2), torch.randn(1, 5, 16), [torch.randn(1, 7, 16)] * 2
    other = _Doubled(*reversed(decoder.feed[0].contract.weight.shape))
    decoder.feed[0].contract = other
    found = decoder(x, levels)
    plain, decoder.cross[0].attention = decoder.cross[0].attention, _Zero()
    decoder(x, levels)
    decoder.cross[0].attention = plain
    assert not calls
    decoder.feed[0].contract = nn.Linear(other.in_features, other.out_features)
    decoder.feed[0].contract.weight.copy_(2 * other.weight)
    decoder.feed[0].contract.bias.copy_(2 * other.bias)
    torch.testing.assert_close(decoder(x, levels), found, atol=1e-5, rtol=1e-5)
    assert len(calls) == 1


@torch.no_grad()
def test_copies_of_a_model_have_weights_of_their_own(calls: list[str]) -> None:
    model = CMANP(dim_x=1, dim_y=1, dim=16, depth=2, num_slots=5, num_latents=6).eval()
    x, y, xt = torch.randn(1, 9, 1), torch.randn(1, 9, 1), torch.randn(1, 4, 1)
    first = model.query(model.condition(x, y), xt).mean
    assert calls == ["layers"] * 2
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    copies = copy.deepcopy(model), pickle.loads(pickle.dumps(model)), torch.load(file, weights_only=False)  # noqa: S301
    for parameter in model.parameters():
        parameter.zero_()
    for other in copies:
        assert other.stack.__dict__.get("_program") is other.embed_target.__dict__.get("_program") is None
        assert torch.equal(other.query(other.condition(x, y), xt).mean, first)
    assert calls == ["layers"] * 8
    assert "_program" not in model.state_dict()
    assert not torch.equal(model.query(model.condition(x, y), xt).mean, first)


@torch.no_grad()
def test_numbers_that_are_none_stay_none_and_harm_no_other_task(calls: list[str]) -> None:
    decoder, x, levels = Decoder(16, 2), torch.randn(2, 20, 16), [torch.randn(2, 7, 16)] * 2
    expected = decoder(x, levels)
    x[0, 3] = torch.nan
    levels[1] = levels[1].clone()
    levels[1][0, 2] = torch.inf
    found = decoder(x, levels)
    assert bool(found[0].isnan().all())
    assert torch.equal(found[1], expected[1])
    assert len(calls) == 2


@pytest.mark.parametrize("usual", [torch.float64, torch.float16])
def test_what_a_model_answers_does_not_depend_on_the_usual_precision_of_new_tensors(
    usual: torch.dtype, calls: list[str]
) -> None:
    model = CMANP(dim_x=2, dim_y=1, dim=16, depth=2, num_slots=4, num_latents=4, hidden=8).eval()
    events = CMHP(num_marks=2, dim=16, num_slots=4).eval()
    happened = Events.from_arrival_times([[0.0, 1.0, 2.5]], marks=[[0, 1, 0]], unit="s", num_marks=2)
    q, k, v = torch.randn(2, 4, 8), torch.randn(1, 2, 1200, 8), torch.randn(1, 2, 1200, 8)
    x, y = torch.randn(1, 5, 2), torch.randn(1, 5, 1)

    @torch.no_grad()
    def answers() -> list[Tensor]:
        state = model.update(model.condition(x, y), x[:, :1], y[:, :1])
        happening = events.query(events.condition(happened)).mean
        return [model.query(state, x).mean, happening, *operators.forward_blocked(q, k, v, None)]

    expected, before = answers(), torch.get_default_dtype()
    torch.set_default_dtype(usual)
    try:
        found = answers()
    finally:
        torch.set_default_dtype(before)
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)
    assert calls

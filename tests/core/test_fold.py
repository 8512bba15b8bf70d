"""Gradients in constant memory: those of the dense path, however the context is cut."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from literal import Literal
from torch import Tensor, nn
from torch.nn.utils import parametrize

from constmem import CMANP
from constmem.neural_processes.points import normal

EXACT, SINGLE = 1e-10, 1e-4
Loss = Callable[[CMANP], Tensor]


def small(dtype: torch.dtype = torch.float64, shake: float = 0.2, **settings: Any) -> CMANP:
    torch.manual_seed(1)
    sizes = {"dim": 16, "depth": 2, "num_slots": 6, "num_latents": 5, "num_heads": 2, "hidden": 12}
    model = CMANP(dim_x=2, dim_y=1, **{**sizes, **settings})
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(shake * torch.randn_like(parameter))
    return model.to(dtype)


def task(n: int = 23, dtype: torch.dtype = torch.float64, b: int = 2) -> tuple[Tensor, ...]:
    random = torch.Generator().manual_seed(5)
    sizes = (n, 2), (n, 1), (6, 2), (6, 1)
    return tuple(torch.randn(b, m, d, generator=random).to(dtype) for m, d in sizes)


def dense(model: CMANP, x: Tensor, y: Tensor, xt: Tensor, yt: Tensor) -> Tensor:
    """The loss by the literal algorithm on the whole context: plain autograd, nothing shared."""
    literal = Literal(model, chunk=None)
    loss: Tensor = -normal(*literal.query(literal.condition(x, y), xt)).log_prob(yt).sum(-1).mean()
    return loss


def lean(
    model: CMANP, x: Tensor, y: Tensor, xt: Tensor, yt: Tensor, mask: Tensor | None = None, chunk: int = 4
) -> Tensor:
    loss: Tensor = -model(x, y, xt, mask, chunk).log_prob(yt).sum(-1).mean()
    return loss


def gradients(model: CMANP, loss: Tensor, *others: Tensor) -> dict[str, Tensor]:
    wanted = {**dict(model.named_parameters()), **{f"input {i}": t for i, t in enumerate(others)}}
    found = torch.autograd.grad(loss, list(wanted.values()), allow_unused=True)
    return {name: grad for name, grad in zip(wanted, found, strict=True) if grad is not None}


def assert_gradients(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float) -> None:
    """All within the tolerance, relative to the largest entry of each gradient."""
    assert found.keys() == expected.keys()
    for name, grad in expected.items():
        scale = max(float(grad.abs().max()), 1e-3)
        assert float((found[name] - grad).abs().max()) <= tolerance * scale, name


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, EXACT), (torch.float32, SINGLE)])
@pytest.mark.parametrize("chunk", [1, 4, 22, 4096])
def test_gradients_in_chunks_are_those_of_the_dense_path(
    chunk: int, dtype: torch.dtype, tolerance: float
) -> None:
    model, data = small(dtype), task(dtype=dtype)
    found = gradients(model, lean(model, *data, chunk=chunk))
    reference = model.double()
    expected = gradients(reference, dense(reference, *(t.double() for t in data)))
    assert len(found) == len(list(model.parameters()))
    assert_gradients(found, expected, tolerance)


def test_gradients_over_long_chunks_in_float32_are_those_of_the_dense_path() -> None:
    model, data = small(torch.float32), task(2000, torch.float32, b=1)
    found = gradients(model, lean(model, *data, chunk=700))
    reference = model.double()
    assert_gradients(found, gradients(reference, dense(reference, *(t.double() for t in data))), SINGLE)


@pytest.mark.parametrize("residual", ["normed", "raw"])
def test_both_residuals_have_the_gradients_of_the_dense_path(residual: str) -> None:
    model, data = small(residual=residual), task()
    expected = gradients(model, dense(model, *data))
    assert_gradients(gradients(model, lean(model, *data)), expected, EXACT)


@pytest.mark.parametrize("chunk", [1, 4, 4096])
def test_masked_gradients_are_those_of_leaving_out(chunk: int) -> None:
    model, (x, y, xt, yt) = small(), task()
    mask = torch.rand(2, 23) < 0.5
    mask[:, :8] = torch.tensor([[True], [False]])  # whole chunks of the second task are masked out
    junk = ~mask[..., None]
    dirty = (t.masked_fill(junk, float("nan")).requires_grad_() for t in (x, y))
    dirty_x, dirty_y = dirty
    found = gradients(model, lean(model, dirty_x, dirty_y, xt, yt, mask, chunk), dirty_x, dirty_y)
    x.requires_grad_(), y.requires_grad_()
    loss = torch.stack(
        [
            dense(model, *(t[i : i + 1, mask[i]] for t in (x, y)), xt[i : i + 1], yt[i : i + 1])
            for i in range(2)
        ]
    ).mean()
    assert_gradients(found, gradients(model, loss, x, y), EXACT)
    assert not bool(found["input 0"][~mask].any())


@pytest.mark.parametrize("chunk", [1, 4, 4096])
def test_inputs_have_gradients_too(chunk: int) -> None:
    model, (x, y, xt, yt) = small(), task()
    for tensor in (x, y, xt):
        tensor.requires_grad_()
    found = gradients(model, lean(model, x, y, xt, yt, chunk=chunk), x, y, xt)
    assert_gradients(found, gradients(model, dense(model, x, y, xt, yt), x, y, xt), EXACT)


def test_inputs_have_gradients_where_no_parameter_learns() -> None:
    model, (x, y, xt, yt) = small().requires_grad_(False), task()
    x.requires_grad_(), y.requires_grad_()
    found = torch.autograd.grad(lean(model, x, y, xt, yt), (x, y))
    expected = torch.autograd.grad(dense(model, x, y, xt, yt), (x, y))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, atol=EXACT, rtol=0)


@pytest.mark.parametrize(
    "only", ["slots", "query", "key_value", "tokens_scale", "embed.layers", "latents", "head"]
)
def test_parameters_may_be_frozen(only: str) -> None:
    """Whatever alone is trained gets the gradient it has when everything is."""
    model, data = small(), task()
    expected = gradients(model, dense(model, *data))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(only in name)
    lean(model, *data).backward()
    for name, parameter in model.named_parameters():
        if only in name:
            assert parameter.grad is not None
            torch.testing.assert_close(parameter.grad, expected[name], atol=EXACT, rtol=1e-9)
        else:
            assert parameter.grad is None


def test_gradients_pass_through_a_merge_of_states() -> None:
    """What merging weighs the parts by, their normalisers, has gradients as well."""
    model, (x, y, xt, yt) = small(), task()
    expected = gradients(model, dense(model, x, y, xt, yt))
    for join in (
        lambda left, right: left.merge(right),
        lambda left, right: right.merge(left),
        lambda left, _: model.update(left, x[:, 9:], y[:, 9:], chunk=3),
    ):
        left, right = (model.condition(x[:, i], y[:, i], chunk=3) for i in (slice(0, 9), slice(9, 23)))
        loss = -model.query(join(left, right), xt).log_prob(yt).sum(-1).mean()
        assert_gradients(gradients(model, loss), expected, EXACT)


def test_gradients_pass_through_a_decayed_state() -> None:
    model, (x, y, xt, yt) = small(), task()
    losses = []
    for chunk in (3, 4096):
        old, new = model.condition(x[:, :9], y[:, :9], chunk=chunk), model.observe(x[:, 9:], y[:, 9:])
        losses.append(-model.query(old.decay(-0.7).merge(new), xt).log_prob(yt).mean())
    assert_gradients(gradients(model, losses[0]), gradients(model, losses[1]), EXACT)


@pytest.mark.parametrize("of", ["value", "lse", "both"])
def test_values_and_normalisers_have_gradients_apart(of: str) -> None:
    model, (x, y, _, _) = small(), task()
    weight = torch.randn(2, *model.layout).double()

    def loss(value: Tensor, lse: Tensor) -> Tensor:
        parts = {"value": (value * weight).sum(), "lse": (lse * weight[..., 0]).sin().sum()}
        return sum(parts.values()) if of == "both" else parts[of]

    literal = Literal(model, chunk=None).condition(x, y)
    expected = gradients(model, loss(torch.stack(literal.embedding, 1), torch.stack(literal.log_c, 1)))
    for chunk in (1, 4, 4096):
        state = model.condition(x, y, chunk=chunk)
        assert_gradients(gradients(model, loss(state.value, state.lse)), expected, EXACT)


def test_a_stream_of_chunks_has_the_same_gradients() -> None:
    model, (x, y, xt, yt) = small(), task()
    expected = gradients(model, dense(model, x, y, xt, yt))
    sizes = [5, 1, 10, 7]
    pairs = zip(x.split(sizes, 1), y.split(sizes, 1), strict=True)
    loss = -model.query(model.condition_chunks(pairs), xt).log_prob(yt).sum(-1).mean()
    assert_gradients(gradients(model, loss), expected, EXACT)


def test_backward_twice_gives_the_gradient_twice() -> None:
    model, data = small(), task()
    loss = lean(model, *data)
    loss.backward(retain_graph=True)
    once = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    loss.backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, 2 * once[name])


def test_gradients_do_not_depend_on_what_came_before() -> None:
    model, data = small(), task()
    first = gradients(model, lean(model, *data))
    with torch.no_grad():
        model.query(model.condition(*data[:2]), data[2])
    assert_gradients(gradients(model, lean(model, *data)), first, 0.0)


@pytest.mark.parametrize(
    "name", ["stack.observation.slots", "stack.observation.key_value", "embed.layers.0.bias"]
)
def test_parameters_that_change_before_the_backward_pass_are_noticed(name: str) -> None:
    model, data = small(), task()
    loss = lean(model, *data)
    with torch.no_grad():
        model.get_parameter(name).add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_data_that_changes_before_the_backward_pass_is_noticed() -> None:
    model, (x, y, xt, yt) = small(), task()
    loss = lean(model, x, y, xt, yt)
    y.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_mask_that_changes_before_the_backward_pass_is_noticed() -> None:
    model, (x, y, *_) = small(), task()
    mask = torch.rand(x.shape[:2]) < 0.7
    state = model.condition(x, y, chunk=4, mask=mask)
    mask.logical_not_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        state.value.sum().backward()


def test_the_backward_pass_leaves_the_module_to_other_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    model, linear, own = small(), F.linear, []
    loss, (first, *_) = lean(model, *task()), model.embed.layers
    weight = first.weight

    def watched(*given: Tensor) -> Tensor:
        own.append(first.weight is weight)
        return linear(*given)

    monkeypatch.setattr(F, "linear", watched)
    loss.backward()
    assert own
    assert all(own)


def test_training_steps_go_the_same_way_as_those_of_the_dense_path() -> None:
    data = task()
    ends = []
    for loss in (lean, dense):
        model = small()
        optimiser = torch.optim.Adam(model.parameters(), lr=1e-2)
        for _ in range(5):
            optimiser.zero_grad()
            loss(model, *data).backward()
            optimiser.step()
            with torch.no_grad():
                model.condition(*data[:2])  # what is remembered of the weights must not outlive them
        ends.append(loss(model, *data).item())
    assert abs(ends[0] - ends[1]) < 1e-8
    assert ends[0] < lean(small(), *data).item() - 0.01


def test_parametrised_weights_get_the_gradients() -> None:
    model, data = small(), task()
    parametrize.register_parametrization(model.stack.observation, "query", nn.Tanh())
    found, expected = (gradients(model, loss(model, *data)) for loss in (lean, dense))
    assert_gradients(found, expected, EXACT)


def test_lent_parameters_get_the_gradients() -> None:
    model, (x, y, xt, yt) = small(), task()
    lent = {name: (1.1 * p.detach()).requires_grad_() for name, p in model.named_parameters()}
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    out = torch.func.functional_call(model, lent, (x, y, xt), {"chunk": 4})
    loss = -out.log_prob(yt).sum(-1).mean()
    found = dict(zip(lent, torch.autograd.grad(loss, list(lent.values())), strict=True))
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    model.load_state_dict({name: p.detach() for name, p in lent.items()})
    expected = gradients(model, dense(model, x, y, xt, yt))
    assert_gradients(found, expected, EXACT)


def test_second_derivatives_are_refused_rather_than_wrong() -> None:
    model, data = small(), task()
    (first,) = torch.autograd.grad(lean(model, *data), [model.stack.observation.slots], create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()


@pytest.mark.parametrize("chunk", [1, 7, 4096])
def test_bfloat16_autocast_is_close(chunk: int) -> None:
    model, (x, y, xt, _) = small(torch.float32, shake=0.0), task(dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rough = model(x, y, xt, None, chunk).mean
    exact = model(x, y, xt, None, chunk).mean
    assert 0 < float((rough - exact).detach().abs().max()) < 0.1
    found, expected = (gradients(model, mean.square().mean()) for mean in (rough, exact))
    assert found.keys() == expected.keys()
    one, other = (torch.cat([g.flatten() for g in grads.values()]) for grads in (found, expected))
    assert float(torch.cosine_similarity(one, other, dim=0)) > 0.95


def test_the_backward_pass_computes_again_in_the_precision_of_the_forward_pass() -> None:
    model, data = small(torch.float32), task(dtype=torch.float32)
    seen: list[torch.dtype] = []
    model.embed.register_forward_hook(lambda _, __, out: seen.append(out.dtype))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = lean(model, *data, chunk=6)
    assert seen == [torch.bfloat16] * 4
    loss.backward()
    assert seen == [torch.bfloat16] * 8


def test_evaluating_after_autocast_training_is_in_full_precision() -> None:
    model, data = small(torch.float32), task(dtype=torch.float32)
    with torch.no_grad():
        expected = model.condition(*data[:2])
    fresh = small(torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        lean(fresh, *data, chunk=7)
    with torch.no_grad():
        found = fresh.condition(*data[:2])
    assert torch.equal(found.value, expected.value)
    assert torch.equal(found.lse, expected.lse)

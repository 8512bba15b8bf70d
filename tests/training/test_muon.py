"""The optimiser: matrices step evenly in every direction, all else goes Adam's way."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from constmem import CMANP
from constmem.training.steps import LEAST, SIZE, Muon, _matrices, orthogonal


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("shape", [(3, 32, 32), (2, 64, 16), (2, 16, 64), (1, 17, 33)])
def test_singular_values_are_drawn_near_one_and_directions_kept(shape: tuple[int, int, int]) -> None:
    u, _, v = torch.linalg.svd(random(*shape), full_matrices=False)
    matrices = u @ torch.diag(torch.linspace(0.2, 3.0, min(shape[1:]))) @ v
    made = orthogonal(matrices)
    assert made.shape == matrices.shape
    values = torch.linalg.svdvals(made)
    assert float(values.min()) > 0.6
    assert float(values.max()) < 1.3
    nearest = u @ v
    cosine = (made * nearest).sum((-2, -1)) / made.norm(dim=(-2, -1)) / nearest.norm(dim=(-2, -1))
    assert float(cosine.min()) > 0.97


def test_the_size_of_a_gradient_does_not_matter_to_a_matrix() -> None:
    matrices = random(1, 24, 24)
    assert torch.allclose(orthogonal(matrices), orthogonal(1e4 * matrices), atol=1e-4)


def test_a_gradient_of_zero_moves_nothing_and_gives_no_nan() -> None:
    assert torch.equal(orthogonal(torch.zeros(2, 16, 16)), torch.zeros(2, 16, 16))


def test_a_step_is_as_large_as_it_says_and_goes_against_the_gradient() -> None:
    layer = nn.Linear(64, 32, bias=False)
    layer.weight.grad = random(32, 64)
    before = layer.weight.detach().clone()
    Muon(layer, lr=0.01).step()
    step = layer.weight.detach() - before
    expected = -0.01 * SIZE * 64**0.5 * orthogonal(layer.weight.grad[None])[0]
    assert torch.allclose(step, expected, atol=1e-7)
    assert float((step * layer.weight.grad).sum()) < 0


def test_momentum_looks_ahead() -> None:
    layer = nn.Linear(16, 16, bias=False)
    optimiser = Muon(layer, lr=1.0, momentum=0.5)
    moment = torch.zeros(16, 16)
    for seed in range(3):
        grad = random(16, 16, seed=seed)
        moment = 0.5 * moment + 0.5 * grad
        ahead = 0.5 * grad + 0.5 * moment
        before = layer.weight.detach().clone()
        layer.weight.grad = grad.clone()
        optimiser.step()
        expected = -SIZE * 4 * orthogonal(ahead[None])[0]
        assert torch.allclose(layer.weight.detach() - before, expected, atol=1e-5)


def test_everything_but_matrices_steps_as_adam_does() -> None:
    torch.manual_seed(0)
    ours, theirs = nn.Linear(4, 64), nn.Linear(4, 64)
    theirs.load_state_dict(ours.state_dict())
    one = Muon(ours, lr=0.01)
    other = torch.optim.Adam(theirs.parameters(), lr=0.01, betas=(0.9, 0.95))
    for seed in range(5):
        for layer in (ours, theirs):
            layer.weight.grad, layer.bias.grad = random(64, 4, seed=seed), random(64, seed=seed)
        one.step()
        other.step()
    assert torch.allclose(ours.weight, theirs.weight, atol=1e-7)
    assert torch.allclose(ours.bias, theirs.bias, atol=1e-7)


def test_matrices_are_the_linear_maps_of_a_model_and_not_its_tables_of_vectors() -> None:
    model = CMANP(dim_x=2, dim_y=1, dim=32, depth=2, num_slots=40, num_latents=48, hidden=64)
    chosen = {id(p) for p in _matrices(model)}
    names = {name for name, p in model.named_parameters() if id(p) in chosen}
    assert {"stack.observation.query", "stack.observation.key_value"} <= names
    assert "embed.layers.1.weight" in names
    assert "embed.layers.0.weight" not in names  # 3 channels come in
    assert not names & {"latents", "stack.observation.slots", "stack.observation.slots_scale"}
    assert all(min(p.shape[-2:]) >= LEAST for p in _matrices(model))


def test_a_stack_of_matrices_steps_as_each_alone_would() -> None:
    class Stacked(nn.Module):
        matrices = ("weight",)

        def __init__(self, weight: Tensor) -> None:
            super().__init__()
            self.weight = nn.Parameter(weight.clone())

    weight, grad = random(3, 16, 20), random(3, 16, 20, seed=1)
    together = Stacked(weight)
    together.weight.grad = grad.clone()
    Muon(together, lr=0.1).step()
    for i in range(3):
        alone = Stacked(weight[i])
        alone.weight.grad = grad[i].clone()
        Muon(alone, lr=0.1).step()
        assert torch.allclose(together.weight[i], alone.weight, atol=1e-6)


def test_weight_decay_takes_its_share_at_every_step() -> None:
    layer = nn.Linear(16, 16)
    for p in layer.parameters():
        p.grad = torch.zeros_like(p)
    before = [p.detach().clone() for p in layer.parameters()]
    Muon(layer, lr=0.1, weight_decay=0.5).step()
    for p, old in zip(layer.parameters(), before, strict=True):
        assert torch.allclose(p, 0.95 * old, atol=1e-7)


def test_parameters_without_a_gradient_stay() -> None:
    layer = nn.Linear(16, 16)
    before = layer.weight.detach().clone()
    layer.bias.grad = torch.ones(16)
    Muon(layer, lr=0.1).step()
    assert torch.equal(layer.weight, before)


def test_a_weight_that_is_computed_from_others_leaves_those_to_adam() -> None:
    layer = nn.utils.parametrizations.weight_norm(nn.Linear(16, 16))
    before = [p.detach().clone() for p in layer.parameters()]
    for p in layer.parameters():
        p.grad = torch.ones_like(p)
    Muon(layer, lr=0.1).step()
    for p, old in zip(layer.parameters(), before, strict=True):
        assert torch.allclose(p, old - 0.1, atol=1e-6)


def test_a_closure_is_refused() -> None:
    with pytest.raises(ValueError, match="closure"):
        Muon(nn.Linear(16, 16), lr=0.1).step(lambda: 0.0)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("setting", "told"),
    [
        ({"lr": -1.0}, "lr is -1.0, but must be 0 or more"),
        ({"lr": float("nan")}, "lr is nan"),
        ({"lr": float("inf")}, "lr is inf, but must be 0 or more, and finite"),
        ({"lr": torch.tensor(-0.5)}, "lr is -0.5"),
        ({"lr": torch.ones(2)}, "lr is a tensor of 2 numbers"),
        ({"momentum": 1.0}, "momentum is 1.0, but must be 0 or more, and below 1"),
        ({"weight_decay": -0.1}, "weight_decay is -0.1"),
    ],
)
def test_settings_that_make_no_sense_are_refused(setting: dict[str, Any], told: str) -> None:
    layer = nn.Linear(16, 16)
    with pytest.raises(ValueError, match=told):
        Muon(layer, **{"lr": 0.1} | setting)


def test_a_rate_of_zero_and_one_in_a_tensor_are_fine() -> None:
    assert Muon(nn.Linear(16, 16), lr=0.0).param_groups[0]["lr"] == 0
    assert Muon(nn.Linear(16, 16), lr=torch.tensor(0.1)).param_groups[0]["lr"] == torch.tensor(0.1)


def test_parameters_instead_of_the_model_are_refused() -> None:
    with pytest.raises(TypeError, match=r"the model, not its parameters: an nn\.Module, not generator"):
        Muon(nn.Linear(16, 16).parameters(), lr=0.1)  # type: ignore[arg-type]

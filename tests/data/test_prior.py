"""Synthetic tables: residuals of rows that a regression has not seen, on the scale that it expects."""

import torch

from constmem.data import table_tasks
from constmem.data.prior import (
    CHANNELS,
    FAR,
    LEAST,
    _factor,
    _solved,
    _strength,
    context_inputs,
    residual_of,
    target_inputs,
)
from constmem.data.task import Task


def drawn(seed: int = 0, batch: int = 24) -> Task:
    return table_tasks(batch, generator=torch.Generator().manual_seed(seed), rows=96, targets=64)


def test_a_seed_always_gives_the_same_tables() -> None:
    first, again, other = drawn(1), drawn(1), drawn(2)
    assert torch.equal(first.yt, again.yt)
    assert not torch.equal(first.yt, other.yt)


def test_tables_are_finite_and_of_the_sizes_asked_for() -> None:
    task = drawn()
    assert task.xc.shape == (24, 96, CHANNELS)
    assert task.xt.shape == (24, 64, CHANNELS)
    for tensor in (task.xc, task.yc, task.xt, task.yt):
        assert bool(tensor.isfinite().all())
    assert int(task.num_context.min()) >= LEAST
    assert len(set(task.num_context.tolist())) > 5


def test_residuals_are_about_as_large_as_they_are_said_to_be() -> None:
    task = drawn(batch=64)
    spread = task.yt[..., 0].square().mean(1).sqrt()
    assert 0.8 < float(spread.median()) < 1.3
    known = torch.where(task.mask_c, task.yc[..., 0], 0.0) if task.mask_c is not None else task.yc[..., 0]
    before = (known.square().sum(1) / task.num_context).sqrt()
    assert 0.8 < float(before.median()) < 1.3


def test_what_a_row_is_shown_as_says_nothing_of_a_target_that_is_not_known() -> None:
    mean, deviation, columns = torch.zeros(3), torch.ones(3), torch.zeros(3, 4)
    sigma, rows = torch.tensor(0.5), torch.tensor(100.0)
    asked = target_inputs(mean, deviation, columns, sigma, rows)
    known = context_inputs(mean, torch.tensor([1.0, 2.0, 3.0]), columns, sigma)
    assert torch.equal(asked[:, 1], torch.zeros(3))
    assert torch.equal(known[:, 1], torch.tensor([1.0, 2.0, 3.0]))
    assert float(residual_of(torch.tensor(1e9), torch.tensor(0.0), sigma)) == FAR


def test_the_regression_inside_is_ridge_regression_and_finds_how_much_noise_there_is() -> None:
    random = torch.Generator().manual_seed(0)
    phi = torch.randn(5, 400, 6, generator=random, dtype=torch.float64)
    weight = torch.randn(5, 6, 1, generator=random, dtype=torch.float64)
    noise = torch.randn(5, 400, 1, generator=random, dtype=torch.float64)
    rows = torch.full((5,), 400.0, dtype=torch.float64)
    for level, low, high in ((0.01, 0.0, 0.01), (3.0, 0.1, 1.1)):
        y = phi @ weight + level * noise
        gram, cross = phi.mT @ phi, phi.mT @ y
        strength = _strength(gram, cross, y, rows)
        assert bool(((strength >= low) & (strength <= high)).all())
        solved = _solved(_factor(gram, strength), cross)
        exact = torch.linalg.solve(gram + strength[:, None, None] * torch.eye(6, dtype=torch.float64), cross)
        assert torch.allclose(solved, exact, atol=1e-10)

"""Scores against slow references, and the tables of the documents against the rows they are made of."""

import runpy
import subprocess
import sys
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributions import Normal

from constmem import data as data_sets
from constmem.data import Kernel, Task, gp_evaluation_tasks
from constmem.evaluation import AT_ONCE, crps_of, evaluate, pit_values
from constmem.neural_processes import CMANP, MODELS
from constmem.neural_processes.joint import SampleMixture
from constmem.training.recipes import changed, recipe
from constmem.training.sources import open_source
from tests.laws.models import POINT_MODELS, data, small

ROOT = Path(__file__).parents[2]


def crps_by_sampling(draws: np.ndarray, y: float) -> float:
    return float(np.abs(draws - y).mean() - 0.5 * np.abs(draws[:, None] - draws[None, ::7]).mean())


@pytest.mark.parametrize(("mean", "std", "y"), [(0.0, 1.0, 0.3), (2.0, 0.5, -1.0), (0.0, 0.1, 0.0)])
def test_crps_of_a_normal_is_that_of_its_samples(mean: float, std: float, y: float) -> None:
    found = crps_of(Normal(torch.tensor(mean), torch.tensor(std)), torch.tensor(y))
    draws = np.random.default_rng(0).normal(mean, std, 4000)
    assert float(found) == pytest.approx(crps_by_sampling(draws, y), abs=0.03 * std)


def test_crps_of_a_mixture_is_that_of_its_samples() -> None:
    mean, std = torch.tensor([[[[-1.0], [2.0]]]]), torch.tensor([[[[0.5], [0.2]]]])  # (1, 1, k, 1)
    mixture = SampleMixture(mean, std)
    generator = np.random.default_rng(0)
    draws = np.concatenate([generator.normal(-1, 0.5, 3000), generator.normal(2, 0.2, 3000)])
    for y in (-1.0, 0.5, 2.5):
        found = crps_of(mixture, torch.full((1, 1, 1), y))
        assert float(found) == pytest.approx(crps_by_sampling(draws, y), abs=0.03)


def test_crps_of_a_mixture_is_the_integral_it_is_defined_by() -> None:
    random = np.random.default_rng(1)
    for k in (1, 2, 5, 6):
        mean, std = (
            torch.tensor(random.normal(size=(1, 1, k, 1))),
            torch.tensor(random.uniform(0.05, 1, (1, 1, k, 1))),
        )
        uneven = torch.tensor(random.normal(size=(1, 1, k))).log_softmax(-1)
        y, z = (
            torch.tensor([[[0.4]]], dtype=torch.float64),
            torch.linspace(-12, 12, 200_001, dtype=torch.float64),
        )
        for mixture in (SampleMixture(mean, std), SampleMixture(mean, std, uneven)):
            off = mixture.cdf(z[None, :, None]).squeeze() - (z >= y.squeeze()).double()
            assert float(crps_of(mixture, y)) == pytest.approx(float(torch.trapezoid(off**2, z)), abs=1e-4)


@pytest.mark.parametrize("name", list(POINT_MODELS))
def test_batches_scored_together_score_as_they_do_alone(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, tasks = small(name), []
    for i, (n, m) in enumerate(((5, 3), (9, 7), (5, 7), (2, 1))):
        tasks.append(Task(*data(n=n, m=m, b=2 + i, seed=i)))
    alone, alone_pits = evaluate(model, tasks), pit_values(model, tasks)
    calls: list[int] = []
    monkeypatch.setitem(AT_ONCE, "cpu", 120)  # the first two, and the other two
    condition = type(model).condition
    monkeypatch.setattr(
        type(model),
        "condition",
        lambda self, x, y, **mask: calls.append(len(x)) or condition(self, x, y, **mask),
    )
    together = evaluate(model, tasks)
    assert calls == [5, 9]
    for key, value in vars(alone).items():
        assert getattr(together, key) == pytest.approx(value, abs=1e-9), key
    torch.testing.assert_close(pit_values(model, tasks), alone_pits, atol=1e-9, rtol=0)


def test_a_share_of_the_functions_trained_and_validated_on_may_be_rougher(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    drawn: list[tuple[str, int]] = []
    for name in ("static_gp_tasks", "gp_evaluation_tasks"):
        plain = getattr(data_sets, name)

        def noted(*size: int, kernel: Kernel, plain: Any = plain, **more: Any) -> Any:
            drawn.append((kernel, *(size or (more["num_batches"],))))
            return plain(*size, kernel=kernel, **more)

        monkeypatch.setattr(data_sets, name, noted)
    settings = changed(recipe("gp", "cmanp-moments"), ["matern=0.25", "batch=8"], kind="gp")
    source = open_source("gp", settings, data_dir=None, device=torch.device("cpu"))
    assert source.sample(torch.Generator().manual_seed(0)).batch == 8
    assert len(list(source.validation())) == 200
    assert drawn == [("rbf", 6), ("matern", 2), ("rbf", 150), ("matern", 50)]


def test_gaussian_processes_are_scored_beside_their_exact_posterior(monkeypatch: pytest.MonkeyPatch) -> None:
    source = open_source("gp", recipe("gp", "cnp"), data_dir=None, device=torch.device("cpu"))
    known = list(gp_evaluation_tasks(kernel="matern", seed=0, num_batches=6))
    found = list(islice(source.tests["matern"](), 6))
    assert all(torch.equal(task.xt, again.xt) for (task, _), again in zip(known, found, strict=True))
    torch.manual_seed(0)
    model = MODELS["cnp"](**recipe("gp", "cnp").model)
    lines = [process.posterior(task).log_prob(task.yt.double())[..., 0] for task, process in known]
    for together in (0, 10_000):
        monkeypatch.setitem(AT_ONCE, "cpu", together)
        scores = evaluate(model, found)
        assert scores.exact == pytest.approx(float(torch.cat([t.flatten() for t in lines]).mean()))
        assert scores.exact_by_batch == pytest.approx(float(torch.stack([t.mean() for t in lines]).mean()))
        assert scores.log_likelihood < scores.exact


def test_targets_that_are_masked_out_may_hold_anything() -> None:
    model = small("cmanp")
    xc, yc, xt, yt = data(n=5, m=4, b=2)
    short = Task(xc, yc, xt[:, :3], yt[:, :3])
    mask = torch.tensor([[True, True, True, False]]).expand(2, -1)
    xt[:, 3], yt[:, 3] = float("nan"), float("inf")
    masked = Task(xc, yc, xt, yt, mask_t=mask)
    for key, value in vars(evaluate(model, [short])).items():
        assert vars(evaluate(model, [masked]))[key] == pytest.approx(value, abs=1e-6), key
    torch.testing.assert_close(pit_values(model, [masked]), pit_values(model, [short]))


def test_a_batch_without_targets_counts_for_nothing_and_none_at_all_is_an_error() -> None:
    model = small("cmanp")
    xc, yc, xt, yt = data(n=5, m=4, b=2)
    task, nothing = Task(xc, yc, xt, yt), Task(xc, yc, xt, yt, mask_t=torch.zeros(2, 4, dtype=torch.bool))
    for key, value in vars(evaluate(model, [task])).items():
        assert vars(evaluate(model, [nothing, task]))[key] == pytest.approx(value, abs=1e-6), key
    with pytest.raises(ValueError, match="no targets to score"):
        evaluate(model, [nothing])
    with pytest.raises(ValueError, match="no tasks to score"):
        evaluate(model, [])


def test_scores_equal_a_loop_over_points() -> None:
    torch.manual_seed(0)
    model = CMANP(dim_x=1, dim_y=2, dim=8, depth=1, num_slots=4, num_latents=4, hidden=8, num_heads=2)
    tasks = []
    for n, m in ((5, 3), (2, 7)):
        x, y = torch.rand(2, n + m, 1), torch.rand(2, n + m, 2)
        tasks.append(Task(x[:, :n], y[:, :n], x[:, n:], y[:, n:]))
    scores = evaluate(model, tasks)
    points, batches, errors, inside = [], [], [], []
    with torch.no_grad():
        for task in tasks:
            dist = model.query(model.condition(task.xc, task.yc), task.xt)
            batch = []
            for b in range(2):
                for i in range(task.xt.shape[1]):
                    z = (task.yt[b, i] - dist.mean[b, i]) / dist.stddev[b, i]
                    density = -0.5 * z**2 - dist.stddev[b, i].log() - 0.5 * np.log(2 * np.pi)
                    batch.append(float(density.sum()))
                    errors += (task.yt[b, i] - dist.mean[b, i]).square().tolist()
                    inside += (z.abs() <= 1.6448536).tolist()
            points += batch
            batches.append(np.mean(batch))
    assert scores.points == 20
    assert scores.log_likelihood == pytest.approx(np.mean(points), abs=1e-5)
    assert scores.log_likelihood_by_batch == pytest.approx(np.mean(batches), abs=1e-5)
    assert scores.rmse == pytest.approx(np.sqrt(np.mean(errors)), abs=1e-5)
    assert scores.coverage["0.9"] == pytest.approx(np.mean(inside), abs=1e-6)


def test_the_tables_of_the_documents_are_what_the_committed_rows_say() -> None:
    script = ROOT / "benchmarks" / "tables.py"
    done = subprocess.run(
        [sys.executable, str(script), "--check"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_the_shipped_model_completes_digits_of_another_data_set() -> None:
    from constmem.data import image_points, load_images
    from constmem.evaluation.demo import like_emnist

    model = CMANP.from_pretrained("emnist")
    digits = like_emnist(load_images("digits", split="test").pixels[:16])
    x, y = image_points(digits)
    order = torch.randperm(784, generator=torch.Generator().manual_seed(0))
    rest = order[200:]
    errors = []
    with torch.no_grad():
        for size in (0, 20, 200):
            known = order[:size]
            dist = model.query(model.condition(x[:, known], y[:, known]), x[:, rest])
            errors.append(float((dist.mean - y[:, rest]).square().mean().sqrt()))
    assert errors[0] > errors[1] > errors[2]
    assert errors[2] < 0.6 * errors[0]


@pytest.mark.parametrize("kernel", ["rbf", "matern"])
def test_the_shipped_model_of_functions_comes_near_the_exact_posterior(kernel: Kernel) -> None:
    model = CMANP.from_pretrained("gp")
    pairs = list(gp_evaluation_tasks(kernel=kernel, seed=1, num_batches=2))
    found = evaluate(model, [task for task, _ in pairs]).log_likelihood_by_batch
    exact = [process.posterior(task).log_prob(task.yt.double()).mean() for task, process in pairs]
    assert 0 < float(torch.stack(exact).mean()) - found < 0.4


def test_the_example_with_digits_draws_its_picture(tmp_path: Path) -> None:
    example = runpy.run_path(str(Path(__file__).parents[2] / "examples" / "digits.py"))
    assert example["main"](tmp_path / "digits.png").stat().st_size > 10_000

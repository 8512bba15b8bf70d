"""Benchmarks of functions of one number, against exact posteriors written out; weights are shipped whole."""

import json
from pathlib import Path

import gp_joint
import gp_limits
import pytest
import ship
import torch
from record import RESULTS

from constmem import CMANP
from constmem.data.gp import GaussianProcess, gp_tasks
from constmem.data.task import Task
from tests.evaluation.made import image_content


def one_task() -> tuple[Task, GaussianProcess]:
    return gp_tasks(1, kernel="rbf", generator=torch.Generator().manual_seed(3), max_points=20)


def test_processes_are_averaged_by_how_likely_they_hold_the_context(monkeypatch: pytest.MonkeyPatch) -> None:
    task, _ = one_task()
    monkeypatch.setattr(gp_limits, "GRID", (2, 1))
    parts, y = gp_limits.answers("rbf", task), task.yt[0, :, 0].double()
    lengths, (scale,) = gp_limits.middles((0.1, 0.6), 2), gp_limits.middles((0.1, 1.0), 1)
    density, weight = torch.zeros(len(y), dtype=torch.float64), torch.zeros((), dtype=torch.float64)
    for length in lengths:
        process = GaussianProcess("rbf", torch.tensor([length]).double(), torch.tensor([scale]).double())
        likely = gp_joint.evidence(process, task.xc, task.yc)[0].exp()
        density += likely * process.posterior(task).log_prob(task.yt.double())[0, :, 0].exp()
        weight += likely
    torch.testing.assert_close(gp_limits.averaged([parts], [1.0], y)[0], (density / weight).log())
    alone = tuple(part[:1] for part in parts)
    mixture, normal = gp_limits.averaged([alone], [1.0], y)
    torch.testing.assert_close(mixture, normal)  # of one process


def test_the_joint_likelihood_of_a_process_is_that_of_its_targets_one_after_another() -> None:
    task, process = one_task()
    total = torch.zeros((), dtype=torch.float64)
    xc, yc = task.xc, task.yc
    for i in range(task.xt.shape[1]):
        x, y = task.xt[:, i : i + 1], task.yt[:, i : i + 1]
        total += process.log_likelihood(Task(xc, yc, x, y)).sum()
        xc, yc = torch.cat([xc, x], 1), torch.cat([yc, y], 1)
    torch.testing.assert_close(gp_joint.exact(process, task).sum(), total, rtol=1e-6, atol=1e-6)


def test_no_prior_is_above_the_process_itself_and_knowing_more_kernels_helps_on_those() -> None:
    rows = {
        (row["test"], row["prior"], row["prediction"]): row["below_exact"]
        for row in json.loads((RESULTS / "gp_limits.json").read_text())["rows"]
    }
    assert min(rows.values()) > 0
    for shape in ("mixture", "one normal"):
        assert rows["matern", "rbf and matern", shape] < rows["matern", "rbf", shape]
    for test, prior in (("rbf", "rbf"), ("matern", "rbf and matern")):
        assert rows[test, prior, "mixture"] < rows[test, prior, "one normal"]


def test_a_scored_run_is_shipped_with_all_that_is_known_of_it(tmp_path: Path) -> None:
    run, folder = tmp_path / "run", tmp_path / "functions"
    model = CMANP(dim_x=1, dim_y=1, dim=16, depth=1, num_slots=4, num_latents=4, moments=8, experts=2)
    model.save_pretrained(run)
    (run / "eval.json").write_text(json.dumps(image_content(commit="abc", data="made up")))
    said = {"what": "w", "trained_on": "t", "license": "l", "domain": {"x": [[-2.0, 2.0]]}}
    with pytest.raises(ValueError, match="nobody says what, trained_on, license, domain of these weights"):
        ship.ship(run, folder, {})
    assert not folder.exists()
    about = ship.ship(run, folder, said)
    assert about == json.loads((folder / "about.json").read_text())
    assert said.items() <= about.items()
    assert (about["commit"], about["scores"]["seen"]["points"]) == ("abc", 9)
    again = CMANP.from_pretrained(folder)
    assert again.config == model.config
    assert again.fingerprint() == model.fingerprint()
    assert (
        ship.ship(run, folder, {"trained_on": "more"})["what"] == "w"
    )  # what stays the same need not be said

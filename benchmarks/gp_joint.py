"""How much is gained by predicting the targets of a function together, one after another.

python benchmarks/gp_joint.py            # some minutes on one core; writes results/gp_joint.json
python benchmarks/gp_joint.py --picture  # draws docs/gp-joint.png

Log-likelihood of a target, given the context alone (independent of the other targets), and given the targets
before it too (the chain rule: predict one, observe it, go on), by the weights that come with the package, and
by the process that the functions were drawn from.
"""

import argparse
from pathlib import Path
from typing import Any

import torch
from record import provenance, save
from torch import Tensor

from constmem import CMANP
from constmem.data.gp import GaussianProcess, Kernel, gp_evaluation_tasks
from constmem.data.task import Task
from constmem.neural_processes.joint import joint_log_prob, sample_jointly
from constmem.plots import BLUE, DPI, GREY, RED, plain, pyplot, save_figure

BATCHES = 12  # of 16 tasks, the first of the tests'
SHOWN = 5  # points of the function that is drawn
PICTURE = Path(__file__).parents[1] / "docs" / "gp-joint.png"


def evidence(process: GaussianProcess, x: Tensor, y: Tensor) -> Tensor:
    """Log-probability of the points of each task together, by the process they came from."""
    noise = process.noise**2 * torch.eye(x.shape[1], dtype=torch.float64)
    zero = torch.zeros(x.shape[:2], dtype=torch.float64)
    law = torch.distributions.MultivariateNormal(zero, process.covariance(x, x) + noise)
    found: Tensor = law.log_prob(y[..., 0].double())
    return found


def exact(process: GaussianProcess, task: Task) -> Tensor:
    """Log-probability of all targets of each task together, given its context."""
    x, y = torch.cat([task.xc, task.xt], 1), torch.cat([task.yc, task.yt], 1)
    return evidence(process, x, y) - evidence(process, task.xc, task.yc)


@torch.no_grad()
def measured(model: CMANP, kernel: Kernel, batches: int) -> dict[str, Any]:
    """Means over all targets of the tasks."""
    totals = dict.fromkeys(("independent", "joint", "exact_independent", "exact_joint"), 0.0)
    points = 0
    for task, process in gp_evaluation_tasks(kernel=kernel, seed=0, num_batches=batches):
        state = model.condition(task.xc, task.yc)
        parts = {
            "independent": model.query(state, task.xt).log_prob(task.yt),
            "joint": joint_log_prob(model, state, task.xt, task.yt),
            "exact_independent": process.log_likelihood(task),
            "exact_joint": exact(process, task),
        }
        points += task.yt.numel()
        totals = {name: total + float(parts[name].double().sum()) for name, total in totals.items()}
    return {"test": kernel, **{name: total / points for name, total in totals.items()}, "points": points}


@torch.no_grad()
def picture(model: CMANP, path: Path) -> Path:
    """Functions drawn point by point without regard to each other, and one point after another."""
    task, _ = next(gp_evaluation_tasks(kernel="rbf", seed=0, num_batches=1))
    x, y = task.xc[:1, :SHOWN], task.yc[:1, :SHOWN]
    grid = torch.linspace(-2, 2, 81)[None, :, None]
    state, random = model.condition(x, y), torch.Generator().manual_seed(0)
    drawn = {
        "independently": sample_jointly(model, state, grid, samples=3, block=81, generator=random),
        "one after another": _shuffled(model, state, grid, random),
    }
    plt = pyplot()
    figure, axes = plt.subplots(1, 2, figsize=(6.8, 2.6), dpi=DPI, sharey=True)
    for axis, (how, functions) in zip(axes, drawn.items(), strict=True):
        for function, colour in zip(functions[:, 0, :, 0], (BLUE, RED, GREY), strict=True):
            axis.plot(grid[0, :, 0], function, color=colour, linewidth=0.9)
        axis.plot(x[0, :, 0], y[0, :, 0], "ok", markersize=4)
        axis.set_title(f"targets drawn {how}", loc="left", fontsize=9)
        plain(axis)
    figure.tight_layout()
    return save_figure(figure, path)


def _shuffled(model: CMANP, state: Any, grid: Tensor, random: torch.Generator) -> Tensor:
    """Joint samples in a random order of the targets, as the model has seen points come."""
    order = torch.randperm(grid.shape[1], generator=random)
    drawn = sample_jointly(model, state, grid[:, order], samples=3, generator=random)
    return drawn[:, :, order.argsort()]


def summary(rows: list[dict[str, Any]]) -> str:
    """What the rows say, for the documents."""
    names = "independent", "joint", "exact_independent", "exact_joint"
    lines = [
        "| log-likelihood of a target, the weights `gp` | given the context | and the targets before it | "
        "exact posterior, given the context | and the targets before it |",
        "|---|---|---|---|---|",
    ]
    lines += [f"| {row['test']} | " + " | ".join(f"{row[name]:.2f}" for name in names) + " |" for row in rows]
    where = f"`python benchmarks/gp_joint.py`, {rows[0]['points']:,} targets of each kernel"
    return "\n".join([*lines, "", f"{where}; `joint_log_prob` updates the state with one target at a time."])


def main() -> None:
    parser = argparse.ArgumentParser(description="Targets predicted together, and independently.")
    parser.add_argument("--batches", type=int, default=BATCHES)
    parser.add_argument("--picture", action="store_true")
    asked = parser.parse_args()
    model = CMANP.from_pretrained("gp")
    if asked.picture:
        print(f"drew {picture(model, PICTURE)}")
        return
    kernels: tuple[Kernel, ...] = ("rbf", "matern")
    rows = [measured(model, kernel, asked.batches) for kernel in kernels]
    for row in rows:
        print(row)
    save("gp_joint", rows, **provenance(0, "Gaussian processes drawn from the protocol's prior"))


if __name__ == "__main__":
    main()

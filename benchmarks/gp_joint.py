"""How much is gained by predicting the targets of a function together, one after another.

python benchmarks/gp_joint.py            # some minutes on one core; writes results/gp_joint.json

Log-likelihood of a target, given the context alone (independent of the other targets), and given the targets
before it too (the chain rule: predict one, observe it, go on), by the weights that come with the package, and
by the process that the functions were drawn from.
"""

import argparse
from typing import Any

import torch
from record import provenance, save
from torch import Tensor

from constmem import CMANP
from constmem.data.gp import GaussianProcess, Kernel, gp_evaluation_tasks
from constmem.data.task import Task
from constmem.neural_processes.joint import joint_log_prob

BATCHES = 12  # of 16 tasks, the first of the tests'


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


def main() -> None:
    parser = argparse.ArgumentParser(description="Targets predicted together, and independently.")
    parser.add_argument("--batches", type=int, default=BATCHES)
    batches = parser.parse_args().batches
    model = CMANP.from_pretrained("gp")
    kernels: tuple[Kernel, ...] = ("rbf", "matern")
    rows = [measured(model, kernel, batches) for kernel in kernels]
    for row in rows:
        print(row)
    save("gp_joint", rows, **provenance(0, "Gaussian processes drawn from the protocol's prior"))


if __name__ == "__main__":
    main()

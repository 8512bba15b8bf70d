"""How well functions can be predicted by whoever knows their prior, but not the length and scale of each.

python benchmarks/gp_limits.py            # some minutes on one core; writes results/gp_limits.json

The exact posterior of the tables knows the kernel, length and scale that a function was drawn with: no model
can. Here exact posteriors of a grid of lengths and scales are averaged by their evidence, as Bayes' rule has
it: the best prediction by a prior. By a prior of RBF kernels alone, as of models trained by the protocol, and
by one of which a quarter are Matern kernels.
"""

import argparse
from itertools import product
from math import log, pi
from typing import Any

import torch
from record import provenance, save
from torch import Tensor

from constmem.data.gp import LENGTH, SCALE, GaussianProcess, Kernel, gp_evaluation_tasks
from constmem.data.task import Task

GRID = 12, 8  # lengths, scales
MATERN = 0.25  # share in the wider prior
BATCHES = 200  # of 16 tasks, the first of the tests'


def middles(bounds: tuple[float, float], count: int) -> list[float]:
    """The middles of equal parts of an interval."""
    low, high = bounds
    return [low + (high - low) * (i + 0.5) / count for i in range(count)]


def answers(kernel: Kernel, task: Task) -> tuple[Tensor, Tensor, Tensor]:
    """Mean and variance of each process of the grid at one task's targets, (k, m), and its evidence."""
    pairs = list(product(middles(LENGTH, GRID[0]), middles(SCALE, GRID[1])))
    length, scale = torch.tensor(pairs, dtype=torch.float64).unbind(-1)
    process, k = GaussianProcess(kernel, length, scale), len(pairs)
    xc, yc, xt = (t.expand(k, -1, -1).double() for t in (task.xc, task.yc, task.xt))
    found = process.posterior(Task(xc, yc, xt, xt))
    noise = torch.full_like(length, process.noise**2)[:, None, None] * torch.eye(
        xc.shape[1], dtype=torch.float64
    )
    factor = torch.linalg.cholesky(process.covariance(xc, xc) + noise)
    white = torch.linalg.solve_triangular(factor, yc, upper=False)
    evidence = -0.5 * white.square().sum((1, 2)) - factor.diagonal(dim1=-2, dim2=-1).log().sum(-1)
    return found.mean[..., 0], found.variance[..., 0], evidence


def averaged(
    parts: list[tuple[Tensor, Tensor, Tensor]], shares: list[float], y: Tensor
) -> tuple[Tensor, Tensor]:
    """Log-likelihood of the targets by the mixture of all answers, and by a normal of its moments."""
    mean, variance = (torch.cat([part[i] for part in parts]) for i in (0, 1))
    evidence = torch.cat([part[2] + log(share) for part, share in zip(parts, shares, strict=True)])
    log_weight = evidence.log_softmax(0)[:, None]
    weight = log_weight.exp()
    middle = (weight * mean).sum(0)
    spread = (weight * (variance + mean**2)).sum(0) - middle**2
    return (log_weight + _normal(y, mean, variance)).logsumexp(0), _normal(y, middle, spread)


def _normal(y: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
    return -0.5 * ((y - mean) ** 2 / variance + (2 * pi * variance).log())


def measured(kernel: Kernel, batches: int) -> list[dict[str, Any]]:
    """Rows of functions of one kernel: means over batches, beside the exact posterior's on the same tasks."""
    totals: dict[tuple[str, str], list[float]] = {}
    exact = []
    for task, process in gp_evaluation_tasks(kernel=kernel, seed=0, num_batches=batches):
        exact.append(float(process.log_likelihood(task).mean()))
        found: dict[tuple[str, str], list[Tensor]] = {}
        for i in range(task.batch):
            xc, yc, xt = (t[i : i + 1] for t in (task.xc, task.yc, task.xt))
            one, y = Task(xc, yc, xt, xt), task.yt[i, :, 0].double()
            rbf, matern = answers("rbf", one), answers("matern", one)
            priors = {"rbf": ([rbf], [1.0]), "rbf and matern": ([rbf, matern], [1 - MATERN, MATERN])}
            for prior, (parts, shares) in priors.items():
                for shape, each in zip(("mixture", "one normal"), averaged(parts, shares, y), strict=True):
                    found.setdefault((prior, shape), []).append(each)
        for key, each in found.items():
            totals.setdefault(key, []).append(float(torch.stack(each).mean()))
    whole = sum(exact) / len(exact)
    return [
        {
            "test": kernel, "prior": prior, "prediction": shape, "by_batch": sum(each) / len(each),
            "exact_by_batch": whole, "below_exact": whole - sum(each) / len(each), "batches": batches,
        }
        for (prior, shape), each in totals.items()
    ]  # fmt: skip


def summary(rows: list[dict[str, Any]]) -> str:
    """What the rows say, for the documents."""
    below = {(r["test"], r["prior"], r["prediction"]): f"{r['below_exact']:.3f}" for r in rows}
    rbf, both = (
        [below[test, prior, "mixture"] for test in ("rbf", "matern")] for prior in ("rbf", "rbf and matern")
    )
    normal = [below[test, "rbf and matern", "one normal"] for test in ("rbf", "matern")]
    return (
        "The exact posterior knows the kernel, length and scale of every function, which no model does. "
        "Averaging exact posteriors by their evidence, the best that a prior allows, is "
        f"{rbf[0]} below it on RBF functions and {rbf[1]} on Matern ones for whoever expects RBF functions "
        f"alone, as the protocol trains; {both[0]} and {both[1]} where a quarter of these are Matern; "
        f"{normal[0]} and {normal[1]} if, then, the prediction has to be one normal "
        f"(`python benchmarks/gp_limits.py`, {rows[0]['batches']} batches)."
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="The best predictions by a prior over functions.")
    parser.add_argument("--batches", type=int, default=BATCHES)
    batches = parser.parse_args().batches
    kernels: tuple[Kernel, ...] = ("rbf", "matern")
    rows = [row for kernel in kernels for row in measured(kernel, batches)]
    for row in rows:
        print(row)
    save("gp_limits", rows, **provenance(0, "Gaussian processes drawn from the protocol's prior"))


if __name__ == "__main__":
    main()

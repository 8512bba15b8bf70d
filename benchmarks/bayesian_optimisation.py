"""Bayesian optimisation with a surrogate of constant size, BoTorch's own Gaussian process, and at random.

python benchmarks/bayesian_optimisation.py   # a quarter of an hour on one core

Writes results/bayesian_optimisation.json: regret (how far the best value found is from the optimum) after
half and all evaluations of standard functions, from the same first points, with the same acquisition
function (LogEI) and the same effort to maximise it.
"""

import argparse
import time
import warnings
from typing import Any

import torch
from botorch.acquisition import LogExpectedImprovement
from botorch.exceptions import BotorchWarning
from botorch.fit import fit_gpytorch_mll
from botorch.models import SingleTaskGP
from botorch.models.transforms import Normalize
from botorch.optim import optimize_acqf
from botorch.test_functions import Ackley, Branin, Hartmann
from botorch.utils.sampling import draw_sobol_samples
from gpytorch.mlls import ExactMarginalLogLikelihood
from record import provenance, save
from torch import Tensor

from constmem.integrations.botorch import RegressionSurrogate

FUNCTIONS: dict[str, Any] = {
    "Branin, 2-D": lambda: Branin(negate=True),
    "Ackley, 4-D": lambda: Ackley(dim=4, bounds=[(-5.0, 10.0)] * 4, negate=True),
    "Hartmann, 6-D": lambda: Hartmann(dim=6, negate=True),
}
WAYS = ("constant memory", "Gaussian process", "random")
STEPS, SEEDS = 30, 3
EFFORT: dict[str, Any] = {"num_restarts": 4, "raw_samples": 128, "options": {"maxiter": 80}}


def next_point(way: str, surrogate: Any, x: Tensor, y: Tensor, bounds: Tensor) -> Tensor:
    """Where to evaluate next."""
    if way == "random":
        return bounds[0] + (bounds[1] - bounds[0]) * torch.rand(1, bounds.shape[1], dtype=torch.float64)
    if way == "Gaussian process":
        surrogate = SingleTaskGP(x, y, input_transform=Normalize(x.shape[1], bounds=bounds))
        fit_gpytorch_mll(ExactMarginalLogLikelihood(surrogate.likelihood, surrogate))
    found, _ = optimize_acqf(LogExpectedImprovement(surrogate, best_f=y.max()), bounds, q=1, **EFFORT)
    return found.detach()


def optimised(name: str, way: str, seed: int, steps: int) -> dict[str, Any]:
    """One run: regret after half and all of its evaluations, and what it cost."""
    function = FUNCTIONS[name]()
    bounds = function.bounds.double()
    torch.manual_seed(seed)
    x = draw_sobol_samples(bounds, n=2 * (function.dim + 1), q=1, seed=seed)[:, 0]
    y = function(x)[:, None]
    surrogate = RegressionSurrogate(bounds, seed=seed).observe(x, y) if way == WAYS[0] else None
    regret, begun = [], time.perf_counter()
    for _ in range(steps):
        new = next_point(way, surrogate, x, y, bounds)
        value = function(new)[:, None]
        x, y = torch.cat([x, new]), torch.cat([y, value])
        surrogate = None if surrogate is None else surrogate.observe(new, value)
        regret.append(float(function.optimal_value - y.max()))
    memory = surrogate.moments.nbytes if surrogate is not None else None
    row = {"function": name, "way": way, "seed": seed, "first": 2 * (function.dim + 1), "steps": steps}
    row |= {"half": regret[steps // 2 - 1], "all": regret[-1], "bytes": memory}
    return row | {"seconds_a_step": (time.perf_counter() - begun) / steps}


def main() -> None:
    warnings.simplefilter("ignore", BotorchWarning)
    warnings.filterwarnings("ignore", category=RuntimeWarning)
    parser = argparse.ArgumentParser(description="Regret of Bayesian optimisation.")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--function", choices=list(FUNCTIONS), nargs="+", default=list(FUNCTIONS))
    parser.add_argument("--dry", action="store_true", help="print, and write nothing")
    asked = parser.parse_args()
    rows = []
    for seed in range(asked.seeds):
        for name in asked.function:
            for way in WAYS:
                rows.append(optimised(name, way, seed, asked.steps))
                print(rows[-1], flush=True)
    if not asked.dry:
        save("bayesian_optimisation", rows, **provenance(0, "standard functions, without noise"))


if __name__ == "__main__":
    main()

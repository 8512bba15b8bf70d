"""Adam against Muon at several rates: a small CMANP on EMNIST's digits, the same tasks for all.

    python benchmarks/optimisers.py --data-dir DATA   # a quarter of an hour; writes results/optimisers.json

Every run has the same initial weights, the same 600 batches of 32 images, the same warm-up and cosine; only
optimiser and rate differ. Scored by the log-likelihood of a point on held-out training images.
"""

import argparse
import dataclasses
from pathlib import Path
from typing import Literal

import torch
from record import provenance, save

from constmem.training import loop as train
from constmem.training import recipes, sources

RATES = {"adam": (5e-4, 1e-3, 2e-3, 4e-3), "muon": (1e-3, 2e-3, 4e-3, 8e-3)}
CPU = torch.device("cpu")


def scored(
    optimiser: Literal["muon", "adam"], lr: float, steps: int, data_dir: Path | None
) -> dict[str, object]:
    recipe = dataclasses.replace(
        recipes.recipe("emnist", "cmanp-small"), optimiser=optimiser, lr=lr, steps=steps, batch=32,
        warmup=100, num_targets=100, augment="none",
    )  # fmt: skip
    run = train.Run("emnist", "cmanp-small", "improved", recipe)
    source = sources.open_source("emnist", recipe, data_dir=data_dir, device=CPU)
    model = train.build(run).train()
    rule = train._optimiser(model, recipe, CPU)
    generator = torch.Generator().manual_seed(run.seed)
    step = train._stepper(recipe, model, rule, source, generator, compiled=False)
    losses = [float(step(train._rate(recipe, i))) for i in range(steps)]
    row = {
        "optimiser": optimiser, "lr": lr, "steps": steps, "validation": train._validate(model, source),
        "last_losses": sum(losses[-50:]) / 50, **provenance(run.seed, source.statement),
    }  # fmt: skip
    print(f"{optimiser} {lr:g}: held out {row['validation']:.3f}, loss {row['last_losses']:.3f}", flush=True)
    return row


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--steps", type=int, default=600)
    given = parser.parse_args()
    rows = [
        scored(name, lr, given.steps, given.data_dir)  # type: ignore[arg-type]
        for name, rates in RATES.items()
        for lr in rates
    ]
    save("optimisers", rows, command="python benchmarks/optimisers.py --data-dir DATA")

"""How well grey levels are predicted by the weights that come with the package, which are normals.

python benchmarks/grey_levels.py  # some minutes on one core

Writes results/grey_levels.json: log-probability of a pixel's level in nats (of a normal, its integral over
the values nearest to the level, tails included), RMSE, CRPS, and how many pixels central intervals hold.
`constmem eval` writes the same of runs, such as of cmanp-calibrated.
"""

import argparse
from dataclasses import asdict
from typing import Any

import torch
from record import provenance, save

from constmem import NeuralProcess
from constmem.core import checks
from constmem.evaluation import evaluate
from constmem.training.recipes import recipe
from constmem.training.sources import open_source


def measured(name: str, model: NeuralProcess[Any, Any], device: torch.device) -> list[dict[str, Any]]:
    """The scores on every test set of EMNIST."""
    source = open_source("emnist", recipe("emnist", "cmanp"), data_dir=None, device=device)
    found = []
    for test, batches in source.tests.items():
        scores = asdict(evaluate(model, batches(), levels=source.levels))
        kept = {key: value for key, value in scores.items() if value is not None}
        head = "levels" if model.config.get("levels") else "normal"
        parameters = sum(p.numel() for p in model.parameters())
        found.append({"model": name, "head": head, "test": test, "parameters": parameters, **kept})
        print(found[-1])
    return found


def summary(rows: list[dict[str, Any]]) -> str:
    """What the rows say, for the documents."""
    lines = [
        "| EMNIST | classes | log-probability of a grey level | RMSE | CRPS | 50 % intervals hold | 90 % |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        inside = [f"{100 * row['coverage'][level]:.1f} %" for level in ("0.5", "0.9")]
        scores = [f"{row['level_log_likelihood']:.2f}", f"{row['rmse']:.3f}", f"{row['crps']:.3f}", *inside]
        lines.append(f"| {row['model']} | {row['test']} | {' | '.join(scores)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description="Grey levels of EMNIST, predicted.")
    parser.add_argument("--device", default="cpu")
    asked = parser.parse_args()
    device = checks.device(asked.device)
    model: Any = NeuralProcess.from_pretrained("emnist", device=device)
    rows = measured("CMANP, the weights `emnist`", model, device)
    save("grey_levels", rows, **provenance(0, "EMNIST, all test images", device))


if __name__ == "__main__":
    main()

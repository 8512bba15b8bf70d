"""How well grey levels of pixels are predicted: by normals, and by a model that can be sure of black.

python benchmarks/grey_levels.py                            # the weights that come with the package
python benchmarks/grey_levels.py --run FOLDER [FOLDER ...]  # and runs, such as of cmanp-calibrated

Writes results/grey_levels.json: log-probability of a pixel's level in nats (of a normal, its integral over
the values nearest to the level, tails included), RMSE, CRPS, and how many pixels central intervals hold.
"""

import argparse
from dataclasses import asdict
from pathlib import Path
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
    parser.add_argument("--run", type=Path, nargs="+", default=[])
    parser.add_argument("--device", default="cpu")
    asked = parser.parse_args()
    device = checks.device(asked.device)
    rows = []
    for folder in ("emnist", *asked.run):
        model: Any = NeuralProcess.from_pretrained(folder, device=device)
        name = "CMANP, the weights `emnist`" if folder == "emnist" else f"`{Path(folder).name}`"
        rows += measured(name, model, device)
    save("grey_levels", rows, **provenance(0, "EMNIST, all test images", device))


if __name__ == "__main__":
    main()

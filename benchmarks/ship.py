"""Makes a scored run the weights that come with the package, with what is known of them beside.

python benchmarks/ship.py runs/gp-cmanp-moments-improved-0 gp

What the weights are for (`what`, `trained_on`, `license`, `domain`) stays as the folder says it, unless it is
given; the rest is the run's: its row of scores, recipe, steps, seed, device, commit, and a checksum.
So the weights of functions are finished, scored and shipped by one line:

constmem train gp cmanp-moments --set matern=0.25 --device cuda --resume && \\
constmem eval runs/gp-cmanp-moments-improved-0 --device cuda && \\
python benchmarks/ship.py runs/gp-cmanp-moments-improved-0 gp --trained-on "..."
"""

import argparse
import hashlib
import json
from pathlib import Path
from typing import Any

from constmem.core.files import ABOUT, WEIGHTS, read_json, write_text
from constmem.evaluation.rows import read_rows
from constmem.neural_processes import NeuralProcess

SHIPPED = Path(__file__).parents[1] / "constmem" / "neural_processes" / "pretrained"
SAID = "what", "trained_on", "license", "domain"
MADE = "data", "recipe", "settings", "steps", "seed", "device", "commit", "scores"


def ship(run: Path, folder: Path, given: dict[str, Any]) -> dict[str, Any]:
    """Write weights, settings and what is known of them into a folder; what nobody says is refused."""
    said = (read_json(folder / ABOUT, "restore it") if (folder / ABOUT).exists() else {}) | given
    if missing := [key for key in SAID if key not in said]:
        raise ValueError(
            f"nobody says {', '.join(missing)} of these weights: write them into {folder / ABOUT}"
        )
    (row,) = read_rows([run])
    found = row.content()
    NeuralProcess.from_pretrained(run).save_pretrained(folder)  # whole, or not at all
    about = {key: said[key] for key in SAID} | {key: found[key] for key in MADE if key in found}
    about["sha256"] = {"weights": hashlib.sha256((folder / WEIGHTS).read_bytes()).hexdigest()}
    write_text(folder / ABOUT, json.dumps(about, indent=1) + "\n")
    return about


def main() -> None:
    parser = argparse.ArgumentParser(description="Make a scored run the weights that come with the package.")
    parser.add_argument("run", type=Path, help="a run folder with its eval.json")
    parser.add_argument("name", help="what the weights are loaded by")
    parser.add_argument("--what", help="what the weights do")
    parser.add_argument("--trained-on", help="what they were trained on")
    asked = parser.parse_args()
    given = {"what": asked.what, "trained_on": asked.trained_on}
    about = ship(asked.run, SHIPPED / asked.name, {key: text for key, text in given.items() if text})
    for test, scores in about["scores"].items():
        print(f"{asked.name}, {test}: {scores['log_likelihood_by_batch']:.3f} by batch")


if __name__ == "__main__":
    main()

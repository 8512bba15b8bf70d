"""From a run's folder to its row: scores on the test sets, beside the published figures."""

import json
import platform
import sys
from collections.abc import Iterable
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from constmem.data import Table
from constmem.evaluate import evaluate
from constmem.files import write_text
from constmem.neural_processes import NeuralProcess
from constmem.recipes import Recipe
from constmem.sources import Source, open_source
from constmem.train import TABLE

# Log-likelihoods of the paper's image table (mean of 5 seeds); for Gaussian processes of its later version.
PUBLISHED: dict[str, dict[str, dict[str, float]]] = {
    "emnist": {
        "cnp": {"seen": 0.73, "unseen": 0.49},
        "canp": {"seen": 0.94, "unseen": 0.82},
        "np": {"seen": 0.79, "unseen": 0.59},
        "anp": {"seen": 0.98, "unseen": 0.89},
        "bnp": {"seen": 0.88, "unseen": 0.73},
        "banp": {"seen": 1.01, "unseen": 0.94},
        "tnpd": {"seen": 1.46, "unseen": 1.31},
        "lbanp": {"seen": 1.39, "unseen": 1.17},
        "cmanp": {"seen": 1.36, "unseen": 1.09},
    },
    "celeba32": {
        "cnp": {"test": 2.15}, "canp": {"test": 2.66}, "np": {"test": 2.48}, "anp": {"test": 2.90},
        "bnp": {"test": 2.76}, "banp": {"test": 3.09}, "tnpd": {"test": 3.89}, "lbanp": {"test": 3.97},
        "cmanp": {"test": 3.93},
    },
    "celeba64": {
        "cnp": {"test": 2.43}, "canp": {"test": 3.15}, "np": {"test": 2.60}, "bnp": {"test": 2.97},
        "tnpd": {"test": 5.41}, "lbanp": {"test": 5.09}, "cmanp": {"test": 5.02},
    },
    "celeba128": {
        "cnp": {"test": 2.55}, "np": {"test": 2.67}, "lbanp": {"test": 5.84}, "cmanp": {"test": 5.55},
    },
    "gp": {"cmanp": {"rbf": 1.24, "matern": 0.80}},
}  # fmt: skip


def read_run(folder: Path) -> dict[str, Any]:
    """What a run's folder says of how it was made: its run.json."""
    path = folder / "run.json"
    if not path.is_file():
        raise FileNotFoundError(f"there is no run in {folder}: train one there first")
    about: dict[str, Any] = json.loads(path.read_text())
    return about


def source_of(folder: Path, run: dict[str, Any], *, data_dir: Path | None, device: torch.device) -> Source:
    """The data that a run was trained on."""
    table = Table.load(folder / TABLE) if (folder / TABLE).exists() else None
    try:
        recipe = Recipe(**run["recipe"])
    except TypeError as error:
        raise ValueError(f"{folder} was written by another version of constmem: {error}") from error
    return open_source(run["dataset"], recipe, data_dir=data_dir, device=device, table=table)


def evaluate_run(folder: Path, *, data_dir: Path | None, device: str) -> dict[str, Any]:
    """Score a run on its test sets and write the row to its eval.json."""
    about = read_run(folder)
    run = about["run"]
    where = torch.device(device)
    source = source_of(folder, run, data_dir=data_dir, device=where)
    model = NeuralProcess.from_pretrained(folder, device=where)
    metrics = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    row = {
        "dataset": run["dataset"], "model": run["model"], "recipe": run["recipe_name"], "seed": run["seed"],
        "scores": {name: asdict(evaluate(model, tasks())) for name, tasks in source.tests.items()},
        "published": PUBLISHED.get(run["dataset"], {}).get(run["model"].partition("-")[0]),
        "steps": max(m.get("step", 0) for m in metrics),
        "minutes": round(max(m.get("seconds", 0.0) for m in metrics) / 60, 2),
        "parameters": sum(p.numel() for p in model.parameters()),
        "settings": run["recipe"],
        "data": source.statement,
        "device": torch.cuda.get_device_name(where) if where.type == "cuda" else platform.processor(),
        "commit": about.get("commit"),
        "torch": torch.__version__,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }  # fmt: skip
    write_text(folder / "eval.json", json.dumps(row, indent=1) + "\n")
    return row


def print_table(rows: Iterable[dict[str, Any]]) -> None:
    """A table of runs: ours beside the published."""
    from rich.console import Console
    from rich.table import Table

    table = Table()
    for column in (
        "run",
        "test set",
        "log-likelihood",
        "by batch",
        "published",
        "RMSE",
        "CRPS",
        "90 %",
        "minutes",
    ):
        table.add_column(column, justify="left" if column in ("run", "test set") else "right")
    for row in rows:
        for name, s in row["scores"].items():
            published = (row["published"] or {}).get(name)
            table.add_row(
                f"{row['dataset']} {row['model']} {row['recipe']} #{row['seed']}", name,
                f"{s['log_likelihood']:.3f}", f"{s['log_likelihood_by_batch']:.3f}",
                "" if published is None else f"{published:.2f}", f"{s['rmse']:.4f}", f"{s['crps']:.4f}",
                f"{100 * s['coverage']['0.9']:.1f} %", f"{row['minutes']:.1f}",
            )  # fmt: skip
    Console(width=None if sys.stdout.isatty() else 160).print(table)

"""From a run's folder to its row: scores on the test sets, beside the published figures."""

import hashlib
import json
import logging
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from constmem.core import checks
from constmem.core.files import write_text
from constmem.core.memory import Peak
from constmem.core.model import WEIGHTS
from constmem.data import DATASETS, Events, simulated
from constmem.evaluation.events import evaluate_events
from constmem.evaluation.points import evaluate
from constmem.models import of_events
from constmem.neural_processes import NeuralProcess
from constmem.point_processes import PointProcess
from constmem.training.folder import EVENTS, TABLE, device_name, own_data, read_run
from constmem.training.log import progress, read_metrics
from constmem.training.recipes import read_recipe
from constmem.training.sources import Source, open_source

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
    "taxi": {"thp": {"test": -0.372}, "gru": {"test": -0.453}},  # NLL an event, as EasyTPP reports it
}  # fmt: skip

_log = logging.getLogger("constmem")


def source_of(
    folder: Path, run: dict[str, Any], *, data_dir: Path | None, device: torch.device
) -> Source[Any]:
    """The data that a run was trained on."""
    recipe = read_recipe(run["recipe"])
    return open_source(run["dataset"], recipe, data_dir=data_dir, device=device, own=own_data(folder))


def evaluate_runs(folders: Sequence[Path], *, data_dir: Path | None, device: str) -> list[dict[str, Any]]:
    """Score runs one after the other; that each folder holds one is made sure of before the first."""
    for folder in folders:
        read_run(folder)
        if not (folder / WEIGHTS).is_file():
            raise FileNotFoundError(
                f"there is no trained model in {folder} ({WEIGHTS}): go on with its training by --resume"
            )
    return [evaluate_run(folder, data_dir=data_dir, device=device) for folder in folders]


def evaluate_run(folder: Path, *, data_dir: Path | None, device: str) -> dict[str, Any]:
    """Score a run on its test sets and write the row to its eval.json."""
    about = read_run(folder)
    run = about["run"]
    where = checks.device(device)
    source = source_of(folder, run, data_dir=data_dir, device=where)
    family: Any = PointProcess if of_events(run["model"]) else NeuralProcess
    model = family.from_pretrained(folder, device=where)
    peak = Peak(where)
    metrics = read_metrics(folder)
    row = {
        "dataset": run["dataset"], "model": run["model"], "recipe": run["recipe_name"], "seed": run["seed"],
        "scores": _scored(model, source, f"scoring {folder}"),
        "published": PUBLISHED.get(run["dataset"], {}).get(run["model"]),  # of a variant nothing was
        "true": _true_nll(run["dataset"], source),
        "peak_memory": {"training": _peak_of(metrics), "evaluation": peak()},
        "steps": max((m.get("step", 0) for m in metrics), default=0),
        "minutes": round(max((m.get("seconds", 0.0) for m in metrics), default=0.0) / 60, 2),
        "parameters": sum(p.numel() for p in model.parameters()),
        "settings": run["recipe"],
        "data": source.statement,
        **_own(folder, run),
        "device": about.get("device") or device_name(where),
        "evaluated_on": device_name(where),
        "commit": about.get("commit"),
        "torch": torch.__version__,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }  # fmt: skip
    try:
        write_text(folder / "eval.json", json.dumps(row, indent=1) + "\n")
    except OSError:
        _log.warning("these scores could not be kept: %s", json.dumps(row))  # they took a while to get
        raise
    return row


def _own(folder: Path, run: dict[str, Any]) -> dict[str, Any]:
    """Of data of one's own: what its columns are, and a digest of the numbers, to know the same data by."""
    kept = next((folder / name for name in (EVENTS, TABLE) if (folder / name).is_file()), None)
    if kept is None:
        return {}
    digest = hashlib.sha256()
    for name, tensor in sorted(load_file(kept).items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.numpy().tobytes())
    return {"columns": run.get("columns"), "contents": digest.hexdigest()[:16]}


def _peak_of(metrics: list[dict[str, Any]]) -> int | None:
    return max((entry["peak_memory"] for entry in metrics if "peak_memory" in entry), default=None)


def _scored(model: Any, source: Source[Any], title: str) -> dict[str, Any]:
    """The scores on each test set, and now and then how far it has come."""
    found: dict[str, Any] = {}
    with progress(title, len(source.tests)) as report:
        for name, batches in source.tests.items():
            report(len(found), name)
            found[name] = _scores(model, batches())
        report(len(found))
    return found


def _scores(model: Any, batches: Iterable[Any]) -> dict[str, Any]:
    if isinstance(model, PointProcess):
        return asdict(evaluate_events(model, Events.cat(list(batches))))
    scores = asdict(evaluate(model, batches))
    return {name: value for name, value in scores.items() if value is not None}


def _true_nll(dataset: str, source: Source[Any]) -> dict[str, float] | None:
    """NLL an event of the process that simulated the data: on the average no model has a lower one."""
    if dataset not in DATASETS or DATASETS[dataset].process is None:
        return None
    known = {name: Events.cat(list(batches())).to("cpu") for name, batches in source.tests.items()}
    return {name: -float(simulated(dataset).log_prob(events).mean) for name, events in known.items()}

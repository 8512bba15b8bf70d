"""What each option of CMHP is worth: variants with one option more than the paper's, or one less than all.

    python benchmarks/event_ablation.py taxi --device cuda --jobs 4 --seeds 0 1 2
    python benchmarks/event_ablation.py taxi --only faithful all gru gru-gap --steps 500

The variants are the paper's CMHP (with 8 slots and 4 latents as by default, not 128: options alone differ),
that with each option, all options, and all but each; THP and GRU with and without the mark head that sees
the gap stand beside them. All are trained by one recipe. Rows are written to results/ablation-DATASET.json
after every run, by validation NLL with the test's beside; what is there already
is not done again, and a run that was stopped goes on from its checkpoint. event_ablation_picture.py draws
the rows.
"""

import argparse
import json
import os
import shlex
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from hashlib import sha256
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import record
import torch

from constmem.core import PLAIN_CMHP
from constmem.core.checks import known
from constmem.data.catalogue import EVENTS
from constmem.evaluation.runs import evaluate_run
from constmem.training.loop import Run, train
from constmem.training.recipes import EventRecipe, changed, complete, recipe

OPTIONS: dict[str, tuple[str, Any]] = {  # option -> (keyword of CMHP, its value there)
    "no_absolute_time": ("absolute_time", False),
    "last_events": ("last_events", 4),
    "recency": ("recency", True),
    "mass": ("mass", True),
    "relative_time": ("relative_time", True),
    "gap_tokens": ("gap_tokens", True),
    "token_mlp": ("embed_depth", 2),
    "mark_given_gap": ("mark_given_gap", True),
}


def variants() -> dict[str, tuple[str, dict[str, Any]]]:
    """Every variant: its name, the model, and the model's settings."""
    on = dict(OPTIONS.values())
    found: dict[str, tuple[str, dict[str, Any]]] = {"faithful": ("cmhp", PLAIN_CMHP)}
    for option, (key, value) in OPTIONS.items():
        found[f"faithful + {option}"] = "cmhp", PLAIN_CMHP | {key: value}
    found["all"] = "cmhp", on
    for option, (key, _) in OPTIONS.items():
        found[f"all - {option}"] = "cmhp", on | {key: PLAIN_CMHP[key]}
    for model in ("thp", "gru"):
        found[model] = model, {}
        found[f"{model}-gap"] = f"{model}-gap", {}
    return found


@dataclass(frozen=True)
class Job:
    """One variant with one seed, and where its run is kept."""

    dataset: str
    variant: str
    seed: int
    recipe: EventRecipe
    folder: Path
    data_dir: Path | None
    device: str

    @property
    def key(self) -> str:
        """What tells its row from others."""
        settings = json.loads(json.dumps(asdict(self.recipe)))
        return json.dumps([self.variant, self.seed, settings], sort_keys=True)

    def row(self) -> dict[str, Any]:
        """Train (or go on) and score: the row of an evaluation, with the best validation NLL."""
        run = Run(self.dataset, variants()[self.variant][0], "improved", self.recipe, self.seed)
        train(run, out=self.folder, data_dir=self.data_dir, device=self.device, resume=True)
        metrics = [json.loads(line) for line in (self.folder / "metrics.jsonl").read_text().splitlines()]
        best = max(entry["validation"] for entry in metrics if "validation" in entry)
        scored = evaluate_run(self.folder, data_dir=self.data_dir, device=self.device).content()
        return {"variant": self.variant, "validation_nll": -best, **scored}


def jobs_of(
    dataset: str, names: Sequence[str], seeds: Sequence[int], changes: Sequence[str], *, runs: Path,
    data_dir: Path | None, device: str,
) -> list[Job]:  # fmt: skip
    """What there is to do: every variant with every seed."""
    known("data set of events", dataset, EVENTS)
    every = variants()
    found = []
    for name in names or every:
        model, settings = every[known("variant", name, every)]
        chosen = recipe(dataset, model)
        chosen = changed(chosen, [*(f"model.{key}={value}" for key, value in settings.items()), *changes])
        for seed in seeds:
            settings_name = sha256(json.dumps(asdict(chosen), sort_keys=True).encode()).hexdigest()[:8]
            folder = runs / dataset / f"{name.replace(' ', '')}-{seed}-{settings_name}"
            found.append(Job(dataset, name, seed, chosen, folder, data_dir, device))
    return found


def ablate(jobs: Sequence[Job], *, at_once: int, command: str) -> list[dict[str, Any]]:
    """Do what is not done yet, several at once, and write all rows after each."""
    name = f"ablation-{jobs[0].dataset}"
    path = record.RESULTS / f"{name}.json"
    content = json.loads(path.read_text()) if path.exists() else {"rows": []}
    rows: dict[str, dict[str, Any]] = {
        json.dumps([row["variant"], row["seed"], complete(row["settings"])], sort_keys=True): row
        for row in content["rows"]
    }
    order = list(variants())
    for key, row in _done([job for job in jobs if job.key not in rows], at_once):
        rows[key] = row
        ordered = sorted(rows.values(), key=lambda row: (order.index(row["variant"]), row["seed"]))
        about = {key: value for key, value in content.items() if key not in ("rows", "command")}
        record.save(name, ordered, command=command, **about)
        print(f"{row['variant']} #{row['seed']}: validation {row['validation_nll']:.4f}, "
              f"test {row['scores']['test']['nll']:.4f}")  # fmt: skip
    return list(rows.values())


def _done(jobs: Sequence[Job], at_once: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """The rows of jobs as they are finished; each in a process of its own where several run at once."""
    if at_once == 1:
        yield from ((job.key, job.row()) for job in jobs)
        return
    with _pool(at_once) as pool:
        running: dict[Future[dict[str, Any]], Job] = {pool.submit(job.row): job for job in jobs}
        for future in as_completed(running):
            yield running[future].key, future.result()


@contextmanager
def _pool(at_once: int) -> Iterator[Executor]:
    threads = max((os.cpu_count() or 1) // at_once, 1)
    pool = ProcessPoolExecutor(at_once, get_context("spawn"), torch.set_num_threads, (threads,))
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("dataset", help=", ".join(EVENTS))
    parser.add_argument("--only", nargs="+", default=[], metavar="VARIANT", help=", ".join(variants()))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--steps", type=int, help="instead of the recipe's")
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="for all variants")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--jobs", type=int, default=1, help="how many runs at once")
    parser.add_argument("--data-dir", type=Path, help="folder of prepared data sets; else CONSTMEM_DATA")
    parser.add_argument("--runs", type=Path, default=Path("runs/ablation"), help="folder of the runs")
    given = parser.parse_args()
    changes = [*given.set, *([] if given.steps is None else [f"steps={given.steps}"])]
    jobs = jobs_of(
        given.dataset, given.only, given.seeds, changes, runs=given.runs,
        data_dir=given.data_dir, device=given.device,
    )  # fmt: skip
    command = f"python benchmarks/event_ablation.py {given.dataset} --seeds {' '.join(map(str, given.seeds))}"
    command += f" --set {' '.join(changes)}" if changes else ""
    command += f" --only {shlex.join(given.only)}" if given.only else ""
    ablate(jobs, at_once=given.jobs, command=command)


if __name__ == "__main__":
    main()

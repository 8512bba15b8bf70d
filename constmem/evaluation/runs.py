"""Runs: from their folders to rows of scores, and how `constmem eval` prints these."""

import hashlib
import json
import logging
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from itertools import compress
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file

from constmem.core import checks
from constmem.core.costs import Peak, progress
from constmem.core.files import WEIGHTS, write_text
from constmem.core.registry import of_events
from constmem.data import Events, simulated
from constmem.data.catalogue import DATASETS
from constmem.evaluation import evaluate
from constmem.evaluation.entries import Entry, EventEntry, PointEntry, compare, difference, entry_of
from constmem.evaluation.events import evaluate_events
from constmem.evaluation.rows import EventScores, Figure, Row, Scores, grouped, kind
from constmem.evaluation.tables import MORE, other_scores
from constmem.neural_processes import NeuralProcess
from constmem.point_processes import PointProcess
from constmem.training.folder import EVENTS, TABLE, device_name, own_data, read_run
from constmem.training.log import read_metrics
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

POINTS = ("run", "test set", "log-likelihood", "exact", "by batch", "published", *MORE, "minutes")
OF_EVENTS = (
    "run", "test set", "NLL", "of time", "of mark", "published", "survival", "gap RMSE", "mark error",
    "mark error, gap known", "KS", "minutes",
)  # fmt: skip
ABOUT_POINTS = (
    "log-likelihood: nats a point, higher is better; by batch: the paper's mean over batches. RMSE, CRPS: in "
    "the units of y (of images, white - black = 1). 50 %, 90 %: how many values lie in central intervals. "
    "grey level: log-probability of a pixel's levels, by which densities and models of levels compare."
)
ABOUT_EVENTS = (
    "NLL: nats an event, of its time plus of its mark given the time. gap RMSE: of the predicted mean gap.\n"
    "mark error: how often the likeliest mark is wrong, predicted before the event, or given its time."
)
PLAIN = ("nll", "time_nll", "mark_nll", "survival_nll", "ks")
ABOUT_SEEDS = "±: the standard deviation over seeds, beside their mean."

_log = logging.getLogger("constmem")


class Opened(NamedTuple):
    """A run's settings, its model and its data."""

    run: dict[str, Any]
    model: Any
    source: Source[Any]


def open_run(folder: Path, *, data_dir: Path | None, device: torch.device) -> Opened:
    """The run in a folder, with its model on a device."""
    run = read_run(folder)["run"]
    recipe = read_recipe(run["recipe"])
    source = open_source(run["dataset"], recipe, data_dir=data_dir, device=device, own=own_data(folder))
    family: Any = PointProcess if of_events(run["model"]) else NeuralProcess
    return Opened(run, family.from_pretrained(folder, device=device), source)


def metrics_of(folder: Path) -> list[dict[str, float]]:
    """The numbers that a run logged at its steps."""
    return [entry for entry in read_metrics(folder) if "step" in entry]


def evaluate_runs(folders: Sequence[Path], *, data_dir: Path | None, device: str) -> list[Row]:
    """Score runs in turn, after checking that each folder holds one."""
    for folder in folders:
        read_run(folder)
        if not (folder / WEIGHTS).is_file():
            raise FileNotFoundError(
                f"there is no trained model in {folder} ({WEIGHTS}): go on with its training by --resume"
            )
    return [evaluate_run(folder, data_dir=data_dir, device=device) for folder in folders]


def evaluate_run(folder: Path, *, data_dir: Path | None, device: str) -> Row:
    """Score a run on its test sets and write the row to its eval.json."""
    about, where = read_run(folder), checks.device(device)
    run, model, source = open_run(folder, data_dir=data_dir, device=where)
    metrics = metrics_of(folder)
    peak = Peak(where)
    scores = _scored(model, source, f"scoring {folder}")
    columns, contents = _own(folder, run)
    row = Row(
        dataset=run["dataset"], model=run["model"], recipe=run["recipe_name"], seed=run["seed"],
        scores=scores,
        published=PUBLISHED.get(run["dataset"], {}).get(run["model"]),  # nothing for a variant
        true=_true_nll(run["dataset"], source),
        peak_memory={"training": _most(metrics, "peak_memory"), "evaluation": peak()},
        steps=_most(metrics, "step") or 0,
        minutes=round((_most(metrics, "seconds") or 0.0) / 60, 2),
        parameters=sum(p.numel() for p in model.parameters()),
        settings=run["recipe"], data=source.statement, columns=columns, contents=contents,
        device=about.get("device") or device_name(where), evaluated_on=device_name(where),
        commit=about.get("commit"), torch=torch.__version__,
        date=datetime.now(UTC).isoformat(timespec="seconds"),
    )  # fmt: skip
    try:
        write_text(folder / "eval.json", json.dumps(row.content(), indent=1) + "\n")
    except OSError:
        _log.warning("these scores could not be kept: %s", json.dumps(row.content()))  # they took a while
        raise
    return row


def _most(metrics: list[dict[str, float]], key: str) -> Any:
    return max((entry[key] for entry in metrics if key in entry), default=None)


def _own(folder: Path, run: dict[str, Any]) -> tuple[dict[str, Any] | None, str | None]:
    """Of data of one's own: its columns, and a digest of the numbers, which identifies the data."""
    kept = next((folder / name for name in (EVENTS, TABLE) if (folder / name).is_file()), None)
    if kept is None:
        return None, None
    digest = hashlib.sha256()
    for name, tensor in sorted(load_file(kept).items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.numpy().tobytes())
    return run.get("columns"), digest.hexdigest()[:16]


def _scored(model: Any, source: Source[Any], title: str) -> dict[str, Scores | EventScores]:
    """The scores on each test set, with progress."""
    found: dict[str, Scores | EventScores] = {}
    with progress(title, len(source.tests)) as report:
        for name, batches in source.tests.items():
            report(len(found), name)
            if isinstance(model, PointProcess):
                found[name] = evaluate_events(model, Events.cat(list(batches())))
            else:
                found[name] = evaluate(model, batches(), levels=source.levels)
        report(len(found))
    return found


def _true_nll(dataset: str, source: Source[Any]) -> dict[str, float] | None:
    """NLL an event of the process that simulated the data: on average no model has a lower one."""
    if dataset not in DATASETS or DATASETS[dataset].kind != "simulated":
        return None
    known = {name: Events.cat(list(batches())).to("cpu") for name, batches in source.tests.items()}
    return {name: -float(simulated(dataset).log_prob(events).mean) for name, events in known.items()}


# What is printed


def over_seeds(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """The rows, and in each of several that differ by seed alone their mean and spread, as "over_seeds"."""
    several = {kind(group[0]): asdict(entry_of(group)) for group in grouped(rows) if len(group) > 1}
    return [
        row.content() | ({"over_seeds": several[kind(row)]} if kind(row) in several else {}) for row in rows
    ]


def print_runs(rows: Sequence[Row], folders: Sequence[Path] | None = None) -> None:
    """Tables of runs, of points and of events: ours beside the published, without empty columns.

    Args:
        folders: where the runs are; shown where nothing else distinguishes two of them.
    """
    single = [entry_of([row]) for row in rows]
    several = [entry for entry in compare(rows) if len(entry.seeds) > 1]
    names = [_name(entry, single) for entry in single]
    if folders is not None:
        both = zip(names, folders, strict=True)
        names = [f"{name}, {folder}" if names.count(name) > 1 else name for name, folder in both]
    named = list(zip(single, names, strict=True)), [(entry, _name(entry, single)) for entry in several]
    for columns, about, events in ((POINTS, ABOUT_POINTS, False), (OF_EVENTS, ABOUT_EVENTS, True)):
        own, pooled = (
            [
                line
                for entry, name in entries
                if isinstance(entry, EventEntry) == events
                for line in _lines(entry, name)
            ]
            for entries in named
        )
        if own:
            _print(columns, [own, pooled], f"{about}\n{ABOUT_SEEDS}" if pooled else about)


def _name(entry: Entry, entries: Sequence[Entry]) -> str:
    """Data, model and recipe, what distinguishes it from the others, and its seed or how many."""
    note = difference(entry, entries, elsewhere=())
    seeds = f" #{entry.seeds[0]}" if len(entry.seeds) == 1 else f", mean of {len(entry.seeds)} seeds"
    return f"{entry.dataset} {entry.model} {entry.recipe}{f' ({note})' if note else ''}{seeds}"


def _lines(entry: Entry, name: str) -> list[list[str]]:
    """A line for each test set."""
    assert isinstance(entry, PointEntry | EventEntry)
    cells = _event_cells(entry) if isinstance(entry, EventEntry) else _point_cells(entry)
    return [[name, test, *found, f"{entry.minutes:.1f}"] for test, found in cells.items()]


def _point_cells(entry: PointEntry) -> dict[str, list[str]]:
    return {
        test: [
            entry.by_point[test].text(3), _known(entry.exact_by_point.get(test), ".3f"), by_batch.text(3),
            _known(entry.published.get(test), ".3g"), *other_scores(entry, test),
        ]
        for test, by_batch in entry.by_batch.items()
    }  # fmt: skip


def _event_cells(entry: EventEntry) -> dict[str, list[str]]:
    found = {}
    for test, scores in entry.scores.items():
        nll, time, mark, survival, ks = (scores[key].text(3) if key in scores else "" for key in PLAIN)
        wrong = [_error(scores.get(key)) for key in ("accuracy", "accuracy_given_gap")]
        gap, published = f"{scores['rmse'].short()} {entry.unit}", _known(entry.published.get(test), ".3g")
        found[test] = [nll, time, mark, published, survival, gap, *wrong, ks]
    return found


def _known(value: float | None, form: str) -> str:
    return "" if value is None else f"{value:{form}}"


def _error(hits: Figure | None) -> str:
    """How often wrong; nothing where no mark is known."""
    return "" if hits is None else Figure(1 - hits.mean, hits.spread).text(1, percent=True)


def _print(columns: Sequence[str], sections: Iterable[list[list[str]]], note: str) -> None:
    """A table on the terminal, a rule between its sections."""
    from rich.console import Console
    from rich.table import Table

    table = Table(padding=(0, 0), caption=note, caption_justify="left")
    sections = list(sections)
    contents: list[Any] = list(zip(*(line for lines in sections for line in lines), strict=True))
    filled = [any(content) for content in contents]
    for column, content in compress(zip(columns, contents, strict=True), filled):
        words = column in ("run", "test set")
        # a narrow terminal may break heads, and cells before units and after a ±, but no number
        pieces = [piece for cell in content for piece in cell.replace("± ", "±\n").split("\n")]
        widest = None if words or column == "gap RMSE" else max(map(len, pieces))
        table.add_column(column, justify="left" if words else "right", min_width=widest, overflow="fold")
    for lines in sections:
        for line in lines:
            table.add_row(*compress(line, filled))
        table.add_section()
    Console(width=None if sys.stdout.isatty() else 200).print(table)

"""Runs: from their folders to rows of scores, and to forecasts of a file's sequences of events."""

import hashlib
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from math import exp
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Float64, Int64
from numpy.typing import NDArray
from safetensors.torch import load_file
from torch import Tensor

from constmem.core import checks, of_events
from constmem.core.costs import Peak, progress
from constmem.core.files import WEIGHTS, write_text
from constmem.data import EventLog, Events, Hawkes, Table, simulated
from constmem.data.catalogue import DATASETS, SECONDS
from constmem.data.event_files import NONE, labelled_sequences
from constmem.data.rows import free, writing
from constmem.evaluation import PUBLISHED, Scores, evaluate
from constmem.evaluation.events import EventScores, evaluate_events
from constmem.evaluation.rows import Row
from constmem.neural_processes import NeuralProcess
from constmem.point_processes import PointProcess
from constmem.training.folder import EVENTS, TABLE, device_name, own_data, read_run
from constmem.training.log import read_metrics
from constmem.training.recipes import read_recipe
from constmem.training.sources import Source, open_source

_log = logging.getLogger("constmem")


class Opened(NamedTuple):
    """A run's folder, its settings, its model, its data, and the rows or events if they are one's own."""

    folder: Path
    run: dict[str, Any]
    model: Any
    source: Source[Any]
    own: Table | EventLog | None


def open_run(folder: Path, *, data_dir: Path | None, device: torch.device) -> Opened:
    """The run in a folder, with its model on a device."""
    run, own = read_run(folder)["run"], own_data(folder)
    recipe = read_recipe(run["recipe"])
    source = open_source(run["dataset"], recipe, data_dir=data_dir, device=device, own=own)
    family: Any = PointProcess if of_events(run["model"]) else NeuralProcess
    return Opened(folder, run, family.from_pretrained(folder, device=device), source, own)


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
    _, run, model, source, _ = open_run(folder, data_dir=data_dir, device=where)
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


def true_process(dataset: str) -> Hawkes | None:
    """The process that simulated a data set; None of other data."""
    return simulated(dataset) if dataset in DATASETS and DATASETS[dataset].kind == "simulated" else None


def _true_nll(dataset: str, source: Source[Any]) -> dict[str, float] | None:
    """NLL an event of the process that simulated the data: on average no model has a lower one."""
    if (process := true_process(dataset)) is None:
        return None
    known = {name: Events.cat(list(batches())).to("cpu") for name, batches in source.tests.items()}
    return {name: -float(process.log_prob(events).mean) for name, events in known.items()}


# Forecasts


FILES = (".csv", ".tsv", ".parquet")
QUANTILES = 0.05, 0.5, 0.95
STREAMS = 2048  # futures at once
SECOND = 60.0  # a typical gap, in seconds, from which on forecasts are to the second


@dataclass(frozen=True)
class Ahead:
    """The next events of some sequences: quantiles of their times, likeliest marks, and their chances."""

    times: Float64[Tensor, "b n levels"]
    marks: Int64[Tensor, "b n"]
    chances: Float[Tensor, "b n"]


@torch.no_grad()
def next_events(
    model: PointProcess[Any], events: Events, *, ahead: int, samples: int, generator: torch.Generator
) -> Ahead:
    """Forecast the next event of each sequence exactly, and those after it by sampled futures."""
    state = model.condition(events)
    first = model.query(state)
    times = [first.last_time[:, None] + first.quantiles(list(QUANTILES)).double()]
    chances, marks = (t[:, None] for t in first.mark_logits().exp().max(-1))
    if ahead > 1:
        future = model.sample(state.repeat(samples), n=ahead, generator=generator)
        drawn = future.times.reshape(len(events), samples, ahead)[..., 1:]
        levels = torch.tensor(QUANTILES, dtype=drawn.dtype, device=drawn.device)
        times += torch.quantile(drawn, levels, dim=1).permute(2, 1, 0).unbind()
        kinds = future.marks.reshape(len(events), samples, ahead)[..., 1:]
        shares = torch.nn.functional.one_hot(kinds, model.num_marks).double().mean(1)
        more = shares.max(-1)
        chances, marks = torch.cat([chances, more.values], 1), torch.cat([marks, more.indices], 1)
    return Ahead(torch.stack(times, 1), marks, chances)


def forecast_file(
    run: Path,
    path: Path,
    out: Path,
    *,
    columns: Mapping[str, str | None],
    ahead: int = 1,
    samples: int = 200,
    seed: int = 0,
    device: str = "cpu",
    replace: bool = False,
    report: Callable[[int, int], None],
) -> tuple[int, int]:
    """Write the next events of every sequence of a file; returns how many sequences, and unknown marks.

    Args:
        run: a trained run of events.
        path: events so far, in the columns of the file that the run was trained on, or of `columns`.
        out: one row for each event that is forecast: whose, 1 for the next, 2 for that after it and so on,
            the median of its time, the 5 and 95 % quantiles (dates where the file has dates), the likeliest
            mark and its probability.
    """
    checks.positive("ahead", ahead)
    checks.positive("samples", samples)
    free(out, replace=replace)
    about = read_run(run)["run"]
    if not of_events(about["model"]):
        raise ValueError(
            f"{run} is a run of {about['model']}, a model of points, which forecasts no events: use "
            f"NeuralProcess.from_pretrained({str(run)!r}) and its query"
        )
    if path.suffix.lower() not in FILES:
        raise ValueError(f"{path}: events to go on from are read from {', '.join(FILES)} files")
    model = PointProcess.from_pretrained(run, device=device).eval()
    own = own_data(run)
    labels = own.labels if isinstance(own, EventLog) else [str(i) for i in range(model.num_marks)]
    unit = model.unit or "second"
    trained = about.get("columns") or {}
    named = {what: columns.get(what) or trained.get(what) for what in ("user", "mark", "time")}
    read = labelled_sequences(path, named, unit, labels=labels)
    events = read.events(unit).to(model.device)
    clock = _clock(model, unit) if read.dated else float
    generator = torch.Generator(model.device).manual_seed(seed)
    user, mark, time = (named[what] or what for what in ("user", "mark", "time"))
    heads = ([] if user == NONE else [user]) + ["event"]
    step = max(1, STREAMS // (samples if ahead > 1 else 1))
    with writing(out, heads) as write:
        for start in range(0, len(events), step):
            part = events.select(slice(start, start + step)).trim()
            found = next_events(model, part, ahead=ahead, samples=samples, generator=generator)
            whose = read.users[start : start + step]
            rows = [([] if user == NONE else [name]) + [str(i + 1)] for name in whose for i in range(ahead)]
            write(rows, _columns(found, labels, mark, time, clock))
            report(min(start + step, len(events)), len(events))
    return len(events), read.unknown


def _columns(
    found: Ahead, labels: list[str], mark: str, time: str, clock: Callable[[float], Any]
) -> dict[str, NDArray[Any]]:
    low, middle, high = (
        np.array([clock(t) for t in times], dtype=object)
        for times in found.times.reshape(-1, len(QUANTILES)).T.tolist()
    )
    made = {time: middle, f"{time}_q5": low, f"{time}_q95": high}
    if len(labels) == 1:  # all events are alike
        return made
    kinds = np.array([labels[i] for i in found.marks.flatten().tolist()], dtype=object)
    chances = found.chances.flatten().double().cpu().numpy().round(4)
    return made | {mark: kinds, f"{mark}_probability": chances}


def _clock(model: PointProcess[Any], unit: str) -> Callable[[float], str]:
    """From times of the unit since 1970 to dates; empty beyond the calendar's end."""
    seconds = SECONDS[unit]
    fine = "milliseconds" if exp(float(model.log_gap_mean)) * seconds < SECOND else "seconds"

    def date(time: float) -> str:
        try:
            return datetime.fromtimestamp(time * seconds, UTC).isoformat(timespec=fine)
        except (ValueError, OverflowError, OSError):
            return ""

    return date

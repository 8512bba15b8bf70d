"""Forecasts of a file's sequences of events: when the next ones come, and of what kind they are."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from math import exp
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Float64, Int64
from numpy.typing import NDArray
from torch import Tensor

from constmem.core import checks
from constmem.core.registry import of_events
from constmem.data import EventLog, Events
from constmem.data.catalogue import SECONDS
from constmem.data.event_rows import NONE, labelled_sequences
from constmem.point_processes import PointProcess
from constmem.tabular.files import Chunk
from constmem.tabular.writing import free, writing
from constmem.training.folder import own_data, read_run

FILES = (".csv", ".tsv", ".parquet")
LEVELS = 0.05, 0.5, 0.95
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
    times = [first.last_time[:, None] + first.quantiles(list(LEVELS)).double()]
    chances, marks = (t[:, None] for t in first.mark_logits().exp().max(-1))
    if ahead > 1:
        future = model.sample(state.repeat(samples), n=ahead, generator=generator)
        drawn = future.times.reshape(len(events), samples, ahead)[..., 1:]
        levels = torch.tensor(LEVELS, dtype=drawn.dtype, device=drawn.device)
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
    if path.suffix not in FILES:
        raise ValueError(f"{path}: events to go on from are read from {', '.join(FILES)} files")
    model = PointProcess.from_pretrained(run, device=device).eval()
    own = own_data(run)
    labels = own.labels if isinstance(own, EventLog) else [str(i) for i in range(model.num_marks)]
    unit = model.unit or "second"
    named = {**(about.get("columns") or {}), **{k: v for k, v in columns.items() if v is not None}}
    named = {what: named.get(what) for what in ("user", "mark", "time")}
    read = labelled_sequences(path, named, unit, labels=labels)
    events = read.sequences.events(unit).to(model.device)
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
            write(Chunk({}, start, 0, rows), _columns(found, labels, mark, time, clock))
            report(min(start + step, len(events)), len(events))
    return len(events), read.unknown


def _columns(
    found: Ahead, labels: list[str], mark: str, time: str, clock: Callable[[float], Any]
) -> dict[str, NDArray[Any]]:
    low, middle, high = (
        np.array([clock(t) for t in times], dtype=object)
        for times in found.times.reshape(-1, len(LEVELS)).T.tolist()
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

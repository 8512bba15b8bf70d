"""Scores of predictions of points, and forecasts of a file's sequences of events."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from math import exp, isnan, nan, pi, sqrt
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Float64, Int64
from numpy.typing import NDArray
from torch import Tensor
from torch.distributions import Distribution, Normal

from constmem.core import checks
from constmem.core.registry import of_events
from constmem.data import EventLog, Events, Task
from constmem.data.catalogue import SECONDS
from constmem.data.event_files import labelled_sequences
from constmem.data.rows import NONE, free, writing
from constmem.evaluation.rows import Scores
from constmem.neural_processes import NeuralProcess
from constmem.neural_processes.heads import LevelMixture, level_log_prob
from constmem.neural_processes.joint import JointNormal, SampleMixture
from constmem.point_processes import PointProcess
from constmem.training.folder import own_data, read_run

LEVELS = (0.5, 0.8, 0.9, 0.95)
OWN = ("log_likelihood", "log_likelihood_by_batch")  # NaN only where a model has failed
AT_ONCE = {"cuda": 2**16}  # points predicted together, where small batches would leave a device idle


@torch.no_grad()
def evaluate(model: NeuralProcess, tasks: Iterable[Task], *, levels: int = 0) -> Scores:
    """Score a model on tasks, each conditioned on its context and asked for its targets.

    Args:
        levels: of pixels, how many values there are from black to white: their probabilities are scored, too.
    """
    batches: list[Tensor] = []  # per batch: sums of ll's, squared error, crps, coverage..., counts
    for group, whole, dist in _predicted(model, tasks):
        each = _task_sums(whole, dist, levels).split([task.batch for task in group])
        batches += [sums.sum(0) for sums in each]
    if not batches:
        raise ValueError("there are no tasks to score a model on")
    table = torch.stack(batches).double().cpu()
    table = table[table[:, -2] > 0]  # a batch without targets has no mean
    if not len(table):
        raise ValueError("there are no targets to score a model on: every one is masked out")
    sums = table.sum(0)
    points, values = float(sums[-2]), float(sums[-1])
    by_batch = (table[:, :4] / table[:, -2:-1]).mean(0).tolist()
    by_point = [float(total) / points for total in sums[:4]]
    names = "log_likelihood", "exact", "level_log_likelihood", "joint_log_likelihood"
    found = dict(zip(names, by_point, strict=True))
    found |= {f"{name}_by_batch": value for name, value in zip(names, by_batch, strict=True)}
    known: dict[str, Any] = {name: value for name, value in found.items() if name in OWN or not isnan(value)}
    return Scores(
        **known,
        rmse=sqrt(float(sums[4]) / values),
        crps=float(sums[5]) / values,
        coverage={str(level): float(sums[6 + i]) / values for i, level in enumerate(LEVELS)},
        points=int(points),
    )


@torch.no_grad()
def pit_values(model: NeuralProcess, tasks: Iterable[Task]) -> Float[Tensor, " n"]:
    """F(y) of every target value under its prediction: uniform on [0, 1] for a calibrated model.

    Of a value that has a probability it is anywhere in the step that F makes there, at random.
    """
    found = []
    for _, task, dist in _predicted(model, tasks):
        bounds = torch.stack(_bounds(dist, task.yt), -1)
        found.append((bounds if task.mask_t is None else bounds[task.mask_t]).flatten(0, -2).cpu())
    below, upto = torch.cat(found).unbind(-1)
    place = torch.rand(below.shape, generator=torch.Generator().manual_seed(0), dtype=below.dtype)
    return below + place * (upto - below)


def _bounds(dist: Distribution, y: Float[Tensor, "b m y"]) -> tuple[Tensor, Tensor]:
    """P(Y < y) and P(Y <= y), which only a distribution on levels knows apart."""
    upto = dist.cdf(y)
    return (dist.below(y), upto) if isinstance(dist, LevelMixture) else (upto, upto)


def _inside(below: Tensor, upto: Tensor, level: float) -> Tensor:
    """How much of a value is in the central interval of a level: all or nothing, unless F makes a step.

    Of a step it is the share that lies between (1 - level) / 2 and (1 + level) / 2. An interval of levels can
    hold no less than the whole of its outermost ones: only counted by shares is a calibrated model's coverage
    the level.
    """
    low, high = (1 - level) / 2, (1 + level) / 2
    step, shared = upto - below, torch.minimum(upto, upto.new_tensor(high)) - below.clamp_min(low)
    return torch.where(step > 0, shared.clamp_min(0) / step, ((upto >= low) & (upto <= high)).to(upto.dtype))


def _predicted(
    model: NeuralProcess, tasks: Iterable[Task]
) -> Iterator[tuple[list[Task], Task, Distribution]]:
    """Predictions for as many batches at a time as their device is good for, and those batches as one."""
    model.eval()
    for group in _grouped(tasks, AT_ONCE.get(model.device.type, 0)):
        whole = Task.stack(group)
        if whole.mask_t is not None:  # what is masked out may hold anything
            hidden = ~whole.mask_t[..., None]
            whole = replace(whole, xt=whole.xt.masked_fill(hidden, 0.0), yt=whole.yt.masked_fill(hidden, 0.0))
        yield group, whole, model.query(model.condition(whole.xc, whole.yc, mask=whole.mask_c), whole.xt)


def _grouped(tasks: Iterable[Task], most: int) -> Iterator[list[Task]]:
    """Batches that follow each other, together while they are of no more than so many points when padded."""
    group: list[Task] = []
    for task in tasks:
        grown = [*group, task]
        longest = max(t.xc.shape[1] for t in grown) + max(t.xt.shape[1] for t in grown)
        if group and sum(t.batch for t in grown) * longest > most:
            yield group
            grown = [task]
        group = grown
    if group:
        yield group


def _task_sums(task: Task, dist: Distribution, levels: int) -> Float[Tensor, "b sums"]:
    """For each task, sums over its targets."""
    real = torch.ones_like(task.xt[..., 0]) if task.mask_t is None else task.mask_t.float()
    each = real[..., None].expand_as(task.yt).double()
    inside = map(partial(_inside, *_bounds(dist, task.yt)), LEVELS)
    of_values = [(dist.mean - task.yt) ** 2, crps_of(dist, task.yt), *inside]
    sums = [(each * values).sum((1, 2)) for values in of_values]
    point = task.point_log_likelihood(dist.log_prob(task.yt)).double()
    unknown = point.new_full(point.shape[:1], nan)
    exact = unknown if task.exact is None else task.exact.double().sum(1)
    level = (
        task.point_log_likelihood(level_log_prob(dist, task.yt, levels)).double().sum(1)
        if levels
        else unknown
    )
    joint = dist.joint_log_prob(task.yt, task.mask_t) if isinstance(dist, JointNormal) else unknown
    parts = [point.sum(1), exact, level, joint, *sums, real.double().sum(1), each.sum((1, 2))]
    return torch.stack(parts, 1)


def crps_of(dist: Distribution, y: Float[Tensor, "*b y"]) -> Float[Tensor, "*b y"]:
    """Continuous ranked probability score of each value, in closed form; in its units, smaller is better.

    CRPS = integral of (F(z) - [z >= y])^2 dz = E|X - y| - E|X - X'| / 2, for X, X' drawn from F. Of a
    mixture both are means of E|N(m, s)| over its components, and over pairs of them, by their weights.
    """
    if isinstance(dist, LevelMixture):
        return dist.crps(y)
    if isinstance(dist, Normal):
        return _mean_size(y - dist.mean, dist.stddev) - dist.stddev / sqrt(pi)
    if not isinstance(dist, SampleMixture):
        raise TypeError(f"there is no closed form here for the CRPS of a {type(dist).__name__}")
    means, stds = dist.components.mean, dist.components.stddev  # (b, m, k, y)
    weight, k = dist.weight, means.shape[-2]
    spread = (2 / sqrt(pi)) * (weight.square() * stds).sum(-2)  # of each component with itself
    for shift in range(1, k // 2 + 1):  # of each with the one so many places on; and back, but for half way
        others, other_stds = means.roll(shift, -2), stds.roll(shift, -2)
        sizes = _mean_size(means - others, torch.hypot(stds, other_stds))
        pairs = (weight * weight.roll(shift, -2) * sizes).sum(-2)
        spread += pairs if 2 * shift == k else 2 * pairs
    return (weight * _mean_size(y[..., None, :] - means, stds)).sum(-2) - 0.5 * spread


def _mean_size(mean: Tensor, std: Tensor) -> Tensor:
    """E|N(mean, std)|."""
    z = mean / std
    size: Tensor = mean * torch.special.erf(z / sqrt(2.0)) + sqrt(2 / pi) * std * torch.exp(-0.5 * z**2)
    return size


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

"""Pictures of events: what was foretold and what came, hazards, goodness of fit, confused marks."""

import os
from collections.abc import Callable, Mapping, Sequence
from math import log10
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float64, Int64
from torch import Tensor

from constmem.data import Events
from constmem.evaluation.events import EventPredictor
from constmem.plots import BLUE, GREY, RED, pyplot, save_figure
from constmem.plots.clock import Clock, label_durations, rate_unit

LEVELS = (0.05, 0.25, 0.5, 0.75, 0.95)
LONGEST = 20  # letters of a mark's name that are shown
COLOURS = 10  # that marks are told apart by
File = str | os.PathLike[str]


@torch.no_grad()
def sequence_picture(
    model: EventPredictor,
    events: Events,
    path: File,
    *,
    title: str,
    names: Sequence[str] | None = None,
    most: int = 60,
) -> Path:
    """One sequence: above, each gap with the density and the intervals foretold for it; below, when and what.

    Args:
        events: of one sequence.
        names: of the marks, where they have any.
        most: how many events are shown, from the last backwards.
    """
    model.eval()
    events = _alone(events)
    gap = model.forecast(events).gap
    real = events.gaps[0].cpu()
    shown = slice(max(1, len(real) - most), len(real))
    place = torch.arange(len(real))[shown]
    gaps = real[shown].clamp_min(_smallest(real))
    quantiles = {level: _quantile(gap, level).cpu()[0, shown] for level in LEVELS}
    low = torch.minimum(gaps, quantiles[0.05]).min().item() / 2
    high = torch.maximum(gaps, quantiles[0.95]).max().item() * 2
    figure, above, below = _panes(title, height=4.8)
    grid = torch.logspace(log10(low), log10(high), 160).double()
    density = _density(gap, grid.to(events.device))[:, shown]
    shades = density / density.amax(0, keepdim=True)
    above.pcolormesh(*map(_array, (place, grid, shades)), cmap="Blues", shading="nearest", vmax=1.6)
    for level, style in ((0.05, ":"), (0.25, "--"), (0.5, "-"), (0.75, "--"), (0.95, ":")):
        label = {0.05: "90 % interval", 0.25: "50 % interval", 0.5: "median"}.get(level)
        above.plot(_array(place), _array(quantiles[level]), style, color=BLUE, linewidth=0.9, label=label)
    above.plot(_array(place), _array(gaps), ".", color=RED, markersize=5, label="what came")
    above.set(yscale="log", xlabel="event", ylim=(low, high))
    above.locator_params(axis="x", integer=True)
    label_durations(above, events.unit)
    _timeline(below, events, shown, _clock(events, shown), names)
    _legend(figure)
    return save_figure(figure, path)


@torch.no_grad()
def hazard_picture(
    model: EventPredictor,
    events: Events,
    path: File,
    *,
    title: str,
    truth: Callable[[Tensor], Tensor] | None = None,
    names: Sequence[str] | None = None,
    most: int = 40,
) -> Path:
    """The hazard a model sees while time passes, with the events below it.

    Args:
        events: of one sequence.
        truth: the true hazard at some times, where it is known (`Process.hazard`).
        names: of the marks, where they have any.
        most: how many events are shown, from the last backwards.
    """
    model.eval()
    events = _alone(events)
    gap = model.forecast(events).gap
    shown = slice(max(1, events.times.shape[1] - most), events.times.shape[1])
    share = torch.linspace(1e-3, 1, 60, dtype=torch.float64, device=events.device)[:, None, None]
    offsets = share * events.gaps  # (60, 1, t)
    log_hazard = gap.log_prob(offsets) - gap.log_survival(offsets)
    times = (events.times - events.gaps + offsets)[:, 0, shown].T.reshape(-1)
    hazard = log_hazard[:, 0, shown].T.reshape(-1).exp()
    true = None if truth is None else truth(times)
    seen = hazard if true is None else true
    unit, many = rate_unit(float(seen.max()), events.unit)
    clock = _clock(events, shown)
    figure, above, below = _panes(title, height=4.0, sharex=True)
    if true is not None:
        above.plot(clock(times), _array(many * true), color=GREY, linewidth=2.4, label="true hazard")
    above.plot(clock(times), _array(many * hazard), color=BLUE, linewidth=1.1, label="the model's hazard")
    above.set(ylabel=f"events per {unit}", **_hazard_axis(many * seen, events.gaps[0, shown] / many))
    above.yaxis.set_major_formatter("{x:g}")
    _timeline(below, events, shown, clock, names)
    _legend(figure)
    return save_figure(figure, path)


def fit_picture(rescaled: Mapping[str, Float64[Tensor, " n"]], path: File, *, title: str) -> Path:
    """Rescaled times against the exponential they should follow, and their histogram as probabilities.

    Grey is where 95 % of the points (of the bars) of a true model would lie, each on its own.

    Args:
        rescaled: for each model its rescaled times (see `evaluate_events.rescaled_times`).
    """
    plt = pyplot()
    figure, (left, right) = plt.subplots(1, 2, figsize=(8.4, 3.8), dpi=130)
    n = min(len(values) for values in rescaled.values())
    expected = torch.linspace(0, float(torch.tensor(n).log()), 200, dtype=torch.float64)
    level = -torch.expm1(-expected)
    spread = 1.96 * (expected.expm1() / n).sqrt()  # √(p (1 - p) / n) over the density 1 - p
    band = (expected - spread).clamp_min(0), expected + spread
    left.fill_between(*map(_array, (expected, *band)), color=GREY, alpha=0.35, linewidth=0)
    left.plot([0, float(expected[-1])], [0, float(expected[-1])], color=GREY, linewidth=0.8)
    bins = 20
    noise = 1.96 * (bins / n * (1 - 1 / bins)) ** 0.5
    right.axhspan(1 - noise, 1 + noise, color=GREY, alpha=0.35, linewidth=0)
    for (label, values), color in zip(rescaled.items(), _colours(len(rescaled)), strict=True):
        values = values.double().cpu()
        found = torch.quantile(_thinned(values), level)
        left.plot(_array(expected), _array(found), color=color, linewidth=1.4, label=label)
        pit = -torch.expm1(-values)
        heights = torch.histc(pit, bins, 0, 1) * bins / len(pit)
        right.stairs(
            _array(heights), _array(torch.linspace(0, 1, bins + 1)), color=color, linewidth=1.4, label=label
        )
    left.set(xlabel="exponential quantile", ylabel="quantile of rescaled times")
    right.set(xlabel="probability of a shorter gap", ylabel="density", ylim=(0, None))
    left.legend(frameon=False, fontsize=8)
    left.set_title(title, loc="left", fontsize=10)
    figure.tight_layout()
    return save_figure(figure, path)


def confusion_picture(
    shown: Int64[Tensor, " k"],
    counts: Int64[Tensor, "k k1"],
    path: File,
    *,
    title: str,
    names: Sequence[str] | None = None,
) -> Path:
    """Which mark was foretold for each of the commonest, in percent of its events (see `mark_confusion`)."""
    plt = pyplot()
    percent = 100 * counts.cpu().double() / counts.cpu().sum(1, keepdim=True).clamp_min(1)
    labels = [str(mark) if names is None else names[mark][:LONGEST] for mark in shown.tolist()]
    foretold = [*labels, "other"]
    if not counts[:, -1].any():  # all marks are shown, or no other was ever foretold
        percent, foretold = percent[:, :-1], labels
    side = 0.48 * len(labels) + 1.6
    figure, axis = plt.subplots(figsize=(max(side + 0.6, 5.6), side), dpi=130)  # wide enough for the title
    axis.imshow(_array(percent), cmap="Blues", vmin=0, vmax=100)
    for i, row in enumerate(percent.tolist()):
        for j, value in enumerate(row):
            if value >= 0.5:
                color = "white" if value > 55 else "black"
                axis.text(j, i, f"{value:.0f}", ha="center", va="center", fontsize=7, color=color)
    turned = {} if max(map(len, labels)) < 5 else {"rotation": 40, "ha": "right", "rotation_mode": "anchor"}
    axis.set_xticks(range(len(foretold)), foretold, fontsize=8, **turned)
    axis.set_yticks(
        range(len(labels)),
        [f"{label} ({int(n):,})" for label, n in zip(labels, counts.sum(1), strict=True)],
        fontsize=8,
    )
    axis.set(xlabel="foretold", ylabel="came (events)")
    axis.set_title(title, loc="left", fontsize=10)
    figure.tight_layout()
    return save_figure(figure, path)


def _array(numbers: Tensor) -> Any:
    return numbers.detach().cpu().numpy()


def _alone(events: Events) -> Events:
    if len(events) != 1 or int(events.lengths[0]) < 2:
        raise ValueError(
            f"there are {len(events)} sequences, the first with {events.lengths.tolist()[:1]} events: select "
            "one of two events or more"
        )
    return events.trim()


def _panes(title: str, *, height: float, **more: Any) -> tuple[Any, Any, Any]:
    """A figure of a large axis under a title, and below it a flat one for a time line."""
    figure, (above, below) = pyplot().subplots(
        2, 1, figsize=(8.0, height), dpi=130, layout="constrained", height_ratios=(5, 1), **more
    )
    above.set_title(title, loc="left", fontsize=10)
    return figure, above, below


def _density(gap: Any, grid: Float64[Tensor, " g"]) -> Float64[Tensor, "g t"]:
    """The densities of the logarithms of gaps that are foretold for one sequence."""
    value = grid[:, None, None].expand(-1, *gap.batch_shape)
    out: Tensor = (gap.log_prob(value).exp() * value)[:, 0].double().cpu()
    return out


def _quantile(gap: Any, level: float) -> Tensor:
    shape = torch.Size(gap.batch_shape)
    out: Tensor = gap.icdf(torch.full(shape, level, dtype=torch.float64, device=gap.mean.device)).double()
    return out


def _hazard_axis(hazard: Float64[Tensor, " g"], gaps: Float64[Tensor, " n"]) -> dict[str, Any]:
    """A logarithmic axis where events come in bursts: a linear one would show nothing but these.

    It goes down to the end of the longest silence; dips right after events may leave it.
    """
    highest = float(hazard.max())
    if highest * float(gaps.mean()) < 10:
        return {"ylim": (0, None)}
    silence = hazard.reshape(len(gaps), -1)[gaps.argmax(), -1]
    return {"yscale": "log", "ylim": (min(float(silence), float(hazard.quantile(0.03))) / 2, highest * 2)}


def _smallest(gaps: Tensor) -> float:
    """The shortest positive gap: what simultaneous events are shown at on a logarithmic axis."""
    positive = gaps[gaps > 0]
    return float(positive.min()) if len(positive) else 1.0


def _clock(events: Events, shown: slice) -> Clock:
    """For the times of the events shown, and of the gap before the first of them."""
    times = events.times[0, shown]
    return Clock.between(float(times[0] - events.gaps[0, shown][0]), float(times[-1]), events.unit)


def _timeline(axis: Any, events: Events, shown: slice, clock: Clock, names: Sequence[str] | None) -> None:
    """The events as strokes, coloured by mark; with ten marks or fewer the legend tells which is which."""
    marks, places = events.marks[0, shown], clock(events.times[0, shown])
    told = 1 < events.num_marks <= COLOURS
    for mark in marks.unique().tolist():
        name = "unknown" if mark < 0 else f"mark {mark}" if names is None else names[mark][:LONGEST]
        colour = GREY if mark < 0 else f"C{mark % COLOURS}"
        here = places[_array(marks == mark)]
        axis.vlines(here, 0, 1, colors=colour, linewidth=1.3, label=name if told else None)
    clock.label_axis(axis)
    if events.num_marks > COLOURS:
        axis.set_xlabel(f"{clock.label}; colours are marks")
    axis.set(yticks=[])
    for side in ("left", "right", "top"):
        axis.spines[side].set_visible(False)


def _legend(figure: Any) -> None:
    """What lines and colours mean, below everything that is drawn."""
    labels = [label for axis in figure.axes for label in axis.get_legend_handles_labels()[1]]
    in_line = len(labels) if sum(map(len, labels)) + 7 * len(labels) <= 110 else 4  # letters, strokes
    figure.legend(loc="outside lower center", frameon=False, fontsize=8, ncols=in_line)


def _colours(count: int) -> list[str]:
    return [BLUE, RED, "#2a9d8f", "#e9a03b", "#6d597a", GREY][:count] + ["black"] * (count - 6)


def _thinned(values: Tensor, most: int = 1_000_000) -> Tensor:
    """`torch.quantile` takes 16 million numbers; evenly spaced order statistics say the same."""
    ordered = values.sort().values
    return ordered if len(ordered) <= most else ordered[torch.linspace(0, len(ordered) - 1, most).long()]

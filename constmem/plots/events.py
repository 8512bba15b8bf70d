"""Pictures of events: what was predicted and what came, hazards, goodness of fit, confused marks."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import log10
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float64, Int64
from torch import Tensor

from constmem.plots import BLUE, GREY, RED, AnyPath, Clock, label_durations, rate_unit, save_figure, subplots

LEVELS = (0.05, 0.25, 0.5, 0.75, 0.95)
LONGEST = 20  # letters of a mark's name that are shown
COLOURS = 10  # as many marks have colours of their own


@dataclass(frozen=True, eq=False)
class Timeline:
    """One sequence of events as it is drawn.

    Attributes:
        times, gaps: of every event, in `unit`; a gap is the time since the event before.
        marks: 0 to num_marks - 1, or -1 where unknown.
        names: of the marks, where they have any.
    """

    times: Float64[Tensor, " t"]
    gaps: Float64[Tensor, " t"]
    marks: Int64[Tensor, " t"]
    unit: str
    num_marks: int
    names: Sequence[str] | None = None

    def last(self, most: int) -> slice:
        """The places of the last `most` events, the first event of all left out: it has no gap."""
        return slice(max(1, len(self.times) - most), len(self.times))


def sequence_picture(timeline: Timeline, gap: Any, path: AnyPath, *, title: str, most: int = 60) -> Path:
    """One sequence: above, each gap with its predicted density and intervals; below, when and what.

    Args:
        gap: the predicted distribution of every gap, (1, t): log_prob and icdf.
        most: how many events are shown, counted from the last.
    """
    real = timeline.gaps
    shown = timeline.last(most)
    place = torch.arange(len(real))[shown]
    positive = real[real > 0]  # simultaneous events are shown at the shortest of these
    gaps = real[shown].clamp_min(float(positive.min()) if len(positive) else 1.0)
    quantiles = {level: _quantile(gap, level)[shown] for level in LEVELS}
    low = torch.minimum(gaps, quantiles[0.05]).min().item() / 2
    high = torch.maximum(gaps, quantiles[0.95]).max().item() * 2
    figure, above, below = _panes(title, height=4.8)
    grid = torch.logspace(log10(low), log10(high), 160).double()
    density = _density(gap, grid)[:, shown]
    shades = density / density.amax(0, keepdim=True)
    above.pcolormesh(place.numpy(), grid.numpy(), shades.numpy(), cmap="Blues", shading="nearest", vmax=1.6)
    for level, style in ((0.05, ":"), (0.25, "--"), (0.5, "-"), (0.75, "--"), (0.95, ":")):
        label = {0.05: "90 % interval", 0.25: "50 % interval", 0.5: "median"}.get(level)
        above.plot(place, quantiles[level], style, color=BLUE, linewidth=0.9, label=label)
    above.plot(place, gaps, ".", color=RED, markersize=5, label="what came")
    above.set(yscale="log", xlabel="event", ylim=(low, high))
    above.locator_params(axis="x", integer=True)
    label_durations(above, timeline.unit)
    _strokes(below, timeline, shown, _clock(timeline, shown))
    _legend(figure)
    return save_figure(figure, path)


def hazard_picture(
    timeline: Timeline,
    times: Float64[Tensor, "t g"],
    hazard: Float64[Tensor, "t g"],
    path: AnyPath,
    *,
    title: str,
    true: Float64[Tensor, "t g"] | None = None,
    most: int = 40,
) -> Path:
    """The hazard a model predicts while time passes, with the events below it.

    Args:
        times: in the gap before each event, in order, the last at the event itself.
        hazard: at these times.
        true: the true hazard there, where it is known.
        most: how many events are shown, counted from the last.
    """
    shown = timeline.last(most)
    seen = (hazard if true is None else true)[shown]
    unit, many = rate_unit(float(seen.max()), timeline.unit)
    clock = _clock(timeline, shown)
    at = clock(times[shown].reshape(-1))
    figure, above, below = _panes(title, height=4.0, sharex=True)
    if true is not None:
        above.plot(at, many * seen.reshape(-1), color=GREY, linewidth=2.4, label="true hazard")
    above.plot(at, many * hazard[shown].reshape(-1), color=BLUE, linewidth=1.1, label="the model's hazard")
    above.set(ylabel=f"events per {unit}", **_hazard_axis(many * seen, timeline.gaps[shown] / many))
    above.yaxis.set_major_formatter("{x:g}")
    _strokes(below, timeline, shown, clock)
    _legend(figure)
    return save_figure(figure, path)


def fit_picture(rescaled: Mapping[str, Float64[Tensor, " n"]], path: AnyPath, *, title: str) -> Path:
    """Rescaled times against the exponential they should follow, and their histogram as probabilities.

    Grey is where 95 % of the points (of the bars) of a true model would lie, each on its own.

    Args:
        rescaled: for each model its rescaled times (see `evaluation.events.rescaled_times`).
    """
    figure, (left, right) = subplots(1, 2, figsize=(8.4, 3.8))
    n = min(len(values) for values in rescaled.values())
    expected = torch.linspace(0, float(torch.tensor(n).log()), 200, dtype=torch.float64)
    level = -torch.expm1(-expected)
    spread = 1.96 * (expected.expm1() / n).sqrt()  # √(p (1 - p) / n) over the density 1 - p
    band = (expected - spread).clamp_min(0), expected + spread
    left.fill_between(expected, *band, color=GREY, alpha=0.35, linewidth=0)
    left.plot([0, float(expected[-1])], [0, float(expected[-1])], color=GREY, linewidth=0.8)
    bins = 20
    noise = 1.96 * (bins / n * (1 - 1 / bins)) ** 0.5
    right.axhspan(1 - noise, 1 + noise, color=GREY, alpha=0.35, linewidth=0)
    for (label, values), color in zip(rescaled.items(), _colours(len(rescaled)), strict=True):
        values = values.double().cpu()
        found = torch.quantile(_thinned(values), level)
        left.plot(expected, found, color=color, linewidth=1.4, label=label)
        pit = -torch.expm1(-values)
        heights = torch.histc(pit, bins, 0, 1) * bins / len(pit)
        right.stairs(heights, torch.linspace(0, 1, bins + 1), color=color, linewidth=1.4, label=label)
    left.set(xlabel="exponential quantile", ylabel="quantile of rescaled times")
    right.set(xlabel="probability of a shorter gap", ylabel="density", ylim=(0, None))
    left.legend(frameon=False, fontsize=8)
    left.set_title(title, loc="left", fontsize=10)
    return save_figure(figure, path, tight={})


def confusion_picture(
    shown: Int64[Tensor, " k"],
    counts: Int64[Tensor, "k k1"],
    path: AnyPath,
    *,
    title: str,
    names: Sequence[str] | None = None,
) -> Path:
    """Which mark was predicted for each of the commonest, in percent of its events."""
    percent = 100 * counts.cpu().double() / counts.cpu().sum(1, keepdim=True).clamp_min(1)
    labels = [str(mark) if names is None else names[mark][:LONGEST] for mark in shown.tolist()]
    predicted = [*labels, "other"]
    if not counts[:, -1].any():  # all marks are shown, or no other was ever predicted
        percent, predicted = percent[:, :-1], labels
    side = 0.48 * len(labels) + 1.6
    figure, axis = subplots(figsize=(max(side + 0.6, 5.6), side))  # wide enough for the title
    axis.imshow(percent.numpy(), cmap="Blues", vmin=0, vmax=100)
    for i, row in enumerate(percent.tolist()):
        for j, value in enumerate(row):
            if value >= 0.5:
                color = "white" if value > 55 else "black"
                axis.text(j, i, f"{value:.0f}", ha="center", va="center", fontsize=7, color=color)
    turned = {} if max(map(len, labels)) < 5 else {"rotation": 40, "ha": "right", "rotation_mode": "anchor"}
    axis.set_xticks(range(len(predicted)), predicted, fontsize=8, **turned)
    axis.set_yticks(
        range(len(labels)),
        [f"{label} ({int(n):,})" for label, n in zip(labels, counts.sum(1), strict=True)],
        fontsize=8,
    )
    axis.set(xlabel="predicted mark", ylabel="true mark (events)")
    axis.set_title(title, loc="left", fontsize=10)
    return save_figure(figure, path, tight={})


def _panes(title: str, *, height: float, **more: Any) -> tuple[Any, Any, Any]:
    """A figure of a large axis under a title, and below it a flat one for a time line."""
    shape: dict[str, Any] = {"layout": "constrained", "height_ratios": (5, 1)}
    figure, (above, below) = subplots(2, 1, figsize=(8.0, height), **shape, **more)
    above.set_title(title, loc="left", fontsize=10)
    return figure, above, below


def _density(gap: Any, grid: Float64[Tensor, " g"]) -> Float64[Tensor, "g t"]:
    """The predicted densities of the logarithms of one sequence's gaps."""
    value = grid[:, None, None].expand(-1, *gap.batch_shape).to(gap.mean.device)
    out: Tensor = (gap.log_prob(value).exp() * value)[:, 0].double().cpu()
    return out


def _quantile(gap: Any, level: float) -> Float64[Tensor, " t"]:
    shape = torch.Size(gap.batch_shape)
    out: Tensor = gap.icdf(torch.full(shape, level, dtype=torch.float64, device=gap.mean.device))
    return out.double()[0].cpu()


def _hazard_axis(hazard: Float64[Tensor, "n g"], gaps: Float64[Tensor, " n"]) -> dict[str, Any]:
    """A logarithmic axis where events come in bursts: a linear one would show nothing but these.

    It goes down to the end of the longest silence; dips right after events may leave it.
    """
    highest = float(hazard.max())
    if highest * float(gaps.mean()) < 10:
        return {"ylim": (0, None)}
    silence = hazard[gaps.argmax(), -1]
    return {"yscale": "log", "ylim": (min(float(silence), float(hazard.quantile(0.03))) / 2, highest * 2)}


def _clock(timeline: Timeline, shown: slice) -> Clock:
    """For the times of the events shown, and of the gap before the first of them."""
    times = timeline.times[shown]
    return Clock.between(float(times[0] - timeline.gaps[shown][0]), float(times[-1]), timeline.unit)


def _strokes(axis: Any, timeline: Timeline, shown: slice, clock: Clock) -> None:
    """The events as strokes, coloured by mark; with ten marks or fewer the legend says which is which."""
    marks, places, names = timeline.marks[shown], clock(timeline.times[shown]), timeline.names
    named = 1 < timeline.num_marks <= COLOURS
    for mark in marks.unique().tolist():
        name = "unknown" if mark < 0 else f"mark {mark}" if names is None else names[mark][:LONGEST]
        colour = GREY if mark < 0 else f"C{mark % COLOURS}"
        here = places[(marks == mark).numpy()]
        axis.vlines(here, 0, 1, colors=colour, linewidth=1.3, label=name if named else None)
    clock.label_axis(axis)
    if timeline.num_marks > COLOURS:
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

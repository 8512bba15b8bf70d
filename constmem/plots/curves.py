"""Lines: how a run learned, how calibrated it is, how memory grows, and functions of one input."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf, isfinite
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from constmem.plots import BLUE, GREY, RED, AnyPath, plain, save_figure, subplots


def learning_curve(entries: Sequence[Mapping[str, Any]], path: AnyPath, *, title: str) -> Path:
    """Loss, validation and rate against steps, from the entries of a run's metrics.jsonl."""
    steps = {
        key: [(entry["step"], entry[key]) for entry in entries if key in entry]
        for key in ("loss", "validation", "lr")
    }
    if not steps["loss"]:
        raise ValueError("the run has logged no loss yet: train it for some steps first")
    figure, axes = subplots(3, 1, figsize=(6.8, 5.6), sharex=True, height_ratios=(3, 2, 1))
    at, loss = zip(*steps["loss"], strict=True)
    dot = "o" if len(at) == 1 else ""  # a line through one point is invisible
    axes[0].plot(at, loss, color=GREY, alpha=0.7, linewidth=0.8, label="logged steps")
    axes[0].plot(at, _smooth(loss), color=BLUE, marker=dot, markersize=3, label="their running mean")
    axes[0].set(ylabel="loss", ylim=_range(loss), xlim=(0, at[-1] * 1.02))
    axes[0].xaxis.get_major_locator().set_params(integer=True)
    axes[0].legend(frameon=False, fontsize=8, loc="best")
    if steps["validation"]:
        at, found = zip(*steps["validation"], strict=True)
        best = max(range(len(found)), key=lambda i: found[i] if isfinite(found[i]) else -inf)
        axes[1].plot(at, found, color=BLUE, marker="o", markersize=3)
        axes[1].plot(at[best], found[best], "o", color=RED, markersize=6, label=f"best: {found[best]:.3f}")
        axes[1].set_ylim(*_range(found))
        axes[1].legend(frameon=False, fontsize=8, loc="best")
    axes[1].set_ylabel("validation\nlog-likelihood")
    if steps["lr"]:
        axes[2].plot(*zip(*steps["lr"], strict=True), color=GREY, marker=dot, markersize=3)
    axes[2].set(ylabel="rate", xlabel="steps", ylim=(0, None))
    axes[2].ticklabel_format(axis="y", style="sci", scilimits=(-2, 2))
    for axis in axes:
        plain(axis)
    figure.align_ylabels(axes)
    axes[0].set_title(title, loc="left", fontsize=10)
    return save_figure(figure, path, tight={})


def calibration_curve(pits: Mapping[str, Float[Tensor, " n"]], path: AnyPath, *, title: str) -> Path:
    """How often central intervals hold the truth, and where in its distribution the truth falls.

    Left, for each level p, the share of values inside the central interval of probability p: on the
    diagonal for a calibrated model, above it where intervals are too wide. Right, the histogram of
    F(y): flat for a calibrated model, a hill where intervals are too wide, a valley where too narrow.

    Args:
        pits: for each test set, F(y) of its values under their predictions.
    """
    figure, (left, right) = subplots(1, 2, figsize=(8.4, 3.8))
    levels = torch.linspace(0, 1, 51)
    left.plot([0, 1], [0, 1], color="black", linewidth=0.8, linestyle=":")
    for (name, pit), colour in zip(pits.items(), (BLUE, RED, GREY), strict=False):
        left.plot(levels, reliability(pit, levels), color=colour, label=name)
        counts = torch.histc(pit.float(), bins=20, min=0, max=1) / len(pit) * 20
        right.stairs(counts, torch.linspace(0, 1, 21), color=colour, linewidth=1.4, label=name)
    right.axhline(1, color="black", linewidth=0.8, linestyle=":")
    left.set(xlabel="probability of the central interval", ylabel="share of values inside it", aspect="equal")
    left.text(0.03, 0.97, "too wide", fontsize=8, color=GREY, va="top")
    left.text(0.97, 0.03, "too narrow", fontsize=8, color=GREY, ha="right")
    right.set(xlabel="F(y): where the truth falls", ylabel="density", xlim=(0, 1), ylim=(0, None))
    for axis in (left, right):
        plain(axis)
    right.legend(frameon=False, fontsize=8)
    return save_figure(figure, path, title=title, tight={})


def reliability(pit: Float[Tensor, " n"], levels: Float[Tensor, " k"]) -> Float[Tensor, " k"]:
    """The share of values inside the central interval of each level: mean(|F(y) - 1/2| <= p / 2).

    Example:
        >>> reliability(torch.tensor([0.5, 0.1, 0.9, 0.99]), torch.tensor([0.5, 0.9]))
        tensor([0.2500, 0.7500])
    """
    distances = (2 * (pit.double() - 0.5).abs()).sort().values
    below = torch.searchsorted(distances, levels.double() + 1e-9, right=True)
    return (below / len(pit)).to(levels.dtype)


def predicted_against_true(
    true: Float[Tensor, " n"],
    mean: Float[Tensor, " n"],
    std: Float[Tensor, " n"],
    path: AnyPath,
    *,
    title: str,
) -> Path:
    """Predicted means with one deviation on either side against the truth."""
    figure, axis = subplots(figsize=(4.8, 4.6))
    low, high = float(torch.minimum(true, mean).min()), float(torch.maximum(true, mean).max())
    axis.plot([low, high], [low, high], color="black", linewidth=0.8, linestyle=":")
    axis.errorbar(true, mean, std, fmt="o", color=BLUE, ecolor=GREY, elinewidth=0.7, markersize=3, alpha=0.8)
    axis.set(xlabel="truth", ylabel="prediction, ± one deviation")
    plain(axis)
    axis.set_title(title, loc="left", fontsize=10)
    return save_figure(figure, path, tight={})


@dataclass(frozen=True)
class Panel:
    """Some lines over a common axis of rows seen.

    Attributes:
        label: what is drawn.
        lines: by name, the rows seen and the values there; a name has one colour in all panels.
        level: where values should be, drawn as a dotted line.
        low, high: limits of the axis; None: as the values are.
        log: whether its axis is logarithmic.
    """

    label: str
    lines: Mapping[str, tuple[Sequence[float], Sequence[float]]]
    level: float | None = None
    low: float | None = None
    high: float | None = None
    log: bool = False


def panels_of_lines(
    panels: Sequence[Panel], path: AnyPath, *, title: str, xlabel: str = "rows seen", log: bool = False
) -> Path:
    """Panels side by side that share their names and their axis of rows (logarithmic if `log` is set)."""
    figure, axes = subplots(1, len(panels), figsize=(3.1 * len(panels), 3.2), squeeze=False)
    names = list(dict.fromkeys(name for panel in panels for name in panel.lines))
    colours = dict(zip(names, (BLUE, RED, GREY, "#2a9d8f", "#e09f3e"), strict=False))
    for axis, panel in zip(axes[0], panels, strict=True):
        for name, (seen, values) in panel.lines.items():
            axis.plot(seen, values, marker="o", markersize=3, color=colours[name], label=name)
        if panel.level is not None:
            axis.axhline(panel.level, color="black", linewidth=0.8, linestyle=":")
        axis.set(xscale="log" if log else "linear", yscale="log" if panel.log else "linear")
        axis.set_xlabel(xlabel, fontsize=8)
        axis.set_ylim(panel.low, panel.high)
        axis.set_title(panel.label, fontsize=9)
        axis.tick_params(labelsize=8)
        plain(axis)
    handles = {
        label: line for axis in axes[0] for line, label in zip(*axis.get_legend_handles_labels(), strict=True)
    }
    figure.legend(handles.values(), handles, loc="lower center", ncols=len(names), frameon=False, fontsize=9)
    return save_figure(figure, path, title=title, tight={"rect": (0, 0.07, 1, 1)})


@dataclass(frozen=True, eq=False)
class Fit:
    """A function as a model sees it from a few points of it; all in one dimension.

    Attributes:
        context: x and y of the points shown.
        x, mean, std: the prediction, on a grid.
        exact: mean and deviation of the exact posterior, where there is one.
        rest: x and y of points that were not shown.
    """

    context: tuple[Float[Tensor, " n"], Float[Tensor, " n"]]
    x: Float[Tensor, " m"]
    mean: Float[Tensor, " m"]
    std: Float[Tensor, " m"]
    exact: tuple[Float[Tensor, " m"], Float[Tensor, " m"]] | None = None
    rest: tuple[Float[Tensor, " k"], Float[Tensor, " k"]] | None = None


def function_fits(rows: Sequence[tuple[str, Sequence[Fit]]], path: AnyPath, *, title: str) -> Path:
    """One row for each function, growing contexts from left to right."""
    columns = max(len(fits) for _, fits in rows)
    size = (2.9 * columns + 0.6, 2.1 * len(rows) + 0.9)
    figure, axes = subplots(len(rows), columns, figsize=size, squeeze=False, sharex="row")
    for row, (name, fits) in zip(axes, rows, strict=True):
        low, high = _limits(fits)
        for axis, fit in zip(row, fits, strict=True):
            _draw(axis, fit)
            axis.set_ylim(low, high)
            axis.set_title(f"{len(fit.context[0])} points", fontsize=8)
            plain(axis)
            axis.tick_params(labelsize=7)
            axis.xaxis.get_offset_text().set_fontsize(7)
        row[0].set_ylabel(name, fontsize=9)
    handles, labels = axes[0, -1].get_legend_handles_labels()
    figure.legend(handles, labels, loc="lower center", ncols=len(labels), frameon=False, fontsize=8)
    return save_figure(figure, path, title=title, tight={"rect": (0, 0.3 / size[1], 1, 1)})


def _smooth(values: Sequence[float], share: float = 0.05) -> list[float]:
    """The mean of the twentieth of all values around each."""
    half = max(int(len(values) * share) // 2, 1)
    return [fmean(values[max(i - half, 0) : i + half + 1]) for i in range(len(values))]


def _range(values: Sequence[float]) -> tuple[float, float]:
    """Limits that a few wild values do not stretch."""
    numbers = torch.tensor([value for value in values if isfinite(value)] or [0.0], dtype=torch.float64)
    low, high = (float(q) for q in numbers.quantile(torch.tensor([0.02, 0.98], dtype=torch.float64)))
    margin = max(0.15 * (high - low), 0.05)
    return low - margin, high + margin


def _draw(axis: Any, fit: Fit) -> None:
    band = {"color": BLUE, "alpha": 0.18, "linewidth": 0}
    axis.fill_between(fit.x, fit.mean - 2 * fit.std, fit.mean + 2 * fit.std, **band, label="± 2 deviations")
    axis.plot(fit.x, fit.mean, color=BLUE, linewidth=1.3, label="mean")
    if fit.exact is not None:
        mean, std = fit.exact
        axis.plot(fit.x, mean, color=RED, linewidth=0.9, linestyle="--", label="exact mean")
        for sign, label in ((2, "exact ± 2 deviations"), (-2, None)):
            axis.plot(fit.x, mean + sign * std, color=RED, linewidth=0.7, linestyle=":", label=label)
    if fit.rest is not None:
        axis.plot(*fit.rest, "o", color="black", markersize=2, alpha=0.25, label="not shown")
    axis.plot(*fit.context, "o", color="black", markersize=3, label="context")


def _limits(fits: Sequence[Fit]) -> tuple[float, float]:
    """Room for all points and for the bands of the last fit, which has seen most."""
    last = fits[-1]
    rest = [] if last.rest is None else [last.rest[1]]
    points = [fit.context[1] for fit in fits]
    values = torch.cat([*points, *rest, last.mean - 2 * last.std, last.mean + 2 * last.std])
    low, high = float(values.min()), float(values.max())
    margin = 0.35 * (high - low)
    return low - margin, high + margin

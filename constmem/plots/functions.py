"""Functions of one input: context, mean and bands, beside the exact posterior where it is known."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxtyping import Float
from torch import Tensor

from constmem.plots.figure import BLUE, DPI, RED, plain, pyplot, save_figure


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


def function_fits(
    rows: Sequence[tuple[str, Sequence[Fit]]], path: str | os.PathLike[str], *, title: str
) -> Path:
    """One row for each function, growing contexts from left to right."""
    plt = pyplot()
    columns = max(len(fits) for _, fits in rows)
    size = (2.9 * columns + 0.6, 2.1 * len(rows) + 0.9)
    figure, axes = plt.subplots(len(rows), columns, figsize=size, dpi=DPI, squeeze=False, sharex="row")
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
    figure.suptitle(title, fontsize=10, x=0.02, ha="left")
    figure.tight_layout(rect=(0, 0.3 / size[1], 1, 1))
    return save_figure(figure, path)


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
    """Room for all points and for the bands of the last fit, the best informed one."""
    last = fits[-1]
    values = [
        *(fit.context[1] for fit in fits if len(fit.context[1])),
        last.mean - 2 * last.std,
        last.mean + 2 * last.std,
    ]
    values += [] if last.rest is None or not len(last.rest[1]) else [last.rest[1]]
    low, high = min(float(v.min()) for v in values), max(float(v.max()) for v in values)
    margin = 0.35 * (high - low)
    return low - margin, high + margin

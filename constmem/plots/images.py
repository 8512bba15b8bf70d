"""Images completed from some of their pixels: one model in detail, or several side by side."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float, UInt8
from torch import Tensor

from constmem.plots import DPI, AnyPath, bare, pyplot, save_figure

UNKNOWN = "#cfe0f5"


@dataclass(frozen=True, eq=False)
class Completion:
    """Images as a model predicts them from some of their pixels; all values in [0, 1].

    Attributes:
        size: how many pixels of each image were observed.
        context: these pixels, NaN elsewhere.
        mean, std: the prediction of every pixel.
    """

    size: int
    context: Float[Tensor, "b h w c"]
    mean: Float[Tensor, "b h w c"]
    std: Float[Tensor, "b h w c"]


def completion_grid(
    completions: Sequence[Completion], pixels: UInt8[Tensor, "b h w c"], path: AnyPath, *, title: str
) -> Path:
    """For each image three rows (context, mean, uncertainty), one column a completion, then the truth."""
    rows, columns = 3 * len(pixels), len(completions) + 1
    figure, axes = _grid(rows, columns, [1.0] * columns)
    brightest = _brightest(completions)
    for i in range(len(pixels)):
        for j, completion in enumerate(completions):
            _show(axes[3 * i, j], completion.context[i], unknown=UNKNOWN)
            _show(axes[3 * i + 1, j], completion.mean[i])
            _show_std(axes[3 * i + 2, j], completion.std[i], brightest)
        _show(axes[3 * i, -1], pixels[i].float() / 255)
        for k, name in enumerate(("context", "mean", "uncertainty")):
            _label(axes[3 * i + k, 0], name)
        _colour_bar(figure, axes[3 * i + 2, -1], brightest)
    _heads(axes[0], completions)
    return _saved(figure, path, title)


def model_grid(
    models: Mapping[str, Sequence[Completion]],
    pixels: UInt8[Tensor, "b h w c"],
    path: AnyPath,
    *,
    title: str,
) -> Path:
    """Several models on the same pixels of the same images, each with its mean and uncertainty.

    The images are side by side; each has a column for every context size and one for the truth.

    Args:
        models: for each model its completions, all of the same contexts.
    """
    first = next(iter(models.values()))
    span = len(first) + 2  # the contexts, the truth, and a gap
    columns = span * len(pixels) - 1
    widths = [0.4 if i % span == span - 1 else 1.0 for i in range(columns)]
    figure, axes = _grid(1 + 2 * len(models), columns, widths, margin=1.4)
    brightest = max(map(_brightest, models.values()))
    for i in range(len(pixels)):
        for j, shown in enumerate(first):
            column = i * span + j
            _show(axes[0, column], shown.context[i], unknown=UNKNOWN)
            for k, completions in enumerate(models.values()):
                _show(axes[1 + 2 * k, column], completions[j].mean[i])
                _show_std(axes[2 + 2 * k, column], completions[j].std[i], brightest)
        _heads(axes[0, i * span :], first)
        _show(axes[0, i * span + len(first)], pixels[i].float() / 255)
    _label(axes[0, 0], "context")
    for k, name in enumerate(models):
        _label(axes[1 + 2 * k, 0], f"{name}\nmean")
        _label(axes[2 + 2 * k, 0], "uncertainty")
        _colour_bar(figure, axes[2 + 2 * k, len(first)], brightest)
    return _saved(figure, path, title)


def _grid(rows: int, columns: int, widths: list[float], *, margin: float = 1.1) -> tuple[Any, Any]:
    size = 0.95 * sum(widths) + margin, 0.95 * rows + 0.5
    figure, axes = pyplot().subplots(
        rows, columns, figsize=size, dpi=DPI, width_ratios=widths, squeeze=False
    )  # fmt: skip
    for axis in axes.flat:
        bare(axis)
    return figure, axes


def _saved(figure: Any, path: AnyPath, title: str) -> Path:
    figure.suptitle(title, fontsize=10, x=0.02, ha="left")
    figure.tight_layout(rect=(0, 0, 1, 1 - 0.22 / figure.get_figheight()), pad=0.3)
    return save_figure(figure, path)


def _brightest(completions: Sequence[Completion]) -> float:
    return max(float(completion.std.max()) for completion in completions)


def _heads(axes: Any, completions: Sequence[Completion]) -> None:
    """Context sizes above the first columns, and the truth above the next."""
    for axis, size in zip(axes, [completion.size for completion in completions], strict=False):
        axis.set_title(f"{size} pixel{'s' if size != 1 else ''}", fontsize=8)
    axes[len(completions)].set_title("truth", fontsize=8)


def _label(axis: Any, name: str) -> None:
    axis.set_ylabel(name, rotation=0, ha="right", va="center", fontsize=8)


def _show_std(axis: Any, std: Tensor, brightest: float) -> None:
    _show(axis, std.mean(-1, keepdim=True) / brightest, colours="magma")


def _colour_bar(figure: Any, axis: Any, brightest: float) -> None:
    """What the colours of uncertainty mean, at the left edge of an axis that shows nothing else."""
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize

    inside = axis.inset_axes((0.05, 0.05, 0.1, 0.9))
    bar = figure.colorbar(ScalarMappable(Normalize(0, brightest), "magma"), cax=inside, ticks=[0, brightest])
    bar.ax.set_yticklabels(["0", f"{brightest:.2g}"], fontsize=7)
    bar.set_label("deviation", fontsize=7, labelpad=-8)
    bar.outline.set_visible(False)


def _show(axis: Any, image: Tensor, *, unknown: str | None = None, colours: str = "gray") -> None:
    array = image.squeeze(-1).numpy()
    if unknown is not None:
        axis.set_facecolor(unknown)
    if array.ndim == 3:
        alpha = ~np.isnan(array[..., :1])
        axis.imshow(np.concatenate([np.nan_to_num(array), alpha], -1), interpolation="nearest")
    else:
        axis.imshow(array, cmap=colours, vmin=0, vmax=1, interpolation="nearest")

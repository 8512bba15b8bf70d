"""Images completed from some of their pixels: one model at length, or several side by side."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from constmem.data import image_points
from constmem.neural_processes import NeuralProcess
from constmem.plots.figure import DPI, bare, pyplot, save_figure
from constmem.stream import Stream

UNKNOWN = "#cfe0f5"


def completions(
    model: NeuralProcess, pixels: Tensor, sizes: Sequence[int], *, seed: int = 0
) -> list[dict[str, Tensor]]:
    """Stream random pixels of images into a model and predict every pixel at each context size.

    Returns for each size `context` (NaN where unknown), `mean` and `std`, all (b, h, w, c) in [0, 1].
    """
    b, h, w, c = pixels.shape
    x, y = (t.to(model.device) for t in image_points(pixels))
    order = torch.randperm(h * w, generator=torch.Generator().manual_seed(seed)).to(model.device)
    stream, shown, results = Stream(model, batch=b), 0, []
    for size in sizes:
        fresh = order[shown:size]
        if len(fresh):
            stream.observe(x[:, fresh], y[:, fresh])
        shown = size
        dist = stream.predict(x)
        context = torch.full_like(y, float("nan"))
        context[:, order[:size]] = y[:, order[:size]] + 0.5
        parts = {"context": context, "mean": (dist.mean + 0.5).clamp(0, 1), "std": dist.stddev}
        results.append({name: t.reshape(b, h, w, c).cpu() for name, t in parts.items()})
    return results


def completion_grid(
    model: NeuralProcess, pixels: Tensor, sizes: Sequence[int], path: str | os.PathLike[str], *, title: str
) -> Path:
    """For each image three rows (context, mean, uncertainty) for growing contexts, the truth at the right."""
    plt = pyplot()
    results = completions(model, pixels, sizes)
    rows, columns = 3 * len(pixels), len(sizes) + 1
    size = (0.95 * columns + 1.1, 0.95 * rows + 0.5)
    figure, axes = plt.subplots(rows, columns, figsize=size, dpi=DPI)
    brightest = max(float(r["std"].max()) for r in results)
    for axis in axes.flat:
        bare(axis)
    for i in range(len(pixels)):
        for j, result in enumerate(results):
            _show(axes[3 * i, j], result["context"][i], unknown=UNKNOWN)
            _show(axes[3 * i + 1, j], result["mean"][i])
            _show_std(axes[3 * i + 2, j], result["std"][i], brightest)
        _show(axes[3 * i, -1], pixels[i].float() / 255)
        for k, name in enumerate(("context", "mean", "uncertainty")):
            _label(axes[3 * i + k, 0], name)
        _colour_bar(figure, axes[3 * i + 2, -1], brightest)
    _heads(axes[0], sizes)
    axes[0, -1].set_title("truth", fontsize=8)
    figure.suptitle(title, fontsize=10, x=0.02, ha="left")
    figure.tight_layout(rect=(0, 0, 1, 1 - 0.22 / size[1]), pad=0.3)
    return save_figure(figure, path)


def model_grid(
    models: Mapping[str, NeuralProcess],
    pixels: Tensor,
    sizes: Sequence[int],
    path: str | os.PathLike[str],
    *,
    title: str,
) -> Path:
    """Several models on the same pixels of the same images, each with its mean and uncertainty.

    The images stand side by side; each has a column for every context size and one for the truth.
    """
    plt = pyplot()
    results = {name: completions(model, pixels, sizes) for name, model in models.items()}
    span = len(sizes) + 2  # the contexts, the truth, and a gap
    rows, columns = 1 + 2 * len(models), span * len(pixels) - 1
    size = (0.95 * (columns - 0.6 * (len(pixels) - 1)) + 1.4, 0.95 * rows + 0.5)
    widths = [0.4 if i % span == span - 1 else 1.0 for i in range(columns)]
    figure, axes = plt.subplots(rows, columns, figsize=size, dpi=DPI, width_ratios=widths, squeeze=False)
    brightest = max(float(r["std"].max()) for found in results.values() for r in found)
    for axis in axes.flat:
        bare(axis)
    for i in range(len(pixels)):
        for j in range(len(sizes)):
            column = i * span + j
            for k, found in enumerate(results.values()):
                _show(axes[0, column], found[j]["context"][i], unknown=UNKNOWN)
                _show(axes[1 + 2 * k, column], found[j]["mean"][i])
                _show_std(axes[2 + 2 * k, column], found[j]["std"][i], brightest)
        _heads(axes[0, i * span :], sizes)
        truth = axes[0, i * span + len(sizes)]
        _show(truth, pixels[i].float() / 255)
        truth.set_title("truth", fontsize=8)
    _label(axes[0, 0], "context")
    for k, name in enumerate(models):
        _label(axes[1 + 2 * k, 0], f"{name}\nmean")
        _label(axes[2 + 2 * k, 0], "uncertainty")
        _colour_bar(figure, axes[2 + 2 * k, len(sizes)], brightest)
    figure.suptitle(title, fontsize=10, x=0.02, ha="left")
    figure.tight_layout(rect=(0, 0, 1, 1 - 0.22 / size[1]), pad=0.3)
    return save_figure(figure, path)


def _heads(axes: Any, sizes: Sequence[int]) -> None:
    for axis, size in zip(axes, sizes, strict=False):
        axis.set_title(f"{size} pixel{'s' if size != 1 else ''}", fontsize=8)


def _label(axis: Any, name: str) -> None:
    axis.set_ylabel(name, rotation=0, ha="right", va="center", fontsize=8)


def _show_std(axis: Any, std: Tensor, brightest: float) -> None:
    _show(axis, std.mean(-1, keepdim=True) / brightest, colours="magma")


def _colour_bar(figure: Any, axis: Any, brightest: float) -> None:
    """What the colours of uncertainty stand for, at the left edge of an axis that shows nothing else."""
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
        import numpy as np

        alpha = ~np.isnan(array[..., :1])
        axis.imshow(np.concatenate([np.nan_to_num(array), alpha], -1), interpolation="nearest")
    else:
        axis.imshow(array, cmap=colours, vmin=0, vmax=1, interpolation="nearest")

"""Pictures: what people would rather look at than read."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from constmem.data import image_points
from constmem.neural_processes import NeuralProcess
from constmem.stream import Stream

BLUE, RED, GREY = "#023e8a", "#c1121f", "#8d99ae"


def pyplot() -> Any:
    """matplotlib without a screen, or an error that names the extra it comes with."""
    try:
        import matplotlib
    except ImportError as error:
        raise ImportError("pictures need matplotlib: pip install 'constmem[train]'") from error
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt


def save_figure(figure: Any, path: str | os.PathLike[str]) -> Path:
    """Write a figure under a temporary name, then rename it into place."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.part{path.suffix}")
    figure.savefig(temporary)
    temporary.replace(path)
    pyplot().close(figure)
    return path


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
    figure, axes = plt.subplots(rows, columns, figsize=(0.95 * columns + 1.1, 0.95 * rows + 0.5), dpi=130)
    for axis in axes.flat:
        axis.set(xticks=[], yticks=[])
        for side in axis.spines.values():
            side.set_visible(False)
    brightest = max(float(r["std"].max()) for r in results)
    for i in range(len(pixels)):
        for j, result in enumerate(results):
            _show(axes[3 * i, j], result["context"][i], unknown="#cfe0f5")
            _show(axes[3 * i + 1, j], result["mean"][i])
            _show(axes[3 * i + 2, j], result["std"][i].mean(-1, keepdim=True) / brightest, colours="magma")
        _show(axes[3 * i + 1, -1], pixels[i].float() / 255)
        for k, name in enumerate(("context", "mean", "uncertainty")):
            axes[3 * i + k, 0].set_ylabel(name, rotation=0, ha="right", va="center", fontsize=8)
    for j, size in enumerate(sizes):
        axes[0, j].set_title(f"{size} pixels", fontsize=8)
    axes[1, -1].set_title("truth", fontsize=8)
    figure.suptitle(title, fontsize=10, x=0.02, ha="left")
    figure.tight_layout(rect=(0, 0, 1, 0.985), pad=0.3)
    return save_figure(figure, path)


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


def memory_curve(
    seen: Sequence[int], lines: Mapping[str, Sequence[float]], path: str | os.PathLike[str], *, title: str
) -> Path:
    """Bytes against points seen, both on logarithmic axes."""
    plt = pyplot()
    figure, axis = plt.subplots(figsize=(6.4, 3.8), dpi=130)
    for (label, values), color in zip(lines.items(), (BLUE, GREY, RED), strict=False):
        axis.plot(seen, [v / 1e6 for v in values], marker="o", color=color, label=label)
    axis.set(xscale="log", yscale="log", xlabel="points seen", ylabel="megabytes")
    axis.set_title(title, loc="left", fontsize=10)
    axis.grid(alpha=0.25, which="both")
    axis.legend(frameon=False, fontsize=8)
    figure.tight_layout()
    return save_figure(figure, path)

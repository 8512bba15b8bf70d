"""Pictures, which know no model: completed images, and what all share (colours, axes, atomic files)."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float, Float64, UInt8
from torch import Tensor

from constmem.core.checks import extra
from constmem.core.files import write_bytes
from constmem.data.catalogue import SECONDS

AnyPath = str | os.PathLike[str]
BLUE, RED, GREY = "#023e8a", "#c1121f", "#8d99ae"
DPI = 130
DATED = ("second", "minute", "hour")  # units since 1970 that are taken for dates; days may well be ages
FIRST, LAST = (datetime(year, 1, 1, tzinfo=UTC).timestamp() for year in (2000, 2050))  # of such dates
DAY = SECONDS["day"]
FAR = 1000  # spans from zero: beyond, times are counted from the first that is shown
DURATIONS = {
    1e-3: "1 ms", 1.0: "1 s", 10.0: "10 s", 60.0: "1 min", 600.0: "10 min", 3600.0: "1 h", 6 * 3600.0: "6 h",
    DAY: "1 day", 10 * DAY: "10 days", 100 * DAY: "100 days", 1000 * DAY: "1000 days",
}  # fmt: skip
_FORMATS = {  # of ticks a year, month, day, hour, minute or second apart; of the first of such; in the corner
    "formats": ["%Y", "%b", "%d %b", "%H:%M", "%H:%M", "%S.%f"],
    "zero_formats": ["", "%Y", "%d %b", "%d %b", "%H:%M", "%H:%M"],
    "offset_formats": ["", "%Y", "%Y", "%d %b %Y", "%d %b %Y", "%d %b %Y, %H:%M"],
}


def pyplot() -> Any:
    """matplotlib without a screen, or an error that names the extra it comes with."""
    with extra("train", "pictures need matplotlib"):
        import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt


def subplots(*shape: int, **how: Any) -> tuple[Any, Any]:
    """A figure and its axes."""
    figure, axes = pyplot().subplots(*shape, dpi=DPI, **how)
    return figure, axes


def save_figure(
    figure: Any, path: AnyPath, *, title: str | None = None, tight: Mapping[str, Any] | None = None
) -> Path:
    """Write a figure under a temporary name, then rename it into place; `tight` says how it is laid out."""
    if title is not None:
        figure.suptitle(title, fontsize=10, x=0.02, ha="left")
    if tight is not None:
        figure.tight_layout(**tight)
    drawn = BytesIO()
    figure.savefig(drawn, format=Path(path).suffix.removeprefix(".") or "png")
    pyplot().close(figure)
    return write_bytes(path, drawn.getvalue())


def plain(axis: Any) -> None:
    """An axis with a light grid and without its upper and right edges."""
    axis.grid(alpha=0.25)
    axis.spines[["top", "right"]].set_visible(False)


def bare(axis: Any) -> None:
    """An axis that shows nothing but its picture."""
    axis.set(xticks=[], yticks=[])
    axis.spines[:].set_visible(False)


@dataclass(frozen=True)
class Clock:
    """How times are shown along an axis: (time - origin) * scale, under a label.

    Attributes:
        dates: whether what is shown are days since 1970, to be labelled as dates.

    Example:
        >>> Clock.between(7200.0, 43_200.0, "second")
        Clock(label='time (hours)', origin=0.0, scale=0.0002777777777777778, dates=False)
    """

    label: str
    origin: float
    scale: float
    dates: bool

    @staticmethod
    def between(first: float, last: float, unit: str) -> "Clock":
        """For times from `first` to `last` in the data's `unit`."""
        if unit not in SECONDS:
            origin, since = _origin(first, last)
            return Clock(f"time{since} ({unit})", origin, 1.0, dates=False)
        seconds = SECONDS[unit]
        if unit in DATED and seconds * first >= FIRST and seconds * last <= LAST:
            return Clock("time (UTC)", 0.0, seconds / DAY, dates=True)
        shown = next(
            (name for name in reversed(SECONDS) if (last - first) * seconds >= 3 * SECONDS[name]), unit
        )
        origin, since = _origin(first, last)
        return Clock(f"time{since} ({shown}s)", origin, seconds / SECONDS[shown], dates=False)

    def __call__(self, times: Float64[Tensor, " n"]) -> Any:
        """Where on the axis these times are."""
        return ((times.detach().cpu().double() - self.origin) * self.scale).numpy()

    def label_axis(self, axis: Any) -> None:
        """Ticks, numbers and label along the x axis, and no number with an exponent or an offset."""
        axis.set_xlabel(self.label)
        if not self.dates:
            axis.ticklabel_format(axis="x", style="plain", useOffset=False)
            return
        from matplotlib.dates import AutoDateLocator, ConciseDateFormatter

        locator = AutoDateLocator(tz=UTC, minticks=3, maxticks=9)
        axis.xaxis.set_major_locator(locator)
        axis.xaxis.set_major_formatter(ConciseDateFormatter(locator, tz=UTC, **_FORMATS))


def label_durations(axis: Any, unit: str) -> None:
    """Name the marks of a logarithmic y axis as people name durations, where three of them are in sight."""
    low, high = axis.get_ylim()
    if unit in SECONDS:
        ticks = {seconds / SECONDS[unit]: name for seconds, name in DURATIONS.items()}
        ticks = {value: name for value, name in ticks.items() if low <= value <= high}
        if len(ticks) >= 3:
            axis.set_yticks(list(ticks), list(ticks.values()))
            axis.minorticks_off()
            axis.set_ylabel("gap")
            return
    axis.set_ylabel(f"gap ({unit})")


def rate_unit(highest: float, unit: str) -> tuple[str, float]:
    """The shortest unit of time that has an event or more where most come, and how many of `unit` it is.

    Example:
        >>> rate_unit(0.001, "second")
        ('hour', 3600.0)
    """
    if unit not in SECONDS or highest >= 1:
        return unit, 1.0
    longer = {name: seconds / SECONDS[unit] for name, seconds in SECONDS.items() if seconds >= SECONDS[unit]}
    return next(
        ((name, many) for name, many in longer.items() if highest * many >= 1), ("day", longer["day"])
    )


def _origin(first: float, last: float) -> tuple[float, str]:
    """Where to count from: zero, unless all that is shown is far away from it; and how to say so."""
    far = max(abs(first), abs(last)) > FAR * (last - first)
    return (first, " since the first shown") if far else (0.0, "")


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
    figure, axes = subplots(rows, columns, figsize=size, width_ratios=widths, squeeze=False)
    for axis in axes.flat:
        bare(axis)
    return figure, axes


def _saved(figure: Any, path: AnyPath, title: str) -> Path:
    above = 0.22 / figure.get_figheight()
    return save_figure(figure, path, title=title, tight={"rect": (0, 0, 1, 1 - above), "pad": 0.3})


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

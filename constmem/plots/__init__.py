"""Pictures, which know no model; and what they share: a backend, colours, axes of time, atomic files."""

import os
from dataclasses import dataclass
from datetime import UTC, datetime
from io import BytesIO
from pathlib import Path
from typing import Any

from jaxtyping import Float64
from torch import Tensor

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
    try:
        import matplotlib
    except ImportError as error:
        raise ImportError("pictures need matplotlib: pip install 'constmem[train]'") from error
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt


def save_figure(figure: Any, path: AnyPath) -> Path:
    """Write a figure under a temporary name, then rename it into place."""
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

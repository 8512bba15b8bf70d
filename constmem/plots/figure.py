"""What every picture shares: a backend without a screen, colours, and a safe way to the disk."""

import os
from io import BytesIO
from pathlib import Path
from typing import Any

from constmem.core.files import write_bytes

BLUE, RED, GREY = "#023e8a", "#c1121f", "#8d99ae"
DPI = 130


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

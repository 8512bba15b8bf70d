"""The demonstration: a power plant's rows learned as a stream, beside a forest; unseen digits completed."""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from constmem.core.costs import progress
from constmem.data import POWER_PLANT, image_points, load_images, power_plant
from constmem.evaluation.pictures import completions
from constmem.neural_processes import CMANP
from constmem.plots import completion_grid
from constmem.plots.curves import Panel, panels_of_lines
from constmem.streams.stream import Stream
from constmem.tabular.estimators import StreamingRegressor

ROWS, CHUNK = 8000, 1000  # of the power plant's hours to learn; the others are held out
OURS, FOREST = "StreamingRegressor", "random forest"
PIXELS = 0, 10, 30, 60, 120, 250  # shown of each digit


@dataclass(frozen=True)
class Moment:
    """How good two ways to learn are after some rows.

    Attributes:
        seen: rows learned so far.
        error: root mean square error on the rows held out, ours and the forest's.
        inside: share of the held-out rows inside our 90 % intervals.
        held: bytes that each must keep to go on; the forest needs all rows, too.
        seconds: of the processor, spent on learning so far.
    """

    seen: int
    error: tuple[float, float]
    inside: float
    held: tuple[int, int]
    seconds: tuple[float, float]


def demo(out: Path, *, rows: int = ROWS, trees: int = 100) -> None:
    """Show both acts on one thread, as fits small work; pictures go to `out`."""
    from rich.console import Console

    out.mkdir(parents=True, exist_ok=True)  # or an error before anything is learned
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        _acts(out, rows, trees, Console())
    finally:
        torch.set_num_threads(threads)


def _acts(out: Path, rows: int, trees: int, console: Any) -> None:
    console.print("1. Hours of a power plant, read once in chunks, beside a forest retrained on all so far")
    found: list[Moment] = []
    with progress("learning", rows) as report:
        for moment in power_stream(rows, trees=trees):
            found.append(moment)
            report(moment.seen, f"error {moment.error[0]:.2f} MW")
    files = {"power plant": power_picture(found, out / "power.png")}
    console.print(_table(found))
    console.print("2. Digits of another data set, completed from a stream of pixels by shipped weights")
    files["digits"], lines = _digits(out / "digits.png")
    console.print("\n".join(lines))
    for what, path in files.items():
        console.print(f"{what:>12}: {path}", soft_wrap=True)
    console.print(
        f"Next, with these rows or a CSV file of your own:\n"
        f"  constmem fit {POWER_PLANT} --target power --out power.model",
        soft_wrap=True,
    )


def power_stream(rows: int = ROWS, *, trees: int = 100) -> Iterator[Moment]:
    """Learn the power plant's rows a chunk at a time; after each, predict the rows that are held out."""
    from sklearn.ensemble import RandomForestRegressor

    x, y = power_plant()
    x_new, y_new = x[ROWS:], y[ROWS:]
    ours, spent = StreamingRegressor(warmup=CHUNK), [0.0, 0.0]
    for start in range(0, rows, CHUNK):
        stop = start + CHUNK
        clock = time.process_time()
        ours.partial_fit(x[start:stop], y[start:stop])
        mean, (low, high) = ours.predict(x_new), ours.predict_interval(x_new, 0.9).T
        spent[0] += time.process_time() - clock
        clock = time.process_time()
        forest = RandomForestRegressor(trees, random_state=0).fit(x[:stop], y[:stop])
        errors = mean - y_new, forest.predict(x_new) - y_new
        spent[1] += time.process_time() - clock
        yield Moment(
            stop, (_rmse(errors[0]), _rmse(errors[1])), float(np.mean((low <= y_new) & (y_new <= high))),
            (ours.nbytes_, forest_bytes(forest) + x[:stop].nbytes + y[:stop].nbytes), (spent[0], spent[1]),
        )  # fmt: skip


def _rmse(errors: NDArray[np.float64]) -> float:
    return float(np.sqrt(np.mean(errors**2)))


def forest_bytes(forest: Any) -> int:
    """What the nodes of all trees take."""
    parts = (tree.tree_.__getstate__() for tree in forest.estimators_)
    return sum(part["nodes"].nbytes + part["values"].nbytes for part in parts)


def power_picture(found: list[Moment], path: Path) -> Path:
    """Error, intervals, memory and time against the rows seen."""
    seen = [moment.seen for moment in found]

    def both(what: str, scale: float = 1.0) -> dict[str, tuple[list[int], list[float]]]:
        names = OURS, f"{FOREST}, retrained each time"
        return {name: (seen, [getattr(m, what)[i] / scale for m in found]) for i, name in enumerate(names)}

    inside = {OURS: (seen, [100 * moment.inside for moment in found])}
    panels = (
        Panel("error on new hours (RMSE, MW)", both("error")),
        Panel("new hours inside 90 % intervals (%)", inside, level=90, low=70, high=100),
        Panel("held in memory (MB)", both("held", 1e6), low=0),
        Panel("processor time so far (s)", both("seconds"), low=0),
    )
    return panels_of_lines(panels, path, title="Output of a power plant, learned from a stream")


def _table(found: list[Moment]) -> Any:
    from rich.table import Column, Table

    heads = "rows", "error, MW", "forest's", "in 90 %", "MB", "forest's", "CPU s", "forest's"
    table = Table(*(Column(head, justify="right") for head in heads))
    for moment in found:
        table.add_row(
            f"{moment.seen:,}", *(f"{error:.2f}" for error in moment.error), f"{100 * moment.inside:.0f} %",
            *(f"{size / 1e6:.1f}" for size in moment.held), *(f"{spent:.1f}" for spent in moment.seconds),
        )  # fmt: skip
    return table


def _digits(path: Path) -> tuple[Path, list[str]]:
    """Draw completions of four digits; errors of twenty, and the bytes of a stream, in words."""
    model = CMANP.from_pretrained("emnist")
    digits = like_emnist(load_images("digits", split="test").pixels[:20])
    title = "Digits of another data set, completed from a growing stream of pixels"
    drawn = completion_grid(completions(model, digits[1:5], PIXELS), digits[1:5], path, title=title)
    x, y = image_points(digits)
    order = torch.randperm(x.shape[1], generator=torch.Generator().manual_seed(0))
    hidden, stream, lines, done = order[PIXELS[-1] :], Stream(model, batch=len(x)), [], 0
    for size in PIXELS[1:]:
        stream.observe(x[:, order[done:size]], y[:, order[done:size]])
        done = size
        error = float((stream.predict(x[:, hidden]).mean - y[:, hidden]).square().mean().sqrt())
        held = stream.nbytes // len(x)
        lines.append(f"{size:>6} of 784 pixels: error {error:.2f} of grey 0 to 1, {held:,} bytes a stream")
    return drawn, lines


def like_emnist(pixels: Tensor) -> Tensor:
    """8x8 digits as EMNIST shows them: twenty pixels high in a frame of 28x28."""
    large = F.interpolate(pixels.permute(0, 3, 1, 2).float(), size=(20, 20), mode="bicubic").clamp(0, 255)
    return F.pad(large, (4, 4, 4, 4)).round().to(torch.uint8).permute(0, 2, 3, 1)

"""Draws the README's pictures: the block, and what the code on its first screen does.

python benchmarks/drawing.py    # writes docs/block.png and docs/stream.png
"""

import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from constmem import Stream
from constmem.plots.figure import BLUE, GREY, RED, bare, plain, pyplot, save_figure

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
LEARNED, DATA, STATE, READ = "#eceff4", "#dbe9f8", "#ffe8cc", "#ffffff"
UNKNOWN = "#cfe0f5"
SIZES = 1, 6, 12, 24, 48  # pixels shown
FINE = 28  # rows and columns at which completions are asked for


def block(path: Path) -> Path:
    """Data flow of one block: what a new point touches to the left, what a question touches to the right."""
    figure, axis = pyplot().subplots(figsize=(10, 3.7), dpi=150)
    axis.set(xlim=(0, 100), ylim=(0, 37))
    bare(axis)
    for i, name in enumerate(("chunk 3", "chunk 2", "chunk 1")):
        _box(axis, 1.5, 6.5 + 5.2 * i, 10, 4.2, name, DATA)
    axis.text(6.5, 22.8, "data", ha="center", fontsize=10, fontweight="bold")
    axis.text(6.5, 3.0, "any number of points", ha="center", fontsize=7.5, color="#444444")
    _box(axis, 17, 26, 12, 4.6, "slots", LEARNED)
    _box(axis, 16, 10, 14, 8, "cross-attention\nslots attend to a chunk", READ)
    _box(axis, 36, 10, 14, 8, "state\nvalue, log-normaliser", STATE)
    _box(axis, 36, 1.2, 14, 4.6, "state of other data", STATE)
    axis.text(43, 7.8, "⊕ merge", ha="center", va="center", fontsize=9)
    _box(axis, 56.5, 10, 11.5, 8, "self-attention", READ)
    _box(axis, 71.5, 10, 11.5, 8, "cross-attention\nlatents attend", READ)
    _box(axis, 71.25, 26, 12, 4.6, "latents", LEARNED)
    _box(axis, 86.5, 10, 11.5, 8, "self-attention", READ)
    for x, of in ((23, "learned"), (77.25, "learned, or of the block before")):
        axis.text(x, 31.5, of, ha="center", fontsize=7.5, color="#444444")
    for start, stop in (
        ((11.5, 14), (16, 14)), ((23, 26), (23, 18)), ((30, 14), (36, 14)), ((50, 14), (56.5, 14)),
        ((68, 14), (71.5, 14)), ((77.25, 26), (77.25, 18)), ((83, 14), (86.5, 14)),
        ((92.25, 10), (92.25, 5.2)),
    ):  # fmt: skip
        _arrow(axis, start, stop)
    axis.text(
        92.25,
        4.4,
        "latents for the next block,\nand for targets to query",
        ha="center",
        va="top",
        fontsize=7.5,
    )
    axis.axvline(53.25, ymin=0.02, ymax=0.92, color=GREY, linestyle=(0, (4, 3)), linewidth=1)
    axis.text(26, 34.8, "observe: once for each point", ha="center", fontsize=10, color=BLUE)
    axis.text(77.25, 34.8, "read: only when somebody asks", ha="center", fontsize=10, color=BLUE)
    axis.text(43, 19.2, "constant size", ha="center", fontsize=8, color=RED)
    figure.subplots_adjust(0.005, 0.01, 0.995, 0.99)
    return save_figure(figure, path)


def _box(axis: Any, x: float, y: float, width: float, height: float, text: str, colour: str) -> None:
    from matplotlib.patches import FancyBboxPatch

    style = "round,pad=0,rounding_size=0.9"
    axis.add_patch(
        FancyBboxPatch((x, y), width, height, boxstyle=style, facecolor=colour, edgecolor="#444444", lw=1)
    )
    head, _, rest = text.partition("\n")
    middle, centre = x + width / 2, y + height / 2
    axis.text(middle, centre + (1.4 if rest else 0), head, ha="center", va="center", fontsize=9)
    axis.text(middle, centre - 1.6, rest, ha="center", va="center", fontsize=7.5, color="#444444")


def _arrow(axis: Any, start: tuple[float, float], stop: tuple[float, float]) -> None:
    axis.annotate("", stop, start, arrowprops={"arrowstyle": "-|>", "color": "#444444", "lw": 1.2})


def stream(path: Path) -> Path:
    """Error and bytes of the README's first code against pixels shown, and one digit on the way."""
    from contextlib import redirect_stdout
    from io import StringIO

    code = re.search(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    assert code is not None, "the README has no Python on its first screen"
    made: dict[str, Any] = {}
    with redirect_stdout(StringIO()):
        exec(compile(code[1], "README.md", "exec"), made)
    model, x, y, shown, hidden = (made[name] for name in ("model", "x", "y", "shown", "hidden"))
    along = torch.linspace(-0.72, 0.72, FINE)
    grid = torch.cartesian_prod(along, along).expand(len(x), -1, -1)
    going, errors, held, drawn = Stream(model, batch=len(x)), [], [], {}
    for i in range(len(shown) + 1):
        if i:
            going.observe(x[:, shown[i - 1 : i]], y[:, shown[i - 1 : i]])
        errors.append(float((going.predict(x[:, hidden]).mean - y[:, hidden]).square().mean().sqrt()))
        held.append(going.nbytes / len(x) / 1e6)
        if i in SIZES:
            drawn[i] = going.predict(grid).mean.reshape(-1, FINE, FINE) + 0.5
    return _draw(path, y.reshape(-1, 8, 8) + 0.5, shown, drawn, errors, held)


def _draw(
    path: Path, truth: Tensor, shown: Tensor, drawn: dict[int, Tensor], errors: list[float], held: list[float]
) -> Path:
    which = 3  # of the digits
    figure = pyplot().figure(figsize=(10, 2.7), dpi=150)
    parts = figure.add_gridspec(
        1, 2, width_ratios=(1.75, 1), left=0.03, right=0.94, wspace=0.18, bottom=0.17, top=0.89
    )
    images = parts[0].subgridspec(2, len(SIZES) + 1, wspace=0.06, hspace=0.06)
    for column, size in enumerate((*SIZES, None)):
        for row in range(2):
            axis = figure.add_subplot(images[row, column])
            bare(axis)
            if size is None and row == 1:
                axis.set_visible(False)
                continue
            picture = truth[which]
            if size is not None and row == 0:
                picture = torch.full((64,), float("nan"))
                picture[shown[:size]] = truth[which].flatten()[shown[:size]]
                picture = picture.reshape(8, 8)
            elif size is not None:
                picture = drawn[size][which].clamp(0, 1)
            axis.set_facecolor(UNKNOWN)
            axis.imshow(picture.numpy(), cmap="gray", vmin=0, vmax=1, interpolation="nearest")
            if row == 0:
                named = "the digit" if size is None else f"{size} pixel{'s' if size > 1 else ''}"
                axis.set_title(named, fontsize=9)
            if column == 0:
                axis.set_ylabel(("shown", "completed")[row], fontsize=9)
    axis = figure.add_subplot(parts[1])
    plain(axis)
    axis.plot(range(len(errors)), errors, color=BLUE, lw=2)
    axis.set(xlabel="pixels shown", ylim=(0, None), xlim=(0, len(errors) - 1))
    axis.set_ylabel("error of hidden pixels (RMSE)", color=BLUE)
    other = axis.twinx()
    other.spines[["top"]].set_visible(False)
    other.plot(range(len(held)), held, color=RED, lw=2, linestyle="--")
    other.set(ylim=(0, 1))
    other.set_ylabel("remembered by a stream, MB", color=RED)
    return save_figure(figure, path)


def main() -> None:
    print("wrote", block(DOCS / "block.png"))
    print("wrote", stream(DOCS / "stream.png"))


if __name__ == "__main__":
    main()

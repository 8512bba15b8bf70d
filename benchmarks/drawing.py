"""Draws the block, the stream of the README's first screen, and three real tables against the rows seen.

python benchmarks/drawing.py    # writes docs/block.png, docs/power.png and docs/rows-seen.png

The last is drawn from the rows of `benchmarks/streams.py protein power kin8nm`.
"""

import json
from pathlib import Path
from typing import Any

import torch

from constmem.evaluation.demo import power_picture, power_stream
from constmem.plots import BLUE, GREY, RED, bare, pyplot, save_figure
from constmem.plots.curves import Panel, panels_of_lines

ROOT = Path(__file__).parents[1]
DOCS, STREAMS = ROOT / "docs", ROOT / "benchmarks" / "results" / "streams.json"
OURS, FOREST = "StreamingRegressor, read once", "random forest, retrained on all rows (which it keeps)"
TABLES = "power", "kin8nm", "protein"
LEARNED, DATA, STATE, READ = "#eceff4", "#dbe9f8", "#ffe8cc", "#ffffff"


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


def rows_seen(path: Path) -> Path:
    """Error and memory against the rows seen of three real tables, beside a forest, from committed rows."""
    found = [row for row in json.loads(STREAMS.read_text())["rows"] if "rmse_in_deviations" in row]
    panels = []
    for table in TABLES:
        own = [row for row in found if row["part"] == table]
        seen = [row["seen"] for row in own]
        lines = {OURS: "rmse_in_deviations", FOREST: "forest_rmse_in_deviations"}
        errors = {name: (seen, [row[key] for row in own]) for name, key in lines.items()}
        panels.append(Panel(f"{table}: error, in deviations of y", errors, low=0))
    memory = {
        "the rows themselves": (seen, [row["rows_bytes"] / 1e6 for row in own]),
        OURS: (seen, [row["state_bytes"] / 1e6 for row in own]),
        FOREST: (seen, [(row["forest_bytes"] + row["rows_bytes"]) / 1e6 for row in own]),
    }
    panels.append(Panel(f"{table}: held in memory, MB", memory, log=True))
    return panels_of_lines(panels, path, title="", log=True)


def main() -> None:
    print("wrote", block(DOCS / "block.png"))
    torch.set_num_threads(1)
    print("wrote", rows_seen(DOCS / "rows-seen.png"))
    print("wrote", power_picture(list(power_stream()), DOCS / "power.png"))


if __name__ == "__main__":
    main()

"""The demonstration: train a small CMANP on real digits, stream pixels into it, draw what it sees."""

import time
from pathlib import Path

import torch

from constmem import plots
from constmem.data import load_images
from constmem.evaluate import evaluate
from constmem.neural_processes import CMANP
from constmem.progress import progress
from constmem.recipes import recipe
from constmem.sources import open_source
from constmem.stream import Stream
from constmem.train import Run, train

SIZES = (0, 4, 8, 16, 32, 64)


def demo(out: Path, *, steps: int | None = None, points: int = 1_000_000) -> None:
    """Run all of it; pictures and the trained model go to `out`."""
    from rich.console import Console
    from rich.table import Table

    console = Console()
    chosen = recipe("digits", "cmanp-small")
    run = Run("digits", "cmanp-small", "improved", chosen)
    folder = out / "model"
    if not (folder / "model.safetensors").exists():
        console.print("Training a small CMANP on 1,500 real handwritten digits (8x8 pixels) ...")
    train(run, out=folder, resume=True, stop_after=steps, validate_every=500)
    model = CMANP.from_pretrained(folder)
    assert isinstance(model, CMANP)

    digits = load_images("digits", split="test")
    grid = plots.completion_grid(
        model, digits.pixels[:4], SIZES, out / "digits.png",
        title="Unseen digits, completed from a growing stream of pixels (nothing but the state is kept)",
    )  # fmt: skip
    source = open_source("digits", chosen, data_dir=None, device=torch.device("cpu"))
    scores = evaluate(model, source.tests["test"]())
    memory, seen, held, micros = _stream(model, points, out)

    table = Table(title="What was just shown", title_justify="left")
    table.add_column("measured")
    table.add_column("value", justify="right")
    for name, value in (
        ("log-likelihood of an unseen pixel (nats, higher is better)", f"{scores.log_likelihood:.3f}"),
        ("error of the predicted mean (RMSE, grey levels 0 to 1)", f"{scores.rmse:.3f}"),
        ("pixels inside their 90 % interval", f"{100 * scores.coverage['0.9']:.1f} %"),
        (f"bytes remembered after {seen[0]:,} points", f"{held[0]:,}"),
        (f"bytes remembered after {seen[-1]:,} points", f"{held[-1]:,}"),
        (f"the same points, stored ({seen[-1]:,} x 12 bytes)", f"{seen[-1] * 12:,}"),
        ("update by one point", f"{micros:.0f} microseconds"),
    ):
        table.add_row(name, value)
    console.print(table)
    for what, path in (("completions", grid), ("memory", memory), ("trained model", folder)):
        console.print(f"{what:>14}: {path}", soft_wrap=True)
    console.print(
        "Next: load it with CMANP.from_pretrained, open a Stream on it, and feed it your own pixels (README)."
    )


def _stream(model: CMANP, points: int, out: Path) -> tuple[Path, list[int], list[int], float]:
    """Stream random points of all test digits, in growing chunks, and watch the bytes held."""
    stream = Stream(model)
    generator = torch.Generator().manual_seed(0)
    seen, held, total = [], [], 0
    with progress("streaming points", points) as report:
        while total < points:
            size = min(max(total * 9, 10), 20_000, points - total)
            xy = torch.rand(1, size, 3, generator=generator)
            stream.observe(xy[..., :2] * 2 - 1, xy[..., 2:] - 0.5)
            total += size
            report(total)
            if total in {10**k for k in range(1, 9)} or total == points:
                seen.append(total)
                held.append(stream.nbytes)
    point = torch.zeros(1, 1, 2), torch.zeros(1, 1, 1)
    stream.observe(*point)
    start = time.perf_counter()
    for _ in range(200):
        stream.observe(*point)
    micros = (time.perf_counter() - start) / 200 * 1e6
    lines = {"remembered by the stream": held, "the points themselves": [12 * n for n in seen]}
    path = plots.memory_curve(seen, lines, out / "memory.png", title="Bytes held against points seen")
    return path, seen, held, micros

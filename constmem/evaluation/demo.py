"""The demonstration: unseen digits completed, a small model trained, a stream that stays small."""

import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from constmem import plots
from constmem.data import Task, load_images
from constmem.evaluation.pictures import completions
from constmem.evaluation.points import evaluate
from constmem.neural_processes import CMANP, NeuralProcess
from constmem.stream import Stream
from constmem.training.folder import InterruptedRunError, StoppedError
from constmem.training.log import progress
from constmem.training.loop import Run, build, train
from constmem.training.recipes import changed, recipe
from constmem.training.sources import Source, open_source

STEPS = 1000  # of training: half a minute of one processor


def demo(out: Path, *, steps: int | None = None, points: int = 1_000_000) -> None:
    """Run all of it on one thread, as fits small work; pictures and the trained model go to `out`."""
    from rich.console import Console

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        _demo(out, steps, points, Console())
    finally:
        torch.set_num_threads(threads)


def _demo(out: Path, steps: int | None, points: int, console: Any) -> None:
    from rich.table import Table

    table = Table(title="What was just shown", title_justify="left", show_lines=False)
    table.add_column("measured")
    table.add_column("value", justify="right")
    console.print(
        "1. A model trained on other people's digits completes scikit-learn's from a stream of pixels ..."
    )
    files = {"digits, completed": _complete(out)}
    console.print(
        "2. Training a small model from scratch on 1,300 real digits of 8x8 pixels (about a minute) ..."
    )
    files |= _train(out, steps, table)
    console.print(f"3. Streaming {points:,} points into the first model ...")
    files |= _stream(out, points, table)
    console.print(table)
    for what, path in files.items():
        console.print(f"{what:>18}: {path}", soft_wrap=True)
    console.print(
        "Next: the README's first screen, with a model of your own or CMANP.from_pretrained('emnist')."
    )


def _complete(out: Path) -> Path:
    model = CMANP.from_pretrained("emnist")
    digits = like_emnist(load_images("digits", split="test").pixels[1:5])
    title = "Digits of another data set, completed from a growing stream of pixels"
    found = completions(model, digits, (0, 10, 30, 60, 120, 250))
    return plots.completion_grid(found, digits, out / "digits.png", title=title)


def like_emnist(pixels: Tensor) -> Tensor:
    """8x8 digits as EMNIST shows them: twenty pixels high in a frame of 28x28."""
    large = F.interpolate(pixels.permute(0, 3, 1, 2).float(), size=(20, 20), mode="bicubic").clamp(0, 255)
    return F.pad(large, (4, 4, 4, 4)).round().to(torch.uint8).permute(0, 2, 3, 1)


def _train(out: Path, steps: int | None, table: Any) -> dict[str, Path]:
    settings = changed(recipe("digits", "cmanp-tiny"), ["model.depth=1", "lr=5e-3"], steps=STEPS)
    run = Run("digits", "cmanp-tiny", "improved", settings)
    folder = out / "model"
    try:
        train(run, out=folder, resume=True, stop_after=steps, validate_every=300)
    except InterruptedRunError as error:
        raise StoppedError(
            f"stopped after step {error.step}: the same command goes on from there (the demo has no --resume)"
        ) from None
    model = CMANP.from_pretrained(folder)
    source = open_source("digits", run.recipe, data_dir=None, device=torch.device("cpu"))
    before, after = _scores(build(run), source), _scores(model, source)
    for what, key, form in (
        ("small model: log-likelihood of an unseen pixel, untrained -> trained", "log_likelihood", "{:.2f}"),
        ("small model: error of the mean (RMSE; grey levels 0 to 1)", "rmse", "{:.3f}"),
    ):
        table.add_row(what, f"{form.format(before[key])} -> {form.format(after[key])}")
    table.add_row("small model: pixels inside their 90 % interval", f"{100 * after['coverage']['0.9']:.1f} %")
    digits = load_images("digits", split="test").pixels[1:4]
    title = "The small model, just trained: unseen 8x8 digits"
    found = completions(model, digits, (0, 4, 8, 16, 32))
    grid = plots.completion_grid(found, digits, out / "small.png", title=title)
    return {"the small model": folder, "its completions": grid}


def _scores(model: NeuralProcess, source: Source[Task]) -> dict[str, Any]:
    return vars(evaluate(model, source.tests["test"]()))


def _stream(out: Path, points: int, table: Any) -> dict[str, Path]:
    """Stream random points into a model, in growing chunks, and watch the bytes held."""
    stream = Stream(CMANP.from_pretrained("emnist"))
    generator = torch.Generator().manual_seed(0)
    seen: list[int] = []
    held: list[int] = []
    total = 0
    with progress("streaming", points) as report:
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
    start = time.perf_counter()
    for _ in range(200):
        stream.observe(*point)
    micros = (time.perf_counter() - start) / 200 * 1e6
    for n, size in ((seen[0], held[0]), (seen[-1], held[-1])):
        table.add_row(f"bytes remembered after {n:,} points", f"{size:,}")
    table.add_row(f"the {seen[-1]:,} points themselves", f"{12 * seen[-1]:,}")
    table.add_row("update by one point, microseconds", f"{micros:.0f}")
    lines = {"remembered by the stream": held, "the points themselves": [12 * n for n in seen]}
    title = "Bytes held against points seen"
    return {"memory": plots.memory_curve(seen, lines, out / "memory.png", title=title)}

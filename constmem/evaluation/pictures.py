"""All pictures of runs: how they learned, how far they can be trusted, and what they see."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor

from constmem import plots
from constmem.core import checks
from constmem.data import GaussianProcess, Kernel, Table, Task, load_images
from constmem.evaluation.comparison import NAMES, model_name
from constmem.evaluation.event_pictures import plot_event_runs
from constmem.evaluation.points import pit_values
from constmem.evaluation.results import source_of
from constmem.models import of_events
from constmem.neural_processes import NeuralProcess
from constmem.plots import Fit
from constmem.training.folder import TABLE, read_run
from constmem.training.log import read_metrics
from constmem.training.sources import Source

SHARES = (0.01, 0.04, 0.08, 0.16, 0.32)  # of an image's pixels, as growing contexts
FEW_PIXELS, FEW_SHARES = 200, (1 / 16, 1 / 8, 1 / 4, 1 / 2)  # of a very small image
GP_SIZES = (3, 6, 12, 24)
GP_SHOWN = (0.55, 0.8, 0.48)  # length, scale and period, inside the protocol's: functions one can follow
IMAGES = (3, 2)  # how many images for one model, and for several side by side
BATCHES = 100  # of a test set, for calibration


@dataclass(frozen=True)
class Trained:
    """A run's folder with what is in it."""

    folder: Path
    run: dict[str, Any]
    model: NeuralProcess[Any, Any]
    source: Source[Any]

    @property
    def title(self) -> str:
        """Model and data as a person would say them."""
        data = NAMES.get(self.run["dataset"], self.run["dataset"])
        return (
            f"{model_name(self.run['model'])} on {data} ({self.run['recipe_name']}, seed {self.run['seed']})"
        )


def plot_runs(
    folders: Sequence[Path], *, out: Path | None = None, data_dir: Path | None = None, device: str = "cpu"
) -> list[Path]:
    """Draw every picture of these runs; returns where they are.

    Args:
        folders: of runs; those on the same images also get one grid, side by side, and those on the same
            events one picture of how well they fit.
        out: folder for the pictures; else `pictures` in each run's own (side by side: in the first's).
    """
    on_events = [folder for folder in folders if of_events(read_run(folder)["run"]["model"])]
    of_points = [folder for folder in folders if folder not in on_events]
    where: Any = {"out": out, "nested": len(folders) > 1, "data_dir": data_dir, "device": device}
    return _plot_point_runs(of_points, **where) + plot_event_runs(on_events, **where)


def _plot_point_runs(
    folders: Sequence[Path], *, out: Path | None, nested: bool, data_dir: Path | None, device: str
) -> list[Path]:
    runs = [open_run(folder, data_dir=data_dir, device=device) for folder in folders]
    names = [run.folder.resolve().name for run in runs]
    made: list[Path] = []
    for run, name in zip(runs, names, strict=True):
        target = run.folder / "pictures" if out is None else out / name if nested else out
        made += plot_run(run, target, data_dir=data_dir)
    for dataset in dict.fromkeys(run.run["dataset"] for run in runs):
        same = [run for run in runs if run.run["dataset"] == dataset]
        if len(same) > 1 and _kind(same[0]) == "images":
            target = same[0].folder / "pictures" if out is None else out
            made.append(_side_by_side(same, target / f"{dataset}-models.png", data_dir=data_dir))
    return made


def open_run(folder: Path, *, data_dir: Path | None, device: str) -> Trained:
    """A run's settings, model and data."""
    run, where = read_run(folder)["run"], checks.device(device)
    model = NeuralProcess.from_pretrained(folder, device=where)
    return Trained(folder, run, model, source_of(folder, run, data_dir=data_dir, device=where))


def plot_run(run: Trained, out: Path, *, data_dir: Path | None) -> list[Path]:
    """The pictures of one run: learning, calibration, and completions or fits."""
    made = [plots.learning_curve(read_metrics(run.folder), out / "learning.png", title=run.title)]
    pits = {name: pit_values(run.model, islice(tasks(), BATCHES)) for name, tasks in run.source.tests.items()}
    made.append(plots.calibration_curve(pits, out / "calibration.png", title=run.title))
    kind = _kind(run)
    if kind == "images":
        pixels = _images(run.run["dataset"], IMAGES[0], data_dir)
        sizes = _sizes(pixels)
        made.append(plots.completion_grid(run.model, pixels, sizes, out / "completions.png", title=run.title))
    elif kind == "gp":
        made.append(plots.function_fits(_gp_rows(run.model), out / "fits.png", title=run.title))
    else:
        made.append(_table_picture(run, out))
    return made


def _kind(run: Trained) -> str:
    if (run.folder / TABLE).exists():
        return "table"
    return "gp" if run.run["dataset"] == "gp" else "images"


def _images(dataset: str, count: int, data_dir: Path | None) -> Tensor:
    """A few test images, of different classes where there are any."""
    images = load_images(dataset, data_dir=data_dir, split="test")
    if images.labels is None:
        return images.pixels[:count]
    classes = (
        [2, 5, 8] if dataset == "digits" else [3, 10, 36]
    )  # emnist: a digit, and two unseen letters, A and a
    return torch.stack([images.pixels[images.labels == c][1] for c in classes[:count]])


def _sizes(pixels: Tensor) -> list[int]:
    whole = pixels.shape[1] * pixels.shape[2]
    return [round(share * whole) for share in (FEW_SHARES if whole < FEW_PIXELS else SHARES)]


def _side_by_side(runs: Sequence[Trained], path: Path, *, data_dir: Path | None) -> Path:
    dataset = runs[0].run["dataset"]
    pixels = _images(dataset, IMAGES[1], data_dir)
    labels = [model_name(run.run["model"]) for run in runs]
    if len(set(labels)) < len(labels):  # the same model twice: say which run
        labels = [run.folder.resolve().name for run in runs]
    models = {label: run.model for label, run in zip(labels, runs, strict=True)}
    title = f"{NAMES.get(dataset, dataset)}: the same pixels, different models"
    return plots.model_grid(models, pixels, _sizes(pixels), path, title=title)


def _gp_rows(model: NeuralProcess[Any, Any]) -> list[tuple[str, list[Fit]]]:
    """A function of each kernel, from growing contexts, with the exact posterior beside the model's."""
    rows: list[tuple[str, list[Fit]]] = []
    grid = torch.linspace(-2, 2, 401)[None, :, None]
    for kernel in get_args(Kernel):
        generator = torch.Generator().manual_seed(4)
        length, scale, period = (torch.tensor([number], dtype=torch.float64) for number in GP_SHOWN)
        process = GaussianProcess(kernel, length, scale, period if kernel == "periodic" else None)
        x = torch.rand(1, max(GP_SIZES), 1, generator=generator) * 4 - 2
        y = process.sample(x, generator=generator).float()
        fits = []
        for n in GP_SIZES:
            exact = process.posterior(Task(x[:, :n], y[:, :n], grid, grid))
            known = exact.mean[0, :, 0].float(), exact.stddev[0, :, 0].float()
            fits.append(_fit(model, x[:, :n], y[:, :n], grid, exact=known))
        rows.append((kernel, fits))
    return rows


def _table_picture(run: Trained, out: Path) -> Path:
    """Of one input: fits of held-out groups, or of the rows; of more: predictions against the truth."""
    table = Table.load(run.folder / TABLE)
    if table.x.shape[1] == table.y.shape[1] == 1:
        return plots.function_fits(_table_rows(run.model, table), out / "fits.png", title=_told(run))
    name = list(run.source.tests)[-1]
    parts: list[tuple[Tensor, Tensor, Tensor]] = []
    with torch.no_grad():
        for task in islice(run.source.tests[name](), BATCHES):
            dist = run.model.query(run.model.condition(task.xc, task.yc, mask=task.mask_c), task.xt)
            real = torch.ones_like(task.yt[..., 0], dtype=torch.bool) if task.mask_t is None else task.mask_t
            parts.append((task.yt[real][:, 0], dist.mean[real][:, 0], dist.stddev[real][:, 0]))
    true, mean, std = (torch.cat(part)[:500].cpu().float() for part in zip(*parts, strict=True))
    return plots.predicted_against_true(true, mean, std, out / "predictions.png", title=_told(run))


def _told(run: Trained) -> str:
    """The run's title with the names of its columns, where they have any."""
    columns = run.run.get("columns") or {}
    if not columns.get("x"):
        return run.title
    return f"{run.title}: {', '.join(columns['y'])} given {', '.join(columns['x'])}"


def _table_rows(model: NeuralProcess[Any, Any], table: Table) -> list[tuple[str, list[Fit]]]:
    training, _, test = table.parts()
    shown = training if table.groups is None else test
    groups = [None] if shown.groups is None else shown.groups.unique().tolist()[:3]
    rows: list[tuple[str, list[Fit]]] = []
    for group in groups:
        index = torch.arange(len(shown)) if group is None else (shown.groups == group).nonzero()[:, 0]
        index = index[torch.randperm(len(index), generator=torch.Generator().manual_seed(0))]
        x, y = shown.x[index][None], shown.y[index][None]
        grid = torch.linspace(float(x.min()), float(x.max()), 201, dtype=x.dtype)[None, :, None]
        sizes = [max(round(len(index) * share), 1) for share in (0.05, 0.15, 0.4, 0.8)]
        rest = [(x[0, n:, 0], y[0, n:, 0]) for n in sizes]
        fits = [_fit(model, x[:, :n], y[:, :n], grid, rest=r) for n, r in zip(sizes, rest, strict=True)]
        name = (
            f"unseen {table.labels[group]}" if group is not None and table.labels else f"unseen group {group}"
        )
        rows.append(("all rows" if group is None else name, fits))
    return rows


def _fit(model: NeuralProcess[Any, Any], x: Tensor, y: Tensor, grid: Tensor, **more: Any) -> Fit:
    with torch.no_grad():
        dist = model.query(model.condition(x.to(model.device), y.to(model.device)), grid.to(model.device))
    mean, std = (t[0, :, 0].cpu().float() for t in (dist.mean, dist.stddev))
    return Fit((x[0, :, 0], y[0, :, 0]), grid[0, :, 0], mean, std, **more)

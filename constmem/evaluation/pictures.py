"""All pictures of runs: how they learned, how calibrated they are, and what they predict."""

from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any, get_args

import torch
from jaxtyping import Float64, UInt8
from torch import Tensor

from constmem.core import checks
from constmem.core import title_of as model_name
from constmem.data import (
    EventLog,
    Events,
    GaussianProcess,
    Kernel,
    Table,
    Task,
    image_points,
    load_images,
)
from constmem.data.catalogue import DATASETS, title_of
from constmem.evaluation import pit_values
from constmem.evaluation.events import mark_confusion, rescaled_times
from constmem.evaluation.runs import Opened, metrics_of, open_run, true_process
from constmem.neural_processes import NeuralProcess
from constmem.plots import Completion, completion_grid, model_grid
from constmem.plots.curves import (
    Fit,
    calibration_curve,
    function_fits,
    learning_curve,
    predicted_against_true,
)
from constmem.plots.events import Timeline, confusion_picture, fit_picture, hazard_picture, sequence_picture
from constmem.point_processes import PointProcess
from constmem.streams.stream import Stream
from constmem.training.sources import Source

SHARES = (0.01, 0.04, 0.08, 0.16, 0.32)  # of an image's pixels, as growing contexts
FEW_PIXELS, FEW_SHARES = 200, (1 / 16, 1 / 8, 1 / 4, 1 / 2)  # of a very small image
GP_SIZES = (3, 6, 12, 24)
GP_SHOWN = (0.55, 0.8, 0.48)  # length, scale and period, within the protocol's ranges: easy to follow
IMAGES = (3, 2)  # how many images for one model, and for several side by side
CLASSES = {"digits": (2, 5, 8), "emnist": (3, 10, 36)}  # shown; of EMNIST a digit and two unseen letters
BATCHES = 100  # of a test set, for calibration
SCORED = 20_000  # events of a test set for goodness of fit and confusion
TYPICAL = 60  # events: the sequence shown is the one with about as many


def plot_runs(
    folders: Sequence[Path], *, out: Path | None = None, data_dir: Path | None = None, device: str = "cpu"
) -> list[Path]:
    """Draw every picture of these runs; returns where they are.

    Args:
        folders: of runs; those on the same images also get one grid, side by side, and those on the same
            events one picture of how well they fit.
        out: folder for the pictures; else `pictures` in each run's own (side by side: in the first's).
    """
    where = checks.device(device)
    runs = [open_run(folder, data_dir=data_dir, device=where) for folder in folders]
    made: list[Path] = []
    rescaled: dict[int, Tensor] = {}  # of the runs of events
    for i, run in enumerate(runs):
        name = run.folder.resolve().name
        target = run.folder / "pictures" if out is None else out / name if len(folders) > 1 else out
        made.append(learning_curve(metrics_of(run.folder), target / "learning.png", title=run_title(run.run)))
        if isinstance(run.model, PointProcess):
            events = _drawn_events(run.source)
            rescaled[i] = rescaled_times(run.model, events)
            made += _plot_events(run, events, rescaled[i], target)
        else:
            made += _plot_points(run, target, data_dir)
    for dataset in dict.fromkeys(run.run["dataset"] for run in runs):
        same = [i for i, run in enumerate(runs) if run.run["dataset"] == dataset]
        if len(same) > 1:
            target = runs[same[0]].folder / "pictures" if out is None else out
            fits = [rescaled[i] for i in same if i in rescaled]
            made += _compared(dataset, [runs[i] for i in same], fits, target, data_dir)
    return made


def run_title(run: dict[str, Any]) -> str:
    """Model and data in words; with the columns of a table, where they have names."""
    columns = run.get("columns") or {}
    given = f": {', '.join(columns['y'])} given {', '.join(columns['x'])}" if columns.get("x") else ""
    how = f"({run['recipe_name']}, seed {run['seed']})"
    return f"{model_name(run['model'])} on {title_of(run['dataset'])} {how}{given}"


def _compared(
    dataset: str, runs: list[Opened], fits: list[Tensor], out: Path, data_dir: Path | None
) -> list[Path]:
    """Runs on the same events or images in one picture; other data have none."""
    labels = [model_name(run.run["model"]) for run in runs]
    if len(set(labels)) < len(labels):  # a model twice: name the runs
        labels = [run.folder.resolve().name for run in runs]
    title = f"{title_of(dataset)}: the same {{}}, different models"
    if fits:
        named = dict(zip(labels, fits, strict=True))
        return [fit_picture(named, out / f"{dataset}-fits.png", title=title.format("events"))]
    if not _of_images(dataset):
        return []
    pixels, sizes = _images(dataset, IMAGES[1], data_dir)
    completed = [completions(run.model, pixels, sizes) for run in runs]
    models = dict(zip(labels, completed, strict=True))
    return [model_grid(models, pixels, out / f"{dataset}-models.png", title=title.format("pixels"))]


def _of_images(dataset: str) -> bool:
    return dataset in DATASETS and DATASETS[dataset].kind == "images"


# Points


def completions(
    model: NeuralProcess[Any, Any], pixels: UInt8[Tensor, "b h w c"], sizes: Sequence[int], *, seed: int = 0
) -> list[Completion]:
    """Stream random pixels of images into a model, and predict every pixel at each context size."""
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
        parts = context, (dist.mean + 0.5).clamp(0, 1), dist.stddev
        results.append(Completion(size, *(t.reshape(b, h, w, c).cpu() for t in parts)))
    return results


def _plot_points(run: Opened, out: Path, data_dir: Path | None) -> list[Path]:
    """Calibration, and completions, fits or predictions."""
    pits = {name: pit_values(run.model, islice(tasks(), BATCHES)) for name, tasks in run.source.tests.items()}
    title = run_title(run.run)
    calibration = calibration_curve(pits, out / "calibration.png", title=title)
    if isinstance(run.own, Table):
        return [calibration, _table_picture(run, run.own, out)]
    if _of_images(run.run["dataset"]):
        pixels, sizes = _images(run.run["dataset"], IMAGES[0], data_dir)
        results = completions(run.model, pixels, sizes)
        return [calibration, completion_grid(results, pixels, out / "completions.png", title=title)]
    return [calibration, function_fits(gp_fits(run.model), out / "fits.png", title=title)]


def _images(dataset: str, count: int, data_dir: Path | None) -> tuple[UInt8[Tensor, "n h w c"], list[int]]:
    """A few test images, of different classes where there are any; and how many of their pixels to show."""
    images = load_images(dataset, data_dir=data_dir, split="test")
    pixels = images.pixels[:count]
    if images.labels is not None:
        pixels = torch.stack([images.pixels[images.labels == c][1] for c in CLASSES[dataset][:count]])
    whole = pixels.shape[1] * pixels.shape[2]
    return pixels, [round(share * whole) for share in (FEW_SHARES if whole < FEW_PIXELS else SHARES)]


def gp_fits(model: NeuralProcess[Any, Any]) -> list[tuple[str, list[Fit]]]:
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


def _table_picture(run: Opened, table: Table, out: Path) -> Path:
    """Of one input: fits of held-out groups, or of the rows; of more: predictions against the truth."""
    if table.x.shape[1] == table.y.shape[1] == 1:
        return function_fits(_table_fits(run.model, table), out / "fits.png", title=run_title(run.run))
    name = list(run.source.tests)[-1]
    parts: list[tuple[Tensor, Tensor, Tensor]] = []
    with torch.no_grad():
        for task in islice(run.source.tests[name](), BATCHES):
            dist = run.model.query(run.model.condition(task.xc, task.yc, mask=task.mask_c), task.xt)
            real = torch.ones_like(task.yt[..., 0], dtype=torch.bool) if task.mask_t is None else task.mask_t
            parts.append((task.yt[real][:, 0], dist.mean[real][:, 0], dist.stddev[real][:, 0]))
    true, mean, std = (torch.cat(part)[:500].cpu().float() for part in zip(*parts, strict=True))
    return predicted_against_true(true, mean, std, out / "predictions.png", title=run_title(run.run))


def _table_fits(model: NeuralProcess[Any, Any], table: Table) -> list[tuple[str, list[Fit]]]:
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
        fits = [_fit(model, x[:, :n], y[:, :n], grid, rest=(x[0, n:, 0], y[0, n:, 0])) for n in sizes]
        label = f"group {group}" if group is None or not table.labels else table.labels[group]
        rows.append(("all rows" if group is None else f"unseen {label}", fits))
    return rows


def _fit(model: NeuralProcess[Any, Any], x: Tensor, y: Tensor, grid: Tensor, **more: Any) -> Fit:
    with torch.no_grad():
        dist = model.query(model.condition(x.to(model.device), y.to(model.device)), grid.to(model.device))
    mean, std = (t[0, :, 0].cpu().float() for t in (dist.mean, dist.stddev))
    return Fit((x[0, :, 0], y[0, :, 0]), grid[0, :, 0], mean, std, **more)


# Events


def _drawn_events(source: Source[Any]) -> Events:
    """Test sequences spread evenly over all, with about `SCORED` events."""
    events = Events.cat([batch for batches in source.tests.values() for batch in batches()])
    count = int(events.scored.sum())
    if count <= SCORED:
        return events
    wanted = max(1, round(len(events) * SCORED / count))
    return events.select(torch.linspace(0, len(events) - 1, wanted).round().long().to(events.device)).trim()


@torch.no_grad()
def _plot_events(run: Opened, events: Events, rescaled: Tensor, out: Path) -> list[Path]:
    """A sequence, its hazards, goodness of fit, and confused marks where there are several."""
    names = run.own.labels if isinstance(run.own, EventLog) else None
    title, label = run_title(run.run), model_name(run.run["model"])
    nearest = int((events.lengths - TYPICAL).abs().argmin())
    shown = events.select(slice(nearest, nearest + 1)).trim()
    gap = run.model.forecast(shown).gap
    line = timeline(shown, names)
    times, hazard = hazards(gap, shown)
    true = None
    if (process := true_process(run.run["dataset"])) is not None:
        true = process.hazard(shown.to("cpu"), times.reshape(-1)).reshape(times.shape)
    made = [
        sequence_picture(line, gap, out / "sequence.png", title=title),
        hazard_picture(line, times, hazard, out / "hazard.png", title=title, true=true),
        fit_picture({label: rescaled}, out / "fit.png", title=title),
    ]
    if events.num_marks > 1:
        marks, counts = mark_confusion(run.model, events)
        made.append(confusion_picture(marks, counts, out / "marks.png", title=title, names=names))
    return made


def timeline(events: Events, names: Sequence[str] | None = None) -> Timeline:
    """One sequence as it is drawn."""
    if len(events) != 1 or int(events.lengths[0]) < 2:
        raise ValueError(
            f"there are {len(events)} sequences, the first with {events.lengths.tolist()[:1]} events: select "
            "one of two events or more"
        )
    one = events.trim().to("cpu")
    return Timeline(one.times[0], one.gaps[0], one.marks[0], one.unit, one.num_marks, names)


def hazards(gap: Any, events: Events) -> tuple[Float64[Tensor, "t g"], Float64[Tensor, "t g"]]:
    """Sixty times in the gap before each event of one sequence, and the predicted hazard at each."""
    share = torch.linspace(1e-3, 1, 60, dtype=torch.float64, device=events.device)[:, None, None]
    offsets = share * events.gaps  # (60, 1, t)
    hazard = (gap.log_prob(offsets) - gap.log_survival(offsets)).exp()
    times = events.times - events.gaps + offsets
    return times[:, 0].T.contiguous().cpu(), hazard[:, 0].T.contiguous().double().cpu()

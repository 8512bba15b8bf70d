"""All pictures of runs on events: learning, a sequence, hazards, goodness of fit, and confused marks."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from constmem import plots
from constmem.core import checks
from constmem.data import DATASETS, EventLog, Events, simulated
from constmem.evaluation.comparison import NAMES, model_name
from constmem.evaluation.events import mark_confusion, rescaled_times
from constmem.evaluation.results import source_of
from constmem.plots import events as plots_events
from constmem.point_processes import PointProcess
from constmem.training.folder import own_data, read_run
from constmem.training.log import read_metrics

SCORED = 20_000  # events of a test set that goodness of fit and confusion are drawn of
TYPICAL = 60  # events: the sequence shown is the one with about as many


@dataclass(frozen=True)
class TrainedOnEvents:
    """A run's folder with its model, and the test events to draw."""

    folder: Path
    run: dict[str, Any]
    model: PointProcess
    events: Events
    names: list[str] | None = None  # of the marks, where a file of one's own has told them

    @property
    def title(self) -> str:
        """Model and data as a person would say them."""
        data = NAMES.get(self.run["dataset"], self.run["dataset"])
        return (
            f"{model_name(self.run['model'])} on {data} ({self.run['recipe_name']}, seed {self.run['seed']})"
        )


def plot_event_runs(
    folders: Sequence[Path], *, out: Path | None, nested: bool, data_dir: Path | None, device: str
) -> list[Path]:
    """Draw every picture of these runs; those on the same data also get their fits in one.

    Args:
        out: folder for the pictures, with one inside for each run if `nested`; else `pictures` in each run's.
    """
    runs = [open_event_run(folder, data_dir=data_dir, device=device) for folder in folders]
    made: list[Path] = []
    rescaled: list[Tensor] = []
    for run in runs:
        name = run.folder.resolve().name
        target = run.folder / "pictures" if out is None else out / name if nested else out
        rescaled.append(rescaled_times(run.model, run.events))
        made += _plot_one(run, rescaled[-1], target)
    for dataset in dict.fromkeys(run.run["dataset"] for run in runs):
        same = [i for i, run in enumerate(runs) if run.run["dataset"] == dataset]
        if len(same) > 1:
            target = runs[same[0]].folder / "pictures" if out is None else out
            labels = _labels([runs[i] for i in same])
            lines = dict(zip(labels, (rescaled[i] for i in same), strict=True))
            title = f"{NAMES.get(dataset, dataset)}: the same events, different models"
            made.append(plots_events.fit_picture(lines, target / f"{dataset}-fits.png", title=title))
    return made


def open_event_run(folder: Path, *, data_dir: Path | None, device: str) -> TrainedOnEvents:
    """A run's settings, its model, and as many of its test events as are drawn."""
    run, where = read_run(folder)["run"], checks.device(device)
    model = PointProcess.from_pretrained(folder, device=where)
    source = source_of(folder, run, data_dir=data_dir, device=where)
    events = Events.cat([batch for batches in source.tests.values() for batch in batches()])
    own = own_data(folder)
    names = own.labels if isinstance(own, EventLog) else None
    return TrainedOnEvents(folder, run, model.eval(), _some(events), names)


def _some(events: Events) -> Events:
    """Sequences spread evenly over all, with about `SCORED` events."""
    count = int(events.scored.sum())
    if count <= SCORED:
        return events
    wanted = max(1, round(len(events) * SCORED / count))
    return events.select(torch.linspace(0, len(events) - 1, wanted).round().long().to(events.device)).trim()


def _plot_one(run: TrainedOnEvents, rescaled: Tensor, out: Path) -> list[Path]:
    made = [plots.learning_curve(read_metrics(run.folder), out / "learning.png", title=run.title)]
    shown = _typical(run.events)
    told: dict[str, Any] = {"title": run.title, "names": run.names}
    made.append(plots_events.sequence_picture(run.model, shown, out / "sequence.png", **told))
    known = DATASETS.get(run.run["dataset"])
    process = None if known is None or known.process is None else simulated(known.name)
    truth = None if process is None else lambda times: process.hazard(shown, times)
    made.append(plots_events.hazard_picture(run.model, shown, out / "hazard.png", truth=truth, **told))
    label = model_name(run.run["model"])
    made.append(plots_events.fit_picture({label: rescaled}, out / "fit.png", title=run.title))
    if run.events.num_marks > 1:
        marks, counts = mark_confusion(run.model, run.events)
        target = out / "marks.png"
        made.append(plots_events.confusion_picture(marks, counts, target, **told))
    return made


def _typical(events: Events) -> Events:
    """The sequence whose length is nearest to `TYPICAL`."""
    nearest = int((events.lengths - TYPICAL).abs().argmin())
    return events.select(slice(nearest, nearest + 1)).trim()


def _labels(runs: Sequence[TrainedOnEvents]) -> list[str]:
    """Names of models, or of folders where a model is there twice."""
    labels = [model_name(run.run["model"]) for run in runs]
    return labels if len(set(labels)) == len(labels) else [run.folder.resolve().name for run in runs]

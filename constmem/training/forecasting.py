"""Events of your own, from a file to a trained model that foretells the next event in the data's unit."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from constmem.data import EventLog
from constmem.point_processes import PointProcess
from constmem.training.loop import Run, train
from constmem.training.recipes import UNUSED, changed, event_recipe


def train_events(
    log: EventLog,
    model: str = "cmhp",
    *,
    out: str | Path,
    steps: int | None = None,
    seed: int = 0,
    device: str = "cpu",
    resume: bool = False,
    compiled: bool = True,
    change: Sequence[str] | None = None,
    columns: dict[str, Any] | None = None,
) -> PointProcess[Any]:
    """Train a model on a log of events into the folder `out`, and return it as it validated best.

    The scale of time, taken from the training part, is kept inside the model, which takes and predicts
    times in their own unit; the folder keeps the events and what their marks are called.

    Args:
        log: the events: `EventLog.read(file)` or `EventLog.of(events)`.
        model: a model of events, or one of its variants such as "cmhp-faithful".
        out: the run's folder, for `constmem eval` and `plot`; must be new unless `resume` is set.
        steps: instead of the recipe's.
        seed: of weights and batches.
        change: settings as `key=value` or `model.key=value`.
        columns: where the events are from, for the record.
    """
    recipe = event_recipe(model, num_marks=log.events.num_marks)
    recipe = changed(recipe, change or [], steps=steps, unused=UNUSED["events"])
    run = Run(log.name, model, "own data", recipe, seed, columns or {"file": None})
    folder = train(run, out=Path(out), table=log, device=device, resume=resume, compiled=compiled)
    return PointProcess.from_pretrained(folder, device=device)

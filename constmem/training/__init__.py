"""Training: rows or events of your own to a model that predicts in their units, ready to stream."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from constmem.core.registry import of_events
from constmem.data import DATASETS, EventLog, Table
from constmem.neural_processes import NeuralProcess
from constmem.point_processes import PointProcess
from constmem.training.loop import LOG_EVERY, Run, train
from constmem.training.recipes import changed, event_recipe, table_recipe
from constmem.training.recipes import recipe as settings_by_name

__all__ = ["fit_dataset", "fit_events", "fit_file", "fit_table"]
Options = dict[str, str | None]  # of the command line, by their names there


def fit_table(
    table: Table,
    model: str = "cmanp-small",
    *,
    out: str | Path,
    steps: int | None = None,
    seed: int = 0,
    device: str = "cpu",
    resume: bool = False,
    compiled: bool = True,
    change: Sequence[str] = (),
    columns: dict[str, Any] | None = None,
) -> NeuralProcess[Any, Any]:
    """Train a model on a table into the folder `out`, and return it as it validated best.

    A tenth of the rows (or groups) each is held out to validate and to test on; the mean and deviation
    of the others are kept inside the model, which takes and predicts data in their units.

    Args:
        table: the rows: `Table.read(file, x=..., y=...)` or `Table.of(x, y)`.
        model: a model of points, or one of its variants such as "cmanp-small".
        out: the run's folder, for `constmem eval` and `plot`; must be new unless `resume` is set.
        steps: instead of the recipe's.
        seed: of weights and tasks.
        compiled: on a GPU, compile the loss and capture steps.
        change: settings as `key=value` or `model.key=value`.
        columns: what the columns are called, for the record.
    """
    (rows, dim_x), dim_y = table.x.shape, table.y.shape[1]
    grouped = table.groups is not None
    recipe = table_recipe(model, dim_x=dim_x, dim_y=dim_y, rows=rows, grouped=grouped)
    recipe = changed(recipe, change, steps=steps, kind="table")
    run = Run(table.name, model, "own data", recipe, seed, columns or {"file": None})
    given = any(item.startswith("validate_every=") for item in change)
    every = None if given else max(recipe.steps // 20 // LOG_EVERY * LOG_EVERY, LOG_EVERY)
    how: dict[str, Any] = {"device": device, "resume": resume, "compiled": compiled}
    folder = train(run, out=Path(out), own=table, validate_every=every, **how)
    return NeuralProcess.from_pretrained(folder, device=device)


def fit_events(
    log: EventLog,
    model: str = "cmhp",
    *,
    out: str | Path,
    steps: int | None = None,
    seed: int = 0,
    device: str = "cpu",
    resume: bool = False,
    compiled: bool = True,
    change: Sequence[str] = (),
    columns: dict[str, Any] | None = None,
) -> PointProcess[Any]:
    """Train a model on a log of events into the folder `out`, and return it as it validated best.

    The scale of time, taken from the training part, is kept inside the model, which takes and predicts
    times in their own unit; the folder keeps the events and what their marks are called.

    Args:
        log: the events: `EventLog.read(file)` or `EventLog.of(events)`.
        model: a model of events, or one of its variants such as "cmhp-faithful".
        out, steps, seed, device, resume, compiled, change: as of `fit_table`.
        columns: where the events are from, for the record.
    """
    recipe = changed(event_recipe(model, num_marks=log.events.num_marks), change, steps=steps)
    run = Run(log.name, model, "own data", recipe, seed, columns or {"file": None})
    folder = train(run, out=Path(out), own=log, device=device, resume=resume, compiled=compiled)
    return PointProcess.from_pretrained(folder, device=device)


def fit_dataset(
    dataset: str,
    model: str,
    *,
    recipe: str = "improved",
    out: str | Path,
    data_dir: Path | None = None,
    steps: int | None = None,
    seed: int = 0,
    device: str = "cpu",
    resume: bool = False,
    compiled: bool = True,
    change: Sequence[str] = (),
) -> Path:
    """Train a model on a data set of the registry into the folder `out`, which is returned.

    Args:
        recipe: "improved" (ours) or "faithful" (the paper's).
        data_dir: the folder of prepared data sets.
        out, steps, seed, device, resume, compiled, change: as of `fit_table`.
    """
    settings = settings_by_name(dataset, model, recipe)
    settings = changed(settings, change, steps=steps, kind=DATASETS[dataset].kind)
    run = Run(dataset, model, recipe, settings, seed)
    return train(run, out=Path(out), data_dir=data_dir, device=device, resume=resume, compiled=compiled)


def fit_file(path: Path, model: str, rows: Options, events: Options, **how: Any) -> None:
    """Train on the rows or on the events of a file, whichever the model is for.

    Args:
        rows: --x, --y and --group, for a model of points.
        events: --user, --mark, --time, --unit, --end and --split, for one of events.
        how: what `fit_table` and `fit_events` take beside their data.
    """
    if of_events(model):
        _refuse(rows, f"are for models of points, but {model!r} is one of events: use --user, --mark, --time")
        given: dict[str, Any] = {name.removeprefix("--"): value for name, value in events.items() if value}
        by = given.pop("split", "sequence")
        log = EventLog.read(path, **given, by=by)
        fit_events(log, model, columns={"file": str(path), **given, "split": by}, **how)
        return
    _refuse(events, f"are for models of events, but {model!r} is one of points: use --x, --y, --group")
    if path.suffix not in (".csv", ".tsv"):
        raise ValueError(f"{model!r} is a model of points, which are read from CSV files, not from {path}")
    x, y, group = (rows[name] for name in ("--x", "--y", "--group"))
    if not x or not y:
        raise ValueError(
            f"say which columns of {path} are what: --x a,b for the inputs, --y c for the outputs; "
            f"there are {', '.join(Table.columns(path))}"
        )
    inputs, outputs = ([name.strip() for name in names.split(",")] for names in (x, y))
    columns = {"file": str(path), "x": inputs, "y": outputs, "group": group}
    fit_table(Table.read(path, x=inputs, y=outputs, group=group), model, columns=columns, **how)


def _refuse(options: Options, why: str) -> None:
    given = [name for name, value in options.items() if value]
    if given:
        raise ValueError(f"{', '.join(given)} {why}")

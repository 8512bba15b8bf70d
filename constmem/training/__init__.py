"""Training: rows or events of your own to a model that predicts in their units, ready to stream."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from constmem.core import of_events
from constmem.data import DATASETS, EventLog, Table
from constmem.data.event_files import NONE
from constmem.data.event_log import FORMATS
from constmem.neural_processes import NeuralProcess
from constmem.point_processes import PointProcess
from constmem.training.folder import RUN, StoppedError, read_run
from constmem.training.log import read_metrics
from constmem.training.loop import LOG_EVERY, Run, train
from constmem.training.recipes import changed, event_recipe, read_recipe, table_recipe
from constmem.training.recipes import recipe as settings_by_name
from constmem.training.sources import open_source

__all__ = ["fit_dataset", "fit_events", "fit_file", "fit_named", "fit_table"]
Options = dict[str, str | None]  # of the command line, by their names there
ROWS = (".csv", ".tsv", ".parquet")  # points are read from these
JITTERS = 0.0, 0.1, 0.3  # noise on inputs that is tried, in their deviations
TRIAL = 4  # each for one in so many steps of the run
LITTLE = 0.95  # of the error without context: what a context must at least achieve


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
    folder = train(
        run, out=Path(out), own=table, device=device, resume=resume, compiled=compiled, validate_every=every
    )
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


def fit_named(
    dataset: str,
    model: str | None,
    *,
    rows: Options,
    events: Options,
    split: str | None = None,
    recipe: str = "improved",
    data_dir: Path | None = None,
    out: Path | None = None,
    seed: int = 0,
    **how: Any,
) -> tuple[Path, list[str]]:
    """Train as the command line asks: on a data set by its name, or on a file of one's own.

    Args:
        dataset: a name of the registry, or a file.
        model: None: cmanp, cmanp-small of a file, or cmhp of events.
        rows, events, split: options of the command line that only files have.
        how: what `fit_table` takes beside its data.

    Returns:
        The run's folder, and notes to print about it.
    """
    path, of_file = Path(dataset), {**rows, **events, "--split": split}
    is_file, given = path.suffix.lower() in FORMATS, [name for name, value in of_file.items() if value]
    if given and not is_file:
        raise ValueError(
            f"{', '.join(given)}: these are for files of your own, but {dataset!r} is none: their names end "
            f"in {', '.join(FORMATS)}"
        )
    if model is None and is_file:
        points = any(rows.values()) or (path.suffix.lower() in FORMATS[:2] and not any(events.values()))
        model = "cmanp-small" if points else "cmhp"
    elif model is None:
        model = "cmhp" if dataset in DATASETS and DATASETS[dataset].of_events else "cmanp"
    name = f"{path.stem}-{model}" if is_file else f"{dataset}-{model}-{recipe}"
    folder = out or Path("runs") / f"{name}-{seed}"
    how |= {"out": folder, "seed": seed}
    if not is_file:
        fit_dataset(dataset, model, recipe=recipe, data_dir=data_dir, **how)
        return folder, []
    if recipe != "improved":
        raise ValueError("the paper has no recipe for data of your own: leave --recipe out, or use --set")
    return folder, fit_file(path, model, rows, events, split=split, **how)


def fit_file(
    path: Path, model: str, rows: Options, events: Options, *, split: str | None = None, **how: Any
) -> list[str]:
    """Train on the rows or on the events of a file, whichever the model is for; returns what was found.

    Args:
        rows: --x, --y and --group, for a model of points.
        events: --user, --mark, --time, --unit and --end, for one of events.
        split: "time", or "group" of rows and "sequence" of events.
        how: what `fit_table` and `fit_events` take beside their data.
    """
    if of_events(model):
        _refuse(rows, f"are for models of points, but {model!r} is one of events: use --user, --mark, --time")
        given: dict[str, Any] = {name.removeprefix("--"): value for name, value in events.items() if value}
        by: Any = split or "sequence"
        log = EventLog.read(path, **given, by=by)
        fit_events(log, model, columns={"file": str(path), **given, "split": by}, **how)
        return [f"what comes next: constmem forecast {how['out']} {path} --out next.csv"]
    _refuse(events, f"are for models of events, but {model!r} is one of points: use --x, --y, --group")
    if path.suffix.lower() not in ROWS:
        raise ValueError(f"{model!r} is a model of points, which are read from {', '.join(ROWS)}, not {path}")
    x, y, group = (rows[name] for name in ("--x", "--y", "--group"))
    if not group:
        raise ValueError(
            f"{path} without --group is one task, and {model} learns from many. For one table use an "
            f"estimator, which trains nothing: constmem fit {path} --target {y or 'COLUMN'} --out "
            f"{path.stem}.model. If a column says which rows belong together (a sensor, a patient, a day), "
            f"give --group COLUMN; --group {NONE} trains on all rows as one task. If rows are events, give a "
            f"model of those: constmem train {path} cmhp --user COLUMN --mark COLUMN --time COLUMN. Columns "
            f"are {', '.join(Table.columns(path))}"
        )
    if not x or not y:
        raise ValueError(
            f"say which columns of {path} are what: --x a,b for the inputs, --y c for the outputs; "
            f"there are {', '.join(Table.columns(path))}"
        )
    inputs, outputs = ([name.strip() for name in names.split(",")] for names in (x, y))
    owner, by = None if group == NONE else group, split or "group"
    columns = {"file": str(path), "x": inputs, "y": outputs, "group": owner}
    table = Table.read(path, x=inputs, y=outputs, group=owner, by=by)
    notes = [] if table.groups is None else choose_jitter(table, model, how)
    fitted = fit_table(table, model, columns=columns, **how)
    return [*notes, context_note(fitted, table, Path(how["out"]))]


def choose_jitter(table: Table, model: str, how: dict[str, Any]) -> list[str]:
    """Add to `how` the noise on inputs that validates best, each tried for a part of the steps.

    Nothing is tried where it is set already, or was by the run that goes on.
    """
    change, folder = list(how.get("change", ())), Path(how["out"])
    if (folder / RUN).exists() and how.get("resume"):
        before = read_run(folder)["run"]["recipe"].get("jitter", 0.0)
        how["change"] = [f"jitter={before}", *change]
        return []
    if (folder / RUN).exists() or any(item.startswith("jitter=") for item in change):
        return []
    own = table_recipe(model, dim_x=table.x.shape[1], dim_y=table.y.shape[1], rows=len(table), grouped=True)
    full = changed(own, change, steps=how.get("steps"), kind="table").steps
    part, tried = max(full // TRIAL, 1), dict[float, float]()
    with TemporaryDirectory() as scratch:
        for jitter in JITTERS:
            out, named = Path(scratch) / str(jitter), replace(table, name=f"trying jitter={jitter}")
            changes = [*change, f"steps={part}", f"jitter={jitter}"]
            try:
                fit_table(named, model, **how | {"out": out, "steps": None, "change": changes})
            except StoppedError as error:
                cause = str(error).partition(";")[0].partition(": start")[0]
                raise StoppedError(
                    f"{cause}, while jitter was chosen by validation: nothing was kept; --set jitter=0 "
                    "leaves that out"
                ) from error
            tried[jitter] = max(entry["validation"] for entry in read_metrics(out) if "validation" in entry)
    best = max(tried, key=lambda jitter: tried[jitter])
    how["change"] = [*change, f"jitter={best}"]
    scores = ", ".join(f"{found:.3f} with {jitter}" for jitter, found in tried.items())
    return [f"jitter={best} validated best in {part} steps each (log-likelihood {scores})"]


@torch.no_grad()
def context_note(model: NeuralProcess[Any, Any], table: Table, folder: Path) -> str:
    """How much a context helps to predict the validation's targets, and what to do if it does not."""
    recipe, model = read_recipe(read_run(folder)["run"]["recipe"]), model.eval()
    source = open_source(table.name, recipe, data_dir=None, device=model.device, own=table)
    sums = torch.zeros(2, dtype=torch.float64)
    count, scale = 0, table.y.std(0).to(model.device)
    for task in source.validation():
        real = torch.ones_like(task.yt[..., 0], dtype=torch.bool) if task.mask_t is None else task.mask_t
        given = model.condition(task.xc, task.yc, mask=task.mask_c)
        none = model.condition(task.xc[:, :0], task.yc[:, :0])
        for i, state in enumerate((given, none)):
            error = (model.query(state, task.xt).mean - task.yt) / scale
            sums[i] += float(error[real].square().sum())
        count += int(real.sum()) * task.yt.shape[-1]
    shown, unseen = (sums / max(count, 1)).sqrt().tolist()
    note = f"validation error, in deviations of y: {shown:.3f} given context, {unseen:.3f} without"
    if shown <= LITTLE * unseen:
        return note
    return (
        f"warning: {note}: context does not help. Rows of a group may say little of each other, or training "
        "was too short: try more --steps, other inputs or another --group, or an estimator (constmem fit)"
    )


def _refuse(options: Options, why: str) -> None:
    given = [name for name, value in options.items() if value]
    if given:
        raise ValueError(f"{', '.join(given)} {why}")

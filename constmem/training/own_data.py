"""A file of one's own and a model's name to a trained run: rows for models of points, events for others."""

from pathlib import Path
from typing import Any

from constmem.data import EventLog, Table
from constmem.training.forecasting import train_events
from constmem.training.recipes import of_events
from constmem.training.regression import train_table

Options = dict[str, str | None]  # of the command line, by their names there


def train_on_file(
    path: Path, model: str, rows: Options, events: Options, how: dict[str, Any], *, compiled: bool = True
) -> None:
    """Train on the rows or on the events of a file, whichever the model is for.

    Args:
        rows: --x, --y and --group, for a model of points.
        events: --user, --mark, --time, --unit, --end and --split, for one of events.
        how: what `train_table` and `train_events` take beside their data.
    """
    if of_events(model):
        _refuse(rows, f"are for models of points, but {model!r} is one of events: use --user, --mark, --time")
        told: dict[str, Any] = {name.removeprefix("--"): value for name, value in events.items() if value}
        by = told.pop("split", "sequence")
        log = EventLog.read(path, **told, by=by)
        train_events(log, model, columns={"file": str(path), **told, "split": by}, compiled=compiled, **how)
        return
    _refuse(events, f"are for models of events, but {model!r} is one of points: use --x, --y, --group")
    if path.suffix not in (".csv", ".tsv"):
        raise ValueError(f"{model!r} is a model of points, which are read from CSV files, not from {path}")
    table, columns = _read_table(path, rows["--x"], rows["--y"], rows["--group"])
    train_table(table, model, columns=columns, **how)


def _read_table(path: Path, x: str | None, y: str | None, group: str | None) -> tuple[Table, dict[str, Any]]:
    if not x or not y:
        raise ValueError(
            f"say which columns of {path} are what: --x a,b for the inputs, --y c for the outputs; "
            f"there are {', '.join(Table.columns(path))}"
        )
    inputs, outputs = ([name.strip() for name in names.split(",")] for names in (x, y))
    columns = {"file": str(path), "x": inputs, "y": outputs, "group": group}
    return Table.read(path, x=inputs, y=outputs, group=group), columns


def _refuse(options: Options, why: str) -> None:
    given = [name for name, value in options.items() if value]
    if given:
        raise ValueError(f"{', '.join(given)} {why}")

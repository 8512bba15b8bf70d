"""Rows of your own, from a table to a trained model that streams and answers in the units of the data."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from constmem.data import Table
from constmem.neural_processes import NeuralProcess
from constmem.training.loop import LOG_EVERY, Run, train
from constmem.training.recipes import UNUSED, changed, table_recipe


def train_table(
    table: Table,
    model: str = "cmanp-small",
    *,
    out: str | Path,
    steps: int | None = None,
    seed: int = 0,
    device: str = "cpu",
    resume: bool = False,
    change: Sequence[str] | None = None,
    columns: dict[str, Any] | None = None,
) -> NeuralProcess[Any, Any]:
    """Train a model on a table into the folder `out`, and return it as it validated best.

    A tenth of the rows (or groups) each is held out to validate and to test on; the mean and deviation
    of the others are kept inside the model, which takes and predicts data in their units.

    Args:
        table: the rows: `Table.read(file, x=..., y=...)` or `Table.of(x, y)`.
        model: a name of `MODELS`, or one of its variants such as "cmanp-small".
        out: the run's folder, for `constmem eval` and `plot`; must be new unless `resume` is set.
        steps: instead of the recipe's.
        seed: of weights and tasks.
        change: settings as `key=value` or `model.key=value`.
        columns: what the columns are called, for the record.
    """
    (rows, dim_x), dim_y = table.x.shape, table.y.shape[1]
    grouped = table.groups is not None
    recipe = table_recipe(model, dim_x=dim_x, dim_y=dim_y, rows=rows, grouped=grouped)
    recipe = changed(recipe, change or [], steps=steps, unused=UNUSED["table"])
    run = Run(table.name, model, "own data", recipe, seed, columns or {"file": None})
    told = any(item.startswith("validate_every=") for item in change or [])
    every = None if told else max(recipe.steps // 20 // LOG_EVERY * LOG_EVERY, LOG_EVERY)
    folder = train(run, out=Path(out), table=table, device=device, resume=resume, validate_every=every)
    return NeuralProcess.from_pretrained(folder, device=device)

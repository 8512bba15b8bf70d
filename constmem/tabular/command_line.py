"""The commands on one table, `constmem fit | update | predict | score`."""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from constmem.tabular.commands import Outcome

Table = Annotated[Path, typer.Argument(help="A .csv, .tsv or .parquet file.")]
Model = Annotated[Path, typer.Argument(help="A model that `constmem fit` wrote.")]
Replace = Annotated[bool, typer.Option("--replace", help="Write over what is there.")]


def register(app: typer.Typer) -> None:
    """Add the commands to an application."""
    for command in (fit, update, predict, score):
        app.command()(command)


def fit(
    table: Table,
    target: Annotated[str, typer.Option(help="The column to predict; several: a,b.")],
    out: Annotated[Path, typer.Option(help="The model's file.")],
    task: Annotated[
        str, typer.Option(help="regression, classification, or auto: classes where the target is text.")
    ] = "auto",
    ignore: Annotated[str, typer.Option(help="Columns to leave out, a,b.")] = "",
    forget: Annotated[
        str | None, typer.Option(help="A half-life in rows, window:ROWS, or auto; nothing if not given.")
    ] = None,
    size: Annotated[int | None, typer.Option(help="Number of features.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of the features.")] = 0,
    replace: Replace = False,
) -> None:
    """Learn to predict a column of a table from the others: closed form, any number of rows.

    constmem fit houses.csv --target price --out houses.model
    """
    from constmem.core.costs import counted
    from constmem.tabular.commands import fit_file

    with counted(f"fitting {table}") as report:
        done = fit_file(
            table, out, _listed(target), task=task, ignore=_listed(ignore), replace=replace, report=report,
            forget=_number(forget), size=size, random_state=seed,
        )  # fmt: skip
    _say(done, f"{done.task} of {target} learned from", out)
    if done.task == "regression" and task == "auto":
        print("numbers are predicted; give --task classification if they name classes")
    print(f"next: constmem predict {out} NEW.csv --out predicted.csv; constmem update {out} MORE.csv")


def update(
    model: Model,
    table: Table,
    out: Annotated[Path | None, typer.Option(help="Write here, and leave the model as it is.")] = None,
    replace: Replace = False,
) -> None:
    """Learn more rows: as if the model had seen them with the first."""
    from constmem.core.costs import counted
    from constmem.data.rows import free
    from constmem.tabular.commands import update_file

    if out is not None:
        free(out, replace=replace)
    with counted(f"updating {model}") as report:
        done = update_file(model, table, out or model, report=report)
    _say(done, "learned", out or model)


def predict(
    model: Model,
    table: Table,
    out: Annotated[
        Path, typer.Option(help="A .csv, .tsv or .parquet file: the table's columns, and predictions.")
    ],
    quantiles: Annotated[str, typer.Option(help="Of numbers, between 0 and 1.")] = "0.05,0.5,0.95",
    replace: Replace = False,
) -> None:
    """Predict every row: mean, deviation and quantiles, or classes and their probabilities."""
    from constmem.core.costs import counted
    from constmem.tabular.commands import predict_file

    try:
        levels = [float(level) for level in _listed(quantiles)]
    except ValueError as error:
        raise ValueError(f"--quantiles {quantiles}: give numbers between 0 and 1, such as 0.1,0.9") from error
    with counted(f"predicting {table}") as report:
        done = predict_file(model, table, out, quantiles=levels, replace=replace, report=report)
    _say(done, "predicted", out)


def score(
    model: Model, table: Table, as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False
) -> None:
    """How well the model predicts rows whose target is known."""
    from constmem.core.costs import counted
    from constmem.tabular.commands import score_file

    with counted(f"scoring {table}") as report:
        done = score_file(model, table, report=report)
    if as_json:
        print(json.dumps({"rows": done.rows, **done.scores}))
        return
    for name, value in {"rows": done.rows, **done.scores}.items():
        print(f"{name.replace('_', ' '):30} {value:.6g}")
    _left_out(done)


def _listed(names: str) -> list[str]:
    return [name.strip() for name in names.split(",") if name.strip()]


def _number(forget: str | None) -> float | str | None:
    try:
        return None if forget is None else float(forget)
    except ValueError:
        return forget


def _say(done: "Outcome", words: str, out: Path) -> None:
    size = out.stat().st_size
    shown = f"{size / 1e6:.2f} MB" if size >= 10_000 else f"{size:,} bytes"
    print(f"{words} {done.rows:,} rows: {out} ({shown})")
    _left_out(done)


def _left_out(done: "Outcome") -> None:
    if done.left_out:
        print(f"warning: {done.left_out:,} rows without a target were left out", file=sys.stderr)

"""The command line, `constmem demo | fit | train | eval | plot | forecast | page | data`; help is quick."""

import os
import shlex
import sys
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from constmem import __version__
from constmem.cli import commands
from constmem.core import EVENTS, POINTS, with_variants
from constmem.data import catalogue

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
data_app = typer.Typer(help="Data sets: what is there, and how to prepare what is not.", no_args_is_help=True)
app.add_typer(data_app, name="data")
commands.register(app)


def _print_version(asked: bool) -> None:
    if asked:
        print(f"constmem {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Attention whose memory does not grow."""


DataDir = Annotated[Path | None, typer.Option(envvar="CONSTMEM_DATA", help="Folder of packs (*.npz).")]
Device = Annotated[str, typer.Option(help="cpu, cuda, cuda:1, mps.")]
X = Annotated[str | None, typer.Option("--x", help="Of a file of rows: its input columns, a,b,...")]
Y = Annotated[str | None, typer.Option("--y", help="Of a file of rows: its output columns.")]
Group = Annotated[
    str | None, typer.Option(help="Of a file of rows: the column that makes rows one task; - for one.")
]

_DATASETS = f"{', '.join(catalogue.POINTS)}; of events: {', '.join(catalogue.EVENTS)}; or a file of your own."
_MODELS = (
    f"{', '.join(with_variants(POINTS))}; of events: {', '.join(with_variants(EVENTS))}. If not given, "
    "cmanp (of a file cmanp-small), of events cmhp."
)
_OWN = "Of an event file: "
User = Annotated[str | None, typer.Option(help=f"{_OWN}the column that tells sequences apart; - for one.")]
Mark = Annotated[str | None, typer.Option(help=f"{_OWN}the column of kinds, any text; - for none.")]
Time = Annotated[str | None, typer.Option(help=f"{_OWN}the column of times, numbers or ISO dates.")]
Unit = Annotated[str | None, typer.Option(help=f"{_OWN}the unit of its times; second if not given.")]
End = Annotated[str | None, typer.Option(help=f"{_OWN}when observation ended, or last: with the last event.")]
Split = Annotated[
    str | None,
    typer.Option(help="Of a file: split by group (rows) or sequence (events), the default, or by time."),
]


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Folder to write to.")] = Path("demo-out"),
) -> None:
    """Learn a power plant's rows as a stream, beside a forest; complete digits; draw both."""
    from constmem.evaluation.demo import demo as run

    run(out)


@app.command()
def train(
    dataset: Annotated[str, typer.Argument(help=_DATASETS)],
    model: Annotated[str | None, typer.Argument(help=_MODELS)] = None,
    recipe: Annotated[str, typer.Option(help="improved (ours) or faithful (the paper's).")] = "improved",
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 1, help="Of weights and tasks.")] = 0,
    steps: Annotated[int | None, typer.Option(help="Instead of the recipe's.")] = None,
    device: Device = "cpu",
    data_dir: DataDir = None,
    out: Annotated[
        Path | None, typer.Option(help="The run's folder; runs/DATASET-MODEL-... if not given.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run in the folder.")] = False,
    compiled: Annotated[
        bool, typer.Option(help="On a GPU: compile the loss, or capture steps on events.")
    ] = True,
    change: Annotated[
        list[str] | None, typer.Option("--set", help="key=value or model.key=value; repeatable.")
    ] = None,
    x: X = None,
    y: Y = None,
    group: Group = None,
    user: User = None,
    mark: Mark = None,
    time: Time = None,
    unit: Unit = None,
    end: End = None,
    split: Split = None,
) -> None:
    """Train a model; Ctrl-C keeps a checkpoint to go on from.

    On tasks of your own: constmem train sensors.csv --x time,place --y heat --group sensor [--split time]

    On events of your own: constmem train visits.csv cmhp --user customer --mark page --time when
    """
    rows = {"--x": x, "--y": y, "--group": group}
    events = {"--user": user, "--mark": mark, "--time": time, "--unit": unit, "--end": end}
    try:
        from constmem.training import fit_named

        folder, notes = fit_named(
            dataset, model, rows=rows, events=events, split=split, recipe=recipe, data_dir=data_dir,
            out=out, seed=seed, steps=steps, device=device, resume=resume, compiled=compiled,
            change=change or [],
        )  # fmt: skip
    except KeyboardInterrupt:  # while nothing is trained: the training loop has an answer of its own
        print("\nconstmem: stopped before the first step; every run is as it was", file=sys.stderr)
        raise typer.Exit(130) from None
    for note in notes:
        print(note, file=sys.stderr if note.startswith("warning") else sys.stdout)
    _say_trained(folder, data_dir if dataset in catalogue.DATASETS else None)


def _say_trained(folder: Path, data_dir: Path | None) -> None:
    """What to do next; a folder of data that only this command knows of is named again."""
    named = data_dir is not None and str(data_dir) != os.environ.get("CONSTMEM_DATA")
    run = shlex.join([str(folder), *(["--data-dir", str(data_dir)] if named else [])])
    print(f"trained: {folder}\nnext: constmem eval {run}; constmem plot {run}")


@app.command(name="eval")
def evaluate(
    runs: Annotated[list[Path], typer.Argument(help="Folders of runs.")],
    device: Device = "cpu",
    data_dir: DataDir = None,
    as_json: Annotated[
        bool, typer.Option("--json", help='Print the rows; "over_seeds" in them: mean and spread.')
    ] = False,
) -> None:
    """Score trained runs on their test sets, into each run's eval.json.

    Runs that differ by seed alone are also given as the mean ± standard deviation over their seeds.
    """
    from constmem.evaluation.rows import json_text
    from constmem.evaluation.runs import evaluate_runs
    from constmem.evaluation.tables import over_seeds, print_runs

    found = evaluate_runs(runs, data_dir=data_dir, device=device)
    if as_json:
        print(json_text(over_seeds(found)))
    else:
        print_runs(found, runs)


@app.command()
def table(
    results: Annotated[
        list[Path] | None,
        typer.Argument(help="Folders of scored runs, or JSON files of rows; if not given, all in runs/."),
    ] = None,
    dataset: Annotated[str | None, typer.Option(help="Only this data set.")] = None,
    as_markdown: Annotated[bool, typer.Option("--markdown", help="Print Markdown.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    out: Annotated[Path | None, typer.Option(help="Write to this file, in Markdown or JSON.")] = None,
    scores: Annotated[bool, typer.Option("--scores", help="RMSE, CRPS and 90 % coverage too.")] = False,
) -> None:
    """A table like the paper's: models against test sets, ours beside the published."""
    from constmem.evaluation.tables import table_of

    if as_json and as_markdown:
        raise ValueError("--markdown and --json are two forms of one table: give one of them")
    form = "json" if as_json else "markdown" if as_markdown else None
    table_of(results, dataset=dataset, form=form, out=out, scores=scores)


@app.command()
def plot(
    runs: Annotated[
        list[Path], typer.Argument(help="Folders of runs; several on the same images or events are compared.")
    ],
    out: Annotated[Path | None, typer.Option(help="Folder for the pictures; else RUN/pictures.")] = None,
    device: Device = "cpu",
    data_dir: DataDir = None,
) -> None:
    """Draw how runs learned, how calibrated they are, and what they complete, fit or predict."""
    from constmem.evaluation.pictures import plot_runs

    for path in plot_runs(runs, out=out, data_dir=data_dir, device=device):
        print(path)


@app.command()
def forecast(
    run: Annotated[Path, typer.Argument(help="Folder of a run of events.")],
    events: Annotated[Path, typer.Argument(help="A .csv, .tsv or .parquet file: events so far.")],
    out: Annotated[Path, typer.Option(help="A .csv, .tsv or .parquet file for the forecasts.")],
    ahead: Annotated[int, typer.Option(min=1, help="How many events of each sequence.")] = 1,
    samples: Annotated[int, typer.Option(min=1, help="Futures that events after the next are from.")] = 200,
    seed: Annotated[int, typer.Option(min=0, help="Of these futures.")] = 0,
    user: User = None,
    mark: Mark = None,
    time: Time = None,
    device: Device = "cpu",
    replace: commands.Replace = False,
) -> None:
    """Forecast the next events of every sequence: when (median, 5 and 95 %), and of what kind.

    constmem forecast runs/visits-cmhp-0 visits.csv --out next.csv
    """
    from constmem.core.costs import counted
    from constmem.evaluation.runs import forecast_file

    columns = {"user": user, "mark": mark, "time": time}
    with counted(f"forecasting {events}") as report:
        found, unknown = forecast_file(
            run, events, out, columns=columns, ahead=ahead, samples=samples, seed=seed, device=device,
            replace=replace, report=report,
        )  # fmt: skip
    print(f"forecast {ahead} {'event' if ahead == 1 else 'events'} of each of {found:,} sequences: {out}")
    if unknown:
        print(f"warning: {unknown:,} events are of kinds that the run has not seen", file=sys.stderr)


@data_app.command(name="list")
def list_data(data_dir: DataDir = None) -> None:
    """What is found where, and what to download for what is not."""
    from constmem.data import hints, listing

    for line in (*listing(data_dir), "", *hints(data_dir)):
        print(line)


@data_app.command()
def prepare(
    what: Annotated[str, typer.Argument(help=", ".join(catalogue.PREPARED))],
    source: Annotated[Path, typer.Option(help="Folder, archive or file of the original public data.")],
    data_dir: DataDir = None,
    partition: Annotated[
        Path | None,
        typer.Option(help="celeba: list_eval_partition.txt; looked for beside the source if not given."),
    ] = None,
    name: Annotated[
        str | None, typer.Option(help="easytpp: of the data set; that of the folder if not given.")
    ] = None,
    unit: Annotated[str | None, typer.Option(help="easytpp: of its times, such as hour.")] = None,
    replace: Annotated[
        bool, typer.Option("--replace", help="Write over a pack that holds more than the new one, too.")
    ] = False,
) -> None:
    """Turn the original public files into the prepared format, and say what was found in them.

    What differs from the official data, in number or checksum, is on lines that begin with warning:.
    """
    from constmem import data
    from constmem.core.costs import counted

    with counted(f"preparing {what}") as progress:
        how: dict[str, Any] = {"partition": partition, "name": name, "unit": unit, "replace": replace}
        made = data.prepare_pack(what, source, data_dir, progress=progress, **how)
    for line in (made.path, *made.found):
        print(line)
    for line in made.warnings:
        print(f"warning: {line}", file=sys.stderr)


def main() -> None:
    """Run a command; known errors become one clear line, with exit code 2 (1 for a run that stopped)."""
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # threads that spin starve a busy machine
    try:
        app()
    except (ValueError, OSError, ImportError, MemoryError) as error:
        advice = ""
        if isinstance(error, OSError) and error.errno is not None:
            from constmem.core.files import advice_on

            advice = advice_on(error)
        _end(f"{error}{advice}", 2)
    except RuntimeError as error:
        kinds = {kind.__name__ for kind in type(error).__mro__}
        if "OutOfMemoryError" in kinds or "can't allocate memory" in str(error):
            how = "take a smaller batch (--set batch=...), fewer points, or a smaller model"
            _end(f"out of memory ({str(error).splitlines()[0]}): {how}", 2)
        if not kinds & {"StoppedError", "ConditioningError"}:
            raise
        _end(str(error), 1)


def _end(message: str, code: int) -> NoReturn:
    print(f"constmem: {message}", file=sys.stderr)
    sys.exit(code)

"""The command line, `constmem demo | fit | train | eval | table | plot | data`; help is given at once."""

import os
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from constmem import __version__, cli_tables
from constmem.core.registry import EVENTS, POINTS, with_variants
from constmem.data import catalogue

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
data_app = typer.Typer(help="Data sets: what is there, and how to prepare what is not.", no_args_is_help=True)
app.add_typer(data_app, name="data")
cli_tables.register(app)


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
X = Annotated[str | None, typer.Option("--x", help="Of a CSV file: its input columns, a,b,...")]
Y = Annotated[str | None, typer.Option("--y", help="Of a CSV file: its output columns.")]
Group = Annotated[str | None, typer.Option(help="Of a CSV file: the column that makes rows one task.")]

_FILES = (".csv", ".tsv", ".json", ".jsonl", ".parquet", ".npz")  # points are read from the first two only
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
End = Annotated[str | None, typer.Option(help=f"{_OWN}when the watch ended, or last: with the last event.")]
Split = Annotated[str | None, typer.Option(help=f"{_OWN}split by sequence (the default) or by time.")]


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

    On rows of your own: constmem train sensors.csv cmanp-small --x time,place --y heat [--group sensor]

    On events of your own: constmem train visits.csv cmhp --user customer --mark page --time when
    """
    of_rows = {"--x": x, "--y": y, "--group": group}
    of_events = {
        "--user": user, "--mark": mark, "--time": time, "--unit": unit, "--end": end, "--split": split,
    }  # fmt: skip
    suffix = Path(dataset).suffix
    is_file, given = suffix in _FILES, [name for name, value in (of_rows | of_events).items() if value]
    if is_file and recipe != "improved":
        raise ValueError("the paper has no recipe for data of your own: leave --recipe out, or use --set")
    if given and not is_file:
        raise ValueError(
            f"{', '.join(given)}: these are for files of your own, but {dataset!r} is none: their names end "
            f"in {', '.join(_FILES)}"
        )
    if model is None and is_file:
        points = any(of_rows.values()) or (suffix in _FILES[:2] and not any(of_events.values()))
        model = "cmanp-small" if points else "cmhp"
    elif model is None:
        model = "cmhp" if dataset in catalogue.EVENTS else "cmanp"
    name = f"{Path(dataset).stem}-{model}" if is_file else f"{dataset}-{model}-{recipe}"
    folder = out or Path("runs") / f"{name}-{seed}"
    how: dict[str, Any] = {
        "out": folder, "seed": seed, "steps": steps, "device": device, "resume": resume,
        "compiled": compiled, "change": change or [],
    }  # fmt: skip
    with _stoppable(folder):
        from constmem import training

        if is_file:
            training.fit_file(Path(dataset), model, of_rows, of_events, **how)
        else:
            training.fit_dataset(dataset, model, recipe=recipe, data_dir=data_dir, **how)
    _say_trained(folder, None if is_file else data_dir)


@contextmanager
def _stoppable(folder: Path) -> Iterator[None]:
    """Answer a Ctrl-C that comes while nothing is trained; the training loop has an answer of its own."""
    try:
        yield
    except KeyboardInterrupt:
        kept = f"{folder} is as it was" if (folder / "run.json").exists() else "nothing was kept"
        print(f"\nconstmem: stopped before the first step; {kept}", file=sys.stderr)
        raise typer.Exit(130) from None


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
    from constmem.evaluation.runs import evaluate_runs, over_seeds, print_runs

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
    from constmem.core.files import write_text
    from constmem.evaluation import tables
    from constmem.evaluation.entries import compare
    from constmem.evaluation.rows import read_rows

    paths = results or sorted(path.parent for path in Path("runs").glob("*/eval.json"))
    if not paths:
        raise ValueError("no scored runs in runs/: name run folders or JSON files, or run `eval` first")
    entries = compare(read_rows(paths), dataset=dataset)
    wants_json = as_json or (out is not None and out.suffix == ".json" and not as_markdown)
    if not (wants_json or as_markdown or out):
        tables.show(entries, scores=scores)
        return
    text = tables.as_json(entries) if wants_json else tables.markdown(entries, scores=scores)
    if out is None:
        print(text)
    else:
        print(f"wrote {write_text(out, text + chr(10))}")


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
    from constmem.training.log import counted

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


if __name__ == "__main__":
    main()

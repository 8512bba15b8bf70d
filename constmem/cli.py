"""The command line: `constmem demo | train | eval | plot | data`; `--help` imports nothing heavy."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(
    help="Attention whose memory does not grow.", no_args_is_help=True, add_completion=False,
    pretty_exceptions_enable=False,
)  # fmt: skip
data_app = typer.Typer(help="Data sets: what is there, and how to prepare what is not.", no_args_is_help=True)
app.add_typer(data_app, name="data")

DataDir = Annotated[
    Path | None, typer.Option(envvar="CONSTMEM_DATA", help="Folder of prepared data sets (*.npz).")
]
Device = Annotated[str, typer.Option(help="cpu, cuda, cuda:1, mps.")]

_POINTS, _EVENTS = (
    "emnist, celeba32, celeba64, celeba128, digits, gp",
    "taxi, mooc, reddit, wiki, taobao, hawkes1",
)
_OF_POINTS = "cmanp, lbanp, tnpd, eqtnp, cnp, canp, np, anp, bnp, banp"
_OF_EVENTS = "cmhp, cmhp-faithful, thp, gru, trivial"


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Folder to write to.")] = Path("demo-out"),
    steps: Annotated[int | None, typer.Option(help="Stop training early, for a quick look.")] = None,
) -> None:
    """Train a small model on real digits, stream pixels into it, and draw what it sees."""
    from constmem.demo import demo as run

    run(out, steps=steps)


@app.command()
def train(
    dataset: Annotated[str, typer.Argument(help=f"{_POINTS}; of events: {_EVENTS}.")],
    model: Annotated[str, typer.Argument(help=f"{_OF_POINTS}; of events: {_OF_EVENTS}.")],
    recipe: Annotated[str, typer.Option(help="improved (ours) or faithful (the paper's).")] = "improved",
    seed: Annotated[int, typer.Option(help="Of weights and tasks.")] = 0,
    steps: Annotated[int | None, typer.Option(help="Instead of the recipe's.")] = None,
    device: Device = "cpu",
    data_dir: DataDir = None,
    out: Annotated[
        Path | None, typer.Option(help="The run's folder; runs/DATASET-MODEL-... if not given.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run in the folder.")] = False,
    compiled: Annotated[bool, typer.Option(help="On a GPU: compile the loss.")] = True,
    change: Annotated[
        list[str] | None, typer.Option("--set", help="key=value or model.key=value; repeatable.")
    ] = None,
) -> None:
    """Train a model; Ctrl-C keeps a checkpoint to go on from."""
    from constmem.recipes import changed
    from constmem.recipes import recipe as settings_of
    from constmem.train import Run
    from constmem.train import train as run_training

    overrides = [*(change or []), *([] if steps is None else [f"steps={steps}"])]
    run = Run(dataset, model, recipe, changed(settings_of(dataset, model, recipe), overrides), seed)
    folder = out or Path("runs") / f"{dataset}-{model}-{recipe}-{seed}"
    run_training(run, out=folder, data_dir=data_dir, device=device, resume=resume, compiled=compiled)
    print(f"trained: {folder}")


@app.command(name="eval")
def evaluate(
    runs: Annotated[list[Path], typer.Argument(help="Folders of runs.")],
    device: Device = "cpu",
    data_dir: DataDir = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Score trained runs on their test sets; each run's eval.json holds what is printed."""
    from constmem.results import evaluate_run, print_table

    found = [evaluate_run(run, data_dir=data_dir, device=device) for run in runs]
    if as_json:
        print(json.dumps(found, indent=1))
    else:
        print_table(found)


@data_app.command(name="list")
def list_data(data_dir: DataDir = None) -> None:
    """What is found where, and what to download for what is not."""
    from constmem.data import listing

    for entry in listing(data_dir):
        print(entry)


@data_app.command()
def prepare(
    what: Annotated[str, typer.Argument(help="emnist, celeba, mooc, reddit, wiki or easytpp.")],
    source: Annotated[Path, typer.Option(help="Folder, archive or file of the original public data.")],
    data_dir: DataDir = None,
    name: Annotated[
        str | None, typer.Option(help="easytpp: of the data set; that of the folder if not given.")
    ] = None,
    unit: Annotated[str | None, typer.Option(help="easytpp: of its times, such as hour.")] = None,
) -> None:
    """Turn the original public files into the prepared format."""
    from functools import partial

    from constmem.data import prepare_celeba, prepare_easytpp, prepare_emnist, prepare_jodie
    from constmem.recipes import known

    preparers: dict[str, Callable[[Path, Path], Path]] = {
        "emnist": prepare_emnist,
        "celeba": prepare_celeba,
        **{jodie: partial(prepare_jodie, jodie) for jodie in ("mooc", "reddit", "wiki")},
        "easytpp": partial(prepare_easytpp, name=name, unit=unit),
    }
    known("data set to prepare", what, preparers)
    if data_dir is None:
        raise ValueError("say where to write: --data-dir FOLDER, or set CONSTMEM_DATA")
    if what != "easytpp" and (name or unit):
        raise ValueError(f"--name and --unit are for easytpp: those of {what} are known")
    print(preparers[what](source, data_dir))


def main() -> None:
    """Run a command; known errors become one clear line, with exit code 2."""
    try:
        app()
    except (ValueError, OSError, ImportError) as error:
        print(f"constmem: {error}", file=sys.stderr)
        sys.exit(2)
    except RuntimeError as error:
        if type(error).__name__ not in ("StoppedError", "ConditioningError"):
            raise
        print(f"constmem: {error}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()

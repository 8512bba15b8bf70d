"""The commands on data, `constmem data list | prepare`."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from constmem.data import Listing

data_app = typer.Typer(help="Data sets: what is there, and how to prepare what is not.", no_args_is_help=True)

DataDir = Annotated[
    Path | None, typer.Option(envvar="CONSTMEM_DATA", help="Folder of prepared data sets (*.npz).")
]


@data_app.command(name="list")
def list_data(data_dir: DataDir = None) -> None:
    """What is found where, and what to download for what is not."""
    from constmem.data import hints, listing

    for line in (*listing(data_dir), "", *hints(data_dir)):
        print(line)


@data_app.command()
def prepare(
    what: Annotated[str, typer.Argument(help="emnist, celeba, mooc, reddit, wiki or easytpp.")],
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

    What is not as officially, in number or checksum, is told on a line that begins with warning:.
    """
    from functools import partial

    from constmem import data
    from constmem.core.checks import known
    from constmem.training.progress import counted

    with counted(f"preparing {what}") as progress:
        preparers: dict[str, Callable[..., Path]] = {
            "emnist": partial(data.prepare_emnist, progress=progress),
            "celeba": partial(data.prepare_celeba, partition=partition, progress=progress),
            **{jodie: partial(data.prepare_jodie, jodie) for jodie in ("mooc", "reddit", "wiki")},
            "easytpp": partial(data.prepare_easytpp, name=name, unit=unit),
        }
        known("data set to prepare", what, preparers)
        if data_dir is None:
            raise ValueError("say where to write: --data-dir FOLDER, or set CONSTMEM_DATA")
        if what != "easytpp" and (name or unit):
            raise ValueError(f"--name and --unit are for easytpp: those of {what} are known")
        if what != "celeba" and partition:
            raise ValueError(f"--partition is for celeba: {what} has no such list")
        before = data.listing(data_dir)
        path = preparers[what](source, data_dir, replace=replace)
    _say_prepared(path, before)


def _say_prepared(path: Path, before: "list[Listing]") -> None:
    from constmem.data.account import account, replaced

    told = account(path)
    for line in (path, *filter(None, [replaced(path, before)]), *told.found):
        print(line)
    for line in told.warnings:
        print(f"warning: {line}", file=sys.stderr)

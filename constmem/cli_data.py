"""The commands on data, `constmem data list | prepare`."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from constmem.data.catalogue import PREPARED

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
    what: Annotated[str, typer.Argument(help=", ".join(PREPARED))],
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
        made = data.prepare_pack(
            what,
            source,
            data_dir,
            partition=partition,
            name=name,
            unit=unit,
            replace=replace,
            progress=progress,
        )
    for line in (made.path, *made.found):
        print(line)
    for line in made.warnings:
        print(f"warning: {line}", file=sys.stderr)

"""The command that takes models elsewhere, `constmem export`."""

from pathlib import Path
from typing import Annotated

import typer


def register(app: typer.Typer) -> None:
    """Add the command to an application."""
    app.command()(export)


def export(
    model: Annotated[str, typer.Argument(help="A folder of a model, emnist, gp, or an estimator's file.")],
    out: Annotated[Path, typer.Option(help="Folder to write to.")],
    to: Annotated[str, typer.Option(help="onnx.")] = "onnx",
    half: Annotated[bool, typer.Option("--half", help="Weights as float16: half the size.")] = False,
) -> None:
    """Write a model for use without PyTorch: ONNX graphs, and a runner on onnxruntime and numpy.

    Models are CMANP, CMHP, and what `constmem fit` wrote of a table.

    constmem export emnist --to onnx --out digits
    """
    if to != "onnx":
        raise ValueError(f"models are exported to onnx, not to {to!r}: give --to onnx")
    from constmem.integrations.onnx import export_named

    export_named(model, out, half=half)
    print(f"wrote {out}\nnext, in that folder: import constmem_runner, which says how in its first lines")

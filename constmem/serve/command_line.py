"""The commands that show models to others, `constmem page`."""

from pathlib import Path
from typing import Annotated

import typer


def register(app: typer.Typer) -> None:
    """Add the commands to an application."""
    app.command()(page)


def page(
    out: Annotated[Path | None, typer.Option(help="Write it to this folder, for any web server.")] = None,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Else show it there; 0: any free one.")] = 8000,
) -> None:
    """A page that learns in the browser: a digit's pixels, a curve's points; nothing leaves it."""
    from constmem.serve.page import show_page, write_page

    if out is None:
        show_page(port)
    else:
        print(f"wrote {write_page(out)}: hand out this folder by any web server")

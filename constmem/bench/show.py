"""Rows of benchmarks as a table on a terminal."""

import sys
from typing import Any

SIZES = "points", "streams", "targets", "batch"


def cells(row: dict[str, Any]) -> list[str]:
    """What is measured, at which size, who, how long, how many times as fast as whom, and extra bytes."""
    sizes = ", ".join(f"{row[key]:,} {key}" for key in SIZES if key in row)
    faster = (
        f"{row['ratio']:g}x ({row['quartile_low']:g} to {row['quartile_high']:g})" if "ratio" in row else ""
    )
    against = f"{faster} {row['against']}" if faster else ""
    extra = row.get("extra_bytes")
    return [
        row["axis"],
        sizes,
        row["how"],
        f"{row['milliseconds']:,.3g}" if row["milliseconds"] < 100 else f"{row['milliseconds']:,.0f}",
        against,
        "" if extra is None else f"{extra / 2**20:,.1f}",
    ]


def show(rows: list[dict[str, Any]]) -> None:
    """A table of the rows of one benchmark."""
    from rich.console import Console
    from rich.table import Table

    if not rows:
        return
    grid = Table(title=rows[0]["bench"], title_justify="left")
    heads = "against", "size", "", "ms", "times as fast as", "extra MiB"
    for head in heads:
        grid.add_column(head, justify="right" if head in ("ms", "extra MiB") else "left")
    before: list[str] = []
    for row in rows:
        now = cells(row)
        if before and now[:2] != before[:2]:
            grid.add_section()
        grid.add_row(*(["", ""] if now[:2] == before[:2] else now[:2]), *now[2:])
        before = now
    Console(width=None if sys.stdout.isatty() else 120).print(grid)

"""Rows of benchmarks as a table on a terminal."""

import sys
from itertools import compress
from typing import Any

SIZES = "points", "streams", "targets", "batch"
HEADS = "against", "size", "", "ms", "times as fast as", "extra MiB"


def cells(row: dict[str, Any]) -> list[str]:
    """What is measured, at which size, who, how long, how many times as fast as whom, and extra bytes."""
    sizes = ", ".join(_counted(row[key], key) for key in SIZES if key in row)
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


def _counted(number: int, what: str) -> str:
    """So many of something, as one says it.

    >>> [_counted(1, "streams"), _counted(4096, "points"), _counted(16, "batch")]
    ['1 stream', '4,096 points', 'batch of 16']
    """
    if what == "batch":
        return f"batch of {number:,}"
    return f"{number:,} {what.removesuffix('s') if number == 1 else what}"


def show(rows: list[dict[str, Any]]) -> None:
    """A table of the rows of one benchmark, without the columns that nothing was measured for."""
    from rich.console import Console
    from rich.table import Table

    if not rows:
        return
    lines = [cells(row) for row in rows]
    told = [any(column) for column in zip(*lines, strict=True)]
    grid = Table(title=rows[0]["bench"], title_justify="left")
    for head in compress(HEADS, told):
        grid.add_column(head, justify="right" if head in ("ms", "extra MiB") else "left")
    before = [""] * len(HEADS)
    for now in lines:
        again = now[:2] == before[:2]
        if before[0] and not again:
            grid.add_section()
        grid.add_row(*compress(["", "", *now[2:]] if again else now, told))
        before = now
    Console(width=None if sys.stdout.isatty() else 120).print(grid)

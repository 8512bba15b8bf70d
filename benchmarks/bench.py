"""What the library costs on this machine: times side by side with the paper's algorithm and fused baselines.

python benchmarks/bench.py                       # tables: condition, update, query, train
python benchmarks/bench.py update --device cuda  # one of them, on a GPU
python benchmarks/bench.py --quick --json        # rows, in under a minute
"""

import argparse
import json
import sys
from collections.abc import Sequence
from itertools import compress
from pathlib import Path
from typing import Any

from benches import BENCHES, Plan
from record import provenance, write
from rich.console import Console
from rich.table import Table

from constmem.core import checks

SIZES = "points", "streams", "targets", "batch"
HEADS = "against", "size", "", "ms", "times as fast as", "extra MiB"


def bench(
    names: Sequence[str] = (), *, device: str = "cpu", quick: bool = False, quiet: bool = False,
    out: Path | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Run benchmarks by name (all, if none is given), and show and return their rows.

    Args:
        names: of condition, update, query, train.
        quick: smaller sizes and fewer rounds, to see that all is well.
        quiet: show nothing.
        out: a file for the rows, rewritten as they come.
    """
    plan = Plan(checks.device(device), quick)
    about = provenance(0, "uniform random points, 2 inputs, 3 outputs, random weights", plan.device)
    rows: list[dict[str, Any]] = []
    for name in names or BENCHES:
        mine: list[dict[str, Any]] = []
        for row in BENCHES[name](plan):
            mine.append(row)
            if out is not None:
                write(out, rows + mine, **about)
        rows += mine
        if not quiet:
            show(mine)
    return {**about, "rows": rows}


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


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="BENCH", help=f"of {', '.join(BENCHES)}; else all")
    parser.add_argument("--device", default="cpu", help="cpu, cuda, cuda:1, mps")
    parser.add_argument("--json", action="store_true", help="print rows as JSON instead of tables")
    parser.add_argument("--quick", action="store_true", help="small sizes, few rounds: under a minute")
    parser.add_argument("--out", type=Path, help="write the rows to this JSON file as they come")
    given = parser.parse_args()
    if unknown := set(given.names) - set(BENCHES):
        parser.error(f"no benchmark {', '.join(sorted(unknown))}: there are {', '.join(BENCHES)}")
    found = bench(given.names, device=given.device, quick=given.quick, quiet=given.json, out=given.out)
    if given.json:
        print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()

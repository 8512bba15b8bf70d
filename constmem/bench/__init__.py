"""What the library costs, side by side with the paper's algorithm and fused baselines, on this machine."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from constmem.bench.benches import BENCHES, Plan
from constmem.bench.record import provenance, write
from constmem.bench.show import show
from constmem.core import checks
from constmem.core.names import known

__all__ = ["BENCHES", "bench"]


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
    for name in names:
        known("benchmark", name, BENCHES)
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

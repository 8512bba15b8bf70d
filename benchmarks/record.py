"""Where the rows of benchmarks are committed."""

from pathlib import Path
from typing import Any

from constmem.bench.record import write

RESULTS = Path(__file__).parent / "results"


def save(name: str, rows: list[dict[str, Any]], **about: Any) -> None:
    """Write the rows of one benchmark, atomically."""
    print(f"wrote {write(RESULTS / f'{name}.json', rows, **about)}")

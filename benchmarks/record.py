"""What every benchmark shares: where and when it ran, how peaks and times are taken, where rows go."""

import gc
import json
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from constmem.files import write_text
from constmem.train import current_commit

RESULTS = Path(__file__).parent / "results"


def provenance(seed: int, data: str) -> dict[str, Any]:
    """Commit, device, versions, date, seed and data: what a row needs to be believed."""
    return {
        "commit": current_commit(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": f"{_processor()}, {torch.get_num_threads()} threads",
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "seed": seed,
        "data": data,
    }  # fmt: skip


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    names = [line.split(":")[1].strip() for line in info.read_text().splitlines() if "model name" in line]
    return names[0] if names else platform.processor()


def save(name: str, rows: list[dict[str, Any]], **about: Any) -> None:
    """Write the rows of one benchmark, atomically."""
    print(f"wrote {write(RESULTS / f'{name}.json', rows, **about)}")


def write(path: Path, rows: list[dict[str, Any]], **about: Any) -> Path:
    """Write rows with where they come from, atomically."""
    return write_text(path, json.dumps({**about, "rows": rows}, indent=1) + "\n")


def peak(work: Callable[[], Any]) -> int:
    """Bytes allocated at the worst moment of `work`, beyond what was there before."""
    import memray

    gc.collect()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "allocations"
        with memray.Tracker(path, native_traces=False):
            work()
        return int(memray.FileReader(path).metadata.peak_memory)


def seconds(work: Callable[[], Any]) -> float:
    """Wall time of one call."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def side_by_side(candidates: dict[str, Callable[[], Any]], *, rounds: int) -> dict[str, list[float]]:
    """Seconds of each candidate, taken in turns so that a noisy machine is noisy for all of them."""
    for work in candidates.values():
        work()
    times: dict[str, list[float]] = {name: [] for name in candidates}
    for _ in range(rounds):
        for name, work in candidates.items():
            times[name].append(seconds(work))
    return times


def ratio(times: dict[str, list[float]], slow: str, fast: str) -> dict[str, float]:
    """How many times faster: the median over rounds of the ratio inside one round, and its quartiles."""
    ratios = [a / b for a, b in zip(times[slow], times[fast], strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    return {"ratio": round(middle, 2), "quartile_low": round(low, 2), "quartile_high": round(high, 2)}

"""What every benchmark shares: where and when it ran, how peaks and times are taken, and what a row holds."""

import gc
import json
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from constmem.core.files import write_text
from constmem.training.folder import current_commit

RESULTS = Path(__file__).parent / "results"
Row = dict[str, Any]
Work = Callable[[], Any]


def provenance(seed: int, data: str, device: torch.device | None = None) -> Row:
    """Commit, device, versions, date, seed and data: what a row needs to be believed."""
    on_gpu = device is not None and device.type == "cuda"
    processor = f"{_processor()}, {torch.get_num_threads()} threads"
    return {
        "commit": current_commit(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": torch.cuda.get_device_name(device) if on_gpu else processor,
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "seed": seed,
        "data": data,
    }  # fmt: skip


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:  # not Linux
        lines = []
    names = [line.split(":")[1].strip() for line in lines if "model name" in line]
    return names[0] if names else platform.processor()


def write(path: Path, rows: list[Row], **about: Any) -> Path:
    """Write rows with where they come from, atomically."""
    return write_text(path, json.dumps({**about, "rows": rows}, indent=1) + "\n")


def save(name: str, rows: list[Row], **about: Any) -> None:
    """Write the rows of one benchmark to where they are committed."""
    print(f"wrote {write(RESULTS / f'{name}.json', rows, **about)}")


def peak(work: Work, device: torch.device | None = None) -> int | None:
    """Bytes allocated at the worst moment of `work` beyond what was there before; None if nobody can tell."""
    gc.collect()
    if device is not None and device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        work()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    if find_spec("memray") is None:
        return None
    import memray

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "allocations"
        with memray.Tracker(path, native_traces=False):
            work()
        return int(memray.FileReader(path).metadata.peak_memory)


def seconds(work: Work, device: torch.device | None = None) -> float:
    """Wall time of one call, waiting for the device included."""
    on_gpu = device is not None and device.type == "cuda"
    if on_gpu:
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    work()
    if on_gpu:
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


def side_by_side(
    candidates: dict[str, Work], *, rounds: int, device: torch.device | None = None
) -> dict[str, list[float]]:
    """Seconds of each candidate, taken in turns so that a noisy machine is noisy for all of them."""
    for work in candidates.values():
        work()
    times: dict[str, list[float]] = {name: [] for name in candidates}
    for _ in range(rounds):
        for name, work in candidates.items():
            times[name].append(seconds(work, device))
    return times


def ratio(times: dict[str, list[float]], slow: str, fast: str) -> dict[str, float]:
    """How many times faster: the median over rounds of the ratio inside one round, and its quartiles."""
    ratios = [a / b for a, b in zip(times[slow], times[fast], strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    return {"ratio": round(middle, 2), "quartile_low": round(low, 2), "quartile_high": round(high, 2)}

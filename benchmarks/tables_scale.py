"""What the learner of tables costs: a row, an answer, a state; shards merged; memory to ten million rows.

python benchmarks/tables_scale.py cost shards memory     # writes results/tables_scale.json

Shards need CONSTMEM_DATA. Seconds are of the CPU, on one thread, but those on two cores: these are of the
clock, so leave the machine alone meanwhile. Rows of the same part are replaced.
"""

import argparse
import json
import resource
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from record import RESULTS, provenance, save
from river import forest
from streams import CHUNK, TABLES, packed

from constmem import StreamingRegressor

Row = dict[str, Any]
SHARDS = 16
SIZES = (10_000, 100_000, 1_000_000, 10_000_000)


def drawn(count: int, seed: int = 0) -> tuple[Any, Any]:
    """Rows of eight columns, and a target that is a smooth function of three of them, with noise."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(count, 8))
    return x, np.sin(2 * x[:, 0]) + x[:, 1] * x[:, 2] + 0.1 * rng.normal(size=count)


def taken(work: Callable[[], Any], tries: int, clock: Callable[[], float] = time.process_time) -> float:
    """Seconds, of one core if not said otherwise, the median of several tries."""
    took = []
    for _ in range(tries):
        start = clock()
        work()
        took.append(clock() - start)
    return float(np.median(took))


def cost(_: int) -> Iterator[Row]:
    """One row learned, a thousand answered after it, chunks learned, beside the forest; bytes of a state."""
    x, y = drawn(30_000)
    estimator = StreamingRegressor().fit(x[:5000], y[:5000])
    estimator.predict(x[:1000])
    at = iter(range(5000, 20_000))
    learn = lambda: estimator.partial_fit(x[(i := next(at)) : i + 1], y[i : i + 1])  # noqa: E731
    yield {"what": "one row learned", "cpu_ms": 1e3 * taken(learn, 2000), "bar_ms": 0.5}
    for what, ask in (
        ("means", lambda: estimator.predict(x[:1000])),
        ("means and deviations", lambda: estimator.predict(x[:1000], return_std=True)),
    ):
        took = []
        for _ in range(20):
            learn()
            took.append(taken(ask, 1))
        what = f"1,000 rows predicted after one more, {what}"
        yield {"what": what, "cpu_ms": 1e3 * float(np.median(took)), "bar_ms": 30}
    chunk = slice(20_000, 20_000 + CHUNK)
    rate = CHUNK / taken(lambda: estimator.partial_fit(x[chunk], y[chunk]), 15)
    torch.set_num_threads(2)
    both = CHUNK / taken(lambda: estimator.partial_fit(x[chunk], y[chunk]), 15, time.perf_counter)
    square = torch.randn(1024, 1024, dtype=torch.float64)
    products = 2 * 1024**3 / taken(lambda: square @ square, 15, time.perf_counter)
    torch.set_num_threads(1)
    rival, start = forest.ARFRegressor(seed=0), time.process_time()
    for row, target in zip(x[:2000].tolist(), y[:2000].tolist(), strict=True):
        rival.learn_one(dict(enumerate(row)), target)
    other = 2000 / (time.process_time() - start)
    for cores, learned in (("of one core", rate), ("on two cores", both)):
        yield {
            "what": f"rows learned a second {cores}, in chunks", "rows_a_second": learned,
            "adaptive_random_forest": other, "ratio": learned / other,
        }  # fmt: skip
    yield {"what": "products of matrices in float64 on two cores", "flop_a_second": products}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model"
        estimator.save(path)
        yield {"what": "state", "bytes_in_memory": estimator.nbytes_, "bytes_saved": path.stat().st_size}


def shards(_: int) -> Iterator[Row]:
    """Estimators of shards, merged, against one that read all rows, in units of the target's deviation."""
    data = packed("tables_uci.npz")
    for name in TABLES:
        x, y, test = data[f"{name}/x"], data[f"{name}/y"], data[f"{name}/test"][0]
        train = np.random.default_rng(0).permutation(np.setdiff1d(np.arange(len(y)), test))
        frozen = StreamingRegressor().fit(x[train[:2048]], y[train[:2048]])
        whole = frozen.spawn()
        for start in range(0, len(train), CHUNK):
            whole.partial_fit(x[train[start : start + CHUNK]], y[train[start : start + CHUNK]])
        merged = frozen.spawn()
        for part in np.array_split(train, SHARDS):
            merged.merge(frozen.spawn().partial_fit(x[part], y[part]))
        gaps = [
            float(np.abs(a - b).max() / y.std())
            for a, b in zip(*(e.predict(x[test], return_std=True) for e in (whole, merged)), strict=True)
        ]
        yield {
            "what": name, "rows": len(train), "shards": SHARDS, "largest_gap_of_means": gaps[0],
            "largest_gap_of_deviations": gaps[1], "bar": 1e-6,
        }  # fmt: skip


def memory(most: int) -> Iterator[Row]:
    """The most memory the process has held after more and more rows, which are drawn as they are learned."""
    x, y = drawn(5000)
    estimator = StreamingRegressor().fit(x, y)
    seen, first = 0, 0
    for size in (size for size in SIZES if size <= most):
        while seen < size:
            estimator.partial_fit(*drawn(min(CHUNK, size - seen), seed=seen + 1))
            seen += min(CHUNK, size - seen)
        estimator.predict(x[:1000], return_std=True)
        held = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        first = first or held
        yield {
            "what": "peak memory", "rows": seen, "process_bytes": held, "more_than_at_first": held - first,
            "state_bytes": estimator.nbytes_,
        }  # fmt: skip


PARTS: dict[str, Callable[[int], Iterator[Row]]] = {"cost": cost, "shards": shards, "memory": memory}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--rows", type=int, default=SIZES[-1], help="at most, of the part memory")
    given = parser.parse_args()
    torch.set_num_threads(1)
    path = RESULTS / "tables_scale.json"
    for part in given.parts or PARTS:
        rows = json.loads(path.read_text())["rows"] if path.exists() else []
        rows = [row for row in rows if row["part"] != part]
        for row in PARTS[part](given.rows):
            tidy = {k: float(f"{v:.4g}") if isinstance(v, float) else v for k, v in row.items()}
            print(part, json.dumps(tidy), flush=True)
            rows.append({"part": part, **tidy, **provenance(0, part)})
            save("tables_scale", rows)


if __name__ == "__main__":
    main()

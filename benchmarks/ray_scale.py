"""Rows a second that Ray's workers condition on, one worker and two, and how far the states are apart.

python benchmarks/ray_scale.py [--rows 10000000]     # writes results/ray_scale.json

The rows are Parquet files on this disk, of two inputs and one output; the model is small (a state of 9 kB).
Workers are started before the clock; both numbers of workers take turns.
"""

import argparse
import logging
import os
import tempfile
import time
import warnings
from pathlib import Path

import numpy as np
import ray
import torch
from record import provenance, save
from service import SMALL

from constmem import CMANP
from constmem.integrations.ray import condition_dataset

FILES = 16


def write(folder: Path, rows: int) -> None:
    """Rows as files of one size."""
    import pandas as pd

    for part in range(FILES):
        random = np.random.default_rng(part)
        x = random.uniform(-1, 1, rows // FILES)
        frame = pd.DataFrame({"x": x, "y": np.sin(3 * x) + 0.1 * random.normal(size=len(x))})
        frame.to_parquet(folder / f"{part:02}.parquet")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=10_000_000)
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    path = os.environ.get("PYTHONPATH", "")
    ray.init(num_cpus=2, include_dashboard=False, logging_level=logging.ERROR, log_to_driver=False,
             runtime_env={"env_vars": {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}})  # fmt: skip
    ray.data.DataContext.get_current().enable_progress_bars = False
    torch.manual_seed(0)
    model = CMANP(**SMALL).eval()
    took: dict[int, list[float]] = {1: [], 2: []}
    states = {}
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder), given.rows)
        rows = ray.data.read_parquet(folder)
        condition_dataset(model, rows.limit(200_000), x=["x"], y=["y"])  # starts the workers
        for workers in (1, 2, 1, 2):
            start = time.perf_counter()
            states[workers] = condition_dataset(model, rows, x=["x"], y=["y"], workers=workers)
            took[workers].append(time.perf_counter() - start)
            print(workers, took[workers][-1], flush=True)
    apart = float((states[1].value - states[2].value).abs().max())
    assert int(states[1].count) == int(states[2].count) == FILES * (given.rows // FILES)
    found = [
        {"workers": workers, "rows": given.rows, "rows_a_second": round(given.rows / min(times)),
         "seconds": times, "states_apart": apart} for workers, times in took.items()
    ]  # fmt: skip
    print(found, f"{min(took[1]) / min(took[2]):.2f} times")
    save("ray_scale", found, **provenance(0, "rows drawn for this"))


if __name__ == "__main__":
    main()

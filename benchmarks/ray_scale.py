"""Rows a second that Ray's workers condition on, one worker and two, and how far states are from one pass.

python benchmarks/ray_scale.py [--rows 10000000] [--model small,paper] [--rounds 2]
python benchmarks/ray_scale.py --table     # the cost model in docs/streams.md, from the committed rows

The rows are Parquet files on this disk: an input, an output, and one of 1,000 keys for the grouped form. A
worker has one CPU and one thread, and does one task at a time. A task reads four files and observes them:
there is no other work on the dataset. Workers are started before the clock; both numbers of workers take
turns. CPU seconds are those of all workers, of the busiest, and of the process that merges what they send: on
cores that others use, too, they say what wall time cannot. Rows go to results/ray_scale.json as they come;
those of the same model and form are replaced.
"""

import argparse
import json
import logging
import os
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from record import RESULTS, Row, provenance, save, seconds
from service import SMALL, used

from constmem import CMANP
from constmem.core.monoid import merged
from constmem.integrations.ray import ROWS, condition_dataset, condition_groups_dataset
from constmem.streams.journal import Layout
from constmem.streams.pool import condition_groups

FILES, TASKS, KEYS = 16, 4, 1000
MODELS: dict[str, dict[str, Any]] = {"small": SMALL, "paper": {"dim_x": 1, "dim_y": 1}}
COLUMNS: dict[str, Any] = {"x": ["x"], "y": ["y"]}
MERGED = 256  # states, to time a merge
MARKS = "<!-- cost model: benchmarks/ray_scale.py --table -->", "<!-- end of the cost model -->"


def write(folder: Path, rows: int) -> None:
    """Rows as files of one size."""
    for part in range(FILES):
        random = np.random.default_rng(part)
        x = random.uniform(-1, 1, rows // FILES)
        frame = pd.DataFrame({"x": x, "y": np.sin(3 * x) + 0.1 * random.normal(size=len(x))})
        frame.assign(key=random.integers(KEYS, size=len(x))).to_parquet(folder / f"{part:02}.parquet")


def one_pass(model: CMANP, folder: Path, grouped: bool) -> Any:
    """The states of all rows, by one process without Ray, in the order of their keys."""
    frames = [pd.read_parquet(path) for path in sorted(folder.iterdir())]
    table = pd.concat(frames)
    x, y = (torch.from_numpy(table[[name]].to_numpy()).float() for name in "xy")
    with torch.no_grad():
        if not grouped:
            return model.condition(x[None], y[None])
        keys, states = condition_groups(model, table["key"].to_numpy(), x, y)
    return states.select(torch.from_numpy(np.argsort(np.array(keys, np.int64))))


def by_ray(model: CMANP, folder: Path, workers: int, grouped: bool) -> Any:
    """The same by workers."""
    import ray

    rows = ray.data.read_parquet(str(folder), concurrency=workers, override_num_blocks=TASKS)
    rows.context.op_resource_reservation_enabled = False  # else the first second is one worker's
    how: dict[str, Any] = COLUMNS | {"workers": workers, "batch_size": None}
    if not grouped:
        return condition_dataset(model, rows, **how)
    pool = condition_groups_dataset(model, rows, key="key", **how)
    return pool.state(sorted(pool.keys, key=int))


def spent() -> dict[int, float]:
    """CPU seconds of each of Ray's workers."""
    found = {}
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if (path / "cmdline").read_bytes().startswith(b"ray::"):
                found[int(path.name)] = used(int(path.name))
        except OSError:  # it has ended
            continue
    return found


def measured(name: str, folder: Path, rows: int, rounds: int, grouped: bool) -> list[Row]:
    """A row for each number of workers."""
    torch.manual_seed(0)
    model = CMANP(**MODELS[name]).eval()
    expected = one_pass(model, folder, grouped)
    took: dict[int, list[Row]] = {1: [], 2: []}
    for workers in (1, 2) * rounds:
        before, own, start = spent(), time.process_time(), time.perf_counter()
        state = by_ray(model, folder, workers, grouped)
        wall, own = time.perf_counter() - start, time.process_time() - own
        cpu = [now - before.get(pid, 0.0) for pid, now in spent().items()]
        apart = float((state.value - expected.value).abs().max())
        assert torch.equal(state.count, expected.count)
        figures = {
            "seconds": wall, "cpu_seconds": sum(cpu), "busiest_cpu_seconds": max(cpu),
            "merging_cpu_seconds": own, "apart": apart,
        }  # fmt: skip
        took[workers].append({key: float(f"{value:.4g}") for key, value in figures.items()})
        print(name, "grouped" if grouped else "whole", workers, took[workers][-1], flush=True)
    layout = Layout(model, model.empty(1), single=False)
    sent = layout.rows(state.select(slice(0, 1)))
    merge = min(seconds(lambda: merged(layout.of_rows(sent) for _ in range(MERGED))) for _ in "123")
    return [
        {
            "model": name, "grouped": grouped, "workers": workers, "rows": rows, "rounds": rounds,
            "rows_a_second": round(rows / min(each["seconds"] for each in found)),
            "rows_a_cpu_second": round(rows / min(each["cpu_seconds"] for each in found)),
            "each": found, "state_bytes": model.empty(1).nbytes, "merge_ms": round(1e3 * merge / MERGED, 3),
        }
        for workers, found in took.items()
    ]  # fmt: skip


def cost_model(rows: list[Row]) -> str:
    """What conditioning costs, as Markdown: measured, and multiplied out."""
    lines = [
        "| | rows a second, one worker | two workers | rows a CPU second | bytes a state | a merge |",
        "|---|---|---|---|---|---|",
    ]
    pairs = {(r["model"], r["grouped"]): {} for r in rows}
    for row in rows:
        pairs[row["model"], row["grouped"]][row["workers"]] = row
    for (name, grouped), by in pairs.items():
        one, two = by[1], by[2]
        what = f"{name} model, " + (f"{KEYS:,} groups" if grouped else "one state")
        faster = two["rows_a_second"] / one["rows_a_second"]
        lines.append(
            f"| {what} | {one['rows_a_second']:,} | {two['rows_a_second']:,} ({faster:.2f} times) "
            f"| {one['rows_a_cpu_second']:,} | {one['state_bytes']:,} | {one['merge_ms']:g} ms |"
        )
    lines += ["", "| rows, one state | small model | paper's size |", "|---|---|---|"]
    for power in (7, 9, 10, 12):
        cells = [_cells(pairs[name, False][1], 10.0**power) for name in MODELS]
        lines.append(f"| 1e{power} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _cells(row: Row, rows: float) -> str:
    """Core hours of so many rows, and wall time of 1,000 cores with the merge of what they send."""
    cores = 1000
    work = rows / row["rows_a_cpu_second"]
    merge = rows / ROWS * row["merge_ms"] / 1e3  # by one process, which takes in the states as they come
    wall = _time(max(work / cores, merge))
    return f"{_time(work)} of a core; {cores:,} cores: {wall}, {_time(merge)} of merging"


def _time(spent: float) -> str:
    for name, length in (("days", 86400.0), ("hours", 3600.0), ("minutes", 60.0)):
        if spent >= 2 * length:
            return f"{spent / length:,.0f} {name}"
    return f"{spent:.0f} s" if spent >= 100 else f"{spent:.2g} s"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--model", default=",".join(MODELS), help=", ".join(MODELS))
    parser.add_argument("--rounds", type=int, default=2, help="of each number of workers")
    parser.add_argument("--table", action="store_true", help="write the cost model into docs/streams.md")
    parser.add_argument("--dry", action="store_true", help="print, and write nothing")
    given = parser.parse_args()
    path = RESULTS / "ray_scale.json"
    if given.table:
        page = RESULTS.parents[1] / "docs" / "streams.md"
        before, _, rest = page.read_text().partition(MARKS[0])
        after = rest.partition(MARKS[1])[2]
        made = cost_model(json.loads(path.read_text())["rows"])
        page.write_text(f"{before}{MARKS[0]}\n{made}\n{MARKS[1]}{after}")
        return
    import ray

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    own = {"PYTHONPATH": os.environ.get("PYTHONPATH", ""), "OMP_NUM_THREADS": "1"}
    ray.init(num_cpus=2, include_dashboard=False, logging_level=logging.ERROR, log_to_driver=False,
             runtime_env={"env_vars": own})  # fmt: skip
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    context.use_datasource_v2 = False  # else up to 32 processes are started that read the ends of files
    logging.getLogger("ray.data").setLevel(logging.ERROR)
    whole = FILES * (given.rows // FILES)
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder), whole)
        by_ray(CMANP(**SMALL).eval(), Path(folder), 2, grouped=True)  # starts the workers
        for name in given.model.split(","):
            for grouped in (False, True):
                rows = json.loads(path.read_text())["rows"] if path.exists() else []
                kept = [r for r in rows if (r["model"], r["grouped"]) != (name, grouped)]
                found = measured(name, Path(folder), whole, given.rounds, grouped)
                kept += [row | provenance(0, "rows drawn for this") for row in found]
                if not given.dry:
                    save("ray_scale", sorted(kept, key=lambda r: (r["model"] != "small", r["grouped"])))


if __name__ == "__main__":
    main()

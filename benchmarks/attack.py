"""The attack's long form: a hundred thousand damaged files and odd calls, a thousand kills, races, limits.

python benchmarks/attack.py             # ten minutes on two cores; writes results/attack.json

What is tried, and what must hold, is in tests/attack; benchmarks/tables.py puts the rows into
docs/reliability.md.
"""

import argparse
import json
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from record import RESULTS, provenance, save

ROOT = Path(__file__).parents[1]
KILLS = 3  # of one case
WHAT = {  # what a kind of attack does, and what must come of it
    "states": "files of states of every kind: bits flipped, cut, mixed, headers and numbers edited",
    "streams": "files of streams, the same",
    "models": "folders of models, the same: `config.json` and `model.safetensors`",
    "estimators": "files of estimators, the same",
    "data of runs": "the rows and events that a run keeps, the same",
    "tables": "CSV files for `Table.read`, beside another reader",
    "table files": "CSV and Parquet files for `constmem fit`, beside other readers",
    "event files": "CSV, JSON and JSON Lines of events, beside another reader",
    "packs": "prepared packs (`.npz`)",
    "archives": "archives for `constmem data prepare`",
    "models of points": "`condition`, `update`, `merge`, `query` of ten models, beside one task at a time",
    "models of events": "the same of four event models, beside all events at once",
    "states and moments": "the algebra, beside NumPy in float64",
    "calls of streams": "steps of a `Stream`, beside a list of all points",
    "calls of estimators": "steps of the estimators, beside all rows at once",
    "calls of stores": "steps of a `Store`, whose process may end at any one, beside lists of rows",
    "calls of pools": "steps of a `StreamPool`, the same",
    "blocks": "one `CMAB` alone: observed in parts, merged, read, beside NumPy",
    "scales": "`Scales` of rows and a model in such units, beside NumPy",
    "rows of river": "the adapter for river, beside the estimators",
    "runs": "damaged folders of runs, read and resumed: the same to the last bit, or refused",
    "commands": "the command line with damaged files and odd words: an answer or one line",
    "killed streams": "kills while a stream is saved after each point",
    "killed estimators": "kills while an estimator is saved after each part",
    "killed updates": "kills of `constmem update`",
    "killed training": "kills of training, resumed to the end",
    "killed compiling": "kills while machine code is compiled",
    "threads on a stream": "four writers and two readers on one `Stream`",
    "threads on an estimator": "four writers and two readers on one estimator",
    "little memory": "too little memory (`RLIMIT_AS`)",
    "no threads": "no thread can be started (`RLIMIT_NPROC`)",
    "no room": "no room for a file (`RLIMIT_FSIZE`, a full disk, a read-only folder)",
}


def times(kind: str, cases: int) -> int:
    """How often something was tried in so many cases."""
    return cases * KILLS if kind.startswith("killed") else cases


def table() -> str:
    """What was tried and what held; nothing where it was never run."""
    path = RESULTS / "attack.json"
    if not path.exists():
        return ""
    content = json.loads(path.read_text())
    lines = ["| what | tried | answered right | refused | neither |", "|---|---|---|---|---|"]
    for row in content["rows"]:
        kind = row["kind"]
        counts = (f"{times(kind, row[key]):,}" for key in ("tried", "right", "refused"))
        lines.append(f"| {WHAT[kind]} | {' | '.join(counts)} | {len(row['findings'])} |")
    fuzzed, killed = totals(content["rows"])
    commits = dict.fromkeys(
        (row.get("commit") or content["commit"] or "unknown")[:7] for row in content["rows"]
    )
    made = f"{content['date'][:10]}, {'commit' if len(commits) == 1 else 'commits'} {', '.join(commits)}"
    lines += ["", f"{fuzzed:,} damaged files and calls, {killed:,} kills; {content['device']}, {made}."]
    return "\n".join(lines)


def totals(rows: list[dict[str, Any]]) -> tuple[int, int]:
    """Files and calls, and kills."""
    kills = sum(times(row["kind"], row["tried"]) for row in rows if row["kind"].startswith("killed"))
    last = ("threads on", "little", "no ")
    fuzzed = sum(row["tried"] for row in rows if not row["kind"].startswith(("killed", *last)))
    return fuzzed, kills


def main() -> None:
    parser = argparse.ArgumentParser(description="The attack's long form.")
    parser.add_argument("--workers", type=int, default=2, help="processes at once; 2 if not given")
    workers = parser.parse_args().workers
    sys.path.insert(0, str(ROOT))
    from tests.attack.campaign import GROUPS

    about, rows, failed = provenance(0, "made at random"), [], 0
    for group in GROUPS:
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "rows.json"
            words = [sys.executable, "-m", "tests.attack", "--long", "--group", group, "--out", str(out)]
            done = subprocess.run([*words, "--workers", str(workers)], cwd=ROOT, check=False)
            rows += json.loads(out.read_text())["rows"]
        failed += done.returncode
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        save("attack", rows, **about, cpu_seconds=round(used.ru_utime + used.ru_stime))
    sys.exit(failed)


if __name__ == "__main__":
    main()

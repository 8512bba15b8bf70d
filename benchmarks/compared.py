"""What became faster or slower since another checkout: conditioning, update, read, query, training, loading.

python benchmarks/compared.py OTHER [--device cuda] [--rounds 5]     # OTHER: a folder with another constmem/
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]


def measure(device: str, least: float = 0.3) -> dict[str, float]:
    """Milliseconds of each verb, in the checkout that this process imports from."""
    import torch

    from constmem import CMANP

    torch.manual_seed(0)
    if device == "cpu":
        torch.set_num_threads(1)
    model = CMANP(dim_x=2, dim_y=3).eval().to(device)
    n = 1_000_000 if device == "cuda" else 20_000
    x, y = torch.rand(1, n, 2, device=device), torch.rand(1, n, 3, device=device)
    tasks = [torch.rand(16, 100, c, device=device) for c in (2, 3, 2, 3)]
    learner = CMANP(dim_x=2, dim_y=3).to(device)
    optimiser = torch.optim.Adam(learner.parameters(), lr=1e-4)
    with torch.no_grad():
        state = model.condition(x[:, :1000], y[:, :1000])

    def step() -> None:
        optimiser.zero_grad()
        learner.loss(*tasks).backward()
        optimiser.step()

    def updates() -> None:
        now = state
        for _ in range(20):
            now = model.update(now, x[:, :1], y[:, :1])

    work = {
        "condition": (lambda: model.condition(x, y), 1),
        "update of one point": (updates, 20),
        "read": (lambda: model.read(state), 1),
        "query of 200 targets": (lambda: model.query(state, x[:, :200]), 1),
        "training step": (step, 1),
        "loading shipped weights": (lambda: CMANP.from_pretrained("emnist", device=device), 1),
    }
    found = {}
    for name, (run, calls) in work.items():
        with torch.set_grad_enabled(name == "training step"):
            times, start = [], time.perf_counter()
            while len(times) < 8 or time.perf_counter() - start < least:
                if device == "cuda":
                    torch.cuda.synchronize()
                before = time.perf_counter()
                run()
                if device == "cuda":
                    torch.cuda.synchronize()
                times.append((time.perf_counter() - before) / calls)
        found[name] = 1e3 * statistics.median(times[3:])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("other", type=Path, help="a folder with another constmem/")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/compared.json")
    parser.add_argument("--name", default="", help="of the other checkout: its commit")
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.measure:
        print(json.dumps(measure(asked.device)))
        return
    import torch
    from record import provenance, write

    times: dict[str, dict[str, list[float]]] = {"other": {}, "this": {}}
    for i in range(asked.rounds):
        order = (("other", asked.other), ("this", ROOT))
        for which, where in order if i % 2 == 0 else order[::-1]:
            command = [sys.executable, __file__, str(where), "--device", asked.device, "--measure"]
            environment = os.environ | {"PYTHONPATH": str(where.resolve())}
            done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
            for name, taken in json.loads(done.stdout.splitlines()[-1]).items():
                times[which].setdefault(name, []).append(taken)
    rows = []
    for name, own in times["this"].items():
        before = times["other"][name]
        ratios = [a / b for a, b in zip(own, before, strict=True)]
        row = {
            "what": name,
            "device": asked.device,
            "milliseconds": round(statistics.median(own), 4),
            "before": round(statistics.median(before), 4),
            "ratio": round(statistics.median(ratios), 3),
            "ratios": [round(r, 3) for r in sorted(ratios)],
        }
        rows.append(row)
        times_of = f"{row['before']:9.4f} -> {row['milliseconds']:9.4f} ms"
        print(f"{name:24} {times_of}  {row['ratio']}x {row['ratios']}", flush=True)
    data = "uniform random points, 2 inputs, 3 outputs; ratios: our time over the other's in each round"
    about = provenance(0, data, torch.device(asked.device))
    kept = json.loads(asked.out.read_text())["rows"] if asked.out.exists() else []
    rows += [row for row in kept if row["device"] != asked.device]
    write(asked.out, rows, other=asked.name or str(asked.other), **about)


if __name__ == "__main__":
    main()

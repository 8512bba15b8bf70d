"""Run the attack, or one case of it again: python -m tests.attack --help."""

import argparse
import json
import os
import re
import sys
import tempfile
import time

os.environ["CONSTMEM_COMMIT"] = "none"  # git is not under attack

import torch

torch.set_num_threads(1)
tempfile.tempdir = "/dev/shm"

from tests.attack import calls, given, kills, limits, pool, runs, shells, stored

def main() -> None:
    parser = argparse.ArgumentParser(description="Attack the library: damaged files, odd calls.")
    parser.add_argument("--cases", type=int, default=1000, help="of each kind")
    parser.add_argument("--kinds", default="", help="a,b; all if not given")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--again", type=int, help="this case of the kind, in this process")
    asked = parser.parse_args()
    kinds = stored.kinds() | given.kinds() | calls.kinds() | shells.kinds() | runs.kinds() | kills.kinds() | limits.kinds()
    if asked.kinds:
        kinds = {name: case for name, case in kinds.items() if name in asked.kinds.split(",")}
    cases = {name: (case, asked.cases) for name, case in kinds.items()}
    if asked.again is not None:
        print(pool.again(cases, asked.kinds, asked.again, seed=asked.seed))
        return
    for name in cases:
        start = time.process_time(), time.monotonic()
        t = pool.run({name: cases[name]}, seed=asked.seed)[name]
        print(time.strftime("%H:%M:%S"), name, t.tried, t.right, t.refused, len(t.findings), f"{time.monotonic()-start[1]:.1f}s", flush=True)
        seen = {}
        for words in t.findings:
            lines = [l for l in words.splitlines() if "^^^" not in l]
            key = re.sub(r"[0-9]+", "#", lines[0][len(name):][:90]) + "".join(lines[-2:])
            seen.setdefault(key, []).append(words)
        for group in sorted(seen.values(), key=len, reverse=True)[:15]:
            lines = [l[:230] for l in group[0].splitlines() if "^^^" not in l]
            print("  x", len(group), "\n      ".join([lines[0], *lines[-6:]] if len(lines)>7 else lines))

main()

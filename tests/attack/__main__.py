"""The attack from the command line: python -m tests.attack --help."""

import argparse
import contextlib
import ctypes
import os
import sys
import tempfile
import time

os.environ["CONSTMEM_COMMIT"] = "none"  # asking git takes longer than most cases
os.environ["OMP_NUM_THREADS"] = "1"  # threads of PyTorch's do not survive a fork
with contextlib.suppress(AttributeError):  # elsewhere than in glibc
    ctypes.CDLL(None).mallopt(-8, 1)  # one arena: others hold 64 MB in reserve, which no limit on memory sees

import torch

from tests.attack import campaign, pool


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Attack the library: damaged files, odd calls, kills, limits."
    )
    parser.add_argument("--long", action="store_true", help="all cases; otherwise the short form")
    parser.add_argument("--only", help="so many cases of some kinds: states=100,packs=50")
    parser.add_argument("--group", choices=campaign.GROUPS, help="all kinds of one group")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--again", type=int, help="one case of the one kind in --only, in this process")
    parser.add_argument("--broken", choices=campaign.BROKEN, help="break a line on purpose first")
    parser.add_argument("--out", help="write rows as JSON to this file")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    tempfile.tempdir = pool.scratch()
    if asked.broken:
        campaign.BROKEN[asked.broken]()
    only = None
    if asked.only:
        only = {name: int(count) for name, count in (each.split("=") for each in asked.only.split(","))}
    form = campaign.LONG if asked.long else campaign.SHORT
    if asked.group:
        only = {kind: counts[form] for kind, counts in campaign.GROUPS[asked.group][1].items()}
    if asked.again is not None and only:
        cases = campaign.counted(form, only)
        print(pool.again(cases, next(iter(only)), asked.again, seed=asked.seed))
        return
    start = time.monotonic()
    tallies = campaign.run(form, seed=asked.seed, only=only, workers=asked.workers)
    for kind, tally in tallies.items():
        print(f"{kind}: {tally.tried} tried, {tally.right} right, {tally.refused} refused", flush=True)
        for words in tally.findings[:5]:
            print(f"  {words}")
    if asked.out:
        from constmem.core.files import write_text

        write_text(asked.out, pool.as_json(tallies, seconds=time.monotonic() - start))
    sys.exit(any(tally.findings for tally in tallies.values()))


if __name__ == "__main__":
    main()

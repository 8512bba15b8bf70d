"""What a GPU makes of it, side by side with the paper's algorithm: conditioning, updates, reads, training.

    python benchmarks/gpu.py                          # two minutes; writes results/gpu.json
    python benchmarks/gpu.py tiles condition          # only these sections
    python benchmarks/gpu.py --out FOLDER/gpu.json

Times are wall clock, launches and waiting included, of a model at the paper's size with the weights that
come with the package. A section that fails prints its traceback, and the others go on.
"""

import argparse
import time
import traceback
from pathlib import Path

import gpu_conditioning
import gpu_phases
import gpu_training
import torch
from record import RESULTS

from constmem.bench.record import provenance, write
from constmem.kernels import gpu

SECTIONS = {
    section.__name__: section
    for section in (
        gpu_conditioning.ceilings, gpu_conditioning.tiles, gpu_conditioning.stages, gpu_conditioning.errors,
        gpu_conditioning.condition, gpu_conditioning.streamed, gpu_phases.update, gpu_phases.read,
        gpu_phases.small, gpu_conditioning.likelihood, gpu_training.training, gpu_training.training_errors,
        gpu_training.training_tiles,
    )
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("sections", nargs="*", help=f"of {', '.join(SECTIONS)}; all if none")
    parser.add_argument("--out", type=Path, default=RESULTS / "gpu.json")
    parser.add_argument("--seconds", type=float, default=110.0, help="start no section after so long")
    options = parser.parse_args()
    unknown = set(options.sections) - SECTIONS.keys()
    if unknown:
        parser.error(f"unknown sections: {', '.join(sorted(unknown))}")
    about = provenance(0, "pixels of random strokes, 2 inputs, 1 output", torch.device("cuda"))
    begun, rows = time.perf_counter(), []
    for name in options.sections or SECTIONS:
        here = time.perf_counter()
        if here - begun > options.seconds:
            print(f"-- {name}: left out, {options.seconds:.0f} s are over", flush=True)
            continue
        try:
            with torch.no_grad():
                for row in SECTIONS[name]():
                    rows.append({"section": name, **row})
                    print(row, flush=True)
                    write(options.out, rows, **about)
        except Exception:
            traceback.print_exc()
            gpu._failures.clear()
        print(f"-- {name}: {time.perf_counter() - here:.1f} s", flush=True)
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()

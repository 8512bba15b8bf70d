"""What a GPU makes of it, side by side with the paper's algorithm: conditioning, updates, reads.

    python benchmarks/gpu.py                          # two minutes; writes results/gpu.json
    python benchmarks/gpu.py tiles condition          # only these sections
    python benchmarks/gpu.py --out FOLDER/gpu.json

Times are wall clock, launches and waiting included, of a model at the paper's size with the weights that
come with the package. A section that fails prints its traceback, and the others go on.
"""

import gpu_conditioning
import gpu_phases
import on_gpu

SECTIONS = (
    gpu_conditioning.ceilings, gpu_conditioning.tiles, gpu_conditioning.stages, gpu_conditioning.errors,
    gpu_conditioning.condition, gpu_conditioning.streamed, gpu_phases.update, gpu_phases.read,
    gpu_phases.small, gpu_conditioning.likelihood,
)  # fmt: skip

if __name__ == "__main__":
    on_gpu.measure("gpu", SECTIONS, __doc__)

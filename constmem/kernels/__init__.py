"""How it is computed: functions on tensors, each of which takes the fastest path that can serve it.

- `attend` (and `attend_backward`) is attention by PyTorch's operators, `scores` and `EMPTY` what it means.
- `observe`, `update` and `merge` make and join states: by machine code on a CPU, by kernels on a GPU. `Plans`
  lay out the weights for both, of which a `Snapshot` tells whether they are still the same.
- `fold` conditions while learning; `attention` and `feed_forward` are whole layers: kernels on a GPU.
- A `Program` of `Layer`s reads, `quantiles`, `gap_vectors` and `turned` predict events: machine code.
- `Graphs` captures what a model does over and over on a GPU.
- `absorb`, `joined`, `chunk` and `cache_folder` are what these share with those who call them.

All but the first return None where no such path serves, and PyTorch's operators do. A path that fails says so
in one line of the log and is not tried again: `PATHS` shows why (`failed`), `reset()` forgets it.
"""

from constmem.kernels import gpu
from constmem.kernels.cpu import Event
from constmem.kernels.cpu_reading import Kind, Layer, Program, gap_vectors, quantiles, serves, turned
from constmem.kernels.gpu import absorb
from constmem.kernels.gpu_fold import Chunk, fold, joined
from constmem.kernels.graphs import Graphs
from constmem.kernels.layers import attention, feed_forward
from constmem.kernels.observing import Plans, Snapshot, chunk, merge, observe, update
from constmem.kernels.operators import EMPTY, attend, attend_backward, scores
from constmem.kernels.paths import PATHS, cache_folder, library

__all__ = [
    "EMPTY", "PATHS", "Chunk", "Event", "Graphs", "Kind", "Layer", "Plans", "Program", "Snapshot", "absorb",
    "attend", "attend_backward", "attention", "cache_folder", "chunk", "feed_forward", "fold",
    "gap_vectors", "joined", "merge", "observe", "quantiles", "reset", "scores", "serves", "turned", "update",
]  # fmt: skip


def reset() -> None:
    """Let all paths be tried again, as in a new process."""
    for path in PATHS:
        path.reset()
    library.cache_clear()
    gpu.forget()

"""What an exported model costs on onnxruntime, and how far it is from PyTorch: the shipped digits.

python benchmarks/onnx_cost.py              # two or three minutes
"""

import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import record
import torch

from constmem import CMANP
from constmem.integrations.onnx import export
from constmem.integrations.onnx_runner import Runner

UPDATES, ROUNDS = 20_000, 100
RESIDENT = (  # of a process of its own, at the most
    "from constmem_runner import Runner; r = Runner('.'); r.observe([[0, 0]], [[0]]); r.predict([[0, 0]]); "
    "print(*[line.split()[1] for line in open('/proc/self/status') if line.startswith('VmHWM')])"
)


def fastest(candidates: dict[str, record.Work]) -> dict[str, float]:
    """Milliseconds of the fastest round of each, taken in turns: what others do on the machine only adds."""
    times = record.side_by_side(candidates, rounds=ROUNDS)
    return {f"{name}_ms": round(1e3 * min(found), 3) for name, found in times.items()}


def measured(folder: Path, model: CMANP, *, half: bool) -> dict[str, Any]:
    export(model, folder, half=half)
    generator = torch.Generator().manual_seed(0)
    x = 2 * torch.rand(1, UPDATES, 2, generator=generator) - 1
    y = torch.rand(1, UPDATES, 1, generator=generator) - 0.5
    xt, runner = 2 * torch.rand(1, 784, 2, generator=generator) - 1, Runner(folder)
    for i in range(UPDATES):
        runner.observe(x[:, i : i + 1], y[:, i : i + 1])
    with torch.no_grad():
        state = model.condition(x, y)
        wanted = model.query(state, xt)
    mean, std = runner.predict(xt)
    one, given = runner.fork(), {"value": runner.state["value"]}
    memory = runner._run("read", **given)[0]
    resident = subprocess.run([sys.executable, "-c", RESIDENT], cwd=folder, capture_output=True, check=True)
    first, points = (x[:, :1], y[:, :1]), {"memory": memory, "xt": xt.double().numpy()}
    with torch.no_grad():
        decoded = model.read(state)
        ours = {
            "update": lambda: one.observe(*first),
            "read": lambda: runner._run("read", **given),
            "predict_784": lambda: runner._run("predict", **points),
        }
        theirs = {
            "update": lambda: model.update(state, *first),
            "read": lambda: model.read(state),
            "predict_784": lambda: model.predict(decoded, xt),
        }
        times: dict[str, float] = {}
        for name, work in ours.items():  # each by itself: after a reading an update meets cold caches
            times |= fastest({name: work, f"{name}_pytorch": theirs[name]})
    return {
        "weights": "float16" if half else "float32",
        "megabytes": round(sum(path.stat().st_size for path in folder.glob("*.onnx")) / 1e6, 2),
        "resident_megabytes": round(int(resident.stdout) / 1e3),
        "updates": UPDATES,
        "state_off_by": float(np.abs(runner.state["value"] - state.value.numpy()).max()),
        "mean_off_by": float(np.abs(mean - wanted.mean.numpy()).max()),
        "std_off_by": float(np.abs(std - wanted.stddev.numpy()).max()),
        **times,
    }


def main() -> None:
    torch.set_num_threads(1)
    rows = []
    for half in (False, True):
        model = CMANP.from_pretrained("emnist")
        if half:
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.copy_(parameter.half())
        with tempfile.TemporaryDirectory() as folder:
            row = measured(Path(folder), model, half=half)
        print(row)
        rows.append(row | record.provenance(0, "random points"))
    record.save("onnx_cost", rows, command="python benchmarks/onnx_cost.py")


if __name__ == "__main__":
    main()

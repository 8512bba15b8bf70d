"""What exported models cost on onnxruntime, and how far they are from PyTorch: the shipped weights, a table.

python benchmarks/onnx_cost.py              # five minutes
"""

import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import record
import torch

from constmem import CMANP, CMHP, Events, StreamingRegressor
from constmem.data import power_plant
from constmem.integrations.onnx import export
from constmem.integrations.onnx_runner import EventRunner, Runner
from constmem.integrations.onnx_table_runner import TableRunner

UPDATES, ROUNDS = 20_000, 100
RESIDENT = (  # of a process of its own, at the most
    "from constmem_runner import Runner; r = Runner('.'); r.observe([[0, 0]], [[0]]); r.predict([[0, 0]]); "
    "print(*[line.split()[1] for line in open('/proc/self/status') if line.startswith('VmHWM')])"
)


def fastest(candidates: dict[str, record.Work]) -> dict[str, float]:
    """Milliseconds of the fastest round of each, taken in turns: what others do on the machine only adds."""
    times = record.side_by_side(candidates, rounds=ROUNDS)
    return {f"{name}_ms": round(1e3 * min(found), 3) for name, found in times.items()}


def against(ours: dict[str, record.Work], theirs: dict[str, record.Work]) -> dict[str, float]:
    """The fastest of each of ours and of PyTorch's, a pair at a time."""
    with torch.no_grad():
        pairs = [fastest({name: work, f"{name}_pytorch": theirs[name]}) for name, work in ours.items()]
    return {name: ms for pair in pairs for name, ms in pair.items()}


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
    one, memory = runner.fork(), runner.read()
    resident = subprocess.run([sys.executable, "-c", RESIDENT], cwd=folder, capture_output=True, check=True)
    first, targets = (x[:, :1], y[:, :1]), {"1": xt[:, :1], "784": xt}
    given = {name: {"xt": t.double().numpy()} for name, t in targets.items()}
    with torch.no_grad():
        decoded = model.read(state)
        ours: dict[str, record.Work] = {
            "update": lambda: one.observe(*first), "read": lambda: runner._run("read"),
        }  # fmt: skip
        theirs: dict[str, record.Work] = {
            "update": lambda: model.update(state, *first), "read": lambda: model.read(state),
        }  # fmt: skip
        for name, t in targets.items():  # what was read is at hand, and then not
            points = given[name]
            ours[f"predict_{name}"] = lambda points=points: runner._run("predict", **memory, **points)
            theirs[f"predict_{name}"] = lambda t=t: model.predict(decoded, t)
            ours[f"query_{name}"] = lambda p=points: runner._run("predict", **runner._run("read"), **p)
            theirs[f"query_{name}"] = lambda t=t: model.query(state, t)
        times = against(ours, theirs)  # each by itself: after a reading an update meets cold caches
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


def gp(folder: Path) -> dict[str, Any]:
    """The shipped curves, whose state has moments, after single updates."""
    model, generator = CMANP.from_pretrained("gp"), torch.Generator().manual_seed(0)
    export(model, folder)
    x = 4 * torch.rand(1, UPDATES, 1, generator=generator) - 2
    xt, y, runner = torch.linspace(-2, 2, 121)[None, :, None], torch.sin(3 * x), Runner(folder)
    for i in range(UPDATES):
        runner.observe(x[:, i : i + 1], y[:, i : i + 1])
    with torch.no_grad():
        state = model.condition(x, y)
        wanted = model.query(state, xt)
    mean, std = runner.predict(xt)
    one, made = (x[:, :1], y[:, :1]), {name: t.numpy() for name, t in state.tensors().items()}
    off = [np.abs(runner.state[name] - t).max() / np.abs(t).max() for name, t in made.items()]
    return {
        "model": "gp", "updates": UPDATES, "state_off_by": float(max(off)),
        "mean_off_by": float(np.abs(mean - wanted.mean.numpy()).max()),
        "std_off_by": float(np.abs(std - wanted.stddev.numpy()).max()),
        **against(
            {"update": lambda: runner.observe(*one),
             "update_and_query_121": lambda: (runner.observe(*one), runner.predict(xt))},
            {"update": lambda: model.update(state, *one),
             "update_and_query_121": lambda: model.query(model.update(state, *one), xt)},
        ),
    }  # fmt: skip


def events(folder: Path) -> dict[str, Any]:
    """A CMHP of three marks, after single events."""
    torch.manual_seed(0)
    gaps = torch.rand(1, UPDATES, dtype=torch.float64)
    marks = torch.randint(3, gaps.shape)
    times = 1e6 + gaps.cumsum(1)
    model = CMHP(num_marks=3).eval()
    model.set_scales(
        Events.from_gaps(gaps[:, :200].tolist(), marks=marks[:, :200].tolist(), num_marks=3, unit="hour")
    )
    export(model, folder)
    start = torch.full((1,), 1e6, dtype=torch.float64)
    runner = EventRunner(folder, start=start)
    for i in range(UPDATES):
        runner.observe(times[:, i : i + 1], marks[:, i : i + 1])
    with torch.no_grad():
        state = model.update(model.empty(start), times, marks)
        wanted = model.query(state)
    value, found = state.tensors()["memory.value"].numpy(), runner.predict()
    seen, later = times[:, -1:].numpy().copy(), (times[:, -1:] + 1, marks[:, :1])

    def observe() -> None:
        seen[:] += 1
        runner.observe(seen, [[0]])

    return {
        "model": "cmhp", "updates": UPDATES,
        "state_off_by": float(np.abs(runner.state["memory.value"] - value).max()),
        "mean_off_by": float(np.abs(found["mean"] - wanted.mean.numpy()).max()),
        **against(
            {"update": observe, "update_and_query": lambda: (observe(), runner.predict())},
            {"update": lambda: model.update(state, *later),
             "update_and_query": lambda: model.query(model.update(state, *later)).mean},
        ),
    }  # fmt: skip


def table(folder: Path) -> dict[str, Any]:
    """An estimator of the power plant, after single rows; errors are in deviations of the target."""
    x, y = power_plant()
    estimator = StreamingRegressor().fit(x[:1024], y[:1024])
    export(estimator, folder)
    runner, spread = TableRunner(folder), float(y.std())
    order = np.arange(UPDATES) % len(x)
    for i in order:
        runner.partial_fit(x[i : i + 1], y[i : i + 1])
    estimator.partial_fit(x[order], y[order])
    asked = x[-500:]
    (mean, std), (wanted, deviation) = (made.predict(asked, True) for made in (runner, estimator))
    moments = estimator.learner_.memory.traces[0].moments  # type: ignore[union-attr]
    parts = {name: getattr(moments, name).numpy() for name in ("gram", "cross", "square")}
    off = [np.abs(runner.state[name] - t).max() / np.abs(t).max() for name, t in parts.items()]
    more = StreamingRegressor.load(folder / "learned.safetensors")
    one, row = runner.spawn(), (x[:1], y[:1])
    return {
        "model": "power plant", "updates": UPDATES, "state_off_by": float(max(off)),
        "mean_off_by": float(np.abs(mean - wanted).max() / spread),
        "std_off_by": float(np.abs(std - deviation).max() / spread),
        "megabytes": round(sum(path.stat().st_size for path in folder.glob("*.onnx")) / 1e6, 2),
        **fastest({"row": lambda: one.partial_fit(*row), "row_pytorch": lambda: more.partial_fit(*row)}),
        **fastest({
            "predict_500": lambda: runner.predict(asked, True),
            "predict_500_pytorch": lambda: estimator.predict(asked, True),
        }),
    }  # fmt: skip


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
        rows.append({"model": "emnist", **row} | record.provenance(0, "random points"))
    for work, data in (
        (gp, "a sine"),
        (events, "random events"),
        (table, "the power plant's rows, again and again"),
    ):
        with tempfile.TemporaryDirectory() as folder:
            row = work(Path(folder))
        print(row)
        rows.append(row | record.provenance(0, data))
    record.save("onnx_cost", rows, command="python benchmarks/onnx_cost.py")


if __name__ == "__main__":
    main()

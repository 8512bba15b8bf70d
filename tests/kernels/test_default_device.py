"""Models and estimators on a CPU do not feel on which device a process usually makes new tensors."""

import subprocess
import sys
from pathlib import Path

ASKED = """
import sys

import numpy as np, torch
from constmem import CMANP, CMHP, Events, StreamingRegressor

torch.manual_seed(0)
sizes = {"dim": 16, "depth": 2, "num_slots": 4, "num_latents": 4}
model, process = CMANP(dim_x=1, dim_y=1, hidden=8, **sizes).eval(), CMHP(num_marks=3).eval()
x, y = torch.rand(2, 40, 1), torch.rand(2, 40, 1)
events = Events.from_gaps([[0.0, 1.0, 0.5, 2.0]], marks=[[0, 2, 2, 1]], num_marks=3, unit="hour")
process.set_scales(events)
later, mark = torch.tensor([[5.0]], dtype=torch.float64), torch.tensor([[1]])
rows = np.random.default_rng(0).normal(size=(200, 3))


@torch.no_grad()
def answers(path):
    state = model.update(model.condition(x, y), x[:, :1], y[:, :1])
    state = state.merge(model.condition(x[:, :1], y[:, :1])).remove(model.observe(x, y))
    read = model.query(state, x).mean
    known = process.update(process.condition(events), later, mark)
    table = StreamingRegressor(warmup=150).partial_fit(rows, rows[:, 0])
    table.save(path)
    intervals = StreamingRegressor.load(path).partial_fit(rows[:1], rows[:1, 0]).predict_interval(rows[:5])
    return [read.numpy(), process.query(known).mean.numpy(), intervals]


expected = answers(sys.argv[1])
torch.set_default_device("meta")  # which keeps no numbers: whatever is made there by mistake is noticed
for one, other in zip(answers(sys.argv[1]), expected, strict=True):
    assert np.array_equal(one, other)
print("equal")
"""


def test_numbers_on_a_cpu_are_the_same_whatever_the_usual_device_is(tmp_path: Path) -> None:
    command = [sys.executable, "-c", ASKED, str(tmp_path / "table")]  # machine code had written to nowhere
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "equal\n"), done.stderr[-2000:]

"""Time of CMANP's training step on a GPU: captured, or compiled too, against the literal algorithm, eager.

    python benchmarks/training_step.py     # needs a GPU, two minutes; writes results/training_step.json

Batch 100, 100 context and 100 target points, the paper's sizes; the tasks are given, and all steps end
with Adam. The literal step is the paper's algorithm in plain operators with tf32 products; our step is also
timed eagerly, to tell what capturing in a graph brings, and compiling before that.
"""

import argparse
import dataclasses
import statistics

import torch
from benches import stepping
from literal import Literal
from record import provenance, save

from constmem import CMANP
from constmem.data import Task
from constmem.training import loop as train
from constmem.training import recipes, sources

BATCH = POINTS = 100
LITERAL = "literal, eager, tf32"


def fixed(task: Task) -> sources.Source[Task]:
    """A source that always gives the same task."""
    return sources.Source(
        lambda _: task, lambda: iter(()), {}, "one task", sources._task_loss, sources._task_score
    )


def new() -> CMANP:
    return CMANP(dim_x=2, dim_y=3).cuda()


def our_step(model: CMANP, task: Task, *, precision: str, compiled: bool):
    """A step as `constmem train` takes it: captured, and compiled before or not."""
    recipe = dataclasses.replace(
        recipes.recipe("celeba32", "cmanp"), precision=precision, clip=0.0, optimiser="adam"
    )
    device = task.xc.device
    optimiser = train._optimiser(model, recipe, device)
    generator = torch.Generator(device).manual_seed(0)
    step = train._stepper(recipe, model, optimiser, fixed(task), generator, compiled=compiled)
    return lambda: step(5e-4)


def milliseconds(step, repeats: int = 20) -> float:
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(repeats):
        step()
    stop.record()
    torch.cuda.synchronize()
    return start.elapsed_time(stop) / repeats


def measured(rounds: int) -> list[dict]:
    """Milliseconds a step of each candidate, taken in turns."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    torch.manual_seed(0)
    x, y = torch.rand(BATCH, 2 * POINTS, 2, device="cuda"), torch.rand(BATCH, 2 * POINTS, 3, device="cuda")
    task = Task(x[:, :POINTS], y[:, :POINTS], x[:, POINTS:], y[:, POINTS:])
    slow, eager = new(), new()
    literal = Literal(slow, None)
    points = task.xc, task.yc, task.xt, task.yt
    steps = {
        LITERAL: stepping(slow, lambda: literal.loss(*points)),
        "constmem, eager, tf32": stepping(eager, lambda: eager.loss(*points)),
    }
    for precision in ("tf32", "bf16"):
        for compiled, how in ((False, "captured"), (True, "compiled and captured")):
            step = our_step(new(), task, precision=precision, compiled=compiled)
            steps[f"constmem, {how}, {precision}"] = step
    for step in steps.values():
        for _ in range(6):
            step()
    times = {name: [] for name in steps}
    for _ in range(rounds):
        for name, step in steps.items():
            times[name].append(milliseconds(step))
    torch.set_float32_matmul_precision(before)
    medians = {name: statistics.median(t) for name, t in times.items()}
    longest = medians[LITERAL]
    return [
        {"what": name, "milliseconds": round(t, 2), "times_faster": round(longest / t, 2)}
        for name, t in medians.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    rows = measured(parser.parse_args().rounds)
    for row in rows:
        print(row)
    about = provenance(0, "uniform random points, batch 100, 100 context and 100 target points")
    save("training_step", rows, **(about | {"device": torch.cuda.get_device_name()}))


if __name__ == "__main__":
    main()

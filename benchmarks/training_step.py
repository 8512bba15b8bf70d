"""Time of CMANP's training step on a GPU: compiled and captured, against the literal algorithm, eager.

    python benchmarks/training_step.py     # needs a GPU, two minutes; writes results/training_step.json

Batch 100, 100 context and 100 target points, the paper's sizes; the tasks are given, and all steps end
with Adam. The literal step is the paper's algorithm in plain operators with tf32 products; our step is also
timed eagerly, to tell what compiling and capturing bring.
"""

import argparse
import dataclasses
import statistics

import torch
from record import save

from constmem import CMANP, recipes, sources, train
from constmem.bench.benches import stepping
from constmem.bench.literal import Literal
from constmem.bench.record import provenance
from constmem.data import Task

BATCH = POINTS = 100


def fixed(task: Task) -> sources.Source[Task]:
    """A source that always gives the same task."""
    return sources.Source(
        lambda _: task, lambda: iter(()), {}, "one task", sources._task_loss, sources._task_score
    )


def our_step(model: CMANP, task: Task, *, precision: str, captured: bool):
    recipe = dataclasses.replace(
        recipes.recipe("celeba32", "cmanp"),
        precision=precision,
        clip=0.0,
        optimiser="adam",
        sampling="static" if captured else "reference",
    )
    device = task.xc.device
    optimiser = train._optimiser(model, recipe, device)
    generator = torch.Generator(device).manual_seed(0)
    step = train._stepper(recipe, model, optimiser, fixed(task), generator, compiled=captured)
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
    slow = CMANP(dim_x=2, dim_y=3).cuda()
    literal = Literal(slow, None)
    steps = {
        "literal, eager, tf32": stepping(slow, lambda: literal.loss(task.xc, task.yc, task.xt, task.yt)),
        "constmem, eager, tf32": our_step(
            CMANP(dim_x=2, dim_y=3).cuda(), task, precision="tf32", captured=False
        ),
        "constmem, captured, tf32": our_step(
            CMANP(dim_x=2, dim_y=3).cuda(), task, precision="tf32", captured=True
        ),
        "constmem, captured, bf16": our_step(
            CMANP(dim_x=2, dim_y=3).cuda(), task, precision="bf16", captured=True
        ),
    }
    for step in steps.values():
        for _ in range(6):
            step()
    times = {name: [] for name in steps}
    for _ in range(rounds):
        for name, step in steps.items():
            times[name].append(milliseconds(step))
    torch.set_float32_matmul_precision(before)
    medians = {name: statistics.median(t) for name, t in times.items()}
    longest = medians["literal, eager, tf32"]
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

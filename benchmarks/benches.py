"""The benchmarks a user cares about: condition, update, query, train; rows of times taken side by side."""

import contextlib
import statistics
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import subjects
import torch
from cached import CachedTransformer
from literal import Literal
from record import Row, Work, peak, ratio, side_by_side
from torch import Tensor

from constmem.neural_processes import CMANP, LBANP, TNPD, NeuralProcess

US, THEM = "constmem", "literal"


class Plan(NamedTuple):
    """Where to measure, and how thoroughly."""

    device: torch.device
    quick: bool

    @property
    def rounds(self) -> int:
        return 3 if self.quick else 7

    @property
    def sizes(self) -> tuple[int, ...]:
        """Numbers of points: as many as the device gets through in a minute or two."""
        if self.quick:
            return 1000, 4096
        return (10**3, 10**4, 10**5, 10**6, 10**7) if self.device.type == "cuda" else (10**3, 10**4, 10**5)


def compared(plan: Plan, about: Row, work: dict[str, Work], *, against: str = THEM) -> Iterator[Row]:
    """A row for every candidate: its time, how many times as fast as `against` it is, and its extra peak."""
    times = side_by_side(work, rounds=plan.rounds, device=plan.device)
    for name, own in times.items():
        row = {**about, "how": name, "milliseconds": round(1e3 * statistics.median(own), 4)}
        if against in times and name != against:
            row |= {"against": against, **ratio(times, against, name)}
        if plan.device.type == "cuda":
            row["extra_bytes"] = peak(work[name], plan.device)
        yield row


def condition(plan: Plan) -> Iterator[Row]:
    """From points to all that a query needs: against the number of points, chunk, slots, batch, precision."""
    everybody = subjects.everybody(plan.device)
    with torch.no_grad():
        for n in plan.sizes:
            x, y = subjects.points(n, plan.device)
            able = [s for s in everybody if n <= subjects.LARGEST.get(s.name, n)]
            work: dict[str, Work] = {s.name: partial(s.condition, x, y) for s in able}
            yield from compared(plan, {"bench": "condition", "axis": "points", "points": n}, work)
        yield from _axes(plan)


def _axes(plan: Plan) -> Iterator[Row]:
    """The same at one number of points, with one setting after another changed."""
    n = plan.sizes[-1] if plan.quick else plan.sizes[-2]
    x, y = subjects.points(n, plan.device)
    cmanp = subjects.model(CMANP, plan.device)
    chosen = partial(subjects.ours(cmanp).condition, x, y)

    def compare(axis: str, against: str, work: dict[str, Work]) -> Iterator[Row]:
        yield from compared(plan, {"bench": "condition", "axis": axis, "points": n}, work, against=against)

    chunks: dict[str, Work] = {US: chosen}
    for chunk in (512, 4096, 65_536):
        chunks[f"chunks of {chunk:,}"] = partial(subjects.ours(cmanp, chunk).condition, x, y)
    yield from compare("chunk", US, chunks)
    slots: dict[str, Work] = {}
    for number in (32, 128, 512):
        other = subjects.model(CMANP, plan.device, num_slots=number)
        slots[f"{number} slots"] = partial(subjects.ours(other).condition, x, y)
    yield from compare("slots", "128 slots", slots)
    batches: dict[str, Work] = {}
    for b in (1, 10, 100):
        tasks = subjects.points(n // b, plan.device, batch=b)
        batches[f"batch of {b}"] = partial(subjects.ours(cmanp).condition, *tasks)
    yield from compare("batch", "batch of 1", batches)
    kinds = "highest", "high", "autocast"
    yield from compare("precision", "highest", {k: _in_precision(k, chosen, plan.device) for k in kinds})


def _in_precision(name: str, work: Work, device: torch.device) -> Work:
    """The same work with products of float32 ("highest"), of TF32 where there is any, or under autocast."""

    def run() -> None:
        before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("highest" if name == "highest" else "high")
        half = torch.autocast(device.type, torch.bfloat16) if name == "autocast" else contextlib.nullcontext()
        try:
            with half:
                work()
        finally:
            torch.set_float32_matmul_precision(before)

    return run


def update(plan: Plan) -> Iterator[Row]:
    """One point more after so many: with and without reading; a cached transformer; starting over."""
    cmanp, lbanp = (subjects.model(kind, plan.device) for kind in (CMANP, LBANP))
    literal, cached = Literal(cmanp), CachedTransformer(subjects.model(TNPD, plan.device))
    with torch.no_grad():
        for n in plan.sizes[: 2 if plan.quick else 3]:
            x, y = subjects.points(n, plan.device)
            one = x[:, :1], y[:, :1]
            state, kept, cache = cmanp.condition(x, y), literal.condition(x, y), cached.filled(n)
            stored = lbanp.condition(x, y)
            work: dict[str, Work] = {
                US: partial(cmanp.update, state, *one),
                f"{US}, and read": partial(_read_after, cmanp, state, *one),
                THEM: partial(literal.update, kept, *one),
                "transformer, KV cache": partial(cached.update, cache, *one),
                "LBANP, from the start": partial(_read_after, lbanp, stored, *one),
            }
            kept_bytes = dict(
                zip(work, (state.nbytes, state.nbytes, None, cache.nbytes, stored.nbytes), strict=True)
            )
            for row in compared(plan, {"bench": "update", "axis": "points", "points": n}, work):
                yield row | {"remembered_bytes": kept_bytes[row["how"]]}
        yield from _streams(plan, cmanp)


def _read_after(model: NeuralProcess[Any, Any], state: Any, x: Tensor, y: Tensor) -> Any:
    return model.read(model.update(state, x, y))


def _streams(plan: Plan, cmanp: CMANP) -> Iterator[Row]:
    """One point for each of many streams at once."""
    for streams in (1, 16, 256) if plan.quick or plan.device.type == "cpu" else (1, 16, 256, 4096):
        state = cmanp.condition(*subjects.points(50, plan.device, batch=streams))
        one = subjects.points(1, plan.device, batch=streams)
        work: dict[str, Work] = {US: partial(cmanp.update, state, *one)}
        for row in compared(plan, {"bench": "update", "axis": "streams", "streams": streams}, work):
            yield row | {"microseconds_a_stream": round(1e3 * row["milliseconds"] / streams, 3)}


def query(plan: Plan) -> Iterator[Row]:
    """Reading a state, and predictions at targets from what was read."""
    n = plan.sizes[0]
    x, y = subjects.points(n, plan.device)
    cmanp = subjects.model(CMANP, plan.device)
    models: list[NeuralProcess[Any, Any]] = [subjects.model(kind, plan.device) for kind in (LBANP, TNPD)]
    literal = Literal(cmanp)
    with torch.no_grad():
        state, kept = cmanp.condition(x, y), literal.condition(x, y)
        reads: dict[str, Work] = {US: partial(cmanp.read, state), THEM: partial(literal.read, kept)}
        yield from compared(plan, {"bench": "query", "axis": "read", "points": n}, reads)
        memory, others = cmanp.read(state), [(m, m.read(m.condition(x, y))) for m in models]
        for targets in (1, 100) if plan.quick else (1, 1000, 10_000):
            xt, _ = subjects.points(targets, plan.device, seed=1)
            work: dict[str, Work] = {
                US: partial(cmanp.predict, memory, xt),
                THEM: partial(literal.query, kept, xt),
                **{subjects.NAMES[model.name]: partial(model.predict, read, xt) for model, read in others},
            }
            about = {"bench": "query", "axis": "targets", "targets": targets, "points": n}
            yield from compared(plan, about, work)


def train(plan: Plan) -> Iterator[Row]:
    """A step of training, from tasks to new weights, every model run operator by operator."""
    batch, n = (4, 20) if plan.quick else (100, 100) if plan.device.type == "cuda" else (16, 50)
    x, y = subjects.points(2 * n, plan.device, batch=batch)
    task = x[:, :n], y[:, :n], x[:, n:], y[:, n:]
    work: dict[str, Work] = {}
    for name, kind in ((US, CMANP), ("LBANP", LBANP), ("TNP-D", TNPD)):
        model = subjects.model(kind, plan.device)
        work[name] = stepping(model, partial(model.loss, *task))
    model = subjects.model(CMANP, plan.device)
    work[THEM] = stepping(model, partial(Literal(model, None).loss, *task))
    about = {"bench": "train", "axis": "step", "batch": batch, "points": n, "targets": n}
    yield from compared(plan, about, work)


def stepping(model: torch.nn.Module, loss: Callable[[], Tensor]) -> Work:
    """A step of Adam down a loss."""
    optimiser = torch.optim.Adam(model.parameters(), lr=5e-4)

    def step() -> None:
        optimiser.zero_grad()
        loss().backward()
        optimiser.step()

    return step


BENCHES: dict[str, Callable[[Plan], Iterator[Row]]] = {
    "condition": condition, "update": update, "query": query, "train": train,
}  # fmt: skip

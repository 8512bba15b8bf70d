"""Updates, reads and small batches on a GPU, against the literal algorithm."""

import itertools
import traceback
from collections.abc import Iterator

import on_gpu
import torch
from literal import Literal
from on_gpu import MODES, Row, extra, mode, ms, seconds


def update() -> Iterator[Row]:
    """One point more: for one stream, and for thousands at once, against the literal loop."""
    model = on_gpu.trained()
    literal = Literal(model)
    x, y = on_gpu.strokes(1000)
    kept = literal.condition(x, y)

    def literally() -> None:
        current = kept
        for i in range(10):
            current = literal.update(current, x[:, i : i + 1], y[:, i : i + 1])

    with mode("plain tf32"):
        slow = seconds(literally, rounds=5) / 10
    yield {"what": "update", "streams": 1, "how": "literal", "milliseconds": ms(slow)}
    for streams, name in itertools.product((1, 16, 256, 4096), ("plain tf32", "half", "exact")):
        try:
            one_x, one_y = on_gpu.strokes(1, tasks=streams)
            with mode(name):
                state = model.condition(*on_gpu.strokes(100, tasks=streams))

                def chain(state=state, one_x=one_x, one_y=one_y) -> None:
                    current = state
                    for _ in range(20):
                        current = model.update(current, one_x, one_y)

                took = seconds(chain, rounds=5) / 20
                peak = extra(lambda: model.update(state, one_x, one_y))  # noqa: B023
            yield {"what": "update", "streams": streams, "how": name, "milliseconds": ms(took),
                   "extra_bytes": peak, "times_the_literal": round(streams * slow / took, 1),
                   "literal": "measured on one stream, times the streams"}  # fmt: skip
        except Exception:
            traceback.print_exc()


def read() -> Iterator[Row]:
    """Reading a state, and a query of one and of a thousand targets."""
    model = on_gpu.trained()
    literal = Literal(model)
    x, y = on_gpu.strokes(1000)
    kept = literal.condition(x, y)

    with mode("plain tf32"):
        state = model.condition(x, y)
        slow = seconds(lambda: literal.read(kept))
        query = {m: seconds(lambda: literal.query(kept, x[:, :m])) for m in (1, 1000)}  # noqa: B023
    yield {"what": "read", "how": "literal", "milliseconds": ms(slow)}
    for name in ("plain tf32", "plain bf16", "half"):
        with mode(name):
            if name == "half":
                torch.set_float32_matmul_precision("high")
            took = seconds(lambda: model.read(state), warm=5, rounds=9)
        how = "constmem, replayed, tf32" if name == "half" else f"constmem, eager, {name.split()[1]}"
        yield {"what": "read", "how": how, "milliseconds": ms(took),
               "times_the_literal": round(slow / took, 2)}  # fmt: skip
    for m, before in query.items():
        with mode("half"):
            memory = model.read(state)
            took = seconds(lambda: model.predict(memory, x[:, :m]))  # noqa: B023
        yield {"what": "query of what was read", "targets": m, "how": "constmem", "milliseconds": ms(took),
               "literal_milliseconds": ms(before), "times_the_literal": round(before / took, 2)}  # fmt: skip


def small() -> Iterator[Row]:
    """A hundred tasks of a hundred points: not slower than the plain path."""
    model = on_gpu.trained()
    x, y = on_gpu.strokes(100, tasks=100)
    for name in ("plain bf16", "plain tf32", "plain float32", *MODES):
        with mode(name):
            took = seconds(lambda: model.condition(x, y), rounds=9)
        yield {"what": "condition 100 tasks of 100 points", "how": name, "milliseconds": ms(took)}

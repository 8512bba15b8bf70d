"""Time of conditioning, updating and reading, side by side with the paper's algorithm taken literally.

python benchmarks/update.py            # about eight minutes, 8 GB; writes results/update.json
"""

import statistics
from collections.abc import Callable

import torch
from literal import Literal
from record import provenance, ratio, save, side_by_side
from torch import Tensor

from constmem import CMANP
from constmem.kernels import cpu

UPDATES = 20  # single-point updates a round
FLOPS = 2 * (
    5 * 64 + 3 * 64**2 + 64 * 768 + 2 * 3072 * 16
)  # of a point: embedding, keys and values, attention


def main() -> None:
    torch.manual_seed(0)
    model = CMANP(dim_x=2, dim_y=3).eval()
    x, y = torch.rand(1, 100_000, 2), torch.rand(1, 100_000, 3)
    rows = []

    def compare(what: str, work: dict, *, slow: str, fast: str, rounds: int, calls: int = 1, **more) -> None:
        times = side_by_side(work, rounds=rounds)
        halves = [name for name in (f"{fast}, bfloat16",) if name in times]
        for name in (fast, *halves):
            title = what if name == fast else what.replace(" points", " points in bfloat16")
            row = {"what": title, "slow": slow, "fast": name, **ratio(times, slow, name), **more}
            row["milliseconds"] = {k: round(1e3 * statistics.median(v) / calls, 3) for k, v in times.items()}
            rows.append(row)
            print(f"{title}: {name} is {row['ratio']}x {slow}   {row['milliseconds']} ms", flush=True)

    def ways(x: Tensor, y: Tensor) -> dict[str, Callable[[], object]]:
        """Conditioning in float32, and with shares and values multiplied as bfloat16 where this CPU can."""

        def coarsely() -> None:
            torch.set_float32_matmul_precision("high")
            model.condition(x, y)
            torch.set_float32_matmul_precision("highest")

        exactly = {"constmem": lambda: model.condition(x, y)}
        return exactly | {"constmem, bfloat16": coarsely} if cpu.has_bfloat16() else exactly

    with torch.no_grad():
        ours = {"constmem": lambda: model.condition(x, y)}
        for chunk in (1024, 4096, None):
            literal = {"literal": lambda chunk=chunk: Literal(model, chunk).condition(x, y)}
            what = f"condition on 1e5 points (literal: {f'chunks of {chunk}' if chunk else 'at once'})"
            work = (ways(x, y) if chunk == 1024 else ours) | literal
            compare(what, work, slow="literal", fast="constmem", rounds=15 if chunk else 3)

        many_x, many_y = x.repeat(1, 10, 1), y.repeat(1, 10, 1)
        compare("condition on 1e6 points (literal: chunks of 1024)",
                ways(many_x, many_y) | {"literal": lambda: Literal(model, 1024).condition(many_x, many_y)},
                slow="literal", fast="constmem", rounds=9)  # fmt: skip
        compare("condition on 1e6 points (literal: at once)",
                ways(many_x, many_y) | {"literal": lambda: Literal(model, None).condition(many_x, many_y)},
                slow="literal", fast="constmem", rounds=3)  # fmt: skip
        a, b = torch.randn(2, 2048, 2048)
        compare("matrix product of 2048 against conditioning on 1e5 points",
                ours | {"product": lambda: a @ b}, slow="constmem", fast="product", rounds=9,
                flops={"constmem": 100_000 * FLOPS, "product": 2 * 2048**3})  # fmt: skip

        one_x, one_y = x[:, :1], y[:, :1]
        small, large = model.condition(x[:, :1000], y[:, :1000]), model.condition(x, y)
        for _ in range(9):
            large = large.merge(model.condition(x, y))  # a million points
        literal = Literal(model)
        literal_state = literal.condition(x[:, :1000], y[:, :1000])

        def chain(update, state):
            def run():
                current = state
                for _ in range(UPDATES):
                    current = update(current, one_x, one_y)

            return run

        update = {
            "constmem": chain(model.update, small),
            "constmem, 1e6 points": chain(model.update, large),
            "literal": chain(literal.update, literal_state),
        }
        compare("update by one point", update, slow="literal", fast="constmem", rounds=41, calls=UPDATES)
        compare("update by one point after 1e6 points and after 1e3",
                {k: update[k] for k in ("constmem", "constmem, 1e6 points")},
                slow="constmem, 1e6 points", fast="constmem", rounds=51, calls=UPDATES)  # fmt: skip
        read = {"read": lambda: model.read(small), "update": chain(model.update, small)}
        compare("read against update", read, slow="read", fast="update", rounds=15)
    save("update", rows, **provenance(0, "uniform random points, 2 inputs, 3 outputs, float32, batch 1"))


if __name__ == "__main__":
    main()

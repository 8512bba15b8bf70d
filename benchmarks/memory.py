"""Peak memory of conditioning, querying, updating and training, against the number of points.

python benchmarks/memory.py            # a few minutes; writes results/memory.json and the figure
python benchmarks/memory.py --largest 1000000
"""

import argparse
from collections.abc import Iterator

import torch
from literal import Literal
from record import RESULTS, peak, provenance, save
from torch import Tensor

from constmem import CMANP
from constmem.plots import pyplot, save_figure

MB = 1e6
CHUNK = 4096


def points(n: int, seed: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
    """A stream of n random points of two inputs and three outputs, never all in memory."""
    generator = torch.Generator().manual_seed(seed)
    for start in range(0, n, CHUNK):
        size = min(CHUNK, n - start)
        xy = torch.rand(1, size, 5, generator=generator)
        yield xy[..., :2], xy[..., 2:]


def stored(n: int) -> tuple[Tensor, Tensor]:
    xs, ys = zip(*points(n), strict=True)
    return torch.cat(xs, 1), torch.cat(ys, 1)


def conditioning(model: CMANP, largest: int) -> Iterator[dict[str, object]]:
    for exponent in range(3, 9):
        n = 10**exponent
        if n > largest:
            return
        held = []
        peak_bytes = peak(lambda n=n, held=held: held.append(model.condition_chunks(points(n)).nbytes))
        row = {
            "what": "condition",
            "points": n,
            "remembered": held[0],
            "peak": peak_bytes,
            "stored_points": n * 5 * 4,
        }
        if n <= 10**6:
            x, y = stored(n)
            row["peak_literal"] = peak(lambda x=x, y=y: Literal(model).condition(x, y))
        yield row


def querying(model: CMANP) -> Iterator[dict[str, object]]:
    state = model.condition_chunks(points(1000))
    for m in (10**4, 10**5, 10**6):
        xt = torch.rand(1, m, 2)
        outputs = 2 * m * 3 * 4
        total = peak(lambda xt=xt: model.query(state, xt))
        yield {"what": "query", "targets": m, "peak_without_outputs": total - outputs, "outputs": outputs}


def updating(model: CMANP) -> Iterator[dict[str, object]]:
    x, y = torch.rand(1, 1, 2), torch.rand(1, 1, 3)
    for n in (10**3, 10**6):
        state = model.condition_chunks(points(n))
        yield {
            "what": "update by one point",
            "points": n,
            "remembered": model.update(state, x, y).nbytes,
            "peak": peak(lambda state=state: model.update(state, x, y)),
        }


def training(model: CMANP) -> Iterator[dict[str, object]]:
    def step(x: Tensor, y: Tensor, chunk: int) -> None:
        loss = -model(x, y, x[:, :100], chunk=chunk).log_prob(y[:, :100]).sum(-1).mean()
        loss.backward()

    step(*stored(2 * CHUNK), CHUNK)  # gradients and the libraries' buffers are there from now on
    for n in (10**4, 10**5):
        x, y = stored(n)
        row = {"what": "forward and backward", "points": n}
        row["peak"] = peak(lambda x=x, y=y: step(x, y, CHUNK))
        row["peak_dense"] = peak(lambda x=x, y=y, n=n: step(x, y, n))
        yield row
    model.zero_grad()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--largest", type=int, default=10**7)
    largest = parser.parse_args().largest
    torch.manual_seed(0)
    model = CMANP(dim_x=2, dim_y=3)
    rows = []

    def take(source: Iterator[dict[str, object]]) -> None:
        for row in source:
            rows.append(row)
            print(*(f"{k}={v / MB:.2f} MB" if k.startswith(("peak", "remem", "stored", "out")) else f"{k}={v}"
                    for k, v in row.items()), sep="  ", flush=True)  # fmt: skip

    with torch.no_grad():
        take(conditioning(model.eval(), largest))
        take(querying(model))
        take(updating(model))
    take(training(model.train()))
    about = provenance(0, "uniform random points, 2 inputs, 3 outputs, float32, batch 1, the paper's sizes")
    save("memory", rows, **about)
    figure(rows)


def figure(rows: list[dict[str, object]]) -> None:
    """Bytes against points seen."""
    plt = pyplot()
    seen = [row for row in rows if row["what"] == "condition"]
    fig, axes = plt.subplots(figsize=(7, 4.2), dpi=150)
    lines = (
        ("peak_literal", "the paper's algorithm, while conditioning", "#c1121f", "--"),
        ("stored_points", "the points themselves (what LBANP, EQTNP, TNP-D must keep)", "#8d99ae", "-"),
        ("peak", "constmem, while conditioning", "#023e8a", "--"),
        ("remembered", "constmem, remembered", "#023e8a", "-"),
    )
    for key, label, color, style in lines:
        xs = [row["points"] for row in seen if key in row]
        axes.plot(
            xs, [row[key] / MB for row in seen if key in row], style, marker="o", color=color, label=label
        )
    axes.set(xscale="log", yscale="log", xlabel="points seen", ylabel="megabytes (CPU, float32, batch 1)")
    axes.set_title("Memory against points seen, CMANP at the paper's sizes", loc="left", fontsize=10)
    axes.grid(alpha=0.25, which="both")
    axes.legend(frameon=False, fontsize=8)
    fig.tight_layout()
    print("wrote", save_figure(fig, RESULTS.parents[1] / "docs" / "memory.png"))


if __name__ == "__main__":
    main()

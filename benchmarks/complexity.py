"""The paper's memory table, measured: extra peak of condition, query and update, for all ten models.

python benchmarks/complexity.py            # minutes on one core; writes results/complexity.json, the figure
python benchmarks/complexity.py --again    # measures nothing: applies the rule to the committed peaks again

Phases are the paper's. *Condition* goes from points to all that a query needs (`read(condition(...))`),
*update* from that and new points to the same (`read(update(...))`), *query* from there to predictions.
Peaks are the bytes allocated at the worst moment of a phase beyond what was there before it: the points
and what earlier phases kept are not counted again, but given apart as *kept*. Everything is measured
twice: with fused attention, as the library is, and written out, softmax(q k') v with all its scores in
memory, as the published code is.

The rule that makes constant, linear or quadratic of these peaks is in growth.py.
"""

import argparse
import contextlib
import json
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from growth import verdict
from literal import Literal, LiteralState
from record import RESULTS, peak, provenance, save
from torch import Tensor

from constmem import kernels
from constmem.neural_processes import MODELS, TNPD, NeuralProcess, StoredPoints
from constmem.plots import pyplot, save_figure

CHUNK = 128  # points handled at once
FIXED = 64  # the sizes that do not vary
SIZES = {"fused": (512, 1024, 2048, 4096), "written out": (256, 512, 1024, 2048)}
SAMPLES = 2  # of the latent, and of the bootstrap, instead of the published 50
DIM_X, DIM_Y = 2, 3
PHASES = (("condition", "N"), ("query", "N"), ("query", "M"), ("update", "N"), ("update", "D"))
KEPT = ("kept", "N")
AGAIN = "verdict, exponent and bytes_a_point were computed from these peaks later; nothing was measured again"
PAPER = {  # Table 1: condition N, query N, query M, update N, update |D_U|
    "tnpd": (None, "quadratic", "quadratic", None, None),
    "eqtnp": ("quadratic", "linear", "linear", "quadratic", "quadratic"),
    "lbanp": ("linear", "constant", "linear", "linear", "linear"),
    "cmanp": ("constant", "constant", "linear", "constant", "constant"),
}


def written_out(
    q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, *, scale: float | None = None
) -> Tensor:
    """softmax(scale q k') v with all scores in memory."""
    scores = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    if attn_mask is not None:
        scores = scores.masked_fill(~attn_mask, -float("inf"))
    return scores.softmax(-1) @ v


@contextlib.contextmanager
def attention(style: str) -> Iterator[None]:
    """Attention as the library computes it, or written out."""
    with contextlib.ExitStack() as stack:
        if style == "written out":
            fused = "torch.nn.functional.scaled_dot_product_attention"
            stack.enter_context(mock.patch(fused, written_out))
            plain = (kernels.operators.REFERENCE,)
            stack.enter_context(mock.patch.object(kernels.operators, "KERNELS", plain))
            stack.enter_context(mock.patch.object(kernels.cpu, "usable", return_value=False))
        yield


class Library:
    """The three phases of a model as the library runs them."""

    phases = (*PHASES, KEPT)

    def __init__(self, model: NeuralProcess[Any, Any]) -> None:
        self.model = model

    def condition(self, x: Tensor, y: Tensor) -> tuple[Any, Any]:
        state = self.model.condition(x, y, chunk=CHUNK)
        return state, self.model.read(state)

    def query(self, kept: tuple[Any, Any], xt: Tensor) -> Any:
        return self.model.predict(kept[1], xt, chunk=CHUNK)

    def update(self, kept: tuple[Any, Any], x: Tensor, y: Tensor) -> tuple[Any, Any]:
        state = self.model.update(kept[0], x, y, chunk=CHUNK)
        return state, self.model.read(state)


class PublishedTNPD:
    """TNP-D as published: points are only stored, and every query runs data and targets in one pass."""

    phases = tuple(phase for phase in PHASES if phase[0] == "query")

    def __init__(self, model: TNPD) -> None:
        self.model = model

    def condition(self, x: Tensor, y: Tensor) -> StoredPoints:
        return self.model.condition(x, y)

    def query(self, kept: StoredPoints, xt: Tensor) -> tuple[Tensor, Tensor]:
        unknown = xt.new_zeros(*xt.shape[:2], DIM_Y)
        points = torch.cat([torch.cat([kept.x, kept.y], -1), torch.cat([xt, unknown], -1)], 1)
        n = kept.x.shape[1]
        seen = (torch.arange(points.shape[1]) < n).expand(xt.shape[0], -1)
        tokens = self.model.embed(points)
        for layer in self.model.layers:
            tokens = layer(tokens, tokens, seen)
        mean, std = self.model.head(tokens[:, n:])
        return mean, std


class PublishedCMANP:
    """CMANP as published: the whole context is embedded first, and every block read in every phase."""

    phases = PHASES

    def __init__(self, model: Any) -> None:
        self.literal = Literal(model, chunk=CHUNK)

    def condition(self, x: Tensor, y: Tensor) -> LiteralState:
        return self.literal.condition(x, y)

    def query(self, kept: LiteralState, xt: Tensor) -> tuple[Tensor, Tensor]:
        return self.literal.query(kept, xt)

    def update(self, kept: LiteralState, x: Tensor, y: Tensor) -> LiteralState:
        for i in range(0, x.shape[1], CHUNK):
            kept = self.literal.update(kept, x[:, i : i + CHUNK], y[:, i : i + CHUNK])
        return kept


def subjects() -> Iterator[tuple[str, str, str, Any]]:
    """What is measured: model, style, how it is run, and the three phases."""
    for style in SIZES:
        for name, kind in MODELS.items():
            samples = {"num_samples": SAMPLES} if name in ("np", "anp", "bnp", "banp") else {}
            torch.manual_seed(0)
            model: Any = kind(dim_x=DIM_X, dim_y=DIM_Y, **samples).eval()
            yield name, style, "library", Library(model)
            published = {"tnpd": PublishedTNPD, "cmanp": PublishedCMANP}.get(name)
            if style == "written out" and published is not None:
                yield name, style, "published", published(model)


def points(n: int, m: int, d: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Random context, targets, and new points."""
    random = torch.Generator().manual_seed(n + m + d)
    shapes = (n, DIM_X), (n, DIM_Y), (m, DIM_X), (d, DIM_X), (d, DIM_Y)
    x, y, xt, x_new, y_new = (torch.rand(1, *shape, generator=random) for shape in shapes)
    return x, y, xt, x_new, y_new


def extra(subject: Any, phase: str, against: str, size: int) -> int:
    """The extra peak of a phase with one of its sizes given, the others fixed."""
    sizes = {"N": FIXED, "M": FIXED, "D": FIXED, against: size}
    x, y, xt, x_new, y_new = points(sizes["N"], sizes["M"], sizes["D"])
    if phase == "condition":
        return peak(lambda: subject.condition(x, y))
    kept = subject.condition(x, y)
    if phase == "kept":
        return held(kept)
    if phase == "query":
        return peak(lambda: subject.query(kept, xt))
    return peak(lambda: subject.update(kept, x_new, y_new))


def held(kept: Any) -> int:
    """Bytes of all tensors that conditioning leaves: the state, and what was read from it."""
    if isinstance(kept, Tensor):
        return kept.untyped_storage().nbytes()
    if hasattr(kept, "tensors"):
        return held(tuple(kept.tensors().values()))
    return sum(map(held, kept)) if isinstance(kept, tuple) else 0


def measured() -> Iterator[dict[str, Any]]:
    for name, style, run, subject in subjects():
        with torch.no_grad(), attention(style):
            for phase, against in subject.phases:
                peaks = [  # the smaller of two: what is allocated once, for good, does not count
                    min(extra(subject, phase, against, size) for _ in range(2)) for size in SIZES[style]
                ]
                marks = dict(zip(PHASES, PAPER.get(name, (None,) * 5), strict=True))
                yield {
                    "model": name, "attention": style, "run": run, "phase": phase, "against": against,
                    "sizes": SIZES[style], "peaks": peaks, **verdict(SIZES[style], peaks),
                    "paper": marks.get((phase, against)),
                }  # fmt: skip


def judged_again(content: dict[str, Any]) -> dict[str, Any]:
    """Committed rows with the verdicts of today's rule; their peaks, and where they come from, stay."""
    rows = [row | verdict(row["sizes"], row["peaks"]) for row in content["rows"]]
    about = {key: value for key, value in content.items() if key not in ("note", "rows")}
    return {**about, "note": AGAIN, "rows": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description="The paper's memory table, measured.")
    parser.add_argument("--draw", action="store_true", help="only draw the committed rows again")
    parser.add_argument("--again", action="store_true", help="only judge the committed peaks again")
    given = parser.parse_args()
    if given.draw or given.again:
        content = json.loads((RESULTS / "complexity.json").read_text())
        if given.again:
            content = judged_again(content)
            save("complexity", **content)
        figure(content["rows"])
        return
    rows = []
    for row in measured():
        rows.append(row)
        shown = "  ".join(f"{p / 1e6:9.3f}" for p in row["peaks"])
        what = "  ".join(row[key] for key in ("model", "attention", "run", "phase", "against"))
        print(f"{what:45}{shown}  {row['verdict']} {row['exponent']} {row['bytes_a_point']}", flush=True)
    about = provenance(
        0,
        f"uniform random points, {DIM_X} inputs, {DIM_Y} outputs, float32, batch 1, the published widths, "
        f"{SAMPLES} samples, chunks of {CHUNK}, other sizes {FIXED}",
    )
    save("complexity", rows, **about)
    figure(rows)


COLOURS = {"tnpd": "#c1121f", "eqtnp": "#e07a00", "lbanp": "#2a7f3f", "cmanp": "#023e8a"}
GREY = "#9aa4b2"


def figure(rows: list[dict[str, Any]]) -> None:
    """Small multiples: condition, query and update against the context, fused above and written out below."""
    plt = pyplot()
    fig, axes = plt.subplots(2, 3, figsize=(10, 6.4), dpi=150, sharex="row", sharey="row")
    for line, style in zip(axes, SIZES, strict=True):
        for panel, phase in zip(line, ("condition", "query", "update"), strict=True):
            here = style, phase, "N"
            shown = [r for r in rows if (r["attention"], r["phase"], r["against"]) == here]
            draw(panel, shown, gap=1.3 if style == "fused" else 1.45)
            panel.set(xscale="log", yscale="log")
            panel.set_title(f"{phase}, attention {style}", fontsize=9, loc="left")
            panel.set_xlim(SIZES[style][0] / 1.2, SIZES[style][-1] * 8)
            panel.set_xticks(SIZES[style], [f"{n:,}" for n in SIZES[style]])
            panel.minorticks_off()
            panel.grid(alpha=0.25)
        line[0].set_ylabel("extra peak, MB")
    for panel in axes[-1]:
        panel.set_xlabel("context points N (dashed, *: as published)", fontsize=8)
    fig.tight_layout()
    print("wrote", save_figure(fig, RESULTS.parents[1] / "docs" / "complexity.png"))


def draw(panel: Any, rows: list[dict[str, Any]], gap: float) -> None:
    """One line a model, its name at the end; names of lines that end together share a place."""
    ends: dict[float, list[dict[str, Any]]] = {}
    for row in sorted(rows, key=lambda r: r["peaks"][-1]):
        strong, published = row["model"] in COLOURS, row["run"] == "published"
        panel.plot(
            row["sizes"],
            [p / 1e6 for p in row["peaks"]],
            "--" if published else "-",
            marker="o",
            markersize=3,
            color=COLOURS.get(row["model"], GREY),
            linewidth=1.8 if strong else 1.0,
            zorder=3 if strong else 2,
        )
        end = row["peaks"][-1] / 1e6
        near = next((known for known in ends if end / known < 1.05), end)
        ends.setdefault(near, []).append(row)
    lowest = 0.0
    for end, group in ends.items():
        lowest = max(end, lowest * gap)  # names do not overlap
        names = " ".join(r["model"].upper() + "*" * (r["run"] == "published") for r in group)
        names = names.replace("TNPD", "TNP-D")
        colour = next((COLOURS[r["model"]] for r in group if r["model"] in COLOURS), "#5f6876")
        panel.annotate(names, (group[0]["sizes"][-1], lowest), xytext=(6, -2), textcoords="offset points",
                       fontsize=7, color=colour)  # fmt: skip


if __name__ == "__main__":
    main()

"""The tables of docs/performance.md; empty where nothing has been measured yet."""

import json
from pathlib import Path
from typing import Any

from bench import SIZES

RESULTS = Path(__file__).parent / "results"
MIB = 2**20
ERRORS = "value, largest", "value, rms", "lse"
CEILINGS = "of_exponential_ceiling", "of_product_ceiling"
LITERALS = {
    "times_the_literal": "literal in chunks", "times_at_once": "literal at once",
    "times_the_literal_in_tf32": "in chunks, TF32", "times_at_once_in_tf32": "at once, TF32",
}  # fmt: skip
Rows = list[dict[str, Any]]


def content(name: str) -> dict[str, Any]:
    """A file of rows with where they come from; of none, no rows."""
    path = RESULTS / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else {"rows": []}


def of(section: str, name: str = "gpu") -> Rows:
    return [row for row in content(name)["rows"] if row.get("section") == section]


def table(heads: tuple[str, ...], lines: list[list[str]]) -> str:
    """Markdown; nothing where there are no lines."""
    if not lines:
        return ""
    every = [list(heads), ["---"] * len(heads), *lines]
    return "\n".join(f"| {' | '.join(line)} |" for line in every)


def rounding() -> str:
    rows = [row for row in content("rounding")["rows"] if row["points"] == 784]
    lines = [[row["rounded"], row["operands"], *_errors(row)] for row in rows]
    return table(("what is rounded", "operands", *ERRORS), lines)


def errors() -> str:
    lines = [[row["precision"], f"{row['points']:,}", *_errors(row)] for row in of("errors")]
    scores = [[row["conditioning"], f"{row['change']:+.1e}"] for row in of("likelihood")]
    tables = (
        table(("precision", "points", *ERRORS), lines),
        table(("conditioning by", "changes the log-likelihood of a target by"), scores),
    )
    return "\n\n".join(filter(None, tables))


def _errors(row: dict[str, Any]) -> list[str]:
    return [f"{row[key]:.1e}" for key in ("value", "value_rms", "lse")]


def ceilings() -> str:
    rows = of("ceilings")
    if not rows:
        return ""
    rates = {name: rate for name, rate in rows[-1].items() if name not in ("section", "what")}
    lines = [
        [name.split(",")[0].removesuffix("/s"), f"{rate:.3g}", name.rpartition(", ")[2].removesuffix("/s")]
        for name, rate in rates.items()
    ]
    reached = [
        [
            f"{row['points']:,}",
            f"{row['points_a_second']:.3g}",
            *(f"{100 * row[key]:.0f} %" for key in CEILINGS),
        ]
        for row in of("condition")
        if CEILINGS[0] in row
    ]
    heads = "points", "points a second", "of the exponential ceiling", "of the product ceiling"
    measured = f"Measured on {content('gpu')['device']}:"
    return "\n\n".join([measured, table(("ceiling", "a second", "unit"), lines), table(heads, reached)])


def condition() -> str:
    lines = [
        [f"{row['points']:,}", row["how"], _ms(row), f"{row['points_a_second']:.3g}",
         *(f"{row[key]:g}x" if key in row else "" for key in LITERALS),
         f"{row['extra_bytes'] / MIB:,.0f}"]
        for row in of("condition") + of("streamed")
    ]  # fmt: skip
    heads = "points", "", "ms", "points a second", *LITERALS.values(), "extra MiB"
    return table(heads, lines)


def phases() -> str:
    """Updates, reads, queries, small batches and steps of training on them."""
    lines = [
        [f"update by one point, {_counted(row['streams'], 'stream')}", row["how"], _ms(row), _times(row)]
        for row in of("update")
    ]
    for row in of("read"):
        what = f"{row['what']}, {_counted(row['targets'], 'target')}" if "targets" in row else row["what"]
        lines.append([what, row["how"], _ms(row), _times(row)])
    lines += [[row["what"], row["how"], _ms(row), ""] for row in of("small")]
    for row in content("training_step")["rows"]:
        lines.append(["training step of 100 tasks", row["what"], _ms(row), f"{row['times_faster']:g}x"])
    return table(("", "", "ms", "literal"), lines)


def training() -> str:
    """Constant-memory training by our kernels and by PyTorch's operators, and how good gradients are."""
    steps = of("steps", "gpu_training")
    wrong = {row["precision"]: f"{row['worst']:.1e}" for row in of("errors", "gpu_training")}
    sizes = sorted({row["points"] for row in steps})
    found = {(row["what"], row["how"], row["points"]): row for row in steps}
    lines = []
    for what, how in dict.fromkeys((row["what"], row["how"]) for row in steps):
        at = [found.get((what, how, n)) for n in sizes]
        ratios = [(at[-1] or {}).get(f"times_{other}") for other in ("literal", "plain_tf32")]
        lines.append([
            what, how, *("" if row is None else _ms(row) for row in at),
            *(f"{ratio:.1f}x" if ratio else "" for ratio in ratios),
            "" if at[-1] is None else f"{at[-1]['extra_bytes'] / MIB:,.0f}", wrong.get(how, ""),
        ])  # fmt: skip
    most = f"{max(sizes, default=0):,}"
    heads = (
        "", "", *(f"ms, {n:,} points" for n in sizes), f"literal, {most}", f"plain tf32, {most}",
        f"extra MiB, {most}", "worst gradient off by",
    )  # fmt: skip
    return table(heads, lines)


def summary() -> list[str]:
    """The lines of the README's table that a GPU is good for."""
    lines = []
    names = {"half": "half precision", "tf32": "TF32"}
    for row in of("condition"):
        if row["points"] == 10**6 and row["how"] in names:
            chunks, once, *in_tf32 = (row[key] for key in LITERALS)
            tf32 = " and ".join(f"{ratio:g}x" for ratio in in_tf32)
            ratios = f"**{chunks:g}x** the rate ({once:g}x at once; {tf32} if the literal is in TF32)"
            lines.append(f"| condition on 1e6 points, {names[row['how']]} | {ratios} | 1x |")
    for row in of("update"):
        if row["how"] == "half" and row["streams"] in (1, 4096):
            what = f"update by one point, {_counted(row['streams'], 'stream')}"
            lines.append(f"| {what} | **{row['times_the_literal']:,.0f}x** faster, {_ms(row)} ms | 1x |")
    lines += [
        f"| read | **{row['times_the_literal']:.0f}x** faster, {_ms(row)} ms | 1x |"
        for row in of("read")
        if "replayed" in row["how"]
    ]
    steps = of("steps", "gpu_training")
    literal = max((row["extra_bytes"] for row in steps if row["how"] == "literal"), default=0)
    for row in steps:
        if (row["what"], row["points"], row["how"]) == ("forward and backward", 10**6, "half"):
            fast = f"**{row['times_literal']:.1f}x** faster, {_ms(row)} ms"
            fast += f" ({row['times_plain_tf32']:.1f}x than by PyTorch's operators)"
            lines.append(f"| forward and backward, context of 1e6 | {fast} | 1x |")
            peak = f"{row['extra_bytes'] / 1e6:.0f} MB | {literal / 1e9:.0f} GB (dense)"
            lines.append(f"| extra peak, the same | {peak} |")
    return [f"| *on {content('gpu')['device']}* | | |", *lines] if lines else []


def claims() -> list[tuple[str, str, str, str]]:
    """The README's lines: conditioning on a million points, and a step of training on them."""
    by = {row["how"]: row for row in of("condition") if row["points"] == 10**6}
    half, literal, fastest = (
        by[how] for how in ("half", "literal, chunks of 16,384", "literal, tf32, at once")
    )
    steps = {row["how"]: row for row in of("steps", "gpu_training")
             if (row["what"], row["points"]) == ("forward and backward", 10**6)}  # fmt: skip
    own, dense = (
        f"{_ms(steps[how])} ms, {steps[how]['extra_bytes'] / 1e9:.2g} GB" for how in ("half", "literal")
    )
    where = content("gpu")["device"].removeprefix("NVIDIA ")
    return [
        (f"the same on an {where}, half precision", f"{_ms(half)} ms",
         f"{_ms(literal)} ms ({_ms(fastest)} in TF32)",
         f"{half['times_the_literal']:.0f}x ({half['times_at_once_in_tf32']:.0f}x)"),
        ("forward and backward through them", own, dense, f"{steps['half']['times_literal']:.1f}x"),
    ]  # fmt: skip


def whole_layers() -> str:
    """Forward and backward of layers as one operator each, and of PyTorch's operators."""
    found: dict[str, dict[str, Any]] = {}
    for row in content("layers")["rows"]:
        layer, _, what = row["what"].partition(": ")
        found.setdefault(layer, {})[what] = row
    lines = []
    for layer, by in found.items():
        if not {"errors", "whole", "operators, eager"} <= by.keys():
            continue
        times = [by[how]["microseconds"] for how in ("whole", "operators, eager")]
        errors = [by["errors"][how]["gradient"] for how in ("whole", "operators")]
        lines.append([layer, *(f"{t:g}" for t in times), f"{times[1] / times[0]:.1f}x", *errors])
    heads = "layer", "whole, us", "operators, us", "", "error of the worst gradient, whole", "operators"
    return table(heads, lines)


def bench() -> str:
    """What `bench.py` found on a CPU."""
    lines = []
    for row in content("bench")["rows"]:
        ratio = f"{row['ratio']:g}x {row['against']}" if "ratio" in row else ""
        size = ", ".join(f"{row[key]:,} {key}" for key in SIZES if key in row)
        lines.append([row["bench"], row["axis"], size, row["how"], _ms(row), ratio])
    return table(("", "against", "size", "", "ms", "times as fast as"), lines)


def _counted(number: int, thing: str) -> str:
    return f"{number:,} {thing}{'' if number == 1 else 's'}"


def _ms(row: dict[str, Any]) -> str:
    return f"{row['milliseconds']:,.3g}" if row["milliseconds"] < 100 else f"{row['milliseconds']:,.0f}"


def _times(row: dict[str, Any]) -> str:
    return f"{row['times_the_literal']:,g}x" if "times_the_literal" in row else ""


TABLES = {
    "rounding": rounding, "gpu errors": errors, "gpu ceilings": ceilings, "gpu conditioning": condition,
    "gpu phases": phases, "gpu training": training, "whole layers": whole_layers, "bench": bench,
}  # fmt: skip

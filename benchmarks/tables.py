"""Writes the measured tables of README.md and of the pages in docs/ from the committed rows.

python benchmarks/tables.py            # rewrite them
python benchmarks/tables.py --check    # exit 1 where they differ
"""

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attack
import event_tables
import gp_joint
import gp_limits
import gpu_tables
import learner_tables
import prediction_tables
import serving_tables

from constmem.core import title_of as model_name
from constmem.core.files import write_text
from constmem.data.catalogue import EVENTS, title_of
from constmem.evaluation.rows import compare, typed_rows
from constmem.evaluation.tables import markdown

ROOT = Path(__file__).parents[1]
MB = 1e6


def rows(name: str) -> list[dict[str, Any]]:
    return json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())["rows"]


def measured() -> str:
    memory, update = rows("memory"), rows("update")
    condition = {r["points"]: r for r in memory if r["what"] == "condition"}
    few, many = condition[10**4], condition[max(condition)]
    query = [r for r in memory if r["what"] == "query"]
    train = [r for r in memory if r["what"] == "forward and backward"]
    one = {r["what"]: r for r in update}
    by_chunk = {what: r for what, r in one.items() if what.startswith("condition")}
    lines = ["| | constmem | literal |", "|---|---|---|"]
    for r in (few, condition[10**6], many):
        literal = f"{r['peak_literal'] / MB:.0f} MB" if "peak_literal" in r else "not run"
        lines.append(
            f"| extra peak, conditioning on {r['points']:,} points | {r['peak'] / MB:.1f} MB | {literal} |"
        )
    lines.append(
        f"| extra peak, query of {query[0]['targets']:,} and {query[-1]['targets']:,} targets, no outputs | "
        f"{query[0]['peak_without_outputs'] / MB:.1f} and {query[-1]['peak_without_outputs'] / MB:.1f} MB | |"
    )
    lines += [
        f"| extra peak, forward and backward, context of {r['points']:,} | {r['peak'] / MB:.0f} MB | "
        f"{r['peak_dense'] / MB:.0f} MB (dense) |"
        for r in train
    ]
    lines.append(f"| bytes remembered after 1,000 and after {max(condition):,} points | "
                 f"{condition[10**3]['remembered']:,} and {many['remembered']:,} | |")  # fmt: skip
    for what, r in by_chunk.items():
        lines.append(f"| {what} | **{r['ratio']}x** the rate | 1x |")
    r = one["update by one point"]
    lines.append(f"| update by one point | **{r['ratio']}x** faster | 1x |")
    r = one["update by one point after 1e6 points and after 1e3"]
    lines.append(f"| time of an update after 1e6 points over that after 1e3 | {r['ratio']} | |")
    return "\n".join(lines + gpu_tables.summary())


def claims() -> str:
    """The six lines of the README, and how good the models are: figures beside their ratios."""
    condition = next(r for r in rows("memory") if r["what"] == "condition" and r["points"] == 10**6)
    by = {r["what"]: r for r in rows("update")}
    once, many = by["update by one point"], by["condition on 1e6 points (literal: chunks of 1024)"]
    lines = [("peak, conditioning on 1,000,000 points", f"{condition['peak'] / MB:.1f} MB",
              f"{condition['peak_literal'] / MB:.0f} MB",
              f"{condition['peak_literal'] / condition['peak']:.0f}x")]  # fmt: skip
    for what, r in (("update by one point", once), ("condition on 1,000,000 points", many)):
        own, literal = (_seconds(r["milliseconds"][who]) for who in ("constmem", "literal"))
        lines.append((what, own, literal, f"{r['ratio']:.3g}x"))
    lines += [*gpu_tables.claims(), event_tables.claim()]
    table = ["|  |constmem|baseline|ratio|", "|---|---|---|---|", *(f"|{'|'.join(line)}|" for line in lines)]
    return "\n".join([*table, "", _quality()])


def _seconds(milliseconds: float) -> str:
    return f"{milliseconds:.3g} ms" if milliseconds < 1000 else f"{milliseconds / 1000:.3g} s"


def _quality() -> str:
    """Where CMANP stands against the paper's own figures, above and below."""
    parts = []
    for dataset in ("emnist", "celeba32", "celeba128"):
        wanted = ("cmanp", "improved")
        entries = compare(typed_rows(rows(dataset), dataset))
        (entry,) = (e for e in entries if (e.first.model, e.first.recipe) == wanted)
        for name, published in entry.first.published.items():
            of = "" if name == "test" else f"{name} classes, "
            parts.append(
                f"{entry.figure(name, 'log_likelihood_by_batch').mean:.2f} ({of}published {published:.2f})"
            )
    return (
        f"CMANP's log-likelihood a pixel: EMNIST {parts[0]} and {parts[1]}; a seventh of CelebA's faces at "
        f"32x32 {parts[2]}; an eighteenth of them at 128x128 {parts[3]}."
    )


def since() -> str:
    """What became faster or slower since version 0.1."""
    lines = ["| CMANP at the paper's size | version 0.1 | now | ratio |", "|---|---|---|---|"]
    for r in rows("compared"):
        taken = (f"{r[which]:.3g} ms" for which in ("before", "milliseconds"))
        lines.append(f"| {r['what']} | {' | '.join(taken)} | {r['ratio']:.2f} |")
    return "\n".join(lines)


def numbers() -> str:
    numerics = rows("numerics")
    lines = ["| single-point updates | | error of lse (log C) | error of value |", "|---|---|---|---|"]
    lines += [
        f"| {r['updates']:,} | {r['what']} | {r['log_c_error']:.1e} | {r['embedding_error']:.1e} |"
        for r in numerics
        if "log_c_error" in r
    ]
    lines += ["", "| a CMANP updated point by point in float32, against a float64 one conditioned at once | "
              "lse | value | predicted mean | predicted deviation |", "|---|---|---|---|---|"]  # fmt: skip
    for r in numerics:
        if "mean_error" in r:
            errors = " | ".join(
                f"{r[k]:.1e}" for k in ("lse_error", "value_error", "mean_error", "stddev_error")
            )
            lines.append(
                f"| {r['what'].removeprefix('whole model, ')}, {r['updates']:,} updates | {errors} |"
            )
    lines += [
        "",
        "Errors of the lse in the first table are absolute; all others are relative to the largest entry.",
    ]
    return "\n".join(lines)


def reproduction() -> str:
    """The image table as far as it was trained, then what else there is to say of it."""
    coverage = next(r for r in rows("emnist") if r["model"] == "cmanp")["scores"]["seen"]["coverage"]
    fast = {r["what"].removeprefix("constmem, "): r["times_faster"] for r in rows("training_step")}
    more = (
        f"CMANP's central 50 % and 90 % intervals hold {100 * coverage['0.5']:.0f} % and "
        f"{100 * coverage['0.9']:.0f} % of the seen classes' pixels: [a head](predictions.md) mends that.",
        "A training step of CMANP on a GPU (batch 100, 100 + 100 points), captured in a graph, is "
        f"{fast['captured, tf32']:.1f} times (tf32) and {fast['captured, bf16']:.1f} times (bf16) "
        "as fast as the literal algorithm run eagerly.",
    )
    others = [
        trained(name) for name in ("celeba32", "celeba32-longer", "celeba64", "celeba128", "gp", "gp-moments")
    ]
    functions = gp_limits.summary(rows("gp_limits")), gp_joint.summary(rows("gp_joint"))
    return "\n\n".join([trained("emnist"), *more, *filter(None, others), *functions])


def compared() -> str:
    """What was tried to make models that read through latents learn faces faster."""
    head = "| CelebA 32x32 | changed | steps | by batch | by point | minutes |"
    lines = [head, "|---|---|---|---|---|---|"]
    for row in rows("celeba32-compared"):
        score = row["scores"]["test"]
        lines.append(
            f"| {model_name(row['model'])} | {row['what']} | {row['steps']:,} | "
            f"{score['log_likelihood_by_batch']:.2f} | {score['log_likelihood']:.2f} | {row['minutes']:.1f} |"
        )
    return "\n".join(lines)


COLUMNS = (
    ("condition", "N"),
    ("query", "N"),
    ("query", "M"),
    ("update", "N"),
    ("update", "D"),
    ("kept", "N"),
)


def complexity(style: str) -> str:
    """The paper's memory table as measured with one style of attention."""
    found = [r for r in rows("complexity") if r["attention"] == style]
    lines = [
        "| | condition, N | query, N | query, M | update, N | update, D | kept, N |",
        "|---|---|---|---|---|---|---|",
    ]
    for model, run in dict.fromkeys((r["model"], r["run"]) for r in found):
        own = {(r["phase"], r["against"]): r for r in found if (r["model"], r["run"]) == (model, run)}
        name = model_name(model) + (" as published" if run == "published" else "")
        lines.append(f"| {name} | {' | '.join(_mark(own.get(column)) for column in COLUMNS)} |")
    return "\n".join(lines)


def _mark(row: dict[str, Any] | None) -> str:
    """Constant, linear with its bytes a point, or quadratic with its exponent; and the paper's mark."""
    if row is None:
        return "-"
    size = row["bytes_a_point"]
    detail = {
        "constant": f"{row['peaks'][-1] / 1e3:,.0f} kB",
        "linear": f"{size:,.0f} B",
        "quadratic": f"exponent {row['exponent']}",
    }[row["verdict"]]
    paper = row["paper"]
    judged = "" if paper is None else " ✓" if paper == row["verdict"] else f"; **paper: {paper}**"
    return f"{row['verdict']} ({detail}){judged}"


def trained(dataset: str) -> str:
    """The table of models on a data set with its command; nothing where none was trained yet."""
    path = ROOT / "benchmarks" / "results" / f"{dataset}.json"
    if not path.exists():
        return ""
    content = json.loads(path.read_text())
    parts = [markdown(compare(typed_rows(content["rows"], path))), f"`{content['command']}`"]
    return "\n\n".join([*parts, *([content["note"]] if "note" in content else [])])


def events(dataset: str) -> str:
    """The same of event models, under a heading of its own."""
    table = trained(dataset)
    return f"### {title_of(dataset)}\n\n{table}" if table else ""


def optimisers() -> str:
    """Held-out log-likelihood by optimiser and rate."""
    found = rows("optimisers")
    first, rates = found[0], sorted({r["lr"] for r in found})
    lines = [
        f"| rate, {first['steps']:,} steps | " + " | ".join(f"{lr:g}" for lr in rates) + " |",
        "|---" * (1 + len(rates)) + "|",
    ]
    for name in dict.fromkeys(r["optimiser"] for r in found):
        own = {r["lr"]: r["validation"] for r in found if r["optimiser"] == name}
        cells = (f"{own[lr]:.2f}" if lr in own else "" for lr in rates)
        lines.append(f"| {name.capitalize()} | {' | '.join(cells)} |")
    lines += ["", "Log-likelihood of a point on held-out images, a small CMANP on EMNIST's digits."]
    return "\n".join(lines)


def at_full_size() -> str:
    """The models that were trained by both optimisers, with what else differed."""
    lines = [
        "| EMNIST, by batch | Adam: seen, unseen | steps | Muon: seen, unseen | steps |",
        "|---|---|---|---|---|",
    ]
    muon = {r["model"]: r for r in reversed(rows("emnist"))}  # seed 0 of each
    for r in rows("emnist-adam"):
        other = muon[r["model"]]
        cells = [text for row in (r, other) for text in (_both(row), f"{row['steps']:,}")]
        lines.append(f"| {model_name(r['model'])} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _both(row: dict[str, Any]) -> str:
    return ", ".join(f"{row['scores'][name]['log_likelihood_by_batch']:.2f}" for name in ("seen", "unseen"))


def place(path: Path, name: str, table: str) -> str:
    """The text of a file with a table between its two marks; they must be there."""
    before, mark, rest = path.read_text().partition(f"<!-- {name} -->")
    _, end, after = rest.partition(f"<!-- /{name} -->")
    if not (mark and end):
        sys.exit(f"{path.name}: it has no marks <!-- {name} --> and <!-- /{name} --> for its table")
    return f"{before}<!-- {name} -->\n{table}{chr(10) if table else ''}<!-- /{name} -->{after}"


def documents() -> Iterator[tuple[Path, str, str]]:
    """Every table: the page it is on, its name there, and what it should say."""
    docs = ROOT / "docs"
    pages = {"tables": learner_tables.TABLES, "predictions": prediction_tables.TABLES}
    pages |= {"serving": serving_tables.TABLES}
    yield ROOT / "README.md", "measured", claims()
    yield docs / "performance.md", "measured", measured()
    yield docs / "performance.md", "since", since()
    for page, tables in pages.items():
        for name, written in tables.items():
            yield docs / f"{page}.md", name, written()
    yield docs / "reproduction.md", "reproduction", reproduction()
    yield docs / "reproduction.md", "compared", compared()
    yield docs / "reproduction.md", "events", event_tables.summary()
    yield docs / "reliability.md", "attack", attack.table()
    yield docs / "idea.md", "numbers", numbers()
    yield docs / "memory.md", "fused", complexity("fused")
    yield docs / "training.md", "optimisers", optimisers()
    yield docs / "training.md", "at full size", at_full_size()
    yield docs / "memory.md", "written out", complexity("written out")
    for dataset in EVENTS:
        yield docs / "event-models.md", dataset, events(dataset)
    for dataset in ("taxi", "mooc"):
        yield docs / "event-models.md", f"ablation {dataset}", event_tables.ablation(dataset)
    yield docs / "event-models.md", "event cost", event_tables.costs()
    for name, written in gpu_tables.TABLES.items():
        yield docs / "performance.md", name, written() or "*Not measured yet.*"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    for path, name, table in documents():
        text = place(path, name, table)
        if check and text != path.read_text():
            sys.exit(f"{path.name}: its table {name!r} is not what the rows say: run benchmarks/tables.py")
        if not check:
            write_text(path, text)


if __name__ == "__main__":
    main()

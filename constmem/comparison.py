"""A table like the paper's: models against test sets, ours beside the published, seeds together."""

import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean, stdev
from typing import Any

PAPER = ("cnp", "canp", "np", "anp", "bnp", "banp", "tnpd", "eqtnp", "lbanp", "cmanp")
NAMES = {
    "emnist": "EMNIST",
    "celeba32": "CelebA 32x32",
    "celeba64": "CelebA 64x64",
    "celeba128": "CelebA 128x128",
    "digits": "digits 8x8",
    "gp": "Gaussian processes",
}
MODEL_NAMES = {"tnpd": "TNP-D"}
Rows = list[dict[str, Any]]


@dataclass(frozen=True)
class Figure:
    """The mean over seeds, and their standard deviation where there are several."""

    mean: float
    spread: float | None

    def __str__(self) -> str:
        return f"{self.mean:.2f}" + ("" if self.spread is None else f" ± {self.spread:.2f}")


@dataclass(frozen=True)
class Entry:
    """All runs of one model by one recipe on one data set.

    Attributes:
        seeds: of the runs that the figures are means over.
        by_batch: log-likelihood of each test set as the reference takes it, the one to compare with
            the published: the unweighted mean over batches.
        by_point: the same as the mean over points.
        published: the paper's, where it has one.
        minutes: of training, the mean over runs.
    """

    dataset: str
    model: str
    recipe: str
    seeds: list[int]
    by_batch: dict[str, Figure]
    by_point: dict[str, Figure]
    published: dict[str, float]
    parameters: int
    steps: int
    batch: int
    minutes: float
    device: str


def read_rows(paths: Iterable[Path]) -> Rows:
    """The rows of run folders (their eval.json) and of JSON files with one row or many."""
    found: Rows = []
    for path in paths:
        file = path / "eval.json" if path.is_dir() else path
        if not file.is_file():
            what = f"{path} holds no scores: run `constmem eval {path}` first" if path.is_dir() else (
                f"there is no run folder or JSON file {path}")  # fmt: skip
            raise FileNotFoundError(what)
        try:
            content = json.loads(file.read_text())
        except json.JSONDecodeError as error:
            raise ValueError(
                f"{file} is not JSON ({error}): expected rows that `constmem eval` wrote"
            ) from error
        rows = content.get("rows", [content]) if isinstance(content, dict) else content
        for row in rows:
            missing = {"dataset", "model", "recipe", "seed", "scores", "settings"} - set(row)
            if missing:
                raise ValueError(
                    f"{file} has a row without {', '.join(sorted(missing))}: not one of an evaluation"
                )
        found += rows
    return found


def compare(rows: Rows, *, dataset: str | None = None) -> list[Entry]:
    """Rows of the same model, recipe and settings as one entry each, in the order of the paper.

    Of two rows of one seed the newer counts.
    """
    groups: dict[str, dict[int, dict[str, Any]]] = {}
    for row in sorted(rows, key=lambda row: row.get("date", "")):
        if dataset is None or row["dataset"] == dataset:
            key = json.dumps([row[k] for k in ("dataset", "model", "recipe", "settings")], sort_keys=True)
            groups.setdefault(key, {})[row["seed"]] = row
    if not groups:
        have = ", ".join(sorted({row["dataset"] for row in rows})) or "no rows at all"
        raise ValueError(f"there are no rows of {dataset or 'any data set'}: there are {have}")
    return sorted((_entry(list(seeds.values())) for seeds in groups.values()), key=_place)


def _entry(rows: Rows) -> Entry:
    first = rows[0]
    tests = [name for name in first["scores"] if all(name in row["scores"] for row in rows)]

    def figures(key: str) -> dict[str, Figure]:
        values = {test: [row["scores"][test][key] for row in rows] for test in tests}
        return {test: Figure(mean(v), stdev(v) if len(v) > 1 else None) for test, v in values.items()}

    return Entry(
        dataset=first["dataset"], model=first["model"], recipe=first["recipe"],
        seeds=sorted(row["seed"] for row in rows),
        by_batch=figures("log_likelihood_by_batch"), by_point=figures("log_likelihood"),
        published=first.get("published") or {}, parameters=first["parameters"],
        steps=max(row["steps"] for row in rows), batch=first["settings"]["batch"],
        minutes=mean(row["minutes"] for row in rows),
        device=", ".join(sorted({row["device"] for row in rows})),
    )  # fmt: skip


def _place(entry: Entry) -> tuple[Any, ...]:
    def rank(name: str, names: Sequence[str]) -> int:
        return names.index(name) if name in names else len(names)

    model, _, variant = entry.model.partition("-")
    recipe = rank(entry.recipe, ("faithful", "improved"))
    return rank(entry.dataset, list(NAMES)), entry.dataset, recipe, rank(model, PAPER), variant, entry.steps


def tabulate(entries: list[Entry]) -> list[tuple[str, list[str], list[list[str]]]]:
    """For each data set its name, the heads of the columns, and the cells: what every form of table shows."""
    tables = []
    for dataset in dict.fromkeys(entry.dataset for entry in entries):
        own = [entry for entry in entries if entry.dataset == dataset]
        tests = list(dict.fromkeys(test for entry in own for test in entry.by_batch))
        published = {test: any(test in entry.published for entry in own) for test in tests}
        head = ["model", "recipe"]
        for test in tests:
            head += [f"{test}, by batch", *(["published"] if published[test] else []), "by point"]
        head += ["parameters", "steps x batch", "minutes", "device", "seeds"]
        cells = []
        for entry in own:
            row = [model_name(entry.model), entry.recipe]
            for test in tests:
                paper = f"{entry.published[test]:.2f}" if test in entry.published else ""
                row += [str(entry.by_batch.get(test, "")), *([paper] if published[test] else [])]
                row.append(str(entry.by_point.get(test, "")))
            size = f"{entry.steps:,} x {entry.batch}"
            row += [
                f"{entry.parameters:,}",
                size,
                f"{entry.minutes:.1f}",
                entry.device,
                str(len(entry.seeds)),
            ]
            cells.append(row)
        tables.append((NAMES.get(dataset, dataset), head, cells))
    return tables


def model_name(model: str) -> str:
    """A model as people write it: cmanp-small is CMANP-small."""
    base, dash, variant = model.partition("-")
    return f"{MODEL_NAMES.get(base, base.upper())}{dash}{variant}"


def markdown(entries: list[Entry]) -> str:
    """The tables in Markdown."""
    parts = []
    for name, head, rows in tabulate(entries):
        lines = [[name, *head[1:]], ["---"] * len(head), *rows]
        parts.append("\n".join(f"| {' | '.join(line)} |" for line in lines))
    return "\n\n".join(parts)


def as_json(entries: list[Entry]) -> str:
    """The entries in JSON."""
    return json.dumps([asdict(entry) for entry in entries], indent=1)


def show(entries: list[Entry]) -> None:
    """The tables on a terminal."""
    from rich.console import Console
    from rich.table import Table

    for name, head, rows in tabulate(entries):
        table = Table(title=f"{name}: log-likelihood of a point", title_justify="left")
        for column in head:
            table.add_column(column, justify="left" if column in ("model", "recipe", "device") else "right")
        for row in rows:
            table.add_row(*row)
        Console(width=None if sys.stdout.isatty() else 160).print(table)

"""The tables of docs/predictions.md: grey levels, targets predicted together, Bayesian optimisation."""

from collections.abc import Callable
from statistics import median
from typing import Any

import emnist_joint
import grey_levels
from event_tables import content

PUBLISHED = {"rbf": 1.48, "matern": 0.96}  # of CMANP-AND, by batch


def variant(dataset: str, model: str) -> dict[str, Any]:
    """The row of a variant."""
    found: dict[str, Any] = next(
        row for row in content("variants")["rows"] if (row["dataset"], row["model"]) == (dataset, model)
    )
    return found


def levels() -> str:
    """Normals beside grey levels, on the same measure."""
    row = variant("emnist", "cmanp-calibrated")
    rows = content("grey_levels")["rows"]
    rows += [
        {"model": "`cmanp-calibrated`", "test": test, **scores} for test, scores in row["scores"].items()
    ]
    return grey_levels.summary(rows)


def low_rank() -> str:
    """Each target by itself, and all of a task together."""
    lines = [
        "| `cmanp-joint`, nats a target | each by itself, by point | all together, by point | "
        "all together, by batch | published (CMANP-AND) |",
        "|---|---|---|---|---|",
    ]
    for dataset in ("gp", "emnist"):
        for test, scores in variant(dataset, "cmanp-joint")["scores"].items():
            keys = "log_likelihood", "joint_log_likelihood", "joint_log_likelihood_by_batch"
            cells = [f"{scores[key]:.2f}" for key in keys]
            published = f"{PUBLISHED[test]:.2f}" if test in PUBLISHED else ""
            lines.append(f"| {dataset}, {test} | {' | '.join(cells)} | {published} |")
    return "\n".join(lines)


def emnist() -> str:
    """Pixels given the context, and given those before."""
    return emnist_joint.summary(content("emnist_joint")["rows"])


def regret() -> str:
    """Of Bayesian optimisation."""
    rows = content("bayesian_optimisation")["rows"]
    if not rows:
        return "*Not measured yet.*"
    steps, seeds = rows[0]["steps"], len({row["seed"] for row in rows})
    lines = [
        f"| median regret of {seeds} runs | after {steps // 2} steps: constant memory | Gaussian process | "
        f"random | after {steps} steps: constant memory | Gaussian process | random |",
        "|---" * 7 + "|",
    ]
    for name in dict.fromkeys(row["function"] for row in rows):
        cells = [
            f"{median(row[key] for row in rows if (row['function'], row['way']) == (name, way)):.3g}"
            for key in ("half", "all")
            for way in ("constant memory", "Gaussian process", "random")
        ]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join([*lines, "", "`python benchmarks/bayesian_optimisation.py`, LogEI, one point a step."])


TABLES: dict[str, Callable[[], str]] = {
    "levels": levels, "low rank": low_rank, "one after another": emnist, "regret": regret,
}  # fmt: skip

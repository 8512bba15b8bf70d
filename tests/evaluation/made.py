"""Rows as `constmem eval` writes them, with figures that are easy to compute with."""

from typing import Any

from constmem.evaluation import PUBLISHED
from constmem.evaluation.rows import Row, typed_rows

SETTINGS = {"batch": 256, "steps": 100}
POINTS: dict[str, Any] = {
    "log_likelihood": 1.0, "log_likelihood_by_batch": 2.0, "rmse": 0.25, "crps": 0.125,
    "coverage": {"0.5": 0.625, "0.9": 0.875}, "points": 9,
}  # fmt: skip
EVENTS: dict[str, Any] = {
    "nll": -0.4, "time_nll": -0.7, "mark_nll": 0.3, "rmse": 0.28, "mae": 0.2, "rmse_median": 0.3,
    "mae_median": 0.1349, "accuracy": 0.9, "error": 0.1, "top5": 0.998, "accuracy_given_gap": 0.92,
    "top5_given_gap": 0.999, "ks": 0.006, "ks_p_value": 0.5, "coverage": {"0.9": 0.9}, "unit": "hour",
    "events": 9, "sequences": 3,
}  # fmt: skip
COLUMNS: dict[str, Any] = {"file": "d1/s.csv", "x": ["a"], "y": ["b"], "group": None}


def row(content: dict[str, Any]) -> Row:
    (found,) = typed_rows([content], "a test")
    return found


def image_content(seed: int = 0, **more: Any) -> dict[str, Any]:
    """Of EMNIST; the log-likelihood of seed s is 1 + s / 10, by batch 2 + s / 10, of letters 0.5 less."""
    seen = POINTS | {"log_likelihood": 1 + seed / 10, "log_likelihood_by_batch": 2 + seed / 10}
    unseen = seen | {key: seen[key] - 0.5 for key in ("log_likelihood", "log_likelihood_by_batch")}
    return {
        "dataset": "emnist", "model": "cmanp", "recipe": "improved", "seed": seed, "settings": SETTINGS,
        "scores": {"seen": seen, "unseen": unseen},
        "published": PUBLISHED["emnist"]["cmanp"], "steps": 100, "minutes": 2.0 + seed, "parameters": 1234,
        "device": "a GPU", "date": f"2026-01-0{seed + 1}",
    } | more  # fmt: skip


def own_content(seed: int = 0, **more: Any) -> dict[str, Any]:
    """Of rows of one's own."""
    return {
        "dataset": "s.csv", "model": "cmanp-small", "recipe": "own data", "seed": seed,
        "settings": {"batch": 8, "steps": 400}, "scores": {"test": POINTS},
        "published": None, "steps": 400, "minutes": 1.0, "parameters": 1234, "device": "CPU",
        "data": "s.csv: 40 rows, 1 inputs, 1 outputs", "contents": "aa", "columns": COLUMNS,
        "date": f"2026-01-0{seed + 1}",
    } | more  # fmt: skip


def event_content(seed: int = 0, *, scores: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    """Of Taxi; the NLL of seed s is -0.4 - s / 100."""
    own = EVENTS | {"nll": -0.4 - seed / 100} | (scores or {})
    return {
        "dataset": "taxi", "model": "gru", "recipe": "improved", "seed": seed,
        "settings": {"batch": 64, "steps": 100, "model": {"num_marks": 10}}, "scores": {"test": own},
        "published": PUBLISHED["taxi"]["gru"], "true": None, "steps": 100, "minutes": 2.0 + seed,
        "parameters": 38522, "device": "CPU", "date": f"2026-01-0{seed + 1}",
    } | more  # fmt: skip


def image_row(seed: int = 0, **more: Any) -> Row:
    return row(image_content(seed, **more))


def own_row(seed: int = 0, **more: Any) -> Row:
    return row(own_content(seed, **more))


def event_row(seed: int = 0, *, scores: dict[str, Any] | None = None, **more: Any) -> Row:
    return row(event_content(seed, scores=scores, **more))


def scored(seed: int, rmse: float, crps: float, inside: float, **more: Any) -> Row:
    """A row of one test set with other scores of its own."""
    seen = image_content(seed)["scores"]["seen"]
    own = seen | {"rmse": rmse, "crps": crps, "coverage": {"0.9": inside}}
    return image_row(seed, scores={"seen": own}, **more)


THREE = [scored(0, 0.2, 0.10, 0.90), scored(1, 0.3, 0.12, 0.91), scored(4, 0.7, 0.17, 0.95)]

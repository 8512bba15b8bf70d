"""What the commands on tables do: fit, update, predict and score a file that may be larger than memory."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import sqrt
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from constmem.data.rows import free, place_of, writing
from constmem.tabular.base import load
from constmem.tabular.estimators import StreamingClassifier, StreamingRegressor
from constmem.tabular.files import Chunk, TableFile, table_file
from constmem.tabular.frames import Kind, missing

Estimator = StreamingRegressor | StreamingClassifier
Report = Callable[[int, int], None]  # how much is done, of how much
SAMPLE = 4096  # rows of the whole file that columns and features are frozen by
COVERAGE = 0.9  # of the intervals that are scored
ROUNDING = 1e-12  # of the mean square: less is no spread
TASKS = ("auto", "regression", "classification")


@dataclass
class Outcome:
    """What a command has done: rows learned, predicted or scored, rows left out, and scores."""

    rows: int = 0
    left_out: int = 0
    task: str = ""
    scores: dict[str, float] = field(default_factory=dict)


def fit_file(
    table: Path,
    out: Path,
    targets: Sequence[str],
    *,
    task: str = "auto",
    ignore: Sequence[str] = (),
    replace: bool = False,
    report: Report,
    **options: Any,
) -> Outcome:
    """Learn a file: read once to see what is in it and to freeze by a sample of all rows, once to learn."""
    if task not in TASKS:
        raise ValueError(f"--task {task}: one of {', '.join(TASKS)} is needed")
    free(out, replace=replace)
    file = table_file(table)
    for name in (*targets, *ignore):
        place_of(name, file.names, file.path)
    twice = sorted({name for name in targets if targets.count(name) > 1 or name in ignore})
    if twice or not targets:
        raise ValueError(
            f"--target {','.join(targets)}: "
            + (f"{twice[0]!r} is also in --ignore, or stands twice" if twice else "name a column to predict")
        )
    kinds = {name: kind for name, kind in file.kinds().items() if name not in ignore}
    if not set(kinds) - set(targets):
        raise ValueError(f"{table}: no columns are left to predict {', '.join(targets)} from")
    discrete = task == "classification" or (task == "auto" and kinds[targets[0]] == "text")
    if discrete and len(targets) > 1:
        raise ValueError(f"classes of one column can be learned, not of {len(targets)}: give one --target")
    estimator: Estimator = StreamingClassifier(**options) if discrete else StreamingRegressor(**options)
    sample = _sample(file, kinds, targets, estimator.random_state)
    estimator = estimator.fit(*_given(estimator, sample, targets, kinds)).spawn()
    estimator.target_names_ = list(targets)
    outcome = _learn(estimator, file, kinds, report)
    estimator.save(out)
    return outcome


def update_file(model: Path, table: Path, out: Path, *, report: Report) -> Outcome:
    """Learn the rows of one more file."""
    estimator = load_model(model)
    file = table_file(table)
    outcome = _learn(estimator, file, _kinds(estimator, file, targets=True), report)
    estimator.save(out)
    return outcome


def predict_file(
    model: Path,
    table: Path,
    out: Path,
    *,
    quantiles: Sequence[float] = (0.05, 0.5, 0.95),
    replace: bool = False,
    report: Report,
) -> Outcome:
    """Write the file's columns, and predictions beside them."""
    free(out, replace=replace)
    estimator = load_model(model)
    file = table_file(table)
    kinds, outcome = _kinds(estimator, file, targets=False), Outcome()
    with writing(out, file.names) as write:
        for chunk in file.chunks(kinds):
            more = _predictions(estimator, chunk.columns, quantiles)
            taken = sorted(set(more) & set(file.names))
            if taken:
                raise ValueError(f"{table} has a column {taken[0]!r} already: rename it, or leave it out")
            write(chunk.rows, more)
            outcome.rows += len(chunk)
            report(chunk.done, file.total)
        if not outcome.rows:
            raise ValueError(f"{table} has no rows: give at least one to predict")
    return outcome


def score_file(model: Path, table: Path, *, report: Report) -> Outcome:
    """How well the model predicts the file's targets."""
    estimator = load_model(model)
    file = table_file(table)
    kinds, outcome = _kinds(estimator, file, targets=True), Outcome(task=_task(estimator))
    totals: dict[str, Any] = {}
    for chunk, x, y in _whole(estimator, file, kinds, outcome):
        for name, value in _sums(estimator, x, y).items():
            totals[name] = totals.get(name, 0.0) + value
        report(chunk.done, file.total)
    _some(outcome.rows, table)
    outcome.scores = _scores({name: total / outcome.rows for name, total in totals.items()})
    return outcome


def load_estimator(path: Path) -> Estimator:
    """Read an estimator of either kind."""
    wanted = "give a file that `constmem fit` wrote"
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}: {wanted}")
    try:
        learner, about = load(path)
    except ValueError as error:
        if path.suffix.lower() in (".csv", ".tsv", ".parquet"):
            raise ValueError(f"{path} is no model: {wanted}, and then the table") from error
        raise
    kind = _CLASSES.get(str(about.get("class")), StreamingRegressor)  # which refuses what it does not know
    estimator: Estimator = kind.of(path, learner, about)
    return estimator


def load_model(path: Path) -> Estimator:
    """Read a model of either kind, which names its targets."""
    estimator = load_estimator(path)
    if not hasattr(estimator, "target_names_"):
        raise ValueError(f"{path} names no target, as it was saved by Python: make it by `constmem fit`")
    return estimator


_CLASSES: dict[str, Any] = {c.__name__: c for c in (StreamingRegressor, StreamingClassifier)}


def _task(estimator: Estimator) -> str:
    return "regression" if isinstance(estimator, StreamingRegressor) else "classification"


def _some(rows: int, table: Path) -> None:
    if not rows:
        raise ValueError(f"{table} has no rows that can be used: rows with a target are needed")


def _kinds(estimator: Estimator, file: TableFile, *, targets: bool) -> dict[str, Kind]:
    """The kinds that the model's columns had, and its targets'."""
    columns = estimator.learner_.columns
    assert columns is not None
    kinds = {column.name: column.kind for column in columns.columns if column.name is not None}
    for name in (*kinds, *(estimator.target_names_ if targets else ())):
        place_of(name, file.names, file.path)
    if targets:
        text = isinstance(estimator, StreamingClassifier) and estimator.classes_.dtype.kind == "U"
        kinds |= dict.fromkeys(estimator.target_names_, "text" if text else "number")
    return kinds


def _sample(
    file: TableFile, kinds: Mapping[str, Kind], targets: Sequence[str], seed: int
) -> dict[str, NDArray[Any]]:
    """Rows drawn evenly from the whole file, in its order: each has the same chance, whatever the length."""
    random = np.random.default_rng(seed)
    kept: dict[str, NDArray[Any]] = {}
    ranks = np.zeros(0)
    for chunk in file.chunks(kinds):
        there = ~np.any([missing(chunk.columns[name]) for name in targets], axis=0)
        ranks = np.concatenate([ranks, random.random(int(there.sum()))])
        for name, column in chunk.columns.items():
            kept[name] = np.concatenate([kept.get(name, column[:0]), column[there]])
        if len(ranks) > SAMPLE:  # the rows with the smallest random numbers stay
            stay = np.sort(np.argpartition(ranks, SAMPLE)[:SAMPLE])
            ranks, kept = ranks[stay], {name: column[stay] for name, column in kept.items()}
    _some(len(ranks), file.path)
    return kept


def _given(
    estimator: Estimator,
    columns: Mapping[str, NDArray[Any]],
    targets: Sequence[str],
    kinds: Mapping[str, Kind],
) -> tuple[dict[str, NDArray[Any]], NDArray[Any]]:
    """Inputs and targets as the estimator takes them."""
    x = {name: column for name, column in columns.items() if name not in targets}
    y = [columns[name] for name in targets]
    if isinstance(estimator, StreamingRegressor):
        for name in targets:
            if kinds[name] not in ("number", "empty"):
                raise ValueError(f"column {name!r} holds {kinds[name]}, not numbers: --task classification")
        return x, y[0] if len(y) == 1 else np.stack(y, 1)
    labels = y[0]
    if labels.dtype.kind == "O":
        return x, labels.astype(str)
    whole = labels.dtype.kind == "f" and bool((labels == np.round(labels)).all())
    return x, labels.astype(np.int64) if whole else labels


def _whole(
    estimator: Estimator, file: TableFile, kinds: Mapping[str, Kind], outcome: Outcome
) -> Iterator[tuple[Chunk, dict[str, NDArray[Any]], NDArray[Any]]]:
    """Chunks without the rows that have no target, which are counted."""
    targets = estimator.target_names_
    for chunk in file.chunks(kinds):
        there = ~np.any([missing(chunk.columns[name]) for name in targets], axis=0)
        outcome.left_out += int((~there).sum())
        outcome.rows += int(there.sum())
        if there.any():
            columns = {name: column[there] for name, column in chunk.columns.items()}
            yield chunk, *_given(estimator, columns, targets, kinds)


def _learn(estimator: Estimator, file: TableFile, kinds: Mapping[str, Kind], report: Report) -> Outcome:
    outcome = Outcome(task=_task(estimator))
    for chunk, x, y in _whole(estimator, file, kinds, outcome):
        try:
            estimator.partial_fit(x, y)
        except ValueError as error:
            raise ValueError(f"{file.path}, rows from {chunk.first + 1}: {error}") from error
        report(chunk.done, file.total)
    _some(outcome.rows, file.path)
    return outcome


def _predictions(
    estimator: Estimator, x: dict[str, NDArray[Any]], quantiles: Sequence[float]
) -> dict[str, NDArray[Any]]:
    names = estimator.target_names_
    if isinstance(estimator, StreamingClassifier):
        chances = estimator.predict_proba(x)
        made = {f"{names[0]}_predicted": estimator.classes_[chances.argmax(1)]}
        return made | {f"{names[0]}_p_{c}": chances[:, i] for i, c in enumerate(estimator.classes_)}
    mean, deviation = (of.reshape(len(of), -1) for of in estimator.predict(x, return_std=True))
    levels = estimator.predict_quantiles(x, quantiles).reshape(len(mean), len(names), -1)
    made = {}
    for i, name in enumerate(names):
        made |= {f"{name}_mean": mean[:, i], f"{name}_deviation": deviation[:, i]}
        made |= {f"{name}_q{100 * q:g}": levels[:, i, j] for j, q in enumerate(quantiles)}
    return made


def _sums(estimator: Estimator, x: dict[str, NDArray[Any]], y: NDArray[Any]) -> dict[str, Any]:
    """Sums over rows that scores are made of; some are of each target."""
    if isinstance(estimator, StreamingClassifier):
        chances = estimator.predict_proba(x)
        place = {label: i for i, label in enumerate(estimator.classes_.tolist())}
        at = np.array([place.get(label, -1) for label in y.tolist()])
        given = np.where(at >= 0, chances[np.arange(len(y)), at], 0.0)
        return {
            "accuracy": float((chances.argmax(1) == at).sum()),
            "log_loss": float(-np.log(np.maximum(given, 1e-6)).sum()),
        }
    mean = estimator.predict(x)
    density = estimator.log_density(x, y)
    ends = estimator.predict_interval(x, COVERAGE)
    inside = (y >= ends[..., 0]) & (y <= ends[..., 1])
    count = y.size / len(y)
    near = y.reshape(len(y), -1) - estimator.learner_.center  # or rounding is all that is left of r2
    return {
        "squares": ((y - mean) ** 2).reshape(len(y), -1).sum(0),
        "mean_absolute_error": float(np.abs(y - mean).sum()) / count,
        "negative_log_likelihood": -float(density.sum()) / count,
        "held_by_90_percent_intervals": float(inside.sum()) / count,
        "y": near.sum(0),
        "y squared": (near**2).sum(0),
    }


def _scores(means: dict[str, Any]) -> dict[str, float]:
    if "squares" not in means:
        return means
    squares, y, y2 = (means.pop(name) for name in ("squares", "y", "y squared"))
    spread = y2 - y**2
    told = bool((spread > ROUNDING * y2).all())  # else a target is constant
    r2 = {"r2": float((1 - squares / spread).mean())} if told else {}  # as scikit-learn's, of each target
    return {"rmse": sqrt(float(squares.mean())), **r2, **means}

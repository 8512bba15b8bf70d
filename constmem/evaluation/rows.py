"""Rows: what an evaluation found, in types; read from files, grouped by seeds, and named."""

import json
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, fields
from math import floor, isfinite, log10, nan
from pathlib import Path
from statistics import mean, stdev
from types import NoneType, UnionType
from typing import Any, get_args, get_origin

from constmem.core.files import read_json
from constmem.training.recipes import complete

OF_MARKS = ("accuracy", "error", "top5", "accuracy_given_gap", "top5_given_gap")
OF_DATA = ("data", "contents", "columns")  # what a row says of the data that it was scored on


@dataclass(frozen=True)
class Scores:
    """Means over all target points of a test set.

    Attributes:
        log_likelihood: summed over channels, mean over points.
        log_likelihood_by_batch: the reference's figure: the unweighted mean over batches of their means.
        rmse: root mean squared error of the predicted mean.
        crps: continuous ranked probability score, mean over channels.
        coverage: share of values inside the central interval of each level (of grey levels, by share).
        points: how many target points.
        exact, exact_by_batch: the two log-likelihoods of the process that the data came from, where it
            is known: no model exceeds them but by chance.
        level_log_likelihood, level_log_likelihood_by_batch: of pixels, the same two of the probabilities of
            grey levels, by which models of densities and of levels compare; a normal's are its integrals.
        joint_log_likelihood, joint_log_likelihood_by_batch: of all targets of a task together, divided by how
            many they are, where a model predicts them together.
    """

    log_likelihood: float
    log_likelihood_by_batch: float
    rmse: float
    crps: float
    coverage: dict[str, float]
    points: int
    exact: float | None = None
    exact_by_batch: float | None = None
    level_log_likelihood: float | None = None
    level_log_likelihood_by_batch: float | None = None
    joint_log_likelihood: float | None = None
    joint_log_likelihood_by_batch: float | None = None


@dataclass(frozen=True)
class EventScores:
    """Means over the scored events of a test set.

    Attributes:
        nll, time_nll, mark_nll: nats an event; the first is the sum of the others. The mark's is given the
            gap, and an unknown mark adds 0.
        rmse, mae: of the predicted mean gap, in `unit`.
        rmse_median, mae_median: of the predicted median gap.
        accuracy, error, top5: of the likeliest mark, and of the five likeliest, when nothing of the event
            is known; over events whose mark is known, NaN if there are none.
        accuracy_given_gap, top5_given_gap: the same when its time is known.
        ks, ks_p_value: the largest distance of the distribution of rescaled times from the exponential,
            and the probability of a larger one if the model were true.
        coverage: share of gaps inside the central interval of each level.
        unit: of the gaps.
        events, sequences: how many events were scored, of how many sequences.
        survival_nll: nats a sequence for the silence until t_end; None without a t_end.
    """

    nll: float
    time_nll: float
    mark_nll: float
    rmse: float
    mae: float
    rmse_median: float
    mae_median: float
    accuracy: float
    error: float
    top5: float
    accuracy_given_gap: float
    top5_given_gap: float
    ks: float
    ks_p_value: float
    coverage: dict[str, float]
    unit: str
    events: int
    sequences: int
    survival_nll: float | None = None


@dataclass(frozen=True, kw_only=True)
class Row:
    """What `constmem eval` found of one run.

    Attributes:
        scores: of each test set.
        settings: of the recipe.
        published: the log-likelihood (NLL of events) on each test set that was published, where one was.
        true: NLL an event of the process that simulated the data.
        peak_memory: bytes that training and evaluation took on a GPU.
        steps, minutes: of training; 0 steps where its metrics are lost.
        data, contents, columns: what the data are; of one's own also a digest of them, and which columns.
        device, evaluated_on: where it was trained, and scored.
    """

    dataset: str
    model: str
    recipe: str
    seed: int
    scores: Mapping[str, Scores | EventScores]
    settings: dict[str, Any]
    steps: int
    minutes: float
    parameters: int
    device: str
    published: dict[str, float] | None = None
    true: dict[str, float] | None = None
    peak_memory: dict[str, int | None] | None = None
    data: str | None = None
    columns: dict[str, Any] | None = None
    contents: str | None = None
    evaluated_on: str | None = None
    commit: str | None = None
    torch: str | None = None
    date: str | None = None

    @property
    def of_events(self) -> bool:
        """Whether it is a row of an event model."""
        return any(isinstance(scores, EventScores) for scores in self.scores.values())

    def content(self) -> dict[str, Any]:
        """The row as JSON can hold it; what is not known is left out."""
        whole = {key: value for key, value in asdict(self).items() if value is not None}
        for test, scores in whole["scores"].items():
            whole["scores"][test] = {key: value for key, value in scores.items() if value is not None}
        return whole


def read_rows(paths: Iterable[Path]) -> list[Row]:
    """The rows of run folders (their eval.json) and of JSON files with one row or many."""
    found: list[Row] = []
    paths = list(paths)
    unscored = [path for path in paths if path.is_dir() and not (path / "eval.json").is_file()]
    if unscored:
        names = shlex.join(map(str, unscored))
        raise FileNotFoundError(f"no scores in {names}: run `constmem eval {names}` first")
    for path in paths:
        file = path / "eval.json" if path.is_dir() else path
        if not file.is_file():
            raise FileNotFoundError(f"there is no run folder or JSON file {path}")
        content = read_json(file, "expected rows that `constmem eval` wrote; run it again")
        rows = content.get("rows", [content]) if isinstance(content, dict) else content
        found += typed_rows(rows if isinstance(rows, list) else [None], file)
    return found


def typed_rows(rows: Iterable[Any], where: Path | str) -> list[Row]:
    """Rows of plain dictionaries as JSON gives them; the error names the row and what is wrong in it."""
    return [_typed_row(row, where) for row in rows]


def _typed_row(row: Any, where: Path | str) -> Row:
    needed = [field.name for field in fields(Row) if field.default is MISSING]
    missing = [name for name in needed if not isinstance(row, dict) or name not in row]
    if missing:
        raise ValueError(f"{where} has a row without {', '.join(missing)}: not one of an evaluation")
    given = {field.name: row[field.name] for field in fields(Row) if field.name in row}
    try:
        every = _typed(given.pop("scores"), dict[str, Any], "scores")
        kind = EventScores if any("nll" in own for own in every.values() if isinstance(own, dict)) else Scores
        scores = {test: _typed(own, kind, f"scores on {test!r}") for test, own in every.items()}
        hints = {field.name: field.type for field in fields(Row)}
        return Row(**{key: _typed(value, hints[key], key) for key, value in given.items()}, scores=scores)
    except ValueError as error:
        name = " ".join(str(row[key]) for key in ("dataset", "model", "recipe", "seed"))
        raise ValueError(
            f"{where}: the row of {name} is not sound ({error}); run `constmem eval` again, or leave it out"
        ) from None


_WORDS = {float: "a number", int: "a whole number", str: "text", dict: "a dictionary"}


def _typed(value: Any, hint: Any, where: str) -> Any:
    """The value if it is of the type, or an error that says where it is not."""
    if hint is Any:
        return value
    if isinstance(hint, UnionType):
        kinds = [kind for kind in get_args(hint) if kind is not NoneType]
        return None if value is None else _typed(value, kinds[0], where)
    plain = get_origin(hint) or hint
    if plain in (Scores, EventScores):
        content = _typed(value, dict[str, Any], where)
        missing = [f.name for f in fields(plain) if f.default is MISSING and f.name not in content]
        if missing:
            raise ValueError(f"{where} lack {', '.join(missing)}, as another version may have written them")
        unknown = {key: nan for key in OF_MARKS if key in content and content[key] is None}
        content = content | unknown
        given = [(f.name, f.type) for f in fields(plain) if f.name in content]
        return plain(**{key: _typed(content[key], kind, f"{key} in {where}") for key, kind in given})
    if plain is dict and isinstance(value, dict):
        inside = get_args(hint)[1]
        return {str(key): _typed(own, inside, f"{key} of {where}") for key, own in value.items()}
    if plain is float and type(value) is int:
        return float(value)
    if type(value) is not plain:
        raise ValueError(f"{where} is {json.dumps(value)[:60]}, not {_WORDS[plain]}")
    return value


# Seeds


@dataclass(frozen=True)
class Figure:
    """The mean over seeds, and their standard deviation where there are several."""

    mean: float
    spread: float | None

    @classmethod
    def of(cls, values: Sequence[float]) -> "Figure":
        """Of one value for each seed; NaN where there are several and not all of them are finite."""
        if len(values) > 1 and not all(map(isfinite, values)):
            return cls(nan, nan)
        return cls(mean(values), stdev(values) if len(values) > 1 else None)

    def __str__(self) -> str:
        return self.text(2)

    def text(self, digits: int, *, percent: bool = False) -> str:
        """With so many digits after the point.

        Example:
            >>> Figure(0.9184, 0.002).text(1, percent=True)
            '91.8 ± 0.2 %'
        """
        scale, unit = (100, " %") if percent else (1, "")
        spread = "" if self.spread is None else f" ± {scale * self.spread:,.{digits}f}"
        return f"{scale * self.mean:,.{digits}f}{spread}{unit}"

    def short(self) -> str:
        """With about four digits in all, for numbers whose unit may be anything.

        Example:
            >>> Figure(1234.5, None).short(), Figure(0.25, None).short(), Figure(0.00012345, None).short()
            ('1,234', '0.2500', '0.0001234')
        """
        size = abs(self.mean)
        if 0 < size < 0.01:
            return self.text(3 - floor(log10(size)))
        return self.text(next((d for d in range(4) if size >= 10 ** (3 - d)), 4))


def kind(row: Row) -> str:
    """What rows have in common that differ by seed alone."""
    of_data = [getattr(row, key) for key in OF_DATA]
    named = [row.dataset, row.model, row.recipe, complete(row.settings), row.steps, row.parameters]
    return json.dumps([*named, *of_data], sort_keys=True)


def grouped(rows: Iterable[Row], *, dataset: str | None = None) -> list[list[Row]]:
    """Rows of the same `kind` together; of two rows of one seed the newer counts."""
    groups: dict[str, dict[int, Row]] = {}
    rows = sorted(rows, key=lambda row: row.date or "")
    for row in rows:
        if dataset is None or row.dataset == dataset:
            groups.setdefault(kind(row), {})[row.seed] = row
    if not groups:
        have = ", ".join(sorted({row.dataset for row in rows})) or "no rows at all"
        raise ValueError(f"there are no rows of {dataset or 'any data set'}: there are {have}")
    return [list(seeds.values()) for seeds in groups.values()]


def json_text(content: Any) -> str:
    """Anything made of numbers and text in JSON, which has no word for numbers that are not finite: null.

    Example:
        >>> json_text({"nll": float("nan")}).split()
        ['{', '"nll":', 'null', '}']
    """
    return json.dumps(_finite(content), indent=1, allow_nan=False)


def _finite(content: Any) -> Any:
    if isinstance(content, Mapping):
        return {key: _finite(value) for key, value in content.items()}
    if isinstance(content, list | tuple):
        return [_finite(value) for value in content]
    return None if isinstance(content, float) and not isfinite(content) else content

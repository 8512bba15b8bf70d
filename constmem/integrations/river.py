"""The streaming estimators with river's verbs: one dictionary at a time, features that come and go."""

import numbers
from collections.abc import Hashable, Mapping
from typing import Any

import numpy as np
from river import base

from constmem.tabular.base import StreamingEstimator
from constmem.tabular.estimators import StreamingClassifier, StreamingRegressor
from constmem.tabular.frames import Frame, Kind
from constmem.tabular.inputs import frame_of


class _River(base.Estimator):
    """What both adapters share.

    A feature that a row lacks is missing; one that turns up after the warm-up is ignored.
    """

    _kind: type[StreamingEstimator]

    def __init__(
        self, forget: float | str | None = None, warmup: int = 1024, size: int | None = None, seed: int = 0
    ) -> None:
        self.forget = forget
        self.warmup = warmup
        self.size = size
        self.seed = seed
        self.estimator = self._kind(forget=forget, warmup=warmup, size=size, random_state=seed)
        self._names: tuple[str, ...] = ()

    @property
    def _learned(self) -> bool:
        return hasattr(self.estimator, "learner_")

    def _learn(self, x: Mapping[Hashable, Any], y: Any) -> None:
        if np.ndim(y):
            raise ValueError(f"y is {y!r}, but river's rows have one target: a number or a class")
        frozen = self._learned and self.estimator.learner_.frozen
        row = {str(name): value for name, value in x.items()}
        if not frozen:
            names = tuple(sorted({*self._names, *row})) or ("nothing",)  # sorted: order changes no answer
            if names != self._names and self._learned:
                self.estimator.learner_.take_columns(names)
            self._names = names
        self.estimator.partial_fit(self._frame(row), np.array([y]))

    def _frame(self, row: Mapping[str, Any]) -> Frame:
        values = [row.get(name) for name in self._names]
        if all(type(value) in (float, int, bool) for value in values):  # the common case, fast
            kinds: list[Kind] = ["number"] * len(values)
            return Frame(self._names, tuple(kinds), np.array([values], np.float64))
        values = [None if isinstance(v, numbers.Real) and v != v else v for v in values]
        return frame_of({name: [value] for name, value in zip(self._names, values, strict=True)})

    def _asked(self, x: Mapping[Hashable, Any]) -> Frame:
        return self._frame({str(name): value for name, value in x.items()})

    @classmethod
    def _unit_test_params(cls) -> Any:
        yield {"size": 96, "warmup": 64}


class StreamingRiverRegressor(_River, base.Regressor):
    """Numbers from a stream of dictionaries, in constant memory.

    Parameters
    ----------
    forget
        None (all rows count), a half-life in rows, "window:ROWS", or "auto".
    warmup
        Rows after which columns and features are frozen.
    size
        Number of features; None for the default.
    seed
        Of the features.
    """

    _kind = StreamingRegressor

    def learn_one(self, x: dict[Any, Any], y: float) -> None:
        """Learn one row."""
        self._learn(x, y)

    def predict_one(self, x: dict[Any, Any]) -> float:
        """The predicted mean; zero before anything was learned."""
        return float(self.estimator.predict(self._asked(x))[0]) if self._learned else 0.0


class StreamingRiverClassifier(_River, base.Classifier):
    """Classes from a stream of dictionaries, in constant memory.

    Its parameters are those of `StreamingRiverRegressor`.
    """

    _kind = StreamingClassifier

    @property
    def _multiclass(self) -> bool:
        return True

    def learn_one(self, x: dict[Any, Any], y: Any) -> None:
        """Learn one row."""
        self._learn(x, y)

    def predict_proba_one(self, x: dict[Any, Any], **kwargs: Any) -> dict[Any, float]:  # noqa: ARG002
        """Probabilities of the classes seen so far; none before anything was learned."""
        if not self._learned:
            return {}
        chances = self.estimator.predict_proba(self._asked(x))[0]
        return dict(zip(self.estimator.classes_.tolist(), chances.tolist(), strict=True))

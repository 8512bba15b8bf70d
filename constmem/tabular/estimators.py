"""`StreamingRegressor` and `StreamingClassifier`: scikit-learn's verbs, any number of rows."""
# ruff: noqa: N803 - X is scikit-learn's name

import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sklearn.base import ClassifierMixin, RegressorMixin
from sklearn.exceptions import DataConversionWarning
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted

from constmem.tabular.answers import (
    mixed_deviation,
    mixed_log_density,
    mixed_mean,
    mixed_probabilities,
    mixed_quantiles,
)  # fmt: skip
from constmem.tabular.base import StreamingEstimator, alone
from constmem.tabular.inputs import frame_of
from constmem.tabular.learner import Learner


class StreamingRegressor(RegressorMixin, StreamingEstimator):  # type: ignore[misc]
    """Numbers from the columns of a table or stream, with calibrated spread; closed form, no training.

    Means are the closed form's. Deviations, quantiles and densities take the shape that a pretrained CMANP
    reads from the residuals (skewed, rounded, of several peaks), in a state that merges as the rest does;
    with `pretrained=False`, or where old rows are forgotten, they are Student's t.

    Args:
        forget, warmup, size, random_state: as of every `StreamingEstimator`.
        pretrained: whether that model is used.

    Example:
        >>> x = np.linspace(0, 6, 600)[:, None]
        >>> whole = StreamingRegressor().fit(x, np.sin(x[:, 0]))
        >>> part, rest = whole.spawn().partial_fit(x[:99], np.sin(x[:99, 0])), whole.spawn()
        >>> both = part.merge(rest.partial_fit(x[99:], np.sin(x[99:, 0])))
        >>> bool(np.allclose(both.predict(x), whole.predict(x), atol=1e-6))
        True
    """

    _discrete = False

    def __init__(
        self,
        *,
        forget: Any = None,
        warmup: int = 1024,
        size: int | None = None,
        random_state: Any = 0,
        pretrained: bool = True,
    ) -> None:
        super().__init__(forget=forget, warmup=warmup, size=size, random_state=random_state)
        self.pretrained = pretrained

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        return tags

    @alone
    def fit(self, X: Any, y: Any) -> "StreamingRegressor":
        """Forget everything, freeze columns and features by these rows, and learn them."""
        frame, targets, flat = self._given(X, y)
        self._take(self._new_learner(), frame, targets, freeze=True)
        self._flat = flat
        return self

    @alone
    def partial_fit(self, X: Any, y: Any) -> "StreamingRegressor":
        """Learn more rows; those of a warm-up are kept until columns and features are frozen by them."""
        frame, targets, flat = self._given(X, y)
        learner = self.learner_ if hasattr(self, "learner_") else self._new_learner()
        if learner.targets and learner.targets != targets.shape[1]:
            raise ValueError(f"y has {targets.shape[1]} targets, but {learner.targets} were learned before")
        self._take(learner, frame, targets, freeze=False)
        self._flat = getattr(self, "_flat", flat)
        return self

    def _given(self, X: Any, y: Any) -> tuple[Any, NDArray[np.float64], bool]:
        frame = frame_of(X)
        given = _targets(y, len(frame))
        if given.dtype.kind == "c":
            raise ValueError("Complex data not supported: y holds complex numbers")
        try:
            targets = np.asarray(given, np.float64)
        except (TypeError, ValueError) as error:
            raise ValueError(f"y must hold numbers ({error}): for classes use StreamingClassifier") from error
        bad = ~np.isfinite(targets)
        if bad.any():
            where = tuple(int(i) for i in np.argwhere(bad)[0])
            what = "NaN" if np.isnan(targets[where]) else "infinity"
            raise ValueError(
                f"Input y contains {what}: row {where[0]} is {targets[where]}, in {int(bad.sum())} of "
                f"{bad.size} places; leave rows without a target out"
            )
        return frame, targets.reshape(len(frame), -1), targets.ndim == 1

    @alone
    def predict(self, X: Any, return_std: bool = False) -> Any:
        """Predicted means, and with `return_std` their standard deviations, noise included."""
        if not return_std:
            check_is_fitted(self)
            return self._shaped(self.learner_.means(frame_of(X)))
        answers, weights = self._answers(X)
        return self._shaped(mixed_mean(answers, weights)), self._shaped(mixed_deviation(answers, weights))

    @alone
    def predict_quantiles(
        self, X: Any, quantiles: Sequence[float] = (0.05, 0.5, 0.95)
    ) -> NDArray[np.float64]:
        """Quantiles of the target's distribution: (n, quantiles), or (n, targets, quantiles) of several."""
        levels = np.asarray(quantiles, np.float64)
        if levels.ndim != 1 or not len(levels) or not ((levels > 0) & (levels < 1)).all():
            raise ValueError(f"quantiles={quantiles!r}: give one or more numbers between 0 and 1")
        answers, weights = self._answers(X)
        made = np.moveaxis(mixed_quantiles(answers, weights, levels.tolist()), 0, -1)
        return made[:, 0] if self._flat else made

    @alone
    def predict_interval(self, X: Any, coverage: float = 0.9) -> NDArray[np.float64]:
        """The central interval that holds the target with this probability: (n, 2) lower and upper ends."""
        if not 0 < coverage < 1:
            raise ValueError(f"coverage={coverage!r}: a number between 0 and 1 is needed, such as 0.9")
        return self.predict_quantiles(X, ((1 - coverage) / 2, (1 + coverage) / 2))

    def log_density(self, X: Any, y: Any) -> NDArray[np.float64]:
        """Log density of each row's targets, (n,), under the distribution that is predicted for it."""
        answers, weights = self._answers(X)
        _, targets, _ = self._given(X, y)
        return mixed_log_density(answers, weights, targets)

    @alone
    def remove(self, X: Any, y: Any) -> "StreamingRegressor":
        """Undo having learned these rows, exactly; refuses rows that cannot have been learned."""
        check_is_fitted(self)
        frame, targets, _ = self._given(X, y)
        self.learner_.remove(frame, targets)
        return self

    def _shaped(self, of: NDArray[np.float64]) -> NDArray[np.float64]:
        return of[:, 0] if self._flat else of

    _also = ("_flat",)

    def _about(self) -> dict[str, Any]:
        return {"flat": self._flat}

    def _restore(self, about: dict[str, Any]) -> None:
        self._flat = bool(about["flat"])


class StreamingClassifier(ClassifierMixin, StreamingEstimator):  # type: ignore[misc]
    """Classes from the columns of a table or stream, with probabilities; closed form, no training.

    Classes may turn up at any time, unless `partial_fit` was given the list of them.
    """

    _discrete = True

    @alone
    def fit(self, X: Any, y: Any) -> "StreamingClassifier":
        """Forget everything, freeze columns and features by these rows, and learn them."""
        frame, labels = self._given(X, y)
        order = np.unique(labels)
        self._take(self._new_learner(), frame, _one_hot(labels, order), freeze=True)
        self._order, self._declared, self.classes_ = order, False, order
        return self

    @alone
    def partial_fit(self, X: Any, y: Any, classes: Any = None) -> "StreamingClassifier":
        """Learn more rows; `classes`, if given at first, are all that there will be."""
        frame, labels = self._given(X, y)
        known = hasattr(self, "learner_")
        declared = self._declared if known else classes is not None
        order = self._order if known else np.unique(labels if classes is None else np.asarray(classes))
        wider = _extended(order, labels)
        if declared and len(wider) > len(order):
            raise ValueError(
                f"y holds {wider.tolist()[len(order)]!r}, which is none of the classes given at first, "
                f"{order.tolist()}: give all of them at first, or none"
            )
        learner = self.learner_ if known else self._new_learner()
        if len(wider) > learner.targets and (learner.seen or learner.frozen):
            learner.check(frame)  # before anything changes
            learner.widen(len(wider))
        self._take(learner, frame, _one_hot(labels, wider), freeze=False)
        self._order, self._declared, self.classes_ = wider, declared, np.sort(wider)
        return self

    def _given(self, X: Any, y: Any) -> tuple[Any, NDArray[Any]]:
        frame = frame_of(X)
        labels = _targets(y, len(frame))
        if labels.ndim == 2 and labels.shape[1] == 1:
            warnings.warn(
                "A column-vector y was passed when a 1d array was expected. Please change the shape of y to "
                "(n_samples,), for example using ravel().",
                DataConversionWarning,
                stacklevel=3,
            )
            labels = labels[:, 0]
        if labels.dtype.kind == "c":
            raise ValueError("Complex data not supported: y holds complex numbers")
        if labels.dtype.kind == "S":
            raise TypeError("y holds bytes, not text: decode them, as in np.char.decode(y)")
        if labels.dtype.kind == "O":
            absent = [row for row, v in enumerate(labels) if v is None or v != v]
            if absent:
                raise ValueError(f"Input y contains NaN: row {absent[0]} has no class; leave such rows out")
            if all(isinstance(v, str) for v in labels.ravel()):
                labels = labels.astype(str)
        elif labels.dtype.kind == "f" and not np.isfinite(labels).all():
            row = int(np.flatnonzero(~np.isfinite(labels))[0])
            what = "NaN" if np.isnan(labels.ravel()[row]) else "infinity"
            raise ValueError(f"Input y contains {what}: row {row} has no class; leave such rows out")
        if labels.dtype.kind not in "iubUS" or labels.ndim != 1:
            check_classification_targets(labels)  # slow, and clear for whole numbers and text
        if labels.ndim != 1:
            raise ValueError(f"y has shape {labels.shape}: one class a row is needed")
        return frame, labels

    @alone
    def predict_proba(self, X: Any) -> NDArray[np.float64]:
        """Probabilities, (n, classes), in the order of `classes_`."""
        chances = mixed_probabilities(*self._answers(X))
        return np.asarray(chances[:, np.argsort(self._order)])

    @alone
    def predict(self, X: Any) -> NDArray[Any]:
        """The most probable class of each row."""
        chances = self.predict_proba(X)
        return np.asarray(self.classes_[chances.argmax(1)])

    @alone
    def remove(self, X: Any, y: Any) -> "StreamingClassifier":
        """Undo having learned these rows, exactly; refuses rows that cannot have been learned."""
        check_is_fitted(self)
        frame, labels = self._given(X, y)
        wider = _extended(self._order, labels)
        if len(wider) > len(self._order):
            raise ValueError(f"class {wider.tolist()[-1]!r} was never learned: remove only rows that were")
        self.learner_.remove(frame, _one_hot(labels, self._order))
        return self

    _also = ("_order", "_declared", "classes_")

    def _merge(self, learner: Learner, other: Any) -> None:
        order = _extended(self._order, other._order) if hasattr(self, "_order") else other._order
        places = [order.tolist().index(label) for label in other._order.tolist()]
        its = other.learner_.arranged(places, len(order))
        if learner.seen or learner.frozen:
            learner.refuse_unlike(its)
            learner.widen(len(order))
        learner.merge(its)
        self._order, self.classes_ = order, np.sort(order)

    def _about(self) -> dict[str, Any]:
        return {"order": self._order.tolist(), "dtype": self._order.dtype.str, "declared": self._declared}

    def _restore(self, about: dict[str, Any]) -> None:
        self._order = np.array(about["order"], dtype=about["dtype"])
        self._declared, self.classes_ = bool(about["declared"]), np.sort(self._order)


def _targets(y: Any, rows: int) -> NDArray[Any]:
    """Targets as an array, one entry or row for each row of the table."""
    if y is None:
        raise ValueError("requires y to be passed, but the target y is None: give one target a row")
    if hasattr(y, "to_numpy"):
        y = y.to_numpy()
    targets = np.asarray(y)
    if targets.ndim not in (1, 2):
        raise ValueError(f"y has shape {targets.shape}: (rows,) or (rows, targets) is needed")
    if len(targets) != rows:
        raise ValueError(f"X has {rows} rows, but y has {len(targets)}: inconsistent numbers of samples")
    return targets


def _extended(order: NDArray[Any], labels: NDArray[Any]) -> NDArray[Any]:
    """Known classes, then those among the labels that are new."""
    if len(order) and (order.dtype.kind in "US") != (labels.dtype.kind in "US"):
        raise ValueError(
            f"classes were {order.tolist()[:3]} before, and now {labels.tolist()[:3]}: text and numbers do "
            "not mix; convert them to what they were"
        )
    known = set(order.tolist())
    new = [label for label in np.unique(labels).tolist() if label not in known]
    return np.concatenate([order, np.array(new, labels.dtype)]) if new else order


def _one_hot(labels: NDArray[Any], order: NDArray[Any]) -> NDArray[np.float64]:
    place = {label: i for i, label in enumerate(order.tolist())}
    made = np.zeros((len(labels), len(order)))
    made[np.arange(len(labels)), [place[label] for label in labels.tolist()]] = 1.0
    return made

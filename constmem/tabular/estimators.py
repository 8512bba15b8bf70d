"""`StreamingRegressor` and `StreamingClassifier`: scikit-learn's verbs, any number of rows."""
# ruff: noqa: N803 - X is scikit-learn's name

import warnings
from copy import deepcopy
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sklearn.base import ClassifierMixin, RegressorMixin
from sklearn.exceptions import DataConversionWarning
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted

from constmem.tabular.answers import Numbers, mixed_deviation, mixed_mean, mixed_probabilities
from constmem.tabular.base import StreamingEstimator, alone
from constmem.tabular.inputs import extended, frame_of, labels_of, numbers_of, one_hot
from constmem.tabular.learner import Learner

LARGEST = 1e100  # of targets: far below what cannot be squared and summed


class StreamingRegressor(RegressorMixin, StreamingEstimator, Numbers):  # type: ignore[misc]
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
        _require_as_many(learner, targets.shape[1], "y has")
        self._take(learner, frame, targets, freeze=False)
        self._flat = getattr(self, "_flat", flat)
        return self

    def _given(self, X: Any, y: Any) -> tuple[Any, NDArray[np.float64], bool]:
        frame = frame_of(X)
        targets, flat = numbers_of(y, len(frame))
        if (far := np.abs(targets) > LARGEST).any():
            row, place = (int(i) for i in np.argwhere(far)[0])
            raise ValueError(
                f"y holds {targets[row, place]} in row {row}: beyond {LARGEST:g}, sums of squares may be "
                "infinite; leave the row out, or give y in another unit, or its logarithm"
            )
        return frame, targets, flat

    @alone
    def predict(self, X: Any, return_std: bool = False) -> Any:
        """Predicted means, and with `return_std` their standard deviations, noise included."""
        if not return_std:
            check_is_fitted(self)
            return self._shaped(self.learner_.means(frame_of(X)))
        answers, weights = self._answers(X)
        return self._shaped(mixed_mean(answers, weights)), self._shaped(mixed_deviation(answers, weights))

    @alone
    def remove(self, X: Any, y: Any) -> "StreamingRegressor":
        """Undo having learned these rows, exactly; refuses rows that cannot have been learned."""
        check_is_fitted(self)
        frame, targets, _ = self._given(X, y)
        _require_as_many(self.learner_, targets.shape[1], "y has")
        self.learner_.remove(frame, targets)
        return self

    _also = ("_flat",)

    def _merge(self, learner: Learner, other: Any) -> Learner:
        _require_as_many(learner, other.learner_.targets, "the other estimator learned")
        return super()._merge(learner, other)

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
        self._take(self._new_learner(), frame, one_hot(labels, order), freeze=True)
        self._order, self._declared, self.classes_ = order, False, order
        return self

    @alone
    def partial_fit(self, X: Any, y: Any, classes: Any = None) -> "StreamingClassifier":
        """Learn more rows; `classes`, if given at first, are all that there will be."""
        frame, labels = self._given(X, y)
        known = hasattr(self, "learner_")
        declared = self._declared if known else classes is not None
        given = None if classes is None else np.unique(labels_of(classes, len(classes)))
        order = self._order if known else np.unique(labels) if given is None else given
        if known and declared and given is not None and {*given.tolist()} != {*order.tolist()}:
            raise ValueError(
                f"classes={classes!r} is not the same as on last call to partial_fit, {order.tolist()}: give "
                "the same ones, or none"
            )
        wider = extended(order, labels)
        if declared and len(wider) > len(order):
            raise ValueError(
                f"y holds {wider.tolist()[len(order)]!r}, which is none of the classes given at first, "
                f"{order.tolist()}: give all of them at first, or none"
            )
        learner = self.learner_ if known else self._new_learner()
        if len(wider) > learner.targets and (learner.seen or learner.frozen):
            learner = deepcopy(learner)  # or a refusal would leave us classes without a name
            learner.arrange(range(learner.targets), len(wider))
        self._take(learner, frame, one_hot(labels, wider), freeze=False)
        self._order, self._declared, self.classes_ = wider, declared, np.sort(wider)
        return self

    def _given(self, X: Any, y: Any) -> tuple[Any, NDArray[Any]]:
        frame = frame_of(X)
        labels = labels_of(y, len(frame))
        if labels.ndim == 2 and labels.shape[1] == 1:
            warnings.warn(
                "A column-vector y was passed when a 1d array was expected. Please change the shape of y to "
                "(n_samples,), for example using ravel().",
                DataConversionWarning,
                stacklevel=3,
            )
            labels = labels[:, 0]
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
        wider = extended(self._order, labels)
        if len(wider) > len(self._order):
            raise ValueError(f"class {wider.tolist()[-1]!r} was never learned: remove only rows that were")
        self.learner_.remove(frame, one_hot(labels, self._order))
        return self

    _also = ("_order", "_declared", "classes_")

    def _merge(self, learner: Learner, other: Any) -> Learner:
        order = extended(self._order, other._order) if hasattr(self, "_order") else other._order
        places = [order.tolist().index(label) for label in other._order.tolist()]
        its = other.learner_
        if places != list(range(len(order))):
            its = deepcopy(its)
            its.arrange(places, len(order))
        if learner.seen or learner.frozen:
            learner.refuse_unlike(its)
            if len(order) > learner.targets:
                learner = deepcopy(learner)
                learner.arrange(range(learner.targets), len(order))
        learner.merge(its)
        self._order, self.classes_ = order, np.sort(order)
        return learner

    def _about(self) -> dict[str, Any]:
        return {"order": self._order.tolist(), "dtype": self._order.dtype.str, "declared": self._declared}

    def _restore(self, about: dict[str, Any]) -> None:
        self._order = np.array(about["order"], dtype=about["dtype"])
        self._declared, self.classes_ = bool(about["declared"]), np.sort(self._order)


def _require_as_many(learner: Learner, targets: int, whose: str) -> None:
    if learner.targets and learner.targets != targets:
        raise ValueError(
            f"{whose} {targets} targets, but {learner.targets} were learned before: give the same ones"
        )

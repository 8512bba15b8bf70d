"""What the two estimators share: learning, merging, removing, saving."""
# ruff: noqa: N803 - X is scikit-learn's name

import inspect
import json
import os
from collections.abc import Callable
from contextlib import nullcontext
from copy import copy
from functools import wraps
from threading import RLock
from typing import Any, Concatenate, ParamSpec, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.base import BaseEstimator
from sklearn.utils import check_random_state
from sklearn.utils.validation import check_is_fitted
from torch import Tensor

from constmem.core import checks
from constmem.core.files import read_tensors, write_tensors
from constmem.tabular.answers import Answer, Shape, Weights
from constmem.tabular.columns import Columns
from constmem.tabular.features import SIZE, Features
from constmem.tabular.forgetting import Forgetting
from constmem.tabular.frames import Frame
from constmem.tabular.inputs import frame_of
from constmem.tabular.learner import Learner
from constmem.tabular.residuals import Residuals, shipped

_NAMES = {"feature_names_in_", "target_names_"}
KIND = "constmem.tabular"
VERSION = 1
DAMAGE = (ValueError, KeyError, TypeError, IndexError, AttributeError, RuntimeError, ArithmeticError)
P = ParamSpec("P")
T = TypeVar("T")


def alone(method: Callable[Concatenate[Any, P], T]) -> Callable[Concatenate[Any, P], T]:
    """A method that waits until no other thread is in one of the same estimator; it works on the CPU."""

    @wraps(method)
    def waiting(self: Any, /, *given: P.args, **named: P.kwargs) -> T:
        with self._lock, torch.device("cpu") if torch._C._len_torch_function_stack() else nullcontext():
            return method(self, *given, **named)

    return waiting


class StreamingEstimator(BaseEstimator):  # type: ignore[misc]
    """An estimator of one table or stream, whose memory does not grow with the rows.

    Any number of threads may use one: they take turns, so that no row is lost and no answer is of half a
    change.

    Args:
        forget: None (all rows count), a half-life in rows, "window:ROWS", or "auto" (several half-lives,
            mixed by how well each predicted lately).
        warmup: rows after which `partial_fit` freezes columns and features; `fit` freezes at once.
        size: number of features; None for the default.
        random_state: seed of the features.
    """

    _discrete: bool
    learner_: Learner

    def __init__(
        self, *, forget: Any = None, warmup: int = 1024, size: int | None = None, random_state: Any = 0
    ) -> None:
        self.forget = forget
        self.warmup = warmup
        self.size = size
        self.random_state = random_state
        self._lock = RLock()

    def __getstate__(self) -> dict[str, Any]:
        state: dict[str, Any] = super().__getstate__()
        return {name: value for name, value in state.items() if name != "_lock"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._lock = RLock()

    def _new_learner(self) -> Learner:
        for name, value, least in (("warmup", self.warmup, 1), ("size", self.size or SIZE, 16)):
            if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < least:
                raise ValueError(f"{name}={value!r}: a whole number of at least {least} is needed")
        if not isinstance(pretrained := getattr(self, "pretrained", False), bool | np.bool_):
            raise ValueError(f"pretrained={pretrained!r}: True or False is needed")
        seed = self.random_state
        if not isinstance(seed, int | np.integer) or seed < 0:
            seed = check_random_state(seed).randint(2**31)  # which refuses what is no seed
        return Learner(
            discrete=self._discrete, forgetting=Forgetting.of(self.forget), warmup=int(self.warmup),
            size=int(self.size or SIZE), seed=int(seed), pretrained=bool(pretrained),
        )  # fmt: skip

    def __sklearn_is_fitted__(self) -> bool:
        return hasattr(self, "learner_") and self.learner_.seen > 0

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.allow_nan = True
        tags.input_tags.categorical = True
        return tags

    def _take(self, learner: Learner, frame: Frame, y: NDArray[Any], *, freeze: bool) -> None:
        """Learn rows, and only if that went well call the learner ours."""
        if freeze:
            learner.freeze(frame, y)
        learner.learn(frame, y)
        if freeze or not hasattr(self, "learner_"):
            self.n_features_in_ = len(frame.kinds)
            if frame.names is not None:
                self.feature_names_in_ = np.array(frame.names, dtype=object)
            elif hasattr(self, "feature_names_in_"):
                del self.feature_names_in_
        self.learner_ = learner

    @alone
    def _answers(self, X: Any) -> tuple[list[Answer | Shape], Weights]:
        check_is_fitted(self)
        return self.learner_.answers(frame_of(X))

    @property
    def nbytes_(self) -> int:
        """Bytes of all that must be remembered: the same after a thousand rows and after a billion."""
        check_is_fitted(self, "learner_")
        return int(self.learner_.nbytes)

    @alone
    def spawn(self) -> Any:
        """An empty estimator that shares the frozen columns and features: for the shards of one table.

        States of estimators spawned from the same one can be merged, wherever they were learned.
        """
        check_is_fitted(self, "learner_")
        made = type(self)(**self.get_params(deep=False))
        made.learner_ = self.learner_.spawn()
        for name in ("n_features_in_", "feature_names_in_", *self._also):
            if hasattr(self, name):
                setattr(made, name, getattr(self, name))
        return made

    _also: tuple[str, ...] = ()

    @alone
    def by_key(self) -> Any:
        """What a `StreamPool` holds streams of this estimator by: its columns, features and units."""
        from constmem.tabular.keyed import EstimatorStreams

        return EstimatorStreams(self)

    def merge(self, other: Any) -> Any:
        """Take all that another estimator has learned, and return this one: as if it had seen both.

        Both must share the frozen columns and features (`spawn`), unless one is still in its warm-up.
        """
        if type(other) is not type(self):
            raise TypeError(
                f"{type(self).__name__} cannot merge {type(other).__name__}: give one of its kind"
            )
        check_is_fitted(other, "learner_")
        if other is self:
            raise ValueError("an estimator cannot be merged with itself: its rows would count twice")
        first, second = sorted((self, other), key=id)  # or two that merge each other wait for ever
        with first._lock, second._lock:
            learner = copy(self.learner_) if hasattr(self, "learner_") else self._new_learner()
            self.learner_ = self._merge(learner, other)  # a copy: a refusal must not end our warm-up
            for name in ("n_features_in_", "feature_names_in_", *self._also):
                if hasattr(other, name) and not hasattr(self, name):
                    setattr(self, name, getattr(other, name))
        return self

    def _merge(self, learner: Learner, other: Any) -> Learner:
        learner.merge(other.learner_)
        return learner

    @alone
    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the estimator to one safetensors file, atomically."""
        check_is_fitted(self, "learner_")
        names = {name: list(getattr(self, name)) for name in _NAMES if hasattr(self, name)}
        given = self.get_params(deep=False).items()
        params = {name: value.item() if isinstance(value, np.generic) else value for name, value in given}
        if not isinstance(params["random_state"], int | type(None)):
            params["random_state"] = self.learner_.seed
        header, tensors = _written(self.learner_)
        header["about"] = {
            "class": type(self).__name__, "params": params, "forget": params["forget"],
            "features": self.n_features_in_, "names": names, **self._about(),
        }  # fmt: skip
        words = {"format": KIND, "version": str(VERSION), "content": json.dumps(header)}
        write_tensors(path, tensors, words)

    def _about(self) -> dict[str, Any]:
        return {}

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Any:
        """Read an estimator that `save` wrote."""
        return cls.of(path, *load(path))

    @classmethod
    def of(cls, path: str | os.PathLike[str], learner: Learner, about: dict[str, Any]) -> Any:
        """The estimator that `load` has read of a file."""
        if about.get("class") != cls.__name__:
            raise ValueError(f"{path} holds a {about.get('class')}, not a {cls.__name__}: load it as such")
        known = inspect.signature(cls.__init__).parameters
        try:
            made = cls(**{name: value for name, value in about["params"].items() if name in known})
            made.learner_, made.n_features_in_ = learner, about["features"]
            for name in _NAMES & about["names"].keys():
                found = about["names"][name]
                setattr(made, name, np.array(found, object) if name == "feature_names_in_" else found)
            made._restore(about)
        except DAMAGE as error:
            raise _damaged(path, error) from error
        return made

    def _restore(self, about: dict[str, Any]) -> None:
        pass


def _written(learner: Learner) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """All that a learner is made of: what JSON holds, and tensors by name."""
    memory, columns, rows = learner.memory, learner.columns, learner.warm_up_rows
    given = {name: getattr(learner, name) for name in ("discrete", "warmup", "size", "seed")}
    header: dict[str, Any] = {"learner": given, "columns": None, "rows": None}
    header["pretrained"] = learner.pretrained
    tensors: dict[str, Tensor] = {}
    if columns is not None and memory is not None:
        header["columns"] = columns.text()
        tensors |= {f"features.{name}": tensor for name, tensor in memory.features.tensors().items()}
        tensors |= {f"memory.{name}": tensor for name, tensor in memory.tensors().items()}
        if memory.residuals is not None:
            header["residuals"] = shipped().fingerprint()
            made = memory.residuals.tensors()
            tensors |= {f"residuals.{name}": tensor for name, tensor in made.items()}
        tensors |= {"center": torch.from_numpy(learner.center), "scale": torch.from_numpy(learner.scale)}
    elif rows is not None:
        frame, y = rows
        header["rows"] = frame.written()
        tensors |= {"rows.values": torch.from_numpy(frame.values), "rows.y": torch.from_numpy(y)}
    return header, tensors


def load(path: str | os.PathLike[str]) -> tuple[Learner, dict[str, Any]]:
    """Read what `save` wrote: the learner, and what is said of the estimator."""
    tensors, words = read_tensors(path, kind=KIND, version=VERSION)
    try:
        with torch.device("cpu"):  # whatever new tensors usually are
            learner = _learner(header := json.loads(words["content"]), tensors)
    except DAMAGE as error:
        raise _damaged(path, error) from error
    return learner, header["about"]


def _damaged(path: str | os.PathLike[str], error: Exception) -> ValueError:
    return ValueError(f"{path} is damaged ({error!r}): fit the estimator and save it again")


def _learner(header: dict[str, Any], tensors: dict[str, Tensor]) -> Learner:
    if (bad := checks.first_not_finite(tensors)) is not None and not bad.startswith("rows."):
        raise ValueError(f"holds a {bad} with NaN or infinity in it")
    if any(type(header["learner"][name]) is not int for name in ("warmup", "size", "seed")):
        raise ValueError("holds settings that are no whole numbers")
    forgetting = Forgetting.of(header["about"]["forget"])
    pretrained = header.get("pretrained", False) is True
    learner = Learner(**header["learner"], forgetting=forgetting, pretrained=pretrained)
    if header["columns"] is not None:
        features = Features.of(_part(tensors, "features."))
        center, scale = (tensors[name].numpy().copy() for name in ("center", "scale"))
        residuals = Residuals.of(_part(tensors, "residuals."), header.get("residuals"))
        learner.start(Columns.of(header["columns"]), features, center, scale, residuals)
        assert learner.memory is not None
        learner.memory.restore(_part(tensors, "memory."))
    elif header["rows"] is not None:
        values, y = (tensors[name].numpy().copy() for name in ("rows.values", "rows.y"))
        if len(y) != len(values):
            raise ValueError(f"holds {len(values)} rows, and targets of {len(y)}")
        learner.learn(Frame.of(header["rows"], values), y)
    return learner


def _part(tensors: dict[str, Tensor], start: str) -> dict[str, Tensor]:
    return {name.removeprefix(start): tensor for name, tensor in tensors.items() if name.startswith(start)}

"""What the two estimators share: learning, merging, removing, saving."""
# ruff: noqa: N803 - X is scikit-learn's name

import inspect
import json
import os
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.base import BaseEstimator
from sklearn.utils.validation import check_is_fitted
from torch import Tensor

from constmem.core.files import read_tensors, write_tensors
from constmem.tabular.answers import Answer, Weights
from constmem.tabular.columns import Columns
from constmem.tabular.features import SIZE, Features
from constmem.tabular.forgetting import Forgetting
from constmem.tabular.frames import MOMENT, Frame
from constmem.tabular.inputs import frame_of
from constmem.tabular.learner import Learner

_NAMES = ("feature_names_in_", "target_names_")
KIND = "constmem.tabular"
VERSION = 1


class StreamingEstimator(BaseEstimator):  # type: ignore[misc]
    """An estimator of one table or stream, whose memory does not grow with the rows.

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

    def _new_learner(self) -> Learner:
        for name, value, least in (("warmup", self.warmup, 1), ("size", self.size or SIZE, 16)):
            if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < least:
                raise ValueError(f"{name}={value!r}: a whole number of at least {least} is needed")
        seed = self.random_state
        if seed is None or isinstance(seed, np.random.RandomState):
            seed = int((seed or np.random.mtrand._rand).randint(2**31))
        return Learner(
            discrete=self._discrete, forgetting=Forgetting.of(self.forget), warmup=int(self.warmup),
            size=int(self.size or SIZE), seed=int(seed),
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
        if not hasattr(self, "learner_") or self.learner_ is not learner:
            self.n_features_in_ = len(frame.kinds)
            if frame.names is not None:
                self.feature_names_in_ = np.array(frame.names, dtype=object)
            elif hasattr(self, "feature_names_in_"):
                del self.feature_names_in_
        self.learner_ = learner

    def _answers(self, X: Any) -> tuple[list[Answer], Weights]:
        check_is_fitted(self)
        return self.learner_.answers(frame_of(X))

    @property
    def nbytes_(self) -> int:
        """Bytes of all that must be remembered: the same after a thousand rows and after a billion."""
        check_is_fitted(self, "learner_")
        return int(self.learner_.nbytes)

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
        learner = self.learner_ if hasattr(self, "learner_") else self._new_learner()
        self._merge(learner, other)
        self.learner_ = learner
        for name in ("n_features_in_", "feature_names_in_", *self._also):
            if hasattr(other, name) and not hasattr(self, name):
                setattr(self, name, getattr(other, name))
        return self

    def _merge(self, learner: Learner, other: Any) -> None:
        learner.merge(other.learner_)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the estimator to one safetensors file, atomically."""
        check_is_fitted(self, "learner_")
        names = {name: list(getattr(self, name)) for name in _NAMES if hasattr(self, name)}
        params = self.get_params(deep=False)
        if not isinstance(params["random_state"], int | type(None)):
            params["random_state"] = self.learner_.seed
        if isinstance(params["forget"], np.number):
            params["forget"] = params["forget"].item()
        about = {
            "class": type(self).__name__, "params": params, "forget": params["forget"],
            "features": self.n_features_in_, "names": names, **self._about(),
        }  # fmt: skip
        save(self.learner_, path, about)

    def _about(self) -> dict[str, Any]:
        return {}

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Any:
        """Read an estimator that `save` wrote."""
        learner, about = load(path)
        if about.get("class") != cls.__name__:
            raise ValueError(f"{path} holds a {about.get('class')}, not a {cls.__name__}: load it as such")
        known = inspect.signature(cls.__init__).parameters
        made = cls(**{name: value for name, value in about["params"].items() if name in known})
        made.learner_, made.n_features_in_ = learner, about["features"]
        for name, found in about["names"].items():
            setattr(made, name, np.array(found, dtype=object) if name == "feature_names_in_" else found)
        made._restore(about)
        return made

    def _restore(self, about: dict[str, Any]) -> None:
        pass


def save(learner: Learner, path: str | os.PathLike[str], about: dict[str, Any]) -> None:
    """Write a learner, atomically, and what else `load` shall give back."""
    memory, columns, rows = learner.memory, learner.columns, learner.warm_up_rows
    given = {
        "discrete": learner.discrete,
        "warmup": learner.warmup,
        "size": learner.size,
        "seed": learner.seed,
    }
    header: dict[str, Any] = {"about": about, "learner": given, "columns": None, "rows": None}
    tensors: dict[str, Tensor] = {}
    if columns is not None and memory is not None:
        header["columns"] = columns.text()
        tensors |= {f"features.{name}": tensor for name, tensor in memory.features.tensors().items()}
        tensors |= {f"memory.{name}": tensor for name, tensor in memory.tensors().items()}
        tensors |= {"center": torch.from_numpy(learner.center), "scale": torch.from_numpy(learner.scale)}
    elif rows is not None:
        frame, y = rows
        others = {i: column.astype(np.int64).tolist() if column.dtype.kind == "M" else column.tolist()
                  for i, column in frame.others.items()}  # fmt: skip
        header["rows"] = {"names": frame.names, "kinds": frame.kinds, "others": others}
        tensors |= {"rows.values": torch.from_numpy(frame.values), "rows.y": torch.from_numpy(y)}
    words = {"format": KIND, "version": str(VERSION), "content": json.dumps(header)}
    write_tensors(path, tensors, words)


def load(path: str | os.PathLike[str]) -> tuple[Learner, dict[str, Any]]:
    """Read what `save` wrote: the learner, and what was given beside it."""
    tensors, words = read_tensors(path, kind=KIND, version=VERSION)
    try:
        header = json.loads(words["content"])
        learner = _learner(header, tensors)
    except (ValueError, KeyError, TypeError, IndexError, RuntimeError) as error:
        raise ValueError(f"{path} is damaged ({error}): fit the estimator and save it again") from error
    return learner, header["about"]


def _learner(header: dict[str, Any], tensors: dict[str, Tensor]) -> Learner:
    learner = Learner(**header["learner"], forgetting=Forgetting.of(header["about"]["forget"]))
    if header["columns"] is not None:
        features = Features.of(_part(tensors, "features."))
        center, scale = (tensors[name].numpy().copy() for name in ("center", "scale"))
        learner.start(Columns.of(header["columns"]), features, center, scale)
        assert learner.memory is not None
        learner.memory.restore(_part(tensors, "memory."))
    elif header["rows"] is not None:
        about = header["rows"]
        others = {int(i): np.array([*column, None], object)[:-1] for i, column in about["others"].items()}
        for i, column in others.items():
            if about["kinds"][i] == "date":
                others[i] = column.astype(np.int64).astype(MOMENT)
        names = None if about["names"] is None else tuple(about["names"])
        frame = Frame(names, tuple(about["kinds"]), tensors["rows.values"].numpy().copy(), others)
        learner.learn(frame, tensors["rows.y"].numpy().copy())
    return learner


def _part(tensors: dict[str, Tensor], start: str) -> dict[str, Tensor]:
    return {name.removeprefix(start): tensor for name, tensor in tensors.items() if name.startswith(start)}

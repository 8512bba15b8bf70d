"""Tables' learners that `constmem export` wrote, on onnxruntime and numpy alone, with the estimators' verbs.

`constmem export` writes a copy of this file beside the graphs, in the folder constmem_runner:

    from constmem_runner import TableRunner
    runner = TableRunner("prices")          # the folder
    runner.partial_fit(X, y)
    runner.predict_interval(X)              # or predict, predict_quantiles, log_density, predict_proba
"""
# ruff: noqa: N803 - X is scikit-learn's name

import json
import os
from copy import copy
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from constmem.integrations.onnx_runner import CHUNK, Array, Exported, read, write
from constmem.tabular.answers import (
    Answer,
    Answers,
    Numbers,
    Shape,
    mixed_deviation,
    mixed_mean,
    mixed_probabilities,
)  # fmt: skip
from constmem.tabular.columns import Columns, fold_of
from constmem.tabular.inputs import extended, frame_of, labels_of, numbers_of, one_hot
from constmem.tabular.precisions import PIECE, RECENT, Fit, Sums, hold, missed, search, unexplained

STATE = "constmem.tabular"


class Known(NamedTuple):
    """What a search of precisions has found: noise and freedom, and what the rows seen until then left."""

    noise: Array
    freedom: float
    left: Array
    rows: float


class TableRunner(Exported, Numbers):
    """A streaming regressor or classifier: frozen columns and features, and sums that grow with no row.

    It starts with what the exported estimator had learned; `spawn` gives one that has learned nothing.

    Args:
        folder: one that `constmem export --to onnx` wrote of an estimator.
        threads: of onnxruntime.
    """

    KIND = "tables"

    def __init__(self, folder: str | os.PathLike[str], *, threads: int = 1) -> None:
        super().__init__(folder, threads)
        self._trust, self._empty = (float(self.about["constants"][name]) for name in ("TRUST", "EMPTY"))
        self.groups = {name: slice(*ends) for name, ends in self.about["groups"].items()}
        self._frozen: dict[str, Any] | None = None
        self._rows: list[tuple[Array, Array]] = []  # that wait to be summed
        self.load(Path(folder) / "learned.safetensors")

    def load(self, path: str | os.PathLike[str]) -> None:
        """Go on from an estimator that `save`, here or of the library, wrote, of the same frozen parts."""
        tensors, words = read(Path(path), STATE)
        header = json.loads(words["content"])
        others = ("memory.", "residuals.state.", *(("center", "scale") if self.about["discrete"] else ()))
        frozen: dict[str, Any] = {name: t for name, t in tensors.items() if not name.startswith(others)}
        frozen["columns"] = header["columns"]
        if self._frozen is not None and not _same(self._frozen, frozen):
            raise ValueError(f"{path} has frozen other columns or features than what was exported: export it")
        self._frozen, self.header, self._rows = frozen, header, []
        self._folds = len(frozen.get("residuals.weights", "1"))
        self.columns = Columns.of(header["columns"])
        memory = {n.removeprefix("memory.0."): t for n, t in tensors.items() if n.startswith("memory.0.")}
        gram = _symmetric(memory["gram"], len(memory["cross"]))
        state = {"gram": gram} | {n: memory[n] for n in ("cross", "square", "count")}
        start = "residuals.state."
        state |= {"residuals." + n.removeprefix(start): t for n, t in tensors.items() if n.startswith(start)}
        self.state = {name: np.array(state[name]) for name in self.about["names"]}
        self.seen, self._waiting, self._asked = int(tensors["memory.seen"]), 0, False
        self._precisions = memory["precisions"] if len(memory["precisions"]) else None
        self._searched, since = memory["searched"].tolist()
        self._since, self._known = int(since), None
        if "noise" in memory and self._precisions is not None:
            left = self._solved().left
            self._known = Known(memory["noise"], float(memory["freedom"]), left, float(self.state["count"]))
        self._folded()
        own, self._flat = header["about"], bool(header["about"].get("flat", True))
        self.order = np.array(own["order"], own["dtype"]) if self.about["discrete"] else None

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write an estimator that the library, and `load`, read."""
        self._fold()
        state, header = self.state, json.loads(json.dumps(self.header))
        lower = np.tril_indices(len(state["gram"]))
        memory = {"gram": state["gram"][lower]} | {n: state[n] for n in ("cross", "square", "count")}
        memory["precisions"] = np.zeros(0) if self._precisions is None else self._precisions
        memory["searched"] = np.array([self._searched, self._since], np.float64)
        if self._known is not None:
            memory |= {"noise": self._known.noise, "freedom": np.array(self._known.freedom)}
        assert self._frozen is not None
        tensors = {name: array for name, array in self._frozen.items() if name != "columns"}
        tensors |= {f"memory.0.{name}": array for name, array in memory.items()}
        tensors |= {"memory.scores": np.zeros(1), "memory.seen": np.array(self.seen)}
        slots = [name for name in state if name.startswith("residuals.")]
        tensors |= {name.replace(".", ".state."): state[name] for name in slots}
        if self.order is not None:
            header["about"] |= {"order": self.order.tolist(), "dtype": self.order.dtype.str}
            tensors |= {"center": np.zeros(len(self.order)), "scale": np.ones(len(self.order))}
        write(Path(path), tensors, {"format": STATE, "content": json.dumps(header)})

    def spawn(self) -> "TableRunner":
        """One that has learned nothing, of the same frozen columns and features: for parts of a table."""
        made = copy(self)
        blank = {name: np.zeros_like(array) for name, array in self.state.items()}
        if "residuals.lse" in blank:
            blank["residuals.lse"] = np.full_like(blank["residuals.lse"], self._empty)
        made._rows, made.state, made.seen, made._waiting, made._asked = [], blank, 0, 0, False
        made._precisions, made._known, made._searched, made._since = None, None, 0.0, 0
        made._folded()
        return made

    @property
    def classes(self) -> Array:
        """Of a classifier, in the order of `predict_proba`."""
        return np.sort(self._classes())

    def _classes(self) -> Array:
        if self.order is None:
            raise ValueError("this is a regressor, which knows no classes: use predict or predict_interval")
        return self.order

    def partial_fit(self, X: Any, y: Any) -> "TableRunner":
        """Learn more rows."""
        x = self.columns(frame_of(X))
        targets = self._targets(y, len(x))
        for i in range(0, len(x), PIECE):
            self._learn(x[i : i + PIECE], targets[i : i + PIECE])
        return self

    def _targets(self, y: Any, rows: int) -> Array:
        if self.order is None:
            targets, _ = numbers_of(y, rows)
            if targets.shape[1] != (known := self.state["cross"].shape[1]):
                raise ValueError(f"y has {targets.shape[1]} targets, but {known} were learned before")
            return targets
        labels, known = labels_of(y, rows), len(self.order)
        if labels.ndim != 1:
            raise ValueError(f"y has shape {labels.shape}: one class a row is needed")
        wider = extended(self.order, labels)
        if (more := len(wider) - known) and self.header["about"]["declared"]:
            raise ValueError(f"y holds {wider[known]!r}, which is none of the classes given at first")
        if more:
            self.order, self._asked, self._known = wider, False, None
            pads: dict[str, Any] = {"cross": ((0, 0), (0, more)), "square": (0, more)}
            self.state = self.state | {name: np.pad(self.state[name], pad) for name, pad in pads.items()}
        return one_hot(labels, wider)

    def _learn(self, x: Array, y: Array) -> None:
        """Take rows; when precisions are searched next follows the library to the row."""
        many = len(x) > RECENT // 2
        if many or self._waiting + len(x) > RECENT:
            self._fold()
        self._rows = [*self._rows, (x, y)]  # forks go on with the same
        self.seen, self._waiting, self._memory = self.seen + len(x), self._waiting + len(x), None
        if many or self._waiting >= RECENT:
            self._fold()

    def _flush(self) -> None:
        """Take the rows that wait into the sums: many at once cost little more than one."""
        rows, self._rows = self._rows, []
        if rows:
            targets = self.state["cross"].shape[1]  # those that came up later were zero
            y = np.concatenate([np.pad(y, ((0, 0), (0, targets - y.shape[1]))) for _, y in rows])
            x = np.concatenate([x for x, _ in rows])
            for i in range(0, len(x), CHUNK):
                some = x[i : i + CHUNK]
                self._change("update", x=some, fold=fold_of(some, self._folds), y=y[i : i + CHUNK])

    def _fold(self) -> None:
        self._flush()
        rows, self._waiting = self._waiting, 0
        if not rows:
            return
        self._since += rows
        known = self._asked and hold(rows, self._since, self._searched)
        self._known = self._now(self._solved().left) if known else None
        self._asked = False
        self._folded()

    def _folded(self) -> None:
        """Note how much of the kernel features explain, on average of the rows so far."""
        self._memory = None
        self._usual = unexplained(self._sums(), self.groups)

    def _now(self, left: Array) -> Known:
        """Noise and freedom, given the rows that came since they were known, too."""
        assert self._known is not None
        noise, freedom, before, had = self._known
        count = float(self.state["count"])
        more = freedom + count - had
        return Known((noise * freedom + np.maximum(left - before, 0.0)) / more, more, left, count)

    def merge(self, other: "TableRunner") -> "TableRunner":
        """Take all that another one of the same frozen columns and features has learned."""
        if other is self or not _same(self._frozen or {}, other._frozen or {}):
            raise ValueError("only runners spawned from one estimator can be merged, and none with itself")
        other._flush()
        theirs = dict(other.state)
        if self.order is not None and other.order is not None:
            self._targets(other.order, len(other.order))  # takes classes that are new
            places = [self.order.tolist().index(label) for label in other.order.tolist()]
            for name in ("cross", "square"):
                theirs[name] = np.zeros_like(self.state[name])
                theirs[name][..., places] = other.state[name]
        self._fold()
        self._change("merge", **{f"other_{name}": array for name, array in theirs.items()})
        self.seen, self._asked, self._known, self._precisions = self.seen + other.seen, False, None, None
        self._folded()
        return self

    def _sums(self) -> Sums:
        gram, cross, square = (self.state[name] for name in ("gram", "cross", "square"))
        return Sums(gram, cross, square, float(self.state["count"]))

    def _solved(self) -> Fit:
        assert self._precisions is not None
        return Fit(self._sums(), self.groups, self._precisions)

    def read(self) -> tuple[dict[str, Array], float]:
        """What the graph of `predict` takes, and degrees of freedom; precisions are searched where due."""
        if not self.seen:
            raise ValueError("nothing was learned yet: give rows to partial_fit first")
        if self._memory is not None:
            return dict(self._memory[0]), float(self._memory[1])
        self._flush()
        if not self._asked and (self._known is None or self._precisions is None):
            self._fold()
            fitted = self.about.get("fitted")  # not there in what was exported before it counted
            best = search(sums := self._sums(), self.groups, self._precisions, fitted=fitted)
            self._precisions = best.fit.precision
            self._searched, self._since = max(sums.count, self._searched + self._since), 0
            self._known = Known(best.noise, best.freedom, best.fit.left, sums.count)
        self._asked, found = True, self._solved()
        now = self._now(found.left)
        read = {"weights": found.weights, "root": found.factor.root.T, "noise": now.noise}
        read["missed"] = np.array(missed(self.groups, found.precision, self._usual))
        read["usual"] = np.array(self._usual or 0.0)
        self._memory = read | (self._run("read") if "read" in self._graphs else {}), now.freedom
        return dict(self._memory[0]), now.freedom

    def _said(self, X: Any) -> tuple[dict[str, Array], float]:
        """What the graph says of rows, and degrees of freedom."""
        x, (given, freedom) = self.columns(frame_of(X)), self.read()
        parts = [self._run("predict", x=x[i : i + CHUNK], **given) for i in range(0, len(x), CHUNK)]
        return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}, freedom

    def _answers(self, X: Any) -> tuple[Answers, Array]:
        if self.order is not None:
            raise ValueError("this is a classifier: use predict_proba")
        found, freedom = self._said(X)
        student = Answer(found["mean"], found["variance"], freedom).heavier()
        if "means" not in found:
            return [student], np.ones(1)
        normals = Shape(*(found[name] for name in ("mean", "means", "stds", "log_weight")))
        return [student, normals], np.array([1 - self._trust, self._trust])

    def predict(self, X: Any, return_std: bool = False) -> Any:
        """The most probable classes; or means, and with `return_std` standard deviations, noise included."""
        if self.order is not None:
            return self.classes[self.predict_proba(X).argmax(1)]
        answers, weights = self._answers(X)
        mean = self._shaped(mixed_mean(answers, weights))
        return (mean, self._shaped(mixed_deviation(answers, weights))) if return_std else mean

    def predict_proba(self, X: Any) -> Array:
        """Probabilities, (n, classes), in the order of `classes`."""
        order = np.argsort(self._classes())
        found, freedom = self._said(X)
        answer = Answer(found["mean"], found["variance"], freedom)
        return np.asarray(mixed_probabilities([answer], np.ones(1))[:, order])


def _symmetric(lower: Array, size: int) -> Array:
    """A matrix from its lower triangle."""
    made = np.zeros((size, size))
    made[np.tril_indices(size)] = lower
    return np.asarray(made + np.tril(made, -1).T)


def _same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether two sets of frozen parts are one."""
    return one.keys() == other.keys() and all(np.array_equal(one[name], other[name]) for name in one)

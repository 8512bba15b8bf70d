"""Models that `constmem export` wrote, on onnxruntime and numpy alone: observe, merge, predict, save, load.

This file needs nothing of constmem. `constmem export` writes a copy of it beside the graphs:

    from constmem_runner import Runner
    runner = Runner("digits")               # the folder
    runner.observe(x, y)                    # (n, dim_x) and (n, dim_y), or with the batch in front
    mean, std = runner.predict(xt)
"""

import hashlib
import json
import os
from copy import copy
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
import onnxruntime

READS = "constmem.onnx of version 4"
CHUNK = 1024  # points observed at once; never changes a result
PROVIDERS, SLOWER = ["CPUExecutionProvider"], ["SkipLayerNormFusion"]  # slower than what it replaces
NUMBERS = {"F64": np.float64, "F32": np.float32, "I64": np.int64}
BLANK = b"0" * 64  # where a checksum will be
Array = np.ndarray[Any, Any]


class Exported:
    """Graphs that `constmem export --to onnx` wrote, and a state of constant size."""

    KIND = ""
    _memory: Any = None  # what `read` makes of the state

    def __init__(self, folder: str | os.PathLike[str], threads: int) -> None:
        path = Path(folder) / "model.json"
        try:
            about: dict[str, Any] = dict(json.loads(path.read_text(encoding="utf-8")))
        except FileNotFoundError:
            raise FileNotFoundError(f"there is no {path}: give what `constmem export` wrote") from None
        except (ValueError, TypeError, RecursionError) as error:
            raise ValueError(f"{path} is damaged ({error}): export the model again") from error
        if (found := f"{about.get('format')} of version {about.get('version')}") != READS:
            raise ValueError(f"{path} is {found}, not {READS}: take the runner from beside the graphs")
        if about.pop("checksum", None) != checksum_of(about):
            raise ValueError(f"{path} is damaged (its checksum is another): export the model again")
        if about["kind"] != self.KIND:
            raise ValueError(f"{folder} is a model of {about['kind']}, not of {self.KIND}: take the other")
        self.about = about
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        self._graphs: dict[str, tuple[Any, list[str], list[str]]] = {}
        for name, sha256 in about["graphs"].items():
            content = (Path(folder) / f"{name}.onnx").read_bytes()
            if hashlib.sha256(content).hexdigest() != sha256:
                raise ValueError(f"{Path(folder) / name}.onnx is damaged: export the model again")
            made = onnxruntime.InferenceSession(content, options, PROVIDERS, disabled_optimizers=SLOWER)
            takes, gives = ([t.name for t in names] for names in (made.get_inputs(), made.get_outputs()))
            self._graphs[name] = made, takes, gives
        self.state: dict[str, Array] = {}

    @property
    def count(self) -> Array:
        """How many points or events each stream has seen."""
        return self.state["count"]

    @property
    def batch(self) -> int:
        """How many streams there are."""
        return np.size(self.count)

    @property
    def nbytes(self) -> int:
        """Bytes remembered: the same whatever was seen."""
        return sum(array.nbytes for array in self.state.values())

    def fork(self) -> Any:
        """One that goes on from here by itself; states are replaced, never written to."""
        return copy(self)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the state as the library does: it reads it, and so does `load`."""
        fingerprint = self.about["fingerprint"] if self.count.any() else ""  # of what has seen nothing
        write(Path(path), self.state, {"format": self.about["state"], "fingerprint": fingerprint})

    def load(self, path: str | os.PathLike[str]) -> None:
        """Go on from a state that `save`, or the library, wrote."""
        state, words = read(Path(path), self.about["state"])
        if words.get("fingerprint", "") not in ("", self.about["fingerprint"]):
            raise ValueError(f"{path} was made by other weights (float16 are others, too): observe again")
        batch = np.shape(state.get("count", 0))
        wanted = {name: (t.dtype.name, *batch, *t.shape[1:]) for name, t in self.state.items()}
        if {name: (array.dtype.name, *array.shape) for name, array in state.items()} != wanted:
            raise ValueError(f"{path} is of another model, or was not kept in float64: it is not {wanted}")
        self._set(state)

    def merge(self, other: Any) -> Any:
        """Merge all that another stream of the same model has seen."""
        if self.about["fingerprint"] != other.about["fingerprint"] or self.batch != other.batch:
            raise ValueError("only streams of the same exported model, and as many of them, can be merged")
        if not np.array_equal(self.state.get("start", 0), other.state.get("start", 0)):
            raise ValueError("parts of streams count time from one start: give both the same start=")
        self._change("merge", **{f"other_{name}": t for name, t in other.state.items()})

    def _set(self, state: dict[str, Array]) -> None:
        self.state, self._memory, self._begun = state, None, True

    def _blank(self, batch: int) -> dict[str, Array]:
        """The state of nothing."""
        blank = self.about["blank"].items()
        return {n: np.full((batch, *of["shape"]), of["fill"], NUMBERS[of["dtype"]]) for n, of in blank}

    def _run(self, graph: str, **given: Array) -> dict[str, Array]:
        """What a graph makes of these, and of what it takes of the state, by name."""
        if graph not in self._graphs:
            raise ValueError(f"an earlier version exported this model, without {graph}: export it again")
        made, takes, gives = self._graphs[graph]
        feed = {name: given[name] if name in given else self.state[name] for name in takes}
        return dict(zip(gives, made.run(None, feed), strict=True))

    def _change(self, graph: str, **given: Array) -> None:
        """Take the state that a graph makes of these, and of what it takes of the state."""
        found = self._run(graph, **given)
        self._set({name: found[f"{name}_out"] for name in self.state})


class Runner(Exported):
    """A stream of points: a model and the state of all it has been shown, which never grows.

    Args:
        folder: one that `constmem export --to onnx` wrote of a CMANP.
        batch: how many streams side by side.
        threads: of onnxruntime; small updates want one.
    """

    KIND = "points"

    def __init__(self, folder: str | os.PathLike[str], *, batch: int = 1, threads: int = 1) -> None:
        super().__init__(folder, threads)
        if batch < 1:
            raise ValueError(f"batch must be at least 1, not {batch}")
        self._set(self._blank(batch))

    def observe(self, x: Any, y: Any) -> None:
        """Observe points: (n, channels) or (n,) of one channel; of several streams (batch, n, channels)."""
        x, y = self._points("x", x), self._points("y", y)
        if x.shape[1] != y.shape[1]:
            raise ValueError(f"x has {x.shape[1]} points, y {y.shape[1]}: give one y for each x")
        for i in range(0, x.shape[1], CHUNK):
            self._change("update", x=x[:, i : i + CHUNK], y=y[:, i : i + CHUNK])

    def predict(self, xt: Any) -> tuple[Array, Array]:
        """Mean and standard deviation at targets, with the batch in front: (batch, m, dim_y) each."""
        targets = self._points("xt", xt)
        if not targets.shape[1]:
            return (none := np.zeros((self.batch, 0, self.about["dim_y"]), np.float32)), none.copy()
        parts = [targets[:, i : i + CHUNK] for i in range(0, targets.shape[1], CHUNK)]
        found = [self._run("predict", **self.read(), xt=part) for part in parts]
        return tuple(np.concatenate([part[name] for part in found], 1) for name in ("mean", "std"))  # type: ignore[return-value]

    def read(self) -> dict[str, Array]:
        """What `predict` needs of the state, by name; made once, until the state changes."""
        if self._memory is None:
            solved = {}
            if "matrix" in self._graphs:  # of a model with moments: ONNX cannot invert it
                solved = self._run("matrix")
                root = np.linalg.inv(factor := np.linalg.cholesky(solved["matrix"]))
                solved["inverse"] = np.swapaxes(root, -1, -2) @ root
                solved["log_det"] = 2 * np.log(np.diagonal(factor, axis1=-2, axis2=-1)).sum(-1)
            self._memory = self._run("read", **solved)
        return dict(self._memory)

    def _points(self, name: str, given: Any) -> Array:
        """Numbers as (batch, n, channels) in float64; refuses what is none, or too large."""
        dim = len((reach := self.about["reach"][name[0]])[0])
        try:
            points = np.asarray(given, dtype=np.float64)
        except (TypeError, ValueError) as error:
            raise TypeError(f"{name} must be numbers ({error})") from error
        if points.ndim in (1, 2) and self.batch == 1:
            points = points[None] if points.ndim == 2 else points[None, :, None]
        if points.ndim != 3 or points.shape[0] != self.batch or points.shape[2] != dim:
            needed = f"(n, {dim}) of one stream is needed, or ({self.batch}, n, {dim})"
            raise ValueError(f"{name} has shape {np.shape(given)}, but {needed}")
        if not (good := (points >= reach[0]) & (points <= reach[1])).all():
            first = tuple(int(i) for i in np.argwhere(~good)[0])
            raise ValueError(f"{name} holds {points[first]} at {first}: leave such points out")
        return points


class EventRunner(Exported):
    """Streams of events: what comes next, and when.

    Args:
        folder: one that `constmem export --to onnx` wrote of a CMHP.
        start: when each observation began, one number a stream; None: of one stream, with its first event.
        last_time: when the event before was, for later parts of streams, which earlier ones `merge`.
    """

    KIND = "events"

    def __init__(
        self, folder: str | os.PathLike[str], *, start: Any = None, last_time: Any = None, threads: int = 1
    ) -> None:
        super().__init__(folder, threads)
        starts = np.asarray([0.0] if start is None else start, dtype=np.float64).copy()
        if starts.ndim != 1 or not len(starts) or not np.isfinite(starts).all():
            raise ValueError(f"start must be one finite number for each stream, not {start!r}")
        last = starts if last_time is None else np.asarray(last_time, dtype=np.float64).copy()
        fits = last.shape == starts.shape and (np.isfinite(last) & (last >= starts)).all()
        if not fits or (last_time is not None and start is None):
            raise ValueError(f"last_time must be one number a stream, none before its start=, not {last}")
        self._set(self._blank(len(starts)) | {"start": starts, "last_time": last})
        self._begun = start is not None

    def observe(self, times: Any, marks: Any = None) -> None:
        """Observe events in order: (n,) of one stream, or (batch, n); marks of -1 are unknown."""
        when = np.atleast_2d(np.asarray(times, dtype=np.float64))
        if marks is None or when.size == np.size(marks) == 0:
            marks = np.full(when.shape, 0 if self.about["num_marks"] == 1 else -1)
        what = np.atleast_2d(np.asarray(marks))
        if when.shape != what.shape or when.ndim != 2 or len(when) != self.batch:
            raise ValueError(f"times {when.shape} and marks {what.shape} must be of one shape, (batch, n)")
        if what.dtype.kind not in "iu" or not ((what >= -1) & (what < self.about["num_marks"])).all():
            raise ValueError(f"marks must be whole numbers from 0 to {self.about['num_marks'] - 1}, or -1")
        last = self.state["last_time"][:, None] if self._begun else when[:, :1]
        if not np.isfinite(when).all() or (np.diff(when, prepend=last) < 0).any():
            raise ValueError("times must be finite, in order, and none before the last event seen")
        if not self._begun and when.size:
            self._set(self.state | {"start": when[:, 0].copy(), "last_time": when[:, 0].copy()})
        for i in range(0, when.shape[1], CHUNK):
            marks = what[:, i : i + CHUNK].astype(np.int64)
            self._change("update", times=when[:, i : i + CHUNK], marks=marks)

    def predict(self) -> dict[str, Array]:
        """The next gap as a mixture of log-normals (log_weights, loc, scale), its mean, and features."""
        made = self._run("predict")
        return made | {"mean": np.exp(made["log_weights"] + made["loc"] + 0.5 * made["scale"] ** 2).sum(-1)}

    def mark_probabilities(self, gap: Any) -> Array:
        """Of every mark, (batch, marks), given that the next event comes after `gap`, one a stream."""
        after = np.asarray(gap, dtype=np.float64) + np.zeros(self.batch)
        if after.shape != (self.batch,) or not ((after >= 0) & (after < np.inf)).all():
            raise ValueError(f"gap must be finite and not negative, one or one for each stream, not {gap!r}")
        return np.exp(self._run("marks", features=self.predict()["features"], gap=after)["log_prob"])


def checksum_of(about: dict[str, Any]) -> str:
    """Of all that model.json says, but for this."""
    return hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()


def write(path: Path, arrays: dict[str, Array], words: dict[str, str]) -> None:
    """Write a safetensors file as the library does: with the checksum of all of it, whole or not at all."""
    kinds = {np.dtype(kind): name for name, kind in NUMBERS.items()}
    header: dict[str, Any] = {"__metadata__": {"checksum": BLANK.decode(), **words, "version": "1s"}}
    at, arrays = 0, dict(sorted(arrays.items()))
    for name, array in arrays.items():
        place = {"data_offsets": [at, at := at + array.nbytes]}
        header[name] = {"dtype": kinds[array.dtype], "shape": list(array.shape), **place}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    content = len(text).to_bytes(8, "little") + text + b"".join(t.tobytes() for t in arrays.values())
    content = content.replace(BLANK, hashlib.sha256(content).hexdigest().encode(), 1)  # the first in it
    partial = path.with_name(f".{path.name}.{uuid4().hex}")
    try:
        partial.write_bytes(content)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def read(path: Path, wanted: str) -> tuple[dict[str, Array], dict[str, str]]:
    """The arrays and words of a file; refuses those that are damaged or of another kind."""
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    try:
        header = json.loads(content[8 : 8 + length])
        about = header.pop("__metadata__")
        kind, version, checksum = (about.get(key) for key in ("format", "version", "checksum"))
    except (ValueError, KeyError, AttributeError, RecursionError) as error:
        raise ValueError(f"{path} is no state, or damaged ({error}): save the state again") from error
    if kind != wanted or version not in ("1", "1s"):
        raise ValueError(f"{path} holds {kind!r} of version {version!r}, not {wanted!r} of version 1")
    own = hashlib.sha256(content.replace(str(checksum).encode(), BLANK, 1)).hexdigest()
    if (checksum is not None or version == "1s") and own != checksum:
        raise ValueError(f"{path} is damaged: its checksum is not that of what it holds; save it again")
    try:
        data = memoryview(content)[8 + length :]
        state = {
            name: np.frombuffer(data[slice(*t["data_offsets"])], NUMBERS[t["dtype"]]).reshape(t["shape"])
            for name, t in header.items()
        }
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is damaged, or holds other numbers ({error}): save it again") from error
    if not all(np.isfinite(array).all() for array in state.values()):
        raise ValueError(f"{path} is damaged: it holds numbers that are not finite; save it again")
    return state, about

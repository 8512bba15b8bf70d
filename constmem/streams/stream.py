"""`Stream`: the one mutable object, a model and the state of all it has been shown."""

import json
import os
from functools import reduce
from threading import Lock
from typing import Any, NamedTuple

import torch
from jaxtyping import Int
from torch import Tensor

from constmem.core import checks
from constmem.core.files import read_tensors, write_tensors
from constmem.core.monoid import Decay, Window, require_possible, restored, written
from constmem.kernels import Snapshot
from constmem.neural_processes import NeuralProcess
from constmem.point_processes import PointProcess
from constmem.streams import AnyModel

KIND, VERSION = "constmem.stream", 2


class _Held(NamedTuple):
    """What a stream remembers at one moment: never changed, only replaced."""

    parts: tuple[Any, ...]  # oldest first; several only for a Window, none of events before the first
    filled: int = 0  # points in the newest bucket


class _Reading(NamedTuple):
    """What predictions need of what was held, and the weights that read it."""

    held: _Held
    weights: Snapshot
    memory: Any


class Stream:
    """A model that is shown points (or events) as they come and asked for predictions in between.

    Nothing is kept but the state; reading it, the costly half of a query, waits until somebody asks and is
    remembered until the next observation or change of weights. No gradients are recorded. What a model that
    stores its points holds grows with all it is shown, unless a window slides over it.

    Any number of threads may use one stream. Writers take turns, so that no point is lost; what is held is
    replaced in one step, so that `predict`, `state`, `count`, `save` and `fork` see all of an `observe` or
    nothing of it, and all of it once that has returned.

    Args:
        model: a trained model, of points or of events.
        batch: how many independent streams run side by side.
        forget: None, `Decay(half_life)` or `Window(points, buckets)`; masked points count as steps.
        start: when observation began, one time or one for each stream; None: with the first event.

    Example:
        >>> from constmem import CMANP
        >>> model = CMANP(dim_x=1, dim_y=1, dim=16, depth=2, num_slots=8, num_latents=8).eval()
        >>> stream = Stream(model)
        >>> before = stream.nbytes
        >>> for _ in range(100):
        ...     stream.observe(torch.rand(1, 1, 1), torch.rand(1, 1, 1))
        >>> stream.observe([0.1, 0.2], [3.0, 4.0])  # two points more, of the one stream
        >>> stream.count.item(), stream.nbytes == before
        (102, True)
        >>> stream.predict(torch.rand(1, 5, 1)).mean.shape
        torch.Size([1, 5, 1])
    """

    def __init__(
        self, model: AnyModel, *, batch: int = 1, forget: Decay | Window | None = None, start: Any = None
    ) -> None:
        checks.positive("batch", batch)
        if not isinstance(model, NeuralProcess | PointProcess):
            raise TypeError(f"a stream is of a neural or a point process, not of a {type(model).__name__}")
        require_possible(forget, type(model).__name__, model.state_type)
        self.model, self.forget, self.batch = model, forget, batch
        if isinstance(model, NeuralProcess):
            self._held = _Held((model.empty(batch),))
        else:
            self._held = _Held(() if start is None else (self._empty(start),))
        self._reading: _Reading | None = None
        self._writing = Lock()

    def observe(self, x: Any, y: Any = None, *, mask: Any = None, chunk: int = 4096) -> None:
        """Observe more; after an error, or Ctrl-C, the stream is as it was before the call.

        Args:
            x, y: points (batch, points, channels) or, of one stream, (points, channels), or (points,) of one
                channel: tensors, arrays or lists. Of events the times and marks: (batch,), (batch, events)
                or, of one stream, (events,).
            mask: True = real.
        """
        checks.positive("chunk", chunk)
        given = self._given(x, y, mask)
        with self._writing, torch.no_grad():
            held = self._held if self._held.parts else _Held((self._empty(_first_times(*given)),))
            self._held = self._extended(held, given, chunk)

    def predict(self, xt: Any = None, *, chunk: int = 4096) -> Any:
        """The predictive distribution at the targets, or the prediction of the next event of each stream."""
        held = self._held
        if isinstance(self.model, PointProcess) and xt is None:
            return self._read(held)
        if isinstance(self.model, PointProcess) or xt is None:
            raise TypeError("predict(xt) is for streams of points; of events, predict() gives the next one")
        xt = self._points("xt", xt, self.model.dim_x)
        self.model._check_targets(xt)
        with torch.no_grad():
            return self.model.predict(self._read(held), xt, chunk=chunk)

    @property
    def state(self) -> Any:
        """The state of all that is remembered, of the model's own kind."""
        return _whole(self._held)

    @property
    def count(self) -> Int[Tensor, " b"]:
        """How many points are remembered (all that were observed, unless a window slides)."""
        none = torch.zeros(self.batch, dtype=torch.int64, device=self.model.device)
        return sum((part.count for part in self._held.parts), none)

    @property
    def nbytes(self) -> int:
        """Bytes of state held."""
        return sum(part.nbytes for part in self._held.parts)

    def fork(self) -> "Stream":
        """An independent stream that goes on from here; states are shared, since they never change."""
        other = Stream(self.model, batch=self.batch, forget=self.forget)
        other._held, other._reading = self._held, self._reading
        return other

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_writing": None, "_reading": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _writing=Lock())

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the stream (without its model), atomically, as one safetensors file."""
        held = self._held
        shell = {"filled": held.filled, "parts": len(held.parts), "batch": self.batch}
        header = {"format": KIND, "version": str(VERSION), "state": self.model.state_type.KIND}
        header["fingerprint"] = self.model._name_of_weights() or ""
        header["shell"] = json.dumps(shell | {"forget": written(self.forget)})
        numbered = enumerate(part.tensors() for part in held.parts)
        tensors = {f"{i}.{name}": t for i, part in numbered for name, t in part.items()}
        write_tensors(path, tensors, header)

    @staticmethod
    def load(path: str | os.PathLike[str], model: AnyModel) -> "Stream":
        """A stream that `save` wrote, with the model it ran on.

        Stored points depend on no weights: any model that stores points of these channels may go on.
        """
        tensors, header = read_tensors(path, kind=KIND, version=VERSION)
        if (found := header.get("state")) != model.state_type.KIND:
            raise ValueError(
                f"{path} remembers a {found!r}, but {type(model).__name__} a {model.state_type.KIND!r}: "
                "load the model it ran on"
            )
        fingerprint = header.get("fingerprint") or None
        if fingerprint != (own := model._name_of_weights()):
            raise ValueError(
                f"{path} was written by other weights (fingerprint {fingerprint}, this model {own}): "
                "load the model it ran on"
            )
        try:
            stream = _loaded(model, json.loads(header["shell"]), tensors, fingerprint)
        except (KeyError, IndexError, TypeError, ValueError, RecursionError) as error:
            raise ValueError(f"{path} is damaged: {error!r}; save the stream again") from error
        for part in stream._held.parts:
            model._require_own(part)
        return stream

    # Inside

    def _given(self, x: Any, y: Any, mask: Any) -> tuple[Any, Any, Any]:
        """Points, or times and marks, of every stream, as tensors; of one stream the axis may be missing."""
        where = self.model.device
        mask = None if mask is None else checks.as_tensor("mask", mask, where)
        if isinstance(self.model, NeuralProcess):
            xs, ys = self._points("x", x, self.model.dim_x), self._points("y", y, self.model.dim_y)
            mask = mask[None] if mask is not None and mask.ndim == 1 == self.batch else mask
            if xs.ndim == 3 and len(xs) != self.batch:
                raise ValueError(f"x is a batch of {len(xs)}, but the stream one of {self.batch}")
            if self.forget is not None:  # which cuts them before a model checks them
                self.model._check(xs, ys, mask)
            return xs, ys, mask
        given: list[Any] = [checks.as_tensor("times", x, where), y, mask]
        given[1] = None if y is None else checks.as_tensor("marks", y, where)
        times, marks, mask = (t if t is None or t.ndim > 1 else t.reshape(self.batch, -1) for t in given)
        return times, marks, mask

    def _points(self, name: str, given: Any, dim: int) -> Tensor:
        """Points (batch, points, channels); of one stream the first axis may be missing."""
        tensor = checks.as_tensor(name, given, self.model.device)
        tensor = tensor if tensor.is_floating_point() else tensor.double()
        if self.batch == 1 and tensor.ndim < 3 and (dim == 1 or tensor.shape[-1:] == (dim,)):
            return tensor.reshape(1, -1, dim)
        return tensor

    def _empty(self, start: Any) -> Any:
        """The state of streams of events that begin."""
        starts: Any = checks.one_each("start", start, self.batch, self.model.device)
        return self.model.empty(starts)

    def _read(self, held: _Held) -> Any:
        """What predictions need of what is held: as remembered, if nothing has changed since."""
        weights, reading = self.model.reading_weights(), self._reading
        if reading is None or reading.held is not held or not reading.weights.holds(weights):
            state = _whole(held)
            self.model._require_own(state)
            with torch.no_grad():
                read = self.model.query if isinstance(self.model, PointProcess) else self.model.read
                self._reading = reading = _Reading(held, Snapshot(weights), read(state))
        return reading.memory

    def _extended(self, held: _Held, given: tuple[Any, Any, Any], chunk: int) -> _Held:
        """What is held after more points."""
        x, y, mask = given
        if self.forget is None:
            return _Held((self.model.update(held.parts[0], x, y, mask=mask, chunk=chunk),))
        with self.model._verified():
            if isinstance(self.forget, Decay):
                return _Held((self._decayed(held.parts[0], x, y, mask, chunk),))
            parts, filled = held
            self.model._require_own(parts[0])  # the newest may be of no weights yet
            for here, after in self.forget.pieces(held.filled, x.shape[1]):
                xs, ys, masks = (t if t is None else t[:, here] for t in given)
                newest: Any = self.model.update(parts[-1], xs, ys, mask=masks, chunk=chunk)  # type: ignore[arg-type]
                parts, filled = (*parts[:-1], newest), after
                if filled == 0:  # the bucket is full: open the next
                    parts = (*parts, _after(self.model, newest))
                parts = parts[-self.forget.kept(filled) - 1 :]  # drop what is no longer needed
            return _Held(parts, filled)

    def _decayed(self, state: Any, x: Tensor, y: Tensor, mask: Tensor | None, chunk: int) -> Any:
        assert isinstance(self.forget, Decay)
        assert isinstance(self.model, NeuralProcess)
        self.model._require_own(state)
        for start in range(0, x.shape[1], chunk):
            here = slice(start, start + chunk)
            xs, ys = x[:, here], y[:, here]
            wide = torch.promote_types(xs.dtype, torch.float32)
            ages = torch.arange(xs.shape[1] - 1, -1, -1, dtype=wide, device=xs.device)
            weights = (-self.forget.rate * ages).expand(len(xs), -1)
            masks = None if mask is None else mask[:, here]
            part = self.model.observe(xs, ys, mask=masks, log_weight=weights)
            state = state.decay(-self.forget.rate * xs.shape[1]).merge(part)
        return state


def _loaded(model: AnyModel, shell: Any, tensors: dict[str, Tensor], fingerprint: str | None) -> Stream:
    """The stream of these settings and tensors; errors say what does not fit."""
    forget, filled, count = restored(shell["forget"]), shell["filled"], shell["parts"]
    if not (type(filled) is type(count) is int and count <= len(tensors)):
        raise ValueError(f"filled is {filled!r} and parts {count!r}")
    named: list[dict[str, Tensor]] = [{} for _ in range(count)]
    for name, tensor in tensors.items():
        number, _, own = name.partition(".")
        named[int(number)][own] = tensor
        most = model.num_marks if isinstance(model, PointProcess) else 0
        if own.endswith(("last_mark", "marks")) and bool(((tensor >= most) | (tensor < -2)).any()):
            raise ValueError(f"{own} holds marks beyond the model's {most}")
    parts = tuple(model.state_type.of_tensors(each, fingerprint).to(model.device) for each in named)
    stream = Stream(model, batch=parts[0].batch if parts else shell["batch"], forget=forget)
    bucket, kept = (forget.bucket, forget.kept(filled)) if isinstance(forget, Window) else (1, 0)
    if not 0 <= filled < bucket or not len(stream._held.parts) <= count <= kept + 1:
        raise ValueError(f"{count} parts with {filled} points in the newest do not fit forget={forget}")
    if len({part.batch for part in parts}) > 1:
        raise ValueError("its parts are of different batches")
    limits = [bucket] * (count - 1) + [filled]
    if isinstance(forget, Window) and any(int(p.count.max()) > n for p, n in zip(parts, limits, strict=True)):
        raise ValueError("a bucket holds more points than it can")
    stream._held = _Held(parts, filled)
    return stream


def _after(model: AnyModel, full: Any) -> Any:
    """The empty bucket after one that is full."""
    if isinstance(model, NeuralProcess):
        return model.empty(full.batch)
    return model.empty(full.start, last_time=full.last_time)


def _whole(held: _Held) -> Any:
    """The state of all parts together."""
    if not held.parts:
        raise ValueError("nothing was observed yet, so it is not known when observation began: give start=")
    return reduce(lambda state, part: state.merge(part), held.parts)


def _first_times(times: Tensor, _: Any, mask: Tensor | None) -> Tensor:
    """When each stream begins: with its first event."""
    if times.shape[1] == 0 or (mask is not None and not bool(mask[:, 0].all())):
        raise ValueError("some stream has no first event, so it is not known when it began: give start=")
    return times[:, 0]

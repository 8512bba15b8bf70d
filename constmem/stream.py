"""`Stream`: the one mutable object, a model and the state of all it has been shown."""

import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import reduce
from math import ceil, log
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.distributions import Distribution

from constmem.core import checks
from constmem.core.files import read_tensors, write_tensors
from constmem.core.monoid import Monoid
from constmem.neural_processes import NeuralProcess

KIND, VERSION = "constmem.stream", 2


@dataclass(frozen=True)
class Decay:
    """Forget exponentially: a point's weight halves with every `half_life` points after it."""

    half_life: float

    def __post_init__(self) -> None:
        if not 0 < self.half_life < float("inf"):
            raise ValueError(f"half_life must be a positive number of points, not {self.half_life}")

    @property
    def rate(self) -> float:
        """The logarithm of the weight lost with each point."""
        return log(2) / self.half_life


@dataclass(frozen=True)
class Window:
    """Remember at least the last `points` points, and at most one bucket (points / buckets) more.

    Each bucket is a state of its own, so memory is `buckets` + 1 states whatever has passed.
    """

    points: int
    buckets: int = 8

    def __post_init__(self) -> None:
        checks.positive("points", self.points)
        checks.positive("buckets", self.buckets)
        if self.buckets > self.points:
            raise ValueError(
                f"{self.buckets} buckets cannot share {self.points} points: take no more buckets "
                f"than points, for instance Window(points={self.points}, buckets={self.points})"
            )

    @property
    def bucket(self) -> int:
        """Points a bucket holds."""
        return ceil(self.points / self.buckets)

    def kept(self, newest: int) -> int:
        """How many full buckets it takes to hold the points, with so many in the newest."""
        return max(ceil((self.points - newest) / self.bucket), 0)


class Stream:
    """A model that is shown points as they come and asked for predictions in between.

    Nothing is kept but the state; reading it, the costly half of a query, waits until somebody asks
    and is remembered until the next observation. No gradients are recorded. A model whose state is the
    stored points streams too: what it holds grows with all it is shown, unless a window slides over it.

    Args:
        model: a trained model.
        batch: how many independent streams run side by side.
        forget: None, `Decay(half_life)` or `Window(points, buckets)`; masked points count as steps.

    Example:
        >>> from constmem import CMANP
        >>> model = CMANP(dim_x=1, dim_y=1, dim=16, depth=2, num_slots=8, num_latents=8).eval()
        >>> stream = Stream(model)
        >>> before = stream.nbytes
        >>> for _ in range(100):
        ...     stream.observe(torch.rand(1, 1, 1), torch.rand(1, 1, 1))
        >>> stream.count.item(), stream.nbytes == before
        (100, True)
        >>> stream.predict(torch.rand(1, 5, 1)).mean.shape
        torch.Size([1, 5, 1])
    """

    def __init__(
        self, model: NeuralProcess[Any, Any], *, batch: int = 1, forget: Decay | Window | None = None
    ) -> None:
        checks.positive("batch", batch)
        if not isinstance(model, NeuralProcess) or not isinstance(forget, Decay | Window | None):
            given = f"a {type(model).__name__} and forget={forget!r}"
            raise TypeError(
                f"a stream is of a neural process and forget=None, Window(points=...) or "
                f"Decay(half_life=...), not {given}"
            )
        if isinstance(forget, Decay) and not model.state_type.WEIGHTED:
            raise ValueError(
                f"{type(model).__name__} cannot forget by {forget}: it stores its points, and all count "
                "alike; use forget=Window(points=...), or a model of constant memory"
            )
        self.model, self.forget = model, forget
        self._parts: list[Monoid] = [model.empty(batch)]  # oldest first; several only for a Window
        self._filled = 0  # points in the newest bucket
        self._memory: Any = None  # what the model's `read` gave

    def observe(
        self,
        x: Float[Tensor, "b n x"],
        y: Float[Tensor, "b n y"],
        *,
        mask: Tensor | None = None,
        chunk: int = 4096,
    ) -> None:
        """Take in more points; after an error, or Ctrl-C, the stream is as it was before the call."""
        checks.positive("chunk", chunk)
        parts, filled = self._parts, self._filled
        with torch.no_grad():
            if not isinstance(self.forget, Window):
                parts = [self._remembered(parts[0], x, y, mask, chunk)]
            else:
                self.model._check(x, y, mask)
                for start, stop, filled in self._pieces(x.shape[1]):
                    here = slice(start, stop)
                    part_mask = None if mask is None else mask[:, here]
                    newest = self.model.update(parts[-1], x[:, here], y[:, here], mask=part_mask, chunk=chunk)
                    parts = [*parts[:-1], newest]
                    if filled == 0:  # the bucket is full: open the next
                        parts = [*parts, self.model.empty(x.shape[0])]
                    parts = parts[-self.forget.kept(filled) - 1 :]  # let go what is no longer needed
        self._parts, self._filled, self._memory = parts, filled, None

    def predict(self, xt: Float[Tensor, "b m x"], *, chunk: int = 4096) -> Distribution:
        """The predictive distribution at the targets, given all that is remembered."""
        self.model._check_targets(xt)
        with torch.no_grad():
            if self._memory is None:
                self._memory = self.model.read(self.state)
            return self.model.predict(self._memory, xt, chunk=chunk)

    @property
    def state(self) -> Any:
        """The state of all that is remembered, of the model's own kind."""
        return reduce(lambda state, part: state.merge(part), self._parts)

    @property
    def count(self) -> Int[Tensor, " b"]:
        """How many points are remembered (all that were observed, unless a window slides)."""
        return torch.stack([part.count for part in self._parts]).sum(0)

    @property
    def nbytes(self) -> int:
        """Bytes of state held."""
        return sum(part.nbytes for part in self._parts)

    def fork(self) -> "Stream":
        """An independent stream that goes on from here; states are shared, since they never change."""
        other = Stream(self.model, batch=self._parts[0].batch, forget=self.forget)
        other._parts, other._filled, other._memory = self._parts, self._filled, self._memory
        return other

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the stream (without its model), atomically, as one safetensors file."""
        forget = self.forget and {"kind": type(self.forget).__name__, **asdict(self.forget)}
        shell = {"forget": forget, "filled": self._filled, "parts": len(self._parts)}
        header = {
            "format": KIND,
            "version": str(VERSION),
            "state": self.model.state_type.KIND,
            "fingerprint": _fingerprint(self.model),
            "shell": json.dumps(shell),
        }
        tensors = {
            f"{number}.{name}": tensor
            for number, part in enumerate(self._parts)
            for name, tensor in part.tensors().items()
        }
        write_tensors(path, tensors, header)

    @staticmethod
    def load(path: str | os.PathLike[str], model: NeuralProcess[Any, Any]) -> "Stream":
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
        if (fingerprint or "") != (own := _fingerprint(model)):
            raise ValueError(
                f"{path} was written by other weights (fingerprint {fingerprint}, this model {own}): "
                "load the model it ran on"
            )
        try:
            shell = json.loads(header["shell"])
            forget, filled = _forget(shell["forget"]), int(shell["filled"])
            parts = [
                model.state_type.of_tensors(_named(tensors, f"{i}."), fingerprint)
                for i in range(shell["parts"])
            ]
            stream = Stream(model, batch=parts[0].batch, forget=forget)
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise ValueError(f"{path} is damaged: {error!r}; save the stream again") from error
        stream._parts = [part.to(model.device) for part in parts]
        for part in stream._parts:
            model._require_own(part)
        stream._filled = filled
        return stream

    def _remembered(self, state: Any, x: Tensor, y: Tensor, mask: Tensor | None, chunk: int) -> Monoid:
        if self.forget is None:
            updated: Monoid = self.model.update(state, x, y, mask=mask, chunk=chunk)
            return updated
        assert isinstance(self.forget, Decay)
        self.model._check(x, y, mask)
        for start in range(0, x.shape[1], chunk):
            here = slice(start, start + chunk)
            xs, ys = x[:, here], y[:, here]
            steps = torch.arange(
                xs.shape[1] - 1, -1, -1, dtype=torch.promote_types(xs.dtype, torch.float32), device=xs.device
            )
            part = self.model.observe(
                xs,
                ys,
                mask=None if mask is None else mask[:, here],
                log_weight=(-self.forget.rate * steps).expand(xs.shape[0], -1),
            )
            state = state.decay(-self.forget.rate * xs.shape[1]).merge(part)
        decayed: Monoid = state.signed(self.model.fingerprint())
        return decayed

    def _pieces(self, n: int) -> Iterator[tuple[int, int, int]]:
        """Cut n points at the edges of buckets: (start, stop, points in the bucket after it)."""
        assert isinstance(self.forget, Window)
        start, filled = 0, self._filled
        while start < n:
            stop = min(n, start + self.forget.bucket - filled)
            filled = (filled + stop - start) % self.forget.bucket
            yield start, stop, filled
            start = stop


def _fingerprint(model: NeuralProcess[Any, Any]) -> str:
    """The weights a stream depends on: none where the state is the points themselves."""
    return model.fingerprint() if model.observing_parameters() else ""


def _forget(settings: dict[str, Any] | None) -> Decay | Window | None:
    kinds: dict[str, Any] = {"Decay": Decay, "Window": Window}
    if not settings:
        return None
    forget: Decay | Window = kinds[settings.pop("kind")](**settings)
    return forget


def _named(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}

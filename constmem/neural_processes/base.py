"""The contract of every neural process: observe, merge, read, predict; the rest is derived here.

A model is a commutative monoid of states and a query. It says how a few points become a state
(`_observe`), how a state becomes what predictions need (`read`), and how those predict (`decode`).
Conditioning in chunks, streaming updates and queries follow, once, for all models.
"""

import hashlib
import json
import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import reduce
from pathlib import Path
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.distributions import Distribution

from constmem import checks
from constmem.files import read_tensors, write_tensors, write_text
from constmem.fold import Chunk
from constmem.heads import normal
from constmem.state import AttentionState

KIND, VERSION = "constmem.model", 1


class ConditioningError(RuntimeError):
    """Conditioning on a stream of chunks broke off; `state` holds all that came before."""

    def __init__(self, message: str, state: AttentionState) -> None:
        super().__init__(message)
        self.state = state


class NeuralProcess(nn.Module, ABC):
    """A model that conditions on points, is updated with more of them, and predicts elsewhere."""

    name: ClassVar[str]

    def __init__(self, *, dim_x: int, dim_y: int, config: dict[str, Any]) -> None:
        super().__init__()
        checks.positive("dim_x", dim_x)
        checks.positive("dim_y", dim_y)
        self.dim_x, self.dim_y = dim_x, dim_y
        self.config = config
        self._signature: tuple[object, str] | None = None
        self._where: Tensor
        self.register_buffer("_where", torch.empty(0), persistent=False)

    # What a model implements

    @abstractmethod
    def empty(self, batch: int = 1) -> AttentionState:
        """The state of having seen nothing, for a batch of tasks."""

    @abstractmethod
    def _observe(
        self, x: Tensor, y: Tensor, mask: Tensor | None, log_weight: Tensor | None
    ) -> AttentionState:
        """The state of exactly these points, already checked."""

    @abstractmethod
    def _fold(self, chunks: list[Chunk]) -> AttentionState:
        """The state of several chunks, differentiable without keeping what is computed from them."""

    @abstractmethod
    def read(self, state: AttentionState) -> Tensor:
        """What predictions need of a state: constant work, done once for any number of queries."""

    @abstractmethod
    def decode(
        self, memory: Tensor, xt: Float[Tensor, "b m x"]
    ) -> tuple[Float[Tensor, "b m y"], Float[Tensor, "b m y"]]:
        """Mean and standard deviation at a few targets."""

    @abstractmethod
    def observing_parameters(self) -> list[nn.Parameter]:
        """The parameters a state depends on."""

    @property
    @abstractmethod
    def layout(self) -> tuple[int, ...]:
        """The shape of a state's value, but for the batch."""

    # What follows

    def observe(
        self,
        x: Float[Tensor, "b n x"],
        y: Float[Tensor, "b n y"],
        *,
        mask: Tensor | None = None,
        log_weight: Tensor | None = None,
    ) -> AttentionState:
        """The state of exactly these points, all at once (`condition` takes them in chunks).

        Args:
            x, y: inputs and outputs.
            mask: (b, n) True = real; what is masked out may hold anything.
            log_weight: (b, n) natural logarithm of how much each point counts.
        """
        self._check(x, y, mask)
        if log_weight is not None:
            checks.per_point("log_weight", log_weight, x)
        return self._signed(self._observe(*_cleared(x, y, mask), log_weight))

    def condition(
        self,
        x: Float[Tensor, "b n x"],
        y: Float[Tensor, "b n y"],
        *,
        chunk: int = 4096,
        mask: Tensor | None = None,
    ) -> AttentionState:
        """The state of these points, `chunk` of them at a time; the chunk never changes the result.

        Differentiable: the backward pass, too, needs the memory of one chunk only.
        """
        checks.positive("chunk", chunk)
        self._check(x, y, mask, chunk=chunk)
        return self._signed(self._condition(list(_slices(x, y, mask, chunk))))

    def condition_chunks(
        self, chunks: Iterable[tuple[Tensor, ...]], *, initial: AttentionState | None = None
    ) -> AttentionState:
        """The state of a stream of (x, y) or (x, y, mask) chunks, each forgotten once it is seen.

        Where gradients are wanted the chunks are kept (they alone) until the backward pass. If the
        stream breaks off, the `ConditioningError` raised holds the state so far.

        Args:
            chunks: any iterable; nothing is stored, so it may be larger than memory.
            initial: a state to go on from.
        """
        if initial is not None:
            self._require_own(initial)
        seen = self._numbered(chunks)
        if self._learns():
            kept = list(seen)
            if not kept and initial is None:
                raise _nothing()
            state = self._condition(kept) if kept else self.empty(_batch(initial))
            return state if initial is None else initial.merge(state)
        state_so_far = initial
        try:
            for chunk in seen:
                part = self._signed(self._observe(*chunk, None))
                state_so_far = part if state_so_far is None else state_so_far.merge(part)
        except Exception as error:
            if state_so_far is None:
                raise
            points = state_so_far.count.tolist()
            raise ConditioningError(
                f"conditioning broke off after {points} points: {error}; "
                "what was seen so far is this error's .state, to go on from with initial=",
                state_so_far,
            ) from error
        if state_so_far is None:
            raise _nothing()
        return state_so_far

    def update(
        self,
        state: AttentionState,
        x: Float[Tensor, "b n x"],
        y: Float[Tensor, "b n y"],
        *,
        mask: Tensor | None = None,
        chunk: int = 4096,
    ) -> AttentionState:
        """The state with more points; old ones are never needed, and nothing is read."""
        checks.positive("chunk", chunk)
        self._require_own(state)
        self._check(x, y, mask, chunk=chunk)
        return state.merge(self._condition(list(_slices(x, y, mask, chunk))))

    def predict(self, memory: Tensor, xt: Float[Tensor, "b m x"], *, chunk: int = 4096) -> Distribution:
        """The predictive distribution at the targets, from what `read` gave."""
        checks.positive("chunk", chunk)
        checks.points("xt", xt, self.dim_x, device=self.device)
        if xt.shape[0] != memory.shape[0]:
            raise ValueError(
                f"xt is a batch of {xt.shape[0]}, but the state one of {memory.shape[0]}: "
                "they must be the same (expand one of them)"
            )
        m = xt.shape[1]
        if m <= chunk:
            return normal(*self.decode(memory, xt))
        parts = (self.decode(memory, xt[:, i : i + chunk]) for i in range(0, m, chunk))
        if torch.is_grad_enabled():
            means, stds = zip(*parts, strict=True)
            return normal(torch.cat(means, 1), torch.cat(stds, 1))
        return normal(*_filled(parts, m))

    def query(self, state: AttentionState, xt: Float[Tensor, "b m x"], *, chunk: int = 4096) -> Distribution:
        """The predictive distribution at the targets: `predict(read(state), xt)`."""
        self._require_own(state)
        checks.finite("xt", xt)
        return self.predict(self.read(state), xt, chunk=chunk)

    def forward(
        self,
        xc: Float[Tensor, "b n x"],
        yc: Float[Tensor, "b n y"],
        xt: Float[Tensor, "b m x"],
        mask: Tensor | None = None,
        chunk: int = 4096,
    ) -> Distribution:
        """Condition and query, for training: the deployed path, but for the checks of values."""
        self._check(xc, yc, mask, values=False)
        state = self._condition(list(_slices(xc, yc, mask, chunk)))
        return self.predict(self.read(state), xt, chunk=chunk)

    @property
    def device(self) -> torch.device:
        """Where the parameters are."""
        return self._where.device

    def fingerprint(self) -> str:
        """A short name for the configuration and weights that states depend on."""
        parameters = self.observing_parameters()
        key = [(p.data_ptr(), 0 if p.is_inference() else p._version) for p in parameters]
        if self._signature is None or self._signature[0] != key:
            digest = hashlib.sha256(f"{self.name}{json.dumps(self.config, sort_keys=True)}".encode())
            for p in parameters:
                digest.update(p.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
            self._signature = key, digest.hexdigest()[:16]
        return self._signature[1]

    def save_pretrained(self, folder: str | os.PathLike[str]) -> None:
        """Write `config.json` and `model.safetensors` into a folder."""
        content = {"model": self.name, "config": self.config}
        header = {"format": KIND, "version": str(VERSION)}
        write_tensors(Path(folder) / "model.safetensors", self.state_dict(), header)
        write_text(Path(folder) / "config.json", json.dumps(content, indent=2) + "\n")

    @classmethod
    def from_pretrained(
        cls, folder: str | os.PathLike[str], *, device: torch.device | str | None = None
    ) -> "NeuralProcess":
        """The model that `save_pretrained` wrote, ready to evaluate."""
        path = Path(folder) / "config.json"
        if not path.is_file():
            raise FileNotFoundError(
                f"there is no {path}: from_pretrained needs a folder that save_pretrained wrote"
            )
        try:
            content = json.loads(path.read_text())
            name, config = content["model"], content["config"]
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            raise ValueError(f"{path} is damaged or of another kind ({error!r})") from error
        if name != cls.name:
            raise ValueError(f"{folder} holds a {name!r}, not a {cls.name!r}: load it with its own class")
        try:
            model = cls(**config)
        except TypeError as error:
            raise ValueError(f"{path} has settings that {cls.__name__} does not know: {error}") from error
        tensors, _ = read_tensors(Path(folder) / "model.safetensors", kind=KIND, version=VERSION)
        try:
            model.load_state_dict(tensors)
        except RuntimeError as error:
            raise ValueError(f"the weights in {folder} do not fit its config.json: {error}") from error
        return model.eval() if device is None else model.eval().to(device)

    # Inside

    def _condition(self, chunks: list[Chunk]) -> AttentionState:
        if self._learns() and len(chunks) > 1:
            return self._fold(chunks)
        parts = (self._observe(*chunk, None) for chunk in chunks)
        return reduce(AttentionState.merge, parts)

    def _learns(self) -> bool:
        return torch.is_grad_enabled() and any(p.requires_grad for p in self.observing_parameters())

    def _signed(self, state: AttentionState) -> AttentionState:
        """Name the weights that made a state, unless they are being trained."""
        if torch.compiler.is_compiling() or self._learns():
            return state
        return replace(state, fingerprint=self.fingerprint())

    def _check(
        self, x: Tensor, y: Tensor, mask: Tensor | None, *, values: bool = True, chunk: int = 4096
    ) -> None:
        device = self.device
        checks.points("x", x, self.dim_x, device=device)
        checks.points("y", y, self.dim_y, like=x, device=device)
        if mask is not None:
            checks.mask(mask, x)
        if values:
            for i in range(0, x.shape[1], chunk):
                here = None if mask is None else mask[:, i : i + chunk]
                checks.finite("x", x[:, i : i + chunk], here, first=i)
                checks.finite("y", y[:, i : i + chunk], here, first=i)

    def _numbered(self, chunks: Iterable[tuple[Tensor, ...]]) -> Iterator[Chunk]:
        for number, chunk in enumerate(chunks):
            if not isinstance(chunk, tuple | list) or len(chunk) not in (2, 3):
                raise TypeError(f"chunk {number} is not a pair (x, y) or triple (x, y, mask) of tensors")
            x, y, mask = chunk[0], chunk[1], chunk[2] if len(chunk) == 3 else None
            try:
                self._check(x, y, mask)
            except (TypeError, ValueError) as error:
                raise type(error)(f"chunk {number}: {error}") from error
            yield _cleared(x, y, mask)

    def _require_own(self, state: AttentionState) -> None:
        """Refuse a state that other weights, another shape of model or another device made."""
        if not isinstance(state, AttentionState):
            raise TypeError(f"expected a state of {type(self).__name__}, not {type(state).__name__}")
        if state.value.shape[1:] != self.layout:
            raise ValueError(
                f"this state is of another model: it has (depth, heads, slots, channels) "
                f"{tuple(state.value.shape[1:])}, this model {self.layout}"
            )
        device = self.device
        if state.value.device != device:
            raise ValueError(
                f"the state is on {state.value.device}, the model on {device}: use state.to({str(device)!r})"
            )
        if torch.compiler.is_compiling() or state.fingerprint is None:
            return
        if not self._learns() and state.fingerprint != self.fingerprint():
            raise ValueError(
                f"this state was made by other weights (fingerprint {state.fingerprint}, this model "
                f"{self.fingerprint()}): condition again with this model"
            )


def _batch(state: AttentionState | None) -> int:
    return 1 if state is None else state.value.shape[0]


def _nothing() -> ValueError:
    return ValueError(
        "the iterable yielded no chunk: if there is really no data, use model.empty(batch), "
        "which predicts the prior; an exhausted iterator cannot be used twice"
    )


def _cleared(x: Tensor, y: Tensor, mask: Tensor | None) -> Chunk:
    """Put zeros where the mask leaves points out, so that whatever stood there cannot leak."""
    if mask is None:
        return x, y, None
    keep = mask[..., None]
    return torch.where(keep, x, 0.0), torch.where(keep, y, 0.0), mask


def _slices(x: Tensor, y: Tensor, mask: Tensor | None, chunk: int) -> Iterator[Chunk]:
    for i in range(0, max(x.shape[1], 1), chunk):
        here = slice(i, i + chunk)
        yield _cleared(x[:, here], y[:, here], None if mask is None else mask[:, here])


def _filled(parts: Iterator[tuple[Tensor, Tensor]], m: int) -> tuple[Tensor, Tensor]:
    """Write the parts into place as they come, so that the outputs are held once."""
    mean = std = torch.empty(0)
    start = 0
    for part_mean, part_std in parts:
        if start == 0:
            b, _, dim = part_mean.shape
            mean, std = part_mean.new_empty(b, m, dim), part_std.new_empty(b, m, dim)
        stop = start + part_mean.shape[1]
        mean[:, start:stop], std[:, start:stop] = part_mean, part_std
        start = stop
    return mean, std

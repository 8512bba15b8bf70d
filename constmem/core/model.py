"""What any model is before it sees data: settings with weights, named by a fingerprint, kept in files."""

import hashlib
import inspect
import json
import os
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn

from constmem.core import checks
from constmem.core.files import (
    CONFIG,
    WEIGHTS,
    home_of,
    read_about,
    read_config,
    read_tensors,
    require_sound,
    write_tensors,
    write_text,
)
from constmem.kernels import Snapshot

KIND, VERSION = "constmem.model", 1
_NOTHING = nullcontext()
AnyModel = TypeVar("AnyModel", bound="Model")
R = TypeVar("R")
_ANY = object()  # equal to no setting


class Model(nn.Module, ABC):
    """The settings and weights of a model; a folder holds them as `config.json` and `model.safetensors`."""

    name: ClassVar[str]
    decoding: ClassVar[Set[str]] = frozenset()  # parts that meet only what was read
    older: ClassVar[Mapping[str, Any]] = {}  # settings that earlier versions did not write, as they were then
    newer: ClassVar[Mapping[str, Any]] = {}  # options that earlier versions had not, as they are when unused

    config: dict[str, Any]  # what the constructor was called with, and its defaults
    __signature__: ClassVar[inspect.Signature]  # all settings, as `help` and editors show them

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        cls.__signature__ = inspect.Signature(_settings(cls))

    def __new__(cls: type[AnyModel], *_: Any, **settings: Any) -> AnyModel:
        """A model that knows its settings before its constructor runs; a copy is given them afterwards."""
        model = super().__new__(cls)
        bound = cls.__signature__.bind_partial(**settings)
        bound.apply_defaults()
        chosen = {key: value for key, value in bound.arguments.items() if value != cls.newer.get(key, _ANY)}
        object.__setattr__(model, "config", chosen)  # of a model without them: as earlier versions wrote it
        return model

    def __init__(self, *, config: dict[str, Any] | None = None) -> None:  # noqa: ARG002
        super().__init__()
        self.domain: dict[str, list[list[float]]] = {}  # lowest and highest of each channel trained on
        self._signature: tuple[Snapshot, str] | None = None
        self._where: Tensor
        self.register_buffer("_where", torch.empty(0), persistent=False)

    @abstractmethod
    def observing_parameters(self) -> Sequence[Tensor]:
        """The parameters (and fixed numbers) a state depends on."""

    @classmethod
    @abstractmethod
    def family(cls) -> Mapping[str, type["Model"]]:
        """The models of this one's kind, by name."""

    @property
    def device(self) -> torch.device:
        """Where the parameters are."""
        return self._buffers["_where"].device  # type: ignore[union-attr]  # past the look-up of modules

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the parameters."""
        return self._buffers["_where"].dtype  # type: ignore[union-attr]

    def fingerprint(self) -> str:
        """A short name for the configuration, weights and units that states depend on.

        It is computed again when any bit of them has changed, by any means.
        """
        known = self._signature
        if known is not None and known[0].fresh:
            return known[1]
        parameters = self._signed_by()
        if known is None or not known[0].holds(parameters):
            snapshot = Snapshot(parameters)
            digest = hashlib.sha256(f"{self.name}{json.dumps(self.config, sort_keys=True)}".encode())
            for p in parameters:
                digest.update(p.detach().cpu().reshape(-1).contiguous().view(torch.uint8).numpy().tobytes())
            self._signature = known = snapshot, digest.hexdigest()[:16]
        return known[1]

    def reading_weights(self) -> list[Tensor]:
        """All numbers that what is read from a state depends on."""
        own = [*self._parameters.values(), *self._buffers.values()]
        parts = (part for name, part in self._modules.items() if name not in self.decoding)
        return [*(t for t in own if t is not None), *listed(*parts)]

    def save_pretrained(self, folder: str | os.PathLike[str]) -> None:
        """Write `config.json` and `model.safetensors` into a folder."""
        content = {"model": self.name, "config": self.config}
        header = {"format": KIND, "version": str(VERSION), "config": _digest(content)}
        write_tensors(Path(folder) / WEIGHTS, self.state_dict(), header)
        write_text(Path(folder) / CONFIG, json.dumps(content, indent=2) + "\n")

    @classmethod
    def from_pretrained(
        cls: type[AnyModel], folder: str | os.PathLike[str], *, device: torch.device | str | None = None
    ) -> AnyModel:
        """A trained model, ready to evaluate; of an abstract class, whichever the folder holds.

        Args:
            folder: one that `save_pretrained` wrote, or the name of weights that come with the package
                (`SHIPPED`): "emnist", handwritten characters of 28x28 grey pixels; "gp", smooth functions
                of one number between -2 and 2, seen with little noise. A folder of the working directory
                that is called so comes first only if it holds a model: config.json and model.safetensors.
            device: where to put it.
        """
        folder = home_of(folder)
        where = None if device is None else checks.device(device)
        path, about = Path(folder) / CONFIG, read_about(Path(folder))
        content = read_config(path)
        kind = cls._named(content["model"], folder)
        known = about.get("sha256", {})
        tensors, header = read_tensors(
            Path(folder) / WEIGHTS, kind=KIND, version=VERSION, sha256=known.get("weights")
        )
        if (digest := _digest(content)) != header.get("config", known.get("config", digest)):
            raise ValueError(
                f"{path} is not the one that was saved with these weights, so one of both was changed or is "
                "of another model: save the model again"
            )
        require_sound(path, content["config"], tensors)
        older = {key: value for key, value in kind.older.items() if key not in content["config"]}
        if older:
            settings = ", ".join(f"{key}={value}" for key, value in older.items())
            warnings.warn(
                f"{path} was written by an earlier version, whose {kind.__name__} was not the published "
                f"one: it is loaded as it was trained, with {settings}; train again for the published model",
                stacklevel=2,
            )
        try:
            model = kind(**older | content["config"])
        except TypeError as error:
            raise ValueError(f"{path} has settings that {kind.__name__} does not know: {error}") from error
        try:
            model._load(tensors)
        except (RuntimeError, TypeError) as error:
            raise ValueError(
                f"the weights in {folder} do not fit its config.json, so one of both is of "
                f"another model: {misfit(error)}"
            ) from error
        model.domain = about.get("domain", {})
        return model.eval() if where is None else model.eval().to(where)

    @classmethod
    def _named(cls: type[AnyModel], name: str, folder: str | os.PathLike[str]) -> type[AnyModel]:
        """This class, if it is the one named; of an abstract class, the model of that name."""
        if not inspect.isabstract(cls):
            if name != cls.name:
                raise ValueError(f"{folder} holds a {name!r}, not a {cls.name!r}: load it with its own class")
            return cls
        kinds = {name: kind for name, kind in cls.family().items() if issubclass(kind, cls)}
        if name not in kinds:
            raise ValueError(f"{folder} holds a {name!r}, which is none of {', '.join(kinds)}")
        return kinds[name]

    # Inside

    def _set(self, *names: str) -> dict[str, Any]:
        """Some of the settings, for the parts that take them."""
        return {name: self.config[name] for name in names}

    def _signed_by(self) -> Sequence[Tensor]:
        """What the fingerprint is taken of."""
        return self.observing_parameters()

    def _load(self, tensors: Mapping[str, Tensor]) -> None:
        """Take on weights, in the precision they were written in."""
        own = (tensors[key] for key, _ in self.named_parameters() if key in tensors)
        self.to(next((tensor.dtype for tensor in own), self.dtype))
        self.load_state_dict(dict(tensors))

    def _verified(self) -> AbstractContextManager[None]:
        """Verify the weights once for all that is done inside of it by this thread."""
        if checks.traced(self.device) or self._name_of_weights() is None:
            return _NOTHING
        assert self._signature is not None  # by which they were named
        return self._signature[0]

    def _while_verifying(self, work: Callable[[], R], *, updates: bool = False) -> R:
        """Do this, with the weights verified once: on a GPU meanwhile, and if they have changed, again."""
        weights = None if self._signature is None else self._signature[0]
        ready = (
            weights is not None and weights.on_gpu and not weights.fresh and not checks.traced(self.device)
        )
        if weights is None or not ready or not weights.begin(self._signed_by(), deferred=updates):
            with self._verified():
                return work()
        failure = None
        try:
            with weights:
                result = work()
        except Exception as error:  # perhaps of weights that are no more
            failure = error
        finally:
            same = weights.end()
        if not same:
            with self._verified():
                return work()
        if failure is not None:
            raise failure
        return result

    def _signed(self, state: Any) -> Any:
        """Name the weights that made a state, in training too: they have another name after each step."""
        if checks.traced(self.device):
            return state
        own = "fingerprint" in state.__dataclass_fields__  # not that of a part
        name = self._name_of_weights()
        return replace(state, fingerprint=name) if own else state.signed(name)

    def _name_of_weights(self) -> str | None:
        """What states are signed with; None where they depend on no weights."""
        return self.fingerprint()

    def _require_made_here(self, state: Any) -> None:
        """Refuse a state on another device, or made by other weights."""
        name, known = state.fingerprint, self._signature
        device, where = self.device, getattr(state, state.LEAD).device
        if where != device:
            raise ValueError(f"the state is on {where}, the model on {device}: use state.to({str(device)!r})")
        if known is not None and known[1] == name and known[0].fresh:
            return
        if not name or checks.traced(device):  # not known, or it has seen nothing
            return
        if name != (own := self.fingerprint()):
            raise ValueError(
                f"this state was made by other weights (fingerprint {name}, this model {own}): condition "
                "again with this model"
            )

    def _learns(self) -> bool:
        return torch.is_grad_enabled() and any(p.requires_grad for p in self.observing_parameters())


def listed(*modules: nn.Module | None) -> list[Tensor]:
    """All numbers that modules are made of; PyTorch's own ways to list them take several times as long."""
    found: list[Any] = []
    for root in modules:
        inner: list[Any] = [root]
        for module in inner:  # of which there are more as it goes on
            if module is None:
                continue
            own = module.__dict__
            if parameters := own["_parameters"]:
                found += parameters.values()
            elif callable(weight := getattr(type(module), "weight", None)):  # of a quantized layer
                found += [weight(module).dequantize(), module.bias()]
            found += own["_buffers"].values()
            inner += own["_modules"].values()
    return [t for t in found if t is not None]


def _settings(kind: type[Model]) -> list[inspect.Parameter]:
    """The keywords of a constructor, behind those of the next one where it hands the rest on to it."""
    found: dict[str, inspect.Parameter] = {}
    for parent in (parent for parent in kind.__mro__ if "__init__" in vars(parent)):
        parameters = inspect.signature(vars(parent)["__init__"]).parameters
        own = {name: p for name, p in parameters.items() if p.kind is p.KEYWORD_ONLY}
        found = {name: p for name, p in own.items() if name not in found} | found
        if all(p.kind is not p.VAR_KEYWORD for p in parameters.values()):
            break
    return list(found.values())


def _digest(content: Mapping[str, Any]) -> str:
    """A checksum of a config, however its file is laid out."""
    fields = {key: content[key] for key in ("model", "config")}
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()


def misfit(error: Exception) -> str:
    """The first lines of an error about weights, which may name hundreds of them."""
    text = " ".join(str(error).split())
    return text if len(text) <= 300 else f"{text[:300]} ..."

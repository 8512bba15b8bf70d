"""What any model is before it sees data: settings with weights, named by a fingerprint, kept in files."""

import hashlib
import inspect
import json
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn

from constmem import checks, memory
from constmem.files import read_tensors, write_tensors, write_text
from constmem.fold import Chunk
from constmem.neural_processes.chunks import slices
from constmem.neural_processes.scales import Scales

SHIPPED = {
    path.parent.name: path.parent for path in Path(__file__).parents[1].glob("pretrained/*/config.json")
}
KIND, VERSION = "constmem.model", 1
AnyModel = TypeVar("AnyModel", bound="Model")


class Model(nn.Module, ABC):
    """The settings and weights of a model; a folder holds them as `config.json` and `model.safetensors`."""

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
        self.scales: Scales | None
        self.register_module("scales", None)

    @abstractmethod
    def observing_parameters(self) -> list[nn.Parameter]:
        """The parameters a state depends on."""

    def needs(self, *, learning: bool) -> memory.Needs | None:  # noqa: ARG002
        """What a context point and a target take at the worst moment; None in constant memory.

        Args:
            learning: whether a gradient is wanted, for which more must be kept.
        """
        return None

    def estimated_peak(self, batch: int, points: int, targets: int = 0, *, learning: bool = False) -> int:
        """About how many bytes it takes to work these through: right within a factor of two.

        batch * (points * needs.point + targets * needs.target) numbers of the model's precision, on the
        fused path; 0 for models of constant memory, which never need to ask.
        """
        needs = self.needs(learning=learning)
        if needs is None:
            return 0
        return batch * (points * needs.point + targets * needs.target) * self.dtype.itemsize

    @property
    def device(self) -> torch.device:
        """Where the parameters are."""
        return self._where.device

    @property
    def dtype(self) -> torch.dtype:
        """What the parameters are made of."""
        return self._where.dtype

    def set_scales(self, scales: Scales | None) -> None:
        """Let the model take and predict data in these units, of which it sees standardised values.

        They are saved with the weights and part of the fingerprint: states made with others are refused.
        """
        if scales is not None and scales.dims != (self.dim_x, self.dim_y):
            raise ValueError(
                f"the scales are of {scales.dims} input and output channels, the model has "
                f"{(self.dim_x, self.dim_y)}"
            )
        self.scales = None if scales is None else scales.to(self.device)

    def fingerprint(self) -> str:
        """A short name for the configuration, weights and scales that states depend on.

        It is computed anew when a weight was replaced or changed in place; writes through
        `parameter.data`, which no version counter counts, it does not see.
        """
        parameters: list[Tensor] = [*self.observing_parameters()]
        if self.scales is not None:
            parameters += self.scales.buffers()
        key = [(p.data_ptr(), 0 if p.is_inference() else p._version) for p in parameters]
        if self._signature is None or self._signature[0] != key:
            digest = hashlib.sha256(f"{self.name}{json.dumps(self.config, sort_keys=True)}".encode())
            for p in parameters:
                digest.update(p.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
            self._signature = key, digest.hexdigest()[:16]
        return self._signature[1]

    def save_pretrained(self, folder: str | os.PathLike[str]) -> None:
        """Write `config.json` and `model.safetensors` into a folder."""
        header = {"format": KIND, "version": str(VERSION)}
        write_tensors(Path(folder) / "model.safetensors", self.state_dict(), header)
        content = {"model": self.name, "config": self.config}
        write_text(Path(folder) / "config.json", json.dumps(content, indent=2) + "\n")

    @classmethod
    def from_pretrained(
        cls: type[AnyModel], folder: str | os.PathLike[str], *, device: torch.device | str | None = None
    ) -> AnyModel:
        """A trained model, ready to evaluate; of `NeuralProcess`, whichever the folder holds.

        Args:
            folder: one that `save_pretrained` wrote, or the name of weights that come with the package
                (`SHIPPED`): "emnist", handwritten characters of 28x28 grey pixels.
            device: where to put it.
        """
        if str(folder) in SHIPPED and not Path(folder).is_dir():
            folder = SHIPPED[str(folder)]
        path = Path(folder) / "config.json"
        name, config = _read_config(path)
        kind = cls._named(name, folder)
        try:
            model = kind(**config)
        except TypeError as error:
            raise ValueError(f"{path} has settings that {kind.__name__} does not know: {error}") from error
        tensors, _ = read_tensors(Path(folder) / "model.safetensors", kind=KIND, version=VERSION)
        units = {k.removeprefix("scales."): t for k, t in tensors.items() if k.startswith("scales.")}
        for key, tensor in tensors.items():
            if not key.startswith("scales."):
                model.to(tensor.dtype)  # the precision it was written in
                break
        try:
            model.set_scales(Scales(**units) if units else None)
            model.load_state_dict(tensors)
        except (RuntimeError, TypeError) as error:
            raise ValueError(f"the weights in {folder} do not fit its config.json: {error}") from error
        return model.eval() if device is None else model.eval().to(device)

    @classmethod
    def _named(cls: type[AnyModel], name: str, folder: str | os.PathLike[str]) -> type[AnyModel]:
        """This class, if it is the one named; of an abstract class, the model of that name."""
        if not inspect.isabstract(cls):
            if name != cls.name:
                raise ValueError(f"{folder} holds a {name!r}, not a {cls.name!r}: load it with its own class")
            return cls
        from constmem.neural_processes import MODELS  # which is made of this class

        kind = MODELS.get(name)
        if kind is None or not issubclass(kind, cls):
            known = [name for name, kind in MODELS.items() if issubclass(kind, cls)]
            raise ValueError(f"{folder} holds a {name!r}, which is none of {', '.join(known)}")
        return kind

    # Inside

    def _learns(self) -> bool:
        return torch.is_grad_enabled() and any(p.requires_grad for p in self.observing_parameters())

    def _afford(self, x: Tensor, targets: int = 0) -> None:
        """Refuse what this device has too little memory for, before it dies of it."""
        batch, points = x.shape[:2]
        if self.estimated_peak(batch, points, targets, learning=True) < memory.WORTH_ASKING:
            return  # small inputs pay for nothing more
        learning = torch.is_grad_enabled() and any(p.requires_grad for p in self.parameters())
        needed = self.estimated_peak(batch, points, targets, learning=learning)
        what = f"{type(self).__name__}, given {points:,} points and {targets:,} targets"
        memory.require(needed, self.device, f"{what} in a batch of {batch:,},")

    def _scaled(self, chunk: Chunk) -> Chunk:
        """Points in the model's own units."""
        return chunk if self.scales is None else self.scales(chunk)

    def _slices(self, x: Tensor, y: Tensor, mask: Tensor | None, chunk: int) -> Iterator[Chunk]:
        """Points in chunks and in the model's own units."""
        return map(self._scaled, slices(x, y, mask, chunk))

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


def _read_config(path: Path) -> tuple[str, dict[str, Any]]:
    if not path.is_file():
        raise FileNotFoundError(
            f"there is no {path}: from_pretrained needs a folder that save_pretrained wrote"
        )
    try:
        content = json.loads(path.read_text())
        return content["model"], content["config"]
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is damaged or of another kind ({error!r})") from error

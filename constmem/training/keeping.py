"""What is kept of a run while it trains: checkpoints and best weights, every number of them finite."""

import math
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from constmem.core import checks
from constmem.core.model import Model
from constmem.training import checkpoint
from constmem.training.log import Log


class StoppedError(RuntimeError):
    """A run came to an early end; the message says why, and how to go on."""


class Losses:
    """The losses of the steps since they were last read: noting one waits for no device.

    Args:
        room: the most steps between two readings.

    Example:
        >>> losses = Losses(3)
        >>> for number in (1.0, 2.0):
        ...     losses.note(torch.tensor(number))
        >>> losses.read(), losses.read()
        ([1.0, 2.0], [])
    """

    def __init__(self, room: int) -> None:
        self._room, self._count = room, 0
        self._kept: Tensor | None = None

    def note(self, loss: Float[Tensor, ""]) -> None:
        """Keep a copy, one small kernel: a captured step writes its next loss over the last."""
        if self._kept is None:
            self._kept = loss.new_empty(self._room)
        self._kept[self._count].copy_(loss)
        self._count += 1

    def read(self) -> list[float]:
        """All that were noted, oldest first; they are forgotten here."""
        found: list[float] = [] if self._kept is None else self._kept[: self._count].tolist()
        self._count = 0
        return found


class Keeper:
    """The weights of a run on disk: its latest checkpoint, and the best by validation, all of them finite.

    Args:
        out: the run's folder.
        lr: its rate, for advice.
        step: of the checkpoint in the folder, if there is one.
    """

    def __init__(
        self,
        out: Path,
        log: Log,
        *,
        lr: float,
        step: int | None,
        model: Model,
        optimiser: torch.optim.Optimizer,
        generator: torch.Generator,
    ) -> None:
        self.out, self.log, self.lr, self.step = out, log, lr, step
        self.model, self.optimiser, self.generator = model, optimiser, generator

    def require_finite(self, losses: list[float], done: int) -> None:
        """Stop where one of the losses of the last steps, up to `done`, is not finite, naming the first."""
        for step, loss in enumerate(losses, done - len(losses) + 1):
            if not math.isfinite(loss):
                raise self._stopped(f"the loss became {loss} at step {step}")

    def validated(self, step: int, score: float) -> None:
        """Log a validation, and keep the weights if it is the best so far; both must be finite."""
        if not math.isfinite(score):
            raise self._stopped(f"the validation after step {step} gave {score}")
        self._require_sound(self.model.state_dict(), step)
        if self.log.validation(step, score):
            self.model.save_pretrained(self.out)

    def save(self, step: int) -> None:
        """Write a checkpoint; before any validation its weights are the best there are."""
        kept: dict[str, Any] = {"model": self.model, "optimiser": self.optimiser}
        self._require_sound(checkpoint.tensors(**kept), step)
        checkpoint.save(self.out, **kept, generator=self.generator, step=step)
        self.step = step
        if self.log.best is None:
            self.model.save_pretrained(self.out)

    def _require_sound(self, tensors: dict[str, Tensor], step: int) -> None:
        """Stop rather than write weights, or moments of the optimiser, that nobody can go on from."""
        if (name := checks.first_not_finite(tensors)) is not None:
            raise self._stopped(f"step {step} left {name} with numbers that are not finite")

    def _stopped(self, what: str) -> StoppedError:
        kept = "there is no checkpoint yet"
        if self.step is not None:
            kept = f"the last good checkpoint is {self.out / checkpoint.FILE}, of step {self.step}"
            kept += ": --resume goes on from it, if the cause is gone"
        if self.step is not None or self.log.best is not None:
            kept += f"; --set start={self.out} begins a new run with the best weights so far"
        return StoppedError(
            f"{what}: start anew, in another --out, with a smaller lr or clip, for instance --set "
            f"lr={min(self.lr / 3, 3e-4):.1g}; look for huge numbers in data of your own; {kept}"
        )

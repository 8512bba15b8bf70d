"""Everything a run needs to go on as if it had never stopped: weights, optimiser, randomness, step."""

import logging
from pathlib import Path

import torch
from torch import Tensor, nn

from constmem.core.files import read_tensors, write_tensors
from constmem.core.model import misfit

KIND, VERSION = "constmem.checkpoint", 1
FILE = "checkpoint.safetensors"
_log = logging.getLogger("constmem")


def save(
    folder: Path, *, model: nn.Module, optimiser: torch.optim.Optimizer, generator: torch.Generator, step: int
) -> None:
    """Write a checkpoint, atomically, over the last one."""
    content = {**tensors(model=model, optimiser=optimiser), "generator": generator.get_state()}
    header = {"format": KIND, "version": str(VERSION), "step": str(step)}
    header["optimiser"] = type(optimiser).__name__
    write_tensors(folder / FILE, content, header)


def tensors(*, model: nn.Module, optimiser: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The numbers of a checkpoint by name: weights, and what the optimiser remembers of each."""
    found: dict[str, Tensor] = {f"model.{name}": t for name, t in model.state_dict().items()}
    for name, parameter in model.named_parameters():
        for key, t in optimiser.state.get(parameter, {}).items():
            found[f"optimiser.{name}.{key}"] = t
    return found


def load(
    folder: Path, *, model: nn.Module, optimiser: torch.optim.Optimizer, generator: torch.Generator
) -> int:
    """Put a checkpoint back in place; returns the number of steps done."""
    content, header = read_tensors(folder / FILE, kind=KIND, version=VERSION)
    if "generator" not in content or not header.get("step", "").isdecimal():
        raise ValueError(f"{folder / FILE} lacks its step or its random numbers: it is damaged; start anew")
    step = int(header["step"])
    wrote, now = header.get("optimiser"), type(optimiser).__name__
    if wrote not in (None, now):
        raise ValueError(
            f"{folder / FILE} is a checkpoint of training by {wrote}, not by {now}, whose moments it lacks: "
            "go on with the same optimiser, or start anew"
        )
    weights = {k.removeprefix("model."): t for k, t in content.items() if k.startswith("model.")}
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:
        raise ValueError(f"{folder / FILE} is a checkpoint of another model: {misfit(error)}") from error
    for name, parameter in model.named_parameters():
        prefix = f"optimiser.{name}."
        state = {k.removeprefix(prefix): t for k, t in content.items() if k.startswith(prefix)}
        if state:  # frozen parameters have none
            optimiser.state[parameter] = {k: t.to(parameter.device) for k, t in state.items()}
    _go_on(generator, content["generator"], step)
    return step


def _go_on(generator: torch.Generator, state: Tensor, step: int) -> None:
    """Random numbers where they were; of a checkpoint from another kind of device, others than before."""
    if state.shape == generator.get_state().shape:
        generator.set_state(state)
        return
    _log.warning("the checkpoint's random numbers are another device's: the run goes on with new ones")
    generator.manual_seed(generator.initial_seed() + step)

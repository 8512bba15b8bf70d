"""The folder of a run: how it was made, its checkpoint and best weights, and a lock while it trains."""

import contextlib
import json
import logging
import math
import os
import platform
import shutil
import socket
import subprocess
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from constmem.core import checks, files
from constmem.core.files import clear_unfinished, read_json, read_tensors, write_tensors, write_text
from constmem.core.model import Model, misfit
from constmem.data import EventLog, Table
from constmem.training.log import BOARD, Log
from constmem.training.log import FILE as METRICS
from constmem.training.recipes import complete

KIND, VERSION = "constmem.checkpoint", 1
RUN, CHECKPOINT, LOCK = "run.json", "checkpoint.safetensors", "lock"
TABLE, EVENTS = "table.safetensors", "events.safetensors"  # the rows or events of a run on one's own data
WRITTEN = (files.CONFIG, files.WEIGHTS, CHECKPOINT, METRICS, TABLE, EVENTS, "eval.json")  # beside run.json
LOST = 3  # steps between two lines of the log that may be passed over
_log = logging.getLogger("constmem")


class StoppedError(RuntimeError):
    """A run came to an early end; the message says why, and how to go on."""


def read_run(folder: Path) -> dict[str, Any]:
    """What a run's folder says of how it was made: its run.json."""
    path, again = folder / RUN, "train again, in another folder"
    if not path.is_file():
        runs = sorted(str(other.parent) for other in folder.glob(f"*/{RUN}"))
        what = f"name those in it, such as {runs[0]}" if runs else "train one there first"
        raise FileNotFoundError(f"there is no run in {folder}: {what}")
    about: Any = read_json(path, again)
    run = about.get("run") if isinstance(about, dict) else None
    run = run if isinstance(run, dict) else {}
    missing = {"dataset", "model", "recipe_name", "recipe", "seed"} - run.keys()
    if missing or not isinstance(run["recipe"], dict):
        raise ValueError(
            f"{path} does not say which {', '.join(sorted(missing or {'recipe'}))} its run has: {again}"
        )
    return dict(about)


def own_data(folder: Path) -> Table | EventLog | None:
    """The rows or events that a run on one's own data keeps in its folder; None for a run on a data set."""
    if (folder / EVENTS).exists():
        return EventLog.load(folder / EVENTS)
    return Table.load(folder / TABLE) if (folder / TABLE).exists() else None


def describe(
    run: dict[str, Any],
    out: Path,
    *,
    resume: bool,
    own: Table | EventLog | None,
    where: torch.device,
    older: Mapping[str, Any],
) -> None:
    """Write down how a run is made; of a folder that holds one, make sure that it is the same.

    Args:
        older: settings of the model that earlier versions did not write, as they were then.
    """
    path = out / RUN
    content = {key: value for key, value in run.items() if value is not None}
    if path.exists():
        if not resume:
            raise FileExistsError(f"{out} holds a run already: take another --out, or go on with --resume")
        before = read_run(out)["run"]
        before["recipe"] = complete(before["recipe"])
        before["recipe"]["model"] = {**older, **before["recipe"]["model"]}
        clear_unfinished(out)
        if others := _differing(before, json.loads(json.dumps(content))):
            raise ValueError(
                f"{out} is a run of other settings ({'; '.join(others)}): resume it with those, or start anew"
            )
        if own is not None and not own.equals(own_data(out)):
            what = "rows" if isinstance(own, Table) else "events"
            raise ValueError(f"{out} is a run on other {what} than {own.name} has now: start a new run")
        return
    if others := [name for name in WRITTEN if (out / name).exists()]:
        raise FileExistsError(
            f"{out} is no run's folder, but holds {', '.join(others)}, which a run would write over: take "
            "another --out"
        )
    if own is not None:
        own.save(out / (TABLE if isinstance(own, Table) else EVENTS))
    about = {"commit": current_commit(), "device": device_name(where), "torch": torch.__version__}
    about["python"] = platform.python_version()
    write_text(path, json.dumps({"run": content, **about}, indent=2) + "\n")


def _differing(there: Any, here: Any, name: str = "") -> list[str]:
    """Which settings of a run in its folder are not those asked for."""
    if not (isinstance(there, dict) and isinstance(here, dict)):
        return [] if there == here else [f"{name} is {there} there, {here} here"]
    keys = sorted(there.keys() | here.keys())
    return [
        text for key in keys for text in _differing(there.get(key), here.get(key), f"{name}.{key}".strip("."))
    ]


@contextlib.contextmanager
def claimed(out: Path) -> Iterator[Callable[[], None]]:
    """Hold a run's folder alone; take back what was written for a run that ended before its first step.

    Yields what to call once a step is taken: then all stays. What was there before stays in any case.
    """
    new_folders = [path for path in (out, *out.parents) if not path.exists()]
    out.mkdir(parents=True, exist_ok=True)
    lock = _lock(out)
    before, stays = set(out.iterdir()), False

    def took_a_step() -> None:
        nonlocal stays
        stays = True

    try:
        yield took_a_step
    except BaseException:
        for path in {out / name for name in (RUN, METRICS, TABLE, EVENTS, BOARD)} - before:
            if not stays:
                shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        raise
    finally:
        (out / LOCK).unlink(missing_ok=True)  # while it is held: no other process's is deleted
        os.close(lock)
        with contextlib.suppress(OSError):  # something is in it
            for folder in new_folders:
                folder.rmdir()


def _lock(out: Path) -> int:
    """Lock a folder, with who holds it in the file; the lock of a process that died does not count."""
    path = out / LOCK
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        held = files.locked(handle)
        if held is False:
            holder = os.read(handle, 200).decode(errors="replace").strip() or "another process"
            os.close(handle)
            raise BlockingIOError(
                f"{out} is being trained by {holder}: wait until it ends, stop it, or take another --out"
            )
        if held is None:  # not every system has locks
            _log.warning(f"{out} cannot be locked: let no other process train there")
        if path.exists() and path.stat().st_ino == os.fstat(handle).st_ino:
            break
        os.close(handle)  # its holder has just deleted it
    os.truncate(path, 0)
    os.write(handle, f"process {os.getpid()} on {socket.gethostname()}\n".encode())
    return handle


def device_name(where: torch.device) -> str:
    """What a device is called by its maker, as far as that is known."""
    if where.type == "cuda":
        return torch.cuda.get_device_name(where)
    return platform.processor() or f"{where.type.upper()} ({platform.machine()})"


def current_commit() -> str | None:
    """The commit of the code, where it runs from a checkout (or CONSTMEM_COMMIT names one)."""
    if "CONSTMEM_COMMIT" in os.environ:
        return os.environ["CONSTMEM_COMMIT"]
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


@dataclass(kw_only=True, eq=False)
class Keeper:
    """What a run keeps: its latest checkpoint and the best weights by validation, every number finite.

    Args:
        out: the run's folder.
        lr: its rate, for advice.
        step: of the checkpoint in the folder.
    """

    out: Path
    lr: float
    model: Model
    optimiser: torch.optim.Optimizer
    generator: torch.Generator
    step: int | None = None

    def load(self) -> int:
        """Put the checkpoint back in place; returns the number of steps done."""
        path = self.out / CHECKPOINT
        content, header = read_tensors(path, kind=KIND, version=VERSION)
        if "generator" not in content or not header.get("step", "").isdecimal():
            raise ValueError(f"{path} lacks its step or its random numbers: it is damaged; start anew")
        wrote, now = header.get("optimiser"), type(self.optimiser).__name__
        if wrote not in (None, now):
            raise ValueError(
                f"{path} is a checkpoint of training by {wrote}, not by {now}, whose moments it lacks: "
                "go on with the same optimiser, or start anew"
            )
        try:
            self.model.load_state_dict(_below("model.", content))
        except RuntimeError as error:
            raise ValueError(f"{path} is a checkpoint of another model: {misfit(error)}") from error
        for name, parameter in self.model.named_parameters():
            if moments := _below(f"optimiser.{name}.", content):  # frozen parameters have none
                self.optimiser.state[parameter] = {k: t.to(parameter.device) for k, t in moments.items()}
        self.step = int(header["step"])
        if content["generator"].shape == self.generator.get_state().shape:
            self.generator.set_state(content["generator"])
        else:
            _log.warning(
                "the checkpoint's random numbers are another device's: the run goes on with new ones"
            )
            self.generator.manual_seed(self.generator.initial_seed() + self.step)
        return self.step

    def save(self, step: int, log: Log) -> None:
        """Write a checkpoint over the last; before any validation its weights are the best there are."""
        content = {f"model.{name}": t for name, t in self.model.state_dict().items()}
        for name, parameter in self.model.named_parameters():
            moments = self.optimiser.state.get(parameter, {})
            content |= {f"optimiser.{name}.{key}": t for key, t in moments.items()}
        self._require_sound(content, step)
        header = {"format": KIND, "version": str(VERSION), "step": str(step)}
        header["optimiser"] = type(self.optimiser).__name__
        write_tensors(self.out / CHECKPOINT, {**content, "generator": self.generator.get_state()}, header)
        self.step = step
        if log.best is None:
            self.model.save_pretrained(self.out)

    def validated(self, step: int, score: float, log: Log) -> None:
        """Log a validation, and keep the weights if it is the best so far; both must be finite."""
        if not math.isfinite(score):
            raise self._stopped(f"the validation after step {step} gave {score}")
        self._require_sound(self.model.state_dict(), step)
        if log.validation(step, score):
            self.model.save_pretrained(self.out)

    def last_finite(self, losses: list[float], done: int) -> float:
        """The last finite loss of the steps up to `done`; stop where too many are not, naming the first."""
        found = [loss for loss in losses if math.isfinite(loss)]
        if lost := len(losses) - len(found):
            first = next(
                i for i, loss in enumerate(losses, done - len(losses) + 1) if not math.isfinite(loss)
            )
            if not found or lost > LOST:
                raise self._stopped(f"the loss became {losses[first - done - 1]} at step {first}")
            _log.warning(
                "%d of the last %d steps, the first of them step %d, had a loss or gradients that are not "
                "finite: their batches were passed over", lost, len(losses), first,
            )  # fmt: skip
        return found[-1]

    def _require_sound(self, tensors: dict[str, Tensor], step: int) -> None:
        """Stop rather than write weights, or moments of the optimiser, that no run can go on from."""
        if (name := checks.first_not_finite(tensors)) is not None:
            raise self._stopped(f"step {step} left {name} with numbers that are not finite")

    def _stopped(self, what: str) -> StoppedError:
        kept = "there is no checkpoint yet"
        if self.step is not None:
            kept = f"the last good checkpoint is {self.out / CHECKPOINT}, of step {self.step}"
            kept += ": --resume goes on from it, if the cause is gone"
        if (self.out / files.WEIGHTS).exists():
            kept += f"; --set start={self.out} begins a new run with the best weights so far"
        return StoppedError(
            f"{what}: start anew, in another --out, with a smaller lr or clip, for instance --set "
            f"lr={min(self.lr / 3, 3e-4):.1g}; look for huge numbers in data of your own; {kept}"
        )


def _below(prefix: str, content: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): t for name, t in content.items() if name.startswith(prefix)}

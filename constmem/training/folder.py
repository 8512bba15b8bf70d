"""What the folder of a run says of how it was made, and the data of one's own that it keeps."""

import contextlib
import json
import os
import platform
import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from constmem.core.files import clear_unfinished, read_json, write_text
from constmem.core.model import CONFIG, WEIGHTS
from constmem.data import EventLog, Table
from constmem.training.checkpoint import FILE as CHECKPOINT
from constmem.training.log import BOARD
from constmem.training.log import FILE as METRICS
from constmem.training.recipes import complete

RUN = "run.json"
TABLE, LOG = "table.safetensors", "events.safetensors"  # the rows or events of a run on one's own data
WRITTEN = (CONFIG, WEIGHTS, CHECKPOINT, METRICS, TABLE, LOG, "eval.json")  # beside run.json


def read_run(folder: Path) -> dict[str, Any]:
    """What a run's folder says of how it was made: its run.json."""
    path, again = folder / RUN, "train again, in another folder"
    if not path.is_file():
        raise FileNotFoundError(f"there is no run in {folder}: train one there first")
    about: Any = read_json(path, again)
    run = about.get("run") if isinstance(about, dict) else None
    run = run if isinstance(run, dict) else {}
    missing = {"dataset", "model", "recipe_name", "recipe", "seed"} - run.keys()
    if missing or not isinstance(run["recipe"], dict):
        told = ", ".join(sorted(missing or {"recipe"}))
        raise ValueError(f"{path} does not say which {told} its run has: {again}")
    return dict(about)


def own_data(folder: Path) -> Table | EventLog | None:
    """The rows or events that a run on one's own data keeps in its folder; None for a run on a data set."""
    if (folder / LOG).exists():
        return EventLog.load(folder / LOG)
    return Table.load(folder / TABLE) if (folder / TABLE).exists() else None


def _same(one: Table | EventLog, other: Table | EventLog | None) -> bool:
    if isinstance(one, Table):
        return isinstance(other, Table) and one.equals(other)
    return isinstance(other, EventLog) and one.equals(other)


def _differing(there: Any, here: Any, name: str = "") -> list[str]:
    """Which settings of a run in its folder are not those asked for."""
    if isinstance(there, dict) and isinstance(here, dict):
        keys = sorted(there.keys() | here.keys())
        return [
            text
            for key in keys
            for text in _differing(there.get(key), here.get(key), f"{name}.{key}".strip("."))
        ]
    return [] if there == here else [f"{name} is {there} there, {here} here"]


def prepare(
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
            told = "; ".join(others)
            raise ValueError(
                f"{out} is a run of other settings ({told}): resume it with those, or start anew"
            )
        if own is not None and not _same(own, own_data(out)):
            what = "rows" if isinstance(own, Table) else "events"
            raise ValueError(f"{out} is a run on other {what} than {own.name} has now: start anew")
        return
    if others := [name for name in WRITTEN if (out / name).exists()]:
        raise FileExistsError(
            f"{out} is no run's folder, but holds {', '.join(others)}, which a run would write over: take "
            "another --out"
        )
    about = {
        "run": content,
        "commit": current_commit(),
        "device": device_name(where),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    if own is not None:
        own.save(out / (TABLE if isinstance(own, Table) else LOG))
    write_text(path, json.dumps(about, indent=2) + "\n")


@contextlib.contextmanager
def tentative(out: Path) -> Iterator[Callable[[], None]]:
    """Take back what was written for a run that ended, by an error or Ctrl-C, before its first step.

    Yields what to call once a step is taken: then all stays. What was there before stays in any case.
    """
    before = set(out.iterdir()) if out.is_dir() else set()
    folders = [path for path in (out, *out.parents) if not path.exists()]
    stays = False

    def took_a_step() -> None:
        nonlocal stays
        stays = True

    try:
        yield took_a_step
    except BaseException:
        if not stays:
            _take_back({out / name for name in (RUN, METRICS, TABLE, LOG, BOARD)} - before, folders)
        raise


def _take_back(paths: set[Path], folders: list[Path]) -> None:
    """Delete these, as far as they are there, and those of the folders that are empty then."""
    for path in paths:
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # something else is in it
        for folder in folders:
            folder.rmdir()


def device_name(where: torch.device) -> str:
    """What a device is called by its maker, as far as that is known."""
    if where.type == "cuda":
        return torch.cuda.get_device_name(where)
    return platform.processor() or f"{where.type.upper()} ({platform.machine()})"


def current_commit() -> str | None:
    """The commit of the code, where it runs from a checkout (or is told by CONSTMEM_COMMIT)."""
    if "CONSTMEM_COMMIT" in os.environ:
        return os.environ["CONSTMEM_COMMIT"]
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None

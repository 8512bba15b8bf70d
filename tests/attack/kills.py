"""SIGKILL at random moments: nothing acknowledged is lost, and what goes on is the same to the last bit."""

import contextlib
import os
import random
import shlex
import signal
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch

from constmem import Decay, Stream, StreamingRegressor, Window
from constmem.kernels import paths as library
from constmem.training.folder import Keeper
from tests.command import command

from . import calls, given, runs, samples
from .pool import Case
from .verdict import RIGHT, require, same

STEPS = 40  # saves of one stream or estimator
Report = Callable[[int], None]


def killed(draw: random.Random, work: Callable[[Report], None], longest: float) -> list[int]:
    """Do `work` in a process that is killed after a while; returns what it has acknowledged until then."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.setpgid(0, 0)  # with all that it starts
        with contextlib.suppress(BaseException):
            work(lambda number: os.write(write, number.to_bytes(4, "little")) and None)
        os._exit(0)
    os.close(write)
    time.sleep(draw.random() ** 2 * longest)
    for kill in (lambda: os.killpg(pid, signal.SIGKILL), lambda: os.kill(pid, signal.SIGKILL)):
        with contextlib.suppress(ProcessLookupError):
            kill()
    os.waitpid(pid, 0)
    text = b""
    while block := os.read(read, 2**16):
        text += block
    os.close(read)
    return [int.from_bytes(text[i : i + 4], "little") for i in range(0, len(text) - 3, 4)]


def no_rest(folder: Path, wanted: set[str]) -> None:
    """What killed writers have left is gone after the next save."""
    found = {path.name for path in folder.iterdir()}
    require(found <= wanted, f"left behind: {sorted(found - wanted)[:3]}")


# Streams


@cache
def _points() -> tuple[torch.Tensor, torch.Tensor]:
    draw = random.Random(3)
    return calls.tensor(draw, 1, STEPS, 2), calls.tensor(draw, 1, STEPS, 2)


@cache
def _prefixes(forget: Any) -> list[Any]:
    """What a stream answers after each of its points."""
    stream, (x, y) = Stream(calls.model("cmanp"), forget=forget), _points()
    found = [samples.predicted(stream)]
    for i in range(STEPS):
        stream.observe(x[:, i : i + 1], y[:, i : i + 1])
        found.append(samples.predicted(stream))
    return found


def stream(draw: random.Random, folder: Path) -> str:
    """A stream that is saved after each point."""
    forget = draw.choice((None, Decay(5), Window(6, 3)))
    model, (x, y), path = calls.model("cmanp"), _points(), folder / "stream"
    expected, seen = _prefixes(forget), 0
    for _ in range(3):

        def work(report: Report, begin: int = seen) -> None:
            own = Stream.load(path, model) if path.exists() else Stream(model, forget=forget)
            for i in range(begin, STEPS):
                own.observe(x[:, i : i + 1], y[:, i : i + 1])
                own.save(path)
                report(i + 1)

        acknowledged = max(killed(draw, work, 0.15), default=seen)
        if not path.exists():
            require(acknowledged == 0, "an acknowledged stream is gone")
            continue
        loaded = Stream.load(path, model)
        found = [k for k in range(acknowledged, STEPS + 1) if same(samples.predicted(loaded), expected[k])]
        require(
            bool(found) and found[0] <= acknowledged + 1,
            f"after {acknowledged} acknowledged points: another state",
        )
        seen = found[0]
    Stream(model).save(path)
    no_rest(folder, {"stream"})
    return RIGHT


# Estimators, by Python and by `constmem update`


@cache
def _rows() -> tuple[Any, Any]:
    columns, y, _ = samples.rows(STEPS * 4)
    return columns, y


def _part(i: int) -> tuple[dict[str, Any], Any]:
    columns, y = _rows()
    at = slice(4 * i, 4 * i + 4)
    return {name: column[at] for name, column in columns.items()}, y[at]


@cache
def _begun() -> StreamingRegressor:
    columns, y, _ = samples.rows(60, seed=5)
    return StreamingRegressor(size=24).fit(columns, y)


def remembered(estimator: Any) -> Any:
    return {
        name: t
        for name, t in estimator.learner_.memory.tensors().items()
        if name.endswith(("gram", "cross", "seen"))
    }


@cache
def _learned() -> list[Any]:
    """What an estimator remembers after each part."""
    estimator = _begun().spawn()
    found = [remembered(estimator)]
    for i in range(STEPS):
        estimator.partial_fit(*_part(i))
        found.append(remembered(estimator))
    return found


def estimator(draw: random.Random, folder: Path) -> str:
    """An estimator that is saved after each part."""
    path, seen = folder / "estimator", 0
    for _ in range(3):

        def work(report: Report, begin: int = seen) -> None:
            own = StreamingRegressor.load(path) if path.exists() else _begun().spawn()
            for i in range(begin, STEPS):
                own.partial_fit(*_part(i)).save(path)
                report(i + 1)

        seen = _checked(path, max(killed(draw, work, 0.15), default=seen))
    _begun().save(path)
    no_rest(folder, {"estimator"})
    return RIGHT


def _checked(path: Path, acknowledged: int) -> int:
    if not path.exists():
        require(acknowledged == 0, "an acknowledged estimator is gone")
        return 0
    loaded = remembered(StreamingRegressor.load(path))
    found = [k for k in range(acknowledged, STEPS + 1) if same(loaded, _learned()[k])]
    require(
        bool(found) and found[0] <= acknowledged + 1,
        f"after {acknowledged} acknowledged parts: another state",
    )
    return found[0]


def update(draw: random.Random, folder: Path) -> str:
    """`constmem update` of a model's file: it is the old model or the new one, and never half of it."""
    model, table = folder / "m", folder / "t.csv"
    model.write_bytes(runs.learned())
    table.write_text(given.mixed_csv())
    states = [command("score", str(model), str(table), "--json").stdout]

    def work(report: Report) -> None:
        report(command("update", str(model), str(table)).returncode)

    for _ in range(3):
        codes = killed(draw, work, 0.06)
        done = command("score", str(model), str(table), "--json")
        text = done.stdout
        require(done.returncode == 0, f"the model cannot be read: {done.stderr}")
        require(not codes or text != states[-1], "an update that was acknowledged is lost")
        if text != states[-1]:
            states.append(text)
            require(text == _updated(len(states) - 1), "neither the old model nor the new one")
    require(command("update", str(model), str(table)).returncode == 0, "cannot be updated any more")
    no_rest(folder, {"m", "t.csv"})
    return RIGHT


@cache
def _updated(times: int) -> str:
    """Scores after so many updates that nobody has killed."""
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        model, table = Path(folder) / "m", Path(folder) / "t.csv"
        model.write_bytes(runs.learned())
        table.write_text(given.mixed_csv())
        for _ in range(times):
            command("update", str(model), str(table))
        return command("score", str(model), str(table), "--json").stdout


# Training


def training(draw: random.Random, folder: Path) -> str:
    """A run that is killed and resumed until it is done: in the end as if nobody had killed it."""
    out, kept = folder / "run", 0

    def work(report: Report) -> None:
        save = Keeper.save

        def saved(self: Any, step: int, log: Any) -> None:
            save(self, step, log)
            report(step)

        Keeper.save = saved  # type: ignore[method-assign]
        runs.go(out)

    for _ in range(3):
        kept = max([kept, *killed(draw, work, 0.25)])
        if kept:
            require(runs.held(out)[0] >= kept, f"a checkpoint of step {kept} was acknowledged and is lost")
    runs.go(out)
    require(same(runs.held(out), runs.finished()), "ended otherwise than the run that nobody has killed")
    no_rest(out, {*runs.FILES})
    return RIGHT


# Machine code


def compiling(draw: random.Random, folder: Path) -> str:
    """Processes that build machine code are killed; the next one has a whole library, and nothing else."""
    cache_folder, real = folder / "cache", draw.random() < 0.1
    compiler = folder / "compiler"  # as fast as copying: what is killed are the steps around it, too
    compiler.write_text(
        f'#!/bin/sh\n[ $1 = --version ] && exec echo 1\nfor to; do :; done\nexec cp {_library()} "$to"\n'
    )
    compiler.chmod(0o700)
    environment = {
        "CONSTMEM_CACHE": str(cache_folder),
        "CXX": "c++ -O1" if real else shlex.quote(str(compiler)),
    }
    os.environ.update(environment)
    flags = tuple(flag for flag in library.FLAGS if not (real and flag == "-O3"))
    for _ in range(3):
        killed(draw, lambda report: library.built(flags) and report(1), 2.0 if real else 0.06)
        for path in cache_folder.glob("native-*.so") if cache_folder.exists() else ():
            require(library._whole(path), "a library under its final name is not whole")
    path = library.built(flags)
    require(library._whole(path) and library.load(path) is not None, "no library that can be loaded")
    return RIGHT


@cache
def _library() -> Path:
    return library.built(library.FLAGS)


def kinds() -> dict[str, Case]:
    """The kills; a case is three of them."""
    for forget in (None, Decay(5), Window(6, 3)):
        _prefixes(forget)
    _learned()
    _library()
    for times in range(4):
        _updated(times)
    runs.finished()

    return {"killed streams": stream, "killed estimators": estimator, "killed updates": update,
            "killed training": training, "killed compiling": compiling}  # fmt: skip

"""Folders of runs, damaged, and the command line: a run goes on bit for bit as it would have, or not."""

import random
import sys
import tempfile
from dataclasses import replace
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import safe_open
from safetensors.torch import load_file

from constmem.data import Table
from constmem.evaluation.pictures import plot_runs
from constmem.evaluation.runs import evaluate_run
from constmem.training import loop
from constmem.training.folder import CHECKPOINT, own_data, read_run
from constmem.training.log import read_metrics
from constmem.training.loop import Run, _validate, train
from constmem.training.recipes import changed, table_recipe
from tests.command import command

from . import damage, given, packed
from .pool import Case
from .verdict import REFUSED, RIGHT, Refused, attempt, require, same

FILES = ("run.json", "metrics.jsonl", CHECKPOINT, "table.safetensors", "config.json", "model.safetensors")
LAST, HALF = 4, 2


@cache
def rows() -> Table:
    """A table to train on."""
    random_ = np.random.default_rng(0)
    x = random_.normal(size=(60, 1))
    return Table.of(x, np.sin(x[:, 0]))


@cache
def small_run() -> Run:
    """Four steps of a tiny model."""
    change = [f"steps={LAST}", "batch=256", "warmup=0", "model.dim=8", "model.pre_depth=2",
              "model.post_depth=2", "model.decoder_depth=2", "max_points=8", "num_targets=4"]  # fmt: skip
    recipe = changed(table_recipe("cnp", dim_x=1, dim_y=1, rows=60, grouped=False), change, kind="table")
    return Run("table", "cnp", "own data", recipe, 0, {"file": None})


def _validated_quickly(model: Any, source: Any) -> float:
    """The validation, on the first of its hundreds of batches: what is under attack are the files."""
    return _validate(model, replace(source, validation=lambda: islice(source.validation(), 2)))


def go(out: Path, *, resume: bool = True, stop_after: int | None = None, save_every: float = 0.0) -> None:
    """Train, with a checkpoint after every step."""
    loop._validate = _validated_quickly
    sys.modules["torch.utils.tensorboard"] = None  # type: ignore[assignment]  # whose files are not under attack
    train(
        small_run(),
        out=out,
        own=rows(),
        resume=resume,
        stop_after=stop_after,
        validate_every=1,
        save_every=save_every,
    )


@cache
def halfway() -> dict[str, bytes]:
    """The folder of a run that was stopped after half of its steps."""
    with tempfile.TemporaryDirectory() as folder:
        go(Path(folder), resume=False, stop_after=HALF)
        return {path.name: path.read_bytes() for path in Path(folder).iterdir() if path.is_file()}


@cache
def finished() -> Any:
    """What a run holds in the end that nobody has interrupted."""
    with tempfile.TemporaryDirectory() as folder:
        go(Path(folder), resume=False)
        return held(Path(folder))


def held(folder: Path) -> Any:
    """The step of a run's checkpoint, all that it holds, the best weights, and the log but for seconds."""
    with safe_open(folder / CHECKPOINT, "pt") as file:
        step = int(file.metadata()["step"])
    losses = [{k: v for k, v in entry.items() if k != "seconds"} for entry in read_metrics(folder)]
    return step, load_file(folder / CHECKPOINT), load_file(folder / "model.safetensors"), losses


def resumed(draw: random.Random, folder: Path) -> str:
    """A damaged folder of a run, read and gone on with."""
    which = draw.choice(FILES)
    before = halfway()
    others = [content for name, content in before.items() if name != which]
    content = damage.in_bytes(draw, before[which], others)
    for name, kept in before.items():
        (folder / name).write_bytes(content if name == which else kept)
    readers = {"run.json": read_run, "metrics.jsonl": read_metrics, "table.safetensors": own_data}
    if which in readers and draw.random() < 0.7:
        found = attempt(lambda: readers[which](folder))
        if isinstance(found, Refused):
            return REFUSED
        if which == "metrics.jsonl":
            lines = content.decode(errors="replace").splitlines()
            require(len(found) in (len(lines), len(lines) - 1), f"{len(found)} entries of {len(lines)} lines")
        return RIGHT
    done = attempt(lambda: go(folder))
    if isinstance(done, Refused):
        return REFUSED
    expected = finished()
    step, weights, best, losses = held(folder)
    require(same((step, weights), expected[:2]), "went on otherwise than without damage")
    if (
        which != "metrics.jsonl"
    ):  # by which the best weights are known: a log, in plain text, without a checksum
        require(
            same((best, losses), expected[2:]),
            "holds other best weights, or another log, than without damage",
        )
    return RIGHT


# The command line


@cache
def learned() -> bytes:
    """A model that `constmem fit` wrote."""
    with tempfile.TemporaryDirectory() as folder:
        table, out = Path(folder) / "t.csv", Path(folder) / "m"
        table.write_text(given.mixed_csv())
        require(
            command("fit", str(table), "--target", "y", "--out", str(out), "--size", "24").returncode == 0,
            "no model",
        )
        return out.read_bytes()


TEMPLATES = (
    "score MODEL TABLE", "score MODEL TABLE --json", "predict MODEL TABLE --out NEW.csv",
    "update MODEL TABLE --out NEW",
    "fit TABLE --target y --out NEW --size 24",
    "fit TABLE --target class --out NEW --size 24 --ignore day,word",
    "fit TABLE --target a,b --out NEW --size 24 --forget 20", "data list --data-dir FOLDER", "table RUN",
    "data prepare emnist --source ZIP --data-dir FOLDER",
    "data prepare mooc --source EVENTS --data-dir FOLDER",
    "eval RUN", "fit TABLE --target y --out NEW --forget window:16 --size 24", "--version", "table",
    "plot RUN", "plot RUN --out NEW",
    "train TABLE cnp --x a --y y --group - --steps 2 --out NEW --set batch=256 --set model.dim=8",
)  # fmt: skip
ODD_WORDS = (
    "",
    "-1",
    "0",
    "nan",
    "--x",
    "é",
    "/",
    ".",
    "x" * 300,
    "\x00"[:0],
    "1e9",
    "a,b",
    "--help",
    "none",
    "--out",
)


def commands(draw: random.Random, folder: Path) -> str:
    """A command on files of which one may be damaged, and words of which one may be odd."""
    contents = {"MODEL": learned(), "TABLE": given.mixed_csv().encode(), "ZIP": packed.emnist()[0],
                "EVENTS": given.event_texts()["e.csv"].replace("\nu", "\n").encode()}  # fmt: skip
    names = {"MODEL": "m", "TABLE": "t.csv", "ZIP": "z.zip", "EVENTS": "mooc.csv"}
    hurt = draw.choice((None, *contents, "RUN"))
    for name, content in contents.items():
        made = damage.in_bytes(draw, content, list(contents.values())) if name == hurt else content
        (folder / names[name]).write_bytes(made)
    run = folder / "run"
    run.mkdir()
    which = draw.choice(FILES)
    for name, content in halfway().items():
        made = damage.in_bytes(draw, content, [learned()]) if hurt == "RUN" and name == which else content
        (run / name).write_bytes(made)
    names |= {"RUN": "run", "FOLDER": "packs", "NEW": "new", "NEW.csv": "new.csv"}
    words = [str(folder / names[w]) if w in names else w for w in draw.choice(TEMPLATES).split()]
    odd = draw.random() < 0.3
    if odd:
        words[draw.randrange(len(words))] = draw.choice(ODD_WORDS)
    found = attempt(lambda: command(*words))
    require(not isinstance(found, Refused), f"constmem {' '.join(words)}: ended with {found!r}")
    code, out, err = found.returncode, found.stdout, found.stderr
    require(code in (0, 1, 2), f"constmem {' '.join(words)}: exit code {code}")
    require(
        code == 0 or (bool(err.strip()) and "Traceback" not in err),
        f"constmem {' '.join(words)}: {err[-300:]!r}",
    )
    sure = words[0] not in ("table", "eval")  # which need a run that is done, and scored
    require(not (code and sure and not odd and hurt is None), f"constmem {' '.join(words)}: {err[-300:]!r}")
    if code == 0 and not odd and words[0] in ("plot", "train"):
        _made(words, out)
    require(len(err) < 6000, f"constmem {' '.join(words)}: {len(err)} letters of error")
    return REFUSED if code else RIGHT


def _made(words: list[str], out: str) -> None:
    """Require what a command says that it has made: every picture, or a run of as many steps as asked for."""
    if words[0] == "plot":
        made = [Path(line) for line in out.split()]
        require(len(made) > 1 and all(p.read_bytes().startswith(b"\x89PNG") for p in made), f"drew {made}")
        return
    step, weights, best, _ = held(Path(words[words.index("--out") + 1]))
    require(step == 2, f"trained {step} steps instead of 2")
    numbers = [t for t in (*weights.values(), *best.values()) if t.is_floating_point()]
    require(all(bool(t.isfinite().all()) for t in numbers), "trained weights that are not finite")


def kinds() -> dict[str, Case]:
    """The attacks on runs and on commands."""
    finished()
    learned()
    with tempfile.TemporaryDirectory() as folder:  # a scored run is what commands find
        for name, content in halfway().items():
            (Path(folder) / name).write_bytes(content)
        evaluate_run(Path(folder), data_dir=None, device="cpu")
        plot_runs([Path(folder)])
    return {"runs": resumed, "commands": commands}

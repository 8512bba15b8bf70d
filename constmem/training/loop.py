"""One flat loop that trains every model: sample, step, log, validate, checkpoint; resumable bit for bit."""

import contextlib
import math
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from constmem import neural_processes, point_processes
from constmem.core import checks, entry_of, settings_of
from constmem.core.checks import known
from constmem.core.costs import Peak, progress
from constmem.core.model import Model
from constmem.data import EventLog, Table
from constmem.neural_processes import Scales
from constmem.neural_processes.points import PointModel
from constmem.training.folder import CHECKPOINT, Keeper, StoppedError, claimed, describe
from constmem.training.log import Log
from constmem.training.recipes import FROM_DATA, EventRecipe, PointRecipe, Recipe
from constmem.training.sources import Source, open_source
from constmem.training.steps import ByShape, Muon, captured, clipped

LOG_EVERY = 50
SMALL = 200_000  # parameters of a model that one thread trains as fast as two


@dataclass(frozen=True)
class Run:
    """What is trained on what, and how: all that is needed to do it again."""

    dataset: str
    model: str
    recipe_name: str
    recipe: PointRecipe | EventRecipe
    seed: int = 0
    columns: dict[str, Any] | None = None  # of data of one's own: the file, and what its columns are


def build(run: Run) -> Any:
    """A freshly initialised model, the same for the same seed."""
    settings_of(run.model)  # refuses an unknown variant
    entry = entry_of(run.model)
    kind = (point_processes if entry.of_events else neural_processes).MODELS[entry.name]
    _require_settings(entry.name, kind, run.recipe.model)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(run.seed)
        try:
            return kind(**run.recipe.model)
        except (TypeError, RuntimeError, ArithmeticError) as error:
            raise ValueError(f"{entry.name} cannot be built with {run.recipe.model}: {error}") from error


def _require_settings(name: str, kind: type[Model], settings: Mapping[str, Any]) -> None:
    """Refuse a setting that a model cannot be built with, saying which it has."""
    taken = signature(kind).parameters
    for key, value in settings.items():
        known("setting", key, taken, f" of {name}")
        least = 1 if key == "dim" else 0
        if taken[key].annotation is int and (type(value) is not int or value < least):
            raise ValueError(f"{key} must be a whole number of at least {least}, not {value!r}")


def train(
    run: Run,
    *,
    out: Path,
    data_dir: Path | None = None,
    own: Table | EventLog | None = None,
    device: str = "cpu",
    resume: bool = False,
    compiled: bool = True,
    validate_every: int | None = None,
    save_every: float = 60.0,
    stop_after: int | None = None,
) -> Path:
    """Train a model into the folder `out`: config.json, model.safetensors, metrics.jsonl, a checkpoint.

    What is kept in model.safetensors are the best weights by validation so far (before the first
    validation, the latest), for every model alike; the checkpoint holds the latest, to go on from.

    Args:
        out: the run's folder; must be new unless `resume` is set.
        own: rows or events of one's own to train on, instead of a data set; the folder keeps them.
        compiled: on a GPU, compile the loss and capture the whole step in a graph.
        validate_every: steps between validations, instead of the recipe's.
        save_every: seconds between checkpoints.
        stop_after: leave the loop (with a checkpoint) after this step, to be resumed later.
    """
    where = checks.device(device)
    model = build(run).to(where).train()
    with contextlib.ExitStack() as stack:
        took_a_step = stack.enter_context(claimed(out))
        source = open_source(run.dataset, run.recipe, data_dir=data_dir, device=where, own=own)
        _require_levels(model, source)
        source.prepare(model)
        goes_on = resume and (out / CHECKPOINT).exists()
        if run.recipe.start and not goes_on:
            _begin_with(model, run.recipe.start)
        optimiser = _optimiser(model, run.recipe, where)
        events = isinstance(run.recipe, EventRecipe)  # whose lengths and seeds are needed on the CPU
        generator = torch.Generator("cpu" if events else where).manual_seed(run.seed)
        step_of = _stepper(run.recipe, model, optimiser, source, generator, compiled=compiled)
        every = validate_every or run.recipe.validate_every
        last = min(run.recipe.steps, stop_after or run.recipe.steps)
        describe(asdict(run), out, resume=resume, own=own, where=where, older=model.older)
        peak = Peak(where)
        keeper = Keeper(out=out, lr=run.recipe.lr, model=model, optimiser=optimiser, generator=generator)
        started = keeper.load() if goes_on else 0
        log = stack.enter_context(contextlib.closing(Log(out, started, source.statement)))
        stack.enter_context(_arithmetic(model, run.recipe.precision, where))
        report = stack.enter_context(progress(f"{run.dataset}/{run.model}", run.recipe.steps))
        interrupted = stack.enter_context(_interruptible())
        done, saved = started, time.monotonic()
        losses: list[Tensor] = []  # since they were last read: noting one waits for no device
        while done < last:
            losses.append(step_of(_rate(run.recipe, done)).clone())  # a captured step writes over its last
            took_a_step()
            done += 1
            validates = done % every == 0 or done == run.recipe.steps
            if done % LOG_EVERY and done < last and not interrupted and not validates:
                continue
            loss = keeper.last_finite(torch.stack(losses).tolist(), done)
            losses.clear()
            log.step(done, loss, _rate(run.recipe, done - 1))
            report(done, f"loss {loss:.3f}")
            if validates:
                keeper.validated(done, _validate(model, source), log)
            if interrupted or done == last or time.monotonic() - saved > save_every:
                keeper.save(done, log)
                saved = time.monotonic()
                log.peak(done, peak())
            if interrupted:
                raise StoppedError(
                    f"stopped by a signal after step {done}; go on by the same command with --resume"
                )
    return out


def _require_levels(model: Model, source: Source[Any]) -> None:
    """Refuse a model of grey levels for data that have others, or none."""
    own = getattr(model, "levels", 0)
    if own not in (0, source.levels):
        have = (
            f"these data have {source.levels}: set model.levels" if source.levels else "these data are none"
        )
        raise ValueError(
            f"the model predicts {own} grey levels of pixels, and {have}; or take a model without"
        )


def _begin_with(model: Model, start: str) -> None:
    """Take on the weights, and the units if it has any, of another run of the same model."""
    given = type(model).from_pretrained(start)
    theirs, mine = given.config, model.config  # either may leave out what is as ever
    differ = [key for key in theirs | mine if theirs.get(key) != mine.get(key)]
    named = ", ".join(f"model.{key}={theirs.get(key)}" for key in differ)
    if any(f"model.{key}" in FROM_DATA for key in differ):
        raise ValueError(f"start={start} has weights for other data, {named}: begin without it")
    if differ:
        raise ValueError(f"start={start} has weights for {named}: --set these too, or begin without it")
    if isinstance(model, PointModel) and isinstance(given.scales, Scales):
        model.set_scales(given.scales)
    model.load_state_dict(model.state_dict() | given.state_dict())


def _validate(model: Model, source: Source[Any]) -> float:
    """Mean log-likelihood of a point or an event on the held-out batches."""
    model.eval()
    with torch.no_grad():
        totals, counts = zip(*(source.score(model, batch) for batch in source.validation()), strict=True)
    model.train()
    return float(sum(totals) / max(sum(counts), 1))


def _rate(recipe: Recipe, step: int) -> float:
    """A linear warm-up, then a cosine to zero."""
    if step < recipe.warmup:
        return recipe.lr * (step + 1) / recipe.warmup
    share = (step - recipe.warmup) / max(recipe.steps - recipe.warmup, 1)
    return recipe.lr * 0.5 * (1 + math.cos(math.pi * share))


def _optimiser(model: Model, recipe: Recipe, where: torch.device) -> torch.optim.Optimizer:
    on_gpu = where.type == "cuda"
    lr: Any = torch.tensor(recipe.lr, device=where) if on_gpu else recipe.lr
    if recipe.optimiser == "muon":
        return Muon(model, lr=lr, weight_decay=recipe.weight_decay)
    parameters = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.Adam(
        parameters, lr=lr, weight_decay=recipe.weight_decay, fused=on_gpu, capturable=on_gpu
    )


def _stepper(
    recipe: Recipe,
    model: Any,
    optimiser: torch.optim.Optimizer,
    source: Source[Any],
    generator: torch.Generator,
    *,
    compiled: bool,
) -> Callable[[float], Tensor]:
    """A function that takes one step at a given rate and returns the loss, still on its device."""
    where: torch.device = model.device
    on_gpu, weights = where.type == "cuda", list(model.parameters())
    half = on_gpu and recipe.precision == "bf16"
    events = isinstance(recipe, EventRecipe)
    compiles = compiled and on_gpu and not events  # which have too many shapes, each used too rarely
    loss_of: Callable[..., Tensor] = torch.compile(model.loss) if compiles else model.loss

    def taken(batch: Any, generator: torch.Generator | None) -> Tensor:
        with torch.autocast(where.type, dtype=torch.bfloat16, enabled=half, cache_enabled=False):
            loss = source.loss(model, loss_of, batch, generator)
        optimiser.zero_grad()
        loss.backward()
        sound = clipped(weights, recipe.clip)
        optimiser.step()
        return torch.where(sound, loss.detach(), math.nan)

    def step() -> Tensor:
        return taken(source.sample(generator), generator)

    if on_gpu and not events:
        step = captured(step, generator)
    elif on_gpu and compiled and isinstance(recipe, EventRecipe) and recipe.reads >= 1.0:
        graphs = ByShape(taken, lambda generator: model.seeds(1, generator), model.at_once)
        step = lambda: graphs(source.sample(generator), generator)  # noqa: E731

    def at_rate(rate: float) -> Tensor:
        for group in optimiser.param_groups:
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate
        loss = step()
        if on_gpu:  # a graph writes to weights without counting: what was made of the old must not be kept
            torch.autograd.graph.increment_version(weights)
        return loss

    return at_rate


@contextlib.contextmanager
def _arithmetic(model: Model, precision: str, where: torch.device) -> Iterator[None]:
    """A recipe's arithmetic on a GPU, and float32 on a CPU, while it lasts: settings are a process's.

    A small model on a CPU has one thread: to share its work costs more than it saves. On a quiet machine two
    are hardly faster, on a busy one ten times slower.
    """
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32, torch.get_num_threads()
    exact = precision == "float32" or where.type != "cuda"
    torch.set_float32_matmul_precision("highest" if exact else "high")
    torch.backends.cudnn.allow_tf32 = not exact
    if where.type == "cpu" and sum(p.numel() for p in model.parameters()) < SMALL:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before[0])
        torch.backends.cudnn.allow_tf32 = before[1]
        torch.set_num_threads(before[2])


@contextlib.contextmanager
def _interruptible() -> Iterator[list[int]]:
    """Turn Ctrl-C and SIGTERM into an entry of a list, so that the loop can end in good order."""
    caught: list[int] = []

    def note(number: int, _: object) -> None:
        caught.append(number)
        if len(caught) > 1:  # asked twice: now
            os._exit(130)
        with contextlib.suppress(OSError):  # not by print, in the middle of which we may be
            os.write(2, b"\nstopping as soon as a checkpoint is written; once more: at once, without one\n")

    old = {s: signal.signal(s, note) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield caught
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)

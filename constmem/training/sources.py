"""Where a run's tasks come from: a data set as an endless sampler and fixed sets to validate and test on."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar, get_args

import torch
from torch import Tensor

from constmem import data
from constmem.core.costs import counted
from constmem.data import DATASETS, EventLog, Events, Images, Table, TableTasks, Task
from constmem.neural_processes import NeuralProcess, Scales
from constmem.neural_processes.heads import GREY
from constmem.point_processes import PointProcess
from constmem.training.recipes import EventRecipe, PointRecipe

HELD_OUT = 1000  # training images set aside to validate on
POOL = 16  # batches among which sequences are sorted by length
B = TypeVar("B")
Fixed = Callable[[], Iterator[B]]  # to the same batches every time


@dataclass(frozen=True)
class Source(Generic[B]):
    """A data set as batches of some kind, and what a training loop does with one of them.

    Attributes:
        sample: a fresh training batch from a generator.
        validation: the same held-out batches every time.
        tests: names of test sets, each a function to their fixed batches.
        statement: what the data are.
        loss: a model's loss of a batch, by the function given (compiled or not); the generator draws.
        score: the summed log-likelihood of a batch, and of how many points or events.
        prepare: what a new model has to know of the training data.
        levels: of pixels, how many values there are from black to white; 0 of other data.
    """

    sample: Callable[[torch.Generator], B]
    validation: Fixed[B]
    tests: dict[str, Fixed[B]]
    statement: str
    loss: Callable[[Any, Callable[..., Tensor], B, torch.Generator | None], Tensor]
    score: Callable[[Any, B], tuple[float, int]]
    prepare: Callable[[Any], None] = lambda _: None
    levels: int = 0


def open_source(
    dataset: str,
    recipe: PointRecipe | EventRecipe,
    *,
    data_dir: Path | None,
    device: torch.device,
    own: Table | EventLog | None = None,
) -> Source[Any]:
    """The source of a data set of the registry, or of data of one's own."""
    if isinstance(recipe, EventRecipe):
        if isinstance(own, EventLog):
            return _events(own.parts(), recipe, device, own.statement)
        if dataset in DATASETS and DATASETS[dataset].process is not None:
            return _simulated(dataset, recipe, device)
        return _prepared_events(dataset, recipe, data_dir, device)
    if isinstance(own, Table):
        return _table(own, recipe, device)
    if dataset == "gp":
        return _gp(recipe, device)
    if dataset == "tables":
        return _tables(recipe, device)
    return _images(dataset, recipe, data_dir, device)


def _require_sizes(recipe: PointRecipe, pixels: int) -> None:
    """Refuse tasks that images of so many pixels cannot give, before anything is trained on them."""
    if not 7 <= recipe.max_points <= pixels:
        raise ValueError(
            f"max_points is {recipe.max_points}, but must be at least 7 (3 points of context, 3 targets, and "
            f"fewer than max_points in all) and at most {pixels}, the pixels of an image"
        )
    if recipe.sampling == "static" and recipe.num_targets > pixels - 3:
        raise ValueError(
            f"num_targets is {recipe.num_targets}, but an image has {pixels} pixels, 3 or more of which are "
            f"its context: take at most {pixels - 3}"
        )


def _task_loss(
    model: NeuralProcess, loss_of: Callable[..., Tensor], task: Task, generator: torch.Generator | None
) -> Tensor:
    # out here: a compiled loss can neither ask for memory nor draw from a generator
    model.afford(task.xc.shape[0], task.xc.shape[1], task.xt.shape[1])
    noise = model.loss_noise(task.xc, generator=generator)
    return loss_of(task.xc, task.yc, task.xt, task.yt, mask_c=task.mask_c, mask_t=task.mask_t, noise=noise)


def _task_score(model: NeuralProcess, task: Task) -> tuple[float, int]:
    state = model.condition(task.xc, task.yc, mask=task.mask_c)
    log_prob = model.query(state, task.xt).log_prob(task.yt)
    return float(task.point_log_likelihood(log_prob).sum()), int(task.num_targets.sum())


def _events_score(model: PointProcess, events: Events) -> tuple[float, int]:
    found = model.log_prob(events)
    total = torch.where(found.scored, found.time + found.mark, 0.0).sum(dtype=torch.float64)
    return float(total), int(found.scored.sum())


def _prepared_events(
    dataset: str, recipe: EventRecipe, data_dir: Path | None, device: torch.device
) -> Source[Events]:
    training, *held_out = (
        data.load_events(dataset, data_dir=data_dir, split=split) for split in ("train", "validation", "test")
    )
    statement = f"{dataset}: {len(training)} sequences, {training.num_events} events to train on"
    return _events([training, *held_out], recipe, device, statement)


def _events(
    parts: Sequence[Events], recipe: EventRecipe, device: torch.device, statement: str
) -> Source[Events]:
    lengths, parts = parts[0].lengths, [events.to(device) for events in parts]
    training = parts[0]

    def sample(generator: torch.Generator) -> Events:
        """One batch of a pool sorted by length: every sequence is as likely as any other, padding is rare.

        A GPU gets lengths that come again, so that steps can be captured; the padding changes nothing.
        """
        pool = torch.randperm(len(training), generator=generator, device=generator.device).cpu()
        pool = pool[: POOL * recipe.batch]
        batches = pool[lengths[pool].argsort(stable=True)].split(recipe.batch)
        index = batches[int(torch.randint(len(batches), (), generator=generator, device=generator.device))]
        width = int(lengths[index].max())
        width = min(_round(width), training.times.shape[1]) if device.type == "cuda" else width
        return training.select(index.to(device, non_blocking=True)).trim(width)

    return _event_source(sample, parts, statement, recipe)


def _round(length: int) -> int:
    """The next multiple of an eighth to a quarter of a length, and of 8: few lengths, little padding.

    >>> [_round(length) for length in (3, 38, 65, 100, 400)]
    [8, 40, 80, 112, 448]
    """
    step = max(8, 2 ** ((length - 1).bit_length() - 3)) if length > 1 else 8
    return -(-length // step) * step


def _simulated(dataset: str, recipe: EventRecipe, device: torch.device) -> Source[Events]:
    """Fresh sequences at every step; what no model can beat is `data.simulated(dataset).log_prob`."""
    process = data.simulated(dataset)

    def drawn(count: int, generator: torch.Generator) -> Events:
        return process.sample(count, num_events=100, generator=generator).to(device)

    parts = [drawn(n, torch.Generator().manual_seed(seed)) for seed, n in ((1, 200), (2, 200), (3, 1000))]
    statement = f"{process}, simulated anew for every step"
    return _event_source(partial(drawn, recipe.batch), parts, statement, recipe)


def _event_source(
    sample: Callable[[torch.Generator], Events], parts: Sequence[Events], statement: str, recipe: EventRecipe
) -> Source[Events]:
    """What any events are as a source: the training part sets the scales, the others are held out."""
    training, *held_out = parts
    validation, test = (_by_length(events, recipe.batch) for events in held_out)

    def loss(
        _: Any, loss_of: Callable[..., Tensor], events: Events, generator: torch.Generator | None
    ) -> Tensor:
        return loss_of(events, reads=recipe.reads, generator=generator)

    def prepare(model: PointProcess) -> None:
        model.set_scales(training)

    return Source(sample, validation, {"test": test}, statement, loss, _events_score, prepare)


def _by_length(events: Events, batch: int) -> Fixed[Events]:
    """The sequences in batches, the shortest first, each as wide as its longest."""
    lengths = events.lengths.cpu()
    order = lengths.argsort(stable=True)

    def batches() -> Iterator[Events]:
        for index in order.split(batch):
            yield events.select(index.to(events.device)).trim(int(lengths[index].max()))

    return batches


def _gp(recipe: PointRecipe, device: torch.device) -> Source[Task]:
    matern = round(recipe.matern * recipe.batch)
    sizes: list[tuple[data.Kernel, int]] = [("rbf", recipe.batch - matern), ("matern", matern)]

    def drawn(kernel: data.Kernel, size: int, generator: torch.Generator) -> Task:
        if recipe.sampling == "reference":
            padded = device.type == "cuda"
            return data.gp_tasks(size, kernel=kernel, generator=generator, padded=padded)[0]
        return data.static_gp_tasks(size, kernel=kernel, generator=generator)[0]

    def sample(generator: torch.Generator) -> Task:
        return Task.stack([drawn(kernel, size, generator) for kernel, size in sizes if size])

    def tasks(kernel: data.Kernel, seed: int, batches: int) -> Iterator[Task]:
        for task, process in data.gp_evaluation_tasks(kernel=kernel, seed=seed, num_batches=batches):
            yield replace(task, exact=process.log_likelihood(task)).to(device)

    def validation() -> Iterator[Task]:
        for kernel, size in sizes:
            if size:
                yield from tasks(kernel, 1, 200 * size // recipe.batch)

    tests: dict[str, Fixed[Task]] = {k: partial(tasks, k, 0, 3000) for k in get_args(data.Kernel)}
    statement = "Gaussian processes drawn from the protocol's prior"
    if matern:
        statement += f", {matern} of {recipe.batch} in training with a Matern kernel"
    return Source(sample, validation, tests, statement, _task_loss, _task_score)


def _tables(recipe: PointRecipe, device: torch.device) -> Source[Task]:
    """What a closed-form regression leaves on synthetic tables, drawn again at every step."""
    sizes = {"rows": recipe.max_points, "targets": recipe.num_targets}

    def fixed(seed: int, batches: int) -> Iterator[Task]:
        generator = torch.Generator().manual_seed(seed)
        for _ in range(batches):
            yield data.table_tasks(16, generator=generator, **sizes).to(device)

    def sample(generator: torch.Generator) -> Task:
        return data.table_tasks(recipe.batch, generator=generator, **sizes)

    statement = "synthetic tables, and what ridge regressions on random features leave of them"
    tests: dict[str, Fixed[Task]] = {"test": partial(fixed, 0, 100)}
    return Source(sample, partial(fixed, 1, 20), tests, statement, _task_loss, _task_score)


def _images(dataset: str, recipe: PointRecipe, data_dir: Path | None, device: torch.device) -> Source[Task]:
    known = DATASETS[dataset]
    images = _loaded(dataset, data_dir, "train", known.train_classes).to(device)
    _require_sizes(recipe, images.pixels[0, ..., 0].numel())
    training, validation = data.hold_out(images, count=min(HELD_OUT, len(images) // 10))
    pixels = training.pixels

    def sample(generator: torch.Generator) -> Task:
        index = torch.randint(len(pixels), (recipe.batch,), generator=generator, device=generator.device)
        chosen = data.augmented(pixels[index], recipe.augment, generator=generator)
        if recipe.sampling == "reference":
            return data.image_tasks(
                chosen, generator=generator, max_points=recipe.max_points, padded=device.type == "cuda"
            )
        return data.static_image_tasks(
            chosen,
            generator=generator,
            num_context_max=min(recipe.max_points - 3, pixels[0, ..., 0].numel() - recipe.num_targets),
            num_targets=recipe.num_targets,
            skew=recipe.skew,
        )

    def fixed(images: Images, seed: int) -> Fixed[Task]:
        return lambda: data.evaluation_tasks(images, seed=seed, max_points=recipe.max_points)

    tests: dict[str, Fixed[Task]] = {}
    for name, classes in known.tests.items():
        test = _loaded(dataset, data_dir, "test", classes)
        tests[name] = fixed(test.to(device), 0)
    return Source(sample, fixed(validation, 1), tests, images.source, _task_loss, _task_score, levels=GREY)


def _loaded(dataset: str, data_dir: Path | None, split: str, classes: range | None) -> Images:
    """Images, with progress where they have to be decoded, which is once."""
    with counted(f"decoding {dataset}, {split}") as progress:
        return data.load_images(dataset, data_dir=data_dir, split=split, classes=classes, progress=progress)


def _table(table: Table, recipe: PointRecipe, device: torch.device) -> Source[Task]:
    """Random contexts and targets among the training rows; held-out rows, or groups, to be scored on."""
    training, validation, test = table.parts()

    def tasks(part: Table) -> TableTasks:
        return TableTasks(part, device=device, max_context=recipe.max_points, num_targets=recipe.num_targets)

    own = tasks(training)
    tests: dict[str, Fixed[Task]]
    if table.groups is None:
        tests = {"test": lambda: own.held_out(test, seed=0), "full": lambda: own.everything(test)}
        fixed = partial(own.held_out, validation, seed=1)
    else:
        tests = {"test": partial(tasks(test).each, seed=0, rounds=4)}
        fixed = partial(tasks(validation).each, seed=1, rounds=4)

    def sample(generator: torch.Generator) -> Task:
        return own.sample(recipe.batch, generator=generator, skew=recipe.skew, jitter=recipe.jitter)

    def prepare(model: NeuralProcess) -> None:
        model.set_scales(Scales.of(training.x, training.y))

    return Source(sample, fixed, tests, table.statement, _task_loss, _task_score, prepare)

"""Where a run's tasks come from: a data set as an endless sampler and fixed sets to validate and test on."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from constmem import data
from constmem.data import Images, Table, TableTasks, Task
from constmem.neural_processes import Scales
from constmem.recipes import Recipe

HELD_OUT = 1000  # training images set aside to validate on


@dataclass(frozen=True)
class Source:
    """A data set as tasks.

    Attributes:
        sample: a fresh batch of training tasks from a generator.
        validation: the same held-out tasks every time.
        tests: names of test sets, each a function to their fixed tasks.
        statement: what the data are.
        scales: the units of the data, where a model is to keep them; then the best validated weights are
            what a run leaves behind, since few rows are soon learned by heart.
    """

    sample: Callable[[torch.Generator], Task]
    validation: Callable[[], Iterator[Task]]
    tests: dict[str, Callable[[], Iterator[Task]]]
    statement: str
    scales: Scales | None = None


def open_source(
    dataset: str,
    recipe: Recipe,
    *,
    data_dir: Path | None,
    device: torch.device,
    table: Table | None = None,
) -> Source:
    """The source of a data set that `recipes.DATASETS` names, or of a table of one's own."""
    if table is not None:
        return _table(table, recipe, device)
    if dataset == "gp":
        return _gp(recipe, device)
    return _images(dataset, recipe, data_dir, device)


def _gp(recipe: Recipe, device: torch.device) -> Source:
    def sample(generator: torch.Generator) -> Task:
        if recipe.sampling == "reference":
            return data.gp_tasks(recipe.batch, generator=generator)[0]
        return data.static_gp_tasks(recipe.batch, generator=generator, fill_targets=True)[0]

    def fixed(kernel: data.Kernel, seed: int, batches: int) -> Callable[[], Iterator[Task]]:
        def tasks() -> Iterator[Task]:
            for task, _ in data.gp_evaluation_tasks(kernel=kernel, seed=seed, num_batches=batches):
                yield task.to(device)

        return tasks

    tests = {kernel: fixed(kernel, 0, 3000) for kernel in ("rbf", "matern", "periodic")}
    return Source(sample, fixed("rbf", 1, 200), tests, "Gaussian processes drawn from the protocol's prior")


def _images(dataset: str, recipe: Recipe, data_dir: Path | None, device: torch.device) -> Source:
    seen = range(10) if dataset == "emnist" else None
    images = data.load_images(dataset, data_dir=data_dir, split="train", classes=seen).to(device)
    training, validation = data.hold_out(images, count=min(HELD_OUT, len(images) // 10))
    pixels = training.pixels

    def sample(generator: torch.Generator) -> Task:
        index = torch.randint(len(pixels), (recipe.batch,), generator=generator, device=generator.device)
        chosen = data.augmented(pixels[index], recipe.augment, generator=generator)
        if recipe.sampling == "reference":
            return data.image_tasks(chosen, generator=generator, max_points=recipe.max_points)
        return data.static_image_tasks(
            chosen,
            generator=generator,
            num_context_max=min(recipe.max_points - 3, pixels[0, ..., 0].numel() - recipe.num_targets),
            num_targets=recipe.num_targets,
            skew=recipe.skew,
        )

    def fixed(images: Images, seed: int) -> Callable[[], Iterator[Task]]:
        return lambda: data.evaluation_tasks(images, seed=seed, max_points=recipe.max_points)

    tests: dict[str, Callable[[], Iterator[Task]]] = {}
    for name, classes in _test_sets(dataset).items():
        test = data.load_images(dataset, data_dir=data_dir, split="test", classes=classes)
        tests[name] = fixed(test.to(device), 0)
    return Source(sample, fixed(validation, 1), tests, images.source)


def _test_sets(dataset: str) -> dict[str, range | None]:
    return {"seen": range(10), "unseen": range(10, 47)} if dataset == "emnist" else {"test": None}


def _table(table: Table, recipe: Recipe, device: torch.device) -> Source:
    """Random contexts and targets among the training rows; held-out rows, or groups, to be scored on."""
    training, validation, test = table.parts()

    def tasks(part: Table) -> TableTasks:
        return TableTasks(part, device=device, max_context=recipe.max_points, num_targets=recipe.num_targets)

    own = tasks(training)
    tests: dict[str, Callable[[], Iterator[Task]]]
    if table.groups is None:
        tests = {"test": lambda: own.held_out(test, seed=0), "full": lambda: own.everything(test)}
        fixed = partial(own.held_out, validation, seed=1)
    else:
        tests = {"test": partial(tasks(test).each, seed=0, rounds=4)}
        fixed = partial(tasks(validation).each, seed=1, rounds=4)

    def sample(generator: torch.Generator) -> Task:
        return own.sample(recipe.batch, generator=generator, skew=recipe.skew, jitter=recipe.jitter)

    return Source(sample, fixed, tests, table.statement, Scales.of(training.x, training.y))

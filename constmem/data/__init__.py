"""Data: tasks of Gaussian processes, of images and of tables, and where they come from."""

from constmem.data.augment import augmented
from constmem.data.gp import (
    GaussianProcess,
    Kernel,
    draw_gp,
    gp_evaluation_tasks,
    gp_tasks,
    static_gp_tasks,
)
from constmem.data.images import Images, hold_out, load_images
from constmem.data.packs import DataSet, Listing, MissingDataError, known, listing
from constmem.data.pixels import evaluation_tasks, image_points, image_tasks, static_image_tasks
from constmem.data.prepare import prepare_celeba, prepare_emnist
from constmem.data.rows import TableTasks
from constmem.data.sizes import draw_sizes
from constmem.data.table import Table
from constmem.data.task import Task

__all__ = [
    "DataSet",
    "GaussianProcess",
    "Images",
    "Kernel",
    "Listing",
    "MissingDataError",
    "Table",
    "TableTasks",
    "Task",
    "augmented",
    "draw_gp",
    "draw_sizes",
    "evaluation_tasks",
    "gp_evaluation_tasks",
    "gp_tasks",
    "hold_out",
    "image_points",
    "image_tasks",
    "known",
    "listing",
    "load_images",
    "prepare_celeba",
    "prepare_emnist",
    "static_gp_tasks",
    "static_image_tasks",
]

"""Data: tasks of Gaussian processes, images and tables, event sequences, and where they come from."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from constmem.data.catalogue import DATASETS as DATASETS
    from constmem.data.catalogue import PACKS as PACKS
    from constmem.data.catalogue import DataSet as DataSet
    from constmem.data.catalogue import Pack as Pack
    from constmem.data.event_files import read_easytpp as read_easytpp
    from constmem.data.event_files import read_event_csv as read_event_csv
    from constmem.data.event_files import read_event_parquet as read_event_parquet
    from constmem.data.event_log import EventLog as EventLog
    from constmem.data.event_log import load_events as load_events
    from constmem.data.gp import GaussianProcess as GaussianProcess
    from constmem.data.gp import Kernel as Kernel
    from constmem.data.gp import draw_gp as draw_gp
    from constmem.data.gp import gp_evaluation_tasks as gp_evaluation_tasks
    from constmem.data.gp import gp_tasks as gp_tasks
    from constmem.data.gp import static_gp_tasks as static_gp_tasks
    from constmem.data.images import Images as Images
    from constmem.data.images import hold_out as hold_out
    from constmem.data.images import load_images as load_images
    from constmem.data.packs import Listing as Listing
    from constmem.data.packs import MissingDataError as MissingDataError
    from constmem.data.packs import hints as hints
    from constmem.data.packs import listing as listing
    from constmem.data.prepare import Prepared as Prepared
    from constmem.data.prepare import prepare_easytpp as prepare_easytpp
    from constmem.data.prepare import prepare_jodie as prepare_jodie
    from constmem.data.prepare import prepare_pack as prepare_pack
    from constmem.data.prepare_images import prepare_celeba as prepare_celeba
    from constmem.data.prepare_images import prepare_emnist as prepare_emnist
    from constmem.data.prior import table_tasks as table_tasks
    from constmem.data.simulate import Hawkes as Hawkes
    from constmem.data.simulate import Poisson as Poisson
    from constmem.data.simulate import simulated as simulated
    from constmem.data.table import POWER_PLANT as POWER_PLANT
    from constmem.data.table import Table as Table
    from constmem.data.table import power_plant as power_plant
    from constmem.data.task import Task as Task
    from constmem.data.task import draw_sizes as draw_sizes
    from constmem.data.tasks import TableTasks as TableTasks
    from constmem.data.tasks import augmented as augmented
    from constmem.data.tasks import evaluation_tasks as evaluation_tasks
    from constmem.data.tasks import image_points as image_points
    from constmem.data.tasks import image_tasks as image_tasks
    from constmem.data.tasks import static_image_tasks as static_image_tasks
    from constmem.point_processes.events import EventLogProb as EventLogProb
    from constmem.point_processes.events import Events as Events
    from constmem.point_processes.events import bucketed as bucketed

_HOMES = {
    "constmem.data.catalogue": ("DATASETS", "PACKS", "DataSet", "Pack"),
    "constmem.data.event_files": ("read_easytpp", "read_event_csv", "read_event_parquet"),
    "constmem.data.event_log": ("EventLog", "load_events"),
    "constmem.data.gp": (
        "GaussianProcess",
        "Kernel",
        "draw_gp",
        "gp_evaluation_tasks",
        "gp_tasks",
        "static_gp_tasks",
    ),
    "constmem.data.images": ("Images", "hold_out", "load_images"),
    "constmem.data.packs": ("Listing", "MissingDataError", "hints", "listing"),
    "constmem.data.prepare": ("Prepared", "prepare_pack", "prepare_easytpp", "prepare_jodie"),
    "constmem.data.prepare_images": ("prepare_celeba", "prepare_emnist"),
    "constmem.data.prior": ("table_tasks",),
    "constmem.data.simulate": ("Hawkes", "Poisson", "simulated"),
    "constmem.data.table": ("POWER_PLANT", "Table", "power_plant"),
    "constmem.data.task": ("Task", "draw_sizes"),
    "constmem.data.tasks": (
        "TableTasks",
        "augmented",
        "evaluation_tasks",
        "image_points",
        "image_tasks",
        "static_image_tasks",
    ),
    "constmem.point_processes.events": ("EventLogProb", "Events", "bucketed"),
}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used: the registry must be readable without torch."""
    for module, names in _HOMES.items():
        if name in names:
            return getattr(import_module(module), name)
    raise AttributeError(f"module 'constmem.data' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(name for names in _HOMES.values() for name in names)

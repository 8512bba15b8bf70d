"""Data: tasks of Gaussian processes, images and tables, event sequences, and where they come from."""

from constmem.data.account import Account, account
from constmem.data.augment import augmented
from constmem.data.catalogue import DataSet, known
from constmem.data.event_files import load_events, read_easytpp, read_event_csv, read_event_parquet
from constmem.data.event_log import EventLog
from constmem.data.gp import (
    GaussianProcess,
    Kernel,
    draw_gp,
    gp_evaluation_tasks,
    gp_tasks,
    static_gp_tasks,
)
from constmem.data.images import Images, hold_out, load_images
from constmem.data.packs import Listing, MissingDataError, hints, listing
from constmem.data.pixels import evaluation_tasks, image_points, image_tasks, static_image_tasks
from constmem.data.prepare import prepare_celeba, prepare_emnist
from constmem.data.prepare_events import prepare_easytpp, prepare_jodie
from constmem.data.rows import TableTasks
from constmem.data.simulate import Hawkes, Poisson, Process, Renewal, SelfCorrecting
from constmem.data.sizes import draw_sizes
from constmem.data.table import Table
from constmem.data.task import Task
from constmem.point_processes.events import EventLogProb, Events, bucketed

__all__ = [
    "Account",
    "DataSet",
    "EventLog",
    "EventLogProb",
    "Events",
    "GaussianProcess",
    "Hawkes",
    "Images",
    "Kernel",
    "Listing",
    "MissingDataError",
    "Poisson",
    "Process",
    "Renewal",
    "SelfCorrecting",
    "Table",
    "TableTasks",
    "Task",
    "account",
    "augmented",
    "bucketed",
    "draw_gp",
    "draw_sizes",
    "evaluation_tasks",
    "gp_evaluation_tasks",
    "gp_tasks",
    "hints",
    "hold_out",
    "image_points",
    "image_tasks",
    "known",
    "listing",
    "load_events",
    "load_images",
    "prepare_celeba",
    "prepare_easytpp",
    "prepare_emnist",
    "prepare_jodie",
    "read_easytpp",
    "read_event_csv",
    "read_event_parquet",
    "static_gp_tasks",
    "static_image_tasks",
]

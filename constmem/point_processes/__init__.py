"""Point processes: models of event streams, trained on all prefixes, updated event by event, sampled."""

from typing import Any

from constmem.point_processes.base import PointProcess
from constmem.point_processes.cmhp import CMHP
from constmem.point_processes.constant import ConstantState
from constmem.point_processes.prediction import Prediction
from constmem.point_processes.recurrent import GRU
from constmem.point_processes.states import EventState
from constmem.point_processes.thp import THP
from constmem.point_processes.trivial import Trivial

MODELS: dict[str, type[PointProcess[Any]]] = {"trivial": Trivial, "gru": GRU, "thp": THP, "cmhp": CMHP}

__all__ = [
    "CMHP",
    "GRU",
    "MODELS",
    "THP",
    "ConstantState",
    "EventState",
    "PointProcess",
    "Prediction",
    "Trivial",
]

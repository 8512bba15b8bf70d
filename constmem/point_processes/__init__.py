"""Point processes: models of event streams, trained on all prefixes, updated event by event, sampled."""

from typing import Any

from constmem import core
from constmem.point_processes.base import PointProcess, Transition
from constmem.point_processes.baselines import GRU, THP, Trivial
from constmem.point_processes.cmhp import CMHP
from constmem.point_processes.model import Prediction
from constmem.point_processes.states import ConstantState, EventMonoid, EventState, StoredEvents

__all__ = [
    "CMHP",
    "GRU",
    "MODELS",
    "THP",
    "ConstantState",
    "EventMonoid",
    "EventState",
    "PointProcess",
    "Prediction",
    "StoredEvents",
    "Transition",
    "Trivial",
]

MODELS: dict[str, type[PointProcess[Any]]] = {name: globals()[core.MODELS[name].kind] for name in core.EVENTS}

"""Neural processes: models that condition on points, are updated with more, and predict elsewhere."""

from typing import Any

from constmem import core
from constmem.core.fold import ConditioningError
from constmem.neural_processes.base import NeuralProcess
from constmem.neural_processes.cmanp import CMANP
from constmem.neural_processes.cnp import CANP, CNP
from constmem.neural_processes.points import Scales
from constmem.neural_processes.sampling import ANP, BANP, BNP, NP
from constmem.neural_processes.states import StoredPoints
from constmem.neural_processes.transformers import EQTNP, LBANP, TNPD

MODELS: dict[str, type[NeuralProcess[Any, Any]]] = {
    name: globals()[core.MODELS[name].kind] for name in core.POINTS
}

__all__ = [
    "ANP",
    "BANP",
    "BNP",
    "CANP",
    "CMANP",
    "CNP",
    "EQTNP",
    "LBANP",
    "MODELS",
    "NP",
    "TNPD",
    "ConditioningError",
    "NeuralProcess",
    "Scales",
    "StoredPoints",
]

"""Neural processes: models that condition on points, are updated with more, and predict elsewhere."""

from constmem.neural_processes.base import ConditioningError, NeuralProcess
from constmem.neural_processes.cmanp import CMANP

__all__ = ["CMANP", "ConditioningError", "NeuralProcess"]

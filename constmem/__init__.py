"""Attention whose memory does not grow."""

from constmem.block import CMAB, CMABStack
from constmem.neural_processes import CMANP, ConditioningError, NeuralProcess
from constmem.state import AttentionState
from constmem.stream import Decay, Stream, Window

__all__ = [
    "CMAB",
    "CMANP",
    "AttentionState",
    "CMABStack",
    "ConditioningError",
    "Decay",
    "NeuralProcess",
    "Stream",
    "Window",
]

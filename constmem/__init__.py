"""Attention whose memory does not grow."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.2.0.dev0"

if TYPE_CHECKING:
    from constmem.core.block import CMAB, CMABStack
    from constmem.core.monoid import Decay, Window
    from constmem.core.state import AttentionState
    from constmem.neural_processes import CMANP, ConditioningError, NeuralProcess, Scales
    from constmem.point_processes import CMHP, PointProcess
    from constmem.point_processes.events import Events
    from constmem.streams.pool import StreamPool, condition_groups
    from constmem.streams.store import Store
    from constmem.streams.stream import Stream
    from constmem.tabular.estimators import StreamingClassifier, StreamingRegressor

__all__ = [
    "CMAB",
    "CMANP",
    "CMHP",
    "AttentionState",
    "CMABStack",
    "ConditioningError",
    "Decay",
    "Events",
    "NeuralProcess",
    "PointProcess",
    "Scales",
    "Store",
    "Stream",
    "StreamPool",
    "StreamingClassifier",
    "StreamingRegressor",
    "Window",
    "condition_groups",
]

_HOMES = {
    "core.block": ("CMAB", "CMABStack"),
    "point_processes.events": ("Events",),
    "neural_processes": ("CMANP", "ConditioningError", "NeuralProcess", "Scales"),
    "point_processes": ("CMHP", "PointProcess"),
    "core.state": ("AttentionState",),
    "core.monoid": ("Decay", "Window"),
    "streams.pool": ("StreamPool", "condition_groups"),
    "streams.store": ("Store",),
    "streams.stream": ("Stream",),
    "tabular.estimators": ("StreamingClassifier", "StreamingRegressor"),
}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first asked for: `constmem --help` should not wait for torch."""
    for module, names in _HOMES.items():
        if name in names:
            return getattr(import_module(f"constmem.{module}"), name)
    raise AttributeError(f"module 'constmem' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)

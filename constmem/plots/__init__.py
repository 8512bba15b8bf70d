"""Pictures of arrays and distributions; no module here knows a model."""

from constmem.plots.curves import (
    Fit,
    calibration_curve,
    function_fits,
    learning_curve,
    memory_curve,
    predicted_against_true,
)
from constmem.plots.events import Timeline, confusion_picture, fit_picture, hazard_picture, sequence_picture
from constmem.plots.figure import BLUE, GREY, RED, pyplot, save_figure
from constmem.plots.images import Completion, completion_grid, model_grid

__all__ = [
    "BLUE",
    "GREY",
    "RED",
    "Completion",
    "Fit",
    "Timeline",
    "calibration_curve",
    "completion_grid",
    "confusion_picture",
    "fit_picture",
    "function_fits",
    "hazard_picture",
    "learning_curve",
    "memory_curve",
    "model_grid",
    "predicted_against_true",
    "pyplot",
    "save_figure",
    "sequence_picture",
]

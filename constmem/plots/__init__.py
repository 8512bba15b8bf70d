"""Pictures of arrays and distributions; no module here knows a model."""

from constmem.plots.curves import (
    Fit,
    Panel,
    calibration_curve,
    function_fits,
    learning_curve,
    panels_of_lines,
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
    "Panel",
    "Timeline",
    "calibration_curve",
    "completion_grid",
    "confusion_picture",
    "fit_picture",
    "function_fits",
    "hazard_picture",
    "learning_curve",
    "model_grid",
    "panels_of_lines",
    "predicted_against_true",
    "pyplot",
    "save_figure",
    "sequence_picture",
]

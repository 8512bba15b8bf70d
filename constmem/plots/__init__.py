"""Pictures: what people would rather look at than read."""

from constmem.plots.curves import calibration_curve, learning_curve, memory_curve, predicted_against_true
from constmem.plots.figure import BLUE, GREY, RED, pyplot, save_figure
from constmem.plots.functions import Fit, function_fits
from constmem.plots.images import completion_grid, completions, model_grid

__all__ = [
    "BLUE",
    "GREY",
    "RED",
    "Fit",
    "calibration_curve",
    "completion_grid",
    "completions",
    "function_fits",
    "learning_curve",
    "memory_curve",
    "model_grid",
    "predicted_against_true",
    "pyplot",
    "save_figure",
]

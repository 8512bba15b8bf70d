"""Which variants of its recipe, such as small, and which settings a model can be built with."""

from collections.abc import Mapping
from inspect import signature
from typing import Any

from constmem.recipes import EVENT_MODELS, VARIANTS, known, recipe


def variants(name: str, models: Mapping[str, type[Any]]) -> list[str]:
    """The variants of a model of points: those whose settings its constructor takes.

    Example:
        >>> from constmem.neural_processes import MODELS
        >>> variants("cmanp", MODELS), variants("cnp", MODELS)
        (['cmanp-tiny', 'cmanp-small', 'cmanp-matched'], [])
    """
    if name in EVENT_MODELS:  # their recipes refuse other variants themselves
        return []
    taken = signature(models[name]).parameters
    named = [f"{name}-{variant}" for variant in VARIANTS]
    return [variant for variant in named if recipe("gp", variant).model.keys() <= taken.keys()]


def require_settings(model: str, settings: Mapping[str, Any], models: Mapping[str, type[Any]]) -> None:
    """Refuse a variant or a setting that a model cannot be built with, saying which it has."""
    name, _, variant = model.partition("-")
    own = variants(name, models)
    if variant and name not in EVENT_MODELS and model not in own:
        has = f"the variants {', '.join(own)}" if own else "no variants"
        raise ValueError(
            f"there is no {model!r}: {name} has {has}; "
            f"use {name} itself, and --set model.KEY=VALUE for other sizes"
        )
    taken = signature(models[name]).parameters
    for key, value in settings.items():
        known(f"setting of {name}", key, taken)
        least = 1 if key == "dim" else 0
        if taken[key].annotation is int and (type(value) is not int or value < least):
            raise ValueError(f"{key} must be a whole number of at least {least}, not {value!r}")

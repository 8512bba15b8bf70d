"""Which variants of its recipe, such as small, a model can be built in."""

from collections.abc import Mapping
from inspect import signature
from typing import Any

from constmem.recipes import EVENT_MODELS, VARIANTS, recipe


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


def require_variant(model: str, models: Mapping[str, type[Any]]) -> None:
    """Refuse a variant that a model of points cannot be built in, saying which it has."""
    name, _, variant = model.partition("-")
    own = variants(name, models)
    if variant and name not in EVENT_MODELS and model not in own:
        has = f"the variants {', '.join(own)}" if own else "no variants"
        raise ValueError(
            f"there is no {model!r}: {name} has {has}; "
            f"use {name} itself, and --set model.KEY=VALUE for other sizes"
        )

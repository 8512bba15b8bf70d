"""Models in other sizes than the published, such as small, and which settings a model can be built with."""

from collections.abc import Mapping
from inspect import signature
from typing import Any

from constmem.core.checks import known

PLAIN_CMHP: dict[str, Any] = {  # the options as in the paper, which has none of the others
    "absolute_time": True, "last_events": 0, "recency": False, "mass": False, "relative_time": False,
    "gap_tokens": False, "mark_given_gap": False, "embed_depth": 0,
}  # fmt: skip
PAPER_CMHP = PLAIN_CMHP | {"num_slots": 128, "num_latents": 128}
_GAP = {"gap": {"mark_given_gap": True}}  # the mark is predicted from the gap too

# model -> variant -> settings; each is made for its model: in another its numbers would be something else
VARIANTS: dict[str, dict[str, dict[str, Any]]] = {
    "cmanp": {
        "tiny": {  # learns to look at its context, which takes a thousand steps, in a minute or two
            "dim": 32, "depth": 2, "num_slots": 16, "num_latents": 16, "hidden": 64, "num_heads": 2,
            "embed_depth": 3, "residual": "raw",
        },
        "small": {"dim": 32, "depth": 3, "num_slots": 32, "num_latents": 32, "hidden": 64},
        "matched": {"depth": 3, "hidden": 160},  # as many parameters as LBANP, within one in a hundred
    },
    "cmhp": {"faithful": PAPER_CMHP},
    "thp": _GAP, "gru": _GAP, "trivial": _GAP,
}  # fmt: skip


def settings_of(model: str) -> dict[str, Any]:
    """The settings that make a variant of a model; none for the model itself.

    Example:
        >>> settings_of("cmanp-matched"), settings_of("cmanp")
        ({'depth': 3, 'hidden': 160}, {})
    """
    name, dash, variant = model.partition("-")
    if not dash:
        return {}
    if name not in VARIANTS:
        raise ValueError(
            f"there is no {model!r}: {name} has no variants; "
            f"use {name} itself, and --set model.KEY=VALUE for other sizes"
        )
    return VARIANTS[name][known(f"variant of {name}", variant, VARIANTS[name])]


def require_settings(model: str, settings: Mapping[str, Any], models: Mapping[str, type[Any]]) -> None:
    """Refuse a variant or a setting that a model cannot be built with, saying which it has."""
    settings_of(model)
    name = model.partition("-")[0]
    taken = signature(models[name]).parameters
    for key, value in settings.items():
        known(f"setting of {name}", key, taken)
        least = 1 if key == "dim" else 0
        if taken[key].annotation is int and (type(value) is not int or value < least):
            raise ValueError(f"{key} must be a whole number of at least {least}, not {value!r}")

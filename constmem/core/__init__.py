"""What all models share; here is their registry: name, class, family, and the sizes each comes in.

Help texts, recipes, tables and tests take their names from here. It imports nothing, so that help can be
printed at once.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Family = Literal["cnp", "transformer", "events"]


@dataclass(frozen=True)
class Entry:
    """A model that can be trained by name.

    Args:
        name: as it is typed.
        title: as publications and tables write it.
        kind: the name of its class in `constmem.neural_processes` or `constmem.point_processes`.
        family: "cnp" (encoders of points), "transformer" (attention among points) or "events".
        variants: settings of other sizes or options, by what follows the dash: cmanp-tiny.
    """

    name: str
    title: str
    kind: str
    family: Family
    variants: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    @property
    def of_events(self) -> bool:
        """Whether it is a model of event sequences; else of points."""
        return self.family == "events"


PLAIN_CMHP: dict[str, Any] = {  # the options as in the paper, which has none of the others
    "absolute_time": True, "last_events": 0, "recency": False, "mass": False, "relative_time": False,
    "gap_tokens": False, "mark_given_gap": False, "embed_depth": 0,
}  # fmt: skip
PAPER_CMHP = PLAIN_CMHP | {"num_slots": 128, "num_latents": 128}
_GAP = {"gap": {"mark_given_gap": True}}  # the mark is predicted from the gap too
_CMANP: dict[str, dict[str, Any]] = {
    "tiny": {  # learns to look at its context, which takes a thousand steps, in a minute or two
        "dim": 32, "depth": 2, "num_slots": 16, "num_latents": 16, "hidden": 64, "num_heads": 2,
        "embed_depth": 3, "residual": "raw",
    },
    "small": {"dim": 32, "depth": 3, "num_slots": 32, "num_latents": 32, "hidden": 64},
    "matched": {"depth": 3, "hidden": 160},  # as many parameters as LBANP, within one in a hundred
    "moments": {"moments": 128},  # and Bayesian linear regressions from them: for smooth functions
    "residuals": {  # mixtures of normals: for what a regression leaves of tables
        "normals": 12, "depth": 3, "num_slots": 32, "num_latents": 32,
    },
    "calibrated": {"levels": 256},  # grey levels instead of densities: for images
    "joint": {"rank": 32},  # targets that belong together: for samples of functions and images
}  # fmt: skip

MODELS = {  # in the order of tables
    entry.name: entry
    for entry in (
        Entry("cnp", "CNP", "CNP", "cnp"),
        Entry("canp", "CANP", "CANP", "cnp"),
        Entry("np", "NP", "NP", "cnp"),
        Entry("anp", "ANP", "ANP", "cnp"),
        Entry("bnp", "BNP", "BNP", "cnp"),
        Entry("banp", "BANP", "BANP", "cnp"),
        Entry("tnpd", "TNP-D", "TNPD", "transformer"),
        Entry("eqtnp", "EQTNP", "EQTNP", "transformer"),
        Entry("lbanp", "LBANP", "LBANP", "transformer"),
        Entry("cmanp", "CMANP", "CMANP", "transformer", _CMANP),
        Entry("trivial", "no history", "Trivial", "events", _GAP),
        Entry("gru", "GRU", "GRU", "events", _GAP),
        Entry("thp", "THP", "THP", "events", _GAP),
        Entry("cmhp", "CMHP", "CMHP", "events", {"faithful": PAPER_CMHP}),
    )
}
POINTS = tuple(name for name, entry in MODELS.items() if not entry.of_events)
EVENTS = tuple(name for name, entry in MODELS.items() if entry.of_events)
CNP_FAMILY = tuple(name for name, entry in MODELS.items() if entry.family == "cnp")


def with_variants(names: tuple[str, ...]) -> list[str]:
    """Models with all their variants, as they can be typed.

    Example:
        >>> with_variants(("thp", "cmhp"))
        ['thp', 'thp-gap', 'cmhp', 'cmhp-faithful']
    """
    return [
        full for name in names for full in (name, *(f"{name}-{variant}" for variant in MODELS[name].variants))
    ]


def title_of(model: str) -> str:
    """A model or a variant as tables write it.

    Example:
        >>> title_of("tnpd"), title_of("cmanp-small")
        ('TNP-D', 'CMANP-small')
    """
    name, dash, variant = model.partition("-")
    return f"{MODELS[name].title if name in MODELS else name.upper()}{dash}{variant}"


def entry_of(model: str) -> Entry:
    """What is known of a model, or of the model that a variant is one of."""
    from constmem.core.checks import known  # not at the top: nothing is imported there

    return MODELS[known("model", model.partition("-")[0], MODELS)]


def of_events(model: str) -> bool:
    """Whether a model, or a variant of one, is a model of events."""
    return entry_of(model).of_events


def settings_of(model: str) -> dict[str, Any]:
    """The settings that make a variant of a model; none for the model itself.

    Example:
        >>> settings_of("cmanp-matched"), settings_of("cmanp")
        ({'depth': 3, 'hidden': 160}, {})
    """
    from constmem.core.checks import known

    name, dash, variant = model.partition("-")
    variants = entry_of(model).variants
    if not dash:
        return {}
    if not variants:
        raise ValueError(
            f"there is no {model!r}: {name} has no variants; "
            f"use {name} itself, and --set model.KEY=VALUE for other sizes"
        )
    return dict(variants[known(f"variant of {name}", variant, variants)])

"""Draws what each option of CMHP is worth from the committed rows of event_ablation.py.

python benchmarks/event_ablation_picture.py    # writes docs/event-ablation.png
"""

import json
from collections.abc import Sequence
from math import sqrt
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import record
from event_ablation import OPTIONS

from constmem.data.catalogue import title_of
from constmem.plots import BLUE, GREY, RED, pyplot, save_figure

Rows = list[dict[str, Any]]


def rows(name: str) -> Rows:
    return json.loads((record.RESULTS / f"{name}.json").read_text())["rows"]


def gains(found: Rows) -> dict[str, tuple[float, float]]:
    """By how much each option lowers the validation NLL: added to the paper's CMHP, and taken from all."""
    seeds: dict[str, list[float]] = {}
    for row in found:
        seeds.setdefault(row["variant"], []).append(row["validation_nll"])
    nll = {variant: mean(values) for variant, values in seeds.items()}
    return {
        option: (nll["faithful"] - nll[f"faithful + {option}"], nll[f"all - {option}"] - nll["all"])
        for option in OPTIONS
    }


def noise(found: Rows) -> float:
    """The standard deviation of what two runs differ by with their seeds alone: sqrt(2) x that of one.

    Rows of whole models have no NLL of validation: that of the test stands for it.
    """
    return sqrt(2) * stdev(row["scores"]["test"]["nll"] for row in found if row["model"] == "cmhp")


def picture(datasets: Sequence[str], path: Path) -> Path:
    """A panel a data set, two bars an option; what seeds alone would do lies in the grey band."""
    plt = pyplot()
    fig, axes = plt.subplots(1, len(datasets), figsize=(5.0 * len(datasets), 4.2), dpi=150, sharey=True)
    for axis, dataset in zip(axes, datasets, strict=True):
        found = gains(rows(f"ablation-{dataset}"))
        bars = (("added to the paper's", BLUE, -0.2), ("taken from all", RED, 0.2))
        for which, (label, colour, shift) in enumerate(bars):
            places = [place + shift for place in range(len(found))]
            axis.barh(places, [both[which] for both in found.values()], 0.38, color=colour, label=label)
        width = noise(rows(dataset))
        axis.axvspan(-width, width, color=GREY, alpha=0.3, lw=0, zorder=0, label="noise of seeds")
        axis.axvline(0, color="black", lw=0.8)
        axis.set_yticks(range(len(found)), [option.replace("_", " ") for option in found])
        axis.set_xlabel("nats an event that it saves in validation")
        axis.set_title(title_of(dataset), loc="left", fontsize=10)
        axis.grid(axis="x", alpha=0.25)
        axis.set_axisbelow(True)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].invert_yaxis()
    axes[-1].legend(frameon=False, fontsize=8, loc="lower right")
    fig.tight_layout()
    return save_figure(fig, path)


if __name__ == "__main__":
    print("wrote", picture(("taxi", "mooc"), record.RESULTS.parents[1] / "docs" / "event-ablation.png"))

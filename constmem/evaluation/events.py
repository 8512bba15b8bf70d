"""How good predictions of events are: likelihood, errors, accuracy and goodness of fit.

The protocol: the second event of every sequence to its last are scored, and these alone, for every figure;
NLLs are nats an event in the data's own unit; the silence until t_end is reported separately.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import exp, isnan, nan, pi, sqrt
from typing import Any

import torch
from jaxtyping import Bool, Float64, Int64
from torch import Tensor

from constmem.core import checks
from constmem.data import EventLogProb, Events
from constmem.evaluation import LEVELS

HITS = ("accuracy", "top5", "accuracy_given_gap", "top5_given_gap")


@dataclass(frozen=True)
class EventScores:
    """Means over the scored events of a test set.

    Attributes:
        nll, time_nll, mark_nll: nats an event; the first is the sum of the others. The mark's is given the
            gap, and an unknown mark adds 0.
        rmse, mae: of the predicted mean gap, in `unit`.
        rmse_median, mae_median: of the predicted median gap.
        accuracy, error, top5: of the likeliest mark, and of the five likeliest, when nothing of the event
            is known; over events whose mark is known, NaN if there are none.
        accuracy_given_gap, top5_given_gap: the same when its time is known.
        ks, ks_p_value: the largest distance of the distribution of rescaled times from the exponential,
            and the probability of a larger one if the model were true.
        coverage: share of gaps inside the central interval of each level.
        unit: of the gaps.
        events, sequences: how many events were scored, of how many sequences.
        survival_nll: nats a sequence for the silence until t_end; None without a t_end.
    """

    nll: float
    time_nll: float
    mark_nll: float
    rmse: float
    mae: float
    rmse_median: float
    mae_median: float
    accuracy: float
    error: float
    top5: float
    accuracy_given_gap: float
    top5_given_gap: float
    ks: float
    ks_p_value: float
    coverage: dict[str, float]
    unit: str
    events: int
    sequences: int
    survival_nll: float | None = None


@torch.no_grad()
def evaluate_events(model: Any, events: Events, *, positions: int | None = None) -> EventScores:
    """Score a model on event sequences.

    Args:
        model: a point process, or anything with its eval, log_prob, forecast and condition.
        events: on the model's device.
        positions: events handled at once, padding included; changes memory and no figure. By default
            2,048 to 8,192: fewer with many marks.
    """
    totals: dict[str, Tensor] = {}
    found: list[Tensor] = []
    for part, lp, forecast in _parts(model, events, positions):
        found.append(_rescaled(part, lp.scored, forecast))
        for name, value in _sums(part, lp, forecast).items():
            totals[name] = value + totals.get(name, 0.0)
    sums = {name: float(value) for name, value in totals.items()}
    if not sums.get("events"):
        raise ValueError("there is nothing to score: no sequence has a second event")
    means = {name: value / sums["events"] for name, value in sums.items()}
    hits = {name: sums[name] / sums["known"] if sums["known"] else nan for name in HITS}
    rescaled = torch.cat(found)
    off_centre = (0.5 - torch.exp(-rescaled)).abs()
    distance = ks_statistic(rescaled)
    return EventScores(
        nll=means["time_nll"] + means["mark_nll"],
        survival_nll=None if events.t_end is None else sums["survival"] / len(events),
        **{name: means[name] for name in ("time_nll", "mark_nll", "mae", "mae_median")},
        **{name: sqrt(means[name]) for name in ("rmse", "rmse_median")},
        **hits,
        error=1 - hits["accuracy"],
        ks=distance,
        ks_p_value=ks_p_value(distance, len(rescaled)),
        coverage={str(level): float((off_centre <= level / 2).double().mean()) for level in LEVELS},
        unit=events.unit,
        events=int(sums["events"]),
        sequences=len(events),
    )


@torch.no_grad()
def rescaled_times(model: Any, events: Events, *, positions: int | None = None) -> Float64[Tensor, " n"]:
    """The integrated hazard Λ = -log P(a longer gap) of every scored gap, as the model predicted it.

    If the model is true they are independent and exponential with mean 1, and the probability
    integral transforms 1 - exp(-Λ) uniform.
    """
    parts = _parts(model, events, positions)
    found = [_rescaled(part, lp.scored, forecast) for part, lp, forecast in parts]
    return torch.cat([torch.zeros(0, dtype=torch.float64, device=events.device), *found])


def ks_statistic(rescaled: Float64[Tensor, " n"]) -> float:
    """The largest distance between the distribution of rescaled times and the exponential with mean 1."""
    n = len(rescaled)
    if not n:
        return nan
    expected = -torch.expm1(-rescaled.double().sort().values)
    steps = torch.arange(n + 1, dtype=torch.float64, device=rescaled.device) / n
    return float(torch.maximum(expected - steps[:-1], steps[1:] - expected).max())


def ks_p_value(distance: float, n: int) -> float:
    """The probability of a larger distance by chance, by Kolmogorov's distribution.

    P(√n D > x) = 2 Σ_k (-1)^(k-1) exp(-2 k² x²), with Stephens' correction of √n for finite n.
    """
    if isnan(distance):
        return nan
    x = (sqrt(n) + 0.12 + 0.11 / sqrt(n)) * distance
    if x < 0.2:
        return 1.0  # to 12 digits
    if x < 1.2:  # the same function, as a series that converges for small x
        return 1 - sqrt(2 * pi) / x * sum(exp(-(((2 * k - 1) * pi / x) ** 2) / 8) for k in range(1, 6))
    return 2 * sum((1.0 if k % 2 else -1.0) * exp(-2 * (k * x) ** 2) for k in range(1, 6))


@torch.no_grad()
def mark_confusion(
    model: Any, events: Events, *, commonest: int = 10, positions: int | None = None
) -> tuple[Int64[Tensor, " k"], Int64[Tensor, "k k1"]]:
    """How often the likeliest mark was which, for each of the commonest true marks.

    Returns the marks, commonest first, and counts [true, predicted], with one more column for
    predictions of any other mark.
    """
    checks.positive("commonest", commonest)
    true = events.marks[events.scored & (events.marks >= 0)]
    order = true.bincount(minlength=events.num_marks).argsort(descending=True, stable=True)
    shown = order[:commonest]
    place = torch.full((events.num_marks,), len(shown), device=events.device)
    place[shown] = torch.arange(len(shown), device=events.device)
    counts = torch.zeros(len(shown) + 1, len(shown) + 1, dtype=torch.long, device=events.device)
    for part, lp, forecast in _parts(model, events, positions):
        known = lp.scored & (part.marks >= 0)
        predicted = forecast.mark_logits().argmax(-1)[known]
        index = place[part.marks[known]], place[predicted]
        counts.index_put_(index, torch.ones_like(predicted), accumulate=True)
    return shown, counts[:-1]


def _parts(model: Any, events: Events, positions: int | None) -> Iterator[tuple[Events, EventLogProb, Any]]:
    """Batches of sequences of like length, and pieces of those too long to take at once."""
    if positions is None:
        positions = min(max((1 << 24) // events.num_marks, 2048), 8192)
    checks.positive("positions", positions)
    model.eval()
    lengths = events.lengths.cpu()
    order = lengths.argsort(descending=True, stable=True)
    start = 0
    while start < len(order):
        width = int(lengths[order[start]])
        stop = start + max(1, positions // max(width, 1))
        batch = events.select(order[start:stop].to(events.device)).trim()
        start = stop
        if width <= positions:
            yield batch, model.log_prob(batch), model.forecast(batch)
            continue
        state = None
        for first in range(0, width, positions):
            piece = batch.window(first, first + positions)
            yield piece, model.log_prob(piece, initial=state), model.forecast(piece, initial=state)
            state = model.condition(piece, initial=state)


def _rescaled(part: Events, scored: Bool[Tensor, "b t"], forecast: Any) -> Float64[Tensor, " n"]:
    log_survival: Tensor = forecast.gap.log_survival(part.gaps)
    return -log_survival.double()[scored]


def _sums(part: Events, lp: EventLogProb, forecast: Any) -> dict[str, Float64[Tensor, ""]]:
    """Sums over the scored events of a batch: NLLs, errors of gaps, and how often marks were right."""
    scored = lp.scored
    off, off_median = (
        (predicted.double() - part.gaps)[scored] for predicted in (forecast.gap.mean, forecast.gap.median)
    )
    known = scored & (part.marks >= 0)
    true = part.marks[known]
    sums = {
        "time_nll": -lp.time.double()[scored].sum(), "mark_nll": -lp.mark.double()[scored].sum(),
        "survival": lp.time.new_zeros(()) if lp.survival is None else -lp.survival.sum(),
        "rmse": off.square().sum(), "mae": off.abs().sum(),
        "rmse_median": off_median.square().sum(), "mae_median": off_median.abs().sum(),
        "events": scored.sum(), "known": known.sum(),
    }  # fmt: skip
    for suffix, gap in (("", None), ("_given_gap", part.gaps)):
        logits = forecast.mark_logits(gap)[known]
        best = logits.topk(min(5, logits.shape[-1]), -1).indices
        sums[f"accuracy{suffix}"] = (best[:, 0] == true).sum()
        sums[f"top5{suffix}"] = (best == true[:, None]).any(-1).sum()
    return {name: value.double() for name, value in sums.items()}

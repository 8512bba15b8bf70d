"""Long-horizon forecasts: futures of several events sampled from a model, against what came."""

from dataclasses import dataclass
from math import sqrt
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float64, Int64
from torch import Tensor

from constmem.core import checks
from constmem.data import Events


@runtime_checkable
class Sampler(Protocol):
    """What is asked of a model; its states `repeat` every stream some times, side by side."""

    def eval(self) -> Any: ...

    def condition(self, events: Events) -> Any: ...

    def sample(self, state: Any, *, n: int, generator: torch.Generator | None) -> Events: ...


@dataclass(frozen=True)
class HorizonScores:
    """How well the last events of every sequence are predicted from all before them.

    Attributes:
        ahead, samples: how many events are predicted, by how many sampled futures.
        elapsed_crps: continuous ranked probability score of the time they take in all, in `unit`:
            E|X - y| - E|X - X'| / 2, with no bias from few samples.
        elapsed_mae: absolute error of the median time they take.
        elapsed_coverage: share of these times inside the central 90 % of the samples.
        mark_distance: √ of the mean over sequences of Σ_marks (mean count in the samples - true count)².
        unit: of the times.
        sequences, left_out: how many were scored, and how many were too short.
    """

    ahead: int
    samples: int
    elapsed_crps: float
    elapsed_mae: float
    elapsed_coverage: float
    mark_distance: float
    unit: str
    sequences: int
    left_out: int


@torch.no_grad()
def evaluate_horizon(
    model: Sampler,
    events: Events,
    *,
    ahead: int = 10,
    samples: int = 32,
    generator: torch.Generator,
    streams: int = 2048,
) -> HorizonScores:
    """Hide the last `ahead` events of every sequence, sample futures from what is before, and compare.

    Args:
        events: on the model's device; a sequence needs `ahead` events and two before them.
        ahead: how many events to predict.
        samples: futures of each sequence, at least 2.
        generator: source of all randomness.
        streams: futures sampled at once.
    """
    for name, number in (("ahead", ahead), ("samples", samples - 1), ("streams", streams)):
        checks.positive(name if name != "samples" else "samples - 1", number)
    model.eval()
    long = (events.lengths >= ahead + 2).nonzero().squeeze(-1)
    if not len(long):
        raise ValueError(f"no sequence has {ahead} events and two before them: ask for fewer ahead")
    sums = torch.zeros(4, dtype=torch.float64, device=events.device)
    for index in long.split(max(1, streams // samples)):
        part = events.select(index).trim()
        state = model.condition(_history(part, ahead)).repeat(samples)
        future = model.sample(state, n=ahead, generator=generator)
        sums += _compared(part, future, ahead, samples)
    crps, error, inside, distance = (sums / len(long)).tolist()
    return HorizonScores(
        ahead, samples, crps, error, inside, sqrt(distance), events.unit, len(long), len(events) - len(long)
    )


def _history(events: Events, ahead: int) -> Events:
    """All but the last events of every sequence."""
    kept = (events.lengths - ahead)[:, None]
    mask = torch.arange(events.times.shape[1], device=events.device) < kept
    last = events.times.gather(1, kept - 1)
    times, marks = torch.where(mask, events.times, last), torch.where(mask, events.marks, -1)
    return Events(times, marks, mask, events.t_start, None, events.unit, events.num_marks).trim()


def _compared(part: Events, future: Events, ahead: int, samples: int) -> Float64[Tensor, "4"]:
    """Sums over sequences of CRPS, absolute error, coverage and squared distance of mark counts."""
    ends = part.lengths[:, None]
    before = part.times.gather(1, ends - ahead - 1)
    elapsed = (part.times.gather(1, ends - 1) - before).squeeze(-1)
    drawn = (future.times[:, -1] - before.squeeze(-1).repeat_interleave(samples)).reshape(-1, samples)
    spread = (drawn[:, :, None] - drawn[:, None]).abs().sum((1, 2)) / (samples * (samples - 1))
    crps = (drawn - elapsed[:, None]).abs().mean(1) - spread / 2
    low, middle, high = torch.quantile(drawn, drawn.new_tensor([0.05, 0.5, 0.95]), dim=1)
    inside = (elapsed >= low) & (elapsed <= high)
    place = ends - ahead + torch.arange(ahead, device=part.device)
    true = _counts(part.marks.gather(1, place), part.num_marks)
    predicted = _counts(future.marks.reshape(len(part), -1), part.num_marks) / samples
    return torch.stack(
        [crps, (middle - elapsed).abs(), inside.double(), (predicted - true).square().sum(1)]
    ).sum(1)


def _counts(marks: Int64[Tensor, "b n"], num_marks: int) -> Float64[Tensor, "b k"]:
    """How often each mark occurs; unknown ones nowhere."""
    zeros = torch.zeros(len(marks), num_marks, dtype=torch.float64, device=marks.device)
    return zeros.scatter_add(1, marks.clamp_min(0), (marks >= 0).double())

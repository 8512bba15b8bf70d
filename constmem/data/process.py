"""What a point process with a known likelihood can do: be sampled exactly and scored exactly.

All start with no history at t_start, in which nothing happened before. With the hazard λ(t) of any
event, given those before it, and λ_m(t) that of mark m,

    compensator of a gap   Λ = ∫ λ(t) dt from the event before to this one,
    log density of a gap   log λ(t) - Λ,
    log-probability of its mark, given the gap   log λ_m(t) - log λ(t),

and under the true process the Λ are independent and exponential with mean 1 (time rescaling).
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from math import isfinite

import torch
from jaxtyping import Float64, Int64
from torch import Tensor

from constmem.core import checks
from constmem.point_processes.events import EventLogProb, Events

Step = tuple[Float64[Tensor, " b"], Int64[Tensor, " b"], Tensor]  # gap, mark, state after it


@dataclass(frozen=True)
class Hazards:
    """What is known of each gap: the log hazard at its end, its compensator, the log share of the mark."""

    log_total: Float64[Tensor, "b t"]
    compensator: Float64[Tensor, "b t"]
    log_mark: Float64[Tensor, "b t"]
    tail: Float64[Tensor, " b"] | None  # compensator from the last event to t_end


class Process(ABC):
    """A point process that can be sampled exactly and scored exactly."""

    @property
    def num_marks(self) -> int:
        """How many kinds of events there are."""
        return 1

    @abstractmethod
    def _start(self, batch: int, device: torch.device) -> Tensor:
        """What a sequence must remember, before any event: (b, ...)."""

    @abstractmethod
    def _next(self, state: Tensor, generator: torch.Generator) -> Step:
        """One more event for every sequence."""

    @abstractmethod
    def _hazards(self, events: Events) -> Hazards:
        """Of given events; what it says of padding is not looked at."""

    def sample(
        self,
        num_sequences: int,
        *,
        t_end: float | None = None,
        num_events: int | None = None,
        generator: torch.Generator,
        unit: str = "unit",
    ) -> Events:
        """Sequences watched from 0 until t_end, or until each has num_events; on the generator's device."""
        checks.positive("num_sequences", num_sequences)
        if (t_end is None) == (num_events is None):
            raise ValueError("give t_end or num_events, and not both: one of them says when a watch ends")
        if num_events is not None:
            checks.positive("num_events", num_events)
        if t_end is not None and not (isfinite(t_end) and t_end > 0):
            raise ValueError(f"t_end is {t_end}, but must be a finite time after 0")
        device, end = generator.device, torch.inf if t_end is None else t_end
        zeros = torch.zeros(num_sequences, dtype=torch.float64, device=device)
        time, state = zeros, self._start(num_sequences, device)
        times: list[Tensor] = []
        marks: list[Tensor] = []
        while (len(times) < num_events) if num_events is not None else bool((time <= end).any()):
            gap, mark, state = self._next(state, generator)
            time = time + gap
            times.append(time)
            marks.append(mark)
        whole = torch.stack(times, 1)
        mask = whole <= end
        padding = torch.where(mask, whole, 0.0).amax(1, keepdim=True)
        return Events(
            torch.where(mask, whole, padding), torch.where(mask, torch.stack(marks, 1), -1), mask, zeros,
            None if t_end is None else zeros + t_end, unit, self.num_marks,
        ).trim()  # fmt: skip

    def log_prob(self, events: Events) -> EventLogProb:
        """The exact log density of every gap, of its mark given the gap, and of the silence until t_end."""
        self._check(events)
        known = self._hazards(events)
        real, told = events.mask, events.mask & (events.marks >= 0)
        time = torch.where(real, known.log_total - known.compensator, 0.0)
        survival = None if known.tail is None else -known.tail
        return EventLogProb(time, torch.where(told, known.log_mark, 0.0), survival, events.scored)

    def compensator(self, events: Events) -> Float64[Tensor, "b t"]:
        """The integrated hazard over each gap; 0 in padding."""
        self._check(events)
        return torch.where(events.mask, self._hazards(events).compensator, 0.0)

    def hazard(self, events: Events, times: Float64[Tensor, " g"]) -> Float64[Tensor, " g"]:
        """The hazard of any event at each of some times, given the events of one sequence before it."""
        self._check(events)
        if len(events) != 1:
            raise ValueError(f"there are {len(events)} sequences: select the one to look at")
        history = events.times[0, : int(events.lengths[0])]
        before = torch.searchsorted(history, times)  # how many events each time comes after
        place = torch.arange(len(history) + 1, device=times.device)
        wide = torch.cat([history, history.new_zeros(1)])
        rows = torch.where(place < before[:, None], wide, times[:, None])
        kinds = torch.cat([events.marks[0, : len(history)], events.marks.new_zeros(1)])
        marks = torch.where(place < before[:, None], kinds, torch.where(place == before[:, None], 0, -1))
        start = events.t_start.expand(len(times)).contiguous()
        asked = Events(rows, marks, place <= before[:, None], start, None, events.unit, self.num_marks)
        return self._hazards(asked).log_total.gather(1, before[:, None]).squeeze(1).exp()

    def _check(self, events: Events) -> None:
        if events.num_marks != self.num_marks:
            raise ValueError(
                f"the events have {events.num_marks} marks, but this process has {self.num_marks}: "
                "score events of the same kinds"
            )


def last_times(events: Events) -> Float64[Tensor, " b"]:
    """When each sequence's last event was; t_start without any."""
    return events.times[:, -1] if events.times.shape[1] else events.t_start


def require_positive(what: str, number: float) -> None:
    if not (isfinite(number) and number > 0):
        raise ValueError(f"{what} must be a finite number above 0, not {number}")

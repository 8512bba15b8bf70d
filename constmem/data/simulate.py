"""Point processes that can be sampled and scored exactly: what models of events are tested against.

All start with no history at t_start, in which nothing happened before. With the hazard λ(t) of any
event, given those before it, and λ_m(t) that of mark m,

    compensator of a gap   Λ = ∫ λ(t) dt from the event before to this one,
    log density of a gap   log λ(t) - Λ,
    log-probability of its mark, given the gap   log λ_m(t) - log λ(t),

and under the true process the Λ are independent and exponential with mean 1 (time rescaling).
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from math import isfinite, log, pi
from typing import Literal

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
        real, marked = events.mask, events.mask & (events.marks >= 0)
        time = torch.where(real, known.log_total - known.compensator, 0.0)
        survival = None if known.tail is None else -known.tail
        return EventLogProb(time, torch.where(marked, known.log_mark, 0.0), survival, events.scored)

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


@dataclass(frozen=True)
class Poisson(Process):
    """Independent events: λ_m(t) = rates_m."""

    rates: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.rates:
            raise ValueError("rates is empty, but one rate for each mark is needed")
        for rate in self.rates:
            require_positive("every rate", rate)

    @property
    def num_marks(self) -> int:
        return len(self.rates)

    def _start(self, batch: int, device: torch.device) -> Tensor:
        rates = torch.tensor(self.rates, dtype=torch.float64, device=device)
        return rates.expand(batch, -1)

    def _next(self, state: Tensor, generator: torch.Generator) -> Step:
        gap = torch.empty_like(state[:, 0]).exponential_(generator=generator) / sum(self.rates)
        return gap, torch.multinomial(state, 1, generator=generator).squeeze(-1), state

    def _hazards(self, events: Events) -> Hazards:
        gaps, total = events.gaps, sum(self.rates)
        shares = torch.tensor(self.rates, dtype=torch.float64, device=events.device).div(total).log()
        tail = None if events.t_end is None else total * (events.t_end - last_times(events))
        return Hazards(
            torch.full_like(gaps, log(total)), total * gaps, shares[events.marks.clamp_min(0)], tail
        )


@dataclass(frozen=True)
class Renewal(Process):
    """Independent gaps: log-normal with log gap ~ N(a, b²), or gamma with shape a and rate b.

    Example:
        >>> process = Renewal("gamma", 1.0, 2.0)  # a gamma of shape 1 is the exponential of a Poisson process
        >>> events = Events.from_gaps([[0.3, 0.7]], unit="s")
        >>> torch.allclose(process.log_prob(events).time, Poisson((2.0,)).log_prob(events).time)
        True
    """

    kind: Literal["lognormal", "gamma"]
    a: float
    b: float

    def __post_init__(self) -> None:
        if self.kind not in ("lognormal", "gamma"):
            raise ValueError(f"kind must be 'lognormal' or 'gamma', not {self.kind!r}")
        require_positive("b", self.b)
        if self.kind == "gamma":
            require_positive("a", self.a)

    def _start(self, batch: int, device: torch.device) -> Tensor:
        return torch.zeros(batch, 0, dtype=torch.float64, device=device)

    def _next(self, state: Tensor, generator: torch.Generator) -> Step:
        shape = torch.full(state.shape[:1], self.a, dtype=torch.float64, device=state.device)
        if self.kind == "gamma":
            gap = torch._standard_gamma(shape, generator=generator) / self.b
        else:
            gap = torch.exp(torch.normal(shape, self.b, generator=generator))
        return gap, torch.zeros_like(gap, dtype=torch.long), state

    def _hazards(self, events: Events) -> Hazards:
        gaps = events.gaps
        survived = self._cumulative(gaps)
        tail = None if events.t_end is None else self._cumulative(events.t_end - last_times(events))
        return Hazards(self._log_density(gaps) + survived, survived, torch.zeros_like(gaps), tail)

    def _log_density(self, gap: Tensor) -> Tensor:
        if self.kind == "gamma":
            shape = torch.tensor(self.a, dtype=torch.float64)
            scale = self.a * log(self.b) - float(torch.lgamma(shape))
            power: Tensor = torch.special.xlogy(torch.full_like(gap, self.a - 1), gap)
            return scale + power - self.b * gap
        log_gap = torch.where(gap > 0, gap, 1.0).log()
        z = (log_gap - self.a) / self.b
        return torch.where(gap > 0, -0.5 * z**2 - log_gap - log(self.b) - 0.5 * log(2 * pi), -torch.inf)

    def _cumulative(self, gap: Tensor) -> Tensor:
        """Λ = -log P(a gap is longer)."""
        if self.kind == "gamma":
            x = self.b * gap
            share: Tensor = torch.special.gammaincc(torch.full_like(x, self.a), x)
            # P(X > x) -> density(x) / (1 - (a - 1) / x), for where the share is below the smallest number
            far = (
                torch.log1p((1 - self.a) / x.clamp_min(max(1.0, self.a)))
                - self._log_density(gap)
                + log(self.b)
            )
            return torch.where(share > 0, -share.log(), far)
        log_share: Tensor = torch.special.log_ndtr((self.a - gap.log()) / self.b)
        return -log_share


@dataclass(frozen=True)
class SelfCorrecting(Process):
    """Pressure that rises with time and falls with each event: λ(t) = exp(growth · t - relief · N(t)).

    In the long run there are growth / relief events in a unit of time.
    """

    growth: float = 1.0
    relief: float = 1.0

    def __post_init__(self) -> None:
        require_positive("growth", self.growth)
        require_positive("relief", self.relief)

    def _start(self, batch: int, device: torch.device) -> Tensor:
        return torch.zeros(batch, dtype=torch.float64, device=device)  # the log hazard

    def _next(self, state: Tensor, generator: torch.Generator) -> Step:
        due = torch.empty_like(state).exponential_(generator=generator)
        # Λ(gap) = e^state (e^(growth gap) - 1) / growth, and Λ(gap) = due
        gap = torch.logaddexp(torch.zeros_like(state), (self.growth * due).log() - state) / self.growth
        return gap, torch.zeros_like(gap, dtype=torch.long), state + self.growth * gap - self.relief

    def _hazards(self, events: Events) -> Hazards:
        before = torch.arange(events.times.shape[1], device=events.device)
        log_end = self.growth * (events.times - events.t_start[:, None]) - self.relief * before
        compensator = self._grown(log_end - self.growth * events.gaps, events.gaps)
        tail = None
        if events.t_end is not None:
            last = last_times(events)
            log_last = self.growth * (last - events.t_start) - self.relief * events.lengths
            tail = self._grown(log_last, events.t_end - last)
        return Hazards(log_end, compensator, torch.zeros_like(log_end), tail)

    def _grown(self, log_hazard: Tensor, gap: Tensor) -> Tensor:
        """The integral of a hazard over a gap from its value at the gap's beginning."""
        return log_hazard.exp() * torch.expm1(self.growth * gap) / self.growth

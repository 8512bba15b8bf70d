"""Simulated events with exact likelihoods: Poisson, renewal, self-correcting and Hawkes processes.

They are what models are tested against: on these no model can beat the process itself.
"""

from dataclasses import dataclass
from math import log, pi
from typing import Literal

import torch
from torch import Tensor

from constmem.data.hawkes import Hawkes
from constmem.data.process import Hazards, Process, Step, last_times, require_positive
from constmem.point_processes.events import Events

__all__ = ["Hawkes", "Poisson", "Process", "Renewal", "SelfCorrecting"]


@dataclass(frozen=True)
class Poisson(Process):
    """Events that know nothing of each other: λ_m(t) = rates_m."""

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

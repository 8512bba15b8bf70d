"""Poisson and Hawkes processes, sampled and scored exactly: what models of events are tested against.

All start with no history at t_start, in which nothing happened before. With the hazard λ(t) of any
event, given those before it, and λ_m(t) that of mark m,

    compensator of a gap   Λ = ∫ λ(t) dt from the event before to this one,
    log density of a gap   log λ(t) - Λ,
    log-probability of its mark, given the gap   log λ_m(t) - log λ(t),

and under the true process the Λ are independent and exponential with mean 1 (time rescaling).
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from math import isfinite, log

import torch
from jaxtyping import Float64, Int64
from torch import Tensor

from constmem.core import checks
from constmem.core.checks import known
from constmem.data.catalogue import DATASETS
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
        """Of given events; what it says of padding is ignored."""

    def sample(
        self,
        num_sequences: int,
        *,
        t_end: float | None = None,
        num_events: int | None = None,
        generator: torch.Generator,
    ) -> Events:
        """Sequences observed from 0 until t_end, or until each has num_events; on the generator's device."""
        checks.positive("num_sequences", num_sequences)
        if (t_end is None) == (num_events is None):
            raise ValueError("give t_end or num_events, and not both: one of them says when a sequence ends")
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
            None if t_end is None else zeros + t_end, "unit", self.num_marks,
        ).trim()  # fmt: skip

    def log_prob(self, events: Events) -> EventLogProb:
        """The exact log density of every gap, of its mark given the gap, and of the silence until t_end."""
        self._check(events)
        found = self._hazards(events)
        real, marked = events.mask, events.mask & (events.marks >= 0)
        time = torch.where(real, found.log_total - found.compensator, 0.0)
        survival = None if found.tail is None else -found.tail
        return EventLogProb(time, torch.where(marked, found.log_mark, 0.0), survival, events.scored)

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


def _last_times(events: Events) -> Float64[Tensor, " b"]:
    """When each sequence's last event was; t_start without any."""
    return events.times[:, -1] if events.times.shape[1] else events.t_start


def _require_positive(what: str, number: float) -> None:
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
            _require_positive("every rate", rate)

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
        tail = None if events.t_end is None else total * (events.t_end - _last_times(events))
        return Hazards(
            torch.full_like(gaps, log(total)), total * gaps, shares[events.marks.clamp_min(0)], tail
        )


@dataclass(frozen=True)
class Hawkes(Process):
    """Events that bring about further events, by sums of exponentials.

    λ_i(t) = base_i + Σ_{events k before t} Σ_j branching[j][i][mark_k] · decay_j · exp(-decay_j (t - t_k))

    so that an event of mark m is followed, on the average, by Σ_j branching[j][i][m] of mark i as its
    direct children.

    Args:
        base: hazard of each mark without any history.
        branching: for each exponential a matrix [child's mark][parent's mark].
        decay: of each exponential.

    Example:
        Without children it is a Poisson process.

        >>> childless = Hawkes((0.5, 1.5), (((0.0, 0.0), (0.0, 0.0)),), (1.0,))
        >>> events = Events.from_gaps([[0.3, 0.7]], marks=[[0, 1]], unit="s", num_marks=2)
        >>> bool(torch.allclose(childless.compensator(events), Poisson((0.5, 1.5)).compensator(events)))
        True
    """

    base: tuple[float, ...]
    branching: tuple[tuple[tuple[float, ...], ...], ...]
    decay: tuple[float, ...]

    @staticmethod
    def univariate(base: float, branching: tuple[float, ...], decay: tuple[float, ...]) -> "Hawkes":
        """One mark. Standard settings: (0.2, (0.8,), (1.0,)) and (0.2, (0.4, 0.4), (1.0, 20.0))."""
        return Hawkes((base,), tuple(((share,),) for share in branching), decay)

    def __post_init__(self) -> None:
        k, j = len(self.base), len(self.decay)
        for number in (*self.base, *self.decay):
            _require_positive("every base and decay", number)
        shape = tuple(torch.tensor(self.branching, dtype=torch.float64).shape)
        if shape != (j, k, k):
            raise ValueError(
                f"branching has shape {shape}, but {j} exponentials and {k} marks need ({j}, {k}, {k})"
            )
        branching = self._matrices(torch.device("cpu"))
        if not bool(((branching >= 0) & torch.isfinite(branching)).all()):
            raise ValueError("every branching must be at least 0 and finite: events can excite, not inhibit")
        radius = float(torch.linalg.eigvals(branching.sum(0)).abs().max())
        if radius >= 1:
            raise ValueError(
                f"the spectral radius of the branching is {radius:.3f}: from 1 on every event has so many "
                "descendants that the process explodes; lower the branching"
            )

    @property
    def num_marks(self) -> int:
        return len(self.base)

    def _matrices(self, device: torch.device) -> Float64[Tensor, "j k k"]:
        return torch.tensor(self.branching, dtype=torch.float64, device=device)

    def _start(self, batch: int, device: torch.device) -> Tensor:
        """The hazard of each mark that each exponential brings about: (b, j, k)."""
        return torch.zeros(batch, len(self.decay), len(self.base), dtype=torch.float64, device=device)

    def _next(self, state: Tensor, generator: torch.Generator) -> Step:
        """The first of the base's next event and that of each exponential, which are independent.

        An exponential's whole compensator is its hazard / decay: where a draw exceeds it, it brings
        about nothing more. No thinning, and nothing is rejected.
        """
        decay = torch.tensor(self.decay, dtype=torch.float64, device=state.device)
        due = torch.empty(len(state), 1 + len(decay), dtype=torch.float64, device=state.device)
        due.exponential_(generator=generator)
        share = (due[:, 1:] * decay / state.sum(-1)).clamp_max(1.0)  # of an exponential's compensator
        gap = torch.minimum(due[:, 0] / sum(self.base), (-torch.log1p(-share) / decay).amin(-1))
        state = self._faded(state, gap)
        hazards = state.sum(1) + torch.tensor(self.base, dtype=torch.float64, device=state.device)
        mark = torch.multinomial(hazards, 1, generator=generator).squeeze(-1)
        return gap, mark, state + self._children(mark)

    def _faded(self, state: Tensor, gap: Tensor) -> Tensor:
        decay = torch.tensor(self.decay, dtype=torch.float64, device=state.device)
        return state * torch.exp(-decay * gap[:, None])[..., None]

    def _children(self, mark: Tensor) -> Float64[Tensor, "b j k"]:
        decay = torch.tensor(self.decay, dtype=torch.float64, device=mark.device)
        return (decay[:, None, None] * self._matrices(mark.device))[..., mark].permute(2, 0, 1)

    def _hazards(self, events: Events) -> Hazards:
        if self.num_marks > 1 and bool((events.mask & (events.marks < 0)).any()):
            raise ValueError(
                "some marks are unknown: what an event excites depends on its mark, so that the exact "
                "likelihood of a Hawkes process needs all of them"
            )
        base = torch.tensor(self.base, dtype=torch.float64, device=events.device)
        gaps, marks = events.gaps, events.marks.clamp_min(0)
        state, totals, spent, shares = self._start(len(events), events.device), [], [], []
        for i in range(gaps.shape[1]):
            spent.append(self._spent(state, gaps[:, i]))
            state = self._faded(state, gaps[:, i])
            hazards = base + state.sum(1)  # (b, k)
            totals.append(hazards.sum(-1).log())
            shares.append(hazards.gather(-1, marks[:, i, None]).squeeze(-1).log() - totals[-1])
            state = torch.where(events.mask[:, i, None, None], state + self._children(marks[:, i]), state)
        tail = None if events.t_end is None else self._spent(state, events.t_end - _last_times(events))
        log_total, compensator, log_mark = (_columns(part, gaps) for part in (totals, spent, shares))
        return Hazards(log_total, compensator, log_mark, tail)

    def _spent(self, state: Tensor, gap: Tensor) -> Float64[Tensor, " b"]:
        """The compensator of a gap: Σ base · gap + Σ_j hazard_j (1 - exp(-decay_j gap)) / decay_j."""
        decay = torch.tensor(self.decay, dtype=torch.float64, device=state.device)
        excited = state.sum(-1) * -torch.expm1(-decay * gap[:, None]) / decay
        return sum(self.base) * gap + excited.sum(-1)


def _columns(parts: list[Tensor], like: Tensor) -> Float64[Tensor, "b t"]:
    return torch.stack(parts, 1) if parts else torch.zeros_like(like)


def simulated(name: str) -> Hawkes:
    """The process of a simulated data set of the registry."""
    processes = {entry.name: entry.process for entry in DATASETS.values() if entry.process is not None}
    return Hawkes.univariate(*processes[known("simulated data set", name, processes)])

"""Hawkes processes: events that excite others, of one mark or of many."""

from dataclasses import dataclass

import torch
from jaxtyping import Float64
from torch import Tensor

from constmem.core.checks import known
from constmem.data.catalogue import DATASETS
from constmem.data.simulate import Hazards, Process, Step, last_times, require_positive
from constmem.point_processes.events import Events


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

        >>> from constmem.data import Poisson
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
            require_positive("every base and decay", number)
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

    @property
    def mean_rates(self) -> Float64[Tensor, " k"]:
        """Events of each mark in a unit of time, in the long run: (1 - Σ_j branching_j)⁻¹ base."""
        total = self._matrices(torch.device("cpu")).sum(0)
        base = torch.tensor(self.base, dtype=torch.float64)
        rates: Tensor = torch.linalg.solve(torch.eye(len(base), dtype=torch.float64) - total, base)
        return rates

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
        tail = None if events.t_end is None else self._spent(state, events.t_end - last_times(events))
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

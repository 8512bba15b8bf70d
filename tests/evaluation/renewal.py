"""A log-normal renewal process, which models of events in tests are true for."""

from dataclasses import dataclass
from math import log, pi

import torch
from torch import Tensor

from constmem.data.simulate import Hazards, Process, Step
from constmem.point_processes.events import Events


@dataclass(frozen=True)
class Renewal(Process):
    """Independent gaps with log gap ~ N(a, b²)."""

    a: float
    b: float

    def _start(self, batch: int, device: torch.device) -> Tensor:
        return torch.zeros(batch, 0, dtype=torch.float64, device=device)

    def _next(self, state: Tensor, generator: torch.Generator) -> Step:
        mean = torch.full(state.shape[:1], self.a, dtype=torch.float64)
        gap = torch.exp(torch.normal(mean, self.b, generator=generator))
        return gap, torch.zeros_like(gap, dtype=torch.long), state

    def _hazards(self, events: Events) -> Hazards:
        gaps = events.gaps
        survived = self._cumulative(gaps)
        tail = None if events.t_end is None else self._cumulative(events.t_end - events.times[:, -1])
        log_gap = gaps.clamp_min(1e-300).log()
        density = -0.5 * ((log_gap - self.a) / self.b) ** 2 - log_gap - log(self.b) - 0.5 * log(2 * pi)
        return Hazards(density + survived, survived, torch.zeros_like(gaps), tail)

    def _cumulative(self, gap: Tensor) -> Tensor:
        return -torch.special.log_ndtr((self.a - gap.log()) / self.b)

"""What any point process is before it sees events: heads, the scale of time, and checks of what comes in."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, TypeVar

import torch
from jaxtyping import Float64
from torch import Tensor

from constmem.core import checks
from constmem.core.model import Model
from constmem.point_processes.events import Events
from constmem.point_processes.heads import GapHead, LogNormalMixture, MarkHead
from constmem.point_processes.states import EventState

S = TypeVar("S", bound=EventState)


class EventModel(Model):
    """A model of events of `num_marks` kinds: gaps and marks are predicted from vectors of features."""

    state_type: ClassVar[type[EventState]] = EventState

    def __init__(
        self,
        *,
        num_marks: int,
        features: int,
        hidden: int,
        components: int,
        mark_given_gap: bool,
        dropout: float,
        unit: str | None,
        config: dict[str, Any],
    ) -> None:
        super().__init__(config=config)
        checks.positive("num_marks", num_marks)
        self.num_marks, self.unit = num_marks, unit
        self.dropout = torch.nn.Dropout(dropout)
        self.gap_head = GapHead(dim=features, hidden=hidden, components=components)
        self.mark_head = MarkHead(dim=features, hidden=hidden, num_marks=num_marks, given_gap=mark_given_gap)
        self.log_gap_mean: Tensor
        self.log_gap_std: Tensor
        self.tick: Tensor
        self.register_buffer("log_gap_mean", torch.tensor(0.0))
        self.register_buffer("log_gap_std", torch.tensor(1.0))
        self.register_buffer("tick", torch.tensor(1e-6))

    @classmethod
    def family(cls) -> Mapping[str, type[Model]]:
        from constmem.point_processes import MODELS  # which is made of this class

        return MODELS

    def observing_parameters(self) -> Sequence[Tensor]:
        """Everything but the heads, unless a model knows better."""
        heads = {id(p) for head in (self.gap_head, self.mark_head) for p in head.parameters()}
        return [p for p in self.parameters() if id(p) not in heads] + [self.log_gap_mean, self.log_gap_std]

    def standardise(self, events: Events) -> None:
        """Take the scale of time from training data: mean and deviation of log gaps, tick and unit.

        It changes how fast a model learns, and in what units it starts, but not what it can say.
        """
        gaps = events.gaps[events.scored]
        gaps = gaps[gaps > 0]
        if gaps.numel() < 2:
            raise ValueError("standardise needs at least two positive gaps between events: give more data")
        self.log_gap_mean.fill_(gaps.log().mean())
        self.log_gap_std.fill_(gaps.log().std().clamp_min(1e-3))
        self.tick.fill_(gaps.min())
        self.unit = self.config["unit"] = events.unit

    # Inside

    def _standard(self, gaps: Tensor) -> Tensor:
        """Standardised log gaps in the model's precision; NaN for no gap at all."""
        z = (gaps.clamp_min(self.tick).log() - self.log_gap_mean) / self.log_gap_std
        return torch.where(gaps > 0, z, torch.nan).to(self.dtype)

    def _since(self, start: Tensor, times: Tensor) -> Float64[Tensor, "*b"]:
        """Times counted from the start, in typical gaps."""
        return (times - start) * torch.exp(-self.log_gap_mean.double())

    def _gap(self, features: Tensor) -> LogNormalMixture:
        gap: LogNormalMixture = self.gap_head(features, self.log_gap_mean, self.log_gap_std)
        return gap

    def _seeds(self, count: int, generator: torch.Generator | None) -> list[int]:
        """Seeds for the dropout of as many chunks.

        None where nothing is dropped, nor where a single chunk draws from PyTorch's own generator.
        """
        rates = [m.p for m in self.modules() if isinstance(m, torch.nn.Dropout)]
        if not self.training or not any(rates) or (count == 1 and generator is None):
            return []
        device = None if generator is None else generator.device
        return torch.randint(2**62, (count,), generator=generator, device=device).tolist()

    def _require_fitting(self, events: Events) -> None:
        """Refuse events of other marks, another unit or on another device."""
        if events.num_marks != self.num_marks:
            raise ValueError(f"these events have {events.num_marks} marks, the model {self.num_marks}")
        if self.unit is not None and events.unit != self.unit:
            raise ValueError(
                f"these events are in {events.unit!r}, the model is of {self.unit!r}: convert them"
            )
        if events.device != self.device:
            raise ValueError(
                f"the events are on {events.device}, the model on {self.device}: "
                f"use events.to({str(self.device)!r})"
            )

    def _signed(self, state: S) -> S:
        """Name the weights that made a state, unless they are being trained."""
        return state if self._learns() else state.signed(self.fingerprint())

    def _require_own(self, state: EventState) -> None:
        """Refuse a state of another kind, device or weights."""
        if not isinstance(state, self.state_type):
            raise TypeError(f"expected a state of {type(self).__name__}, not {type(state).__name__}")
        self._require_made_here(state)

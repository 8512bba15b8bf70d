"""What any point process is before it sees events: heads, the scale of time, and what it predicts by them."""

import warnings
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import exp, isfinite
from operator import sub
from typing import TYPE_CHECKING, Any, ClassVar, Required, TypedDict

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from constmem.core import checks
from constmem.core.model import Model
from constmem.point_processes.events import Events
from constmem.point_processes.heads import LONGEST, QUANTILES, GapHead, LogNormalMixture, MarkHead, Scale
from constmem.point_processes.states import EventState

if TYPE_CHECKING:
    from constmem.point_processes.base import PointProcess

AT_ONCE = 1 << 17  # components, or marks, of a batch up to which all gaps are handled at once
FAR = 5.0  # deviations between typical gaps and those that a model expects, from which on it warns


@dataclass(frozen=True, eq=False)
class Prediction:
    """The next event after each of some histories.

    Attributes:
        gap: the time until it, in the data's unit; a batch (b,) of streams or (b, t) of prefixes.
        last_time: when the event before it was (or observation began): what the gap is added to.
        features, mark_head, scale: what its mark is predicted from.
    """

    gap: LogNormalMixture
    last_time: Float64[Tensor, "*b"]
    features: Float[Tensor, "*b f"]
    mark_head: MarkHead
    scale: Scale

    def mark_logits(self, gap: Float[Tensor, "*b"] | None = None) -> Float[Tensor, "*b marks"]:
        """Log-probabilities of the marks of an event after `gap`, or of the next one, whenever it comes.

        Where marks depend on the gap, the latter is the mean over 16 equally likely gaps.
        """
        if gap is not None or not self.mark_head.given_gap:
            return self._given(self.last_time if gap is None else gap)
        levels = (torch.arange(QUANTILES, device=self.last_time.device) + 0.5) / QUANTILES
        levels = levels.reshape(-1, *[1] * self.last_time.ndim)
        at_once = self.gap.loc.numel() <= AT_ONCE
        gaps = self.gap.icdf(levels) if at_once else torch.cat([self.gap.icdf(p[None]) for p in levels])
        if self.last_time.numel() * self.mark_head.num_marks <= AT_ONCE:
            return self._given(gaps).logsumexp(0).log_softmax(-1)
        total = self._given(gaps[0])
        for gap in gaps[1:]:
            total = torch.logaddexp(total, self._given(gap))
        return total.log_softmax(-1)

    def _given(self, gap: Tensor) -> Tensor:
        """Log-probabilities of the marks given a gap (which does not matter to all models)."""
        logits: Tensor = self.mark_head(self.features, self.scale.standard(gap))
        return logits

    @property
    def mean(self) -> Float[Tensor, "*b"]:
        """The mean gap: what minimises the squared error."""
        return self.gap.mean

    @property
    def median(self) -> Float[Tensor, "*b"]:
        """The median gap: what minimises the absolute error."""
        return self.gap.median

    def quantiles(self, levels: Float[Tensor, " q"] | list[float]) -> Float[Tensor, "*b q"]:
        """The gaps that are not exceeded with the given probabilities."""
        levels = torch.as_tensor(levels, dtype=self.gap.loc.dtype, device=self.last_time.device)
        return self.gap.icdf(levels.reshape(-1, *[1] * self.last_time.ndim)).movedim(0, -1)


@torch.no_grad()
def sample(
    model: "PointProcess[Any]",
    state: Any,
    *,
    n: int | None,
    until: float | Tensor | None,
    generator: torch.Generator | None,
    limit: int,
) -> Events:
    """A future of each stream: see `PointProcess.sample`."""
    if (n is None) == (until is None):
        raise ValueError("say either how many events to draw, n=, or up to when, until=")
    checks.positive("n", 1 if n is None else n)
    begin, end = state.last_time, None
    if until is not None:
        end = checks.one_each("until", until, len(begin), begin.device).double()
        for k, (stop, last) in enumerate(zip(end.tolist(), begin.tolist(), strict=True)):
            if not isfinite(stop):
                raise ValueError(f"until={stop} for stream {k} is no time to stop at: give one, or n=")
            if stop < last:
                raise ValueError(f"until={stop} is before the last event of stream {k}, {last}")
    drawn: list[tuple[Tensor, Tensor, Tensor]] = []
    running = torch.ones_like(begin, dtype=torch.bool)
    while n is None or len(drawn) < n:
        if len(drawn) == limit:
            raise RuntimeError(f"{limit} events were drawn before until= was reached: allow more by limit=")
        prediction = model.query(state)
        gap = prediction.gap.sample(generator=generator).double()
        chances, time = prediction.mark_logits(gap).exp(), state.last_time + gap
        mark = torch.multinomial(chances, 1, generator=generator).squeeze(-1)
        running = running if end is None else running & (time <= end)
        if not bool(running.any()):
            break
        state = model.update(state, time, mark, mask=None if end is None else running)
        drawn.append((state.last_time, torch.where(running, mark, -1), running))
    none = begin[:, None][:, :0]
    parts = [torch.stack(p, 1) for p in zip(*drawn, strict=True)]
    times, marks, alive = parts or (none, none.long(), none.bool())
    return Events(times, marks, alive, begin, end, model.unit or "unit", model.num_marks)


class HeadSettings(TypedDict, total=False):
    """Settings of every model of events with the same default everywhere."""

    num_marks: Required[int]
    hidden: int
    components: int
    unit: str | None


class EventSettings(HeadSettings, total=False):
    """All settings."""

    dim: int
    mark_given_gap: bool
    dropout: float


class EventModel(Model):
    """A model of events of `num_marks` kinds: gaps and marks are predicted from vectors of features.

    Args:
        num_marks: kinds of events.
        dim: width of embeddings, and of the vector that the heads see.
        hidden: width inside the heads.
        components: log-normals of the mixture over the gap.
        mark_given_gap: the mark is predicted from the gap too.
        dropout: of what is known, before the heads, while training.
        unit: of the times it is trained on; `set_scales` sets it.
    """

    state_type: ClassVar[type[EventState]] = EventState

    def __init__(
        self,
        *,
        num_marks: int,
        dim: int = 64,
        hidden: int = 64,
        components: int = 16,
        mark_given_gap: bool = False,
        dropout: float = 0.1,
        unit: str | None = None,
    ) -> None:
        super().__init__()
        checks.positive("num_marks", num_marks)
        self.num_marks, self.unit = num_marks, unit
        self.dropout = torch.nn.Dropout(dropout)
        self.gap_head = GapHead(dim=dim, hidden=hidden, components=components)
        self.mark_head = MarkHead(dim=dim, hidden=hidden, num_marks=num_marks, given_gap=mark_given_gap)
        self.log_gap_mean: Tensor
        self.log_gap_std: Tensor
        self.tick: Tensor
        self.register_buffer("log_gap_mean", torch.tensor(0.0))
        self.register_buffer("log_gap_std", torch.tensor(1.0))
        self.register_buffer("tick", torch.tensor(1e-6))
        self._compared = False  # whether gaps were compared with those expected

    @abstractmethod
    def _blank(self, batch: int) -> dict[str, Tensor]:
        """The memory of having seen nothing."""

    @classmethod
    def family(cls) -> Mapping[str, type[Model]]:
        from constmem.point_processes import MODELS  # which is made of this class

        return MODELS

    def observing_parameters(self) -> Sequence[Tensor]:
        """Everything but the heads, unless a model knows better."""
        heads = ("gap_head.", "mark_head.")
        own = [p for name, p in self.named_parameters() if not name.startswith(heads)]
        return [*own, self.log_gap_mean, self.log_gap_std]

    @property
    def scale(self) -> Scale:
        """How it counts time."""
        return Scale(self.log_gap_mean, self.log_gap_std, self.tick)

    def set_scales(self, events: Events) -> None:
        """Take the scale of time from training data: mean and deviation of log gaps, tick and unit.

        It changes how fast a model learns, and in what units it starts, but not what it can say.
        """
        gaps = events.gaps[events.scored]
        gaps = gaps[gaps > 0]
        if gaps.numel() < 2:
            raise ValueError("set_scales needs at least two positive gaps between events: give more data")
        self.log_gap_mean.fill_(gaps.log().mean())
        self.log_gap_std.fill_(gaps.log().std().clamp_min(1e-3))
        self.tick.fill_(gaps.min())
        self.unit = self.config["unit"] = events.unit
        self._compared = False
        self._require_near(events.t_start, events.times)

    # Inside

    def _gap(self, features: Tensor) -> LogNormalMixture:
        gap: LogNormalMixture = self.gap_head(features, self.log_gap_mean, self.log_gap_std)
        return gap

    def seeds(self, count: int, generator: torch.Generator | None) -> list[int]:
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
        if not isinstance(events, Events):
            raise TypeError(
                f"expected Events, not {type(events).__name__}: Events.from_arrival_times(times, marks=, "
                "unit=, num_marks=) makes them of lists or arrays"
            )
        if events.num_marks != self.num_marks:
            raise ValueError(
                f"these events have {events.num_marks} marks, the model {self.num_marks}: give both the "
                "same num_marks"
            )
        if self.unit is not None and events.unit != self.unit:
            raise ValueError(
                f"these events are in {events.unit!r}, the model is of {self.unit!r}: convert them"
            )
        if events.device != self.device:
            raise ValueError(
                f"the events are on {events.device}, the model on {self.device}: "
                f"use events.to({str(self.device)!r})"
            )
        self._compare_gaps(events.gaps)

    def _require_near(self, start: Tensor, times: Tensor) -> None:
        """Refuse times so far from their start that gaps between them are lost; a GPU is not waited for."""
        if start.device.type != "cpu" or not times.numel():
            return
        last = times if times.ndim == 1 else times[:, -1]
        span = max(map(sub, last.tolist(), start.tolist()))  # for a few streams sooner than by PyTorch
        typical = exp(float(self.log_gap_mean))
        if span > LONGEST * typical:
            raise ValueError(
                f"an event is {span:.3g} after the start of its stream, {span / typical:.3g} times as long "
                f"as a typical gap ({typical:.3g}): so far from it float64 rounds gaps away; look for a "
                "wrong time, or begin a new stream with a later t_start"
            )

    def _compare_gaps(self, gaps: Tensor) -> None:
        """Warn once if gaps are far from those the model expects; a GPU is not waited for."""
        if self._compared or gaps.device.type != "cpu" or not bool((gaps > 0).any()):
            return
        self._compared = True
        typical = gaps[gaps > 0].log().median()
        if bool((typical - self.log_gap_mean).abs() > FAR * self.log_gap_std):
            warnings.warn(
                f"gaps here are typically {float(typical.exp()):.3g}, but this model expects "
                f"{exp(float(self.log_gap_mean)):.3g}: before training, set_scales(events) takes the scale "
                "from the data; of a trained model check the unit of times",
                stacklevel=4,
            )

    def _require_own(self, state: EventState) -> None:
        """Refuse a state of another kind, device or weights."""
        if not isinstance(state, self.state_type):
            raise TypeError(
                f"expected a state of {type(self).__name__} ({self.state_type.__name__}), not "
                f"{type(state).__name__}: condition this model, or load by its state_type"
            )
        self._require_made_here(state)
        if state.fingerprint is None:  # which would say more than a shape
            own = replace(state, memory=self._blank(0)).layout
            if state.layout != own:
                raise ValueError(
                    f"this state is of another model: {state.AXES} is {state.layout} there, {own} here"
                )

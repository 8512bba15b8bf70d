"""The contract of every event model: observe, scan, read; likelihood, streaming and sampling follow here.

A model says how events change what it remembers (`_observe`), what it knows before each event of a chunk
(`_scan`) and after all (`read`): vectors of features, from which two heads predict the next gap and mark.
Everything is done chunk by chunk from a state, so the likelihood of a long stream needs the memory of one.
"""

from abc import abstractmethod
from functools import partial
from typing import Generic

import torch
from jaxtyping import Bool, Float, Float64, Real
from torch import Tensor
from typing_extensions import TypeVar

from constmem.core import checks
from constmem.core.monoid import NOTHING as UNSIGNED
from constmem.point_processes.chunks import Chunk, pieces, streamed, walk
from constmem.point_processes.events import EventLogProb, Events
from constmem.point_processes.model import EventModel, Prediction, sample
from constmem.point_processes.padding import NOTHING, Given, moments
from constmem.point_processes.states import EventState

S = TypeVar("S", bound=EventState, default=EventState)
Scanned = tuple[Float[Tensor, "b t f"], dict[str, Tensor]]  # what is known before events; what is remembered
Moments = Real[Tensor, "*b"] | Given  # a time, or one for each stream
POSITIONS = 4096  # of a batch that are read at once, and on a GPU as many as it has MiB, up to:
MANY = 65_536  # less than half a MiB each, while a CMHP of the default size is trained


class PointProcess(EventModel, Generic[S]):
    """A model of event streams: what comes next, and when, given all that came before.

    S is the type of its states. Gaps shorter than the clock's tick (the shortest positive gap of the
    training data) are scored as one tick, so that simultaneous events have a finite density.
    """

    # What a model implements

    @abstractmethod
    def _observe(self, state: S, chunk: Chunk) -> dict[str, Tensor]:
        """The memory after some more events."""

    @abstractmethod
    def _scan(self, state: S, chunk: Chunk, wanted: Bool[Tensor, "b t"] | None) -> Scanned:
        """What is known before each event of a chunk, and the memory after all of them.

        Args:
            wanted: the events before which it is asked for; None: all of them.
        """

    @abstractmethod
    def read(self, state: S) -> Float[Tensor, "b f"]:
        """What is known after all events seen: what `query` predicts from."""

    # What follows

    def empty(self, start: Moments, *, last_time: Moments | None = None) -> S:
        """The state of having seen nothing of streams whose observation began at `start`.

        Args:
            start: one time, or one for each stream.
            last_time: when the event before was, for a later part of a stream (see `observe`).
        """
        starts = moments("start", start).to(self.device)
        last = starts if last_time is None else moments("last_time", last_time).to(self.device)
        return self._claimed(self._nothing(starts, last.expand_as(starts)))

    def observe(self, events: Events, *, start: Moments | None = None, chunk: int = 4096) -> S:
        """The state of exactly these events: states of consecutive parts of a stream `merge`.

        Args:
            start: when observation of the whole stream began, if these events are a later part of it; its
                t_start is then the time of the event before, as `Events.window` has it.

        Example:
            >>> from constmem import CMHP
            >>> process = CMHP(num_marks=1, dim=16, num_slots=4, num_latents=4).eval()
            >>> events = Events.from_arrival_times([[1.0, 2.0, 2.5, 4.0, 4.5]], unit="hour")
            >>> first = process.observe(events.window(0, 2))
            >>> later = process.observe(events.window(2, 5), start=events.t_start)
            >>> merged, whole = process.query(first.merge(later)), process.query(process.observe(events))
            >>> torch.allclose(merged.mean, whole.mean, rtol=1e-4)
            True
        """
        initial = None if start is None else self.empty(start, last_time=events.t_start)
        return self.condition(events, initial=initial, chunk=chunk)

    def condition(self, events: Events, *, initial: S | None = None, chunk: int = 4096) -> S:
        """The state after these events (and those that `initial` has seen); the chunk changes nothing."""
        with self._verified():
            state = self._begin(events, initial)
            for part in pieces(events, state.last_time, chunk):
                state = state.moved(part, self._observe(state, part))
            return self._claimed(state)

    def update(
        self,
        state: S,
        times: Real[Tensor, " *bk"] | Given,
        marks: Real[Tensor, " *bk"] | Given | None = None,
        *,
        mask: Bool[Tensor, " *bk"] | Given | None = None,
        chunk: int = 4096,
    ) -> S:
        """The state after one more event of each stream, (b,), or a few, (b, k).

        Args:
            times: absolute, none before the last event of its stream.
            marks: -1 (or None for all) where unknown.
            mask: True = real; where a stream has fewer events than others, the missing ones come last.
        """
        with self._verified():
            self._require_own(state)
            for part in streamed(state.last_time, times, marks, mask, self.num_marks, chunk):
                if not self._compared:
                    self._compare_gaps(part.gaps)
                state = state.moved(part, self._observe(state, part))
            self._require_near(state.start, state.last_time)
            return self._claimed(state)

    def query(self, state: S) -> Prediction:
        """The next event of each stream."""
        self._require_own(state)
        return self._prediction(self.read(state), state.last_time)

    def forecast(self, events: Events, *, initial: S | None = None, chunk: int | None = None) -> Prediction:
        """At place (b, i) the prediction of event i of stream b from the events before it."""
        state = self._begin(events, initial)
        features, befores = [], []
        for part in pieces(events, state.last_time, self._stride(events, chunk)):
            known, memory = self._scan(state, part, self._few(part.real))
            state = state.moved(part, memory)
            features.append(known)
            befores.append(part.times - part.gaps)
        if not features:
            return self._prediction(self.read(state)[:, None][:, :0], events.times)
        return self._prediction(torch.cat(features, 1), torch.cat(befores, 1))

    def log_prob(self, events: Events, *, initial: S | None = None, chunk: int | None = None) -> EventLogProb:
        """Log-probabilities of events, each given those before it; see `EventLogProb` for what is scored.

        Args:
            initial: the state to go on from; then first events are scored too, where it has seen any before.
            chunk: events handled at once; never changes the result. Only one chunk's intermediate results
                are held, also for the backward pass, which computes them again.
        """
        state = self._begin(events, initial)
        scored = events.scored
        if initial is not None:
            scored = scored | (events.mask & (initial.count > 0)[:, None])
        time, mark, state = self._log_prob(state, events, events.mask, chunk)
        return EventLogProb(time, mark, self._survival(state, events), scored)

    def loss(
        self,
        events: Events,
        *,
        reads: float = 1.0,
        chunk: int | None = None,
        generator: torch.Generator | None = None,
    ) -> Float[Tensor, ""]:
        """Minus the mean over scored events of the log-probability of gap and mark.

        Args:
            reads: the share of events to take the mean over, drawn again each time: an estimate that costs
                less where reading a state is the larger part of the work.
            generator: for the draw and for dropout.
        """
        state, scored = self._begin(events, None), events.scored
        if reads < 1.0:
            where = scored.device if generator is None else generator.device
            draw = torch.rand(scored.shape, generator=generator, device=where)
            scored = scored & (draw.to(scored.device) < reads)
        time, mark, _ = self._log_prob(state, events, scored, chunk, generator, some=reads < 1.0)
        return -EventLogProb(time, mark, None, scored).mean

    def sample(
        self,
        state: S,
        *,
        n: int | None = None,
        until: float | Tensor | None = None,
        generator: torch.Generator | None = None,
        limit: int = 100_000,
    ) -> Events:
        """A future of each stream, drawn event by event from the model itself: `n` events, or all `until`.

        Exact: gaps and marks come from their distributions in closed form, without thinning. `state.repeat`
        gives several futures of each stream.

        Args:
            until: a time, or one for each stream.
            limit: of events a stream; reaching it before `until` is an error, never a silent cut.
        """
        self._require_own(state)
        return sample(self, state, n=n, until=until, generator=generator, limit=limit)

    def at_once(self, events: Events) -> bool:
        """Whether the loss takes these events in one chunk, without computing anything twice."""
        return events.times.shape[1] <= self._stride(events)

    # Inside

    def _nothing(self, start: Float64[Tensor, " b"], last_time: Float64[Tensor, " b"]) -> S:
        """The state of having seen nothing, without a fingerprint."""
        zero = torch.zeros_like(start, dtype=torch.int64)
        mark, memory = torch.full_like(zero, NOTHING), self._blank(len(start))
        return self.state_type(  # type: ignore[return-value]
            start.clone(), last_time.clone(), torch.zeros_like(start), mark, zero, memory, UNSIGNED
        )

    def _claimed(self, state: S) -> S:
        """The state signed by these weights if they have made all of it."""
        return self._signed(state) if state.fingerprint == UNSIGNED else state

    def _prediction(self, features: Tensor, last_time: Tensor) -> Prediction:
        return Prediction(self._gap(features), last_time, features, self.mark_head, self.scale)

    def _few(self, wanted: Tensor) -> Tensor | None:
        """The places to read, or None for all: a GPU reads all sooner than it counts those wanted."""
        return wanted if wanted.device.type == "cpu" else None

    def _log_prob(
        self,
        state: S,
        events: Events,
        wanted: Tensor,
        chunk: int | None,
        generator: torch.Generator | None = None,
        *,
        some: bool = False,
    ) -> tuple[Tensor, Tensor, S]:
        """Log-probabilities of gaps and marks where wanted (`some` events), and the state after all."""
        if not events.times.shape[1]:
            nothing = events.times.to(self.dtype)
            return nothing, nothing, state
        stride = self._stride(events, chunk)
        parts = pieces(events, state.last_time, stride)
        chunks = list(zip(parts, wanted.split(stride, 1), strict=True))
        return walk(partial(self._score, some=some), chunks, self.seeds(len(chunks), generator), state, self)

    def _score(
        self, state: S, chunk: Chunk, wanted: Tensor, *, some: bool = False
    ) -> tuple[Tensor, Tensor, S]:
        """Log-probabilities of the gaps and marks of a chunk where wanted, and the state after it."""
        known_before, memory = self._scan(state, chunk, wanted if some else self._few(wanted))
        features = self.dropout(known_before)
        known = wanted & (chunk.marks >= 0)
        gaps = chunk.gaps.clamp_min(self.tick)
        time = torch.where(wanted, self._gap(features).log_prob(gaps), 0.0)
        logits = self.mark_head(features, self.scale.standard(chunk.gaps))
        mark = logits.gather(-1, chunk.marks.clamp_min(0)[..., None]).squeeze(-1)
        return time, torch.where(known, mark, 0.0), state.moved(chunk, memory)

    def _survival(self, state: S, events: Events) -> Tensor | None:
        """The log-probability of nothing from the last event to the end of the observation."""
        if events.t_end is None:
            return None
        left = (events.t_end - state.last_time).clamp_min(0.0)
        return torch.where(left > 0, self._gap(self.read(state)).log_survival(left), 0.0)

    def _stride(self, events: Events, chunk: int | None = None) -> int:
        checks.positive("chunk", 1 if chunk is None else chunk)
        positions = POSITIONS
        if self.device.type == "cuda":
            positions = min(torch.cuda.get_device_properties(self.device).total_memory >> 20, MANY)
        return chunk or max(16, positions // max(len(events), 1))

    def _begin(self, events: Events, initial: S | None) -> S:
        """The state to start from, of events that fit the model and the state."""
        self._require_fitting(events)
        if initial is None:
            self._require_near(events.t_start, events.times)
            return self._nothing(events.t_start, events.t_start)
        self._require_own(initial)
        if initial.batch != len(events):
            raise ValueError(f"the state is of {initial.batch} streams, the events of {len(events)}")
        early = events.mask & (events.times < initial.last_time[:, None])
        if bool(early.any()):
            k, i = early.nonzero()[0].tolist()
            raise ValueError(
                f"event {i} of stream {k} is at {events.times[k, i].item()}, before the last event that the "
                f"state has seen, at {initial.last_time[k].item()}: events come in order"
            )
        self._require_near(initial.start, events.times)
        return initial


class Transition(PointProcess[S]):
    """A model each of whose events changes what the one before it left: its states cannot merge.

    What the second half of a stream does to a state depends on the state that it meets, so there is no
    state of the second half alone to merge with: a stream is taken in from its first event to its last.
    """

    def _observe(self, state: S, chunk: Chunk) -> dict[str, Tensor]:
        return self._scan(state, chunk, chunk.real)[1]

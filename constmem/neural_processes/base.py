"""The contract of every neural process: observe, merge, read, predict; the rest is derived here.

A model is a commutative monoid of states and a query. It says how a few points become a state
(`_observe`), how a state becomes what predictions need (`read`), and how those predict (`decode`).
Conditioning in chunks, streaming updates, queries and the training loss follow, once, for all models.
"""

from abc import abstractmethod
from collections.abc import Iterable
from functools import reduce
from typing import Any, Generic

import torch
from jaxtyping import Float
from torch import Tensor
from torch.distributions import Distribution
from typing_extensions import TypeVar

from constmem.core import checks
from constmem.core.algebra import EMPTY
from constmem.core.fold import Chunk, filled, nothing, numbered, slices, streamed
from constmem.core.monoid import NOTHING
from constmem.neural_processes.joint import SampleMixture, mean_of_real
from constmem.neural_processes.points import PointModel, S, normal

M = TypeVar("M", bound=Tensor | tuple[Any, ...], default=Tensor)


class NeuralProcess(PointModel[S], Generic[S, M]):
    """A model that conditions on points, is updated with more of them, and predicts elsewhere.

    S is the type of its states, M of what `read` makes of one: a tensor with the batch in front, or a
    tuple that begins with such a tensor.
    """

    # What a model implements

    @abstractmethod
    def empty(self, batch: int = 1) -> S:
        """The state of having seen nothing, for a batch of tasks."""

    @abstractmethod
    def _observe(self, x: Tensor, y: Tensor, mask: Tensor | None, log_weight: Tensor | None) -> S:
        """The state of exactly these points, already checked."""

    @abstractmethod
    def read(self, state: S) -> M:
        """What predictions need of a state, computed once for any number of queries."""

    @abstractmethod
    def decode(self, memory: M, xt: Float[Tensor, "b m x"]) -> tuple[Tensor, ...]:
        """Mean and standard deviation at a few targets, (b, m, y); all that `distribution` takes.

        Of k samples both are (b, m, k, y), followed by the logarithms of their weights, (b, m, k), if any.
        """

    # What a model may do otherwise

    def distribution(self, mean: Tensor, std: Tensor, *log_weight: Tensor) -> Distribution:
        """The prediction that `decode`'s tensors stand for: normals, or a mixture of them where it has k."""
        return normal(mean, std) if mean.ndim == 3 else SampleMixture(mean, std, *log_weight)

    def _chunk(self) -> int:
        """How many points are best observed at a time."""
        return 4096

    def _fold(self, chunks: list[Chunk]) -> S:
        """The state of several chunks while learning: here plainly, keeping all a gradient needs."""
        return self._merged(chunks)

    def loss_noise(
        self,
        xc: Float[Tensor, "b n x"],
        *,
        generator: torch.Generator | None = None,  # noqa: ARG002
    ) -> Tensor:
        """The random numbers that a loss given this context takes: none of them in most models."""
        return xc.new_empty(0)

    def _loss(self, context: Chunk, targets: Chunk, noise: Tensor) -> Tensor:  # noqa: ARG002
        """The loss of checked and cleared points in the model's units: a function of nothing else."""
        x, y, mask = targets
        state = self._condition(slices(*context, 4096))
        log_prob = self.distribution(*self._decoded(self.read(state), x, 4096)).log_prob(y)
        return -mean_of_real(log_prob.sum(-1), mask)

    # What follows

    def observe(
        self,
        x: Float[Tensor, "b n x"],
        y: Float[Tensor, "b n y"],
        *,
        mask: Tensor | None = None,
        log_weight: Tensor | None = None,
    ) -> S:
        """The state of exactly these points, all at once (`condition` takes them in chunks).

        Args:
            x, y: inputs and outputs.
            mask: (b, n) True = real; what is masked out may hold anything.
            log_weight: (b, n) natural logarithm of how much each point counts.
        """
        self._check(x, y, mask)
        if log_weight is not None:
            checks.per_point("log_weight", log_weight, x)
            wide = log_weight.to(torch.promote_types(log_weight.dtype, torch.float32))
            checks.finite("log_weight", wide.clamp_min(EMPTY)[..., None], mask)
        with self._verified():
            state: S = self._signed(self._observe(*self._scaled((x, y, mask)), log_weight))
        return state

    def condition(
        self,
        x: Float[Tensor, "b n x"],
        y: Float[Tensor, "b n y"],
        *,
        chunk: int | None = None,
        mask: Tensor | None = None,
    ) -> S:
        """The state of these points, `chunk` of them at a time (None: the model's choice).

        The chunk never changes the result. Differentiable: the backward pass, too, needs the memory of
        one chunk only.
        """
        chunk = self._chunk() if chunk is None else chunk
        checks.positive("chunk", chunk)
        self._check(x, y, mask, chunk=chunk)
        with self._verified():
            state: S = self._signed(self._seen(x, y, mask, chunk))
        return state

    def condition_chunks(self, chunks: Iterable[tuple[Tensor, ...]], *, initial: S | None = None) -> S:
        """The state of a stream of (x, y) or (x, y, mask) chunks, each forgotten once it is seen.

        Where gradients are wanted the chunks are kept (they alone) until the backward pass. If the
        stream breaks off, the `ConditioningError` raised holds the state so far.

        Args:
            chunks: any iterable; nothing is stored, so it may be larger than memory.
            initial: a state to go on from.
        """
        if initial is not None:
            self._require_own(initial)
        seen = map(self._scaled, numbered(chunks, self._check))
        if self._learns():
            kept = list(seen)
            if not kept and initial is None:
                raise nothing()
            if not kept and initial is not None:
                return initial
            made: S = self._signed(self._condition(kept))
            return made if initial is None else initial.merge(made)
        state: S = streamed(map(self._part, seen), initial)
        return state

    def update(
        self,
        state: S,
        x: Float[Tensor, "b n x"],
        y: Float[Tensor, "b n y"],
        *,
        mask: Tensor | None = None,
        chunk: int | None = None,
    ) -> S:
        """The state with more points; old ones are never needed, and nothing is read."""
        if chunk is not None:
            checks.positive("chunk", chunk)

        def extended() -> S:
            self._require_own(state)
            self._check(x, y, mask, values=False)
            if x.shape[0] != (batch := state.batch):
                raise ValueError(
                    f"x is a batch of {x.shape[0]}, but the state one of {batch}: they must be the same"
                )
            made = self._extended(state, x, y, mask, chunk)
            if made.fingerprint == NOTHING:  # there was nothing before: these weights have made all of it
                made = self._signed(made)
            return made

        return self._while_verifying(extended, updates=isinstance(x, Tensor) and x.shape[1:2] == (1,))

    def predict(self, memory: M, xt: Float[Tensor, "b m x"], *, chunk: int = 4096) -> Distribution:
        """The predictive distribution at the targets, from what `read` gave."""
        checks.positive("chunk", chunk)
        checks.points("xt", xt, self.dim_x, device=self.device)
        if xt.shape[0] != (batch := batch_of(memory)):
            here = f"xt is a batch of {xt.shape[0]}, but the state one of {batch}"
            raise ValueError(f"{here}: they must be the same (expand one of them)")
        if self.scales is None:
            return self.distribution(*self._decoded(memory, xt, chunk))
        mean, std, *log_weight = self._decoded(memory, self.scales.inputs(xt), chunk)
        return self.distribution(*self.scales.restored(mean, std), *log_weight)

    def query(self, state: S, xt: Float[Tensor, "b m x"], *, chunk: int = 4096) -> Distribution:
        """The predictive distribution at the targets: `predict(read(state), xt)`."""

        def check() -> None:
            self._require_own(state)
            self._check_targets(xt)

        self._while_verifying(check)
        return self.predict(self.read(state), xt, chunk=chunk)

    def forward(
        self,
        xc: Float[Tensor, "b n x"],
        yc: Float[Tensor, "b n y"],
        xt: Float[Tensor, "b m x"],
        mask: Tensor | None = None,
        chunk: int = 4096,
    ) -> Distribution:
        """Condition and query, for training: the deployed path, but for the checks of values."""
        checks.positive("chunk", chunk)
        self._check(xc, yc, mask, values=False)
        checks.points("xt", xt, self.dim_x, device=self.device)
        self.afford(xc.shape[0], xc.shape[1], xt.shape[1])
        state = self._seen(xc, yc, mask, chunk)
        return self.predict(self.read(state), xt, chunk=chunk)

    def loss(
        self,
        xc: Float[Tensor, "b n x"],
        yc: Float[Tensor, "b n y"],
        xt: Float[Tensor, "b m x"],
        yt: Float[Tensor, "b m y"],
        *,
        mask_c: Tensor | None = None,
        mask_t: Tensor | None = None,
        generator: torch.Generator | None = None,
        noise: Tensor | None = None,
    ) -> Float[Tensor, ""]:
        """What training makes small: minus the mean log-likelihood of a point, or the model's bound on it.

        Where a model has scales it is in their units: off by a constant that no gradient sees. Compiled, it
        is one graph, but a generator cannot be part of one: draw `loss_noise` before, and hand it in.

        Args:
            xc, yc, mask_c: the context, and which of it is real; what is masked out may hold anything.
            xt, yt, mask_t: the targets, likewise.
            generator: for models that draw samples; PyTorch's own if None.
            noise: what `loss_noise` has drawn already, instead of a generator.
        """
        for x, y, mask in ((xc, yc, mask_c), (xt, yt, mask_t)):
            self._check(x, y, mask, values=False)
        if xc.shape[0] != xt.shape[0]:
            here = f"the context is a batch of {xc.shape[0]}, the targets one of {xt.shape[0]}"
            raise ValueError(f"{here}: they must be the same")
        self.afford(xc.shape[0], xc.shape[1], xt.shape[1])
        context, targets = self._scaled((xc, yc, mask_c)), self._scaled((xt, yt, mask_t))
        if noise is None:
            noise = self.loss_noise(xc, generator=generator)
        return self._loss(context, targets, noise)

    # Inside

    def _decoded(self, memory: M, xt: Tensor, chunk: int) -> tuple[Tensor, ...]:
        """What `decode` says of any number of targets, in the model's own units."""
        m = xt.shape[1]
        if torch.compiler.is_exporting() or m <= chunk:  # exported for any number of targets
            return self.decode(memory, xt)
        return filled((self.decode(memory, xt[:, i : i + chunk]) for i in range(0, m, chunk)), m)

    def _seen(self, x: Tensor, y: Tensor, mask: Tensor | None, chunk: int) -> S:
        """The state of checked points, `chunk` of them at a time."""
        if x.shape[1] <= chunk:
            return self._merged([self._scaled((x, y, mask))])
        return self._condition(map(self._scaled, slices(x, y, mask, chunk)))

    def _part(self, chunk: Chunk) -> S:
        """The state of a checked chunk, signed."""
        with self._verified():
            part: S = self._signed(self._observe(*chunk, None))
        return part

    def _extended(self, state: S, x: Tensor, y: Tensor, mask: Tensor | None, chunk: int | None) -> S:
        """A state with more points, checked but for their values."""
        self._check_values(x, y, mask, chunk or 4096)
        part = self._seen(x, y, mask, self._chunk() if chunk is None else chunk)
        return state.merge(part.signed(state.fingerprint))  # made by the same weights, as far as is known

    def _condition(self, chunks: Iterable[Chunk]) -> S:
        if not self._learns():
            return self._merged(chunks)
        kept = list(chunks)
        return self._merged(kept) if len(kept) == 1 else self._fold(kept)

    def _merged(self, chunks: Iterable[Chunk]) -> S:
        parts = (self._observe(*chunk, None) for chunk in chunks)
        return reduce(lambda state, part: state.merge(part), parts)


def batch_of(memory: Tensor | tuple[Any, ...]) -> int:
    """The batch of what `read` gave: its first tensor's."""
    while not isinstance(memory, Tensor):
        memory = memory[0]
    return memory.shape[0]

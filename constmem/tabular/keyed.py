"""Streams of one fitted estimator by key, for a `StreamPool`: sums of each stream, and answers from them."""

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from numpy.typing import NDArray
from torch import Tensor
from torch.distributions import Categorical, Distribution, StudentT

from constmem.core import checks
from constmem.core.moments import Moments
from constmem.core.monoid import NOTHING, Monoid
from constmem.streams import Table
from constmem.tabular.answers import Answer, probabilities
from constmem.tabular.forgetting import Forgetting
from constmem.tabular.inputs import extended, frame_of, one_hot
from constmem.tabular.trace import Trace

NUMBERS = 2**22  # of Gram matrices made at once


@dataclass(frozen=True, eq=False)
class Sums(Monoid):
    """`Moments` of many streams, with one triangle of each Gram matrix: merging adds.

    Attributes:
        gram: (b, p (p + 1) / 2) lower triangles of the sums of phi phi', row by row.
        cross: (b, p, k) sums of phi y'.
        square: (b, k) sums of y².
        count: (b,) rows seen.
        fingerprint: of the columns and features.
    """

    AXES: ClassVar[str] = "(features, targets)"
    KIND: ClassVar[str] = "constmem.tabular.sums"

    gram: Float[Tensor, "b q"]
    cross: Float[Tensor, "b p k"]
    square: Float[Tensor, "b k"]
    count: Int[Tensor, " b"]
    fingerprint: str | None = None

    @property
    def layout(self) -> tuple[int, ...]:
        """(features, targets)."""
        return self.cross.shape[-2:]

    def tensors(self) -> dict[str, Tensor]:
        """All it is made of, by name."""
        return {name: getattr(self, name) for name in Moments.NAMES}

    @classmethod
    def _made(cls, tensors: dict[str, Tensor], fingerprint: str | None) -> "Sums":
        return cls(**tensors, fingerprint=fingerprint)

    @classmethod
    def _require(cls, tensors: dict[str, Tensor]) -> None:
        checks.named(tensors, set(Moments.NAMES))
        b, p, k = tensors["cross"].shape
        shapes = (b, p * (p + 1) // 2), (b, p, k), (b, k), (b,)
        if [tuple(tensors[name].shape) for name in Moments.NAMES] != [*shapes]:
            raise ValueError("holds sums whose shapes do not fit")
        if any(tensors[name].dtype != torch.float64 for name in Moments.NAMES[:-1]):
            raise ValueError("holds sums that are not float64")
        if bool((tensors["square"] < 0).any()):
            raise ValueError("holds a negative sum of squares")

    def merge(self, other: "Sums") -> "Sums":
        """The sums of both sets of rows."""
        added = {name: t + other.tensors()[name] for name, t in self.tensors().items()}
        return Sums(**added, fingerprint=self.signature_with(other))

    def moments(self, stream: int) -> Moments:
        """Those of one stream."""
        one = {name: t[stream] for name, t in self.tensors().items()}
        return Moments._made(one | {"count": one["count"].double()}, self.fingerprint)


class EstimatorStreams(Table):
    """Columns, features and units of an estimator that is fitted; streams by key share them.

    Each stream answers as an estimator would that was spawned from this one, has learned the stream's rows
    and is asked for the first time: the precisions are found by those rows alone.
    """

    state_type = Sums

    def __init__(self, estimator: Any) -> None:
        if estimator._new_learner().forgetting != Forgetting():
            raise ValueError(
                f"a pool holds one sum for each stream, and forget={estimator.forget!r} needs more: fit with "
                "forget=None, or hold an estimator for each key"
            )
        self.estimator = estimator.spawn()
        learner = self.estimator.learner_
        if learner.memory.residuals is not None:
            raise ValueError(
                "a pool holds one sum for each stream, and the law of residuals needs more: fit "
                f"{type(estimator).__name__}(pretrained=False), or hold an estimator for each key"
            )
        self.learner, self.features = learner, learner.memory.features
        self.fingerprint: str = learner.fingerprint

    def empty(self, batch: int = 1) -> Sums:
        """Sums of no rows."""
        blank = Moments.empty(self.features.width, len(self.learner.center), batch=(batch,)).tensors()
        return Sums(**blank | {"count": blank["count"].long()}, fingerprint=NOTHING)

    def rows(self, x: Any, y: Any) -> tuple[Tensor, Tensor]:
        """Rows of a table, encoded, and their targets in the units of the sums."""
        frame, targets = self.estimator._given(x, y)[:2]
        if self.learner.discrete:
            order = self.estimator._order
            if len(wider := extended(order, targets)) > len(order):
                raise ValueError(
                    f"y holds the class {wider.tolist()[len(order)]!r}, but the pool's estimator was fitted "
                    f"with {order.tolist()}: fit it with rows of all classes"
                )
            targets = one_hot(targets, order)
        elif targets.shape[1] != len(self.learner.center):
            raise ValueError(
                f"y has {targets.shape[1]} targets, but the pool's estimator was fitted with "
                f"{len(self.learner.center)}"
            )
        return self._encoded(frame), self.learner._inside(targets)

    def update(
        self,
        state: Sums,
        x: Float[Tensor, "b n d"],
        y: Float[Tensor, "b n k"],
        *,
        mask: Bool[Tensor, "b n"] | None = None,
    ) -> Sums:
        """The sums with more rows of each stream."""
        own = torch.ones(x.shape[:2], dtype=torch.bool) if mask is None else mask
        parts = []
        for some in torch.arange(len(x)).split(max(1, NUMBERS // self.features.width**2)):
            real = own[some]
            phi = x.new_zeros(*real.shape, self.features.width)
            phi[real] = self.features(x[some][real])
            parts.append(Moments.observe(phi, y[some], real.double()).tensors())
        made = {name: torch.cat([part[name] for part in parts]) for name in Moments.NAMES}
        return state.merge(Sums(**made | {"count": own.sum(1)}, fingerprint=self.fingerprint))

    def query(self, state: Sums, places: NDArray[np.int64], x: Any) -> Distribution:
        """What streams answer to rows of a table: `places` says which one of the batch each row asks."""
        encoded = self._encoded(frame_of(x))
        if len(encoded) != len(places):
            raise ValueError(f"there are {len(places)} keys, but {len(encoded)} rows: each row needs one")
        order = np.argsort(places, kind="stable")
        starts = np.flatnonzero(np.diff(places[order], prepend=-1))
        found = []
        for rows in np.split(order, starts[1:]):
            phi = self.features(encoded[rows])
            trace = Trace(state.moments(int(places[rows[0]])), self.features, lines=not self.learner.discrete)
            answer = trace.answer(phi, phi[:0], phi.new_zeros(0, state.layout[1]))
            found.append(self._parameters(answer))
        back = torch.from_numpy(np.argsort(order))
        parts: Any = [torch.cat(tensors)[back] for tensors in zip(*found, strict=True)]
        return Categorical(*parts) if self.learner.discrete else StudentT(*parts)

    def _parameters(self, answer: Answer) -> tuple[Tensor, ...]:
        """Of the distribution, in the units of the targets; classes in the order of `classes_`."""
        if self.learner.discrete:
            chances = probabilities(answer.mean, answer.variance)
            return (torch.from_numpy(chances[:, np.argsort(self.estimator._order)]),)
        found = answer.restored(self.learner.center, self.learner.scale).heavier()
        shape = slice(None) if not self.estimator._flat else 0
        mean, spread = (torch.from_numpy(t[:, shape]) for t in (found.mean, found.scale))
        return torch.full_like(mean, found.freedom), mean, spread

    def _encoded(self, frame: Any) -> Tensor:
        return torch.from_numpy(self.learner.columns(frame))

    def _name_of_weights(self) -> str:
        return self.fingerprint

    def _require_own(self, state: Any) -> None:
        if not isinstance(state, Sums) or state.fingerprint not in (NOTHING, self.fingerprint):
            raise ValueError(
                "these states were made with other columns and features: use the estimator that they were "
                "made with, or one spawned from it"
            )

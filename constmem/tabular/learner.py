"""`Learner`: rows in, answers out; columns and features freeze after a warm-up, then only sums grow."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from constmem.tabular.answers import Answer, Shape, Weights
from constmem.tabular.answers import concatenated as joined
from constmem.tabular.columns import Columns, center_and_scale, refuse_infinite
from constmem.tabular.features import SIZE, Features
from constmem.tabular.forgetting import Forgetting, Memory
from constmem.tabular.frames import Frame, aligned, concatenated
from constmem.tabular.precisions import PIECE
from constmem.tabular.residuals import Residuals

ANCHORS = 8192  # rows that features are anchored in, at most
ROWS = 1024  # answered at once
FIRST = 64  # features while there are few rows
ENOUGH = 128  # rows whose targets may shape features; of fewer they would promise too much


class Learner:
    """The one mutable object behind the estimators.

    Args:
        discrete: whether targets are one-hot classes, which are left as they are; numbers are standardised.
        forgetting: how old rows lose weight.
        warmup: rows that are kept until columns and features are frozen by them.
        size: number of features, about.
        seed: of the features that are drawn at random.
        pretrained: whether numbers' distributions take the shape that a pretrained model reads from the
            residuals; else they are Student's t.
    """

    def __init__(
        self,
        *,
        discrete: bool,
        forgetting: Forgetting,
        warmup: int = 1024,
        size: int = SIZE,
        seed: int = 0,
        pretrained: bool = False,
    ) -> None:
        self.pretrained = pretrained
        self.discrete, self.forgetting = discrete, forgetting
        self.warmup, self.size, self.seed = warmup, size, seed
        self.columns: Columns | None = None
        self.center, self.scale = np.zeros(0), np.ones(0)  # of the targets
        self.memory: Memory | None = None
        self._rows: Frame | None = None  # of the warm-up
        self._y = np.zeros((0, 0))
        self._early: tuple[Learner, int, int] | None = None  # made of so many rows, and has seen so many

    @property
    def frozen(self) -> bool:
        """Whether the warm-up is over."""
        return self.columns is not None

    @property
    def seen(self) -> int:
        """Rows learned."""
        return len(self._y) if self.memory is None else self.memory.seen

    @property
    def targets(self) -> int:
        """Numbers predicted for each row."""
        return self._y.shape[1] if self.memory is None else self.memory.targets

    @property
    def warm_up_rows(self) -> tuple[Frame, Any] | None:
        """Rows and targets that are kept until enough are there to freeze by."""
        return None if self._rows is None else (self._rows, self._y)

    @property
    def nbytes(self) -> int:
        """Bytes of all that must be remembered."""
        if self.columns is None or self.memory is None:
            kept = 0 if self._rows is None else self._rows.values.nbytes * (1 + bool(self._rows.others))
            return kept + self._y.nbytes
        return len(self.columns.text()) + self.memory.features.nbytes + self.memory.nbytes

    def freeze(self, frame: Frame, y: Float[np.ndarray, "n k"]) -> None:
        """Fix columns, features and the units of targets by these rows, without learning them."""
        columns = Columns.freeze(frame)
        center, scale = np.zeros(y.shape[1]), np.ones(y.shape[1])
        if not self.discrete:
            center, scale = np.array([center_and_scale(column) for column in y.T]).T
        rows = np.random.default_rng(self.seed).permutation(len(y))[:ANCHORS]
        rows.sort()
        x = torch.from_numpy(columns(frame.at(rows)))
        targets = torch.from_numpy((y[rows] - center) / scale) if len(rows) >= ENOUGH else None
        anchored = Features.anchor(x, targets, seed=self.seed, size=self.size)
        residuals = None
        if targets is not None and self.pretrained and not self.discrete and self.forgetting == Forgetting():
            residuals = Residuals.freeze(anchored, x, targets)
        self.start(columns, anchored, center, scale, residuals)

    def start(
        self, columns: Columns, features: Features, center: Any, scale: Any, more: Residuals | None = None
    ) -> None:
        """Begin with what was frozen elsewhere, and no rows."""
        self.columns, self.center, self.scale = columns, center, scale
        settings = self.forgetting, self.discrete, more
        self.memory = Memory(features, columns.width, len(center), *settings)
        self._rows, self._y, self._early = None, np.zeros((0, len(center))), None

    def spawn(self) -> "Learner":
        """An empty learner with the same columns and features, whose state can be merged with this one's."""
        made = self._blank()
        if self.columns is None or self.memory is None:
            raise ValueError(
                f"columns and features are frozen after {self.warmup} rows, but {self.seen} have been seen: "
                "learn some more rows first, or fit, and spawn then"
            )
        made.start(self.columns, self.memory.features, self.center, self.scale, self.memory.no_residuals)
        return made

    def _blank(self, size: int | None = None) -> "Learner":
        return Learner(
            discrete=self.discrete, forgetting=self.forgetting, warmup=self.warmup, size=size or self.size,
            seed=self.seed, pretrained=self.pretrained,
        )  # fmt: skip

    def learn(self, frame: Frame, y: Float[np.ndarray, "n k"]) -> None:
        """Take rows and their targets; nothing is taken where anything is wrong."""
        if self.columns is None:
            frame, y = self._warm_up(frame, y)
        else:
            frame = self.columns.matched(frame)
        if self.columns is None or self.memory is None:
            return
        for start in range(0, len(y), PIECE):
            rows = frame.rows(start, start + PIECE)
            self.memory.learn(
                torch.from_numpy(self.columns.numbers(rows)), self._inside(y[start : start + PIECE])
            )

    def _warm_up(self, frame: Frame, y: Any) -> tuple[Frame, Any]:
        """Keep rows until there are enough to freeze by, and return those beyond."""
        refuse_infinite(frame)
        if self._rows is not None:
            frame = aligned(frame, self._rows.names, len(self._rows.kinds))
        room = self.warmup - len(self._y)
        first = frame.rows(0, room)
        self._rows = first if self._rows is None else concatenated(self._rows, first)
        self._y = np.concatenate([self._y.reshape(-1, y.shape[1]), y[:room]])
        if len(self._y) == self.warmup:
            rows, targets = self._rows, self._y
            self.freeze(rows, targets)
            self.learn(rows, targets)
        return frame.rows(room, len(y)), y[room:]

    def _inside(self, y: Any) -> Tensor:
        """Targets in the units of the moments."""
        return torch.from_numpy(np.ascontiguousarray((y - self.center) / self.scale, np.float64))

    def answers(self, frame: Frame) -> tuple[list[Answer | Shape], Weights]:
        """Answers of every horizon, and by residuals, in the units of the targets; and their shares."""
        if self.columns is None or self.memory is None:
            return self._early_learner().answers(frame)
        frame = self.columns.matched(frame)
        memory = self.memory
        parts = [
            memory.all_answers(torch.from_numpy(self.columns.numbers(frame.rows(start, start + ROWS))))
            for start in range(0, len(frame), ROWS)
        ]
        made = [joined(pieces) for pieces in zip(*parts, strict=True)]
        if not self.discrete and self.seen == len(memory.features.points) == 1:  # says nothing of the spread
            made = [replace(a, variance=np.maximum(a.variance, 1.0)) for a in made]
        made = [a.restored(self.center, self.scale) for a in made]
        heavy = [a if self.discrete or isinstance(a, Shape) else a.heavier() for a in made]
        return heavy, memory.all_weights

    def means(self, frame: Frame) -> Float[np.ndarray, "n k"]:
        """The means of the answers alone, mixed: far cheaper."""
        if self.columns is None or self.memory is None:
            return self._early_learner().means(frame)
        frame = self.columns.matched(frame)
        parts = []
        for start in range(0, len(frame), ROWS):
            x = torch.from_numpy(self.columns.numbers(frame.rows(start, start + ROWS)))
            means = np.stack([mean.numpy() for mean in self.memory.means(x)])
            parts.append(np.tensordot(self.memory.weights, means, 1))
        return np.concatenate(parts) * self.scale + self.center

    def _early_learner(self) -> "Learner":
        """A learner of the rows kept so far, made anew whenever there are twice as many."""
        if self._rows is None:
            raise ValueError("nothing was learned yet: give rows first")
        now = len(self._y)
        made, first, known = self._early or (self, 0, 0)
        if now >= 2 * first:
            made, first, known = self._blank(min(self.size, max(FIRST, 4 * now))), now, 0
            made.freeze(self._rows, self._y)
        if known < now:
            made.learn(self._rows.rows(known, now), self._y[known:])
        self._early = made, first, now
        return made

    def arrange(self, places: Sequence[int], targets: int) -> None:
        """Move the classes to these places among more of them, which no row so far had."""
        y, self._early = np.zeros((len(self._y), targets)), None
        y[:, list(places)] = self._y
        self._y = y
        if self.memory is not None:
            self.center, self.scale = np.zeros(targets), np.ones(targets)
            self.memory.arrange(places, targets)

    def take_columns(self, names: tuple[str, ...]) -> None:
        """During the warm-up, take more columns, or another order; rows so far have no values in new ones."""
        rows = self._rows
        if rows is None or rows.names is None:
            return
        place = {name: i for i, name in enumerate(rows.names)}
        blank = np.full((len(rows), 1), np.nan)
        wider = Frame(None, (*rows.kinds, "empty"), np.hstack([rows.values, blank]), rows.others)
        order = wider.ordered([place.get(name, len(place)) for name in names])
        self._rows, self._early = replace(order, names=names), None

    def merge(self, other: "Learner") -> None:
        """Take what another learner has seen; one of them may still be warming up, or both."""
        if other._rows is not None:
            self.learn(other._rows, other._y)
            return
        if other.memory is None:
            return
        if self.memory is None:
            rows, y = self._rows, self._y
            assert other.columns is not None
            if rows is not None:
                other.columns.matched(rows)
            frozen = other.memory.features, other.center, other.scale, other.memory.no_residuals
            self.start(other.columns, *frozen)
            if rows is not None:
                self.learn(rows, y)
        self.refuse_unlike(other)
        assert self.memory is not None
        self.memory.merge(other.memory)

    def refuse_unlike(self, other: "Learner") -> None:
        """Refuse a learner whose state cannot be merged with this one's."""
        if self.frozen and other.frozen and self.fingerprint != other.fingerprint:
            raise ValueError(
                "these two have frozen different columns, features or forgetting (or one has lost its law of "
                "residuals), so their sums do not add up: freeze once, and give every shard base.spawn()"
            )

    def remove(self, frame: Frame, y: Float[np.ndarray, "n k"]) -> None:
        """Undo having learned rows."""
        if self.columns is None or self.memory is None:
            raise ValueError(
                f"rows can be removed once the warm-up of {self.warmup} rows is over; {self.seen} were seen"
            )
        if len(y) > self.seen:
            raise ValueError(
                f"{len(y)} rows cannot be removed from {self.seen}: remove only what was learned"
            )
        self.memory.remove(torch.from_numpy(self.columns(frame)), self._inside(y))

    @property
    def fingerprint(self) -> str:
        """The same for learners whose states can be merged."""
        if self.columns is None or self.memory is None:
            return ""
        made = hashlib.sha256(self.columns.text().encode())
        for name, tensor in self.memory.frozen():
            made.update(name.encode() + tensor.contiguous().numpy().tobytes())
        about = [self.discrete, repr(self.forgetting)]
        if not self.discrete:
            about += [self.center.tolist(), self.scale.tolist()]
        made.update(json.dumps(about).encode())
        return made.hexdigest()

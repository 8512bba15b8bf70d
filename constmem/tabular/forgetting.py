"""`Memory`: the moments of a stream at one horizon or several, mixed by how well each predicted lately."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import inf, isfinite
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor

from constmem.core.moments import Moments
from constmem.tabular.answers import Answer, Shape
from constmem.tabular.evidence import Echo, arranged
from constmem.tabular.features import Features
from constmem.tabular.precisions import PIECE, RECENT
from constmem.tabular.residuals import Residuals
from constmem.tabular.trace import Asked, Trace, answered

HORIZONS = (100.0, 1000.0, inf)  # half-lives that "auto" mixes
ECHOES = (10.0, 30.0)  # and those so short that their rows are kept
LATELY = 100.0  # half-life of the scores it mixes them by, in rows
JUDGED = 256  # rows predicted, then folded, where horizons compete
TRUST = 0.8  # in the law of residuals; the rest stays with heavy tails around the mean
WORST = 8.0  # nats a row: one surprise does not decide


@dataclass(frozen=True)
class Forgetting:
    """How old rows lose their weight: half-lives of the copies that are kept, or a window of rows."""

    half_lives: tuple[float, ...] = (inf,)
    echoes: tuple[float, ...] = ()
    window: int | None = None

    @staticmethod
    def of(forget: Any) -> "Forgetting":
        """What `forget=` means: None, a half-life in rows, "window:ROWS" or "auto"."""
        if forget is None:
            return Forgetting()
        if forget == "auto":
            return Forgetting(HORIZONS, ECHOES)
        if isinstance(forget, str) and forget.startswith("window:"):
            rows = forget.removeprefix("window:")
            if rows.isdecimal() and int(rows) >= 1:
                return Forgetting(window=int(rows))
        number = isinstance(forget, int | float | np.number) and not isinstance(forget, bool)
        if number and isfinite(forget) and forget > 0:
            return Forgetting((float(forget),))
        raise ValueError(
            f"forget={forget!r} is none of: None (nothing is forgotten), a number above 0 (rows after which "
            'a row counts half), "window:1000" (only the last 1000 rows count), "auto" (several half-lives, '
            "mixed by how well each predicted lately)"
        )


class Memory:
    """All that is remembered of rows, but for how they were encoded.

    Args:
        features: of encoded rows.
        width: of an encoded row.
        targets: numbers to predict.
        discrete: whether targets are one-hot classes. Horizons are mixed by the likelihood of targets; a law
            that is linear in the columns is no law of classes.
        residuals: of no rows; None: nothing is learned of residuals.
    """

    def __init__(
        self,
        features: Features,
        width: int,
        targets: int,
        forgetting: Forgetting,
        discrete: bool = False,
        residuals: Residuals | None = None,
    ) -> None:
        self.residuals, self._shown = residuals, 0  # and of the rows that wait, how many it has seen
        self.features, self.forgetting = features, forgetting
        self._likelihood = Answer.log_probability if discrete else Answer.heavy_log_density
        empty = Moments.empty(features.width, targets)
        traces = [
            Trace(empty, features, half_life=half_life, window=forgetting.window, lines=not discrete)
            for half_life in forgetting.half_lives
        ]
        frozen = traces[0].base, features, features.groups
        echoes = [Echo(*frozen, targets, width, half_life=half_life) for half_life in forgetting.echoes]
        self.traces: list[Trace | Echo] = [*traces, *echoes]
        self.scores = np.zeros(len(self.traces))
        self.seen = 0
        self._x, self._y = (torch.zeros(RECENT, n, dtype=torch.float64) for n in (width, targets))
        self._phi = torch.empty(RECENT, features.width, dtype=torch.float64)  # of the rows that wait
        self._known = self._waiting = 0  # rows whose features are there, and rows that wait
        self._last: tuple[Tensor, Tensor, list[Answer]] | None = None  # asked: often what is learned next
        self._folded = [0] * len(self.traces)  # of the rows that wait, how many a trace has folded already

    @property
    def targets(self) -> int:
        """Numbers predicted for each row."""
        return self._y.shape[1]

    @property
    def nbytes(self) -> int:
        """Bytes remembered."""
        more = 0 if self.residuals is None else self.residuals.nbytes
        return sum(trace.nbytes for trace in self.traces) + self._x.nbytes + self._y.nbytes + more

    @property
    def weights(self) -> NDArray[np.float64]:
        """Shares of the horizons in answers."""
        shares = np.exp(self.scores - self.scores.max())
        return np.asarray(shares / shares.sum())

    def learn(self, x: Float[Tensor, "n d"], y: Float[Tensor, "n k"]) -> None:
        """Take rows, the oldest first; how calls cut them changes no moments, but for rounding."""
        size = PIECE if len(self.traces) == 1 else JUDGED
        for rows, targets in zip(x.split(size), y.split(size), strict=True):
            if len(self.traces) > 1 and self.seen:
                self._judge(rows, targets)
            if len(rows) > RECENT // 2 or self._waiting + len(rows) > RECENT:
                self.fold()  # older rows first
            if len(rows) > RECENT // 2:
                phi = self.features(rows)
                for trace in self.traces:
                    trace.fold(rows, phi, targets)
                if self.residuals is not None:
                    self.residuals = self.residuals.learn(self.features, rows, phi, targets)
            else:
                self._wait(rows, targets)
            self._last = None
            self.seen += len(rows)

    def _wait(self, x: Tensor, y: Tensor) -> None:
        now = self._waiting + len(x)
        self._x[self._waiting : now], self._y[self._waiting : now] = x, y
        if self._known == self._waiting and self._last is not None and torch.equal(self._last[0], x):
            self._phi[self._known : now], self._known = self._last[1], now
        self._waiting = now
        for i, trace in enumerate(self.traces):
            if now - self._folded[i] >= trace.limit:
                self._fold_one(i)
        if min(self._folded) == now:
            self._clear()

    def fold(self) -> None:
        """Take all rows that wait into the moments."""
        if self._waiting:
            for i in range(len(self.traces)):
                self._fold_one(i)
            self._clear()

    def _fold_one(self, i: int) -> None:
        rows = slice(self._folded[i], self._waiting)
        if rows.start < rows.stop:
            self.traces[i].fold(self._x[rows], self._features_of_waiting()[rows], self._y[rows])
        self._folded[i] = self._waiting

    def show(self) -> None:
        """Let the residuals' model see the rows that wait, too."""
        rows = slice(self._shown, self._waiting)
        if self.residuals is not None and rows.start < rows.stop:
            phi = self._features_of_waiting()[rows]
            self.residuals = self.residuals.learn(self.features, self._x[rows], phi, self._y[rows])
            self._shown = self._waiting

    def _clear(self) -> None:
        self.show()
        self._shown = 0
        self._waiting, self._known, self._folded = 0, 0, [0] * len(self.traces)

    def _features_of_waiting(self) -> Tensor:
        if self._known < self._waiting:
            rows = slice(self._known, self._waiting)
            self._phi[rows], self._known = self.features(self._x[rows]), self._waiting
        return self._phi[: self._waiting]

    def answers(self, x: Float[Tensor, "n d"]) -> list[Answer]:
        """One answer for each horizon."""
        if self._last is not None and torch.equal(self._last[0], x):
            return self._last[2]
        asked = [*self._asked()]
        if len(x) > RECENT:
            self._last = None
            return answered(self.features, asked, x)
        phi = self.features(x)
        found = [trace.answer(phi, recent, y) for trace, recent, y in asked]
        self._last = x, phi, found
        return found

    def frozen(self) -> list[tuple[str, Tensor]]:
        """What must be the same for memories to merge, by name."""
        more = {} if self.residuals is None else self.residuals.frozen()
        return [*sorted(self.features.tensors().items()), *more.items()]

    def all_answers(self, x: Float[Tensor, "n d"]) -> list[Answer | Shape]:
        """Answers of each horizon, and of the residuals where their law is known."""
        self.show()
        found = self.answers(x)
        if self.residuals is None:
            return [*found]
        return [*found, self.residuals.shape(self.features, x, found[0])]

    @property
    def all_weights(self) -> NDArray[np.float64]:
        """Shares of all answers."""
        return self.weights if self.residuals is None else np.array([1 - TRUST, TRUST])

    @property
    def no_residuals(self) -> Residuals | None:
        """What is frozen of the residuals, of no rows."""
        return None if self.residuals is None else self.residuals.empty()

    def means(self, x: Float[Tensor, "n d"]) -> list[Tensor]:
        """The means of each horizon's answer alone: far cheaper."""
        return self.features.predict(x, [trace.weights(recent, y) for trace, recent, y in self._asked()])

    def _asked(self) -> Iterator[Asked]:
        """Each trace, and the rows that it has still to fold."""
        for i, trace in enumerate(self.traces):
            if trace.searches:  # of all rows, so that it does not matter which of them wait
                self._fold_one(i)
        recent, y = self._features_of_waiting(), self._y[: self._waiting]
        for trace, done in zip(self.traces, self._folded, strict=True):
            yield trace, recent[done:], y[done:]

    def _judge(self, x: Tensor, y: Tensor) -> None:
        """Score every horizon by what it would have said of rows that are about to be learned."""
        said = np.stack([self._likelihood(answer, y.numpy()) for answer in self.answers(x)])
        said = np.maximum(said - said.max(0), -WORST)
        age = np.arange(len(x) - 1, -1, -1)
        self.scores = self.scores * 0.5 ** (len(x) / LATELY) + said @ 0.5 ** (age / LATELY)

    def arrange(self, places: Sequence[int], targets: int) -> None:
        """Move the targets to these places among more of them, which were zero in all rows so far."""
        self._y, self._last = arranged(self._y, places, targets), None
        for trace in self.traces:
            trace.arrange(places, targets)

    def merge(self, other: "Memory") -> None:
        """Take what another memory of the same features has seen."""
        if self.forgetting.window is not None:
            raise ValueError(
                "windows of two streams cannot be merged: nobody knows which rows came first; use a half-life"
            )
        self.fold()
        other.fold()
        total = max(self.seen + other.seen, 1)
        self.scores = (self.scores * self.seen + other.scores * other.seen) / total
        self.seen, self._last = self.seen + other.seen, None
        for mine, its in zip(self.traces, other.traces, strict=True):
            mine.merge(its)  # type: ignore[arg-type]
        if self.residuals is not None and other.residuals is not None:
            self.residuals = self.residuals.merge(other.residuals)

    def remove(self, x: Float[Tensor, "n d"], y: Float[Tensor, "n k"]) -> None:
        """Undo having learned these rows."""
        if self.forgetting != Forgetting():
            raise ValueError("rows that lose weight with time cannot be removed exactly: use forget=None")
        self.fold()
        (trace,) = self.traces
        assert isinstance(trace, Trace)
        phi = self.features(x)
        left = trace.moments.remove(Moments.observe(phi, y))
        if self.residuals is not None:
            self.residuals = self.residuals.without(self.features, x, phi, y)
        trace.moments = left
        trace.forget_answers()
        self.seen, self._last = self.seen - len(x), None

    def tensors(self) -> dict[str, Tensor]:
        """All that is remembered but residuals, by name."""
        self.fold()
        made = {"scores": torch.from_numpy(self.scores.copy()), "seen": torch.tensor(self.seen)}
        for i, trace in enumerate(self.traces):
            made |= {f"{i}.{name}": tensor for name, tensor in trace.tensors().items()}
        return made

    def restore(self, tensors: dict[str, Tensor]) -> None:
        """Take what `tensors` gave in place of all that is remembered."""
        for name, blank in self.tensors().items():
            found = tensors[name]
            if name == "scores" and len(found) != len(blank):
                raise ValueError(f"holds {len(found)} scores of {len(blank)} horizons")
            if found.ndim != blank.ndim or found.shape[1:] != blank.shape[1:] or found.dtype != blank.dtype:
                raise ValueError(f"holds a {name} that does not fit: {tuple(found.shape)} {found.dtype}")
        for i, trace in enumerate(self.traces):
            start = f"{i}."
            trace.restore({n.removeprefix(start): t for n, t in tensors.items() if n.startswith(start)})
        self.scores, self.seen, self._last = tensors["scores"].numpy().copy(), int(tensors["seen"]), None
        self._y = torch.zeros(RECENT, tensors["0.cross"].shape[-1], dtype=torch.float64)

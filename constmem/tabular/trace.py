"""`Trace`: moments that forget at one rate, and answers that hold for rows not yet folded into them, too."""

from collections import deque
from collections.abc import Sequence
from functools import reduce
from math import inf, isinf

import torch
from jaxtyping import Float
from torch import Tensor

from constmem.core.moments import Moments
from constmem.tabular.answers import Answer, concatenated
from constmem.tabular.evidence import Echo, Posterior, arranged, at, posterior
from constmem.tabular.features import PIECE, Features
from constmem.tabular.kernel import shares, side_by_side
from constmem.tabular.precisions import RECENT, hold

ASKED = 256  # rows answered at once
LONG = 16.0  # half-lives that count as rows seen, at most: what fades is searched again for ever
LEAST = 1e-6  # of the noise: a variance is never less, whatever rounding says


class Trace:
    """One copy of the moments, and what it answers.

    Rows wait outside, and are folded in together. Until then answers correct the posterior for them: with
    covariance S of the weights, and rows R, S - S R' (I + R S R')⁻¹ R S. This is exact, but that between two
    folds a half-life or a window does not yet forget.

    Args:
        half_life: rows after which a row counts half.
        window: rows that count at all; those are kept, to be removed exactly.
        lines: whether a law that is linear in the columns may win.
    """

    def __init__(
        self, moments: Moments, features: Features, *, half_life: float = inf, window: int | None = None,
        lines: bool = True,
    ) -> None:  # fmt: skip
        self.moments, self.features, self.lines = moments, features, lines
        self.half_life, self.window = half_life, window
        self.held: deque[tuple[Tensor, Tensor]] = deque()
        self._removed = 0
        self._posterior: Posterior | None = None
        self._precisions: dict[str, float] | None = None
        self._searched, self._since = 0.0, 0
        self._noise: tuple[Tensor, float] | None = None  # variance and freedom, where no search is due
        self._correction = _Correction(moments.width)
        self._asked: tuple[Tensor, Tensor] | None = None  # features of rows, whitened: often learned next

    @property
    def limit(self) -> int:
        """How many rows may wait."""
        memory = self.half_life / 4 if self.window is None else self.window / 8
        return int(max(1, min(RECENT, memory)))

    @property
    def searches(self) -> bool:
        """Whether the next answer begins with a search of precisions."""
        return self._posterior is None and (self._noise is None or self._precisions is None)

    @property
    def nbytes(self) -> int:
        """Bytes remembered: moments, and the rows of a window."""
        return self.moments.nbytes + sum(x.nbytes + y.nbytes for x, y in self.held)

    def fold(self, x: Float[Tensor, "n d"], phi: Float[Tensor, "n p"], y: Float[Tensor, "n k"]) -> None:
        """Take rows into the moments, the oldest first."""
        n, weight, noise, state = len(y), None, None, self.moments
        self._since += n
        if self._posterior is not None and hold(n, self._since, self._searched):
            self._extend(self._posterior, phi, y)
            noise = self._correction.noise(self._posterior, self.half_life)
        if not isinf(self.half_life):
            factor = 0.5 ** (1 / self.half_life)
            weight = factor ** torch.arange(n - 1, -1, -1, dtype=torch.float64)
            state = state.decay(max(factor**n, 1e-300))
        sums = side_by_side(
            lambda s: Moments.observe(phi[s], y[s], None if weight is None else weight[s]),
            shares(n, least=PIECE),
        )
        self.moments = reduce(Moments.merge, sums, state)
        if self.window is not None:
            self.held.append((x.clone(), y.clone()))
            self._slide(self.window)
        self.forget_answers()
        self._noise = noise

    def _slide(self, window: int) -> None:
        """Remove the rows that have left the window; now and then sum what is left anew, without rounding."""
        excess = sum(len(y) for _, y in self.held) - window
        gone = []
        while excess > 0:
            x, y = self.held.popleft()
            gone.append((x[:excess], y[:excess]))
            if len(y) > excess:
                self.held.appendleft((x[excess:], y[excess:]))
            excess -= len(y)
        self._removed += sum(len(y) for _, y in gone)
        anew = self._removed > max(window, RECENT)
        if gone and not anew:
            x, y = (torch.cat(parts) for parts in zip(*gone, strict=True))
            try:
                self.moments = self.moments.remove(Moments.observe(self.features(x), y))
            except ValueError:  # so few rows are left that rounding shows
                anew = True
        if anew:
            self._removed, self.moments = 0, Moments.empty(self.moments.width, self.moments.targets)
            for x, y in self.held:
                self.moments = self.moments.merge(Moments.observe(self.features(x), y))

    def arrange(self, places: Sequence[int], targets: int) -> None:
        """Move the targets to these places among more of them, which were zero in all rows so far."""
        old = self.moments
        more = arranged(old.cross, places, targets), arranged(old.square, places, targets)
        self.moments = Moments(old.gram, *more, old.count)
        self.held = deque((x, arranged(y, places, targets)) for x, y in self.held)
        self.forget_answers()

    def merge(self, other: "Trace") -> None:
        """Take what another trace of the same features has seen."""
        self.moments = self.moments.merge(other.moments)
        self.forget_answers(search=True)

    def forget_answers(self, *, search: bool = False) -> None:
        """Make the posterior anew when next asked, and with `search` its precisions from scratch, too."""
        self._posterior = self._noise = None
        if search:
            self._precisions = None

    def answer(
        self, phi: Float[Tensor, "n p"], recent: Float[Tensor, "r p"], y: Float[Tensor, "r k"]
    ) -> Answer:
        """The answer to rows, given the moments and rows that wait."""
        base, noise, freedom = self._corrected(recent, y)
        whitened = base.whitened(phi)
        leverage = base.leverage(phi, whitened)
        if not len(y):
            mean = base.mean(phi)
        else:
            shift, less = self._correction.apply(whitened)
            leverage = (leverage - less) * 2.0 ** (len(y) / self.half_life)
            exact = whitened.dtype == torch.float64
            mean = base.mean(phi) + shift if exact else phi @ self.weights(recent, y)
        self._asked = (phi, whitened) if len(phi) <= RECENT else None
        variance = noise * (1 + leverage).clamp(min=LEAST)[:, None]
        return Answer(mean.numpy(), variance.numpy(), freedom)

    def weights(self, recent: Float[Tensor, "r p"], y: Float[Tensor, "r k"]) -> Float[Tensor, "p k"]:
        """The weights whose products with features are the means of answers."""
        base, *_ = self._corrected(recent, y)
        return base.weights + self._correction.weights(base) if len(y) else base.weights

    def _corrected(self, recent: Tensor, y: Tensor) -> tuple[Posterior, Tensor, float]:
        """The posterior, and variance and freedom of the noise, given the rows that wait, too."""
        base = self.base()
        if not len(y):
            return base, base.noise, base.freedom
        self._extend(base, recent, y)
        return base, *self._correction.noise(base, self.half_life)

    def _extend(self, base: Posterior, phi: Tensor, y: Tensor) -> None:
        """Have the correction know these rows; one that has just been asked for is not whitened again."""
        new = slice(self._correction.count, len(y))
        if new.start < new.stop:
            phi, known = phi[new], self._asked
            whitened = known[1] if known and torch.equal(known[0], phi) else base.whitened(phi)
            self._correction.extend(y[new] - base.mean(phi), whitened, self.half_life)

    def base(self) -> Posterior:
        """The posterior of the moments; its precisions are searched again when many more rows have come."""
        if self._posterior is None:
            if self._noise and self._precisions:
                found = at(self.moments, self.features.groups, self._precisions, *self._noise)
            else:
                fitted = self.features.fitted if self.lines else None
                found = posterior(self.moments, self.features.groups, self._precisions, fitted=fitted)
                seen = max(float(self.moments.count), self._searched + self._since)
                self._searched, self._since = min(seen, LONG * self.half_life), 0
            self._posterior, self._precisions = found, found.precisions
            self._correction, self._asked = _Correction(self.moments.width), None
        return self._posterior

    def tensors(self) -> dict[str, Tensor]:
        """All that is remembered, and the precisions last found, by name."""
        found = self._precisions or {}
        made = {**self.moments.tensors(), "precisions": torch.tensor([*found.values()], dtype=torch.float64)}
        made["searched"] = torch.tensor([self._searched, self._since], dtype=torch.float64)
        known = self._noise if (last := self._posterior) is None else (last.noise, last.freedom)
        if known is not None:
            made["noise"], made["freedom"] = known[0], torch.tensor(known[1], dtype=torch.float64)
        if self.held:
            made["x"], made["y"] = (torch.cat(parts) for parts in zip(*self.held, strict=True))
        return made

    def restore(self, tensors: dict[str, Tensor]) -> None:
        """Take what `tensors` gave in place of what is remembered."""
        moments = Moments.of_tensors({name: tensors[name] for name in ("gram", "cross", "square", "count")})
        if moments.width != self.moments.width:
            raise ValueError(f"holds moments of {moments.width} features, not {self.moments.width}")
        self.moments = moments
        found = tensors["precisions"].tolist()
        self._precisions = dict(zip(self.features.groups, found, strict=True)) if found else None
        searched, since = tensors["searched"].tolist()
        self._searched, self._since = searched, int(since)
        self.held = deque([(tensors["x"], tensors["y"])] if "x" in tensors else [])
        self.forget_answers()
        if "noise" in tensors:
            self._noise = tensors["noise"], float(tensors["freedom"])


class _Correction:
    """What rows that wait change about the answers of a posterior; grows row by row.

    With whitened rows R, errors e of the posterior's means and the Cholesky factor L of I + R R': L⁻¹ R and
    L⁻¹ e, which is all that answers need.
    """

    def __init__(self, width: int) -> None:
        self.count = 0
        self.rows = torch.empty(RECENT, width, dtype=torch.float64)
        self.errors = torch.zeros(RECENT, 0, dtype=torch.float64)
        self._weights: tuple[int, Tensor] | None = None  # changed by so many rows
        self._noise: tuple[int, tuple[Tensor, float]] | None = None  # known of so many rows

    def extend(self, errors: Float[Tensor, "q k"], whitened: Float[Tensor, "q p"], half_life: float) -> None:
        """Take more rows; later ones count more."""
        had, now = self.count, self.count + len(errors)
        rise = 2.0 ** (torch.arange(had + 1, now + 1, dtype=torch.float64) / (2 * half_life))[:, None]
        if not had:
            self.errors = torch.empty(RECENT, errors.shape[1], dtype=torch.float64)
        new, error = whitened * rise, errors * rise
        across = new @ self.rows[:had].mT  # (q, had)
        inner = torch.eye(now - had, dtype=torch.float64) + new @ new.mT - across @ across.mT
        left = torch.cat([new - across @ self.rows[:had], error - across @ self.errors[:had]], 1)
        solved = torch.linalg.solve_triangular(torch.linalg.cholesky(inner), left, upper=False)
        self.rows[had:now], self.errors[had:now] = solved.split([new.shape[1], error.shape[1]], 1)
        self.count = now

    def noise(self, base: Posterior, half_life: float) -> tuple[Tensor, float]:
        """Variance of the noise and degrees of freedom, given the rows, too."""
        if self._noise is not None and self._noise[0] == self.count:
            return self._noise[1]
        rises = 2.0 ** (torch.arange(1, self.count + 1, dtype=torch.float64) / half_life)
        shape = base.freedom / 2
        more = shape + float(rises.sum()) / 2
        noise = (base.noise * shape + self.errors[: self.count].square().sum(0) / 2) / more
        self._noise = self.count, (noise, 2 * more * 0.5 ** (self.count / half_life))
        return self._noise[1]

    def apply(self, whitened: Float[Tensor, "n p"]) -> tuple[Tensor, Tensor]:
        """Change of the mean, (n, k), and reduction of the leverage, (n,), of whitened rows."""
        across = (whitened @ self.rows[: self.count].to(whitened.dtype).mT).double()
        return across @ self.errors[: self.count], torch.linalg.vecdot(across, across)

    def weights(self, base: Posterior) -> Float[Tensor, "p k"]:
        """Change of the weights."""
        if self._weights is None or self._weights[0] != self.count:
            change = self.rows[: self.count].mT @ self.errors[: self.count]
            self._weights = self.count, torch.linalg.solve_triangular(base.factor.mT, change, upper=True)
        return self._weights[1]


Asked = tuple[Trace | Echo, Tensor, Tensor]  # and the features and targets of rows that wait


def answered(features: Features, asked: Sequence[Asked], x: Float[Tensor, "n d"]) -> list[Answer]:
    """Answers to many rows, piece by piece, so that a piece's features are not sent to memory and back."""
    for trace, recent, y in asked:
        trace.weights(recent, y)  # makes what all pieces need, before they are answered side by side

    def answers(rows: Tensor) -> list[Answer]:
        phi = features(rows)
        return [trace.answer(phi, recent, y) for trace, recent, y in asked]

    pieces = side_by_side(answers, x.chunk(-(-len(x) // ASKED)))
    return [concatenated(horizon) for horizon in zip(*pieces, strict=True)]

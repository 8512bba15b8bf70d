"""`Echo`: the last few rows, where a half-life is so short that they are fewer than the features."""

import torch
from jaxtyping import Float
from torch import Tensor

from constmem.tabular.answers import Answer
from constmem.tabular.trace import Trace, padded

LIVES = 8  # half-lives after which a row counts for nothing


class Echo:
    """Rows that lose weight fast, kept as they are; the same posterior as a `Trace`'s, written with kernels.

    With rows R of features, weights W, and precisions P of the features: K = R P⁻¹ R', and the answer to a
    row f is k' (K + W⁻¹)⁻¹ y with k = R P⁻¹ f. A few rows cannot tell the precisions: they are those of a
    trace with a longer memory, whose noise counts as one row's.
    """

    def __init__(self, elder: Trace, targets: int, width: int, *, half_life: float) -> None:
        self.elder, self.half_life = elder, half_life
        self.x = torch.zeros(0, width, dtype=torch.float64)
        self.y = torch.zeros(0, targets, dtype=torch.float64)
        room = 2 * int(LIVES * half_life)  # of rows and their kernel: new ones are added behind the old
        self._buffer = torch.zeros(room, elder.features.width, dtype=torch.float64)
        self._inner = torch.zeros(room, room, dtype=torch.float64)
        self._stop = self._kept = 0
        self._precisions: Tensor | None = None  # that the kernel was made with

    limit = 1
    searches = False

    @property
    def nbytes(self) -> int:
        """Bytes remembered."""
        rows = int(LIVES * self.half_life)
        return rows * 8 * (self.x.shape[1] + self.y.shape[1])

    def fold(self, x: Float[Tensor, "n d"], phi: Float[Tensor, "n p"], y: Float[Tensor, "n k"]) -> None:
        """Take rows, and drop those that are too old."""
        keep = int(LIVES * self.half_life)
        self.x, self.y = (torch.cat([old, new])[-keep:] for old, new in ((self.x, x), (self.y, y)))
        phi, kept = phi[-keep:], min(self._kept, keep - len(phi[-keep:]))
        if self._stop + len(phi) > len(self._buffer):  # now and then: what is kept moves to the front
            old = slice(self._stop - kept, self._stop)
            self._buffer[:kept] = self._buffer[old].clone()
            self._inner[:kept, :kept] = self._inner[old, old].clone()
            self._stop = kept
        new = slice(self._stop, self._stop + len(phi))
        self._buffer[new], self._stop, self._kept = phi, new.stop, kept + len(phi)
        if self._precisions is not None:
            across = (phi / self._precisions) @ self._phi.mT  # (new, rows)
            rows = self._rows
            self._inner[new, rows], self._inner[rows, new] = across, across.mT

    @property
    def _rows(self) -> slice:
        return slice(self._stop - self._kept, self._stop)

    @property
    def _phi(self) -> Tensor:
        return self._buffer[self._rows]

    def answer(
        self, phi: Float[Tensor, "n p"], recent: Float[Tensor, "r p"], y: Float[Tensor, "r k"]
    ) -> Answer:
        """The answer to rows; none wait."""
        assert not len(recent)
        assert not len(y)
        precisions, factor, white, weight = self._solved()
        scaled = phi / precisions
        across = torch.linalg.solve_triangular(factor, self._phi @ scaled.mT, upper=False)
        leverage = (scaled * phi).sum(1) - across.square().sum(0)
        freedom = 1.0 + float(weight.sum())
        noise = (self.elder.base().noise + white.square().sum(0)) / freedom
        variance = noise * (1 + leverage.clamp(min=0.0)[:, None])
        return Answer((across.mT @ white).numpy(), variance.numpy(), freedom)

    def weights(self, recent: Float[Tensor, "r p"], y: Float[Tensor, "r k"]) -> Float[Tensor, "p k"]:
        """The weights whose products with features are the means of answers; no rows wait."""
        assert not len(recent)
        assert not len(y)
        precisions, factor, white, _ = self._solved()
        made: Tensor = (self._phi / precisions).mT @ torch.linalg.solve_triangular(
            factor.mT, white, upper=True
        )
        return made

    def _solved(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Precisions P, the Cholesky factor of K + W⁻¹, its inverse times y, and W."""
        precisions, rows = self._elder_precisions(), self._rows
        if self._precisions is None or not torch.equal(self._precisions, precisions):
            self._precisions = precisions
            self._inner[rows, rows] = (self._phi / precisions) @ self._phi.mT
        age = torch.arange(len(self.y) - 1, -1, -1, dtype=torch.float64)
        weight = 0.5 ** (age / self.half_life)
        factor = torch.linalg.cholesky(self._inner[rows, rows] + (1 / weight).diag())
        return precisions, factor, torch.linalg.solve_triangular(factor, self.y, upper=False), weight

    def _elder_precisions(self) -> Tensor:
        made = torch.empty(self._buffer.shape[1], dtype=torch.float64)
        for name, group in self.elder.features.groups.items():
            made[group] = self.elder.base().precisions[name]
        return made

    def widen(self, targets: int) -> None:
        """Take more targets; of the rows so far they were zero."""
        self.y = padded(self.y, targets)

    def merge(self, other: "Echo") -> None:
        """Take the last rows of another stream, too: they are taken as the newer ones."""
        self.fold(other.x, other._phi, other.y)

    def take(self, other: "Echo", places: list[int]) -> None:
        """Take over another one's rows, its targets moved to these places among ours."""
        y = torch.zeros(len(other.y), self.y.shape[1], dtype=torch.float64)
        y[:, places] = other.y
        self._begin(other.x, other._phi, y)

    def _begin(self, x: Tensor, phi: Tensor, y: Tensor) -> None:
        """Keep these rows, and no others."""
        self.x, self.y = x[:0], y[:0]
        self._stop, self._kept, self._precisions = 0, 0, None
        self.fold(x, phi, y)

    def tensors(self) -> dict[str, Tensor]:
        """All that is remembered, by name."""
        return {"x": self.x, "y": self.y}

    def restore(self, tensors: dict[str, Tensor]) -> None:
        """Take what `tensors` gave in place of what is remembered."""
        self._begin(tensors["x"], self.elder.features(tensors["x"]), tensors["y"])

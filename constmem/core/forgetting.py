"""Ways to forget: by and by, or all but the last points."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from math import ceil, log
from typing import Any

from constmem.core import checks
from constmem.core.monoid import Monoid, State


@dataclass(frozen=True)
class Decay:
    """Forget exponentially: a point's weight halves with every `half_life` points after it."""

    half_life: float

    def __post_init__(self) -> None:
        if not 0 < self.half_life < float("inf"):
            raise ValueError(f"half_life must be a positive number of points, not {self.half_life}")

    @property
    def rate(self) -> float:
        """The logarithm of the weight lost with each point."""
        return log(2) / self.half_life


@dataclass(frozen=True)
class Window:
    """Remember at least the last `points` points, and at most one bucket (points / buckets) more.

    Each bucket is a state of its own, so memory is `buckets` + 1 states whatever has passed.
    """

    points: int
    buckets: int = 8

    def __post_init__(self) -> None:
        checks.positive("points", self.points)
        checks.positive("buckets", self.buckets)
        if self.buckets > self.points:
            raise ValueError(
                f"{self.buckets} buckets cannot share {self.points} points: take no more buckets "
                f"than points, for instance Window(points={self.points}, buckets={self.points})"
            )

    @property
    def bucket(self) -> int:
        """Points a bucket holds."""
        return ceil(self.points / self.buckets)

    def pieces(self, filled: int, n: int) -> Iterator[tuple[slice, int]]:
        """Cut n points at the edges of buckets: each piece, and how many points its bucket holds then."""
        start = 0
        while start < n:
            stop = min(n, start + self.bucket - filled)
            filled = (filled + stop - start) % self.bucket
            yield slice(start, stop), filled
            start = stop

    def kept(self, newest: int) -> int:
        """How many full buckets it takes to hold the points, with so many in the newest."""
        return max(ceil((self.points - newest) / self.bucket), 0)


def written(forget: Decay | Window | None) -> dict[str, Any] | None:
    """A way to forget as JSON holds it."""
    return None if forget is None else {"kind": type(forget).__name__, **asdict(forget)}


def restored(settings: dict[str, Any] | None) -> Decay | Window | None:
    """The way to forget that `written` has written; KeyError, TypeError or ValueError of anything else."""
    if settings is None:
        return None
    kinds: dict[str, Any] = {"Decay": Decay, "Window": Window}
    forget: Decay | Window = kinds[settings["kind"]](**{k: v for k, v in settings.items() if k != "kind"})
    return forget


def require_possible(forget: Decay | Window | None, model: str, kind: type[State]) -> None:
    """Refuse what is no way to forget, and ways that the states of a model do not allow."""
    if not isinstance(forget, Decay | Window | None):
        raise TypeError(f"forget must be None, Window(points=...) or Decay(half_life=...), not {forget!r}")
    if isinstance(forget, Decay) and not kind.WEIGHTED:
        raise ValueError(
            f"{model} cannot forget by {forget}: what it remembers has no weights to make smaller; use "
            "forget=Window(points=...), or a neural process of constant memory"
        )
    if isinstance(forget, Window) and not issubclass(kind, Monoid):
        raise ValueError(
            f"{model} cannot forget by {forget}: each event changes what all before it left, so that none of "
            "them can be left out; use forget=None, or a model whose states merge, such as CMHP"
        )

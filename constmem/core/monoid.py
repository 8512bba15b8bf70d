"""What models remember: the base of all states, those that merge, here or over processes; ways to forget."""

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from math import ceil, log
from numbers import Real
from typing import Any, ClassVar, Protocol, TypeVar, runtime_checkable

import torch
import torch.distributed as dist
from jaxtyping import Int
from torch import Tensor

from constmem.core import checks
from constmem.core.files import packed, read_tensors, unpacked, write_tensors

S = TypeVar("S", bound="State")
M = TypeVar("M", bound="Monoid")
A = TypeVar("A", bound="Mergeable")
NOTHING = ""  # the fingerprint of having seen nothing, which is the same for all weights


class State(ABC):
    """Tensors with the batch in front, signed by the weights they depend on; immutable.

    A kind of state says what it is made of (`tensors`), how (`_made`) and what is needed for it (`_require`);
    the rest is written once, here. Where states of parts add up to that of the whole it is a `Monoid`.
    """

    KIND: ClassVar[str]  # what its files say they hold
    VERSION: ClassVar[int] = 1  # of its files
    AXES: ClassVar[str]  # what the numbers of `layout` are
    LEAD: ClassVar[str] = "count"  # the tensor whose batch and device are the state's
    WEIGHTED: ClassVar[bool] = False  # whether points may count more or less, and so be forgotten gradually

    count: Int[Tensor, "..."]  # how many points each task has seen
    fingerprint: str | None  # which weights made it; NOTHING of nothing seen, None where unknown

    @property
    @abstractmethod
    def layout(self) -> tuple[int, ...]:
        """What states of one model have in common, whatever their batch and points."""

    @abstractmethod
    def tensors(self) -> dict[str, Tensor]:
        """All it is made of, by name."""

    @classmethod
    @abstractmethod
    def _made(cls: type[S], tensors: dict[str, Tensor], fingerprint: str | None) -> S:
        """The state made of tensors that are known to fit."""

    @classmethod
    @abstractmethod
    def _require(cls, tensors: dict[str, Tensor]) -> None:
        """A ValueError says what is missing, unknown or does not fit, as "it ..." goes on."""

    @classmethod
    def of_tensors(cls: type[S], tensors: dict[str, Tensor], fingerprint: str | None = None) -> S:
        """The state made of these, as they come from a file: shapes and numbers are checked."""
        cls._require(tensors)
        checks.remembered(tensors)
        return cls._made(tensors, fingerprint)

    @property
    def batch(self) -> int:
        """How many tasks it is the state of."""
        return int(getattr(self, self.LEAD).shape[0])

    @property
    def device(self) -> torch.device:
        """Where its tensors are."""
        where: torch.device = getattr(self, self.LEAD).device
        return where

    @property
    def nbytes(self) -> int:
        """Bytes remembered."""
        return sum(t.nbytes for t in self.tensors().values())

    def signed(self: S, fingerprint: str | None) -> S:
        """The same state with the name of the weights that made it."""
        return self._made(self.tensors(), fingerprint)

    def to(self: S, device: torch.device | str | None = None) -> S:
        """The same state elsewhere."""
        return self._mapped(lambda t: t.to(device))

    def detach(self: S) -> S:
        """The same state cut off from the graph that computed it."""
        return self._mapped(Tensor.detach)

    def select(self: S, index: Tensor | slice) -> S:
        """The states of some of the tasks."""
        return self._mapped(lambda t: t[index])

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the state, atomically, as a safetensors file with a versioned header."""
        write_tensors(path, self.tensors(), self._header())

    def packed(self) -> bytes:
        """What `save` writes, to be sent or kept in another file."""
        return bytes(packed(self.tensors(), self._header()))

    def _header(self) -> dict[str, str]:
        return {"format": self.KIND, "version": str(self.VERSION), "fingerprint": self.fingerprint or ""}

    @classmethod
    def load(cls: type[S], path: str | os.PathLike[str], device: torch.device | str | None = None) -> S:
        """Read a state that `save` wrote."""
        state = cls._read(str(path), *read_tensors(path, kind=cls.KIND, version=cls.VERSION))
        return state if device is None else state.to(device)

    @classmethod
    def unpacked(cls: type[S], content: bytes) -> S:
        """The state that `packed` made these bytes of."""
        what = f"a state of {len(content)} bytes"
        return cls._read(what, *unpacked(content, what, kind=cls.KIND, version=cls.VERSION))

    @classmethod
    def _read(cls: type[S], what: str, tensors: dict[str, Tensor], header: dict[str, str]) -> S:
        try:
            return cls.of_tensors(tensors, header.get("fingerprint") or None)
        except ValueError as error:
            raise ValueError(f"{what} is damaged: it {error}; save the state again") from error

    def _mapped(self: S, function: Callable[[Tensor], Tensor]) -> S:
        """The same state with each of its tensors changed."""
        return self._made({name: function(t) for name, t in self.tensors().items()}, self.fingerprint)


class Monoid(State):
    """A state that merges with those of more points, in any order and grouping."""

    def signature_with(self, other: "Monoid") -> str | None:
        """The fingerprint of both together: known where both are, or where one has seen nothing."""
        if NOTHING in (self.fingerprint, other.fingerprint):
            return other.fingerprint if self.fingerprint == NOTHING else self.fingerprint
        return None if None in (self.fingerprint, other.fingerprint) else self.fingerprint

    @abstractmethod
    def merge(self: M, other: M) -> M:
        """The state of both sets of points together."""


@runtime_checkable
class Mergeable(Protocol):
    """Whatever has a `merge`: states, and estimators."""

    def merge(self, other: Any, /) -> Any: ...


def merged(states: Iterable[A]) -> A | None:
    """All states merged with their neighbours, as a tree of which only the open branches are held.

    So few of many states exist at a time, and each is rounded log2 of their number times. None if there are
    none.
    """
    open_: list[tuple[int, A]] = []
    for state in states:
        height = 0
        while open_ and open_[-1][0] == height:
            state, height = open_.pop()[1].merge(state), height + 1
        open_.append((height, state))
    whole: A | None = None
    while open_:
        state = open_.pop()[1]
        whole = state if whole is None else state.merge(whole)
    return whole


def all_merge(state: M, *, group: "dist.ProcessGroup | None" = None) -> M:
    """The state of what all processes have seen, over `torch.distributed`; the same to the last bit on each.

    Every process calls it with the state of its own share of the data: `torchrun` starts them, for instance,
    and `torch.distributed.init_process_group` joins them. States of one size (CMANP, CNP, CMHP) travel once,
    in about the time of an all-gather of their bytes.

    Args:
        state: of this process; on the GPU where the processes talk by NCCL.
        group: the processes that take part; None: all.

    Example:
        state = all_merge(model.condition(x[rank::size], y[rank::size]))  # under torchrun
    """
    if not isinstance(state, Monoid):
        raise TypeError(f"a {type(state).__name__} does not merge: only states of monoids can be shared so")
    where = state.device if dist.get_backend(group) == "nccl" else torch.device("cpu")
    own = torch.frombuffer(bytearray(state.packed()), dtype=torch.uint8)
    parts = _gathered(own, where, group)  # in the order of their ranks, so that event streams stay in theirs
    whole = merged(type(state).unpacked(part.cpu().numpy().tobytes()) for part in parts)
    assert whole is not None
    return whole.to(state.device)


def _gathered(content: Tensor, where: torch.device, group: "dist.ProcessGroup | None") -> list[Tensor]:
    """The bytes of every process, which may differ in number."""
    size = torch.tensor([content.numel()], device=where)
    sizes = [torch.zeros_like(size) for _ in range(dist.get_world_size(group))]
    dist.all_gather(sizes, size, group=group)
    longest = max(int(each) for each in sizes)
    padded = torch.zeros(longest, dtype=torch.uint8, device=where)
    padded[: content.numel()] = content.to(where)
    everyone = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(everyone, padded, group=group)
    return [part[: int(each)] for part, each in zip(everyone, sizes, strict=True)]


@dataclass(frozen=True)
class Decay:
    """Forget exponentially: a point's weight halves with every `half_life` points after it."""

    half_life: float

    def __post_init__(self) -> None:
        number = isinstance(self.half_life, Real) and not isinstance(self.half_life, bool)
        if not number or not 0 < self.half_life < float("inf"):
            raise ValueError(f"half_life must be a positive number of points, not {self.half_life!r}")

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
    """Refuse values of `forget` that are none, and those that the states of a model do not allow."""
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

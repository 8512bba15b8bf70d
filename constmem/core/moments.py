"""`Moments`: sums of products of features and targets, all that Bayesian linear regression remembers."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from constmem.core import checks
from constmem.core.monoid import Monoid

CHUNK = 4096  # rows multiplied at once
BLOCK = 128  # features of one block of the Gram matrix: blocks below the diagonal are copied, not computed
ROUNDING = 1e-12  # of the larger state's trace: what a difference of two sums may miss being positive by


@dataclass(frozen=True, eq=False)
class Moments(Monoid):
    """What must be remembered of rows (phi, y) to regress y on phi; immutable, mergeable, float64.

    Attributes:
        gram: (*b, p, p) sum of weight * phi phi'.
        cross: (*b, p, k) sum of weight * phi y'.
        square: (*b, k) sum of weight * y².
        count: (*b,) sum of the weights; the number of rows if none were given.
        fingerprint: which weights made the features; None where unknown.

    Example:
        >>> phi, y = torch.randn(9, 3), torch.randn(9, 2)
        >>> whole = Moments.observe(phi, y)
        >>> merged = Moments.observe(phi[:4], y[:4]).merge(Moments.observe(phi[4:], y[4:]))
        >>> torch.allclose(merged.gram, whole.gram)
        True
    """

    AXES: ClassVar[str] = "(features, targets)"
    KIND: ClassVar[str] = "constmem.moments"
    NAMES: ClassVar[tuple[str, ...]] = ("gram", "cross", "square", "count")

    gram: Float[Tensor, "*b p p"]
    cross: Float[Tensor, "*b p k"]
    square: Float[Tensor, "*b k"]
    count: Float[Tensor, "*b"]
    fingerprint: str | None = field(default=None, kw_only=True)

    @staticmethod
    def empty(
        p: int, k: int, *, batch: tuple[int, ...] = (), device: torch.device | str | None = None
    ) -> "Moments":
        """The moments of no rows, of p features and k targets."""
        shapes = (p, p), (p, k), (k,), ()
        return Moments(*(torch.zeros((*batch, *s), dtype=torch.float64, device=device) for s in shapes))

    @staticmethod
    def observe(
        phi: Float[Tensor, "*b n p"], y: Float[Tensor, "*b n k"], weight: Float[Tensor, "*b n"] | None = None
    ) -> "Moments":
        """The moments of exactly these rows, each counted `weight` times (once if not given)."""
        checks.tensors(phi=phi, y=y)
        for name, tensor in (("phi", phi), ("y", y)):
            checks.dense(name, tensor)
            if tensor.ndim < 2 or tensor.is_complex() or tensor.device != phi.device:
                raise TypeError(
                    f"{name} has shape {tuple(tensor.shape)}, of {tensor.dtype} on {tensor.device}, but "
                    "real numbers are needed, (n, p) of features and (n, k) of targets, on one device"
                )
        if phi.shape[:-1] != y.shape[:-1]:
            raise ValueError(
                f"features of {_rows(phi)} rows and targets of {_rows(y)}: give one row of targets, "
                "(n, k), for each row of features, (n, p)"
            )
        if weight is not None and weight.shape != phi.shape[:-1]:
            raise ValueError(f"weights of shape {tuple(weight.shape)} for {_rows(phi)} rows: give one a row")
        if torch.compiler.is_exporting():  # for any number of rows
            return _of_chunk(phi.double(), y.double(), None if weight is None else weight.double())
        made = None
        for start in range(0, max(phi.shape[-2], 1), CHUNK):
            rows = slice(start, start + CHUNK)
            part = None if weight is None else weight[..., rows].double()
            chunk = _of_chunk(phi[..., rows, :].double(), y[..., rows, :].double(), part)
            made = chunk if made is None else made.merge(chunk)
        assert made is not None
        return made

    def merge(self, other: "Moments") -> "Moments":
        """The moments of both sets of rows."""
        self._fits(other)
        return Moments(*(mine + its for mine, its in zip(self.parts, other.parts, strict=True)))

    def remove(self, other: "Moments") -> "Moments":
        """The moments without rows that were observed before; refuses what cannot have been among them."""
        self._fits(other)
        left = Moments(*(mine - its for mine, its in zip(self.parts, other.parts, strict=True)))
        slack = ROUNDING * self.count.clamp(min=1.0)
        if bool((left.count < -slack).any()):
            raise ValueError(
                f"{float(other.count.max()):g} rows cannot be removed from {float(self.count.min()):g}: "
                "remove only rows that this state has observed, each once"
            )
        if not left._is_of_rows(self):
            raise ValueError(
                "what would be left are no sums of squares: some of these rows were never observed here, or "
                "were observed with other features or weights (or decayed since); remove the very same rows"
            )
        for sums in (left.gram.diagonal(dim1=-2, dim2=-1), left.square, left.count):
            sums.clamp_(min=0.0)  # of squares: where nothing is left, rounding is, and may be negative
        return left

    def decay(self, factor: float | Float[Tensor, "*b"]) -> "Moments":
        """The same rows, each counted `factor` times as much; 0 < factor <= 1, one or one for each task."""
        factors = torch.as_tensor(factor, dtype=torch.float64, device=self.count.device)
        if factors.numel() != 1 and factors.shape != self.count.shape:
            shape, needed = tuple(factors.shape), tuple(self.count.shape)
            raise ValueError(f"factor has shape {shape}, but one number is needed, or numbers of {needed}")
        if not bool(((factors > 0.0) & (factors <= 1.0)).all()):
            raise ValueError(f"decay takes a factor above 0 and at most 1, not {factor}")
        return self._mapped(lambda t: t * factors.reshape((*factors.shape, *[1] * (t.ndim - factors.ndim))))

    @property
    def layout(self) -> tuple[int, ...]:
        """(features, targets)."""
        return self.cross.shape[-2:]

    @property
    def width(self) -> int:
        """Number of features, p."""
        return self.cross.shape[-2]

    @property
    def targets(self) -> int:
        """Number of targets, k."""
        return self.cross.shape[-1]

    @property
    def nbytes(self) -> int:
        """Bytes remembered: the same whatever the number of rows seen."""
        return sum(t.nbytes for t in self.parts)

    def tensors(self) -> dict[str, Tensor]:
        """All it is made of, by name; of the symmetric Gram matrix one triangle."""
        rows, columns = torch.tril_indices(self.width, self.width, device=self.gram.device)
        packed = self.gram[..., rows, columns]
        return {"gram": packed, "cross": self.cross, "square": self.square, "count": self.count}

    @classmethod
    def of_tensors(cls, tensors: dict[str, Tensor], fingerprint: str | None = None) -> "Moments":
        """The state made of what `tensors` gave; refuses what no rows can have made."""
        cls._require(tensors)
        made = cls._made(tensors, fingerprint)
        cls.require({name: getattr(made, name) for name in cls.NAMES})
        return made

    @classmethod
    def _made(cls, tensors: dict[str, Tensor], fingerprint: str | None) -> "Moments":
        packed, (*batch, p, _) = tensors["gram"], tensors["cross"].shape
        gram = packed.new_zeros(*batch, p, p)
        rows, columns = torch.tril_indices(p, p)
        gram[..., rows, columns] = packed
        gram[..., columns, rows] = packed
        return cls(gram, *(tensors[name] for name in cls.NAMES[1:]), fingerprint=fingerprint)

    @classmethod
    def _require(cls, tensors: dict[str, Tensor]) -> None:
        checks.named(tensors, set(cls.NAMES))
        packed, cross = tensors["gram"], tensors["cross"]
        if cross.ndim < 2:
            raise ValueError(f"holds cross moments of shape {tuple(cross.shape)}, not (p, k)")
        *batch, p, _ = cross.shape
        if tuple(packed.shape) != (*batch, p * (p + 1) // 2):
            raise ValueError("holds moments whose shapes do not fit")

    def _mapped(self, function: Callable[[Tensor], Tensor]) -> "Moments":
        return Moments(
            *(function(t) for t in self.parts), fingerprint=self.fingerprint
        )  # not packed and unpacked

    @staticmethod
    def require(tensors: dict[str, Tensor]) -> None:
        """A ValueError says why no rows can have made these, as "it ..." goes on; `gram` is whole here."""
        gram, cross, square, count = (tensors[name] for name in Moments.NAMES)
        *batch, p, k = cross.shape
        shapes = [(*batch, p, p), (*batch, k), tuple(batch)]
        if [tuple(t.shape) for t in (gram, square, count)] != shapes:
            raise ValueError("holds moments whose shapes do not fit")
        if any(t.dtype != torch.float64 or not bool(t.isfinite().all()) for t in tensors.values()):
            raise ValueError("holds moments that are not finite numbers in float64")
        if bool((count < 0).any() | (square < 0).any() | (gram.diagonal(dim1=-2, dim2=-1) < 0).any()):
            raise ValueError("holds a negative count or a negative sum of squares")
        if not torch.equal(gram, gram.mT):
            raise ValueError("holds a Gram matrix that is not symmetric")

    @property
    def parts(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.gram, self.cross, self.square, self.count

    def _fits(self, other: "Moments") -> None:
        if self.cross.shape != other.cross.shape:
            raise ValueError(
                f"moments of shape {tuple(self.cross.shape)} and {tuple(other.cross.shape)} (batch, p, k) "
                "differ: observe both with the same features"
            )

    def _is_of_rows(self, before: "Moments") -> bool:
        """Whether [phi y]'[phi y] is positive semidefinite, up to the rounding of the state it came from."""
        trace = before.gram.diagonal(dim1=-2, dim2=-1).sum(-1)[..., None]
        slack = (ROUNDING * self.width * trace).clamp(min=torch.finfo(torch.float64).tiny)
        factor, failed = torch.linalg.cholesky_ex(
            self.gram + torch.diag_embed(slack.expand_as(self.cross[..., 0]))
        )
        if bool((failed > 0).any()):
            return False
        explained = torch.linalg.solve_triangular(factor, self.cross, upper=False).square().sum(-2)
        return bool((self.square - explained >= -ROUNDING * self.width * before.square).all())


def _of_chunk(phi: Tensor, y: Tensor, weight: Tensor | None) -> Moments:
    """Sums over one chunk of rows, in float64: one of float32 is not positive definite."""
    weighted = phi if weight is None else phi * weight[..., None]
    squares = y.square() if weight is None else y.square() * weight[..., None]
    count = phi.new_zeros(phi.shape[:-2]) + phi.shape[-2] if weight is None else weight.sum(-1)
    return Moments(_gram(phi, weighted), weighted.mT @ y, squares.sum(-2), count)


def _gram(phi: Tensor, weighted: Tensor) -> Float[Tensor, "*b p p"]:
    """Sums of products of features, symmetric to the last bit, as saving needs it."""
    if weighted is phi and phi.ndim == 2 and phi.device.type == "cpu" and not phi.requires_grad:
        whole = phi.numpy()
        return torch.from_numpy(whole.T @ whole)  # numpy multiplies one triangle, and copies it
    p = phi.shape[-1]
    gram = phi.new_empty(*phi.shape[:-2], p, p)
    for start in range(0, p, BLOCK):
        rows, beyond = slice(start, start + BLOCK), slice(start + BLOCK, p)
        block = weighted[..., rows].mT @ phi[..., start:]
        gram[..., rows, beyond] = block[..., BLOCK:]
        gram[..., beyond, rows] = block[..., BLOCK:].mT
        square = block[..., :BLOCK]
        gram[..., rows, rows] = (square + square.mT) / 2
    return gram


def _rows(t: Tensor) -> str:
    return " x ".join(map(str, t.shape[:-1]))

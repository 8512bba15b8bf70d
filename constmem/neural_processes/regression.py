"""What CMANP keeps beside its slots: moments, and Bayesian linear regressions from them alone."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from constmem.core import checks
from constmem.core.moments import Moments
from constmem.core.monoid import Monoid
from constmem.core.state import AttentionState

SLOTS, MOMENTS = "slots.", "moments."  # how the tensors of each part are named in files


@dataclass(frozen=True, eq=False)
class Product(Monoid):
    """The state of a model that keeps two kinds of sums of the same points; immutable, mergeable.

    Count and fingerprint are those of the slots: both parts have seen the same points, by the same weights.

    Attributes:
        slots: what learned queries read from the points.
        moments: sums of products of their features and outputs.

    Example:
        >>> q, k, phi, y = (torch.randn(shape) for shape in ((1, 3, 4), (1, 1, 9, 4), (1, 9, 5), (1, 9, 2)))
        >>> def seen(i, j):
        ...     slots = AttentionState.observe(q, k[..., i:j, :], k[..., i:j, :])
        ...     return Product(slots, Moments.observe(phi[:, i:j], y[:, i:j]))
        >>> merged, whole = seen(0, 4).merge(seen(4, 9)), seen(0, 9)
        >>> torch.allclose(merged.moments.gram, whole.moments.gram), merged.nbytes == whole.nbytes
        (True, True)
    """

    AXES: ClassVar[str] = "(depth, heads, slots, channels, features, outputs)"
    KIND: ClassVar[str] = "constmem.product"
    WEIGHTED: ClassVar[bool] = True

    slots: AttentionState
    moments: Moments

    @property
    def count(self) -> Int[Tensor, "..."]:  # type: ignore[override]
        """How many points each task has seen."""
        return self.slots.count

    @property
    def fingerprint(self) -> str | None:  # type: ignore[override]
        """Which weights made it."""
        return self.slots.fingerprint

    @property
    def layout(self) -> tuple[int, ...]:
        """The shapes of a slots' value and of the cross moments, but for the batch."""
        return *self.slots.layout, *self.moments.cross.shape[1:]

    def merge(self, other: "Product") -> "Product":
        """The state of both sets of points together; associative and commutative."""
        checks.state("merge", self, other)
        return Product(self.slots.merge(other.slots), self.moments.merge(other.moments))

    def remove(self, other: "Product", *, max_share: float = 0.999) -> "Product":
        """The state without points it has seen: undoes `merge` with `other`, within what both parts allow."""
        checks.state("remove", self, other)
        slots = self.slots.remove(other.slots, max_share=max_share)
        return Product(slots, self.moments.remove(other.moments))

    def decay(self, log_weight: float | Tensor) -> "Product":
        """Multiply the weight of every point seen by exp(log_weight), at most 1: less is forgetting."""
        slots = self.slots.decay(log_weight)
        factor = torch.as_tensor(log_weight, dtype=torch.float64, device=self.device).exp()
        return Product(slots, self.moments.decay(factor))

    def signed(self, fingerprint: str | None) -> "Product":
        """The same state with the name of the weights that made it."""
        return replace(self, slots=self.slots.signed(fingerprint))

    def tensors(self) -> dict[str, Tensor]:
        """All it is made of, by name."""
        slots = {name: t for name, t in self.slots.tensors().items() if name != "count"}
        moments = {name: getattr(self.moments, name) for name in Moments.NAMES}
        parts = {SLOTS + k: t for k, t in slots.items()} | {MOMENTS + k: t for k, t in moments.items()}
        return {**parts, "count": self.count}

    @classmethod
    def _made(cls, tensors: dict[str, Tensor], fingerprint: str | None) -> "Product":
        slots, moments = _split(tensors)
        return cls(
            AttentionState._made(slots, fingerprint), Moments(*(moments[name] for name in Moments.NAMES))
        )

    @classmethod
    def _require(cls, tensors: dict[str, Tensor]) -> None:
        slots, moments = _split(tensors)
        AttentionState._require(slots)
        checks.named(moments, set(Moments.NAMES))
        Moments.require(moments)

    def _mapped(self, function: Callable[[Tensor], Tensor]) -> "Product":
        return Product(self.slots._mapped(function), self.moments._mapped(function))

    def to(self, device: torch.device | str | None = None) -> "Product":
        """The same state elsewhere."""
        where = self.device if device is None else device
        return Product(self.slots.to(where), self.moments.to(where))


def _split(tensors: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The tensors of the slots, and of the moments; those of neither are left with the slots."""
    moments = {k.removeprefix(MOMENTS): t for k, t in tensors.items() if k.startswith(MOMENTS)}
    slots = {k.removeprefix(SLOTS): t for k, t in tensors.items() if not k.startswith(MOMENTS)}
    return slots, moments


SPACING = 0.9  # of the first frequencies, in radians: two harmonics repeat after 7, beyond inputs in [-2, 2]
LENGTHS, AMPLITUDES, NOISE = (0.1, 0.8), (0.1, 1.0), 0.02  # of the functions that experts start with
GOLDEN = 0.618034  # amplitudes of neighbours in length are spread by it
FEWEST = -60.0  # logarithm of a variance that is as good as none
AT_ONCE = 512  # targets whose variances are computed together


class Posterior(NamedTuple):
    """What the experts know of the coefficients after some points, in float64."""

    evidence: Float[Tensor, "b k"]  # logarithm of how likely each expert held the points, and of its prior
    weights: Float[Tensor, "b k p y"]  # mean of the coefficients
    covariance: Float[Tensor, "b k p p"]  # of the coefficients, the same for every output


class Regression(nn.Module):
    """`experts` ways to regress outputs on the same cosines and sines of inputs.

    With phi(x) = [cos(W x), sin(W x)], expert k holds that y = phi(x)' w + e, w ~ N(0, S_k) and
    e ~ N(0, noise_k^2). Its posterior and its evidence are closed form in the moments of phi and y:

        B = 1 + S^1/2 G S^1/2 / noise^2        C = S^1/2 B^-1 S^1/2        E[w] = C c / noise^2
        log p(y) = -1/2 (n log(2 pi noise^2) + log det B + (y'y - c'C c / noise^2) / noise^2)

    for G = sum phi phi' and c = sum phi y. Experts start as smooth functions (squared exponential and
    Matern 5/2 by turns) of many length scales and amplitudes; W, S and the noise are learned.

    Args:
        dim_x: channels of inputs.
        features: cosines and sines together: even.
        experts: how many.
        lengths, amplitudes, noise: of the functions that experts start with.
        spacing: of the first frequencies.

    Example:
        >>> regression = Regression(dim_x=1, features=64, experts=8)
        >>> x = torch.linspace(-1, 1, 30)[None, :, None]
        >>> posterior = regression.read(regression.observe(x, torch.sin(3 * x)))
        >>> mean, std = regression(posterior, torch.tensor([[[0.5], [3.0]]]))  # among the points, and far off
        >>> best = posterior.evidence.argmax()
        >>> bool((mean[0, 0, best] - torch.sin(torch.tensor(1.5))).abs() < 0.02)
        True
        >>> bool(std[0, 0, best] < 0.03), bool(std[0, 1, best] > 0.2)
        (True, True)
    """

    def __init__(
        self,
        *,
        dim_x: int,
        features: int,
        experts: int,
        lengths: tuple[float, float] = LENGTHS,
        amplitudes: tuple[float, float] = AMPLITUDES,
        noise: float = NOISE,
        spacing: float = SPACING,
    ) -> None:
        super().__init__()
        checks.positive("experts", experts)
        if features < 2 or features % 2:
            raise ValueError(f"moments must be an even number of features, cosines and sines, not {features}")
        radius = spacing * (torch.arange(features // 2) + 0.5)
        length = _spread(lengths, (torch.arange(experts) + 0.5) / experts)[:, None]
        amplitude = _spread(amplitudes, torch.arange(experts) * GOLDEN % 1)[:, None]
        scaled = (radius * length).square()
        smooth, rough = -0.5 * scaled, -(5 + dim_x) / 2 * torch.log1p(scaled / 5)
        spectrum = torch.where(torch.arange(experts)[:, None] % 2 == 0, smooth, rough)
        spectrum = spectrum + (dim_x - 1) * radius.log()  # radii are spread evenly, volume is not
        start = spectrum.log_softmax(-1) + 2 * amplitude.log()
        self.frequencies = nn.Parameter(
            radius[:, None] * F.normalize(torch.randn(features // 2, dim_x), dim=-1)
        )
        self.log_variance = nn.Parameter(
            start.clamp_min(FEWEST)
        )  # of the coefficients of a cosine and its sine
        self.log_noise = nn.Parameter(torch.full((experts,), noise).log())
        self.log_prior = nn.Parameter(torch.zeros(experts))

    def features(self, x: Float[Tensor, "*b n x"]) -> Float[Tensor, "*b n p"]:
        """phi(x), in float64."""
        angles = x.double() @ self.frequencies.double().mT
        return torch.cat([angles.cos(), angles.sin()], -1)

    def observe(
        self,
        x: Float[Tensor, "b n x"],
        y: Float[Tensor, "b n y"],
        mask: Tensor | None = None,
        log_weight: Tensor | None = None,
    ) -> Moments:
        """The moments of exactly these points; those that are masked out count nothing."""
        weight = None if log_weight is None else log_weight.double().exp()
        if mask is not None:
            weight = mask.double() if weight is None else torch.where(mask, weight, 0.0)
        return Moments.observe(self.features(x), y, weight)

    def read(self, moments: Moments) -> Posterior:
        """What each expert makes of the points."""
        matrix = self.matrix(moments.gram)
        inverse, log_det = Inverse.apply(matrix)  # type: ignore[no-untyped-call]
        return self.solved(moments, matrix, inverse, log_det)

    def _prior(self) -> tuple[Float[Tensor, "k p"], Float[Tensor, " k"]]:
        """Deviations of the coefficients, and variances of the noise."""
        return (0.5 * self.log_variance.double()).exp().repeat(1, 2), (2 * self.log_noise.double()).exp()

    def matrix(self, gram: Float[Tensor, "b p p"]) -> Float[Tensor, "b k p p"]:
        """B of each expert, which must be inverted."""
        scale, noise = self._prior()
        outer = scale[:, :, None] * scale[:, None]
        eye = torch.eye(scale.shape[-1], dtype=scale.dtype, device=scale.device)
        return eye + gram[:, None] * (outer / noise[:, None, None])

    def solved(
        self,
        moments: Moments,
        matrix: Float[Tensor, "b k p p"],
        inverse: Float[Tensor, "b k p p"],
        log_det: Float[Tensor, "b k"],
    ) -> Posterior:
        """What each expert makes of the points, given B, its inverse and the logarithm of its determinant."""
        scale, noise = self._prior()
        covariance = scale[:, :, None] * scale[:, None] * inverse
        right = scale[..., None] * moments.cross[:, None] / noise[:, None, None]
        weights = inverse @ right  # in units of the prior, once refined: little noise would cost their digits
        weights = scale[..., None] * (weights + inverse @ (right - matrix @ weights))
        left = moments.square[:, None] - (moments.cross[:, None] * weights).sum(-2)  # (b, k, y)
        one = moments.count[:, None] * (2 * torch.pi * noise).log() + log_det  # (b, k)
        evidence = -0.5 * (left.shape[-1] * one + left.sum(-1) / noise)
        return Posterior(evidence + self.log_prior.double().log_softmax(-1), weights, covariance)

    def forward(
        self, posterior: Posterior, xt: Float[Tensor, "b m x"]
    ) -> tuple[Float[Tensor, "b m k y"], Float[Tensor, "b m k 1"]]:
        """Mean and standard deviation of each expert at the targets, noise included."""
        phi, (_, weights, covariance) = self.features(xt), posterior
        mean = torch.einsum("bmp,bkpy->bmky", phi, weights)
        pieces = (phi,) if torch.compiler.is_exporting() else phi.split(AT_ONCE, 1)  # a graph takes any m
        parts = [_quadratic(part, covariance) for part in pieces]
        variance = parts[0] if len(parts) == 1 else torch.cat(parts, 1)  # (b, m, k)
        noise = (2 * self.log_noise.double()).exp()
        return mean, (variance.clamp_min(0.0) + noise).sqrt()[..., None]


def _quadratic(phi: Float[Tensor, "b m p"], covariance: Float[Tensor, "b k p p"]) -> Float[Tensor, "b m k"]:
    """phi' C phi for each expert."""
    return (phi[:, None] @ covariance).mul(phi[:, None]).sum(-1).mT


def _spread(bounds: tuple[float, float], places: Tensor) -> Tensor:
    """Numbers between two bounds, evenly in their logarithm."""
    low, high = bounds
    return low * (high / low) ** places


class Inverse(torch.autograd.Function):
    """Inverse and log-determinant of positive definite matrices, with the gradient of both by two products.

    Nothing asks a GPU whether it worked: the identity is part of every matrix that is inverted here.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(matrix: Tensor) -> tuple[Tensor, Tensor]:
        factor = torch.linalg.cholesky_ex(matrix).L
        eye = torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device).expand_as(matrix)
        root = torch.linalg.solve_triangular(factor, eye, upper=False)
        return root.mT @ root, 2 * factor.diagonal(dim1=-2, dim2=-1).log().sum(-1)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:  # noqa: ARG004
        ctx.save_for_backward(output[0])

    @staticmethod
    def backward(ctx: Any, grad: Tensor, grad_log_det: Tensor) -> Tensor:
        (inverse,) = ctx.saved_tensors
        found: Tensor = grad_log_det[..., None, None] * inverse - inverse @ grad @ inverse
        return found

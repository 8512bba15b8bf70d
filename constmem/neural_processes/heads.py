"""From tokens to distributions: the last steps of models, and mixtures of what samples predict."""

from collections.abc import Sequence
from math import log
from typing import Any, ClassVar, Literal, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.distributions import Distribution, Normal, constraints

from constmem.core.layers import MLP, RELU, affine, applied, keep_variance

Std = Literal["bounded", "exp"]
AnyStd = Literal["bounded", "exp", "coarse"]
NARROWEST = 0.01  # deviation of a component of a mixture


def std_of(raw: Tensor, kind: AnyStd) -> Tensor:
    """A standard deviation from an unconstrained number.

    "bounded" is 0.05 + 0.95 softplus, "coarse" 0.1 + 0.9 softplus, "exp" the exponential.
    """
    if kind == "bounded":
        return 0.05 + 0.95 * F.softplus(raw)
    if kind == "coarse":
        return 0.1 + 0.9 * F.softplus(raw)
    return raw.exp()


class Gaussian(nn.Module):
    """Independent normals: an MLP gives a mean and a standard deviation for every output channel.

    Tokens that no norm has seen last want one here (`norm`).
    """

    def __init__(self, *, dim: int, hidden: int, dim_y: int, std: Std = "bounded", norm: bool = True) -> None:
        super().__init__()
        if std not in ("bounded", "exp"):
            raise ValueError(f"std must be 'bounded' or 'exp', not {std!r}")
        self.std: Std = std
        self.norm = nn.LayerNorm(dim) if norm else nn.Identity()
        self.predictor = MLP(dim_in=dim, dim_hidden=hidden, dim_out=2 * dim_y, depth=2)

    def forward(
        self, tokens: Float[Tensor, "b m d"]
    ) -> tuple[Float[Tensor, "b m y"], Float[Tensor, "b m y"]]:
        """Mean and standard deviation."""
        parts: Any = self._modules
        mean, raw = parts["predictor"](applied(parts["norm"], tokens)).chunk(2, -1)
        return mean, std_of(raw, self.std)


class PreciseHead(nn.Module):
    """What a head of many numbers begins with, always in full precision: half would round what it says."""

    def __init__(self, *, dim: int, hidden: int, dim_out: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.predictor = MLP(dim_in=dim, dim_hidden=hidden, dim_out=dim_out, depth=2)

    def raw(self, tokens: Float[Tensor, "b m d"]) -> Float[Tensor, "b m o"]:
        """All numbers, as yet without bounds."""
        with torch.autocast(tokens.device.type, enabled=False):
            return self.predictor(self.norm(tokens.to(self.norm.weight.dtype)))  # type: ignore[no-any-return]


class PointDecoder(nn.Module):
    """An MLP from a target's x and what was encoded to mean and standard deviation."""

    def __init__(
        self, *, dim_x: int, dim_y: int, dim_in: int, dim: int, decoder_depth: int, std: AnyStd
    ) -> None:
        super().__init__()
        if std not in ("bounded", "exp", "coarse"):
            raise ValueError(f"std must be 'bounded', 'exp' or 'coarse', not {std!r}")
        if decoder_depth < 2:
            raise ValueError(f"decoder_depth must be at least 2, not {decoder_depth}")
        self.std: AnyStd = std
        self.first = keep_variance(nn.Linear(dim_x + dim_in, dim), gain=RELU)
        share = torch.tensor([dim_x] * dim_x + [dim_in] * dim_in) / (dim_x + dim_in)
        with torch.no_grad():  # x, a few channels among many, starts with half of the say
            self.first.weight /= (2 * share).sqrt()
        self.rest = MLP(dim_in=dim, dim_hidden=dim, dim_out=2 * dim_y, depth=decoder_depth - 1)

    def forward(
        self, xt: Float[Tensor, "*#b x"], *parts: Float[Tensor, "*#b _"]
    ) -> tuple[Float[Tensor, "*b y"], Float[Tensor, "*b y"]]:
        """Mean and standard deviation from what was encoded, in as many parts as there are."""
        return self.predict(self.hidden(xt, *parts))

    def hidden(self, xt: Float[Tensor, "*#b x"], *parts: Float[Tensor, "*#b _"]) -> Float[Tensor, "*b d"]:
        """What the first layer gives."""
        return linear_in_parts((xt, *parts), *affine(self.first))

    def predict(self, hidden: Float[Tensor, "*b d"]) -> tuple[Float[Tensor, "*b y"], Float[Tensor, "*b y"]]:
        """What follows on the first layer."""
        mean, raw = self.rest(F.relu(hidden)).chunk(2, -1)
        return mean, std_of(raw, self.std)


def linear_in_parts(
    parts: Sequence[Float[Tensor, "*#b _"]], weight: Float[Tensor, "o i"], bias: Tensor | None = None
) -> Float[Tensor, "*b o"]:
    """A linear map of parts side by side, which are broadcast against each other only behind it.

    Each is one product of matrices, whatever its strides: the same to the last digit.
    """
    weights = weight.split([part.shape[-1] for part in parts], 1)
    total: Tensor | None = None
    for part, own in zip(parts, weights, strict=True):
        flat = F.linear(part.flatten(0, -2), own, bias if total is None else None)
        term = flat.view(*part.shape[:-1], weight.shape[0])
        total = term if total is None else total + term
    assert total is not None
    return total


def normal(mean: Tensor, std: Tensor) -> Normal:
    """A normal distribution in at least float32; its arguments were checked at the border."""
    wide = torch.promote_types(mean.dtype, torch.float32)
    return Normal(mean.to(wide), std.to(wide), validate_args=False)


class Corrected(nn.Module):
    """Normals of k experts that tokens shift and widen, in units of their deviations; at first, not at all.

    Args:
        std: "bounded" keeps every deviation above 0.05; "exp" does not.
    """

    def __init__(self, *, dim: int, hidden: int, dim_y: int, std: Std = "bounded") -> None:
        super().__init__()
        self.floor = {"bounded": 0.05, "exp": 0.0}[std]
        self.norm = nn.LayerNorm(dim)
        self.predictor = MLP(dim_in=dim, dim_hidden=hidden, dim_out=2 * dim_y, depth=2)
        nn.init.zeros_(self.predictor.layers[-1].weight)  # type: ignore[arg-type]

    def forward(
        self, tokens: Float[Tensor, "b m d"], mean: Float[Tensor, "b m k y"], std: Float[Tensor, "b m k 1"]
    ) -> tuple[Float[Tensor, "b m k y"], Float[Tensor, "b m k y"]]:
        """Mean and standard deviation of each expert."""
        shift, raw = self.predictor(self.norm(tokens))[:, :, None].to(mean.dtype).chunk(2, -1)
        return mean + shift * std, ((std * raw.exp()).square() + self.floor**2).sqrt()


class Mixture(nn.Module):
    """Mixtures of k normals for every point: an MLP gives means, deviations and weights.

    They begin spread out from -2 to 2. Always in full precision: narrow ones need exact places.
    """

    def __init__(self, *, dim: int, hidden: int, dim_y: int, components: int) -> None:
        super().__init__()
        self.components = components
        self.norm = nn.LayerNorm(dim)
        self.predictor = MLP(dim_in=dim, dim_hidden=hidden, dim_out=components * (2 * dim_y + 1), depth=3)

    def forward(
        self, tokens: Float[Tensor, "b m d"]
    ) -> tuple[Float[Tensor, "b m k y"], Float[Tensor, "b m k y"], Float[Tensor, "b m k"]]:
        """Mean, deviation and logarithm of the weight of each component."""
        with torch.autocast(tokens.device.type, enabled=False):
            raw = self.predictor(self.norm(tokens.to(self.norm.weight.dtype)))
            raw = raw.unflatten(-1, (self.components, -1))
            shift, wide = raw[..., 1:].chunk(2, -1)
            spread = torch.linspace(-2, 2, self.components, dtype=raw.dtype, device=raw.device)
            return spread[:, None] + shift, NARROWEST + F.softplus(wide), raw[..., 0].log_softmax(-1)


class SampleMixture(Distribution):
    """A mixture of k normals at every point: what k samples of a latent, or k experts, predict together.

    Its `log_prob` is that of a point, log sum_k w_k prod_y N(y | mean_k, std_k): the channels of one
    sample belong together. It is returned as (b, m, 1), so that `log_prob(y).sum(-1)` is the
    log-likelihood of a point here as it is for independent normals. `mean`, `variance` and `cdf` are
    those of each channel. `sample` draws one component for a whole task: its points belong together.

    Args:
        log_weight: log w_k, the same at all points of a task; an even mixture if not given.

    Example:
        >>> one = torch.zeros(1, 2, 1, 3), torch.ones(1, 2, 1, 3)
        >>> alone = SampleMixture(*one).log_prob(torch.zeros(1, 2, 3))  # a mixture of one is a normal
        >>> torch.allclose(alone.sum(-1), Normal(0.0, 1.0).log_prob(torch.zeros(1, 2, 3)).sum(-1))
        True
    """

    arg_constraints: ClassVar[dict[str, constraints.Constraint]] = {}
    support = constraints.real_vector

    def __init__(
        self,
        means: Float[Tensor, "b m k y"],
        stds: Float[Tensor, "b m k y"],
        log_weight: Float[Tensor, "b m k"] | None = None,
    ) -> None:
        self.components = normal(means, stds)
        even = self.components.mean.new_full((), -log(means.shape[-2])).expand(means.shape[:-1])
        self.log_weight = even if log_weight is None else log_weight.to(even.dtype)
        super().__init__(means.shape[:2], means.shape[-1:], validate_args=False)

    @property
    def weight(self) -> Float[Tensor, "b m k 1"]:
        """Of each component."""
        return self.log_weight.exp()[..., None]

    @property
    def mean(self) -> Float[Tensor, "b m y"]:
        return (self.weight * self.components.mean).sum(-2)

    @property
    def variance(self) -> Float[Tensor, "b m y"]:
        apart = (self.components.mean - self.mean[..., None, :]).square()
        return (self.weight * (self.components.variance + apart)).sum(-2)

    def log_prob(self, value: Float[Tensor, "b m y"]) -> Float[Tensor, "b m 1"]:
        each: Tensor = self.components.log_prob(value[..., None, :]).sum(-1)
        return (each + self.log_weight).logsumexp(-1)[..., None]

    def joint_log_prob(self, value: Float[Tensor, "b m y"]) -> Float[Tensor, " b"]:
        """Of all points of a task together, which are of one component."""
        if value.shape[1] == 0:
            return value.new_zeros(value.shape[0])
        each: Tensor = self.components.log_prob(value[..., None, :]).sum((1, 3))
        return (each + self.log_weight[:, 0]).logsumexp(-1)

    def cdf(self, value: Float[Tensor, "b m y"]) -> Float[Tensor, "b m y"]:
        out: Tensor = (self.weight * self.components.cdf(value[..., None, :])).sum(-2)
        return out

    def sample(
        self, sample_shape: Any = (), *, generator: torch.Generator | None = None
    ) -> Float[Tensor, "*s b m y"]:
        means, stds = self.components.mean, self.components.stddev
        shape, (b, m, k, y) = tuple(sample_shape), means.shape
        with torch.no_grad():
            place = torch.rand((*shape, b, 1, 1), generator=generator, device=means.device, dtype=means.dtype)
            passed = place > self.weight[..., 0].cumsum(-1)[..., :-1]  # but for the last, which is up to 1
            pick = passed.sum(-1, keepdim=True)[..., None].expand(*shape, b, m, 1, y)
            mean, std = (t.expand(*shape, b, m, k, y).gather(-2, pick).squeeze(-2) for t in (means, stds))
            noise = torch.randn(mean.shape, generator=generator, dtype=mean.dtype, device=mean.device)
            return mean + std * noise


class PointMixture(SampleMixture):
    """A mixture of k normals whose weights differ from point to point: points are independent."""

    def joint_log_prob(self, value: Float[Tensor, "b m y"]) -> Float[Tensor, " b"]:
        total: Tensor = self.log_prob(value).sum((1, 2))
        return total

    def sample(
        self, sample_shape: Any = (), *, generator: torch.Generator | None = None
    ) -> Float[Tensor, "*s b m y"]:
        b, m, k, y = self.components.mean.shape
        flat = SampleMixture(
            self.components.mean.reshape(b * m, 1, k, y),
            self.components.stddev.reshape(b * m, 1, k, y),
            self.log_weight.reshape(b * m, 1, k),
        )
        drawn: Tensor = flat.sample(sample_shape, generator=generator)
        made: Tensor = drawn.unflatten(-3, (b, m))
        return made.squeeze(-2)


def logmeanexp(numbers: Float[Tensor, "*b k"]) -> Float[Tensor, "*b"]:
    """log of the mean of exponentials over the last axis."""
    return numbers.logsumexp(-1) - log(numbers.shape[-1])


class Levels(NamedTuple):
    """Tokens of a ragged context at every level of a model, and which of them are real (None: all)."""

    tokens: tuple[Float[Tensor, "b n d"], ...]
    mask: Bool[Tensor, "b n"] | None

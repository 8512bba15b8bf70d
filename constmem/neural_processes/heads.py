"""The last steps of models, from tokens to numbers, and grey levels: what pixels are predicted on."""

from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int64
from torch import Tensor, nn
from torch.distributions import Distribution, Normal, constraints
from torch.distributions.utils import lazy_property

from constmem.core.layers import MLP, applied
from constmem.neural_processes.joint import SampleMixture, chosen

Std = Literal["bounded", "exp"]
AnyStd = Literal["bounded", "exp", "coarse"]
LOW, HIGH = -0.5, 0.5  # black and white
GREY = 256  # levels of an image of bytes
NARROWEST = 0.01  # deviation of a normal of a mixture
START, SHARPEST = 0.05, 0.1  # scales of logistics: about what they begin with; their least, in steps


def std_of(raw: Tensor, kind: AnyStd) -> Tensor:
    """A standard deviation from an unconstrained number.

    "bounded" is 0.05 + 0.95 softplus, "coarse" 0.1 + 0.9 softplus, "exp" the exponential.
    """
    if kind == "exp":
        return raw.exp()
    least = 0.05 if kind == "bounded" else 0.1
    return least + (1 - least) * F.softplus(raw)


class Head(nn.Module):
    """What all heads begin with: a norm, and an MLP to all numbers of a point.

    Tokens that a norm has seen last want no other here (`norm`).
    """

    def __init__(self, *, dim: int, hidden: int, dim_out: int, depth: int = 2, norm: bool = True) -> None:
        super().__init__()
        self.norm: nn.Module = nn.LayerNorm(dim) if norm else nn.Identity()
        self.predictor = MLP(dim_in=dim, dim_hidden=hidden, dim_out=dim_out, depth=depth)

    def raw(self, tokens: Float[Tensor, "b m d"]) -> Float[Tensor, "b m o"]:
        """All numbers, as yet without bounds."""
        parts: Any = self._modules  # past the look-ups of modules: small queries feel those
        return parts["predictor"](applied(parts["norm"], tokens))  # type: ignore[no-any-return]

    def precise(self, tokens: Float[Tensor, "b m d"]) -> Float[Tensor, "b m o"]:
        """The same in full precision: autocast would round what mixtures and loadings say."""
        with torch.autocast(tokens.device.type, enabled=False):
            return self.raw(tokens.to(self.norm.weight.dtype))  # type: ignore[arg-type]


class Gaussian(Head):
    """Independent normals: mean and standard deviation for every output channel."""

    def __init__(self, *, dim: int, hidden: int, dim_y: int, std: Std = "bounded", norm: bool = True) -> None:
        super().__init__(dim=dim, hidden=hidden, dim_out=2 * dim_y, norm=norm)
        if std not in ("bounded", "exp"):
            raise ValueError(f"std must be 'bounded' or 'exp', not {std!r}")
        self.std: Std = std

    def forward(
        self, tokens: Float[Tensor, "b m d"]
    ) -> tuple[Float[Tensor, "b m y"], Float[Tensor, "b m y"]]:
        """Mean and standard deviation."""
        mean, raw = self.raw(tokens).chunk(2, -1)
        return mean, std_of(raw, self.std)


class Corrected(Head):
    """Normals of k experts that tokens shift and widen, in units of their deviations; at first, not at all.

    Args:
        std: "bounded" keeps every deviation above 0.05; "exp" does not.
    """

    def __init__(self, *, dim: int, hidden: int, dim_y: int, std: Std = "bounded") -> None:
        super().__init__(dim=dim, hidden=hidden, dim_out=2 * dim_y)
        self.floor = {"bounded": 0.05, "exp": 0.0}[std]
        nn.init.zeros_(self.predictor.layers[-1].weight)  # type: ignore[arg-type]

    def forward(
        self, tokens: Float[Tensor, "b m d"], mean: Float[Tensor, "b m k y"], std: Float[Tensor, "b m k 1"]
    ) -> tuple[Float[Tensor, "b m k y"], Float[Tensor, "b m k y"]]:
        """Mean and standard deviation of each expert."""
        shift, raw = self.raw(tokens)[:, :, None].to(mean.dtype).chunk(2, -1)
        return mean + shift * std, ((std * raw.exp()).square() + self.floor**2).sqrt()


class LowRank(Head):
    """Mean, own deviation and loadings of every target, each from its own token alone.

    Args:
        rank: how many directions targets have in common.
    """

    def __init__(self, *, dim: int, hidden: int, dim_y: int, rank: int, std: Std = "bounded") -> None:
        super().__init__(dim=dim, hidden=hidden, dim_out=(2 + rank) * dim_y)
        self.rank, self.dim_y, self.std = rank, dim_y, std

    def forward(
        self, tokens: Float[Tensor, "b m d"]
    ) -> tuple[Float[Tensor, "b m y"], Float[Tensor, "b m y"], Float[Tensor, "b m y r"]]:
        """Mean, deviation, and loadings in units of that deviation."""
        mean, raw, loading = self.precise(tokens).split([self.dim_y, self.dim_y, self.rank * self.dim_y], -1)
        return mean, std_of(raw, self.std), loading.unflatten(-1, (self.dim_y, -1)) / self.rank**0.5


class Mixture(Head):
    """Mixtures of k normals or logistics for every point: places, widths and weights.

    They begin spread out from -2 to 2 or, of grey `levels`, from black to white, wide enough to overlap.

    Args:
        components: k.
        levels: how many; widths are at least a tenth of the step between two. 0 for none: normals.
    """

    def __init__(
        self, *, dim: int, hidden: int, dim_y: int, components: int, levels: int = 0, depth: int = 2
    ) -> None:
        super().__init__(dim=dim, hidden=hidden, dim_out=components * (2 * dim_y + 1), depth=depth)
        self.components, self.bounds = components, (LOW, HIGH) if levels else (-2.0, 2.0)
        self.unit, self.start = (4 * START, 2 * START) if levels else (1.0, 1.0)
        self.least = SHARPEST * (HIGH - LOW) / (levels - 1) if levels else NARROWEST

    def forward(
        self, tokens: Float[Tensor, "b m d"]
    ) -> tuple[Float[Tensor, "b m k y"], Float[Tensor, "b m k y"], Float[Tensor, "b m k"]]:
        """Place, width and logarithm of the weight of each component."""
        raw = self.precise(tokens).unflatten(-1, (self.components, -1))
        shift, wide = raw[..., 1:].chunk(2, -1)
        spread = torch.linspace(*self.bounds, self.components, dtype=raw.dtype, device=raw.device)
        width = self.least + self.start * F.softplus(wide)
        return spread[:, None] + self.unit * shift, width, raw[..., 0].log_softmax(-1)


def level_of(value: Float[Tensor, "*b"], levels: int) -> Int64[Tensor, "*b"]:
    """The number of the level nearest to a value; beyond black and white, those."""
    place = (value - LOW) * ((levels - 1) / (HIGH - LOW))
    return place.round().clamp(0, levels - 1).long()


class LevelMixture(Distribution):
    """A mixture of k logistics at every point, rounded to `levels` values from black to white.

    All that a logistic has beyond black is black's, and so with white: pixels can be either for sure. With
    F the logistic function, level i at value v_i, and steps of s between values, a component gives

        P(i) = F((v_i + s/2 - location) / scale) - F((v_i - s/2 - location) / scale)

    where the first is 1 for white, the second 0 for black. `log_prob` is log sum_k w_k prod_y P_k(y), the
    probability of a point's levels, no density: never above 0. It is returned as (b, m, 1), as of
    `SampleMixture`. A value between two levels counts as the nearer one. `mean`, `variance`, `cdf` and
    `icdf` are those of each channel.

    Example:
        >>> black = LevelMixture(torch.full((1, 1, 1, 1), -9.0), torch.ones(1, 1, 1, 1) * 0.01,
        ...     torch.zeros(1, 1, 1), levels=256)
        >>> y = torch.tensor([[[-0.5]]])
        >>> black.log_prob(y).exp().item(), black.icdf(torch.tensor(0.99)).item(), black.stddev.item()
        (1.0, -0.5, 0.0)
    """

    arg_constraints: ClassVar[dict[str, constraints.Constraint]] = {}
    support = constraints.interval(LOW, HIGH)

    def __init__(
        self,
        location: Float[Tensor, "b m k y"],
        scale: Float[Tensor, "b m k y"],
        log_weight: Float[Tensor, "b m k"],
        *,
        levels: int,
    ) -> None:
        wide = torch.promote_types(location.dtype, torch.float32)
        self.location, self.scale, self.log_weight = (t.to(wide) for t in (location, scale, log_weight))
        self.levels, self.step = levels, (HIGH - LOW) / (levels - 1)
        super().__init__(location.shape[:2], location.shape[-1:], validate_args=False)

    @lazy_property
    def values(self) -> Float[Tensor, " levels"]:
        """Of all levels."""
        return LOW + self.step * torch.arange(self.levels, dtype=self.scale.dtype, device=self.scale.device)

    @lazy_property
    def cumulative(self) -> Float[Tensor, "b m y levels"]:
        """P(Y <= value) of every level."""
        edges = self.values[:-1] + self.step / 2
        total = self.scale.new_zeros(*self.batch_shape, *self.event_shape, self.levels - 1)
        parts = (self.location.unbind(2), self.scale.unbind(2), self.log_weight.exp().unbind(2))
        for location, scale, weight in zip(*parts, strict=True):  # by turns: at once would be k times this
            inside = torch.sigmoid((edges - location[..., None]) / scale[..., None])
            total = total + weight[..., None, None] * inside
        return torch.cat([total.clamp(0, 1), torch.ones_like(total[..., :1])], -1)

    @property
    def probabilities(self) -> Float[Tensor, "b m y levels"]:
        """Of every level."""
        return self.cumulative.diff(dim=-1, prepend=torch.zeros_like(self.cumulative[..., :1]))

    @property
    def mean(self) -> Float[Tensor, "b m y"]:
        return (self.probabilities * self.values).sum(-1)

    @property
    def variance(self) -> Float[Tensor, "b m y"]:
        apart = (self.values - self.mean[..., None]).square()
        return (self.probabilities * apart).sum(-1)

    def log_prob(self, value: Float[Tensor, "b m y"]) -> Float[Tensor, "b m 1"]:
        level = level_of(value, self.levels)[..., None, :]  # (b, m, 1, y)
        middle = LOW + self.step * level.to(self.scale.dtype) - self.location
        above, below = (middle + self.step / 2) / self.scale, (middle - self.step / 2) / self.scale
        black, white = level == 0, level == self.levels - 1
        # F(b) - F(a) = F(b) F(-a) (1 - exp(a - b)), each factor of which is exact far out, too
        upper = torch.where(white, 0.0, F.logsigmoid(above))
        lower = torch.where(black, 0.0, F.logsigmoid(-below))
        between = torch.where(black | white, 0.0, torch.log(-torch.expm1(-self.step / self.scale)))
        each = (upper + lower + between).sum(-1)
        return (each + self.log_weight).logsumexp(-1)[..., None]

    def cdf(self, value: Float[Tensor, "b m y"]) -> Float[Tensor, "b m y"]:
        return self._upto(level_of(value, self.levels))

    def below(self, value: Float[Tensor, "b m y"]) -> Float[Tensor, "b m y"]:
        """P(Y < value)."""
        level = level_of(value, self.levels)
        return torch.where(level == 0, 0.0, self._upto((level - 1).clamp_min(0)))

    def _upto(self, level: Int64[Tensor, "b m y"]) -> Float[Tensor, "b m y"]:
        out: Tensor = self.cumulative.gather(-1, level[..., None]).squeeze(-1)
        return out

    def icdf(self, value: Float[Tensor, "*#b"]) -> Float[Tensor, "b m y"]:
        """The lowest level that Y does not exceed with this probability."""
        wanted = value.to(self.scale.dtype).expand(self.cumulative.shape[:-1])
        return self.values[(self.cumulative[..., :-1] < wanted[..., None]).sum(-1)]

    def crps(self, value: Float[Tensor, "b m y"]) -> Float[Tensor, "b m y"]:
        """Continuous ranked probability score: the integral of (F(z) - [z >= value])^2 dz."""
        reached = torch.arange(self.levels, device=value.device) >= level_of(value, self.levels)[..., None]
        off = (self.cumulative - reached.to(self.cumulative.dtype))[..., :-1].square()
        return self.step * off.sum(-1)

    def sample(
        self, sample_shape: Any = (), *, generator: torch.Generator | None = None
    ) -> Float[Tensor, "*s b m y"]:
        shape, (b, m, _, y) = tuple(sample_shape), self.location.shape
        how: dict[str, Any] = {"generator": generator, "device": self.scale.device, "dtype": self.scale.dtype}
        with torch.no_grad():
            place = torch.rand((*shape, b, m, 1), **how)
            location, scale = chosen(place, self.log_weight, self.location, self.scale)
            value = location + scale * torch.rand((*shape, b, m, y), **how).logit(1e-7)
            return LOW + self.step * level_of(value, self.levels).to(value.dtype)


def level_log_prob(
    predicted: Distribution, value: Float[Tensor, "b m y"], levels: int
) -> Float[Tensor, "b m"]:
    """Log-probability of the levels of each point by any prediction, by which all of them compare.

    A normal gives a level all it has nearer to that than to any other: black and white get its tails, so that
    nothing of it is lost beyond them.
    """
    if isinstance(predicted, LevelMixture):
        if predicted.levels != levels:
            raise ValueError(f"the prediction is on {predicted.levels} levels, the values are on {levels}")
        return predicted.log_prob(value).squeeze(-1)
    if isinstance(predicted, SampleMixture):
        each = _normal_level(predicted.components, value[..., None, :], levels).sum(-1)
        return (each + predicted.log_weight.double()).logsumexp(-1)
    if isinstance(predicted, Normal):
        return _normal_level(predicted, value, levels).sum(-1)
    raise TypeError(f"it is not known here which levels a {type(predicted).__name__} gives how likely")


def _normal_level(predicted: Normal, value: Tensor, levels: int) -> Tensor:
    step, level = (HIGH - LOW) / (levels - 1), level_of(value, levels)
    mean, std = predicted.mean.double(), predicted.stddev.double()
    middle = LOW + step * level.double() - mean
    lower = torch.where(level == 0, -torch.inf, (middle - step / 2) / std)
    upper = torch.where(level == levels - 1, torch.inf, (middle + step / 2) / std)
    turned = lower + upper > 0  # where differences of tails are exact
    lower, upper = torch.where(turned, -upper, lower), torch.where(turned, -lower, upper)
    upto, below = torch.special.log_ndtr(upper), torch.special.log_ndtr(lower)
    found: Tensor = upto + torch.log(-torch.expm1(below - upto))
    return found

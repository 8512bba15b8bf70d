"""Times, gaps and marks as vectors, and back to distributions: a mixture over gaps, a softmax over marks."""

from math import log, pi
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, Float64, Int
from torch import Tensor, nn
from torch.distributions import Distribution, constraints
from torch.nn.modules.module import _has_any_global_hook

from constmem import kernels
from constmem.core.checks import positive
from constmem.core.layers import MLP, applied, keep_variance

LOG_SCALE = (-5.0, 1.0)  # bounds of a component's log deviation, in deviations of the data's log gaps
REACH = 10.0  # of a component's mean, in the same deviations
LONGEST = 1e12  # typical gaps from a start: beyond, float64 rounds the gaps between events
QUANTILES = 16  # at which marks that depend on the gap are averaged over it


class Scale(NamedTuple):
    """How a model counts time: mean and deviation of the log gaps it expects, and the tick of its clock."""

    mean: Float[Tensor, ""]
    std: Float[Tensor, ""]
    tick: Float[Tensor, ""]

    def standard(self, gaps: Float[Tensor, "*b"]) -> Float[Tensor, "*b"]:
        """Standardised log gaps in the model's precision; NaN for no gap at all."""
        z = (gaps.clamp_min(self.tick).log() - self.mean) / self.std
        return torch.where(gaps > 0, z, torch.nan).to(self.mean.dtype)

    def since(self, start: Float64[Tensor, "*#b"], times: Float64[Tensor, "*b"]) -> Float64[Tensor, "*b"]:
        """Times counted from the start, in typical gaps."""
        return ((times - start) * torch.exp(-self.mean.double())).clamp_max(LONGEST)


def sinusoids(times: Float[Tensor, "*b"], dim: int) -> Float[Tensor, "*b d"]:
    """sin and cos of time at `dim` / 2 frequencies from 1 down to 1e-4, in turns; float64 in, float64 out.

    Sine and cosine of a large float32 are noise: times come in float64, and counted from their start.
    """
    pairs = (dim + 1) // 2
    last = -8 * (pairs - 1) / dim  # the frequency of pair i is 1e4^(-2 i / dim)
    angles = times[..., None] * torch.logspace(0, last, pairs, dtype=times.dtype, device=times.device)
    return torch.stack([angles.sin(), angles.cos()], -1).flatten(-2)[..., :dim]


def unhooked(*modules: nn.Module) -> bool:
    """Whether nothing else happens before or after calls of these."""
    hooks = (found for m in modules for found in (m._forward_hooks, m._forward_pre_hooks))
    return not any(hooks) and not _has_any_global_hook()


class GapFeatures(nn.Module):
    """A standardised log gap as a vector: linear in z, in waves of z, and in whether there is a gap at all.

    NaN stands for no gap (nothing came before, or at the very same time), which has a vector of its own.
    """

    WAVES = (0.25, 0.5, 1.0, 2.0)  # half-turns a deviation

    def __init__(self, *, dim: int) -> None:
        super().__init__()
        self.project = keep_variance(nn.Linear(2 + 2 * len(self.WAVES), dim))
        self.waves: Tensor
        self.register_buffer("waves", pi * torch.tensor(self.WAVES), persistent=False)

    def weights(self) -> tuple[Tensor, Tensor, Tensor] | None:
        """Waves, and weight and bias of the projection; None where that is more than both."""
        linear: Any = self._modules["project"]
        plain = type(linear) is nn.Linear and unhooked(self, linear)
        return (self.waves, linear.weight, linear.bias) if plain else None

    def forward(self, z: Float[Tensor, "*b"]) -> Float[Tensor, "*b d"]:
        own = self.weights() if kernels.serves(z) else None
        found = None if own is None else kernels.gap_vectors(z, *own)
        if found is not None:
            return found
        there = ~z.isnan()
        z = z.nan_to_num(0.0).clamp(-8.0, 8.0)[..., None]
        angles = z * self.waves
        columns = torch.cat([torch.ones_like(z), z, angles.sin(), angles.cos()], -1)
        out: Tensor = self.project((columns * there[..., None]).to(self.waves.dtype))
        return out


class MarkEmbedding(nn.Module):
    """A vector for every mark, one for an unknown mark (-1), one for no event yet (-2)."""

    def __init__(self, *, num_marks: int, dim: int) -> None:
        super().__init__()
        self.num_marks = num_marks
        self.table = nn.Parameter(torch.randn(num_marks + 2, dim))

    def forward(self, marks: Int[Tensor, "*b"]) -> Float[Tensor, "*b d"]:
        index = torch.where(marks < 0, self.num_marks - 1 - marks, marks)  # -1 and -2 stand behind the marks
        return F.embedding(index, self.table)


class LogNormalMixture(Distribution):
    """A mixture of log-normals over the gap to the next event; all but quantiles in closed form.

        f(x) = sum_k w_k N(log x | loc_k, scale_k) / x,    S(x) = sum_k w_k Phi((loc_k - log x) / scale_k)

    Tails are summed as logarithms (`log_ndtr`), so that `log_survival` and `log_hazard` stay finite where
    1 - cdf is zero. A gap of zero has density zero; its `log_prob` is that of the smallest positive number
    of the dtype, a very negative number rather than minus infinity. Models lift gaps to their clock's
    tick before they score them.

    Args:
        log_weights, loc, scale: (*b, k) of the components; the weights are normalised here.

    Example:
        >>> gap = LogNormalMixture(torch.zeros(2), torch.tensor([0.0, 1.0]), torch.tensor([0.5, 1.5]))
        >>> x = torch.tensor(3.0)
        >>> torch.allclose(gap.log_hazard(x), gap.log_prob(x) - torch.log1p(-gap.cdf(x)), atol=1e-5)
        True
        >>> torch.allclose(gap.cdf(gap.icdf(torch.tensor(0.9))), torch.tensor(0.9))
        True
    """

    arg_constraints: ClassVar[dict[str, constraints.Constraint]] = {}
    support = constraints.positive

    def __init__(
        self, log_weights: Float[Tensor, "*b k"], loc: Float[Tensor, "*b k"], scale: Float[Tensor, "*b k"]
    ) -> None:
        self.log_weights = log_weights.log_softmax(-1)
        self.loc, self.scale = loc, scale
        super().__init__(loc.shape[:-1], validate_args=False)

    def log_prob(self, value: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
        x = self._log(value)
        z = (x[..., None] - self.loc) / self.scale
        normal = -0.5 * z**2 - self.scale.log() - 0.5 * log(2 * pi)
        return (self.log_weights + normal).logsumexp(-1) - x

    def log_cdf(self, value: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
        """The logarithm of the probability of a gap of at most `value`."""
        return self._tail(self._log(value), 1.0)

    def log_survival(self, value: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
        """The logarithm of the probability of a gap longer than `value`."""
        return self._tail(self._log(value), -1.0)

    def log_hazard(self, value: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
        """The logarithm of the intensity once `value` has passed without an event: log f - log S."""
        return self.log_prob(value) - self.log_survival(value)

    def cdf(self, value: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
        return self.log_cdf(value).exp()

    def survival(self, value: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
        """The probability of a gap longer than `value`."""
        return self.log_survival(value).exp()

    def hazard(self, value: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
        """The intensity once `value` has passed without an event."""
        return self.log_hazard(value).exp()

    @torch.no_grad()
    def icdf(self, value: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
        """Quantiles, without gradient: between the smallest and largest of the components' own."""
        p = value.double()
        found = kernels.quantiles(self.log_weights, self.loc, self.scale, p)
        if found is not None:
            return found.to(self.loc.dtype)
        inside = p.clamp(torch.finfo(torch.float64).tiny, 1 - torch.finfo(torch.float64).eps)
        quantile = self._cut(inside[..., None]).exp()
        quantile = torch.where(p <= 0, 0.0, torch.where(p >= 1, float("inf"), quantile))
        return torch.where(p.isnan() | (p < 0) | (p > 1), float("nan"), quantile).to(self.loc.dtype)

    def _cut(self, inside: Float64[Tensor, "... 1"]) -> Float64[Tensor, "..."]:
        """Logarithms of quantiles, by PyTorch's operators.

        The interval is cut in four until it is narrower than the last digit of the dtype. The smaller
        tail decides, below the median P(log gap < x) = sum_k w_k erfc((loc_k - x) / scale_k sqrt 2) / 2,
        above it that of the other side: no digits are lost in either.
        """
        loc, scale = self.loc.double(), self.scale.double()
        each = loc + scale * torch.special.ndtri(inside)
        low, width = each.amin(-1, keepdim=True), each.amax(-1, keepdim=True) - each.amin(-1, keepdim=True)
        side = 2.0 * (inside < 0.5).double() - 1.0
        slope = (-(0.5**0.5) * side / scale)[..., None, :]
        weights = (0.5 * side * self.log_weights.double().exp())[..., None]
        offset = loc[..., None, :] * -slope
        wanted = torch.where(inside < 0.5, inside, inside - 1.0)[..., None]
        quarters = torch.arange(1, 4, dtype=torch.float64, device=loc.device)[:, None]
        low, width = low[..., None], width[..., None]
        for _ in range(17 if self.loc.dtype == torch.float32 else 28):
            width = 0.25 * width
            cuts = torch.addcmul(low, width, quarters)  # (*b, 3, 1)
            shares = torch.erfc(torch.addcmul(offset, cuts, slope)) @ weights
            low = low + width * (shares < wanted).sum(-2, keepdim=True)
        found: Tensor = (low + 0.5 * width).squeeze(-1).squeeze(-1)
        return found

    @property
    def mean(self) -> Float[Tensor, "*b"]:
        return (self.log_weights + self.loc + 0.5 * self.scale**2).logsumexp(-1).exp()

    @property
    def median(self) -> Float[Tensor, "*b"]:
        """Half of all gaps are shorter: what minimises the absolute error."""
        half = torch.full(self.batch_shape, 0.5, dtype=self.loc.dtype, device=self.loc.device)
        return self.icdf(half)

    @property
    def variance(self) -> Float[Tensor, "*b"]:
        square = (self.log_weights + 2 * self.loc + 2 * self.scale**2).logsumexp(-1).exp()
        return square - self.mean**2

    @torch.no_grad()
    def sample(
        self, sample_shape: Any = (), *, generator: torch.Generator | None = None
    ) -> Float[Tensor, "..."]:
        shape = tuple(sample_shape)
        count = torch.Size(shape).numel()
        weights = self.log_weights.exp().reshape(-1, self.loc.shape[-1])
        pick = torch.multinomial(weights, count, replacement=True, generator=generator)  # (b, s)
        loc, scale = (t.reshape(weights.shape).gather(-1, pick).mT for t in (self.loc, self.scale))
        noise = torch.randn(loc.shape, generator=generator, dtype=loc.dtype, device=loc.device)
        return (loc + scale * noise).exp().reshape(*shape, *self.batch_shape)

    def __getitem__(self, index: Any) -> "LogNormalMixture":
        """The mixtures at some places of the batch."""
        where = (*(index if isinstance(index, tuple) else (index,)), ..., slice(None))
        return LogNormalMixture(self.log_weights[where], self.loc[where], self.scale[where])

    def _log(self, value: Tensor) -> Tensor:
        wide = value.to(torch.promote_types(value.dtype, self.loc.dtype))
        return wide.clamp_min(torch.finfo(self.loc.dtype).tiny).log().to(self.loc.dtype)

    def _tail(self, x: Tensor, side: float) -> Tensor:
        """log P(log gap < x) for side 1, log P(log gap > x) for side -1."""
        tails: Tensor = torch.special.log_ndtr(side * (x[..., None] - self.loc) / self.scale)
        return (self.log_weights + tails).logsumexp(-1)


class GapHead(nn.Module):
    """A mixture of log-normals from what is known before the event, learned on standardised log gaps.

    With log x = shift + scale z and a mixture of normals over z, the gap x is a mixture of log-normals
    with loc = shift + scale mu and deviation scale sigma: the change of variables is inside, and
    log-likelihoods are in the data's units.
    """

    def __init__(self, *, dim: int, hidden: int, components: int) -> None:
        super().__init__()
        positive("components", components)
        self.predictor = MLP(dim_in=dim, dim_hidden=hidden, dim_out=3 * components, depth=2)
        with torch.no_grad():  # components start side by side, not on top of each other
            bias = self.predictor.layers[-1].bias
            assert isinstance(bias, Tensor)
            bias[components : 2 * components] = torch.linspace(-1.5, 1.5, components)

    def forward(self, features: Float[Tensor, "*b d"], shift: Tensor, scale: Tensor) -> LogNormalMixture:
        log_weights, mean, raw = _wide(self.predictor(features)).chunk(3, -1)
        low, high = LOG_SCALE
        middle, reach = (low + high) / 2, (high - low) / 2
        log_scale = middle + reach * torch.tanh((raw - middle) / reach)
        mean = REACH * torch.tanh(mean / REACH)
        return LogNormalMixture(log_weights, shift + scale * mean, scale * log_scale.exp())


class MarkHead(nn.Module):
    """Log-probabilities of the marks, from what is known before the event and (`given_gap`) its gap."""

    def __init__(self, *, dim: int, hidden: int, num_marks: int, given_gap: bool) -> None:
        super().__init__()
        self.given_gap, self.num_marks = given_gap, num_marks
        self.from_features = keep_variance(nn.Linear(dim, hidden))
        self.from_gap = GapFeatures(dim=hidden) if given_gap else None
        self.out = keep_variance(nn.Linear(hidden, num_marks), gain=0.1)  # at first all marks are alike

    def forward(
        self, features: Float[Tensor, "*#b d"], gap: Float[Tensor, "*#b"]
    ) -> Float[Tensor, "*#b marks"]:
        """Args: `gap` is the standardised logarithm of the gap; NaN stands for an unknown one."""
        own: Any = self._modules
        hidden = applied(own["from_features"], features)
        if "from_gap" in own:
            hidden = hidden + own["from_gap"](gap)
        return _wide(applied(own["out"], F.relu(hidden))).log_softmax(-1)


def _wide(numbers: Tensor) -> Tensor:
    return numbers.to(torch.promote_types(numbers.dtype, torch.float32))

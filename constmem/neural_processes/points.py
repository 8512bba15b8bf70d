"""What any neural process is before it sees data: channels, the units of the data, costs, its states."""

import warnings
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.distributions import Normal
from typing_extensions import TypeVar

from constmem.core import checks, costs
from constmem.core.algebra import accumulator
from constmem.core.fold import Chunk
from constmem.core.model import Model
from constmem.core.monoid import Monoid
from constmem.core.state import AttentionState

S = TypeVar("S", bound=Monoid, default=AttentionState)
_UNITS = "scales."
PARTS = ("x_mean", "x_std", "y_mean", "y_std")


def normal(mean: Tensor, std: Tensor) -> Normal:
    """A normal distribution in at least float32; its arguments were checked at the border."""
    wide = torch.promote_types(mean.dtype, torch.float32)
    return Normal(mean.to(wide), std.to(wide), validate_args=False)


def near(bounds: Sequence[float], number: float) -> bool:
    """Whether a number is in a range, or beyond it by at most half of its width."""
    (low, high), more = bounds, (bounds[1] - bounds[0]) / 2
    return low - more <= number <= high + more


class Scales(nn.Module):
    """Mean and standard deviation of every channel of the data a model is made for.

    Inside, x' = (x - x_mean) / x_std and y' = (y - y_mean) / y_std. A predicted N(m, s) of y' is
    N(y_mean + y_std m, y_std s) of y, and log p(y) = log p(y') - sum log y_std. Kept in float64,
    whatever the precision of the model: a time stamp has more digits than float32 holds.

    Example:
        >>> x, y = torch.rand(100, 2) * 40 + 1000, torch.rand(100, 1)
        >>> x_in, _, _ = Scales.of(x, y)((x[None], y[None], None))
        >>> bool(x_in.mean().abs() < 1e-4), round(x_in.std(1, correction=0).mean().item(), 4)
        (True, 1.0)
    """

    x_mean: Tensor
    x_std: Tensor
    y_mean: Tensor
    y_std: Tensor

    def __init__(self, *, x_mean: Any, x_std: Any, y_mean: Any, y_std: Any) -> None:
        super().__init__()
        for name, numbers in zip(PARTS, (x_mean, x_std, y_mean, y_std), strict=True):
            tensor = torch.as_tensor(numbers, dtype=torch.float64).detach().clone()
            if tensor.ndim != 1 or not bool(torch.isfinite(tensor).all()):
                raise ValueError(f"{name} must be one finite number for each channel, not {numbers!r}")
            if name.endswith("std") and not bool((tensor > 0).all()):
                raise ValueError(f"{name} is {tensor.tolist()}, but every deviation must be above 0")
            self.register_buffer(name, tensor)
        for side, mean, std in (("x", self.x_mean, self.x_std), ("y", self.y_mean, self.y_std)):
            if len(mean) != len(std):
                raise ValueError(f"{side}_mean has {len(mean)} channels and {side}_std {len(std)}: one each")

    @staticmethod
    def of(x: Float[Tensor, "n x"], y: Float[Tensor, "n y"]) -> "Scales":
        """The scales of these rows: those a model is to be trained on, without the held-out ones."""
        found: dict[str, Tensor] = {}
        checks.tensors(x=x, y=y)
        for side, rows in (("x", x), ("y", y)):
            checks.dense(side, rows)
            if rows.ndim != 2 or rows.shape[0] < 2 or rows.is_complex() or rows.is_meta:
                what = f"{rows.dtype} of shape {tuple(rows.shape)} on {rows.device}"
                raise ValueError(f"{side} is {what}, but real (rows, channels), two or more, are needed")
            wide = rows.double()
            found[f"{side}_mean"], found[f"{side}_std"] = wide.mean(0), wide.std(0, correction=0)
            constant = (wide.amax(0) == wide.amin(0)).nonzero().flatten().tolist()
            if constant:
                what = f"column {constant[0]} of {side} is constant over all {len(rows)} rows"
                raise ValueError(f"{what}: there is nothing to learn from it; leave it out")
        return Scales(**found)

    @property
    def dims(self) -> tuple[int, int]:
        """(dim_x, dim_y)."""
        return self.x_mean.shape[0], self.y_mean.shape[0]

    def forward(self, chunk: Chunk) -> Chunk:
        """Points in the model's own units."""
        x, y, mask = chunk
        return self.inputs(x), ((y - self.y_mean) / self.y_std).to(y.dtype), mask

    def inputs(self, x: Float[Tensor, "*b x"]) -> Float[Tensor, "*b x"]:
        """Inputs in the model's own units."""
        return ((x - self.x_mean) / self.x_std).to(x.dtype)

    def restored(
        self, mean: Float[Tensor, "*b y"], std: Float[Tensor, "*b y"]
    ) -> tuple[Float[Tensor, "*b y"], Float[Tensor, "*b y"]]:
        """A predicted mean and deviation in the units of the data."""
        wide = torch.promote_types(mean.dtype, torch.float32)
        return (self.y_mean + self.y_std * mean).to(wide), (self.y_std * std).to(wide)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Scales":  # noqa: ARG002
        """Follow the model to another device, but not to another precision."""
        where = fn(torch.empty(0, device=self.x_mean.device)).device
        for name in PARTS:
            setattr(self, name, getattr(self, name).to(where, accumulator(where)))
        return self


class PointModel(Model, Generic[S]):
    """A model of points with `dim_x` channels in and `dim_y` out, that remembers them in states of type S."""

    state_type: type[Monoid] = AttentionState

    def __init__(self, *, dim_x: int, dim_y: int) -> None:
        super().__init__()
        checks.positive("dim_x", dim_x)
        checks.positive("dim_y", dim_y)
        self.dim_x, self.dim_y, self._calls = dim_x, dim_y, [0]
        self.scales: Scales | None
        self.register_module("scales", None)

    @classmethod
    def family(cls) -> Mapping[str, type[Model]]:
        from constmem.neural_processes import MODELS  # which is made of this class

        return MODELS

    @property
    @abstractmethod
    def layout(self) -> tuple[int, ...]:
        """What the states of this model have in common: `state.layout`."""

    def set_scales(self, scales: Scales | None) -> None:
        """Let the model take and predict data in these units, of which it sees standardised values.

        They are saved with the weights and part of the fingerprint: states made with others are refused.
        """
        if scales is not None and scales.dims != (self.dim_x, self.dim_y):
            raise ValueError(
                f"the scales are of {scales.dims} input and output channels, the model has "
                f"{(self.dim_x, self.dim_y)}"
            )
        self.scales = None if scales is None else scales.to(self.device)

    def needs(self, *, learning: bool) -> costs.Needs | None:  # noqa: ARG002
        """What a context point and a target take at the worst moment; None in constant memory.

        Args:
            learning: whether a gradient is wanted, for which more must be kept.
        """
        return None

    def estimated_peak(self, batch: int, points: int, targets: int = 0, *, learning: bool = False) -> int:
        """About how many bytes it takes to work these through: right within a factor of two.

        batch * (points * needs.point + targets * needs.target) numbers of the model's precision (or of that
        which autocast works in), on the fused path; 0 for models of constant memory, which never need to ask.
        """
        needs = self.needs(learning=learning)
        if needs is None:
            return 0
        numbers = batch * (points * needs.point + targets * needs.target)
        where = self.device.type
        lower = torch.amp.is_autocast_available(where) and torch.is_autocast_enabled(where)
        return numbers * (torch.get_autocast_dtype(where) if lower else self.dtype).itemsize

    def afford(self, batch: int, points: int, targets: int = 0) -> None:
        """Refuse work of these sizes that this device has too little memory for, before it dies of it.

        `loss` and `query` ask by themselves, except where they are compiled: then ask before.
        """
        if torch.compiler.is_compiling():
            return
        if self.estimated_peak(batch, points, targets, learning=True) < costs.WORTH_ASKING:
            return  # small inputs pay for nothing more
        learning = torch.is_grad_enabled() and any(p.requires_grad for p in self.parameters())
        needed = self.estimated_peak(batch, points, targets, learning=learning)
        what = f"{type(self).__name__}, given {points:,} points and {targets:,} targets"
        costs.require_room(needed, self.device, f"{what} in a batch of {batch:,},")

    # Inside

    def _signed_by(self) -> Sequence[Tensor]:
        scales = self._modules["scales"]  # past the look-up of modules
        own = self.observing_parameters()
        return own if scales is None else [*own, *scales.buffers()]

    def _load(self, tensors: Mapping[str, Tensor]) -> None:
        units = {k.removeprefix(_UNITS): t for k, t in tensors.items() if k.startswith(_UNITS)}
        self.set_scales(Scales(**units) if units else None)
        super()._load(tensors)

    def _scaled(self, chunk: Chunk) -> Chunk:
        """Points in the model's own units, with zeros where the mask leaves them out: nothing there leaks."""
        scales = self._modules["scales"]
        x, y, mask = chunk if scales is None else scales(chunk)
        if mask is None:
            return x, y, None
        keep = mask[..., None]
        return torch.where(keep, x, 0.0), torch.where(keep, y, 0.0), mask

    def _check(
        self, x: Tensor, y: Tensor, mask: Tensor | None, *, values: bool = True, chunk: int = 4096
    ) -> None:
        device = self.device
        checks.points("x", x, self.dim_x, device=device)
        checks.points("y", y, self.dim_y, like=x, device=device)
        if mask is not None:
            checks.mask(mask, x)
        compared = self.domain and (x.shape[1] > 1 or self._due()) and not checks.traced(device)
        own = self._taken(x, y) if compared else ()
        if compared and mask is None and self._familiar(*zip("xy", own, strict=True)):
            return
        if values:
            self._check_values(x, y, mask, chunk)
        for name, points in zip("xy", own, strict=False):
            self._compare_with_domain(name, points, mask)

    def _due(self) -> bool:
        """Whether a single point is to be checked: not every one is, since that takes 10 us."""
        self._calls[0] += 1
        return self._calls[0] % 64 == 1

    def _familiar(self, *named: tuple[str, Tensor]) -> bool:
        """Whether all numbers are as those the model was trained on, and so finite: one wait for a GPU."""
        bounds = [bound for name, _ in named for bound in self.domain.get(name, [])]
        flat = [points.reshape(-1, points.shape[-1]) for _, points in named]
        if len(bounds) != sum(t.shape[-1] for t in flat) or not all(map(len, flat)):
            return False
        least, most = zip(*(t.aminmax(dim=0) for t in flat), strict=True)
        return all(map(near, bounds + bounds, torch.cat([*least, *most]).tolist()))

    def _compare_with_domain(self, name: str, points: Tensor, mask: Tensor | None = None) -> None:
        """Warn, once, of numbers beyond what the model was trained on by more than half of that range."""
        real = (points if mask is None else points[mask]).reshape(-1, points.shape[-1])
        if not len(real):
            return
        for channel, (low, high) in enumerate(self.domain.get(name, [])):
            least, most = (v.item() for v in real[:, channel].aminmax())
            if not all(near((low, high), v) for v in (least, most)):
                self.domain = {}
                warnings.warn(
                    f"channel {channel} of {name} goes from {least:.3g} to {most:.3g} in the model's units, "
                    f"which was trained on {low:g} to {high:g}: predictions there mean little; bring the "
                    "data into that range, or train a model on such data",
                    stacklevel=4,
                )
                return

    def _check_values(self, x: Tensor, y: Tensor, mask: Tensor | None, chunk: int) -> None:
        """Refuse numbers that are not finite as the model takes them, `chunk` points at a time."""
        if checks.traced(self.device):  # where values cannot be checked
            return
        if self.device.type == "cuda" and checks.surely_finite(*self._taken(x, y)):
            return
        for i in range(0, x.shape[1], chunk):
            here = None if mask is None else mask[:, i : i + chunk]
            parts = x[:, i : i + chunk], y[:, i : i + chunk]
            for name, part, taken in zip("xy", parts, self._taken(*parts), strict=True):
                checks.finite(name, part, here, first=i, taken=taken)

    def _check_targets(self, xt: Tensor) -> None:
        """Refuse targets of other channels, elsewhere, or not finite as the model takes them."""
        checks.points("xt", xt, self.dim_x, device=self.device)
        taken = xt if self.scales is None else self.scales.inputs(xt)
        compared = bool(self.domain) and not checks.traced(self.device)
        if compared and self._familiar(("x", taken.to(self.dtype))):
            return
        checks.finite("xt", xt, taken=taken.to(self.dtype))
        if compared:
            self._compare_with_domain("x", taken)

    def _taken(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Points in the model's own units and precision."""
        own_x, own_y, _ = self._scaled((x, y, None))
        return own_x.to(self.dtype), own_y.to(self.dtype)

    def _require_own(self, state: S) -> None:
        """Refuse a state that other weights, another shape of model or another device made."""
        if not isinstance(state, self.state_type):
            raise TypeError(f"expected a state of {type(self).__name__}, not {type(state).__name__}")
        known = self._signature  # whose name says more than a shape
        if (known is None or state.fingerprint != known[1]) and state.layout != self.layout:
            raise ValueError(
                f"this state is of another model: it has {state.AXES} "
                f"{tuple(state.layout)}, this model {self.layout}"
            )
        self._require_made_here(state)

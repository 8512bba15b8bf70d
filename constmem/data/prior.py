"""Synthetic tables, and what a closed-form learner gets wrong on them: what the corrections learn from."""

from dataclasses import dataclass
from math import log, pi
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from constmem.data.task import Task

COLUMNS = 8  # of a synthetic table, at most
SHOWN = 4  # of its columns, those that matter most, beside what was predicted
CHANNELS = SHOWN + 5
FOLDS = 4
FEATURES = 128
LAMBDAS = 1e-4, 1e-3, 1e-2, 0.1, 1.0  # noise over signal, as the learner in the prior may choose it
SMALL = 0.05  # deviations of the target: what is left is shown as no less
FAR = 8.0  # residuals beyond so many deviations are shown as that
HUGE = 1e6  # deviations of the target: float32 holds what is left of it
LEAST, MOST = 24, 1024  # rows of a table's context
NOISES = 5  # normal, Student's t, skewed, two peaks, even


def context_inputs(
    mean: Float[Tensor, "*b"], y: Tensor, columns: Float[Tensor, "*b c"], sigma: Tensor
) -> Float[Tensor, "*b x"]:
    """How rows whose targets are known are shown to the model of residuals, in units of the target.

    They say what was predicted without them, their target and the deviation of such predictions.
    """
    blank = torch.zeros_like(mean)
    return _side_by_side(columns, mean, y, blank, blank, _size(sigma).expand_as(mean))


def target_inputs(
    mean: Float[Tensor, "*b"], deviation: Tensor, columns: Tensor, sigma: Tensor, rows: Tensor
) -> Float[Tensor, "*b x"]:
    """How rows to be predicted are shown: what is predicted, its deviation, and of how many rows."""
    wide = (deviation / sigma).log()
    many = (rows.clamp(max=MOST) / LEAST).log().expand_as(mean)
    return _side_by_side(columns, mean, torch.zeros_like(mean), wide, many, _size(sigma).expand_as(mean))


def residual_of(y: Tensor, mean: Tensor, deviation: Tensor) -> Tensor:
    """How far targets lie from their predictions, in deviations."""
    return ((y - mean) / deviation).clamp(-FAR, FAR)


def _size(sigma: Tensor) -> Tensor:
    """How much was left to predict; next to nothing is all the same."""
    return sigma.clamp(min=SMALL).log()


def _side_by_side(columns: Tensor, *channels: Tensor) -> Tensor:
    return torch.cat([torch.stack(channels, -1).clamp(-HUGE, HUGE), columns.clamp(-FAR, FAR)], -1)


def table_tasks(batch: int, *, generator: torch.Generator, rows: int = 512, targets: int = 128) -> Task:
    """Residuals of closed-form regressions on synthetic tables, as tasks of points.

    A table is a random function of up to eight columns of several kinds, with noise that may depend on the
    columns, have heavy tails, be skewed or have two peaks, and targets that may be rounded, bent or cut off.
    A ridge regression on random features predicts the context's rows from others (in `FOLDS` parts of
    the first rows) and the target's rows from all of them. What is left, in deviations, is y of the task.

    Args:
        batch: number of tables.
        generator: source of all randomness; the tasks are made on its device.
        rows: context rows, at most; each table has from 24 to so many.
        targets: rows to predict.
    """
    draw = _Draws(generator)
    x, rates = _columns(draw, batch, rows + targets)
    y = _targets(draw, x, rates)
    count = (LEAST * (rows / LEAST) ** draw.uniform(batch, 1)).floor()
    place = torch.arange(rows, device=x.device)
    seen = place < count
    known = torch.where(seen, y[:, :rows], 0.0)
    centre = known.sum(1, keepdim=True) / count
    spread = (torch.where(seen, known - centre, 0.0).square().sum(1, keepdim=True) / count).sqrt() + 1e-6
    y = (y - centre) / spread
    base = _Base.of(draw, x, y, seen, rates)
    order = rates.argsort(1, descending=True)[:, None, :SHOWN].expand(-1, x.shape[1], -1)
    columns = x.gather(2, order)
    first, last = slice(0, rows), slice(rows, rows + targets)
    sigma = base.sigma[:, None]
    xc = context_inputs(base.before, y[:, first], columns[:, first], sigma)
    xt = target_inputs(base.mean, base.deviation, columns[:, last], sigma, count)
    yc = residual_of(y[:, first], base.before, sigma)
    yt = residual_of(y[:, last], base.mean, base.deviation)
    return Task(xc.float(), yc[..., None].float(), xt.float(), yt[..., None].float(), seen)


@dataclass(frozen=True)
class _Draws:
    generator: torch.Generator

    @property
    def _kind(self) -> dict[str, Any]:  # float64: Gram matrices of less are not positive definite
        return {"device": self.generator.device, "dtype": torch.float64}

    def uniform(self, *shape: int, low: float = 0.0, high: float = 1.0) -> Tensor:
        made = torch.rand(shape, generator=self.generator, **self._kind)
        return low + (high - low) * made

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator, **self._kind)

    def chance(self, p: float, *shape: int) -> Bool[Tensor, "*b"]:
        return self.uniform(*shape) < p

    def one_of(self, count: int, *shape: int) -> Tensor:
        return torch.randint(count, shape, generator=self.generator, device=self.generator.device)


def _columns(draw: _Draws, b: int, n: int) -> tuple[Float[Tensor, "b n c"], Float[Tensor, "b c"]]:
    """Columns of several kinds, correlated, and how fast the target changes with each."""
    z = draw.normal(b, n, COLUMNS)
    mixing = 0.5 * draw.uniform(b, 1, 1) * draw.normal(b, COLUMNS, COLUMNS)
    mixing = mixing + torch.eye(COLUMNS, dtype=z.dtype, device=z.device)
    z = z @ mixing / mixing.square().sum(1, keepdim=True).sqrt()
    kind = draw.one_of(4, b, 1, COLUMNS)
    even = (torch.special.ndtr(z) - 0.5) * 12**0.5
    heavy = torch.sinh(z) / 1.8
    steps = 2 + draw.one_of(10, b, 1, COLUMNS)
    rounded = (even * steps / 3.5).round() * 3.5 / steps
    x = torch.where(kind == 0, z, torch.where(kind == 1, even, torch.where(kind == 2, heavy, rounded)))
    used = 1 + draw.one_of(COLUMNS, b, 1)
    rates = (1.2 * draw.normal(b, COLUMNS) - 1.0).exp()
    real = torch.arange(COLUMNS, device=x.device) < used
    x = torch.where(real[:, None], x, 0.0)
    return x.clamp(-FAR, FAR), torch.where(real, rates.clamp(max=3.0), 0.0)


def _waves(draw: _Draws, x: Tensor, rates: Tensor, count: int = 48) -> Float[Tensor, "b n"]:
    """A smooth random function of the columns, of unit variance about."""
    w = draw.normal(x.shape[0], COLUMNS, count) * rates[:, :, None]
    phase = draw.uniform(x.shape[0], 1, count, high=2 * pi)
    weight = draw.normal(x.shape[0], count, 1)
    made: Tensor = (torch.cos(x @ w + phase) @ weight)[..., 0] * (2 / count) ** 0.5
    return made


def _trees(draw: _Draws, x: Tensor, rates: Tensor, count: int = 6, depth: int = 3) -> Float[Tensor, "b n"]:
    """A sum of oblivious trees: their levels test columns that matter."""
    b, n, _ = x.shape
    luck = -(-draw.uniform(b, count * depth, COLUMNS, low=1e-6).log() + 1e-6).log()
    column = ((rates + 1e-4).log()[:, None] + luck).argmax(-1)[:, None]  # as likely as it matters
    place = draw.one_of(n, b, 1, count * depth)
    tested = x.gather(2, column.expand(-1, n, -1))
    passed = (tested > tested.gather(1, place)).view(b, n, count, depth)
    leaf = (passed * (2 ** torch.arange(depth, device=x.device))).sum(-1)
    values = draw.normal(b, count, 2**depth)
    made: Tensor = (
        values[:, None].expand(-1, n, -1, -1).gather(3, leaf[..., None])[..., 0].sum(-1) / count**0.5
    )
    return made


def _network(draw: _Draws, x: Tensor, rates: Tensor, hidden: int = 16) -> Float[Tensor, "b n"]:
    """A small random network."""
    w = draw.normal(x.shape[0], COLUMNS, hidden) * rates[:, :, None]
    h = torch.tanh(1.5 * x @ w + draw.normal(x.shape[0], 1, hidden))
    made: Tensor = (h @ draw.normal(x.shape[0], hidden, 1))[..., 0] / hidden**0.5
    return made


def _unit(f: Tensor) -> Tensor:
    return (f - f.mean(1, keepdim=True)) / (f.std(1, keepdim=True) + 1e-3)


def _targets(draw: _Draws, x: Tensor, rates: Tensor) -> Float[Tensor, "b n"]:
    """A random function of the columns, noise of many laws, and what becomes of them."""
    b, n, _ = x.shape
    line = (x @ (draw.normal(b, COLUMNS, 1) * rates[:, :, None]))[..., 0]
    parts = torch.stack([_waves(draw, x, rates), _trees(draw, x, rates), _network(draw, x, rates), line], -1)
    share = draw.uniform(b, 1, 4) * draw.chance(0.5, b, 1, 4) + 1e-3
    f = _unit((_unit(parts) * share).sum(-1))
    switch, width = (_waves(draw, x, 0.7 * rates) for _ in range(2))
    level = (log(0.01) + draw.uniform(b, 1) * log(150.0)).exp()  # from 0.01 to 1.5
    by_value = torch.where(draw.chance(0.3, b, 1), f, width)
    uneven = draw.chance(0.5, b, 1) * draw.uniform(b, 1, high=1.2)
    y = f + level * (uneven * by_value).clamp(-3, 3).exp() * _noise(draw, b, n, switch)
    return _bent(draw, y)


def _noise(draw: _Draws, b: int, n: int, switch: Tensor) -> Float[Tensor, "b n"]:
    """Noise of unit size about, of one law for each table."""
    normal, other = (draw.normal(b, n) for _ in range(2))
    heavy = normal / ((other.square() + draw.normal(b, n).square() + draw.normal(b, n).square()) / 3).sqrt()
    skewed = -draw.uniform(b, n, low=1e-6).log() - 1.0
    apart = draw.uniform(b, 1, low=1.0, high=6.0)
    up = draw.uniform(b, n) < torch.sigmoid(2 * switch + draw.normal(b, 1))
    peaks = 0.4 * other + apart * torch.where(up, 0.5, -0.5)
    even = draw.uniform(b, n, low=-(3**0.5), high=3**0.5)
    law = draw.one_of(NOISES, b, 1)
    made = normal
    for number, noise in enumerate((heavy.clamp(-30, 30), skewed, peaks, even), start=1):
        made = torch.where(law == number, noise, made)
    return made * torch.where(draw.chance(0.5, b, 1), -1.0, 1.0)


def _bent(draw: _Draws, y: Tensor) -> Tensor:
    """Targets as tables have them: as they are, rounded, bent, or cut off at an end."""
    b = y.shape[0]
    y = _unit(y)
    bent = torch.where(draw.chance(0.5, b, 1), y.clamp(-6, 3).exp(), torch.sinh(0.8 * y.clamp(-6, 6)))
    y = torch.where(draw.chance(0.2, b, 1), _unit(bent), y)
    end = draw.normal(b, 1) - 0.5
    y = torch.where(draw.chance(0.15, b, 1), y.clamp(min=end), y)
    step = (log(0.02) + draw.uniform(b, 1) * log(60.0)).exp()  # from 0.02 to 1.2 deviations
    return torch.where(draw.chance(0.3, b, 1), (y / step).round() * step, y)


@dataclass(frozen=True)
class _Base:
    """What ridge regressions answer: of context rows without them, and of the targets.

    Attributes:
        before: of context rows, by those of the first rows that are in other folds.
        mean, deviation: of targets, by all context rows.
        sigma: deviation of what `before` leaves, over the first rows.
    """

    before: Float[Tensor, "b n"]
    mean: Float[Tensor, "b m"]
    deviation: Float[Tensor, "b m"]
    sigma: Float[Tensor, " b"]

    @staticmethod
    def of(draw: _Draws, x: Tensor, y: Tensor, seen: Tensor, rates: Tensor) -> "_Base":
        (b, _, _), rows = x.shape, seen.shape[1]
        phi = _features(draw, x, rates)
        known, asked = phi[:, :rows] * seen[..., None], phi[:, rows:]
        target = torch.where(seen, y[:, :rows], 0.0)[..., None]
        share = draw.uniform(b, 1, low=0.15, high=1.0)
        share = torch.where(draw.chance(0.5, b, 1), 1.0, share)
        place = torch.arange(rows, device=x.device)
        warm = place < (share * seen.sum(1, keepdim=True)).ceil()
        fold = draw.one_of(FOLDS, b, rows)
        gram, cross = known.mT @ known, known.mT @ target
        strength = _strength(gram, cross, target, seen.sum(1))
        before = torch.zeros_like(target)
        for k in range(FOLDS):
            used = known * (warm & (fold != k))[..., None]
            factor = _factor(used.mT @ known, strength)
            weight = _solved(factor, used.mT @ target)
            before = torch.where((fold == k)[..., None], known @ weight, before)
        left = torch.where(warm[..., None], target - before, 0.0).square().sum((1, 2)) / warm.sum(1)
        sigma = left.sqrt().clamp(min=1e-3)
        factor = _factor(gram, strength)
        weight = _solved(factor, cross)
        noise = (target - known @ weight).square().sum((1, 2)) + strength * weight.square().sum((1, 2))
        noise = (noise / seen.sum(1)).clamp(min=1e-6)
        reach = torch.linalg.solve_triangular(factor, asked.mT, upper=False).square().sum(1)
        deviation = (noise[:, None] * (1 + reach)).sqrt()
        return _Base(before[..., 0], (asked @ weight)[..., 0], deviation, sigma)


def _features(draw: _Draws, x: Tensor, rates: Tensor) -> Float[Tensor, "b n p"]:
    """Waves of three lengths about the right ones, the columns and a constant."""
    lengths = 2.0 ** (torch.arange(FEATURES, device=x.device) % 3 - 1)
    guessed = rates * (0.4 * draw.normal(*rates.shape)).exp()
    w = draw.normal(x.shape[0], COLUMNS, FEATURES) * guessed[:, :, None] * lengths
    waves = torch.cos(x @ w + draw.uniform(x.shape[0], 1, FEATURES, high=2 * pi)) * (2 / FEATURES) ** 0.5
    return torch.cat([torch.ones_like(x[..., :1]), x * 0.5, waves], -1)


def _factor(gram: Tensor, strength: Tensor) -> Tensor:
    eye = torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device)
    return torch.linalg.cholesky_ex(gram + strength[:, None, None] * eye)[0]  # type: ignore[no-any-return]


def _solved(factor: Tensor, right: Tensor) -> Tensor:
    half = torch.linalg.solve_triangular(factor, right, upper=False)
    made: Tensor = torch.linalg.solve_triangular(factor.mT, half, upper=True)
    return made


def _strength(gram: Tensor, cross: Tensor, y: Tensor, rows: Tensor) -> Float[Tensor, " b"]:
    """The ratio of noise and signal with the highest evidence."""
    best, chosen = None, gram.new_zeros(len(gram))
    p = gram.shape[-1]
    for ratio in LAMBDAS:
        factor = _factor(gram, torch.full_like(chosen, ratio))
        weight = _solved(factor, cross)
        left = (y.square().sum((1, 2)) - (cross * weight).sum((1, 2))).clamp(min=1e-8)
        determinant = 2 * factor.diagonal(dim1=1, dim2=2).clamp(min=1e-12).log().sum(1) - p * log(ratio)
        evidence = -0.5 * (rows * (left / rows).log() + determinant)
        if best is None:
            best, chosen = evidence, torch.full_like(chosen, ratio)
        else:
            chosen = torch.where(evidence > best, ratio, chosen)
            best = torch.maximum(best, evidence)
    return chosen

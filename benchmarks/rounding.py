"""What rounding does to the states of a trained model: which operands kernels and machine code can afford.

    python benchmarks/rounding.py          # half a minute; writes results/rounding.json

Everything is computed in float64 on a CPU with the weights that come with the package; only the operands of
the matrix products named are rounded first, as the matrix units of a GPU would round them. The last row is of
the machine code of CPUs, where it multiplies bfloat16. Errors of values are relative to the largest, those of
the lse absolute.
"""

from collections.abc import Callable, Iterator
from math import log2
from typing import Any

import torch
import torch.nn.functional as F
from record import provenance, save
from torch import Tensor

from constmem import CMANP
from constmem.kernels import cpu

Rounding = Callable[[Tensor], Tensor]


def exact(t: Tensor) -> Tensor:
    return t


def bfloat16(t: Tensor) -> Tensor:
    return t.to(torch.bfloat16).double()


def float16(t: Tensor) -> Tensor:
    return t.to(torch.float16).double()


def tf32(t: Tensor) -> Tensor:
    bits = (t.float().view(torch.int32) + 0x1000) & ~0x1FFF
    return bits.view(torch.float32).double()


def product(a: Tensor, b: Tensor, rounding: Rounding, terms: int = 1) -> Tensor:
    """a b' with rounded operands; of three terms, what was rounded off is multiplied too."""
    high_a, high_b = rounding(a), rounding(b)
    first = high_a @ high_b.mT
    if terms == 1:
        return first
    return first + rounding(a - high_a) @ high_b.mT + high_a @ rounding(b - high_b).mT


def strokes(n: int, seed: int = 0) -> Tensor:
    """Pixels (x, y, grey) at random places of a smooth stroke, in the units of the shipped model."""
    random = torch.Generator().manual_seed(seed)
    x = 2 * torch.rand(n, 2, generator=random, dtype=torch.float64) - 1
    grey = (-(((0.5 * (3 * x[:, :1]).sin() + x[:, 1:]) / 0.15) ** 2)).exp() - 0.5
    return torch.cat([x, grey], -1)


class Observer:
    """The shipped model's way from points to a state, with a rounding for every product."""

    def __init__(self) -> None:
        self.model = CMANP.from_pretrained("emnist").eval()
        self.wide = model = CMANP.from_pretrained("emnist").eval().double()
        prepared = model.stack.observation.prepare()
        self.queries = log2(torch.e) * prepared.queries.flatten(0, 1)  # (h, s, c), to base two
        heads, _, channels = self.queries.shape
        self.key, self.value = (w.unflatten(0, (heads, channels)) for w in prepared.weight.chunk(2))
        self.layers = model.embed.weights()

    def tokens(self, points: Tensor, rounding: Rounding = exact, terms: int = 1) -> Tensor:
        for i, (weight, bias) in enumerate(self.layers):
            points = product(points if i == 0 else F.relu(points), weight, rounding, terms) + bias
        return F.layer_norm(points, (points.shape[-1],))

    def projected(self, h: Tensor, rounding: Rounding) -> tuple[Tensor, Tensor]:
        """Keys and values made first, as usual; every product rounded."""
        k, v = (product(h, w, rounding) for w in (self.key, self.value))
        return softmax(product(self.queries, k, rounding), v, rounding)

    def weighed(
        self, h: Tensor, rounding: Rounding, *, key: Rounding = exact, value: Rounding = exact
    ) -> tuple[Tensor, Tensor]:
        """Shares and values rounded, divided by the sum of the shares as rounded; projections if asked to."""
        scores, v = self.queries @ product(h, self.key, key).mT, product(h, self.value, value)
        shares = rounding(torch.exp2(scores - scores.amax(-1, keepdim=True)))
        return shares @ rounding(v) / shares.sum(-1, keepdim=True), softmax(scores, v, exact)[1]

    def by_machine(self, points: Tensor, precision: str) -> tuple[Tensor, Tensor]:
        """What the CPU's machine code is off by when products so precise are asked for."""
        before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision(precision)
        found = self.model.stack.observation.observe(points.float()[None], embed=self.model.embed)
        torch.set_float32_matmul_precision(before)
        true = self.wide.stack.observation.observe(points[None], embed=self.wide.embed)
        return (found.value - true.value)[0].flatten(0, 1), (found.lse - true.lse)[0].flatten(0, 1)

    def absorbed(self, h: Tensor, rounding: Rounding, lift: float = 0.0) -> tuple[Tensor, Tensor]:
        """Queries absorbed into keys, values left for the end: two rounded products."""
        a = self.queries @ self.key
        a = (a - a.mean(-1, keepdim=True)).flatten(0, 1)
        mean, lse = softmax(product(a, h, rounding), h, rounding, lift)
        mean = mean.unflatten(0, self.queries.shape[:2])
        return mean @ self.value.mT, lse.unflatten(0, self.queries.shape[:2])


def softmax(scores: Tensor, v: Tensor, rounding: Rounding, lift: float = 0.0) -> tuple[Tensor, Tensor]:
    top = scores.amax(-1, keepdim=True) - lift
    shares = torch.exp2(scores - top)
    total = shares.sum(-1, keepdim=True)
    return product(shares, v.mT, rounding) / total, (top + total.log2()).squeeze(-1) / log2(torch.e)


def variants(o: Observer, points: Tensor) -> Iterator[tuple[str, str, tuple[Tensor, Tensor]]]:
    """What is rounded, how, and the state it gives."""
    h = o.tokens(points)
    for rounding in (bfloat16, float16):
        yield "attention, keys and values made first", rounding.__name__, o.projected(h, rounding)
    for rounding, lift in ((bfloat16, 0.0), (tf32, 0.0), (float16, 15.0)):
        yield "attention, all learned moved out", rounding.__name__, o.absorbed(h, rounding, lift)
    for rounding, terms in ((bfloat16, 1), (tf32, 1), (bfloat16, 3), (tf32, 3)):
        name = rounding.__name__ if terms == 1 else f"{terms} products of {rounding.__name__}"
        yield "embedding", name, o.absorbed(o.tokens(points, rounding, terms), exact)
    plain = F.layer_norm(o.model.embed(points.float()), h.shape[-1:]).double()
    yield "embedding", "float32", o.absorbed(plain, exact)
    rounded = o.tokens(points, bfloat16, 3)
    yield (
        "all, as the kernels do",
        "embedding 3 of bfloat16, then float16",
        o.absorbed(rounded, float16, 15.0),
    )
    yield "projection to keys alone", "bfloat16", o.weighed(h, exact, key=bfloat16)
    yield "projection to values, shares and values", "bfloat16", o.weighed(h, bfloat16, value=bfloat16)
    yield "shares and values", "bfloat16", o.weighed(h, bfloat16)
    value, lse = o.absorbed(h, exact)
    if cpu.has_bfloat16():
        off, lse_off = o.by_machine(points, "high")
        yield "the same, as the machine code of CPUs does", "bfloat16", (value + off, lse + lse_off)
    if cpu.usable():
        off, lse_off = o.by_machine(points, "highest")
        how = "float32, but for an embedding in float64"
        yield "all, as the machine code of CPUs does", how, (value + off, lse + lse_off)


def main() -> None:
    observer, rows = Observer(), []
    with torch.no_grad():
        for n in (20, 100, 784, 4096):
            points = strokes(n).float().double()
            value, lse = observer.absorbed(observer.tokens(points), exact)
            for what, how, (found, found_lse) in variants(observer, points):
                row: dict[str, Any] = {"rounded": what, "operands": how, "points": n}
                row["value"] = float(f"{(found - value).abs().max() / value.abs().max():.2e}")
                row["value_rms"] = float(f"{(found - value).norm() / value.norm():.2e}")
                row["lse"] = float(f"{(found_lse - lse).abs().max():.2e}")
                rows.append(row)
                print(row, flush=True)
    save("rounding", rows, **provenance(0, "pixels of a smooth stroke, the shipped EMNIST weights"))


if __name__ == "__main__":
    main()

"""How memory grows with a size: an exponent fitted to measured peaks, and constant, linear or quadratic.

A size is doubled a few times, all else fixed. Let d be the growth of the peak over a doubling, from n to 2n
points: if the peak is a + b n^k, then d = b (2^k - 1) n^k, without the constant a. The exponent is the slope
of the least-squares line of log d against log n, over all doublings.

The floor. Allocations that have nothing to do with the size come and go: of phases measured twice, peaks have
differed by up to 3 kB. So a growth of less than 4 kB, or of less than a thousandth of the peak, is not told
from none, and counts as much as that floor in the fit, which makes the exponent too small rather than too
large. But growths in proportion to the size are no chance, however slight: where every one is of at least a
byte a point, and the exponent of them as they are is within a quarter of 1, that is the exponent.

The verdict. *Constant*: the last growth is below the floor; *linear*: it is not, and the exponent is below
1.5; *quadratic*: from there on. Of what is constant there is no growth to fit: its exponent is that of the
peaks themselves, the slope of log peak against log n, and should be near 0.
"""

from collections.abc import Sequence
from itertools import pairwise
from math import log
from typing import Any

FLOOR, FLOOR_SHARE = 4096, 1e-3  # bytes, and the share of a peak, that may come and go by themselves
LEAST = 1.0  # bytes a point: no model that keeps or computes anything for every point can do with less
PROPORTIONAL = 0.25  # how far from 1 the exponent of slight growths may be
QUADRATIC = 1.5  # the exponent from which on growth is called so


def exponent(sizes: Sequence[float], values: Sequence[float]) -> float:
    """The slope k of the least-squares line log value = k log size + constant.

    Example:
        >>> round(exponent([1, 2, 4, 8], [3, 12, 48, 192]), 12)
        2.0
    """
    xs, ys = [log(size) for size in sizes], [log(value) for value in values]
    middle_x, middle_y = sum(xs) / len(xs), sum(ys) / len(ys)
    across = sum((x - middle_x) * (y - middle_y) for x, y in zip(xs, ys, strict=True))
    return across / sum((x - middle_x) ** 2 for x in xs)


def verdict(sizes: Sequence[int], peaks: Sequence[int]) -> dict[str, Any]:
    """Constant, linear or quadratic, by the rule at the top; the exponent, and the last growth a point."""
    starts = sizes[:-1]
    growths = [after - before for before, after in pairwise(peaks)]
    added = [after - before for before, after in pairwise(sizes)]
    floor = max(FLOOR, FLOOR_SHARE * peaks[-1])
    found = exponent(starts, [max(growth, floor) for growth in growths])
    grows = growths[-1] > floor
    if all(growth >= LEAST * points for growth, points in zip(growths, added, strict=True)):
        as_they_are = exponent(starts, growths)
        if abs(as_they_are - 1) <= PROPORTIONAL:
            found, grows = as_they_are, True
    if grows:
        kind = "linear" if found < QUADRATIC else "quadratic"
    else:
        kind, found = "constant", exponent(sizes, peaks)
    return {
        "verdict": kind,
        "exponent": round(found, 2) + 0.0,  # no -0.0
        "bytes_a_point": round(growths[-1] / added[-1], 1),
    }

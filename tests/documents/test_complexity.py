"""The rule of the measured memory table, and that what stands for published code predicts the same."""

import json
from collections.abc import Callable

import numpy as np
import pytest
import torch
from complexity import AGAIN, PAPER, PHASES, PublishedCMANP, PublishedTNPD, attention, judged_again
from growth import exponent, verdict
from record import RESULTS

from constmem import CMANP
from constmem.neural_processes import MODELS, TNPD

ROWS = json.loads((RESULTS / "complexity.json").read_text())["rows"]


@pytest.mark.parametrize(
    ("peak", "expected"),
    [
        (lambda _: 5e6, "constant"),
        (lambda n: 5e6 + 0.5 * n, "constant"),  # half a byte a point holds nothing
        (lambda n: 5e8 + n, "linear"),  # a boolean a point, under any floor
        (lambda n: 5e6 + 24 * n, "linear"),
        (lambda n: 4000 * n + 0.1 * n**2, "linear"),  # what is quadratic does not show yet
        (lambda n: 5e6 + 4000 * n + 16 * n**2, "quadratic"),
    ],
)
def test_the_rule_sees_growth_under_a_floor(peak: Callable[[int], float], expected: str) -> None:
    sizes = (512, 1024, 2048, 4096)
    assert verdict(sizes, [int(peak(n)) for n in sizes])["verdict"] == expected


@pytest.mark.parametrize(
    ("peaks", "expected"),
    [
        ([5584088, 6421464, 6421464, 6422936], "constant"),  # as once measured: 1.4 kB came by themselves
        ([6421464, 6421464, 6421848, 6424936], "constant"),  # in both doublings, but not in proportion
        ([200_000_000, 200_000_000, 200_000_000, 200_150_000], "constant"),  # slight beside the peak
        ([6400000, 6400512, 6401536, 6403584], "linear"),  # as slight, but two bytes for every point
        ([70_000, 70_000, 70_000, 80_000], "linear"),  # a sudden jump is no noise: at least linear
        ([5_000_000, 5_000_000, 5_000_000, 6_000_000], "quadratic"),  # and a great one more than that
    ],
)
def test_slight_growth_counts_only_if_it_is_proportional_to_the_size(peaks: list[int], expected: str) -> None:
    assert verdict((256, 512, 1024, 2048), peaks)["verdict"] == expected


@pytest.mark.parametrize("power", [0.5, 1.0, 1.3, 2.0])
def test_the_exponent_of_what_grows_is_that_of_the_growth_whatever_it_grows_upon(power: float) -> None:
    sizes = (512, 1024, 2048, 4096)
    for constant in (0, 10**6):
        peaks = [constant + int(10_000 * n**power) for n in sizes]
        assert verdict(sizes, peaks)["exponent"] == pytest.approx(power, abs=0.01)


def test_the_exponent_is_the_slope_of_a_least_squares_line() -> None:
    sizes, values = [3, 8, 20, 100, 101], [7.0, 1.0, 30.0, 2.0, 900.0]
    slope, _ = np.polyfit(np.log(sizes), np.log(values), 1)
    assert exponent(sizes, values) == pytest.approx(slope)


def test_every_doubling_counts_in_the_exponent_not_the_last_two_alone() -> None:
    one, other = ([10**6 * p for p in peaks] for peaks in ([1, 2, 6, 14], [1, 4, 8, 16]))  # same last two
    sizes = (512, 1024, 2048, 4096)
    assert verdict(sizes, one)["exponent"] > verdict(sizes, other)["exponent"]


def test_what_is_constant_has_its_measured_exponent_and_bytes() -> None:
    found = verdict((256, 512, 1024, 2048), [5584088, 6421464, 6421464, 6422936])
    assert found == {"verdict": "constant", "exponent": 0.06, "bytes_a_point": 1.4}
    assert verdict((1, 2, 4), [8, 8, 8])["exponent"] == 0.0
    assert all(abs(row["exponent"]) < 0.1 for row in ROWS if row["verdict"] == "constant")


def test_judging_again_leaves_what_was_measured_and_says_so() -> None:
    before = {"date": "then", "rows": [ROWS[0] | {"verdict": "cubic", "exponent": 3.0}]}
    assert judged_again(before) == {"date": "then", "note": AGAIN, "rows": [ROWS[0]]}


def test_committed_verdicts_follow_from_the_committed_peaks_and_cover_all_models() -> None:
    for row in ROWS:
        found = verdict(tuple(row["sizes"]), row["peaks"])
        assert {key: row[key] for key in found} == found
    for style in ("fused", "written out"):
        own = {(r["model"], r["phase"], r["against"]) for r in ROWS if r["attention"] == style}
        assert own >= {(name, *phase) for name in MODELS for phase in PHASES}
    assert {r["model"] for r in ROWS if r["paper"] is not None} == set(PAPER)


def test_a_cmanp_is_constant_in_every_phase_but_for_its_outputs() -> None:
    for row in ROWS:
        if row["model"] == "cmanp" and row["run"] == "library":
            assert row["verdict"] == ("linear" if row["against"] == "M" else "constant")


@pytest.mark.parametrize("style", ["fused", "written out"])
def test_what_stands_for_published_code_predicts_the_same(style: str) -> None:
    x, y, xt = torch.rand(1, 20, 2), torch.rand(1, 20, 3), torch.rand(1, 7, 2)
    tnpd, cmanp = TNPD(dim_x=2, dim_y=3, dim=16, depth=2), CMANP(dim_x=2, dim_y=3, dim=16, depth=2)
    with torch.no_grad():
        for model, published in ((tnpd, PublishedTNPD(tnpd)), (cmanp, PublishedCMANP(cmanp))):
            expected = model.query(model.condition(x, y), xt)
            with attention(style):
                mean, std = published.query(published.condition(x, y), xt)
                again = model.query(model.condition(x, y), xt)
            torch.testing.assert_close(mean, expected.mean, atol=1e-5, rtol=0)
            torch.testing.assert_close(std, expected.stddev, atol=1e-5, rtol=0)
            torch.testing.assert_close(again.mean, expected.mean, atol=1e-5, rtol=0)

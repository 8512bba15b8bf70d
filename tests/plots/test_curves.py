"""Curves: drawn of whatever was logged, and true to the numbers."""

from typing import Any

import pytest
import torch
from torch.distributions import Normal

from constmem.plots.curves import Panel, learning_curve, panels_of_lines, predicted_against_true, reliability

METRICS = [
    {"data": "something"},
    *({"step": s, "loss": 1 / s, "lr": 1e-3, "seconds": s} for s in range(50, 500, 50)),
    {"step": 400, "validation": -0.5, "seconds": 401.0},
    {"step": 450, "validation": -0.4, "seconds": 460.0},
]


def test_a_run_whose_loss_was_lost_can_still_be_looked_at(drawn: list[Any]) -> None:
    nan = float("nan")
    lost = [{"step": 500, "loss": nan, "lr": 1e-3}, {"step": 500, "validation": nan}]
    for entries in (METRICS + lost, lost, [{"step": 1, "loss": 0.5}]):
        learning_curve(entries, "learning.png", title="lost")
    assert [line.get_label() for line in drawn[0].axes[1].lines][-1] == "best: -0.400"


def test_a_run_without_a_logged_loss_has_no_curve() -> None:
    with pytest.raises(ValueError, match="logged no loss"):
        learning_curve(METRICS[:1], "none.png", title="")


def test_a_single_logged_step_is_visible(drawn: list[Any]) -> None:
    for count in (1, 2):
        entries = [{"step": 20 * s, "loss": 1.0, "lr": 1e-3} for s in range(1, count + 1)]
        learning_curve(entries, "short.png", title="")
    one, two = ([axis.lines[-1].get_marker() for axis in (f.axes[0], f.axes[2])] for f in drawn)
    assert one == ["o", "o"]  # a line through one point is invisible
    assert two == ["", ""]


def test_f_of_y_is_uniform_where_predictions_are_true() -> None:
    """Against a slow reference: the share of draws inside the interval between two quantiles."""
    y, truth = torch.randn(20_000, generator=torch.Generator().manual_seed(0)), Normal(0.0, 1.0)
    levels = torch.tensor([0.1, 0.5, 0.9])
    for spread, direction in ((1.0, 0), (2.0, 1), (0.5, -1)):
        pit = Normal(0.0, spread).cdf(y)
        found = reliability(pit, levels)
        for level, share in zip(levels, found, strict=True):
            edge = spread * truth.icdf(0.5 + level / 2)
            assert float(share) == pytest.approx(float((y.abs() <= edge).float().mean()), abs=1e-3)
            assert (float(share - level) > 0.03) == (direction == 1)
            assert (float(share - level) < -0.03) == (direction == -1)


def test_memory_and_predictions_are_drawn_as_given(drawn: list[Any]) -> None:
    seen, lines = [10, 100], {"state": ([10, 100], [1.0, 1.0]), "points": ([10, 100], [1.0, 10.0])}
    panels = Panel("memory", lines, low=0), Panel("inside", {"points": (seen, [8, 9])}, level=9)
    panels_of_lines(panels, "memory.png", title="")
    memory, inside = drawn[0].axes
    assert [list(line.get_ydata()) for line in memory.lines] == [[1.0, 1.0], [1.0, 10.0]]
    assert [list(line.get_ydata()) for line in inside.lines] == [[8, 9], [9, 9]]
    assert inside.lines[0].get_color() == memory.lines[1].get_color() != memory.lines[0].get_color()
    assert memory.get_ylim()[0] == 0
    true, mean, std = torch.tensor([0.0, 1.0]), torch.tensor([0.5, 0.5]), torch.tensor([0.1, 0.2])
    predicted_against_true(true, mean, std, "p.png", title="")
    assert drawn[1].axes[0].lines[1].get_ydata().tolist() == [0.5, 0.5]


def test_legends_of_a_learning_curve_hide_none_of_its_points(drawn: list[Any]) -> None:
    losses, scores = [0.85, 0.8, 0.81, 0.95], [-4.0, -4.1, -4.4, -4.8]  # both end where legends usually are
    entries = [
        {"step": 50 * s, "loss": loss, "validation": score, "lr": 1e-3}
        for s, (loss, score) in enumerate(zip(losses, scores, strict=True), 1)
    ]
    learning_curve(entries, "worse.png", title="worse")
    for axis in drawn[0].axes[:2]:
        box = axis.get_legend().get_window_extent()
        for line in axis.lines:
            assert not any(box.contains(*point) for point in axis.transData.transform(line.get_xydata()))

"""Pictures of events: what is drawn is what was given; dates, units that suit, nothing drawn over."""

from datetime import UTC, datetime, timedelta
from math import exp
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from torch.distributions import LogNormal

from constmem.plots.events import (
    LONGEST,
    Timeline,
    confusion_picture,
    fit_picture,
    hazard_picture,
    sequence_picture,
)

START = datetime(2024, 5, 1, 12, tzinfo=UTC)
NAMES = ["shop", "cart", "a name that is a good deal longer than a legend has room for"]


def made(
    gap: float = 1.0, unit: str = "hour", start: float = 0.0, *, num_marks: int = 3, names: Any = None
) -> Timeline:
    """Thirty events about `gap` apart."""
    gaps = torch.rand(30, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 2 * gap
    return Timeline(start + gaps.cumsum(0), gaps, torch.arange(30) % num_marks, unit, num_marks, names)


def draw(line: Timeline, title: str = "a title") -> None:
    """Both pictures of one sequence, predicted as if every gap were log-normal."""
    shape = 1, len(line.times)
    scale = line.gaps.mean().log()
    sequence_picture(line, LogNormal(scale.expand(shape), torch.ones(shape).double()), "s.png", title=title)
    times, hazard = (torch.linspace(0, 1, 60).double() * line.gaps[:, None] for _ in range(2))
    hazard_picture(line, line.times[:, None] - times.flip(1), 1 / (1 + hazard), "h.png", title=title)


def strokes(axis: Any) -> list[float]:
    """Where the events of a time line are drawn, in order."""
    return sorted(float(segment[0][0]) for lines in axis.collections for segment in lines.get_segments())


@pytest.mark.parametrize(("unit", "seconds"), [("second", 1), ("hour", 3600)])
def test_times_that_are_dates_are_drawn_as_dates(drawn: list[Any], unit: str, seconds: int) -> None:
    from matplotlib.dates import num2date

    line = made(7200 / seconds, unit, START.timestamp() / seconds)
    draw(line)
    expected = [datetime.fromtimestamp(t * seconds, UTC) for t in line.times[1:].tolist()]
    for figure in drawn:
        below = figure.axes[1]
        shown = num2date(strokes(below))
        assert all(abs(a - b) < timedelta(seconds=1) for a, b in zip(shown, expected, strict=True))
        labels = [label.get_text() for label in below.get_xticklabels()]
        assert "02 May" in labels
        assert below.xaxis.get_offset_text().get_text().endswith("2024")
        assert below.get_xlabel() == "time (UTC)"


@pytest.mark.parametrize(
    ("gap", "unit", "start", "label", "scale"),
    [
        (20_000.0, "second", 0.0, "time (days)", 1 / 86_400),
        (600.0, "second", 0.0, "time (hours)", 1 / 3600),
        (20.0, "hour", 100.0, "time (days)", 1 / 24),
        (0.01, "second", 0.0, "time (seconds)", 1.0),
        (700.0, "day", 0.0, "time (days)", 1.0),
        (3.0, "day", 19_844.0, "time (days)", 1.0),  # perhaps an age: not taken for a date
        (7200.0, "week", 0.0, "time (week)", 1.0),
    ],
)
def test_other_times_are_counted_in_a_unit_that_suits_what_is_shown(
    drawn: list[Any], gap: float, unit: str, start: float, label: str, scale: float
) -> None:
    line = made(gap, unit, start)
    draw(line)
    for figure in drawn:
        below = figure.axes[1]
        assert below.get_xlabel() == label
        assert strokes(below) == pytest.approx((line.times[1:] * scale).tolist())
        assert below.xaxis.get_offset_text().get_text() == ""  # no 1e9 in a corner


@pytest.mark.parametrize("title", ["short", "CMHP-faithful on " + "a file with a long name " * 3])
def test_nothing_is_drawn_over_by_the_legend(drawn: list[Any], title: str) -> None:
    draw(made(7200.0, "second", START.timestamp(), names=NAMES), title)
    for figure in drawn:
        (legend,) = figure.legends
        box = legend.get_window_extent()
        assert not any(axis.get_tightbbox().overlaps(box) for axis in figure.axes)
        assert all(axis.get_legend() is None for axis in figure.axes)
        assert box.x0 >= 0
        assert box.x1 <= figure.bbox.x1
        assert box.y0 >= 0


def test_the_legend_names_the_marks_where_colours_can(drawn: list[Any]) -> None:
    draw(made(names=NAMES))
    for figure in drawn:
        labels = [text.get_text() for text in figure.legends[0].get_texts()]
        assert labels[-3:] == ["shop", "cart", NAMES[2][:LONGEST]]
    drawn.clear()
    draw(made(num_marks=11))
    for figure in drawn:
        assert not any("mark" in text.get_text() for text in figure.legends[0].get_texts())
        assert figure.axes[1].get_xlabel() == "time (hours); colours are marks"


def test_a_sequence_is_shown_with_its_last_gaps_and_their_predicted_quantiles(drawn: list[Any]) -> None:
    line = made()
    gap = LogNormal(torch.full((1, 30), -0.5).double(), torch.full((1, 30), 0.8).double())
    sequence_picture(line, gap, "a.png", title="x", most=9)
    lines = {line.get_label(): line.get_ydata() for line in drawn[0].axes[0].lines}
    np.testing.assert_allclose(lines["what came"], line.gaps[-9:])
    np.testing.assert_allclose(lines["median"], [exp(-0.5)] * 9)
    np.testing.assert_allclose(lines["90 % interval"], [stats.lognorm.ppf(0.05, 0.8, scale=exp(-0.5))] * 9)
    np.testing.assert_allclose(strokes(drawn[0].axes[1]), line.times[-9:])


def test_events_of_a_short_sequence_are_counted_in_whole_numbers(drawn: list[Any]) -> None:
    gaps = torch.tensor([0.0, 1.0, 0.5, 2.0], dtype=torch.float64)
    line = Timeline(gaps.cumsum(0), gaps, torch.tensor([0, 1, -1, 0]), "hour", 10)
    draw(line)
    ticks = drawn[0].axes[0].get_xticks().tolist()
    assert {1.0, 2.0, 3.0} <= set(ticks)
    assert all(tick.is_integer() for tick in ticks)


def test_hazards_are_drawn_in_the_unit_that_the_axis_names_beside_the_true_ones(drawn: list[Any]) -> None:
    line = made(600.0, "second")
    times = line.times[:, None] - torch.linspace(1, 0, 5).double() * line.gaps[:, None]
    hazard = torch.rand(30, 5, generator=torch.Generator().manual_seed(1)).double() / 600
    hazard_picture(line, times, hazard, "a.png", title="x", true=hazard / 2, most=10)
    above = drawn[0].axes[0]
    assert above.get_ylabel() == "events per hour"
    true, model = (shown.get_ydata() for shown in above.lines)
    np.testing.assert_allclose(model, 3600 * hazard[-10:].reshape(-1))
    np.testing.assert_allclose(true, model / 2)


def test_hazards_of_bursts_are_drawn_on_a_logarithmic_axis_down_to_the_longest_silence(
    drawn: list[Any],
) -> None:
    for long, scale in ((1.0, "linear"), (1e4, "log")):
        gaps = 600 * torch.tensor([1.0, 1.0, long, 1.0], dtype=torch.float64)
        line = Timeline(gaps.cumsum(0), gaps, torch.zeros(4, dtype=torch.long), "second", 1)
        hazard = (
            torch.tensor([[1.0, 1.0], [0.5, 1.0], [0.4, 0.1 / long], [0.5, 1.0]], dtype=torch.float64) / 600
        )
        hazard_picture(line, gaps.cumsum(0)[:, None].expand(4, 2), hazard, "a.png", title="x")
        assert drawn[-1].axes[0].get_yscale() == scale
    low, high = drawn[-1].axes[0].get_ylim()  # in events per hour
    assert low <= 6 * 1e-5 / 2
    assert high == pytest.approx(6 * 2.0)


def test_the_quantiles_drawn_for_a_true_model_lie_in_the_band(drawn: list[Any]) -> None:
    true = torch.empty(5000, dtype=torch.float64).exponential_(generator=torch.Generator().manual_seed(0))
    fit_picture({"true": true, "wrong": 3 * true}, "a.png", title="x")
    left = drawn[0].axes[0]
    top = left.collections[0].get_paths()[0].vertices[:, 1].max()
    inside = {}
    for line in left.lines[1:]:
        x, y = line.get_xdata(), line.get_ydata()
        spread = 2.5 * np.sqrt(np.expm1(x) / len(true))
        inside[line.get_label()] = (np.abs(y - x) <= spread + 1e-3).mean()
        assert line.get_label() != "true" or y.max() < top
    assert inside["true"] > 0.9
    assert inside["wrong"] < 0.1


def test_confusions_are_drawn_in_percent_with_names(drawn: list[Any]) -> None:
    shown, counts = torch.tensor([2, 0]), torch.tensor([[3, 1, 0], [0, 1, 1]])
    confusion_picture(shown, counts, "a.png", title="x", names=["a", "b", "c"])
    axis = drawn[0].axes[0]
    np.testing.assert_allclose(axis.images[0].get_array(), [[75, 25, 0], [0, 50, 50]])
    assert [label.get_text() for label in axis.get_xticklabels()] == ["c", "a", "other"]
    assert [label.get_text() for label in axis.get_yticklabels()] == ["c (4)", "a (2)"]
    confusion_picture(shown, torch.tensor([[3, 1, 0], [0, 2, 0]]), "a.png", title="x")
    assert [label.get_text() for label in drawn[1].axes[0].get_xticklabels()] == ["2", "0"]

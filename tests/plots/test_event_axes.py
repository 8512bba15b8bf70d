"""Axes and legends of event pictures: dates, units that suit, nothing drawn over."""

import warnings
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

from constmem.data import Events
from constmem.plots import events as plots_events
from constmem.plots import pyplot
from constmem.plots.clock import Clock, label_durations, rate_unit
from constmem.point_processes import MODELS

START = datetime(2024, 5, 1, 12, tzinfo=UTC)
NAMES = ["shop", "cart", "a name that is a good deal longer than a legend has room for"]


def made(gap: float, unit: str, start: float, num_marks: int = 3) -> Events:
    """Thirty events about `gap` apart."""
    gaps = torch.rand(30, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 2 * gap
    marks = (torch.arange(30) % num_marks).tolist()
    return Events.from_gaps([gaps.tolist()], marks=[marks], t_start=[start], unit=unit, num_marks=num_marks)


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """Figures as they would have been written."""
    figures: list[Any] = []

    def keep(figure: Any, path: Path) -> Path:
        figure.canvas.draw()
        figures.append(figure)
        return path

    monkeypatch.setattr(plots_events, "save_figure", keep)
    yield figures
    for figure in figures:
        pyplot().close(figure)


def draw(events: Events, names: list[str] | None = None, title: str = "a title") -> Any:
    """Both pictures of one sequence, of a model that has learned nothing but the scale of time."""
    model = MODELS["trivial"](num_marks=events.num_marks, components=2)
    model.set_scales(events)
    plots_events.sequence_picture(model, events, "sequence.png", title=title, names=names)
    plots_events.hazard_picture(model, events, "hazard.png", title=title, names=names)
    return model


def strokes(axis: Any) -> list[float]:
    """Where the events of a time line are drawn, in order."""
    return sorted(float(segment[0][0]) for lines in axis.collections for segment in lines.get_segments())


@pytest.mark.parametrize(("unit", "seconds"), [("second", 1), ("minute", 60), ("hour", 3600)])
def test_times_that_are_dates_are_drawn_as_dates(drawn: list[Any], unit: str, seconds: int) -> None:
    from matplotlib.dates import num2date

    events = made(7200 / seconds, unit, START.timestamp() / seconds)
    draw(events)
    expected = [datetime.fromtimestamp(t * seconds, UTC) for t in events.times[0, 1:].tolist()]
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
        (3.0, "day", 19_844.0, "time (days)", 1.0),  # perhaps an age: taken for no date
        (7200.0, "week", 0.0, "time (week)", 1.0),
    ],
)
def test_other_times_are_counted_in_a_unit_that_suits_what_is_shown(
    drawn: list[Any], gap: float, unit: str, start: float, label: str, scale: float
) -> None:
    events = made(gap, unit, start)
    draw(events)
    for figure in drawn:
        below = figure.axes[1]
        assert below.get_xlabel() == label
        assert strokes(below) == pytest.approx((events.times[0, 1:] * scale).tolist())
        assert below.xaxis.get_offset_text().get_text() == ""  # no 1e9 in a corner


def test_times_far_from_zero_are_counted_from_the_first_shown() -> None:
    clock = Clock.between(1e7 + 5, 1e7 + 50, "hour")
    assert clock.label == "time since the first shown (hours)"
    assert clock(torch.tensor([1e7 + 5, 1e7 + 6], dtype=torch.float64)).tolist() == [0.0, 1.0]
    assert Clock.between(1e7 + 5, 1e7 + 50, "parsec").label == "time since the first shown (parsec)"


def test_every_span_of_dates_has_a_few_ticks_and_no_warning() -> None:
    plt, first = pyplot(), START.timestamp()
    for k in range(40):
        figure, axis = plt.subplots(figsize=(8, 2))
        span = 10 ** (0.2 * k)  # a second to twelve years
        clock = Clock.between(first, first + span, "second")
        axis.plot(clock(torch.tensor([first, first + span], dtype=torch.float64)), [0, 1])
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            clock.label_axis(axis)
            figure.canvas.draw()
        labels = [label.get_text() for label in axis.get_xticklabels() if label.get_text()]
        assert 2 <= len(labels) <= 10, (span, labels)
        plt.close(figure)


@pytest.mark.parametrize("title", ["short", "CMHP-faithful on " + "a file with a long name " * 3])
def test_nothing_is_drawn_over_by_the_legend(drawn: list[Any], title: str) -> None:
    draw(made(7200.0, "second", START.timestamp()), NAMES, title)
    for figure in drawn:
        (legend,) = figure.legends
        box = legend.get_window_extent()
        assert not any(axis.get_tightbbox().overlaps(box) for axis in figure.axes)
        assert all(axis.get_legend() is None for axis in figure.axes)
        assert box.x0 >= 0
        assert box.x1 <= figure.bbox.x1
        assert box.y0 >= 0


def test_the_legend_tells_the_marks_where_colours_can(drawn: list[Any]) -> None:
    draw(made(1.0, "hour", 0.0), NAMES)
    for figure in drawn:
        labels = [text.get_text() for text in figure.legends[0].get_texts()]
        assert labels[-3:] == ["shop", "cart", NAMES[2][: plots_events.LONGEST]]
    drawn.clear()
    draw(made(1.0, "hour", 0.0, num_marks=11))
    for figure in drawn:
        assert not any("mark" in text.get_text() for text in figure.legends[0].get_texts())
        assert figure.axes[1].get_xlabel() == "time (hours); colours are marks"


def test_gaps_are_named_as_durations_at_the_right_height() -> None:
    figure, axis = pyplot().subplots()
    for unit, seconds in (("second", 1.0), ("hour", 3600.0)):
        axis.set(yscale="log", ylim=(5 / seconds, 1e5 / seconds))
        label_durations(axis, unit)
        labels = [label.get_text() for label in axis.get_yticklabels()]
        assert labels == ["10 s", "1 min", "10 min", "1 h", "6 h", "1 day"]
        heights = [t * seconds for t in axis.get_yticks()]
        assert heights == pytest.approx([10, 60, 600, 3600, 21_600, 86_400])
        assert axis.get_ylabel() == "gap"
    axis.set(ylim=(5, 50))
    label_durations(axis, "second")
    assert axis.get_ylabel() == "gap (second)"
    label_durations(axis, "parsec")
    assert axis.get_ylabel() == "gap (parsec)"
    pyplot().close(figure)


def test_hazards_are_drawn_in_the_unit_that_they_are_said_to_be_in(drawn: list[Any]) -> None:
    events = made(600.0, "second", 0.0)
    model = draw(events)
    above = drawn[1].axes[0]
    assert above.get_ylabel() == "events per hour"
    gap = model.forecast(events).gap
    hazard = (gap.log_prob(events.gaps) - gap.log_survival(events.gaps)).exp()[0, 1:]  # at the events
    shown = torch.as_tensor(above.lines[0].get_ydata()).reshape(29, 60)[:, -1]
    torch.testing.assert_close(shown.double(), 3600 * hazard.detach().double(), rtol=1e-4, atol=0)
    assert rate_unit(0.9, "minute") == ("hour", 60.0)
    assert rate_unit(1e-9, "second") == ("day", 86_400.0)
    assert rate_unit(0.001, "parsec") == ("parsec", 1.0)

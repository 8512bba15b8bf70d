"""Axes of time: dates where times are dates, units that suit, names of durations; and files written whole."""

import warnings
from datetime import UTC, datetime
from pathlib import Path

import pytest
import torch

from constmem.plots import Clock, label_durations, pyplot, rate_unit, save_figure

START = datetime(2024, 5, 1, 12, tzinfo=UTC)


def test_a_figure_is_written_whole_under_its_name_alone(tmp_path: Path) -> None:
    from matplotlib.image import imread

    figure, _ = pyplot().subplots()
    path = save_figure(figure, tmp_path / "new" / "a.png")
    assert imread(path).std() > 0
    assert [other.name for other in path.parent.iterdir()] == ["a.png"]


def test_times_far_from_zero_are_counted_from_the_first_shown() -> None:
    clock = Clock.between(1e7 + 5, 1e7 + 50, "hour")
    assert clock.label == "time since the first shown (hours)"
    assert clock(torch.tensor([1e7 + 5, 1e7 + 6], dtype=torch.float64)).tolist() == [0.0, 1.0]
    assert Clock.between(1e7 + 5, 1e7 + 50, "parsec").label == "time since the first shown (parsec)"


def test_every_span_of_dates_has_a_few_ticks_and_no_warning() -> None:
    plt, first = pyplot(), START.timestamp()
    for k in range(0, 40, 2):
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


def test_rates_are_given_in_the_shortest_unit_with_an_event_or_more() -> None:
    assert rate_unit(0.9, "minute") == ("hour", 60.0)
    assert rate_unit(1e-9, "second") == ("day", 86_400.0)
    assert rate_unit(0.001, "parsec") == ("parsec", 1.0)

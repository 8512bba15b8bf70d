"""Progress as it is seen on a terminal, and where there is none."""

import io
import time

import pytest
from rich.console import Console

from constmem.core import costs as progress


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(time, "monotonic", found)
    return found


@pytest.mark.parametrize(
    ("reports", "shown", "hidden"),
    [
        (((1000, 0.0), (1040, 10.0)), "4.0/s", "104.0/s"),  # resumed after 950 steps, 50 of them unseen
        (((0, 0.0), (1, 40.0)), "40 s each", "/s"),
        (((50, 0.0),), "50/1200", "/s"),
    ],
)
@pytest.mark.parametrize("width", [80, 120])
def test_a_bar_on_a_terminal_tells_the_rate_and_the_words_in_one_line(
    clock: Clock, reports: tuple[tuple[int, float], ...], shown: str, hidden: str, width: int
) -> None:
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=width, color_system=None)
    with progress._bar("emnist/cmanp", 1200, console) as report:
        for done, seconds in reports:
            clock.now = 100.0 + seconds
            report(done, "loss -1.234")
    last = screen.getvalue().replace("\r", "\n").split("\n")
    line = next(line for line in reversed(last) if "emnist/cmanp" in line)
    assert shown in line
    assert f"{reports[-1][0]}/1200" in line
    assert "loss -1.234" in line
    assert hidden not in line


def test_work_that_tells_its_extent_as_it_goes_is_shown_too(
    clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    with progress.counted("decoding") as count:
        for done in (256, 512, 600):
            count(done, 600)
            clock.now += 20.0
    assert capsys.readouterr().err.splitlines() == [
        "decoding 512/600 (12.8/s, 7 s left)",
        "decoding 600/600 (8.6/s)",
    ]
    with progress.counted("nothing to do"):
        pass
    assert capsys.readouterr().err == ""

"""Figures as they would have been written, to look at what they show."""

from collections.abc import Iterator
from typing import Any

import pytest

from constmem import plots


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """Every figure that was drawn, complete, instead of its file."""
    figures: list[Any] = []
    close = plots.pyplot().close
    monkeypatch.setattr(plots, "write_bytes", lambda path, _: path)
    monkeypatch.setattr(plots.pyplot(), "close", figures.append)
    yield figures
    for figure in figures:
        close(figure)

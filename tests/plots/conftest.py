"""Figures as they would have been written, to look at what they show."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import constmem.plots as images
from constmem.plots import curves, events, pyplot


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """Every figure that was drawn, complete, instead of its file."""
    figures: list[Any] = []

    def keep(figure: Any, path: Path) -> Path:
        figure.canvas.draw()
        figures.append(figure)
        return path

    for module in (curves, events, images):
        monkeypatch.setattr(module, "save_figure", keep)
    yield figures
    for figure in figures:
        pyplot().close(figure)

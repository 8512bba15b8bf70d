"""A reader follows conditioning through eight files, and a query through ten."""

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

import constmem
from constmem import CMANP
from constmem.kernels.paths import library

PACKAGE = Path(constmem.__file__).parent


def passed(work: Callable[[], object]) -> set[str]:
    """The files of the package whose code runs in the third call: what is made once has been made by then."""
    work()
    work()
    found: set[str] = set()

    def enter(frame: FrameType, event: str, _: Any) -> None:
        if event == "call":
            found.add(frame.f_code.co_filename)

    before = sys.getprofile()
    sys.setprofile(enter)
    try:
        work()
    finally:
        sys.setprofile(before)
    inside = [Path(name) for name in found if Path(name).is_relative_to(PACKAGE)]
    return {str(path.relative_to(PACKAGE)) for path in inside}


@pytest.mark.skipif(library() is None, reason="there is no C++ compiler, so that operators serve")
@torch.no_grad()
def test_conditioning_passes_eight_files_at_most_and_a_query_ten() -> None:
    model = CMANP.from_pretrained("emnist")
    x, y = 2 * torch.rand(1, 100, 2) - 1, torch.rand(1, 100, 1) - 0.5
    state = model.condition(x, y)
    conditioned, asked = passed(lambda: model.condition(x, y)), passed(lambda: model.query(state, x))
    assert "neural_processes/base.py" in conditioned & asked  # files are seen at all
    assert len(conditioned) <= 8, sorted(conditioned)
    assert len(asked) <= 10, sorted(asked)

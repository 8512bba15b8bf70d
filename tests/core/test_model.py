"""Tests of what any model is: its settings, wherever in a family they are declared."""

import copy
import inspect
from typing import Any

import pytest

from constmem.core.model import Model
from constmem.neural_processes import MODELS as POINTS
from constmem.point_processes import MODELS as EVENTS

KINDS: dict[str, type[Model]] = {**POINTS, **EVENTS}
NEEDED: dict[str, dict[str, Any]] = {
    name: {"dim_x": 2, "dim_y": 1} if name in POINTS else {"num_marks": 3} for name in KINDS
}


@pytest.mark.parametrize("name", KINDS)
def test_config_holds_every_setting_that_a_constructor_shows(name: str) -> None:
    shown = inspect.signature(KINDS[name]).parameters
    defaults = {key: p.default for key, p in shown.items() if p.default is not p.empty}
    model = KINDS[name](**NEEDED[name])
    unused = {key for key, value in KINDS[name].newer.items() if defaults[key] == value}
    assert model.config == NEEDED[name] | {k: v for k, v in defaults.items() if k not in unused}
    assert copy.deepcopy(model).config == model.config
    own = KINDS[name](**NEEDED[name], dim=32)
    assert own.config == model.config | {"dim": 32}
    assert sum(p.numel() for p in own.parameters()) != sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("name", KINDS)
def test_an_unknown_setting_is_refused_by_name(name: str) -> None:
    with pytest.raises(TypeError, match="breadth"):
        KINDS[name](**NEEDED[name], breadth=3)


def test_settings_of_a_family_come_first_and_a_model_may_change_a_default() -> None:
    class Base(Model):
        def __init__(self, *, width: int, depth: int = 2) -> None: ...

    class Middle(Base):
        def __init__(self, *, rate: float = 0.5, **rest: Any) -> None: ...

    class Last(Middle):
        def __init__(self, *, depth: int = 7, **rest: Any) -> None: ...

    class Alone(Middle):
        def __init__(self, *, size: int = 1) -> None: ...

    assert str(inspect.signature(Last)) == "(*, width: int, rate: float = 0.5, depth: int = 7)"
    assert str(inspect.signature(Alone)) == "(*, size: int = 1)"

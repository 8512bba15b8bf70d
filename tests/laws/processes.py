"""Small event models of every kind, and events for them: what their tests share."""

from typing import Any

import torch

from constmem.data import Events
from constmem.models import PLAIN_CMHP
from constmem.point_processes import MODELS

KINDS = ("trivial", "gru", "thp", "cmhp", "cmhp-faithful")
MARKS = 3


def small(kind: str, **more: Any) -> Any:
    """A small model in float64, away from its initial zeros."""
    name, _, variant = kind.partition("-")
    settings: dict[str, Any] = {"num_marks": MARKS, "components": 3, "hidden": 12, "dim": 8}
    settings |= {"depth": 2, "num_heads": 2} if name in ("thp", "cmhp") else {}
    settings |= {"num_slots": 5, "num_latents": 3} if name == "cmhp" else {}
    settings |= PLAIN_CMHP if variant else {"mark_given_gap": True}
    torch.manual_seed(1)
    model = MODELS[name](**settings | more)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    model.double().eval()
    model.set_scales(stream(40))
    return model


def stream(*lengths: int, seed: int = 0, t_end: bool = False, start: float = 100.0) -> Events:
    """Sequences of the given lengths, with bursts and long breaks."""
    random = torch.Generator().manual_seed(seed)
    gaps = [(2 * torch.randn(n, generator=random, dtype=torch.float64)).exp() for n in lengths]
    marks = [torch.randint(MARKS, (n,), generator=random) for n in lengths]
    ends = [start + float(gap.sum()) + 1.5 for gap in gaps] if t_end else None
    return Events.from_gaps(gaps, marks=marks, t_start=start, t_end=ends, unit="hour", num_marks=MARKS)


def same_events(left: Events, right: Events) -> None:
    """Two batches of events are the same in all they hold."""
    for name in ("times", "marks", "mask", "t_start"):
        assert torch.equal(getattr(left, name), getattr(right, name)), name
    assert (left.t_end is None) == (right.t_end is None)
    assert left.t_end is None or torch.equal(left.t_end, right.t_end)
    assert (left.unit, left.num_marks) == (right.unit, right.num_marks)

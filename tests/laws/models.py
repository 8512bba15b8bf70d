"""Small models of every kind, and points and events for them: what tests share."""

from typing import Any

import torch
from torch import Tensor
from torch.distributions import Distribution

from constmem import Events
from constmem.core import CNP_FAMILY, PLAIN_CMHP
from constmem.neural_processes import MODELS
from constmem.point_processes import MODELS as EVENT_MODELS

POINT_MODELS = (*MODELS, "cmanp-moments", "cmanp-calibrated", "cmanp-joint")
MIXTURES = ("np", "anp", "bnp", "banp")
POOLED = ("cnp", "np")
CONSTANT = (
    "cmanp",
    "cmanp-moments",
    "cmanp-calibrated",
    "cmanp-joint",
    *POOLED,
)  # of constant memory: points may have weights
STORED = [name for name in MODELS if name not in CONSTANT]
KINDS = (*EVENT_MODELS, "cmhp-faithful")
MARKS = 3
# Sizes of a CMANP: the least there are, and those that learn something
LEAST = {"dim": 8, "depth": 1, "num_slots": 2, "num_latents": 2, "hidden": 8, "num_heads": 1}
LEARNER = {"dim": 16, "depth": 1, "num_slots": 4, "num_latents": 4, "hidden": 32, "num_heads": 2}


def fresh(kind: str, **more: Any) -> Any:
    """A small model as it is built: of two input and output channels, or of events of `MARKS` kinds."""
    name, _, variant = kind.partition("-")
    settings: dict[str, Any] = (
        {"num_heads": 2, "depth": 2} if name not in (*CNP_FAMILY, "trivial", "gru") else {}
    )
    settings |= {"num_slots": 5} if name in ("cmanp", "cmhp") else {}
    if name in EVENT_MODELS:
        settings |= {"num_marks": MARKS, "components": 3, "hidden": 12, "dim": 8}
        settings |= {"num_latents": 3} if name == "cmhp" else {}
        settings |= PLAIN_CMHP if variant else {"mark_given_gap": True}
        return EVENT_MODELS[name](**settings | more)
    settings |= {"dim_x": 2, "dim_y": 2, "dim": 16}
    if name in CNP_FAMILY:
        settings |= {"pre_depth": 3, "post_depth": 2, "decoder_depth": 2}
    else:
        settings |= {"hidden": 24, "embed_depth": 2}
    settings |= {"num_samples": 5} if name in MIXTURES else {}
    settings |= {"dim_latent": 7} if name in ("np", "anp") else {}
    settings |= {"num_latents": 6} if name in ("lbanp", "cmanp") else {}
    settings |= {"moments": 12, "experts": 3} if variant == "moments" else {}
    settings |= {"levels": 256, "components": 4} if variant == "calibrated" else {}
    settings |= {"rank": 3} if variant == "joint" else {}
    return MODELS[name](**settings | more)


def moved(model: Any) -> Any:
    """The same model with weights away from the ones and zeros they start from."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model


def small(kind: str, **more: Any) -> Any:
    """A small model in float64, away from its initial weights, ready to evaluate."""
    torch.manual_seed(1)
    model = moved(fresh(kind, **more)).double().eval()
    if model.name in EVENT_MODELS:
        model.set_scales(stream(40))
    return model


def data(n: int = 11, m: int = 6, b: int = 2, seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    random = torch.Generator().manual_seed(seed)
    shapes = (n, n, m, m)
    x, y, xt, yt = (torch.randn(b, k, 2, generator=random, dtype=torch.float64) for k in shapes)
    return x, y, xt, yt


def ragged(n: int, counts: list[int], seed: int = 3) -> Tensor:
    """A mask with as many real points as asked for, in random places."""
    scores = torch.rand(len(counts), n, generator=torch.Generator().manual_seed(seed))
    return scores.argsort(1).argsort(1) < torch.tensor(counts)[:, None]


def assert_same(found: Distribution, expected: Distribution, yt: Tensor) -> None:
    torch.testing.assert_close(found.mean, expected.mean, atol=1e-7, rtol=0)
    torch.testing.assert_close(found.stddev, expected.stddev, atol=1e-7, rtol=0)
    torch.testing.assert_close(found.log_prob(yt), expected.log_prob(yt), atol=1e-6, rtol=0)


def close(found: Tensor, expected: Tensor, atol: float = 1e-6) -> None:
    torch.testing.assert_close(found, expected, atol=atol, rtol=1e-6)


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

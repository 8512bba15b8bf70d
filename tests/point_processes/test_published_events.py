"""CMHP as the paper has it, and THP, against forward passes written out from the weights alone.

For every event all events before it are worked through again, as the papers write it: nothing is remembered.
"""

from math import exp, sqrt
from typing import Any

import pytest
import torch
from torch import Tensor

from constmem.data import Events
from constmem.point_processes import MODELS, PointProcess
from constmem.training.recipes import recipe
from tests import published as p
from tests.published import Weights, under

MARKS = 5
Heads = tuple[Tensor, Tensor, Tensor, Tensor]  # log-weights, means, deviations, log-probabilities of marks
SIZES: dict[str, dict[str, Any]] = {  # blocks or layers, heads, mixture
    "paper": {"depth": 2, "num_heads": 4, "components": 16},
    "small": {"depth": 3, "num_heads": 2, "components": 3, "dim": 8, "hidden": 6},
}


def heads(w: Weights, known: Tensor) -> Heads:
    """A mixture of log-normals over the gap and a softmax over marks, each behind an MLP.

    Means reach 10 deviations of the data's log gaps, log-deviations lie between -5 and 1.
    """
    log_weights, mean, raw = p.mlp(under(w, "gap_head.predictor"), known).chunk(3, -1)
    shift, scale = w["log_gap_mean"], w["log_gap_std"]
    log_std = -2 + 3 * torch.tanh((raw + 2) / 3)
    mean, std = shift + scale * 10 * torch.tanh(mean / 10), scale * log_std.exp()
    own = under(w, "mark_head")
    logits = p.linear(under(own, "out"), p.relu(p.linear(under(own, "from_features"), known)))
    return normalised(log_weights), mean, std, normalised(logits)


def normalised(logits: Tensor) -> Tensor:
    return logits - logits.exp().sum(-1, keepdim=True).log()


def tokens_of(w: Weights, times: Tensor, marks: Tensor) -> tuple[Tensor, Tensor]:
    """Vectors of the marks, and encodings of the times since the start in typical gaps."""
    table = w["marks.table"]
    return table[marks], p.time_encoding(times * exp(-float(w["log_gap_mean"])), table.shape[-1])


def cmhp(w: Weights, settings: dict[str, Any], times: Tensor, marks: Tensor) -> Heads:
    """The transformer layers of THP replaced by CMABs over the events; latents are flattened, projected."""
    vectors, clock = tokens_of(w, times, marks)
    tokens, latents = (vectors + clock)[None], w["latents"][None]
    for i in range(settings["depth"]):
        latents = p.cmab(under(w, "stack"), i, latents, tokens, settings["num_heads"])
    known = p.linear(under(w, "project"), latents.flatten())
    return heads(w, p.layer_norm(under(w, "norm"), known))


def thp(w: Weights, settings: dict[str, Any], times: Tensor, marks: Tensor) -> Heads:
    """A causal post-norm transformer, time added before every layer; the last token predicts."""
    tokens, clock = tokens_of(w, times, marks)
    n, count = len(times), settings["num_heads"]
    if n == 0:
        return heads(w, w["nothing"])
    for i in range(settings["depth"]):
        own = under(w, f"layers.{i}")
        x = tokens + clock
        q = p.linear(under(own, "query"), x)
        k, v = p.linear(under(own, "key_value"), x).chunk(2, -1)
        past = torch.ones(n, n).tril()
        mixed = p.heads_attend(q, k, v, heads=count, scale=1 / sqrt(q.shape[-1] // count), seen=past)
        x = p.layer_norm(under(own, "norms.0"), x + p.linear(under(own, "out"), mixed))
        wide = p.gelu(p.linear(under(own, "feed.0"), x))
        tokens = p.layer_norm(under(own, "norms.1"), x + p.linear(under(own, "feed.2"), wide))
    return heads(w, tokens[-1])


WRITTEN = {"cmhp": cmhp, "thp": thp}


def streams() -> Events:
    random = torch.Generator().manual_seed(0)
    gaps = [torch.randn(n, generator=random, dtype=torch.float64).exp() for n in (7, 4)]
    marks = [torch.randint(MARKS, (n,), generator=random) for n in (7, 4)]
    return Events.from_gaps(gaps, marks=marks, t_start=30.0, unit="hour", num_marks=MARKS)


def built(name: str, size: str) -> PointProcess:
    """A model by the faithful recipe, in the paper's sizes or in small ones, away from its initial zeros."""
    settings = recipe("mooc", name, "faithful").model | {"num_marks": MARKS}
    if size == "small":
        settings |= SIZES["small"] | ({"num_slots": 7, "num_latents": 3} if name == "cmhp" else {})
    model: Any = MODELS[name](**settings)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 / sqrt(parameter.shape[-1]) * torch.randn_like(parameter))
    model.double().eval().requires_grad_(False)
    model.set_scales(streams())
    return model  # type: ignore[no-any-return]


def assert_equal(found: Any, logits: Tensor, expected: Heads) -> None:
    ours = found.log_weights, found.loc, found.scale, logits
    for mine, theirs in zip(ours, expected, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-10, rtol=0)


both = pytest.mark.parametrize("name", WRITTEN)
every_size = pytest.mark.parametrize("size", SIZES)


def test_the_faithful_cmhp_has_the_papers_sizes() -> None:
    for variant in (recipe("mooc", "cmhp", "faithful"), recipe("reddit", "cmhp-faithful", "faithful")):
        model: Any = MODELS["cmhp"](**variant.model)
        assert model.latents.shape == (128, 64)
        assert model.stack.observation.slots.shape == (2, 128, 64)
        assert (variant.optimiser, variant.lr) == ("adam", 5e-4)


@both
@every_size
def test_what_is_predicted_before_every_event_is_the_published_models(name: str, size: str) -> None:
    model, events = built(name, size), streams()
    found = model.forecast(events)
    logits = found.mark_logits()
    for b, i in events.mask.nonzero().tolist():
        before = events.times[b, :i] - events.t_start[b], events.marks[b, :i]
        expected = WRITTEN[name](model.state_dict(), SIZES[size], *before)
        assert_equal(found.gap[b, i], logits[b, i], expected)


@both
@every_size
def test_what_a_stream_predicts_event_by_event_is_the_published_models(name: str, size: str) -> None:
    model, events = built(name, size), streams()
    state = model.empty(events.t_start[:1])
    for i in range(7):
        state = model.update(state, events.times[:1, i], events.marks[:1, i])
        found = model.query(state)
        seen = events.times[0, : i + 1] - events.t_start[0], events.marks[0, : i + 1]
        expected = WRITTEN[name](model.state_dict(), SIZES[size], *seen)
        assert_equal(found.gap[0], found.mark_logits()[0], expected)


@both
@every_size
def test_log_probabilities_of_gaps_and_marks_are_the_published_models(name: str, size: str) -> None:
    model, events = built(name, size), streams()
    found = model.log_prob(events)
    for b, i in events.scored.nonzero().tolist():
        before = events.times[b, :i] - events.t_start[b], events.marks[b, :i]
        *mixture, logits = WRITTEN[name](model.state_dict(), SIZES[size], *before)
        log_gap = (events.times[b, i] - events.times[b, i - 1]).log()
        time = p.log_normal_mixture(log_gap, *mixture)
        torch.testing.assert_close(found.time[b, i], time, atol=1e-10, rtol=0)
        torch.testing.assert_close(found.mark[b, i], logits[events.marks[b, i]], atol=1e-10, rtol=0)

"""Predictions of all ten models against the published forward passes, written out from the weights alone.

The references know nothing of the package but the names of weights. Paths that are drawn at random (the
latent's samples, the bootstrap's points and residuals) are computed from the same random numbers.
"""

from math import sqrt
from typing import Any

import pytest
import torch
from torch import Tensor

from constmem.neural_processes import MODELS, NeuralProcess
from tests import published as p
from tests.published import Weights, under

Prediction = tuple[Tensor, Tensor]  # mean and standard deviation
SAMPLES = 3
CNP_FAMILY = ("cnp", "canp", "np", "anp", "bnp", "banp")


def coarse(raw: Tensor) -> Tensor:
    return 0.1 + 0.9 * p.softplus(raw)


STDS = {"bounded": lambda raw: 0.05 + 0.95 * p.softplus(raw), "exp": torch.exp, "coarse": coarse}


# The CNP family


def post_norm(weights: Weights, queries: Tensor, keys: Tensor, values: Tensor, heads: int) -> Tensor:
    """h = norm(q + softmax(q k' / sqrt(width)) v), out = norm(h + relu(W h))."""
    q, k, v = (
        p.linear(under(weights, name), x)
        for name, x in (("query", queries), ("key", keys), ("value", values))
    )
    h = p.layer_norm(
        under(weights, "norm"), q + p.heads_attend(q, k, v, heads=heads, scale=1 / sqrt(q.shape[-1]))
    )
    return p.layer_norm(under(weights, "norm_out"), h + p.relu(p.linear(under(weights, "out"), h)))


def pooled(w: Weights, which: int, x: Tensor, y: Tensor) -> Tensor:
    """MLP on each point, mean, MLP."""
    tokens = p.mlp(under(w, f"encoder.pre.{which}"), torch.cat([x, y], -1))
    return p.mlp(under(w, f"encoder.post.{which}"), tokens.mean(-2))


def pooled_by_attention(w: Weights, heads: int, x: Tensor, y: Tensor) -> Tensor:
    """MLP on each point, ReLU, self-attention, mean, MLP."""
    own = under(w, "encoder.tokens")
    tokens = p.relu(p.mlp(under(own, "embed"), torch.cat([x, y], -1)))
    tokens = post_norm(under(own, "attention"), tokens, tokens, tokens, heads)
    return p.mlp(under(w, "encoder.post"), tokens.mean(-2))


def attended(w: Weights, heads: int, x: Tensor, y: Tensor, xt: Tensor) -> Tensor:
    """Queries and keys from x by one MLP; values: MLP on each point, self-attention (no ReLU between)."""
    own = under(w, "encoder.values")
    values = p.mlp(under(own, "embed"), torch.cat([x, y], -1))
    values = post_norm(under(own, "attention"), values, values, values, heads)
    keys = under(w, "encoder.keys")
    return post_norm(under(w, "encoder.attention"), p.mlp(keys, xt), p.mlp(keys, x), values, heads)


def represented(w: Weights, settings: dict[str, Any], x: Tensor, y: Tensor, xt: Tensor) -> Tensor:
    """The deterministic representation of every target: that of CNP, or of CANP."""
    if "num_heads" not in settings:
        both = torch.cat([pooled(w, which, x, y) for which in (0, 1)], -1)
        return both[..., None, :].expand(*xt.shape[:-1], -1)
    heads = settings["num_heads"]
    mean = pooled_by_attention(w, heads, x, y)[..., None, :].expand(*xt.shape[:-1], -1)
    return torch.cat([attended(w, heads, x, y, xt), mean], -1)


def decoded(
    w: Weights, settings: dict[str, Any], xt: Tensor, seen: Tensor, more: Tensor | None
) -> Prediction:
    """MLP on [x, what is seen]; what a bootstrap version shows enters behind the first layer."""
    hidden = p.linear(under(w, "decoder.first"), torch.cat([xt, seen], -1))
    if more is not None:
        hidden = hidden + p.linear(under(w, "adapt"), more)
    mean, raw = p.mlp(under(w, "decoder.rest"), p.relu(hidden)).chunk(2, -1)
    return mean, STDS[settings["std"]](raw)


def conditional(w: Weights, settings: dict[str, Any], x: Tensor, y: Tensor, xt: Tensor) -> Prediction:
    """CNP and CANP."""
    return decoded(w, settings, xt, represented(w, settings, x, y, xt), None)


def latent(
    w: Weights, settings: dict[str, Any], x: Tensor, y: Tensor, xt: Tensor, noise: Tensor
) -> Prediction:
    """NP and ANP: one deterministic path, one latent z of deviation 0.1 + 0.9 sigmoid; a mixture over z."""
    if "num_heads" in settings:
        path = attended(w, settings["num_heads"], x, y, xt)
        z_mean, z_raw = pooled_by_attention(w, settings["num_heads"], x, y).chunk(2, -1)
    else:
        path = pooled(w, 0, x, y)[:, None].expand(-1, xt.shape[1], -1)
        z_mean, z_raw = pooled(w, 1, x, y).chunk(2, -1)
    found = []
    for drawn in noise:
        z = z_mean + (0.1 + 0.9 / (1 + (-z_raw).exp())) * drawn
        seen = torch.cat([path, z[:, None].expand(-1, xt.shape[1], -1)], -1)
        found.append(decoded(w, settings, xt, seen, None))
    means, stds = zip(*found, strict=True)
    return torch.stack(means, -2), torch.stack(stds, -2)


def bootstrapped(
    w: Weights, settings: dict[str, Any], x: Tensor, y: Tensor, xt: Tensor, draws: Tensor
) -> Prediction:
    """BNP and BANP: residual bootstrap; draws are (points or residuals, version, point)."""
    base = represented(w, settings, x, y, xt)
    found = []
    for points, residuals in zip(*draws, strict=True):
        mean, std = conditional(w, settings, x[:, points], y[:, points], x)
        drawn = ((y - mean) / std)[:, residuals]
        rebuilt = mean + std * (drawn - drawn.mean(-2, keepdim=True))
        found.append(decoded(w, settings, xt, base, represented(w, settings, x, rebuilt, xt)))
    means, stds = zip(*found, strict=True)
    return torch.stack(means, -2), torch.stack(stds, -2)


# Transformers


def predictor(w: Weights, settings: dict[str, Any], tokens: Tensor) -> Prediction:
    """[LayerNorm] Linear ReLU Linear."""
    if any(key.startswith("head.norm") for key in w):
        tokens = p.layer_norm(under(w, "head.norm"), tokens)
    mean, raw = p.mlp(under(w, "head.predictor"), tokens).chunk(2, -1)
    return mean, STDS[settings["std"]](raw)


def tnpd(w: Weights, settings: dict[str, Any], x: Tensor, y: Tensor, xt: Tensor) -> Prediction:
    """One post-norm transformer over [context (x, y); target (x, 0)]; all see the context only."""
    n, heads = x.shape[1], settings["num_heads"]
    unknown = torch.zeros(*xt.shape[:2], y.shape[-1], dtype=xt.dtype)
    points = torch.cat([torch.cat([x, y], -1), torch.cat([xt, unknown], -1)], 1)
    tokens = p.mlp(under(w, "embed"), points)
    seen = torch.arange(points.shape[1]) < n
    for i in range(settings["depth"]):
        own = under(w, f"layers.{i}")
        q, k, v = p.linear(under(own, "query_key_value"), tokens).chunk(3, -1)
        mixed = p.heads_attend(q, k, v, heads=heads, scale=1 / sqrt(q.shape[-1] // heads), seen=seen)
        tokens = p.layer_norm(under(own, "norm"), tokens + p.linear(under(own, "out"), mixed))
        wide = p.relu(p.linear(under(own, "expand"), tokens))
        tokens = p.layer_norm(under(own, "norm_feed"), tokens + p.linear(under(own, "contract"), wide))
    return predictor(w, settings, tokens[:, n:])


def by_level(w: Weights, settings: dict[str, Any], xt: Tensor, levels: list[Tensor]) -> Prediction:
    """Layer i of the decoder, CA and FF, reads level i."""
    tokens = p.mlp(under(w, "embed_target"), xt)
    for i, level in enumerate(levels):
        tokens = p.cross_attention(under(w, f"cross.{i}"), tokens, level, settings["num_heads"])
        tokens = p.feed_forward(under(w, f"feed.{i}"), tokens)
    return predictor(w, settings, tokens)


def eqtnp(w: Weights, settings: dict[str, Any], x: Tensor, y: Tensor, xt: Tensor) -> Prediction:
    """depth - 1 layers, SA and FF, on the context, whose every level is kept."""
    levels = [p.mlp(under(w, "embed"), torch.cat([x, y], -1))]
    for i in range(settings["depth"] - 1):
        mixed = p.self_attention(under(w, f"among.{i}"), levels[-1], settings["num_heads"])
        levels.append(p.feed_forward(under(w, f"among_feed.{i}"), mixed))
    return by_level(w, settings, xt, levels)


def lbanp(w: Weights, settings: dict[str, Any], x: Tensor, y: Tensor, xt: Tensor) -> Prediction:
    """CA(latents, context) FF SA FF, in every layer."""
    tokens, heads = p.mlp(under(w, "embed"), torch.cat([x, y], -1)), settings["num_heads"]
    latents, levels = w["latents"].expand(len(x), -1, -1), []
    for i in range(settings["depth"]):
        latents = p.cross_attention(under(w, f"look.{i}"), latents, tokens, heads)
        latents = p.among(under(w, f"think.{i}"), latents, heads)
        levels.append(latents)
    return by_level(w, settings, xt, levels)


def cmanp(w: Weights, settings: dict[str, Any], x: Tensor, y: Tensor, xt: Tensor) -> Prediction:
    """LBANP with a CMAB for a layer."""
    tokens = p.mlp(under(w, "embed"), torch.cat([x, y], -1))
    latents, levels = w["latents"].expand(len(x), -1, -1), []
    for i in range(settings["depth"]):
        latents = p.cmab(under(w, "stack"), i, latents, tokens, settings["num_heads"])
        levels.append(latents)
    return by_level(w, settings, xt, levels)


# Models of the paper's sizes and of small ones, and tasks for them

PAPER: dict[str, dict[str, Any]] = {  # channels, depths of the CNP family, deviation of the others
    "gp": {"channels": (1, 1), "depths": (4, 2, 3), "std": "exp"},
    "emnist": {"channels": (2, 1), "depths": (5, 3, 4), "std": "bounded"},
    "celeba": {"channels": (2, 3), "depths": (6, 3, 5), "std": "exp"},
}
SMALL: dict[str, dict[str, Any]] = {
    "cnp": {}, "np": {"dim_latent": 6}, "bnp": {},
    "canp": {"num_heads": 4}, "anp": {"num_heads": 4, "dim_latent": 6}, "banp": {"num_heads": 4},
    "tnpd": {}, "eqtnp": {}, "lbanp": {"num_latents": 5}, "cmanp": {"num_latents": 5, "num_slots": 7},
}  # fmt: skip


def sizes(name: str, size: str) -> dict[str, Any]:
    """Settings that differ between data sets; the small ones differ in all else, too."""
    paper = PAPER["emnist" if size == "small" else size]
    settings = dict(zip(("dim_x", "dim_y"), paper["channels"], strict=True))
    if name in CNP_FAMILY:
        settings |= dict(zip(("pre_depth", "post_depth", "decoder_depth"), paper["depths"], strict=True))
    else:
        settings["std"] = paper["std"]
    if size == "small":
        settings |= {"dim": 12} | SMALL[name]
        settings |= {} if name in CNP_FAMILY else {"depth": 3, "hidden": 10, "num_heads": 2, "embed_depth": 2}
    return settings | ({"num_samples": SAMPLES} if name in ("np", "anp", "bnp", "banp") else {})


def facts(name: str, size: str) -> dict[str, Any]:
    """All settings the reference needs, those not given by `sizes` as published: no default is believed."""
    published: dict[str, Any] = {"depth": 6, "num_heads": 4}
    if name in CNP_FAMILY:
        published = {"std": "coarse"} | ({"num_heads": 8} if name in ("canp", "anp", "banp") else {})
        published |= {"dim_latent": 128} if name in ("np", "anp") else {}
    return published | sizes(name, size)


def built(name: str, size: str) -> NeuralProcess:
    """A model away from its initial zeros and ones: a term left out shows."""
    model = MODELS[name](**sizes(name, size))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 / sqrt(parameter.shape[-1]) * torch.randn_like(parameter))
    return model.double().eval().requires_grad_(False)


def task(model: NeuralProcess, n: int = 9, m: int = 5, b: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    """Points that grow in every channel: a bootstrap, which sorts them, leaves them in place."""
    x, y, xt = (
        torch.randn(b, k, channels, dtype=torch.float64)
        for k, channels in ((n, model.dim_x), (n, model.dim_y), (m, model.dim_x))
    )
    return x.sort(1).values, y.sort(1).values, xt


def assert_equal(found: Prediction, expected: Prediction) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-10, rtol=0)


WRITTEN = {
    "cnp": conditional,
    "canp": conditional,
    "tnpd": tnpd,
    "eqtnp": eqtnp,
    "lbanp": lbanp,
    "cmanp": cmanp,
}
every_size = pytest.mark.parametrize("size", ["small", *PAPER])


@every_size
@pytest.mark.parametrize("name", WRITTEN)
def test_predictions_are_the_published_models(name: str, size: str) -> None:
    model = built(name, size)
    x, y, xt = task(model)
    found = model.query(model.condition(x, y), xt)
    expected = WRITTEN[name](model.state_dict(), facts(name, size), x, y, xt)
    assert_equal((found.mean, found.stddev), expected)


@every_size
@pytest.mark.parametrize("name", ["np", "anp"])
def test_predictions_of_latent_models_are_the_published_given_the_noise(name: str, size: str) -> None:
    model = built(name, size)
    x, y, xt = task(model)
    memory = model.read(model.condition(x, y), generator=torch.Generator().manual_seed(5))  # type: ignore[call-arg]
    found = model.predict(memory, xt).components  # type: ignore[attr-defined]
    shape = SAMPLES, facts(name, size)["dim_latent"]
    noise = torch.randn(shape, generator=torch.Generator().manual_seed(5))
    expected = latent(model.state_dict(), facts(name, size), x, y, xt, noise.double())
    assert_equal((found.mean, found.stddev), expected)


@every_size
@pytest.mark.parametrize("name", ["bnp", "banp"])
def test_predictions_of_bootstrap_models_are_the_published_given_the_draws(name: str, size: str) -> None:
    model = built(name, size)
    x, y, xt = task(model)
    memory = model.read(model.condition(x, y), generator=torch.Generator().manual_seed(5))  # type: ignore[call-arg]
    found = model.predict(memory, xt).components  # type: ignore[attr-defined]
    n = x.shape[1]
    draws = (n * torch.rand(n, 2, SAMPLES, generator=torch.Generator().manual_seed(5))).long()
    expected = bootstrapped(model.state_dict(), facts(name, size), x, y, xt, draws.permute(1, 2, 0))
    assert_equal((found.mean, found.stddev), expected)


@every_size
@pytest.mark.parametrize("name", ["bnp", "banp"])
def test_training_predicts_from_the_data_alone_too(name: str, size: str) -> None:
    """The first term of the bootstrap's loss is the likelihood of CNP or CANP with the same weights."""
    model = built(name, size)
    x, y, xt = task(model)
    yt, noise = torch.randn(2, 5, model.dim_y, dtype=torch.float64), torch.rand(2, 2, SAMPLES, 9)
    w, settings = model.state_dict(), facts(name, size)
    everything, outputs = torch.cat([x, xt], 1), torch.cat([y, yt], 1)

    def log_density(mean: Tensor, std: Tensor, value: Tensor) -> Tensor:
        return torch.distributions.Normal(mean, std).log_prob(value).sum(-1)

    alone = log_density(*conditional(w, settings, x, y, everything), outputs)
    versions = []
    for b in range(2):
        one = slice(b, b + 1)
        draws = (9 * noise[:, b]).long()
        mean, std = bootstrapped(w, settings, x[one], y[one], everything[one], draws)
        versions.append(log_density(mean, std, outputs[one, :, None]))
    mixed = torch.cat(versions).exp().mean(-1).log()
    expected = -(alone + mixed).mean()
    torch.testing.assert_close(model.loss(x, y, xt, yt, noise=noise), expected, atol=1e-10, rtol=0)

"""The layers of the published models in float64, as the papers write them, from weights by their names."""

from collections.abc import Mapping
from math import pi, sqrt

import torch
from torch import Tensor

Weights = Mapping[str, Tensor]


def under(weights: Weights, name: str) -> Weights:
    """The weights of one part of a model."""
    found = {key.removeprefix(f"{name}."): w for key, w in weights.items() if key.startswith(f"{name}.")}
    assert found, f"there are no weights of {name}"
    return found


def linear(weights: Weights, x: Tensor) -> Tensor:
    out = x @ weights["weight"].T
    return out + weights["bias"] if "bias" in weights else out


def relu(x: Tensor) -> Tensor:
    return x * (x > 0)


def softplus(x: Tensor) -> Tensor:
    return (1 + x.exp()).log()


def gelu(x: Tensor) -> Tensor:
    return x * 0.5 * (1 + torch.erf(x / sqrt(2)))


def mlp(weights: Weights, x: Tensor) -> Tensor:
    """Linear layers with ReLU between."""
    depth = len([key for key in weights if key.endswith("weight")])
    for i in range(depth):
        x = linear(under(weights, f"layers.{i}"), x)
        x = relu(x) if i < depth - 1 else x
    return x


def normalised(x: Tensor) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    return centred / ((centred**2).mean(-1, keepdim=True) + 1e-5).sqrt()


def layer_norm(weights: Weights, x: Tensor) -> Tensor:
    return normalised(x) * weights["weight"] + weights["bias"]


def heads_attend(
    q: Tensor, k: Tensor, v: Tensor, *, heads: int, scale: float, seen: Tensor | None = None
) -> Tensor:
    """softmax(scale q k') v, head by head; `seen` says which queries see which keys."""
    width, parts = q.shape[-1] // heads, []
    for head in range(heads):
        mine = slice(head * width, (head + 1) * width)
        weights = (scale * q[..., mine] @ k[..., mine].mT).exp()
        weights = weights if seen is None else weights * seen
        parts.append(weights / weights.sum(-1, keepdim=True) @ v[..., mine])
    return torch.cat(parts, -1)


# Pre-norm layers of EQTNP, LBANP and CMANP: the residual is the normed x


def attention(weights: Weights, x: Tensor, context: Tensor, heads: int) -> Tensor:
    """q, k, v without bias, scores over the root of a head's width, the output with bias."""
    own = under(weights, "attention")
    key, value = own["key_value.weight"].chunk(2)
    q, k, v = x @ own["query.weight"].T, context @ key.T, context @ value.T
    seen = heads_attend(q, k, v, heads=heads, scale=1 / sqrt(q.shape[-1] // heads))
    return linear(under(own, "out"), seen)


def cross_attention(weights: Weights, x: Tensor, context: Tensor, heads: int) -> Tensor:
    x, context = layer_norm(under(weights, "norm"), x), layer_norm(under(weights, "norm_context"), context)
    return attention(weights, x, context, heads) + x


def self_attention(weights: Weights, x: Tensor, heads: int) -> Tensor:
    x = layer_norm(under(weights, "norm"), x)
    return attention(weights, x, x, heads) + x


def feed_forward(weights: Weights, x: Tensor) -> Tensor:
    """GEGLU."""
    x = layer_norm(under(weights, "norm"), x)
    content, gate = linear(under(weights, "expand"), x).chunk(2, -1)
    return linear(under(weights, "contract"), content * gelu(gate)) + x


def among(weights: Weights, x: Tensor, heads: int) -> Tensor:
    """FF SA FF."""
    x = self_attention(under(weights, "1"), feed_forward(under(weights, "0"), x), heads)
    return feed_forward(under(weights, "2"), x)


def cmab(weights: Weights, i: int, latents: Tensor, tokens: Tensor, heads: int) -> Tensor:
    """Block i of a stack: CA(slots, tokens) FF SA FF -> data; CA(latents, data) FF SA FF.

    Without tokens the slots attend to nothing: what they read is zero.
    """
    own, reading = under(weights, "observation"), under(weights, f"readings.{i}")
    slots = normalised(own["slots"][i]) * own["slots_scale"][i] + own["slots_shift"][i]
    seen = torch.zeros(len(tokens), *slots.shape, dtype=slots.dtype)
    if tokens.shape[1]:
        context = normalised(tokens) * own["tokens_scale"][i] + own["tokens_shift"][i].T
        q, k, v = slots @ own["query"][i].T, *(context @ w[i].T for w in own["key_value"])
        seen = heads_attend(q, k, v, heads=heads, scale=1 / sqrt(q.shape[-1] // heads))
    data = among(under(reading, "data"), linear(under(reading, "out"), seen) + slots, heads)
    latents = cross_attention(under(reading, "cross"), latents, data, heads)
    return among(under(reading, "latents"), latents, heads)


# Events


def time_encoding(times: Tensor, dim: int) -> Tensor:
    """sin (even channels) and cos (odd ones) of t / 10000^(2 floor(i / 2) / dim)."""
    channels = []
    for i in range(dim):
        angle = times / 10_000 ** (2 * (i // 2) / dim)
        channels.append(angle.sin() if i % 2 == 0 else angle.cos())
    return torch.stack(channels, -1)


def log_normal_mixture(log_gap: Tensor, log_weights: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """Log-density of a gap under a mixture of log-normals."""
    density = (-0.5 * ((log_gap[..., None] - mean) / std) ** 2).exp() / (std * sqrt(2 * pi))
    return (log_weights.exp() * density).sum(-1).log() - log_gap

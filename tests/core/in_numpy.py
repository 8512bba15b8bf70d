"""The block and its layers written out in numpy, one task and one row at a time, in float64."""

from math import erf

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from constmem import CMABStack
from constmem.core.layers import CrossAttention, FeedForward, SelfAttention

Array = NDArray[np.float64]


def array(tensor: Tensor) -> Array:
    out: Array = tensor.detach().double().numpy()
    return out


def norm(x: Array, scale: Array, shift: Array) -> Array:
    centred = x - x.mean(-1, keepdims=True)
    return centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5) * scale + shift


def layer(x: Array, module: nn.LayerNorm) -> Array:
    return norm(x, array(module.weight), array(module.bias))


def attention(x: Array, source: Array, query: Array, key: Array, value: Array, heads: int) -> Array:
    """Every row of x over every row of its source, head by head, before the output layer."""
    q, k, v = x @ query.T, source @ key.T, source @ value.T
    width = q.shape[-1] // heads
    out = np.zeros_like(q)
    for head in range(heads):
        here = slice(head * width, (head + 1) * width)
        for i in range(len(q)):
            scores = k[:, here] @ q[i, here] / np.sqrt(width)
            weights = np.exp(scores - scores.max())
            out[i, here] = weights @ v[:, here] / weights.sum()
    return out


def attended(module: SelfAttention | CrossAttention, x: Array, context: Array | None, raw: bool) -> Array:
    normed = layer(x, module.norm)
    source = normed if context is None else layer(context, module.norm_context)
    inner = module.attention
    key, value = np.split(array(inner.key_value.weight), 2)
    out = attention(normed, source, array(inner.query.weight), key, value, inner.num_heads)
    out = out @ array(inner.out.weight).T + array(inner.out.bias)
    return out + (x if raw else normed)


def fed(module: FeedForward, x: Array, raw: bool) -> Array:
    normed = layer(x, module.norm)
    wide = normed @ array(module.expand.weight).T + array(module.expand.bias)
    content, gate = np.split(wide, 2, -1)
    gelu = gate * 0.5 * (1 + np.vectorize(erf)(gate / np.sqrt(2)))
    out = (content * gelu) @ array(module.contract.weight).T + array(module.contract.bias)
    return out + (x if raw else normed)


def written_out(stack: CMABStack, block: int, latents: Array, tokens: Array, raw: bool) -> Array:
    """SA(CA(latents, SA(CA(slots, tokens)))) for one task, each with a feed-forward layer behind it."""
    o = stack.observation
    normed = norm(array(o.slots[block]), array(o.slots_scale[block]), array(o.slots_shift[block]))
    context = norm(tokens, array(o.tokens_scale[block]), array(o.tokens_shift[block, :, 0]))
    key, value = array(o.key_value[0, block]), array(o.key_value[1, block])
    seen = attention(normed, context, array(o.query[block]), key, value, o.num_heads)
    return read(stack, block, latents, seen, raw)


def read(stack: CMABStack, block: int, latents: Array, seen: Array, raw: bool) -> Array:
    """What comes after the slots have seen data, for one task."""
    o, reading = stack.observation, stack.readings[block]
    slots = array(o.slots[block])
    normed = norm(slots, array(o.slots_scale[block]), array(o.slots_shift[block]))
    seen = seen @ array(reading.out.weight).T + array(reading.out.bias) + (slots if raw else normed)
    seen = fed(reading.data[0], seen, raw)
    seen = fed(reading.data[2], attended(reading.data[1], seen, None, raw), raw)
    latents = fed(reading.latents[0], attended(reading.cross, latents, seen, raw), raw)
    return fed(reading.latents[2], attended(reading.latents[1], latents, None, raw), raw)

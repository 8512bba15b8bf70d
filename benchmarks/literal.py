"""The paper's algorithm taken literally, on a `CMANP`'s weights: what the library is measured against.

Conditioning embeds the whole context first, then passes over it once for every block, in chunks,
with the rule log C' = log C + softplus(T); an update changes every block's embedding and log C in
turn and computes the block's output anew each time. Everything is float32, as published.
"""

from dataclasses import dataclass
from math import sqrt
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from constmem.core.block import Reading
from constmem.core.layers import normed_slots
from constmem.neural_processes import CMANP


@dataclass
class LiteralState:
    """What the literal algorithm keeps: every block's embedding and log C, and the latents they give."""

    embedding: list[Tensor]  # (b, h, s, c) each
    log_c: list[Tensor]  # (b, h, s) each
    latents: list[Tensor]  # (b, l, d) each


class Literal:
    """Condition, update and query as the paper's appendix describes them."""

    def __init__(self, model: CMANP, chunk: int | None = 1024) -> None:
        self.model, self.chunk = model, chunk
        self.observation = model.stack.observation

    def condition(self, x: Tensor, y: Tensor) -> LiteralState:
        tokens = self.model.embed(torch.cat([x, y], -1))  # the whole context
        state = LiteralState([], [], [])
        latents = self.model.latents.expand(x.shape[0], -1, -1)
        for block in range(len(self.model.stack.readings)):
            embedding, log_c = self._attend(block, tokens)
            latents = self._read(block, embedding, latents)
            state.embedding.append(embedding)
            state.log_c.append(log_c)
            state.latents.append(latents)
        return state

    def update(self, state: LiteralState, x: Tensor, y: Tensor) -> LiteralState:
        tokens = self.model.embed(torch.cat([x, y], -1))
        new = LiteralState([], [], [])
        latents = self.model.latents.expand(x.shape[0], -1, -1)
        for block in range(len(self.model.stack.readings)):
            embedding, log_c = self._advance(block, tokens, state.embedding[block], state.log_c[block])
            latents = self._read(block, embedding, latents)
            new.embedding.append(embedding)
            new.log_c.append(log_c)
            new.latents.append(latents)
        return new

    def read(self, state: LiteralState) -> list[Tensor]:
        """The latents after every block, computed anew: what the literal algorithm does in every update."""
        latents = [self.model.latents.expand(len(state.embedding[0]), -1, -1)]
        for block, embedding in enumerate(state.embedding):
            latents.append(self._read(block, embedding, latents[-1]))
        return latents[1:]

    def query(self, state: LiteralState, xt: Tensor) -> tuple[Tensor, Tensor]:
        return self.model.decode(torch.stack(state.latents, 1), xt)

    def loss(self, xc: Tensor, yc: Tensor, xt: Tensor, yt: Tensor) -> Tensor:
        """Minus the mean log-likelihood of a target."""
        mean, std = self.query(self.condition(xc, yc), xt)
        score: Tensor = torch.distributions.Normal(mean, std).log_prob(yt).sum(-1).mean()
        return -score

    def _attend(self, block: int, tokens: Tensor) -> tuple[Tensor, Tensor]:
        chunk = self.chunk or tokens.shape[1]
        scores, v = self._scores(block, tokens[:, :chunk])
        embedding, log_c = scores.softmax(-1) @ v, scores.logsumexp(-1)
        for start in range(chunk, tokens.shape[1], chunk):
            embedding, log_c = self._advance(block, tokens[:, start : start + chunk], embedding, log_c)
        return embedding, log_c

    def _advance(self, block: int, tokens: Tensor, embedding: Tensor, log_c: Tensor) -> tuple[Tensor, Tensor]:
        scores, v = self._scores(block, tokens)
        return literal_rule(embedding, log_c, scores, v)

    def _scores(self, block: int, tokens: Tensor) -> tuple[Tensor, Tensor]:
        o, dim = self.observation, self.observation.dim
        heads = o.num_heads
        slots = F.layer_norm(o.slots[block], (dim,)) * o.slots_scale[block] + o.slots_shift[block]
        normed = F.layer_norm(tokens, (dim,), o.tokens_scale[block, 0], o.tokens_shift[block, :, 0])
        q = F.linear(slots, o.query[block]).unflatten(-1, (heads, -1)).transpose(0, 1)
        k, v = (F.linear(normed, w).unflatten(-1, (heads, -1)).transpose(1, 2) for w in o.key_value[:, block])
        return torch.einsum("hsc,bhnc->bhsn", q, k) / sqrt(dim // heads), v

    def _read(self, block: int, embedding: Tensor, latents: Tensor) -> Tensor:
        o, reading = self.observation, cast(Reading, self.model.stack.readings[block])
        slots = (
            normed_slots(o.slots, o.slots_scale, o.slots_shift)[block]
            if self.model.stack.normed
            else o.slots[block]
        )
        data = reading.out(embedding.transpose(1, 2).flatten(2)) + slots
        feed, attend, feed_again = reading.data.children()
        data = feed_again(_attention(attend, feed(data), None))
        feed, attend, feed_again = reading.latents.children()
        out: Tensor = feed_again(_attention(attend, feed(_attention(reading.cross, latents, data)), None))
        return out


def _attention(module: nn.Module, x: Tensor, context: Tensor | None) -> Tensor:
    """softmax(q k') v written out, with the module's norms, weights and residual."""
    own: Any = module
    normed = own.norm(x)
    source = normed if context is None else own.norm_context(context)
    a = own.attention
    q = a.query(normed).unflatten(-1, (a.num_heads, -1))
    k, v = a.key_value(source).unflatten(-1, (2, a.num_heads, -1)).unbind(2)
    shares = (torch.einsum("bmhc,bnhc->bhmn", q, k) / sqrt(q.shape[-1])).softmax(-1)
    out: Tensor = a.out(torch.einsum("bhmn,bnhc->bmhc", shares, v).flatten(2))
    return out + (normed if own.normed else x)


def literal_rule(embedding: Tensor, log_c: Tensor, scores: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """The paper's update: log C' = log C + softplus(T), T = log sum exp(scores - log C)."""
    new_log_c = log_c + F.softplus((scores - log_c[..., None]).logsumexp(-1))
    kept = (log_c - new_log_c).exp()[..., None] * embedding
    return kept + (scores - new_log_c[..., None]).exp() @ v, new_log_c

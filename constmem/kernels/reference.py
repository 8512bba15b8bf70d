"""The plain attention kernel: what every faster kernel must agree with, on any device and dtype."""

import torch
from jaxtyping import Float
from torch import Tensor


def supports(*_: Tensor | None) -> bool:
    """Everything: this is the fallback."""
    return True


def scores(
    q: Float[Tensor, "h s c"], k: Float[Tensor, "b h n c"], bias: Float[Tensor, "b n"] | None
) -> Float[Tensor, "b h s n"]:
    """The logits of every query against every key, in float32 or better."""
    wide = torch.promote_types(q.dtype, torch.float32)
    logits = q.to(wide) @ k.to(wide).mT
    return logits if bias is None else logits + bias[:, None, None, :].to(wide)


def forward(
    q: Float[Tensor, "h s c"],
    k: Float[Tensor, "b h n c"],
    v: Float[Tensor, "b h n c"],
    bias: Float[Tensor, "b n"] | None,
) -> tuple[Float[Tensor, "b h s c"], Float[Tensor, "b h s"]]:
    """Attention and the logarithm of its normaliser; differentiable as it stands."""
    logits = scores(q, k, bias)
    if logits.shape[-1] == 1:  # the share of an only point is one
        return v.expand(-1, -1, q.shape[-2], -1), logits.squeeze(-1)
    lse = logits.logsumexp(-1)
    shares = (logits - lse[..., None]).exp()
    return (shares @ v.to(shares.dtype)).to(v.dtype), lse


def backward(
    q: Float[Tensor, "h s c"],
    k: Float[Tensor, "b h n c"],
    v: Float[Tensor, "b h n c"],
    bias: Float[Tensor, "b n"] | None,
    value: Float[Tensor, "b h s c"],
    lse: Float[Tensor, "b h s"],
    grad_value: Float[Tensor, "b h s c"],
) -> tuple[Float[Tensor, "b h s c"], Float[Tensor, "b h n c"], Float[Tensor, "b h n c"]]:
    """Gradients of these keys and values as a part of a larger softmax, whose value and lse are given.

    With shares p = exp(score - lse): dv = p' g, dscore = p (g v' - sum(g * value)).
    """
    logits = scores(q, k, bias)
    shares = (logits - lse[..., None]).exp()
    wide = shares.dtype
    g = grad_value.to(wide)
    delta = (g * value.to(wide)).sum(-1, keepdim=True)
    grad_scores = shares * (g @ v.to(wide).mT - delta)
    return (
        (grad_scores @ k.to(wide)).to(q.dtype),
        (grad_scores.mT @ q.to(wide)).to(k.dtype),
        (shares.mT @ g).to(v.dtype),
    )

"""Attention with its log-sum-exp by PyTorch's operators: plain, as a reference, and fused; which serves.

The contract: `attend(q, k, v, bias)` returns `softmax(q k' + bias) v` and the logarithm of the
normaliser, in float32 or better; `attend_backward` returns the gradients of q, k and v when these
keys are only a part of a larger softmax, whose value and log-sum-exp are given. Queries come scaled.
"""

from collections.abc import Callable
from math import log, log2
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from constmem.kernels.paths import transformed

Queries = Float[Tensor, "h s c"]
Keys = Float[Tensor, "b h n c"]  # and values
Bias = Float[Tensor, "b n"] | None
Values = Float[Tensor, "b h s c"]
Lse = Float[Tensor, "b h s"]
EMPTY = -(2.0**100)  # the lse of nothing: about -1e30, and the same number in float64, float32 and bfloat16
BLOCK = 512  # keys at a time, of long contexts on a CPU
_LARGEST = 2**21  # scores the buffer may hold
_LN2, _LOG2E = log(2.0), log2(torch.e)
_CUDA_ALIGNMENT = 8  # channels and biases are read 16 bytes at a time
_CUDA_LSE_ALIGNMENT = 32


def scores(q: Queries, k: Keys, bias: Bias) -> Float[Tensor, "b h s n"]:
    """The logits of every query against every key, in float32 or better."""
    wide = torch.promote_types(q.dtype, torch.float32)
    logits = q.to(wide) @ k.to(wide).mT
    return logits if bias is None else logits + bias[:, None, None, :].to(wide)


def forward_plainly(q: Queries, k: Keys, v: Keys, bias: Bias) -> tuple[Values, Lse]:
    """Attention and the logarithm of its normaliser; differentiable as it stands."""
    logits = scores(q, k, bias)
    if logits.shape[-1] == 1:  # the share of an only point is one
        return v.expand(-1, -1, q.shape[-2], -1), logits.squeeze(-1)
    lse = logits.logsumexp(-1)
    shares = (logits - lse[..., None]).exp()
    return (shares @ v.to(shares.dtype)).to(v.dtype), lse


def backward_plainly(
    q: Queries, k: Keys, v: Keys, bias: Bias, value: Values, lse: Lse, grad_value: Values
) -> tuple[Values, Keys, Keys]:
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


def supports_cpu(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> bool:
    """Any floating dtype (float16 only unmasked) on a CPU; the bias is taken as a constant."""
    one_dtype = q.dtype == k.dtype == v.dtype and not (bias is not None and k.dtype == torch.float16)
    return k.device.type == "cpu" and one_dtype and not (bias is not None and bias.requires_grad)


def _batched(q: Tensor, k: Tensor) -> Tensor:
    return q.expand(k.shape[0], -1, -1, -1)


def _cpu_bias(bias: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return None if bias is None else bias[:, None, None, :].to(dtype)


def forward_cpu(q: Queries, k: Keys, v: Keys, bias: Bias) -> tuple[Values, Lse]:
    """Flash attention on a CPU."""
    value, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        _batched(q, k), k, v, 0.0, False, attn_mask=_cpu_bias(bias, k.dtype), scale=1.0
    )
    return value, lse


def backward_cpu(
    q: Queries, k: Keys, v: Keys, bias: Bias, value: Values, lse: Lse, grad_value: Values
) -> tuple[Values, Keys, Keys]:
    """Its backward pass, which sees the shares only through `lse`: parts of a larger softmax will do."""
    grads: tuple[Tensor, Tensor, Tensor]
    grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad_value,
        _batched(q, k),
        k,
        v,
        value,
        lse,
        0.0,
        False,
        attn_mask=_cpu_bias(bias, k.dtype),
        scale=1.0,
    )
    return grads


def supports_cuda(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> bool:
    """float32, bfloat16 and (unmasked, since it cannot hold `EMPTY`) float16; channels in eights."""
    return (
        k.device.type == "cuda"
        and q.dtype == k.dtype == v.dtype
        and (k.dtype in (torch.float32, torch.bfloat16) or (k.dtype == torch.float16 and bias is None))
        and k.shape[-1] % _CUDA_ALIGNMENT == 0
        and not (bias is not None and bias.requires_grad)
    )


def _cuda_bias(bias: Tensor | None, q: Tensor, dtype: torch.dtype) -> Tensor | None:
    if bias is None:
        return None
    n = bias.shape[-1]
    padded = F.pad(bias.to(dtype), (0, -n % _CUDA_ALIGNMENT))
    return padded[:, None, None, :n].expand(-1, q.shape[-3], q.shape[-2], -1)


def forward_cuda(q: Queries, k: Keys, v: Keys, bias: Bias) -> tuple[Values, Lse]:
    """Memory-efficient attention on a GPU."""
    value, lse, _, _ = torch.ops.aten._scaled_dot_product_efficient_attention(
        _batched(q, k), k, v, _cuda_bias(bias, q, k.dtype), True, 0.0, False, scale=1.0
    )
    return value, lse[..., : q.shape[-2]]


def backward_cuda(
    q: Queries, k: Keys, v: Keys, bias: Bias, value: Values, lse: Lse, grad_value: Values
) -> tuple[Values, Keys, Keys]:
    """Its backward pass, with the given value and lse of the whole softmax."""
    # In half precision the kernel sums grad * value itself, and takes for granted that both lie in
    # memory as its forward pass leaves them: (b, s, h, c).
    value, grad_value = (t.transpose(1, 2).contiguous().transpose(1, 2) for t in (value, grad_value))
    padded = F.pad(lse, (0, -lse.shape[-1] % _CUDA_LSE_ALIGNMENT), value=float("inf"))
    no_dropout = torch.zeros((), dtype=torch.int64, device=k.device)
    grad_q, grad_k, grad_v, _ = torch.ops.aten._scaled_dot_product_efficient_attention_backward(
        grad_value,
        _batched(q, k),
        k,
        v,
        _cuda_bias(bias, q, k.dtype),
        value,
        padded,
        no_dropout,
        no_dropout,
        0.0,
        [True, True, True, False],
        False,
        scale=1.0,
    )
    return grad_q, grad_k, grad_v


def supports_blocked(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> bool:
    """float32 on a CPU, many keys, few queries; no gradient of the bias."""
    rows = k.shape[0] * q.shape[0] * q.shape[1]
    return (
        k.device.type == "cpu"
        and q.dtype == k.dtype == v.dtype == torch.float32
        and k.shape[-2] >= BLOCK // 2
        and rows * BLOCK <= _LARGEST
        and not (bias is not None and bias.requires_grad)
    )


def forward_blocked(q: Queries, k: Keys, v: Keys, bias: Bias) -> tuple[Values, Lse]:
    """Matrix products into one reused buffer, and exponentials to base two, joined by the online softmax.

    The vectorised `exp2` takes a third of the time of `exp`, and a block of scores that stays in the cache
    is worth more than a fused loop over narrow heads.
    """
    b, h, n, c = k.shape
    s = q.shape[-2]
    q2 = (q * _LOG2E).expand(b, h, s, c).reshape(b * h, s, c)
    shift = None if bias is None else (bias * _LOG2E).repeat_interleave(h, 0)[:, None, :]
    buffer = k.new_empty(b * h * s * min(BLOCK, n))
    acc, total = k.new_zeros(b * h, s, c), k.new_zeros(b * h, s, 1)
    top = k.new_full((b * h, s, 1), -float("inf"))
    for start in range(0, n, BLOCK):
        here = slice(start, min(start + BLOCK, n))
        size = here.stop - start
        scores = buffer[: b * h * s * size].view(b * h, s, size)
        torch.bmm(q2, k[:, :, here].reshape(b * h, size, c).mT, out=scores)
        if shift is not None:
            scores += shift[..., here]
        new_top = torch.maximum(top, scores.amax(-1, keepdim=True))
        shrink = torch.exp2(top - new_top)
        torch.exp2(scores.sub_(new_top), out=scores)
        total = total * shrink + scores.sum(-1, keepdim=True)
        acc = torch.baddbmm(acc * shrink, scores, v[:, :, here].reshape(b * h, size, c))
        top = new_top
    lse = (top + total.log2()) * _LN2
    return (acc / total).view(b, h, s, c), lse.view(b, h, s)


class Kernel(NamedTuple):
    """One way to compute attention; `alignment` is what its channel count must be a multiple of."""

    name: str
    supports: Callable[..., bool]
    forward: Callable[..., tuple[Tensor, Tensor]]
    backward: Callable[..., tuple[Tensor, Tensor, Tensor]]
    alignment: int

    def gradients(
        self, q: Queries, k: Keys, v: Keys, bias: Bias, whole: tuple[Values, Lse], grad_value: Values,
        grad_lse: Lse | None,
    ) -> tuple[Queries, Keys, Keys]:  # fmt: skip
        """Gradients of q, k, v as a part of the `whole` softmax, given those of its value, and of its lse.

        Kernels know nothing of a gradient of the lse. It is smuggled in as one more channel: values of
        one there, the gradient of the lse as its gradient, and an output declared to be zero, turn
        `p (g v' - sum(g * value))` into `p (g v' - sum(g * value) + grad_lse)`.
        """
        channels, (value, lse) = k.shape[-1], whole
        if grad_lse is not None:
            pad = self.alignment
            ones = torch.zeros(pad, dtype=v.dtype, device=v.device)
            ones[0] = 1
            v = torch.cat([v, ones.expand(*v.shape[:-1], pad)], -1)
            q, k, value = (F.pad(t, (0, pad)) for t in (q, k, value))
            grad_value = torch.cat([grad_value, grad_lse[..., None].to(grad_value.dtype)], -1)
            grad_value = F.pad(grad_value, (0, pad - 1))
        grads = self.backward(q, k, v, bias, value, lse, grad_value)
        grad_q, grad_k, grad_v = (grad[..., :channels] for grad in grads)
        return grad_q.sum(0), grad_k, grad_v


REFERENCE = Kernel("reference", lambda *_: True, forward_plainly, backward_plainly, 1)
FUSED_CPU = Kernel("fused-cpu", supports_cpu, forward_cpu, backward_cpu, 1)
BLOCKED_CPU = Kernel("blocked-cpu", supports_blocked, forward_blocked, backward_cpu, 1)
FUSED_CUDA = Kernel("fused-cuda", supports_cuda, forward_cuda, backward_cuda, 8)
KERNELS = (BLOCKED_CPU, FUSED_CPU, FUSED_CUDA, REFERENCE)  # the first that supports its arguments is taken


def choose(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> Kernel:
    """The fastest kernel that can take these arguments.

    Function transforms (vmap, grad of grad) and `torch.export` get the plain kernel: it is made of
    portable operators only. So does a single point, which has no softmax to fuse.
    """
    if transformed() or torch.compiler.is_exporting() or k.shape[-2] == 1:
        return REFERENCE
    return next(kernel for kernel in KERNELS if kernel.supports(q, k, v, bias))


def attend(q: Queries, k: Keys, v: Keys, bias: Bias = None) -> tuple[Values, Lse]:
    """Attention and the logarithm of its normaliser, differentiable in both."""
    kernel = choose(q, k, v, bias)
    if kernel is REFERENCE:
        return forward_plainly(q, k, v, bias)
    value, lse = _Attend.apply(kernel, q, k, v, bias)  # type: ignore[no-untyped-call]
    return value, lse


def attend_backward(
    q: Queries, k: Keys, v: Keys, bias: Bias, whole: tuple[Values, Lse], grad_value: Values,
    grad_lse: Lse | None,
) -> tuple[Queries, Keys, Keys]:  # fmt: skip
    """Gradients of q, k, v as a part of the `whole` softmax, given those of its value and perhaps its lse."""
    return choose(q, k, v, bias).gradients(q, k, v, bias, whole, grad_value, grad_lse)


class _Attend(torch.autograd.Function):
    """A fused kernel with a gradient for both of its outputs."""

    @staticmethod
    def forward(
        ctx: Any, kernel: Kernel, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        value, lse = kernel.forward(q, k, v, bias)
        ctx.kernel = kernel
        ctx.save_for_backward(q, k, v, bias, value, lse)
        ctx.set_materialize_grads(False)
        return value, lse

    @staticmethod
    def backward(ctx: Any, grad_value: Tensor | None, grad_lse: Tensor | None) -> Any:
        q, k, v, bias, value, lse = ctx.saved_tensors
        if grad_value is None:
            grad_value = torch.zeros_like(value)
        grads = ctx.kernel.gradients(q, k, v, bias, (value, lse), grad_value, grad_lse)
        return None, *grads, None

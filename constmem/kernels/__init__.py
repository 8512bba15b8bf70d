"""How attention with its log-sum-exp is computed: one dispatcher, one contract, several kernels.

The contract: `attend(q, k, v, bias)` returns `softmax(q k' + bias) v` and the logarithm of the
normaliser, in float32 or better; `attend_backward` returns the gradients of q, k and v when these
keys are only a part of a larger softmax, whose value and log-sum-exp are given. Queries come scaled.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from constmem.kernels import blocked, fused, native, reference


class Kernel(NamedTuple):
    """One way to compute attention; `alignment` is what its channel count must be a multiple of."""

    name: str
    supports: Callable[..., bool]
    forward: Callable[..., tuple[Tensor, Tensor]]
    backward: Callable[..., tuple[Tensor, Tensor, Tensor]]
    alignment: int


REFERENCE = Kernel("reference", reference.supports, reference.forward, reference.backward, 1)
FUSED_CPU = Kernel("fused-cpu", fused.supports_cpu, fused.forward_cpu, fused.backward_cpu, 1)
BLOCKED_CPU = Kernel("blocked-cpu", blocked.supports, blocked.forward, fused.backward_cpu, 1)
FUSED_CUDA = Kernel("fused-cuda", fused.supports_cuda, fused.forward_cuda, fused.backward_cuda, 8)
KERNELS = (BLOCKED_CPU, FUSED_CPU, FUSED_CUDA, REFERENCE)  # the first that supports its arguments is taken


def choose(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> Kernel:
    """The fastest kernel that can take these arguments.

    Function transforms (vmap, grad of grad) and `torch.export` get the plain kernel: it is made of
    portable operators only. So does a single point, which has no softmax to fuse.
    """
    if native.transformed() or torch.compiler.is_exporting() or k.shape[-2] == 1:
        return REFERENCE
    return next(kernel for kernel in KERNELS if kernel.supports(q, k, v, bias))


def attend(
    q: Float[Tensor, "h s c"],
    k: Float[Tensor, "b h n c"],
    v: Float[Tensor, "b h n c"],
    bias: Float[Tensor, "b n"] | None = None,
) -> tuple[Float[Tensor, "b h s c"], Float[Tensor, "b h s"]]:
    """Attention and the logarithm of its normaliser, differentiable in both."""
    kernel = choose(q, k, v, bias)
    if kernel is REFERENCE:
        return reference.forward(q, k, v, bias)
    value, lse = _Attend.apply(kernel, q, k, v, bias)  # type: ignore[no-untyped-call]
    return value, lse


def attend_backward(
    kernel: Kernel,
    q: Float[Tensor, "h s c"],
    k: Float[Tensor, "b h n c"],
    v: Float[Tensor, "b h n c"],
    bias: Float[Tensor, "b n"] | None,
    value: Float[Tensor, "b h s c"],
    lse: Float[Tensor, "b h s"],
    grad_value: Float[Tensor, "b h s c"],
    grad_lse: Float[Tensor, "b h s"] | None,
) -> tuple[Float[Tensor, "h s c"], Float[Tensor, "b h n c"], Float[Tensor, "b h n c"]]:
    """Gradients of q, k, v given those of the value and, where there are any, of the lse.

    Kernels know nothing of a gradient of the lse. It is smuggled in as one more channel: values of
    one there, the gradient of the lse as its gradient, and an output declared to be zero, turn
    `p (g v' - sum(g * value))` into `p (g v' - sum(g * value) + grad_lse)`.
    """
    channels = k.shape[-1]
    if grad_lse is not None:
        pad = kernel.alignment
        ones = torch.zeros(pad, dtype=v.dtype, device=v.device)
        ones[0] = 1
        v = torch.cat([v, ones.expand(*v.shape[:-1], pad)], -1)
        q, k, value = (F.pad(t, (0, pad)) for t in (q, k, value))
        grad_value = torch.cat([grad_value, grad_lse[..., None].to(grad_value.dtype)], -1)
        grad_value = F.pad(grad_value, (0, pad - 1))
    grads = kernel.backward(q, k, v, bias, value, lse, grad_value)
    grad_q, grad_k, grad_v = (grad[..., :channels] for grad in grads)
    return grad_q.sum(0), grad_k, grad_v


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
        grads = attend_backward(ctx.kernel, q, k, v, bias, value, lse, grad_value, grad_lse)
        return None, *grads, None

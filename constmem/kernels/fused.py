"""PyTorch's own fused attention, called where it also returns its log-sum-exp."""

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

_CUDA_ALIGNMENT = 8  # channels and biases are read 16 bytes at a time
_CUDA_LSE_ALIGNMENT = 32


def supports_cpu(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> bool:
    """Any floating dtype (float16 only unmasked) on a CPU; the bias is taken as a constant."""
    one_dtype = q.dtype == k.dtype == v.dtype and not (bias is not None and k.dtype == torch.float16)
    return k.device.type == "cpu" and one_dtype and not (bias is not None and bias.requires_grad)


def _batched(q: Tensor, k: Tensor) -> Tensor:
    return q.expand(k.shape[0], -1, -1, -1)


def _cpu_bias(bias: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return None if bias is None else bias[:, None, None, :].to(dtype)


def forward_cpu(
    q: Float[Tensor, "h s c"],
    k: Float[Tensor, "b h n c"],
    v: Float[Tensor, "b h n c"],
    bias: Float[Tensor, "b n"] | None,
) -> tuple[Float[Tensor, "b h s c"], Float[Tensor, "b h s"]]:
    """Flash attention on a CPU."""
    value, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        _batched(q, k), k, v, 0.0, False, attn_mask=_cpu_bias(bias, k.dtype), scale=1.0
    )
    return value, lse


def backward_cpu(
    q: Float[Tensor, "h s c"],
    k: Float[Tensor, "b h n c"],
    v: Float[Tensor, "b h n c"],
    bias: Float[Tensor, "b n"] | None,
    value: Float[Tensor, "b h s c"],
    lse: Float[Tensor, "b h s"],
    grad_value: Float[Tensor, "b h s c"],
) -> tuple[Float[Tensor, "b h s c"], Float[Tensor, "b h n c"], Float[Tensor, "b h n c"]]:
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


def forward_cuda(
    q: Float[Tensor, "h s c"],
    k: Float[Tensor, "b h n c"],
    v: Float[Tensor, "b h n c"],
    bias: Float[Tensor, "b n"] | None,
) -> tuple[Float[Tensor, "b h s c"], Float[Tensor, "b h s"]]:
    """Memory-efficient attention on a GPU."""
    value, lse, _, _ = torch.ops.aten._scaled_dot_product_efficient_attention(
        _batched(q, k), k, v, _cuda_bias(bias, q, k.dtype), True, 0.0, False, scale=1.0
    )
    return value, lse[..., : q.shape[-2]]


def backward_cuda(
    q: Float[Tensor, "h s c"],
    k: Float[Tensor, "b h n c"],
    v: Float[Tensor, "b h n c"],
    bias: Float[Tensor, "b n"] | None,
    value: Float[Tensor, "b h s c"],
    lse: Float[Tensor, "b h s"],
    grad_value: Float[Tensor, "b h s c"],
) -> tuple[Float[Tensor, "b h s c"], Float[Tensor, "b h n c"], Float[Tensor, "b h n c"]]:
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

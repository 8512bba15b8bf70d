"""Thin modules: multi-layer perceptrons, and pre-norm cross-attention, self-attention and feed-forward.

The paper's CA and SA are these with a FeedForward behind each. Every module computes
`f(norm(x)) + residual`, where the residual is `norm(x)` (`residual="normed"`, as in the published
lineage of models) or `x` itself (`residual="raw"`, as in most transformers).
"""

from collections.abc import Iterable
from math import sqrt
from typing import Any, ClassVar, Literal, TypeVar

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook
from torch.nn.utils.parametrize import type_before_parametrizations
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from constmem import kernels

Residual = Literal["normed", "raw"]
RELU = sqrt(2.0)  # the gain that makes up for what a ReLU takes away


def keep_variance(layer: nn.Linear, *, gain: float = 1.0) -> nn.Linear:
    """Draw the weights from N(0, gain^2 / inputs), set the bias to zero, and return the layer.

    PyTorch's default shrinks a signal by three in variance with every linear layer, but not its biases:
    behind a deep embedding all points look alike, and a model has to learn first that its context matters.
    """
    nn.init.normal_(layer.weight, std=gain / sqrt(layer.in_features))
    if layer.bias is not None:
        nn.init.zeros_(layer.bias)
    return layer


def check_residual(residual: str) -> None:
    """Refuse an unknown kind of residual."""
    if residual not in ("normed", "raw"):
        raise ValueError(f"residual must be 'normed' or 'raw', not {residual!r}")


def check_heads(dim: int, num_heads: int) -> None:
    """Refuse widths that do not split into heads."""
    if num_heads < 1 or dim % num_heads:
        raise ValueError(f"dim={dim} does not split into num_heads={num_heads} equal heads")


def perceptron(
    x: Float[Tensor, "*b i"], layers: Iterable[tuple[Float[Tensor, "_o _i"], Float[Tensor, " _o"]]]
) -> Float[Tensor, "*b o"]:
    """Linear layers, each a weight and a bias, with ReLU between them."""
    in_place = not torch.is_grad_enabled()  # what is needed no more is written over: a sixth faster
    for i, (weight, bias) in enumerate(layers):
        x = F.linear(x if i == 0 else F.relu(x, inplace=in_place), weight, bias)
    return x


class MLP(nn.Module):
    """`depth` linear layers with ReLU between them."""

    def __init__(self, *, dim_in: int, dim_hidden: int, dim_out: int, depth: int) -> None:
        super().__init__()
        if depth < 1:
            raise ValueError(f"an MLP needs a depth of at least 1, not {depth}")
        widths = [dim_in] + [dim_hidden] * (depth - 1) + [dim_out]
        gains = [RELU] * (depth - 1) + [1.0]
        self.layers = nn.ModuleList(
            keep_variance(nn.Linear(before, after), gain=gain)
            for before, after, gain in zip(widths[:-1], widths[1:], gains, strict=True)
        )

    def forward(self, x: Float[Tensor, "*b i"]) -> Float[Tensor, "*b o"]:
        layers = self.weights()
        if layers is not None:
            return perceptron(x, layers)
        for i, layer in enumerate(self.layers):
            x = layer(x if i == 0 else F.relu(x))
        return x

    def weights(self) -> list[tuple[Float[Tensor, "o i"], Float[Tensor, " o"]]] | None:
        """Every layer's weight and bias, past the modules' calls and look-ups, which slow small updates.

        None where a layer was replaced by one that is more than both, as quantization does.
        """
        found: list[tuple[Any, Any]] = []
        layers: Any = self._modules["layers"]
        for layer in layers._modules.values():
            own = refreshed(layer)._parameters if layer._forward_pre_hooks else layer._parameters
            if type(layer) is nn.Linear and "weight" in own and "bias" in own:
                found.append((own["weight"], own["bias"]))
            elif type_before_parametrizations(layer) is nn.Linear:
                found.append((layer.weight, layer.bias))
            else:
                return None
        return found


def affine(layer: nn.Module) -> tuple[Float[Tensor, "o i"], Any]:
    """The weight and bias of a linear layer; of one that quantization has replaced, what they stand for."""
    weight: Any = layer.weight
    bias: Any = layer.bias
    return (weight().dequantize(), bias()) if callable(weight) else (weight, bias)


AnyModule = TypeVar("AnyModule", bound=nn.Module)
_RENEW = BasePruningMethod, WeightNorm, SpectralNorm


def refreshed(module: AnyModule) -> AnyModule:
    """The module, after pruning and older normalisations of weights, which hook calls, were applied again."""
    for hook in module._forward_pre_hooks.values():
        if isinstance(hook, _RENEW):
            hook(module, ())
    return module


def applied(module: nn.Module, x: Float[Tensor, "*b i"]) -> Float[Tensor, "*b o"]:
    """module(x): of plain linear maps and norms past the bookkeeping of calls, a third of a small query."""
    kind, own = type(module), module._parameters
    hooked = module._forward_hooks or module._forward_pre_hooks or module._backward_hooks
    if hooked or module._backward_pre_hooks or _has_any_global_hook() or "weight" not in own:
        kind = nn.Module
    if kind is nn.Linear:
        return F.linear(x, own["weight"], own["bias"])  # type: ignore[arg-type]
    if kind is nn.LayerNorm:
        about: Any = module
        return F.layer_norm(x, about.normalized_shape, own["weight"], own["bias"], about.eps)
    out: Tensor = module(x)
    return out


def on_gpu(x: Tensor) -> bool:
    """Whether layers may be fused there; asked first, since every look-up slows small queries."""
    return x.is_cuda


def normed_slots(
    slots: Float[Tensor, "depth s d"], scale: Float[Tensor, "depth 1 d"], shift: Float[Tensor, "depth 1 d"]
) -> Float[Tensor, "depth s d"]:
    """Slots after their normalisation."""
    return F.layer_norm(slots, slots.shape[-1:]) * scale + shift


def _plain(*layers: nn.Module) -> bool:
    """Whether these are no more than their weights and biases."""
    return all(type(layer) is nn.Linear and not layer._forward_pre_hooks for layer in layers)


def attend(
    q: Float[Tensor, "b h m c"],
    k: Float[Tensor, "b h n c"],
    v: Float[Tensor, "b h n c"],
    mask: Bool[Tensor, "b n"] | None = None,
    *,
    scale: float | None = None,
) -> Float[Tensor, "b h m c"]:
    """Fused softmax(scale q k') v over the real keys; zero where there is none.

    Args:
        mask: True = real; None where all are, which keeps the fastest kernels available.
        scale: 1 / sqrt(channels) if None.
    """
    if k.shape[-2] == 0:
        return torch.zeros_like(q)
    if mask is None:
        return F.scaled_dot_product_attention(q, k, v, scale=scale)
    some = mask.any(-1)[:, None, None, None]
    seen = mask[:, None, None, :] | ~some  # a softmax over nothing is not a number, nor is its gradient
    return torch.where(some, F.scaled_dot_product_attention(q, k, v, seen, scale=scale), 0.0)


class _PreNorm(nn.Module):
    """Attention of x to a context, or to itself where there is none, with pre-norm and residual."""

    NORMS: ClassVar[tuple[str, ...]]
    norm: nn.LayerNorm

    def __init__(self, *, dim: int, num_heads: int, residual: Residual = "normed") -> None:
        super().__init__()
        check_heads(dim, num_heads)
        check_residual(residual)
        self.normed = residual == "normed"
        for name in self.NORMS:
            self.add_module(name, nn.LayerNorm(dim))
        self.attention = _Attention(dim, num_heads)

    def _attended(self, x: Tensor, context: Tensor | None, mask: Tensor | None) -> Tensor:
        own: Any = self._modules
        whole = self._whole(x, context, mask) if on_gpu(x) else None
        if whole is not None:
            return whole
        normed = applied(own["norm"], x)
        other = normed if context is None else applied(own["norm_context"], context)
        out: Tensor = own["attention"](normed, other, mask)
        return out + (normed if self.normed else x)

    def _whole(self, x: Tensor, context: Tensor | None, mask: Tensor | None) -> Tensor | None:
        """The whole layer as one operator, where one serves."""
        parts: Any = self._modules
        own = self.attention
        if not _plain(own.query, own.key_value, own.out):
            return None
        norms = [(parts[name].weight, parts[name].bias) for name in self.NORMS]
        weights = own.query.weight, own.key_value.weight, own.out.weight, own.out.bias
        return kernels.attention(
            x, context, mask, norms[0], norms[1] if norms[1:] else None, weights,
            heads=own.num_heads, eps=self.norm.eps, normed=self.normed,
        )  # fmt: skip


class CrossAttention(_PreNorm):
    """x attends to a context: softmax(q k') v with pre-norm and residual.

    Example:
        >>> import torch
        >>> attend = CrossAttention(dim=8, num_heads=2)
        >>> x, context = torch.randn(1, 3, 8), torch.randn(1, 5, 8)
        >>> torch.allclose(attend(x, context), attend(x, context.flip(1)), atol=1e-6)  # a set
        True
    """

    NORMS = "norm", "norm_context"

    def forward(
        self, x: Float[Tensor, "b m d"], context: Float[Tensor, "b n d"],
        mask: Bool[Tensor, "b n"] | None = None,
    ) -> Float[Tensor, "b m d"]:  # fmt: skip
        return self._attended(x, context, mask)


class SelfAttention(_PreNorm):
    """x attends to itself, with pre-norm and residual."""

    NORMS = ("norm",)

    def forward(
        self, x: Float[Tensor, "b m d"], mask: Bool[Tensor, "b m"] | None = None
    ) -> Float[Tensor, "b m d"]:
        return self._attended(x, None, mask)


class _Attention(nn.Module):
    """Multi-head attention without norm or residual: q, k, v have no bias, the output has one."""

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.query = keep_variance(nn.Linear(dim, dim, bias=False))
        self.key_value = keep_variance(nn.Linear(dim, 2 * dim, bias=False))
        self.out = keep_variance(nn.Linear(dim, dim))

    def forward(
        self, x: Float[Tensor, "b m d"], context: Float[Tensor, "b n d"],
        mask: Bool[Tensor, "b n"] | None = None,
    ) -> Float[Tensor, "b m d"]:  # fmt: skip
        own: Any = self._modules
        q = applied(own["query"], x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)  # (b, h, m, c)
        kv = applied(own["key_value"], context).unflatten(-1, (2, self.num_heads, -1))
        k, v = kv.transpose(1, 3).unbind(2)  # (b, h, n, c) each
        return applied(own["out"], attend(q, k, v, mask).transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    """A gated feed-forward layer (GEGLU) with pre-norm and residual."""

    def __init__(self, *, dim: int, hidden: int, residual: Residual = "normed") -> None:
        super().__init__()
        check_residual(residual)
        self.normed = residual == "normed"
        self.norm = nn.LayerNorm(dim)
        self.expand = keep_variance(nn.Linear(dim, 2 * hidden))
        self.contract = keep_variance(nn.Linear(hidden, dim))

    def forward(self, x: Float[Tensor, "b m d"]) -> Float[Tensor, "b m d"]:
        if on_gpu(x) and _plain(self.expand, self.contract):
            parts = self.norm, self.expand, self.contract
            weights = (t for part in parts for t in (part.weight, part.bias))
            whole = kernels.feed_forward(x, *weights, eps=self.norm.eps, normed=self.normed)
            if whole is not None:
                return whole
        own: Any = self._modules
        normed = applied(own["norm"], x)
        content, gate = applied(own["expand"], normed).chunk(2, -1)
        return applied(own["contract"], content * F.gelu(gate)) + (normed if self.normed else x)

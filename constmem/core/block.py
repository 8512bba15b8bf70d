"""The Constant Memory Attention Block: observe data into a state, read latents from the state.

    CMAB(latents, data) = SA(CA(latents, SA(CA(slots, data))))

Only the innermost cross-attention sees data, and its queries are the learned slots. So a block
splits exactly in two: `observe` (data to state) and `read` (state to latents). What the blocks of a
stack observe does not depend on one another: all of them look at a chunk in one pass.
"""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from constmem.core.checks import points, positive
from constmem.core.layers import (
    MLP,
    CrossAttention,
    FeedForward,
    Residual,
    SelfAttention,
    applied,
    check_residual,
    keep_variance,
    normed_slots,
    refreshed,
)
from constmem.core.observation import Observation
from constmem.core.state import AttentionState


class Reading(nn.Module):
    """The constant part of one block: from what its slots hold to new latents."""

    def __init__(self, *, dim: int, num_heads: int, hidden: int, residual: Residual) -> None:
        super().__init__()
        attention = {"dim": dim, "num_heads": num_heads, "residual": residual}
        self.out = keep_variance(nn.Linear(dim, dim))
        self.data = nn.Sequential(
            FeedForward(dim=dim, hidden=hidden, residual=residual),
            SelfAttention(**attention),  # type: ignore[arg-type]
            FeedForward(dim=dim, hidden=hidden, residual=residual),
        )
        self.cross = CrossAttention(**attention)  # type: ignore[arg-type]
        self.latents = nn.Sequential(
            FeedForward(dim=dim, hidden=hidden, residual=residual),
            SelfAttention(**attention),  # type: ignore[arg-type]
            FeedForward(dim=dim, hidden=hidden, residual=residual),
        )

    def forward(
        self,
        value: Float[Tensor, "b h s c"],
        slots: Float[Tensor, "s d"],
        latents: Float[Tensor, "b l d"],
    ) -> Float[Tensor, "b l d"]:
        own: Any = self._modules
        seen = applied(own["out"], value.transpose(1, 2).flatten(2)) + slots
        out: Tensor = own["latents"](own["cross"](latents, own["data"](seen)))
        return out


class CMABStack(nn.Module):
    """`depth` blocks whose states are one `AttentionState` with a depth axis.

    Example:
        >>> import torch
        >>> stack = CMABStack(depth=2, dim=16, num_slots=4, num_heads=2)
        >>> tokens, latents = torch.randn(1, 10, 16), torch.randn(1, 3, 16)
        >>> one_by_one = stack.observe(tokens[:, :1])
        >>> for i in range(1, 10):
        ...     one_by_one = one_by_one.merge(stack.observe(tokens[:, i : i + 1]))
        >>> levels = stack.read(one_by_one, latents)
        >>> torch.allclose(levels[-1], stack(latents, tokens)[-1], atol=1e-5)
        True
    """

    def __init__(
        self, *, depth: int, dim: int = 64, num_slots: int = 128, num_heads: int = 4, hidden: int = 128,
        residual: Residual = "normed",
    ) -> None:  # fmt: skip
        super().__init__()
        for name, number in (("depth", depth), ("num_slots", num_slots), ("hidden", hidden)):
            positive(name, number)
        check_residual(residual)
        self.normed = residual == "normed"
        self.observation = Observation(dim=dim, depth=depth, num_slots=num_slots, num_heads=num_heads)
        self.layout = depth, num_heads, num_slots, dim // num_heads  # the shape of a state, but for the batch
        self.readings = nn.ModuleList(
            Reading(dim=dim, num_heads=num_heads, hidden=hidden, residual=residual) for _ in range(depth)
        )

    def observe(
        self, data: Float[Tensor, "b n i"], mask: Tensor | None = None, log_weight: Tensor | None = None, *,
        embed: MLP | None = None,
    ) -> AttentionState:  # fmt: skip
        """The state of exactly these tokens (or points that `embed` makes tokens), for all blocks at once."""
        return self.observation.observe(data, mask, log_weight, embed=embed)

    def empty(self, batch: int) -> AttentionState:
        """The state of nothing."""
        *shape, channels = self.layout
        device = self.observation.slots.device
        return AttentionState.empty((batch, *shape), channels, device=device)

    def read(self, state: AttentionState, latents: Float[Tensor, "b l d"]) -> list[Float[Tensor, "b l d"]]:
        """The latents after each block."""
        return self.read_value(state.value, latents)

    def read_value(
        self, value: Float[Tensor, "b depth h s c"], latents: Float[Tensor, "b l d"]
    ) -> list[Float[Tensor, "b l d"]]:
        """The latents after each block, from a state's value: nothing else of it is read."""
        own = refreshed(self.observation)
        slots = normed_slots(own.slots, own.slots_scale, own.slots_shift) if self.normed else own.slots
        values = value.to(latents.dtype)
        levels: list[Tensor] = []
        for i, reading in enumerate(self.readings):
            latents = reading(values[:, i], slots[i], latents)
            levels.append(latents)
        return levels

    def forward(
        self, latents: Float[Tensor, "b l d"], tokens: Float[Tensor, "b n d"], mask: Tensor | None = None,
    ) -> list[Float[Tensor, "b l d"]]:  # fmt: skip
        return self.read(self.observe(tokens, mask), latents)


class CMAB(nn.Module):
    """One block: SA(CA(latents, SA(CA(slots, tokens)))), as `observe` and `read`.

    Example:
        >>> import torch
        >>> block = CMAB(dim=16, num_slots=4, num_heads=2)
        >>> tokens, latents = torch.randn(1, 10, 16), torch.randn(1, 3, 16)
        >>> state = block.observe(tokens[:, :7]).merge(block.observe(tokens[:, 7:]))
        >>> torch.allclose(block.read(state, latents), block(latents, tokens), atol=1e-5)
        True
    """

    def __init__(
        self, *, dim: int = 64, num_slots: int = 128, num_heads: int = 4, hidden: int = 128,
        residual: Residual = "normed",
    ) -> None:  # fmt: skip
        super().__init__()
        sizes = {"dim": dim, "num_slots": num_slots, "num_heads": num_heads, "hidden": hidden}
        self.stack = CMABStack(depth=1, **sizes, residual=residual)

    def observe(
        self,
        tokens: Float[Tensor, "b n d"],
        mask: Tensor | None = None,
        log_weight: Tensor | None = None,
    ) -> AttentionState:
        """The state of exactly these tokens."""
        self._check("tokens", tokens)
        return self.stack.observe(tokens, mask, log_weight)

    def empty(self, batch: int) -> AttentionState:
        """The state of nothing."""
        return self.stack.empty(batch)

    def read(self, state: AttentionState, latents: Float[Tensor, "b l d"]) -> Float[Tensor, "b l d"]:
        """New latents from a state."""
        self._check("latents", latents)
        if state.value.shape != (latents.shape[0], *self.stack.layout):
            raise ValueError(
                f"the state has shape {tuple(state.value.shape)}, but this block reads states of "
                f"{(latents.shape[0], *self.stack.layout)} into {latents.shape[0]} tasks' latents"
            )
        return self.stack.read(state, latents)[0]

    def _check(self, name: str, given: Tensor) -> None:
        slots = self.stack.observation.slots
        points(name, given, slots.shape[-1], device=slots.device)
        if given.dtype != slots.dtype and not torch.is_autocast_enabled(slots.device.type):
            raise TypeError(
                f"{name} are {given.dtype}, but the block is {slots.dtype}: use {name}.to({slots.dtype})"
            )

    def forward(
        self, latents: Float[Tensor, "b l d"], tokens: Float[Tensor, "b n d"], mask: Tensor | None = None,
    ) -> Float[Tensor, "b l d"]:  # fmt: skip
        return self.read(self.observe(tokens, mask), latents)

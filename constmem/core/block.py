"""The Constant Memory Attention Block: observe data into a state, read latents from the state.

    CMAB(latents, data) = SA(CA(latents, SA(CA(slots, data))))

Only the innermost cross-attention sees data, and its queries are the learned slots. So a block
splits exactly in two: `observe` (data to state) and `read` (state to latents). What the blocks of a
stack observe does not depend on one another: all of them look at a chunk in one pass.
"""

from collections.abc import Callable, Sequence
from itertools import chain
from operator import is_
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from constmem import kernels
from constmem.core.checks import points, positive
from constmem.core.layers import (
    MLP,
    CrossAttention,
    FeedForward,
    Residual,
    SelfAttention,
    _Attention,
    applied,
    check_residual,
    keep_variance,
    normed_slots,
    refreshed,
)
from constmem.core.observation import NAMES, Observation
from constmem.core.state import AttentionState
from constmem.kernels import Kind

EPS = 1e-5  # of the slots' norm


class _Listing:
    """Layers that machine code can do one after another, and all modules that these are made of."""

    def __init__(self, *roots: nn.Module) -> None:
        self.layers: list[kernels.Layer] = []
        self.modules: list[Any] = [*roots]

    def add(self, module: Any, context: Kind = Kind.OTHER) -> None:
        """Add what a module does: one layer, or several; a TypeError if it does anything else."""
        own, of = module._modules, type(module)
        self.modules.append(module)
        if of is nn.Sequential or of is nn.ModuleList:
            for part in own.values():
                self.add(part)
        elif of is FeedForward:
            self._layer(Kind.FEED, module, 0, [own["norm"], own["expand"], own["contract"]])
        elif of in (SelfAttention, CrossAttention) and type(own["attention"]) is _Attention:
            inner, norms = own["attention"]._modules, [own[name] for name in own if "norm" in name]
            parts = [*norms, inner["query"], inner["key_value"], inner["out"]]
            self.modules.append(own["attention"])
            kind = Kind.OWN if of is SelfAttention else context
            self._layer(kind, module, own["attention"].num_heads, parts)
        elif of is MLP:
            maps = own["layers"]
            self.modules.append(maps)
            for i, part in enumerate(maps, start=1):
                self.layers.append(kernels.Layer(Kind.MAP, self.weights(part), 0, EPS, i < len(maps)))
        else:
            raise TypeError(f"{of.__name__} is no layer")

    def _layer(self, kind: Kind, module: Any, heads: int, parts: list[nn.Module]) -> None:
        weights = self.weights(*parts)
        self.layers.append(kernels.Layer(kind, weights, heads, module.norm.eps, module.normed))

    def weights(self, *parts: nn.Module) -> list[Tensor]:
        """Weights and biases of linear maps and norms in a row; a TypeError where one is something else."""
        self.modules += parts
        plain = nn.Linear, nn.LayerNorm
        if any(type(part) not in plain or "weight" not in part._parameters for part in parts):  # or pruned
            raise TypeError("only plain linear maps and norms have all they do in their weights")
        found = (part._parameters.get(name) for part in parts for name in ("weight", "bias"))
        return [t for t in found if t is not None]


def _program(roots: Sequence[nn.Module], listing: Callable[[], _Listing]) -> kernels.Program | None:
    """Layers for machine code: as the first of the roots keeps them, while no part of them has changed."""
    program: kernels.Program | None = roots[0].__dict__.get("_program")
    if program is None or not all(map(is_, roots, program.modules)) or not program.holds():
        try:
            listed = listing()
        except TypeError:
            return None
        made = kernels.Program(listed.layers, listed.modules)
        program = roots[0].__dict__["_program"] = made if made.holds() else None  # something is hooked
    return program


def through_levels(
    tokens: Float[Tensor, "b m i"], levels: Sequence[Float[Tensor, "b n d"]], cross: nn.ModuleList,
    feed: nn.ModuleList, mask: Bool[Tensor, "b n"] | None = None, *, embed: MLP | None = None,
) -> Float[Tensor, "b m d"]:  # fmt: skip
    """The tokens of targets after attending to every level; they never see each other.

    Args:
        embed: makes tokens of the targets, if these are none yet.
    """
    roots = [cross, feed] if embed is None else [embed, cross, feed]

    def listing() -> _Listing:
        made = _Listing(*roots)
        for layer in (*roots[:-2], *chain.from_iterable(zip(cross, feed, strict=True))):
            made.add(layer)
        return made

    if kernels.serves(tokens) and not _has_any_global_hook():
        program = _program(roots, listing)
        found = None if program is None else program.run(tokens, [(level, mask) for level in levels])
        if found is not None:
            return found[:, 0]
    tokens = tokens if embed is None else embed(tokens)
    for level, attend_to, forward in zip(levels, cross, feed, strict=True):
        tokens = forward(attend_to(tokens, level, mask))
    return tokens


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
        if kernels.serves(latents) and not _has_any_global_hook():
            program = _program([self], self._listing)
            parts = () if program is None else value.to(latents.dtype).unbind(1)
            found = None if program is None else program.run(latents, [(part, None) for part in parts])
            if found is not None:
                return list(found.unbind(1))
        own, values = refreshed(self.observation), value.to(latents.dtype)
        slots = normed_slots(own.slots, own.slots_scale, own.slots_shift) if self.normed else own.slots
        levels: list[Tensor] = []
        for i, reading in enumerate(self.readings):
            latents = reading(values[:, i], slots[i], latents)
            levels.append(latents)
        return levels

    def _listing(self) -> _Listing:
        """All layers of all blocks, each after its part of a state."""
        own, made = self.observation, _Listing(self, self.observation, self.readings)
        if type(own) is not Observation or not own._parameters.keys() >= {*NAMES}:
            raise TypeError("only plain slots are read where they lie")
        for i, reading in enumerate(self.readings):
            parts: Any = reading._modules
            norm = [own.slots_scale[i], own.slots_shift[i]] if self.normed else []
            weights = [*norm, *made.weights(parts["out"]), own.slots[i]]
            made.layers.append(kernels.Layer(Kind.START, weights, self.layout[1], EPS, self.normed))
            made.modules.append(reading)
            made.add(parts["data"])
            made.add(parts["cross"], Kind.BACK)
            made.add(parts["latents"])
        return made

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

"""Reading states by the CPU's machine code, without gradients: layers in a row, and what events need.

Weights are read where they lie. PyTorch's operators serve where gradients are wanted, something is traced or
hooked, numbers are not float32, and where they are better: at long contexts, and at many tasks of a few
tokens, which would leave most lanes of a vector empty.
"""

from array import array
from collections.abc import Sequence
from enum import IntEnum
from itertools import chain
from operator import is_
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Float64
from torch import Tensor, nn
from torch.autograd import forward_ad

from constmem.kernels import cpu

KEYS = 1024  # tokens that are attended to
FEW = 8  # tasks of which each may waste lanes
LANES = 16  # of the widest vectors
PLACES = 4  # numbers that say what a layer meets
Met = tuple[Tensor, Tensor | None]  # a context, or a state's value, and which of its tokens are real


class Kind(IntEnum):
    """What a layer does, as native_layers.h has it."""

    FEED = 0  # a gated feed-forward layer
    OWN = 1  # tokens attend to themselves,
    OTHER = 2  # to a context
    START = 3  # tokens are set aside; what follows is done to those of a state,
    BACK = 4  # which the tokens then attend to
    MAP = 5  # a linear map, with a ReLU if `normed`; such come first, and make tokens of points


class Layer(NamedTuple):
    """A layer with pre-norm and residual; START: the slots of a state, which have a norm if `normed`.

    Args:
        weights: scale and shift of the norm, and of the context's, if there is one; then weight and bias of
            both linear maps, or the weights of query, key and value, and the projection of what comes out,
            with its bias; of a state, weight and bias of that projection, and the slots; of a map, both.
        heads: of attention, and of a state.
    """

    kind: Kind
    weights: Sequence[Tensor]
    heads: int
    eps: float
    normed: bool


def serves(x: Tensor) -> bool:
    """Whether numbers may go through machine code, as far as they themselves tell; cheap to ask."""
    watched = (
        torch.is_grad_enabled()
        or torch.compiler.is_compiling()
        or torch._C._is_tracing()
        or torch._C._functorch.maybe_current_level() is not None
        or forward_ad._current_level >= 0
        or torch._C._len_torch_dispatch_stack()  # operators are being counted or traced
        or torch.is_autocast_enabled("cpu")
    )
    return not watched and x.dtype == torch.float32 and x.is_cpu and cpu.library() is not None


class Program:
    """Layers laid out for machine code, which serve while the modules they are made of stay as they are.

    Args:
        layers: one after another.
        modules: all that these are made of, down to linear maps: `holds` checks them and their parameters.

    Attributes:
        modules: the same.
    """

    def __init__(self, layers: Sequence[Layer], modules: Sequence[nn.Module]) -> None:
        self.modules, self._types = modules, [*map(type, modules)]
        self._hooks = [h for m in modules for h in (m._forward_hooks, m._forward_pre_hooks)]
        self._parts: list[dict[str, Any]] = [d for m in modules for d in (m._parameters, m._modules)]
        self._members = self._now()
        self._weights = [t for t in self._members if isinstance(t, Tensor)]
        self._alive = [t.detach() for t in self._weights]  # so that their memory goes to no others
        self._where = [*map(Tensor.data_ptr, self._weights)]
        self._counts = [*map(Tensor.numel, self._weights)]
        self._width, self._eps, self._count = layers[-1].weights[0].shape[-1], layers[-1].eps, len(layers)
        maps = [layer.weights[0] for layer in layers if layer.kind == Kind.MAP]
        self._channels = maps[0].shape[1] if maps else self._width
        widths = [*(w.shape[1] for w in maps), self._width], [self._channels, *(len(w) for w in maps)]
        meeting = Kind.OTHER, Kind.START
        self._meets = [(i, layer) for i, layer in enumerate(layers) if layer.kind in meeting]
        self._levels = max(1, sum(layer.kind == Kind.START for layer in layers))
        self._most = KEYS if any(layer.kind == Kind.OWN for layer in layers) else 2**31
        self._fit = widths[0] == widths[1] and all(map(self._fits, layers))
        rows = [_row(layer, self._width) for layer in layers] if self._fit else []
        self._rows = array("q", chain.from_iterable(rows))

    def holds(self) -> bool:
        """Whether all modules are what they were, without hooks, and their parameters where they were."""
        members = self._now()
        return (
            not any(self._hooks)
            and len(members) == len(self._members)
            and all(map(is_, members, self._members))
            and [*map(type, self.modules)] == self._types
            and [*map(Tensor.data_ptr, self._weights)] == self._where
            and [*map(Tensor.numel, self._weights)] == self._counts
            and all(map(Tensor.is_contiguous, self._weights))
        )

    def run(self, x: Float[Tensor, "b m i"], met: Sequence[Met]) -> Float[Tensor, "b levels m d"] | None:
        """Tokens, which `serves`, after all layers: a level for each state they attend to, or one.

        None where machine code is not fit for that.

        Args:
            met: for layers that attend to a context, or start with a state, what that is, one after another.
        """
        tasks, tokens, channels = x.shape
        few = tasks > FEW and tokens < LANES
        if not (self._fit and tasks and tokens) or few or channels != self._channels or tokens > self._most:
            return None
        if len(met) != len(self._meets):
            return None
        x = _packed(x)
        places, kept = array("q", bytes(8 * PLACES * self._count)), []
        for (i, layer), (context, mask) in zip(self._meets, met, strict=True):
            shape = context.shape
            if context.dtype != torch.float32 or not context.is_cpu or not self._meeting(layer, shape, tasks):
                return None
            if mask is not None:
                if mask.shape != (tasks, shape[1]) or mask.dtype != torch.bool or not mask.is_cpu:
                    return None
                mask = mask.contiguous()
                places[PLACES * i + 3] = mask.data_ptr()
            context = _packed(context)
            places[PLACES * i : PLACES * i + 3] = array(
                "q", (context.data_ptr(), context.stride(0), shape[-2])
            )
            kept.append((context, mask))  # until the end: these may be copies
        out, code = x.new_empty(tasks, self._levels, tokens, self._width), cpu.library()
        assert code is not None  # as `serves` says
        short = code.layers(
            self._count, self._rows.buffer_info()[0], places.buffer_info()[0], tasks, tokens,
            channels, self._width, self._eps, x.data_ptr(), x.stride(0), torch.get_num_threads(),
            out.data_ptr(),
        )  # fmt: skip
        if short:
            raise MemoryError(cpu.SHORT)
        return out

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()  # a copy's modules lie elsewhere

    def _now(self) -> list[Any]:
        return [*chain.from_iterable(map(dict.values, self._parts))]

    def _fits(self, layer: Layer) -> bool:
        """Whether machine code finds as many numbers as it will read."""
        kind, weights, heads, eps, normed = layer
        width, square = self._width, self._width**2
        sizes = [width, width]
        if kind == Kind.FEED:
            hidden = weights[-2].numel() // width
            sizes += [2 * hidden * width, 2 * hidden, hidden * width, width]
        elif kind == Kind.MAP:
            sizes = [weights[0].numel(), weights[0].shape[0]]
        elif kind == Kind.START:
            slots = weights[-1].shape[0]
            sizes = [*(sizes if normed else ()), square, width, slots * width]
        else:
            sizes += [*([] if kind == Kind.OWN else sizes), square, 2 * square, square, width]
        small = kind != Kind.START or weights[-1].shape[0] <= KEYS
        return (
            small
            and [*map(Tensor.numel, weights)] == sizes
            and all(map(_readable, weights))
            and width % (heads or 1) == 0
            and eps == self._eps
        )

    def _meeting(self, layer: Layer, shape: torch.Size, tasks: int) -> bool:
        """Whether a layer can attend to something of this shape."""
        width = self._width
        if layer.kind == Kind.START:
            return shape == (tasks, layer.heads, layer.weights[-1].shape[0], width // layer.heads)
        return shape == (tasks, shape[1], width) and shape[1] <= KEYS


def _row(layer: Layer, width: int) -> list[int]:
    """`Layer` of native_layers.h."""
    kind, weights, heads, _, normed = layer
    where = [*map(Tensor.data_ptr, weights)]
    if kind == Kind.MAP:
        return [kind, 0, weights[0].shape[0], normed, 0, 0, 0, 0, *where, 0, 0]
    if kind in (Kind.FEED, Kind.OWN):
        where[2:2] = 0, 0
    elif kind == Kind.START:
        where = [*(where[:2] if normed else (0, 0)), 0, 0, *where[-3:], 0]
    return [kind, heads, weights[-2].numel() // width if kind == Kind.FEED else 0, normed, *where]


def _packed(t: Float[Tensor, "b ..."]) -> Float[Tensor, "b ..."]:
    """The same, where each task's numbers lie one after another; one task may serve for all."""
    return t if t.is_contiguous() or t[0].is_contiguous() else t.contiguous()


def _readable(t: Tensor) -> bool:
    """Whether these are plain numbers of float32 in order."""
    return type(t) in (Tensor, nn.Parameter) and cpu.reads(t) and t.is_contiguous()


def gap_vectors(
    z: Float[Tensor, "*b"],
    waves: Float[Tensor, " w"],
    weight: Float[Tensor, "d f"],
    bias: Float[Tensor, " d"],
) -> Float[Tensor, "*b d"] | None:
    """Standardised log gaps, which `serves`, as vectors: linear in 1, z and waves of z; no gap is a NaN."""
    if weight.numel() != len(bias) * (2 + 2 * len(waves)) or not all(map(_readable, (waves, weight, bias))):
        return None
    z, out = z.contiguous(), z.new_empty(*z.shape, len(bias))
    where = (t.data_ptr() for t in (z, waves, weight, bias, out))
    cpu.run("gap_vectors", z.numel(), len(bias), len(waves), *where)
    return out


def turned(
    value: Float64[Tensor, "b *h c"], clock: Float64[Tensor, " b"], turns: Float64[Tensor, " p"]
) -> Float[Tensor, "b *h c"] | None:
    """Pairs of channels as complex numbers times exp(i turns clock), in float32; None if unfit."""
    if torch.is_grad_enabled() or value.dtype != torch.float64 or not value.is_cpu or not cpu.usable():
        return None
    value, clock, channels = value.contiguous(), clock.contiguous(), value.shape[-1]
    out = torch.empty(value.shape, dtype=torch.float32, device=value.device)
    sizes = len(value), value[:1].numel() // max(channels, 1), channels, len(turns)
    cpu.run("turned", *sizes, *(t.data_ptr() for t in (value, clock, turns, out)))
    return out


def quantiles(
    log_weights: Float[Tensor, "*b k"], loc: Float[Tensor, "*b k"], scale: Float[Tensor, "*b k"],
    p: Float64[Tensor, "..."],
) -> Float64[Tensor, "..."] | None:  # fmt: skip
    """The quantiles of mixtures of log-normals at levels, which are broadcast; None if unfit."""
    if not loc.is_cpu or not cpu.usable():
        return None
    mixtures, ndim = loc.shape[:-1], loc.ndim - 1
    if p.shape[p.ndim - ndim :] != mixtures:
        p = p.expand(torch.broadcast_shapes(p.shape, mixtures))
        if p.shape[p.ndim - ndim :] != mixtures:
            return None
    if not p.numel():
        return None
    given = [log_weights.double().exp(), *(t.double().contiguous() for t in (loc, scale)), p.contiguous()]
    out, sizes = torch.empty_like(given[3]), (p.numel(), mixtures.numel(), loc.shape[-1])
    cpu.run("quantiles", *sizes, *(t.data_ptr() for t in given), torch.get_num_threads(), out.data_ptr())
    return out

"""Where a GPU observes and merges by kernels of our own: what they can take, and what happens if they fail.

`triton_observe.py` and `triton_states.py` hold the kernels, imported at first use; where Triton is missing,
the GPU too old, a size beyond what a program can hold, or a launch fails, one line in the log says so and
PyTorch's operators serve. CONSTMEM_NATIVE=0 switches the kernels off, like the CPU's machine code.
"""

import functools
import importlib
import os
from collections.abc import Sequence
from math import log2
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from constmem.kernels.cpu import Slots, SlotsLse, contiguous
from constmem.kernels.paths import GPU, coarse, traced

WIDEST = {"half": 128, "tf32": 64, "exact": 64}  # channels of a token
ROWS = 128  # slots are padded to a multiple of this
TOKENS = 2**25  # bytes of tokens that exist at a time
PARTIAL = 2**27  # bytes of unjoined states of many tasks
OLDEST = 8, 0  # compute capability with asynchronous copies and TF32
FEW = 512  # states up to which a new point is observed and merged at once: of more, one after the other
FEWEST = 16  # states up to which every program that merges embeds the point itself: of more, one for all
PROGRAMS = 8  # that merge, on a multiprocessor
CHUNK = 2**19  # points a model observes at a time
_LARGEST_HALF = 3e4


class Absorbed(NamedTuple):
    """All that meets normalised tokens: rows whose products with them are scores, and what makes values."""

    rows: Float[Tensor, "s d"]  # q Wk of all slots of all heads
    score: Float[Tensor, " s"]  # what the shift of keys adds to every score
    project: Float[Tensor, "h c d"]  # from mean tokens to values
    shift: Float[Tensor, "h c"]

    @property
    def single(self) -> tuple[Float[Tensor, "sv d"], Float[Tensor, " sv"]]:
        """Scores and values of a token by one product."""
        weight = torch.cat([self.rows, self.project.flatten(0, 1)])
        return weight, torch.cat([self.score, self.shift.flatten()])


def absorb(
    queries: Float[Tensor, "*depth h s c"], weight: Float[Tensor, "kv d"], shift: Float[Tensor, " kv"]
) -> Absorbed:
    """Queries, and the projection to keys and values of all heads, as tokens meet them; differentiable."""
    queries = queries.flatten(0, -3)
    heads, _, channels = queries.shape
    (key, value), (key_shift, value_shift) = weight.chunk(2), shift.chunk(2)
    rows = (queries @ key.unflatten(0, (heads, channels))).flatten(0, 1)
    score = (queries @ key_shift.view(heads, channels, 1)).flatten()
    return Absorbed(rows, score, value.unflatten(0, (heads, channels)), value_shift.view(heads, channels))


class Plan(NamedTuple):
    """How points become a state: weights as the kernels read them."""

    precision: str
    embedding: Float[Tensor, "l d d"]  # (in, out) each
    embedding_bias: Float[Tensor, "l d"]
    absorbed: Float[Tensor, "s d"]  # q Wk of all slots of all heads, to base two
    score: Float[Tensor, " s"]  # what the shift of keys adds to every score, in float64
    project: Float[Tensor, "h c d"]  # from mean tokens to values, in float64
    shift: Float[Tensor, "h c"]
    single: tuple[Tensor, Tensor]  # for one point at a time: scores and values of a token in float32
    width: int


def usable(device: torch.device) -> bool:
    """Whether kernels run there, on ordinary tensors, and none has failed yet."""
    if device.type != "cuda" or GPU.failed or traced() or torch.cuda.is_current_stream_capturing():
        return False
    return able(device.index)


@functools.cache
def able(index: int | None) -> bool:
    """Whether kernels are known to run on that GPU, are wanted, and can be imported."""
    found = torch.cuda.get_device_capability(index)
    if found < OLDEST:
        GPU.unfit(f"its compute capability is {found}, and {OLDEST} is needed")
        return False
    if os.environ.get("CONSTMEM_NATIVE", "1") == "0":
        return False
    try:
        triton("observe")
    except Exception as error:  # Triton's import can fail in many ways, none of which must stop anybody
        GPU.unfit(f"{type(error).__name__}: {error}")
        return False
    return True


@functools.cache
def triton(name: str) -> Any:
    """A module of kernels, imported when it is first needed."""
    return importlib.import_module(f"constmem.kernels.triton_{name}")


_FOUND = able, triton  # which GPUs and kernels


def forget() -> None:
    """Forget which kernels and GPUs were found."""
    for known in _FOUND:
        known.cache_clear()


def place(index: int | None) -> torch.device:
    """The GPU of that index."""
    return torch.device("cuda") if index is None else torch.device("cuda", index)


def precision_of(dtype: torch.dtype) -> str | None:
    """How products are computed: as PyTorch would compute its own, or better.

    "half" has float16 operands, which round like TF32 and run twice as fast: normalised tokens and shares
    of a softmax do not need the range of bfloat16, whose rounding is eight times as coarse. "exact" makes
    up float32 operands of three TF32 products.
    """
    if dtype == torch.float64:
        return None
    return "half" if coarse("cuda") or dtype != torch.float32 else "exact"


def padded(n: int) -> int:
    """The channels of a tile that holds tokens of n."""
    return max(16, 1 << (n - 1).bit_length())


def plan(absorbed: Absorbed, layers: Sequence[tuple[Tensor, Tensor]], precision: str) -> Plan | None:
    """What was absorbed in float64, and the layers of an embedding, padded; None if too wide."""
    width = absorbed.rows.shape[1]
    d = padded(max([width, *(n for w, _ in layers for n in w.shape)]))
    turn = turn_of(width, absorbed.rows.device)
    absorbed = absorbed._replace(rows=absorbed.rows @ turn.T, project=absorbed.project @ turn.T)
    single, rows, project = absorbed.single, log2(torch.e) * absorbed.rows, absorbed.project
    if precision == "half" and float(rows.abs().max()) > _LARGEST_HALF:
        precision = "tf32"
    if d > WIDEST[precision]:
        GPU.unfit(f"tokens or an embedding of {d} channels, more than {WIDEST[precision]} in {precision!r}")
        return None
    operands = torch.float16 if precision == "half" else torch.float32
    embedding, bias = _embedding(layers, turn, d, double=precision == "exact")
    return Plan(
        precision, embedding, bias,
        F.pad(rows, (0, d - width, 0, -len(rows) % ROWS)).to(operands).contiguous(), absorbed.score,
        F.pad(project, (0, d - width)).contiguous(), absorbed.shift.contiguous(),
        (single[0].float(), single[1].float()), width,
    )  # fmt: skip


def turn_of(width: int, device: torch.device) -> Float[Tensor, "d d"]:
    """What turns tokens, in float64, so that their mean is their last channel, and makes that zero."""
    ones = torch.full((width,), width**-0.5, dtype=torch.float64, device=device)
    eye = torch.eye(width, dtype=torch.float64, device=device)
    across = eye[-1] - ones
    turn = eye - 2 * torch.outer(across, across) / (across @ across).clamp(min=1e-300)  # a reflection
    turn[-1] = 0.0
    return turn


def _embedding(
    layers: Sequence[tuple[Tensor, Tensor]], turn: Tensor, d: int, *, double: bool
) -> tuple[Float[Tensor, "l d d"], Float[Tensor, "l d"]]:
    """Its layers as (in, out), padded to one square size; the last turns its tokens, or an only one does."""
    given = [(w.detach().double(), b.detach().double()) for w, b in layers]
    last = turn, turn.new_zeros(len(turn))
    if given:
        weight, bias = given.pop()
        last = turn @ weight, turn @ bias
    given.append(last)
    weights = torch.stack([F.pad(w.T, (0, d - w.shape[0], 0, d - w.shape[1])) for w, _ in given])
    biases = torch.stack([F.pad(b, (0, d - b.shape[0])) for _, b in given])
    return (weights, biases) if double else (weights.float(), biases.float())


def normed_tokens(plan: Plan, points: Float[Tensor, "n i"]) -> Float[Tensor, "n d"]:
    """Points through the embedding and the normalisation, as exact as can be, padded."""
    tokens = torch.empty(len(points), plan.embedding.shape[-1], device=points.device)
    _embed(plan, points.contiguous(), tokens, "float64")
    return tokens


def extended(
    plan: Plan, data: Float[Tensor, "b 1 i"], value: Float[Tensor, "b *h s c"], lse: Float[Tensor, "b *h s"],
    check: Any = None,
) -> tuple[Float[Tensor, "b *h s c"], Float[Tensor, "b *h s"]]:  # fmt: skip
    """Float64 states with one point more each: in one launch, of more than a few in two.

    Args:
        check: memory to sum by the same launch (`triton_states.Check`).
    """
    embedded = len(data) > FEWEST
    points = normed_tokens(plan, data[:, 0]) if embedded else data.contiguous()
    found: tuple[Tensor, Tensor] = triton("states").extended(
        points, (plan.embedding, plan.embedding_bias), plan.single, value.contiguous(), lse.contiguous(),
        PROGRAMS * multiprocessors(data.device), embedded=embedded, check=check,
    )  # fmt: skip
    return found


def operands(plan: Plan, points: Float[Tensor, "b n i"]) -> Float[Tensor, "b n d"]:
    """Tokens as the softmax meets them: turned, rounded, the last channel one."""
    precision = triton("observe").PRECISIONS[plan.precision]
    b, n, inputs = points.shape
    tokens = torch.empty(b, n, plan.embedding.shape[-1], dtype=precision.operands, device=points.device)
    _embed(plan, points.reshape(-1, inputs).contiguous(), tokens.view(b * n, -1), precision.embedding)
    return tokens


def _embed(plan: Plan, points: Tensor, tokens: Tensor, products: str) -> None:
    triton("observe").tokens_of(
        points, plan.embedding, plan.embedding_bias, tokens, width=plan.width, products=products
    )


def seen(
    plan: Plan | None, data: Float[Tensor, "b n i"], bias: Float[Tensor, "b n"] | None
) -> tuple[Float[Tensor, "b h s c"], Float[Tensor, "b h s"]] | None:
    """What the kernels make of the data; None of what they cannot take."""
    if plan is None or data.shape[0] == 0:
        return None
    GPU.chosen()
    if data.shape[1] > 1 or bias is not None:
        return observe(plan, data, bias)
    heads, channels, _ = plan.project.shape
    with torch.autocast("cuda", enabled=False):
        out = F.linear(normed_tokens(plan, data[:, 0])[:, : plan.width], *plan.single).double()
    lse, value = out.split([len(plan.score), heads * channels], -1)
    lse = lse.unflatten(-1, (heads, -1))
    return value.view(-1, heads, 1, channels).expand(-1, -1, lse.shape[-1], -1), lse


def observe(
    plan: Plan, data: Float[Tensor, "b n i"], bias: Float[Tensor, "b n"] | None
) -> tuple[Float[Tensor, "b h s c"], Float[Tensor, "b h s"]]:
    """Value and lse of each task's points in float64; points of bias `EMPTY` are left out."""
    heads, channels, d = plan.project.shape
    kernels = triton("observe")
    precision = kernels.PRECISIONS[plan.precision]
    shape = len(data), heads, len(plan.score) // heads
    value = torch.empty(*shape, channels, dtype=torch.float64, device=data.device)
    lse = torch.empty(shape, dtype=torch.float64, device=data.device)
    group = max(1, PARTIAL // (4 * len(plan.absorbed) * d))
    for i in range(0, len(data), group):
        here = slice(i, i + group)
        partial = _partial(plan, data[here], None if bias is None else bias[here].float(), precision)
        kernels.joined(partial, plan.score, plan.project, plan.shift, value[here], lse[here], precision)
    return value, lse


def _partial(
    plan: Plan, data: Float[Tensor, "b n i"], bias: Float[Tensor, "b n"] | None, precision: Any
) -> tuple[Float[Tensor, "b p s"], Float[Tensor, "b p s d"]]:
    """Largest score and sum of shared tokens, whose last channel is that of shares, in stretches of tasks."""
    b, n, inputs = data.shape
    rows, d = plan.absorbed.shape
    tiles = precision.cut(d)
    programs = tiles.programs * multiprocessors(data.device)
    parts = max(1, min(programs // (rows // tiles.rows * b), -(-n // tiles.tokens)))
    partial = (
        torch.empty(b, parts, rows, device=data.device),
        torch.empty(b, parts, rows, d, device=data.device),
    )
    step = max(TOKENS // (b * d * precision.operands.itemsize), tiles.tokens)
    tokens = torch.empty(b * min(step, n), d, dtype=precision.operands, device=data.device)
    for start in range(0, n, step):
        here = data[:, start : start + step].contiguous().view(-1, inputs)
        extra = None if bias is None else bias[:, start : start + step].contiguous()
        _embed(plan, here, tokens, precision.embedding)
        points = len(here) // b
        triton("observe").softmax(
            tokens, extra, plan.absorbed, partial, points=points, first=start == 0, precision=precision
        )
    return partial


@functools.cache
def multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2


def merge(value: Slots, lse: SlotsLse, other_value: Slots, other_lse: SlotsLse) -> tuple[Slots, SlotsLse]:
    """The algebra's `merge` of float64 tensors in one launch."""
    found: tuple[Tensor, Tensor] = triton("states").merge(*contiguous(value, lse, other_value, other_lse))
    return found

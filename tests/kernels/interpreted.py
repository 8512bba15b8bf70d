"""Runs the GPU's kernels in Triton's interpreter, on a CPU: a program of its own, which tests start.

TRITON_INTERPRET=1 python tests/interpreted.py CASE [SETTINGS as JSON]      # prints what it found as JSON
"""

import copy
import json
import sys
from collections.abc import Callable
from math import gcd
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from constmem import CMANP, kernels
from constmem.core.algebra import EMPTY
from constmem.core.layers import MLP
from constmem.core.observation import Observation
from constmem.core.state import AttentionState
from constmem.kernels import cpu, gpu, graphs
from constmem.kernels.paths import GPU, PATHS

SIZES = (1, 1), (2, 2), (3, 65), (1, 300)  # tasks, points


def ready() -> None:
    """Let kernels of the interpreter serve tensors of a CPU, with little work for each program."""
    import numpy as np
    import triton.runtime.interpreter as interpreter

    patched = interpreter._patch_lang_tensor

    def patch(
        tensor: Any, scope: Any
    ) -> None:  # older interpreters make an int of an array, as NumPy no longer does
        patched(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(np.asarray(self.handle.data).item()))

    interpreter._patch_lang_tensor = patch
    from constmem.kernels import triton_observe as triton

    for name, precision in triton.PRECISIONS.items():  # of which the interpreter knows only some
        known = precision.embedding.replace("bfloat16", "float16")
        triton.PRECISIONS[name] = precision._replace(embedding=known)
    triton.JOINED = 128  # fewer programs, which the interpreter runs one after another
    gpu.TOKENS = 2**14  # so that a few hundred points come in several pieces
    cpu.library = lambda: None  # type: ignore[assignment]
    gpu.usable = lambda _: GPU.failed is None


def exactly(work: Callable[[], Any]) -> Any:
    """What PyTorch's operators give."""
    with mock.patch.object(gpu, "usable", return_value=False):
        return work()


def failures() -> list[str]:
    """Why any path, or a size of one, is not taken."""
    unfit = [f"{path.name} at {size}" for path in PATHS for size, runs in path.sizes.items() if not runs]
    return [path.failed for path in PATHS if path.failed is not None] + unfit


def errors(found: AttentionState, expected: AttentionState) -> dict[str, Any]:
    size = float(expected.lse.abs().clamp(1, 1e6).max())
    return {
        "lse": float((found.lse - expected.lse).abs().max()) / size,
        "value": float((found.value - expected.value).abs().max())
        / max(1e-9, float(expected.value.abs().max())),
        "counted": torch.equal(found.count, expected.count),
        "failures": failures(),
    }


@torch.no_grad()
def observation(dim: int, heads: int, slots: int, sharpness: float) -> Observation:
    torch.manual_seed(dim)
    found = Observation(dim=dim, depth=2, num_slots=slots, num_heads=heads)
    for p in (found.tokens_scale, found.tokens_shift, found.slots_scale, found.slots_shift):
        p.add_(0.3 * torch.randn_like(p))
    found.query.mul_(sharpness)
    return found


def observe(*, dim: int, heads: int, slots: int, kind: str, precision: str) -> list[dict[str, Any]]:
    """Errors against float64 at several sizes."""
    gpu.precision_of = lambda _: precision
    found = observation(dim, heads, slots, 300.0 if kind == "sharp" else 1.0)
    embed = MLP(dim_in=3, dim_hidden=17, dim_out=dim, depth=3) if kind == "embedded" else None
    wide, wide_embed = copy.deepcopy(found).double(), None if embed is None else copy.deepcopy(embed).double()
    rows = []
    for batch, n in SIZES:
        data = torch.randn(batch, n, 3 if embed else dim)
        mask = torch.rand(batch, n) < 0.6 if kind == "masked" else None
        if mask is not None:
            mask[-1] = n > 2  # a task of nothing but masked points
        weight = 30 * torch.randn(batch, n) if kind == "weighted" else None
        seen = found.observe(data, mask, weight, embed=embed)
        doubled = None if weight is None else weight.double()
        expected = exactly(lambda: wide.observe(data.double(), mask, doubled, embed=wide_embed))  # noqa: B023
        laid = found.prepared(embed).plans._laid  # type: ignore[union-attr]
        rows.append(errors(seen, expected) | {"plans": sum(plan is not None for plan in laid.values())})
    return rows


def leaves_out() -> dict[str, bool]:
    """Whether what is masked out leaves no trace, and all masked out is the state of nothing."""
    gpu.precision_of = lambda _: "half"
    found, data = observation(16, 2, 5, 1.0), torch.randn(2, 70, 16)
    mask = torch.rand(2, 70) < 0.5
    seen, other = found.observe(data, mask), found.observe(torch.where(mask[..., None], data, 99.0), mask)
    none = found.observe(data, torch.zeros_like(mask))
    return {
        "same": torch.equal(seen.value, other.value) and torch.equal(seen.lse, other.lse),
        "empty": bool((none.lse == EMPTY).all()) and bool((none.value == 0).all()),
    }


def trained() -> dict[str, Any]:
    """Errors of states of the shipped model in half precision, relative to float64."""
    gpu.precision_of = lambda _: "half"
    model = CMANP.from_pretrained("emnist")
    x = 2 * torch.rand(1, 100, 2) - 1
    y = (-((x[..., :1] + (3 * x[..., 1:]).sin()) ** 2) / 0.1).exp() - 0.5
    exact = copy.deepcopy(model).double()
    return errors(model.condition(x, y), exactly(lambda: exact.condition(x.double(), y.double())))


def update() -> dict[str, Any]:
    """A state updated point by point and in pieces, against one conditioned at once by operators."""
    gpu.precision_of = lambda _: "exact"
    torch.manual_seed(0)
    sizes = {"dim": 16, "depth": 2, "num_slots": 4, "num_latents": 4, "hidden": 16, "num_heads": 2}
    model = CMANP(dim_x=1, dim_y=1, **sizes).eval()  # type: ignore[arg-type]
    x, y = torch.randn(3, 40, 1), torch.randn(3, 40, 1)
    state = model.update(model.empty(3), x[:, :1], y[:, :1]).merge(model.condition(x[:, 1:30], y[:, 1:30]))
    with mock.patch.object(gpu, "extended", wraps=gpu.extended) as extended:
        for i in range(30, 40):
            state = model.update(state, x[:, i : i + 1], y[:, i : i + 1])
    by_kernels = {"by_kernels": extended.call_count}
    return errors(state, exactly(lambda: model.double().condition(x.double(), y.double()))) | by_kernels


def extend(*, dim: int, heads: int, slots: int, tasks: int, depth: int) -> dict[str, Any]:
    """States with one more point each, against points observed and merged in float64; and the launches."""
    from constmem.kernels import triton_observe as triton
    from constmem.kernels import triton_states

    gpu.precision_of = lambda _: "half"
    found = observation(dim, heads, slots, 30.0)
    embed = MLP(dim_in=3, dim_hidden=17, dim_out=dim, depth=depth) if depth else None
    data = torch.randn(3 if embed else dim, 2, tasks).transpose(0, 2)  # which lie askew
    wide, wide_embed = copy.deepcopy(found).double(), None if embed is None else copy.deepcopy(embed).double()
    first = exactly(lambda: wide.observe(data[:, :1].double(), embed=wide_embed))
    askew = AttentionState(first.value.mT.contiguous().mT, first.lse.clone(), first.count)
    launch = triton.launch
    with (
        mock.patch.object(triton, "launch", wraps=launch) as embeds,
        mock.patch.object(triton_states, "launch", wraps=launch) as merges,
    ):
        extended = found.extended(askew, data[:, 1:], embed=embed)
    second = exactly(lambda: first.merge(wide.observe(data[:, 1:].double(), embed=wide_embed)))
    assert extended is not None
    merged = [call for call in merges.call_args_list if call.args[0] is triton_states._extended]
    return errors(extended, second) | {"launches": [embeds.call_count, len(merged)]}


def verifies() -> dict[str, Any]:
    """Launches of an update by weights known before; its answers to others, and to points of NaN."""
    from constmem.kernels import triton_states

    gpu.precision_of = lambda _: "exact"
    torch.manual_seed(0)
    sizes = {"dim": 16, "depth": 1, "num_slots": 4, "num_latents": 4, "hidden": 16, "num_heads": 2}
    model = CMANP(dim_x=1, dim_y=1, **sizes).eval()  # type: ignore[arg-type]
    x, y = torch.randn(2, 3, 1), torch.randn(2, 3, 1)
    state = model.update(model.condition(x[:, :1], y[:, :1]), x[:, 1:2], y[:, 1:2])
    with mock.patch.object(triton_states, "launch", wraps=triton_states.launch) as launches:
        found = model.update(state, x[:, 2:], y[:, 2:])
    names = [call.args[0].__name__ for call in launches.call_args_list]
    expected = exactly(lambda: model.condition(x, y))
    answers = {}
    for name, parameter in model.named_parameters():
        if any(parameter is p for p in model.observing_parameters()):
            before = parameter.data.clone()
            parameter.data.view(-1)[-1] += 1.0  # no counter of versions tells
            answers[name] = _refusal(lambda: model.update(state, x[:, 2:], y[:, 2:]))
            parameter.data.copy_(before)
    missing = _refusal(lambda: model.update(state, x[:, 2:] * torch.nan, y[:, 2:]))
    return errors(found, expected) | {"launches": names, "answers": answers, "missing": missing}


def _refusal(work: Callable[[], Any]) -> str:
    try:
        work()
    except ValueError as error:
        return str(error)
    return "none"


def changed() -> list[float]:
    """After a change of each weight in place, how far an update is from one by operators."""
    gpu.precision_of = lambda _: "exact"
    torch.manual_seed(0)
    sizes = {"dim": 16, "depth": 1, "num_slots": 4, "num_latents": 4, "hidden": 16, "num_heads": 2}
    model = CMANP(dim_x=1, dim_y=1, **sizes).eval()  # type: ignore[arg-type]
    x, y, differences = torch.randn(1, 1, 1), torch.randn(1, 1, 1), []
    state = model.empty(1)
    for parameter in model.observing_parameters():
        parameter.add_(0.3)
        state = state.signed(model.fingerprint())
        found, again = model.update(state, x, y), model.update(state, x, y)
        expected = exactly(lambda: model.update(state, x, y))  # noqa: B023
        differences += [float((f.lse - expected.lse).abs().max()) for f in (found, again)]
    return differences


def merge() -> dict[str, float]:
    """The largest difference of merged states from the formula's."""
    torch.manual_seed(0)

    def part(nothing: int) -> tuple[Tensor, Tensor]:
        value, lse = torch.randn(2, 3, 70, 5).double(), 20 * torch.randn(2, 3, 70).double()
        value[nothing, 0], lse[nothing, 0] = 0.0, EMPTY
        return value, lse

    (value, lse), (other, other_lse) = part(0), part(1)
    found = {}
    for name, theirs in (("each", other), ("shared", other[..., :1, :].expand_as(other))):
        merged = gpu.merge(value, lse, theirs, other_lse)
        expected = torch.lerp(value, theirs, torch.sigmoid(other_lse - lse)[..., None])
        found[f"{name} value"] = float((merged[0] - expected).abs().max())
        found[f"{name} lse"] = float((merged[1] - torch.logaddexp(lse, other_lse)).abs().max())
        found[f"{name} of nothing"] = float((merged[0][0, 0] - theirs[0, 0]).abs().max())
        found[f"{name} with nothing"] = float((merged[0][1, 0] - value[1, 0]).abs().max())
    return found


def mixed(tensors: list[Tensor]) -> int:
    """The checksum of tensors by its formula, word by word."""
    data = [t.reshape(-1).view(torch.uint8).numpy().tobytes() for t in tensors]
    word = gcd(4, *(len(d) for d in data))
    total = place = 0
    for piece in data:
        for i in range(0, len(piece), word):
            x = place << 32 | int.from_bytes(piece[i : i + word], "little")
            x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % 2**64
            x = (x ^ x >> 27) * 0x94D049BB133111EB % 2**64
            total, place = total + (x ^ x >> 31), place + 1
    return total % 2**64


def checksum() -> dict[str, Any]:
    """How often a checksum is not that of the formula, does not see one bit, or sees what is not there."""
    from constmem.kernels import triton_states

    triton_states.WORDS = 64
    torch.manual_seed(0)
    wrong = {"formula": 0, "missed": 0, "imagined": 0}
    for sizes, dtype in (((1,), torch.float32), ((65, 0, 64, 200), torch.float32), ((33, 4), torch.bfloat16),
                         ((64, 3), torch.float64), ((7, 130), torch.int8)):  # fmt: skip
        tensors = [(100 * torch.randn(size)).to(dtype) for size in sizes]
        wrong["formula"] += graphs.Checksum(tensors)() != mixed(tensors)
        before = kernels.Snapshot(tensors)
        for t in tensors:
            flat = t.view(torch.uint8)
            for place in torch.randint(0, max(1, len(flat)), (4 * bool(len(flat)),)).tolist():
                for bit in (0, 7):
                    flat[place] ^= 1 << bit
                    wrong["missed"] += before.holds(tensors)
                    flat[place] ^= 1 << bit
                    wrong["imagined"] += not before.holds(tensors)
        wrong["missed"] += before.holds([t.roll(1) for t in tensors]) and len(tensors) > 1
        wrong["imagined"] += not before.holds([t.clone() for t in tensors])
    return wrong | {"failures": failures()}


CASES: dict[str, Callable[..., Any]] = {
    case.__name__: case
    for case in (observe, leaves_out, trained, update, extend, verifies, changed, merge, checksum)
}

if __name__ == "__main__":
    torch.set_num_threads(1)
    ready()
    with torch.no_grad():
        found = [CASES[name](**settings) for name, settings in json.loads(sys.argv[1])]
    print(json.dumps(found))

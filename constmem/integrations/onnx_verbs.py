"""The verbs of models as modules on plain tensors, which can be exported one by one."""

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim

from constmem.core.layers import CrossAttention, SelfAttention
from constmem.core.moments import Moments
from constmem.neural_processes import CMANP
from constmem.neural_processes.regression import Posterior
from constmem.point_processes import CMHP
from constmem.point_processes.chunks import Chunk
from constmem.point_processes.states import ConstantState


class Verb(nn.Module):
    """One verb of a model."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model


class _Attention(nn.Module):
    """Attention as few operations of a graph: keys and values apart."""

    def __init__(self, own: Any) -> None:
        super().__init__()
        query, key_value = own.query.weight.detach(), own.key_value.weight.detach()
        self.heads, self.out = own.num_heads, own.out
        self.scale = (query.shape[0] // own.num_heads) ** -0.5
        self.weights = nn.ParameterList([query.mT, *(part.mT for part in key_value.chunk(2))])

    def forward(self, x: Tensor, context: Tensor, mask: None) -> Tensor:
        assert mask is None
        given = zip((x, context, context), self.weights, strict=True)
        q, k, v = ((t @ weight).unflatten(-1, (self.heads, -1)) for t, weight in given)
        shares = (self.scale * (q.transpose(1, 2) @ k.permute(0, 2, 3, 1))).softmax(-1)
        made: Tensor = self.out((shares @ v.transpose(1, 2)).transpose(1, 2).flatten(2))
        return made


def exportable(model: Any) -> Any:
    """A copy of a model whose attention makes small graphs."""
    made = copy.deepcopy(model)
    for part in list(made.modules()):
        if isinstance(part, CrossAttention | SelfAttention):
            part.attention = _Attention(part.attention)  # type: ignore[assignment]
    return made


def merged(value: Tensor, lse: Tensor, other_value: Tensor, other_lse: Tensor) -> tuple[Tensor, Tensor]:
    """log(exp a + exp b) and the share of b, from exp(-|a - b|), which never overflows."""
    gap = other_lse - lse
    less = (-gap.abs()).exp()
    share = torch.where(gap > 0, 1.0, less) / (1.0 + less)
    return (
        value + (other_value - value) * share[..., None],
        torch.maximum(lse, other_lse) + (1.0 + less).log(),
    )


def sums(phi: Tensor, y: Tensor) -> list[Tensor]:
    """The moments of rows, as `Moments` has them: a Gram matrix must be symmetric to the last bit."""
    gram = phi.mT @ phi
    count = torch.ones_like(phi[..., 0]).sum(-1)
    return [(gram + gram.mT) / 2, phi.mT @ y, y.square().sum(-2), count]


class Merge(Verb):
    """Slots, where there are some (value and lse), then sums."""

    def forward(self, state: list[Tensor], other: list[Tensor]) -> list[Tensor]:
        first = 0 if self.model is None else 2
        added = [mine + its for mine, its in zip(state[first:], other[first:], strict=True)]
        return [*(merged(*state[:2], *other[:2]) if first else ()), *added]


class Observe(Verb):
    def forward(self, x: Tensor, y: Tensor) -> list[Tensor]:
        x, y, _ = self.model._scaled((x, y, None))
        points = torch.cat([x, y], -1).to(self.model.dtype)
        slots = self.model.stack.observation.observe(points, embed=self.model.embed)
        regression = self.model.regression
        moments = [] if regression is None else sums(regression.features(x), y.double())
        return [slots.value, slots.lse, *moments, torch.ones_like(x[..., 0]).long().sum(1)]


class _Update(Merge):
    def forward(self, state: list[Tensor], x: Tensor, y: Tensor) -> list[Tensor]:  # type: ignore[override]
        return super().forward(state, Observe.forward(self, x, y))  # type: ignore[arg-type]


class Read(Verb):
    def forward(self, value: Tensor) -> Tensor:
        return self.model._read(value)  # type: ignore[no-any-return]


class _Matrix(Verb):
    def forward(self, gram: Tensor) -> Tensor:
        return self.model.regression.matrix(gram)  # type: ignore[no-any-return]


class _ReadMoments(Verb):
    """What follows once a runner has inverted the matrices: ONNX cannot."""

    def forward(
        self, state: list[Tensor], matrix: Tensor, inverse: Tensor, log_det: Tensor
    ) -> tuple[Tensor, ...]:
        value, *moments = state
        posterior: Posterior = self.model.regression.solved(Moments(*moments), matrix, inverse, log_det)
        return self.model._weighed(self.model._read(value), posterior)  # type: ignore[no-any-return]


class _Predict(Verb):
    def forward(self, memory: list[Tensor], xt: Tensor) -> tuple[Tensor, Tensor]:
        found = self.model.predict(tuple(memory) if len(memory) > 1 else memory[0], xt)
        return found.mean, found.stddev


Work = tuple[Verb, tuple[Any, ...], tuple[Any, ...], list[str], list[str]]  # and names of in- and outputs


def of_points(model: CMANP) -> tuple[dict[str, Work], dict[str, Any]]:
    """Every verb of a model of points, with examples of its arguments; and what a runner must know."""
    model = exportable(model)
    b, n, m = Dim("batch"), Dim("points"), Dim("targets")
    x, y, xt = (torch.zeros(3, k, dim, dtype=torch.float64) for k, dim in (
        (5, model.dim_x), (5, model.dim_y), (7, model.dim_x)
    ))  # fmt: skip
    with torch.no_grad():
        empty = model.empty(3)
        memory = model.read(empty)
    blank = empty.tensors()
    names, state = list(blank), [t.clone() for t in blank.values()]
    memory = list(memory) if model.regression else [memory]
    held: list[Any] = [{0: b} for _ in state]
    points, out = ({0: b, 1: n},) * 2, [f"{name}_out" for name in names]
    others, given = [f"other_{name}" for name in names], ["latents", *Posterior._fields][: len(memory)]
    target = [{0: b} for _ in memory], {0: b, 1: m}
    work: dict[str, Work] = {
        "observe": (Observe(model), (x, y), points, ["x", "y"], names),
        "update": (_Update(model), (state, x, y), (held, *points), [*names, "x", "y"], out),
        "merge": (Merge(model), (state, [t.clone() for t in state]), (held, held), [*names, *others], out),
        "read": (Read(model), (state[0],), ({0: b},), names[:1], given),
        "predict": (_Predict(model), (memory, xt), target, [*given, "xt"], ["mean", "std"]),
    }
    if model.regression is not None:
        gram, matrix = state[2], model.regression.matrix(state[2]).detach()
        solved, asked = [matrix, matrix.clone(), matrix[..., 0, 0].clone()], ["matrix", "inverse", "log_det"]
        work["matrix"] = (_Matrix(model), (gram,), ({0: b},), names[2:3], ["matrix"])
        read = [name for name in names if name not in ("slots.lse", "count")]
        own = ([blank[name].clone() for name in read], *solved), (held[2:], *({0: b} for _ in solved))
        work["read"] = (_ReadMoments(model), *own, [*read, *asked], given)
    about = {
        "kind": "points", "state": empty.KIND, "dim_x": model.dim_x, "dim_y": model.dim_y,
        "blank": _blank(blank),
    }  # fmt: skip
    return work, about


def _blank(tensors: dict[str, Tensor]) -> dict[str, Any]:
    """What a runner makes an empty state of, by name."""
    return {
        name: {
            "shape": list(t.shape[1:]), "fill": t.flatten()[0].item(),
            "dtype": "F64" if t.is_floating_point() else "I64",
        }
        for name, t in tensors.items()
    }  # fmt: skip


class _Events(Verb):
    """A verb of a model of events, whose state comes as a list of tensors."""

    def __init__(self, model: CMHP, names: list[str]) -> None:
        super().__init__(model)
        self.names = names

    def held(self, tensors: list[Tensor]) -> ConstantState:
        return ConstantState._made(dict(zip(self.names, tensors, strict=True)), None)


class _UpdateEvents(_Events):
    def forward(self, state: list[Tensor], times: Tensor, marks: Tensor) -> list[Tensor]:
        held = self.held(state)
        gaps = times - torch.cat([held.last_time[:, None], times], 1)[:, :-1]
        chunk = Chunk(times, gaps, marks, None)
        seen = self.model._observe_some(chunk, self.model.scale.since(held.start[:, None], times))
        value, lse = merged(held.memory["value"], held.memory["lse"], seen.value, seen.lse)
        after = held.moved(chunk, {"value": value, "lse": lse} | held.recent_after(chunk)).tensors()
        return [after[name] for name in self.names]


class _PredictEvents(_Events):
    def forward(self, state: list[Tensor]) -> tuple[Tensor, ...]:
        features = self.model.read(self.held(state))
        gap = self.model._gap(features)
        return features, gap.log_weights, gap.loc, gap.scale


class _Marks(Verb):
    def forward(self, features: Tensor, gap: Tensor) -> Tensor:
        found: Tensor = self.model.mark_head(features, self.model.scale.standard(gap))
        return found


def of_events(model: CMHP) -> tuple[dict[str, Work], dict[str, Any]]:
    """Every verb of a model of events, with examples of its arguments; and what a runner must know."""
    model = exportable(model)
    b, n = Dim("batch"), Dim("events")
    blank = model.empty(torch.zeros(3, dtype=torch.float64)).tensors()
    names, state = list(blank), [t.clone() for t in blank.values()]
    held: list[dict[int, Any]] = [{0: b} for _ in state]
    times, marks = torch.ones(3, 5, dtype=torch.float64).cumsum(1), torch.zeros(3, 5, dtype=torch.int64)
    features, gap = torch.zeros(3, model.config["dim"]), torch.ones(3, dtype=torch.float64)
    out = [f"{name}_out" for name in names]
    predicted = ["features", "log_weights", "loc", "scale"]
    about = {
        "kind": "events", "state": ConstantState.KIND, "num_marks": model.num_marks, "blank": _blank(blank),
    }  # fmt: skip
    update, predict = _UpdateEvents(model, names), _PredictEvents(model, names)
    chunk = {0: b, 1: n}
    return {
        "update": (update, (state, times, marks), (held, chunk, chunk), [*names, "times", "marks"], out),
        "predict": (predict, (state,), (held,), names, predicted),
        "marks": (_Marks(model), (features, gap), ({0: b}, {0: b}), ["features", "gap"], ["log_prob"]),
    }, about

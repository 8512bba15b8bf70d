"""The verbs of models as modules on plain tensors, which can be exported one by one."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim

from constmem.core.state import AttentionState
from constmem.neural_processes import CMANP
from constmem.point_processes import CMHP
from constmem.point_processes.chunks import Chunk
from constmem.point_processes.states import ConstantState


class _Verb(nn.Module):
    """One verb of a model."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model


class _Observe(_Verb):
    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        state = self.model.observe(x, y)
        return state.value, state.lse


class _Merge(_Verb):
    """log(exp a + exp b) and the share of b, from exp(-|a - b|), which never overflows."""

    def forward(
        self, value: Tensor, lse: Tensor, other_value: Tensor, other_lse: Tensor
    ) -> tuple[Tensor, Tensor]:
        gap = other_lse - lse
        less = (-gap.abs()).exp()
        share = torch.where(gap > 0, 1.0, less) / (1.0 + less)
        return (
            value + (other_value - value) * share[..., None],
            torch.maximum(lse, other_lse) + (1.0 + less).log(),
        )


class _Update(_Merge):
    def forward(self, value: Tensor, lse: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        state = self.model.observe(x, y)
        return super().forward(value, lse, state.value, state.lse)


class _Read(_Verb):
    def forward(self, value: Tensor) -> Tensor:
        return self.model._read(value)  # type: ignore[no-any-return]


class _Predict(_Verb):
    def forward(self, memory: Tensor, xt: Tensor) -> tuple[Tensor, Tensor]:
        found = self.model.predict(memory, xt)
        return found.mean, found.stddev


Work = tuple[_Verb, tuple[Any, ...], tuple[Any, ...], list[str], list[str]]  # and names of in- and outputs


def of_points(model: CMANP) -> tuple[dict[str, Work], dict[str, Any]]:
    """Every verb of a model of points, with examples of its arguments; and what a runner must know."""
    b, n, m = Dim("batch"), Dim("points"), Dim("targets")
    x, y, xt = (torch.zeros(3, k, dim, dtype=torch.float64) for k, dim in (
        (5, model.dim_x), (5, model.dim_y), (7, model.dim_x)
    ))  # fmt: skip
    with torch.no_grad():
        state = model.observe(x, y)
        memory = model.read(state)
    held, points, slots = (state.value, state.lse), ({0: b, 1: n},) * 2, ({0: b},) * 2
    out = ["value_out", "lse_out"]
    others = ["value", "lse", "other_value", "other_lse"]
    about = {
        "kind": "points", "state": AttentionState.KIND, "dim_x": model.dim_x, "dim_y": model.dim_y,
        "layout": list(model.layout),
    }  # fmt: skip
    return {
        "observe": (_Observe(model), (x, y), points, ["x", "y"], ["value", "lse"]),
        "update": (_Update(model), (*held, x, y), (*slots, *points), ["value", "lse", "x", "y"], out),
        "merge": (_Merge(model), (*held, *(t.clone() for t in held)), slots * 2, others, out),
        "read": (_Read(model), held[:1], slots[:1], ["value"], ["memory"]),
        "predict": (_Predict(model), (memory, xt), ({0: b}, {0: b, 1: m}), ["memory", "xt"], ["mean", "std"]),
    }, about


class _Events(_Verb):
    """A verb of a model of events, whose state comes as a list of tensors."""

    def __init__(self, model: CMHP, names: list[str]) -> None:
        super().__init__(model)
        self.names, self.merge = names, _Merge(model)

    def held(self, tensors: list[Tensor]) -> ConstantState:
        return ConstantState._made(dict(zip(self.names, tensors, strict=True)), None)


class _UpdateEvents(_Events):
    def forward(self, state: list[Tensor], times: Tensor, marks: Tensor) -> list[Tensor]:
        held = self.held(state)
        gaps = times - torch.cat([held.last_time[:, None], times], 1)[:, :-1]
        chunk = Chunk(times, gaps, marks, None)
        seen = self.model._observe_some(chunk, self.model.scale.since(held.start[:, None], times))
        value, lse = self.merge(held.memory["value"], held.memory["lse"], seen.value, seen.lse)
        after = held.moved(chunk, {"value": value, "lse": lse} | held.recent_after(chunk)).tensors()
        return [after[name] for name in self.names]


class _PredictEvents(_Events):
    def forward(self, state: list[Tensor]) -> tuple[Tensor, ...]:
        features = self.model.read(self.held(state))
        gap = self.model._gap(features)
        return features, gap.log_weights, gap.loc, gap.scale


class _Marks(_Verb):
    def forward(self, features: Tensor, gap: Tensor) -> Tensor:
        found: Tensor = self.model.mark_head(features, self.model.scale.standard(gap))
        return found


def of_events(model: CMHP) -> tuple[dict[str, Work], dict[str, Any]]:
    """Every verb of a model of events, with examples of its arguments; and what a runner must know."""
    b, n = Dim("batch"), Dim("events")
    blank = model.empty(torch.zeros(3, dtype=torch.float64)).tensors()
    names, state = list(blank), [t.clone() for t in blank.values()]
    held: list[dict[int, Any]] = [{0: b} for _ in state]
    times, marks = torch.ones(3, 5, dtype=torch.float64).cumsum(1), torch.zeros(3, 5, dtype=torch.int64)
    features, gap = torch.zeros(3, model.config["dim"]), torch.ones(3, dtype=torch.float64)
    out = [f"{name}_out" for name in names]
    predicted = ["features", "log_weights", "loc", "scale"]
    fills = {
        name: {
            "shape": list(t.shape[1:]), "fill": t.flatten()[0].item(),
            "dtype": "F64" if t.is_floating_point() else "I64",
        }
        for name, t in blank.items()
    }  # fmt: skip
    about = {"kind": "events", "state": ConstantState.KIND, "num_marks": model.num_marks, "blank": fills}
    update, predict = _UpdateEvents(model, names), _PredictEvents(model, names)
    chunk = {0: b, 1: n}
    return {
        "update": (update, (state, times, marks), (held, chunk, chunk), [*names, "times", "marks"], out),
        "predict": (predict, (state,), (held,), names, predicted),
        "marks": (_Marks(model), (features, gap), ({0: b}, {0: b}), ["features", "gap"], ["log_prob"]),
    }, about

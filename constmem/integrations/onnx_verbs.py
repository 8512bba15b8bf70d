"""Verbs of models on plain tensors, and the graphs that they become."""

import copy
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from constmem.core.layers import CrossAttention, SelfAttention
from constmem.core.moments import Moments
from constmem.data.prior import context_inputs, residual_of, target_inputs
from constmem.neural_processes import CMANP
from constmem.neural_processes.regression import Posterior
from constmem.point_processes import CMHP
from constmem.point_processes.chunks import Chunk
from constmem.point_processes.states import ConstantState
from constmem.tabular.learner import Learner
from constmem.tabular.precisions import KERNEL
from constmem.tabular.trace import LEAST


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


def joined(state: list[Tensor], other: list[Tensor], *, slots: bool) -> list[Tensor]:
    """Slots, where there are some (value and lse), then sums."""
    first = merged(*state[:2], *other[:2]) if slots else ()
    return [*first, *(state[i] + other[i] for i in range(len(first), len(state)))]


class Verbs(nn.Module):
    """A model whose methods become graphs: tensors in, tensors out; a state is a list of them."""

    rewritten = True  # by PyTorch's exporter into fewer operations
    verb = ""  # the method that is exported

    def forward(self, *given: Any) -> Any:
        return getattr(self, self.verb)(*given)


class Points(Verbs):
    """The verbs of a CMANP."""

    def __init__(self, model: CMANP) -> None:
        super().__init__()
        self.model = exportable(model)

    def observe(self, x: Tensor, y: Tensor) -> list[Tensor]:
        x, y, _ = self.model._scaled((x, y, None))
        points = torch.cat([x, y], -1).to(self.model.dtype)
        slots = self.model.stack.observation.observe(points, embed=self.model.embed)
        regression = self.model.regression
        moments = [] if regression is None else sums(regression.features(x), y.double())
        return [slots.value, slots.lse, *moments, torch.ones_like(x[..., 0]).long().sum(1)]

    def update(self, state: list[Tensor], x: Tensor, y: Tensor) -> list[Tensor]:
        return self.merge(state, self.observe(x, y))

    def merge(self, state: list[Tensor], other: list[Tensor]) -> list[Tensor]:
        return joined(state, other, slots=True)

    def matrix(self, gram: Tensor) -> Tensor:
        return self.model.regression.matrix(gram)  # type: ignore[no-any-return]

    def read(self, state: list[Tensor], *solved: Tensor) -> Any:
        """Of a model with moments from its matrices, inverted by a runner: ONNX cannot."""
        value, *moments = state
        latents = self.model._read(value)
        if not moments:
            return latents
        posterior: Posterior = self.model.regression.solved(Moments(*moments), *solved)
        return self.model._weighed(latents, posterior)

    def predict(self, memory: list[Tensor], xt: Tensor) -> tuple[Tensor, Tensor]:
        found = self.model.predict(tuple(memory) if len(memory) > 1 else memory[0], xt)
        return found.mean, found.stddev


class _Slots(NamedTuple):
    """What a model of events remembers of them all."""

    value: Tensor
    lse: Tensor

    def merge(self, other: "_Slots") -> "_Slots":
        return _Slots(*merged(*self, *other))


class _State(ConstantState):
    """A state in a graph, where nothing can be refused: a runner does so before."""

    @property
    def attention(self) -> Any:
        return _Slots(self.memory["value"], self.memory["lse"])

    def _require_parts(self, other: Any, verb: str) -> None:
        pass


class Events(Verbs):
    """The verbs of a CMHP."""

    def __init__(self, model: CMHP) -> None:
        super().__init__()
        self.model = exportable(model)
        self.empty = model._nothing(torch.zeros(1).double(), torch.zeros(1).double()).tensors()

    def _held(self, tensors: list[Tensor]) -> _State:
        return _State._made(dict(zip(self.empty, tensors, strict=True)), None)

    def _listed(self, state: ConstantState) -> list[Tensor]:
        tensors = state.tensors()
        return [tensors[name] for name in self.empty]

    def observe(self, start: Tensor, last_time: Tensor, times: Tensor, marks: Tensor) -> list[Tensor]:
        nothing = {name: t.expand(start.shape[0], *t.shape[1:]) for name, t in self.empty.items()}
        return self.update([*(nothing | {"start": start, "last_time": last_time}).values()], times, marks)

    def update(self, state: list[Tensor], times: Tensor, marks: Tensor) -> list[Tensor]:
        held = self._held(state)
        gaps = times - torch.cat([held.last_time[:, None], times], 1)[:, :-1]
        chunk = Chunk(times, gaps, marks, None)
        seen = self.model._observe_some(chunk, self.model.scale.since(held.start[:, None], times))
        memory = held.attention.merge(_Slots(seen.value, seen.lse))._asdict()
        return self._listed(held.moved(chunk, memory | held.recent_after(chunk)))

    def merge(self, state: list[Tensor], other: list[Tensor]) -> list[Tensor]:
        return self._listed(self._held(state).merge(self._held(other)))

    def predict(self, state: list[Tensor]) -> tuple[Tensor, ...]:
        features = self.model.read(self._held(state))
        gap = self.model._gap(features)
        return features, gap.log_weights, gap.loc, gap.scale

    def marks(self, features: Tensor, gap: Tensor) -> Tensor:
        found: Tensor = self.model.mark_head(features, self.model.scale.standard(gap))
        return found


class Table(Verbs):
    """The verbs of a tables' learner.

    Args:
        law: of its residuals' model, if they are learned.
    """

    rewritten = False  # that loses one of two limits where one tensor is clamped twice

    def __init__(self, learner: Learner, law: Points | None) -> None:
        super().__init__()
        memory = learner.memory
        assert memory is not None
        self.law, self.features, self.discrete = law, memory.features, learner.discrete
        self.read = None if law is None else law.read
        self.residuals: Any = memory.residuals
        self.centre, self.scale = (torch.from_numpy(t) for t in (learner.center, learner.scale))

    def _phi(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Features of rows, and the columns that the residuals' model sees."""
        made = torch.cat(self.features._parts(x), 1)
        for name, (_, _, whitener) in self.features.kernels.items():
            here = self.features.groups[name]
            made = torch.cat([made[:, : here.start], made[:, here] @ whitener, made[:, here.stop :]], 1)
        shown = x[:, :0] if self.residuals is None else self.residuals._shown(self.features, x)
        return made, shown

    def observe(self, x: Tensor, fold: Tensor, y: Tensor) -> list[Tensor]:
        phi, shown = self._phi(x)
        y = y if self.discrete else (y - self.centre) / self.scale
        moments = sums(phi, y)
        if self.law is None:
            return moments
        made = torch.einsum("np,fpk->fnk", phi, self.residuals.weights)
        before = made.gather(0, fold[None, :, None].expand(1, -1, made.shape[2]))[0]
        sigma = self.residuals.sigma[:, None]
        inputs = context_inputs(before.mT, y.mT, shown.expand(len(sigma), -1, -1), sigma)
        off = residual_of(y.mT, before.mT, sigma)[..., None]
        return [*self.law.observe(inputs.float(), off.float()), *moments]

    def update(self, state: list[Tensor], x: Tensor, fold: Tensor, y: Tensor) -> list[Tensor]:
        return self.merge(state, self.observe(x, fold, y))

    def merge(self, state: list[Tensor], other: list[Tensor]) -> list[Tensor]:
        return joined(state, other, slots=self.law is not None)

    def predict(
        self, x: Tensor, weights: Tensor, root: Tensor, noise: Tensor, missed: Tensor, usual: Tensor,
        more: list[Tensor],
    ) -> list[Tensor]:  # fmt: skip
        """Means, variances and the residuals' normals in units of targets, from what a runner has read."""
        phi, shown = self._phi(x)
        mean, leverage = phi @ weights, (phi @ root).square().sum(-1)
        if (kernel := self.features.groups.get(KERNEL)) is not None:
            leverage = leverage + missed * ((1.0 - phi[:, kernel].square().sum(-1)).clamp(min=0.0) - usual)
        variance = noise * (1 + leverage).clamp(min=LEAST)[:, None]
        if self.discrete:
            return [mean, variance]
        restored = [mean * self.scale + self.centre, variance * self.scale**2]
        if self.law is None:
            return restored
        latents, count = more
        deviation, sigma = variance.clamp(min=1e-300).sqrt(), self.residuals.sigma[:, None]
        wide = shown.expand(len(sigma), -1, -1)
        inputs = target_inputs(mean.mT, deviation.mT, wide, sigma, count.double()[:, None])
        law = self.law.model.predict(latents, inputs.float())
        normals, log_weight = law.components, law.log_weight.double().transpose(0, 1)
        means, stds = (t[..., 0].double().transpose(0, 1) for t in (normals.mean, normals.stddev))
        unit = (deviation * self.scale)[..., None]
        return [*restored, restored[0][..., None] + unit * means, unit * stds, log_weight]


def graph(
    model: Verbs, name: str, given: tuple[Any, ...], axes: tuple[Any, ...], inputs: list[str],
    outputs: list[str],
) -> Any:  # fmt: skip
    """A verb as a model of the package onnx, without notes on where it was made.

    Args:
        given: examples of what the verb takes.
        axes: those of any length, by their numbers.
    """
    import onnxscript

    model.verb = name
    with torch.no_grad():
        exported: Any = torch.onnx.export(
            model.eval(), given, dynamic_shapes=(axes,), input_names=inputs, output_names=outputs,
            dynamo=True, verbose=False, optimize=model.rewritten, custom_translation_table={
                torch.ops.aten.searchsorted.Tensor: _searchsorted, torch.ops.aten.sort.stable: _sort,
            },
        )  # fmt: skip
        made = exported.model_proto
        if not model.rewritten:
            onnxscript.optimizer.fold_constants(made)
            onnxscript.optimizer.remove_unused_nodes(made)
    for part in (made, *made.graph.node):
        del part.metadata_props[:]
        part.doc_string = ""
    return made


def _searchsorted(known: Any, asked: Any, *, right: bool = False, **_: Any) -> Any:
    """How many of each row's sorted numbers are below each of those asked: ONNX has no such operator."""
    from onnxscript import opset18

    rows, columns = opset18.Unsqueeze(known, [1]), opset18.Unsqueeze(asked, [2])
    below = opset18.LessOrEqual(rows, columns) if right else opset18.Less(rows, columns)
    return opset18.ReduceSum(opset18.Cast(below, to=7), [2], keepdims=0)  # as whole numbers


def _sort(numbers: Any, *, dim: int, descending: bool = False, **_: Any) -> Any:
    """All numbers from the least: of equal ones, TopK takes the first in their order, as a stable sort."""
    from onnxscript import opset18

    count = opset18.Gather(opset18.Shape(numbers), [dim])
    return opset18.TopK(numbers, count, axis=dim, largest=int(descending), sorted=1)

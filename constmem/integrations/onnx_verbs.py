"""The verbs of models as modules on plain tensors, which can be exported one by one."""

import contextlib
import copy
import io
import logging
import tempfile
import warnings
from collections.abc import Iterator
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


class Verb(nn.Module):
    """One verb of a model."""

    rewritten = True  # by PyTorch's exporter into fewer operations

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


class Update(Merge):
    def forward(self, state: list[Tensor], x: Tensor, y: Tensor) -> list[Tensor]:  # type: ignore[override]
        return super().forward(state, Observe.forward(self, x, y))  # type: ignore[arg-type]


class Read(Verb):
    def forward(self, value: Tensor) -> Tensor:
        return self.model._read(value)  # type: ignore[no-any-return]


class Matrix(Verb):
    def forward(self, gram: Tensor) -> Tensor:
        return self.model.regression.matrix(gram)  # type: ignore[no-any-return]


class ReadMoments(Verb):
    """What follows once a runner has inverted the matrices: ONNX cannot."""

    def forward(
        self, state: list[Tensor], matrix: Tensor, inverse: Tensor, log_det: Tensor
    ) -> tuple[Tensor, ...]:
        value, *moments = state
        posterior: Posterior = self.model.regression.solved(Moments(*moments), matrix, inverse, log_det)
        return self.model._weighed(self.model._read(value), posterior)  # type: ignore[no-any-return]


class Predict(Verb):
    def forward(self, memory: list[Tensor], xt: Tensor) -> tuple[Tensor, Tensor]:
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


class _Events(Verb):
    """A verb of a model of events, whose state comes as a list of tensors."""

    def __init__(self, model: CMHP, names: list[str]) -> None:
        super().__init__(model)
        self.names = names

    def held(self, tensors: list[Tensor]) -> _State:
        return _State._made(dict(zip(self.names, tensors, strict=True)), None)

    def listed(self, state: ConstantState) -> list[Tensor]:
        tensors = state.tensors()
        return [tensors[name] for name in self.names]


class MergeEvents(_Events):
    def forward(self, state: list[Tensor], other: list[Tensor]) -> list[Tensor]:
        return self.listed(self.held(state).merge(self.held(other)))


class UpdateEvents(_Events):
    def forward(self, state: list[Tensor], times: Tensor, marks: Tensor) -> list[Tensor]:
        held = self.held(state)
        gaps = times - torch.cat([held.last_time[:, None], times], 1)[:, :-1]
        chunk = Chunk(times, gaps, marks, None)
        seen = self.model._observe_some(chunk, self.model.scale.since(held.start[:, None], times))
        memory = held.attention.merge(_Slots(seen.value, seen.lse))._asdict()
        return self.listed(held.moved(chunk, memory | held.recent_after(chunk)))


class ObserveEvents(UpdateEvents):
    def forward(  # type: ignore[override]
        self, start: Tensor, last_time: Tensor, times: Tensor, marks: Tensor
    ) -> list[Tensor]:
        one = self.model._nothing(start.new_zeros(1), start.new_zeros(1))
        nothing = [t.expand(start.shape[0], *t.shape[1:]) for t in self.listed(one)]
        begun = dict(zip(self.names, nothing, strict=True)) | {"start": start, "last_time": last_time}
        return super().forward([*begun.values()], times, marks)


class PredictEvents(_Events):
    def forward(self, state: list[Tensor]) -> tuple[Tensor, ...]:
        features = self.model.read(self.held(state))
        gap = self.model._gap(features)
        return features, gap.log_weights, gap.loc, gap.scale


class Marks(Verb):
    def forward(self, features: Tensor, gap: Tensor) -> Tensor:
        found: Tensor = self.model.mark_head(features, self.model.scale.standard(gap))
        return found


class _Table(Verb):
    """A verb of a tables' learner; the model is that of its residuals, if they are learned."""

    rewritten = False  # that loses one of two limits where one tensor is clamped twice

    def __init__(self, learner: Learner, model: CMANP | None) -> None:
        memory = learner.memory
        assert memory is not None
        super().__init__(model)
        self.features, self.discrete = memory.features, learner.discrete
        self.residuals: Any = memory.residuals
        self.centre, self.scale = (torch.from_numpy(t) for t in (learner.center, learner.scale))

    def phi(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Features of rows, and the columns that the residuals' model sees."""
        made = torch.cat(self.features._parts(x), 1)
        for name, (_, _, whitener) in self.features.kernels.items():
            here = self.features.groups[name]
            made = torch.cat([made[:, : here.start], made[:, here] @ whitener, made[:, here.stop :]], 1)
        shown = x[:, :0] if self.residuals is None else self.residuals._shown(self.features, x)
        return made, shown


class ObserveTable(_Table):
    def forward(self, x: Tensor, fold: Tensor, y: Tensor) -> list[Tensor]:
        phi, shown = self.phi(x)
        y = y if self.discrete else (y - self.centre) / self.scale
        moments = sums(phi, y)
        if self.residuals is None:
            return moments
        made = torch.einsum("np,fpk->fnk", phi, self.residuals.weights)
        before = made.gather(0, fold[None, :, None].expand(1, -1, made.shape[2]))[0]
        sigma = self.residuals.sigma[:, None]
        inputs = context_inputs(before.mT, y.mT, shown.expand(len(sigma), -1, -1), sigma).float()
        off = residual_of(y.mT, before.mT, sigma)[..., None].float()
        value, lse, count = Observe.forward(self, inputs, off)  # type: ignore[arg-type]
        return [value, lse, count, *moments]


class UpdateTable(ObserveTable):
    def forward(self, state: list[Tensor], x: Tensor, fold: Tensor, y: Tensor) -> list[Tensor]:  # type: ignore[override]
        return Merge.forward(self, state, super().forward(x, fold, y))  # type: ignore[arg-type]


class PredictTable(_Table):
    """Means, variances and the residuals' normals in the units of targets, from what a runner has read."""

    def forward(
        self, x: Tensor, weights: Tensor, root: Tensor, noise: Tensor, missed: Tensor, usual: Tensor,
        more: list[Tensor],
    ) -> list[Tensor]:  # fmt: skip
        phi, shown = self.phi(x)
        mean, leverage = phi @ weights, (phi @ root).square().sum(-1)
        if (kernel := self.features.groups.get(KERNEL)) is not None:
            leverage = leverage + missed * ((1.0 - phi[:, kernel].square().sum(-1)).clamp(min=0.0) - usual)
        variance = noise * (1 + leverage).clamp(min=LEAST)[:, None]
        if self.discrete:
            return [mean, variance]
        restored = [mean * self.scale + self.centre, variance * self.scale**2]
        if self.residuals is None:
            return restored
        latents, count = more
        deviation, sigma = variance.clamp(min=1e-300).sqrt(), self.residuals.sigma[:, None]
        wide = shown.expand(len(sigma), -1, -1)
        inputs = target_inputs(mean.mT, deviation.mT, wide, sigma, count.double()[:, None])
        law = self.model.predict(latents, inputs.float())
        normals, log_weight = law.components, law.log_weight.double().transpose(0, 1)
        means, stds = (t[..., 0].double().transpose(0, 1) for t in (normals.mean, normals.stddev))
        unit = (deviation * self.scale)[..., None]
        return [*restored, restored[0][..., None] + unit * means, unit * stds, log_weight]


def graph(
    verb: Verb, given: tuple[Any, ...], axes: tuple[Any, ...], inputs: list[str], outputs: list[str]
) -> Any:
    """A verb as a model of the package onnx, without notes on where it was made."""
    import onnx
    import onnxscript

    with tempfile.TemporaryDirectory() as folder, torch.no_grad(), _quiet():
        path = f"{folder}/graph.onnx"
        torch.onnx.export(
            verb.eval(), given, path, dynamic_shapes=axes, input_names=inputs, output_names=outputs,
            dynamo=True, external_data=False, verbose=False, optimize=verb.rewritten,
            custom_translation_table={
                torch.ops.aten.searchsorted.Tensor: _searchsorted, torch.ops.aten.sort.stable: _sort,
            },
        )  # fmt: skip
        made = onnx.load(path)
        if not verb.rewritten:
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


def _sort(numbers: Any, *, stable: bool, dim: int, descending: bool = False) -> Any:  # noqa: ARG001
    """All numbers from the least: of equal ones, TopK takes the first in their order, as a stable sort."""
    from onnxscript import opset18

    count = opset18.Gather(opset18.Shape(numbers), [dim])
    return opset18.TopK(numbers, count, axis=dim, largest=int(descending), sorted=1)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without the exporter's notes to its own developers."""
    loggers = [logging.getLogger(name) for name in ("torch.onnx", "onnxscript", "onnx_ir")]
    levels = [logger.level for logger in loggers]
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        try:
            yield
        finally:
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)

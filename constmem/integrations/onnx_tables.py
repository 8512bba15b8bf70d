"""The verbs of a tables' learner as modules on plain tensors, which can be exported one by one."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.export import Dim

from constmem.core.algebra import EMPTY
from constmem.core.moments import Moments
from constmem.data.prior import SHOWN, context_inputs, residual_of, target_inputs
from constmem.integrations.onnx_verbs import Merge, Observe, Read, Verb, Work, exportable, sums
from constmem.neural_processes import CMANP
from constmem.tabular import evidence
from constmem.tabular.answers import DOUBT, TAILS
from constmem.tabular.evidence import KERNEL
from constmem.tabular.features import CLIP, DEPTH, FAR, RANK
from constmem.tabular.forgetting import TRUST
from constmem.tabular.learner import Learner
from constmem.tabular.residuals import shipped
from constmem.tabular.trace import LEAST

EVIDENCE = (
    "PRIOR", "SMALLEST", "FAINT", "LARGEST", "ROUNDING", "STEPS", "REACH", "RATIO", "RATIOS", "SPREAD",
    "START", "CLOSE",
)  # fmt: skip


class _Table(Verb):
    """A verb of a tables' learner; the model is that of its residuals, if they are learned."""

    def __init__(self, learner: Learner, model: CMANP | None) -> None:
        memory = learner.memory
        assert memory is not None
        super().__init__(model)
        self.features, self.discrete = memory.features, learner.discrete
        self.residuals: Any = memory.residuals
        self.centre, self.scale = (torch.from_numpy(t) for t in (learner.center, learner.scale))

    def phi(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Features of rows, as `Features` makes them; and the columns that the residuals' model sees."""
        f = self.features
        z = (x - f.centre) / f.scale
        below = (f.knots < z[..., None]).long().sum(-1) + (f.knots <= z[..., None]).long().sum(-1)
        ranks = (below.double() / f.knots.shape[1] - 1.0) * RANK
        left, right = (z.index_select(1, one).clamp(-FAR, FAR) for one in f.pairs)
        made = {"constant": torch.ones_like(z[:, :1]), "columns": z, "ranks": ranks, "products": left * right}
        for name, (kernel, where, whitener) in f.kernels.items():
            made[name] = kernel(torch.cat([z.clamp(-CLIP, CLIP), ranks], 1), where) @ whitener
        if count := len(f.columns):
            powers = 2 ** torch.arange(DEPTH - 1, -1, -1)
            tested = z.index_select(1, f.columns.flatten()).unflatten(1, f.columns.shape)
            leaf = ((tested > f.thresholds).long() * powers).sum(-1)
            one_hot = leaf[..., None] == torch.arange(2**DEPTH)
            made["trees"] = one_hot.double().reshape(-1, count * 2**DEPTH)
        shown = z[:, :0] if self.residuals is None else z.index_select(1, self.residuals.columns)
        return torch.cat([made[name] for name in f.groups], 1), F.pad(shown, (0, SHOWN - shown.shape[1]))


class _ObserveTable(_Table):
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


class _UpdateTable(_ObserveTable):
    def forward(self, state: list[Tensor], x: Tensor, fold: Tensor, y: Tensor) -> list[Tensor]:  # type: ignore[override]
        return Merge.forward(self, state, super().forward(x, fold, y))  # type: ignore[arg-type]


class _PredictTable(_Table):
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


def of_table(learner: Learner) -> tuple[dict[str, Work], dict[str, Any]]:
    """Every verb of a tables' learner, with examples of its arguments; and what a runner must know."""
    memory, columns = learner.memory, learner.columns
    assert memory is not None
    assert columns is not None
    n = Dim("rows")
    model = None if memory.residuals is None else exportable(shipped())
    k: Any = Dim("classes", min=1) if learner.discrete else None
    p, count = memory.features.width, max(memory.targets, 3) if learner.discrete else memory.targets
    moments = Moments.empty(p, count)
    state = {name: getattr(moments, name) for name in Moments.NAMES}
    axes: list[Any] = [None, {1: k}, {0: k}, None] if learner.discrete else [None] * 4
    if model is not None:
        slots = model.empty(count).tensors()
        state, axes = {f"residuals.{name}": t for name, t in slots.items()} | state, [None] * 3 + axes
    names, held = list(state), [t.clone() for t in state.values()]
    out, others = [f"{name}_out" for name in names], [f"other_{name}" for name in names]
    x, fold, y = torch.zeros(5, columns.width).double(), torch.zeros(5).long(), torch.zeros(5, count).double()
    rows, target = {0: n}, {0: n, 1: k} if learner.discrete else {0: n}
    asked, posterior = ["x", "fold", "y"], ["weights", "root", "noise", "missed", "usual"]
    read = [torch.zeros(p, count), torch.eye(p), torch.ones(count), torch.zeros(()), torch.zeros(())]
    read_axes: list[Any] = [{1: k}, None, {0: k}, None, None] if learner.discrete else [None] * 5
    more, more_names, answers = [], [], ["mean", "variance"]
    work: dict[str, Work] = {}
    with torch.no_grad():
        if model is not None:
            latents = model.read(model.empty(count))
            more, more_names = [latents, torch.ones(count).long()], ["latents", "residuals.count"]
            answers += ["means", "stds", "log_weight"]
            work["read"] = (Read(model), (held[0],), (None,), names[:1], ["latents"])
    merge = Merge(model)
    observe, update, predict = (kind(learner, model) for kind in (_ObserveTable, _UpdateTable, _PredictTable))
    work |= {
        "observe": (observe, (x, fold, y), (rows, rows, target), asked, names),
        "update": (update, (held, x, fold, y), (axes, rows, rows, target), [*names, *asked], out),
        "merge": (merge, (held, [t.clone() for t in held]), (axes, axes), [*names, *others], out),
        "predict": (
            predict, (x, *(t.double() for t in read), more), (rows, *read_axes, [None] * len(more)),
            ["x", *posterior, *more_names], answers,
        ),
    }  # fmt: skip
    groups = {name: [group.start, group.stop] for name, group in memory.features.groups.items()}
    constants = {name: getattr(evidence, name) for name in EVIDENCE}
    constants |= {"DOUBT": DOUBT, "TAILS": TAILS, "TRUST": TRUST, "EMPTY": EMPTY}
    return work, {
        "kind": "tables", "groups": groups, "discrete": learner.discrete, "names": names,
        "constants": constants,
    }  # fmt: skip

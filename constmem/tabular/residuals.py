"""`Residuals`: the law of what the closed form leaves, read from the rows by a pretrained CMANP."""

import warnings
from dataclasses import dataclass, replace
from functools import cache, reduce

import torch
from jaxtyping import Float, Int
from torch import Tensor

from constmem.core.moments import Moments
from constmem.core.state import AttentionState
from constmem.data.prior import FOLDS, SHOWN, context_inputs, residual_of, target_inputs
from constmem.neural_processes import CMANP
from constmem.tabular.answers import Answer, Shape
from constmem.tabular.columns import fold_of
from constmem.tabular.evidence import at, posterior
from constmem.tabular.features import PIECE, Features
from constmem.tabular.kernel import shares, side_by_side

WEIGHTS = "tables"  # that come with the package


@cache
def shipped() -> CMANP:
    """The pretrained model, loaded once."""
    return CMANP.from_pretrained(WEIGHTS).eval().requires_grad_(False)


@dataclass(frozen=True, eq=False)
class Residuals:
    """What a pretrained model has seen of the residuals: a state of constant size, which merges.

    A row's residual must not know its own target. So the rows of the warm-up are cut into folds by a hash
    of their numbers, and each row is predicted, now and ever after, by weights that other folds gave. Those
    weights are frozen: the same rows always give the same tokens, in any order, on any machine.

    Attributes:
        weights: of the features, by fold; frozen.
        sigma: deviation of the residuals of the warm-up; frozen.
        columns: those that matter most, which the model is shown; frozen.
        state: of the model, a task for each target.
    """

    weights: Float[Tensor, "f p k"]
    sigma: Float[Tensor, " k"]
    columns: Int[Tensor, " c"]
    state: AttentionState

    @staticmethod
    def freeze(features: Features, x: Float[Tensor, "n d"], y: Float[Tensor, "n k"]) -> "Residuals":
        """Weights for each fold of the warm-up, and no rows seen."""
        phi, fold = features(x), _folds(x)
        parts = [Moments.observe(phi[fold == i], y[fold == i]) for i in range(FOLDS)]
        found = posterior(reduce(Moments.merge, parts), features.groups, fitted=features.fitted)
        weights = []
        for i in range(FOLDS):
            rest = reduce(Moments.merge, parts[:i] + parts[i + 1 :])
            own = at(rest, features.groups, found.precisions, found.noise, found.freedom)
            weights.append(own.weights)
        blank = torch.ones(y.shape[1], dtype=torch.float64)
        d = len(features.centre)
        columns = features.rates[:, :d].sum(0).argsort(descending=True, stable=True)[:SHOWN]
        made = Residuals(torch.stack(weights), blank, columns, shipped().empty(y.shape[1]))
        left = (y - made._before(phi, fold)).square().mean(0).sqrt()
        return replace(made, sigma=left.clamp(min=1e-9))

    def empty(self) -> "Residuals":
        """The same, of no rows."""
        return replace(self, state=shipped().empty(len(self.sigma)))

    @property
    def nbytes(self) -> int:
        """Bytes of all that must be remembered."""
        return self.weights.nbytes + self.sigma.nbytes + self.columns.nbytes + self.state.nbytes

    def frozen(self) -> dict[str, Tensor]:
        """What must be the same for states to merge, by name."""
        return {"weights": self.weights, "sigma": self.sigma, "columns": self.columns}

    def tensors(self) -> dict[str, Tensor]:
        """All it is made of, by name."""
        return self.frozen() | {f"state.{name}": tensor for name, tensor in self.state.tensors().items()}

    @staticmethod
    def of(tensors: dict[str, Tensor], fingerprint: str | None) -> "Residuals | None":
        """What `tensors` gave, if weights of this fingerprint are here; refuses what does not fit."""
        if fingerprint is None:
            return None
        if fingerprint != shipped().fingerprint():
            warnings.warn(
                "the law of residuals was read by other weights than come with this version: intervals and "
                "densities are those of the closed form; learn the rows again for the new weights to read",
                stacklevel=6,
            )
            return None
        state = {n.removeprefix("state."): t for n, t in tensors.items() if n.startswith("state.")}
        model = shipped()
        made = AttentionState.of_tensors(state, model.fingerprint())
        weights, sigma, columns = (tensors[name] for name in ("weights", "sigma", "columns"))
        if made.layout != model.layout or weights.shape[::2] != (FOLDS, made.batch):
            raise ValueError("holds residuals whose shapes do not fit each other")
        if sigma.shape != (made.batch,) or bool((sigma <= 0).any()):
            raise ValueError("holds deviations of residuals that are none")
        return Residuals(weights, sigma, columns, made)

    def learn(
        self, features: Features, x: Float[Tensor, "n d"], phi: Float[Tensor, "n p"], y: Float[Tensor, "n k"]
    ) -> "Residuals":
        """The same, of some rows more."""
        seen = side_by_side(
            lambda s: self._observed(features, x[s], phi[s], y[s]), shares(len(x), least=PIECE)
        )
        return replace(self, state=reduce(AttentionState.merge, seen, self.state))

    def merge(self, other: "Residuals") -> "Residuals":
        """Of the rows of both; they must have been frozen together."""
        return replace(self, state=self.state.merge(other.state))

    def without(self, features: Features, x: Tensor, phi: Tensor, y: Tensor) -> "Residuals | None":
        """Without rows that were learned; nothing where rounding would be all that is left."""
        try:
            return replace(self, state=self.state.remove(self._observed(features, x, phi, y)))
        except ValueError:
            warnings.warn(
                "the law of residuals was read from these rows for the most part, and is forgotten with "
                "them: intervals and densities are those of the closed form from now on",
                stacklevel=6,
            )
            return None

    def _before(self, phi: Tensor, fold: Tensor) -> Float[Tensor, "n k"]:
        """What other folds predict."""
        every = self.weights.mT.flatten(0, 1) @ phi.mT  # (f k, n)
        return every.view(FOLDS, -1, len(phi))[fold, :, torch.arange(len(phi))]

    def _observed(self, features: Features, x: Tensor, phi: Tensor, y: Tensor) -> AttentionState:
        before = self._before(phi, _folds(x))
        shown = self._shown(features, x)
        sigma = self.sigma[:, None]
        inputs = context_inputs(before.mT, y.mT, shown.expand(len(sigma), -1, -1), sigma)
        left = residual_of(y.mT, before.mT, sigma)[..., None]
        with torch.no_grad():
            state: AttentionState = shipped().observe(inputs.float(), left.float())
        return state

    def _shown(self, features: Features, x: Tensor) -> Float[Tensor, "n c"]:
        """The columns that matter most, in deviations; zeros where there are fewer."""
        z = ((x.double() - features.centre) / features.scale)[:, self.columns]
        return torch.nn.functional.pad(z, (0, SHOWN - z.shape[1]))

    def shape(self, features: Features, x: Float[Tensor, "n d"], answer: Answer) -> Shape:
        """The law of rows' targets around what the closed form answers."""
        mean, deviation = torch.from_numpy(answer.mean), torch.from_numpy(answer.scale)
        shown, sigma = self._shown(features, x), self.sigma[:, None]
        rows = self.state.count.double()[:, None]
        wide = shown.expand(len(sigma), -1, -1)
        inputs = target_inputs(mean.mT, deviation.mT, wide, sigma, rows)
        with torch.no_grad():
            law = shipped().query(self.state, inputs.float())
        normals, log_weight = law.components, law.log_weight  # type: ignore[attr-defined]
        means, stds = (t[..., 0].double().transpose(0, 1) for t in (normals.mean, normals.stddev))
        scale = deviation[..., None]
        parts = mean[..., None] + scale * means, scale * stds, log_weight.double().transpose(0, 1)
        return Shape(answer.mean, *(t.numpy() for t in parts))


def _folds(x: Float[Tensor, "n d"]) -> Int[Tensor, " n"]:
    return torch.from_numpy(fold_of(x.double().numpy(), FOLDS))

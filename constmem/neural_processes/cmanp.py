"""Constant Memory Attentive Neural Process: stacked CMABs, and a decoder that reads every level."""

from collections.abc import Callable, Mapping, Set
from functools import reduce
from typing import Any, ClassVar, Unpack

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.distributions import Distribution
from torch.utils.checkpoint import checkpoint

from constmem.core import checks
from constmem.core.block import CMABStack, through_levels
from constmem.core.fold import Chunk, fold, fused_fold, slices
from constmem.core.layers import MLP, keep_variance, on_gpu
from constmem.core.model import listed
from constmem.core.moments import Moments
from constmem.core.observation import Observation
from constmem.kernels import Graphs
from constmem.neural_processes.heads import Corrected, LevelMixture, LowRank, Mixture
from constmem.neural_processes.joint import JointNormal, PointMixture
from constmem.neural_processes.points import Scales
from constmem.neural_processes.regression import Posterior, Regression
from constmem.neural_processes.states import Product
from constmem.neural_processes.transformers import LevelProcess, LevelSettings


class CMANP(LevelProcess[Any, Any]):
    """A neural process in constant memory: conditioning, updating, and (training's) gradients too.

    The defaults are the paper's sizes.

    Args:
        num_slots: learned queries a block looks at the data with; they size the state.
        num_latents: vectors the blocks hand to each other.
        moments: how many features' products it remembers beside the slots; none as published. With them it
            predicts by `experts` Bayesian linear regressions, which the slots correct: a mixture of normals
            instead of one, from a `Product` of states. For smooth functions of a few inputs.
        experts: how many regressions.
        levels: of pixels from black to white, -0.5 to 0.5. With them it predicts mixtures of `components`
            logistics on these values instead of normals, and can be sure of black: 256 for images of bytes.
        components: how many logistics.
        rank: how many random numbers the targets of a task have in common, for joint predictions: a
            `JointNormal`, trained by the likelihood of all targets together. None as published.
        normals: how many normals a prediction is a mixture of, at every target by itself; one as published.
        settings: those of `LevelProcess`; `depth` is the number of blocks, and of decoder layers.

    Example:
        >>> model = CMANP(dim_x=1, dim_y=1, dim=16, depth=2, num_slots=8, num_latents=8).eval()
        >>> x, y = torch.rand(1, 50, 1), torch.rand(1, 50, 1)
        >>> with torch.no_grad():
        ...     streamed = model.update(model.condition(x[:, :30], y[:, :30]), x[:, 30:], y[:, 30:])
        ...     at_once = model.condition(x, y)
        ...     same = torch.allclose(
        ...         model.query(streamed, x).mean, model.query(at_once, x).mean, atol=1e-5)
        >>> same, streamed.nbytes == at_once.nbytes, streamed.count.item()
        (True, True, 50)
    """

    name: ClassVar[str] = "cmanp"
    decoding: ClassVar[Set[str]] = {"embed_target", "cross", "feed", "head", "recall"}
    newer: ClassVar[Mapping[str, Any]] = {
        "moments": 0,
        "experts": 48,
        "levels": 0,
        "components": 10,
        "rank": 0,
        "normals": 0,
    }

    def __init__(
        self,
        *,
        num_slots: int = 128,
        num_latents: int = 128,
        moments: int = 0,
        experts: int = 48,
        levels: int = 0,
        components: int = 10,
        rank: int = 0,
        normals: int = 0,
        **settings: Unpack[LevelSettings],
    ) -> None:
        super().__init__(**settings)
        checks.positive("num_latents", num_latents)
        self.latents = nn.Parameter(torch.randn(num_latents, self.config["dim"]))
        sizes = self._set("depth", "dim", "num_heads", "hidden", "residual")
        self.stack = CMABStack(num_slots=num_slots, **sizes)
        self._add_decoder()
        self.regression: Regression | None = None
        if moments:
            dim = self.config["dim"]
            self.regression = Regression(dim_x=self.dim_x, features=moments, experts=experts)
            self.recall = keep_variance(nn.Linear(experts * (self.dim_y + 2), dim))
            self.weigh = nn.Linear(dim, experts)
            for part in (self.weigh.weight, self.weigh.bias):
                nn.init.zeros_(part)
            self.head = Corrected(**self._set("dim", "hidden", "std"), dim_y=self.dim_y)
            self.state_type = Product
        self.levels, self.rank, self.normals = levels, rank, normals
        if sum(map(bool, (moments, levels, rank, normals))) > 1:
            raise ValueError(
                "moments, levels, rank and normals are kinds of predictions: set one of them, the others 0"
            )
        sizes = self._set("dim", "hidden") | {"dim_y": self.dim_y}
        if levels:
            if levels < 2:
                raise ValueError(
                    f"levels must be 2 or more (256 for images of bytes), or 0 for none, not {levels}"
                )
            checks.positive("components", components)
            self.head = Mixture(**sizes, components=components, levels=levels)
        if rank:
            checks.positive("rank", rank)
            self.head = LowRank(**sizes, **self._set("std"), rank=rank)
        if normals:
            checks.positive("normals", normals)
            self.head = Mixture(**sizes, components=normals, depth=3)
        self._graphs = Graphs()

    def set_scales(self, scales: Scales | None) -> None:
        if scales is not None and self.levels:
            raise ValueError(
                f"this model predicts {self.levels} levels from -0.5 to 0.5, as of pixels, which have no "
                "other units: for data of other units use a model without levels"
            )
        super().set_scales(scales)

    def distribution(self, mean: Tensor, std: Tensor, *more: Tensor) -> Distribution:
        if self.levels:
            return LevelMixture(mean, std, *more, levels=self.levels)
        if self.normals:
            return PointMixture(mean, std, *more)
        return JointNormal(mean, std, *more) if self.rank else super().distribution(mean, std, *more)

    def _loss(self, context: Chunk, targets: Chunk, noise: Tensor) -> Tensor:
        if not self.rank:
            return super()._loss(context, targets, noise)
        x, y, mask = targets
        memory = self.read(self._condition(slices(*context, 4096)))
        together = JointNormal(*self._decoded(memory, x, 4096)).joint_log_prob(y, mask).sum()
        real = max(y.shape[:2].numel(), 1) if mask is None else mask.sum().clamp_min(1)
        return -together / real

    def empty(self, batch: int = 1) -> Any:
        slots = self.stack.empty(batch)
        if self.regression is None:
            return slots
        features = 2 * len(self.regression.frequencies)
        return Product(slots, Moments.empty(features, self.dim_y, batch=(batch,), device=self.device))

    def _observe(self, x: Tensor, y: Tensor, mask: Tensor | None, log_weight: Tensor | None) -> Any:
        points = torch.cat([x, y], -1).to(self.dtype)
        slots = self.stack.observation.observe(points, mask, log_weight, embed=self.embed)
        if self.regression is None:
            return slots
        return Product(slots, self.regression.observe(x, y, mask, log_weight))

    def _extended(self, state: Any, x: Tensor, y: Tensor, mask: Tensor | None, chunk: int | None) -> Any:
        if x.shape[1] == 1 and mask is None and not self._learns():
            own_x, own_y, _ = self._scaled((x, y, None))
            points = torch.cat([own_x, own_y], -1)
            points = points if points.dtype == (own_dtype := self.dtype) else points.to(own_dtype)
            slots = state if self.regression is None else state.slots
            own: Any = self._modules  # past the look-ups of modules: small updates feel those
            found = own["stack"]._modules["observation"].extended(slots, points, embed=own["embed"])
            if found is not None:
                if self.regression is None:
                    return found
                return Product(found, state.moments.merge(self.regression.observe(own_x, own_y)))
        return super()._extended(state, x, y, mask, chunk)

    def _chunk(self) -> int:
        return self.stack.observation.chunk()

    def _fold(self, chunks: list[Chunk]) -> Any:
        observation = self.stack.observation
        slots = fused_fold(observation, self.embed, chunks)
        if slots is None:
            slots = fold(_Projection(self.embed, observation), observation.prepared().queries, chunks)
        if self.regression is None:
            return slots
        observe = self.regression.observe  # each chunk's features are computed again for the gradient
        parts = [checkpoint(observe, *chunk, use_reentrant=False) for chunk in chunks]
        return Product(slots, reduce(Moments.merge, parts))

    def observing_parameters(self) -> list[Tensor]:
        own: Any = self._modules
        features = [] if self.regression is None else [self.regression.frequencies]
        return [*listed(own["embed"], own["stack"]._modules["observation"]), *features]

    @property
    def layout(self) -> tuple[int, ...]:
        if self.regression is None:
            return self.stack.layout
        return *self.stack.layout, 2 * len(self.regression.frequencies), self.dim_y

    def read(self, state: Any) -> Any:
        """The latents after every block; with moments also the experts' posterior."""
        if self.regression is None:
            return self._run(self._read, state.value)
        latents = self._run(self._read, state.slots.value)
        return self._weighed(latents, self.regression.read(state.moments))

    def _weighed(self, latents: Float[Tensor, "b depth l d"], posterior: Posterior) -> tuple[Tensor, ...]:
        """The latents, and the experts' posterior, whose evidence they correct."""
        corrected = posterior.evidence + self.weigh(latents[:, -1].mean(1)).double()
        return latents, *posterior._replace(evidence=corrected.log_softmax(-1))

    def _read(self, value: Float[Tensor, "b depth h s c"]) -> Float[Tensor, "b depth l d"]:
        return torch.stack(self.stack.read_value(value, self.latents.expand(value.shape[0], -1, -1)), 1)

    def decode(self, memory: Any, xt: Float[Tensor, "b m x"]) -> tuple[Tensor, ...]:
        if self.regression is None:
            return self._run(self._decode, memory, xt)  # type: ignore[no-any-return]
        return self._run(self._decode_experts, *memory, xt)  # type: ignore[no-any-return]

    def _run(self, work: Callable[..., Any], *given: Tensor) -> Any:
        """Work of many small launches, put together on a GPU."""
        return self._graphs.run(self, work, *given) if on_gpu(given[0]) else work(*given)

    def _decode(self, memory: Tensor, xt: Tensor) -> tuple[Tensor, ...]:
        layers = self.cross, self.feed
        tokens = through_levels(xt.to(self.dtype), memory.unbind(1), *layers, embed=self.embed_target)
        return self.head(tokens)  # type: ignore[no-any-return]

    def _decode_experts(self, latents: Tensor, *posterior_and_xt: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        assert self.regression is not None
        *parts, xt = posterior_and_xt
        posterior = Posterior(*parts)
        mean, std = self.regression(posterior, xt)
        log_weight = posterior.evidence[:, None].expand(-1, xt.shape[1], -1)
        known = torch.cat([mean.flatten(2), std.log().flatten(2), log_weight.exp()], -1)
        tokens = self.embed_target(xt.to(self.dtype)) + self.recall(known.to(self.dtype))
        tokens = through_levels(tokens, latents.unbind(1), self.cross, self.feed)
        found = *self.head(tokens, mean, std), log_weight
        wide = torch.promote_types(self.dtype, torch.float32)
        return found[0].to(wide), found[1].to(wide), found[2].to(wide)


class _Projection(nn.Module):
    """From points to the keys and values of all blocks."""

    def __init__(self, embed: MLP, observation: Observation) -> None:
        super().__init__()
        self.embed, self.observation = embed, observation

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        points = torch.cat([x, y], -1).to(self.observation.slots.dtype)
        k, v = self.observation(self.embed(points))
        return k, v

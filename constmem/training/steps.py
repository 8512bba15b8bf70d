"""How steps are taken: by Muon, Adam for all but matrices; and captured in a graph on a GPU."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import inf, sqrt
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.optim.adam import adam

from constmem.data import Events
from constmem.point_processes.chunks import seeded

QUINTIC = 3.4445, -4.7750, 2.0315  # s -> a s + b s^3 + c s^5 draws singular values s in (0, 1] towards 1
LEAST = 16  # sides of a matrix that counts as one: maps from or to a few channels are left to Adam
SIZE = 0.2  # root mean square of a matrix's step at rate 1, about what Adam's is


class Muon(torch.optim.Optimizer):
    """Orthogonalised momentum (Nesterov's) for the matrices of a model, Adam for its other parameters.

    Matrices are the weights of linear layers, and those that a module's attribute `matrices` names; one with
    more than two axes is a stack of them. All of one shape are made orthogonal together.

    Args:
        model: whose parameters are trained.
        lr: the rate, for all of them; a tensor where steps are captured in a graph.
        momentum: of the matrices.
        weight_decay: share of a parameter taken away at every step, times the rate.

    Example:
        >>> layer = nn.Linear(32, 32, bias=False)
        >>> optimiser = Muon(layer, lr=0.1)
        >>> layer.weight.grad = torch.outer(torch.ones(32), torch.ones(32)) + 0.1 * torch.eye(32)
        >>> before = layer.weight.detach().clone()
        >>> optimiser.step()
        >>> step = (before - layer.weight.detach()) / (0.1 * 0.2 * 32**0.5)
        >>> bool((torch.linalg.svdvals(step) - 1).abs().max() < 0.35)
        True
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        lr: float | Tensor,
        momentum: float = 0.95,
        weight_decay: float = 0.0,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(
                f"Muon takes the model, not its parameters: an nn.Module, not {type(model).__name__}"
            )
        if isinstance(lr, Tensor) and lr.numel() != 1:
            raise ValueError(f"lr is a tensor of {lr.numel()} numbers, but must be of one")
        for name, number in (("lr", lr), ("weight_decay", weight_decay)):
            if not 0 <= float(number) < inf:
                raise ValueError(f"{name} is {float(number)}, but must be 0 or more, and finite")
        if not 0 <= momentum < 1:
            raise ValueError(f"momentum is {momentum}, but must be 0 or more, and below 1")
        matrices = _matrices(model)
        chosen = {id(p) for p in matrices}
        others = [p for p in model.parameters() if p.requires_grad and id(p) not in chosen]
        groups = [{"params": matrices, "matrices": True}, {"params": others, "matrices": False}]
        defaults = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay}
        super().__init__([group for group in groups if group["params"]], defaults)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One step of every parameter that has a gradient."""
        if closure is not None:
            raise ValueError("Muon takes no closure: compute the gradients before the step")
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            if not parameters:
                continue
            if group["weight_decay"]:
                torch._foreach_mul_(parameters, 1 - group["lr"] * group["weight_decay"])
            (self._matrix_step if group["matrices"] else self._adam_step)(group, parameters)

    def _matrix_step(self, group: dict[str, Any], parameters: list[Tensor]) -> None:
        grads = _grads(parameters)
        moments = self._states(parameters, "momentum")
        torch._foreach_lerp_(moments, grads, 1 - group["momentum"])
        ahead = torch._foreach_lerp(grads, moments, group["momentum"])
        steps = [torch.empty(0)] * len(parameters)
        for shape in dict.fromkeys(p.shape[-2:] for p in parameters):
            same = [i for i, p in enumerate(parameters) if p.shape[-2:] == shape]
            stacked = torch.cat([ahead[i].reshape(-1, *shape) for i in same])
            made = orthogonal(stacked) * (-SIZE * sqrt(max(shape)))
            parts = made.split([parameters[i].numel() // shape.numel() for i in same])
            for i, part in zip(same, parts, strict=True):
                steps[i] = part.view(parameters[i].shape)
        torch._foreach_mul_(steps, group["lr"])
        torch._foreach_add_(parameters, steps)

    def _adam_step(self, group: dict[str, Any], parameters: list[Tensor]) -> None:
        on_gpu = parameters[0].device.type == "cuda"
        for p in parameters:
            if "step" not in self.state[p]:
                self.state[p]["step"] = torch.zeros((), device=p.device if p.is_cuda else "cpu")
        means, squares = (self._states(parameters, name) for name in ("exp_avg", "exp_avg_sq"))
        adam(
            parameters, _grads(parameters), means, squares, [], [self.state[p]["step"] for p in parameters],
            fused=on_gpu, capturable=on_gpu, amsgrad=False, beta1=0.9, beta2=0.95, lr=group["lr"],
            weight_decay=0.0, eps=1e-8, maximize=False,
        )  # fmt: skip

    def _states(self, parameters: Sequence[Tensor], name: str) -> list[Tensor]:
        for p in parameters:
            if name not in self.state[p]:  # else a graph would fill unused zeros at every step
                self.state[p][name] = torch.zeros_like(p)
        return [self.state[p][name] for p in parameters]


def orthogonal(matrices: Float[Tensor, "n o i"]) -> Float[Tensor, "n o i"]:
    """Each matrix with its singular values drawn near one (0.7 to 1.2), by a polynomial's iteration."""
    a, b, c = QUINTIC
    x = matrices.to(torch.bfloat16) if matrices.is_cuda else matrices
    tall = x.shape[-2] > x.shape[-1]
    if tall:
        x = x.mT
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        square = x @ x.mT
        x = a * x + (b * square + c * square @ square) @ x
    out: Tensor = (x.mT if tall else x).to(matrices.dtype)
    return out


def _grads(parameters: Sequence[Tensor]) -> list[Tensor]:
    return [p.grad for p in parameters if p.grad is not None]


def _matrices(model: nn.Module) -> list[nn.Parameter]:
    found = []
    for module in model.modules():
        names = ("weight",) if isinstance(module, nn.Linear) else getattr(module, "matrices", ())
        parameters = [module._parameters.get(name) for name in names]  # none: it is computed from others
        found += [p for p in parameters if p is not None and p.requires_grad and min(p.shape[-2:]) >= LEAST]
    return list(dict.fromkeys(found))


def clipped(parameters: Sequence[Tensor], most: float) -> Tensor:
    """Shorten the gradients to a norm of `most` (0: not at all); zeros where one is not finite.

    Whether all were finite is returned. One task in millions can have a likelihood beyond all numbers: its
    batch is passed over, and the device need not be waited for.
    """
    grads = _grads(parameters)
    if not grads:
        return torch.tensor(True)
    norm = torch.nn.utils.get_total_norm(grads, foreach=True)
    sound = norm.isfinite()
    scale = (most / (norm + 1e-6)).clamp_max(1.0) if most > 0 else torch.ones_like(norm)
    flat = torch.where(sound, torch.cat([g.flatten() for g in grads]) * scale, 0.0)
    parts = flat.split([g.numel() for g in grads])
    torch._foreach_copy_(grads, [part.view_as(g) for part, g in zip(parts, grads, strict=True)])
    return sound


WARM = 3  # steps before a graph of the only shape there is
MET = 2  # the time at which a shape of events is met that its graph is captured


def captured(step: Callable[[], Tensor], generator: torch.Generator) -> Callable[[], Tensor]:
    """Capture a step that draws its own batches, always of one shape, once it is warm."""
    warm, graph, loss, side = 0, torch.cuda.CUDAGraph(), torch.empty(0), torch.cuda.Stream()

    def run() -> Tensor:
        nonlocal warm, loss
        warm += 1
        if warm <= WARM:
            return _aside(side, step)
        if warm == WARM + 1:
            graph.register_generator_state(generator)
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                loss = step()
        graph.replay()
        return loss

    return run


class ByShape:
    """Capture a step for every shape of event batches that is met more than once.

    Batches are drawn outside, and written over the one that a graph was captured with. What is dropped
    is drawn from PyTorch's own generator, seeded before each replay as it is before each step without
    a graph: both take the same steps. All graphs share their memory, since one step runs at a time.

    Args:
        step: from a batch and a generator (None: PyTorch's own) to the loss.
        seeds: draws the seed of a step from a generator; none where nothing is dropped.
        capturable: whether the step of a batch can be captured.
    """

    def __init__(
        self,
        step: Callable[[Events, torch.Generator | None], Tensor],
        seeds: Callable[[torch.Generator], list[int]],
        capturable: Callable[[Events], bool],
    ) -> None:
        self._step, self._seeds, self._capturable = step, seeds, capturable
        self._met: Counter[Any] = Counter()
        self._graphs: dict[Any, tuple[torch.cuda.CUDAGraph, Events, Tensor]] = {}
        self._pool: Any = torch.cuda.graph_pool_handle()
        self._side = torch.cuda.Stream()

    def __call__(self, batch: Events, generator: torch.Generator) -> Tensor:
        """Take one step."""
        shape = batch.times.shape
        self._met[shape] += 1
        if self._met[shape] < MET or not self._capturable(batch):
            return _aside(self._side, lambda: self._step(batch, generator))
        if shape not in self._graphs:
            self._graphs[shape] = self._captured(batch)
        graph, inputs, loss = self._graphs[shape]
        for name, here in _tensors(inputs).items():
            here.copy_(getattr(batch, name))
        seeds = self._seeds(generator)
        if seeds:
            with seeded(seeds[0], batch.device):
                graph.replay()
        else:
            graph.replay()
        return loss.clone()  # the next replay writes over it

    def _captured(self, batch: Events) -> tuple[torch.cuda.CUDAGraph, Events, Tensor]:
        own: dict[str, Any] = {name: part.clone() for name, part in _tensors(batch).items()}
        inputs, graph = replace(batch, **own), torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            loss = self._step(inputs, None)
        return graph, inputs, loss


def _tensors(events: Events) -> dict[str, Tensor]:
    return {name: part for name, part in vars(events).items() if isinstance(part, Tensor)}


def _aside(side: torch.cuda.Stream, step: Callable[[], Tensor]) -> Tensor:
    """Take a step on another stream: gradients remember theirs, and a captured one must not wait for it."""
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        result = step()
    torch.cuda.current_stream().wait_stream(side)
    return result

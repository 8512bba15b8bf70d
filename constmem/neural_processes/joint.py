"""Joint predictions of any neural process, by the chain rule: predict a few targets, observe them, go on.

    p(y_1 ... y_m | state) = prod_i p(y_i | state, y_1 ... y_(i-1))

A step is a query and an update, which a model of constant memory does in constant time and memory, however
many targets came before. The factors are the model's own, so that another order of the targets gives another
joint distribution: near-by for a well trained model, never the same.
"""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.distributions import Distribution

from constmem.core import checks
from constmem.neural_processes.base import NeuralProcess
from constmem.neural_processes.heads import SampleMixture
from constmem.neural_processes.levels import LevelMixture
from constmem.neural_processes.low_rank import JointNormal
from constmem.neural_processes.points import S


@torch.no_grad()
def sample_jointly(
    model: NeuralProcess[S, Any],
    state: S,
    xt: Float[Tensor, "b m x"],
    *,
    samples: int = 1,
    block: int = 1,
    generator: torch.Generator | None = None,
) -> Float[Tensor, "k b m y"]:
    """Coherent functions: outputs at all targets that belong together, `samples` times for each task.

    Args:
        state: of what is known; it stays as it is.
        xt: the targets, drawn in this order.
        block: how many targets are drawn at a time, each block given all before it. Within a block they are
            independent, or share one sample of the model's latent or low rank where it has one.
        generator: PyTorch's own if None.

    Example:
        >>> from constmem.neural_processes import CNP
        >>> model, x = CNP(dim_x=1, dim_y=1, dim=16).eval(), torch.linspace(-1, 1, 5)[None, :, None]
        >>> y = sample_jointly(model, model.empty(), x, samples=3, generator=torch.Generator().manual_seed(0))
        >>> y.shape, joint_log_prob(model, model.empty(3), x.expand(3, -1, -1), y[:, 0]).shape
        (torch.Size([3, 1, 5, 1]), torch.Size([3]))
    """
    checks.positive("samples", samples)
    checks.positive("block", block)
    every = torch.arange(state.batch, device=state.device).repeat(samples)
    state, xt = state.select(every), xt.repeat(samples, 1, 1)
    drawn = []
    for x in xt.split(block, 1):
        y = _draw(model.query(state, x), generator)
        drawn.append(y)
        state = model.update(state, x, y) if len(drawn) * block < xt.shape[1] else state
    out: Tensor = torch.cat(drawn, 1).unflatten(0, (samples, -1))
    return out


def joint_log_prob(
    model: NeuralProcess[S, Any],
    state: S,
    xt: Float[Tensor, "b m x"],
    yt: Float[Tensor, "b m y"],
    *,
    block: int = 1,
) -> Float[Tensor, " b"]:
    """Log-probability of all targets together, for each task: of what `sample_jointly` draws.

    Args:
        state: of what is known; it stays as it is.
        xt, yt: the targets, in the order in which they are predicted and observed.
        block: how many are predicted at a time; with all at once nothing is observed.
    """
    checks.positive("block", block)
    checks.points("yt", yt, model.dim_y, like=xt, device=model.device)
    total = torch.zeros(xt.shape[0], dtype=torch.float64, device=xt.device)
    for i, (x, y) in enumerate(zip(xt.split(block, 1), yt.split(block, 1), strict=True), 1):
        total = total + _log_prob(model.query(state, x), y)
        state = model.update(state, x, y) if i * block < xt.shape[1] else state
    return total


def _draw(predicted: Distribution, generator: torch.Generator | None) -> Float[Tensor, "b m y"]:
    if isinstance(predicted, SampleMixture | LevelMixture | JointNormal):
        return predicted.sample(generator=generator)
    mean, std = predicted.mean, predicted.stddev
    return mean + std * torch.randn(mean.shape, generator=generator, dtype=mean.dtype, device=mean.device)


def _log_prob(predicted: Distribution, y: Float[Tensor, "b m y"]) -> Float[Tensor, " b"]:
    if isinstance(predicted, SampleMixture | JointNormal):  # one component, or draw, for the whole block
        return predicted.joint_log_prob(y)
    out: Tensor = predicted.log_prob(y).sum((1, 2))
    return out

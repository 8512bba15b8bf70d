"""A batch of regression tasks: context points to condition on, target points to predict."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from constmem.core import checks


@dataclass(frozen=True, eq=False)
class Task:
    """A batch of tasks of the same shape; what the masks leave out (True = real) may hold anything.

    Args:
        xc, yc: context inputs and outputs.
        xt, yt: target inputs and outputs.
        mask_c, mask_t: which context and target points are real; None: all of them.
        exact: log-likelihood of each target (0 where masked out) under the process that it came from,
            where that is known: on the average no model has a higher one.

    Example:
        Masked targets count neither above nor below the line.

        >>> x, y = torch.zeros(1, 3, 1), torch.zeros(1, 3, 1)
        >>> task = Task(x, y, x, y, mask_t=torch.tensor([[True, True, False]]))
        >>> task.mean_log_likelihood(torch.tensor([[1.0, 3.0, 100.0]])).item()
        2.0
    """

    xc: Float[Tensor, "b n x"]
    yc: Float[Tensor, "b n y"]
    xt: Float[Tensor, "b m x"]
    yt: Float[Tensor, "b m y"]
    mask_c: Bool[Tensor, "b n"] | None = None
    mask_t: Bool[Tensor, "b m"] | None = None
    exact: Float[Tensor, "b m"] | None = None

    def __post_init__(self) -> None:
        device = self.xc.device
        pairs = (("c", self.xc, self.yc, self.mask_c), ("t", self.xt, self.yt, self.mask_t))
        for side, x, y, mask in pairs:
            checks.points(f"x{side}", x, self.xc.shape[-1], device=device)
            checks.points(f"y{side}", y, self.yc.shape[-1], like=x, device=device)
            if mask is not None:
                checks.mask(mask, x)
        if self.xc.shape[0] != self.xt.shape[0]:
            raise ValueError(
                f"the context is a batch of {self.xc.shape[0]}, the targets one of {self.xt.shape[0]}: "
                "they must be the same"
            )

    @staticmethod
    def stack(tasks: Sequence["Task"]) -> "Task":
        """Batches of any sizes as one batch: padded to the largest of them, which masks tell."""
        if len(tasks) == 1:
            return tasks[0]
        xc, yc, mask_c = _padded([(task.xc, task.yc, task.mask_c) for task in tasks])
        xt, yt, mask_t = _padded([(task.xt, task.yt, task.mask_t) for task in tasks])
        known = [task.exact for task in tasks if task.exact is not None]
        most = xt.shape[1]
        exact = (
            torch.cat([F.pad(t, (0, most - t.shape[1])) for t in known]) if len(known) == len(tasks) else None
        )
        return Task(xc, yc, xt, yt, mask_c, mask_t, exact)

    @property
    def batch(self) -> int:
        """How many tasks there are."""
        return self.xc.shape[0]

    @property
    def num_context(self) -> Int[Tensor, " b"]:
        """How many real context points each task has."""
        return _count(self.xc, self.mask_c)

    @property
    def num_targets(self) -> Int[Tensor, " b"]:
        """How many real target points each task has: what a sum of log-likelihoods is divided by."""
        return _count(self.xt, self.mask_t)

    def point_log_likelihood(self, log_prob: Float[Tensor, "b m *y"]) -> Float[Tensor, "b m"]:
        """The log-likelihood of each target: summed over channels where there are any, 0 if masked out."""
        point = log_prob.sum(-1) if log_prob.ndim == 3 else log_prob
        return point if self.mask_t is None else torch.where(self.mask_t, point, 0.0)

    def mean_log_likelihood(self, log_prob: Float[Tensor, "b m *y"]) -> Float[Tensor, ""]:
        """The mean over all real targets of the batch; its negative is the loss."""
        return self.point_log_likelihood(log_prob).sum() / self.num_targets.sum()

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> "Task":
        """The same tasks on another device."""
        moved: dict[str, Any] = {}
        for field in fields(self):
            part = getattr(self, field.name)
            moved[field.name] = None if part is None else part.to(device, non_blocking=non_blocking)
        return Task(**moved)


def _padded(sides: list[tuple[Tensor, Tensor, Tensor | None]]) -> tuple[Tensor, Tensor, Tensor | None]:
    """Points of several batches as one batch, with zeros behind the fewer ones, and a mask if need be."""
    xs, ys, masks = zip(*sides, strict=True)
    rest = [max(x.shape[1] for x in xs) - x.shape[1] for x in xs]
    x, y = (torch.cat([F.pad(p, (0, 0, 0, r)) for p, r in zip(ps, rest, strict=True)]) for ps in (xs, ys))
    if not any(rest) and all(mask is None for mask in masks):
        return x, y, None
    real = (
        torch.ones(x.shape[:2], dtype=torch.bool, device=x.device) if mask is None else mask
        for x, mask in zip(xs, masks, strict=True)
    )
    return x, y, torch.cat([F.pad(mask, (0, r)) for mask, r in zip(real, rest, strict=True)])


def _count(points: Tensor, mask: Tensor | None) -> Tensor:
    if mask is not None:
        return mask.sum(-1)
    return torch.full(points.shape[:1], points.shape[1], device=points.device)

"""What is predicted of the next event: when, of what kind, and of what kind if it is then."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from constmem.point_processes.heads import QUANTILES, LogNormalMixture

AT_ONCE = 1 << 17  # components, or marks, of a batch up to which all gaps are handled at once


@dataclass(frozen=True, eq=False)
class Prediction:
    """The next event after each of some histories.

    Attributes:
        gap: the time until it, in the data's unit; a batch (b,) of streams or (b, t) of prefixes.
        last_time: when the event before it was (or the watch began): what the gap is added to.
        mark_at: log-probabilities of its mark from a gap (that does not matter to all models).
    """

    gap: LogNormalMixture
    last_time: Float64[Tensor, "*b"]
    mark_at: Callable[[Tensor], Tensor]
    given_gap: bool

    def mark_logits(self, gap: Float[Tensor, "*b"] | None = None) -> Float[Tensor, "*b marks"]:
        """Log-probabilities of the marks of an event after `gap`, or of the next one, whenever it comes.

        Where marks depend on the gap, the latter is the mean over 16 equally likely gaps.
        """
        if gap is not None or not self.given_gap:
            return self.mark_at(self.last_time if gap is None else gap)
        levels = (torch.arange(QUANTILES, device=self.last_time.device) + 0.5) / QUANTILES
        levels = levels.reshape(-1, *[1] * self.last_time.ndim)
        few = len(levels) if self.gap.loc.numel() <= AT_ONCE else 1
        gaps = torch.cat([self.gap.icdf(part) for part in levels.split(few)])
        total = self.mark_at(gaps[0])
        if total.numel() <= AT_ONCE:
            return self.mark_at(gaps).logsumexp(0).log_softmax(-1)
        for gap in gaps[1:]:
            total = torch.logaddexp(total, self.mark_at(gap))
        return total.log_softmax(-1)

    @property
    def mean(self) -> Float[Tensor, "*b"]:
        """The mean gap: what minimises the squared error."""
        return self.gap.mean

    @property
    def median(self) -> Float[Tensor, "*b"]:
        """The median gap: what minimises the absolute error."""
        return self.gap.median

    def quantiles(self, levels: Float[Tensor, " q"] | list[float]) -> Float[Tensor, "*b q"]:
        """The gaps that are not exceeded with the given probabilities."""
        levels = torch.as_tensor(levels, dtype=self.gap.loc.dtype, device=self.last_time.device)
        return self.gap.icdf(levels.reshape(-1, *[1] * self.last_time.ndim)).movedim(0, -1)

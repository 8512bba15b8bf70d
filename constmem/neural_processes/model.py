"""What any neural process is before it sees data: channels in and out, and checks of both."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from constmem import checks
from constmem.model import Model


class PointModel(Model):
    """A model of points with `dim_x` channels in and `dim_y` out."""

    def __init__(self, *, dim_x: int, dim_y: int, config: dict[str, Any]) -> None:
        super().__init__(config=config)
        checks.positive("dim_x", dim_x)
        checks.positive("dim_y", dim_y)
        self.dim_x, self.dim_y = dim_x, dim_y

    @classmethod
    def family(cls) -> Mapping[str, type[Model]]:
        from constmem.neural_processes import MODELS  # which is made of this class

        return MODELS

    def _check(
        self, x: Tensor, y: Tensor, mask: Tensor | None, *, values: bool = True, chunk: int = 4096
    ) -> None:
        device = self.device
        checks.points("x", x, self.dim_x, device=device)
        checks.points("y", y, self.dim_y, like=x, device=device)
        if mask is not None:
            checks.mask(mask, x)
        if values:
            for i in range(0, x.shape[1], chunk):
                here = None if mask is None else mask[:, i : i + chunk]
                checks.finite("x", x[:, i : i + chunk], here, first=i)
                checks.finite("y", y[:, i : i + chunk], here, first=i)

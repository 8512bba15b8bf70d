"""How PyTorch's settings have products computed."""

import torch


def products(where: str) -> tuple[object, ...]:
    """How PyTorch's settings have products computed on that kind of device."""
    autocast = torch.is_autocast_enabled(where), torch.get_autocast_dtype(where)
    return *autocast, torch.get_float32_matmul_precision()

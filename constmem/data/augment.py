"""Training images as they might have been: mirrored, or turned into any symmetry of the square."""

import torch
from jaxtyping import UInt8
from torch import Tensor


def augmented(
    pixels: UInt8[Tensor, "b h w c"], how: str, *, generator: torch.Generator
) -> UInt8[Tensor, "b h w c"]:
    """Half of the images changed at random, half of them as they are.

    Args:
        pixels: images, square where they are to be turned.
        how: "none", "mirror" (left and right swapped) or "turn" (one of the eight symmetries each).
        generator: source of all randomness, on the device of the images.
    """
    if how == "none":
        return pixels
    size = 4, len(pixels), 1, 1, 1
    chance = torch.rand(size, generator=generator, device=generator.device).to(pixels.device) < 0.5
    if how == "mirror":
        return torch.where(chance[0], pixels.flip(2), pixels)
    if how != "turn" or pixels.shape[1] != pixels.shape[2]:
        raise ValueError(f"cannot augment images of {tuple(pixels.shape[1:3])} pixels by {how!r}")
    turned = torch.where(chance[1], pixels.flip(1), pixels)
    turned = torch.where(chance[2], turned.flip(2), turned)
    turned = torch.where(chance[3], turned.transpose(1, 2), turned)
    return torch.where(chance[0], turned, pixels)

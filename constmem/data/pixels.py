"""From images to tasks: random pixels as context and targets, chosen on the device, all images at once."""

from collections.abc import Iterator

import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor

from constmem.core import checks
from constmem.data.images import Images
from constmem.data.sizes import LEAST, draw_sizes, draw_skewed, draw_split, first, spread_sizes
from constmem.data.task import Task


def image_tasks(
    pixels: UInt8[Tensor, "b h w c"],
    *,
    generator: torch.Generator,
    max_points: int = 200,
    sizes: tuple[int, int] | None = None,
    padded: bool = False,
) -> Task:
    """Tasks by the reference protocol: one context and one target size for the whole batch.

    Nc ~ U[3, max-3), Nt ~ U[3, max-Nc); the pixels of an image are distinct.

    Args:
        pixels: images, on the device where the tasks are wanted.
        generator: source of all randomness, on the same device; one on the CPU gives the same
            tasks on every device, but chooses the pixels there.
        max_points: a task has fewer points than this: 200 for 32x32, 800 for 64x64, 1600 for 128x128.
        sizes: (Nc, Nt) where they are known already; drawn by `draw_sizes` with a generator on the
            CPU they spare waiting for the device.
        padded: tell the sizes by masks over max_points - 1 points instead: shapes never change and
            nothing waits for the device, so that steps can be compiled or captured in a graph.
    """
    _check(pixels)
    if sizes is None:
        _fits("max_points", max_points, pixels)
        if padded:
            split = draw_split(pixels.shape[0], generator=generator, max_points=max_points)
            mask_c, mask_t = (mask.to(pixels.device) for mask in split)
            x, y = _points(pixels, _choose(pixels, max_points - 1, generator))
            return Task(x, y, x, y, mask_c, mask_t)
        sizes = draw_sizes(generator=generator, max_points=max_points)
    n, m = sizes
    _fits("Nc + Nt", n + m, pixels)
    x, y = _points(pixels, _choose(pixels, n + m, generator))
    return Task(x[:, :n], y[:, :n], x[:, n:], y[:, n:])


def static_image_tasks(
    pixels: UInt8[Tensor, "b h w c"],
    *,
    generator: torch.Generator,
    num_context_max: int = 197,
    num_targets: int = 100,
    num_context_min: int = LEAST,
    skew: float = 1.0,
) -> Task:
    """Tasks of one fixed shape, a context size drawn for each image and told by a mask.

    Nc ~ U{min..max} where skew is 1; every target is real and none of them is in the context.
    Nothing waits for the device, so that steps on these tasks can be compiled or captured in a graph.

    Args:
        pixels: images, on the device where the tasks are wanted.
        generator: source of all randomness, on the same device.
        num_context_max: slots of the context.
        num_targets: targets of each image.
        num_context_min: the smallest context; 0 teaches the prior as well.
        skew: how strongly small contexts are preferred; at 2 context sizes are about as frequent
            as the targets that the reference protocol scores at them.
    """
    _check(pixels)
    if not 0 <= num_context_min <= num_context_max:
        raise ValueError(
            f"num_context_min is {num_context_min} and num_context_max {num_context_max}: "
            "0 <= min <= max is needed"
        )
    checks.positive("num_targets", num_targets)
    _fits("num_context_max + num_targets", num_context_max + num_targets, pixels)
    low, high = num_context_min, num_context_max
    counts = draw_skewed(pixels.shape[0], low=low, high=high, skew=skew, generator=generator)
    x, y = _points(pixels, _choose(pixels, num_context_max + num_targets, generator))
    n = num_context_max
    mask = first(counts.to(pixels.device), n)
    return Task(x[:, :n], y[:, :n], x[:, n:], y[:, n:], mask)


def evaluation_tasks(images: Images, *, seed: int, batch: int = 20, max_points: int = 200) -> Iterator[Task]:
    """A fixed evaluation set: every image once, by the reference protocol but for one thing.

    The sizes of the batches are spread evenly over those of the protocol (`spread_sizes`), and the
    images shuffled, so that the mean over a few batches does not hang on which sizes came up. All is
    drawn on the CPU: the same seed gives the same tasks on any device; they are made where the images are.
    """
    checks.positive("batch", batch)
    _fits("max_points", max_points, images.pixels)
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(images), generator=generator).to(images.pixels.device).split(batch)
    sizes = spread_sizes(len(order), generator=generator, max_points=max_points)
    return (
        image_tasks(images.pixels[index], generator=generator, sizes=size)
        for index, size in zip(order, sizes, strict=True)
    )


def image_points(
    pixels: UInt8[Tensor, "b h w c"],
) -> tuple[Float[Tensor, "b n 2"], Float[Tensor, "b n c"]]:
    """Every pixel of every image as a point, row by row."""
    _check(pixels)
    b, h, w, _ = pixels.shape
    return _points(pixels, torch.arange(h * w, device=pixels.device).expand(b, -1))


def _choose(pixels: Tensor, count: int, generator: torch.Generator) -> Int[Tensor, "b n"]:
    """Distinct pixels in random order: the places of the largest of independent random numbers.

    They must come sorted: an unsorted top-k may follow the order of pixels, which would part
    context from targets.
    """
    b, h, w, _ = pixels.shape
    keys = torch.rand(b, h * w, generator=generator, device=generator.device)
    return keys.topk(count, sorted=True).indices.to(pixels.device)


def _points(pixels: Tensor, chosen: Int[Tensor, "b n"]) -> tuple[Tensor, Tensor]:
    """x = (row, col) in [-1, 1] and y in [-0.5, 0.5] of the chosen pixels.

    Whole numbers are divided once, by a number on the device: every device rounds that alike.
    """
    b, h, w, c = pixels.shape
    rows, cols = chosen // w, chosen % w
    x = torch.stack(
        [_ratio(2 * rows - (h - 1), max(h - 1, 1)), _ratio(2 * cols - (w - 1), max(w - 1, 1))], -1
    )
    values = pixels.reshape(b, h * w, c).gather(1, chosen[..., None].expand(-1, -1, c))
    return x, _ratio(2 * values.int() - 255, 510)


def _ratio(numerator: Tensor, denominator: int) -> Tensor:
    return numerator.float() / torch.full((), float(denominator), device=numerator.device)


def _check(pixels: Tensor) -> None:
    if pixels.dtype != torch.uint8 or pixels.ndim != 4:
        raise ValueError(
            f"pixels are {pixels.dtype} of shape {tuple(pixels.shape)}, but uint8 of shape "
            "(batch, height, width, channels) is needed"
        )


def _fits(name: str, count: int, pixels: Tensor) -> None:
    h, w = pixels.shape[1:3]
    if count > h * w:
        raise ValueError(
            f"{name} is {count}, but an image of {h}x{w} has only {h * w} pixels: take fewer points, "
            "or load the images at a larger size"
        )

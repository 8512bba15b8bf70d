"""Grids of completed images: every cell shows what it says, colours have numbers."""

from typing import Any

import numpy as np
import pytest
import torch

from constmem.plots import Completion, completion_grid, model_grid

SIZES = (4, 9)


def made(channels: int, seed: int = 0) -> tuple[torch.Tensor, list[Completion]]:
    """Two images of 6x6 pixels and their completions at two context sizes."""
    generator = torch.Generator().manual_seed(seed)
    pixels = torch.randint(0, 256, (2, 6, 6, channels), generator=generator, dtype=torch.uint8)
    found = []
    for size in SIZES:
        context = torch.full(pixels.shape, float("nan"))
        context.view(2, 36, channels)[:, :size] = (pixels / 255).view(2, 36, channels)[:, :size]
        mean, std = (torch.rand(pixels.shape, generator=generator) for _ in range(2))
        found.append(Completion(size, context, mean, std / size))
    return pixels, found


def shown(axis: Any) -> np.ndarray:
    (image,) = axis.images
    return np.asarray(image.get_array())


def colours(axis: Any) -> np.ndarray:
    array = shown(axis)
    return array[..., :3] if array.ndim == 3 else array


@pytest.mark.parametrize("channels", [1, 3])
def test_a_grid_shows_context_mean_uncertainty_and_truth(drawn: list[Any], channels: int) -> None:
    pixels, found = made(channels)
    completion_grid(found, pixels, "a.png", title="")
    axes = np.array(drawn[0].axes).reshape(6, 3)
    for i in range(2):
        for j, completion in enumerate(found):
            known = shown(axes[3 * i, j])
            missing = np.isnan(known).sum() if channels == 1 else (known[..., 3] == 0).sum()
            assert missing == 36 - SIZES[j]
            np.testing.assert_allclose(colours(axes[3 * i + 1, j]), completion.mean[i].squeeze(-1))
        np.testing.assert_allclose(colours(axes[3 * i, 2]), (pixels[i] / 255).squeeze(-1), atol=1e-6)
    assert [axis.get_title() for axis in axes[0]] == ["4 pixels", "9 pixels", "truth"]


def test_models_are_side_by_side_on_the_same_images(drawn: list[Any]) -> None:
    pixels, first = made(1)
    _, second = made(1, seed=1)
    model_grid({"one": first, "two": second}, pixels, "a.png", title="")
    axes = np.array(drawn[0].axes).reshape(5, 7)
    for i in range(2):
        for j in range(len(SIZES)):
            for k, found in enumerate((first, second)):
                np.testing.assert_allclose(shown(axes[1 + 2 * k, 4 * i + j]), found[j].mean[i, ..., 0])
    assert axes[1, 0].get_ylabel() == "one\nmean"
    assert axes[3, 0].get_ylabel() == "two\nmean"


def test_the_colours_of_uncertainty_have_numbers(drawn: list[Any]) -> None:
    pixels, found = made(1)
    completion_grid(found, pixels, "a.png", title="")
    model_grid({"CMANP": found}, pixels, "b.png", title="")
    brightest = max(float(completion.std.max()) for completion in found)
    for figure, count in zip(drawn, (2, 1), strict=True):
        bars = [bar for axis in figure.axes for bar in axis.child_axes]
        assert [bar.get_ylabel() for bar in bars] == ["deviation"] * count
        labels = {text.get_text() for bar in bars for text in bar.get_yticklabels()}
        assert labels == {"0", f"{brightest:.2g}"}

"""Pixels of images as tasks, and images as they might have been."""

import pytest
import torch

from constmem import CMANP
from constmem.data import (
    Images,
    Task,
    augmented,
    evaluation_tasks,
    gp_tasks,
    image_points,
    image_tasks,
    static_gp_tasks,
    static_image_tasks,
)
from constmem.neural_processes import CNP
from tests.data.test_task import same, seeded

# Chance


@pytest.mark.parametrize(
    "make",
    [
        lambda g: gp_tasks(3, kernel="periodic", generator=g)[0],
        lambda g: static_gp_tasks(3, generator=g)[0],
        lambda g: image_tasks(coded(3, 16, 16), generator=g, max_points=50),
        lambda g: static_image_tasks(coded(3, 16, 16), generator=g, num_context_max=50, num_targets=9),
    ],
)
def test_the_generator_alone_decides_what_is_drawn(make):
    before = torch.get_rng_state()
    assert same(make(seeded(3)), make(seeded(3)))
    assert not same(make(seeded(3)), make(seeded(4)))
    assert torch.equal(before, torch.get_rng_state())


# Pixels


def coded(b, h, w):
    """Images whose three channels tell image, row and column."""
    pixels = torch.empty(b, h, w, 3, dtype=torch.uint8)
    pixels[..., 0] = torch.arange(b)[:, None, None] % 256
    pixels[..., 1], pixels[..., 2] = torch.arange(h)[:, None], torch.arange(w)
    return pixels


def places(x, h, w):
    """The index of each pixel in its image."""
    rows, cols = (x[..., 0] + 1) / 2 * (h - 1), (x[..., 1] + 1) / 2 * (w - 1)
    return (rows.round() * w + cols.round()).long()


@pytest.mark.parametrize("make", [image_tasks, static_image_tasks])
def test_every_point_carries_the_colour_of_its_own_pixel(make):
    b, h, w = 7, 20, 30
    task = make(coded(b, h, w), generator=seeded())
    for x, y in ((task.xc, task.yc), (task.xt, task.yt)):
        value = (y.double() + 0.5) * 255
        torch.testing.assert_close(value[..., 0], torch.arange(b)[:, None].double().expand(x.shape[:2]))
        row_col = (x.double() + 1) / 2 * torch.tensor([h - 1.0, w - 1.0])
        torch.testing.assert_close(value[..., 1:], row_col, rtol=0, atol=1e-4)


@pytest.mark.parametrize("make", [image_tasks, static_image_tasks])
def test_the_pixels_of_a_task_are_distinct_and_its_targets_new(make):
    task = make(coded(50, 28, 28), generator=seeded(1))
    chosen = torch.cat([places(task.xc, 28, 28), places(task.xt, 28, 28)], 1).sort(1).values
    assert (chosen.diff(dim=1) > 0).all()


@pytest.mark.parametrize("slot", ["first context", "last context", "first target", "last target"])
def test_each_slot_is_filled_uniformly_from_all_pixels(slot):
    task = static_image_tasks(coded(12_800, 8, 8), generator=seeded(2), num_context_max=20, num_targets=10)
    x = task.xc if "context" in slot else task.xt
    counts = torch.bincount(places(x[:, 0 if "first" in slot else -1], 8, 8), minlength=64).double()
    chi_square = ((counts - 200) ** 2 / 200).sum()
    assert 63 - 5 * 126**0.5 < chi_square < 63 + 5 * 126**0.5


def test_coordinates_and_colours_reach_exactly_the_ends_of_their_ranges():
    pixels = torch.tensor([0, 255, 128], dtype=torch.uint8).expand(1, 32, 32, 3)
    x, y = image_points(pixels)
    assert x.shape == (1, 1024, 2)
    assert (x.min(), x.max()) == (-1, 1)
    assert x[0, 0].tolist() == [-1, -1]
    assert x[0, 31].tolist() == [-1, 1]
    assert y[0, 5].tolist() == pytest.approx([-0.5, 0.5, 128 / 255 - 0.5])


def test_an_image_of_one_row_has_finite_coordinates():
    x, _ = image_points(torch.zeros(1, 1, 9, 1, dtype=torch.uint8))
    assert x.isfinite().all()


def test_reference_tasks_have_one_size_a_batch_within_the_protocol():
    pixels = coded(2, 16, 16)
    sizes = [image_tasks(pixels, generator=seeded(i), max_points=20) for i in range(300)]
    drawn = {(t.xc.shape[1], t.xt.shape[1]) for t in sizes}
    assert {n for n, _ in drawn} == set(range(3, 17))
    assert max(n + m for n, m in drawn) == 19
    assert min(m for _, m in drawn) == 3
    given = image_tasks(pixels, generator=seeded(), sizes=(5, 6))
    assert (given.xc.shape[1], given.xt.shape[1]) == (5, 6)


@pytest.mark.parametrize(
    "make",
    [
        lambda g: image_tasks(
            torch.randint(256, (4, 9, 9, 1)).byte(), generator=g, max_points=40, padded=True
        ),
        lambda g: gp_tasks(4, generator=g, max_points=40, padded=True)[0],
    ],
    ids=["images", "gp"],
)
def test_padded_tasks_give_the_sizes_of_the_protocol_by_masks(make):
    sizes = set()
    for seed in range(300):
        task = make(seeded(seed))
        assert task.xc.shape[1] == task.xt.shape[1] == 39
        n, m = task.num_context, task.num_targets
        assert n.unique().numel() == m.unique().numel() == 1  # one size for the batch
        assert not bool((task.mask_c & task.mask_t).any())  # the same points: none is both
        assert task.xc is task.xt
        sizes.add((int(n[0]), int(m[0])))
    contexts, targets = zip(*sizes, strict=True)
    assert min(contexts) == min(targets) == 3
    assert max(contexts) >= 35
    assert all(n + m < 40 for n, m in sizes)
    few = [m for n, m in sizes if n < 10]
    assert max(few) > 25  # small contexts leave room for many targets


@pytest.mark.parametrize("model", [CMANP(dim_x=2, dim_y=1, dim=16, depth=1), CNP(dim_x=2, dim_y=1, dim=16)])
def test_the_loss_of_a_padded_task_is_that_of_its_points(model):
    pixels = torch.randint(256, (3, 9, 9, 1), generator=seeded(1)).byte()
    padded = image_tasks(pixels, generator=seeded(5), max_points=40, padded=True)
    n, m = int(padded.num_context[0]), int(padded.num_targets[0])
    cut = Task(
        *(t[:, :n] for t in (padded.xc, padded.yc)), *(t[:, n : n + m] for t in (padded.xt, padded.yt))
    )
    whole = model.loss(padded.xc, padded.yc, padded.xt, padded.yt, mask_c=padded.mask_c, mask_t=padded.mask_t)
    assert whole.item() == pytest.approx(model.loss(cut.xc, cut.yc, cut.xt, cut.yt).item(), rel=1e-5)


def test_static_image_tasks_draw_a_context_size_for_each_image():
    task = static_image_tasks(coded(20_000, 6, 6), generator=seeded(3), num_context_max=12, num_targets=5)
    assert task.xc.shape == (20_000, 12, 2)
    assert task.yt.shape == (20_000, 5, 3)
    assert task.mask_t is None
    counts = torch.bincount(task.num_context, minlength=13)
    assert counts[:3].sum() == 0
    assert (counts[3:] - 2000).abs().max() < 5 * 2000**0.5
    assert (task.mask_c.int().diff(dim=1) <= 0).all(), "the real points come first"


def test_the_evaluation_set_sees_every_image_once_and_is_fixed_by_its_seed():
    images = Images(coded(25, 16, 16), None, "made", "made here")
    first = list(evaluation_tasks(images, seed=1, batch=10, max_points=50))
    again = list(evaluation_tasks(images, seed=1, batch=10, max_points=50))
    other = list(evaluation_tasks(images, seed=2, batch=10, max_points=50))
    assert [task.batch for task in first] == [10, 10, 5]
    assert all(same(a, b) for a, b in zip(first, again, strict=True))
    assert not any(same(a, b) for a, b in zip(first, other, strict=True))
    seen = torch.cat([(task.yc[:, 0, 0] + 0.5) * 255 for task in first])
    torch.testing.assert_close(seen.sort().values, torch.arange(25.0))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda p: image_tasks(p, generator=seeded()), "max_points is 200, but an image of 8x8 has only 64"),
        (lambda p: image_tasks(p, generator=seeded(), sizes=(60, 5)), "Nc . Nt is 65"),
        (lambda p: static_image_tasks(p, generator=seeded()), "num_targets is 297, but an image of 8x8"),
        (
            lambda p: static_image_tasks(
                p[:, :4], generator=seeded(), skew=0.0, num_context_max=9, num_targets=9
            ),
            "skew is 0.0",
        ),
        (lambda p: image_tasks(p.float(), generator=seeded()), "uint8 of shape"),
        (lambda p: image_points(p[0]), "uint8 of shape"),
        (
            lambda p: static_image_tasks(p, generator=seeded(), num_context_max=2, num_targets=3),
            "num_context_max is 2, but a context has 3 points or more",
        ),
        (
            lambda p: evaluation_tasks(Images(p, None, "made", "here"), seed=0, max_points=100),
            "only 64 pixels",
        ),
    ],
)
def test_pixels_that_are_not_there_are_refused(call, message, refuses):
    with refuses(ValueError, message):
        call(coded(2, 8, 8))


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_static_tasks_never_wait_for_the_gpu_and_evaluation_equals_the_cpus():
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    generator = torch.Generator("cuda").manual_seed(0)
    pixels = coded(64, 28, 28)
    there = pixels.cuda()
    static_gp_tasks(4, generator=generator)  # loads the linear algebra libraries
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        task = static_image_tasks(there, generator=generator)
        process_task, _ = static_gp_tasks(16, generator=generator)
        padded = image_tasks(there, generator=generator, padded=True)
        gp_tasks(16, generator=generator, padded=True)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert task.xc.is_cuda
    assert padded.mask_t.is_cuda
    assert process_task.yt.is_cuda
    assert process_task.yt.isfinite().all()
    here = evaluation_tasks(Images(pixels, None, "made", "here"), seed=0)
    away = evaluation_tasks(Images(there, None, "made", "here"), seed=0)
    assert all(same(a, b.to("cpu")) for a, b in zip(here, away, strict=True))


# Augmentation


def test_half_of_the_images_are_turned_into_any_of_the_eight_symmetries():
    image = torch.arange(9, dtype=torch.uint8).view(1, 3, 3, 1)
    found = augmented(image.expand(8000, -1, -1, -1), "turn", generator=seeded())
    kinds, counts = found.flatten(1).unique(dim=0, return_counts=True)
    symmetries = {tuple(t.flatten().tolist()) for k in range(4) for t in (image[0, ..., 0].rot90(k),)}
    symmetries |= {tuple(image[0, ..., 0].rot90(k).flip(0).flatten().tolist()) for k in range(4)}
    assert {tuple(k) for k in kinds.tolist()} == symmetries
    upright = counts[(kinds == image.flatten()).all(1)].item() / 8000
    assert abs(upright - (1 / 2 + 1 / 16)) < 0.03
    assert all(abs(c / 8000 - 1 / 16) < 0.02 for c in counts.tolist() if c / 8000 < 0.4)


def test_a_mirror_swaps_left_and_right_only():
    image = torch.arange(6, dtype=torch.uint8).view(1, 2, 3, 1)
    found = augmented(image.expand(400, -1, -1, -1), "mirror", generator=seeded())
    mirrored = (found == image.flip(2)).flatten(1).all(1)
    assert (mirrored | (found == image).flatten(1).all(1)).all()
    assert 150 < mirrored.sum() < 250


def test_images_that_are_not_square_cannot_be_turned():
    with pytest.raises(ValueError, match=r"cannot augment images of \(2, 3\) pixels by 'turn'"):
        augmented(torch.zeros(1, 2, 3, 1, dtype=torch.uint8), "turn", generator=seeded())
    assert augmented(torch.zeros(1, 2, 3, 1, dtype=torch.uint8), "none", generator=seeded()).shape == (
        1,
        2,
        3,
        1,
    )

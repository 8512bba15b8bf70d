"""Tasks, their sizes, and pixels of images as tasks."""

import doctest
import importlib

import numpy as np
import pytest
import torch

from constmem import CMANP
from constmem.data import (
    Images,
    Task,
    augmented,
    draw_sizes,
    evaluation_tasks,
    gp_tasks,
    image_points,
    image_tasks,
    static_gp_tasks,
    static_image_tasks,
)
from constmem.data.sizes import draw_counts, draw_skewed, spread_sizes
from constmem.neural_processes import CNP


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def same(a, b):
    """Equal to the bit, masks included."""
    pairs = [(getattr(a, name), getattr(b, name)) for name in ("xc", "yc", "xt", "yt", "mask_c", "mask_t")]
    return all((p is None and q is None) or torch.equal(p, q) for p, q in pairs)


# Tasks


def test_the_examples_in_the_docstrings_hold():
    for name in ("task", "gp", "images"):
        module = importlib.import_module(f"constmem.data.{name}")
        result = doctest.testmod(module)
        assert result.attempted > 0
        assert result.failed == 0


def test_targets_are_counted_with_and_without_a_mask():
    x, y = torch.zeros(2, 4, 1), torch.zeros(2, 4, 3)
    assert Task(x, y, x, y).num_targets.tolist() == [4, 4]
    mask = torch.tensor([[True, False, False, False], [True, True, True, False]])
    task = Task(x, y, x, y, mask_c=~mask, mask_t=mask)
    assert task.num_targets.tolist() == [1, 3]
    assert task.num_context.tolist() == [3, 1]
    assert task.batch == 2


def test_the_log_likelihood_sums_channels_and_averages_points_not_tasks():
    x, y = torch.zeros(2, 2, 1), torch.zeros(2, 2, 3)
    task = Task(x, y, x, y, mask_t=torch.tensor([[True, True], [True, False]]))
    log_prob = torch.tensor([[1.0, 2.0], [6.0, float("nan")]])
    assert task.mean_log_likelihood(log_prob).item() == pytest.approx(3.0)
    channels = log_prob[..., None] * torch.tensor([0.2, 0.3, 0.5])
    assert task.mean_log_likelihood(channels).item() == pytest.approx(3.0)
    assert task.point_log_likelihood(channels)[1, 1] == 0


def test_a_task_moves_with_its_masks():
    task, process = static_gp_tasks(2, generator=seeded(), kernel="periodic")
    assert same(task.to("cpu"), task)
    there, home = task.to("meta"), process.to("meta")
    assert {t.device.type for t in (there.xc, there.yt, there.mask_c, there.mask_t)} == {"meta"}
    assert home.period.device.type == "meta"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"yc": torch.zeros(2, 3, 1)}, "yc has .batch, points. .2, 3., but x has .2, 4."),
        ({"xt": torch.zeros(2, 4, 2)}, "xt has shape"),
        ({"xc": torch.zeros(4, 1)}, "add the missing axes"),
        ({"mask_c": torch.ones(2, 5, dtype=torch.bool)}, "one entry a point"),
        ({"xc": torch.zeros(1, 4, 1), "yc": torch.zeros(1, 4, 1)}, "batch of 1, the targets one of 2"),
    ],
)
def test_a_task_whose_parts_do_not_fit_is_refused(change, message, refuses):
    parts = dict.fromkeys(("xc", "yc", "xt", "yt"), torch.zeros(2, 4, 1))
    with refuses(ValueError, message):
        Task(**(parts | change))


# Sizes


def test_sizes_follow_the_protocol_and_reach_both_ends():
    context, targets = draw_counts(200_000, generator=seeded(), max_points=50)
    assert context.unique().tolist() == list(range(3, 47))
    assert torch.bincount(context)[3:].min() > 0.9 * 200_000 / 44
    for n in (3, 20, 46):
        here = targets[context == n]
        assert here.unique().tolist() == list(range(3, 50 - n))
        assert here.double().mean().item() == pytest.approx((3 + 49 - n) / 2, abs=0.6)


def test_one_size_for_a_batch_has_the_same_range():
    drawn = {draw_sizes(generator=seeded(i), max_points=8) for i in range(200)}
    assert drawn == {(3, 3), (3, 4), (4, 3)}


@pytest.mark.parametrize("skew", [0.5, 1.0, 2.0, 4.0])
def test_skewed_counts_fall_as_announced(skew):
    counts = draw_skewed(100_000, low=3, high=12, skew=skew, generator=seeded())
    edges = np.arange(11) / 10
    expected = 100_000 * -np.diff((1 - edges) ** skew)
    found = torch.bincount(counts, minlength=13)
    assert found[:3].sum() == 0
    np.testing.assert_allclose(found[3:].numpy(), expected, atol=5 * np.sqrt(expected.max()))


def test_evaluation_sizes_have_the_protocols_means_however_few_they_are():
    context, targets = draw_counts(400_000, generator=seeded(), max_points=200)
    expected = (targets / (200 - context)).mean()
    for seed in range(20):
        sizes = torch.tensor(spread_sizes(40, generator=seeded(seed), max_points=200)).double()
        assert abs(sizes[:, 0].mean() - 99.5) < 4.5  # a random draw of forty is off by 9 as a rule
        assert abs((sizes[:, 1] / (200 - sizes[:, 0])).mean() - expected) < 0.04
        assert sizes.min() >= 3
        assert sizes.sum(1).max() < 200


def test_a_skew_of_two_trains_where_the_protocol_scores():
    context, targets = draw_counts(400_000, generator=seeded(), max_points=200)
    scored = torch.zeros(197).index_add_(0, context, targets.float())[3:]
    trained = draw_skewed(400_000, low=3, high=196, skew=2.0, generator=seeded(1))
    trained = torch.bincount(trained, minlength=197)[3:].float()
    assert (scored / scored.sum() - trained / trained.sum()).abs().sum() < 0.1


def test_too_few_points_for_a_task_are_refused():
    with pytest.raises(ValueError, match="7 is the smallest that works"):
        draw_sizes(generator=seeded(), max_points=6)


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
def test_padded_tasks_tell_the_sizes_of_the_protocol_by_masks(make):
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
    empty = static_image_tasks(
        coded(200, 6, 6), generator=seeded(), num_context_max=3, num_targets=5, num_context_min=0
    )
    assert empty.num_context.min() == 0


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
            "0 <= min <= max",
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

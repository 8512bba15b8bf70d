"""Tasks and their sizes."""

import numpy as np
import pytest
import torch

from constmem.data import Task, draw_sizes
from constmem.data.task import draw_counts, draw_skewed, spread_sizes


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def same(a, b):
    """Equal to the bit, masks included."""
    pairs = [(getattr(a, name), getattr(b, name)) for name in ("xc", "yc", "xt", "yt", "mask_c", "mask_t")]
    return all((p is None and q is None) or torch.equal(p, q) for p, q in pairs)


# Tasks


def test_targets_are_counted_with_and_without_a_mask():
    x, y = torch.zeros(2, 4, 1), torch.zeros(2, 4, 3)
    assert Task(x, y, x, y).num_targets.tolist() == [4, 4]
    mask = torch.tensor([[True, False, False, False], [True, True, True, False]])
    task = Task(x, y, x, y, mask_c=~mask, mask_t=mask)
    assert task.num_targets.tolist() == [1, 3]
    assert task.num_context.tolist() == [3, 1]
    assert task.batch == 2


def test_the_log_likelihood_of_a_point_sums_channels_and_is_zero_where_masked_out():
    x, y = torch.zeros(2, 2, 1), torch.zeros(2, 2, 3)
    task = Task(x, y, x, y, mask_t=torch.tensor([[True, True], [True, False]]))
    log_prob = torch.tensor([[1.0, 2.0], [6.0, float("nan")]])
    channels = log_prob[..., None] * torch.tensor([0.2, 0.3, 0.5])
    for given in (log_prob, channels):
        torch.testing.assert_close(task.point_log_likelihood(given), torch.tensor([[1.0, 2.0], [6.0, 0.0]]))


def test_a_task_moves_with_its_masks():
    x = torch.zeros(2, 4, 1)
    task = Task(x, x, x, x, torch.ones(2, 4, dtype=torch.bool), torch.ones(2, 4, dtype=torch.bool))
    assert same(task.to("cpu"), task)
    there = task.to("meta")
    assert {t.device.type for t in (there.xc, there.yt, there.mask_c, there.mask_t)} == {"meta"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"yc": torch.zeros(2, 3, 1)}, "yc has .batch, points. .2, 3., but x has .2, 4."),
        ({"xt": torch.zeros(2, 4, 2)}, "xt has shape"),
        ({"xc": torch.zeros(4, 1)}, r"xc.reshape\(1, -1, 1\)"),
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

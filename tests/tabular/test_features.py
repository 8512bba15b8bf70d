"""Features, their kernel and their trees, against what they are meant to be."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from threadpoolctl import threadpool_info
from torch import Tensor

from constmem.core.moments import Moments
from constmem.tabular import lengths
from constmem.tabular.evidence import posterior
from constmem.tabular.features import Features, grow
from constmem.tabular.features import leaves as leaves_of
from constmem.tabular.kernel import Kernel, coordinates, shares, side_by_side, times_upper


def table(n: int = 300, d: int = 4, *, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Targets that depend on the first column alone, by a wave and a step."""
    x = torch.randn(n, d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return x, (2 * x[:, :1]).sin() + (x[:, :1] > 0.5)


def random() -> torch.Generator:
    return torch.Generator().manual_seed(0)


@pytest.mark.parametrize(("n", "d"), [(1, 1), (2, 3), (9, 1), (40, 30), (300, 4), (100, 300)])
def test_any_table_has_features(n: int, d: int) -> None:
    x, y = table(n, d)
    features = Features.anchor(x, y, size=200)
    phi = features(torch.cat([x, 1e6 * x]))
    assert phi.shape == (2 * n, features.width)
    assert phi.dtype == torch.float64
    assert bool(phi.isfinite().all())
    groups = list(features.groups.values())
    assert [g.start for g in groups] == [0, *(g.stop for g in groups[:-1])]
    assert groups[-1].stop == features.width


def test_features_are_at_most_as_many_as_were_asked_for() -> None:
    x, y = table(500)
    assert Features.anchor(x, y, size=400).width == 400


def test_features_of_a_row_depend_on_nothing_else() -> None:
    x, y = table()
    features, again = (Features.anchor(x, y, seed=3, size=200) for _ in range(2))
    phi = features(x)
    assert torch.equal(phi, again(x))
    torch.testing.assert_close(features(x[5:9]), phi[5:9], atol=1e-9, rtol=0)


def test_saved_features_are_the_same() -> None:
    x, y = table()
    features = Features.anchor(x, y, size=200)
    tensors = features.tensors()
    assert torch.equal(Features.of({name: t.clone() for name, t in tensors.items()})(x), features(x))
    assert features.nbytes == sum(t.nbytes for t in tensors.values()) < 20_000


def test_constant_and_repeated_columns_do_no_harm() -> None:
    x, y = table()
    x[:, 1], x[:, 2] = 7.0, x[:, 0]
    phi = Features.anchor(x, y, size=200)(x + torch.tensor([0.0, 1.0, 0.0, 0.0]))
    assert bool(phi.isfinite().all())


def test_columns_go_through_as_they_are_and_ranks_do_not_grow() -> None:
    x, y = table()
    features = Features.anchor(x, y, size=200)
    groups, new = features.groups, 100 * x[:5]
    phi = features(new)
    assert torch.equal(phi[:, groups["constant"]], torch.ones(5, 1, dtype=torch.float64))
    wanted = (new - x.mean(0)) / x.std(0, correction=0)
    torch.testing.assert_close(phi[:, groups["columns"]], wanted)
    ranks = features(x)[:, groups["ranks"]]
    assert float(phi[:, groups["ranks"]].abs().max()) <= 3**0.5
    assert ranks.mean(0).abs().max() < 0.05
    assert torch.equal(ranks[:, 2].argsort(), ranks[:, 2].argsort())
    assert np.corrcoef(ranks[:, 2].numpy(), x[:, 2].argsort().argsort().numpy())[0, 1] > 0.999


def test_products_are_those_of_the_columns() -> None:
    x, _ = table()
    features = Features.anchor(x, size=200)
    z = ((x - x.mean(0)) / x.std(0, correction=0)).clamp(-8, 8)
    found = features(x)[:, features.groups["products"]]
    wanted = [z[:, i] * z[:, j] for i in range(4) for j in range(i, 4)]
    for product in wanted:
        assert float((found - product[:, None]).abs().max(0).values.min()) < 1e-9
    assert found.shape[1] == len(wanted)


def test_products_and_trees_are_kept_where_evidence_is_for_them() -> None:
    """Of squares of columns with heavy tails, of steps, and of waves, which only need points."""
    x = torch.randn(600, 4, generator=random(), dtype=torch.float64)
    far = torch.where(torch.rand(600, 4, generator=random()) < 0.1, 4 * x, x)
    steps = (x[:, :1] > 0.3).double() + 2.0 * (x[:, 1:2] > -0.4) * (x[:, 2:3] > 0.1)
    waves = (2 * x[:, :1]).sin() + (2 * x[:, 1:2] + x[:, 2:3]).cos()
    noise = 0.02 * torch.randn(600, 1, generator=random(), dtype=torch.float64)
    kept = {}
    squares = far.square().sum(1, keepdim=True)
    for name, rows, y in (("products", far, squares), ("trees", x, steps), ("none", x, waves)):
        made = Features.anchor(rows, y + noise, size=250)
        kept[name] = made.groups.keys() & {"products", "trees"}
        assert made.width == 250  # whatever is left out, points take its room
    assert kept["none"] == set()
    assert "trees" in kept["trees"]
    assert "products" in kept["products"]


def test_features_saved_before_products_were_chosen_are_as_they_were() -> None:
    x, _ = table()
    new = Features.anchor(x, size=200)  # of no targets: all products, no finer kernel
    old = {name: t for name, t in new.tensors().items() if name not in ("multiplied", "finer")}
    again = Features.of(old)
    assert torch.equal(again(x), new(x))
    assert again.groups == new.groups
    assert again.tensors().keys() == old.keys()  # their fingerprint stays, too


def test_a_finer_kernel_takes_the_room_that_a_long_one_leaves() -> None:
    x = torch.randn(2400, 2, generator=random(), dtype=torch.float64)
    y = (0.2 * x).sum(1, keepdim=True).sin() + 1e-4 * (
        4 * x[:, :1]
    ).sin()  # details that few rows do not show
    features = Features.anchor(x[:300], y[:300], size=250)
    assert len(features.points) < 100
    assert features.groups["finer"].stop == features.width
    phi = features(x)
    fine = phi[:, features.groups["finer"]]
    assert float(torch.linalg.vecdot(fine, fine).max()) <= 1 + 1e-6  # whitened: no more than k(x, x)
    off = []
    for groups in (features.groups, {n: g for n, g in features.groups.items() if n != "finer"}):
        width = max(group.stop for group in groups.values())
        found = posterior(Moments.observe(phi[:2000, :width], y[:2000]), groups)
        off.append(float((found.mean(phi[2000:, :width]) - y[2000:]).square().mean()))
    assert off[0] < off[1] / 4
    weights = torch.randn(features.width, 2, generator=random(), dtype=torch.float64)
    torch.testing.assert_close(features.predict(x, [weights])[0], phi @ weights, atol=1e-6, rtol=0)


def test_no_finer_kernel_is_there_where_all_rows_are_inducing_points() -> None:
    x, y = table(120)
    groups = Features.anchor(x, y).groups
    assert groups["kernel"].stop - groups["kernel"].start == 120
    assert "finer" not in groups


def test_damaged_features_are_refused() -> None:
    tensors = Features.anchor(*table(), size=200).tensors()
    for name, bad in (("multiplied", torch.tensor([9])), ("finer", torch.zeros(2, 9).double())):
        with pytest.raises(ValueError, match=r"columns which are not there|do not fit each other"):
            Features.of(tensors | {name: bad})


def test_inner_products_of_kernel_features_are_the_kernels_at_its_points() -> None:
    x, y = table(80)
    features = Features.anchor(x, y, size=500)  # room for all rows
    phi = features(x)[:, features.groups["kernel"]]
    u = coordinates((x - features.centre) / features.scale, features.knots)
    kernel = Kernel(features.rates, features.share)
    torch.testing.assert_close(phi @ phi.mT, kernel(u, u), atol=1e-4, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("n", [0, 1, 33])
def test_a_product_with_an_upper_triangle_is_the_product(n: int, dtype: torch.dtype) -> None:
    rows, square = (torch.randn(count, 230, generator=random(), dtype=dtype) for count in (n, 230))
    upper, wide = (
        square.triu(),
        torch.cat([torch.ones(n, 3, dtype=dtype), rows, torch.ones(n, 2, dtype=dtype)], 1),
    )
    times_upper(wide[:, 3:-2], upper)
    np.testing.assert_allclose(wide[:, 3:-2], rows.numpy() @ upper.numpy(), rtol=1e-3, atol=1e-4)
    assert bool((wide[:, [0, 1, 2, -2, -1]] == 1.0).all())  # what stands beside them is left alone


def test_rows_that_lie_otherwise_are_refused() -> None:
    upper = torch.eye(4, dtype=torch.float64)
    for rows in (torch.ones(4, 3, dtype=torch.float64).mT, torch.ones(3, 4)):
        with pytest.raises(ValueError, match="one precision"):
            times_upper(rows, upper)


@pytest.mark.parametrize("threads", [1, 2])
def test_work_side_by_side_is_in_order_and_leaves_the_numbers_of_threads_alone(threads: int) -> None:
    blas = [info["num_threads"] for info in threadpool_info() if info["user_api"] == "blas"]
    before, inside = torch.get_num_threads(), []

    def work(piece: int) -> int:
        inside.extend(info["num_threads"] for info in threadpool_info() if info["user_api"] == "blas")
        return sum(side_by_side(lambda i: i, [piece, 1])) - 1

    torch.set_num_threads(threads)
    try:
        assert side_by_side(work, [3, 1, 2, 0]) == [3, 1, 2, 0]
        with pytest.raises(ZeroDivisionError):
            side_by_side(lambda i: 1 // i, [1, 0, 1])
        assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)
    assert set(inside) == {1}
    assert [info["num_threads"] for info in threadpool_info() if info["user_api"] == "blas"] == blas


@pytest.mark.parametrize(
    ("threads", "count", "wanted"), [(1, 700, [700]), (2, 700, [350, 350]), (2, 150, [100, 50])]
)
def test_rows_are_shared_evenly_and_none_is_left_out(threads: int, count: int, wanted: list[int]) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        found = shares(count, least=100)
    finally:
        torch.set_num_threads(before)
    assert [len(range(count)[part]) for part in found] == wanted
    assert [part.start for part in found] == [0, *(part.stop for part in found[:-1])]


def test_the_kernel_is_the_formula() -> None:
    rates, share = torch.rand(2, 6, dtype=torch.float64), torch.tensor(0.3, dtype=torch.float64)
    u, v = torch.randn(5, 6, dtype=torch.float64), torch.randn(4, 6, dtype=torch.float64)
    found = Kernel(rates, share)(u, v).numpy()
    for i, j in np.ndindex(5, 4):
        gap = (u[i] - v[j]).numpy()
        smooth = np.exp(-((rates[0].numpy() * gap) ** 2).sum() / 2)
        rough = np.exp(-np.sqrt(((rates[1].numpy() * gap) ** 2).sum()))
        assert found[i, j] == pytest.approx(0.3 * smooth + 0.7 * rough, rel=1e-9)


def test_the_slope_is_that_of_the_likelihood() -> None:
    x, y = table(25)
    u = torch.cat([x, x.argsort(0).argsort(0).double() / 12 - 1], 1)
    rates = Kernel.usual(4).rates.log().flatten()
    at = torch.cat([rates, torch.tensor(lengths.PARTS, dtype=torch.float64)])
    at = at + 0.3 * torch.randn(len(at), generator=random(), dtype=torch.float64)

    def loss(at: Tensor) -> float:
        smooth, rough, slant, noise = at[-4:].exp().numpy()
        s, r = at[:-4].exp().view(2, 8).numpy()
        gaps = u.numpy()[:, None] - u.numpy()
        inner = smooth * np.exp(-((gaps * s) ** 2).sum(-1) / 2)
        inner = inner + rough * np.exp(-np.sqrt(((gaps * r) ** 2).sum(-1)))
        inner = inner + slant * x.numpy() @ x.numpy().T / 4 + lengths.CONSTANT
        inner = inner + (noise + lengths.JITTER) * np.eye(25)
        fit = float((y.numpy() * np.linalg.solve(inner, y.numpy())).sum())
        return (fit + float(np.linalg.slogdet(inner)[1])) / 2

    slope = lengths.exact_slope(at, u, y)
    assert slope is not None
    for i, found in enumerate(slope.tolist()):
        move = 1e-5 * torch.eye(len(at), dtype=torch.float64)[i]
        assert found == pytest.approx((loss(at + move) - loss(at - move)) / 2e-5, rel=1e-4, abs=1e-4)


@pytest.mark.parametrize("missed", [0.0, 1.0])
def test_slopes_by_inducing_points_are_those_of_their_likelihood_or_of_the_bound(missed: float) -> None:
    x, y = table(25)
    y = torch.cat([y, y.flip(0)], 1)  # two targets
    u = torch.cat([x, x.argsort(0).argsort(0).double() / 12 - 1], 1)
    points = u[:7] + 0.1 * torch.randn(7, 8, generator=random(), dtype=torch.float64)
    at = torch.cat([Kernel.usual(4).rates.log().flatten(), torch.tensor(lengths.PARTS, dtype=torch.float64)])
    at = at + 0.3 * torch.randn(len(at), generator=random(), dtype=torch.float64)

    def loss(at: Tensor, points: Tensor) -> float:
        smooth, rough, slant, noise = at[-4:].exp().numpy()
        s, r = at[:-4].exp().view(2, 8).numpy()

        def covariances(a: Any, b: Any) -> Any:
            gaps = a[:, None] - b
            made = smooth * np.exp(-((gaps * s) ** 2).sum(-1) / 2)
            return made + rough * np.exp(-np.sqrt(((gaps * r) ** 2).sum(-1)))

        across, inner = (covariances(t.numpy(), points.numpy()) for t in (u, points))
        inner = inner + lengths.ROUNDING * (smooth + rough) * np.eye(7)
        explained, noise = across @ np.linalg.solve(inner, across.T), noise + lengths.JITTER
        whole = explained + slant * x.numpy() @ x.numpy().T / 4 + lengths.CONSTANT + noise * np.eye(25)
        fit = float((y.numpy() * np.linalg.solve(whole, y.numpy())).sum())
        rest = 2 * (25 * (smooth + rough) - np.trace(explained)) / (2 * noise)
        return (fit + 2 * float(np.linalg.slogdet(whole)[1])) / 2 + missed * float(rest)

    slopes = lengths.induced_slopes(at, u, y, points, missed)
    assert slopes is not None
    for i, found in enumerate(slopes[0].tolist()):
        move = 1e-5 * torch.eye(len(at), dtype=torch.float64)[i]
        wanted = (loss(at + move, points) - loss(at - move, points)) / 2e-5
        assert found == pytest.approx(wanted, rel=1e-4, abs=1e-4)
    for i, found in enumerate(slopes[1].flatten().tolist()):
        move = 1e-5 * torch.eye(points.numel(), dtype=torch.float64)[i].view_as(points)
        wanted = (loss(at, points + move) - loss(at, points - move)) / 2e-5
        assert found == pytest.approx(wanted, rel=1e-4, abs=1e-4)


def test_inducing_points_move_to_where_they_explain_more() -> None:
    """Of a function that is rough on one side alone: fewer errors on other rows than by rows themselves."""
    x = torch.rand(1500, 2, generator=random(), dtype=torch.float64) * 4 - 2
    y = (8 * x[:, :1] * (x[:, :1] > 0)).sin() * x[:, 1:].cos()
    y = y + 0.05 * torch.randn(1500, 1, generator=random(), dtype=torch.float64)
    features = Features.anchor(x[:1000], y[:1000], size=120)
    u = coordinates((x[:1000] - features.centre) / features.scale, features.knots)
    kernel, points, _ = features.kernels["kernel"]
    nearest = torch.cdist(points, u).min(1).values
    assert float(nearest.max()) > 0.01  # they are no rows any more
    rows = u[kernel.inducing(u, len(points))]
    off = []
    for made in (features, replace(features, points=rows)):
        phi = made(x)
        found = posterior(Moments.observe(phi[:1000], y[:1000]), made.groups)
        off.append(float((found.mean(phi[1000:]) - y[1000:]).square().mean()))
    assert off[0] < 0.9 * off[1]


@pytest.mark.parametrize(("rows", "size"), [(120, 756), (300, 250)])
def test_inducing_points_that_are_nearly_all_rows_stay_where_they_are(rows: int, size: int) -> None:
    x, _ = table(rows)
    y = (2 * x[:, :1]).sin() + (2 * x[:, 1:2] + x[:, 2:3]).cos()
    features = Features.anchor(x, y + 0.05 * torch.randn_like(y), size=size)
    u = coordinates((x - features.centre) / features.scale, features.knots)
    _, points, _ = features.kernels["kernel"]
    assert 120 <= len(points) <= rows < 1.5 * len(points)
    assert float(torch.cdist(points, u).min(1).values.max()) < 1e-5


def test_points_of_older_features_have_columns_alone_and_are_ranked() -> None:
    x, _ = table()
    made = Features.anchor(x, size=200).tensors()
    columns = (x[:90] - made["centre"]) / made["scale"]
    both = coordinates(columns, made["knots"])
    older, new = (Features.of(made | {"points": p, "finer": p[:0]}) for p in (columns, both))
    assert torch.equal(older(x), new(x))


def test_lengths_are_short_only_where_targets_change() -> None:
    x, y = table(300)
    u = torch.cat([x, x.argsort(0).argsort(0).double() / 87 - 1.73], 1)
    rates = lengths.learned(u, y, random()).rates
    assert float(rates[0, 0]) > 3 * float(rates[0, 1:4].max())


def test_without_noise_or_with_copies_only_the_search_ends_well() -> None:
    u = torch.zeros(50, 2, dtype=torch.float64)
    kernel = lengths.learned(u, torch.zeros(50, 1, dtype=torch.float64), random())
    assert bool(kernel.rates.isfinite().all())
    assert kernel.inducing(u, 10).tolist() == [0]


def test_no_row_is_as_far_from_inducing_points_as_from_random_ones() -> None:
    x, _ = table(300, 2)
    u = torch.cat([x, x], 1)
    kernel = Kernel.usual(2)
    chosen = kernel.inducing(u, 20)
    assert len(set(chosen.tolist())) == 20

    def missed(rows: Tensor) -> float:
        across = kernel(u, u[rows])
        explained = (across * torch.linalg.solve(kernel(u[rows], u[rows]), across.mT).mT).sum(1)
        return float((1 - explained).max())

    drawn = [torch.randperm(300, generator=torch.Generator().manual_seed(i))[:20] for i in range(20)]
    assert missed(chosen) < min(map(missed, drawn))


def test_trees_find_steps() -> None:
    x, _ = table(400, 3)
    y = ((x[:, 1:2] > 0.3) ^ (x[:, 2:] > 0)).double()  # visible from the second level on only
    columns, thresholds = grow(x, y + x[:, 1:2] * 0.01, count=3, depth=3)
    leaves = leaves_of(x, columns, thresholds)
    assert leaves.shape == (400, 24)
    weights, *_ = np.linalg.lstsq(leaves.numpy(), y.numpy(), rcond=None)
    assert np.mean((leaves.numpy() @ weights - y.numpy()) ** 2) < 0.05


def test_trees_see_what_the_trees_before_them_left() -> None:
    x, _ = table(400, 3)
    y = (x > 0).double() @ torch.tensor([[3.0], [2.0], [1.0]], dtype=torch.float64)
    columns, _ = grow(x, y, count=16, depth=1)
    assert columns[0].tolist() == [0]
    assert set(columns.flatten().tolist()) == {0, 1, 2}


def test_every_row_is_in_one_leaf_of_each_tree() -> None:
    x, y = table(100, 3)
    columns, thresholds = grow(x, y, count=5, depth=2)
    leaves = leaves_of(x, columns, thresholds).view(100, 5, 4)
    assert torch.equal(leaves.sum(2), torch.ones(100, 5, dtype=torch.float64))
    for row, tree in ((0, 0), (17, 3)):
        bits = [int(x[row, c] > t) for c, t in zip(columns[tree], thresholds[tree], strict=True)]
        assert float(leaves[row, tree, 2 * bits[0] + bits[1]]) == 1.0


def test_no_rows_or_no_columns_are_refused() -> None:
    for shape in ((0, 3), (3, 0)):
        with pytest.raises(ValueError, match="a row and a column at least"):
            Features.anchor(torch.zeros(shape, dtype=torch.float64))

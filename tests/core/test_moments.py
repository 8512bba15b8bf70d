"""The algebra of moments, law by law, against sums written in numpy."""

from dataclasses import FrozenInstanceError
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor

from constmem.core import moments as module
from constmem.core.files import write_tensors
from constmem.core.moments import Moments
from tests.conftest import Refuses

P, K = 5, 2
seeds = st.integers(0, 2**31)
sizes = st.integers(0, 9)
scales = st.sampled_from([1e-3, 1.0, 1e4])
batches = st.sampled_from([(), (3,), (2, 3)])


def rows(
    n: int, *, seed: int = 0, scale: float = 1.0, batch: tuple[int, ...] = (), p: int = P
) -> tuple[Tensor, Tensor, Tensor]:
    random = torch.Generator().manual_seed(seed)
    phi, y = (scale * torch.randn(*batch, n, c, generator=random, dtype=torch.float64) for c in (p, K))
    return phi, y, torch.rand(*batch, n, generator=random, dtype=torch.float64)


def assert_same(left: Moments, right: Moments, tolerance: float = 1e-12) -> None:
    for name, tensor in left.tensors().items():
        other = right.tensors()[name]
        largest = float(other.abs().max()) if other.numel() else 0.0
        torch.testing.assert_close(tensor, other, atol=tolerance * (1 + largest), rtol=tolerance)


@given(n=sizes, seed=seeds, scale=scales, batch=batches, weighted=st.booleans())
def test_observing_sums_products_row_by_row(
    n: int, seed: int, scale: float, batch: tuple[int, ...], weighted: bool
) -> None:
    phi, y, weight = rows(n, seed=seed, scale=scale, batch=batch)
    state = Moments.observe(phi, y, weight if weighted else None)
    gram, cross, square = np.zeros((*batch, P, P)), np.zeros((*batch, P, K)), np.zeros((*batch, K))
    count = np.zeros(batch)
    for *b, i in np.ndindex(*batch, n):
        w = float(weight[(*b, i)]) if weighted else 1.0
        a, t = phi[(*b, i)].numpy(), y[(*b, i)].numpy()
        at = tuple(b)
        gram[at] += w * np.outer(a, a)
        cross[at] += w * np.outer(a, t)
        square[at] += w * t**2
        count[at] += w
    for found, wanted in zip((state.gram, state.cross, state.square), (gram, cross, square), strict=True):
        np.testing.assert_allclose(found.numpy(), wanted, rtol=1e-10, atol=1e-12 * scale**2)
    np.testing.assert_allclose(state.count.numpy(), count, rtol=1e-12)


@given(seed=seeds, n=sizes, m=sizes, k=sizes, scale=scales, batch=batches)
def test_merging_is_observing_both_in_any_order(
    seed: int, n: int, m: int, k: int, scale: float, batch: tuple[int, ...]
) -> None:
    phi, y, weight = rows(n + m + k, seed=seed, scale=scale, batch=batch)
    cut = slice(0, n), slice(n, n + m), slice(n + m, None)
    a, b, c = (Moments.observe(phi[..., s, :], y[..., s, :], weight[..., s]) for s in cut)
    whole = Moments.observe(phi, y, weight)
    assert_same(a.merge(b).merge(c), whole)
    assert_same(c.merge(a.merge(b)), whole)
    assert_same(whole.merge(Moments.empty(P, K, batch=batch)), whole, 0.0)


@given(seed=seeds, n=sizes, m=sizes, scale=scales)
def test_removing_undoes_merging(seed: int, n: int, m: int, scale: float) -> None:
    phi, y, weight = rows(n + m, seed=seed, scale=scale)
    kept, gone = (Moments.observe(phi[s], y[s], weight[s]) for s in (slice(0, n), slice(n, None)))
    assert_same(kept.merge(gone).remove(gone), kept, 1e-11)


@given(seed=seeds, scale=scales)
def test_removing_all_in_parts_leaves_no_negative_squares(seed: int, scale: float) -> None:
    phi, y, weight = rows(50, seed=seed, scale=scale)
    whole, *parts = (
        Moments.observe(phi[s], y[s], weight[s]) for s in (slice(None), slice(30), slice(30, None))
    )
    left = whole.remove(parts[0]).remove(parts[1])
    for sums in (left.gram.diagonal(), left.square, left.count):
        assert bool((sums >= 0.0).all())


def test_chunks_and_blocks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    phi, y, weight = rows(50, p=11)
    whole = Moments.observe(phi, y, weight)
    monkeypatch.setattr(module, "CHUNK", 7)
    monkeypatch.setattr(module, "BLOCK", 4)
    pieces = Moments.observe(phi, y, weight)
    assert_same(pieces, whole)
    assert torch.equal(pieces.gram, pieces.gram.mT)


def test_a_million_rows_of_float32_stay_positive_definite() -> None:
    random = torch.Generator().manual_seed(0)
    base = torch.randn(20_000, 3, generator=random)
    phi = torch.cat([base, base + 1e-4 * torch.randn(20_000, 3, generator=random)], 1)  # nearly collinear
    state = Moments.observe(phi, base[:, :1])
    for _ in range(6):
        state = state.merge(state)
    smallest = float(torch.linalg.eigvalsh(state.gram)[0])
    wanted = 64 * np.linalg.eigvalsh(phi.double().numpy().T @ phi.double().numpy())[0]
    assert smallest == pytest.approx(wanted, rel=1e-4)
    assert float(state.count) == 64 * 20_000


@given(seed=seeds, factor=st.floats(0.01, 1.0))
def test_decaying_counts_rows_less(seed: int, factor: float) -> None:
    phi, y, weight = rows(6, seed=seed)
    assert_same(Moments.observe(phi, y, weight).decay(factor), Moments.observe(phi, y, weight * factor))


@pytest.mark.parametrize("factor", [0.0, -1.0, 1.1, float("nan"), float("inf")])
def test_other_factors_are_no_decay(factor: float) -> None:
    with pytest.raises(ValueError, match="above 0 and at most 1"):
        Moments.empty(P, K).decay(factor)


def test_removing_more_rows_than_were_seen_is_refused() -> None:
    phi, y, _ = rows(6)
    with pytest.raises(ValueError, match="6 rows cannot be removed from 5"):
        Moments.observe(phi[:5], y[:5]).remove(Moments.observe(phi, y))


@pytest.mark.parametrize("what", ["features", "targets"])
def test_removing_what_was_never_seen_is_refused(what: str) -> None:
    phi, y, _ = rows(20)
    other_phi, other_y, _ = rows(3, seed=1)
    other = (
        Moments.observe(5 * other_phi, y[:3]) if what == "features" else Moments.observe(phi[:3], 9 * other_y)
    )
    state = Moments.observe(phi, y)
    with pytest.raises(ValueError, match="never observed here"):
        state.remove(other)
    assert_same(state, Moments.observe(phi, y), 0.0)


def test_states_of_other_shapes_do_not_merge() -> None:
    with pytest.raises(ValueError, match="observe both with the same features"):
        Moments.empty(P, K).merge(Moments.empty(P + 1, K))


def test_targets_or_weights_that_do_not_fit_are_refused(refuses: Refuses) -> None:
    phi, y, weight = rows(6)
    with refuses(ValueError, "one row of targets"):
        Moments.observe(phi, y[:5])
    with refuses(ValueError, "give one a row"):
        Moments.observe(phi, y, weight[:5])


def test_size_does_not_depend_on_the_rows_and_states_do_not_change() -> None:
    phi, y, _ = rows(1000)
    few, many = Moments.observe(phi[:1], y[:1]), Moments.observe(phi, y)
    assert few.nbytes == many.nbytes == 8 * (P * P + P * K + K + 1)
    assert (many.width, many.targets) == (P, K)
    with pytest.raises(FrozenInstanceError):
        few.count = many.count  # type: ignore[misc]
    phi.zero_()
    assert float(many.gram.abs().sum()) > 0


def test_gradients_flow_until_detached() -> None:
    phi, y, _ = rows(4)
    state = Moments.observe(phi.requires_grad_(), y)
    assert state.gram.requires_grad
    assert not state.detach().gram.requires_grad
    assert_same(state.detach().to("cpu"), state.detach(), 0.0)


@pytest.mark.parametrize("batch", [(), (2,)])
def test_saving_and_loading_keeps_every_bit(tmp_path: Path, batch: tuple[int, ...]) -> None:
    phi, y, weight = rows(9, batch=batch, p=140)
    state = Moments.observe(phi, y, weight)
    state.save(tmp_path / "state")
    loaded = Moments.load(tmp_path / "state", "cpu")
    for name in Moments.NAMES:
        assert torch.equal(getattr(state, name), getattr(loaded, name))
    assert loaded.fingerprint is None
    assert (tmp_path / "state").stat().st_size < 0.6 * state.nbytes + 1000  # one triangle


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("gram", lambda t: t[..., :-1], "shapes do not fit"),
        ("cross", lambda t: t * float("nan"), "not finite"),
        ("square", lambda t: t.float(), "float64"),
        ("count", lambda t: -t, "negative"),
        ("square", lambda t: -t, "negative"),
        ("cross", lambda t: t[0], "not \\(p, k\\)"),
        ("count", None, "lacks \\['count'\\]"),
    ],
)
def test_damaged_files_are_named(tmp_path: Path, name: str, change: object, message: str) -> None:
    path = tmp_path / "state"
    phi, y, _ = rows(9)
    Moments.observe(phi, y).save(path)
    tensors = load_file(path)
    if callable(change):
        tensors[name] = change(tensors[name]).contiguous()
    else:
        del tensors[name]
    write_tensors(path, tensors, {"format": Moments.KIND, "version": "1"})
    with pytest.raises(ValueError, match=f"is damaged: it .*{message}.*; save the state again"):
        Moments.load(path)

"""A product of states does to each of its parts what they do by themselves, and is one state to its files."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from constmem.core.files import write_tensors
from constmem.core.moments import Moments
from constmem.core.state import AttentionState
from constmem.neural_processes.states import Product

random = torch.Generator().manual_seed(0)
Q, K, V = (
    torch.randn(s, generator=random, dtype=torch.float64) for s in ((2, 3, 4), (2, 2, 9, 4), (2, 2, 9, 4))
)
PHI, Y = (torch.randn(2, 9, width, generator=random, dtype=torch.float64) for width in (5, 2))


def parts(first: int, last: int) -> tuple[AttentionState, Moments]:
    rows = slice(first, last)
    return AttentionState.observe(Q, K[:, :, rows], V[:, :, rows]), Moments.observe(PHI[:, rows], Y[:, rows])


def seen(first: int, last: int) -> Product:
    return Product(*parts(first, last)).signed("abc")


def assert_same(found: Product, slots: AttentionState, moments: Moments) -> None:
    for name in ("value", "lse", "count"):
        torch.testing.assert_close(getattr(found.slots, name), getattr(slots, name))
    for name in Moments.NAMES:
        torch.testing.assert_close(getattr(found.moments, name), getattr(moments, name))


def test_points_are_merged_and_removed_in_both_parts() -> None:
    merged = seen(0, 4).merge(seen(4, 9))
    assert_same(merged, *parts(0, 9))
    assert_same(merged.remove(seen(4, 9)), *parts(0, 4))
    assert merged.count.tolist() == [9, 9]
    assert merged.fingerprint == merged.remove(seen(4, 9)).fingerprint == "abc"


@pytest.mark.parametrize("log_weight", [-0.7, torch.tensor([-0.7, -0.1])])
def test_both_parts_forget_alike(log_weight: float | Tensor) -> None:
    slots, moments = parts(0, 4)
    factor = torch.as_tensor(log_weight).double().exp().expand(2)
    found = seen(0, 4).decay(log_weight)
    assert_same(
        found, slots.decay(log_weight), moments._mapped(lambda t: torch.einsum("b,b...->b...", factor, t))
    )
    weighted = AttentionState.observe(
        Q, K[:, :, :4], V[:, :, :4], log_weight=factor.log()[:, None].expand(2, 4)
    )
    heavier = Moments.observe(PHI[:, :4], Y[:, :4], factor[:, None].expand(2, 4))
    assert_same(found, weighted, heavier)


def test_states_of_other_weights_are_not_merged() -> None:
    with pytest.raises(ValueError, match="different weights"):
        seen(0, 4).merge(seen(4, 9).signed("xyz"))
    with pytest.raises(TypeError, match="both must be states of one model"):
        seen(0, 4).merge(parts(0, 4)[0])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="never observed here"):
        seen(0, 9).remove(Product(parts(0, 4)[0], Moments.observe(3 * PHI[:, :4], Y[:, :4])))


def test_bytes_are_those_of_both_parts_whatever_was_seen() -> None:
    slots, moments = parts(0, 9)
    whole = slots.to(dtype=torch.float64)
    assert seen(0, 9).nbytes == whole.nbytes + moments.nbytes == seen(3, 4).merge(seen(0, 2)).nbytes


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("moments.gram", lambda t: t.triu(), "not symmetric"),
        ("moments.gram", lambda t: t[..., :-1], "shapes do not fit"),
        ("moments.square", lambda t: -t, "negative"),
        ("moments.cross", lambda t: t.float(), "float64"),
        ("slots.value", lambda t: t[..., :-1, :], "do not fit"),
        ("moments.cross", None, "lacks \\['cross'\\]"),
    ],
)
def test_damaged_files_are_named(tmp_path: Path, name: str, change: object, message: str) -> None:
    path = tmp_path / "state"
    seen(0, 9).save(path)
    tensors = load_file(path)
    if callable(change):
        tensors[name] = change(tensors[name]).contiguous()
    else:
        del tensors[name]
    write_tensors(path, tensors, {"format": Product.KIND, "version": "1"})
    with pytest.raises(ValueError, match=f"is damaged: it .*{message}.*; save the state again"):
        Product.load(path)

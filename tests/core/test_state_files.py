"""Attention states never change, come back from files, and pass through PyTorch's transforms."""

import os
from collections.abc import Callable
from dataclasses import FrozenInstanceError, replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from constmem import AttentionState
from constmem.core.files import read_tensors, write_tensors
from tests.core.states import (
    B,
    S,
    assert_identical,
    copy_of,
    points,
    some,
)

# Never changing


@pytest.mark.parametrize("n", [1, 4])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_state_does_not_alias_what_it_was_made_of(n: int, dtype: torch.dtype) -> None:
    q, k, v = points(n, dtype=dtype)
    mask, log_weight = torch.ones(B, n, dtype=torch.bool), torch.zeros(B, n, dtype=dtype)
    for state in (
        AttentionState.observe(q, k, v),
        AttentionState.observe(q, k, v, mask, log_weight),
        AttentionState.scan(q, k, v, mask, log_weight),
    ):
        before = copy_of(state)
        kept = [t.clone() for t in (q, k, v, mask, log_weight)]
        for tensor in (q, k, v, log_weight):
            tensor.fill_(7.0)
        mask.fill_(False)
        assert_identical(state, before)
        for tensor, old in zip((q, k, v, mask, log_weight), kept, strict=True):
            tensor.copy_(old)


def test_verbs_leave_their_arguments_as_they_were() -> None:
    data = points(6)
    left, right = some(data, 0, 3), some(data, 3, 6)
    before = copy_of(left), copy_of(right)
    left.merge(right).remove(right)
    left.decay(-2.0)
    left.to(dtype=torch.float32)
    AttentionState.scan(*data, initial=left)
    assert_identical(left, before[0])
    assert_identical(right, before[1])


def test_a_state_cannot_be_changed() -> None:
    state = some(points(3), 0, 3)
    with pytest.raises(FrozenInstanceError):
        state.value = torch.zeros(1)  # type: ignore[misc]


# Files


def saved(tmp_path: Path) -> tuple[AttentionState, Path]:
    state = replace(some(points(5), 0, 5), fingerprint="abc")
    state.save(tmp_path / "state")
    return state, tmp_path / "state"


def test_a_state_comes_back_from_its_file(tmp_path: Path) -> None:
    state, path = saved(tmp_path)
    found = AttentionState.load(path)
    assert_identical(found, state)
    assert found.fingerprint == "abc"
    assert found.low is None
    assert found.value.dtype == torch.float64
    assert_identical(AttentionState.load(path, device="cpu"), state)


@pytest.mark.parametrize("n", [0, 1, 3])
def test_small_states_come_back_from_their_files(tmp_path: Path, n: int) -> None:
    state = some(points(n), 0, n)
    state.save(tmp_path / "state")
    found = AttentionState.load(tmp_path / "state")
    assert_identical(found, state)
    assert found.fingerprint is None


def test_pairs_of_float32_come_back_from_their_file(tmp_path: Path) -> None:
    state = some(points(5), 0, 5).to(dtype=torch.float32)
    state.save(tmp_path / "state")
    found = AttentionState.load(tmp_path / "state")
    assert_identical(found, state)
    assert_identical(found.to(dtype=torch.float64), state.to(dtype=torch.float64))


def test_a_missing_state_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"there is no file .*nowhere: expected a constmem.state"):
        AttentionState.load(tmp_path / "nowhere")


@pytest.mark.parametrize("size", [0, 7, 200, 2000])
def test_a_truncated_state_file_is_refused(tmp_path: Path, size: int) -> None:
    _, path = saved(tmp_path)
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(
        ValueError, match=r"not a readable safetensors file .*; write the constmem.state again"
    ):
        AttentionState.load(path)


def test_a_file_that_is_no_state_is_refused(tmp_path: Path) -> None:
    save_file({"value": torch.rand(3)}, tmp_path / "foreign")
    with pytest.raises(ValueError, match=r"holds 'no constmem header' where 'constmem.state' was expected"):
        AttentionState.load(tmp_path / "foreign")


def test_a_state_file_of_a_newer_version_is_refused(tmp_path: Path) -> None:
    state, path = saved(tmp_path)
    tensors = {"value": state.value, "lse": state.lse.contiguous(), "count": state.count}
    save_file(tensors, path, {"format": "constmem.state", "version": "2", "fingerprint": ""})
    with pytest.raises(ValueError, match="format version 2; this constmem reads version 1: install"):
        AttentionState.load(path)


Change = Callable[[dict[str, Tensor]], object]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: (t.pop("lse"), t.pop("count")), r"lacks \['count', 'lse'\]"),
        (lambda t: t.update(lse=t["lse"][:1]), "do not fit|different batches"),
        (lambda t: t.update(lse=t["lse"].float()), "lse that does not fit"),
        (lambda t: t.update(mask=torch.ones(B)), r"holds tensors of unknown names: \['mask'\]"),
        (lambda t: t["value"][0, 0, 0, 0].fill_(torch.nan), "value with NaN or infinity"),
        (lambda t: t["lse"][0, 0, 0, 0].fill_(torch.inf), "lse with NaN or infinity"),
        (lambda t: t["count"].fill_(-3), "counts that are no whole numbers"),
        (lambda t: t.update(count=t["count"].double()), "counts that are no whole numbers"),
        (lambda t: t.update(value_low=t["value"].float()), r"lacks \['lse_low'\]"),
        (lambda t: t.update(value=t["value"].long(), lse=t["lse"].long()), "does not fit"),
    ],
)
def test_a_file_that_is_whole_but_holds_no_state_is_refused(
    tmp_path: Path, change: Change, message: str
) -> None:
    _, path = saved(tmp_path)
    tensors, header = read_tensors(path, kind="constmem.state", version=1)
    change(tensors)
    write_tensors(path, tensors, header)  # with a checksum of what it holds now
    with pytest.raises(ValueError, match=f"state is damaged: it .*({message})"):
        AttentionState.load(path)


@pytest.mark.parametrize("where", ["fsync", "replace"])
def test_a_full_disk_leaves_the_old_state_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    state, path = saved(tmp_path)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, where, full)
    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(OSError, match="No space left"):
        state.decay(-1.0).save(path)
    monkeypatch.undo()
    assert_identical(AttentionState.load(path), state)
    assert list(tmp_path.iterdir()) == [path]


# Transforms


class Both(nn.Module):
    """Two observations merged, decayed and removed again, on plain tensors."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        left = AttentionState.observe(q, k[..., :3, :], v[..., :3, :], mask[..., :3])
        right = AttentionState.observe(q, k[..., 3:, :], v[..., 3:, :], mask[..., 3:])
        state = left.decay(-0.25).merge(right)
        return state.value, state.lse


class Prefixes(nn.Module):
    """A scan on plain tensors."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        states = AttentionState.scan(q, k, v, mask, chunk=4)
        return states.value, states.lse


both_ways = pytest.mark.parametrize("function", [Both(), Prefixes()], ids=["merge", "scan"])
Function = Callable[..., tuple[Tensor, Tensor]]


def plain(dtype: torch.dtype = torch.float64, b: int = B) -> tuple[Tensor, ...]:
    return *points(7, dtype=dtype, b=b), torch.arange(b * 7).view(b, 7) % 4 > 0


@pytest.mark.compiles
@both_ways
def test_the_algebra_compiles(function: Function) -> None:
    arguments = plain()
    torch._dynamo.reset()
    compiled = torch.compile(function, backend="eager", fullgraph=True)
    for found, expected in zip(compiled(*arguments), function(*arguments), strict=True):
        torch.testing.assert_close(found, expected)


@pytest.mark.compiles
@both_ways
def test_compiled_gradients_are_the_same(function: Function) -> None:
    q, k, v, mask = plain()
    torch._dynamo.reset()
    compiled = torch.compile(function, backend="aot_eager")
    grads = []
    for f in (compiled, function):
        leaves = [t.clone().requires_grad_() for t in (q, k, v)]
        value, lse = f(*leaves, mask)
        grads.append(torch.autograd.grad(value.square().sum() + lse.sum(), leaves))
    for found, expected in zip(*grads, strict=True):
        torch.testing.assert_close(found, expected)


@pytest.mark.compiles
@both_ways
def test_the_algebra_is_exported(function: nn.Module) -> None:
    arguments = plain()
    exported = torch.export.export(function, arguments).module()
    other = tuple(t if i == 3 else t.flip(-1) + 0.5 for i, t in enumerate(arguments))
    for found, expected in zip(exported(*other), function(*other), strict=True):
        torch.testing.assert_close(found, expected)


@pytest.mark.compiles
@both_ways
def test_the_algebra_is_mapped_over_further_axes(function: Function) -> None:
    q, k, v, mask = plain(b=6)
    k, v, mask = (t.unflatten(0, (3, 2)) for t in (k, v, mask))
    found = torch.vmap(function, in_dims=(None, 0, 0, 0))(q, k, v, mask)
    for i in range(3):
        for one, other in zip(found, function(q, k[i], v[i], mask[i]), strict=True):
            torch.testing.assert_close(one[i], other)


@pytest.mark.compiles
def test_single_points_are_mapped_too() -> None:
    q, k, v, _ = plain(b=6)
    k, v = (t[..., :1, :].unflatten(0, (3, 2)) for t in (k, v))
    found = torch.vmap(lambda k, v: AttentionState.observe(q, k, v).value)(k, v)
    torch.testing.assert_close(found, v.expand(-1, -1, -1, -1, S, -1))

"""Checks of what users give: what is wrong, where, and what to do about it."""

import difflib
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from math import isfinite, isnan, sqrt
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

FEW = 32  # numbers that are checked one by one
LONGEST = 1000  # letters of names in a message: those of a damaged file have no end


def finite(
    name: str, tensor: Tensor, mask: Tensor | None = None, *, first: int = 0, taken: Tensor | None = None
) -> None:
    """Refuse NaN and infinity, naming the first index; what the mask leaves out may hold anything.

    Args:
        first: the number of points before `tensor` in the data it was cut from.
        taken: the same numbers as the model takes them, in its units and precision: these must be finite,
            and leave room for the squares that norms are made of.
    """
    limit = torch.finfo(tensor.dtype).max if taken is None else largest(taken.dtype)
    taken = tensor if taken is None else taken
    if traced() or _surely_within(taken, limit):
        return
    good = taken.abs() <= limit
    if mask is not None:
        good = good | ~mask[..., None]
    if bool(good.all()):
        return
    bad = ~good
    b, n, c = (int(i) for i in bad.nonzero()[0])
    value, inside = tensor[b, n, c].item(), taken[b, n, c].item()
    as_taken = f", which the model takes as {inside:.3g} in its {taken.dtype}" if isfinite(value) else ""
    raise ValueError(
        f"{name}[{b}, {n + first}, {c}] is {value}{as_taken}: every value of {name} must be "
        f"finite, and at most {limit:.2g} in size; leave points out with mask= (True = real)"
    )


def largest(dtype: torch.dtype) -> float:
    """The largest number that a model of this precision takes: grown a thousandfold its square is finite."""
    most = torch.finfo(dtype).max
    return most if dtype == torch.float16 else sqrt(most) / 1000  # squares of float16 are float32


def _surely_within(tensor: Tensor, limit: float) -> bool:
    """Whether surely no number is beyond the limit: a few are checked one by one, outside of PyTorch."""
    if tensor.numel() <= FEW:
        return within(tensor.reshape(-1).tolist(), limit)  # on a GPU, too: copied in the time a sum would be
    wide = torch.promote_types(tensor.dtype, torch.float32)
    return bool(_squares(tensor).item() <= min(limit * limit, torch.finfo(wide).max))  # limit**2 may overflow


def within(numbers: Sequence[float], limit: float) -> bool:
    """Whether all are within the limit, and none is NaN."""
    return not numbers or (-limit <= min(numbers) and max(numbers) <= limit and not any(map(isnan, numbers)))


def _squares(tensor: Tensor) -> Float[Tensor, ""]:
    """The sum of all squares, none of which is larger."""
    flat = tensor.detach().to(torch.promote_types(tensor.dtype, torch.float32)).flatten()
    return torch.dot(flat, flat)


def surely_finite(*tensors: Tensor) -> bool:
    """Whether all their squares add up to little, as none with NaN or huge ones do: one wait for a GPU."""
    if traced():
        return True
    if len(tensors) == 1 and tensors[0].numel() <= FEW:
        return _surely_within(tensors[0], largest(tensors[0].dtype))
    sums = [_squares(t) for t in tensors]
    return bool(sum(sums[1:], sums[0]).item() <= largest(tensors[0].dtype) ** 2)


def first_not_finite(named: Mapping[str, Tensor]) -> str | None:
    """The name of the first tensor with a NaN or infinity in it, if any: one wait for a GPU."""
    names = [name for name, tensor in named.items() if tensor.is_floating_point()]
    if not names:
        return None
    where = named[names[0]].device
    good = torch.stack([named[name].isfinite().all().to(where, non_blocking=True) for name in names])
    return next((name for name, fine in zip(names, good.tolist(), strict=True) if not fine), None)


def traced(device: torch.device | None = None) -> bool:
    """Whether numbers cannot be checked: a compiler, a function transform or a capture is at work."""
    if torch.compiler.is_compiling() or torch._C._functorch.maybe_current_level() is not None:
        return True
    return device is not None and device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def all_finite(name: str, tensor: Tensor) -> None:
    """Refuse a tensor with NaN or infinity in it."""
    if not traced() and not bool(tensor.isfinite().all()):
        raise ValueError(f"{name} must be finite, not {tensor.detach().flatten()[:5].tolist()}")


def named(found: Mapping[str, Tensor], needed: Set[str], allowed: Set[str] = frozenset()) -> None:
    """Refuse tensors of a file that are missing or unknown."""
    if missing := needed - found.keys():
        raise ValueError(f"lacks {sorted(missing)}")
    if unknown := found.keys() - needed - allowed:
        raise ValueError(f"holds tensors of unknown names: {sorted(unknown)[:5]}")


def remembered(found: Mapping[str, Tensor]) -> None:
    """Refuse tensors that cannot be a state's: of different batches, not finite, or with counts below 0."""
    if len({tensor.shape[:1] for tensor in found.values()}) != 1:
        raise ValueError("holds tensors of different batches")
    if (bad := first_not_finite(found)) is not None:
        raise ValueError(f"holds a {bad} with NaN or infinity in it")
    count = found.get("count")
    if count is not None and (count.dtype != torch.int64 or bool((count < 0).any())):
        raise ValueError("holds counts that are no whole numbers of at least 0")


def tensors(**given: object) -> None:
    """Refuse what is not a tensor."""
    for name, value in given.items():
        if not isinstance(value, Tensor):
            raise TypeError(f"{name} must be a tensor, not {type(value).__name__}: use torch.as_tensor")


def as_tensor(name: str, given: Any, device: torch.device) -> Tensor:
    """Numbers as a tensor: one as it is, arrays, lists and columns of frames in their own precision."""
    if np.ma.is_masked(given):
        raise TypeError(f"{name} is a masked array, whose mask would be lost: give x.data, and mask=~x.mask")
    try:
        if not isinstance(given, Tensor):
            array = np.asarray(given)  # in the order of bytes and rows that PyTorch takes
            native = array.astype(array.dtype.newbyteorder("="), "C", copy=False)
            given = torch.tensor(native, device=device)
        tensor: Tensor = given
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(
            f"{name} must be numbers, in a tensor, an array or lists, not {type(given).__name__} ({error}): "
            "turn words and dates into numbers first, and leave out what is missing"
        ) from error
    dense(name, tensor)
    if tensor.is_complex():
        raise TypeError(f"{name} holds {tensor.dtype}, but real numbers are needed: give both parts")
    return tensor


def one_each(name: str, given: Any, batch: int, device: torch.device) -> Float[Tensor, " b"]:
    """One number for each stream, from as many or from a single one."""
    tensor = as_tensor(name, given, device)
    if tensor.ndim > 1 or tensor.numel() not in (1, batch):
        raise ValueError(f"{name} has shape {tuple(tensor.shape)}, but one number is needed, or {batch}")
    return tensor.reshape(-1).expand(batch)


def points(name: str, tensor: Tensor, dim: int, like: Tensor | None = None, *, device: torch.device) -> None:
    """Refuse anything but floating (b, n, dim) on `device`, with the batch and points of `like`."""
    if not isinstance(tensor, Tensor):
        kind, array = type(tensor).__name__, f"{name}.to_numpy()" if hasattr(tensor, "to_numpy") else name
        use = f"torch.as_tensor({array}, dtype=torch.float32) makes one of numbers"
        raise TypeError(f"{name} must be a floating-point tensor, not {kind}: {use}")
    if not tensor.is_floating_point():
        raise TypeError(f"{name} must be a floating-point tensor, not {tensor.dtype}: use {name}.float()")
    dense(name, tensor)
    if tensor.ndim != 3 or tensor.shape[-1] != dim:
        one = tensor.ndim < 3 and (dim == 1 or tensor.shape[-1:] == (dim,))
        raise ValueError(
            f"{name} has shape {tuple(tensor.shape)}, but (batch, points, {dim}) is needed"
            + (f": if these are the points of one task, {name}.reshape(1, -1, {dim})" if one else "")
        )
    if like is not None and (tensor.size(0) != like.size(0) or tensor.size(1) != like.size(1)):
        raise ValueError(
            f"{name} has (batch, points) {tuple(tensor.shape[:2])}, but x has {tuple(like.shape[:2])}: "
            "they must be the same"
        )
    if tensor.device != device:
        raise ValueError(
            f"{name} is on {tensor.device}, but the model is on {device}: "
            f"move one of them, for instance {name}.to({str(device)!r})"
        )


def per_point(name: str, tensor: Tensor, like: Tensor) -> None:
    """Refuse anything but one number for each point of `like`, on the same device."""
    tensors(**{name: tensor})
    dense(name, tensor)
    if tensor.shape != like.shape[:2] or tensor.device != like.device or tensor.is_complex():
        raise ValueError(
            f"{name} has shape {tuple(tensor.shape)} on {tensor.device}, but one entry a point is "
            f"needed: {tuple(like.shape[:2])} on {like.device}, of real numbers"
        )


def mask(tensor: Tensor, like: Tensor) -> None:
    """Refuse a mask that is not boolean (batch, points)."""
    if not isinstance(tensor, Tensor):
        kind = type(tensor).__name__
        raise TypeError(f"mask must be a boolean tensor (True = real), not {kind}: use torch.as_tensor")
    if tensor.dtype != torch.bool:
        raise TypeError(f"mask must be boolean (True = real), not {tensor.dtype}: use mask != 0")
    per_point("mask", tensor, like)


def dense(name: str, tensor: Tensor) -> None:
    """Refuse a sparse tensor."""
    if tensor.layout is not torch.strided:
        raise TypeError(f"{name} is {tensor.layout}: sparse tensors are not taken; use {name}.to_dense()")


def positive(name: str, number: int) -> None:
    """Refuse a size that is not a whole number of at least one."""
    if isinstance(number, bool) or not isinstance(number, int) or number < 1:
        raise ValueError(f"{name} must be a whole number of at least 1, not {number!r}")


def heads(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Refuse queries, keys and values that do not have the same axes of heads, at least one."""
    tensors(q=q, k=k, v=v)
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        dense(name, tensor)
        if not tensor.is_floating_point() or tensor.device != q.device:
            raise TypeError(
                f"{name} holds {tensor.dtype} on {tensor.device}, but q, k and v must hold floating-point "
                "numbers on one device"
            )
    fits = q.ndim >= 3 and k.shape == v.shape and k.shape[1:-2] == q.shape[:-2] and k.shape[-1] == q.shape[-1]
    if not fits:
        raise ValueError(
            f"q, k and v have shapes {tuple(q.shape)}, {tuple(k.shape)} and {tuple(v.shape)}, but "
            "(*heads, slots, channels) and twice (batch, *heads, points, channels) are needed, with at least "
            "one axis of heads: for a single head use q[None], k[:, None] and v[:, None]"
        )


def state(verb: str, mine: object, theirs: object) -> None:
    """Refuse to merge or remove what is no state of the same kind."""
    if type(theirs) is not type(mine):
        raise TypeError(
            f"cannot {verb} a {type(theirs).__name__} and a {type(mine).__name__}: both must be states of "
            "one model, as its observe, condition and update give them"
        )


def alike(verb: str, mine: Tensor, theirs: Tensor, fingerprints: tuple[str | None, str | None]) -> None:
    """Refuse to merge or remove states that cannot belong to the same model, by their values and weights."""
    if mine.shape != theirs.shape or mine.device != theirs.device or mine.dtype != theirs.dtype:
        here, there = (f"{tuple(t.shape)} {t.dtype} on {t.device}" for t in (mine, theirs))
        raise ValueError(
            f"cannot {verb} states that differ: {here} and {there}; both must come from the same "
            "model and batch, in one precision on one device (state.to moves one)"
        )
    own, other = fingerprints
    if own and other and own != other:
        made = f"made by different weights ({own} and {other})"
        raise ValueError(f"cannot {verb} states {made}: observe the data again with one model")


def goes_on(value: Tensor, shape: tuple[int, ...], device: torch.device) -> None:
    """Refuse to scan from the state of other slots, another batch or another device, by its value."""
    if value.shape != shape or value.device != device:
        raise ValueError(
            f"cannot scan from a state of {tuple(value.shape)} on {value.device}: these points give "
            f"states of {shape} on {device}; both must come from the same model and batch, on one device"
        )


def device(name: str | torch.device) -> torch.device:
    """The device of that name, if there is one here."""
    try:
        where = torch.device(name)
        torch.empty(0, device=where)
    except (RuntimeError, AssertionError, TypeError, ValueError) as error:  # the second without CUDA
        raise ValueError(
            f"there is no device {str(name)!r} here ({str(error).splitlines()[0]}): take another, such as cpu"
        ) from error
    return where


@contextmanager
def extra(name: str, what: str) -> Iterator[None]:
    """Imports that an extra of the package brings; an ImportError says which extra, and what needs it."""
    try:
        yield
    except ImportError as error:
        raise ImportError(f"{what} ({error}): pip install 'constmem[{name}]'") from error


def known(what: str, name: str, names: Any, of: str = "") -> str:
    """`name` if it is one of `names`; otherwise an error with the nearest ones."""
    if name in names:
        return name
    near = difflib.get_close_matches(name, list(names), n=3)
    every = ", ".join(filter(None, names))
    every = every if len(every) <= LONGEST else f"{every[:LONGEST]} ..."
    hint = f"did you mean {' or '.join(map(repr, near))}?" if near else f"choose from {every}"
    raise ValueError(f"there is no {what} {name[:LONGEST]!r}{of}: {hint}")

"""States of random points, and the softmaxes they stand for, written in numpy."""

from dataclasses import replace

import numpy as np
import torch
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from constmem import AttentionState
from constmem.core.algebra import EMPTY

Points = tuple[Tensor, Tensor, Tensor]
B, H, S, C = 2, (2, 3), 4, 5

seeds = st.integers(0, 2**31)
sizes = st.integers(0, 9)
sharpnesses = st.sampled_from([1e-3, 1.0, 30.0, 1e4])


def points(
    n: int, *, seed: int = 0, sharpness: float = 1.0, dtype: torch.dtype = torch.float64, b: int = B
) -> Points:
    """Queries, keys and values of n points; scores spread over about +-sharpness."""
    random = torch.Generator().manual_seed(seed)
    q = torch.randn(*H, S, C, generator=random, dtype=torch.float64)
    q = sharpness * q / q.norm(dim=-1, keepdim=True)
    k = torch.randn(b, *H, n, C, generator=random, dtype=torch.float64)
    v = torch.randn(b, *H, n, C, generator=random, dtype=torch.float64)
    return q.to(dtype), k.to(dtype), v.to(dtype)


def some(data: Points, start: int, stop: int) -> AttentionState:
    q, k, v = data
    return AttentionState.observe(q, k[..., start:stop, :], v[..., start:stop, :])


def softmax(
    q: Tensor, k: Tensor, v: Tensor, added: Tensor | None = None
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Value and log-normaliser in numpy's float64, one softmax after another; -inf leaves points out."""
    queries, keys, values = (t.detach().double().numpy() for t in (q, k, v))
    b, *heads, n, c = keys.shape
    bias = np.zeros((b, n)) if added is None else added.double().numpy()
    value = np.zeros((b, *heads, queries.shape[-2], c))
    lse = np.full(value.shape[:-1], EMPTY)
    for i, *h, s in np.ndindex(lse.shape):
        here = (i, *h)
        scores = keys[here] @ queries[(*h, s)] + bias[i]
        top = scores.max(initial=-np.inf)
        if top > -np.inf:
            weights = np.exp(scores - top)
            value[(*here, s)] = weights @ values[here] / weights.sum()
            lse[(*here, s)] = top + np.log(weights.sum())
    return value, lse


def assert_state(state: AttentionState, value: object, lse: object, tolerance: float = 1e-9) -> None:
    torch.testing.assert_close(state.value, torch.as_tensor(value).double(), atol=tolerance, rtol=0)
    torch.testing.assert_close(state.lse, torch.as_tensor(lse).double(), atol=tolerance, rtol=tolerance)


def assert_same(left: AttentionState, right: AttentionState, tolerance: float = 1e-9) -> None:
    assert_state(left, right.value, right.lse, tolerance)
    assert torch.equal(left.count, right.count)


def assert_identical(left: AttentionState, right: AttentionState) -> None:
    assert torch.equal(left.value, right.value)
    assert torch.equal(left.lse, right.lse)
    assert torch.equal(left.count, right.count)


def copy_of(state: AttentionState) -> AttentionState:
    return replace(state, value=state.value.clone(), lse=state.lse.clone(), count=state.count.clone())


def nothing(b: int = B) -> AttentionState:
    return AttentionState.empty((b, *H, S), C)

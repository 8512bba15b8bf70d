"""One contract for every kernel: agree with loops over float64 numbers, forwards and backwards."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from constmem import kernels
from constmem.kernels.operators import KERNELS, REFERENCE, Kernel, choose

Array = NDArray[np.float64]
NOTHING = -1e30
ALL_DTYPES = torch.float64, torch.float32, torch.bfloat16, torch.float16
DTYPES = {
    "blocked-cpu": (torch.float32,),
    "fused-cuda": (torch.float32, torch.bfloat16, torch.float16),
}
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 4e-2, torch.float16: 5e-3}
SIZES = 1, 2, 7, 16, 33, 256, 515, 1100
WIDTHS = 5, 8, 16
BIASES = "none", "weights", "mask"


def cases() -> Iterator[object]:
    for kernel in KERNELS:
        for dtype in DTYPES.get(kernel.name, ALL_DTYPES):
            device = "cuda" if kernel.name.endswith("cuda") else "cpu"
            yield case(kernel, dtype, device)
    for dtype in ALL_DTYPES:
        yield case(REFERENCE, dtype, "cuda")


def case(kernel: Kernel, dtype: torch.dtype, device: str) -> object:
    gone = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
    marks = [pytest.mark.gpu, gone] if device == "cuda" else []
    name = f"{kernel.name}-{str(dtype).removeprefix('torch.')}-{device}"
    return pytest.param(kernel, dtype, device, marks=marks, id=name)


every_kernel = pytest.mark.parametrize(("kernel", "dtype", "device"), list(cases()))


def inputs(
    n: int, width: int, bias: str, dtype: torch.dtype, device: str, sharpness: float = 1.0
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Two tasks, three heads, five queries; of the mask, the second task has one point at least."""
    random = torch.Generator().manual_seed(n + width)
    q = sharpness * torch.randn(3, 5, width, generator=random)
    k, v = torch.randn(2, 2, 3, n, width, generator=random).unbind(0)
    added = None
    if bias == "weights":
        added = torch.randn(2, n, generator=random)
    if bias == "mask":
        added = torch.where(torch.rand(2, n, generator=random) < 0.5, 0.0, NOTHING)
        added[:, n // 2] = 0.0
    wide = torch.promote_types(dtype, torch.float32)
    moved = [t.to(dtype).to(device) for t in (q, k, v)]
    return moved[0], moved[1], moved[2], None if added is None else added.to(wide).to(device)


def supported(kernel: Kernel, dtype: torch.dtype, device: str, **options: float) -> Iterator[tuple]:
    """The arguments, of all sizes, widths and biases, that a kernel says it can take."""
    found = 0
    for n in SIZES:
        for width in WIDTHS:
            for bias in BIASES:
                arguments = inputs(n, width, bias, dtype, device, **options)
                if kernel.supports(*arguments):
                    found += 1
                    yield arguments
    assert found >= 9, f"{kernel.name} supports {found} of the arguments it is meant for"


def numbers(tensor: Tensor) -> Array:
    array: Array = tensor.detach().double().cpu().numpy()
    return array


def by_loops(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> tuple[Array, Array]:
    """softmax(q k' + bias) v and the logarithm of its normaliser, one query at a time."""
    queries, keys, values = numbers(q), numbers(k), numbers(v)
    b, h, n, c = keys.shape
    added = np.zeros((b, n)) if bias is None else numbers(bias)
    value, lse = np.zeros((b, h, queries.shape[1], c)), np.zeros((b, h, queries.shape[1]))
    for i, j, s in np.ndindex(lse.shape):
        scores = keys[i, j] @ queries[j, s] + added[i]
        weights = np.exp(scores - scores.max())
        value[i, j, s] = weights @ values[i, j] / weights.sum()
        lse[i, j, s] = scores.max() + np.log(weights.sum())
    return value, lse


def whole_gradient(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, grad_value: Tensor, grad_lse: Tensor | None
) -> list[Tensor]:
    """Gradients by autograd of the plain softmax in float64."""
    leaves = [t.detach().double().cpu().requires_grad_() for t in (q, k, v)]
    scores = leaves[0] @ leaves[1].mT
    if bias is not None:
        scores = scores + bias.double().cpu()[:, None, None, :]
    out = (scores.softmax(-1) @ leaves[2] * grad_value.double().cpu()).sum()
    if grad_lse is not None:
        out = out + (scores.logsumexp(-1) * grad_lse.double().cpu()).sum()
    return list(torch.autograd.grad(out, leaves))


def assert_near(found: Tensor, expected: Tensor | Array, tolerance: float) -> None:
    wanted = torch.as_tensor(expected).double()
    scale = max(1.0, float(wanted.abs().max()))
    assert found.shape == wanted.shape
    assert float((found.detach().double().cpu() - wanted).abs().max()) <= tolerance * scale


@every_kernel
def test_every_kernel_agrees_with_loops_over_float64(kernel: Kernel, dtype: torch.dtype, device: str) -> None:
    for arguments in supported(kernel, dtype, device):
        value, lse = kernel.forward(*arguments)
        expected_value, expected_lse = by_loops(*arguments)
        assert_near(value, expected_value, TOLERANCE[dtype])
        assert_near(lse, expected_lse, TOLERANCE[dtype])


@every_kernel
def test_the_normaliser_is_float32_or_better(kernel: Kernel, dtype: torch.dtype, device: str) -> None:
    for arguments in supported(kernel, dtype, device):
        assert kernel.forward(*arguments)[1].dtype == torch.promote_types(dtype, torch.float32)


@every_kernel
def test_sharp_scores_neither_overflow_nor_vanish(kernel: Kernel, dtype: torch.dtype, device: str) -> None:
    sharpness = 1e3 if dtype == torch.float16 else 1e4  # what its range allows
    for arguments in supported(kernel, dtype, device, sharpness=sharpness):
        value, lse = kernel.forward(*arguments)
        _, expected_lse = by_loops(*arguments)
        assert bool(value.isfinite().all())
        assert_near(lse, expected_lse, TOLERANCE[dtype])


@every_kernel
def test_what_is_masked_out_has_no_influence(kernel: Kernel, dtype: torch.dtype, device: str) -> None:
    for q, k, v, bias in supported(kernel, dtype, device):
        if bias is None or not bool((bias == NOTHING).any()):
            continue
        out = (bias == NOTHING)[:, None, :, None]
        value, lse = kernel.forward(q, k, v, bias)
        other_value, other_lse = kernel.forward(q, k.masked_fill(out, 9.0), v.masked_fill(out, 99.0), bias)
        assert torch.equal(value, other_value)
        assert torch.equal(lse, other_lse)


@every_kernel
def test_where_all_is_masked_out_the_normaliser_says_so(
    kernel: Kernel, dtype: torch.dtype, device: str
) -> None:
    for q, k, v, bias in supported(kernel, dtype, device):
        if bias is None:
            continue
        value, lse = kernel.forward(q, k, v, torch.full_like(bias, NOTHING))
        assert bool((lse < NOTHING / 2).all())
        assert bool(value.isfinite().all())


@every_kernel
@pytest.mark.parametrize("with_lse", [False, True])
def test_gradients_of_parts_are_those_of_the_whole(
    kernel: Kernel, dtype: torch.dtype, device: str, with_lse: bool
) -> None:
    """Given the value and the normaliser of the whole, each part knows its own gradients."""
    for q, k, v, bias in supported(kernel, dtype, device):
        value, lse = (torch.as_tensor(t) for t in by_loops(q, k, v, bias))
        grad_value = torch.randn(value.shape, dtype=torch.float64).to(dtype)
        grad_lse = torch.randn(lse.shape, dtype=torch.float64) if with_lse else None
        whole = value.to(dtype), lse.to(torch.promote_types(dtype, torch.float32)), grad_value
        whole_value, whole_lse, whole_grad = (t.to(device) for t in whole)
        n = k.shape[-2]
        parts = [
            kernel.gradients(
                q,
                k[:, :, here],
                v[:, :, here],
                None if bias is None else bias[:, here],
                (whole_value, whole_lse),
                whole_grad,
                None if grad_lse is None else grad_lse.to(whole_lse),
            )
            for here in ((slice(0, n // 3), slice(n // 3, n)) if n > 2 else (slice(0, n),))
        ]
        expected_q, expected_k, expected_v = whole_gradient(q, k, v, bias, grad_value, grad_lse)
        assert_near(sum(part[0].double() for part in parts), expected_q, 3 * TOLERANCE[dtype])
        assert_near(torch.cat([part[1] for part in parts], -2), expected_k, 3 * TOLERANCE[dtype])
        assert_near(torch.cat([part[2] for part in parts], -2), expected_v, 3 * TOLERANCE[dtype])


@pytest.mark.parametrize("n", [1, 6])
@pytest.mark.parametrize("bias", ["none", "weights"])
def test_attention_and_its_normaliser_are_differentiable(n: int, bias: str) -> None:
    q, k, v, added = inputs(n, 3, bias, torch.float64, "cpu")
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]
    assert torch.autograd.gradcheck(lambda q, k, v: kernels.attend(q, k, v, added), leaves)
    assert torch.autograd.gradcheck(lambda q, k, v: kernels.attend(q, k, v, added)[1], leaves)


def test_long_contexts_in_float32_are_differentiable() -> None:
    q, k, v, bias = inputs(1100, 8, "mask", torch.float32, "cpu")
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]
    value, lse = kernels.attend(*leaves, bias)
    grad_value, grad_lse = torch.randn_like(value), torch.randn_like(lse)
    found = torch.autograd.grad((value, lse), leaves, (grad_value, grad_lse))
    for one, other in zip(found, whole_gradient(q, k, v, bias, grad_value, grad_lse), strict=True):
        assert_near(one, other, 1e-5)


def test_log_weights_have_gradients_too() -> None:
    q, k, v, bias = inputs(6, 3, "weights", torch.float64, "cpu")
    assert bias is not None
    assert torch.autograd.gradcheck(lambda bias: kernels.attend(q, k, v, bias), [bias.requires_grad_()])


def test_a_cpu_gets_the_fused_kernel_where_it_can() -> None:
    few = inputs(7, 5, "mask", torch.float64, "cpu")
    assert choose(*few).name == "fused-cpu"


def test_one_point_gets_the_plain_kernel() -> None:
    assert choose(*inputs(1, 8, "none", torch.float32, "cpu")) is REFERENCE


def test_a_bias_that_learns_gets_the_plain_kernel() -> None:
    for n in (7, 1100):
        q, k, v, bias = inputs(n, 8, "weights", torch.float32, "cpu")
        assert bias is not None
        assert choose(q, k, v, bias.requires_grad_()) is REFERENCE


def test_mixed_dtypes_get_the_plain_kernel() -> None:
    for n in (7, 1100):
        q, k, v, bias = inputs(n, 8, "none", torch.float32, "cpu")
        assert choose(q.double(), k, v, bias) is REFERENCE


def test_function_transforms_get_the_plain_kernel() -> None:
    taken = []

    def look(k: Tensor) -> Tensor:
        taken.append(choose(q, k, k, None))
        return k

    q, k, _, _ = inputs(7, 8, "none", torch.float32, "cpu")
    torch.vmap(look)(k[None])
    assert taken == [REFERENCE]


def test_the_last_kernel_takes_anything() -> None:
    assert KERNELS[-1] is REFERENCE
    assert REFERENCE.supports(torch.empty(0), None)


@pytest.mark.compiles
def test_compiled_code_is_given_a_fused_kernel_too() -> None:
    found: list[str] = []

    def spy(module: torch.fx.GraphModule, _: object) -> object:
        found.extend(str(node.target) for node in module.graph.nodes if node.op == "call_function")
        return module.forward

    q, k, v = torch.randn(2, 5, 8), torch.randn(3, 2, 20, 8), torch.randn(3, 2, 20, 8)
    compiled = torch.compile(kernels.attend, backend=spy, fullgraph=True)
    value, lse = compiled(q, k, v)
    assert any("attention" in name for name in found)
    assert not any("logsumexp" in name for name in found)
    expected = kernels.operators.forward_plainly(q, k, v, None)
    assert torch.allclose(value, expected[0], atol=1e-5)
    assert torch.allclose(lse, expected[1], atol=1e-5)

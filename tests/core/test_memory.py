"""Memory that does not grow, measured: the peak of every allocation while a function runs."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from literal import Literal
from torch import Tensor

from constmem import CMANP, Stream, Window
from constmem.core import costs
from constmem.neural_processes import MODELS
from constmem.neural_processes.points import normal

MB = 2**20
FEW, MANY = 20_000, 100_000
Peak = Callable[..., int]


@pytest.fixture
def model() -> CMANP:
    return CMANP(dim_x=2, dim_y=1, dim=32, depth=3, num_slots=32, num_latents=16, hidden=32).eval()


def points(n: int, chunk: int = 1000) -> Iterator[tuple[Tensor, Tensor]]:
    """Points that exist a thousand at a time."""
    for i in range(n // chunk):
        random = torch.Generator().manual_seed(i)
        yield torch.rand(1, chunk, 2, generator=random), torch.rand(1, chunk, 1, generator=random)


def assert_flat(peak: Peak, few: Callable[[], object], many: Callable[[], object], limit: int) -> None:
    """The smaller of two peaks each: what other threads allocate meanwhile only adds."""
    small, large = (min(peak(work, before=few), peak(work, before=few)) for work in (few, many))
    assert small > 0
    assert large < limit
    assert abs(large - small) < MB


def test_the_measure_sees_what_is_held(peak: Peak) -> None:
    assert 16 * MB <= peak(lambda: torch.zeros(4 * MB)) < 17 * MB
    assert peak(lambda: [torch.zeros(4 * MB).sum() for _ in range(5)]) < 17 * MB  # one after another


def test_conditioning_on_a_stream_needs_the_memory_of_one_chunk(peak: Peak, model: CMANP) -> None:
    """100,000 points are 1.2 MB, their tokens (32 wide) 13 MB, their keys and values 77 MB."""

    def condition(n: int) -> None:
        with torch.no_grad():
            assert int(model.condition_chunks(points(n)).count) == n

    assert_flat(peak, lambda: condition(FEW), lambda: condition(MANY), 8 * MB)


def test_conditioning_on_a_tensor_needs_the_memory_of_one_chunk(peak: Peak, model: CMANP) -> None:
    """The points themselves are the caller's; 13 MB of tokens would break the limit."""
    x, y = torch.rand(1, MANY, 2), torch.rand(1, MANY, 1)
    mask = torch.rand(1, MANY) < 0.9

    def condition(n: int) -> None:
        with torch.no_grad():
            model.condition(x[:, :n], y[:, :n], chunk=1000)

    def masked(n: int) -> None:
        with torch.no_grad():
            model.condition(x[:, :n], y[:, :n], mask=mask[:, :n], chunk=1000)

    assert_flat(peak, lambda: condition(FEW), lambda: condition(MANY), 8 * MB)
    assert_flat(peak, lambda: masked(FEW), lambda: masked(MANY), 8 * MB)


def test_updating_needs_the_same_whatever_was_seen(peak: Peak, model: CMANP) -> None:
    x, y = torch.rand(1, 1, 2), torch.rand(1, 1, 1)
    with torch.no_grad():
        few, many = (model.condition_chunks(points(n)) for n in (1000, MANY))
        assert few.nbytes == many.nbytes
        peaks = [peak(lambda state=state: model.update(state, x, y)) for state in (few, many)]
    assert abs(peaks[0] - peaks[1]) < MB / 16
    assert max(peaks) < 2 * MB


def test_querying_needs_the_memory_of_one_chunk_and_its_outputs(peak: Peak, model: CMANP) -> None:
    """Mean and deviation of 100,000 targets are 0.8 MB; their tokens 13 MB, their shares more."""
    xt = torch.rand(1, MANY, 2)
    with torch.no_grad():
        state = model.condition_chunks(points(1000))
    outputs = 2 * 4  # bytes a target

    def query(m: int) -> None:
        with torch.no_grad():
            model.query(state, xt[:, :m], chunk=1000)

    few, many = peak(lambda: query(FEW)), peak(lambda: query(MANY))
    assert many < 10 * MB
    assert abs((many - outputs * MANY) - (few - outputs * FEW)) < MB


def test_a_stream_needs_no_more_the_longer_it_runs(peak: Peak, model: CMANP) -> None:
    def run(n: int, forget: Window | None) -> None:
        stream = Stream(model, forget=forget)
        for x, y in points(n):
            stream.observe(x, y)
        stream.predict(x)

    for forget in (None, Window(5000, 4)):
        assert_flat(
            peak, lambda forget=forget: run(FEW, forget), lambda forget=forget: run(MANY, forget), 10 * MB
        )


def test_training_needs_the_memory_of_one_chunk(peak: Peak, model: CMANP) -> None:
    """20,000 points' keys and values alone are 15 MB, and a graph keeps several times that."""
    n = FEW
    x, y, xt, yt = (torch.rand(1, m, d) for m, d in ((n, 2), (n, 1), (50, 2), (50, 1)))

    def lean(n: int) -> None:
        (-model(x[:, :n], y[:, :n], xt, chunk=1000).log_prob(yt).mean()).backward()

    def dense() -> None:
        literal = Literal(model, chunk=None)
        (-normal(*literal.query(literal.condition(x, y), xt)).log_prob(yt).mean()).backward()

    limit = 24 * MB
    assert_flat(peak, lambda: lean(n // 10), lambda: lean(n), limit)
    assert peak(dense) > 4 * limit


def test_training_on_a_stream_keeps_the_points_alone(peak: Peak, model: CMANP) -> None:
    """12 bytes a point are kept for the backward pass, where a token alone would be 128."""

    def step(n: int) -> None:
        xt = torch.rand(1, 50, 2)
        model.query(model.condition_chunks(points(n)), xt).mean.sum().backward()

    few, many = peak(lambda: step(2000)), peak(lambda: step(50_000))
    assert many - few < 48_000 * 12 + 2 * MB


# Models that store their points ask before they need more than there is

STORING = ("tnpd", "eqtnp", "lbanp", "canp", "anp", "bnp", "banp")


def storing(name: str) -> Any:
    sizes = {"hidden": 48} if name in ("tnpd", "eqtnp", "lbanp") else {}
    samples = {"num_samples": 3, "num_train_samples": 2} if name in ("anp", "bnp", "banp") else {}
    return MODELS[name](dim_x=2, dim_y=1, dim=32, **sizes, **samples)


@pytest.mark.parametrize("name", STORING)
@pytest.mark.parametrize("learning", [False, True])
def test_estimated_peaks_are_right_within_a_factor_of_two(peak: Peak, name: str, learning: bool) -> None:
    model, n, m = storing(name), 800, 200
    x, y, xt, yt = (torch.rand(2, k, d) for k, d in ((n, 2), (n, 1), (m, 2), (m, 1)))

    def work() -> None:
        if learning:
            model.loss(x, y, xt, yt).backward()
        else:
            with torch.no_grad():
                model.query(model.condition(x, y), xt)

    estimate = model.estimated_peak(2, n, m, learning=learning)
    assert estimate / 2 < peak(work) < 2 * estimate


@pytest.mark.parametrize("name", STORING)
def test_too_little_memory_is_said_before_it_is_gone(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = storing(name)
    x, y, xt, yt = (torch.rand(2, k, d) for k, d in ((50, 2), (50, 1), (9, 2), (9, 1)))
    state = model.condition(x, y)
    monkeypatch.setattr(costs, "available", lambda _: 100_000)
    model.query(state, xt)  # small inputs are never asked about
    monkeypatch.setattr(costs, "WORTH_ASKING", 0)
    message = rf"^{type(model).__name__}, given 50 points and %s targets in a batch of 2, would need about "
    advice = r".* but cpu has 0.0 GB free: .*smaller batch .*chunk=.* constant memory such as CMANP$"
    with pytest.raises(MemoryError, match=message % 9 + advice):
        model.loss(x, y, xt, yt)
    with pytest.raises(MemoryError, match=message % 9 + advice):
        model(x, y, xt)
    monkeypatch.setattr(costs, "available", lambda _: 1000)
    with torch.no_grad(), pytest.raises(MemoryError, match=message % 0 + advice):
        model.query(state, xt)
    with pytest.raises(MemoryError, match="which stores a copy of all points, would need about"):
        model.condition(x, y)
    monkeypatch.setattr(costs, "available", lambda _: None)  # nobody knows
    model.loss(x, y, xt, yt)


def test_models_of_constant_memory_never_ask(model: CMANP, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(costs, "WORTH_ASKING", 0)
    monkeypatch.setattr(costs, "available", lambda _: 0)
    x, y = torch.rand(1, 50, 2), torch.rand(1, 50, 1)
    for constant in (model, MODELS["cnp"](dim_x=2, dim_y=1), MODELS["np"](dim_x=2, dim_y=1)):
        assert constant.estimated_peak(10**6, 10**9, 10**9) == 0
        constant.query(constant.condition(x, y), x)
        constant.loss(x, y, x, y)


def test_what_is_free_is_what_the_machine_and_the_group_leave(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cpu = torch.device("cpu")
    free = costs.available(cpu)
    assert free is None or free > MB
    limit, used = tmp_path / "max", tmp_path / "current"
    monkeypatch.setattr(costs, "_CGROUPS", ((limit, used),))
    monkeypatch.setattr(costs, "_of_machine", lambda: 1000)
    assert costs.available(cpu) == 1000  # there is no such group
    used.write_text("250\n")
    for content, expected in (("max\n", 1000), ("900\n", 650), ("5000\n", 1000)):
        limit.write_text(content)
        assert costs.available(cpu) == expected
    assert costs.available(torch.device("meta")) is None

"""Which steps on events are captured, and how they are replayed: shown by a graph that only remembers."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from constmem.data import Events
from constmem.training import steps
from tests.laws.models import stream


class Recorder:
    """Stands in for CUDA: what is run under `graph` is not run, but kept to be replayed."""

    def __init__(self) -> None:
        self.recording: Any = None
        self.captured = 0

    def cuda(self) -> SimpleNamespace:
        @contextmanager
        def graph(made: Any, **_: Any) -> Iterator[None]:
            self.recording, self.captured = made, self.captured + 1
            yield
            self.recording = None

        @contextmanager
        def nothing(*_: Any) -> Iterator[None]:
            yield

        streams = SimpleNamespace(wait_stream=lambda _: None)
        return SimpleNamespace(
            graph=graph, CUDAGraph=SimpleNamespace, graph_pool_handle=lambda: None, stream=nothing,
            Stream=lambda: streams, current_stream=lambda: streams,
        )  # fmt: skip

    def step(self, work: Callable[[Events], Tensor]) -> Callable[[Events, Any], Tensor]:
        def taken(batch: Events, generator: torch.Generator | None) -> Tensor:
            if self.recording is None:
                assert generator is not None
                torch.manual_seed(int(torch.randint(2**62, (1,), generator=generator)))
                return work(batch)
            assert generator is None
            loss = torch.zeros((), dtype=torch.float64)
            self.recording.replay = lambda: loss.copy_(work(batch))
            return loss

        return taken


def work(batch: Events) -> Tensor:
    """A number that depends on every part of a batch and on what is drawn."""
    assert batch.t_end is not None
    parts = batch.times, batch.marks, batch.mask, batch.t_start, batch.t_end
    total = sum((i + 2) * part.double().sin().sum() for i, part in enumerate(parts))
    return torch.as_tensor(total) + torch.rand(())


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    found = Recorder()
    for name, part in vars(found.cuda()).items():
        monkeypatch.setattr(torch.cuda, name, part)
    return found


def seeds(generator: torch.Generator) -> list[int]:
    return torch.randint(2**62, (1,), generator=generator).tolist()


def batches() -> list[Events]:
    lengths = ((5, 3), (5, 4), (7, 2), (5, 5), (7, 7), (5, 2))
    return [stream(*n, seed=i, t_end=True) for i, n in enumerate(lengths)]


def test_captured_steps_see_the_new_batch_and_the_same_draws(recorder: Recorder) -> None:
    graphs = steps.ByShape(recorder.step(work), seeds, lambda _: True)
    one, other = (torch.Generator().manual_seed(3) for _ in range(2))
    found = [float(graphs(batch, one)) for batch in batches()]
    assert recorder.captured == 2  # of the two shapes, each met more than once
    plain = recorder.step(work)
    assert found == pytest.approx([float(plain(batch, other)) for batch in batches()], rel=1e-12)


def test_a_replay_does_not_write_over_the_batch_it_was_captured_with_nor_over_losses(
    recorder: Recorder,
) -> None:
    graphs = steps.ByShape(recorder.step(work), lambda _: [], lambda _: True)
    all_batches = batches()
    before = [batch.times.clone() for batch in all_batches]
    losses = [graphs(batch, torch.Generator()) for batch in all_batches]
    assert all(torch.equal(batch.times, times) for batch, times in zip(all_batches, before, strict=True))
    assert len({float(loss) for loss in losses}) == len(losses)


def test_what_does_not_fit_is_never_captured(recorder: Recorder) -> None:
    graphs = steps.ByShape(recorder.step(work), seeds, lambda batch: batch.times.shape[1] < 6)
    for batch in batches():
        graphs(batch, torch.Generator())
    assert recorder.captured == 1

"""Processes that merge their states over torch.distributed: all hold the state of one pass over all data."""

import sys
from pathlib import Path
from subprocess import PIPE, Popen

import pytest
import torch
import torch.distributed as dist

from constmem import Stream
from constmem.core.monoid import all_merge
from tests.laws import models as small_models

KINDS = ("cmanp", "tnpd", "cmhp")
WORKERS = 2
SCRIPT = """
import sys, torch, torch.distributed as dist
from pathlib import Path
from constmem.core.monoid import all_merge
from tests.laws import models as small_models

rank, folder = int(sys.argv[1]), Path(sys.argv[2])
dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=WORKERS)
for kind in KINDS:
    model = small_models.small(kind)
    if kind == "cmhp":
        events = small_models.stream(30, 30)
        part = events.window(15 * rank, 15 * rank + 15)
        state = model.observe(part, start=events.t_start) if rank else model.observe(part)
    else:
        x, y, _, _ = small_models.data(30)
        state = model.condition(x[:, rank::WORKERS], y[:, rank::WORKERS])
    all_merge(state).save(folder / f"{kind}{rank}")
dist.destroy_process_group()
""".replace("WORKERS", str(WORKERS)).replace("KINDS", repr(KINDS))


@pytest.fixture(scope="module")
def met(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where processes that have met left what each of them holds."""
    folder = tmp_path_factory.mktemp("met")
    started = [
        Popen([sys.executable, "-c", SCRIPT, str(rank), str(folder)], stderr=PIPE, text=True)
        for rank in range(WORKERS)
    ]
    for process in started:
        _, errors = process.communicate()
        assert process.returncode == 0, errors
    return folder


@pytest.mark.parametrize("kind", KINDS)
def test_every_process_holds_the_state_of_all_data(kind: str, met: Path) -> None:
    model = small_models.small(kind)
    states = [model.state_type.load(met / f"{kind}{rank}") for rank in range(WORKERS)]
    for name, t in states[0].tensors().items():
        assert all(torch.equal(t, other.tensors()[name]) for other in states[1:])
    if kind == "cmhp":
        expected = model.query(model.condition(small_models.stream(30, 30))).mean
        found = model.query(states[0]).mean
    else:
        x, y, xt, _ = small_models.data(30)
        expected = model.query(model.condition(x, y), xt).mean
        found = model.query(states[0], xt).mean
    assert states[0].fingerprint == model._name_of_weights()
    torch.testing.assert_close(found, expected, rtol=1e-7, atol=1e-9)


def test_a_state_that_does_not_merge_is_refused() -> None:
    stream = Stream(small_models.small("gru"), start=0.0)
    with pytest.raises(TypeError, match="does not merge"):
        all_merge(stream.state)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("kind", KINDS[:2])
def test_a_state_on_a_gpu_travels_by_nccl(kind: str, tmp_path: Path) -> None:
    """Alone, as NCCL wants a GPU for each process: through the GPU and back, to the last bit."""
    dist.init_process_group("nccl", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    try:
        x, y, _, _ = small_models.data(30)
        state = small_models.small(kind).cuda().condition(x.cuda(), y.cuda())
        found = all_merge(state)
    finally:
        dist.destroy_process_group()
    assert found.fingerprint == state.fingerprint
    for name, t in state.tensors().items():
        assert found.tensors()[name].is_cuda == t.is_cuda
        assert torch.equal(found.tensors()[name], t)

"""What all tests share: one thread, one seed a test, no deadlines, machine code for vectors of any width."""

import platform
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest
import torch
from hypothesis import settings
from jaxtyping import TypeCheckError

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]  # which are not installed

torch.set_num_threads(1)
settings.register_profile("constmem", deadline=None, max_examples=25, derandomize=True, database=None)
settings.load_profile("constmem")

VECTORS = {"widest": (), "256 bits": ("-mno-avx512f",), "128 bits": ("-mno-avx",)}
IS_X86 = platform.machine() in ("x86_64", "AMD64")
Kinds = type[Exception] | tuple[type[Exception], ...]
Refuses = Callable[[Kinds, str], AbstractContextManager[None]]


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture
def refuses(request: pytest.FixtureRequest) -> Refuses:
    """`pytest.raises` that also takes the shape checker's refusal, in the pass that has one."""
    checked = request.config.getoption("--jaxtyping-packages", default=None) is not None

    @contextmanager
    def check(kinds: Kinds, message: str) -> Iterator[None]:
        wanted = kinds if isinstance(kinds, tuple) else (kinds,)
        with pytest.raises((*wanted, TypeCheckError) if checked else wanted) as caught:
            yield
        if not isinstance(caught.value, TypeCheckError):
            assert re.search(message, str(caught.value)), str(caught.value)

    return check


@pytest.fixture(params=list(VECTORS) if IS_X86 else ["widest"])
def library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU's machine code as built for this machine, and as it would be for smaller ones."""
    from constmem.kernels import cpu, library  # not before shapes are checked, where they are

    found = library.load(library.built((*library.FLAGS, *VECTORS[request.param])))
    monkeypatch.setattr(cpu, "library", lambda: found)

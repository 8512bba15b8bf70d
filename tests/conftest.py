"""What all tests share: one thread, one seed a test, no deadlines, machine code for vectors of any width."""

import os
import platform
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from itertools import count
from pathlib import Path

import pytest
import torch
from hypothesis import settings
from jaxtyping import TypeCheckError

MULTIPLY = "import torch; a = torch.ones(256, 256, dtype=torch.bfloat16); a @ a"


def instruction_set(cpu: str, program: str = MULTIPLY) -> str | None:
    """What oneDNN must be held to; None if nothing.

    Some virtual machines announce AMX and do not permit it: any product of bfloat16 dies of it.
    """
    if "amx" not in cpu or "ONEDNN_MAX_CPU_ISA" in os.environ:
        return None
    for name in (None, "AVX512_CORE_BF16", "AVX512_CORE"):
        environment = os.environ | ({} if name is None else {"ONEDNN_MAX_CPU_ISA": name})
        if subprocess.run([sys.executable, "-c", program], env=environment, check=False).returncode == 0:
            return name
    return "AVX2"


_CPU = Path("/proc/cpuinfo")
if (_name := instruction_set(_CPU.read_text() if _CPU.exists() else "")) is not None:
    os.environ["ONEDNN_MAX_CPU_ISA"] = _name  # before oneDNN is used; child processes inherit it


ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]  # which are not installed

torch.set_num_threads(1)
settings.register_profile("constmem", deadline=None, max_examples=25, derandomize=True, database=None)
settings.register_profile("shapes", settings.get_profile("constmem"), max_examples=5)
settings.load_profile("constmem")

VECTORS = {"widest": (), "256 bits": ("-mno-avx512f",), "128 bits": ("-mno-avx",)}
IS_X86 = platform.machine() in ("x86_64", "AMD64")
Kinds = type[Exception] | tuple[type[Exception], ...]
Refuses = Callable[[Kinds, str], AbstractContextManager[None]]
Peak = Callable[..., int]


@pytest.fixture
def held_to() -> Callable[..., str | None]:
    """`instruction_set`, for its own test."""
    return instruction_set


def pytest_configure(config: pytest.Config) -> None:
    """The pass that checks shapes looks at each law a few times: the other has looked at it often."""
    if config.getoption("--jaxtyping-packages", default=None) is not None:
        settings.load_profile("shapes")


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


@pytest.fixture
def peak(tmp_path: Path) -> Peak:
    """Bytes a function holds at its worst moment, all allocators counted; what it starts with is not."""
    memray = pytest.importorskip("memray")  # not at the top: Windows has none
    paths = (tmp_path / f"{number}.bin" for number in count())

    def measured(function: Callable[[], object], *, before: Callable[[], object] | None = None) -> int:
        path = next(paths)
        (function if before is None else before)()  # what is allocated once, for good, is no peak
        with memray.Tracker(path):
            function()
        with memray.FileReader(path) as reader:
            return int(reader.metadata.peak_memory)

    return measured


@pytest.fixture(params=list(VECTORS) if IS_X86 else ["widest"])
def library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU's machine code as built for this machine, and as it would be for smaller ones."""
    from constmem.kernels import cpu, paths  # not before shapes are checked, where they are

    found = paths.load(paths.built((*paths.FLAGS, *VECTORS[request.param])))
    monkeypatch.setattr(cpu, "library", lambda: found)

"""Machine code is built where it can be, loaded only if whole, and never takes a process down with it."""

import logging
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from constmem.kernels import paths

pytestmark = pytest.mark.skipif(paths.library() is None, reason="there is no C++ compiler")
SOURCE = 'extern "C" {' + "".join(f" long {name}() {{ return 7; }}" for name in paths._SIGNATURES) + " }\n"
FLAGS = "-shared", "-fPIC"
has_owners = pytest.mark.skipif(not hasattr(os, "geteuid"), reason="there are no owners here")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder for builds of a small source, which has yet to be made."""
    (tmp_path / "small").mkdir()
    source = tmp_path / "small" / "native.cpp"
    source.write_text(SOURCE)
    monkeypatch.setattr(paths, "SOURCE", source)
    monkeypatch.delenv("CONSTMEM_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    return tmp_path / "constmem"


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> Callable[[str], int]:
    """How often the log says something."""
    caplog.set_level(logging.INFO, "constmem")
    return lambda text: sum(text in record.getMessage() for record in caplog.records)


def test_a_build_is_kept_and_nothing_else(cache: Path, said: Callable[[str], int]) -> None:
    made = paths.built(FLAGS)
    assert paths.built(FLAGS) == made
    assert said("compiling machine code") == 1
    assert [made] == list(cache.iterdir())
    assert re.fullmatch(r"native-[0-9a-f]{16}-[0-9a-f]{16}\.so", made.name)
    assert made.stat().st_mode & 0o077 == cache.stat().st_mode & 0o077 == 0
    assert paths.load(made).has_bfloat16() == 7


def test_a_compiler_may_come_with_options(
    cache: Path, said: Callable[[str], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, compiler = paths.built(FLAGS), paths._compiler()[0]
    monkeypatch.setenv("CXX", f"{compiler} -O1 '-DNAME=a b'")
    other = paths.built(FLAGS)
    assert other.name[:23] != plain.name[:23]  # other options, another build
    assert paths.load(other).has_bfloat16() == 7
    assert said("compiling machine code") == 2
    assert len(list(cache.iterdir())) == 2


@pytest.mark.parametrize(
    "damage", ["cut short", "one byte", "empty", "a link to another", "writable by others"]
)
def test_a_damaged_or_planted_build_is_never_loaded_but_made_anew(
    damage: str, cache: Path, said: Callable[[str], int], tmp_path: Path
) -> None:
    made = paths.built(FLAGS)
    content = bytearray(made.read_bytes())
    if damage == "writable by others":
        made.chmod(0o722)
    elif damage == "a link to another":
        made.unlink()
        (tmp_path / "another").write_bytes(content[:-1])
        made.symlink_to(tmp_path / "another")
    else:
        content[len(content) // 2] ^= 1
        made.write_bytes({"cut short": content[:-100], "one byte": content, "empty": b""}[damage])
    again = paths.built(FLAGS)
    assert said("compiling machine code") == 2
    assert paths._whole(again)
    assert paths.load(again).has_bfloat16() == 7
    assert all(paths._whole(path) for path in cache.iterdir())


@has_owners
@pytest.mark.parametrize("whose", ["open to others", "another user's", "a file", "nowhere"])
def test_a_cache_that_is_not_ones_own_is_refused_with_one_line(
    whose: str, cache: Path, said: Callable[[str], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    if whose == "a file":
        cache.write_text("where a folder should be")
    elif whose == "nowhere":
        monkeypatch.delenv("XDG_CACHE_HOME")
        monkeypatch.setattr(Path, "home", lambda: (_ for _ in ()).throw(RuntimeError("no home")))
    else:
        planted = paths.built(FLAGS)
        if whose == "open to others":
            cache.chmod(0o777)
        else:
            own = os.geteuid()
            monkeypatch.setattr(os, "geteuid", lambda: own + 1)
    if whose == "another user's":
        with monkeypatch.context() as context:
            context.setattr(paths, "_whole", lambda _: True)
            made = paths.built(FLAGS)
    else:
        made = paths.built(FLAGS)
    assert said("compiled for this process alone") == 1
    assert made.parent != cache
    assert made.parent.stat().st_mode & 0o077 == 0
    assert paths.load(made).has_bfloat16() == 7
    if whose == "open to others":
        assert made != planted


@pytest.mark.parametrize("compiler", ["no-such-compiler", "false", "g++ '"])
def test_without_a_working_compiler_there_is_no_library_and_one_line_says_so(
    compiler: str, cache: Path, said: Callable[[str], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", compiler)
    assert not cache.exists()
    assert asked_anew(monkeypatch) is None
    assert said("PyTorch's operators serve") == 1


def asked_anew(monkeypatch: pytest.MonkeyPatch) -> object:
    """What a process finds that has not asked yet."""
    with monkeypatch.context() as context:
        context.setattr(paths, "CPU", paths.Path(paths.CPU.name))
        return paths.library.__wrapped__()


def test_a_library_without_a_function_is_not_used(
    cache: Path, said: Callable[[str], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    paths.SOURCE.write_text('extern "C" long observe() { return 0; }')
    with pytest.raises(AttributeError, match="observe_one"):
        paths.load(paths.built(FLAGS))
    assert asked_anew(monkeypatch) is None
    assert said("PyTorch's operators serve") == 1
    assert len(list(cache.iterdir())) == 2


def test_switched_off_nothing_is_built(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CONSTMEM_NATIVE", "0")
    assert asked_anew(monkeypatch) is None
    assert not cache.exists()


def aged(path: Path, hours: float) -> Path:
    then = time.time() - 3600 * hours
    os.utime(path, (then, then))
    return path


def test_old_builds_and_what_killed_processes_left_are_deleted(tmp_path: Path) -> None:
    builds = [tmp_path / f"native-{i:016d}-0.so" for i in range(12)]
    for i, path in enumerate(builds):
        path.write_bytes(b"")
        aged(path, i)
    for name in ("building-dead", "building-alive"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "native.so").write_bytes(b"half")
    aged(tmp_path / "building-dead", 5)
    (tmp_path / "other").write_text("")
    aged(tmp_path / "other", 100)
    paths._clean(tmp_path, "none", builds[0])
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {*(path.name for path in builds[: paths.BUILDS]), "building-alive", "other"}
    for path in builds[: paths.BUILDS]:
        os.utime(path)
    for i in range(4):
        (tmp_path / f"native-new{i}-0.so").write_bytes(b"")
    paths._clean(tmp_path, "none", builds[0])
    assert len(list(tmp_path.glob("native-*.so"))) == paths.BUILDS + 4  # all may be about to be opened


LIMITED = """
import os, resource, sys, torch
from constmem.core.observation import Observation
from constmem.kernels import cpu
torch.manual_seed(0)
observation, tokens = Observation(dim=64, depth=4, num_slots=128, num_heads=4), torch.randn(2, 4000, 64)
value, lse = torch.randn(60, 24, 128, 16).double(), torch.randn(60, 24, 128).double()
with torch.no_grad():
    alone = observation.observe(tokens), cpu.merge(value, lse, value, lse)
    torch.get_num_threads = lambda: 4  # as machine code is told; PyTorch itself would give up
    for limit in sys.argv[1:]:  # each in a process of its own, which need not import all that again
        if not os.fork():
            break
        if os.wait()[1]:
            sys.exit(f"{limit} took the process down")
    else:
        sys.exit()
    if limit == "threads":
        resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))
        if os.geteuid() == 0:
            os.setuid(65534)  # for root this limit does not hold
    else:
        used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
        enough = used + 2**20 * int(limit)  # too little for the stack of a thread
        resource.setrlimit(resource.RLIMIT_AS, (enough, enough))
    try:
        state = observation.observe(tokens)
        merged = cpu.merge(value, lse, value, lse)
    except MemoryError as error:
        print("refused")
    except RuntimeError as error:
        print("refused" if "memory" in str(error) else error)
    else:
        print(float((state.value - alone[0].value).abs().max()) < 1e-6, torch.equal(merged[0], alone[1][0]))
"""


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="limits are Linux's here")
def test_no_limit_takes_the_process_down() -> None:
    """Where no thread can be started the calling one does the work; where memory is short that is said."""
    command = [sys.executable, "-c", LIMITED, "threads", "60", "0"]  # the latter are MiB
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, (done.returncode, done.stderr)
    assert done.stdout.splitlines() == ["True True", "True True", "refused"]

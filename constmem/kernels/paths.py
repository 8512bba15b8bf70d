"""Ways to compute the same thing: which serves, which has failed and why; machine code is compiled here.

It is compiled for the very machine at first use, and kept in the user's cache folder.
"""

import contextlib
import ctypes
import functools
import hashlib
import logging
import os
import pathlib
import platform
import shlex
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch.autograd import forward_ad

BUILDS = 8  # kept in the cache
UNUSED = 3600.0  # seconds after which a build beyond `BUILDS` may be deleted: no process is about to open it
SOURCE = pathlib.Path(__file__).with_name("native.cpp")
FLAGS = ("-O3", "-march=native", "-std=c++17", "-shared", "-fPIC", "-pthread")
POINTER, NUMBER = ctypes.c_void_p, ctypes.c_int64
_SIGNATURES = {
    "observe": [POINTER, NUMBER, NUMBER, *[POINTER] * 2, *[NUMBER] * 2, *[POINTER] * 2],
    "observe_one": [POINTER, NUMBER, POINTER, NUMBER, *[POINTER] * 2],
    "merge": [*[NUMBER] * 2, *[POINTER] * 3, NUMBER, POINTER, NUMBER, *[POINTER] * 2],
    "update": [POINTER, NUMBER, POINTER, ctypes.c_double, *[POINTER] * 3, NUMBER, *[POINTER] * 2],
    "quantiles": [*[NUMBER] * 3, *[POINTER] * 4, NUMBER, POINTER],
    "gap_vectors": [*[NUMBER] * 3, *[POINTER] * 5],
    "turned": [*[NUMBER] * 4, *[POINTER] * 4],
    "layers": [NUMBER, POINTER, POINTER, *[NUMBER] * 4, ctypes.c_double, POINTER, *[NUMBER] * 2, POINTER],
    "has_bfloat16": [],
    "checksum": [NUMBER, POINTER, POINTER],
}
log = logging.getLogger("constmem")
_Result = TypeVar("_Result")


class Path:
    """One way to compute; PyTorch's operators serve where it cannot, after one line in the log.

    Attributes:
        name: as the log has it.
        failed: why it is not tried again; None while it is.
        sizes: whether it runs at each size it was rehearsed at.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.reset()

    def reset(self) -> None:
        """As in a process that has not tried it yet."""
        self.failed: str | None = None
        self.sizes: dict[object, bool] = {}
        self._said: set[str] = set()

    def chosen(self) -> None:
        """Say, the first time, that this is what serves."""
        if "" not in self._said:
            self._said.add("")
            log.debug("%s: chosen", self.name)

    def unfit(self, why: str) -> None:
        """Say once why it cannot take something; it goes on serving all else."""
        if why not in self._said:
            self._said.add(why)
            log.warning("no %s for this, PyTorch's operators serve: %s", self.name, why[:500])

    def attempt(self, work: Callable[[], _Result]) -> _Result | None:
        """What `work` gives; None if it fails, but for want of memory: after that it is not tried again."""
        try:
            return work()
        except Exception as error:  # a compiler or a driver may raise anything
            if isinstance(error, MemoryError | torch.OutOfMemoryError) or "out of memory" in str(error):
                raise  # as drivers say it, too
            self.failed = f"{type(error).__name__}: {error}"
            self.unfit(self.failed)
            return None

    def rehearsed(self, size: object, work: Callable[[], object]) -> bool:
        """Whether `work`, done once for each size, did not fail; other sizes need other resources."""
        if size not in self.sizes:
            before = self.failed
            self.attempt(work)
            self.sizes[size] = self.failed == before
            self.failed = before
        return self.sizes[size]


CPU = Path("machine code for this CPU")
GPU = Path("kernels of our own on the GPU")
FOLD = Path("kernels of our own for gradients on the GPU")
LAYERS = Path("kernels of our own for whole layers on the GPU")
GRAPHS = Path("CUDA graphs")
CHECKSUM = Path("checksum of weights on the GPU")
CAPTURED = Path("CUDA graph of that checksum")
PATHS = CPU, GPU, FOLD, LAYERS, GRAPHS, CHECKSUM, CAPTURED


def traced() -> bool:
    """Whether tensors are symbols of a compiler, a trace or a function transform, or have tangents."""
    if torch.compiler.is_compiling() or torch._C._is_tracing() or transformed():
        return True
    return forward_ad._current_level >= 0


def transformed() -> bool:
    """Whether a function transform (vmap, grad of grad) is at work; asked while compiling, too."""
    return torch._C._functorch.maybe_current_level() is not None


def coarse(device: str) -> bool:
    """Whether products coarser than float32 are asked for: by autocast, or by PyTorch's own setting."""
    return torch.is_autocast_enabled(device) or torch.get_float32_matmul_precision() != "highest"


@functools.cache
def library() -> ctypes.CDLL | None:
    """The compiled library, built if need be; None, after one line in the log, where that is not possible."""
    if os.environ.get("CONSTMEM_NATIVE", "1") == "0":
        return None
    try:
        return load(built(FLAGS))
    except (OSError, RuntimeError, AttributeError, ValueError, subprocess.SubprocessError) as error:
        detail = (getattr(error, "stderr", None) or str(error)).strip()[:500]
        CPU.failed = detail
        CPU.unfit(detail)
        return None


def load(path: pathlib.Path) -> ctypes.CDLL:
    """A library with its functions' types declared; an AttributeError where one is missing."""
    found = ctypes.CDLL(str(path))
    for name, given in _SIGNATURES.items():
        function = getattr(found, name)
        function.argtypes = given
        function.restype = ctypes.c_uint64 if name == "checksum" else NUMBER
    return found


def built(flags: Sequence[str]) -> pathlib.Path:
    """The library's file, compiled unless it lies whole in the cache; safe if several processes ask at once.

    Its name ends with a checksum of its content: what was cut short or changed is never loaded.
    """
    command = _compiler()
    about = subprocess.run([*command, "--version"], capture_output=True, text=True, check=True).stdout
    what = f"{command[1:]}{list(flags)}{about}{_cpu()}"
    key = hashlib.sha256(_sources() + what.encode()).hexdigest()[:16]
    folder = _folder()
    for path in folder.glob(f"native-{key}-*.so"):
        if _whole(path):
            with contextlib.suppress(OSError):
                os.utime(path)  # used just now
            return path
    log.info("compiling machine code for this CPU into %s", folder)
    with tempfile.TemporaryDirectory(prefix="building-", dir=folder) as temporary:
        made = pathlib.Path(temporary) / "native.so"
        subprocess.run(
            [*command, *flags, str(SOURCE), "-o", str(made)],
            capture_output=True, text=True, check=True, timeout=300,
        )  # fmt: skip
        made.chmod(0o700)
        path = folder / f"native-{key}-{_checksum(made)}.so"
        _synchronise(made)  # the content is on the disk before its name is
        made.replace(path)
        _synchronise(folder)
    _clean(folder, key, path)
    return path


def _compiler() -> list[str]:
    """The compiler's command and its own options: CXX, or the first that is found."""
    asked = shlex.split(os.environ.get("CXX", ""))
    names = asked[:1] or ["c++", "g++", "clang++"]
    found = next(filter(None, map(shutil.which, names)), None)
    if found is None:
        raise FileNotFoundError(f"no C++ compiler was found under the name {' or '.join(names)}")
    return [found, *asked[1:]]


def cache_folder() -> pathlib.Path:
    """Where what can be made again is kept: CONSTMEM_CACHE, else constmem in XDG_CACHE_HOME or ~/.cache."""
    if asked := os.environ.get("CONSTMEM_CACHE"):
        return pathlib.Path(asked).expanduser()
    return pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache") / "constmem"


def _folder() -> pathlib.Path:
    """The cache folder, if no other user can write to it; otherwise a private one, and a line in the log."""
    try:
        folder = cache_folder()
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        if _own(folder):
            return folder
        why = f"others may write to {folder}: make it your own (chown) and close it to others (chmod 700)"
    except (OSError, RuntimeError) as error:  # there is no home folder
        why = str(error)
    log.warning("machine code is compiled for this process alone: %s", why)
    private = tempfile.TemporaryDirectory(prefix="constmem-")  # gone when the process ends
    _private.append(private)
    return pathlib.Path(private.name)


_private: list[tempfile.TemporaryDirectory[str]] = []


def _own(path: pathlib.Path) -> bool:
    """Whether it is the user's, and no other user may write to it."""
    about = path.lstat()
    return not hasattr(os, "geteuid") or (about.st_uid == os.geteuid() and not about.st_mode & 0o022)


def _whole(path: pathlib.Path) -> bool:
    """Whether a build is a file of the user's own with the content its name speaks of."""
    try:
        return _own(path) and path.stem.endswith(f"-{_checksum(path)}")
    except OSError:
        return False


def _checksum(path: pathlib.Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


def _synchronise(path: pathlib.Path) -> None:
    """Have the disk hold what was written."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _clean(folder: pathlib.Path, key: str, newest: pathlib.Path) -> None:
    """Delete damaged builds of this key, builds beyond the last used ones, and what killed processes left.

    What was used in the last hour stays: another process may be about to open it, or still be compiling.
    """
    for path in folder.glob(f"native-{key}*.so"):
        if path != newest and not _whole(path):
            path.unlink(missing_ok=True)
    ages: dict[pathlib.Path, float] = {}
    for path in (*folder.glob("native-*.so"), *folder.glob("building-*"), *folder.glob("tmp*")):
        with contextlib.suppress(OSError):  # another process was faster
            ages[path] = time.time() - path.stat().st_mtime
    builds = sorted((path for path in ages if path.suffix == ".so"), key=ages.__getitem__)
    for path in (*builds[BUILDS:], *(ages.keys() - set(builds))):
        if ages[path] > UNUSED:
            with contextlib.suppress(OSError):
                shutil.rmtree(path) if path.is_dir() else path.unlink()


def _sources() -> bytes:
    headers = sorted(SOURCE.parent.glob("native_*.h"))
    return b"".join(path.read_bytes() for path in (SOURCE, *headers))


def _cpu() -> str:
    """What `-march=native` depends on."""
    try:
        lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    kinds = {line for line in lines if line.startswith(("model name", "flags", "Features"))}
    return f"{platform.machine()}{platform.processor()}{sorted(kinds)}"

"""Machine code compiled for the very machine at first use, and kept in the user's cache folder."""

import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from constmem.core.files import keep_newest, touched

BUILDS = 8  # kept in the cache
SOURCE = Path(__file__).with_name("native.cpp")
FLAGS = ("-O3", "-march=native", "-std=c++17", "-shared", "-fPIC", "-pthread")
_log = logging.getLogger("constmem")


def built(flags: Sequence[str]) -> Path:
    """The library's file, compiled unless it lies in the cache; safe when several processes ask at once."""
    names = [os.environ["CXX"]] if "CXX" in os.environ else ["c++", "g++", "clang++"]
    compiler = next(filter(None, map(shutil.which, names)), None)
    if compiler is None:
        raise FileNotFoundError(f"no C++ compiler was found under the name {' or '.join(names)}")
    about = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True).stdout
    key = hashlib.sha256(_sources() + f"{flags}{about}{_cpu()}".encode()).hexdigest()[:16]
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "constmem"
    path = folder / f"native-{key}.so"
    if touched(path):
        return path
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    _log.info("compiling machine code for this CPU into %s", path)
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        made = Path(temporary) / path.name
        command = [compiler, *flags, str(SOURCE), "-o", str(made)]
        subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
        made.replace(path)
    keep_newest(folder, "native-*.so", count=BUILDS)
    return path


def _sources() -> bytes:
    headers = sorted(SOURCE.parent.glob("native_*.h"))
    return b"".join(path.read_bytes() for path in (SOURCE, *headers))


def _cpu() -> str:
    """What `-march=native` depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    kinds = {line for line in lines if line.startswith(("model name", "flags", "Features"))}
    return f"{platform.machine()}{platform.processor()}{sorted(kinds)}"

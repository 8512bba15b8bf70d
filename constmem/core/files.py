"""Writing files so that a crash, a full disk or Ctrl-C never leaves half of one behind."""

import errno
import json
import os
import re
from pathlib import Path
from typing import Any
from uuid import uuid4

from safetensors import SafetensorError, safe_open
from safetensors.torch import save as _to_bytes
from torch import Tensor


def write_bytes(path: str | os.PathLike[str], content: bytes) -> Path:
    """Write `content` under a temporary name beside `path`, then rename it into place."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{uuid4().hex}")
    try:
        _write_new(temporary, content)
        temporary.replace(path)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        if isinstance(error, OSError):  # whose message names the file, then: the one that was meant
            error.filename = str(path)
        raise
    return path


def _write_new(path: Path, content: bytes) -> None:
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)  # less the user's umask
    with os.fdopen(handle, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def clear_unfinished(folder: Path) -> None:
    """Delete what a process that was killed while it wrote has left: temporary files of `write_bytes`."""
    for path in folder.glob(".*"):
        if re.fullmatch(r"\..+\.[0-9a-f]{32}", path.name):
            path.unlink(missing_ok=True)


def write_text(path: str | os.PathLike[str], content: str) -> Path:
    """Write text the same way, as UTF-8."""
    return write_bytes(path, content.encode())


def write_tensors(path: str | os.PathLike[str], tensors: dict[str, Tensor], header: dict[str, str]) -> Path:
    """Write tensors and a header of strings as one safetensors file."""
    plain = {name: t.detach().cpu().contiguous() for name, t in tensors.items()}
    return write_bytes(path, _to_bytes(plain, metadata=header))


def read_json(path: Path, advice: str) -> Any:
    """What a JSON file holds; of one that is damaged, the error says which, and what is advised."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:  # no JSON, or no text at all
        raise ValueError(f"{path} is damaged or of another kind ({error}): {advice}") from error


def advice_on(error: OSError) -> str:
    """What to do about an error of the disk."""
    match error.errno:
        case errno.ENOSPC | errno.EDQUOT | errno.EFBIG:
            return ": make room, or write elsewhere; what was written before is whole, and a run --resumes"
        case errno.EACCES | errno.EPERM | errno.EROFS:
            return ": you may not write there, or read it; take another place, such as by --out"
        case errno.EEXIST | errno.ENOTDIR | errno.EISDIR:
            return ": a file is there where a folder is needed, or the other way round; take another name"
        case errno.ENOENT:
            return ": there is no such place; make it, or take another"
    return ""


def read_tensors(
    path: str | os.PathLike[str], *, kind: str, version: int
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Read what `write_tensors` wrote, and refuse anything that is not a `kind` of a known version."""
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}: expected a {kind} written by constmem")
    try:
        with safe_open(path, framework="pt") as file:
            header = dict(file.metadata() or {})
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise ValueError(
            f"{path} is not a readable safetensors file ({error}): it is cut short or of another "
            f"format; write the {kind} again"
        ) from error
    if header.get("format") != kind:
        raise ValueError(
            f"{path} is a safetensors file, but holds {header.get('format', 'no constmem header')!r} "
            f"where {kind!r} was expected"
        )
    found = header.get("version", "0")
    if found != str(version):
        raise ValueError(
            f"{path} is a {kind} of format version {found}; this constmem reads version {version}: "
            "install the constmem that wrote it, or write it again"
        )
    return tensors, header

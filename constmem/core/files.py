"""Files that are whole or not there: atomic writing, checksums, clear errors of damage; a model's folder."""

import contextlib
import errno
import hashlib
import json
import os
import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from uuid import uuid4

from safetensors import SafetensorError, safe_open
from safetensors.torch import load as _of_bytes
from safetensors.torch import save as _to_bytes
from torch import Tensor

from constmem.core import checks

try:
    import fcntl
except ImportError:  # on Windows
    fcntl = None  # type: ignore[assignment]

SHIPPED = {
    path.parent.name: path.parent for path in Path(__file__).parents[1].glob("*/pretrained/*/config.json")
}
CONFIG, WEIGHTS, ABOUT = "config.json", "model.safetensors", "about.json"  # of a model's folder
CHECKSUM = re.compile(rb'"checksum":"([0-9a-f]{64})"')
SEALED = "s"  # behind the version of a file that has a checksum: without one it is damaged, not old
BLANK = b"0" * 64  # what the checksum is while it is computed
LONGEST_JSON = 2**24  # bytes; those of a model take hundreds
LARGEST_SIZE = 2**48  # of one axis of a tensor, as those of tensors without numbers are not bounded by a file


def write_bytes(path: str | os.PathLike[str], content: bytes | bytearray) -> Path:
    """Write `content` under a temporary name beside `path`, then rename it into place.

    A link goes on pointing where it does, and a file that is replaced hands on its mode. What writers of this
    file that were killed have left is deleted.
    """
    path = Path(path)
    target = Path(os.path.realpath(path)) if path.is_symlink() else path
    if target.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if target.exists() and not target.is_file():
        raise OSError(f"{path} is a device or a pipe, which a file would replace: give the name of a file")
    target.parent.mkdir(parents=True, exist_ok=True)
    clear_unfinished(target.parent, target.name)
    temporary, handle = _new_file(target)
    try:
        with os.fdopen(handle, "wb") as file:  # locked until it is closed, so that nobody clears it
            if target.is_file():
                temporary.chmod(target.stat().st_mode & 0o7777)
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
            temporary.replace(target)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        if isinstance(error, OSError):  # whose message names the file, then: the one that was meant
            error.filename = str(path)
        raise
    return path


def _new_file(target: Path) -> tuple[Path, int]:
    """A new, empty, locked file beside `target`, of a name that `clear_unfinished` knows."""
    while True:
        path = target.with_name(f".{target.name}.{uuid4().hex}")
        try:
            handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)  # less the user's umask
        except OSError as error:
            error.filename = str(target)
            raise
        if locked(handle) is not False and os.fstat(handle).st_nlink:
            return path, handle
        os.close(handle)  # somebody took it for one that was left, before it was locked


def locked(handle: int) -> bool | None:
    """Whether a file could be locked, until its process ends in any way; None where there are no locks."""
    if fcntl is None:
        return None
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks
        return None
    return True


def clear_unfinished(folder: Path, name: str | None = None) -> None:
    """Delete temporary files of `write_bytes` (for one file, or all) that no process is writing."""
    own = r".+" if name is None else re.escape(name)
    for entry in os.scandir(folder):
        if not re.fullmatch(rf"\.{own}\.[0-9a-f]{{32}}", entry.name):
            continue
        with contextlib.suppress(OSError):  # another process was faster, or it is somebody else's
            handle = os.open(entry.path, os.O_RDWR)
            try:
                if locked(handle) is not False:
                    Path(entry.path).unlink()
            finally:
                os.close(handle)


def write_text(path: str | os.PathLike[str], content: str) -> Path:
    """Write text the same way, as UTF-8."""
    return write_bytes(path, content.encode())


def write_tensors(path: str | os.PathLike[str], tensors: dict[str, Tensor], header: dict[str, str]) -> Path:
    """Write tensors and a header of strings as one safetensors file, with a checksum of all of it."""
    return write_bytes(path, packed(tensors, header))


def packed(tensors: dict[str, Tensor], header: dict[str, str]) -> bytearray:
    """What `write_tensors` writes."""
    plain = {name: t.detach().cpu().contiguous() for name, t in tensors.items()}
    sealed = {"version": header.get("version", "") + SEALED, "checksum": BLANK.decode()}
    content = bytearray(_to_bytes(plain, metadata=header | sealed))
    place = CHECKSUM.search(content, 8)
    assert place is not None
    content[place.start(1) : place.end(1)] = hashlib.sha256(content).hexdigest().encode()
    return content


def unpacked(
    content: bytes, what: str, *, kind: str, version: int
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """What `packed` has made these bytes of; `what` they are is for errors."""
    place = CHECKSUM.search(content, 8)
    blank = b"" if place is None else content[: place.start(1)] + BLANK + content[place.end(1) :]
    if place is None or hashlib.sha256(blank).hexdigest().encode() != place.group(1):
        raise ValueError(f"{what} is damaged: its checksum is not that of what it holds")
    length = int.from_bytes(content[:8], "little")
    header: dict[str, str] = json.loads(content[8 : 8 + length])["__metadata__"]
    header["version"] = header["version"].removesuffix(SEALED)
    _require_kind(what, header, kind, version)
    return _of_bytes(content), header


def read_json(path: Path, advice: str) -> Any:
    """What a JSON file holds; of one that is damaged, the error says which, and what is advised."""
    if (size := path.stat().st_size) > LONGEST_JSON:
        raise ValueError(f"{path} is damaged or of another kind ({size:,} bytes are too many): {advice}")
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:  # no JSON, no text at all, or lists in lists without end
        raise ValueError(f"{path} is damaged or of another kind ({error}): {advice}") from error


def advice_on(error: OSError) -> str:
    """What to do about an error of the disk, or of an address."""
    match error.errno:
        case errno.ENOSPC | errno.EDQUOT | errno.EFBIG:
            return ": make room, or write elsewhere; what was written before is whole, and a run --resumes"
        case errno.EACCES | errno.EPERM | errno.EROFS:
            return ": you may not write there, or read it; take another place, such as by --out"
        case errno.EEXIST | errno.ENOTDIR | errno.EISDIR:
            return ": a file is there where a folder is needed, or the other way round; take another name"
        case errno.ENOENT:
            return ": there is no such place; make it, or take another"
        case errno.EADDRINUSE:
            return ": another program listens there; take another --port, or 0 for any that is free"
    return ""


def read_tensors(
    path: str | os.PathLike[str], *, kind: str, version: int, sha256: str | None = None
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Read what `write_tensors` wrote; what is damaged or not a `kind` of a known version is refused.

    Args:
        sha256: of a file that holds no checksum of its own, from where that is known.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}: expected a {kind} written by constmem")
    try:
        with safe_open(path, framework="pt") as file:
            header = dict(file.metadata() or {})
            sealed = header.get("version", "").endswith(SEALED)
            header["version"] = header.get("version", "0").removesuffix(SEALED)
            _require_kind(path, header, kind, version)
            _require_whole(path, header.pop("checksum", "lost" if sealed else sha256), kind)
            names = file.keys()
            for name in names:
                if max(file.get_slice(name).get_shape(), default=0) > LARGEST_SIZE:
                    raise ValueError(
                        f"{path} is damaged: the size of {name!r} is impossible; write the {kind} again"
                    )
            tensors = {name: file.get_tensor(name).clone() for name in names}  # which do not need the file
    except (SafetensorError, OSError, RuntimeError) as error:
        raise ValueError(
            f"{path} is not a readable safetensors file ({error}): it is cut short or of another "
            f"format; write the {kind} again"
        ) from error
    return tensors, header


def _require_kind(path: Path | str, header: dict[str, str], kind: str, version: int) -> None:
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


def _require_whole(path: Path, expected: str | None, kind: str) -> None:
    """Refuse a file whose bytes are not those that were written; warn where there is no checksum."""
    if expected is None:
        warnings.warn(
            f"{path} has no checksum, as older versions wrote none: damage to it goes unnoticed; "
            f"write the {kind} again to add one",
            stacklevel=4,
        )
        return
    with path.open("rb") as file:
        start = file.read(8)
        start += file.read(int.from_bytes(start, "little"))  # the header; safetensors has checked its length
        place = CHECKSUM.search(start, 8)
        if place is not None:
            start = start[: place.start(1)] + BLANK + start[place.end(1) :]
        digest = hashlib.sha256(start)
        while block := file.read(2**20):
            digest.update(block)
    if digest.hexdigest() != expected:
        raise ValueError(
            f"{path} is damaged: its checksum is not that of what it holds; take a copy of it, or write the "
            f"{kind} again"
        )


def require_sound(path: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Refuse weights that are not finite, and settings far beyond them, before anything is built by those."""
    if (bad := checks.first_not_finite(tensors)) is not None:
        raise ValueError(
            f"the weights beside {path} are damaged: {bad} holds NaN or infinity; save them again"
        )
    widest = max((size for tensor in tensors.values() for size in tensor.shape), default=0)
    limits = {"seed": 2**64, "num_samples": 2**16, "num_train_samples": 2**16}
    for name, value in config.items():
        limit = limits.get(name, len(tensors) if name.endswith("depth") else max(widest, 512))
        if isinstance(value, int | float) and not -limit <= value <= limit:
            raise ValueError(
                f"{path} is damaged: {name} is {value}, far beyond what the weights beside it can "
                "be of; save the model again"
            )


def home_of(folder: str | os.PathLike[str]) -> Path:
    """Where a model is: a folder, or that of weights which come with the package."""
    here = all((Path(folder) / name).is_file() for name in (CONFIG, WEIGHTS))
    return Path(folder) if here else SHIPPED.get(str(folder), Path(folder))


def read_config(path: Path) -> dict[str, Any]:
    """The name of a model and its config."""
    if not path.is_file():
        raise FileNotFoundError(
            f"there is no {path}: from_pretrained needs a folder that save_pretrained wrote (as a run does "
            f"with its first checkpoint), or one of the names {', '.join(map(repr, sorted(SHIPPED)))}"
        )
    content = read_json(path, "save the model again")
    fields = content if isinstance(content, dict) else {}
    if not isinstance(fields.get("model"), str) or not isinstance(fields.get("config"), dict):
        raise ValueError(
            f"{path} is damaged or of another kind: it does not hold the name of a model and its config; "
            "save the model again"
        )
    return fields


def read_about(folder: Path) -> dict[str, Any]:
    """What is known of weights that come with the package: their checksums, what they were trained on."""
    if folder not in SHIPPED.values():
        return {}
    about: dict[str, Any] = read_json(folder / ABOUT, "install constmem again")
    return about

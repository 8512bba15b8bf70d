"""From the original public files of images to packs: EMNIST and CelebA, within bounds on every file."""

import gzip
import hashlib
import io
import json
import os
import re
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import product
from math import prod
from pathlib import Path

import numpy as np

from constmem.data.images import CHUNK, Progress, opened_face
from constmem.data.packs import Array, Folder, data_folder, free_for, require_bounded, write_pack

PARTITION = "list_eval_partition.txt"
PUBLISHED = {  # MD5 of the official files, as published with torchvision
    "gzip.zip": "58c8d27c78d21e728a6bc7b3cc06412e",
    "img_align_celeba.zip": "00d2c5bc6d35e252742224ab0c1e8fcb",
    PARTITION: "d32c9cbf5e040fd4025c592c306e6668",
}
NUM_CLASSES, SIDE, MOST_IMAGES = 47, 28, 500_000  # of EMNIST 'balanced', a file of which has 112,800 images
MOST_GZIP, MOST_JPEG, MOST_LIST = 2**28, 2**20, 2**26  # bytes of one file
IDX = {"images": 3, "labels": 1}  # axes of the arrays in EMNIST's files
AGAIN = "extract or download it again"
DIFFERS = "not that of the official file"  # said of a checksum
Source = str | os.PathLike[str]
Reader = Callable[[str, int], bytes]  # a file by its name, of at most so many bytes


def prepare_emnist(
    source: Source, data_dir: Folder = None, *, replace: bool = False, progress: Progress | None = None
) -> Path:
    """Write `emnist.npz` from EMNIST 'balanced' in its binary (IDX) format.

    The original images are transposed; the pack's are upright.

    Args:
        source: the official `gzip.zip`, or a folder with the four `emnist-balanced-*` files.
        data_dir: folder to write to; else CONSTMEM_DATA, else ~/.local/share/constmem.
        replace: write over a pack of more images, too.
        progress: called with (done, all) files.
    """
    source = Path(source)
    arrays: dict[str, Array] = {}
    digests: dict[str, str] = {}
    with _reader(source, what="EMNIST") as read:
        for number, (split, (kind, dims)) in enumerate(product(("train", "test"), IDX.items()), 1):
            name = f"emnist-balanced-{split}-{kind}-idx{dims}-ubyte.gz"
            content = read(name, MOST_GZIP)
            digests[name] = hashlib.sha256(content).hexdigest()
            arrays[f"{split}_{kind}"] = _idx(name, content, dims=dims)
            if progress is not None:
                progress(number, 4)
    counts: dict[str, int] = {}
    for split in ("train", "test"):
        images, labels = arrays[f"{split}_images"], arrays[f"{split}_labels"]
        _check_emnist(split, images, labels)
        arrays[f"{split}_images"], counts[split] = np.ascontiguousarray(images.mT), len(labels)
    path = free_for(data_folder(data_dir) / "emnist.npz", counts, replace=replace)
    return write_pack(path, arrays | _origin({"gzip.zip": source}, digests), compress=True)


def prepare_celeba(
    source: Source,
    data_dir: Folder = None,
    *,
    partition: Source | None = None,
    replace: bool = False,
    progress: Progress | None = None,
) -> Path:
    """Write `celeba.npz` from the aligned CelebA faces; the partition list says which.

    Args:
        source: `img_align_celeba.zip`, or the folder with the images or with `img_align_celeba` in it.
        data_dir: folder to write to; else CONSTMEM_DATA, else ~/.local/share/constmem.
        partition: `list_eval_partition.txt`; looked for in `source` and beside it where not given.
        replace: write over a pack of more images, too.
        progress: called with (done, all) images.
    """
    source = Path(source)
    with _reader(source, what="CelebA") as read:
        listed = _find_partition(source, partition)
        splits = _read_partition(listed)
        num_test = list(splits.values()).count(2)
        counts = {"train": len(splits) - num_test, "test": num_test}
        path = free_for(data_folder(data_dir) / "celeba.npz", counts, replace=replace)
        jpeg, ends = _collect(read, source, list(splits), progress)
    arrays: dict[str, Array] = {
        "jpeg": np.frombuffer(jpeg, np.uint8),
        "offsets": np.array(ends, np.int64),
        "split": np.array([int(split == 2) for split in splits.values()], np.int8),
        "image_number": np.array([int(Path(name).stem) for name in splits], np.int32),
    }
    origin = _origin(
        {"img_align_celeba.zip": source, PARTITION: listed},
        {"all images, in the order of the list": hashlib.sha256(jpeg).hexdigest()},
    )
    return write_pack(path, arrays | origin, compress=False)


def _collect(
    read: Reader, source: Path, names: list[str], progress: Progress | None
) -> tuple[bytearray, list[int]]:
    """The JPEG files concatenated, each checked, and where they begin and end."""
    jpeg, ends = bytearray(), [0]
    for number, name in enumerate(names, 1):
        content = read(name, MOST_JPEG)
        if content[:2] != b"\xff\xd8" or content[-2:] != b"\xff\xd9":
            raise ValueError(f"{name} is not a whole JPEG file ({len(content):,} bytes): {AGAIN}")
        with opened_face(content, f"{name} of {source}", remedy=AGAIN) as opened:
            opened.draft("RGB", (1, 1))  # an eighth of its size: all is decoded, but fast
            opened.load()
        jpeg += content
        ends.append(len(jpeg))
        if progress is not None and (number % CHUNK == 0 or number == len(names)):
            progress(number, len(names))
    return jpeg, ends


@contextmanager
def _reader(source: Path, *, what: str) -> Iterator[Reader]:
    """A function that reads a file by its bare name from a folder, what is below it, or a zip archive."""
    if not source.exists():
        raise FileNotFoundError(f"there is no {source}: give the folder or zip archive of {what}")
    try:
        with nullcontext() if source.is_dir() else zipfile.ZipFile(source) as archive:
            places: dict[str, tuple[int, Callable[[], bytes]]] = {}  # size, and content
            if archive is None:
                paths = [path for path in sorted(source.rglob("*")) if path.is_file()]
                places = {path.name: (path.stat().st_size, path.read_bytes) for path in paths}
            else:
                require_bounded(archive, source)
                for member in (m for m in archive.infolist() if not m.is_dir()):
                    places[Path(member.filename).name] = member.file_size, partial(archive.read, member)

            def read(name: str, most: int) -> bytes:
                if name not in places:
                    raise FileNotFoundError(
                        f"{name} is not in {source} ({len(places):,} files): the download or its extraction "
                        "broke off, or this is another part of the data set"
                    )
                size, content = places[name]
                _require_small(name, size, most)
                return content()

            yield read
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError) as error:
        raise ValueError(
            f"{source} is not a whole zip archive ({str(error)[:200]}): download it again"
        ) from error


def _require_small(name: str, size: int, most: int) -> None:
    if size > most:
        raise ValueError(f"{name} has {size:,} bytes, but {most:,} at most are expected: it is another file")


def _idx(name: str, content: bytes, *, dims: int) -> Array:
    """The array in a gzipped IDX file of unsigned bytes: magic number, sizes, data.

    No more is unpacked than the sizes announce.
    """
    magic = 0x0800 + dims  # 08: unsigned bytes
    try:
        with gzip.GzipFile(fileobj=io.BytesIO(content)) as file:
            start = file.read(4 + 4 * dims)
            if len(start) < 4 + 4 * dims or struct.unpack(">I", start[:4])[0] != magic:
                raise ValueError(
                    f"{name} does not begin with the magic number {magic:#06x} and {dims} sizes of an IDX "
                    "file of unsigned bytes: it is another file under this name; download it again"
                )
            shape = struct.unpack(f">{dims}I", start[4:])
            wanted, size = prod(shape), "x".join(map(str, shape))
            if wanted > MOST_IMAGES * SIDE**2:
                raise ValueError(
                    f"{name} announces {size} bytes, far more than EMNIST has: it is another file"
                )
            raw = file.read(wanted + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(
            f"{name} is not a whole gzip file ({error}): it is cut short or damaged; download it again"
        ) from error
    if len(raw) != wanted:
        held = "more" if len(raw) > wanted else f"{len(raw):,}"
        raise ValueError(
            f"{name} announces {size} = {wanted:,} bytes, but holds {held}: it is cut short or damaged; "
            "download it again"
        )
    return np.frombuffer(raw, np.uint8).reshape(shape)


def _check_emnist(split: str, images: Array, labels: Array) -> None:
    if images.shape[1:] != (SIDE, SIDE):
        size = "x".join(map(str, images.shape[1:]))
        raise ValueError(f"the {split} images are {size}, but EMNIST's are 28x28: use the original files")
    if len(images) != len(labels):
        raise ValueError(
            f"there are {len(images):,} {split} images but {len(labels):,} labels: the files do not belong "
            "together; take all four from one archive"
        )
    if len(labels) == 0 or labels.max() >= NUM_CLASSES:
        raise ValueError(
            f"the {split} labels reach {labels.max(initial=0)} ({len(labels):,} of them), but EMNIST "
            f"'balanced' has {NUM_CLASSES} classes: use the emnist-balanced files"
        )


def _find_partition(source: Path, partition: Source | None) -> Path:
    places = [source / PARTITION, source.parent / PARTITION] if partition is None else [Path(partition)]
    for place in places:
        if place.is_file():
            return place
    raise FileNotFoundError(
        f"there is no {' or '.join(map(str, places))}: CelebA's partition list says which images are for "
        "testing; download it from the same page (folder Eval) and put it there, or give it by --partition "
        "FILE (in Python: partition=)"
    )


def _read_partition(path: Path) -> dict[str, int]:
    """File name -> 0 train, 1 validation, 2 test."""
    splits: dict[str, int] = {}
    for number, line in enumerate(_text(path).splitlines(), 1):
        if not line.strip():
            continue
        match = re.fullmatch(r"([0-9]{1,9}\.jpg)\s+([012])", line.strip())
        if match is None or match[1] in splits:
            raise ValueError(
                f"line {number} of {path} is {line[:60]!r}, but a new file name (of up to nine digits) and "
                "0, 1 or 2 is needed, as in '000001.jpg 0': download the list again"
            )
        splits[match[1]] = int(match[2])
    num_test = list(splits.values()).count(2)
    if not 0 < num_test < len(splits):
        raise ValueError(
            f"{path} lists {len(splits) - num_test} train and {num_test} test images, but some of each (0 or "
            "1, and 2) are needed: download the list again, or list more of it"
        )
    return splits


def _text(path: Path) -> str:
    _require_small(path.name, path.stat().st_size, MOST_LIST)
    content = path.read_bytes()
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise ValueError(f"line {line} of {path} is no text ({error}): download the list again") from error


def _origin(sources: dict[str, Path], digests: dict[str, str]) -> dict[str, Array]:
    """What a pack says of where it comes from: a sentence, and the SHA-256 of every source.

    Args:
        sources: what was read, by the official name of each.
        digests: of what else was read, by name.
    """
    remarks: list[str] = []
    for official, path in sources.items():
        if path.is_file():
            md5, digests[path.name] = _digests(path)
            if md5 != PUBLISHED[official]:
                remarks.append(f"the MD5 of {path.name} is {md5}, {DIFFERS}, {PUBLISHED[official]}")
        else:
            remarks.append(f"{path.name} is a folder of files, which has no published checksum")
    names = " and ".join(path.name for path in sources.values())
    sentence = f"prepared from the official files ({names}, MD5 as published)"
    if remarks:
        sentence = f"prepared from {names}: {'; '.join(remarks)}"
    return {"source": np.array(sentence), "sources": np.array(json.dumps(digests, sort_keys=True))}


def _digests(path: Path) -> tuple[str, str]:
    with path.open("rb") as file:
        md5 = hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()
        file.seek(0)
        return md5, hashlib.file_digest(file, "sha256").hexdigest()

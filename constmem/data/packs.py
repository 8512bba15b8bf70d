"""The prepared format of data sets: where packs are, how they are read and written, what is found.

A pack is one `.npz` file of plain arrays (`numpy.load(path, allow_pickle=False)`):

- `emnist.npz`: `train_images` and `test_images` uint8 (n, 28, 28), upright; `train_labels` and
  `test_labels`, 0-9 digits and 10-46 letters.
- `celeba.npz`: `jpeg` uint8, the JPEG files (178x218) one after the other; `offsets` int64 (n + 1,),
  file i is `jpeg[offsets[i]:offsets[i + 1]]`; `split` int8 (n,), 0 train and validation, 1 test;
  `image_number` int32 (n,), the official number of each image.
- `celeba32_more.npz`: `images` uint8 (n, 32, 32, 3), further training faces; `image_number` as above.
- `events_*.npz`: `times` float64, all sequences one after the other, never decreasing inside one, in
  `unit`; `marks` int32 from 0, -1 where unknown; `offsets` int64 (n + 1,), sequence k is
  `times[offsets[k]:offsets[k + 1]]`; `split` int8 (n,), 0 train, 1 validation, 2 test; `num_marks`.

Packs written by `prepare` also hold `source`, a sentence on where the data come from, and `sources`,
a JSON object of file names and their SHA-256.
"""

import io
import os
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from constmem.core.files import write_bytes
from constmem.data.catalogue import EVENT_KEYS, EVENT_SPLITS, OWN_EVENTS, PACKS, Pack

Array = npt.NDArray[Any]
Folder = str | os.PathLike[str] | None
DAMAGE = (zipfile.BadZipFile, zlib.error, EOFError, ValueError, KeyError, OSError, NotImplementedError)


class MissingDataError(FileNotFoundError):
    """A data set is not there; the message says where it was looked for and how to get it."""


def data_folder(data_dir: Folder = None) -> Path:
    """Where packs are: `data_dir`, else the folder CONSTMEM_DATA names, else ~/.local/share/constmem."""
    return Path(data_dir or os.environ.get("CONSTMEM_DATA") or "~/.local/share/constmem").expanduser()


def cache_folder() -> Path:
    """Where what can be made again is kept: the folder CONSTMEM_CACHE names, else ~/.cache/constmem."""
    return Path(os.environ.get("CONSTMEM_CACHE") or "~/.cache/constmem").expanduser()


def find_pack(name: str, data_dir: Folder = None) -> Path:
    """The pack of a data set, or an error that says where it was looked for and how to get it."""
    folder = data_folder(data_dir)
    path = folder / f"{name}.npz"
    if path.is_file():
        return path
    if data_dir:
        origin = "given as data_dir"
    elif os.environ.get("CONSTMEM_DATA"):
        origin = "named by CONSTMEM_DATA"
    else:
        origin = "the default, as neither data_dir nor CONSTMEM_DATA is set"
    raise MissingDataError(
        f"the data set {name!r} is missing: there is no {path.name} in {folder} ({origin}"
        f"{'' if folder.is_dir() else '; the folder does not exist'}). To get it, {PACKS[name].get}; "
        f"or point data_dir or CONSTMEM_DATA to the folder that holds {path.name}"
    )


def read_pack(path: Path, keys: Sequence[str], *, optional: Sequence[str] = ()) -> dict[str, Array]:
    """These arrays of a pack, and the optional ones that it holds; an error where it is damaged."""
    try:
        with _open(path) as pack:
            absent = [key for key in keys if key not in pack.files]
            if not absent:
                return {key: pack[key] for key in (*keys, *optional) if key in pack.files}
            found = ", ".join(sorted(pack.files)) or "nothing"
    except DAMAGE as error:
        raise ValueError(
            f"{path} is not a readable npz file of plain arrays ({error}): it is cut short, damaged or "
            "of another format; copy or prepare it again"
        ) from error
    raise ValueError(
        f"{path} lacks {', '.join(absent)}: it holds {found}. It is another file under this name, or "
        "of another version; prepare it again"
    )


def write_pack(path: Path, arrays: dict[str, Array], *, compress: bool) -> Path:
    """Write a pack whole or not at all."""
    content = io.BytesIO()
    save: Callable[..., None] = np.savez_compressed if compress else np.savez
    save(content, **arrays)
    return write_bytes(path, content.getvalue())


def free_for(path: Path, counts: Mapping[str, int], *, replace: bool) -> Path:
    """The path, unless a pack is there that holds more images or sequences than the counts of a new one.

    Args:
        counts: images or sequences in each split of the new pack.
        replace: take the place of a larger one, too.
    """
    old = listed(path.stem, path.parent)
    if replace or sum(old.counts.values()) <= sum(counts.values()):  # none where it is absent or damaged
        return path
    kind = "sequences" if old.known.of_events else "images"
    raise FileExistsError(
        f"{path} holds {told(old.counts)} {kind}, more than the new one would, {told(counts)}: nothing was "
        "written; give --replace (in Python: replace=True) to write over it, or another --data-dir"
    )


def told(counts: Mapping[str, int]) -> str:
    """Counts of splits in words.

    >>> told({"train": 112_800, "test": 18_800})
    '112,800 train, 18,800 test'
    """
    return ", ".join(f"{count:,} {split}" for split, count in counts.items())


def identity(path: Path) -> str:
    """A short name for what a pack holds, from the checksums in its table of contents alone."""
    try:
        with zipfile.ZipFile(path) as archive:
            parts = sorted((m.filename, m.CRC, m.file_size) for m in archive.infolist())
    except DAMAGE as error:
        raise ValueError(f"{path} is not a readable npz file ({error}): prepare it again") from error
    return f"{zlib.crc32(repr(parts).encode()):08x}"


@dataclass(frozen=True)
class Listing:
    """What was found of a data set; `path` is None where nothing was.

    Args:
        known: the data set.
        path: its pack, or the package it is embedded in.
        size: bytes of the pack.
        counts: images or event sequences in each split.
        problem: why what was found cannot be used, if so.
    """

    known: Pack
    path: Path | None
    size: int
    counts: dict[str, int]
    problem: str | None = None

    def __str__(self) -> str:
        name = self.known.name
        if self.path is None:
            return f"{name}: missing. {self.known.about}. To get it, {self.known.get}"
        if self.problem is not None:
            return f"{name}: cannot be used. {self.problem}"
        counts = told(self.counts)
        size = f", {self.size / 1e6:.1f} MB" if self.size else ""
        complete = "" if self.known.embedded else self.known.completeness(self.counts)
        counts += f" ({complete})" if complete else ""
        return f"{name}: {counts}{size}, {self.path}. {self.known.about}"


def listing(data_dir: Folder = None) -> list[Listing]:
    """What is found of every known data set, and of other event packs, without reading the data."""
    folder = data_folder(data_dir)
    others = sorted(path.stem for path in folder.glob("events_*.npz") if path.stem not in PACKS)
    return [listed(name, folder) for name in (*PACKS, *others)]


def hints(data_dir: Folder = None) -> list[str]:
    """Where `listing` has looked and how to have it look elsewhere, and what to do with one's own events."""
    folder = data_folder(data_dir)
    there = "" if folder.is_dir() else ", which does not exist"
    return [
        f"Looked in {folder}{there}: --data-dir FOLDER, or else the variable CONSTMEM_DATA, names another",
        OWN_EVENTS,
    ]


def listed(name: str, folder: Path) -> Listing:
    """What is found in a folder of one data set: a known one, or one's own events."""
    own = Pack(name, EVENT_KEYS, "event sequences", "")
    entry = PACKS.get(name, own)
    if entry.embedded is not None:
        return _listed_embedded(entry, entry.embedded)
    path = folder / f"{entry.name}.npz"
    if not path.is_file():
        return Listing(entry, None, 0, {})
    size = path.stat().st_size
    try:
        return Listing(entry, path, size, _counts(path, entry))
    except ValueError as error:
        return Listing(entry, path, size, {}, str(error))


def _listed_embedded(entry: Pack, package: str) -> Listing:
    from importlib.util import find_spec

    found = find_spec(package)
    if found is None or found.origin is None:
        return Listing(entry, None, 0, {})
    return Listing(entry, Path(found.origin).parent, 0, dict(entry.official))


def _counts(path: Path, entry: Pack) -> dict[str, int]:
    """Images or sequences in each split, from the small arrays of a pack."""
    large = ("train_images", "test_images", "jpeg", "images", "times", "marks")
    pack = read_pack(path, [key for key in entry.keys if key not in large])
    if entry.of_events:
        return {name: int((pack["split"] == i).sum()) for i, name in enumerate(EVENT_SPLITS)}
    if entry.name == "emnist":
        return {"train": len(pack["train_labels"]), "test": len(pack["test_labels"])}
    if entry.name == "celeba":
        return {"train": int((pack["split"] == 0).sum()), "test": int((pack["split"] == 1).sum())}
    return {"train": len(pack["image_number"])}


@contextmanager
def _open(path: Path) -> "Iterator[np.lib.npyio.NpzFile]":
    with path.open("rb") as file:  # opened here: numpy leaves it open where the archive is damaged
        if file.read(2) != b"PK":  # numpy would take it for a pickle and say so
            raise ValueError("it does not begin like a zip archive")
        file.seek(0)
        with np.load(file, allow_pickle=False) as pack:
            yield pack

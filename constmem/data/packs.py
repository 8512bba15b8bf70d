"""Packs, the prepared form of data sets: found, read within bounds, written whole, listed.

A pack is one `.npz` file of plain arrays, which `numpy.load(path, allow_pickle=False)` reads too:

- `emnist.npz`: `train_images`, `test_images` uint8 (n, 28, 28), upright; `train_labels`, `test_labels`.
- `celeba.npz`: `jpeg` uint8, the JPEG files (178x218) concatenated; `offsets` int64 (n + 1,), file i is
  `jpeg[offsets[i]:offsets[i + 1]]`; `split` int8 (n,), 0 train and validation, 1 test; `image_number` int32.
- `celeba32_more.npz`: `images` uint8 (n, 32, 32, 3), further training faces; `image_number`.
- `events_*.npz`: `times` float64, all sequences concatenated, never decreasing inside one, in `unit`;
  `marks` int32 from 0, -1 where unknown; `offsets` as above; `split` int8 (n,), 0 train, 1 validation,
  2 test; `num_marks`.

Packs written by `prepare` also hold `source`, a sentence on where the data come from, and `sources`,
a JSON object of file names and their SHA-256.
"""

import io
import os
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from math import prod
from pathlib import Path
from tokenize import TokenError
from typing import Any

import numpy as np
import numpy.typing as npt

from constmem.core.files import write_bytes
from constmem.data.catalogue import EVENT_KEYS, EVENT_SPLITS, OWN_EVENTS, PACKS, Pack

Array = npt.NDArray[Any]
Folder = str | os.PathLike[str] | None
DAMAGE = (
    zipfile.BadZipFile, zlib.error, struct.error, EOFError, ValueError, KeyError, OSError,
    NotImplementedError, RuntimeError, MemoryError, SyntaxError, TokenError,
)  # fmt: skip
ROOM, RATIO = 2**26, 100  # an archive may unpack to so many bytes, and so many times its size more
LARGE = ("train_images", "test_images", "jpeg", "images", "times", "marks")  # not needed to count


class MissingDataError(FileNotFoundError):
    """A data set is not there; the message says where it was looked for and how to get it."""


def data_folder(data_dir: Folder = None) -> Path:
    """Where packs are: `data_dir`, else the folder CONSTMEM_DATA names, else ~/.local/share/constmem."""
    return Path(data_dir or os.environ.get("CONSTMEM_DATA") or "~/.local/share/constmem").expanduser()


def find_pack(name: str, data_dir: Folder = None) -> Path:
    """The pack of a data set, or an error that says where it was looked for and how to get it."""
    folder = data_folder(data_dir)
    path = folder / f"{name}.npz"
    if path.is_file():
        return path
    named = "named by CONSTMEM_DATA" if os.environ.get("CONSTMEM_DATA") else None
    default = "the default, as neither data_dir nor CONSTMEM_DATA is set"
    origin = "given as data_dir" if data_dir else named or default
    raise MissingDataError(
        f"the data set {name!r} is missing: there is no {path.name} in {folder} ({origin}"
        f"{'' if folder.is_dir() else '; the folder does not exist'}). To get it, {PACKS[name].get}; "
        f"or point data_dir or CONSTMEM_DATA to the folder that holds {path.name}"
    )


def read_pack(path: Path, keys: Sequence[str], *, optional: Sequence[str] = ()) -> dict[str, Array]:
    """These arrays of a pack, and the optional ones that it holds; an error where it is damaged."""
    try:
        with path.open("rb") as file, zipfile.ZipFile(file) as archive:
            require_bounded(archive, path)
            members = {m.filename.removesuffix(".npy"): m for m in archive.infolist()}
            absent = [key for key in keys if key not in members]
            if not absent:
                return {key: _array(archive, members[key]) for key in (*keys, *optional) if key in members}
    except DAMAGE as error:
        raise ValueError(
            f"{path} is not a readable npz file of plain arrays ({str(error)[:200]}): it is cut short, "
            "damaged or of another format; copy or prepare it again"
        ) from error
    raise ValueError(
        f"{path} lacks {', '.join(absent)}: it holds {', '.join(sorted(members))[:200] or 'nothing'}. It is "
        "another file under this name, or of another version; prepare it again"
    )


def require_bounded(archive: zipfile.ZipFile, path: Path) -> None:
    """Refuse an archive that would unpack to far more than its own size, before anything is unpacked."""
    whole, most = sum(m.file_size for m in archive.infolist()), ROOM + RATIO * path.stat().st_size
    if whole > most:
        raise ValueError(
            f"{path} of {path.stat().st_size:,} bytes would unpack to {whole:,}, more than {RATIO} times that"
        )


def _array(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> Array:
    """One array; its header must announce just the bytes that are there, before memory is taken for them."""
    with archive.open(member) as file:
        version = np.lib.format.read_magic(file)
        if version > (2, 0):
            raise ValueError(f"{member.filename} is an array of format {version}")
        newer = version == (2, 0)
        read = np.lib.format.read_array_header_2_0 if newer else np.lib.format.read_array_header_1_0
        shape, _, dtype = read(file)
        announced, held = prod(shape) * dtype.itemsize, member.file_size - file.tell()
    if announced != held or dtype.hasobject:
        raise ValueError(f"{member.filename} announces {announced:,} bytes of {dtype}, but holds {held:,}")
    with archive.open(member) as file:
        array: Array = np.lib.format.read_array(file, allow_pickle=False)
    return array


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
        f"{path} holds {in_words(old.counts)} {kind}, more than the new one would, {in_words(counts)}: "
        "nothing was written; give --replace (in Python: replace=True) or another --data-dir"
    )


def in_words(counts: Mapping[str, int]) -> str:
    """Counts of splits in words.

    >>> in_words({"train": 112_800, "test": 18_800})
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
        known: what it should be.
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
        size = f", {self.size / 1e6:.1f} MB" if self.size else ""
        return f"{name}: {in_words(self.counts)}{self._complete()}{size}, {self.path}. {self.known.about}"

    def _complete(self) -> str:
        complete = "" if self.known.embedded else self.known.completeness(self.counts)
        return f" ({complete})" if complete else ""

    def prepared(self, source: str, differs: str) -> tuple[list[str], list[str]]:
        """Of a pack just written from a source: lines on what it holds, and warnings on what is not official.

        Args:
            source: what the pack says of its origin.
            differs: what it says there if a checksum is not the official one.
        """
        found = [f"found: {in_words(self.counts)} {self._contents()}{self._complete()}"]
        official, warnings = self.known.official, [source] if differs in source else []
        if official and self.counts != official:
            warnings.append(
                f"expected were {in_words(official)} images, officially, but found were "
                f"{in_words(self.counts)}: {self.known.completeness(self.counts)}"
            )
        return [*found, *([] if differs in source else [source])], warnings

    def _contents(self) -> str:
        """What a pack is made of, and of how many kinds of it."""
        assert self.path is not None
        if self.known.of_events:
            pack = read_pack(self.path, ["offsets", "num_marks"])
            return f"sequences, {int(pack['offsets'][-1]):,} events of {int(pack['num_marks']):,} marks"
        if "train_labels" not in self.known.keys:
            return "images"
        labels = read_pack(self.path, ["train_labels", "test_labels"])
        return f"images of {len(np.unique(np.concatenate(list(labels.values()))))} classes"


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
    entry = PACKS.get(name, Pack(name, EVENT_KEYS, "event sequences", ""))
    if entry.embedded is not None:
        found = find_spec(entry.embedded)
        place = None if found is None or found.origin is None else Path(found.origin).parent
        return Listing(entry, place, 0, {} if place is None else dict(entry.official))
    path = folder / f"{entry.name}.npz"
    if not path.is_file():
        return Listing(entry, None, 0, {})
    size = path.stat().st_size
    try:
        return Listing(entry, path, size, _counts(path, entry))
    except ValueError as error:
        return Listing(entry, path, size, {}, str(error))


def _counts(path: Path, entry: Pack) -> dict[str, int]:
    """Images or sequences in each split, from the small arrays of a pack."""
    pack = read_pack(path, [key for key in entry.keys if key not in LARGE])
    if "train_labels" in pack:
        return {split: len(pack[f"{split}_labels"]) for split in ("train", "test")}
    if "split" not in pack:
        return {"train": len(pack["image_number"])}
    names: Iterable[str] = EVENT_SPLITS if entry.of_events else ("train", "test")
    return {name: int((pack["split"] == i).sum()) for i, name in enumerate(names)}

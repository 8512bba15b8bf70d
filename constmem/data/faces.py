"""CelebA's JPEG files to arrays of one size, decoded once and kept in the cache."""

import io
import os
import struct
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np

from constmem.data.packs import Array, identity, read_pack, write_pack
from constmem.kernels import cache_folder

Progress = Callable[[int, int], None]
WIDTH, HEIGHT = 178, 218  # of an aligned face
SPLITS = ("train", "test")
BICUBIC = 3  # of pillow's Resampling
CHUNK = 256  # images between two reports of progress
UNDECODABLE = (OSError, SyntaxError, EOFError, IndexError, struct.error)  # what pillow raises


def faces(path: Path, *, size: int, split: str, progress: Progress | None = None) -> Array:
    """The images of one split, resized to size x size without a crop, uint8 (n, size, size, 3).

    Decoding takes a while, so the result is kept in the cache folder under a name that changes with
    the pack; a damaged one is made again.
    """
    kept = cache_folder() / f"celeba-{size}-{split}-{identity(path)}.npz"
    if kept.is_file():
        with suppress(ValueError):  # of a damaged one
            images = read_pack(kept, ["images"])["images"]
            if images.dtype == np.uint8 and images.shape[1:] == (size, size, 3):
                return images
    images = _decoded(_jpegs(path, split), path, size, progress)
    try:
        write_pack(kept, {"images": images}, compress=False)
    except OSError as error:
        warnings.warn(
            f"the decoded images could not be kept in {kept.parent} ({error}), so they will be decoded "
            "again next time: set CONSTMEM_CACHE to a folder that can be written",
            stacklevel=2,
        )
    return images


def _decoded(jpegs: list[tuple[int, bytes]], path: Path, size: int, progress: Progress | None) -> Array:
    """(index, JPEG file) pairs decoded and resized (bicubic, no crop), on all cores."""

    def one(numbered: tuple[int, bytes]) -> Array:
        index, content = numbered
        with opened_face(content, f"image {index} of {path}", remedy="prepare the pack again") as opened:
            return np.asarray(opened.convert("RGB").resize((size, size), BICUBIC))

    result = np.empty((len(jpegs), size, size, 3), np.uint8)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for i in range(0, len(jpegs), CHUNK):
            part = jpegs[i : i + CHUNK]
            for k, image in enumerate(pool.map(one, part), i):
                result[k] = image
            if progress is not None:
                progress(i + len(part), len(jpegs))
    return result


@contextmanager
def opened_face(content: bytes, what: str, *, remedy: str) -> Iterator[Any]:
    """An aligned face as pillow opens it, its size checked before it is decoded; errors name it."""
    try:
        from PIL.JpegImagePlugin import JpegImageFile
    except ImportError as error:
        raise ImportError(
            "JPEG files are read with pillow, which is not installed: pip install 'constmem[data]'"
        ) from error
    try:
        with JpegImageFile(io.BytesIO(content)) as opened:  # no other format, whatever the file says
            if opened.size != (WIDTH, HEIGHT):
                raise ValueError(
                    f"{what} is {opened.size[0]}x{opened.size[1]}, but the aligned CelebA faces are "
                    f"{WIDTH}x{HEIGHT}: use img_align_celeba, not the in-the-wild or already resized images"
                )
            yield opened
    except UNDECODABLE as error:
        raise ValueError(f"{what} is not a readable JPEG file ({error}): {remedy}") from error


def _jpegs(path: Path, split: str) -> list[tuple[int, bytes]]:
    """The JPEG files of one split, each with its index in the pack."""
    pack = read_pack(path, ["jpeg", "offsets", "split"])
    jpeg, offsets, splits = pack["jpeg"], pack["offsets"], pack["split"]
    whole = (
        jpeg.dtype == np.uint8
        and jpeg.ndim == offsets.ndim == splits.ndim == 1
        and np.issubdtype(offsets.dtype, np.integer)
        and len(offsets) == len(splits) + 1
        and offsets[0] == 0
        and offsets[-1] == len(jpeg)
        and bool((np.diff(offsets) > 0).all())
    )
    if not whole or not np.isin(splits, (0, 1)).all():
        raise ValueError(
            f"the arrays of {path} do not fit together: jpeg {jpeg.dtype}{list(jpeg.shape)}, offsets "
            f"{offsets.dtype}{list(offsets.shape)} from 0 to the length of jpeg, split (0 or 1) "
            f"{splits.dtype}{list(splits.shape)}; prepare it again"
        )
    chosen = np.flatnonzero(splits == SPLITS.index(split)).tolist()
    return [(i, jpeg[offsets[i] : offsets[i + 1]].tobytes()) for i in chosen]

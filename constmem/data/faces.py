"""CelebA's JPEG files to arrays of one size, decoded once and kept in the cache."""

import io
import os
import struct
import warnings
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from constmem.data.packs import Array, cache_folder, identity, read_pack, write_pack

Progress = Callable[[int, int], None]
WIDTH, HEIGHT = 178, 218
SPLITS = {"train": 0, "test": 1}
CHUNK = 256  # images between two reports of progress
UNDECODABLE = (OSError, SyntaxError, EOFError, IndexError, struct.error)  # what pillow raises


def pillow() -> Any:
    """Pillow's Image module, or an error that names the extra it comes with."""
    try:
        from PIL import Image
    except ImportError as error:
        raise ImportError(
            "JPEG files are read with pillow, which is not installed: pip install 'constmem[data]'"
        ) from error
    return Image


def faces(path: Path, *, size: int, split: str, progress: Progress | None = None) -> Array:
    """The images of one split, resized to size x size without a crop, uint8 (n, size, size, 3).

    Decoding takes a while, so the result is kept in the cache folder under a name that changes with
    the pack; a damaged one is made again.
    """
    kept = cache_folder() / f"celeba-{size}-{split}-{identity(path)}.npz"
    if kept.is_file():
        try:
            images = read_pack(kept, ["images"])["images"]
            if images.dtype == np.uint8 and images.shape[1:] == (size, size, 3):
                return images
        except ValueError:
            pass  # made again below
    images = decode(_jpegs(path, split), path=path, size=size, progress=progress)
    try:
        write_pack(kept, {"images": images}, compress=False)
    except OSError as error:
        warnings.warn(
            f"the decoded images could not be kept in {kept.parent} ({error}), so they will be decoded "
            "again next time: set CONSTMEM_CACHE to a folder that can be written",
            stacklevel=2,
        )
    return images


def decode(
    jpegs: list[tuple[int, bytes]], *, path: Path, size: int, progress: Progress | None = None
) -> Array:
    """Decode (index, JPEG file) pairs and resize them (bicubic, no crop), on all cores."""
    bicubic = pillow().Resampling.BICUBIC

    def one(numbered: tuple[int, bytes]) -> Array:
        index, content = numbered
        with opened_face(content, f"image {index} of {path}", remedy="prepare the pack again") as opened:
            return np.asarray(opened.convert("RGB").resize((size, size), bicubic))

    result = np.empty((len(jpegs), size, size, 3), np.uint8)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for i in range(0, len(jpegs), CHUNK):
            part = jpegs[i : i + CHUNK]
            _fill(result[i : i + CHUNK], pool.map(one, part))
            if progress is not None:
                progress(i + len(part), len(jpegs))
    return result


@contextmanager
def opened_face(content: bytes, what: str, *, remedy: str) -> Iterator[Any]:
    """An aligned face, opened by pillow; where it cannot be decoded, also later, the error names it."""
    try:
        with pillow().open(io.BytesIO(content)) as opened:
            _require_size(opened.size, what)
            yield opened
    except UNDECODABLE as error:
        raise ValueError(f"{what} is not a readable JPEG file ({error}): {remedy}") from error


def _require_size(size: tuple[int, int], what: str) -> None:
    """Refuse an image that is not an aligned CelebA face."""
    if size != (WIDTH, HEIGHT):
        raise ValueError(
            f"{what} is {size[0]}x{size[1]}, but the aligned CelebA faces are {WIDTH}x{HEIGHT}: "
            "use img_align_celeba, not the in-the-wild or already resized images"
        )


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
    if not whole or not np.isin(splits, list(SPLITS.values())).all():
        raise ValueError(
            f"the arrays of {path} do not fit together: jpeg {jpeg.dtype}{list(jpeg.shape)}, offsets "
            f"{offsets.dtype}{list(offsets.shape)} from 0 to the length of jpeg, split (0 or 1) "
            f"{splits.dtype}{list(splits.shape)}; prepare it again"
        )
    chosen = np.flatnonzero(splits == SPLITS[split]).tolist()
    return [(i, jpeg[offsets[i] : offsets[i + 1]].tobytes()) for i in chosen]


def _fill(place: Array, images: Iterable[Array]) -> None:
    for i, image in enumerate(images):
        place[i] = image

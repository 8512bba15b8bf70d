"""Image data sets by name, as uint8 tensors; CelebA's JPEG files are decoded once and kept in the cache."""

import io
import os
import struct
import warnings
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Int64, UInt8
from torch import Tensor

from constmem.core.checks import extra, known
from constmem.data.catalogue import PACKS
from constmem.data.packs import Array, Folder, MissingDataError, find_pack, identity, read_pack, write_pack
from constmem.kernels import cache_folder

NUM_CLASSES = 47
SPLITS = ("train", "test")
WIDTH, HEIGHT = 178, 218  # of an aligned face
BICUBIC = 3  # of pillow's Resampling
CHUNK = 256  # images between two reports of progress
UNDECODABLE = (OSError, SyntaxError, EOFError, IndexError, struct.error)  # what pillow raises
Progress = Callable[[int, int], None]
Loaded = tuple[Array, Array | None, str]  # pixels, labels, source


@dataclass(frozen=True, eq=False)
class Images:
    """Images of one size with what is known of them.

    Args:
        pixels: 0 to 255.
        labels: class of each image, where there are classes.
        name: of the data set.
        source: a sentence on which images these are, to stand beside every figure made with them.
    """

    pixels: UInt8[Tensor, "n h w c"]
    labels: Int64[Tensor, " n"] | None
    name: str
    source: str

    def __len__(self) -> int:
        return self.pixels.shape[0]

    def take(self, index: Int64[Tensor, " k"]) -> "Images":
        """Some of the images, in the order of `index`."""
        labels = None if self.labels is None else self.labels[index]
        return replace(self, pixels=self.pixels[index], labels=labels)

    def to(self, device: torch.device | str) -> "Images":
        """The same images on another device."""
        labels = None if self.labels is None else self.labels.to(device)
        return replace(self, pixels=self.pixels.to(device), labels=labels)


def load_images(
    name: str,
    *,
    data_dir: Folder = None,
    split: str = "train",
    classes: Iterable[int] | None = None,
    progress: Progress | None = None,
) -> Images:
    """The images of a data set of the registry: emnist, celeba32, celeba64, celeba128 or digits.

    Args:
        name: of the data set.
        data_dir: folder of the packs; else CONSTMEM_DATA, else ~/.local/share/constmem.
        split: 'train' or 'test'.
        classes: keep images of these classes only.
        progress: called with (done, all) while JPEG files are decoded.

    Example:
        >>> seen = load_images("digits", classes=range(5))
        >>> tuple(seen.pixels.shape[1:]), int(seen.labels.max())
        ((8, 8, 1), 4)
    """
    load = LOADERS[known("data set of images", name, LOADERS)]
    pixels, labels, source = load(data_dir, known("split", split, SPLITS), progress)
    tensor = torch.from_numpy(pixels if pixels.ndim == 4 else pixels[..., None])
    numbers = None if labels is None else torch.from_numpy(labels.astype(np.int64))
    images = Images(tensor, numbers, name, source)
    return images if classes is None else _of_classes(images, list(classes))


def hold_out(images: Images, *, count: int) -> tuple[Images, Images]:
    """Split the images at random, but always alike, into the rest and `count` held out, for validation."""
    if not 0 < count < len(images):
        raise ValueError(f"{count} of {len(images)} images cannot be held out: take between 1 and all but 1")
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    order = order.to(images.pixels.device)
    return images.take(order[count:].sort().values), images.take(order[:count].sort().values)


def _emnist(data_dir: Folder, split: str, _progress: Progress | None) -> Loaded:
    path = find_pack("emnist", data_dir)
    keys = [f"{split}_images", f"{split}_labels"]
    pack = read_pack(path, [*keys, "train_labels", "test_labels"], optional=["source"])
    images, labels = pack[keys[0]], pack[keys[1]]
    _require_images(path, keys[0], images, (28, 28))
    if labels.shape != images.shape[:1] or not np.issubdtype(labels.dtype, np.integer):
        raise ValueError(
            f"{path} holds {len(images)} images, but {keys[1]} is {labels.dtype}{list(labels.shape)}: "
            "one whole number an image is needed; prepare it again"
        )
    if len(labels) and not 0 <= labels.min() <= labels.max() < NUM_CLASSES:
        raise ValueError(
            f"{path} has labels from {labels.min()} to {labels.max()}, but EMNIST 'balanced' has "
            f"{NUM_CLASSES} classes, 0 to {NUM_CLASSES - 1}: it is another part of EMNIST"
        )
    counts = {part: len(pack[f"{part}_labels"]) for part in SPLITS}
    return images, labels, _source_of(pack, split, counts, "emnist", "EMNIST 'balanced', 28x28")


def _celeba(size: int, data_dir: Folder, split: str, progress: Progress | None) -> Loaded:
    path = find_pack("celeba", data_dir)
    images = faces(path, size=size, split=split, progress=progress)
    pack = read_pack(path, ["split"], optional=["source", "image_number"])
    counts = {part: int((pack["split"] == i).sum()) for i, part in enumerate(SPLITS)}
    about = f"CelebA aligned faces, bicubic resize to {size}x{size} without crop"
    source = _source_of(pack, split, counts, "celeba", about)
    if size == 32 and split == "train":
        more = _more_faces(data_dir, pack.get("image_number"))
        if len(more):
            images = np.concatenate([images, more])
            source += f"; and {len(more):,} more from celeba32_more.npz"
    return images, None, source


def _more_faces(data_dir: Folder, numbers: Array | None) -> Array:
    """Training faces of the second pack that the first does not hold; none where that is not known."""
    try:
        path = find_pack("celeba32_more", data_dir)
    except MissingDataError:
        return np.empty((0, 32, 32, 3), np.uint8)
    pack = read_pack(path, ["images", "image_number"])
    images = pack["images"]
    _require_images(path, "images", images, (32, 32, 3))
    if numbers is None:  # an image of the test split must never be trained on
        return images[:0]
    return images[~np.isin(pack["image_number"], numbers)]


def _digits(_data_dir: Folder, split: str, _progress: Progress | None) -> Loaded:
    with extra("train", "the digits come with scikit-learn"):
        from sklearn.datasets import load_digits
    digits = load_digits()
    count = len(digits.images) * 4 // 5  # in the order of the file
    part = slice(count) if split == "train" else slice(count, None)
    pixels = np.rint(digits.images[part] * (255 / 16)).astype(np.uint8)
    source = f"{len(pixels):,} of the 1,797 handwritten digits (UCI, 8x8) in scikit-learn, {split} part"
    return pixels, digits.target[part], source


LOADERS: dict[str, Callable[[Folder, str, Progress | None], Loaded]] = {
    "emnist": _emnist,
    **{f"celeba{size}": partial(_celeba, size) for size in (32, 64, 128)},
    "digits": _digits,
}


def _source_of(pack: dict[str, Array], split: str, counts: dict[str, int], name: str, about: str) -> str:
    """What the pack says of its origin, else what its counts say."""
    official = PACKS[name].official
    start = f"{about}: {counts[split]:,} {split} images"
    if "source" in pack:
        return f"{start}; {pack['source']}"
    if counts == official:
        return f"{start}, the official counts; the pack does not name its origin"
    ours = f"this pack: {counts['train']:,} and {counts['test']:,}"  # these words name the data of a row, too
    theirs = f"which has {official['train']:,} train and {official['test']:,} test images"
    return f"{start}; not exactly the official split, {theirs} ({ours})"


def _require_images(path: Path, key: str, images: Array, shape: tuple[int, ...]) -> None:
    if images.dtype != np.uint8 or images.shape[1:] != shape:
        raise ValueError(
            f"{key} of {path} is {images.dtype}{list(images.shape)}, but uint8 images of "
            f"{'x'.join(map(str, shape))} are needed: it holds images of another size or kind; "
            "prepare it again"
        )


def _of_classes(images: Images, classes: list[int]) -> Images:
    if images.labels is None:
        raise ValueError(f"{images.name} has no classes to choose from: leave classes= out")
    present = images.labels.unique().tolist()
    absent = sorted(set(classes) - set(present))
    if absent or not classes:
        raise ValueError(
            f"{images.name} has no images of the classes {absent or '(none asked for)'}: "
            + (f"there are {present[0]} to {present[-1]}" if present else "it is empty; prepare it again")
        )
    kept = images.take(torch.isin(images.labels, torch.tensor(classes)).nonzero()[:, 0])
    chosen = ", ".join(map(str, sorted(set(classes))))
    return replace(kept, source=f"{images.source}; of these the {len(kept):,} of the classes {chosen}")


def faces(path: Path, *, size: int, split: str, progress: Progress | None = None) -> Array:
    """The images of one split, resized to size x size without a crop; kept by a name that is the pack's."""
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
        lost = f"the decoded images could not be kept in {kept.parent} ({error}), so they will be decoded"
        remedy = "set CONSTMEM_CACHE to a folder that can be written"
        warnings.warn(f"{lost} again next time: {remedy}", stacklevel=2)
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
    with extra("data", "JPEG files are read with pillow"):
        from PIL.JpegImagePlugin import JpegImageFile
    try:
        with JpegImageFile(io.BytesIO(content)) as opened:  # no other format, even if the file claims one
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
    flat = jpeg.ndim == offsets.ndim == splits.ndim == 1 and jpeg.dtype == np.uint8
    counted = flat and np.issubdtype(offsets.dtype, np.integer) and len(offsets) == len(splits) + 1
    fits = counted and offsets[0] == 0 and offsets[-1] == len(jpeg) and (np.diff(offsets) > 0).all()
    if not fits or not np.isin(splits, (0, 1)).all():
        raise ValueError(
            f"the arrays of {path} do not fit together: jpeg {jpeg.dtype}{list(jpeg.shape)}, offsets "
            f"{offsets.dtype}{list(offsets.shape)} from 0 to the length of jpeg, split (0 or 1) "
            f"{splits.dtype}{list(splits.shape)}; prepare it again"
        )
    chosen = np.flatnonzero(splits == SPLITS.index(split)).tolist()
    return [(i, jpeg[offsets[i] : offsets[i + 1]].tobytes()) for i in chosen]

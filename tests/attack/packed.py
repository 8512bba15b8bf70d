"""Packs and archives of public data, damaged: what is read is what was written, or nothing is read."""

import gzip
import io
import random
import struct
import tempfile
import zipfile
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from constmem.data import load_events, prepare_pack
from constmem.data.packs import listing, read_pack

from . import damage
from .given import event_texts
from .pool import Case
from .verdict import REFUSED, RIGHT, Refused, attempt, require, same


def _zipped(files: dict[str, bytes]) -> bytes:
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, each in files.items():
            archive.writestr(name, each)
    return content.getvalue()


@cache
def event_pack() -> tuple[bytes, Any]:
    """A prepared pack of events, and what it holds."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "mine"
        source.mkdir()
        for part in ("train", "dev", "test"):
            (source / f"{part}.json").write_text(event_texts()["e.json"])
        made = prepare_pack("easytpp", source, folder, unit="hour")
        return made.path.read_bytes(), _pack(Path(folder))


def _pack(folder: Path) -> Any:
    parts = [load_events("mine", data_dir=folder, split=split) for split in ("train", "validation", "test")]
    return [(p.times, p.marks, p.mask, p.t_start, p.unit, p.num_marks) for p in parts]


def pack(draw: random.Random, folder: Path) -> str:
    """A pack of events, read and listed."""
    content, expected = event_pack()
    path = folder / "events_mine.npz"
    path.write_bytes(damage.in_bytes(draw, content, [emnist()[0]]))
    listed = attempt(lambda: [str(each) for each in listing(folder)])
    require(not isinstance(listed, Refused), "a damaged pack must not keep others from being listed")
    found = attempt(lambda: _pack(folder))
    if isinstance(found, Refused):
        return REFUSED
    require(same(found, expected), "was read without a word, and holds other events")
    return RIGHT


@cache
def emnist() -> tuple[bytes, Any]:
    """The four files of EMNIST in one archive, tiny, and the pack made of them."""
    random_ = np.random.default_rng(0)
    files = {}
    for split, count in (("train", 6), ("test", 3)):
        for kind, array in (("images", random_.integers(0, 256, (count, 28, 28), np.uint8)),
                            ("labels", np.arange(count, dtype=np.uint8))):  # fmt: skip
            start = struct.pack(f">{1 + array.ndim}I", 0x0800 + array.ndim, *array.shape)
            name = f"emnist-balanced-{split}-{kind}-idx{array.ndim}-ubyte.gz"
            files[f"gzip/{name}"] = gzip.compress(start + array.tobytes())
    return _zipped(files), None


@cache
def celeba() -> tuple[bytes, Any]:
    """A few faces in one archive."""
    files = {}
    for i in range(1, 5):
        content = io.BytesIO()
        Image.fromarray(np.random.default_rng(i).integers(0, 256, (218, 178, 3), np.uint8)).save(
            content, "JPEG", quality=5
        )
        files[f"img_align_celeba/{i:06}.jpg"] = content.getvalue()
    return _zipped(files), None


PARTITION = "000001.jpg 0\n000002.jpg 0\n000003.jpg 1\n000004.jpg 2\n"


def _prepared(what: str, content: bytes, folder: Path) -> Any:
    source = folder / "source.zip"
    source.write_bytes(content)
    (folder / "list_eval_partition.txt").write_text(PARTITION)
    path = prepare_pack(what, source, folder / "packs", replace=True).path
    names = {"emnist": ("train_images", "train_labels", "test_images", "test_labels"),
             "celeba": ("jpeg", "offsets", "split", "image_number")}  # fmt: skip
    return read_pack(path, names[what])


@cache
def _expected(what: str) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        return _prepared(what, {"emnist": emnist, "celeba": celeba}[what]()[0], Path(folder))


def archive(draw: random.Random, folder: Path) -> str:
    """`data prepare` of a zip archive."""
    what, other = draw.choice((("emnist", "celeba"), ("celeba", "emnist")))
    contents = {"emnist": emnist()[0], "celeba": celeba()[0]}
    content = damage.in_bytes(draw, contents[what], [contents[other], event_pack()[0]])
    found = attempt(lambda: _prepared(what, content, folder))
    if isinstance(found, Refused):
        return REFUSED
    require(same(found, _expected(what)), "was read without a word, and holds other images")
    return RIGHT


def kinds() -> dict[str, Case]:
    """The attacks on packs and archives."""
    _ = event_pack(), _expected("emnist"), _expected("celeba")  # before workers are forked
    return {"packs": pack, "archives": archive}

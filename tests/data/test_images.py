"""Loading image data sets: packs, the cache, and refusing what is damaged."""

import io
import os
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from constmem.data import (
    PACKS,
    MissingDataError,
    hold_out,
    listing,
    load_images,
    prepare_celeba,
    prepare_emnist,
)
from constmem.data.packs import data_folder
from tests.data.test_prepare_images import (
    celeba_folder,
    emnist_arrays,
    emnist_folder,
    jpeg,
    own_folders,
    read,
)

__all__ = ["own_folders"]  # a fixture that every test here uses


# Loading


@pytest.fixture
def celeba(tmp_path):
    celeba_folder(tmp_path / "celeba")
    return prepare_celeba(tmp_path / "celeba")


@pytest.mark.parametrize("size", [32, 64, 128])
@pytest.mark.usefixtures("celeba")
def test_celeba_is_resized_without_a_crop(size):
    images = load_images(f"celeba{size}", split="test")
    assert images.pixels.shape == (2, size, size, 3)
    assert images.labels is None
    plain = Image.open(io.BytesIO(jpeg(4))).resize((size, size), Image.Resampling.BICUBIC)
    np.testing.assert_array_equal(images.pixels[0].numpy(), np.asarray(plain))
    assert "not exactly" not in images.source
    assert "2 test images" in images.source


@pytest.mark.usefixtures("celeba")
def test_celeba_is_decoded_once_and_again_when_the_cache_is_damaged_or_stale(tmp_path):
    decoded = []

    def load():
        decoded.clear()
        return load_images("celeba32", progress=lambda *step: decoded.append(step)).pixels

    first = load()
    assert decoded == [(4, 4)]
    assert torch.equal(load(), first)
    assert decoded == []
    (kept,) = (tmp_path / "cache").iterdir()
    for content in (kept.read_bytes()[:-100], b"", b"PK\x03\x04 nonsense"):
        kept.write_bytes(content)
        assert torch.equal(load(), first)
        assert decoded == [(4, 4)]
    np.savez(kept, images=np.zeros((4, 8, 8, 3), np.uint8))
    assert torch.equal(load(), first)
    celeba_folder(tmp_path / "changed", splits=(0, 2, 2, 2, 2, 2))
    prepare_celeba(tmp_path / "changed")
    assert len(load()) == 1
    assert decoded == [(1, 1)]


@pytest.mark.usefixtures("celeba")
def test_a_cache_that_cannot_be_written_costs_a_warning_not_the_images(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("CONSTMEM_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.warns(UserWarning, match="set CONSTMEM_CACHE to a folder that can be written"):
        images = load_images("celeba64")
    assert len(images) == 4


def test_more_faces_join_the_training_set_unless_they_are_in_the_pack(celeba):
    more = {"images": np.full((3, 32, 32, 3), 7, np.uint8), "image_number": np.array([5, 100, 101], np.int32)}
    np.savez(celeba.parent / "celeba32_more.npz", **more)
    images = load_images("celeba32")
    assert len(images) == 4 + 2, "number 5 is in the test split"
    assert "2 more from celeba32_more.npz" in images.source
    assert len(load_images("celeba32", split="test")) == 2
    assert len(load_images("celeba64")) == 4
    pack = read(celeba)
    del pack["image_number"]
    np.savez(celeba, **pack)
    assert len(load_images("celeba32")) == 4, "overlap cannot be ruled out without numbers"


def test_the_embedded_digits_need_no_files():
    train, test = load_images("digits"), load_images("digits", split="test")
    assert (len(train), len(test)) == (1437, 360)
    assert train.pixels.shape[1:] == test.pixels.shape[1:] == (8, 8, 1)
    assert (train.pixels.min(), train.pixels.max()) == (0, 255)


def test_classes_choose_and_held_out_images_are_never_trained_on(tmp_path):
    prepare_emnist(emnist_folder(tmp_path / "gzip"))
    seen = load_images("emnist", classes=range(10))
    unseen = load_images("emnist", split="test", classes=range(10, 47))
    assert len(seen) == 20
    assert sorted(unseen.labels.tolist()) == list(range(10, 47))
    assert "37 of the classes 10, 11" in unseen.source
    rest, held = hold_out(seen, count=5)
    assert (len(rest), len(held)) == (15, 5)
    together = torch.cat([rest.pixels, held.pixels]).flatten(1)
    assert len(together.unique(dim=0)) == 20
    assert torch.equal(hold_out(seen, count=5)[1].pixels, held.pixels)
    assert held.to("cpu").labels.tolist() == held.labels.tolist()
    with pytest.raises(ValueError, match="20 of 20 images cannot be held out"):
        hold_out(seen, count=20)


def test_a_pack_that_does_not_name_its_origin_is_described_by_its_counts(tmp_path):
    (tmp_path / "packs").mkdir()
    np.savez(tmp_path / "packs" / "emnist.npz", **emnist_arrays())
    assert "not exactly the official split, which has 112,800 train" in load_images("emnist").source


@pytest.mark.parametrize("name", ["emnist", "celeba32", "celeba128"])
def test_a_missing_set_says_what_where_and_how_to_get_it(name, tmp_path, monkeypatch):
    base = "emnist" if name == "emnist" else "celeba"
    with pytest.raises(MissingDataError) as found:
        load_images(name)
    message = str(found.value)
    for part in (f"no {base}.npz", str(tmp_path / "packs"), "CONSTMEM_DATA", "does not exist"):
        assert part in message
    assert f"`constmem data prepare {base} --source" in message
    (tmp_path / "here").mkdir()
    with pytest.raises(MissingDataError, match=r"here \(given as data_dir\)"):
        load_images(name, data_dir=tmp_path / "here")
    monkeypatch.delenv("CONSTMEM_DATA")
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(MissingDataError, match="neither data_dir nor CONSTMEM_DATA is set"):
        load_images(name)
    assert data_folder() == tmp_path / ".local/share/constmem"


def emnist_with(**changes):
    return lambda: emnist_arrays() | changes


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        (lambda: {"images": np.zeros(3)}, "lacks train_images, train_labels.*it holds images"),
        (
            emnist_with(train_images=np.zeros((94, 32, 32), np.uint8)),
            r"\[94, 32, 32\], but .*28x28.*another size",
        ),
        (emnist_with(train_images=np.zeros((94, 28, 28))), "float64.*uint8 images"),
        (emnist_with(train_labels=np.zeros(93, np.uint8)), "94 images, but train_labels"),
        (emnist_with(train_labels=np.full(94, 50)), "labels from 50 to 50"),
        (emnist_with(train_labels=np.array([None] * 94)), "not a readable npz file of plain arrays"),
    ],
)
def test_a_pack_of_another_kind_is_refused(tmp_path, arrays, message):
    (tmp_path / "packs").mkdir()
    np.savez(tmp_path / "packs" / "emnist.npz", **arrays())
    with pytest.raises(ValueError, match=message):
        load_images("emnist")


@pytest.mark.parametrize("keep", [0, 3, 100, 20_000])
def test_a_truncated_pack_is_refused(tmp_path, keep):
    for name, path in (
        ("emnist", prepare_emnist(emnist_folder(tmp_path / "gzip"))),
        ("celeba32", prepare_celeba(celeba_folder(tmp_path / "celeba"))),
    ):
        path.write_bytes(path.read_bytes()[:keep])
        with pytest.raises(ValueError, match="not a readable npz file"):
            load_images(name)
        assert any("not a readable npz" in (entry.problem or "") for entry in listing())


def test_a_pack_with_a_flipped_byte_is_refused(tmp_path):
    path = prepare_emnist(emnist_folder(tmp_path / "gzip"))
    content = bytearray(path.read_bytes())
    content[5000] ^= 0xFF
    path.write_bytes(content)
    with pytest.raises(ValueError, match="not a readable npz file"):
        load_images("emnist")


def test_a_pickle_under_the_name_of_a_pack_is_never_opened(tmp_path):
    (tmp_path / "packs").mkdir()
    (tmp_path / "packs" / "emnist.npz").write_bytes(b"\x80\x04cos\nsystem\n(S'false'\ntR.")
    with pytest.raises(ValueError, match="not a readable npz file"):
        load_images("emnist")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda p: {"offsets": p["offsets"][:-1]}, "do not fit together"),
        (lambda p: {"offsets": p["offsets"] * 2}, "do not fit together"),
        (lambda p: {"split": p["split"] + 5}, "do not fit together"),
        (lambda p: {"jpeg": p["jpeg"] * 0}, "image 0 of .* is not a readable JPEG"),
        (
            lambda p: {"jpeg": np.where(np.arange(len(p["jpeg"])) > p["offsets"][1] - 900, 0, p["jpeg"])},
            "JPEG|fit",
        ),
    ],
)
def test_celeba_arrays_that_do_not_fit_together_are_refused(celeba, change, message):
    pack = read(celeba)
    np.savez(celeba, **(pack | change(pack)))
    with pytest.raises(ValueError, match=message):
        load_images("celeba32")


def test_faces_of_another_size_are_refused(celeba):
    content = jpeg(0, (100, 100))
    np.savez(
        celeba,
        jpeg=np.frombuffer(content, np.uint8),
        offsets=np.array([0, len(content)]),
        split=np.zeros(1, np.int8),
    )
    with pytest.raises(ValueError, match=r"image 0 of .* is 100x100, but .* 178x218"):
        load_images("celeba32")


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: load_images("emnst"), "no data set of images 'emnst': did you mean 'emnist'"),
        (lambda: load_images("nothing like it"), "choose from emnist, celeba32"),
        (lambda: load_images("digits", split="valid"), "no split 'valid'"),
        (
            lambda: load_images("digits", classes=[3, 11]),
            r"no images of the classes \[11\]: there are 0 to 9",
        ),
        (lambda: load_images("digits", classes=[]), "none asked for"),
    ],
)
def test_wrong_arguments_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_a_pack_of_no_images_is_said_to_be_empty(tmp_path):
    nothing = {f"{split}_{what}": np.zeros(shape, np.uint8) for split in ("train", "test")
               for what, shape in (("images", (0, 28, 28)), ("labels", 0))}  # fmt: skip
    np.savez(tmp_path / "emnist.npz", **nothing)
    with pytest.raises(ValueError, match="it is empty; prepare it again"):
        load_images("emnist", data_dir=tmp_path, classes=range(10))


@pytest.mark.usefixtures("celeba")
def test_celeba_has_no_classes():
    with pytest.raises(ValueError, match="no classes to choose from"):
        load_images("celeba32", classes=[1])


@pytest.mark.usefixtures("celeba")
def test_missing_packages_are_named_by_their_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "PIL.JpegImagePlugin", None)
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(ImportError, match=r"pillow.*pip install 'constmem\[data\]'"):
        load_images("celeba32")
    with pytest.raises(ImportError, match=r"scikit-learn.*pip install 'constmem\[train\]'"):
        load_images("digits")


def test_the_listing_says_what_is_found_and_how_to_get_the_rest(celeba, tmp_path):
    found = {entry.known.name: entry for entry in listing()}
    assert list(found) == list(PACKS)
    assert found["celeba"].path == celeba
    assert found["celeba"].size == celeba.stat().st_size
    assert found["celeba"].counts == {"train": 4, "test": 2}
    assert found["emnist"].path is None
    assert "gzip.zip" in found["emnist"].known.get
    digits = {split: len(load_images("digits", split=split)) for split in ("train", "test")}
    assert found["digits"].counts == digits
    prepare_emnist(emnist_folder(tmp_path / "gzip"))
    assert listing()[0].counts == {"train": 94, "test": 47}
    (tmp_path / "packs" / "celeba32_more.npz").write_bytes(b"PK")
    lines = [str(entry) for entry in listing()]
    assert lines[0].startswith("emnist: 94 train, 47 test (a subset: 141 of 131,600 images), 0.1 MB, ")
    assert lines[2].startswith("celeba32_more: cannot be used. ")
    assert str(listing(tmp_path)[1]).startswith("celeba: missing. CelebA: aligned faces")
    elsewhere = listing(tmp_path / "elsewhere")
    assert [entry.path for entry in elsewhere[:3]] == [None] * 3


# The real packs


@pytest.fixture
def real():
    if not os.environ.get("CONSTMEM_DATA"):
        pytest.skip("CONSTMEM_DATA is not set")
    return Path(os.environ["CONSTMEM_DATA"])


@pytest.mark.data
def test_the_real_packs_have_their_counts(real):
    counts = {entry.known.name: entry.counts for entry in listing(real)}
    part, official = {"train": 10_000, "test": 2_000}, {"train": 182_637, "test": 19_962}
    assert counts["celeba"] in (part, official)
    if counts["celeba"] == part:
        assert counts["celeba32_more"] == {"train": 16_000}
    assert counts["emnist"]["test"] == 18_800


@pytest.mark.data
def test_the_real_emnist_has_its_classes(real):
    digits = load_images("emnist", data_dir=real, classes=range(10))
    assert torch.bincount(digits.labels).tolist() == [2_400] * 10
    test = load_images("emnist", data_dir=real, split="test")
    assert torch.bincount(test.labels).tolist() == [400] * 47
    assert test.pixels.shape == (18_800, 28, 28, 1)


@pytest.mark.data
def test_the_real_faces_are_decoded_and_those_of_both_packs_look_alike(real, tmp_path, monkeypatch):
    monkeypatch.setenv("CONSTMEM_CACHE", str(tmp_path))
    test = load_images("celeba32", data_dir=real, split="test")
    assert test.pixels.shape == (2_000, 32, 32, 3)
    with np.load(real / "celeba32_more.npz", allow_pickle=False) as pack:
        more = torch.from_numpy(pack["images"][:4_000])
    for axis in (1, 2):  # another resampling filter would change this by a tenth
        ours, theirs = (p.float().diff(dim=axis).abs().mean() / p.float().std() for p in (test.pixels, more))
        assert ours.item() == pytest.approx(theirs.item(), rel=0.05)

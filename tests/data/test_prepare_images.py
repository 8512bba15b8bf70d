"""From the original formats of EMNIST and CelebA to packs, on tiny files made here."""

import dataclasses
import gzip
import hashlib
import io
import json
import shutil
import struct
import zipfile
import zlib
from functools import partial

import numpy as np
import pytest
import torch
from PIL import Image

from constmem.cli import app
from constmem.data import (
    catalogue,
    load_images,
    prepare_celeba,
    prepare_emnist,
    prepare_images,
    prepare_jodie,
)
from constmem.training.recipes import recipe
from constmem.training.sources import open_source
from tests.data.test_packs import little_memory

NAMES = {
    f"{split}_{kind}": f"emnist-balanced-{split}-{kind}-idx{dims}-ubyte.gz"
    for split in ("train", "test")
    for kind, dims in (("images", 3), ("labels", 1))
}


@pytest.fixture(autouse=True)
def own_folders(request, tmp_path, monkeypatch):
    """Keep every test away from the packs and the cache of whoever runs it."""
    if request.node.get_closest_marker("data") is None:
        monkeypatch.setenv("CONSTMEM_DATA", str(tmp_path / "packs"))
        monkeypatch.setenv("CONSTMEM_CACHE", str(tmp_path / "cache"))


# Tiny files in the original formats


def idx(array):
    """An array of bytes as a gzipped IDX file."""
    header = struct.pack(f">{1 + array.ndim}I", 0x0800 + array.ndim, *array.shape)
    return gzip.compress(header + array.tobytes())


def emnist_arrays(seed=0):
    rng = np.random.default_rng(seed)
    return {
        "train_images": rng.integers(0, 256, (94, 28, 28), np.uint8),
        "train_labels": np.arange(94, dtype=np.uint8) % 47,
        "test_images": rng.integers(0, 256, (47, 28, 28), np.uint8),
        "test_labels": np.arange(47, dtype=np.uint8),
    }


def emnist_folder(folder, **changes):
    """The four files as NIST gives them, some changed."""
    files = {key: idx(array) for key, array in emnist_arrays().items()} | changes
    folder.mkdir(parents=True, exist_ok=True)
    for key, content in files.items():
        if content is not None:
            (folder / NAMES[key]).write_bytes(content)
    return folder


def zipped(folder, path, prefix):
    with zipfile.ZipFile(path, "w") as archive:
        for file in sorted(folder.iterdir()):
            archive.write(file, f"{prefix}/{file.name}")
    return path


def jpeg(seed, size=(178, 218)):
    """A smooth random picture as the bytes of a JPEG file."""
    small = np.random.default_rng(seed).integers(0, 256, (8, 6, 3), np.uint8)
    content = io.BytesIO()
    Image.fromarray(small).resize(size, Image.Resampling.BICUBIC).save(content, "JPEG")
    return content.getvalue()


def celeba_folder(folder, count=6, splits=(0, 0, 0, 1, 2, 2)):
    """The image folder with the partition list beside it."""
    images = folder / "img_align_celeba"
    images.mkdir(parents=True)
    lines = []
    for i in range(count):
        (images / f"{i + 1:06d}.jpg").write_bytes(jpeg(i))
        lines.append(f"{i + 1:06d}.jpg {splits[i]}\n")
    (folder / "list_eval_partition.txt").write_text("".join(lines))
    return images


def read(path):
    with np.load(path, allow_pickle=False) as pack:
        return {key: pack[key] for key in pack.files}


# Preparing EMNIST


@pytest.mark.parametrize("archive", [False, True])
def test_emnist_becomes_upright_and_keeps_its_labels(tmp_path, archive):
    source = emnist_folder(tmp_path / "gzip")
    if archive:
        source = zipped(source, tmp_path / "gzip.zip", "gzip")
    steps = []
    path = prepare_emnist(source, progress=lambda done, whole: steps.append((done, whole)))
    assert path == tmp_path / "packs" / "emnist.npz"
    assert steps == [(1, 4), (2, 4), (3, 4), (4, 4)]
    original = emnist_arrays()
    for split in ("train", "test"):
        images = load_images("emnist", split=split)
        upright = images.pixels[..., 0].numpy()
        np.testing.assert_array_equal(upright, original[f"{split}_images"].transpose(0, 2, 1))
        assert images.labels.tolist() == original[f"{split}_labels"].tolist()
        assert images.pixels.dtype == torch.uint8
        assert images.name == "emnist"


def test_the_pack_records_the_checksums_of_its_sources(tmp_path):
    archive = zipped(emnist_folder(tmp_path / "gzip"), tmp_path / "gzip.zip", "gzip")
    pack = read(prepare_emnist(archive))
    sources = json.loads(str(pack["sources"]))
    for path in (archive, *(tmp_path / "gzip").iterdir()):
        assert sources[path.name] == hashlib.sha256(path.read_bytes()).hexdigest()
    assert "not that of the official" in load_images("emnist").source
    prepare_emnist(tmp_path / "gzip")
    assert "no published checksum" in load_images("emnist").source


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"train_images": idx(emnist_arrays()["train_images"])[:-900]},
            "train-images.*not a whole gzip file",
        ),
        ({"train_images": b"hello"}, "train-images.*not a whole gzip file"),
        ({"test_labels": gzip.compress(b"\0\0\x08\x03" + bytes(99))}, "test-labels.*magic number 0x0801"),
        ({"test_labels": gzip.compress(b"\0\0")}, "magic number"),
        ({"test_labels": gzip.compress(struct.pack(">2I", 0x801, 47) + bytes(40))}, "47 bytes, but holds 40"),
        ({"test_labels": idx(np.zeros(46, np.uint8))}, "47 test images but 46 labels"),
        ({"test_labels": idx(np.full(47, 61, np.uint8))}, "labels reach 61.*47 classes"),
        ({"test_images": idx(np.zeros((47, 32, 32), np.uint8))}, "test images are 32x32.*28x28"),
    ],
)
def test_damaged_or_foreign_emnist_files_are_refused(tmp_path, changes, message):
    source = emnist_folder(tmp_path / "source", **changes)
    with pytest.raises(ValueError, match=message):
        prepare_emnist(source)
    assert not (tmp_path / "packs").exists(), "nothing half-made stays behind"


def test_what_is_not_there_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"there is no .*nowhere: give the folder or zip"):
        prepare_emnist(tmp_path / "nowhere")
    source = emnist_folder(tmp_path / "source", test_labels=None)
    with pytest.raises(FileNotFoundError, match=r"emnist-balanced-test-labels.* is not in .*3 files"):
        prepare_emnist(source)


def test_a_truncated_archive_is_refused_and_the_old_pack_kept(tmp_path):
    folder = emnist_folder(tmp_path / "gzip")
    pack = prepare_emnist(folder)
    before = pack.read_bytes()
    archive = zipped(folder, tmp_path / "gzip.zip", "gzip")
    whole = archive.read_bytes()
    archive.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match="not a whole zip archive"):
        prepare_emnist(archive)
    archive.write_bytes(whole[:5000] + bytes(1000) + whole[6000:])
    with pytest.raises(ValueError, match=r"not a whole zip archive.*CRC"):
        prepare_emnist(archive)
    assert pack.read_bytes() == before
    assert [path.name for path in pack.parent.iterdir()] == ["emnist.npz"]


# Preparing CelebA


@pytest.mark.parametrize("archive", [False, True])
def test_celeba_keeps_the_original_files_and_the_official_split(tmp_path, archive):
    images = celeba_folder(tmp_path / "celeba")
    source = tmp_path / "celeba"
    if archive:
        source = zipped(images, tmp_path / "celeba" / "img_align_celeba.zip", "img_align_celeba")
    steps = []
    pack = read(prepare_celeba(source, progress=lambda *step: steps.append(step)))
    assert steps == [(6, 6)]
    assert pack["split"].tolist() == [0, 0, 0, 0, 1, 1], "validation is trained on"
    assert pack["image_number"].tolist() == [1, 2, 3, 4, 5, 6]
    for i, path in enumerate(sorted(images.iterdir())):
        start, stop = pack["offsets"][i : i + 2]
        assert pack["jpeg"][start:stop].tobytes() == path.read_bytes()
    sources = json.loads(str(pack["sources"]))
    assert sources["all images, in the order of the list"] == hashlib.sha256(pack["jpeg"]).hexdigest()
    assert "list_eval_partition.txt" in sources


def test_the_partition_list_may_lie_elsewhere_and_name_a_part(tmp_path):
    images = celeba_folder(tmp_path / "celeba")
    partition = tmp_path / "few.txt"
    partition.write_text("000002.jpg 0\n\n000005.jpg 2\n")
    pack = read(prepare_celeba(images, partition=partition, data_dir=tmp_path / "other"))
    assert pack["image_number"].tolist() == [2, 5]
    assert (tmp_path / "other" / "celeba.npz").is_file()


@pytest.mark.parametrize(
    ("damage", "error", "message"),
    [
        (lambda d: (d / "list_eval_partition.txt").unlink(), FileNotFoundError, "partition list says which"),
        (lambda d: (d / "list_eval_partition.txt").write_text(""), ValueError, "0 train and 0 test images"),
        (
            lambda d: (d / "list_eval_partition.txt").write_text("000001.jpg 7\n"),
            ValueError,
            "line 1 .* 0, 1 or 2",
        ),
        (
            lambda d: (d / "list_eval_partition.txt").write_text("000001.jpg 0\n000001.jpg 1\n"),
            ValueError,
            "line 2",
        ),
        (lambda d: (d / "img_align_celeba/000003.jpg").unlink(), FileNotFoundError, "000003.jpg is not in"),
        (
            lambda d: (d / "img_align_celeba/000003.jpg").write_bytes(jpeg(2)[:-50]),
            ValueError,
            "000003.jpg is not a whole JPEG",
        ),
        (
            lambda d: (d / "img_align_celeba/000003.jpg").write_bytes(jpeg(2, (64, 64))),
            ValueError,
            "000003.jpg .* is 64x64, .* 178x218",
        ),
        (
            lambda d: (d / "img_align_celeba/000003.jpg").write_bytes(b"\xff\xd8" + bytes(99) + b"\xff\xd9"),
            ValueError,
            "000003.jpg of .* is not a readable JPEG file .*: extract or download it again",
        ),
        (
            lambda d: (d / "img_align_celeba/000003.jpg").write_bytes(jpeg(2)[:400] + b"\xff\xd9"),
            ValueError,
            "000003.jpg of .* is not a readable JPEG file",
        ),
        (
            lambda d: (d / "list_eval_partition.txt").write_bytes(b"000001.jpg 0\n\n\xff\xfe\x00"),
            ValueError,
            r"line 3 of .*list_eval_partition\.txt is no text",
        ),
        (
            lambda d: (d / "list_eval_partition.txt").write_text("000001.jpg 0\n99999999999.jpg 2\n"),
            ValueError,
            r"line 2 of .*list_eval_partition\.txt is '99999999999.jpg 2'",
        ),
        (
            lambda d: (d / "list_eval_partition.txt").write_text("000001.jpg 0\n000002.jpg 1\n"),
            ValueError,
            r"list_eval_partition\.txt .* 2 train and 0 test images",
        ),
        (
            lambda d: (d / "list_eval_partition.txt").write_text("000001.jpg 2\n"),
            ValueError,
            "0 train and 1 test images",
        ),
        (
            lambda d: shutil.rmtree(d),
            FileNotFoundError,
            "there is no .*celeba: give the folder or zip archive of CelebA",
        ),
    ],
)
def test_an_incomplete_celeba_is_refused(tmp_path, damage, error, message):
    celeba_folder(tmp_path / "celeba")
    damage(tmp_path / "celeba")
    with pytest.raises(error, match=message):
        prepare_celeba(tmp_path / "celeba")
    assert not (tmp_path / "packs").exists()


def test_a_partition_list_may_begin_with_a_byte_order_mark(tmp_path):
    celeba_folder(tmp_path / "celeba")
    listed = tmp_path / "celeba" / "list_eval_partition.txt"
    listed.write_bytes(b"\xef\xbb\xbf" + listed.read_bytes())
    assert read(prepare_celeba(tmp_path / "celeba"))["image_number"].tolist() == [1, 2, 3, 4, 5, 6]


# Over a pack that is there


def jodie_file(path, users):
    rows = "".join(f"{user},{mark},{10 * user + mark},0\n" for user in range(users) for mark in range(3))
    path.write_text("user_id,item_id,timestamp,state_label\n" + rows)
    return path


def larger_and_smaller(name, folder):
    """How to prepare a pack, with more in it and with less."""
    if name == "emnist":
        few = {"test_images": np.zeros((46, 28, 28), np.uint8), "test_labels": np.zeros(46, np.uint8)}
        more = emnist_folder(folder / "more")
        less = emnist_folder(folder / "less", **{key: idx(array) for key, array in few.items()})
        return partial(prepare_emnist, more), partial(prepare_emnist, less)
    if name == "celeba":
        more, less = celeba_folder(folder / "more"), celeba_folder(folder / "less", 2, (0, 2))
        return partial(prepare_celeba, more), partial(prepare_celeba, less)
    more, less = (jodie_file(folder / f"{users}.csv", users) for users in (6, 5))
    return partial(prepare_jodie, "mooc", more), partial(prepare_jodie, "mooc", less)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("emnist", "holds 94 train, 47 test images, more than .* 94 train, 46 test: .*--replace"),
        ("celeba", "holds 4 train, 2 test images, more than .* 1 train, 1 test"),
        ("mooc", "holds 3 train, 1 validation, 2 test sequences, more than .* 3 train, 1 validation, 1 test"),
    ],
)
def test_a_larger_pack_is_replaced_by_a_smaller_one_only_on_demand(tmp_path, name, message):
    larger, smaller = larger_and_smaller(name, tmp_path)
    path = smaller()
    small = read(path)
    assert larger() == path, "a larger one may come over a smaller one"
    large = path.read_bytes()
    with pytest.raises(FileExistsError, match=message):
        smaller()
    assert path.read_bytes() == large
    assert larger() == path, "and the same again"
    assert smaller(replace=True) == path
    assert {key: value.tolist() for key, value in read(path).items()} == {
        key: value.tolist() for key, value in small.items()
    }


def test_a_pack_that_cannot_be_read_is_no_hindrance(tmp_path):
    (tmp_path / "packs").mkdir()
    (tmp_path / "packs" / "emnist.npz").write_bytes(b"PK, but no more")
    assert len(read(prepare_emnist(emnist_folder(tmp_path / "gzip")))["test_labels"]) == 47


# What is said of it all on a terminal


def printed(capsys, *arguments):
    """What `constmem data` prints for its arguments: the lines, and the warnings among them."""
    app(["data", *map(str, arguments)], standalone_mode=False)
    shown = capsys.readouterr()
    assert all(line.startswith(("warning: ", "preparing ")) for line in shown.err.splitlines())
    return shown.out.splitlines(), [line for line in shown.err.splitlines() if line.startswith("warning")]


@pytest.mark.parametrize("archive", [False, True])
def test_a_subset_is_reported_with_what_was_expected_but_is_no_error(tmp_path, capsys, archive):
    source = emnist_folder(tmp_path / "gzip")
    if archive:
        source = zipped(source, tmp_path / "gzip.zip", "gzip")
    lines, warnings = printed(capsys, "prepare", "emnist", "--source", source)
    assert lines[0] == str(tmp_path / "packs" / "emnist.npz")
    assert lines[1] == ("found: 94 train, 47 test images of 47 classes (a subset: 141 of 131,600 images)")
    assert warnings[-1] == (
        "warning: expected were 112,800 train, 18,800 test images, officially, but found were 94 train, "
        "47 test: a subset: 141 of 131,600 images"
    )
    if archive:
        md5 = hashlib.md5(source.read_bytes()).hexdigest()
        assert f"the MD5 of gzip.zip is {md5}, not that of the official file, 58c8d27c78d2" in warnings[0]
    else:
        assert len(warnings) == 1
        assert "no published checksum" in lines[2]
    listed, _ = printed(capsys, "list")
    assert any(line.startswith("emnist: 94 train, 47 test (a subset: 141 of 131,600") for line in listed)


def test_files_that_are_official_by_number_and_checksum_are_reported_without_a_warning(
    tmp_path, capsys, monkeypatch
):
    archive = zipped(emnist_folder(tmp_path / "gzip"), tmp_path / "renamed.zip", "gzip")
    md5 = hashlib.md5(archive.read_bytes()).hexdigest()
    monkeypatch.setitem(prepare_images.PUBLISHED, "gzip.zip", md5)
    official = dataclasses.replace(catalogue.PACKS["emnist"], official={"train": 94, "test": 47})
    monkeypatch.setitem(catalogue.PACKS, "emnist", official)
    lines, warnings = printed(capsys, "prepare", "emnist", "--source", archive)
    assert warnings == []
    assert lines[1] == "found: 94 train, 47 test images of 47 classes (the official counts)"
    assert lines[2] == "prepared from the official files (renamed.zip, MD5 as published)"
    monkeypatch.setitem(prepare_images.PUBLISHED, "gzip.zip", "0" * 32)
    monkeypatch.setitem(
        prepare_images.PUBLISHED, "list_eval_partition.txt", md5
    )  # of another file altogether
    _, warnings = printed(capsys, "prepare", "emnist", "--source", archive)
    assert [f"is {md5}, not that of the official file, {'0' * 32}" in line for line in warnings] == [True]


def test_celeba_is_prepared_with_a_partition_list_from_elsewhere_and_its_progress_is_shown(tmp_path, capsys):
    images = celeba_folder(tmp_path / "celeba")
    partition = tmp_path / "few.txt"
    partition.write_text("000002.jpg 0\n000005.jpg 2\n")
    app(
        ["data", "prepare", "celeba", "--source", str(images), "--partition", str(partition)],
        standalone_mode=False,
    )
    shown = capsys.readouterr()
    assert "found: 1 train, 1 test images (a subset: 2 of 202,599 images)" in shown.out
    assert "preparing celeba 2/2" in shown.err
    assert "the MD5 of few.txt is " in shown.err
    with pytest.raises(ValueError, match="--partition is for celeba: emnist has no such list"):
        app(
            ["data", "prepare", "emnist", "--source", str(images), "--partition", str(partition)],
            standalone_mode=False,
        )


def test_faces_that_are_decoded_at_first_use_show_their_progress(tmp_path, capsys):
    splits = (0,) * 10 + (2, 2)
    prepare_celeba(celeba_folder(tmp_path / "celeba", 12, splits))
    settings = recipe("celeba32", "cnp")
    for shown in (True, False):  # the second time they come from the cache
        open_source("celeba32", settings, data_dir=None, device=torch.device("cpu"))
        err = capsys.readouterr().err
        assert ("decoding celeba32, train 10/10" in err) == shown
        assert ("decoding celeba32, test 2/2" in err) == shown


def test_events_are_reported_in_sequences_and_marks(tmp_path, capsys):
    source = jodie_file(tmp_path / "mooc.csv", 5)
    lines, warnings = printed(capsys, "prepare", "mooc", "--source", source)
    assert lines[1] == "found: 3 train, 1 validation, 1 test sequences, 15 events of 3 marks"
    assert lines[2].startswith("prepared from mooc.csv of the JODIE collection: 15 events")
    assert warnings == []


def test_what_is_replaced_is_reported(tmp_path, capsys):
    source = jodie_file(tmp_path / "mooc.csv", 6)
    lines, _ = printed(capsys, "prepare", "mooc", "--source", source)
    assert not any(line.startswith("replaced") for line in lines)
    jodie_file(source, 5)
    with pytest.raises(FileExistsError):
        printed(capsys, "prepare", "mooc", "--source", source)
    lines, _ = printed(capsys, "prepare", "mooc", "--source", source, "--replace")
    assert lines[1] == "replaced: a pack of 3 train, 1 validation, 2 test"
    assert lines[2].startswith("found: 3 train, 1 validation, 1 test sequences")
    (tmp_path / "packs" / "events_mooc.npz").write_bytes(b"")
    lines, _ = printed(capsys, "prepare", "mooc", "--source", source)
    assert lines[1] == "replaced: a pack that could not be read"


# Bounds


def bomb(announced, held):
    """A gzipped IDX file of images that announces so many bytes of them, and holds so many zeros."""
    packer = zlib.compressobj(9, zlib.DEFLATED, 31)
    parts = [packer.compress(struct.pack(">4I", 0x803, announced, 28, 28))]
    parts += [packer.compress(bytes(10**6)) for _ in range(held // 10**6)]
    return b"".join([*parts, packer.flush()])


@pytest.mark.parametrize(("announced", "message"), [(47, "holds more"), (2**31, "far more than EMNIST")])
@pytest.mark.parametrize("archive", [False, True])
def test_a_bomb_of_a_few_kilobytes_is_refused_in_little_memory(tmp_path, announced, message, archive):
    content = bomb(announced, 200 * 10**6)
    source = emnist_folder(tmp_path / "gzip", train_images=content)
    if archive:
        with zipfile.ZipFile(tmp_path / "gzip.zip", "w", zipfile.ZIP_DEFLATED) as file:
            for path in source.iterdir():
                file.write(path, path.name)
        source = tmp_path / "gzip.zip"
    with little_memory(), pytest.raises(ValueError, match=message):
        prepare_emnist(source)


def test_an_archive_whose_files_are_far_larger_than_itself_is_refused(tmp_path):
    path = tmp_path / "gzip.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file, file.open("huge", "w") as member:
        for _ in range(200):
            member.write(bytes(10**6))
    with little_memory(), pytest.raises(ValueError, match="would unpack to 200,000,000"):
        prepare_emnist(path)


def huge(content):
    """A JPEG file that says that it is 65,500 pixels wide and high."""
    start = content.index(b"\xff\xc0") + 5
    return content[:start] + struct.pack(">2H", 65_500, 65_500) + content[start + 4 :]


def test_a_face_that_says_it_is_huge_is_refused_before_it_is_decoded(tmp_path):
    celeba_folder(tmp_path / "celeba")
    image = tmp_path / "celeba" / "img_align_celeba" / "000003.jpg"
    image.write_bytes(huge(jpeg(2)))
    with little_memory(), pytest.raises(ValueError, match=r"000003.jpg .* is 65500x65500, .* 178x218"):
        prepare_celeba(tmp_path / "celeba")
    image.write_bytes(jpeg(2))
    path = prepare_celeba(tmp_path / "celeba")
    pack = read(path)
    whole = pack["jpeg"].tobytes()
    place = int(pack["offsets"][2])
    pack["jpeg"] = np.frombuffer(whole[:place] + huge(whole[place:]), np.uint8)
    np.savez(path, **pack)
    with little_memory(), pytest.raises(ValueError, match=r"image 2 of .* is 65500x65500"):
        load_images("celeba32")


def test_a_face_of_another_format_is_refused_whatever_its_name(tmp_path):
    celeba_folder(tmp_path / "celeba")
    content = io.BytesIO()
    Image.new("RGB", (178, 218)).save(content, "PNG")
    image = tmp_path / "celeba" / "img_align_celeba" / "000003.jpg"
    image.write_bytes(b"\xff\xd8" + content.getvalue() + b"\xff\xd9")
    with pytest.raises(ValueError, match="not a readable JPEG"):
        prepare_celeba(tmp_path / "celeba")


def test_a_file_of_more_bytes_than_its_kind_has_is_not_read(tmp_path, monkeypatch):
    monkeypatch.setattr(prepare_images, "MOST_JPEG", 1000)
    monkeypatch.setattr(prepare_images, "MOST_GZIP", 1000)
    with pytest.raises(ValueError, match=r"jpg has .* bytes, but 1,000 at most"):
        prepare_celeba(celeba_folder(tmp_path / "celeba").parent)
    with pytest.raises(ValueError, match=r"gz has .* bytes, but 1,000 at most"):
        prepare_emnist(emnist_folder(tmp_path / "gzip"))

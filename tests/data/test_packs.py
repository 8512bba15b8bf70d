"""Packs are read within bounds: what announces too much, or unpacks to too much, is refused first."""

import io
import os
import struct
import tracemalloc
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from constmem.data import listing, load_events
from constmem.data.packs import read_pack, write_pack

MB = 10**6


@contextmanager
def little_memory(most: int = 30 * MB) -> Iterator[None]:
    """Whatever happens inside must not take more than this."""
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < most
    finally:
        tracemalloc.stop()


def npy(shape: str, descr: str = "|u1", version: bytes = b"\1\0") -> bytes:
    """The beginning of an array's file, as a header of this shape announces it."""
    text = f"{{'descr': {descr!r}, 'fortran_order': False, 'shape': {shape}, }}".encode()
    return b"\x93NUMPY" + version + struct.pack("<H" if version == b"\1\0" else "<I", len(text)) + text


def archive(path: Path, members: dict[str, bytes]) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        for name, content in members.items():
            file.writestr(name, content)
    return path


def test_arrays_are_read_as_numpy_reads_them(tmp_path: Path) -> None:
    arrays = {
        "bytes": np.arange(24, dtype=np.uint8).reshape(2, 3, 4), "none": np.zeros((0, 28), np.float32),
        "words": np.array("hour"), "number": np.array(7), "turned": np.asfortranarray(np.eye(3)),
    }  # fmt: skip
    for compress in (True, False):
        found = read_pack(write_pack(tmp_path / "a.npz", arrays, compress=compress), [*arrays])
        with np.load(tmp_path / "a.npz", allow_pickle=False) as expected:
            for key in arrays:
                np.testing.assert_array_equal(found[key], expected[key])
                assert found[key].dtype == expected[key].dtype
                assert found[key].flags.writeable


def test_a_pack_that_unpacks_to_very_much_more_than_its_size_is_refused_first(tmp_path: Path) -> None:
    path = tmp_path / "a.npz"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file, file.open("x.npy", "w") as member:
        member.write(npy(f"({300 * MB},)"))
        for _ in range(300):
            member.write(bytes(MB))
    assert path.stat().st_size < MB
    with little_memory(), pytest.raises(ValueError, match="would unpack to 300,"):
        read_pack(path, ["x"])


@pytest.mark.parametrize(
    "content",
    [
        npy("(10**15,)"),
        npy("(1000000000000000,)") + bytes(100),
        npy("(4000000000, 4000000000, 4000000000)"),
        npy("(-5,)"),
        npy("(3,)") + bytes(2),
        npy("(3,)") + bytes(4),
        npy("(2,)", "|O") + bytes(16),
        npy("(2,)", version=b"\3\0") + bytes(2),
        npy("(2,)", version=b"\2\0")[:-4],
        npy("(" * 3000),
        npy("(2,)", "<U2000000000"),
        b"",
        b"\x93NUMPY",
    ],
)
def test_headers_that_announce_what_is_not_there_are_refused_before_memory_is_taken(
    tmp_path: Path, content: bytes
) -> None:
    with (
        little_memory(),
        pytest.raises(ValueError, match=r"a\.npz is not a readable npz file of plain arrays"),
    ):
        read_pack(archive(tmp_path / "a.npz", {"x.npy": content}), ["x"])


def flipped(content: bytes, random: np.random.Generator) -> bytes:
    out = bytearray(content)
    for place in random.integers(0, len(out), 3):
        out[place] ^= int(random.integers(1, 256))
    return bytes(out)


def cut(content: bytes, random: np.random.Generator) -> bytes:
    return content[: random.integers(0, len(content))]


@pytest.mark.parametrize("damage", [flipped, cut])
def test_damage_anywhere_is_refused_or_changes_nothing(
    tmp_path: Path, damage: Callable[[bytes, np.random.Generator], bytes]
) -> None:
    random = np.random.default_rng(0)
    arrays = {"x": random.integers(0, 256, 500, np.uint8), "y": random.normal(size=(5, 4))}
    content = io.BytesIO()
    np.savez_compressed(content, **arrays)
    path = tmp_path / "a.npz"
    for _ in range(300):
        path.write_bytes(damage(content.getvalue(), random))
        with little_memory():
            try:
                found = read_pack(path, ["x", "y"])
            except ValueError:
                continue
        for key, value in arrays.items():
            np.testing.assert_array_equal(found[key], value)


def test_a_bomb_among_the_packs_is_listed_as_one_and_does_no_harm(tmp_path: Path) -> None:
    members = {f"{key}.npy": npy("(10**12,)") for key in ("times", "marks", "offsets", "split", "unit")}
    archive(tmp_path / "events_own.npz", members | {"num_marks.npy": npy("(10**12,)")})
    with little_memory():
        (found,) = (entry for entry in listing(tmp_path) if entry.known.name == "events_own")
        assert "not a readable npz file" in str(found)
        with pytest.raises(ValueError, match="not a readable npz file"):
            load_events("own", data_dir=tmp_path)


@pytest.mark.data
def test_the_real_packs_are_well_within_the_bounds() -> None:
    folder = os.environ.get("CONSTMEM_DATA")
    if not folder:
        pytest.skip("CONSTMEM_DATA is not set")
    assert not [str(entry) for entry in listing(folder) if entry.problem]

"""Writing files: all of one, or none of it."""

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from constmem.core.files import LONGEST_JSON, read_json, read_tensors, write_bytes, write_tensors, write_text


def test_what_is_written_can_be_read(tmp_path: Path) -> None:
    path = write_bytes(tmp_path / "a", b"\x00\xff")
    assert path.read_bytes() == b"\x00\xff"


def test_text_is_written_as_utf8(tmp_path: Path) -> None:
    assert write_text(tmp_path / "a", "äß\n").read_bytes() == "äß\n".encode()


def test_missing_folders_are_made(tmp_path: Path) -> None:
    write_bytes(tmp_path / "deep" / "deeper" / "a", b"1")
    assert (tmp_path / "deep" / "deeper" / "a").read_bytes() == b"1"


def test_writing_replaces_the_old_file_and_leaves_nothing_else(tmp_path: Path) -> None:
    write_bytes(tmp_path / "a", b"old and longer")
    write_bytes(tmp_path / "a", b"new")
    assert (tmp_path / "a").read_bytes() == b"new"
    assert [p.name for p in tmp_path.iterdir()] == ["a"]


def test_a_reader_never_sees_half_of_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_bytes(tmp_path / "a", b"old")
    seen = []
    fsync = os.fsync

    def look(handle: int) -> None:
        fsync(handle)
        seen.append((path.read_bytes(), len(list(tmp_path.iterdir()))))

    monkeypatch.setattr(os, "fsync", look)
    write_bytes(path, b"new")
    assert seen == [(b"old", 2)]  # all bytes are on the disk, under another name, before the rename
    assert path.read_bytes() == b"new"


@pytest.mark.parametrize("where", ["fsync", "rename"])
@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_a_failed_write_leaves_the_old_file_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str, error: BaseException
) -> None:
    path = write_bytes(tmp_path / "a", b"old")

    def fail(*_: object) -> None:
        raise error

    if where == "fsync":
        monkeypatch.setattr(os, "fsync", fail)
    else:
        for target in ((os, "replace"), (Path, "replace"), (os, "rename"), (Path, "rename")):
            monkeypatch.setattr(*target, fail)
    with pytest.raises(type(error)):
        write_bytes(path, b"new")
    monkeypatch.undo()
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_tensors_of_any_stride_come_back(tmp_path: Path) -> None:
    tensors = {"a": torch.rand(3, 4).T, "b": torch.rand(2, 1).expand(2, 5), "c": torch.arange(3)}
    write_tensors(tmp_path / "t", tensors, {"format": "kind", "version": "1", "note": "x"})
    found, header = read_tensors(tmp_path / "t", kind="kind", version=1)
    assert header["note"] == "x"
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())


def test_every_bit_of_a_file_counts(tmp_path: Path) -> None:
    path = write_tensors(
        tmp_path / "t", {"a": torch.rand(3), "mask": torch.tensor([True])}, {"format": "kind", "version": "1"}
    )
    content = path.read_bytes()
    for place in range(len(content)):  # those of the word "checksum" itself, too
        for bit in (0, 5):
            path.write_bytes(content[:place] + bytes([content[place] ^ 1 << bit]) + content[place + 1 :])
            with pytest.raises(ValueError, match=r"damaged|not a readable|expected|version"):
                read_tensors(path, kind="kind", version=1)


def test_a_checksum_whose_name_and_digits_are_both_damaged_is_noticed(tmp_path: Path) -> None:
    path = write_tensors(tmp_path / "t", {"a": torch.rand(3)}, {"format": "kind", "version": "1"})
    content = bytearray(path.read_bytes())
    key = content.index(b"checksum")
    content[key], content[key + 20], content[-1] = ord("C"), ord("Z"), content[-1] ^ 1
    path.write_bytes(content)
    with pytest.raises(ValueError, match="damaged: its checksum"):
        read_tensors(path, kind="kind", version=1)


def test_a_checksum_known_from_elsewhere_serves_a_file_that_has_none(tmp_path: Path) -> None:
    save_file({"a": torch.rand(3)}, tmp_path / "t", {"format": "kind", "version": "1"})
    known = hashlib.sha256((tmp_path / "t").read_bytes()).hexdigest()
    assert read_tensors(tmp_path / "t", kind="kind", version=1, sha256=known)[0].keys() == {"a"}
    with pytest.raises(ValueError, match="damaged: its checksum"):
        read_tensors(tmp_path / "t", kind="kind", version=1, sha256="0" * 64)
    with pytest.warns(UserWarning, match="has no checksum, as older versions wrote none"):
        read_tensors(tmp_path / "t", kind="kind", version=1)


def test_tensors_do_not_need_their_file_once_they_are_read(tmp_path: Path) -> None:
    path = write_tensors(tmp_path / "t", {"a": torch.arange(5000)}, {"format": "kind", "version": "1"})
    tensors, _ = read_tensors(path, kind="kind", version=1)
    os.truncate(path, 0)
    assert torch.equal(tensors["a"], torch.arange(5000))


def test_tensors_of_absurd_sizes_and_endless_json_are_refused(tmp_path: Path) -> None:
    for shape in ([0, 2**60], [2**63, 0]):
        about = {"a": {"dtype": "F32", "shape": shape, "data_offsets": [0, 0]}}
        text = json.dumps({"__metadata__": {"format": "kind", "version": "1"}, **about}).encode()
        write_bytes(tmp_path / "t", len(text).to_bytes(8, "little") + text)
        known = hashlib.sha256((tmp_path / "t").read_bytes()).hexdigest()
        with pytest.raises(ValueError, match=r"impossible|not a readable"):
            read_tensors(tmp_path / "t", kind="kind", version=1, sha256=known)
    for text in (b"[" * 10**6, b" " * (LONGEST_JSON + 1)):
        with pytest.raises(ValueError, match="damaged or of another kind"):
            read_json(write_bytes(tmp_path / "j", text), "write it again")


def test_a_link_and_a_mode_survive_a_save(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    real, link = tmp_path / "elsewhere" / "real", tmp_path / "link"
    real.write_bytes(b"old")
    real.chmod(0o640)
    link.symlink_to(Path("elsewhere") / "real")
    write_bytes(link, b"new")
    assert link.is_symlink()
    assert real.read_bytes() == b"new"
    assert real.stat().st_mode & 0o777 == 0o640
    assert sorted(p.name for p in tmp_path.rglob("*")) == ["elsewhere", "link", "real"]


def test_what_a_killed_writer_left_is_cleared_by_the_next_and_what_another_is_writing_is_not(
    tmp_path: Path,
) -> None:
    writing = """
import os, sys, time
from constmem.core import files
os.fsync = lambda _: (print("writing", flush=True), time.sleep(600))
files.write_bytes(sys.argv[1], b"never finished")
"""
    path = tmp_path / "a"
    with subprocess.Popen([sys.executable, "-c", writing, str(path)], stdout=subprocess.PIPE) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline() == b"writing\n"
        (left,) = tmp_path.iterdir()
        write_bytes(path, b"1")
        assert left.exists()  # its writer is alive
        writer.kill()
        writer.wait()
        write_bytes(tmp_path / "b", b"2")
        assert left.exists()  # of another file
        write_bytes(path, b"3")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "b"]


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"there is no file .*nowhere: expected a kind"):
        read_tensors(tmp_path / "nowhere", kind="kind", version=1)


def test_a_folder_is_not_a_file(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="there is no file"):
        read_tensors(tmp_path, kind="kind", version=1)


@pytest.mark.parametrize("content", [b"", b"hello", bytes(1000), b"\xff" * 1000])
def test_a_file_of_another_format_is_refused(tmp_path: Path, content: bytes) -> None:
    write_bytes(tmp_path / "t", content)
    with pytest.raises(ValueError, match=r"t is not a readable safetensors file .*; write the kind again"):
        read_tensors(tmp_path / "t", kind="kind", version=1)


@pytest.mark.parametrize("share", [0.1, 0.5, 0.99])
def test_a_file_cut_short_is_refused(tmp_path: Path, share: float) -> None:
    path = write_tensors(tmp_path / "t", {"a": torch.rand(100)}, {"format": "kind", "version": "1"})
    content = path.read_bytes()
    path.write_bytes(content[: int(share * len(content))])
    with pytest.raises(ValueError, match="is cut short or of another format"):
        read_tensors(path, kind="kind", version=1)


def test_a_foreign_safetensors_file_is_refused(tmp_path: Path) -> None:
    save_file({"a": torch.rand(3)}, tmp_path / "t")
    with pytest.raises(ValueError, match="holds 'no constmem header' where 'kind' was expected"):
        read_tensors(tmp_path / "t", kind="kind", version=1)


def test_another_kind_is_refused(tmp_path: Path) -> None:
    write_tensors(tmp_path / "t", {"a": torch.rand(3)}, {"format": "other", "version": "1"})
    with pytest.raises(ValueError, match="holds 'other' where 'kind' was expected"):
        read_tensors(tmp_path / "t", kind="kind", version=1)


@pytest.mark.parametrize("version", [0, 2, 17])
def test_another_version_is_refused(tmp_path: Path, version: int) -> None:
    header = {"format": "kind", "version": str(version)}
    write_tensors(tmp_path / "t", {"a": torch.rand(3)}, header)
    with pytest.raises(ValueError, match=f"format version {version}; this constmem reads version 1"):
        read_tensors(tmp_path / "t", kind="kind", version=1)


def test_a_pipe_or_a_folder_is_not_replaced_by_a_file(tmp_path: Path) -> None:
    pipe, link = tmp_path / "pipe", tmp_path / "link"
    os.mkfifo(pipe)
    link.symlink_to(pipe)
    for path in (pipe, link):
        with pytest.raises(OSError, match="a device or a pipe"):
            write_text(path, "new")
    assert pipe.is_fifo()
    for folder in (tmp_path, Path()):
        with pytest.raises(IsADirectoryError):
            write_text(folder, "new")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "pipe"]

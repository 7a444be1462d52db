"""The files of a box as bytes: exact both ways, and neither a hostile tree nor hostile bytes leave their folders."""

from __future__ import annotations

import os
import stat
import struct
import time
import tracemalloc
from pathlib import Path

import pytest
import zstandard
from each_case import each_case

from agentrl.errors import SandboxError, SandboxPathError
from agentrl.sandbox.pack_files import pack, unpack

MB = 1 << 20


def folder(path: Path) -> Path:
    path.mkdir()
    return path


def packed(root: Path, *, most: int = 4 * MB, limit: int = 64 * MB) -> bytes:
    return pack({"work": root}, most_bytes=most, limit=limit)


def unpacked(data: bytes, root: Path, *, limit: int = 64 * MB) -> Path:
    unpack(data, {"work": folder(root)}, limit=limit)
    return root


def told(root: Path) -> dict[Path, object]:
    """All that a box can see of a tree, by path."""
    found: dict[Path, object] = {}
    for path in root.rglob("*"):
        status = path.lstat()
        content: object = None
        if path.is_symlink():
            content = path.readlink()
        elif path.is_file():
            content = path.read_bytes()
        found[path.relative_to(root)] = status.st_mode, content, None if path.is_symlink() else status.st_mtime_ns
    return found


def test_a_tree_comes_back_as_it_was(tmp_path: Path) -> None:
    root = folder(tmp_path / "a")
    for name in (b"plain", b"new\nline", b"\xff\xfe not text", b"-rf", "ä→🙂".encode(), b"x" * 255):
        Path(os.fsdecode(os.fsencode(root) + b"/" + name)).write_bytes(name * 100)
    (root / "deep" / "er" / "empty").mkdir(parents=True)
    (root / "deep" / "run").write_text("#!/bin/sh\n")
    (root / "deep" / "run").chmod(0o711)
    (root / "deep" / "er").chmod(0o700)
    (root / "inside").symlink_to("deep/run")
    (root / "outside").symlink_to("/etc/passwd")
    (root / "up").symlink_to("../../..")
    os.mkfifo(root / "pipe", 0o640)
    os.utime(root / "plain", ns=(1, 1_234_567_890_123_456_789))
    os.utime(root / "deep", ns=(1, 5_000_000_000))
    back = unpacked(packed(root), tmp_path / "b")
    assert told(back) == told(root)


def test_a_time_beyond_all_clocks_hinders_nothing(tmp_path: Path) -> None:
    root = folder(tmp_path / "a")
    (root / "f").write_bytes(b"x")
    os.utime(root / "f", (1 << 35, 1 << 35))
    if (root / "f").stat().st_mtime_ns < 1 << 63:
        pytest.skip("this file system has no such times")
    assert (unpacked(packed(root), tmp_path / "b") / "f").read_bytes() == b"x"


def test_names_of_one_file_stay_one_file(tmp_path: Path) -> None:
    root = folder(tmp_path / "a")
    (root / "one").write_bytes(b"x" * 1000)
    (root / "sub").mkdir()
    (root / "sub" / "two").hardlink_to(root / "one")
    back = unpacked(packed(root), tmp_path / "b")
    assert (back / "one").stat().st_ino == (back / "sub" / "two").stat().st_ino
    assert (back / "sub" / "two").read_bytes() == b"x" * 1000


def test_an_unpacked_folder_loses_what_it_held(tmp_path: Path) -> None:
    root, other = folder(tmp_path / "a"), folder(tmp_path / "b")
    (root / "f").write_text("new")
    (other / "old").mkdir()
    (other / "old" / "f").write_text("old")
    unpack(packed(root), {"work": other}, limit=MB)
    assert told(other) == told(root)


def test_links_that_lead_out_are_never_followed(tmp_path: Path) -> None:
    root, secret = folder(tmp_path / "a"), folder(tmp_path / "secret")
    (secret / "key").write_text("do not read me")
    (root / "folder").symlink_to(secret)
    (root / "file").symlink_to(secret / "key")
    data = packed(root)
    assert b"do not read me" not in zstandard.ZstdDecompressor().decompressobj().decompress(data[8:])
    other = folder(tmp_path / "b")
    (other / "folder").symlink_to(secret)  # where a box's link stands already
    unpack(data, {"work": other}, limit=MB)
    assert (secret / "key").read_text() == "do not read me" and (other / "folder").is_symlink()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root makes device nodes")
def test_device_nodes_and_setuid_bits_do_not_come_along(tmp_path: Path) -> None:
    root = folder(tmp_path / "a")
    os.mknod(root / "null", stat.S_IFCHR | 0o666, os.makedev(1, 3))
    (root / "su").write_text("")
    (root / "su").chmod(0o6755)
    (root / "sticky").mkdir()
    (root / "sticky").chmod(0o7777)
    back = unpacked(packed(root), tmp_path / "b")
    assert sorted(path.name for path in back.iterdir()) == ["sticky", "su"]
    assert (back / "su").stat().st_mode & 0o7777 == 0o755
    assert (back / "sticky").stat().st_mode & 0o7777 == 0o777


def test_a_sparse_file_of_a_terabyte_is_refused_before_it_is_read(tmp_path: Path) -> None:
    root = folder(tmp_path / "a")
    with (root / "sparse").open("wb") as file:
        file.truncate(1 << 40)
    began = time.monotonic()
    with pytest.raises(SandboxPathError, match="exceeds 67108864 bytes"):
        packed(root)
    assert time.monotonic() - began < 60, "to read it takes minutes"


def test_a_sparse_file_within_the_bound_stays_sparse_and_costs_little_memory(tmp_path: Path) -> None:
    root = folder(tmp_path / "a")
    with (root / "sparse").open("wb") as file:
        file.seek(10 * MB)
        file.write(b"x")
        file.truncate(48 * MB)
    tracemalloc.start()
    try:
        data = packed(root)
        back = unpacked(data, tmp_path / "b")
        assert tracemalloc.get_traced_memory()[1] < 8 * MB
    finally:
        tracemalloc.stop()
    assert len(data) < 100_000
    status = (back / "sparse").stat()
    assert status.st_size == 48 * MB and status.st_blocks * 512 < 4 * MB
    with (back / "sparse").open("rb") as file:
        file.seek(10 * MB)
        assert file.read(2) == b"x\0"


def test_a_packed_tree_beyond_its_bound_is_given_up_early(tmp_path: Path) -> None:
    root = folder(tmp_path / "a")
    for n in range(8):
        (root / str(n)).write_bytes(os.urandom(4 * MB))
    tracemalloc.start()
    try:
        with pytest.raises(SandboxPathError, match="more than 2097152 bytes"):
            packed(root, most=2 * MB)
        assert tracemalloc.get_traced_memory()[1] < 16 * MB
    finally:
        tracemalloc.stop()


@pytest.mark.medium
def test_endless_entries_are_given_up_at_the_bound(tmp_path: Path) -> None:
    """A hundred thousand names of one empty file: cheap to make, and none of them is a byte long."""
    root = folder(tmp_path / "a")
    (root / "0").write_bytes(b"")
    made, at = 0, 0
    while made < (1 << 16):
        at += 1
        try:
            os.link(root / "0", root / str(at))
            made += 1
        except OSError:  # the file system's own bound on names of a file
            (root / "0").unlink()
            (root / "0").write_bytes(b"")
    with pytest.raises(SandboxPathError, match="65536 entries"):
        packed(root)


def test_a_tree_that_is_too_deep_is_refused(tmp_path: Path) -> None:
    root = folder(tmp_path / "a")
    fd = os.open(root, os.O_RDONLY)
    for _ in range(150):
        os.mkdir("d", dir_fd=fd)
        inner = os.open("d", os.O_RDONLY, dir_fd=fd)
        os.close(fd)
        fd = inner
    os.close(fd)
    with pytest.raises(SandboxPathError, match="deeper than 100"):
        packed(root)


# --- hostile bytes ------------------------------------------------------------------------------------------------

ENTRY = struct.Struct("<cHIQq")


def entry(kind: bytes, name: bytes = b"", *, size: int = 0, content: bytes = b"", mode: int = 0o755) -> bytes:
    return ENTRY.pack(kind, mode, len(name), size or len(content), 0) + name + content


def hostile(*entries: bytes, root: bytes = b"work") -> bytes:
    return b"agentrl1" + zstandard.compress(entry(b"R", root) + b"".join(entries) + entry(b"U") + entry(b"E"))


@each_case(
    "data",
    {
        "dots": hostile(entry(b"F", b"..", content=b"x")),
        "a folder of dots": hostile(entry(b"D", b".."), entry(b"F", b"out", content=b"x"), entry(b"U")),
        "a path": hostile(entry(b"F", b"../out", content=b"x")),
        "an absolute path": hostile(entry(b"F", b"/tmp/agentrl-out", content=b"x")),
        "no name": hostile(entry(b"F", b"", content=b"x")),
        "a NUL": hostile(entry(b"F", b"a\0b", content=b"x")),
        "a long name": hostile(entry(b"F", b"x" * 300, content=b"x")),
        "a name that never ends": b"agentrl1" + zstandard.compress(ENTRY.pack(b"R", 0, 0xFFFFFFFF, 0, 0)),
        "a file through a link": hostile(entry(b"L", b"l", content=b".."), entry(b"D", b"l"), entry(b"U")),
        "a file onto a link": hostile(entry(b"L", b"l", content=b"../out"), entry(b"F", b"l", content=b"x")),
        "a link from elsewhere": hostile(entry(b"H", b"h", size=7)),
        "up and out": hostile(entry(b"U"), entry(b"U"), entry(b"F", b"out", content=b"x")),
        "an unknown kind": hostile(entry(b"C", b"null")),
        "another root": hostile(root=b"../out"),
        "no end": b"agentrl1" + zstandard.compress(entry(b"R", b"work")),
        "less than it says": hostile(entry(b"F", b"f", size=1000)),
        "a bomb": hostile(entry(b"F", b"f", size=1 << 40)),
        "a bomb of zeros": hostile(entry(b"F", b"f", content=bytes(65 * MB))),
        "a link of a megabyte": hostile(entry(b"L", b"l", content=b"x" * MB)),
        "deeper than it may": hostile(*[entry(b"D", b"d")] * 150),
        "endless folders": hostile(*[entry(b"F", str(n).encode()) for n in range(1 << 16)]),
        "endless roots": b"agentrl1" + zstandard.compress((entry(b"R", b"work") + entry(b"U")) * 10_000_000),
        "nothing": b"",
        "another format": b"PK\x03\x04" + bytes(100),
        "no zstd": b"agentrl1" + os.urandom(1000),
        "cut": hostile(entry(b"F", b"f", content=os.urandom(1000)))[:-100],
    }.items(),
)
def test_hostile_bytes_stay_inside_and_say_what_is_wrong(data: tuple[str, bytes], tmp_path: Path) -> None:
    before = list(tmp_path.iterdir())
    began = time.monotonic()
    tracemalloc.start()
    try:
        with pytest.raises((SandboxError, SandboxPathError)):
            unpacked(data[1], tmp_path / "b")
        assert tracemalloc.get_traced_memory()[1] < 16 * MB
    finally:
        tracemalloc.stop()
    assert time.monotonic() - began < 60
    assert set(tmp_path.iterdir()) == {*before, tmp_path / "b"}
    assert not Path("/tmp/agentrl-out").exists()


def test_every_cut_of_a_packed_tree_is_noticed(tmp_path: Path) -> None:
    root = folder(tmp_path / "a")
    (root / "f").write_bytes(b"hello")
    data = packed(root)
    for n in range(len(data)):
        with pytest.raises(SandboxError):
            unpack(data[:n], {"work": root}, limit=MB)

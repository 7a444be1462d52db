"""Conformance: files in and out, snapshots and forks."""

from __future__ import annotations

import functools
import os
import tempfile
from pathlib import Path

from agentrl.errors import BoxBusy
from agentrl.protocols import PackableSandbox, Sandbox
from agentrl.testing.sandbox.case import Bench, Case, case, must_fail, must_refuse, output

_ALL_BYTES = bytes(range(256))

CASES: list[Case] = []
promise = functools.partial(case, CASES, "conformance")


# --- files ------------------------------------------------------------------------------------------------------------


@promise()
async def _(bench: Bench) -> None:
    """what is written can be read by a command, and the reverse, all 256 byte values"""
    async with bench.box() as box:
        await box.write("in", _ALL_BYTES)
        assert (await box.exec(["cp", "in", "out"])).exit_code == 0
        assert await box.read("out") == _ALL_BYTES


@promise()
async def _(bench: Bench) -> None:
    """five megabytes pass through write and read"""
    data = os.urandom(5 << 20)
    async with bench.box() as box:
        await box.write("big", data)
        assert await box.read("big") == data


@promise()
async def _(bench: Bench) -> None:
    """write makes parent folders; a shorter text leaves nothing of the longer one; empty files are files"""
    async with bench.box() as box:
        await box.write("a/b/c.txt", b"longer text")
        await box.write("a/b/c.txt", b"short")
        await box.write("empty", b"")
        assert (await box.read("a/b/c.txt"), await box.read("empty")) == (b"short", b"")


@promise()
async def _(bench: Bench) -> None:
    """commands may change, move and delete what was written from outside"""
    async with bench.box(files={"a/x": b"1", "y": b"2"}) as box:
        await output(box, "echo more >> a/x && mv a/x a/z && rm y && mkdir a/new && touch a/new/file")
        assert await box.read("a/z") == b"1more\n"


@promise()
async def _(bench: Bench) -> None:
    """names may hold spaces, unicode, newlines, leading dashes, and bytes that are not UTF-8"""
    async with bench.box() as box:
        for name in ("with space", "ä→🙂", "new\nline", "-rf", os.fsdecode(b"\xff\xfe")):
            await box.write(name, b"x")
            assert await box.read(name) == b"x", name


@promise()
async def _(bench: Bench) -> None:
    """an absolute path below /workspace is the same file"""
    async with bench.box() as box:
        await box.write("/workspace/f", b"1")
        assert await box.read("f") == b"1"


@promise()
async def _(bench: Bench) -> None:
    """files stay from one command to the next, in the work folder and in /tmp"""
    async with bench.box() as box:
        await output(box, 'echo 1 > kept; echo 2 > "${TMPDIR:-/tmp}/kept2"')
        assert await output(box, 'cat kept "${TMPDIR:-/tmp}/kept2"') == "1\n2\n"


@promise()
async def _(bench: Bench) -> None:
    """reading what is missing, a folder, or below a file is the box's own doing: SandboxPathError"""
    async with bench.box(files={"folder/file": b""}) as box:
        for path in ("missing", "folder", "folder/file/below", ".", "", "a\0b", "x" * 5000):
            await must_refuse(box.read(path))


@promise()
async def _(bench: Bench) -> None:
    """a file of more bytes than the caller allows is refused, also one that only looks large"""
    async with bench.box(files={"f": b"12345"}) as box:
        await output(box, "truncate -s 60M sparse")
        assert await box.read("f", most_bytes=5) == b"12345"
        for path, most_bytes in (("f", 4), ("f", 0), ("sparse", 1000)):
            await must_refuse(box.read(path, most_bytes=most_bytes))


@promise()
async def _(bench: Bench) -> None:
    """writing onto a folder or below a file is the box's own doing: SandboxPathError"""
    async with bench.box(files={"folder/file": b""}) as box:
        for path in ("folder", "folder/file/below", ".", ""):
            await must_refuse(box.write(path, b"x"))


@promise()
async def _(bench: Bench) -> None:
    """links that stay inside are followed, relative and absolute ones"""
    async with bench.box(files={"real/file": b"1"}) as box:
        await output(box, "ln -s real dir; ln -s ../real/file real/link; ln -s $PWD/real/file absolute")
        for path in ("dir/file", "real/link", "absolute", "dir/../real/file"):
            assert await box.read(path) == b"1", path


@promise()
async def _(bench: Bench) -> None:
    """a tree comes in with its modes, links and empty folders, and its programs run"""
    with tempfile.TemporaryDirectory() as name:
        source_path = Path(name) / "tree"
        (source_path / "sub" / "empty").mkdir(parents=True)
        (source_path / "run.sh").write_text("#!/bin/sh\necho ran\n")
        (source_path / "run.sh").chmod(0o755)
        (source_path / "link").symlink_to("run.sh")
        async with bench.box() as box:
            await box.upload(source_path, "into/tree")
            assert await output(box, "into/tree/link && ls -d into/tree/sub/empty") == "ran\ninto/tree/sub/empty\n"


@promise()
async def _(bench: Bench) -> None:
    """a tree goes out as it came in"""
    with tempfile.TemporaryDirectory() as name:
        source_path, returned_path = Path(name) / "source", Path(name) / "back"
        (source_path / "a").mkdir(parents=True)
        (source_path / "a" / "bytes").write_bytes(_ALL_BYTES)
        (source_path / "a" / "run").write_text("#!/bin/sh\n")
        (source_path / "a" / "run").chmod(0o755)
        async with bench.box() as box:
            await box.upload(source_path, "tree")
            await box.download("tree", returned_path)
        assert (returned_path / "a" / "bytes").read_bytes() == _ALL_BYTES
        assert (returned_path / "a" / "run").stat().st_mode & 0o777 == 0o755


@promise()
async def _(bench: Bench) -> None:
    """a single file goes in and out by upload and download"""
    with tempfile.TemporaryDirectory() as name:
        source_path, returned_path = Path(name) / "source", Path(name) / "new" / "back"
        source_path.write_bytes(_ALL_BYTES)
        async with bench.box() as box:
            await box.upload(source_path, "deep/file")
            await box.download("deep/file", returned_path)
        assert returned_path.read_bytes() == _ALL_BYTES


@promise()
async def _(bench: Bench) -> None:
    """downloading what is missing is the box's own doing, uploading what is missing the host's"""
    with tempfile.TemporaryDirectory() as name:
        async with bench.box() as box:
            await must_refuse(box.download("missing", Path(name) / "x"))
            await must_fail(box.upload(Path(name) / "missing", "x"))


# --- copies -----------------------------------------------------------------------------------------------------------


@promise()
async def _(bench: Bench) -> None:
    """restore brings back content, deletes what is new, and works more than once"""
    async with bench.box(files={"a/old": b"1"}) as box:
        snapshot_id = await box.snapshot()
        for _ in range(2):
            await output(box, "echo 2 > a/old; touch a/new; rm -rf b; mkdir b")
            await box.restore(snapshot_id)
            assert await output(box, "cat a/old; ls a; ls") == "1old\na\n"


@promise()
async def _(bench: Bench) -> None:
    """several snapshots are kept apart"""
    async with bench.box() as box:
        await box.write("f", b"1")
        first = await box.snapshot()
        await box.write("f", b"2")
        second = await box.snapshot()
        await box.restore(first)
        first_read = await box.read("f")
        await box.restore(second)
        assert (first_read, await box.read("f")) == (b"1", b"2")


@promise()
async def _(bench: Bench) -> None:
    """restoring what was never taken is SandboxError"""
    async with bench.box() as box:
        await must_fail(box.restore("never"))


@promise()
async def _(bench: Bench) -> None:
    """a fork starts with the same files and then goes its own way, in both directions"""
    async with bench.box(files={"f": b"1"}) as box:
        await output(box, "echo more >> f; chmod 700 f; ln -s f l")
        forked_box = await box.fork()
        try:
            assert await output(forked_box, "cat l; stat -c %a f") == "1more\n700\n"
            await forked_box.write("f", b"twin")
            await box.write("g", b"box")
            assert await box.read("f") == b"1more\n"
            await must_refuse(forked_box.read("g"))
        finally:
            await forked_box.close()
        assert await output(box, "cat f") == "1more\n"


@promise()
async def _(bench: Bench) -> None:
    """a fork outlives its origin"""
    async with bench.box(files={"f": b"1"}) as box:
        forked_box = await box.fork()
        await box.close()
        try:
            assert await output(forked_box, "cat f") == "1"
        finally:
            await forked_box.close()


# --- packed boxes: a promise only of backends whose boxes have `pack` and `unpack` ------------------------------------

_MOST = 4 << 20


def _packable(box: Sandbox) -> PackableSandbox | None:
    return box if isinstance(box, PackableSandbox) else None


@promise()
async def _(bench: Bench) -> None:
    """a packed box goes on in another: content, modes, links, second names, pipes and odd names, after its own end"""
    make_script = r"""
        mkdir -p d/empty; printf '#!/bin/sh\necho ran\n' > d/run; chmod 711 d/run; ln -s d/run link; ln d/run second
        ln -s /etc/passwd out; mkfifo pipe; echo odd > "$(printf 'new\nline \377')"; chmod 500 d
        [ -z "$TMPDIR" ] || echo kept > "$TMPDIR/kept"
    """
    look_script = r"""
        find . | LC_ALL=C sort | od -c; ./link; stat -c '%a %h' d/run second; readlink link out; stat -c %F pipe
        stat -c '%a %Y' d; cat new*; cat "${TMPDIR:-.}/kept" """
    async with bench.box(files={"f": _ALL_BYTES}) as box, bench.box(files={"gone": b"1"}) as other_box:
        if (first := _packable(box)) is None or (second := _packable(other_box)) is None:
            return
        await output(box, make_script)
        output_before, data = await output(box, look_script), await first.pack(_MOST)
        await box.close()
        for _ in range(2):
            await second.unpack(data)
            assert await output(other_box, look_script) == output_before
            assert await other_box.read("f") == _ALL_BYTES
            await must_refuse(other_box.read("gone"))
            await output(other_box, "chmod 700 d; rm -rf d f; echo new > gone")


@promise()
async def _(bench: Bench) -> None:
    """a box in which a process runs is not packed, and says so; once it has ended it is"""
    async with bench.box(files={"f": b"1"}) as box:
        if (packable_box := _packable(box)) is None:
            return
        box_process = await box.start(["sleep", "600"])
        for operation in (packable_box.pack(_MOST), packable_box.unpack(b"")):
            try:
                await operation
            except BoxBusy as error:
                assert "process" in str(error)
            else:
                raise AssertionError("a box was copied under a running process")
        await box_process.kill()
        assert await packable_box.pack(_MOST)


@promise()
async def _(bench: Bench) -> None:
    """a box that holds more than may be packed says so: SandboxPathError, also one that only looks large"""
    async with bench.box() as box:
        if (packable_box := _packable(box)) is None:
            return
        await output(box, "head -c 2000000 /dev/urandom > random")
        await must_refuse(packable_box.pack(1 << 20))
        await output(box, "rm random; truncate -s 60M a; cp --sparse=always a b; ln a c; truncate -s 60M d e f")
        await must_refuse(packable_box.pack(1 << 20))
        await output(box, "rm ?; echo 1 > a")
        assert await packable_box.pack(1 << 20)


@promise()
async def _(bench: Bench) -> None:
    """bytes that are no packed box are SandboxError, and the box can be used after it"""
    async with bench.box() as box:
        if (packable_box := _packable(box)) is None:
            return
        data = await packable_box.pack(_MOST)
        for broken_bytes in (b"", b"PK" + data, data[: len(data) // 2], data[:8] + os.urandom(100)):
            await must_fail(packable_box.unpack(broken_bytes))
        await packable_box.unpack(data)
        assert await output(box, "ls") == ""

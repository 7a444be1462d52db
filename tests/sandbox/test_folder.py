"""Archives and trees that hostile code made are read without leaving the folder they go to."""

from __future__ import annotations

import io
import os
import resource
import signal
import subprocess
import tarfile
from contextlib import suppress
from pathlib import Path

import pytest
from each_case import each_case

from agentrl.errors import SandboxError, SandboxPathError
from agentrl.host.janitor import is_dead, label, reap
from agentrl.sandbox.docker import tar as archive
from agentrl.sandbox.work_folder import MAX_DEPTH, Folder, stays_inside, usage

MB = 1 << 20


def made(*members: tuple[str, bytes, str, bytes]) -> bytes:
    """A tar of (name, type, link target, content)."""
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w") as tar:
        for name, kind, link, content in members:
            member = tarfile.TarInfo(name)
            member.type, member.linkname, member.size, member.mode = kind, link, len(content), 0o6755
            tar.addfile(member, io.BytesIO(content))
    return data.getvalue()


@each_case(
    "members",
    [
        [("../out", tarfile.REGTYPE, "", b"x")],
        [("/tmp/agentrl-out", tarfile.REGTYPE, "", b"x")],
        [("link", tarfile.SYMTYPE, "..", b""), ("link/out", tarfile.REGTYPE, "", b"x")],
        [("link", tarfile.SYMTYPE, "/", b""), ("link/tmp/agentrl-out", tarfile.REGTYPE, "", b"x")],
        [("a", tarfile.SYMTYPE, ".", b""), ("a/a/a/x", tarfile.SYMTYPE, "../../../out", b"")],
        [("dev", tarfile.CHRTYPE, "", b""), ("pipe", tarfile.FIFOTYPE, "", b"")],
        [("hard", tarfile.LNKTYPE, "/etc/passwd", b"")],
        [("self", tarfile.LNKTYPE, "self", b"")],
    ],
)
def test_hostile_archive_stays_inside(members: list[tuple[str, bytes, str, bytes]], tmp_path: Path) -> None:
    target = tmp_path / "target"
    with suppress(SandboxPathError):
        archive.unpack(made(*members), target, MB)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["target"]
    assert not Path("/tmp/agentrl-out").exists()
    for path in target.rglob("*"):
        assert path.resolve().is_relative_to(target) and (path.is_file() or path.is_dir())


def test_a_single_file_is_uploaded_with_its_mode(tmp_path: Path) -> None:
    (box := tmp_path / "box").mkdir()
    (program := tmp_path / "program").write_text("#!/bin/sh\n")
    program.chmod(0o750)
    folder = Folder(box, limit=MB)
    folder.upload(program, "run")
    folder.close()
    assert (box / "run").stat().st_mode & 0o777 == 0o750


def test_archive_keeps_modes_but_no_setuid_and_bounds_sizes(tmp_path: Path) -> None:
    archive.unpack(made(("f", tarfile.REGTYPE, "", b"x")), tmp_path / "a", MB)
    assert (tmp_path / "a" / "f").stat().st_mode & 0o7777 == 0o755
    with pytest.raises(SandboxPathError, match="exceeds"):
        archive.unpack(made(("f", tarfile.REGTYPE, "", b"x" * 100)), tmp_path / "b", 99)
    with pytest.raises(SandboxPathError, match="broken"):
        archive.unpack(b"no archive at all" * 100, tmp_path / "c", MB)


@each_case(
    ("target", "depth", "inside"),
    [
        ("x", 0, True),
        ("../x", 0, False),
        ("../x", 1, True),
        ("../../x", 1, False),
        ("x/..", 5, False),
        ("/x", 5, False),
    ],
)
def test_links_that_stay_inside(target: str, depth: int, inside: bool) -> None:
    assert stays_inside(target, depth) == inside


def test_faults_of_box_and_host_are_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = Folder(tmp_path, limit=MB)

    def full(*_: object, **__: object) -> int:
        raise OSError(28, "No space left on device")

    def broken(*_: object, **__: object) -> int:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "readlink", full)
    with pytest.raises(SandboxError):
        folder.write("f", b"x")
    folder.bounded = True
    with pytest.raises(SandboxPathError):
        folder.write("f", b"x")
    monkeypatch.setattr(os, "readlink", broken)
    with pytest.raises(SandboxError):
        folder.read("f")
    folder.close()


@pytest.mark.parametrize("path", ["a/" * 3_000 + "f", "down/" * 8 + "f"], ids=["its own names", "links"])
def test_a_path_without_end_is_the_policys_and_takes_few_descriptors(path: str, tmp_path: Path) -> None:
    (tmp_path / ("a/" * 240)).mkdir(parents=True)
    for depth in range(0, 240, 30):
        (tmp_path / ("a/" * depth) / "down").symlink_to("a/" * 30)
    folder = Folder(tmp_path, limit=MB)
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(list(Path("/proc/self/fd").iterdir())) + 200, before[1]))
    try:
        for call in (lambda: folder.write(path, b"x"), lambda: folder.make_folder(path), lambda: folder.read(path)):
            with pytest.raises(SandboxPathError):
                call()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
        folder.close()


def test_a_path_may_be_deep_and_wind(tmp_path: Path) -> None:
    folder = Folder(tmp_path, limit=MB)
    path = "a/../" * 1_000 + "a/" * MAX_DEPTH + "f"
    folder.write(path, b"x")
    assert folder.read(path) == b"x"
    with pytest.raises(SandboxPathError, match=f"deeper than {MAX_DEPTH} folders"):
        folder.write(f"a/{path}", b"x")
    folder.close()


def test_usage_counts_bytes_on_disk(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"x" * 100_000)
    assert 100_000 <= usage(tmp_path) < 120_000


def test_reaper_takes_the_dead_of_this_machine_only(tmp_path: Path) -> None:
    mine = label()
    pid, started, namespace, _ = mine.split(".")
    dead = f"{pid}.{int(started) + 1}.{namespace}.aa"
    elsewhere = f"{pid}.{int(started) + 1}.1.bb"
    for name in (mine, dead, elsewhere, "unlabelled"):
        (tmp_path / name / "box0").mkdir(parents=True)
    assert is_dead(dead) and not is_dead(mine) and not is_dead(elsewhere)
    marked = subprocess.Popen(["sleep", "60"], env={"AGENTRL_OWNER": str(tmp_path / dead)})
    spared = subprocess.Popen(["sleep", "60"], env={"AGENTRL_OWNER": str(tmp_path / mine)})
    try:
        assert dead in reap(tmp_path)
        assert marked.wait(timeout=60) == -signal.SIGKILL and spared.poll() is None
    finally:
        for process in (marked, spared):
            process.kill()
            process.wait()
    assert sorted(entry.name for entry in tmp_path.iterdir()) == sorted([mine, elsewhere, "unlabelled"])

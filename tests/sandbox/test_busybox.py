"""Boxes on an image that has busybox alone, as Alpine's images are but for their packages."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentrl.errors import SandboxUnavailable
from agentrl.protocols import SandboxSpec
from agentrl.sandbox.docker.backend import Docker
from agentrl_tools.files import ListFiles
from agentrl_tools.search import Search

from . import rootfs
from .conftest import import_root
from .promises import keep, named

pytestmark = [pytest.mark.docker, pytest.mark.timeout(180)]

WITH_OUR_SCRIPTS = (  # all cases hold but those that run python3 in the box; these run the most of our own commands
    "names may hold spaces, unicode, newlines, leading dashes, and bytes that are not UTF-8",
    "a tree comes in with its modes, links and empty folders, and its programs run",
    "a tree goes out as it came in",
    "restore brings back content, deletes what is new, and works more than once",
    "a fork starts with the same files and then goes its own way, in both directions",
    "four commands run in one box at the same time",
    "a box in which a process runs is not packed, and says so; once it has ended it is",
    "outliving the end of a command by a double fork with a session of its own",
    "writing through a planted link to a host file or folder",
)


@pytest.mark.medium
async def test_keeps_promise(docker_engine: str, busybox_image: str) -> None:
    backend = Docker(image=busybox_image, base_url=docker_engine)
    try:
        await keep(backend, named(WITH_OUR_SCRIPTS))
    finally:
        await backend.aclose()


@pytest.mark.medium
async def test_the_tools_find_files(docker_engine: str, busybox_image: str) -> None:
    backend = Docker(image=busybox_image, base_url=docker_engine)
    files = {"src/a.py": b"x = 1\n", "src/a.txt": b"x = 2\n", "src/-b.py": b"x = 3\n"}
    try:
        box = await backend.create(SandboxSpec(files=files))
        search, list_files = Search(box), ListFiles(box)
        found = (await search.call({"pattern": "x = [0-9]", "glob": "*.py"})).content.splitlines()
        assert sorted(found) == ["src/-b.py:1:x = 3", "src/a.py:1:x = 1"]
        assert (await search.call({"pattern": "X = 2", "ignore_case": True})).content == "src/a.txt:1:x = 2"
        assert (await search.call({"pattern": "y", "glob": "*.py"})).content == "no match"
        assert (await list_files.call({})).content.splitlines() == sorted(files)
    finally:
        await backend.aclose()


@pytest.mark.parametrize(
    ("without", "mode", "words"),
    [
        (["readlink", "tar"], 0o1777, r"image 'agentrl-lacking:1' lacks readlink, tar: a box needs sh, cat, chmod, "),
        ([], 0o755, r"image 'agentrl-lacking:1': its /tmp cannot be written: RUN chmod 1777 /tmp"),
    ],
)
async def test_an_image_that_lacks_something_is_named_with_it(
    docker_engine: str, tmp_path: Path, without: list[str], mode: int, words: str
) -> None:
    root = tmp_path / "root"
    rootfs.build(root, {*rootfs.PROGRAMS} - {"python3", *without})
    (root / "tmp").chmod(mode)
    import_root(docker_engine, root, "agentrl-lacking:1")
    backend = Docker(image="agentrl-lacking:1", base_url=docker_engine)
    try:
        with pytest.raises(SandboxUnavailable, match=words):
            await backend.create()
    finally:
        await backend.aclose()

"""The common part of boxes over a work folder of the host: files, copies, and that a closed box is closed.

Owns no process: a class that derives from it runs the commands and makes the walls. A snapshot lives beside the boxes
of a backend until the box that took it closes.
"""

from __future__ import annotations

import secrets
from pathlib import Path

import trio

from agentrl.errors import BoxBusy, SandboxError
from agentrl.host.janitor import remove_tree
from agentrl.sandbox.pack_files import pack, unpack
from agentrl.sandbox.work_folder import Folder


class FolderSnapshots:
    """All snapshots of one backend, under `home`."""

    def __init__(self, home: Path) -> None:
        self._home = home
        self._taken: dict[str, Path] = {}

    async def take(self, folder: Folder) -> str:
        """Copy a work folder; the copy's id, good for every box of the backend."""
        snapshot_id = secrets.token_hex(8)
        snapshot_path = self._home / snapshot_id
        try:
            await trio.to_thread.run_sync(folder.save, snapshot_path)
        except BaseException:
            remove_tree(snapshot_path)
            raise
        self._taken[snapshot_id] = snapshot_path
        return snapshot_id

    async def put_back(self, name: str, folder: Folder) -> None:
        """Replace a work folder's contents by a copy taken before."""
        snapshot_path = self._taken.get(name)
        if snapshot_path is None:
            raise SandboxError(f"no snapshot {name!r}: its box was closed, or it is another backend's")
        await trio.to_thread.run_sync(folder.load, snapshot_path)

    def drop(self, names: set[str]) -> None:
        for snapshot_id in names:
            snapshot_path = self._taken.pop(snapshot_id, None)
            if snapshot_path is not None:
                remove_tree(snapshot_path)


class WorkBox:
    """A box whose files lie in `_work`. The `close` of a subclass sets `_closed` and drops the
    snapshots in `_taken`."""

    def __init__(self, work: Folder, snapshots: FolderSnapshots) -> None:
        self._work, self._snapshots = work, snapshots
        self._taken: set[str] = set()
        self._closed = False

    async def read(self, path: str, *, most_bytes: int | None = None) -> bytes:
        """The bytes of a file of the work folder. Raises SandboxPathError if there are more than `most_bytes`."""
        self._must_be_open()
        return self._work.read(path, most_bytes=most_bytes)

    async def write(self, path: str, data: bytes) -> None:
        """Write a file of the work folder, making parent folders as needed."""
        self._must_be_open()
        self._work.write(path, data)

    async def upload(self, source: Path, target: str) -> None:
        """Copy a host file or tree into the work folder."""
        self._must_be_open()
        await trio.to_thread.run_sync(self._work.upload, source, target)

    async def download(self, source: str, target: Path) -> None:
        """Copy a file or tree of the work folder to the host; links that could lead out are left behind."""
        self._must_be_open()
        await trio.to_thread.run_sync(self._work.download, source, target)

    async def pack(self, most_bytes: int) -> bytes:
        """The files of the box as bytes (see `pack_files`), for `unpack` of another box, maybe on another host."""
        self._must_be_still()
        return await trio.to_thread.run_sync(
            lambda: pack(
                self._roots(),
                most_bytes=most_bytes,
                limit=self._work.limit,
                # The walk of a large tree cannot be interrupted from outside, as it is a thread. It asks itself whether
                # its caller still wants the result.
                still=trio.from_thread.check_cancelled,
            )
        )

    async def unpack(self, data: bytes) -> None:
        """Replace the files of the box by those of a box that was packed."""
        self._must_be_still()
        work_folder = self._work
        await trio.to_thread.run_sync(
            lambda: unpack(
                data,
                self._roots(),
                limit=work_folder.limit,
                owner=work_folder.owner,
                bounded=work_folder.bounded,
                still=trio.from_thread.check_cancelled,
            )
        )

    def _roots(self) -> dict[str, Path]:
        """The folders that the box's processes may write to, by name."""
        return {"work": self._work.root}

    def _processes(self) -> int:
        """How many commands run in the box."""
        raise NotImplementedError

    def _must_be_still(self) -> None:
        self._must_be_open()
        if running_count := self._processes():
            raise BoxBusy(running_count)

    async def snapshot(self) -> str:
        """Keep a copy of the work folder until this box closes; its id, good for every box of this backend."""
        self._must_be_open()
        snapshot_id = await self._snapshots.take(self._work)
        self._taken.add(snapshot_id)
        return snapshot_id

    def _must_be_open(self) -> None:
        if self._closed:
            raise SandboxError("the box is closed")

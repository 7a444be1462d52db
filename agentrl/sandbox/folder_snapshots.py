"""Copies of work folders, kept beside the boxes of a backend. A snapshot lives until the box that took it closes."""

from __future__ import annotations

import secrets
from pathlib import Path

import trio

from agentrl.errors import SandboxError
from agentrl.host.janitor import remove_tree
from agentrl.sandbox.work_folder import Folder


class FolderSnapshots:
    """All snapshots of one backend, under `home`."""

    def __init__(self, home: Path) -> None:
        self._home = home
        self._taken: dict[str, Path] = {}

    async def take(self, folder: Folder) -> str:
        """Copy a work folder; the copy's id, good for every box of the backend."""
        name = secrets.token_hex(8)
        path = self._home / name
        try:
            await trio.to_thread.run_sync(folder.save, path)
        except BaseException:
            remove_tree(path)
            raise
        self._taken[name] = path
        return name

    async def put_back(self, name: str, folder: Folder) -> None:
        """Replace a work folder's contents by a copy taken before."""
        path = self._taken.get(name)
        if path is None:
            raise SandboxError(f"no snapshot {name!r}: its box was closed, or it is another backend's")
        await trio.to_thread.run_sync(folder.load, path)

    def drop(self, names: set[str]) -> None:
        for name in names:
            path = self._taken.pop(name, None)
            if path is not None:
                remove_tree(path)

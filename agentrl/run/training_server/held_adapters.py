"""The adapters that an engine holds for sampling clients: loaded when a call names one, at most so many at once.

Owns their names at the engine, and links of their files. vLLM reads an adapter's folder again whenever its own cache
has dropped the adapter, and dies if the files are gone: with their session, or because other weights took their name.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import trio

from agentrl.engine.auth import folder_digest
from agentrl.engine.client import EngineClient
from agentrl.errors import StoreError, UsageError

_ADMIN_S = 120.0


class HeldAdapters:
    """The adapters of the engine of `client`, at most `most` at once; `folder`, for links of their files, is its
    own."""

    def __init__(self, client: EngineClient, folder: Path, *, most: int) -> None:
        self.client = client
        self._folder, self._most = folder, most
        self._users = dict[str, int]()  # by name, the longest unused first
        self._changing = trio.Lock()  # its waiters come in their order, so none waits for ever
        self._left = trio.Event()  # when a user of an adapter left since somebody looked

    @asynccontextmanager
    async def held(self, adapter: tuple[str, Path] | None) -> AsyncGenerator[str | None]:
        """Inside, the engine has an adapter of this name and folder, and requests use the name that this yields. If all
        adapters that the engine may hold are in use, this waits until one is not. Raises UsageError if the folder is
        gone."""
        if adapter is None:
            yield None
            return
        adapter_name, adapter_folder = adapter
        # One change at a time, waiting included: two callers that each wait for room would otherwise evict the adapter
        # that the other has just loaded.
        async with self._changing:
            if adapter_name not in self._users:
                await self._make_room()
                await self._load(adapter_name, adapter_folder)
            self._users[adapter_name] = self._users.pop(adapter_name, 0) + 1
        try:
            yield adapter_name
        finally:
            self._users[adapter_name] -= 1
            self._left.set()

    async def _make_room(self) -> None:
        while len(self._users) >= self._most:
            self._left = trio.Event()
            unused_name = next(
                (adapter_name for adapter_name, user_count in self._users.items() if not user_count), None
            )
            if unused_name is None:
                await self._left.wait()
                continue
            del self._users[unused_name]
            await self.client.dialect.unload_adapter(self.client, unused_name, deadline_s=_ADMIN_S)
            await trio.to_thread.run_sync(shutil.rmtree, self._folder / unused_name, True)

    async def _load(self, name: str, folder: Path) -> None:
        link_folder = self._folder / name
        files_digest = await trio.to_thread.run_sync(_linked, folder, link_folder)
        await self.client.dialect.load_adapter(self.client, name, str(link_folder), files_digest, deadline_s=_ADMIN_S)
        self._users[name] = 0


def _linked(folder: Path, place: Path) -> str:
    """Link the files of `folder` into `place`; returns their digest."""
    shutil.rmtree(place, ignore_errors=True)
    try:
        shutil.copytree(folder, place, copy_function=_link)
        return folder_digest(place)
    except (OSError, shutil.Error) as error:
        if not folder.is_dir():
            raise UsageError(
                "the weights of this sampling client are gone: its session ended, or others took their name"
            ) from None
        raise StoreError(f"cannot link {str(folder)!r} to {str(place)!r}: {error}") from error


def _link(source: str, target: str) -> None:
    try:
        # Hard links, since a copy of an adapter for each loading costs its size on disk, and a symbolic link would end
        # with the folder that it points to, which is the case to survive.
        os.link(source, target)
    except OSError:  # a file system without links
        shutil.copy2(source, target)

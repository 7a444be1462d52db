"""A box whose processes and files only an engine can reach: everything goes through commands run in a container.

The image needs `sh` and the programs of `shell_scripts.PROGRAMS`. Owns the files and copies of the box;
`container_commands` owns how a command runs and ends.
"""

from __future__ import annotations

import dataclasses
import math
import os
import posixpath
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path

import trio

from agentrl.errors import SandboxError, SandboxPathError, SandboxUnavailable
from agentrl.host.clocks import policy_time
from agentrl.host.cpu_time import starved_out
from agentrl.protocols import BoxProcess, ExecResult, SandboxSpec
from agentrl.sandbox.background_process import Background, NeverStarted
from agentrl.sandbox.check_command import CommandRefused, checked_argv, checked_env
from agentrl.sandbox.command_deadline import checked_wall_s
from agentrl.sandbox.docker import tar as archive
from agentrl.sandbox.docker.attached_streams import AttachedStreams
from agentrl.sandbox.docker.container_commands import ContainerCommand, ContainerCommands, ContainerEngine
from agentrl.sandbox.docker.shell_scripts import (
    BOUND,
    CHECK,
    CLEAR,
    ENTER,
    PACK,
    PACK_FOLDER,
    PROGRAMS,
    READ,
    UNPACK,
    UNPACK_FOLDER,
    WRITE_FILE,
    checked_path,
    is_text,
    shell_word,
)
from agentrl.sandbox.work_folder import WORKSPACE

ENV = {"HOME": "/tmp", "TMPDIR": "/tmp", "LANG": "C.UTF-8"}
_WRITABLE: tuple[str, ...] = (WORKSPACE, "/tmp", "/dev/shm")


class Container:
    """One box."""

    def __init__(self, engine: ContainerEngine, spec: SandboxSpec, siblings: set[Container]) -> None:
        self.spec = spec
        self._engine, self._siblings = engine, siblings
        self._commands = ContainerCommands(engine, spec.limits)
        self._keeper: AttachedStreams | None = None
        self._snapshots: dict[str, Path] = {}
        siblings.add(self)

    @property
    def name(self) -> str:
        """The container's name."""
        return self._commands.name

    @classmethod
    async def open(cls, engine: ContainerEngine, spec: SandboxSpec, siblings: set[Container]) -> Container:
        """Start a container and lay the files of its spec. Raises SandboxError."""
        new_box = cls(engine, spec, siblings)
        try:
            with trio.CancelScope(shield=True):  # a container that was started must be known
                # The connection is the container's lifeline: its main program is a `cat` that reads from it. When this
                # process ends, the connection closes, the `cat` ends, and the container with it (law 4).
                new_box._commands.name, new_box._keeper = await engine.start_container(spec, new_box._commands.uid)
            # Looked at before the first command of a policy: an image without `tar` or `find` is the author's mistake,
            # and in the middle of an episode it would look like the policy's.
            exit_code, _, error_output = await new_box._commands.run_script(CHECK)
            error_text = " ".join(error_output.decode(errors="replace").split())[:200]
            if exit_code == 2:
                raise SandboxUnavailable(f"image {spec.image!r}: {error_text} (docs/how-to/images.md)")
            if exit_code == 1 and not set(error_text.split()) - set(PROGRAMS.split()):
                needed_programs = ", ".join(["sh", *PROGRAMS.split()])
                raise SandboxUnavailable(
                    f"image {spec.image!r} lacks {', '.join(error_text.split())}: a box needs {needed_programs}, see "
                    "docs/how-to/images.md"
                )
            if exit_code != 0:
                raise SandboxUnavailable(f"image {spec.image!r} cannot run sh: {error_text}")
            for file_path, file_bytes in spec.files.items():
                await new_box.write(file_path, file_bytes)
        except BaseException:
            await new_box.close()
            raise
        return new_box

    # --- commands -----------------------------------------------------------------------------------------------

    async def exec(
        self,
        argv: Sequence[str],
        *,
        stdin: bytes = b"",
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
    ) -> ExecResult:
        """Run a command to its end or `timeout_s` (seconds, default `Limits.wall_s`). Raises SandboxError."""
        try:
            wall_s = checked_wall_s(timeout_s, self.spec.limits)
            command = await self._spawn(argv, cwd, env)
        except CommandRefused as refusal:
            return refusal.result
        with policy_time():
            timed_out = await self._commands.drive(command, stdin, wall_s)
        if timed_out and command.used.starved_out:
            raise starved_out(command.used.starved_s, command.used.cpu_s)
        return command.result(timed_out=timed_out)

    async def start(
        self, argv: Sequence[str], *, cwd: str | None = None, env: Mapping[str, str] | None = None
    ) -> BoxProcess:
        """Start a background process; it lives until it ends, is killed, or the box closes."""
        try:
            command = await self._spawn(argv, cwd, env)
        except CommandRefused as refusal:
            return NeverStarted(refusal.result)
        return Background(
            command.streams,
            drive=lambda: self._commands.drive(command, None, math.inf),
            result=lambda: command.result(timed_out=False),
            kill=command.stop.set,
            used=lambda: command.used,
        )

    async def _spawn(self, argv: Sequence[str], cwd: str | None, env: Mapping[str, str] | None) -> ContainerCommand:
        arguments, variables = checked_argv(argv), checked_env({**self.spec.env, **(env or {})})
        self._commands.is_entered = True
        working_folder = os.fsencode(cwd or ".")
        if b"\0" in working_folder:
            raise CommandRefused("the folder holds a NUL byte")
        script = BOUND.format(pids=self.spec.limits.pids)
        if not all(is_text(name_or_value) for variable in variables.items() for name_or_value in variable):
            raise CommandRefused("a variable is not UTF-8")
        text_variables = {
            variable_name.decode(): variable_value.decode() for variable_name, variable_value in variables.items()
        }
        preparation, shell_text = shell_word(working_folder)
        # The folder is entered by our script and not by the engine's `workdir`, which would follow a link out of the
        # work folder, and whose error for a missing folder reads like a failure of the host.
        script += preparation + ENTER.format(workspace=WORKSPACE, cwd=shell_text)
        # As arguments beside the script, never pasted into it: so nothing in them needs quoting. Bytes that are no text
        # cannot pass the engine's JSON, and are spelled out below.
        if all(map(is_text, arguments)):
            return await self._commands.begin(
                [f'{script}exec "$@"', "sandbox", *map(bytes.decode, arguments)], text_variables
            )
        quoted_words = [shell_word(argument, word_number) for word_number, argument in enumerate(arguments)]
        script += "".join(preparation for preparation, _ in quoted_words)
        return await self._commands.begin(
            [f"{script}exec {' '.join(shell_text for _, shell_text in quoted_words)}"], text_variables
        )

    # --- files --------------------------------------------------------------------------------------------------

    async def read(self, path: str, *, most_bytes: int | None = None) -> bytes:
        """The bytes of a file of the work folder. Raises SandboxPathError if there are more than `most_bytes`."""
        self._commands.must_be_open()
        disk_bytes = self.spec.limits.disk_bytes
        most_read = (disk_bytes if most_bytes is None else min(most_bytes, disk_bytes)) + 1
        return await self._commands.must_run(path, READ, checked_path(path), str(most_read), limit=most_read)

    async def write(self, path: str, data: bytes) -> None:
        """Write a file of the work folder, making parent folders as needed."""
        self._commands.must_be_open()
        await self._write(path, data, "")

    async def _write(self, path: str, data: bytes, mode: str) -> None:
        folder_path, file_name = posixpath.split(checked_path(path))
        if file_name in ("", ".", ".."):
            raise SandboxPathError(f"{path!r} is a folder")
        await self._commands.must_run(path, WRITE_FILE, folder_path or ".", file_name, mode, stdin=data)

    async def upload(self, source: Path, target: str) -> None:
        """Copy a host file or tree into the work folder."""
        self._commands.must_be_open()
        source_path = trio.Path(source)
        if await source_path.is_file():
            await self._write(target, await source_path.read_bytes(), f"{(await source_path.stat()).st_mode & 0o777:o}")
            return
        packed_tree = await trio.to_thread.run_sync(archive.pack, source, self.spec.limits.disk_bytes)
        await self._commands.must_run(target, UNPACK, checked_path(target) or ".", stdin=packed_tree)

    async def download(self, source: str, target: Path) -> None:
        """Copy a file or tree of the work folder to the host; links that could lead out are left behind."""
        self._commands.must_be_open()
        most_packed = 2 * self.spec.limits.disk_bytes + archive.OVERHEAD
        exit_code, file_bytes, error_output = await self._commands.run_script(
            PACK, checked_path(source) or ".", str(most_packed), limit=most_packed
        )
        if exit_code == 92:
            file_bytes = await self.read(source)
            await trio.Path(target.parent).mkdir(parents=True, exist_ok=True)
            await trio.Path(target).write_bytes(file_bytes)
            return
        if exit_code != 0 or len(file_bytes) >= most_packed:
            raise SandboxPathError(
                f"{source!r}: {error_output.decode(errors='replace').strip() or 'the tree is too large'}"
            )
        await trio.to_thread.run_sync(archive.unpack, file_bytes, target, self.spec.limits.disk_bytes)

    # --- copies of the box --------------------------------------------------------------------------------------

    async def _pack(self) -> bytes:
        most_packed = 2 * self.spec.limits.disk_bytes + archive.OVERHEAD
        return await self._commands.must_run("the work folder", PACK, ".", str(most_packed), limit=most_packed)

    async def _unpack(self, data: bytes) -> None:
        await self._commands.must_run("the work folder", CLEAR)
        await self._commands.must_run("the work folder", UNPACK, ".", stdin=data)

    async def pack(self, most_bytes: int) -> bytes:
        """Return all that commands have written, for `unpack` of another box, in `most_bytes` at most. In memory the
        tars may take eight times as much before they are compressed. Raises SandboxPathError."""
        most_packed = min(8 * most_bytes, 2 * self.spec.limits.disk_bytes) + archive.OVERHEAD
        # Most boxes write to the work folder alone. A call that packs a folder also reports which of the next ones hold
        # anything, so that an empty folder costs no call.
        tar_by_folder, full_folders = dict.fromkeys(_WRITABLE, b""), {WORKSPACE}
        for folder_index, folder in enumerate(_WRITABLE):
            if folder in full_folders:
                self._commands.must_be_still()
                exit_code, folder_tar, full_names = await self._commands.run_script(
                    PACK_FOLDER, folder, str(most_packed), *_WRITABLE[folder_index + 1 :], limit=most_packed
                )
                if exit_code != 0 or len(folder_tar) >= most_packed:
                    raise SandboxPathError(f"{folder!r} cannot be packed: its files are too large, or not readable")
                tar_by_folder[folder] = folder_tar
                full_folders.update(full_names.decode(errors="replace").split("\n"))
        return await trio.to_thread.run_sync(archive.join, tar_by_folder, most_bytes)

    async def unpack(self, data: bytes) -> None:
        """Replace what commands have written by the files of a box that was packed."""
        self._commands.must_be_still()
        await self._commands.must_run("the work folder", CLEAR)
        for folder, folder_tar in archive.split(data, _WRITABLE, 2 * self.spec.limits.disk_bytes + archive.OVERHEAD):
            await self._commands.must_run(folder, UNPACK_FOLDER, folder, stdin=folder_tar)

    async def snapshot(self) -> str:
        """Keep a copy of the work folder until this box closes."""
        self._commands.must_be_open()
        packed_tree = await self._pack()
        snapshot_id = secrets.token_hex(8)
        snapshot_path = self._engine.folder.path / snapshot_id
        await trio.Path(snapshot_path).write_bytes(packed_tree)
        self._snapshots[snapshot_id] = snapshot_path
        return snapshot_id

    async def restore(self, snapshot: str) -> None:
        """Put the work folder back as it was; processes of the box are ended and /tmp is emptied."""
        self._commands.must_be_open()
        snapshot_paths = [sibling._snapshots[snapshot] for sibling in self._siblings if snapshot in sibling._snapshots]
        if not snapshot_paths:
            raise SandboxError(f"no snapshot {snapshot!r}: its box was closed, or it is another backend's")
        packed_tree = await trio.Path(snapshot_paths[0]).read_bytes()
        # Before the files are put back: a process of the old state that still runs would write into the new one.
        await self._commands.end_all()
        await self._unpack(packed_tree)

    async def fork(self) -> Container:
        """A new box with a copy of the work folder; processes are not copied."""
        self._commands.must_be_open()
        packed_tree = await self._pack()
        forked_box = await Container.open(self._engine, dataclasses.replace(self.spec, files={}), self._siblings)
        try:
            await forked_box._unpack(packed_tree)
        except BaseException:
            await forked_box.close()
            raise
        return forked_box

    async def alive(self) -> bool:
        """Whether the box can still be used."""
        return not (self._commands.closed or self._commands.broken) and await self._engine.is_running(self.name)

    # --- the end ------------------------------------------------------------------------------------------------

    async def close(self) -> None:
        """Remove the container. Idempotent."""
        if self._commands.closed:
            return
        self._commands.closed = True
        with trio.CancelScope(shield=True):
            try:
                if self.name:
                    # The container first: with it all processes end at once, whatever state their commands are in.
                    await self._engine.remove(self.name)
                await self._commands.end_all()
            finally:
                if self._keeper is not None:
                    await self._keeper.close()
                for snapshot_path in self._snapshots.values():
                    snapshot_path.unlink(missing_ok=True)
                self._snapshots.clear()
                self._siblings.discard(self)

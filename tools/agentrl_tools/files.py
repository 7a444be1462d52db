"""Files of a box: list, read, write, replace, patch. Bytes that are not UTF-8 survive an edit elsewhere.

A file larger than `MOST_BYTES` is refused before it is read, and what takes time is done in a thread: the policy makes
the files, and this process serves other episodes too.
"""

from __future__ import annotations

import posixpath
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Final

import trio

from agentrl.env.limits import positive_seconds
from agentrl.env.tools.tool_results import readable
from agentrl.errors import PolicyFault, SandboxPathError, ToolError
from agentrl.protocols import ExecResult, Sandbox, ToolResult
from agentrl.records import Json
from agentrl_tools.base import OUTPUT_BYTES, SchemaChecked, text_result
from agentrl_tools.patching import Effort, FilePatch, apply_hunks, parse_patch

MOST_BYTES: Final = 4 << 20
"""Bound of a file that is shown or edited."""
_MOST_FILES: Final = 200  # of one patch
_MOST_WRITTEN: Final = 16 << 20  # bytes of them together

_AS_BEFORE: Final = 'while [ $# -gt 1 ]; do [ ! -x "$1" ] || chmod a+x "$2"; shift 2; done'

_PATH: Json = {"type": "string", "description": "path relative to the work folder", "minLength": 1}


def _must_work(result: ExecResult) -> None:
    """Raise ToolError for a command that failed: a patch that is applied in part must not pass for a whole one."""
    if result.exit_code != 0:
        raise ToolError(
            readable(result.stderr).strip()[:500] or f"a file was not changed: exit code {result.exit_code}"
        )


def _text(data: bytes) -> str:
    """Bytes as text that `_bytes` turns back exactly."""
    return data.decode("utf-8", "surrogateescape")


def _bytes(text: str) -> bytes:
    try:
        return text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError as error:
        raise ToolError(f"the text holds a character that cannot be written: {error.reason}") from error


class ListFiles(SchemaChecked):
    """`list_files(path?)`: the files below a folder, hidden ones and folders of bytecode left out."""

    parallel = True

    def __init__(self, sandbox: Sandbox, *, timeout_s: float = 10.0, output_bytes: int = OUTPUT_BYTES) -> None:
        path_schema: Json = {"type": "string", "description": "folder, by default the work folder", "minLength": 1}
        super().__init__("list_files", "List files.", {"path": path_schema})
        self._sandbox, self._output_bytes = sandbox, output_bytes
        self.timeout_s = positive_seconds("timeout_s", timeout_s)

    async def call(self, arguments: Mapping[str, Json]) -> ToolResult:
        """Raises ToolArgumentError, ToolError, SandboxError."""
        listed_folder = self.checked(arguments).get("path", ".")
        hidden_files = ["(", "-name", ".?*", "-o", "-name", "__pycache__", ")", "-prune"]
        find_command = ["find", f"./{listed_folder}", *hidden_files, "-o", "-type", "f", "-print"]
        exec_result = await self._sandbox.exec(find_command, timeout_s=self.timeout_s)
        if exec_result.exit_code != 0 and not exec_result.stdout:
            raise ToolError(readable(exec_result.stderr).strip() or f"find ended with {exec_result.exit_code}")
        find_lines = readable(exec_result.stdout).splitlines()
        # More lines than bytes of output are never shown.
        file_paths = sorted(posixpath.normpath(find_line) for find_line in find_lines[: self._output_bytes])
        has_more = exec_result.truncated or len(find_lines) > self._output_bytes
        return text_result("\n".join(file_paths) or "no file", self._output_bytes, truncated=has_more)


class ReadFile(SchemaChecked):
    """`read_file(path, first?, last?)`: numbered lines."""

    parallel = True

    def __init__(self, sandbox: Sandbox, *, output_bytes: int = OUTPUT_BYTES) -> None:
        line_schema: Json = {"type": "integer", "minimum": 1}
        parameters = {
            "path": _PATH,
            "first": {**line_schema, "description": "first line to show"},
            "last": {**line_schema, "description": "last line to show"},
        }
        super().__init__("read_file", "Show a text file with line numbers.", parameters, "path")
        self._sandbox, self._output_bytes = sandbox, output_bytes

    async def call(self, arguments: Mapping[str, Json]) -> ToolResult:
        """Raises ToolArgumentError, ToolError, SandboxPathError, SandboxError."""
        checked_arguments = self.checked(arguments)
        file_bytes = await self._sandbox.read(checked_arguments["path"], most_bytes=MOST_BYTES)
        return await trio.to_thread.run_sync(self._shown, file_bytes, checked_arguments)

    def _shown(self, data: bytes, checked: Mapping[str, Json]) -> ToolResult:
        file_lines = readable(data).split("\n")
        if file_lines[-1] == "":
            file_lines.pop()
        first_line, last_line = checked.get("first", 1), min(checked.get("last", len(file_lines)), len(file_lines))
        if file_lines and first_line > len(file_lines):
            raise ToolError(f"{checked['path']} has {len(file_lines)} lines: there is no line {first_line}")
        line_numbers: Sequence[int] = range(first_line, last_line + 1)
        # Each takes three bytes: those in the middle are never shown.
        if has_more := len(line_numbers) > self._output_bytes:
            line_numbers = [*line_numbers[: self._output_bytes // 2], *line_numbers[-(self._output_bytes // 2) :]]
        numbered_lines = (f"{line_number}\t{file_lines[line_number - 1]}" for line_number in line_numbers)
        return text_result("\n".join(numbered_lines) or "[empty]", self._output_bytes, truncated=has_more)


class WriteFile(SchemaChecked):
    """`write_file(path, content)`: the whole file, folders made as needed."""

    def __init__(self, sandbox: Sandbox) -> None:
        content_schema: Json = {"type": "string", "description": "the whole new content"}
        super().__init__("write_file", "Write a file.", {"path": _PATH, "content": content_schema}, "path", "content")
        self._sandbox = sandbox

    async def call(self, arguments: Mapping[str, Json]) -> ToolResult:
        """Raises ToolArgumentError, ToolError, SandboxPathError, SandboxError."""
        checked_arguments = self.checked(arguments)
        file_bytes = _bytes(checked_arguments["content"])
        await self._sandbox.write(checked_arguments["path"], file_bytes)
        return ToolResult(content=f"wrote {len(file_bytes)} bytes to {checked_arguments['path']}")


class ReplaceText(SchemaChecked):
    """`replace_text(path, old, new)`: exactly one occurrence."""

    def __init__(self, sandbox: Sandbox) -> None:
        parameters: dict[str, Json] = {
            "path": _PATH,
            "old": {"type": "string", "description": "a text that occurs exactly once", "minLength": 1},
            "new": {"type": "string", "description": "what stands in its place"},
        }
        super().__init__("replace_text", "Replace a text in a file.", parameters, "path", "old", "new")
        self._sandbox = sandbox

    async def call(self, arguments: Mapping[str, Json]) -> ToolResult:
        """Raises ToolArgumentError, ToolError, SandboxPathError, SandboxError."""
        checked_arguments = self.checked(arguments)
        file_path, old_bytes = checked_arguments["path"], _bytes(checked_arguments["old"])
        file_bytes = await self._sandbox.read(file_path, most_bytes=MOST_BYTES)
        occurrences = file_bytes.count(old_bytes)
        if occurrences != 1:
            correction = "look at the file again" if occurrences == 0 else "give more of what stands around it"
            raise ToolError(f"the text to replace occurs {occurrences} times in {file_path}: {correction}")
        await self._sandbox.write(file_path, file_bytes.replace(old_bytes, _bytes(checked_arguments["new"])))
        return ToolResult(content=f"replaced in {file_path}")


class ApplyPatch(SchemaChecked):
    """`apply_patch(patch)`: a unified diff over one or several files; all of it is applied, or nothing. Of git's
    headers it knows files that are new, empty, renamed, copied, removed or executable, and no binary ones."""

    def __init__(self, sandbox: Sandbox) -> None:
        patch_schema: Json = {"type": "string", "description": "a unified diff: --- a/file, +++ b/file, @@ hunks"}
        super().__init__("apply_patch", "Apply a unified diff.", {"patch": patch_schema}, "patch")
        self._sandbox = sandbox

    async def call(self, arguments: Mapping[str, Json]) -> ToolResult:
        """Raises ToolArgumentError, ToolError, SandboxPathError, SandboxError."""
        file_patches = parse_patch(self.checked(arguments)["patch"])
        if len(file_patches) > _MOST_FILES:
            raise ToolError(f"the patch has {len(file_patches)} parts: give at most {_MOST_FILES} at once")
        new_contents: dict[str, bytes | None] = {}
        old_contents: dict[str, bytes | None] = {}
        search_effort = Effort()
        for file_patch in file_patches:
            new_contents.update(await self._changed(file_patch, new_contents, old_contents, search_effort))
            if max(_bytes_of(new_contents), _bytes_of(old_contents)) > _MOST_WRITTEN:
                raise ToolError(f"the patched files have more than {_MOST_WRITTEN} bytes: patch fewer at once")
        written_paths: list[str] = []
        try:
            for file_path, file_bytes in new_contents.items():
                if file_bytes is not None:
                    written_paths.append(file_path)
                    await self._sandbox.write(file_path, file_bytes)
        except PolicyFault:
            await self._take_back(written_paths, old_contents)
            raise
        await self._modes(file_patches, new_contents)
        await self._remove([file_path for file_path, file_bytes in new_contents.items() if file_bytes is None])
        return ToolResult(content="applied to " + ", ".join(new_contents))

    async def _take_back(self, done: Sequence[str], before: Mapping[str, bytes | None]) -> None:
        """The files as they were, after the last of `done` could not be written: a path that leads out, a full disk."""
        await self._remove([file_path for file_path in done[:-1] if before[file_path] is None])
        for file_path in done:
            if (old_bytes := before[file_path]) is not None:
                await self._sandbox.write(file_path, old_bytes)

    async def _modes(self, changes: Sequence[FilePatch], written: Mapping[str, bytes | None]) -> None:
        """Files are executable as the patch says; where it does not, one with a new name as the one before."""
        staying_patches = [file_patch for file_patch in changes if written.get(file_patch.new or "") is not None]
        made_executable = [f"./{file_patch.new}" for file_patch in staying_patches if file_patch.executable]
        made_plain = [
            f"./{file_patch.new}"
            for file_patch in staying_patches
            if file_patch.executable is False and file_patch.old is not None
        ]
        for mode_change, changed_paths in (("a+x", made_executable), ("a-x", made_plain)):
            if changed_paths:
                _must_work(await self._sandbox.exec(["chmod", mode_change, "--", *changed_paths]))
        moved_paths = [
            f"./{file_name}"
            for file_patch in staying_patches
            if _moves(file_patch)
            for file_name in (file_patch.old, file_patch.new)
        ]
        if moved_paths:
            _must_work(await self._sandbox.exec(["sh", "-c", _AS_BEFORE, "sh", *moved_paths]))

    async def _remove(self, paths: Sequence[str]) -> None:
        if paths:
            _must_work(await self._sandbox.exec(["rm", "-f", "--", *(f"./{file_path}" for file_path in paths)]))

    async def _changed(
        self,
        change: FilePatch,
        written: Mapping[str, bytes | None],
        before: dict[str, bytes | None],
        effort: Effort,
    ) -> dict[str, bytes | None]:
        """Apply one file's part of a patch. Returns changed files (None: removed); `before` gets their old bytes."""
        old_bytes: bytes | None = b""
        if change.old is not None and change.old in written:
            old_bytes = written[change.old]
        elif change.old is not None:
            old_bytes = await self._sandbox.read(change.old, most_bytes=MOST_BYTES)
        if change.new is not None and change.new not in before:
            before[change.new] = None
            with suppress(SandboxPathError):  # it is not there yet, most often
                before[change.new] = (
                    old_bytes
                    if change.new == change.old
                    else await self._sandbox.read(change.new, most_bytes=MOST_BYTES)
                )
        if old_bytes is None:
            raise ToolError(f"{change.old} was removed by an earlier part of the patch")
        new_bytes = await trio.to_thread.run_sync(_patched, old_bytes, change, effort)
        changed_files: dict[str, bytes | None] = {}
        if change.old is not None and change.old != change.new and not change.copies:
            changed_files[change.old] = None
        if change.new is not None:
            changed_files[change.new] = new_bytes
        return changed_files


def _bytes_of(files: Mapping[str, bytes | None]) -> int:
    return sum(len(file_bytes or b"") for file_bytes in files.values())


def _moves(change: FilePatch) -> bool:
    return change.executable is None and None not in (change.old, change.new) and change.old != change.new


def _patched(data: bytes, change: FilePatch, effort: Effort) -> bytes:
    return _bytes(apply_hunks(_text(data), change.hunks, change.old or change.new or "", effort))

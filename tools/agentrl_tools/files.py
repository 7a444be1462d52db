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
        path: Json = {"type": "string", "description": "folder, by default the work folder", "minLength": 1}
        super().__init__("list_files", "List files.", {"path": path})
        self._sandbox, self._output_bytes = sandbox, output_bytes
        self.timeout_s = positive_seconds("timeout_s", timeout_s)

    async def call(self, arguments: Mapping[str, Json]) -> ToolResult:
        """Raises ToolArgumentError, ToolError, SandboxError."""
        folder = self.checked(arguments).get("path", ".")
        hidden = ["(", "-name", ".?*", "-o", "-name", "__pycache__", ")", "-prune"]
        command = ["find", f"./{folder}", *hidden, "-o", "-type", "f", "-print"]
        result = await self._sandbox.exec(command, timeout_s=self.timeout_s)
        if result.exit_code != 0 and not result.stdout:
            raise ToolError(readable(result.stderr).strip() or f"find ended with {result.exit_code}")
        lines = readable(result.stdout).splitlines()
        paths = sorted(posixpath.normpath(line) for line in lines[: self._output_bytes])  # more are never shown
        more = result.truncated or len(lines) > self._output_bytes
        return text_result("\n".join(paths) or "no file", self._output_bytes, truncated=more)


class ReadFile(SchemaChecked):
    """`read_file(path, first?, last?)`: numbered lines."""

    parallel = True

    def __init__(self, sandbox: Sandbox, *, output_bytes: int = OUTPUT_BYTES) -> None:
        line: Json = {"type": "integer", "minimum": 1}
        parameters = {
            "path": _PATH,
            "first": {**line, "description": "first line to show"},
            "last": {**line, "description": "last line to show"},
        }
        super().__init__("read_file", "Show a text file with line numbers.", parameters, "path")
        self._sandbox, self._output_bytes = sandbox, output_bytes

    async def call(self, arguments: Mapping[str, Json]) -> ToolResult:
        """Raises ToolArgumentError, ToolError, SandboxPathError, SandboxError."""
        checked = self.checked(arguments)
        data = await self._sandbox.read(checked["path"], most_bytes=MOST_BYTES)
        return await trio.to_thread.run_sync(self._shown, data, checked)

    def _shown(self, data: bytes, checked: Mapping[str, Json]) -> ToolResult:
        lines = readable(data).split("\n")
        if lines[-1] == "":
            lines.pop()
        first, last = checked.get("first", 1), min(checked.get("last", len(lines)), len(lines))
        if lines and first > len(lines):
            raise ToolError(f"{checked['path']} has {len(lines)} lines: there is no line {first}")
        numbers: Sequence[int] = range(first, last + 1)
        if more := len(numbers) > self._output_bytes:  # each takes three bytes: those in the middle are never shown
            numbers = [*numbers[: self._output_bytes // 2], *numbers[-(self._output_bytes // 2) :]]
        shown = (f"{number}\t{lines[number - 1]}" for number in numbers)
        return text_result("\n".join(shown) or "[empty]", self._output_bytes, truncated=more)


class WriteFile(SchemaChecked):
    """`write_file(path, content)`: the whole file, folders made as needed."""

    def __init__(self, sandbox: Sandbox) -> None:
        content: Json = {"type": "string", "description": "the whole new content"}
        super().__init__("write_file", "Write a file.", {"path": _PATH, "content": content}, "path", "content")
        self._sandbox = sandbox

    async def call(self, arguments: Mapping[str, Json]) -> ToolResult:
        """Raises ToolArgumentError, ToolError, SandboxPathError, SandboxError."""
        checked = self.checked(arguments)
        data = _bytes(checked["content"])
        await self._sandbox.write(checked["path"], data)
        return ToolResult(content=f"wrote {len(data)} bytes to {checked['path']}")


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
        checked = self.checked(arguments)
        path, old = checked["path"], _bytes(checked["old"])
        data = await self._sandbox.read(path, most_bytes=MOST_BYTES)
        count = data.count(old)
        if count != 1:
            hint = "look at the file again" if count == 0 else "give more of what stands around it"
            raise ToolError(f"the text to replace occurs {count} times in {path}: {hint}")
        await self._sandbox.write(path, data.replace(old, _bytes(checked["new"])))
        return ToolResult(content=f"replaced in {path}")


class ApplyPatch(SchemaChecked):
    """`apply_patch(patch)`: a unified diff over one or several files; all of it is applied, or nothing. Of git's
    headers it knows files that are new, empty, renamed, copied, removed or executable, and no binary ones."""

    def __init__(self, sandbox: Sandbox) -> None:
        patch: Json = {"type": "string", "description": "a unified diff: --- a/file, +++ b/file, @@ hunks"}
        super().__init__("apply_patch", "Apply a unified diff.", {"patch": patch}, "patch")
        self._sandbox = sandbox

    async def call(self, arguments: Mapping[str, Json]) -> ToolResult:
        """Raises ToolArgumentError, ToolError, SandboxPathError, SandboxError."""
        changes = parse_patch(self.checked(arguments)["patch"])
        if len(changes) > _MOST_FILES:
            raise ToolError(f"the patch has {len(changes)} parts: give at most {_MOST_FILES} at once")
        written: dict[str, bytes | None] = {}
        before: dict[str, bytes | None] = {}
        effort = Effort()
        for change in changes:
            written.update(await self._changed(change, written, before, effort))
            if max(_bytes_of(written), _bytes_of(before)) > _MOST_WRITTEN:
                raise ToolError(f"the patched files have more than {_MOST_WRITTEN} bytes: patch fewer at once")
        done: list[str] = []
        try:
            for path, data in written.items():
                if data is not None:
                    done.append(path)
                    await self._sandbox.write(path, data)
        except PolicyFault:
            await self._take_back(done, before)
            raise
        await self._modes(changes, written)
        await self._remove([path for path, data in written.items() if data is None])
        return ToolResult(content="applied to " + ", ".join(written))

    async def _take_back(self, done: Sequence[str], before: Mapping[str, bytes | None]) -> None:
        """The files as they were, after the last of `done` could not be written: a path that leads out, a full disk."""
        await self._remove([path for path in done[:-1] if before[path] is None])
        for path in done:
            if (data := before[path]) is not None:
                await self._sandbox.write(path, data)

    async def _modes(self, changes: Sequence[FilePatch], written: Mapping[str, bytes | None]) -> None:
        """Files are executable as the patch says; where it does not, one with a new name as the one before."""
        stay = [change for change in changes if written.get(change.new or "") is not None]
        made = [f"./{change.new}" for change in stay if change.executable]
        unmade = [f"./{change.new}" for change in stay if change.executable is False and change.old is not None]
        for word, paths in (("a+x", made), ("a-x", unmade)):
            if paths:
                _must_work(await self._sandbox.exec(["chmod", word, "--", *paths]))
        pairs = [f"./{name}" for change in stay if _moves(change) for name in (change.old, change.new)]
        if pairs:
            _must_work(await self._sandbox.exec(["sh", "-c", _AS_BEFORE, "sh", *pairs]))

    async def _remove(self, paths: Sequence[str]) -> None:
        if paths:
            _must_work(await self._sandbox.exec(["rm", "-f", "--", *(f"./{path}" for path in paths)]))

    async def _changed(
        self,
        change: FilePatch,
        written: Mapping[str, bytes | None],
        before: dict[str, bytes | None],
        effort: Effort,
    ) -> dict[str, bytes | None]:
        """Apply one file's part of a patch. Returns changed files (None: removed); `before` gets their old bytes."""
        data: bytes | None = b""
        if change.old is not None and change.old in written:
            data = written[change.old]
        elif change.old is not None:
            data = await self._sandbox.read(change.old, most_bytes=MOST_BYTES)
        if change.new is not None and change.new not in before:
            before[change.new] = None
            with suppress(SandboxPathError):  # it is not there yet, most often
                before[change.new] = (
                    data if change.new == change.old else await self._sandbox.read(change.new, most_bytes=MOST_BYTES)
                )
        if data is None:
            raise ToolError(f"{change.old} was removed by an earlier part of the patch")
        after = await trio.to_thread.run_sync(_patched, data, change, effort)
        changed: dict[str, bytes | None] = {}
        if change.old is not None and change.old != change.new and not change.copies:
            changed[change.old] = None
        if change.new is not None:
            changed[change.new] = after
        return changed


def _bytes_of(files: Mapping[str, bytes | None]) -> int:
    return sum(len(data or b"") for data in files.values())


def _moves(change: FilePatch) -> bool:
    return change.executable is None and None not in (change.old, change.new) and change.old != change.new


def _patched(data: bytes, change: FilePatch, effort: Effort) -> bytes:
    return _bytes(apply_hunks(_text(data), change.hunks, change.old or change.new or "", effort))

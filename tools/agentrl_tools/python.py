"""A Python session in a box: variables, imports and functions stay from one call to the next, as in a notebook.

The policy may have filled the box before: the session's own code starts isolated from the work folder, whose modules
the policy's code can import, and needs no disk.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from typing import Final

import trio

from agentrl.env.limits import positive_seconds
from agentrl.env.tools.tool_results import readable
from agentrl.errors import SandboxError, ToolError
from agentrl.protocols import BoxProcess, Sandbox, ToolResult
from agentrl.records import Json
from agentrl.sandbox.check_command import NO_COMMAND
from agentrl_tools.base import OUTPUT_BYTES, SchemaChecked, text_result

_START_S = 20.0
_DRIVER: Final = r"""
import ast, base64, fcntl, json, linecache, os, sys, tempfile, tokenize, traceback
sys.path[:0] = ["", *filter(None, os.environ.get("PYTHONPATH", "").split(":"))]  # of the code, not of this driver
requests, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
if hasattr(os, "memfd_create"):
    screen = os.memfd_create("screen")
else:
    screen, name = tempfile.mkstemp()
    os.unlink(name)
fcntl.fcntl(screen, fcntl.F_SETFL, os.O_APPEND)
os.dup2(screen, 1); os.dup2(screen, 2)
sys.argv, limit = [""], int(sys.argv[1])
space = {"__name__": "__main__", "__builtins__": __builtins__}

def run(code):
    tree = ast.parse(code, "<session>")
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, "<session>", "exec"), space)
    if last is not None:
        value = eval(compile(ast.Expression(last.value), "<session>", "eval"), space)
        if value is not None:
            print(repr(value))

replies.write(b"ready\n"); replies.flush()
for line in requests:
    os.ftruncate(screen, 0)
    failed = False
    try:
        run(json.loads(line)["code"])
    except BaseException as error:
        failed = True
        shown = error.__traceback__
        while shown is not None and shown.tb_frame.f_code.co_filename != "<session>":
            shown = shown.tb_next
        try:
            traceback.print_exception(type(error), error, shown)
        except BaseException:
            pass
    try:
        sys.stdout.flush(); sys.stderr.flush()
    except BaseException:
        pass
    data = os.pread(screen, limit, 0)
    cut = os.fstat(screen).st_size > limit
    reply = {"failed": failed, "output": base64.b64encode(data).decode(), "cut": cut}
    replies.write(json.dumps(reply).encode() + b"\n"); replies.flush()
"""


class Python(SchemaChecked):
    """`python(code)`. The value of a last expression is shown, an error as a traceback. A call that takes too long, or
    ends the interpreter, costs the session: the next one starts afresh, and the result says so."""

    def __init__(self, sandbox: Sandbox, *, timeout_s: float = 30.0, output_bytes: int = OUTPUT_BYTES) -> None:
        code_schema: Json = {"type": "string", "description": "Python statements; variables stay for the next call"}
        super().__init__("python", "Run Python code in a session that stays.", {"code": code_schema}, "code")
        self._sandbox, self._limit_s = sandbox, positive_seconds("timeout_s", timeout_s)
        self._output_bytes = output_bytes
        self.timeout_s = timeout_s + _START_S + 10.0
        self._longest = 2 * output_bytes + 1_024  # a reply is the output in base64, and some words
        self._process: BoxProcess | None = None
        self._waiting = b""
        self._turn = trio.Lock()

    async def call(self, arguments: Mapping[str, Json]) -> ToolResult:
        """Raises ToolArgumentError, ToolError, SandboxError."""
        python_code = self.checked(arguments)["code"]
        async with self._turn:
            process = self._process or await self._start()
            session_reply: bytes | None = None
            try:
                await process.send(json.dumps({"code": python_code}).encode() + b"\n")
                session_reply = await self._line(process, self._limit_s)
            finally:
                # Too slow, ended, or our caller was cancelled: what runs is not to be trusted.
                if session_reply is None:
                    self._process = None
                    with trio.CancelScope(shield=True):
                        await process.kill()
            return self._shown(session_reply)

    async def aclose(self) -> None:
        """End the session. Idempotent; the next call starts a new one."""
        old_process, self._process = self._process, None
        if old_process is not None:
            await old_process.kill()

    async def _start(self) -> BoxProcess:
        self._waiting = b""
        session_process = await self._sandbox.start(["python3", "-I", "-u", "-c", _DRIVER, str(self._output_bytes)])
        if await self._line(session_process, _START_S) != b"ready":
            exec_result = await session_process.kill()
            if exec_result.exit_code == NO_COMMAND:
                raise SandboxError("the box has no python3: give an image that has it")
            last_words = readable(exec_result.stderr).strip()[-300:]  # what runs in the box took all that it may have
            raise ToolError(f"no Python session starts in the box (exit code {exec_result.exit_code}): {last_words}")
        self._process = session_process
        return session_process

    async def _line(self, process: BoxProcess, seconds: float) -> bytes | None:
        """The next line that the session writes; None if it ended, the time is up, or it writes more than a reply."""
        with trio.move_on_after(seconds):
            while b"\n" not in self._waiting:
                output_chunk = await process.receive()
                if not output_chunk or len(self._waiting) > self._longest:
                    return None
                self._waiting += output_chunk
            session_line, _, self._waiting = self._waiting.partition(b"\n")
            return session_line
        return None

    def _shown(self, reply: bytes | None) -> ToolResult:
        if reply is None:
            shown_text = f"[the session ended, or took more than {self._limit_s:g} s; it was restarted and is empty]"
            return ToolResult(content=shown_text, is_error=True)
        try:
            answer = json.loads(reply)
            output, failed, was_cut = base64.b64decode(answer["output"]), bool(answer["failed"]), bool(answer["cut"])
        except (ValueError, KeyError, TypeError, RecursionError):  # the code wrote on the session's own line
            return ToolResult(content="[the session gave no readable answer]", is_error=True)
        shown_text = readable(output).rstrip("\n") or "[no output]"
        return text_result(shown_text, self._output_bytes, is_error=failed, truncated=was_cut)

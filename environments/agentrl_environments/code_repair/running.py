"""Runs a module's tests in a box: calls go in, the `repr` of what they return comes out.

The expected values never enter the box, and nothing outlives a run: it has a fresh box, or a fork of a warm interpreter
that can only compute. Nothing that a module prints, patches or leaves behind can make a test pass that its functions
do not pass. Knows nothing of tasks, prompts or rewards.
"""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Sequence
from hashlib import blake2b
from typing import Final

import trio

from agentrl.errors import HostBusy
from agentrl.host.clocks import granted
from agentrl.host.platform_checks import own_cores
from agentrl.protocols import Limits, SandboxBackend, SandboxSpec
from agentrl.sandbox.graded_time import own_time_out
from agentrl.sandbox.warm_python import WarmPython
from agentrl_environments.remembering import Remembered

Values = tuple[str, ...] | str
"""What the calls returned, as `repr` (or the name of what they raised); one text where the module did not run."""

DEADLINE_S: Final = 20.0
"""Of a module that sleeps; what it computes is bounded by CPU time. On a busy host milliseconds of that take seconds,
and that is not the module's doing."""

LIMITS: Final = Limits(wall_s=DEADLINE_S, cpu_s=2.0, memory_bytes=256 << 20, pids=8, output_bytes=16 << 10)
_WARM_S: Final = 0.5  # a run that takes longer gains nothing by a warm interpreter
_SIGNALLED: Final = 128  # a command that signal n ended has exit code 128 + n

# The two parts of what runs in the box; in a warm interpreter the second one can only compute. They import nothing that
# is not built in, as starting Python is most of what a run costs. The module writes to nowhere; answers leave on a copy
# of stdout, each line marked with the run's nonce.
_BEFORE: Final = r"""
import posix, sys
nonce, n, *rest = sys.stdin.buffer.read().decode().split("\n")
calls, source = rest[: int(n)], "\n".join(rest[int(n) :])
out, nowhere = posix.dup(1), posix.open("/dev/null", posix.O_WRONLY)
posix.dup2(nowhere, 1), posix.dup2(nowhere, 2)
posix.write(out, b"%s begun\n" % nonce.encode())
"""
_AFTER: Final = r"""
lines = []
try:
    namespace = {"__name__": "module"}
    exec(compile(source, "module.py", "exec"), namespace)
except SyntaxError as error:
    lines.append("! SyntaxError in line %s" % error.lineno)
except BaseException as error:
    lines.append("! " + type(error).__name__)
else:
    for call in calls:
        try:
            value = repr(eval(call, namespace))[:1000]
        except BaseException as error:
            value = type(error).__name__
        lines.append("= " + value.replace("\n", "\\n"))
answer = "".join("%s %s\n" % (nonce, line) for line in [*lines, "."]).encode("utf-8", "backslashreplace")
while answer:
    answer = answer[posix.write(out, answer) :]
posix._exit(0)
"""


class Runner:
    """Runs in boxes of `backend`, with the last `remembered` results kept; `counts` says where they were made.

    What is remembered: a run is a function of module and calls alone, so the same pair need not run twice. A run that
    was cut off (time, memory) is never remembered. `warm` runs in warm interpreters what can run there. Raises
    `SandboxError` where the box's host fails, `HostBusy` where it has no slot."""

    def __init__(
        self, backend: SandboxBackend, *, image: str | None = None, remembered: int = 4096, warm: bool = True
    ) -> None:
        self.counts: Counter[str] = Counter()  # warm, box
        self._backend, self._spec = backend, SandboxSpec(image=image, limits=LIMITS)
        self._warm = WarmPython(backend, self._spec, before=_BEFORE, after=_AFTER, deadline_s=_WARM_S) if warm else None
        self._results = Remembered[Values](remembered)
        # More at once would only eat each other's time, which a module's tests have little of.
        self._slots = trio.CapacityLimiter(2 * len(own_cores()))

    async def run(self, source: str, calls: Sequence[str], *, fresh: bool = False) -> Values:
        """Execute `source` and evaluate each of `calls` (one line each) after it; `fresh` insists on a box and an
        interpreter of its own."""
        run_key = blake2b("\0".join([str(fresh), *calls, source]).encode("utf-8", "surrogatepass")).digest()
        nonce = secrets.token_hex(8)
        payload = "\n".join([nonce, str(len(calls)), *calls, source]).encode("utf-8", "backslashreplace")

        async def find() -> tuple[Values, bool]:
            async with granted(self._slots, "a slot to run tests in"):
                warm_output = await self._warm.run(payload) if self._warm and not fresh else None
                self.counts["box" if warm_output is None else "warm"] += 1
                if warm_output is not None:
                    return parse(warm_output.decode("utf-8", "replace"), nonce, len(calls)), True
                return await self._run_in_box(payload, nonce, len(calls))

        return await self._results.get(run_key, find)

    async def _run_in_box(self, payload: bytes, nonce: str, n: int) -> tuple[Values, bool]:
        """The values of `n` calls, and whether another run would give the same."""
        fresh_box = await self._backend.create(self._spec)
        try:
            python_command = ["python3", "-I", "-S", "-c", _BEFORE + _AFTER]
            exec_result = await fresh_box.exec(python_command, stdin=payload, timeout_s=DEADLINE_S)
        finally:
            with trio.CancelScope(shield=True):
                await fresh_box.close()
        is_late = own_time_out(exec_result)
        if is_late and not exec_result.stdout.startswith(f"{nonce} begun".encode()):
            raise HostBusy(f"a box did not begin to run tests within {DEADLINE_S:g} s: give the host fewer at once")
        if is_late:
            return "Timeout", False
        if exec_result.oom:
            return "MemoryError", False
        if exec_result.exit_code > _SIGNALLED:  # ended by a signal: the bound on CPU time, most likely
            return "Timeout", False
        return parse(exec_result.stdout.decode("utf-8", "replace"), nonce, n), not exec_result.truncated


def parse(output: str, nonce: str, n: int) -> Values:
    """Read the runner's output: `n` values or a reason; any other output means that the module ended the run."""
    runner_lines = [
        runner_line.removeprefix(f"{nonce} ")
        for runner_line in output.split("\n")
        if runner_line.startswith(f"{nonce} ")
    ]
    runner_lines = [runner_line for runner_line in runner_lines if runner_line != "begun"]
    if len(runner_lines) == 2 and runner_lines[0].startswith("! ") and runner_lines[1] == ".":
        return runner_lines[0].removeprefix("! ")
    call_values = tuple(
        runner_line.removeprefix("= ") for runner_line in runner_lines[:-1] if runner_line.startswith("= ")
    )
    if len(runner_lines) == n + 1 and len(call_values) == n and runner_lines[-1] == ".":
        return call_values
    return "the module ended the test run"

"""Where and how a child of a run begins, is awaited and is ended: on this machine (`Local`), or on a node of a cluster
(`agentrl.run.cluster.ray_launcher`).

A launcher knows no role and no budget: `agentrl.run.children.restart_loop` decides what is started again, and
`agentrl.run.processes.heartbeat` what hangs. A child dies with the process that requested it, by whatever means it was
started.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import trio

from agentrl.engine.embedded_process import end_group
from agentrl.errors import RunFailed
from agentrl.host import json_log
from agentrl.host.child_environment import NOTHING, Withheld
from agentrl.run.processes import heartbeat

NODE_TMP = "AGENTRL_NODE_TMP"
"""Names the folder for temporary files of a child on a node that shares no scratch space with the others."""


class ClusterLost(RunFailed):
    """The cluster that started the children is gone; the run can go on in the next one."""

    exit_code = 7
    at_once = True


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildCommand:
    """A child to start: `argv` follows the interpreter `python`; output is appended to `log`; the child may leave the
    line of its error in `error`, and its marks in `beat`. `mark` names its owner to a janitor of this machine. It
    inherits all variables but the `withheld` ones. With `json` its log is JSON."""

    argv: Sequence[str]
    log: Path
    error: Path
    env: Mapping[str, str] = field(default_factory=dict[str, str])
    python: str = sys.executable
    beat: Path | None = None
    mark: Mapping[str, str] = field(default_factory=dict[str, str])
    withheld: Withheld = NOTHING
    json: bool = field(default_factory=json_log.is_on)

    def variables(self) -> dict[str, str]:
        """Return the variables of the child's environment besides the launcher's own. With `PYTHONPATH` the child
        imports the user's modules too."""
        importable = os.pathsep.join(path_entry for path_entry in sys.path if path_entry)
        own_variables = {"PYTHONPATH": importable, "PYTHONUNBUFFERED": "1", "AGENTRL_ERROR_FILE": str(self.error)}
        return own_variables | dict(self.env)


class Process(heartbeat.Marked, Protocol):
    """A child that was started. A call that ends it never waits; `wait` does. `pid` is that of its host, None until it
    is known."""

    @property
    def pid(self) -> int | None: ...
    def poll(self) -> int | None: ...
    async def wait(self) -> int:
        """Wait until it and all of its group have ended. Returns its exit status, negative for a signal."""
        ...

    def terminate(self) -> None:
        """Ask it to end: the end of its lifeline, and SIGTERM."""
        ...

    def kill(self, *, group: bool = False) -> None:
        """End it at once, also if it hangs; with `group`, its whole group. Nothing if it has ended."""
        ...


class Launcher(Protocol):
    """Starts children by name; the next one of a name is started when the last one has ended."""

    async def place(self, name: str, port: int) -> tuple[str, int]:
        """The host and port where the child `name`, which is started next, will serve: `port` if it can be had.

        Raises RunFailed if there is no place for it in time."""
        ...

    async def reserve(self, name: str) -> None:
        """Find a place for the child `name`. Raises as `place`."""
        ...

    def start(self, name: str, command: ChildCommand) -> Process: ...
    def release(self, name: str) -> None:
        """Give back the place of a child that has ended, and is not started again."""
        ...

    async def watch(self) -> None:
        """Watch until cancelled. Raises ClusterLost once nothing can be started any more; children can still be
        ended."""
        ...


@dataclass(slots=True)
class LocalProcess(heartbeat.Here):
    """A child of this process, in its own process group, so that Ctrl-C reaches only the supervisor; its standard input
    is its lifeline."""

    process: subprocess.Popen[bytes]
    beat: Path | None

    @property
    def pid(self) -> int:
        return self.process.pid

    def poll(self) -> int | None:
        return self.process.poll()

    async def wait(self) -> int:
        exit_status = await trio.to_thread.run_sync(self.process.wait, abandon_on_cancel=True)
        # The process has ended, and what it started may not have: tools of an environment, workers of an engine. Until
        # they are gone, the next process of this name could meet them at its port or its GPU.
        await end_group(self.process.pid)
        return exit_status

    def terminate(self) -> None:
        if self.process.stdin is not None:
            self.process.stdin.close()
        if self.process.poll() is None:
            self.process.terminate()

    def kill(self, *, group: bool = False) -> None:
        if self.process.poll() is None:
            with suppress(ProcessLookupError, PermissionError):  # as in `kill_group`
                (os.killpg if group else os.kill)(self.process.pid, signal.SIGKILL)


class Local:
    """Starts children on this machine."""

    async def place(self, name: str, port: int) -> tuple[str, int]:
        return "127.0.0.1", port

    async def reserve(self, name: str) -> None:
        await trio.lowlevel.checkpoint()

    def start(self, name: str, command: ChildCommand) -> LocalProcess:
        beat_variables = {} if command.beat is None else heartbeat.prepare(command.beat)
        arguments = [command.python, *command.argv]
        with command.log.open("ab") as log_file:
            child_process = subprocess.Popen(
                json_log.wrapped(arguments, command.log.stem) if command.json else arguments,
                # The lifeline. The kernel closes the pipe however this process ends, SIGKILL included, which no handler
                # and no `atexit` survives. PR_SET_PDEATHSIG would do for a direct child on Linux alone, and fires when
                # the thread that forked ends, not the process.
                stdin=subprocess.PIPE,
                stdout=log_file,
                stderr=subprocess.STDOUT,
                env={**command.withheld.without(os.environ), **beat_variables, **command.variables(), **command.mark},
                process_group=0,
            )
        return LocalProcess(child_process, command.beat)

    def release(self, name: str) -> None: ...
    async def watch(self) -> None:
        await trio.sleep_forever()


LOCAL = Local()

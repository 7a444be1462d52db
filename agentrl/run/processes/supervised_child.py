"""A child process that cannot outlive its owner (law 4), as its supervisor has it.

A launcher starts it, here or on another host. Its standard input is its lifeline: the end of file shows it that the
supervisor is gone, however that ended. A child that fails leaves one line in `logs/NAME.error`.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import trio

from agentrl.host.child_environment import NOTHING, Withheld
from agentrl.run.processes.launcher import LOCAL, ChildCommand, Launcher, Process

_GRACE_S = 8.0


@dataclass(slots=True)
class Child:
    """One supervised process. `argv` follows the interpreter; `mark` names its owner to a janitor, also for processes
    that it starts; `beat` is the file of its heartbeat, if it has one; `error_path` holds the one line of its error;
    `launcher` starts it."""

    name: str
    argv: Sequence[str]
    logs: Path
    env: Mapping[str, str] = field(default_factory=dict[str, str])
    python: str = sys.executable
    mark: Mapping[str, str] = field(default_factory=dict[str, str])
    beat: Path | None = None
    launcher: Launcher = LOCAL
    withheld: Withheld = NOTHING
    _process: Process | None = None

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    @property
    def log_path(self) -> Path:
        return self.logs / f"{self.name}.log"

    @property
    def error_path(self) -> Path:
        return self.logs / f"{self.name}.error"

    async def place(self, port: int) -> tuple[str, int]:
        """The host and port where it will serve, if it serves. Raises as `Launcher.place`."""
        return await self.launcher.place(self.name, port)

    def start(self) -> None:
        """Start it; output goes to `logs/NAME.log`."""
        self.error_path.unlink(missing_ok=True)
        child_command = ChildCommand(
            argv=self.argv,
            log=self.log_path,
            error=self.error_path,
            env=self.env,
            python=self.python,
            beat=self.beat,
            mark=self.mark,
            withheld=self.withheld,
        )
        self._process = self.launcher.start(self.name, child_command)

    def poll(self) -> int | None:
        """Its exit status if it has ended."""
        return None if self._process is None else self._process.poll()

    async def wait(self) -> int:
        """Wait until it and all of its group have ended. Returns its exit status."""
        assert self._process is not None
        return await self._process.wait()

    def kill(self, why: str) -> None:
        """End it at once with its group, and write `why` as its error. Does nothing if it has ended already."""
        # Only of a process that lives: otherwise the line of a hang would replace the one that it left itself as it
        # failed, and that one says more.
        if self._process is not None and self._process.poll() is None:
            self.error_path.write_text(why + "\n")
            self._process.kill(group=True)

    async def end(self) -> None:
        """End it at once, also if it hangs."""
        if self._process is not None:
            self._process.kill()
            await self.wait()

    async def stop(self) -> None:
        """End it: lifeline and SIGTERM first, SIGKILL after a grace period. Safe at any time, also if cancelled."""
        child_process = self._process
        if child_process is None:
            return
        with trio.CancelScope(shield=True):
            child_process.terminate()
            # Time to hand episodes back and to close boxes; shorter than what a supervisor is left by whoever ends it,
            # or nobody would be there to send the SIGKILL.
            with trio.move_on_after(_GRACE_S):
                await self.wait()
            child_process.kill()
            await self.wait()

    # --- signs of life

    def count(self) -> int:
        return 0 if self._process is None else self._process.count()

    def stopped(self) -> bool:
        return self._process is not None and self._process.stopped()

    def dump(self) -> None:
        if self._process is not None:
            self._process.dump()

    def failure(self, status: int) -> str:
        """One line on why it ended with `status`."""
        if self.error_path.exists():
            return f"{self.name}: {self.error_path.read_text().strip()}"
        ending = f"signal {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"
        return f"{self.name} ended with {ending}; see {self.log_path}"

"""`agentrl train --keep-alive`: a small parent that starts the supervisor again after a crash or a hang.

It owns one process at a time, and nothing of the run: the janitor cleans up after a dead supervisor, and the store says
where the run goes on. A supervisor that ends on purpose (success, Ctrl-C, a line that says why the run cannot go on) is
not started again. If the parent dies, the supervisor's lifeline ends, and the supervisor shuts down in order.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import trio

from agentrl import config as configuration
from agentrl.config import RunConfig
from agentrl.errors import RunFailed, matters
from agentrl.host import json_log
from agentrl.host.clocks import HostClock
from agentrl.host.janitor import OwnedFolder, watch_lifeline
from agentrl.host.nonblocking_output import waiting_for_no_reader
from agentrl.host.platform_checks import kill_group
from agentrl.run.processes import heartbeat
from agentrl.run.processes.heartbeat import Pulse
from agentrl.run.processes.launcher import ClusterLost
from agentrl.run.processes.restart_budget import RestartBudget
from agentrl.run.run_folder import RunDir

ERROR_FILE = "AGENTRL_ERROR_FILE"
"""Names the file in which a process leaves the one line that it failed with on purpose."""

AGAIN = "AGENTRL_AGAIN"
"""Says that the run was under way before, in the environment of a supervisor that is started again."""

KEPT = "AGENTRL_KEPT"
"""Says that standard input is a lifeline, in the environment of a process."""

_STOPPED = 130
_PATIENCE_S = 20.0  # time for a supervisor to shut down in order after its parent ended


def live_with_parent() -> None:
    """In a supervisor, or its parent: shut down in order when the process that keeps it alive, if any, is gone."""
    if os.environ.pop(KEPT, None):
        faulthandler.register(heartbeat.DUMP)  # the parent asks for our stacks before it ends us
        watch_lifeline(lambda: os.kill(os.getpid(), signal.SIGTERM))


def keep_training(
    words: Sequence[str], file: Path | None, settings: list[str] | None, out: Path | None, resume: Path | None
) -> int:
    """Keep `agentrl WORDS` alive, which trains from `file` into `out`, or goes on with `resume`. As `keep_alive`."""
    if resume is not None:
        run_path, run_config = resume, RunDir.open(resume).config()
    else:
        assert file is not None
        run_config = configuration.load(file, settings)
        run_path = out or Path("runs") / run_config.name
    has_begun = False

    def command() -> list[str]:
        nonlocal has_begun
        # Decided at each start: a supervisor that died before it made the store has nothing to resume, and the words
        # that were typed are given once more.
        has_begun, is_resume = True, has_begun and RunDir(run_path).store_path.exists()
        command_words = ["train", "--resume", str(run_path)] if is_resume else words
        return [sys.executable, "-c", "from agentrl.cli.main import main; main()", *command_words]

    return keep_alive(command, path=run_path, settings=run_config)


def keep_alive(command: Callable[[], Sequence[str]], *, path: Path, settings: RunConfig) -> int:
    """Run the supervisor until it ends on purpose; returns its exit status. `command` is called at each start, `path`
    is the run's folder.

    Raises RunFailed, which gives the last failure, when the budget of restarts is spent."""
    live_with_parent()
    hang_limit_s, start_limit_s = settings.train.liveness_deadline_s, settings.engine.start_deadline_s
    with waiting_for_no_reader(), closing(OwnedFolder(patience_s=_PATIENCE_S)) as owned_folder:
        kept_process = _Kept(command, owned_folder.path, owned_folder.mark)
        pulse = Pulse(
            process=kept_process,
            start_s=start_limit_s,
            silent_s=hang_limit_s,
            stopped_s=hang_limit_s,
            names=(_NAME, _NAME),
        )
        try:
            return trio.run(_keep, kept_process, pulse, RestartBudget(), path, clock=HostClock())
        except BaseExceptionGroup as group:
            raise matters(group) from None


_NAME = "train.liveness_deadline_s"


@dataclass(slots=True)
class _Kept(heartbeat.Here):
    """The current supervisor, in its own process group: Ctrl-C reaches the parent, which passes it on once."""

    command: Callable[[], Sequence[str]]
    folder: Path
    mark: dict[str, str]
    hung: str = ""
    _began: bool = False
    _process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    @property
    def beat(self) -> Path:
        return self.folder / "beat"

    @property
    def line(self) -> Path:
        return self.folder / "error"

    def start(self) -> None:
        self.hung = ""
        self.line.unlink(missing_ok=True)
        own_variables = {**self.mark, **heartbeat.prepare(self.beat), ERROR_FILE: str(self.line), KEPT: "1"}
        own_variables |= {AGAIN: "1"} if self._began else {}
        self._began = True
        self._process = subprocess.Popen(
            self.command(),
            stdin=subprocess.PIPE,
            stdout=json_log.objects(),
            stderr=json_log.objects(),
            env={**os.environ, **own_variables},
            process_group=0,
        )

    def kill(self, why: str) -> None:
        assert self._process is not None
        if self._process.poll() is None:
            self.hung = why
            # It may end by itself, and the thread in `wait` may reap it, between the look and the signal. The process
            # that got the signal for its stacks before it could handle it does so: the signal ends it.
            kill_group(self._process.pid)

    def send(self, number: int) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(number)

    async def wait(self) -> int:
        assert self._process is not None
        return await trio.to_thread.run_sync(self._process.wait, abandon_on_cancel=True)


# Why a file, and not the exit status, says that a run has ended on purpose.
#
# A parent that starts its child again must know when not to. To start it after every status but 0 is the simple way. A
# run whose model is missing would then fail again and again until the budget is spent, with the same line each time.
# The status cannot tell more: Python ends with 1 for an exception that nobody caught, which the next try may not meet,
# and an error that agentrl has explained may end with 1 as well.
#
# So a supervisor that ends with an explained error writes the line into a file first (`ERROR_FILE`), and what counts is
# both together:
#
#   a status, and the line          On purpose. The parent ends with the same status.
#   not status 1, and no line       On purpose as well: success, or Ctrl-C.
#   status 1, and no line           A crash. It is started again.
#   killed or hung, and no line     It is started again.
#   killed or hung, and the line    It was stopped, or had failed, and could not even end: in a call to a cluster that
#                                   is gone, say. The parent prints the line, and the run has ended.
#   the status of a lost cluster    It is started again, with the line or without: the next one waits for a cluster.
#
# To start again is safe because a supervisor owns nothing of the run that the store does not have (law 2), and because
# the janitor of the dead one holds the run's lock until its children are gone (law 4). The price of the rule: whoever
# ends a supervisor on purpose has to write the line first. `tests/run/test_keep_alive.py` has a case for each line
# above.
async def _keep(kept: _Kept, pulse: Pulse, budget: RestartBudget, path: Path) -> int:
    async with trio.open_nursery() as nursery:
        await nursery.start(_pass_on, kept)
        while True:
            kept.start()
            budget.begin()
            async with trio.open_nursery() as listening:
                listening.start_soon(pulse.run, kept.kill, budget.lives)
                exit_status = await kept.wait()
                listening.cancel_scope.cancel()
            is_cluster_lost = exit_status == ClusterLost.exit_code
            if not is_cluster_lost and not kept.hung and exit_status >= 0 and (exit_status != 1 or kept.line.exists()):
                nursery.cancel_scope.cancel()
                return exit_status
            failure_text = f"the supervisor {kept.hung or _how(exit_status)}"
            if not is_cluster_lost and kept.line.exists():  # it was stopped, and could not even end
                nursery.cancel_scope.cancel()
                print(f"agentrl: {kept.line.read_text().strip()} ({failure_text})", file=sys.stderr)
                return _STOPPED
            try:
                await budget.spend(failure_text)
            except RunFailed as error:
                raise RunFailed(f"{error}; go on with agentrl train --resume {path}") from None
            print(f"agentrl: {failure_text}; it is started again", file=sys.stderr)


async def _pass_on(kept: _Kept, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
    with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
        task_status.started()
        async for signal_number in signals:
            kept.send(signal_number)


def _how(status: int) -> str:
    if status == ClusterLost.exit_code:
        return "lost its cluster"
    return f"ended with signal {signal.Signals(-status).name}" if status < 0 else "crashed"

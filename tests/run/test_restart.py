"""Child processes end with their owner and say in one line why they failed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
import trio
from each_case import each_case
from trio.testing import MockClock

from agentrl.errors import RunFailed
from agentrl.run.processes.exit_status import ENDS_THE_RUN
from agentrl.run.processes.restart_budget import RestartBudget
from agentrl.run.processes.supervised_child import Child

DEADLINE_S = 300


def child(tmp_path: Path, code: str) -> Child:
    return Child("part", ["-c", code], tmp_path)


async def up(one: Child) -> None:
    """Wait until the child has said so in its log: its handlers are in place."""
    while "up" not in one.log_path.read_text():
        assert one.poll() is None
        await trio.sleep(0.01)


async def test_a_child_is_asked_to_end_before_it_is_killed(tmp_path: Path) -> None:
    code = (
        "import signal, sys\n"
        "signal.signal(signal.SIGTERM, lambda *_: (print('in order'), sys.exit(0)))\n"
        "print('up')\nsignal.pause()"
    )
    one = child(tmp_path, code)
    one.start()
    with trio.fail_after(DEADLINE_S):
        await up(one)
        await one.stop()
    assert one.poll() == 0
    assert "in order" in one.log_path.read_text()


async def test_a_child_that_will_not_end_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentrl.run.processes.supervised_child._GRACE_S", 0.2)
    code = "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nprint('up')\nwhile True: signal.pause()"
    one = child(tmp_path, code)
    one.start()
    with trio.fail_after(DEADLINE_S):
        await up(one)
        await one.stop()
    assert one.poll() == -signal.SIGKILL


@pytest.mark.medium
@each_case(
    ("raised", "status", "line"),
    [
        ("UsageError('bad thing: mend it')", 2, "part: bad thing: mend it"),
        ("RunFailed('went wrong')", ENDS_THE_RUN, "part: went wrong"),
        ("ZeroDivisionError('two\\nlines')", 1, "part: ZeroDivisionError: two lines"),
        ("ExceptionGroup('nursery', [ExceptionGroup('inner', [StoreError('not here')])])", 1, "part: not here"),
        ("ExceptionGroup('nursery', [ZeroDivisionError('1 / 0')])", 1, "part: ZeroDivisionError: 1 / 0"),
        ("ExceptionGroup('n', [KeyError('k'), StoreError('s'), RunFailed('r')])", ENDS_THE_RUN, "part: r"),
        ("ExceptionGroup('n', [RunFailed('r'), UsageError('bad thing: mend it')])", 2, "part: bad thing: mend it"),
        ("OSError(28, 'No space')", 5, "part: no space left on the disk: free some ([Errno 28] No space)"),
        (
            "OSError(122, 'Disk quota exceeded')",
            5,
            "part: no space left on the disk: free some ([Errno 122] Disk quota exceeded)",
        ),
        (
            "ValueError('I/O: No space left on device')",
            5,
            "part: no space left on the disk: free some (I/O: No space left on device)",
        ),
        ("BaseExceptionGroup('n', [SystemExit(0)])", 0, None),
    ],
)
async def test_a_failing_child_leaves_one_line(tmp_path: Path, raised: str, status: int, line: str | None) -> None:
    code = (
        "import sys\nfrom agentrl.errors import RunFailed, StoreError, UsageError\n"
        "from agentrl.run.processes.exit_status import run_role\n"
        f"def main(): raise {raised}\nsys.exit(run_role('part', main))"
    )
    one = child(tmp_path, code)
    one.start()
    with trio.fail_after(DEADLINE_S):
        assert await one.wait() == status
    assert not one.error_path.exists() if line is None else one.failure(status) == line


async def test_a_signal_is_named_where_no_line_was_left(tmp_path: Path) -> None:
    one = child(tmp_path, "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)")
    one.start()
    with trio.fail_after(DEADLINE_S):
        status = await one.wait()
    assert one.failure(status).startswith("part ended with signal SIGKILL")


async def test_a_child_that_crashes_in_a_librarys_code_says_where(tmp_path: Path) -> None:
    code = (
        "import os, sys\nfrom agentrl.run.processes import child\ndef crashes(*_): os.abort()\n"
        "child.run_role, sys.argv = crashes, ['', 'worker', 'run', '0']\nchild.main()"
    )
    one = child(tmp_path, code)
    one.start()
    with trio.fail_after(DEADLINE_S):
        assert await one.wait() == -signal.SIGABRT
    said = one.log_path.read_text()
    assert "Fatal Python error: Aborted" in said and "in crashes" in said


@pytest.mark.medium
async def test_law_4_what_a_killed_child_leaves_in_its_group_ends_before_it_is_started_again(tmp_path: Path) -> None:
    """Such as the engine core of a vLLM server; and Python's resource tracker removes the semaphore of the dead."""
    code = (
        "import multiprocessing, os, signal, subprocess\n"
        "print(subprocess.Popen(['sleep', '60']).pid)\n"
        "lock = multiprocessing.get_context('spawn').Lock()\nprint(lock._semlock.name)\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    one = child(tmp_path, code)
    one.start()
    with trio.fail_after(DEADLINE_S):
        assert await one.wait() == -signal.SIGKILL
        pid, semaphore = one.log_path.read_text().split()[:2]
        with suppress(ProcessLookupError):
            watched = os.pidfd_open(int(pid))
            try:
                await trio.lowlevel.wait_readable(watched)
            finally:
                os.close(watched)
    assert not await trio.Path("/dev/shm", f"sem.{semaphore.removeprefix('/')}").exists()


def test_law_4_children_of_a_killed_owner_end(tmp_path: Path) -> None:
    """The owner is killed by SIGKILL and can tell nobody: the lifeline does."""
    owner = (
        "import signal\nfrom pathlib import Path\nfrom agentrl.run.processes.supervised_child import Child\n"
        "code = 'import os, signal; from agentrl.host.janitor import watch_lifeline;'\n"
        "code += 'watch_lifeline(lambda: os._exit(0)); print(1, flush=True); signal.pause()'\n"
        f"one = Child('part', ['-c', code], Path({str(tmp_path)!r}))\none.start()\nprint(one.pid, flush=True)\n"
        "signal.pause()"
    )
    process = subprocess.Popen([sys.executable, "-c", owner], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    pid = int(process.stdout.readline())
    watched = os.pidfd_open(pid)
    process.kill()
    process.wait(DEADLINE_S)

    async def gone() -> None:
        with trio.fail_after(DEADLINE_S):
            await trio.lowlevel.wait_readable(watched)

    try:
        trio.run(gone)
    finally:
        os.close(watched)


@each_case(
    ("signs_s", "is_reset"),
    [
        ([], False),  # it dies, or hangs, while it starts
        ([500], False),  # it starts slowly, and hangs at once
        ([500, 509], False),
        ([500, 505, 510], True),
        ([0, 10], True),  # and hangs then: it had worked
    ],
)
async def test_only_a_life_with_the_windows_time_between_two_signs_resets_a_restart_budget(
    signs_s: list[float], is_reset: bool, autojump_clock: MockClock
) -> None:
    budget = RestartBudget(allowed=2, window_s=10)
    for _ in range(2):
        budget.begin()
        began = trio.current_time()
        for sign_s in signs_s:
            await trio.sleep_until(began + sign_s)
            budget.lives()
        await trio.sleep(600)  # until its death is noticed
        await budget.spend("died")
    if is_reset:
        budget.begin()
        await budget.spend("died")
    with pytest.raises(RunFailed, match=r"died \(started again 2 times, never well for 10 s\)"):
        await budget.spend("died")


async def test_signs_of_two_lives_are_not_added_up(autojump_clock: MockClock) -> None:
    """A life that ends without costs, such as that of a worn out child, spends nothing and resets nothing."""
    budget = RestartBudget(allowed=0, window_s=10)
    for _ in range(2):
        budget.begin()
        budget.lives()
        await trio.sleep(20)
    with pytest.raises(RunFailed):
        await budget.spend("died")


async def test_one_outage_of_a_minute_does_not_use_up_a_restart_budget(autojump_clock: MockClock) -> None:
    """Every start fails at once as long as it lasts."""
    budget, started = RestartBudget(), trio.current_time()
    await budget.spend("no GPU")
    assert trio.current_time() == started, "the first time at once"
    while trio.current_time() - started < 60:
        await budget.spend("no GPU")

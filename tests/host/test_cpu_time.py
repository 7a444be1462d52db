"""Law 3: a deadline waits while this machine gives a program no processor, and never while the program sleeps."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import warnings
from collections.abc import Iterator

import pytest
import trio

from agentrl.host.clocks import HostClock, Whose, watch
from agentrl.protocols import ExecResult, Limits, SandboxSpec
from agentrl.sandbox.local_unsafe import LocalUnsafe

PYTHON = (sys.executable, "-S", "-E", "-c")
SPIN = "while True: pass"
WORK = "import time\nwhile time.process_time() < 3.0: pass\nprint('done')"
THREADS = """
import threading
for _ in range(6): threading.Thread(target=lambda: exec("while True: pass"), daemon=True).start()
while True: pass
"""


@pytest.fixture
def one_processor() -> Iterator[None]:
    """This process and what it starts run on one processor, which eight others keep busy."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    with contextlib.ExitStack() as stack:
        stack.callback(os.sched_setaffinity, 0, before)
        for _ in range(8):
            busy = stack.enter_context(subprocess.Popen([sys.executable, "-c", SPIN]))
            stack.callback(busy.kill)
        yield


def run_boxed(*argv: str, timeout_s: float, policy_s: float = 60.0) -> tuple[ExecResult, Whose | None]:
    async def main() -> tuple[ExecResult, Whose | None]:
        with warnings.catch_warnings(action="ignore"):
            backend = LocalUnsafe()
            box = await backend.create(SandboxSpec(limits=Limits(cpu_s=60)))
        try:
            with watch(policy_s=policy_s) as watching:
                result = await box.exec(argv, timeout_s=timeout_s)
            return result, watching.over
        finally:
            await backend.aclose()

    return trio.run(main, clock=HostClock())


@pytest.mark.medium
@pytest.mark.usefixtures("one_processor")
def test_a_program_without_a_processor_gets_its_seconds_later() -> None:
    """3 s of work within 4.5 s, on at most half of a processor: six seconds of wall time or more, the rest of which is
    this machine's. The deadline of the step around it (5.9 s) waits too."""
    result, over = run_boxed(*PYTHON, WORK, timeout_s=4.5, policy_s=5.9)  # the start is starved as well
    assert (result.stdout, result.timed_out, over) == (b"done\n", False, None)
    assert result.cpu_s is not None and 2.9 < result.cpu_s < 3.6
    assert result.duration_s > 4.5 and result.starved_s > 0.2


@pytest.mark.medium
@pytest.mark.usefixtures("one_processor")
def test_a_program_that_sleeps_is_not_starved() -> None:
    """It starts with next to no work: the start of an interpreter is starved as long as the machine is busy."""
    result, _ = run_boxed("sleep", "600", timeout_s=3.0)
    assert result.timed_out
    assert result.starved_s < 1.5


@pytest.mark.medium
def test_threads_that_take_processors_from_each_other_are_not_starved() -> None:
    """Seven threads on one processor: each waits most of the time, and the program has had all it may have."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {max(before)})
    try:
        result, _ = run_boxed(*PYTHON, THREADS, timeout_s=1.0)
    finally:
        os.sched_setaffinity(0, before)
    assert result.timed_out
    assert result.cpu_s is not None
    assert result.starved_s <= result.duration_s - result.cpu_s + 0.2  # all but what others of this machine used

"""Failures of this machine that a grader must not score (law 3), put on the boxes of one play.

    killed     the box is lost                                exec raises SandboxLost
    slowed     the command got no processor until it was late  an ExecResult with `timed_out` and `starved_s`
    starved    no processor for longer than anything waits     exec raises HostBusy

These are the three ways in which a sandbox reports its host, so a grader sees what it would see on a bad day, and a
play costs no more than one without grading. Boxes really killed or starved would add minutes for each task and would
test the sandbox, which has a conformance suite of its own. Knows nothing of verdicts.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Awaitable, Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any, Final, Literal, TypeVar, cast

import trio

from agentrl.env import sync_async
from agentrl.env.checks.oracles import Oracle
from agentrl.env.checks.tasks.plays import Play, play
from agentrl.errors import HostBusy, SandboxLost
from agentrl.host.cores import cores
from agentrl.protocols import AsyncEnv, BoxProcess, ExecResult, Sandbox
from agentrl.records import Messages
from agentrl.sandbox.shared_backend import wrapped_boxes

T = TypeVar("T")
Hindrance = Literal["killed", "slowed", "starved"]

HINDRANCES: Final[tuple[Hindrance, ...]] = ("killed", "slowed", "starved")
_SIGKILL: Final = 137
_LATE_S: Final = 60.0  # seconds that a slowed command without a time-out of its own is reported to have taken
_SPIN: Final = "import os\nparent = os.getppid()\nwhile os.getppid() == parent:\n    sum(range(100_000))\n"
LOAD: Final = "agentrl-load"
"""An argument of the processes that keep this machine busy, by which people recognise them."""


@dataclass(slots=True)
class HinderedBoxes:
    """The boxes of one play, hindered while `is_on`. `touched`: whether anything ran in one of them meanwhile."""

    hindrance: Hindrance
    is_on: bool = False
    touched: bool = False

    @contextmanager
    def hindered(self) -> Generator[None]:
        """Hinder the boxes that are made in the block once `is_on` is set. A box that an environment keeps for other
        plays works again afterwards."""
        with wrapped_boxes(lambda box: cast("Sandbox", _HinderedBox(box, self))):
            try:
                yield
            finally:
                self.is_on = False

    def from_turn(self, oracle: Oracle, turns: int) -> Oracle:
        """The oracle, whose last turn of `turns` sets the hindrance on: that turn is the one that is graded."""
        written_turns = 0

        async def policy(messages: Messages) -> str:
            nonlocal written_turns
            action_text = await sync_async.call(oracle.policy, messages, blocking=False)
            written_turns += 1
            self.is_on = written_turns >= turns
            return action_text

        return replace(oracle, policy=policy)

    def result(self, timeout_s: float | None) -> ExecResult:
        """The result of a command that the machine hindered. Raises SandboxLost, HostBusy."""
        self.touched = True
        if self.hindrance == "killed":
            raise SandboxLost("the box was killed, as a check of the task asks")
        if self.hindrance == "starved":
            raise HostBusy("no processor for the box, as a check of the task asks")
        exceeded_s = timeout_s or _LATE_S
        return ExecResult(
            exit_code=_SIGKILL,
            stdout=b"",
            stderr=b"",
            timed_out=True,
            duration_s=2 * exceeded_s,
            cpu_s=0.1 * exceeded_s,
            starved_s=1.9 * exceeded_s,
        )


class _HinderedBox:
    """A box whose commands fail by the machine's doing while its hindrance is on; all else is the box's own."""

    def __init__(self, box: Sandbox, boxes: HinderedBoxes) -> None:
        self._box, self._boxes = box, boxes

    def __getattr__(self, name: str) -> Any:
        return getattr(self._box, name)

    async def exec(self, argv: Sequence[str], *, timeout_s: float | None = None, **options: Any) -> ExecResult:
        if self._boxes.is_on:
            return self._boxes.result(timeout_s)
        return await self._box.exec(argv, timeout_s=timeout_s, **options)

    async def start(self, argv: Sequence[str], **options: Any) -> BoxProcess:
        if self._boxes.is_on:
            self._boxes.result(None)
            raise HostBusy("no processor for the process, as a check of the task asks")
        return await self._box.start(argv, **options)


async def in_own_loop(function: Callable[[], Awaitable[T]]) -> T:
    """Call a function in a trio loop of its own, in a thread, within the deadline around the call.

    Environments remember the verdicts of equal work for as long as a loop runs, and a grader that is not called again
    can be neither hindered nor timed."""
    remaining_s = trio.current_effective_deadline() - trio.current_time()

    async def main() -> T:
        with trio.fail_after(remaining_s):
            return await function()

    try:
        # Left behind where somebody interrupts the command: its own deadline ends it, or the process does.
        return await trio.to_thread.run_sync(trio.run, main, abandon_on_cancel=True)
    except trio.TooSlowError:
        await trio.sleep(max(0.0, trio.current_effective_deadline() - trio.current_time()))  # which cancels the caller
        raise


async def hindered_plays(
    make: Callable[[], AsyncEnv],
    seed: int,
    won: tuple[int, Play],
    lost: tuple[int, Play] | None,
    oracles_of: Callable[[AsyncEnv], Sequence[Oracle]],
) -> dict[str, Play]:
    """Play a task once under each hindrance of its grader; empty where nothing of the last turn runs in a box.

    `won` and `lost` are earlier plays with the index of their oracles. The one that won is played again, and where it
    wins although its grader ran nothing the other one, which shows whether everything wins."""

    async def hindered(boxes: HinderedBoxes, index: int, earlier: Play) -> Play:
        turn_count = 0 if earlier.result is None else earlier.result.turns

        def hinder(env: AsyncEnv) -> list[Oracle]:
            return [boxes.from_turn(task_oracle, turn_count) for task_oracle in oracles_of(env)]

        with boxes.hindered():
            return await play(make, seed, earlier.oracle, index, hinder, None)

    plays_by_hindrance: dict[str, Play] = {}
    for hindrance in HINDRANCES:
        hindered_boxes = HinderedBoxes(hindrance)
        plays_by_hindrance[hindrance] = await hindered(hindered_boxes, *won)
        if not hindered_boxes.touched:
            return {}
        if plays_by_hindrance[hindrance].wins and lost is not None:
            plays_by_hindrance[hindrance] = await hindered(hindered_boxes, *lost)
    return plays_by_hindrance


@contextmanager
def busy_processors() -> Generator[None]:
    """Keep all processors that this process may use busy, with two processes for each. They end with the block, and
    with this process however it ends."""
    with ExitStack() as exit_stack:
        for _ in range(2 * cores()):
            busy_process = exit_stack.enter_context(subprocess.Popen([sys.executable, "-S", "-E", "-c", _SPIN, LOAD]))
            exit_stack.callback(busy_process.kill)
        yield

"""A policy that sleeps, in a tool or while it is judged, is scored: its slowness is nobody else's failure.

Boxes are real. Time runs faster than it does while all of their processes sleep."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import trio
from rollout.conftest import context, renderer, store  # noqa: F401  (fixtures)
from rollout.saying import saying
from trio.testing import MockClock

import agentrl
from agentrl.env import ToolEnv
from agentrl.errors import HostBusy
from agentrl.protocols import ExecResult, SandboxSpec
from agentrl.records import StopReason, Task, Trajectory
from agentrl.rollout.episode import play
from agentrl.rollout.stop_cause import StopCause
from agentrl_environments.code_repair import CodeRepair
from agentrl_environments.judging import SourceJudge
from agentrl_environments.repo_repair import RepoRepair
from agentrl_environments.swe import SWE, Harbor, submitted_files

ROOM: dict[str, Any] = {"max_context": 1_000_000, "max_tokens_per_turn": 100_000, "max_turns": 20}
SLEEP = "import time\ntime.sleep(1000)\n"

Played = tuple[StopCause, Trajectory]


LOOK_S = 0.01


@pytest.fixture
def fast_clock() -> MockClock:
    return MockClock(rate=1.0)


async def hurry(clock: MockClock) -> None:
    """A machine that is busy with a box has its time; nothing is lost where a policy's code sleeps."""
    calm = 0
    while True:
        calm = calm + 1 if set(states(os.getpid())) <= {"S", "Z"} else 0
        clock.rate = 100.0 if calm > 3 else 1.0
        await trio.sleep(LOOK_S * clock.rate)


def states(pid: int) -> Iterator[str]:
    """The kernel's letters for the threads of a process, and of all processes below it; not for the one that asks."""
    for task in Path(f"/proc/{pid}/task").glob("*"):
        with suppress(OSError):  # it has ended
            if int(task.name) != threading.get_native_id():
                yield (task / "stat").read_text().rpartition(")")[2].split()[0]
            for child in (task / "children").read_text().split():
                yield from states(int(child))


@pytest.fixture
async def played(
    renderer: Any,  # noqa: F811
    store: Any,  # noqa: F811
    context: Any,  # noqa: F811
    fast_clock: MockClock,
    nursery: trio.Nursery,
) -> Any:
    """`await played(env, seed, *turns, **options)`: an episode at the default deadlines of a run."""
    nursery.start_soon(hurry, fast_clock)

    async def play_one(env: ToolEnv, seed: int, *turns: str, **options: Any) -> Played:
        store.groups.add_groups([Task(index=0, env="test/Env", seed=seed, options=options)], size=1, purpose="train")
        (claim,) = store.leases.claim("w", 1, lease_s=1e6)
        ending = await play(claim, context(env, saying(renderer, *turns), **ROOM))
        return ending, store.reads.trajectory(claim.episode_id)

    return play_one


def texts(trajectory: Trajectory, turn: int) -> list[str]:
    step = trajectory.turns[turn].step
    assert step is not None
    return [message["content"] for message in step.observation]


@pytest.mark.medium
@pytest.mark.bubblewrap
async def test_law_3_one_command_that_sleeps_is_ended_and_read(played: Any, fast_clock: MockClock) -> None:
    env = SWE()
    ending, trajectory = await played(env, 0, env.call("shell", command="sleep 1000"), env.call("submit"))
    assert ending.stop_reason is StopReason.DONE
    assert trajectory.scored
    assert "share" in texts(trajectory, 0)[0]


@pytest.mark.medium
@pytest.mark.bubblewrap
async def test_law_3_a_module_that_sleeps_in_the_tests_of_a_repository(played: Any, fast_clock: MockClock) -> None:
    env = RepoRepair()
    await env.areset(seed=3)
    paths = sorted(env._repair.broken)
    await env.aclose()
    sleeping = "".join(env.call("write_file", path=path, content=SLEEP) for path in paths)
    ending, trajectory = await played(env, 3, sleeping + env.call("run_tests") * 3, env.call("submit"))
    assert trajectory.scored, ending
    assert trajectory.outcome == 0.0


@pytest.mark.medium
@pytest.mark.bubblewrap
async def test_law_3_a_module_that_sleeps_in_twelve_test_runs(played: Any, fast_clock: MockClock) -> None:
    env = CodeRepair()
    await env.areset(seed=3)
    first = env._repair.source.split("\n")[0]
    await env.aclose()
    sleeping = env.call("replace_line", line=1, text=f"import time; time.sleep(1000)\n{first}")
    ending, trajectory = await played(env, 3, sleeping + env.call("run_tests") * 12, env.call("submit"))
    assert trajectory.scored, ending
    assert trajectory.outcome == 0.0


@pytest.mark.medium
@pytest.mark.bubblewrap
@pytest.mark.parametrize(
    ("new", "task"),
    [(lambda: SWE(apart=False), "agentrl__lru-1"), (Harbor, "mend-totals")],
    ids=["SWE", "Harbor"],
)
async def test_law_3_work_that_sleeps_while_it_is_graded(
    played: Any, fast_clock: MockClock, new: Any, task: str
) -> None:
    env = new()
    all_sleep = "find . -name '*.py' -exec sh -c 'echo \"import time; time.sleep(1000)\" > {}' \\;"
    ending, trajectory = await played(env, 0, env.call("shell", command=all_sleep) + env.call("submit"), task=task)
    assert trajectory.scored, ending
    assert trajectory.outcome == 0.0


class SleepyBoxes:
    """A backend of judges and suspects: tests pass at once, unless a source says that it sleeps."""

    name = "sleepy"

    async def create(self, spec: SandboxSpec) -> Any:
        return _Box(spec.files)

    async def aclose(self) -> None: ...


class _Box:
    def __init__(self, files: Mapping[str, bytes]) -> None:
        self._lines = [b"=" + json.dumps(line).encode() + b"\n" for line in (["test", True, ""], ["", True, ""])]
        self._judge = "box/judge.py" in files
        self.sleeps = any(b"sleep" in data for path, data in files.items() if path.startswith(("sources", "tests")))

    async def start(self, argv: Any, **_: Any) -> Any:
        return self

    async def receive(self, timeout_s: float | None = None) -> bytes:
        if self.sleeps:
            await trio.sleep_forever()
        return self._lines.pop(0) if self._lines else b""

    async def close(self) -> None: ...


async def test_law_3_siblings_that_sleep_while_they_are_judged_cost_an_honest_one_nothing(
    renderer: Any,  # noqa: F811
    store: Any,  # noqa: F811
    context: Any,  # noqa: F811
    autojump_clock: MockClock,
) -> None:
    """Eight members, one slot: seven sleep for as long as a judgement may last, the last to come is honest."""
    judge = SourceJudge(SleepyBoxes(), slots=1)  # type: ignore[arg-type]

    class Judged(ToolEnv):
        blocking = False
        work = b""

        def prompt(self, task: Any) -> str:
            return "go"

        @agentrl.tool
        def hand_in(self, work: str) -> str:
            """Hand in."""
            self.work = work.encode()
            self.finish()
            return "thanks"

        async def grade(self) -> bool:
            return "test" in (await judge.run({"a.py": b""}, {"test_a.py": self.work})).passed

    store.groups.add_groups([Task(index=0, env="test/Env", seed=0)], size=8, purpose="train")
    claims = store.leases.claim("w", 8, lease_s=1e6)
    endings: dict[int, StopCause] = {}

    async def member(claim: Any, work: str) -> None:
        env = Judged()
        endings[claim.episode_id] = await play(
            claim, context(env, saying(renderer, env.call("hand_in", work=work)), **ROOM)
        )

    async with trio.open_nursery() as nursery:
        for at, claim in enumerate(claims):
            nursery.start_soon(member, claim, f"sleep {at}" if at < 7 else "honest")
    outcomes = [store.reads.trajectory(claim.episode_id).outcome for claim in claims]
    assert outcomes == [0.0] * 7 + [1.0], endings
    assert {ending.stop_reason for ending in endings.values()} == {StopReason.DONE}


class _LateBox:
    """A box whose commands end at their deadline; the host withheld the processor for `starved_s` of 60 seconds."""

    def __init__(self, starved_s: float) -> None:
        self._starved_s = starved_s

    async def exec(self, argv: Any, **_: Any) -> ExecResult:
        late = {"timed_out": True, "duration_s": 60.0, "starved_s": self._starved_s}
        return ExecResult(exit_code=137, stdout=b"", stderr=b"", **late)


async def test_law_3_a_work_folder_that_the_host_kept_from_being_listed_is_not_refused() -> None:
    """A folder with too many files to list is the agent's doing, and gets 0."""
    with pytest.raises(submitted_files.WorkRefused):
        await submitted_files.work(_LateBox(0.0), {}, lambda path, start: True)  # type: ignore[arg-type]
    with pytest.raises(HostBusy):
        await submitted_files.work(_LateBox(55.0), {}, lambda path, start: True)  # type: ignore[arg-type]

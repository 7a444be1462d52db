"""The red team does no harm where a wall is missing: a probe proves each wall first, or the attack is left out.

Nothing of an attack runs here: a fake backend keeps a list of the commands. The probes alone run on `local-unsafe`.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import suppress

import pytest
from each_case import each_case

from agentrl.protocols import BoxProcess, ExecResult, SandboxSpec
from agentrl.sandbox.local_unsafe import LocalUnsafe
from agentrl.testing.fake_sandbox import FakeBackend, FakeSandbox
from agentrl.testing.sandbox import CASES, walls

RED_TEAM = [case for case in CASES if case.suite == "red team"]
NEEDS_A_WALL = (
    "writing to the system: /usr, /etc, /bin, /lib, /dev, the root folder",
    "the host's clock, name, priorities and hard limits",
    "mount, pivot_root, chroot, and the new mount calls",
    "control groups: mounting them, leaving them, raising their bounds",
    "signals to the supervisor and to everything in sight",
    "a fork bomb",
    "background processes that take all a box may have, then one more command",
    "taking the work folder away: modes, renames, deletion",
)
HARMFUL = {
    "signals by number ranges, to the supervisor, to process 1": r"kill -\w+ (-1|1\b|\$PPID)|range\(2, \d+\)",
    "forks without end": r"b \| b|while os\.fork|while :; do sleep 100 & done",
    "writes to the system": r"(>|mkdir|touch) (/|\$f\b)(?!dev/null|tmp/agentrl-|dev/shm/agentrl-)",
    "changes of what lies beside the box": r"(rm -rf|mv|chmod \w+) /(workspace|tmp(?!/agentrl-))|rm -f /(tmp|dev/shm)/",
    "the host's clock": r"clock_settime",
    "mounts": r"mount -t|mount --bind",
    "memory without end": r"while True: b\.append",
}


class RecordingBox(FakeSandbox):
    """Also keeps what it is asked to start."""

    async def start(
        self, argv: Sequence[str], *, cwd: str | None = None, env: Mapping[str, str] | None = None
    ) -> BoxProcess:
        self.commands.append(list(argv))
        return await super().start(argv, cwd=cwd, env=env)


class WeakBackend(FakeBackend):
    """Boxes that say yes to everything."""

    async def create(self, spec: SandboxSpec) -> FakeSandbox:
        box = RecordingBox(spec, self.answer)
        self.boxes.append(box)
        return box

    @property
    def commands(self) -> list[str]:
        return [" ".join(command) for box in self.boxes for command in box.commands]


def says(text: bytes) -> WeakBackend:
    return WeakBackend(lambda argv, files: ExecResult(exit_code=0, stdout=text, stderr=b""))


@each_case("answer", [b"", b"open\n", b"0\n", b"alive\n"])
async def test_no_harmful_command_reaches_a_backend_without_walls(answer: bytes) -> None:
    for case in RED_TEAM:
        backend = says(answer)
        with suppress(Exception):  # how a case fails here is not the question
            await case.run(backend)
        for kind, pattern in HARMFUL.items():
            hit = [command for command in backend.commands if re.search(pattern, command)]
            assert not hit, f"{case.name}: {kind}: {hit[0][:200]}"


@each_case("name", NEEDS_A_WALL)
async def test_a_missing_wall_is_reported_and_the_attack_left_out(name: str) -> None:
    (case,) = [each for each in RED_TEAM if each.name == name]
    backend = says(b"open\n")
    with pytest.raises(AssertionError, match="the attack was left out"):
        await case.run(backend)
    assert backend.commands, "the wall was not even probed"


@each_case("name", NEEDS_A_WALL)
async def test_the_attack_is_made_where_the_wall_is_proven(name: str) -> None:
    (case,) = [each for each in RED_TEAM if each.name == name]
    backend = says(b"closed\n")
    with suppress(Exception):  # the walls of a fake hold no attack
        await case.run(backend)
    open_ = says(b"open\n")
    with pytest.raises(AssertionError):
        await case.run(open_)
    assert len(backend.commands) > len(open_.commands)


@pytest.fixture
async def no_wall() -> AsyncGenerator[LocalUnsafe]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        backend = LocalUnsafe()
        yield backend
        await backend.aclose()


@pytest.mark.parametrize("wall", [walls.read_only_system, walls.own_processes, walls.own_work_folder])
async def test_a_probe_finds_that_there_is_no_wall(wall: walls.Wall, no_wall: LocalUnsafe) -> None:
    """The negative control. The probes do no harm, so they may run where nothing holds them."""
    box = await no_wall.create()
    with pytest.raises(AssertionError, match="the attack was left out"):
        await wall(box)


def test_every_case_that_attacks_the_host_is_in_the_list() -> None:
    assert {case.name for case in RED_TEAM} >= set(NEEDS_A_WALL)

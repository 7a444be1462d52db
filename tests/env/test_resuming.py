"""Environments with a box go on elsewhere: their code is run again, and their box is asked nothing again."""

from __future__ import annotations

import os
import secrets
from pathlib import Path
from typing import Any

import pytest
from each_case import each_case

import agentrl
from agentrl.env.tool_env import ToolEnv
from agentrl.errors import EnvError, SandboxError, SandboxPathError
from agentrl.protocols import ExecResult, SandboxSpec
from agentrl.sandbox.current_box import CurrentBox
from agentrl.testing.fake_sandbox import FakeSandbox


class Packable(FakeSandbox):
    """A fake box that can be packed; every command has an output that no other run has."""

    async def exec(self, argv: Any, **options: Any) -> ExecResult:
        await super().exec(argv, **options)
        self.files[f"made-{len(self.commands)}"] = b"1"
        return ExecResult(exit_code=0, stdout=secrets.token_bytes(8).hex().encode(), stderr=b"\xff")

    async def fork(self) -> Packable:
        twin = Packable(SandboxSpec())
        twin.files = dict(self.files)
        return twin

    async def pack(self, most_bytes: int) -> bytes:
        data = repr(sorted(self.files.items())).encode()
        if len(data) > most_bytes:
            raise SandboxPathError("too large")
        return data

    async def unpack(self, data: bytes) -> None:
        self.files = dict(eval(data))


class Boxed(ToolEnv):
    """Its Python state (a set, a generator of numbers) is no plain data."""

    limits = agentrl.EpisodeLimits(turns=9, tokens=1000)
    blocking = False

    def __init__(self, **settings: Any) -> None:
        self.own_box = self.current = CurrentBox()
        self.seen: set[str] = set()
        super().__init__(**settings)

    async def setup(self, task: Any) -> None:
        self.real = self.current.box = Packable(SandboxSpec())
        await self.box.write("first", b"1")

    async def prompt(self, task: Any) -> str:
        self.numbers = iter(range(100))
        return f"look {(await self.box.exec(['uname'])).stdout.decode()} {task.get('name')}"

    @agentrl.tool
    async def run(self, command: str) -> str:
        """Run a command."""
        result = await self.box.exec(["sh", "-c", command], timeout_s=60.0)
        self.seen.add(command)
        self.note(luck=int(self.np_random.integers(1 << 30)))
        return f"{next(self.numbers)} {result.stdout.decode()} {len(result.stderr)}"

    @agentrl.tool
    async def look(self, path: str) -> str:
        """Read a file."""
        return (await self.box.read(path)).decode(errors="replace")

    @agentrl.tool
    async def serve(self) -> str:
        """Start a server in the box."""
        try:
            await self.box.start(["server"])
        except SandboxError:
            return "started"
        return ""

    def grade(self) -> float:
        return float(len(self.seen))


async def begun(*actions: str, make: Any = Boxed) -> Any:
    env = make()
    await env.areset(seed=3, options={"name": "x"})
    for action in actions:
        env.charge_tokens(10)
        await env.astep(action)
    return env


def call(name: str, **arguments: Any) -> str:
    return Boxed().call(name, **arguments)


RUN, AGAIN = call("run", command="make"), call("run", command="make") + call("run", command="test")


async def test_a_restored_episode_stands_where_it_was_and_runs_no_command_again() -> None:
    first = await begun(RUN, "no call \ud800", AGAIN, call("look", path="none"), call("look", path="first"))
    assert first.has_snapshots
    second = Boxed()
    await second.restore(await first.snapshot())
    assert second.real.commands == [] and second.real.files == first.real.files
    assert second.seen == first.seen == {"make", "test"}
    assert second.np_random.bit_generator.state == first.np_random.bit_generator.state
    meters = [each._episode.meter for each in (first, second)]
    assert meters[0].tokens == meters[1].tokens == 50 and meters[0].turns == meters[1].turns == 5
    assert meters[1].tool_seconds == pytest.approx(meters[0].tool_seconds) and meters[1].seconds >= meters[0].seconds
    observation, *_ = await second.astep(RUN)
    assert observation[0]["content"].split()[1].startswith("3") or "3 " in observation[0]["content"]
    assert second.real.commands == [["sh", "-c", "make"]]


async def test_a_restored_episode_can_be_saved_and_restored_again() -> None:
    env = await begun(RUN)
    for _ in range(3):
        twin = Boxed()
        await twin.restore(await env.snapshot())
        await twin.astep(RUN)
        env = twin
    assert env._episode.meter.turns == 4 and len(env.real.commands) == 1
    assert sorted(env.real.files) == ["first", "made-1", "made-2"]


async def test_an_environment_that_goes_another_way_is_noticed() -> None:
    saved = await (await begun(RUN, RUN)).snapshot()

    class Otherwise(Boxed):
        async def prompt(self, task: Any) -> str:
            return "other words"

    class Curious(Boxed):
        async def after_turn(self, results: Any) -> None:
            await self.box.exec(["git", "diff"])

    class Lazy(Boxed):
        async def prompt(self, task: Any) -> str:
            self.numbers = iter(range(100))
            return "look"

    class Tidy(Boxed):
        @agentrl.tool
        async def run(self, command: str) -> str:
            """Run a command."""
            return (await self.box.exec(["sh", "-c", command], timeout_s=60.0)).stdout.decode()

    class Forgetful(Boxed):
        async def _play_turn(self, episode: Any, action: str) -> Any:
            observation, *rest, info = await super()._play_turn(episode, action)
            return (observation, *rest, {**info, "history": observation})

    for make, words in (
        (Otherwise, "reset gave another first observation"),
        (Curious, "made a call to its box that it had not made before: exec ['git', 'diff']"),
        (Lazy, "reset gave another first observation"),
        (Tidy, "turn 0 was answered differently"),
        (Forgetful, "turn 0 was answered differently"),
    ):
        with pytest.raises(EnvError, match=words.replace("[", r"\[").replace("(", r"\(")):
            await make().restore(saved)


async def test_a_box_in_which_a_process_was_started_is_not_saved_and_says_so() -> None:
    env = await begun(RUN)
    assert await env.snapshot()
    await env.astep(call("serve"))
    with pytest.raises(SandboxError, match="a process was started in its box"):
        await env.snapshot()


async def test_copies_of_the_box_are_answered_from_the_record_too_and_none_may_be_open() -> None:
    class Measured(Boxed):
        async def after_turn(self, results: Any) -> float:
            copy = await self.box.fork()
            await copy.write("probe", b"1")
            found = (await copy.exec(["measure"])).stdout
            await copy.close()
            return float(int(found, 16) % 7)

    class Open(Boxed):
        async def after_turn(self, results: Any) -> None:
            self.copy = await self.box.fork()

    env, twin = await begun(RUN, RUN, make=Measured), Measured()
    await twin.restore(await env.snapshot())
    assert twin.real.files == env.real.files and "probe" not in env.real.files
    for each in (env, twin):
        await each.astep(RUN)
        assert await each.snapshot()
    left = await begun(RUN, make=Open)
    with pytest.raises(SandboxError, match="a copy of its box is open"):
        await left.snapshot()
    await left.copy.close()
    assert await left.snapshot()


async def test_a_box_that_cannot_be_packed_says_so() -> None:
    env = await begun(RUN)
    env.current.box = FakeSandbox(SandboxSpec())
    with pytest.raises(SandboxError, match="boxes of the kind FakeSandbox cannot be packed"):
        await env.snapshot()


async def test_what_the_box_answered_is_held_within_the_bound_of_a_snapshot() -> None:
    env = Boxed()
    env.snapshot_bytes = 4000
    await env.areset(seed=3)
    assert await env.snapshot()
    for _ in range(3):
        env.real.files["big"] = os.urandom(4000)
        await env.astep(call("look", path="big"))
    with pytest.raises(SandboxError, match="more than 16000 bytes"):
        await env.snapshot()


async def test_without_a_wish_for_snapshots_nothing_is_kept() -> None:
    env = Boxed()
    env.snapshot_bytes = 0
    await env.areset(seed=3)
    await env.astep(RUN)
    with pytest.raises(SandboxError, match="snapshots were off when the episode began"):
        await env.snapshot()


async def test_an_episode_without_a_beginning_has_no_snapshot() -> None:
    with pytest.raises(EnvError, match="no episode"):
        await Boxed().snapshot()


@each_case("data", [b"", b"agentrle" + b"x" * 50, b"PK", os.urandom(300)])
async def test_hostile_bytes_are_no_snapshot(data: bytes) -> None:
    with pytest.raises((EnvError, SandboxError)):
        await Boxed().restore(data)


async def test_every_cut_or_flipped_snapshot_is_refused_or_noticed() -> None:
    saved = await (await begun(RUN)).snapshot()
    for n in range(0, len(saved), 7):
        with pytest.raises(Exception) as caught:  # the fake box reads its own part by eval
            await Boxed().restore(saved[:n])
        assert isinstance(caught.value, EnvError | SandboxError | SyntaxError)


def test_an_environment_of_its_own_snapshots_keeps_them() -> None:
    class Own(Boxed):
        async def snapshot(self) -> bytes:
            return b"own"

    class Both(Own):
        async def restore(self, snapshot: bytes) -> None:
            assert snapshot == b"own"

    class Free(ToolEnv):
        pass

    assert Both().has_snapshots and not Own().has_snapshots and not Free().has_snapshots


@pytest.mark.bubblewrap
async def test_a_real_box_goes_on_from_its_files(tmp_path: Path) -> None:
    class Real(ToolEnv):
        boxed = True
        limits = agentrl.EpisodeLimits(turns=9)

        def __init__(self, **settings: Any) -> None:
            super().__init__(tools=["shell", "write_file", "python"], **settings)

        async def prompt(self, task: Any) -> str:
            await self.box.write("numbers.txt", b"1\n2\n")
            return "go"

    first, second = Real(), Real()
    async with first, second:
        await first.areset(seed=0)
        await first.astep(first.call("shell", command="date +%s%N > t; cat t; mkdir d; echo x > /tmp/y; ln -s t l"))
        saved = await first.snapshot()
        await second.restore(saved)
        for name in ("cat l", "cat /tmp/y; ls", "stat -c '%Y %a' d"):
            action = first.call("shell", command=name)
            assert (await first.astep(action))[0] == (await second.astep(action))[0]
        await first.astep(first.call("python", code="1"))
        with pytest.raises(SandboxError, match="a process was started"):
            await first.snapshot()

"""What a container's box makes of an engine that answers oddly; no engine runs."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import pytest
import trio
import trio.testing
from each_case import each_case

from agentrl.errors import SandboxError, SandboxLost, SandboxPathError
from agentrl.host import clocks
from agentrl.host.cpu_time import GroupCpuTime
from agentrl.protocols import SandboxSpec
from agentrl.sandbox.docker import container, shell_scripts
from agentrl.sandbox.docker.attached_streams import AttachedStreams
from agentrl.sandbox.docker.container import Container
from agentrl.sandbox.docker.container_commands import ContainerCommands, ContainerEngine


def unknown_cpu_time(container: str, cpus: float) -> GroupCpuTime:
    """As of an engine on another machine."""
    return GroupCpuTime(None, None, cpus=cpus)


class Gone:
    """An engine whose container is gone. `starved`: because the kernel ended its process 1 for want of memory."""

    cpu_time = staticmethod(unknown_cpu_time)

    def __init__(self, *, starved: bool) -> None:
        self.starved = starved
        self.asked_since: list[float] = []

    def next_uid(self) -> int:
        return 1000

    async def execute(
        self, container: str, argv: Sequence[str], uid: int, env: Mapping[str, str], output_bytes: int
    ) -> Any:
        raise SandboxError("the engine: no such container")

    async def is_running(self, container: str) -> bool:
        raise SandboxError("the engine: no such container")

    async def out_of_memory(self, container: str, since: float) -> bool:
        self.asked_since.append(since)
        return self.starved


async def test_a_box_that_used_up_its_memory_is_destroyed_and_its_commands_are_results() -> None:
    engine = Gone(starved=True)
    box = Container(cast(ContainerEngine, engine), SandboxSpec(), set())
    for _ in range(2):
        result = await box.exec(["true"])
        assert (result.exit_code, result.stderr) == (137, b"sandbox: the box ran out of memory and was destroyed\n")
    with pytest.raises(SandboxPathError, match="ran out of memory"):
        await box.read("f")
    assert len(engine.asked_since) == 1, "it is asked once: the box stays broken"


async def test_files_that_tar_cannot_read_are_not_left_out_of_a_packed_box_in_silence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    work, programs = tmp_path / "work", tmp_path / "programs"
    for path in (work, programs):
        path.mkdir()
    (work / "f").write_text("x")
    way = f"{programs}:/usr/bin:/bin"

    async def own(
        self: ContainerCommands, script: str, *words: str, stdin: bytes = b"", limit: int
    ) -> tuple[int, bytes, bytes]:
        script = f"cd {work}; {script.replace(shell_scripts.WORKSPACE, str(work))}"
        command = ["sh", "-c", script, "sh", *words]
        ran = await trio.run_process(command, capture_stdout=True, capture_stderr=True, check=False, env={"PATH": way})
        return ran.returncode, ran.stdout, ran.stderr

    monkeypatch.setattr(ContainerCommands, "run_script", own)
    monkeypatch.setattr(container, "_WRITABLE", (str(work),))
    monkeypatch.setattr(container, "WORKSPACE", str(work))
    box = Container(cast(ContainerEngine, Gone(starved=False)), SandboxSpec(), set())
    assert await box.pack(1 << 20) and await box._pack()
    await box.download(".", tmp_path / "whole")
    assert (tmp_path / "whole" / "f").read_text() == "x"
    (programs / "tar").write_text('#!/bin/sh\nPATH=/usr/bin:/bin tar "$@"\necho "f: Permission denied" >&2\nexit 2\n')
    (programs / "tar").chmod(0o755)
    with pytest.raises(SandboxPathError, match="not readable"):
        await box.pack(1 << 20)
    with pytest.raises(SandboxPathError, match="f: Permission denied"):
        await box._pack()
    with pytest.raises(SandboxPathError, match="f: Permission denied"):
        await box.download(".", tmp_path / "part")


async def test_a_container_that_is_gone_for_another_reason_is_the_hosts_failure() -> None:
    box = Container(cast(ContainerEngine, Gone(starved=False)), SandboxSpec(), set())
    with pytest.raises(SandboxError, match="no such container"):
        await box.exec(["true"])


class Late:
    """An engine that learns `by` askings after the streams of a command have ended that the command has ended too."""

    cpu_time = staticmethod(unknown_cpu_time)

    def __init__(self, *, by: float) -> None:
        self.by, self.asked, self.removed = by, 0, 0

    def next_uid(self) -> int:
        return 1000

    async def execute(
        self, container: str, argv: Sequence[str], uid: int, env: Mapping[str, str], output_bytes: int
    ) -> tuple[str, AttachedStreams]:
        ours, theirs = trio.testing.memory_stream_pair()
        await theirs.aclose()
        return "execution", AttachedStreams(ours, b"", output_bytes=output_bytes)

    async def state(self, execution: str) -> tuple[bool, int | None]:
        self.asked += 1
        return self.asked <= self.by, None if self.asked <= self.by else 0

    async def processes(self, container: str) -> int:
        return 1

    async def remove(self, container: str) -> None:
        self.removed += 1


async def test_a_commands_end_that_the_engine_learns_late_costs_no_box(
    autojump_clock: trio.testing.MockClock,
) -> None:
    engine = Late(by=50)
    box = Container(cast(ContainerEngine, engine), SandboxSpec(), set())
    assert (await box.exec(["true"])).exit_code == 0
    assert not engine.removed


async def test_a_command_that_never_ends_costs_its_box(autojump_clock: trio.testing.MockClock) -> None:
    engine = Late(by=math.inf)
    box = Container(cast(ContainerEngine, engine), SandboxSpec(), set())
    result = await box.exec(["true"])
    assert (result.exit_code, engine.removed) == (137, 1)
    assert b"could not be ended" in (await box.exec(["true"])).stderr


class Slow(Late):
    """An engine that starts a command only after its box was swept once: it had answered before."""

    def __init__(self) -> None:
        super().__init__(by=math.inf)
        self.theirs: list[trio.StapledStream[Any, Any]] = []
        self.sweeps = 0

    async def execute(
        self, container: str, argv: Sequence[str], uid: int, env: Mapping[str, str], output_bytes: int
    ) -> tuple[str, AttachedStreams]:
        ours, theirs = trio.testing.memory_stream_pair()
        if argv[-1] == shell_scripts.SWEEP_ALL:
            self.sweeps += 1
            await theirs.aclose()
            if self.sweeps == 2:
                await self.theirs[0].aclose()
        else:
            self.theirs.append(theirs)
        return "execution", AttachedStreams(ours, b"", output_bytes=output_bytes)

    async def state(self, execution: str) -> tuple[bool, int | None]:
        return self.sweeps < 2, None if self.sweeps < 2 else 137


async def test_a_command_that_starts_after_its_kill_is_killed_again(
    autojump_clock: trio.testing.MockClock,
) -> None:
    engine = Slow()
    box = Container(cast(ContainerEngine, engine), SandboxSpec(), set())
    process = await box.start(["sleep", "600"])
    await process.kill()
    assert (engine.sweeps, engine.removed) == (2, 0)
    assert not box._commands.broken  # pyright: ignore[reportPrivateUsage]


class Held(Late):
    """An engine whose box stops our own commands, until they are swept: what a process of the policy can do."""

    def __init__(self) -> None:
        super().__init__(by=0)
        self.held: list[trio.StapledStream[Any, Any]] = []

    async def execute(
        self, container: str, argv: Sequence[str], uid: int, env: Mapping[str, str], output_bytes: int
    ) -> tuple[str, AttachedStreams]:
        ours, theirs = trio.testing.memory_stream_pair()
        if argv[-1] == "the policy's" or argv[-1] == shell_scripts.SWEEP_ALL:
            for stream in (theirs, *self.held):
                await stream.aclose()
            self.held.clear()
        else:
            self.held.append(theirs)
        return "execution", AttachedStreams(ours, b"", output_bytes=output_bytes)

    async def state(self, execution: str) -> tuple[bool, int | None]:
        return bool(self.held), None if self.held else 0


async def test_law_3_the_time_for_which_a_box_keeps_its_files_back_is_the_policys(
    autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Our commands run as its user: a process of the policy may stop them."""

    # The clock takes the wait for a thread, in which files are packed, for idleness, and would jump over all deadlines.
    async def inline(call: Callable[..., object], *args: object) -> object:
        return call(*args)

    monkeypatch.setattr(trio.to_thread, "run_sync", inline)
    box = Container(cast(ContainerEngine, Held()), SandboxSpec(), set())
    await box.exec(["the policy's"])
    calls = (lambda: box.read("f"), lambda: box.write("f", b""), box.snapshot, box.fork, lambda: box.pack(1_000))
    late = pytest.raises(SandboxPathError, match="did not answer within 60 s")
    for call in calls:
        with clocks.watch(own_s=1.0, policy_s=1_000.0) as watch, late:
            await call()
        assert watch.over is None and watch.left(clocks.Whose.POLICY) <= 940.0
    with clocks.watch(own_s=1_000.0, policy_s=1.0) as watch, late:  # nobody has acted in a new box
        await Container(cast(ContainerEngine, Held()), SandboxSpec(), set()).write("f", b"")
    assert watch.over is None and watch.left(clocks.Whose.OWN) <= 940.0


class Away(Late):
    """An engine that a network cuts off for a while: its answers, and the end of a command's output, come after it."""

    def __init__(self, *, away_s: float, output_s: float, left: int = 1) -> None:
        super().__init__(by=0)
        self.away_s, self.output_s, self.left = away_s, output_s, left

    async def execute(
        self, container: str, argv: Sequence[str], uid: int, env: Mapping[str, str], output_bytes: int
    ) -> tuple[str, AttachedStreams]:
        ours, theirs = trio.testing.memory_stream_pair()

        async def end() -> None:
            await trio.sleep(self.output_s)
            await theirs.aclose()

        trio.lowlevel.spawn_system_task(end)
        return "execution", AttachedStreams(ours, b"", output_bytes=output_bytes)

    async def state(self, execution: str) -> tuple[bool, int | None]:
        away_s, self.away_s = self.away_s, 0.0
        await trio.sleep(away_s)
        return False, 0

    async def processes(self, container: str) -> int:
        return self.left


async def test_law_3_a_partition_that_heals_takes_nothing_from_a_commands_deadline(
    autojump_clock: trio.testing.MockClock,
) -> None:
    box = Container(cast(ContainerEngine, Away(away_s=20.0, output_s=21.0)), SandboxSpec(), set())
    result = await box.exec(["true"], timeout_s=5.0)
    assert (result.exit_code, result.timed_out) == (0, False)


async def test_law_3_output_that_the_network_keeps_back_costs_no_box(autojump_clock: trio.testing.MockClock) -> None:
    """No process of the command is left that could hold its output open; where one is, it is the policy's."""
    engine = Away(away_s=0.0, output_s=1000.0)
    box = Container(cast(ContainerEngine, engine), SandboxSpec(), set())
    with pytest.raises(SandboxLost, match="the end of its output did not come"):
        await box.exec(["true"])
    assert not engine.removed
    held = Away(away_s=0.0, output_s=1000.0, left=9)
    assert (await Container(cast(ContainerEngine, held), SandboxSpec(), set()).exec(["true"])).exit_code == 137
    assert held.removed == 1


class Wire:
    """A connection that brings `pieces`, the last of them once `is_late` is set, and then ends or breaks off."""

    def __init__(self, *pieces: bytes, breaks: bool) -> None:
        self.pieces, self.breaks, self.is_late = list(pieces), breaks, trio.Event()

    async def receive_some(self, most: int) -> bytes:
        await trio.lowlevel.checkpoint()
        if len(self.pieces) > 1:
            return self.pieces.pop(0)
        await self.is_late.wait()
        if self.pieces:
            return self.pieces.pop()
        if self.breaks:
            raise trio.BrokenResourceError
        return b""

    async def send_all(self, data: bytes) -> None:
        await trio.lowlevel.checkpoint()

    async def send_eof(self) -> None:
        await trio.lowlevel.checkpoint()

    async def aclose(self) -> None:
        await trio.lowlevel.checkpoint()


class Cut(Away):
    """An engine whose first command has the connection `wire`; with `runs`, it ends by a sweep alone. The last piece
    comes once the engine has said that the command ended, or with `early` at once."""

    def __init__(self, wire: Wire, *, runs: bool = False, early: bool = False) -> None:
        super().__init__(away_s=0.0, output_s=0.0)
        self.wire, self.wires, self.runs = wire, [wire], runs
        if early:
            wire.is_late.set()

    async def execute(
        self, container: str, argv: Sequence[str], uid: int, env: Mapping[str, str], output_bytes: int
    ) -> tuple[str, AttachedStreams]:
        if not self.wires:  # a sweep: it ends what runs
            self.runs = False
            self.wire.is_late.set()
            return await super().execute(container, argv, uid, env, output_bytes)
        return "execution", AttachedStreams(cast(Any, self.wires.pop()), b"", output_bytes=output_bytes)

    async def state(self, execution: str) -> tuple[bool, int | None]:
        if not self.runs:
            self.wire.is_late.set()
        return self.runs, None if self.runs else 0


def frame(data: bytes, part: int | None = None) -> bytes:
    return (b"\x01\0\0\0" + len(data).to_bytes(4) + data)[:part]


@each_case(
    ("pieces", "breaks", "early", "stdin"),
    [
        ([frame(b"one")], True, False, b""),  # after the engine has said that the command ended
        ([frame(b"one")], True, True, b""),  # before
        ([frame(b"one"), frame(b"two", 9)], True, True, b"input"),  # within a frame
        ([frame(b"one"), frame(b"two", 3)], True, False, b"input"),  # within a frame's head
        ([frame(b"one"), frame(b"two", 9)], False, True, b"input"),  # a proxy between ends it in order
    ],
)
async def test_law_3_output_that_is_cut_after_a_commands_end_is_no_result(
    pieces: list[bytes], breaks: bool, early: bool, stdin: bytes, autojump_clock: trio.testing.MockClock
) -> None:
    engine = Cut(Wire(*pieces, breaks=breaks), early=early)
    with pytest.raises(SandboxLost, match="output is not whole"):
        await Container(cast(ContainerEngine, engine), SandboxSpec(), set()).exec(["true"], stdin=stdin)
    assert not engine.removed


async def test_output_is_whole_where_an_engine_drops_input_that_nobody_reads(
    autojump_clock: trio.testing.MockClock,
) -> None:
    engine = Cut(Wire(frame(b"one"), frame(b"two"), breaks=True))
    result = await Container(cast(ContainerEngine, engine), SandboxSpec(), set()).exec(["true"], stdin=b"input")
    assert (result.stdout, result.exit_code, result.truncated) == (b"onetwo", 0, False)


async def test_law_8_output_that_is_cut_as_its_command_is_killed_is_flagged(
    autojump_clock: trio.testing.MockClock,
) -> None:
    engine = Cut(Wire(frame(b"one"), frame(b"two", 9), breaks=True), runs=True)
    box = Container(cast(ContainerEngine, engine), SandboxSpec(), set())
    result = await box.exec(["true"], timeout_s=60.0)
    assert (result.stdout, result.timed_out, result.truncated) == (b"onet", True, True)


async def test_law_3_a_process_whose_connection_breaks_has_no_end_of_its_output(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """Its reader would take the end of the output for the end of the process."""
    box = Container(
        cast(ContainerEngine, Cut(Wire(frame(b"one"), breaks=True), runs=True, early=True)), SandboxSpec(), set()
    )
    process = await box.start(["cat"])
    await process.send(b"input")
    assert await process.receive() == b"one"
    with pytest.raises(SandboxLost):
        await process.receive()


class Silent(Gone):
    async def execute(
        self, container: str, argv: Sequence[str], uid: int, env: Mapping[str, str], output_bytes: int
    ) -> Any:
        raise SandboxLost("no engine answers")


async def test_a_host_that_does_not_answer_is_not_asked_what_its_box_died_of() -> None:
    engine = Silent(starved=True)
    with pytest.raises(SandboxLost):
        await Container(cast(ContainerEngine, engine), SandboxSpec(), set()).exec(["true"])
    assert engine.asked_since == []


class Odd(Away):
    async def processes(self, container: str) -> int:
        raise TypeError("object of type 'NoneType' has no len()")


async def test_what_fails_in_a_background_process_for_no_known_reason_ends_it_and_no_worker() -> None:
    engine = Odd(away_s=0.0, output_s=0.0)
    process = await Container(cast(ContainerEngine, engine), SandboxSpec(), set()).start(["true"])
    with pytest.raises(SandboxError, match=r"a background process of a box: TypeError: .* has no len"):
        await process.wait()

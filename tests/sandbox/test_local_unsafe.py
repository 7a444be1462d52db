"""`local-unsafe` keeps the promises that need no wall, warns that it has none, and shows that the red team bites."""

from __future__ import annotations

import os
import warnings
from collections.abc import AsyncGenerator

import pytest
import trio

from agentrl.errors import SandboxError
from agentrl.host.user_warnings import AgentRLWarning
from agentrl.protocols import SandboxSpec
from agentrl.sandbox.host_process import HostProcess
from agentrl.sandbox.local_unsafe import LocalUnsafe
from agentrl.testing.sandbox.case import host_processes

from .promises import WITHOUT_WALLS, keep, named

# Attacks that do no harm to this machine when they succeed.
HARMLESS = (
    "reading the host's files by their paths",
    "peeking at the host's processes through /proc",
    "reaching a server on the host: loopback, every address, abstract sockets",
    "outliving the end of a command by a double fork with a session of its own",
)


@pytest.fixture
async def backend() -> AsyncGenerator[LocalUnsafe]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        backend = LocalUnsafe()
        yield backend
        await backend.aclose()


@pytest.mark.medium
@pytest.mark.parametrize("room", WITHOUT_WALLS)
async def test_keeps_promise(room: str, backend: LocalUnsafe) -> None:
    await keep(backend, WITHOUT_WALLS[room])


@pytest.mark.medium
async def test_red_team_succeeds_where_there_is_no_wall(backend: LocalUnsafe) -> None:
    """The negative control: an attack that could not succeed anywhere would prove nothing about the walls."""
    with pytest.raises(ExceptionGroup) as caught:
        await keep(backend, named(HARMLESS))
    assert len(caught.value.exceptions) == len(HARMLESS)
    assert caught.value.split(AssertionError)[1] is None


async def test_what_escaped_its_command_ends_with_the_backend(backend: LocalUnsafe) -> None:
    marker = f"4323.{os.getpid()}"
    box = await backend.create()
    escape = f"setsid sh -c 'echo away > f; sleep {marker}' >/dev/null 2>&1 & read -r _ < f"
    assert (await box.exec(["sh", "-c", f"mkfifo f; {escape}"])).exit_code == 0
    assert host_processes(marker)
    await backend.aclose()
    assert not host_processes(marker)


async def test_law_8_output_is_whole_also_where_nobody_had_time_to_read_it(
    backend: LocalUnsafe, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that escaped holds the output open, so the reading has a deadline; a busy machine reads nothing."""

    async def reads_nothing(self: HostProcess, stream: object, output: object) -> None:
        await trio.sleep_forever()

    monkeypatch.setattr(HostProcess, "_drain", reads_nothing)
    box = await backend.create()
    result = await box.exec(["sh", "-c", "setsid sleep 600 & printf out; printf err >&2"])
    assert (result.stdout, result.stderr, result.truncated) == (b"out", b"err", False)


async def test_warns_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LocalUnsafe, "_warned", False)
    backend = LocalUnsafe()
    with pytest.warns(AgentRLWarning, match="WITHOUT a sandbox"):
        await backend.create()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        await backend.create()
    await backend.aclose()


async def test_has_no_images(backend: LocalUnsafe) -> None:
    with pytest.raises(SandboxError, match="no images"):
        await backend.create(SandboxSpec(image="debian"))

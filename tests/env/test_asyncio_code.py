"""Tools and environments written with asyncio run beside trio, with its deadlines and cancellations."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from typing import Any

import pytest
import trio
import trio.lowlevel

import agentrl
from agentrl.env.asyncio_code import in_asyncio, uses_asyncio
from agentrl.env.sync_async import call
from agentrl.errors import EnvError, ToolError

LOG: list[str] = []
BEGUN = threading.Event()  # the task that hangs runs


async def fetched(url: str) -> str:
    """As a client does it: tasks, a lock and a timeout of asyncio."""
    lock = asyncio.Lock()

    async def part(text: str) -> str:
        async with lock:
            await asyncio.sleep(0)
            return text

    async with asyncio.timeout(60):
        return "".join(await asyncio.gather(part("page of "), part(url)))


class Browser(agentrl.ToolEnv):
    limits = agentrl.EpisodeLimits(turns=99)

    async def setup(self, task: Any) -> None:
        self.loop = asyncio.get_running_loop()  # what a client session keeps, for as long as it lives

    async def prompt(self, task: Any) -> str:
        return await fetched("prompt")

    async def grade(self) -> float:
        await asyncio.sleep(0)
        return 1.0

    @agentrl.tool(errors=(ValueError,))
    async def open(self, url: str) -> str:
        """Open."""
        assert asyncio.get_running_loop() is self.loop and threading.current_thread() is not threading.main_thread()
        if url == "bad":
            raise ValueError("bad url")
        return await fetched(url)

    @agentrl.tool(timeout_s=2.0)
    async def hang(self) -> str:
        """Hang."""
        BEGUN.set()
        try:
            await asyncio.Event().wait()
        finally:
            LOG.append("cleaned up")
        return ""

    @agentrl.tool
    async def native(self) -> str:
        """Of trio, though it catches an error of asyncio's."""
        with contextlib.suppress(asyncio.TimeoutError, asyncio.CancelledError):
            await trio.lowlevel.checkpoint()
        return "trio"

    def on_text(self, text: str) -> None:
        self.finish()


async def test_an_environment_written_with_asyncio_is_played_under_trio() -> None:
    async with Browser() as env:
        opening, _ = await env.areset(seed=0)
        assert opening[0]["content"] == "page of prompt"
        for name, arguments, content in (
            ("open", {"url": "a"}, "page of a"),
            ("open", {"url": "bad"}, "error: ValueError: bad url"),
            ("native", {}, "trio"),
        ):
            assert (await env.astep(env.call(name, **arguments)))[0][0]["content"] == content
        assert (await env.astep("done"))[4]["outcome"] == 1.0


@pytest.mark.medium
async def test_a_deadline_and_a_cancellation_reach_the_asyncio_task() -> None:
    LOG.clear()
    async with Browser() as env:
        await env.areset(seed=0)
        answer = (await env.astep(env.call("hang")))[0][0]["content"]
        assert answer.startswith("timeout: hang was ended after 2 s") and LOG == ["cleaned up"]
        BEGUN.clear()
        with trio.fail_after(60):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(call, env.hang)
                await trio.to_thread.run_sync(BEGUN.wait, 60)
                nursery.cancel_scope.cancel()
        assert LOG == ["cleaned up"] * 2


class Counter(agentrl.Env):
    """Its own areset and astep, with what they call."""

    async def areset(self, *, seed: int | None = None, options: Any = None) -> Any:
        await super().areset(seed=seed)
        self.count = 0
        return ({"role": "user", "content": await self._shown()},), {}

    async def astep(self, action: str) -> Any:
        self.count += 1
        return ({"role": "user", "content": await self._shown()},), 0.0, self.count > 1, False, {"outcome": 1.0}

    async def _shown(self) -> str:
        await asyncio.sleep(0)
        return str(self.count)


def test_reset_and_step_of_asyncio_from_both_sides() -> None:
    env = Counter()
    assert env.reset(seed=0)[0][0]["content"] == "0" and env.step("a")[0][0]["content"] == "1"
    env.close()

    async def played() -> str:
        async with Counter() as env:
            await env.areset(seed=0)
            return (await env.astep("a"))[0][0]["content"]

    assert trio.run(played) == "1"


def hidden(seconds: float) -> Any:
    return getattr(asyncio, "sle" + "ep")(seconds)


async def unseen() -> str:
    LOG.append("began")
    await hidden(0)
    return "ok"


@agentrl.tool(asyncio=True)
async def stated() -> str:
    """Its code does not show it."""
    await hidden(0)
    return "ok"


class Stated(agentrl.Env):
    async_library = "asyncio"

    async def astep(self, action: str) -> Any:
        await hidden(0)
        return (), 0.0, True, False, {}


async def test_what_the_code_does_not_show_is_said_in_one_line_or_by_the_author() -> None:
    LOG.clear()
    with pytest.raises(EnvError, match=r"^unseen is written with asyncio.*: say @tool\(asyncio=True\)"):
        await call(unseen)
    assert LOG == ["began"], "nothing is done twice"
    assert await call(stated) == "ok"
    assert (await Stated().astep("a"))[2]


async def test_errors_of_asyncio_code_are_those_of_its_author() -> None:
    async def leaves() -> None:
        await asyncio.sleep(0)
        raise SystemExit(3)

    async def cancels_itself() -> None:
        await asyncio.sleep(0)
        raise asyncio.CancelledError

    async def refuses() -> None:
        await asyncio.sleep(0)
        raise ToolError("no")

    async def sleeps_under_trio() -> None:
        await asyncio.sleep(0)
        await trio.lowlevel.checkpoint()

    for function, kind, text in (
        (leaves, EnvError, "sys.exit"),
        (cancels_itself, EnvError, "was cancelled by its own"),
        (refuses, ToolError, "no"),
        (sleeps_under_trio, EnvError, "awaits code of trio"),
    ):
        with pytest.raises(kind, match=text):
            await call(function)
    assert await in_asyncio(fetched, "b") == "page of b"  # the loop lives on


def test_code_says_what_it_is_written_with() -> None:
    async def imports_it() -> None:
        from asyncio import sleep

        await sleep(0)

    async def names_a_helper() -> str:
        return await fetched("a")

    async def of_trio() -> None:
        await trio.lowlevel.checkpoint()

    assert [uses_asyncio(each) for each in (imports_it, names_a_helper, of_trio)] == [True, True, False]

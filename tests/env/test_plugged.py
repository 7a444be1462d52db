"""Tools that are named in a run file: functions, classes, servers, in a box if they need one, and by entry point."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import trio
from each_case import each_case

import agentrl
from agentrl import registry
from agentrl.env import FunctionTool, ToolEnv
from agentrl.errors import ConfigError, InfrastructureError, UnknownIdError, UsageError
from agentrl.protocols import Sandbox, ToolResult
from agentrl.testing.fake_sandbox import FakeBackend
from agentrl_environments.repo_repair import RepoRepair

HERE = f"{Path(__file__)}:"
MCP = [sys.executable, str(Path(__file__).parents[1] / "tools" / "mcp_server.py")]


class Talk(ToolEnv):
    blocking = False
    graded = False

    def prompt(self, task: Mapping[str, Any]) -> str:
        return "Use your tools."


def shout(text: str, times: int = 1) -> str:
    """Say it louder."""
    return text.upper() * times


class Keep:
    """A tool that works in the box of the episode."""

    name, parallel = "keep", False
    schema = {"name": "keep", "description": "Keep a file.", "parameters": {"type": "object"}}  # noqa: RUF012

    def __init__(self, sandbox: Sandbox, *, path: str = "kept") -> None:
        self._sandbox, self._path = sandbox, path
        self.closed = 0

    async def call(self, arguments: Mapping[str, Any]) -> ToolResult:
        await self._sandbox.write(self._path, b"x")
        return ToolResult(content="kept")

    async def aclose(self) -> None:
        self.closed += 1


class Plain:
    """A tool as its author first writes it: a plain `call` that returns a text."""

    name, parallel = "plain", False
    schema = {"name": "plain", "description": "Say a name.", "parameters": {"type": "object"}}  # noqa: RUF012

    def call(self, arguments: Mapping[str, Any]) -> str:
        return arguments["name"].upper()


class Hasty(Plain):
    parallel = property()


class Renamed(Plain):
    name = "renamed"


class Server:
    """An executor elsewhere: what it offers is known once it runs."""

    made: list[Server] = []  # noqa: RUF012

    def __init__(self, *, fails: bool = False) -> None:
        self._fails, self.said = fails, [""]
        self.made.append(self)

    async def open(self) -> list[FunctionTool]:
        self.said = ["open"]
        if self._fails:
            raise InfrastructureError("it does not start")
        return [FunctionTool(shout)]

    async def aclose(self) -> None:
        self.said.append("closed")


@pytest.fixture
def servers() -> list[Any]:
    """What the reference to `Server` has made in this test, which is another class than ours: a file is a module."""
    made: list[Any] = registry.load_reference(f"{HERE}Server").made  # pyright: ignore[reportFunctionMemberAccess]
    made.clear()
    return made


@pytest.fixture
def backend() -> Iterator[FakeBackend]:
    made = FakeBackend()
    registry.register("sandboxes", "plugged-fake", lambda: made)
    yield made
    del registry._registered["sandboxes", "plugged-fake"]  # pyright: ignore[reportPrivateUsage]


async def told(env: ToolEnv, name: str, **arguments: Any) -> str:
    observation, *_ = await env.astep(env.call(name, **arguments))
    return observation[0]["content"]


async def test_a_function_is_a_tool_by_itself_by_reference_and_as_it_is() -> None:
    for named in (shout, f"{HERE}shout", FunctionTool(shout)):
        async with Talk(tools=[named, "calculator"]) as env:
            await env.areset(seed=0)
            assert [schema["name"] for schema in env.schemas] == ["shout", "calculator"]
            assert await told(env, "shout", text="ab", times=2) == "ABAB"
            assert await told(env, "calculator", expression="6 * 7") == "42"


async def test_a_box_is_opened_for_who_asks_for_one_once_an_episode(backend: FakeBackend) -> None:
    box = {"sandbox": "plugged-fake", "image": "theirs", "wall_s": 3.0}
    async with Talk(tools=[f"{HERE}shout"], box=box) as env:
        await env.areset(seed=0)
    assert backend.boxes == []
    env = Talk(tools=[{"id": f"{HERE}Keep", "path": "a"}, f"{HERE}shout"], box=box)
    for episode in range(2):
        await env.areset(seed=episode)
        assert await told(env, "keep") == "kept"
    first, second = backend.boxes
    assert first.closed and not second.closed and first.files == second.files == {"a": b"x"}
    assert (first.spec.image, first.spec.limits.wall_s) == ("theirs", 3.0)
    await env.aclose()
    await env.aclose()
    assert second.closed and backend.closed


async def test_a_server_lives_as_long_as_its_episode(servers: list[Any]) -> None:
    env = Talk(tools=[f"{HERE}Server"])
    assert env.schemas == []
    for _ in range(2):
        await env.areset(seed=0)
        assert await told(env, "shout", text="a") == "A"
    await env.aclose()
    assert [server.said for server in servers] == [["open", "closed"]] * 2 and env.schemas == []


async def test_a_server_that_fails_costs_the_episode_and_is_closed(servers: list[Any], backend: FakeBackend) -> None:
    tools = [f"{HERE}Keep", {"id": f"{HERE}Server", "fails": True}]
    env = Talk(tools=tools, box={"sandbox": "plugged-fake"})
    with pytest.raises(InfrastructureError, match="does not start"):
        await env.areset(seed=0)
    await env.aclose()
    assert servers[0].said == ["open", "closed"] and backend.boxes[0].closed


@each_case(
    ("tools", "box", "kind", "said"),
    [
        (["calculater"], {}, UnknownIdError, "calculator"),
        ([{"allow": []}], {}, ConfigError, "a table with one"),
        (["fetch"], {}, ConfigError, "missing a required argument: 'allow'"),
        ([{"id": "shell", "colour": 1}], {}, ConfigError, "'colour'"),
        ([{"id": "calculator", "sandbox": True}], {}, ConfigError, "tools.calculator.sandbox"),
        ("calculator", {}, ConfigError, r"^tools = 'calculator': give a list of tools$"),
        ([], "docker", ConfigError, r"^box = 'docker': give a table"),
        ([], {"sandbox": 3}, ConfigError, r"^box.sandbox = 3: give the id"),
        ([], {"ready": "4"}, ConfigError, r"^box.ready = '4': give how many"),
        ([], {"ready": -1}, ConfigError, r"^box.ready = -1: give how many"),
        ([], {"image": 5}, ConfigError, r"^box.image = 5: give the name of an image"),
        ([], {"wall_s": "60"}, ConfigError, r"^box.wall_s = '60': give a finite number above 0$"),
        ([], {"cpus": math.inf}, ConfigError, r"^box.cpus = inf: give a finite number above 0$"),
        ([], {"pids": -1}, ConfigError, r"^box.pids = -1: give a whole number above 0$"),
        ([], {"pids": 64.5}, ConfigError, r"^box.pids = 64.5: give a whole number above 0$"),
        ([], {"memory_bytes": 1e9}, ConfigError, r"^box.memory_bytes = 1000000000.0: give a whole number above 0$"),
        ([], {"memory_bytes": math.inf}, ConfigError, r"^box.memory_bytes = inf: give a whole number above 0$"),
        ([], {"disk_bytes": math.nan}, ConfigError, r"^box.disk_bytes = nan: give a whole number above 0$"),
        ([], {"memory": 3}, ConfigError, r"^box.memory = 3: give fields of Limits \(wall_s, cpu_s, .*\)$"),
        ([{"id": f"{HERE}shout", "times": 2}], {}, ConfigError, "takes no settings"),
        ([f"{HERE}HERE"], {}, UsageError, "is no tool"),
        (["shell"], {"memory": 1}, ConfigError, "fields of Limits"),
        (["calculator", "calculator"], {}, UsageError, "two tools named"),
    ],
)
def test_what_cannot_be_is_refused_when_the_environment_is_made(tools: Any, box: Any, kind: Any, said: str) -> None:
    with pytest.raises(kind, match=said):
        Talk(tools=tools, box=box)


def test_a_package_offers_a_tool_by_entry_point(tmp_path: Path) -> None:
    (tmp_path / "their_words.py").write_text(
        'def look_up(word: str) -> str:\n    """Look up."""\n    return word[::-1]\n'
    )
    metadata = tmp_path / "their_words-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: their-words\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[agentrl.tools]\nlook_up = their_words:look_up\n")
    code = (
        "import agentrl; env = agentrl.make('agentrl/Calculator-v0', tools=['look_up']); env.reset(seed=0)\n"
        "print(env.step(env.call('look_up', word='abc'))[0][0]['content']); env.close()"
    )
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.stdout == "cba\n", done.stderr


@pytest.mark.bubblewrap
async def test_a_session_in_a_box_stays_for_the_episode_and_no_longer() -> None:
    env = agentrl.make("agentrl/Retrieval-v0", tools=["python", "shell"], box={"wall_s": 60.0})
    await env.areset(seed=1)
    assert await told(env, "python", code="n = 20; open('f', 'w').write('hi')") == "2"
    assert await told(env, "python", code="n + 1") == "21"
    assert "hi" in await told(env, "shell", command="cat f")
    await env.areset(seed=1)
    assert "NameError" in await told(env, "python", code="n")
    assert "No such file" in await told(env, "shell", command="cat f")
    await env.aclose()


@pytest.mark.bubblewrap
async def test_named_tools_work_in_the_box_that_the_environment_opens() -> None:
    async with RepoRepair(tools=["shell"]) as env:
        await env.areset(seed=1)
        assert "README.md" in await told(env, "shell", command="ls")


async def test_an_mcp_server_is_named_and_dies_with_the_episode() -> None:
    pytest.importorskip("mcp")
    env = Talk(tools=[{"id": "mcp", "command": MCP, "start_s": 300.0}])
    await env.areset(seed=0)
    assert {"add", "pid"} <= {schema["name"] for schema in env.schemas}
    assert json.loads(await told(env, "add", a=2, b=3)) == 5
    descriptor = os.pidfd_open(int(await told(env, "pid")))
    try:
        await env.aclose()
        with trio.fail_after(300):
            await trio.lowlevel.wait_readable(descriptor)
    finally:
        os.close(descriptor)


async def test_a_run_may_say_what_the_model_calls_a_tool() -> None:
    named = [
        {"id": "calculator", "name": "compute"},
        {"id": f"{HERE}shout", "name": "yell"},
        {"id": f"{HERE}shout", "name": "scream"},
        {"id": f"{HERE}Keep", "name": "note", "path": "noted"},
    ]
    registry.register("sandboxes", "test_plugged/fake", FakeBackend)
    env = Talk(tools=named, box={"sandbox": "test_plugged/fake"})
    await env.areset(seed=0)
    assert [schema["name"] for schema in env.schemas] == ["compute", "yell", "scream", "note"]
    assert await told(env, "compute", expression="6 * 7") == "42"
    assert await told(env, "yell", text="hi", times=2) == "HIHI"
    assert await told(env, "note") == "kept" and await env.box.read("noted") == b"x"
    assert "no tool named" in await told(env, "shout", text="hi")
    assert "text" in await told(env, "scream")  # the arguments are checked as the tool's own
    await env.aclose()


def test_a_name_that_no_tool_can_have_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"^tools.calculator.name = 'my tool': give at most 64 letters, digits, _ and -"
    ):
        Talk(tools=[{"id": "calculator", "name": "my tool"}])
    with pytest.raises(ConfigError, match=r"^tools.*Server.name = 'x': its tools name themselves"):
        Talk(tools=[{"id": f"{HERE}Server", "name": "x"}])


def test_the_checker_finds_nothing() -> None:
    assert not agentrl.check_env(lambda: Talk(tools=["calculator", f"{HERE}Server"])).findings


@pytest.mark.parametrize("blocking", [True, False])
def test_a_plain_call_and_a_text_for_a_result_are_taken(blocking: bool) -> None:
    env = type("Talk", (Talk,), {"blocking": blocking})(tools=[Plain()])
    env.reset(seed=1)
    messages, *_ = env.step(env.call("plain", name="ann"))  # an argument of that name too
    assert messages[0]["content"] == "ANN"
    env.close()


def test_what_is_no_tool_says_what_it_lacks() -> None:
    with pytest.raises(UsageError, match=r"Hasty object at .* is no tool: it has no parallel$"):
        Talk(tools=[f"{HERE}Hasty"])
    with pytest.raises(UsageError, match=r"^the tool 'renamed' is named 'plain' in its schema: give both one name$"):
        Talk(tools=[Renamed()])

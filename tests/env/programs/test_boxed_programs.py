"""A command in a box: it reaches its model and nothing else, leaves files to grade, and ends with the box."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import trio

from agentrl.config.sections import BubblewrapSettings, Sandboxes
from agentrl.env.agent_programs import ProgramEnv
from agentrl.errors import ConfigError, EnvError, SandboxError
from agentrl.protocols import SandboxSpec
from agentrl.sandbox import backend
from agentrl.sandbox.bubblewrap.backend import Bubblewrap
from agentrl.sandbox.network_policy import forwarded

PROGRAM = """
import json, os, socket, sys, time, urllib.error, urllib.parse, urllib.request

opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
base = os.environ["OPENAI_BASE_URL"]

def ask(messages, url=base):
    request = urllib.request.Request(url + "/chat/completions", json.dumps({"messages": messages}).encode())
    try:
        return json.load(opener.open(request, timeout=300))["choices"][0]["message"]
    except urllib.error.HTTPError as error:
        return error.code

def connects(port):
    try:
        socket.create_connection(("127.0.0.1", port), timeout=60).close()
    except OSError:
        return False
    return True

task = json.loads(os.environ["AGENTRL_TASK"])
messages = [{"role": "user", "content": task["q"]}]
messages.append(ask(messages))
url = urllib.parse.urlsplit(base)
found = [connects(task["port"]), connects(url.port), ask([], base.replace(url.path, "/another/v1"))]
messages.append({"role": "user", "content": json.dumps([found, open("given").read(), sys.stdin.read()])})
answer = ask(messages)["content"]
open("answer", "w").write(answer)
print(answer)
if answer == "stay": time.sleep(600)
sys.exit(3)
"""


class Boxed(ProgramEnv):
    def __init__(self, program: Any = ("python3", "program.py"), **settings: Any) -> None:
        super().__init__(list(program), **{"sandbox": "bubblewrap", **settings})
        self.results = []

    def box_files(self, task: Mapping[str, Any]) -> Mapping[str, bytes]:
        return {"program.py": PROGRAM.encode(), "given": b"a file"}

    async def grade(self, task: Mapping[str, Any], result: Any) -> bool:
        self.results.append(result)
        return await self.box.read("answer") == b"fine"


@pytest.mark.bubblewrap
async def test_a_command_in_a_box_reaches_its_model_and_nothing_else(tmp_path: Path) -> None:
    listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
    port = listeners[0].socket.getsockname()[1]
    env: Any
    async with Boxed() as env:
        opening, _ = await env.areset(seed=0, options={"q": "Hello?", "port": port})
        assert [message["content"] for message in opening] == ["Hello?"]
        large = "x" * 3_000_000  # more than any buffer on the way
        observation, *_, info = await env.astep(large)
        assert info == {}, "what came back through the relay is what was said"
        assert observation[0]["content"] == '[[false, true, 404], "a file", ""]'
        *_, terminated, _, info = await env.astep("fine")
        assert terminated and info == {"stop_reason": "done", "exit_code": 3, "outcome": 1.0, "success": True}
        assert env.results[0].stdout == b"fine\n"
        with pytest.raises(SandboxError, match="no episode has a box"):
            await env.box.read("answer")
    await listeners[0].aclose()


@pytest.mark.bubblewrap
async def test_closing_ends_a_boxed_program_and_its_box() -> None:
    env = Boxed()
    await env.areset(seed=0, options={"q": "?", "port": 9})
    box: Any = env.box.box
    await env.aclose()
    assert not await box.alive()
    with pytest.raises(SandboxError, match="closed"):
        await box.exec(["true"])


@pytest.mark.bubblewrap
async def test_what_a_policy_leaves_out_has_earned_nothing() -> None:
    class Forgets(Boxed):
        async def grade(self, task: Mapping[str, Any], result: Any) -> bool:
            return bool(await self.box.read("no such file"))

    async with Forgets() as env:
        await env.areset(seed=0, options={"q": "?", "port": 9})
        await env.astep("x")
        *_, terminated, _, info = await env.astep("y")
        assert terminated and (info["outcome"], info["success"]) == (0.0, False)


@pytest.mark.bubblewrap
async def test_a_program_that_is_not_in_the_box_is_named() -> None:
    async with Boxed(["no-such-agent"]) as env:
        with pytest.raises(EnvError, match=r"exit code 127: .*no-such-agent"):
            await env.areset(seed=0, options={})


@pytest.mark.bubblewrap
async def test_a_connection_to_a_port_that_nobody_serves_ends_alone() -> None:
    listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
    port = listeners[0].socket.getsockname()[1]
    await listeners[0].aclose()
    look = "import urllib.request as r; r.build_opener(r.ProxyHandler({})).open('http://127.0.0.1:3128/', timeout=60)"
    boxes = Bubblewrap()
    try:
        box = await boxes.create()
        async with forwarded(box, port) as way:
            results = [await box.exec(way.argv(["python3", "-c", look])) for _ in range(2)]
            after = await box.exec(way.argv(["echo", "still here"]))
    finally:
        await boxes.aclose()
    assert [result.exit_code for result in results] == [1, 1] and after.stdout == b"still here\n"


def test_settings_of_a_box_are_for_commands_in_one() -> None:
    with pytest.raises(ConfigError, match="sandbox = None: image and box are of a sandbox"):
        ProgramEnv(["agent"], box={"pids": 9})
    with pytest.raises(ConfigError, match="a function runs in this process"):
        ProgramEnv(lambda session: None, sandbox="bubblewrap")
    with pytest.raises(ConfigError, match=r"box\.memory: 1|box\.memory = 1"):
        ProgramEnv(["agent"], sandbox="bubblewrap", box={"memory": 1})


@pytest.mark.bubblewrap
async def test_a_run_file_shows_folders_of_the_machine_to_its_boxes(tmp_path: Path) -> None:
    (tmp_path / "agent").write_text("#!/bin/sh\nexit 7\n")
    (tmp_path / "agent").chmod(0o755)
    tmp_path.chmod(0o755)  # noqa: ASYNC240
    arguments = Sandboxes(bubblewrap=BubblewrapSettings(readonly={str(tmp_path): "/opt/agents"})).arguments()
    boxes = backend("bubblewrap", **arguments["bubblewrap"])
    try:
        box = await boxes.create(SandboxSpec())
        result = await box.exec(["/opt/agents/agent"])
        written = await box.exec(["touch", "/opt/agents/more"])
    finally:
        await boxes.aclose()
    assert result.exit_code == 7 and written.exit_code != 0
    with pytest.raises(ConfigError, match=r"sandbox\.bubblewrap\.readonly = .* give absolute paths"):
        BubblewrapSettings(readonly={"agents": "/opt/agents"})


LARGE = """
import json, os, urllib.error, urllib.request
opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
def ask(body):
    try:
        answer = json.load(opener.open(urllib.request.Request(url, body), timeout=300))
        return answer["choices"][0]["message"]["content"]
    except urllib.error.HTTPError as error:
        return [error.code, json.load(error)["error"]["message"]]
first = {"role": "user", "content": "q"}
ask(json.dumps({"messages": [first]}).encode())
refused = ask(b'{"messages":[{}' + b",{}" * (3 << 20) + b"]}")
ask(json.dumps({"messages": [{"role": "user", "content": json.dumps(refused)}]}).encode())
"""


async def test_law_3_a_body_beyond_the_bound_is_refused_and_the_program_goes_on() -> None:
    """9 MiB of empty messages took the worker's loop 10 s; and a client in a box sends all of it before it reads."""

    class Sends(Boxed):
        def box_files(self, task: Mapping[str, Any]) -> Mapping[str, bytes]:
            return {"program.py": LARGE.encode()}

    async with Sends() as env:
        env.observation_bytes = 100_000
        await env.areset(seed=0)
        *_, info = await env.astep("a")
        assert info["history"][0]["content"] == '[413, "the body is larger than 4194304 bytes"]'
        *_, terminated, _, info = await env.astep("b")
        assert terminated and info["exit_code"] == 0

"""Agent programs as environments, spoken to over real sockets: the conversation, forks, ends, and what stays behind."""

import argparse
import asyncio
import inspect
import json
import os
import signal
import sys
from decimal import Decimal
from pathlib import Path

import httpx
import numpy as np
import pytest
import trio
import trio.testing
from each_case import each_case
from gymnasium.error import ResetNeeded

import agentrl
from agentrl import notices
from agentrl.env.agent_programs import ProgramEnv
from agentrl.env.agent_programs.branches import Branches
from agentrl.env.agent_programs.model_apis import Conversation, Reply
from agentrl.env.tools.calls import ToolCall
from agentrl.env.tools.parsers import get_format
from agentrl.errors import EnvError, SandboxError, UsageError
from tests.parts.kill_sweep import sweep

HERMES = get_format("hermes")
CHAT, RESPONSES, ANTHROPIC = "/v1/chat/completions", "/v1/responses", "/v1/messages"
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Look outside.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}


async def ask(session, path, **body):
    async with httpx.AsyncClient(base_url=session.base_url, timeout=60, trust_env=False) as client:
        answer = await client.post(path.removeprefix("/"), json=body)
        return answer.status_code, answer.json()


def user(text):
    return {"role": "user", "content": text}


async def chatty(session):
    """Asks twice, with a tool in between, as a plain loop would; returns whether the last word is right."""
    messages = [{"role": "developer", "content": "Be brief."}, user(f"Weather in {session.task['city']}?")]
    _, first = await ask(session, CHAT, messages=messages, tools=[WEATHER], model="m")
    message = first["choices"][0]["message"]
    messages.append(message)
    for call in message.get("tool_calls") or []:
        city = json.loads(call["function"]["arguments"])["city"]
        messages.append({"role": "tool", "tool_call_id": call["id"], "content": f"Rain in {city}."})
    _, second = await ask(session, CHAT, messages=messages, tools=[WEATHER], model="m")
    return second["choices"][0]["message"]["content"] == "It rains."


async def test_a_program_is_played_request_by_request():
    async with ProgramEnv(chatty) as env:
        assert env.tool_schemas() == []
        observation, info = await env.areset(seed=0, options={"city": "Bergen"})
        assert observation == ({"role": "system", "content": "Be brief."}, user("Weather in Bergen?")) and info == {}
        assert env.tool_schemas() == [WEATHER]
        call = HERMES.write(ToolCall("weather", {"city": "Bergen"}))
        observation, reward, terminated, truncated, info = await env.astep(f"Let me look. {call}")
        assert observation == (
            {"name": "weather", "role": "tool", "content": "Rain in Bergen.", "tool_call_id": "c00010000"},
        )
        assert (reward, terminated, truncated, info) == (0.0, False, False, {})
        observation, _, terminated, _, info = await env.astep("It rains.")
        assert observation == () and terminated
        assert info == {"stop_reason": "done", "outcome": 1.0, "success": True}
        with pytest.raises(ResetNeeded):
            await env.astep("more")


async def test_a_broken_call_goes_to_the_program_as_text():
    async with ProgramEnv(chatty) as env:
        await env.areset(seed=0, options={"city": "Bergen"})
        observation, *_ = await env.astep('<tool_call>{"name": "weather", </tool_call>')
        assert observation == (), "the program had nothing to add"
        *_, terminated, _, info = await env.astep("It rains.")
        assert terminated and info["success"]


async def forgetful(session):
    """Keeps only its last three messages: history is rewritten."""
    messages = [user("Count from 1.")]
    for _ in range(3):
        _, answer = await ask(session, CHAT, messages=messages[-3:])
        messages += [answer["choices"][0]["message"], user("Next?")]


async def test_a_program_that_rewrites_history_makes_a_fork():
    async with ProgramEnv(forgetful) as env:
        await env.areset(seed=0)
        observation, *_, info = await env.astep("1")
        assert observation == (user("Next?"),) and info == {}
        observation, *_, info = await env.astep("2")
        assert observation == ()
        shorter = [user("Next?"), {"role": "assistant", "content": "2"}, user("Next?")]
        assert info == {"history": shorter, "branch": {"kind": "compaction", "turn": 1}}
        *_, terminated, _, info = await env.astep("3")
        assert terminated and info == {"stop_reason": "done"}


def conversation(*texts, tools=()):
    roles = ("user", "assistant")
    return Conversation(tuple({"role": roles[i % 2], "content": text} for i, text in enumerate(texts)), tools)


def following(before, reply, now):
    branches = Branches()
    branches.add(before, reply)
    return branches.following(now)


@each_case(
    ("now", "news"),
    [
        (conversation("q", "a", "next"), ("next",)),
        (conversation("q", " a\n", "next"), ("next",)),
        (conversation("q", "a"), ()),
        (conversation("q", "b", "next"), None),
        (conversation("other", "a", "next"), None),
        (conversation("q"), None),
        (conversation("q", "a", "next", tools=(WEATHER,)), None),
    ],
)
def test_what_a_request_adds(now, news):
    found, info = following(conversation("q"), Reply("1", "a"), now)
    assert (None if info else tuple(message["content"] for message in found)) == news


def test_calls_are_compared_by_value_not_by_id():
    reply = Reply("1", "", (ToolCall("f", {"a": 1}),))
    sent = {"role": "assistant", "content": "", "tool_calls": [{"id": "mine", "function": {"name": "f"}}]}
    sent["tool_calls"][0]["function"]["arguments"] = '{ "a" : 1 }'
    assert following(conversation("q"), reply, Conversation((*conversation("q").messages, sent))) == ((), {})
    sent["tool_calls"][0]["function"]["arguments"] = '{"a": 2}'
    _, info = following(conversation("q"), reply, Conversation((*conversation("q").messages, sent)))
    assert info["branch"]["kind"] == "new"


# --- the other dialects


async def responder(session):
    tools = [{"type": "function", **WEATHER["function"]}]
    _, first = await ask(session, RESPONSES, input="Weather in Rome?", instructions="Be brief.", tools=tools)
    (call,) = [item for item in first["output"] if item["type"] == "function_call"]
    output = {"type": "function_call_output", "call_id": call["call_id"], "output": "Sun."}
    _, second = await ask(
        session,
        RESPONSES,
        input=[output],
        instructions="Be brief.",
        tools=tools,
        previous_response_id=first["id"],
    )
    return second["output"][0]["content"][0]["text"]


async def claude(session):
    tools = [{"name": "weather", "description": "Look outside.", "input_schema": WEATHER["function"]["parameters"]}]
    head = {"system": "Be brief.", "tools": tools, "max_tokens": 100, "model": "m"}
    messages = [user([{"type": "text", "text": "Weather in Rome?"}])]
    _, first = await ask(session, ANTHROPIC, messages=messages, **head)
    assert first["stop_reason"] == "tool_use"
    messages.append({"role": "assistant", "content": first["content"]})
    use = first["content"][-1]
    messages.append(user([{"type": "tool_result", "tool_use_id": use["id"], "content": "Sun."}]))
    _, second = await ask(session, ANTHROPIC, messages=messages, **head)
    return second["content"][0]["text"]


@pytest.mark.parametrize("program", [responder, claude])
async def test_the_other_apis_carry_the_same_conversation(program):
    results = []

    class Keeps(ProgramEnv):
        def grade(self, task, result):
            results.append(result)
            return True

    async with Keeps(program) as env:
        observation, _ = await env.areset(seed=0)
        assert observation == ({"role": "system", "content": "Be brief."}, user("Weather in Rome?"))
        assert env.tool_schemas()[0]["function"] == WEATHER["function"]
        observation, *_, info = await env.astep("I look. " + HERMES.write(ToolCall("weather", {"city": "Rome"})))
        assert (
            observation == ({"name": "weather", "role": "tool", "content": "Sun.", "tool_call_id": "c00010000"},)
            and info == {}
        )
        *_, terminated, _, info = await env.astep("It shines.")
        assert terminated and results == ["It shines."]


async def test_what_is_not_served_is_said():
    answers = []

    async def program(session):
        answers.append(await ask(session, CHAT, messages=[user("x")], n=2))
        answers.append(await ask(session, CHAT, messages="x"))
        answers.append(await ask(session, "/v1/embeddings", input="x"))
        answers.append(await ask(session, RESPONSES, input="x", previous_response_id="resp_none"))
        async with httpx.AsyncClient(base_url=session.base_url, timeout=60, trust_env=False) as client:
            answers.append(((await client.get("v1/models")).status_code, {}))
            answers.append(((await client.post("v1/messages", content=b"{")).status_code, {}))
            other = session.base_url.replace(session.api_key, "0" * 32)
            answers.append(((await client.post(f"{other}{CHAT}", json={})).status_code, {}))
        await ask(session, CHAT, messages=[user("x")])

    async with ProgramEnv(program) as env:
        await env.areset(seed=0)
        assert [status for status, _ in answers] == [400, 400, 404, 400, 200, 400, 404]
        assert "n must be 1" in answers[0][1]["error"]["message"]


def deep(levels):
    return [] if levels == 0 else [deep(levels - 1)]


HOSTILE = [
    (CHAT, {"messages": [user("\udcff")]}),
    (CHAT, {"messages": [{"role": "", "content": "x"}]}),
    (CHAT, {"messages": [{"role": "narrator", "content": "x"}]}),
    (CHAT, {"messages": [{"role": "tool", "content": [5]}]}),
    (CHAT, {"messages": [user("x"), {"role": "assistant", "content": "", "tool_calls": [{"x": float("nan")}]}]}),
    (CHAT, {"messages": [user("x"), {"role": "assistant", "content": "", "tool_calls": 5}]}),
    (CHAT, {"messages": [user("x")], "stop": 5}),
    (CHAT, {"messages": [user("x")], "stop": ["x"] * 65}),
    (CHAT, {"messages": [user("x")], "tools": [{"type": "function"}]}),
    (CHAT, {"messages": [user("x")], "tools": [{"type": "function", "function": {"name": "\udcff"}}]}),
    (
        CHAT,
        {"messages": [user("x")], "tools": [{"type": "function", "function": {"name": "f", "parameters": deep(99)}}]},
    ),
    (RESPONSES, {"input": [5]}),
    (RESPONSES, {"input": "x", "previous_response_id": []}),
    (ANTHROPIC, {"messages": [user("x")], "stop_sequences": [1]}),
    (ANTHROPIC, {"messages": [user("x")], "tools": [{"input_schema": {}, "name": 1}]}),
    (ANTHROPIC, {"messages": [user([5])]}),
]


async def test_law_3_what_a_policy_makes_its_program_send_is_no_failure_of_the_environment():
    """It may say anything, and a program may send it on."""
    answers = []

    async def program(session):
        async with httpx.AsyncClient(base_url=session.base_url, timeout=60, trust_env=False) as client:
            _, first = await ask(session, CHAT, messages=[user("x")])
            said = first["choices"][0]["message"]
            for path, body in HOSTILE:
                answer = await client.post(path.removeprefix("/"), content=json.dumps(body))
                answers.append((answer.status_code, answer.json()["error"]["message"], body))
            said["tool_calls"] = [{"function": {"name": "f", "arguments": "[" * 3_000}}]
            await ask(session, CHAT, messages=[user("x"), said, user("y")])
        return False

    async with ProgramEnv(program) as env:
        await env.areset(seed=0)
        observation, *_, info = await env.astep("wrong")
        assert [(status, bool(text)) for status, text, _ in answers] == [(400, True)] * len(HOSTILE), answers
        assert observation == () and len(info["history"]) == 3
        *_, terminated, _, info = await env.astep("wrong")
        assert terminated and (info["outcome"], info["success"]) == (0.0, False)


async def test_streams_and_stops():
    got = []

    async def program(session):
        body = {
            "messages": [user("x")],
            "stream": True,
            "stop": ["Observation:"],
            "stream_options": {"include_usage": 1},
        }
        async with (
            httpx.AsyncClient(base_url=session.base_url, timeout=60, trust_env=False) as client,
            client.stream("POST", "v1/chat/completions", json=body) as answer,
        ):
            got.extend([line async for line in answer.aiter_lines() if line])

    async with ProgramEnv(program) as env:
        await env.areset(seed=0)
        await env.astep("I act.\nObservation: made up")
    chunks = [json.loads(line.removeprefix("data: ")) for line in got[:-1]]
    assert got[-1] == "data: [DONE]"
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": "I act.\n"}
    assert chunks[1]["choices"][0]["finish_reason"] == "stop" and chunks[2]["usage"]["total_tokens"] == 0


# --- ends


async def test_requests_side_by_side_are_answered_one_by_one():
    async def program(session):
        texts = {}

        async def branch(name):
            _, answer = await ask(session, CHAT, messages=[user(name)])
            texts[name] = answer["choices"][0]["message"]["content"]

        async with trio.open_nursery() as nursery:
            nursery.start_soon(branch, "a")
            nursery.start_soon(branch, "b")
        return texts == {"a": "answer a", "b": "answer b"}

    async with ProgramEnv(program) as env:
        observation, _ = await env.areset(seed=0)
        *_, info = await env.astep(f"answer {observation[0]['content']}")
        (other,) = info["history"]
        *_, terminated, _, info = await env.astep(f"answer {other['content']}")
        assert terminated and info["success"]


async def test_a_program_that_fails_is_named_with_its_cause():
    async def fails(session):
        await ask(session, CHAT, messages=[user("x")])
        raise ZeroDivisionError("oh")

    async with ProgramEnv(fails) as env:  # it has read what the policy wrote: the policy could have caused it
        await env.areset(seed=0)
        _, _, terminated, _, info = await env.astep("y")
        assert terminated and (info["outcome"], info["success"]) == (0.0, False)
        assert info["program_error"] == "ZeroDivisionError: oh"

    async def host_fails(session):
        await ask(session, CHAT, messages=[user("x")])
        raise SandboxError("the host of the box failed")

    async with ProgramEnv(host_fails) as env:
        await env.areset(seed=0)
        with pytest.raises(SandboxError, match="the host of the box failed"):
            await env.astep("y")

    async def fails_first(session):
        raise ZeroDivisionError("oh")

    async with ProgramEnv(fails_first) as env:
        with pytest.raises(EnvError, match="ended before its first request: ZeroDivisionError: oh"):
            await env.areset(seed=0)

    async def asks_nothing(session):
        return 3

    async with ProgramEnv(asks_nothing) as env:
        with pytest.raises(EnvError, match="ended before its first request: it returned 3"):
            await env.areset(seed=0)


def leave(session):
    argparse.ArgumentParser().parse_args(["--unknown"])


async def leave_from_a_nursery(session):
    async with trio.open_nursery() as nursery:
        nursery.start_soon(trio.sleep_forever)
        leave(session)


def cancel(session):
    raise asyncio.CancelledError


@each_case(
    ("leaves", "why"),
    [
        (leave, "RuntimeError: the program called sys.exit(2)"),
        (leave_from_a_nursery, "RuntimeError: the program called sys.exit(2)"),
        (cancel, "RuntimeError: the program raised CancelledError: "),
        (lambda session: sys.exit(), None),
    ],
)
async def test_law_3_a_program_that_exits_ends_its_episode_and_not_the_worker(leaves, why):
    async def program(session):
        await ask(session, CHAT, messages=[user("x")])
        answer = leaves(session)
        return await answer if inspect.isawaitable(answer) else answer

    async with ProgramEnv(program) as env:
        await env.areset(seed=0)
        _, _, terminated, _, info = await env.astep("y")
        assert terminated and info.get("program_error") == why

    async with ProgramEnv(leaves) as env:
        with pytest.raises(EnvError, match="ended before its first request"):
            await env.areset(seed=0)


async def test_a_silent_program_is_ended_and_the_episode_truncated(mock_clock):
    """Time jumps once, when the program is silent: with sockets at work an idle loop does not say that all is done."""
    silent, ended = trio.Event(), []

    async def sleeps(session):
        await ask(session, CHAT, messages=[user("x")])
        silent.set()
        try:
            await trio.sleep_forever()
        finally:
            ended.append(True)

    async def pass_time():
        await silent.wait()
        await trio.testing.wait_all_tasks_blocked()
        mock_clock.jump(61)

    async with ProgramEnv(sleeps, silence_s=60) as env, trio.open_nursery() as nursery:
        await env.areset(seed=0)
        nursery.start_soon(pass_time)
        *_, terminated, truncated, info = await env.astep("y")
        assert truncated and not terminated and info["stop_reason"] == "tool_time_limit" and ended == [True]


async def test_turns_are_limited():
    async def endless(session):
        while True:
            await ask(session, CHAT, messages=[user("more")])

    async with ProgramEnv(endless, max_turns=3) as env:
        await env.areset(seed=0)
        flags = [(await env.astep("x"))[2:4] for _ in range(3)]
        assert flags == [(False, False), (False, False), (False, True)]


COMMAND = """
import json, os, subprocess, sys, urllib.request
child = subprocess.Popen(["sleep", "60"])
print(child.pid, flush=True)
request = urllib.request.Request(
    os.environ["OPENAI_BASE_URL"] + "/chat/completions",
    json.dumps({"messages": [{"role": "user", "content": json.loads(os.environ["AGENTRL_TASK"])["q"]}]}).encode(),
    {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]},
)
opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
answer = json.load(opener.open(request))
print(answer["choices"][0]["message"]["content"])
sys.exit(3)
"""


def alive(pid):
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:  # it may end between any two looks
        return False
    return state != "Z"


async def test_a_command_is_a_program_and_its_children_end_with_it():
    exits = []

    class Commands(ProgramEnv):
        def grade(self, task, result):
            exits.append(result)
            return float(b"fine" in result.stdout)

    async with Commands([sys.executable, "-c", COMMAND]) as env:
        observation, _ = await env.areset(seed=0, options={"q": "How are you?"})
        assert observation == (user("How are you?"),)
        *_, terminated, _, info = await env.astep("fine")
        assert terminated and info == {"stop_reason": "done", "exit_code": 3, "outcome": 1.0, "success": True}
    pid = int(exits[0].stdout.split()[0])
    with trio.fail_after(60):
        while alive(pid):  # it was killed; the kernel takes a moment
            await trio.lowlevel.checkpoint()

    async with Commands([sys.executable, "-c", "import sys; sys.exit('no key')"]) as env:
        with pytest.raises(EnvError, match="exit code 1: no key"):
            await env.areset(seed=0)


async def test_closing_ends_a_program_in_the_middle(tmp_path):
    note = tmp_path / "pid"
    command = f"import os, time; open({str(note)!r}, 'w').write(str(os.getpid()));" + COMMAND
    env = ProgramEnv([sys.executable, "-c", command])
    await env.areset(seed=0, options={"q": "?"})
    pid = int(note.read_text())
    assert alive(pid)
    await env.aclose()
    assert not alive(pid)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)


EACH_CALL = """
import sys, trio
from agentrl.env.agent_programs import ProgramEnv
from agentrl.host import janitor as owner
from tests.parts.kill_sweep import MAKING, killed_after_each_call

owner.reap = lambda home: []  # nobody else cleans up here
away = "subprocess.Popen(['sleep', sys.argv[1]], start_new_session=True, stdout=2)"
program = [sys.executable, "-c", sys.argv[2].replace("subprocess.Popen(['sleep', '60'])", away), sys.argv[1]]

async def main():
    async with ProgramEnv(program) as env:
        await env.areset(seed=0, options={"q": "?"})
        *_, terminated, _, info = await env.astep("fine")
        assert terminated and info["exit_code"] == 3

for pid in killed_after_each_call(lambda: trio.run(main), MAKING | {"_accept"}):
    print(pid)
"""


@pytest.mark.medium
def test_law_4_a_command_and_what_left_its_group_end_with_their_owner_at_every_instant():
    """Killed after each folder and process that it made, and when the program first asks."""
    marker = f"4325.{os.getpid()}"
    assert sweep(EACH_CALL, marker, COMMAND.replace('"', "'")) >= 4


@pytest.mark.medium
def test_passes_the_checker(monkeypatch):
    monkeypatch.setattr("agentrl.env.checks.checks.FUZZ_EXAMPLES", 4)  # each is a conversation over sockets

    async def program(session):
        for turn in range(3):
            await ask(session, CHAT, messages=[user(f"turn {turn}")])
        return True

    assert agentrl.check_env(lambda: ProgramEnv(program, replayable=True), deadline_s=120).findings == ()


def test_an_empty_command_is_refused():
    with pytest.raises(UsageError, match="program is empty"):
        ProgramEnv([])


@each_case("result", [float("nan"), float("inf"), -float("inf"), 10**400])
async def test_a_program_that_makes_no_number_of_an_answer_has_earned_nothing(result):
    async def program(session):
        await ask(session, CHAT, messages=[user("x")])
        return result

    async with ProgramEnv(program) as env:
        await env.areset(seed=0)
        *_, terminated, _, info = await env.astep("y")
        assert terminated and (info["outcome"], info["success"]) == (0.0, False)


@each_case(
    ("result", "outcome"),
    [
        (np.float32(0.5), 0.5),
        (np.bool_(True), 1.0),
        (Decimal("0.25"), 0.25),
        (Decimal("sNaN"), 0.0),  # float() raises for it
        (True, 1.0),
        ("1.0", None),  # a text may be the policy's
        ({"reward": 1.0}, None),
    ],
)
def test_what_a_program_returns_is_its_outcome_or_named(result, outcome):
    def notice_count():
        case = f"a program returned a {type(result).__name__}, which is no number"
        return sum(tally.count for (_, words), tally in notices.OF_PROCESS.totals().items() if words.startswith(case))

    before = notice_count()
    grade = ProgramEnv(chatty).grade({}, result)
    assert (grade, type(grade)) == (outcome, type(outcome))
    assert notice_count() - before == (outcome is None)

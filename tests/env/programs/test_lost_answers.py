"""Clients that lose their patience with us, over real sockets: what they read is trained, and nothing else (law 3)."""

import asyncio
import sys
import threading

import httpx
import pytest
import trio
import trio.testing

from agentrl.env.agent_programs import ProgramEnv
from agentrl.errors import EnvError
from agentrl.host import clocks

CHAT = "v1/chat/completions"


def user(text):
    return {"role": "user", "content": text}


async def ask(session, *messages):
    async with httpx.AsyncClient(base_url=session.base_url, timeout=60, trust_env=False) as client:
        answer = (await client.post(CHAT, json={"messages": messages})).json()
    return answer["choices"][0]["message"]["content"]


class Impatient:
    """A program's client, whose first request is given up when `gives_up` is set."""

    def __init__(self):
        self.gives_up, self.gave_up = trio.Event(), trio.Event()

    async def ask(self, session, *messages):
        async with trio.open_nursery() as nursery:

            async def watch():
                await self.gives_up.wait()
                nursery.cancel_scope.cancel()

            nursery.start_soon(watch)
            await ask(session, *messages)
            raise AssertionError("it was answered")
        self.gave_up.set()


async def test_a_client_that_asks_again_gets_the_answer_that_it_did_not_wait_for():
    client, texts = Impatient(), []

    async def program(session):
        await client.ask(session, user("q"))
        texts.append(await ask(session, user("q")))
        texts.append(await ask(session, user("q")))  # it has read that one: another sample
        return True

    async with ProgramEnv(program) as env:
        await env.areset(seed=0)
        client.gives_up.set()
        await client.gave_up.wait()
        observation, *_, info = await env.astep("first")
        assert observation == () and info == {"history": [user("q")], "branch": {"kind": "again", "turn": 0}}
        *_, terminated, _, info = await env.astep("second")
        assert terminated and info["success"] and texts == ["first", "second"]


async def test_an_answer_that_nobody_read_is_not_trained_and_no_turn_of_the_program():
    client = Impatient()

    async def program(session):
        await client.ask(session, user("q"))
        return await ask(session, user("something else")) == "read"

    async with ProgramEnv(program, max_turns=2) as env:
        await env.areset(seed=0)
        client.gives_up.set()
        await client.gave_up.wait()
        *_, info = await env.astep("nobody reads this")
        assert info == {"masked": True, "history": [user("something else")], "branch": {"kind": "new"}}
        *_, terminated, _, info = await env.astep("read")
        assert terminated and info == {"stop_reason": "done", "outcome": 1.0, "success": True}


@pytest.mark.parametrize("raises", [True, False], ids=["raises", "returns"])
async def test_law_3_a_program_that_ends_because_we_were_slow_is_not_scored(raises):
    client = Impatient()

    async def program(session):
        text = await ask(session, user("q"))
        await client.ask(session, user("q"), {"role": "assistant", "content": text}, user("more"))
        if raises:
            raise TimeoutError("no answer")
        return 0.0

    async with ProgramEnv(program) as env:
        await env.areset(seed=0)
        await env.astep("in time")
        client.gives_up.set()
        await client.gave_up.wait()
        with pytest.raises(EnvError, match="did not ask again"):
            await env.astep("too late")


async def test_law_3_a_program_that_fails_by_what_it_read_is_scored_also_with_a_request_open():
    async def program(session):
        async def first():
            if await ask(session, user("a")) == "wrong":
                raise ValueError("of what the policy wrote")

        async with trio.open_nursery() as nursery:
            nursery.start_soon(first)
            nursery.start_soon(ask, session, user("b"))

    async with ProgramEnv(program) as env:
        observation, _ = await env.areset(seed=0)
        if observation == (user("b"),):
            await env.astep("fine")
        answer = await env.astep("wrong")
        if not answer[2]:  # the other request was handed on before the program had failed
            answer = await env.astep("fine")
        assert answer[2] and answer[4]["outcome"] == 0.0 and "ValueError" in str(answer[4]["program_error"])


COMMAND = """
import http.client, json, os, sys, time, urllib.parse
url = urllib.parse.urlsplit(os.environ["OPENAI_BASE_URL"])
def ask(*messages):
    connection = http.client.HTTPConnection(url.netloc)
    connection.request("POST", url.path + "/chat/completions", json.dumps({"messages": messages}))
    return connection
first = {"role": "user", "content": "q"}
answer = json.load(ask(first).getresponse())["choices"][0]["message"]
waits = ask(first, answer, first)
while not os.path.exists(sys.argv[1]): time.sleep(0.01)
sys.exit(1)  # it waits no longer
"""


async def test_law_3_a_command_that_exits_badly_because_we_were_slow_is_not_scored(tmp_path):
    gives_up = tmp_path / "gives up"
    async with ProgramEnv([sys.executable, "-c", COMMAND, str(gives_up)]) as env:
        await env.areset(seed=0)
        await env.astep("in time")
        running = env._running
        gives_up.touch()
        with trio.fail_after(60):
            while running._ended is None:  # the engine is slow
                await trio.lowlevel.checkpoint()
        with pytest.raises(EnvError, match="did not ask again: exit code 1"):
            await env.astep("too late")


def impatient(library, third):
    """A client of a library, `httpx` or its successor, whose first two reads time out at once."""

    class Transport(library.AsyncHTTPTransport):
        tries = 0

        async def handle_async_request(self, request):
            self.tries += 1
            if self.tries < 3:
                request.extensions["timeout"]["read"] = 0.001
            else:
                third.set()
            return await super().handle_async_request(request)

    return library.AsyncClient(transport=Transport(), trust_env=False, timeout=60)


async def of_openai(session, third):
    import openai

    http = impatient(httpx, third)
    client = openai.AsyncOpenAI(base_url=f"{session.base_url}/v1", api_key=session.api_key, http_client=http)
    answer = await client.chat.completions.create(model="policy", messages=[user("q")])
    return answer.choices[0].message.content


async def of_anthropic(session, third):
    import anthropic
    import httpx2

    http = impatient(httpx2, third)
    client = anthropic.AsyncAnthropic(base_url=session.base_url, api_key=session.api_key, http_client=http)
    answer = await client.messages.create(model="policy", messages=[user("q")], max_tokens=9)
    return answer.content[0].text


@pytest.mark.adapters
@pytest.mark.parametrize("asks", [of_openai, of_anthropic])
async def test_a_real_client_at_its_default_settings_reads_the_one_answer(asks):
    """It retries twice by itself: two reads time out at once, and the policy answers once the third try is made."""
    third = threading.Event()

    def program(session):
        return asyncio.run(asks(session, third)) == "first"

    async with ProgramEnv(program) as env:
        await env.areset(seed=0)
        assert await trio.to_thread.run_sync(third.wait, 300)  # it is imported first
        *_, terminated, _, info = await env.astep("first")
        assert terminated and info["success"]


async def test_law_3_the_time_between_an_answer_and_the_next_request_is_the_policys(mock_clock):
    """What the program does then, such as a test run, is what the policy asked for."""
    busy = trio.Event()

    async def program(session):
        text = await ask(session, user("q"))
        busy.set()
        await trio.sleep(60)
        return await ask(session, user("q"), {"role": "assistant", "content": text}, user("more")) == "late"

    async def pass_time():
        await busy.wait()
        await trio.testing.wait_all_tasks_blocked()
        mock_clock.jump(60)

    async with ProgramEnv(program) as env, trio.open_nursery() as nursery:
        await env.areset(seed=0)
        nursery.start_soon(pass_time)
        with clocks.watch(own_s=10, policy_s=61) as watch:
            await env.astep("first")
        assert watch.over is None and watch.seconds == pytest.approx(60)
        *_, terminated, _, info = await env.astep("late")
        assert terminated and info["success"]

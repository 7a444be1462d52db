"""`agentrl record`: what clients read is what is in the folder, token for token, whoever dies when."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import trio
from commands import agentrl
from each_case import each_case
from engine.conftest import Server

from agentrl.engine.scoring_client import ScoringClient
from agentrl.env.tools.calls import ToolCall
from agentrl.env.tools.parsers import get_format
from agentrl.models.resolve import model_dir
from agentrl.records import StopReason, Trajectory, context_ids
from agentrl.store import TEXT
from tests.parts.served_vllm import in_thread
from tests.parts.vllm_server import FakeVLLM, made_up_logprob
from tests.run.recordings import MODEL, RENDERER, Running, engine, episodes, recorder

PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
CALL = "I look. " + get_format("hermes").write(ToolCall("weather", {"city": "Rome"}))


def weather(prompt: str) -> str:
    """The answer to a question about the weather: a call, then its result in other words."""
    return "Sunny, then." if "Sun in Rome." in prompt else CALL


def echo(prompt: str) -> str:
    """The last question's words."""
    return f"You said {prompt.rpartition('user')[2].partition('<|im_end|>')[0].strip()!r}."


@pytest.fixture
def fake() -> FakeVLLM:
    return engine(echo, version="3")


@pytest.fixture
def running(fake: FakeVLLM, tmp_path: Path) -> Iterator[Running]:
    with in_thread(fake) as served, recorder(tmp_path / "recorded", served.url) as at_work:
        yield at_work


def ask(url: str, *messages: dict[str, Any], headers: dict[str, str] | None = None, **options: Any) -> dict[str, Any]:
    body = {"model": "any", "messages": list(messages), **options}
    answer = httpx.post(f"{url}/v1/chat/completions", json=body, headers=headers, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["message"]


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def check_tokens(trajectory: Trajectory, *texts: str) -> None:
    """Each turn has the tokens that the engine sampled after the very context that the engine got, with its log-probs
    and version, and the words that the client read."""
    assert [turn.text for turn in trajectory.turns] == list(texts)
    for turn in trajectory.turns:
        assert turn.token_ids == (*RENDERER.tokens(turn.text), RENDERER.stop_token_ids[0])
        assert turn.versions == (3,) * len(turn.token_ids)
        start = len(context_ids(trajectory.turns, turn.index))
        expected = [made_up_logprob("base", start + place, token) for place, token in enumerate(turn.token_ids)]
        assert list(turn.logprobs) == pytest.approx(expected)


def chat(url: str, stream: bool) -> str:
    import openai

    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none")
    tool: Any = {"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}
    messages: list[Any] = [user("Weather?")]
    message = client.chat.completions.create(model="m", messages=messages, tools=[tool]).choices[0].message
    (call,) = message.tool_calls
    city = json.loads(call.function.arguments)["city"]
    messages += [
        message.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": call.id, "content": f"Sun in {city}."},
    ]
    if not stream:
        answer = client.chat.completions.create(model="m", messages=messages, tools=[tool])
        return answer.choices[0].message.content
    chunks = client.chat.completions.create(model="m", messages=messages, tools=[tool], stream=True)
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)


def responses(url: str, stream: bool) -> str:
    import openai

    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none")
    tool: Any = {"type": "function", "name": "weather", "parameters": PARAMETERS, "strict": False}
    first = client.responses.create(model="m", input="Weather?", tools=[tool])
    (call,) = [item for item in first.output if item.type == "function_call"]
    city = json.loads(call.arguments)["city"]
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": f"Sun in {city}."}
    more: Any = {"model": "m", "input": [result], "tools": [tool], "previous_response_id": first.id}
    if not stream:
        return client.responses.create(**more).output_text
    with client.responses.stream(**more) as events:
        return events.get_final_response().output_text


def anthropic(url: str, stream: bool) -> str:
    import anthropic as package

    client = package.Anthropic(base_url=url, api_key="none")
    tool: Any = {"name": "weather", "description": "", "input_schema": PARAMETERS}
    head: Any = {"model": "m", "max_tokens": 500, "tools": [tool]}
    messages: list[Any] = [user("Weather?")]
    first = client.messages.create(messages=messages, **head)
    use = first.content[-1]
    assert first.stop_reason == "tool_use"
    result = {"type": "tool_result", "tool_use_id": use.id, "content": f"Sun in {use.input['city']}."}
    messages += [
        {"role": "assistant", "content": [block.model_dump(exclude_none=True) for block in first.content]},
        {"role": "user", "content": [result]},
    ]
    if not stream:
        return client.messages.create(messages=messages, **head).content[0].text
    with client.messages.stream(messages=messages, **head) as events:
        return "".join(events.text_stream)


CLIENTS = {"chat": chat, "responses": responses, "anthropic": anthropic}


@pytest.mark.adapters
@each_case("api", list(CLIENTS))
@each_case("stream", [False, True])
def test_a_tool_conversation_of_a_real_client_is_one_episode_of_exact_tokens(
    api: str, stream: bool, tmp_path: Path
) -> None:
    fake = engine(weather, version="3")
    with in_thread(fake) as served, recorder(tmp_path / "recorded", served.url) as running:
        assert CLIENTS[api](running.url, stream) == "Sunny, then."
    (trajectory,) = running.episodes()
    check_tokens(trajectory, CALL, "Sunny, then.")
    assert [turn.parent for turn in trajectory.turns] == [None, 0]
    assert trajectory.stop_reason is StopReason.DONE and trajectory.tools.schemas[0]["function"]["name"] == "weather"
    # The engine got the sampled tokens back, and no other spelling of them.
    first, second = (request["token_ids"] for request in fake.requests)
    assert second[: len(first) + len(trajectory.turns[0].token_ids)] == [*first, *trajectory.turns[0].token_ids]


@pytest.mark.medium
def test_an_embedded_engine_is_recorded_with_its_own_log_probs(tmp_path: Path) -> None:
    """The oracle is the engine's scoring of the whole row, a forward pass of its own."""
    server = Server(model_dir(MODEL), tmp_path, "--max-model-len", "512")
    try:
        with recorder(tmp_path / "recorded", server.url) as running:
            first = ask(running.url, user("What is 1 + 1?"), max_tokens=12)
            ask(running.url, user("What is 1 + 1?"), first, user("And 2 + 2?"), max_tokens=12)
        (trajectory,) = running.episodes()
        first_turn, second_turn = trajectory.turns
        row = (*context_ids(trajectory.turns, 1), *second_turn.token_ids)

        async def scored() -> tuple[float, ...]:
            return await ScoringClient(server.url).logprobs(row)

        logprobs = (0.0, *trio.run(scored))
        for turn in (first_turn, second_turn):
            start = len(context_ids(trajectory.turns, turn.index))
            assert list(turn.logprobs) == pytest.approx(logprobs[start : start + len(turn.token_ids)], abs=1e-3)
    finally:
        server.close()


def test_conversations_are_known_by_what_they_say(running: Running) -> None:
    one, other = user("one"), user("other")
    first = [one, ask(running.url, one)]
    second = [other, ask(running.url, other)]
    ask(running.url, *second, user("and"))
    ask(running.url, *first, user("more"))
    ask(running.url, *first, user("again"))  # behind an answer that the conversation has left: a new one
    texts = [[turn.text for turn in each.turns] for each in running.episodes()]
    assert texts[0] == ["You said 'one'.", "You said 'more'."]
    assert texts[1:] == [["You said 'other'.", "You said 'and'."], ["You said 'again'."]]
    assert [turn.parent for turn in running.episodes()[0].turns] == [None, 0]


@pytest.mark.parametrize("in_path", [False, True])
def test_a_session_is_one_episode_whatever_it_asks(running: Running, in_path: bool) -> None:
    url = f"{running.url}/session/s-1" if in_path else running.url
    headers = {} if in_path else {"x-session-id": "s-1"}
    ask(url, user("one"), headers=headers)
    ask(url, user("one"), headers=headers)  # it has read the answer: another sample
    ask(url, user("other"), headers=headers)
    ask(running.url, user("one"))
    first, second = running.episodes()
    assert [turn.parent for turn in first.turns] == [None, None, None] and len(second.turns) == 1
    assert first.task.options["session"] == "s-1"


def test_conversations_of_one_session_keep_their_tokens_and_say_where_they_come_from(
    running: Running, fake: FakeVLLM, tmp_path: Path
) -> None:
    """A sub-agent works between two requests of the main conversation, which is then made shorter."""
    url = f"{running.url}/session/s-1"
    main = [user("A first long question of the main conversation.")]
    main.append(ask(url, *main))
    ask(url, user("Something else, in another conversation."))
    main.append(user("And then?"))
    main.append(ask(url, *main))
    ask(url, *main[2:], user("More?"))
    copy, out = killed(running, tmp_path / "killed"), tmp_path / "out.jsonl"
    with recorder(copy, fake.url) as again:  # also where the recorder was killed meanwhile
        ask(f"{again.url}/session/s-1", *main, user("On the long way."))
    (trajectory,) = again.episodes()
    assert [turn.parent for turn in trajectory.turns] == [None, None, 0, None, 2]
    for turn, parent in ((2, 0), (4, 2)):
        row = [*context_ids(trajectory.turns, parent), *trajectory.turns[parent].token_ids]
        assert fake.requests[turn]["token_ids"][: len(row)] == row, "the sampled tokens, and no other spelling"
    shown = agentrl("export-episodes", copy, "--out", out, "--format", "tokens").out
    assert "2 turns in it begin a branch (compaction: 1, new: 1)" in shown
    (line,) = map(json.loads, out.read_text().splitlines())
    edges = [turn.get("branch") for turn in line["turns"]]
    assert edges == [None, {"kind": "new"}, None, {"kind": "compaction", "turn": 2}, None]
    out = tmp_path / "traces"
    assert agentrl("export-episodes", copy, "--out", out, "--format", "verifiers").out == f"1 episodes in {out}\n"
    (line,) = map(json.loads, next(out.glob("*.jsonl")).read_text().splitlines())
    nodes = line["traces"][0]["nodes"]
    place, path = len(nodes) - 1, list[str]()
    while place is not None:
        path.insert(0, nodes[place]["message"]["content"])
        place = nodes[place]["parent"]
    assert path[:-1] == [*(message["content"] for message in main), "On the long way."]


def test_a_client_decides_how_its_answers_are_sampled(running: Running, fake: FakeVLLM) -> None:
    ask(running.url, user("one"), temperature=0.5, top_p=0.9, max_completion_tokens=4, stop=["said"])
    sampling = fake.requests[-1]["sampling_params"]
    assert [sampling[key] for key in ("temperature", "top_p", "max_tokens", "stop")] == [0.5, 0.9, 4, ["said"]]
    (trajectory,) = running.episodes()
    assert trajectory.task.options["request"] == {
        "sampling": {"temperature": 0.5, "top_p": 0.9, "max_completion_tokens": 4},
        "stops": ["said"],
    }


@each_case(
    ("path", "body", "named"),
    [
        ("/v1/chat/completions", {"messages": [user("x")], "temperature": -1}, "temperature"),
        ("/v1/chat/completions", {"messages": [user("x")], "max_tokens": True}, "max_tokens"),
        ("/v1/chat/completions", {"messages": [user("x")], "n": 2}, "n "),
        ("/v1/responses", {"input": "x", "previous_response_id": "resp_7-0001"}, "resp_7-0001"),
        ("/session/a%20b/v1/chat/completions", {"messages": [user("x")]}, "session"),
    ],
)
def test_what_cannot_be_served_is_refused_by_its_name(
    running: Running, path: str, body: dict[str, Any], named: str
) -> None:
    answer = httpx.post(f"{running.url}{path}", json=body, timeout=60)
    assert answer.status_code == 400 and named in answer.json()["error"]["message"]
    assert running.episodes() == []


def test_without_the_key_nobody_is_served(fake: FakeVLLM, tmp_path: Path) -> None:
    with in_thread(fake) as served, recorder(tmp_path / "recorded", served.url, key="right") as running:
        for headers in ({}, {"authorization": "Bearer wrong"}, {"x-api-key": "wrong"}):
            assert httpx.get(f"{running.url}/v1/models", headers=headers, timeout=60).status_code == 401
        for headers in ({"authorization": "Bearer right"}, {"x-api-key": "right"}):
            assert httpx.get(f"{running.url}/v1/models", headers=headers, timeout=60).status_code == 200


def killed(running: Running, copy: Path) -> Path:
    """The folder as a recorder leaves it that is killed now: what is on the disk, and nothing that its end writes."""
    return Path(shutil.copytree(running.folder, copy))


@pytest.mark.parametrize("comes_back", ["repeats", "goes on"])
def test_after_a_kill_between_two_turns_the_conversation_goes_on(
    running: Running, fake: FakeVLLM, tmp_path: Path, comes_back: str
) -> None:
    first = ask(running.url, user("one"))
    folder = killed(running, tmp_path / "killed")
    with recorder(folder, fake.url) as again:
        if comes_back == "repeats":  # it never read the answer
            assert ask(again.url, user("one")) == first and len(fake.requests) == 1
        ask(again.url, user("one"), first, user("two"))
    (trajectory,) = again.episodes()
    check_tokens(trajectory, "You said 'one'.", "You said 'two'.")
    assert [turn.parent for turn in trajectory.turns] == [None, 0]


def test_conversations_that_sleep_go_on_where_they_were(fake: FakeVLLM, tmp_path: Path) -> None:
    with in_thread(fake) as served, recorder(tmp_path / "recorded", served.url, awake=1) as running:
        told = {text: [user(text), ask(running.url, user(text))] for text in ("one", "two", "three")}
        for text, messages in told.items():
            ask(running.url, *messages, user(f"more of {text}"))
    for trajectory, text in zip(running.episodes(), told, strict=True):
        check_tokens(trajectory, f"You said {text!r}.", f"You said 'more of {text}'.")
        assert [turn.parent for turn in trajectory.turns] == [None, 0]


def completion(text: str) -> bytes:
    """An answer of a server that gives no tokens."""
    message = {"role": "assistant", "content": text}
    return json.dumps({"choices": [{"index": 0, "message": message, "finish_reason": "stop"}]}).encode()


def test_an_upstream_without_tokens_is_recorded_as_text_and_says_so(tmp_path: Path) -> None:
    server = FakeVLLM(lacks={"tokens"}, answers={"/v1/chat/completions": (200, completion("Fine."))})
    folder, out = tmp_path / "recorded", tmp_path / "out.jsonl"
    with in_thread(server) as served:
        with recorder(folder, served.url, kind="openai") as running:
            first = ask(running.url, user("How?"), temperature=0.5)
            copy = killed(running, tmp_path / "killed")
        with recorder(copy, served.url, kind="openai") as again:
            ask(again.url, user("How?"), first, user("And?"))
    assert episodes(folder) == [] and episodes(copy) == [], "none of it is trained"
    (trajectory,) = episodes(copy, TEXT)
    assert [(turn.text, turn.token_ids) for turn in trajectory.turns] == [("Fine.", ()), ("Fine.", ())]
    assert agentrl("export-episodes", copy, "--out", out).out == f"1 episodes in {out}\n"
    (line,) = map(json.loads, out.read_text().splitlines())
    assert line["text_only"] is True
    assert [message["content"] for message in line["messages"]] == ["How?", "Fine.", "And?", "Fine."]
    assert "recorded as text" in agentrl("export-episodes", copy, "--out", out, "--format", "tokens").out
    assert out.read_text() == ""


def test_the_folder_is_read_as_a_run_is(running: Running, tmp_path: Path) -> None:
    ask(running.url, user("one"))
    copy = killed(running, tmp_path / "killed")
    assert agentrl("audit", copy).code == 0
    assert "the page with 1 episodes" in agentrl("view", copy, "--bundle", tmp_path / "page").out
    assert "agentrl record" in agentrl("status", copy).out
    refused = agentrl("train", "--resume", copy)
    assert refused.code == 2 and "holds recordings and no run" in refused.err


def test_a_program_that_cannot_be_started_and_another_model_are_one_line(fake: FakeVLLM, tmp_path: Path) -> None:
    with in_thread(fake) as served:
        options = ("--engine", served.url, "--out", tmp_path / "recorded", "--model")
        missing = agentrl("record", *options, MODEL, "--", "/no/such/program")
        assert missing.code == 2 and "/no/such/program cannot be started" in missing.err
        other = agentrl("record", *options, "agentrl/another", "--", "true")
        assert other.code != 0 and other.err.count("\n") == 1


def test_a_conversation_beyond_the_most_is_refused_for_now(fake: FakeVLLM, tmp_path: Path) -> None:
    with in_thread(fake) as served, recorder(tmp_path / "recorded", served.url, most=1) as running:
        ask(running.url, user("one"))
        body = {"messages": [user("two")]}
        assert httpx.post(f"{running.url}/v1/chat/completions", json=body, timeout=60).status_code == 503

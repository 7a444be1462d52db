"""The real clients that agent programs are built on, and a real agent, through `ProgramEnv`."""

import asyncio
import json

import pytest
from each_case import each_case

from agentrl.env.agent_programs import ProgramEnv
from agentrl.env.tools.calls import ToolCall
from agentrl.env.tools.parsers import get_format

pytestmark = pytest.mark.adapters
HERMES = get_format("hermes")
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
LOOK = "I look. " + HERMES.write(ToolCall("weather", {"city": "Rome"}))


def clients(session):
    import openai

    return openai.OpenAI(base_url=f"{session.base_url}/v1", api_key=session.api_key, timeout=300)


def chat(session, stream):
    client = clients(session)
    messages = [{"role": "user", "content": "Weather?"}]
    tool = {"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}
    answer = client.chat.completions.create(model="policy", messages=messages, tools=[tool])
    message = answer.choices[0].message
    assert answer.choices[0].finish_reason == "tool_calls"
    messages.append(message.model_dump(exclude_none=True))
    call = message.tool_calls[0]
    city = json.loads(call.function.arguments)["city"]
    messages.append({"role": "tool", "tool_call_id": call.id, "content": f"Sun in {city}."})
    if not stream:
        return client.chat.completions.create(model="m", messages=messages, tools=[tool]).choices[0].message.content
    chunks = client.chat.completions.create(model="m", messages=messages, tools=[tool], stream=True)
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)


def responses(session, stream):
    client = clients(session)
    tool = {"type": "function", "name": "weather", "parameters": PARAMETERS, "strict": False}
    first = client.responses.create(model="policy", input="Weather?", tools=[tool])
    (call,) = [item for item in first.output if item.type == "function_call"]
    city = json.loads(call.arguments)["city"]
    result = {"type": "function_call_output", "call_id": call.call_id, "output": f"Sun in {city}."}
    more = {"model": "policy", "input": [result], "tools": [tool], "previous_response_id": first.id}
    if not stream:
        return client.responses.create(**more).output_text
    with client.responses.stream(**more) as events:
        for _ in events:
            pass
        return events.get_final_response().output_text


def anthropic(session, stream):
    import anthropic as package

    client = package.Anthropic(base_url=session.base_url, api_key=session.api_key, timeout=300)
    tool = {"name": "weather", "description": "", "input_schema": PARAMETERS}
    messages = [{"role": "user", "content": "Weather?"}]
    head = {"model": "policy", "max_tokens": 100, "tools": [tool]}
    first = client.messages.create(messages=messages, **head)
    use = first.content[-1]
    assert first.stop_reason == "tool_use"
    messages.append({"role": "assistant", "content": [block.model_dump(exclude_none=True) for block in first.content]})
    result = {"type": "tool_result", "tool_use_id": use.id, "content": f"Sun in {use.input['city']}."}
    messages.append({"role": "user", "content": [result]})
    if not stream:
        return client.messages.create(messages=messages, **head).content[0].text
    with client.messages.stream(messages=messages, **head) as events:
        return "".join(events.text_stream)


def async_chat(session, stream):
    """An asyncio program, as most agent frameworks are."""
    import openai

    async def main():
        async with openai.AsyncOpenAI(base_url=f"{session.base_url}/v1", api_key=session.api_key) as client:
            first = await client.chat.completions.create(model="m", messages=[{"role": "user", "content": "Weather?"}])
            said = first.choices[0].message.content
            assert said == LOOK, "without tools on offer a call is text"
            messages = [
                {"role": "user", "content": "Weather?"},
                {"role": "assistant", "content": said},
                {"role": "user", "content": "Sun in Rome."},
            ]
            second = await client.chat.completions.create(model="m", messages=messages)
            return second.choices[0].message.content

    return asyncio.run(main())


@each_case("stream", [False, True])
@each_case("program", [chat, responses, anthropic, async_chat])
async def test_a_real_client_holds_a_conversation(program, stream):
    results = []

    class Keeps(ProgramEnv):
        def grade(self, task, result):
            results.append(result)
            return True

    async with Keeps(lambda session: program(session, stream)) as env:
        observation, _ = await env.areset(seed=0)
        assert observation == ({"role": "user", "content": "Weather?"},)
        observation, *_, info = await env.astep(LOOK)
        assert [message["content"] for message in observation] == ["Sun in Rome."] and info == {}
        *_, terminated, _, info = await env.astep("It shines.")
        assert terminated and info["success"] and results == ["It shines."]


@each_case("stream", [False, True])
async def test_a_client_that_writes_its_own_template_extends_its_prompt(stream):
    """The second prompt begins with the first and its answer, and the outcome is the text that the client has."""

    def program(session):
        client, prompt = clients(session), "Question: 1 + 1?\nAnswer:"
        for _ in range(2):
            answer = client.completions.create(model="m", prompt=prompt, stop=["\nQ"], stream=stream)
            texts = [chunk.choices[0].text for chunk in answer] if stream else [answer.choices[0].text]
            prompt += "".join(texts) + "\nQuestion: and 2?"
        return len(prompt)

    async with ProgramEnv(program) as env:
        observation, _ = await env.areset(seed=0)
        assert observation == ({"role": "user", "content": "Question: 1 + 1?\nAnswer:", "raw": True},)
        observation, *_, info = await env.astep(" 2\nQuestion: 3?")
        (prompt,) = info["history"]
        assert observation == () and prompt["raw"] is True
        assert prompt["content"] == "Question: 1 + 1?\nAnswer: 2\nQuestion: and 2?"
        *_, terminated, _, info = await env.astep(" 4")
        assert terminated and info["outcome"] == len(prompt["content"] + " 4\nQuestion: and 2?")


def mini_swe_agent(session):
    """mini-swe-agent's own loop, model and local environment, in an empty folder."""
    from minisweagent.agents.default import DefaultAgent
    from minisweagent.environments.local import LocalEnvironment
    from minisweagent.models.litellm_model import LitellmModel

    model = LitellmModel(
        model_name="openai/policy",
        model_kwargs={"api_base": f"{session.base_url}/v1", "api_key": session.api_key},
        cost_tracking="ignore_errors",
    )
    agent = DefaultAgent(
        model,
        LocalEnvironment(cwd=session.task["folder"]),
        system_template="You fix things with bash.",
        instance_template="{{task}}",
    )
    return agent.run(session.task["issue"])


def bash(command):
    return HERMES.write(ToolCall("bash", {"command": command}))


@pytest.mark.medium
async def test_mini_swe_agent_is_an_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("MSWEA_SILENT_STARTUP", "1")
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # else its import asks the network for prices
    monkeypatch.setenv("MSWEA_GLOBAL_CONFIG_DIR", str(tmp_path / "config"))
    (tmp_path / "work").mkdir()

    class Fixed(ProgramEnv):
        def grade(self, task, result):
            written = tmp_path / "work" / "answer.txt"
            return result["exit_status"] == "Submitted" and written.read_text() == "42\n"

    async with Fixed(mini_swe_agent) as env:
        options = {"issue": "Write 42 into answer.txt.", "folder": str(tmp_path / "work")}
        opening, _ = await env.areset(seed=0, options=options)
        assert [message["content"] for message in opening] == ["You fix things with bash.", options["issue"]]
        assert [schema["function"]["name"] for schema in env.tool_schemas()] == ["bash"]
        observation, *_, info = await env.astep("I write. " + bash("echo 42 > answer.txt && ls"))
        assert observation[0]["role"] == "tool" and "answer.txt" in observation[0]["content"] and info == {}
        observation, *_, info = await env.astep("Am I done?")
        assert "Am I done?" not in str(info["history"]), "it forgets what had no call"
        assert info["continues"] == 0 and len(observation) == len(info["history"][3:]), "the first turn's tokens stay"
        assert info["history"][:2] == list(opening) and "tool call" in info["history"][-1]["content"].lower()
        *_, terminated, _, info = await env.astep(bash("echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"))
        assert terminated and info["success"]

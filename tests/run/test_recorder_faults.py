"""Clients of each API meet each fault between them and the engine: what they read is what is recorded, and once.

The clients are the vendors' own at their default settings of retries; nothing in them knows of a recorder.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from agentrl import notices
from tests.parts.served_vllm import InThread, in_thread
from tests.parts.vllm_server import FakeVLLM
from tests.run.recordings import RENDERER, Running, engine, episodes, partial_tokens, recorder

pytestmark = pytest.mark.adapters
TEXT = "An answer of a few words, which takes several chunks of tokens."


@pytest.fixture
def fake() -> FakeVLLM:
    return engine(lambda prompt: f"{TEXT} {prompt.count('<|im_start|>user')}", version="3", stream_tokens=4)


@pytest.fixture
def served(fake: FakeVLLM) -> Iterator[InThread]:
    with in_thread(fake) as running:
        yield running


@pytest.fixture
def running(served: InThread, tmp_path: Path) -> Iterator[Running]:
    with recorder(tmp_path / "recorded", served.url) as at_work:
        yield at_work


def chat(url: str, timeout_s: float = 60.0) -> list[str]:
    import openai

    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", timeout=timeout_s)
    messages: list[Any] = []
    for turn in range(2):
        messages.append({"role": "user", "content": f"Turn {turn}?"})
        answer = client.chat.completions.create(model="m", messages=messages).choices[0].message
        messages.append({"role": "assistant", "content": answer.content})
    return [message["content"] for message in messages[1::2]]


def responses(url: str, timeout_s: float = 60.0) -> list[str]:
    import openai

    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", timeout=timeout_s)
    first = client.responses.create(model="m", input="Turn 0?")
    second = client.responses.create(model="m", input="Turn 1?", previous_response_id=first.id)
    return [first.output_text, second.output_text]


def anthropic(url: str, timeout_s: float = 60.0) -> list[str]:
    import anthropic as package

    client = package.Anthropic(base_url=url, api_key="none", timeout=timeout_s)
    messages: list[Any] = []
    for turn in range(2):
        messages.append({"role": "user", "content": f"Turn {turn}?"})
        with client.messages.stream(model="m", max_tokens=100, messages=messages) as stream:
            messages.append({"role": "assistant", "content": "".join(stream.text_stream)})
    return [message["content"] for message in messages[1::2]]


APIS = {"chat": chat, "responses": responses, "anthropic": anthropic}
FAULTS: dict[str, Callable[[FakeVLLM], None]] = {
    "reset before an answer": lambda fake: fake.fail("cut"),
    "reset amid an answer": lambda fake: fake.fail("cut", after=6),
    "500 of the engine": lambda fake: fake.fail("status", status=500),
    "503 of the engine": lambda fake: fake.fail("status", status=503),
    "its core dies amid an answer": lambda fake: fake.fail("error_event", after=6),
    "an answer that is no JSON": lambda fake: fake.fail("bad_json", after=6),
}


def check(folder: Path, read: list[str], turns: int = 2) -> None:
    """One episode has what the client read, and each token of it once."""
    (trajectory,) = episodes(folder)
    assert [turn.text for turn in trajectory.turns] == read == [f"{TEXT} {turn + 1}" for turn in range(turns)]
    assert [turn.parent for turn in trajectory.turns] == [None, *range(turns - 1)]
    for turn in trajectory.turns:
        assert turn.token_ids == (*RENDERER.tokens(turn.text), RENDERER.stop_token_ids[0])
        assert not (turn.step is not None and turn.step.masked)


@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_the_engine_costs_a_client_nothing(
    fake: FakeVLLM, served: InThread, running: Running, api: str, fault: str
) -> None:
    served.do(lambda: FAULTS[fault](fake))
    read = APIS[api](running.url)
    check(running.folder, read)


@pytest.mark.medium
@pytest.mark.parametrize("api", APIS)
def test_a_client_that_times_out_before_the_first_token_asks_again_and_gets_the_one_answer(
    fake: FakeVLLM, served: InThread, running: Running, api: str
) -> None:
    """The engine answers once the client has given up for the first time, as it hangs up at the recorder."""
    fake.core = "hung"
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(APIS[api], running.url, 2.0)
        while not any("it gets the same answer" in what for _, what in notices.OF_PROCESS.totals()):
            assert not asked.done(), asked.result()
            time.sleep(0.02)
        served.do(fake.mend)
        read = asked.result(60)
    check(running.folder, read)
    assert len(fake.requests) == 2, "one turn, one request"


@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize("how", ["kill", "Ctrl-C"])
def test_a_client_of_a_recorder_that_ended_amid_its_answer_gets_the_rest(
    fake: FakeVLLM, served: InThread, tmp_path: Path, api: str, how: str
) -> None:
    served.do(lambda: fake.fail("hang", after=12))
    folder, copy = tmp_path / "recorded", tmp_path / "killed"
    with ThreadPoolExecutor(1) as pool:
        with recorder(folder, served.url) as running:
            asked = pool.submit(APIS[api], running.url)
            while not partial_tokens(folder):
                assert not asked.done(), asked.result()
                time.sleep(0.02)
            shutil.copytree(folder, copy)  # as a kill leaves it
        with pytest.raises(Exception, match="rror"):  # of either vendor's client
            asked.result(60)
    left = folder if how == "Ctrl-C" else copy
    kept = partial_tokens(left)
    with recorder(left, served.url) as again:
        read = APIS[api](again.url)
    check(left, read)
    begun, rest, _ = (request["token_ids"] for request in fake.requests)
    assert rest[: len(begun)] == begun and len(rest) == len(begun) + kept, "no written token is sampled again"

"""Clients of each API meet each fault of a server that gives no tokens: what they read is what is recorded, and once.

The clients are the vendors' own at their default settings of retries, as in `test_recorder_faults`.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import trio

from agentrl import notices
from agentrl.http.http_server import Answer, Cut
from agentrl.store import TEXT
from tests.parts.served_vllm import in_thread
from tests.parts.vllm_server import FakeVLLM
from tests.run.recordings import episodes, recorder
from tests.run.test_recorder_faults import anthropic, chat, responses

pytestmark = pytest.mark.adapters
ANSWER = "An answer of a few words"


@dataclass(eq=False, kw_only=True)
class TextServer(FakeVLLM):
    """A server of chat completions whose next requests meet `faults`: a status, "cut" (the connection breaks), "hang"
    (no answer until `released`)."""

    faults: list[int | str] = field(default_factory=list[int | str])
    asked: int = 0
    released: trio.Event = field(default_factory=trio.Event)
    hangs: trio.Event = field(default_factory=trio.Event)

    async def answer(self, method: str, path: str, query: str, headers: Mapping[str, str], content: bytes) -> Answer:
        if path not in ("/v1/chat/completions", "/v1/completions"):
            return await super().answer(method, path, query, headers, content)
        self.asked += 1
        fault = self.faults.pop(0) if self.faults else None
        if fault == "cut":
            raise Cut
        if fault == "hang":
            self.hangs.set()
            await self.released.wait()
        elif fault is not None:
            return int(fault), json.dumps({"error": {"message": "trouble"}}).encode()
        body: Any = json.loads(content)
        users = sum(message["role"] == "user" for message in body.get("messages", ()))
        text = f"{ANSWER} {users or body['prompt'].count('?')}"
        message = {"role": "assistant", "content": text}
        choice = {"index": 0, "message": message, "text": text, "finish_reason": "stop"}
        return 200, json.dumps({"choices": [choice]}).encode()


def completions(url: str, timeout_s: float = 60.0) -> list[str]:
    import openai

    client, prompt, read = openai.OpenAI(base_url=f"{url}/v1", api_key="none", timeout=timeout_s), "Turn 0?", []
    for _ in range(2):
        read.append(client.completions.create(model="m", prompt=prompt).choices[0].text)
        prompt += f"{read[-1]} And now?"
    return read


def litellm(url: str, timeout_s: float = 60.0) -> list[str]:
    import litellm as package

    messages: list[Any] = []
    for turn in range(2):
        messages.append({"role": "user", "content": f"Turn {turn}?"})
        answer: Any = package.completion("openai/m", messages, api_base=f"{url}/v1", api_key="none", timeout=timeout_s)
        messages.append({"role": "assistant", "content": answer.choices[0].message.content})
    return [message["content"] for message in messages[1::2]]


APIS: dict[str, Any] = {
    "chat": chat,
    "responses": responses,
    "anthropic": anthropic,
    "completions": completions,
}
WITH_LITELLM = [*APIS, pytest.param("litellm", marks=pytest.mark.slow)]  # its import alone takes seconds
APIS["litellm"] = litellm


def check(folder: Path, read: list[str]) -> None:
    """One conversation that was not given up has what the client read, and each answer of it once."""
    assert read == [f"{ANSWER} 1", f"{ANSWER} 2"]
    played = [trajectory for trajectory in episodes(folder, TEXT) if trajectory.turns]
    (trajectory,) = played
    assert [turn.text for turn in trajectory.turns] == read and not any(turn.token_ids for turn in trajectory.turns)
    assert not any(turn.step is not None and turn.step.masked for turn in trajectory.turns)
    assert episodes(folder) == [], "none of it is trained"


@pytest.mark.parametrize("api", WITH_LITELLM)
@pytest.mark.parametrize("fault", ["cut", 500, 503, 429])
def test_a_fault_of_the_server_costs_a_client_nothing(tmp_path: Path, api: str, fault: int | str) -> None:
    server = TextServer(lacks={"tokens"}, faults=[fault])
    with in_thread(server) as served, recorder(tmp_path / "recorded", served.url, kind="openai") as running:
        read = APIS[api](running.url)
    check(running.folder, read)


@pytest.mark.medium
@pytest.mark.parametrize("api", WITH_LITELLM)
def test_a_client_that_times_out_at_a_slow_server_gets_the_one_answer(tmp_path: Path, api: str) -> None:
    server = TextServer(lacks={"tokens"}, faults=["hang"])
    with (
        in_thread(server) as served,
        recorder(tmp_path / "recorded", served.url, kind="openai") as running,
        ThreadPoolExecutor(1) as pool,
    ):
        repeats = repeated()
        asked = pool.submit(APIS[api], running.url, 2.0)
        while repeated() == repeats:
            assert not asked.done(), asked.result()
            time.sleep(0.02)
        served.do(server.released.set)
        read = asked.result(60)
    check(running.folder, read)
    assert server.asked == 2, "one turn, one request"


def repeated() -> int:
    """How many requests took the place of one that was left."""
    return sum(
        tally.count for (_, what), tally in notices.OF_PROCESS.totals().items() if "it gets the same answer" in what
    )


@pytest.mark.parametrize("api", WITH_LITELLM)
def test_a_recorder_killed_while_the_server_answers_asks_it_again(tmp_path: Path, api: str) -> None:
    """Text that nobody has is no part of a turn, so the turn is asked for anew."""
    server, copy = TextServer(lacks={"tokens"}, faults=["hang"]), tmp_path / "killed"
    with in_thread(server) as served, ThreadPoolExecutor(1) as pool:
        with recorder(tmp_path / "recorded", served.url, kind="openai") as running:
            asked = pool.submit(APIS[api], running.url)
            while not served.do(server.hangs.is_set):
                assert not asked.done(), asked.result()
                time.sleep(0.02)
            shutil.copytree(running.folder, copy)  # as a kill leaves it
            served.do(server.released.set)
            asked.result(60)
        with recorder(copy, served.url, kind="openai") as again:
            read = APIS[api](again.url)
    check(copy, read)

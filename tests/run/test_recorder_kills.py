"""The recorder's process is killed in the middle of a turn: its client and its program go on, and no token is lost."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
from descriptors import readable

from agentrl.records import StopReason
from tests.parts.served_vllm import InThread, in_thread
from tests.parts.vllm_server import FakeVLLM
from tests.run.recordings import RENDERER, command, engine, episodes, partial_tokens, url_of

pytestmark = pytest.mark.adapters
LONG = "A long answer, of which the engine has sent some tokens and will send the rest later."
AFTER = 12  # tokens that the engine has sent when the recorder dies
DEADLINE_S = 60


def answer(prompt: str) -> str:
    """A long answer that differs from turn to turn."""
    return f"{LONG} {prompt.count('<|im_start|>user')}"


@pytest.fixture
def fake() -> FakeVLLM:
    return engine(answer, version="3", stream_tokens=4)


@pytest.fixture
def served(fake: FakeVLLM) -> Iterator[InThread]:
    with in_thread(fake) as running:
        yield running


def until(condition: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.02)


def kill_amid_a_turn(process: subprocess.Popen[str], folder: Path) -> int:
    """Kill a recorder once it has written tokens of a turn; returns how many there are then."""
    until(lambda: partial_tokens(folder) > 0, process)
    process.send_signal(signal.SIGKILL)
    process.wait()
    return partial_tokens(folder)


@contextmanager
def ending(process: subprocess.Popen[str]) -> Iterator[subprocess.Popen[str]]:
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def ask_until_answered(url: str) -> str:
    """A program's client as it comes; the program asks again when the client gives up."""
    import openai

    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none")
    deadline = time.monotonic() + 2 * DEADLINE_S
    while time.monotonic() < deadline:
        try:
            completion = client.chat.completions.create(model="m", messages=[{"role": "user", "content": "Go on?"}])
        except openai.APIConnectionError:
            continue
        return completion.choices[0].message.content or ""
    raise AssertionError("it was not answered")


@pytest.mark.medium
def test_law_1_a_client_of_a_killed_recorder_gets_the_rest_of_its_answer(
    fake: FakeVLLM, served: InThread, tmp_path: Path
) -> None:
    folder, port = tmp_path / "recorded", free_port()
    served.do(lambda: fake.fail("hang", after=AFTER))
    with ThreadPoolExecutor(1) as pool:
        with ending(command(folder, served.url, "--port", str(port))) as first:
            asked = pool.submit(ask_until_answered, url_of(first))
            kept = kill_amid_a_turn(first, folder)
        with ending(command(folder, served.url, "--port", str(port))) as second:
            text = asked.result(DEADLINE_S)
            second.send_signal(signal.SIGTERM)
            assert second.wait(DEADLINE_S) == 0
    (trajectory,) = episodes(folder)
    (turn,) = trajectory.turns
    assert text == turn.text == f"{LONG} 1" and trajectory.stop_reason is StopReason.DONE
    assert turn.token_ids == (*RENDERER.tokens(text), RENDERER.stop_token_ids[0]) and turn.versions == (3,) * len(
        turn.token_ids
    )
    begun, rest = (request["token_ids"] for request in fake.requests)
    assert rest == [*begun, *turn.token_ids[:kept]], "the tokens that were written are not sampled again"


PROGRAM = """
import os, sys, openai
client = openai.OpenAI()
messages = []
for turn in range(3):
    messages.append({"role": "user", "content": f"Turn {turn}?"})
    answer = client.chat.completions.create(model="m", messages=messages).choices[0].message
    messages.append({"role": "assistant", "content": answer.content})
    with open(sys.argv[1], "a") as file:
        print(os.getpid(), turn, answer.content, file=file)
"""


@pytest.mark.medium
def test_law_2_a_program_of_a_killed_recorder_is_started_again_and_gets_the_answers_that_it_had(
    fake: FakeVLLM, served: InThread, tmp_path: Path
) -> None:
    folder, notes = tmp_path / "recorded", tmp_path / "notes"
    program = ["--", sys.executable, "-c", PROGRAM, str(notes)]
    served.do(lambda: fake.fail("hang", after=len(RENDERER.tokens(LONG)) + 100))  # the first turn ends before
    served.do(lambda: fake.fail("hang", after=AFTER))
    with ending(command(folder, served.url, *program)) as first:
        until(lambda: notes.exists() and notes.read_text().endswith("\n"), first)
        descriptor = os.pidfd_open(int(notes.read_text().split()[0]))
        kill_amid_a_turn(first, folder)
        assert readable(descriptor, 60), "the program lives on without its recorder"
        os.close(descriptor)
    before, requests = notes.read_text().splitlines(), len(fake.requests)
    with ending(command(folder, served.url, *program)) as second:
        assert second.wait(DEADLINE_S) == 0
    (trajectory,) = episodes(folder)
    texts = [f"{LONG} {turn}" for turn in (1, 2, 3)]
    assert [turn.text for turn in trajectory.turns] == texts
    assert [turn.parent for turn in trajectory.turns] == [None, 0, 1]
    assert (trajectory.outcome, trajectory.success) == (1.0, True)
    lines = [line.split(maxsplit=2)[1:] for line in notes.read_text().splitlines()]
    assert lines[len(before) :] == [[str(turn), text] for turn, text in enumerate(texts)]
    assert len(fake.requests) == requests + 3 - len(before), "an answer of the journal is not sampled again"

"""`agentrl record` and the older `/v1/completions`: OpenAI's client sends texts, and each token stays as sampled."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from agentrl.records import Trajectory, context_ids
from agentrl.store import TEXT
from tests.parts.served_vllm import in_thread
from tests.parts.vllm_server import FakeVLLM
from tests.run.recordings import RENDERER, ROOM, Running, episodes, recorder

pytestmark = pytest.mark.adapters
STOP = RENDERER.stop_token_ids[0]
STOP_TEXT = RENDERER.conversations.tokenizer.id_to_token(STOP)


def scripted(*answers: str, ends: bool = True) -> FakeVLLM:
    """An engine that writes one answer after the other; each `ends` with the stop token."""

    def script(context: tuple[int, ...]) -> int:
        begun = len(fake.requests[-1]["token_ids"])
        tokens = (*RENDERER.tokens(answers[len(fake.requests) - 1]), *((STOP,) if ends else ()))
        return tokens[min(len(context) - begun, len(tokens) - 1)]

    fake = FakeVLLM(script=script, max_model_len=ROOM, version="3")  # type: ignore[arg-type]
    return fake


def client(url: str) -> Any:
    import openai

    return openai.OpenAI(base_url=f"{url}/v1", api_key="none").completions


def text_of(answer: Any, stream: bool) -> tuple[str, str, Any]:
    """Text, finish reason and the counts of tokens, of a whole answer or of its chunks."""
    if not stream:
        return answer.choices[0].text, answer.choices[0].finish_reason, answer.usage
    chunks = list(answer)
    choices = [chunk.choices[0] for chunk in chunks if chunk.choices]
    return "".join(choice.text for choice in choices), choices[-1].finish_reason, chunks[-1].usage


def rows(trajectory: Trajectory) -> list[tuple[int | None, str]]:
    """Of each turn its parent, and the text of all tokens up to its end."""
    decode = RENDERER.conversations.tokenizer.decode
    return [
        (turn.parent, decode([*context_ids(trajectory.turns, turn.index), *turn.token_ids], skip_special_tokens=False))
        for turn in trajectory.turns
    ]


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Any]:
    """Starts a recorder before a fake engine."""
    with ExitStack() as stack:

        def start(fake: FakeVLLM, **settings: Any) -> Running:
            engine = stack.enter_context(in_thread(fake))
            return stack.enter_context(recorder(tmp_path / "recorded", engine.url, **settings))

        yield start


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_that_goes_on_keeps_the_tokens_of_the_answer(served: Any, stream: bool) -> None:
    running = served(fake := scripted("Two.", "Four."))
    create, options = client(running.url).create, {"stream_options": {"include_usage": True}} if stream else {}
    prompt = "<|im_start|>user\n1 + 1?<|im_end|>\n<|im_start|>assistant\n"
    first, finish, usage = text_of(create(model="m", prompt=prompt, max_tokens=40, stream=stream, **options), stream)
    assert (first, finish) == ("Two.", "stop")
    assert usage.prompt_tokens == len(fake.requests[0]["token_ids"]) and usage.completion_tokens > 1
    longer = f"{prompt}{first}{STOP_TEXT}\n<|im_start|>user\nAnd 2 + 2?<|im_end|>\n<|im_start|>assistant\n"
    echoed, _, _ = text_of(create(model="m", prompt=longer, max_tokens=40, echo=True, stream=stream), stream)
    assert echoed == f"{longer}Four."
    first_ids, second_ids = (request["token_ids"] for request in fake.requests)
    # Control tokens of the client's own template are control tokens, and the sampled ones come back as they were.
    assert first_ids[0] == RENDERER.conversations.tokenizer.token_to_id("<|im_start|>")
    assert second_ids[: len(first_ids)] == first_ids
    assert second_ids[len(first_ids) :][: usage.completion_tokens] == [*RENDERER.tokens("Two."), STOP]
    (trajectory,) = running_episodes(running)
    assert rows(trajectory) == [(None, f"{prompt}Two.{STOP_TEXT}"), (0, f"{longer}Four.{STOP_TEXT}")]


def running_episodes(running: Running) -> list[Trajectory]:
    return episodes(Path(shutil.copytree(running.folder, running.folder.with_name("copy"))))


def test_a_prompt_without_the_token_that_ended_the_answer_is_a_branch(served: Any) -> None:
    """Its client asks for a context without that token, and gets it."""
    running = served(fake := scripted("Two.", "Four."))
    create = client(running.url).create
    create(model="m", prompt="1 + 1?", max_tokens=40)
    create(model="m", prompt="1 + 1?Two.\n2 + 2?", max_tokens=40)
    (trajectory,) = running_episodes(running)
    assert rows(trajectory) == [(None, f"1 + 1?Two.{STOP_TEXT}"), (None, f"1 + 1?Two.\n2 + 2?Four.{STOP_TEXT}")]
    assert fake.requests[1]["token_ids"] == RENDERER.conversations.tokenizer.encode("1 + 1?Two.\n2 + 2?").ids


def test_an_answer_that_a_limit_cut_goes_on_token_for_token(served: Any) -> None:
    running = served(scripted("Two and two", " and so on", ends=False))
    create = client(running.url).create
    tokens = len(RENDERER.tokens("Two and two"))
    first, finish, _ = text_of(create(model="m", prompt="Say", max_tokens=tokens), False)
    assert (first, finish) == ("Two and two", "length")
    create(model="m", prompt=f"Say{first}", max_tokens=len(RENDERER.tokens(" and so on")))
    (trajectory,) = running_episodes(running)
    assert rows(trajectory) == [(None, "SayTwo and two"), (0, "SayTwo and two and so on")]
    assert trajectory.turns[1].prompt_ids == ()


def test_a_client_that_names_no_limit_gets_the_apis_own(served: Any) -> None:
    running = served(fake := scripted("A word", ends=False))
    answer = client(running.url).create(model="m", prompt="Say")
    assert answer.choices[0].finish_reason == "length" and answer.usage.completion_tokens == 16
    assert fake.requests[0]["sampling_params"]["max_tokens"] == 16


def test_texts_of_two_clients_are_two_conversations_also_after_a_kill(served: Any, tmp_path: Path) -> None:
    running = served(fake := scripted("A1", "B1", "A2", "B2"))
    create = client(running.url).create
    for prompt in ("A:", "B:"):
        create(model="m", prompt=prompt, max_tokens=40)
    create(model="m", prompt=f"A:A1{STOP_TEXT}more:", max_tokens=40)
    killed = Path(shutil.copytree(running.folder, tmp_path / "killed"))
    with recorder(killed, fake.url) as again:
        client(again.url).create(model="m", prompt=f"B:B1{STOP_TEXT}more:", max_tokens=40)
    assert [rows(trajectory) for trajectory in episodes(killed)] == [
        [(None, f"{name}:{name}1{STOP_TEXT}"), (0, f"{name}:{name}1{STOP_TEXT}more:{name}2{STOP_TEXT}")]
        for name in "AB"
    ]


def test_what_is_not_served_is_a_bad_request_of_openais_client(served: Any) -> None:
    import openai

    running = served(scripted("x"))
    for option in ({"prompt": ["a", "b"]}, {"prompt": [1, 2]}, {"suffix": "s"}, {"best_of": 2}, {"logprobs": 0}):
        with pytest.raises(openai.BadRequestError, match=next(iter(option))):
            client(running.url).create(**{"model": "m", "prompt": "a", **option})
    assert running_episodes(running) == []


def test_a_text_is_recorded_before_a_server_without_tokens(served: Any) -> None:
    choice = {"index": 0, "text": " Fine.", "finish_reason": "length", "logprobs": None}
    fake = FakeVLLM(lacks={"tokens"}, answers={"/v1/completions": (200, json.dumps({"choices": [choice]}).encode())})
    running = served(fake, kind="openai")
    answer = client(running.url).create(model="m", prompt="How?", stop=["x"]).choices[0]
    assert (answer.text, answer.finish_reason) == (" Fine.", "length")
    copy = Path(shutil.copytree(running.folder, running.folder.with_name("copy")))
    (trajectory,) = episodes(copy, TEXT)
    assert [(turn.text, turn.token_ids) for turn in trajectory.turns] == [(" Fine.", ())]
    assert trajectory.start == ({"role": "user", "content": "How?", "raw": True},)
